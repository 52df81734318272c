"""HotpotQA (Yang et al., EMNLP 2018), distractor and fullwiki settings."""

from typing import Any

import msgspec
import tensorflow_datasets as tfds

from cirag_jax.datasets.benchmarks.base import Converted, OfficialBuilder
from cirag_jax.datasets.benchmarks.corpora import OfficialCorpus
from cirag_jax.datasets.benchmarks.files import OfficialFile
from cirag_jax.datasets.passages import passage_of
from cirag_jax.types import Count, NonEmptyStr, Passage, Question

# The publisher states no checksum for these files; these are from the loader of ParlAI.
_SHA256 = {
    "hotpot_train_v1.1.json": "26650cf50234ef5fb2e664ed70bbecdfd87815e6bffc257e068efea5cf7cd316",
    "hotpot_dev_distractor_v1.json": (
        "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea"
    ),
    "hotpot_dev_fullwiki_v1.json": (
        "2f1f3e594a3066a3084cc57950ca2713c24712adaad03af6ccce18d1846d5618"
    ),
}


def _file(name: str) -> OfficialFile:
    url = f"http://curtis.ml.cmu.edu/datasets/hotpot/{name}"
    sha256 = _SHA256.get(name)
    return OfficialFile(name, url, sha256=sha256, checksum_by="ParlAI" if sha256 else None)


_TRAIN = _file("hotpot_train_v1.1.json")


_FULLWIKI = {
    "train": _TRAIN,
    "dev": _file("hotpot_dev_fullwiki_v1.json"),
    "test": _file("hotpot_test_fullwiki_v1.json"),
}
_ABSTRACTS = "enwiki-20171001-pages-meta-current-withlinks-abstracts.tar.bz2"


class HotpotRecord(msgspec.Struct):
    """An official record, in the format that 2WikiMultihopQA also uses."""

    id: NonEmptyStr = msgspec.field(name="_id")
    question: NonEmptyStr
    context: list[tuple[str, list[str]]]
    answer: str | None = None
    type: str | None = None
    level: str | None = None
    supporting_facts: list[tuple[str, Count]] | None = None


class HotpotQA(OfficialBuilder):
    """Two-hop questions over Wikipedia abstracts, with supporting sentences."""

    name = "hotpotqa"
    VERSION = tfds.core.Version("1.1.0")
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="distractor", description="2 gold and 8 other paragraphs"),
        tfds.core.BuilderConfig(name="fullwiki", description="10 retrieved paragraphs"),
        tfds.core.BuilderConfig(name="abstracts", description="the abstracts of Wikipedia"),
    ]
    FILES = {
        "distractor": {"train": _TRAIN, "dev": _file("hotpot_dev_distractor_v1.json")},
        "fullwiki": _FULLWIKI,
        "abstracts": _FULLWIKI,
    }
    CORPORA = {
        "abstracts": OfficialCorpus(
            OfficialFile(
                _ABSTRACTS,
                f"https://nlp.stanford.edu/projects/hotpotqa/{_ABSTRACTS}",
                sha256="1acca1c5cc93c4890ea51091d2bad7c3ef6987aead127ab88728dc9e26555729",
                checksum_by="public reproductions",
            ),
            "abstracts",
            count=5_233_329,
            key="title",
        )
    }
    Record = HotpotRecord
    HOMEPAGE = "https://hotpotqa.github.io/"
    LICENSE = "CC BY-SA 4.0"

    def wrong_version(self, value: Any, split: str) -> str | None:
        """Recognizes files of 2WikiMultihopQA, and fullwiki contexts in the distractor setting."""
        if "evidences" in value:
            return (
                "have the field evidences, which HotpotQA lacks: this is a file of "
                "2WikiMultihopQA (--benchmark=two_wiki)"
            )
        config = self.builder_config.name  # pyright: ignore[reportOptionalMemberAccess]
        titles = {title for title, _ in value["context"]}
        lacks_gold = not {title for title, _ in value.get("supporting_facts") or ()} <= titles
        if config == "distractor" and lacks_gold:
            return (
                "lack a gold paragraph in their context: this is a file of the fullwiki setting "
                "(--config=fullwiki)"
            )
        return None

    @classmethod
    def convert(cls, record: HotpotRecord, split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`; every HotpotQA question has two hops."""
        if setting in cls.CORPORA:
            fields = _titles(record)
            return Question(**fields, hops=2, split=split, setting=setting), ()
        passages, fields = convert_context(record)
        # Both settings use the same training file, which has distractor contexts.
        setting = "distractor" if split == "train" else setting
        return Question(**fields, hops=2, split=split, setting=setting), passages


def _fields(record: HotpotRecord) -> dict[str, Any]:
    """Returns the fields of `Question` that do not refer to passages."""
    return {
        "id": record.id,
        "question": record.question,
        "answers": () if record.answer is None else (record.answer,),
        "type": record.type,
    }


def _titles(record: HotpotRecord) -> dict[str, Any]:
    """Returns the fields of `Question`, with titles in place of ids of passages."""
    facts = tuple(dict.fromkeys(record.supporting_facts or ()))
    return {
        **_fields(record),
        "context": tuple(dict.fromkeys(title for title, _ in record.context)),
        "supporting": tuple(dict.fromkeys(title for title, _ in facts)) or None,
        "supporting_sentences": facts or None,
    }


def convert_context(record: HotpotRecord) -> tuple[tuple[Passage, ...], dict[str, Any]]:
    """Returns the passages of the context and the fields of `Question` that refer to them.

    ``supporting`` is None if it is unpublished (missing or empty in the test split) or if the
    context lacks a gold title, which happens in the fullwiki setting. Listing only the remaining
    gold passages would inflate recall. Sentence indices out of range are dropped.
    """
    passages = tuple(passage_of(title, "", sentences) for title, sentences in record.context)
    context = tuple(dict.fromkeys(passage.id for passage in passages))
    fields = {**_fields(record), "context": context}
    facts = record.supporting_facts
    by_title = {passage.title: passage for passage in reversed(passages)}  # The first one wins.
    if facts and all(title in by_title for title, _ in facts):
        fields["supporting"] = tuple(dict.fromkeys(by_title[title].id for title, _ in facts))
        fields["supporting_sentences"] = tuple(
            dict.fromkeys(
                (by_title[title].id, sentence)
                for title, sentence in facts
                if sentence < len(by_title[title].sentences or ())
            )
        )
    return passages, fields
