"""Questions with long answers and no passages, scored by ROUGE: ASQA and ELI5."""

from typing import Any

import msgspec
import tensorflow_datasets as tfds

from cirag_jax.datasets.benchmarks.base import Converted, OfficialBuilder
from cirag_jax.datasets.benchmarks.files import OfficialFile
from cirag_jax.types import NonEmptyStr, Question


class Reading(msgspec.Struct):
    """One meaning of an ambiguous question."""

    question: str
    short_answers: list[str]
    context: str | None = None
    wikipage: str | None = None


class Annotation(msgspec.Struct):
    """A long answer that covers all readings."""

    long_answer: str
    knowledge: Any = None


class ASQARecord(msgspec.Struct):
    """An official record of ASQA."""

    id: NonEmptyStr
    ambiguous_question: NonEmptyStr
    qa_pairs: list[Reading]
    annotations: list[Annotation]
    wikipages: Any = None


_ASQA = {
    split: OfficialFile(
        "ASQA.json", "https://storage.googleapis.com/gresearch/ASQA/ASQA.json", split=split
    )
    for split in ("train", "dev")
}


class ASQA(OfficialBuilder):
    """Ambiguous questions with an answer for every reading (Stelmakh et al., EMNLP 2022)."""

    name = "asqa"
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="long", description="the annotators' long answers"),
        tfds.core.BuilderConfig(name="short", description="the short answers of all readings"),
    ]
    FILES = {"long": _ASQA, "short": _ASQA}
    Record = ASQARecord
    HOMEPAGE = "https://github.com/google-research/language/tree/master/language/asqa"
    LICENSE = "Apache-2.0"

    @classmethod
    def convert(cls, record: ASQARecord, split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`; ``setting`` chooses the accepted answers."""
        answers = [annotation.long_answer for annotation in record.annotations]
        if setting == "short":
            answers = [answer for pair in record.qa_pairs for answer in pair.short_answers]
        answers = tuple(dict.fromkeys(answers))
        return Question(
            record.id, record.ambiguous_question, answers, split=split, setting=setting
        ), ()


class Output(msgspec.Struct):
    """An answer, or its source in Wikipedia."""

    answer: str | None = None
    provenance: Any = None
    meta: Any = None


class KILTRecord(msgspec.Struct):
    """A record of the KILT benchmark (Petroni et al., NAACL 2021)."""

    id: NonEmptyStr
    input: NonEmptyStr
    output: list[Output]
    meta: Any = None


class ELI5(OfficialBuilder):
    """Questions that ask for an explanation (Fan et al., ACL 2019), in KILT's version."""

    name = "eli5"
    FILES = {
        "default": {
            split: OfficialFile(
                f"eli5-{split}-kilt.jsonl",
                f"http://dl.fbaipublicfiles.com/KILT/eli5-{split}-kilt.jsonl",
            )
            for split in ("train", "dev")
        }
    }
    Record = KILTRecord
    HOMEPAGE = "https://github.com/facebookresearch/KILT"
    LICENSE = "MIT"

    @classmethod
    def convert(cls, record: KILTRecord, split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`."""
        answers = tuple(dict.fromkeys(o.answer for o in record.output if o.answer))
        return Question(record.id, record.input, answers, split=split), ()
