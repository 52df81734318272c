"""MuSiQue v1.0 (Trivedi et al., TACL 2022): MuSiQue-Ans and MuSiQue-Full."""

from collections.abc import Mapping
from typing import Any

import msgspec
import tensorflow_datasets as tfds

from cirag_jax.datasets.benchmarks.base import Converted, OfficialBuilder
from cirag_jax.datasets.benchmarks.files import OfficialFile
from cirag_jax.datasets.passages import passage_of
from cirag_jax.datasets.records import field_error
from cirag_jax.types import Count, NonEmptyStr, Passage, Question, SubQuestion

_ARCHIVE = "musique_data_v1.0.zip"
# This host returns the file; drive.google.com first shows a virus-scan warning.
_URL = (
    "https://drive.usercontent.google.com/download"
    "?id=1tGdADlNjWFaHLeZZGShh2IRcpO6Lv24h&export=download&confirm=t"
)


class Paragraph(msgspec.Struct):
    """A passage of the context."""

    idx: Count
    title: str
    paragraph_text: str
    is_supporting: bool | None = None


class Step(msgspec.Struct):
    """A sub-question; its id is a number or a string."""

    question: str
    answer: str
    id: int | str = ""
    paragraph_support_idx: Count | None = None


class MuSiQueRecord(msgspec.Struct):
    """An official record."""

    id: NonEmptyStr
    question: NonEmptyStr
    paragraphs: list[Paragraph]
    answer: str | None = None
    answer_aliases: list[str] | None = None
    answerable: bool | None = None
    question_decomposition: list[Step] | None = None


def _files(config: str) -> dict[str, OfficialFile]:
    return {
        split: OfficialFile(f"musique_{config}_v1.0_{split}.jsonl", _URL, _ARCHIVE)
        for split in ("train", "dev", "test")
    }


class MuSiQue(OfficialBuilder):
    """Questions of two to four hops, decomposed; MuSiQue-Full adds unanswerable twins."""

    name = "musique"
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="ans", description="answerable questions"),
        tfds.core.BuilderConfig(name="full", description="each with an unanswerable twin"),
    ]
    FILES = {"ans": _files("ans"), "full": _files("full")}
    SHARED_IDS = frozenset({"full"})
    Record = MuSiQueRecord
    HOMEPAGE = "https://github.com/StonyBrookNLP/musique"
    LICENSE = "CC BY 4.0"

    def check(self, place: str, record: MuSiQueRecord) -> None:
        """Raises UserError if a paragraph repeats a number or a step names a missing one."""
        known: set[int] = set()
        for i, paragraph in enumerate(record.paragraphs):
            if paragraph.idx in known:
                problem = f"repeats the number {paragraph.idx} of an earlier paragraph"
                raise field_error(place, f"paragraphs[{i}].idx", problem)
            known.add(paragraph.idx)
        for i, step in enumerate(record.question_decomposition or ()):
            idx = step.paragraph_support_idx
            if idx is not None and idx not in known:
                field = f"question_decomposition[{i}].paragraph_support_idx"
                raise field_error(place, field, f"names paragraph {idx}, which is missing")

    def wrong_version(self, value: Any, split: str) -> str | None:
        """Recognizes MuSiQue-Full in the config ans."""
        config = self.builder_config.name  # pyright: ignore[reportOptionalMemberAccess]
        if config == "ans" and value.get("answerable") is False:
            return "are unanswerable: this is a file of MuSiQue-Full (--config=full)"
        return None

    @classmethod
    def convert(cls, record: MuSiQueRecord, split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`.

        The id begins with the type of the question and its number of hops, such as ``3hop1``. The
        question's setting is ``answerable`` or ``unanswerable``; MuSiQue-Full has both.
        """
        shape = record.id.split("__", 1)[0]
        by_idx = {p.idx: passage_of(p.title, p.paragraph_text) for p in record.paragraphs}
        official = () if record.answer is None else (record.answer, *(record.answer_aliases or ()))
        answers = tuple(dict.fromkeys(official))
        supporting = None
        if all(p.is_supporting is not None for p in record.paragraphs):
            gold = (by_idx[p.idx].id for p in record.paragraphs if p.is_supporting)
            supporting = tuple(dict.fromkeys(gold))
        question = Question(
            id=record.id,
            question=record.question,
            answers=answers,
            type=shape,
            hops=int(shape[0]) if shape[:1].isdigit() else None,
            split=split,
            setting={None: None, True: "answerable", False: "unanswerable"}[record.answerable],
            supporting=supporting,
            context=tuple(dict.fromkeys(passage.id for passage in by_idx.values())),
            decomposition=_decomposition(record.question_decomposition, by_idx),
            aliases=answers[1:] or None,
        )
        return question, tuple(by_idx.values())


def _decomposition(
    steps: list[Step] | None, by_idx: Mapping[int, Passage]
) -> tuple[SubQuestion, ...] | None:
    if steps is None:
        return None
    return tuple(
        SubQuestion(
            step.question,
            step.answer,
            None if step.paragraph_support_idx is None else by_idx[step.paragraph_support_idx].id,
        )
        for step in steps
    )
