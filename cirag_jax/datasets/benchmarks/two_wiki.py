"""2WikiMultihopQA (Ho et al., COLING 2020), the release of 7 April 2021 with evidence ids."""

import tensorflow_datasets as tfds

from cirag_jax.datasets.benchmarks.base import Converted, OfficialBuilder
from cirag_jax.datasets.benchmarks.files import OfficialFile
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


class TwoWiki(OfficialBuilder):
    """Two- and four-hop questions with gold sentences, and gold triples in reasoning order."""

    name = "two_wiki"
    VERSION = tfds.core.Version("1.1.0")
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="default", description="10 paragraphs per question"),
    ]
    FILES = {
        "default": {
            split: OfficialFile(f"{split}.json", _URL, _ARCHIVE, _SHA256, "public reproductions")
            for split in ("train", "dev", "test")
        }
    }
    Record = TwoWikiRecord
    HOMEPAGE = "https://github.com/Alab-NII/2wikimultihop"
    LICENSE = "Apache-2.0"

    @classmethod
    def convert(cls, record: TwoWikiRecord, split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`; bridge comparisons have four hops, other questions two."""
        passages, fields = convert_context(record)
        hops = {None: None, "bridge_comparison": 4}.get(record.type, 2)
        triples = tuple(record.evidences) if record.evidences else None
        return Question(**fields, hops=hops, split=split, evidences=triples), passages
