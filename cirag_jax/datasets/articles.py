"""Articles behind passages, and articles cut into chunks of other sizes (GRADE, section 4.1, A.8).

Passages with ids ``ARTICLE#NUMBER``, as `documents.split_document` writes them, or
``ARTICLE@NUMBER``, as a generated benchmark has them (`cirag_jax.grade`), are the parts of one
article, in the order of the corpus; any other passage is an article of its own. Length is counted
in words, that is between spaces.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cirag_jax.datasets.chains import passage_text
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.types import Passage, Question


class Size(NamedTuple):
    """Words of a chunk, and of what two neighbours share."""

    least: int
    most: int
    overlap: int


SIZES: Mapping[str, Size] = {
    "64-128": Size(64, 128, 25),
    "128-256": Size(128, 256, 50),
    "256-512": Size(256, 512, 100),
}
UNITS = ("passage", "chunk", "article")

Span = tuple[int, int]  # First word, and the one behind the last.

_PART = re.compile(r"(.+)[#@]\d+")
_LEAST_SHARED = 5  # Words that the end of a part and the start of the next do not share by chance.


@dataclasses.dataclass(frozen=True)
class Article:
    """A whole text.

    Attributes:
      title: of its first passage.
      words: what its passages say; what two neighbours share stands there once.
      places: where each passage lies, by its id.
    """

    title: str
    words: tuple[str, ...]
    places: Mapping[str, Span]

    def text(self, span: Span | None = None) -> str:
        """What represents it, or a part of it, for retrieval."""
        start, end = span or (0, len(self.words))
        return passage_text(Passage("", self.title, " ".join(self.words[start:end])))


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

    def gold_texts(
        self, question: Question, unit: str, size: Size = SIZES["128-256"]
    ) -> list[tuple[str, ...]]:
        """What a retriever has to find for a question with gold passages.

        Args:
          question: whose ``supporting`` passages are all in the corpus.
          unit: one of `UNITS`. ``passage``: the gold passages as they stand. ``article``: their
            articles. ``chunk``: chunks of their articles that hold words of a gold sentence; of a
            gold passage without annotated sentences, those that hold any of its words.
          size: of chunks.

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
            chunks = spans(len(article.words), size)
            for start, end in self._gold_spans(question, passage_id, article):
                near = [chunk for chunk in chunks if chunk[0] < end and start < chunk[1]]
                found.append(tuple(map(article.text, near or chunks[:1])))
        return list(dict.fromkeys(found))

    def _gold_spans(self, question: Question, passage_id: str, article: Article) -> list[Span]:
        """The gold sentences of a passage in its article; without any, the passage."""
        passage, whole = self._corpus[passage_id], article.places[passage_id]
        sentences = sentences_of(passage)
        lengths = [len(sentence.split()) for sentence in sentences]
        gold = [i for pid, i in question.supporting_sentences or () if pid == passage_id]
        if not gold or sum(lengths) != whole[1] - whole[0]:
            return [whole]  # Nothing annotated, or its own sentences are not what its text says.
        starts = [whole[0] + sum(lengths[:i]) for i in gold]
        return [(start, start + lengths[i]) for start, i in zip(starts, gold, strict=True)]


def join(passages: Sequence[Passage]) -> Article:
    """The article of its passages, in their order."""
    words: list[str] = []
    places: dict[str, Span] = {}
    for passage in passages:
        own = passage.text.split()
        start = len(words) - _shared(words, own)
        words = [*words[:start], *own]
        places[passage.id] = (start, start + len(own))
    return Article(passages[0].title, tuple(words), places)


def spans(num_words: int, size: Size) -> list[Span]:
    """Where the chunks of a text lie.

    Every chunk has ``size.most`` words and begins ``size.overlap`` words before the end of the one
    before it. What is left for the last may be less: it then begins earlier, so that it has
    ``size.least`` words where the text has.
    """
    starts = range(0, max(num_words - size.overlap, 1), size.most - size.overlap)
    return [
        (max(min(start, num_words - size.least), 0), min(start + size.most, num_words))
        for start in starts
    ]


def _article_of(passage_id: str) -> str:
    part = _PART.fullmatch(passage_id)
    return part[1] if part else passage_id


def _shared(before: Sequence[str], after: Sequence[str]) -> int:
    """Words at the end of one part that the next one begins with."""
    longest = min(len(before), len(after))
    for count in range(longest, _LEAST_SHARED - 1, -1):
        if list(before[-count:]) == list(after[:count]):
            return count
    return 0
