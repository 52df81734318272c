"""2WikiMultihopQA (Ho et al., COLING 2020), the release of 7 April 2021 with evidence ids."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import tensorflow_datasets as tfds

from cirag_jax.datasets import records
from cirag_jax.datasets.benchmarks.base import Converted, OfficialBuilder
from cirag_jax.datasets.benchmarks.files import FoundFile, OfficialFile, beside
from cirag_jax.datasets.benchmarks.hotpotqa import HotpotRecord, convert_context
from cirag_jax.types import Question

_ARCHIVE = "data_ids_april7.zip"
_URL = f"https://www.dropbox.com/s/ms2m13252h6xubs/{_ARCHIVE}?dl=1"
# The publisher states no checksum; several public reproductions record this one.
_SHA256 = "95df2bf56fdabe034e27aebc580e02264232203cf52552f9efe8a919e5529eef"


class TwoWikiRecord(HotpotRecord):
    """An official record."""

    evidences: list[tuple[str, str, str]] | None = None
    evidences_id: list[tuple[str, str, str]] | None = None
    entity_ids: str | None = None
    answer_id: str | None = None
    aliases: list[str] | None = None  # Added by `TwoWiki` from the file of aliases.


class Aliases(msgspec.Struct):
    """A line of the official file of aliases: other names of a Wikidata entity."""

    entity: str = msgspec.field(name="Q_id")
    aliases: list[str] = []
    demonyms: list[str] = []


class TwoWiki(OfficialBuilder):
    """Two- and four-hop questions with gold sentences, and gold triples in reasoning order."""

    name = "two_wiki"
    VERSION = tfds.core.Version("1.2.0")
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="default", description="10 paragraphs per question"),
    ]
    FILES = {
        "default": {
            split: OfficialFile(f"{split}.json", _URL, _ARCHIVE, _SHA256, "public reproductions")
            for split in ("train", "dev", "test")
        }
    }
    # Read if it is beside the questions. Its lines are JSON objects, in spite of its name.
    ALIASES = OfficialFile("id_aliases.json", _URL, _ARCHIVE, noun="entity", lines=True)
    Record = TwoWikiRecord
    HOMEPAGE = "https://github.com/Alab-NII/2wikimultihop"
    LICENSE = "Apache-2.0"

    def _generate_examples(self, found: Mapping[str, FoundFile], split: str):
        names = _aliases(beside(found[split], self.ALIASES))
        for index, example in super()._generate_examples(found, split):
            record = msgspec.json.decode(example["record"])
            if aliases := names.get(record["answer_id"]):
                record["aliases"] = [name for name in aliases if name != record["answer"]]
            yield index, {"record": msgspec.json.encode(record).decode()}

    def wrong_version(self, value: Any, split: str) -> str | None:
        """Recognizes files of HotpotQA, and versions without evidences."""
        if "evidences" in value or split == "test":
            return None
        return (
            "have no evidences: this is a file of HotpotQA (--benchmark=hotpotqa), or of another "
            "version of 2WikiMultihopQA"
        )

    @classmethod
    def convert(cls, record: TwoWikiRecord, split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`; bridge comparisons have four hops, other questions two.

        The official scorer (2wikimultihop_evaluate_v1.1.py) accepts the aliases and demonyms of the
        entity that is the answer.
        """
        passages, fields = convert_context(record)
        hops = {None: None, "bridge_comparison": 4}.get(record.type, 2)
        triples = tuple(record.evidences) if record.evidences else None
        if record.aliases:
            fields["aliases"] = tuple(record.aliases)
            fields["answers"] = (*fields["answers"], *record.aliases)
        return Question(**fields, hops=hops, split=split, evidences=triples), passages


def _aliases(file: FoundFile | None) -> dict[str | None, list[str]]:
    """Returns the other names of each entity, without repetitions."""
    if file is None:
        return {}
    lines: Iterator[tuple[str, Any]] = file.records()
    entries = (records.convert(place, value, Aliases) for place, value in lines)
    return {e.entity: list(dict.fromkeys((*e.aliases, *e.demonyms))) for e in entries}
