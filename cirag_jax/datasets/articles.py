"""Articles behind passages, as GRADE measures retrieval difficulty over them and their chunks.

Passages with ids ``ARTICLE#NUMBER``, as `documents.split_document` writes them, or
``ARTICLE@NUMBER``, as a generated benchmark has them (`cirag_jax.grade`), are the parts of one
article, in the order of the corpus; any other passage is an article of its own.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence

from cirag_jax.datasets.chains import passage_text
from cirag_jax.datasets.chunks import ChunkSettings, spans
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.types import Passage, Question

UNITS = ("passage", "chunk", "article")

_PART = re.compile(r"(.+)[#@]\d+")


@dataclasses.dataclass(frozen=True)
class Article:
    """A whole text.

    Attributes:
      title: of its first passage.
      sentences: of its passages; what two neighbours share stands there once.
      places: the sentences that each passage has, by its id.
    """

    title: str
    sentences: tuple[str, ...]
    places: Mapping[str, range]

    def text(self, span: range | None = None) -> str:
        """What represents it, or some of its sentences, for retrieval."""
        held = self.sentences if span is None else self.sentences[span.start : span.stop]
        return passage_text(Passage("", self.title, " ".join(" ".join(held).split())))


class Articles:
    """The articles of a corpus."""

    def __init__(self, corpus: Mapping[str, Passage]):
        self._corpus = corpus
        self._members: dict[str, list[Passage]] = collections.defaultdict(list)
        for passage in corpus.values():
            self._members[_article_of(passage.id)].append(passage)
        self._joined: dict[str, Article] = {}

    def of(self, passage_id: str) -> Article:
        """The article that a passage is a part of."""
        name = _article_of(passage_id)
        if name not in self._joined:
            self._joined[name] = join(self._members[name])
        return self._joined[name]

    def are_found(self, question: Question, retrieved: Sequence[str]) -> bool:
        """Whether passages hold what a question needs.

        That is every gold sentence, for which any part of its article will do that has it, too; of
        a gold passage without annotated sentences, all of them.

        Args:
          question: whose ``supporting`` passages are all in the corpus.
          retrieved: ids of passages.
        """
        for passage_id in set(question.supporting or ()).difference(retrieved):
            places = self.of(passage_id).places
            held = {at for i in retrieved if i in places for at in places[i]}
            gold = _gold_spans(question, passage_id, places[passage_id])
            if not any(gold) or not held.issuperset(at for span in gold for at in span):
                return False
        return True

    def gold_texts(
        self, question: Question, unit: str, settings: ChunkSettings
    ) -> list[tuple[str, ...]]:
        """What a retriever has to find for a question with gold passages.

        Args:
          question: whose ``supporting`` passages are all in the corpus.
          unit: one of `UNITS`. ``passage``: the gold passages as they stand. ``article``: their
            articles. ``chunk``: chunks of their articles that hold a gold sentence; of a gold
            passage without annotated sentences, those that hold any of its sentences.
          settings: of chunks.

        Returns:
          For every thing to be found the texts of which one suffices; each thing once.
        """
        ids = list(dict.fromkeys(question.supporting or ()))
        if unit == "passage":
            return [(passage_text(self._corpus[i]),) for i in ids]
        articles = {i: self.of(i) for i in ids}
        if unit == "article":
            found = [(article.text(),) for article in articles.values()]
            return list(dict.fromkeys(found))
        found = []
        for passage_id, article in articles.items():
            chunks = spans(article.sentences, settings)
            for gold in _gold_spans(question, passage_id, article.places[passage_id]):
                near = [one for one in chunks if one.start < gold.stop and gold.start < one.stop]
                # A passage without sentences is its title.
                found.append(tuple(map(article.text, near or [gold])))
        return list(dict.fromkeys(found))


def join(passages: Sequence[Passage]) -> Article:
    """The article of its passages, in their order."""
    sentences: list[str] = []
    places: dict[str, range] = {}
    for passage in passages:
        own = sentences_of(passage)
        start = len(sentences) - _shared(sentences, own)
        sentences[start:] = own
        places[passage.id] = range(start, start + len(own))
    return Article(passages[0].title, tuple(sentences), places)


def _gold_spans(question: Question, passage_id: str, whole: range) -> list[range]:
    """The gold sentences of a passage in its article; without any, all of its sentences."""
    pairs = question.supporting_sentences or ()
    places = [whole[index] for name, index in pairs if name == passage_id]
    return [range(place, place + 1) for place in places] or [whole]


def _article_of(passage_id: str) -> str:
    part = _PART.fullmatch(passage_id)
    return part[1] if part else passage_id


def _shared(before: Sequence[str], after: Sequence[str]) -> int:
    """Sentences at the end of one part that the next one begins with."""
    longest = min(len(before), len(after))
    counts = range(longest, 0, -1)
    return next((n for n in counts if list(before[-n:]) == list(after[:n])), 0)
