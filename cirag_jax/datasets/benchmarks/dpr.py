"""DPR's versions of Natural Questions and WebQuestions, with gold among 21 million passages."""

import ast

import msgspec
import tensorflow_datasets as tfds

from cirag_jax.datasets.benchmarks.base import Converted, OfficialBuilder
from cirag_jax.datasets.benchmarks.corpora import OfficialCorpus
from cirag_jax.datasets.benchmarks.files import OfficialFile
from cirag_jax.datasets.records import field_error
from cirag_jax.types import NonEmptyStr, Question

_URL = "https://dl.fbaipublicfiles.com/dpr"


class DprContext(msgspec.Struct):
    """A passage of a training question; files name its id in two ways."""

    title: str | None = None
    text: str | None = None
    passage_id: str | int | None = None
    psg_id: str | int | None = None

    @property
    def id(self) -> str | None:
        """The id of the passage in ``psgs_w100.tsv``."""
        value = self.psg_id if self.passage_id is None else self.passage_id
        return None if value is None else str(value).removeprefix("wiki:")


class DprRecord(msgspec.Struct):
    """A question of a training file, or a row of a ``.qa.csv`` file, whose answers are a text."""

    question: NonEmptyStr
    answers: list[str] | str
    positive_ctxs: list[DprContext] | None = None


class DprBuilder(OfficialBuilder, skip_registration=True):
    """Questions over the passages of 100 words of Karpukhin et al. (EMNLP 2020)."""

    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="default")]
    CORPORA = {
        "default": OfficialCorpus(
            OfficialFile("psgs_w100.tsv", f"{_URL}/wikipedia_split/psgs_w100.tsv.gz"),
            "passages",
            count=21_015_324,
            key="id",
        )
    }
    Record = DprRecord
    HOMEPAGE = "https://github.com/facebookresearch/DPR"

    def check(self, place: str, record: DprRecord) -> None:
        """Raises UserError for answers that are no list, or a gold passage without an id."""
        if isinstance(record.answers, str):
            try:
                answers = ast.literal_eval(record.answers)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                answers = None
            if not isinstance(answers, list) or not all(isinstance(a, str) for a in answers):
                raise field_error(place, "answers", "must be a Python list of strings")
        if record.positive_ctxs and record.positive_ctxs[0].id is None:
            raise field_error(place, "positive_ctxs[0].passage_id", "is missing")

    @classmethod
    def convert(cls, record: DprRecord, split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`.

        The gold passage is the first positive one, on which DPR trains. In Natural Questions, it is
        the annotated one; the others only contain an answer. The questions of the test split have
        no gold passages.
        """
        answers = record.answers
        if isinstance(answers, str):
            answers = ast.literal_eval(answers)
        gold = record.positive_ctxs[0].id if record.positive_ctxs else None
        return Question(
            id="",
            question=record.question,
            answers=tuple(dict.fromkeys(answers)),
            hops=1,
            split=split,
            supporting=None if gold is None else (gold,),
        ), ()


def _files(name: str) -> dict[str, OfficialFile]:
    files = {
        split: OfficialFile(
            f"biencoder-{name}-{split}.json",
            f"{_URL}/data/retriever/biencoder-{name}-{split}.json.gz",
        )
        for split in ("train", "dev")
    }
    test = f"{name}-test.qa.csv"
    columns = ("question", "answers")
    return {**files, "test": OfficialFile(test, f"{_URL}/data/retriever/{test}", columns=columns)}


class DprNQ(DprBuilder):
    """Natural Questions with short answers (Kwiatkowski et al., TACL 2019)."""

    name = "dpr_nq"
    FILES = {"default": _files("nq")}
    LICENSE = "CC BY-SA 3.0"


class DprWebQuestions(DprBuilder):
    """WebQuestions (Berant et al., EMNLP 2013); gold passages are the best that have an answer."""

    name = "dpr_web_questions"
    FILES = {"default": _files("webquestions")}
    LICENSE = "CC BY 4.0"
