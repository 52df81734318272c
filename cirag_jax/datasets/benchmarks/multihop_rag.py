"""MultiHop-RAG (Tang and Yang, COLM 2024): questions over news, with a corpus of articles."""

from collections.abc import Mapping

import msgspec

from cirag_jax.datasets.benchmarks.base import ARTICLES, Converted, OfficialBuilder
from cirag_jax.datasets.benchmarks.files import FoundFile, OfficialFile
from cirag_jax.datasets.records import convert, field_error
from cirag_jax.types import NonEmptyStr, Passage, Question

_SITE = "https://huggingface.co/datasets/yixuantt/MultiHopRAG/resolve/main"


class About(msgspec.Struct, kw_only=True):
    """Metadata of an article, given for each article and each fact."""

    url: NonEmptyStr
    title: str
    source: str
    published_at: str
    author: str | None = None
    category: str | None = None


class News(About, kw_only=True):
    """An official article."""

    body: str


class Evidence(About, kw_only=True):
    """A fact that the answer needs."""

    fact: str


class MultiHopRAGRecord(msgspec.Struct):
    """An official record."""

    query: NonEmptyStr
    answer: str
    question_type: str
    evidence_list: list[Evidence]


class MultiHopRAG(OfficialBuilder):
    """Questions that need two to four articles, and some that the articles do not answer."""

    name = "multihop_rag"
    FILES = {
        "default": {
            ARTICLES: OfficialFile("corpus.json", f"{_SITE}/corpus.json", noun="article"),
            "test": OfficialFile("MultiHopRAG.json", f"{_SITE}/MultiHopRAG.json"),
        }
    }
    Record = MultiHopRAGRecord
    Article = News
    HOMEPAGE = "https://github.com/yixuantt/MultiHop-RAG"
    LICENSE = "ODC-BY 1.0"

    _urls: frozenset[str] | None = None  # URLs of the articles, if there are any.

    def _generate_examples(self, found: Mapping[str, FoundFile], split: str):
        if split != ARTICLES and ARTICLES in found:
            articles = found[ARTICLES].records()
            self._urls = frozenset(convert(*article, News).url for article in articles)
        yield from super()._generate_examples(found, split)

    def check(self, place: str, record: MultiHopRAGRecord | News) -> None:
        """Raises UserError if a fact is from an unknown article."""
        if isinstance(record, News) or self._urls is None:
            return
        for i, fact in enumerate(record.evidence_list):
            if fact.url not in self._urls:
                problem = f"names article {fact.url!r}, which corpus.json does not have"
                raise field_error(place, f"evidence_list[{i}].url", problem)

    @classmethod
    def convert(cls, record: MultiHopRAGRecord, split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`; each fact is a hop."""
        question = Question(
            "",
            record.query,
            (record.answer,),
            type=record.question_type,
            hops=len(record.evidence_list) or None,
            split=split,
            supporting=tuple(dict.fromkeys(fact.url for fact in record.evidence_list)),
        )
        return question, ()

    @classmethod
    def convert_article(cls, article: News) -> Passage:
        """Returns an article as a passage; its text begins with the source and date.

        Questions mention both.
        """
        day = article.published_at.partition("T")[0]
        return Passage(article.url, article.title, f"{article.source}, {day}. {article.body}")
