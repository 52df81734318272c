"""Articles and their chunks, the texts for which GRADE measures retrieval difficulty.

Passages with ids ``ARTICLE#NUMBER`` (`documents.split_document`) or ``ARTICLE@NUMBER``
(`cirag_jax.grade`) are the parts of the article ``ARTICLE``, in corpus order. Any other passage is
a complete article.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence

from cirag_jax.datasets.chains import passage_text
from cirag_jax.datasets.chunks import ChunkSettings, Size, num_words, spans
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.io import one_line
from cirag_jax.types import Passage, Question

UNITS = ("passage", "chunk", "article")

_PART = re.compile(r"(.+)[#@]\d+")


@dataclasses.dataclass(frozen=True)
class Article:
    """The text of an article.

    Attributes:
      title: title of the first passage.
      sentences: sentences of the passages; a sentence shared by neighboring passages occurs once.
      places: passage id -> indices of the passage's sentences in ``sentences``.
    """

    title: str
    sentences: tuple[str, ...]
    places: Mapping[str, range]

    def text(self, span: range | None = None) -> str:
        """Returns the article, or a span of its sentences, as text for retrieval."""
        sentences = self.sentences if span is None else self.sentences[span.start : span.stop]
        return passage_text(Passage("", self.title, one_line(" ".join(sentences))))


class Articles:
    """The articles of a corpus."""

    def __init__(self, corpus: Mapping[str, Passage]):
        self._corpus = corpus
        self._parts: dict[str, list[Passage]] = collections.defaultdict(list)
        for passage in corpus.values():
            self._parts[_article_name(passage.id)].append(passage)
        self._articles: dict[str, Article] = {}

    def of(self, passage_id: str) -> Article:
        """Returns the article of a passage."""
        name = _article_name(passage_id)
        if name not in self._articles:
            self._articles[name] = join(self._parts[name])
        return self._articles[name]

    def cover_gold(self, question: Question, retrieved: Sequence[str]) -> bool:
        """Returns whether retrieved passages contain every gold sentence of a question.

        A gold sentence may come from any passage of its article. If a gold passage has no annotated
        sentences, all of its sentences are gold. The corpus must contain all gold passages.
        """
        for passage_id in set(question.supporting or ()).difference(retrieved):
            places = self.of(passage_id).places
            covered = {at for i in retrieved if i in places for at in places[i]}
            gold = _gold_spans(question, passage_id, places[passage_id])
            if not any(gold) or not covered.issuperset(at for span in gold for at in span):
                return False
        return True

    def gold_texts(
        self, question: Question, unit: str, settings: ChunkSettings, size: Size = num_words
    ) -> list[tuple[str, ...]]:
        """Returns the texts that a retriever must find for a question.

        Args:
          question: a question whose gold passages are all in the corpus.
          unit: one of `UNITS`. ``passage``: the gold passages. ``article``: their articles.
            ``chunk``: chunks of their articles that contain a gold sentence, or any sentence of a
            gold passage without annotated sentences.
          settings: sizes of the chunks.
          size: returns the size of a sentence, see ``settings.tokenizer``.

        Returns:
          Distinct tuples of alternative texts; one text of each tuple must be found.
        """
        ids = list(dict.fromkeys(question.supporting or ()))
        if unit == "passage":
            return [(passage_text(self._corpus[i]),) for i in ids]
        articles = {i: self.of(i) for i in ids}
        if unit == "article":
            return list(dict.fromkeys((article.text(),) for article in articles.values()))
        alternatives = []
        for passage_id, article in articles.items():
            chunks = spans(article.sentences, settings, size)
            for gold in _gold_spans(question, passage_id, article.places[passage_id]):
                overlapping = [c for c in chunks if c.start < gold.stop and gold.start < c.stop]
                # A passage without sentences is represented by its title.
                alternatives.append(tuple(map(article.text, overlapping or [gold])))
        return list(dict.fromkeys(alternatives))


def join(passages: Sequence[Passage]) -> Article:
    """Joins passages into an article, in order."""
    sentences: list[str] = []
    places: dict[str, range] = {}
    for passage in passages:
        part = sentences_of(passage)
        start = len(sentences) - _num_shared(sentences, part)
        sentences[start:] = part
        places[passage.id] = range(start, start + len(part))
    return Article(passages[0].title, tuple(sentences), places)


def _gold_spans(question: Question, passage_id: str, whole: range) -> list[range]:
    """Returns the indices in the article of a passage's gold sentences, or of all its sentences."""
    pairs = question.supporting_sentences or ()
    places = [whole[index] for name, index in pairs if name == passage_id]
    return [range(place, place + 1) for place in places] or [whole]


def _article_name(passage_id: str) -> str:
    part = _PART.fullmatch(passage_id)
    return part[1] if part else passage_id


def _num_shared(before: Sequence[str], after: Sequence[str]) -> int:
    """Returns how many sentences at the end of ``before`` recur at the start of ``after``."""
    longest = min(len(before), len(after))
    counts = range(longest, 0, -1)
    return next((n for n in counts if list(before[-n:]) == list(after[:n])), 0)
