"""Questions with short answers and no passages: Bamboogle, WebQuestions, NQ-open, PopQA."""

import re

import msgspec

from cirag_jax.datasets.benchmarks.base import Converted, OfficialBuilder
from cirag_jax.datasets.benchmarks.files import OfficialFile
from cirag_jax.datasets.records import field_error
from cirag_jax.types import NonEmptyStr, Question


class BamboogleRecord(msgspec.Struct):
    """A row of the official table of Bamboogle."""

    question: NonEmptyStr = msgspec.field(name="Question")
    answer: NonEmptyStr = msgspec.field(name="Answer")


class Bamboogle(OfficialBuilder):
    """Two-hop questions that a search engine gets wrong (Press et al., Findings of EMNLP 2023)."""

    name = "bamboogle"
    # The authors publish a spreadsheet, which is exported under this name.
    FILES = {
        "default": {
            "test": OfficialFile(
                "Bamboogle Prerelease - Sheet1.csv",
                "https://docs.google.com/spreadsheets/d/"
                "1jwcsA5kE4TObr9YHn9Gc-wQHYjTbLhDGx6tmIzMhl_U/export?format=csv",
            )
        }
    }
    Record = BamboogleRecord
    HOMEPAGE = "https://github.com/ofirpress/self-ask"
    LICENSE = "MIT"

    @classmethod
    def convert(cls, record: BamboogleRecord, split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`; every question has two hops."""
        return Question("", record.question, (record.answer,), hops=2, split=split), ()


# A quoted text with backslash escapes, or an unquoted text.
_DESCRIPTION = r'\(description (?:"((?:[^"\\]|\\.)+)"|([^()"\s][^()]*))\)'
_DESCRIPTIONS = re.compile(rf"\(list(?: {_DESCRIPTION})*\)")


# Split -> bundle on CodaLab, and checksum of the file.
_WEB_QUESTIONS_BUNDLES = {
    "train": (
        "0x4a763f8cde224c2da592b75f29e2f5c2",
        "fb1797e4554a1b1be642388367de1379f8c0d5afc609ac171492c67f7b70cb1e",
    ),
    "test": (
        "0xe7bac352fce7448c9ef238fb0a297ec2",
        "e3d4550e90660aaabe18458ba34b59f2624857273f375af7353273ce8b84ce6e",
    ),
}


class WebQuestionsRecord(msgspec.Struct):
    """An official record of WebQuestions."""

    utterance: NonEmptyStr
    target_value: str = msgspec.field(name="targetValue")
    url: str | None = None


class WebQuestions(OfficialBuilder):
    """Questions by users of a search engine, answered from Freebase (Berant et al., EMNLP 2013)."""

    name = "web_questions"
    FILES = {
        "default": {
            split: OfficialFile(
                f"webquestions.examples.{split}.json",
                f"https://worksheets.codalab.org/rest/bundles/{bundle}/contents/blob/",
                sha256=sha256,
                checksum_by="ParlAI",
            )
            for split, (bundle, sha256) in _WEB_QUESTIONS_BUNDLES.items()
        }
    }
    Record = WebQuestionsRecord
    HOMEPAGE = "https://nlp.stanford.edu/software/sempre/"
    LICENSE = "CC BY 4.0"

    def check(self, place: str, record: WebQuestionsRecord) -> None:
        """Raises UserError unless the answers are a list of descriptions."""
        if not _DESCRIPTIONS.fullmatch(record.target_value):
            raise field_error(place, "targetValue", 'must be like (list (description "...") ...)')

    @classmethod
    def convert(cls, record: WebQuestionsRecord, split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`."""
        descriptions = re.findall(_DESCRIPTION, record.target_value)
        answers = (re.sub(r"\\(.)", r"\1", quoted) or bare for quoted, bare in descriptions)
        return Question("", record.utterance, tuple(dict.fromkeys(answers)), split=split), ()


class NQOpenRecord(msgspec.Struct):
    """An official record of NQ-open."""

    question: NonEmptyStr
    answer: list[str]


class NQOpen(OfficialBuilder):
    """Natural Questions with short answers and no Wikipedia pages (Lee et al., ACL 2019)."""

    name = "nq_open"
    FILES = {
        "default": {
            split: OfficialFile(
                f"NQ-open.{split}.jsonl",
                "https://raw.githubusercontent.com/google-research-datasets/natural-questions/"
                f"master/nq_open/NQ-open.{split}.jsonl",
            )
            for split in ("train", "dev")
        }
    }
    Record = NQOpenRecord
    HOMEPAGE = "https://github.com/google-research-datasets/natural-questions"
    LICENSE = "CC BY-SA 3.0"

    @classmethod
    def convert(cls, record: NQOpenRecord, split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`."""
        return Question("", record.question, tuple(dict.fromkeys(record.answer)), split=split), ()


class PopQARecord(msgspec.Struct):
    """A row of the official table of PopQA."""

    id: NonEmptyStr
    question: NonEmptyStr
    prop: str
    possible_answers: str
    subj: str | None = None
    obj: str | None = None
    subj_id: str | None = None
    prop_id: str | None = None
    obj_id: str | None = None
    s_aliases: str | None = None
    o_aliases: str | None = None
    s_uri: str | None = None
    o_uri: str | None = None
    s_wiki_title: str | None = None
    o_wiki_title: str | None = None
    s_pop: str | None = None
    o_pop: str | None = None


class PopQA(OfficialBuilder):
    """One-hop questions about popular and rare entities (Mallen et al., ACL 2023)."""

    name = "popqa"
    FILES = {
        "default": {
            "test": OfficialFile(
                "popQA.tsv",
                "https://raw.githubusercontent.com/AlexTMallen/adaptive-retrieval/main/data/popQA.tsv",
            )
        }
    }
    Record = PopQARecord
    HOMEPAGE = "https://github.com/AlexTMallen/adaptive-retrieval"
    LICENSE = "MIT"

    def check(self, place: str, record: PopQARecord) -> None:
        """Raises UserError unless the answers are a JSON list."""
        try:
            _answers(record)
        except msgspec.DecodeError:
            raise field_error(place, "possible_answers", "must be a JSON list of strings") from None

    @classmethod
    def convert(cls, record: PopQARecord, split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`; the question's type is the requested property."""
        answers = tuple(dict.fromkeys(_answers(record)))
        return Question(
            record.id, record.question, answers, type=record.prop, hops=1, split=split
        ), ()


def _answers(record: PopQARecord) -> list[str]:
    return msgspec.json.decode(record.possible_answers, type=list[str])
