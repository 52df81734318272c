"""HotpotQA (Yang et al., EMNLP 2018), distractor and fullwiki settings."""

from collections.abc import Mapping
from typing import Any

import tensorflow_datasets as tfds

from cirag_jax.datasets.benchmarks.base import Converted, OfficialBuilder, present_fields
from cirag_jax.datasets.benchmarks.files import OfficialFile
from cirag_jax.datasets.benchmarks.hotpot_format import (
    context_features,
    convert_context,
    decode_context,
    encode_context,
)
from cirag_jax.datasets.records import Record
from cirag_jax.types import Question

_SITE = "http://curtis.ml.cmu.edu/datasets/hotpot"
# The publisher states no checksum for these files (only for its Wikipedia dump). These are what
# the loader of ParlAI has checked every download against.
_PARLAI = "ParlAI"
_TRAIN = OfficialFile(
    "hotpot_train_v1.1.json",
    f"{_SITE}/hotpot_train_v1.1.json",
    sha256="26650cf50234ef5fb2e664ed70bbecdfd87815e6bffc257e068efea5cf7cd316",
    checksum_by=_PARLAI,
)
_DEV_DISTRACTOR = OfficialFile(
    "hotpot_dev_distractor_v1.json",
    f"{_SITE}/hotpot_dev_distractor_v1.json",
    sha256="4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
    checksum_by=_PARLAI,
)
_DEV_FULLWIKI = OfficialFile(
    "hotpot_dev_fullwiki_v1.json",
    f"{_SITE}/hotpot_dev_fullwiki_v1.json",
    sha256="2f1f3e594a3066a3084cc57950ca2713c24712adaad03af6ccce18d1846d5618",
    checksum_by=_PARLAI,
)
_TEST_FULLWIKI = OfficialFile(
    "hotpot_test_fullwiki_v1.json", f"{_SITE}/hotpot_test_fullwiki_v1.json"
)
_OPTIONAL = ("answer", "type", "level", "supporting_facts")


class HotpotQA(OfficialBuilder):
    """Two-hop questions over Wikipedia abstracts, with supporting sentences."""

    name = "hotpotqa"
    VERSION = tfds.core.Version("1.1.0")
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="distractor", description="2 gold and 8 other paragraphs"),
        tfds.core.BuilderConfig(name="fullwiki", description="10 retrieved paragraphs"),
    ]
    FILES = {
        "distractor": {"train": _TRAIN, "dev": _DEV_DISTRACTOR},
        "fullwiki": {"train": _TRAIN, "dev": _DEV_FULLWIKI, "test": _TEST_FULLWIKI},
    }

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Multi-hop questions with sentence-level supporting facts.",
            features=tfds.features.FeaturesDict(
                {**context_features(), "level": tfds.features.Text()}
            ),
            homepage="https://hotpotqa.github.io/",
            license="CC BY-SA 4.0",
            disable_shuffling=True,  # papers take the first N of the file
        )

    @classmethod
    def encode(cls, record: Record) -> dict[str, Any]:
        """See `OfficialBuilder.encode`."""
        return {
            **encode_context(record),
            "level": record.maybe_text("level") or "",
            "present": present_fields(record, _OPTIONAL),
        }

    @classmethod
    def decode(cls, example: Mapping[str, Any]) -> dict[str, Any]:
        """See `OfficialBuilder.decode`."""
        level = example["level"].decode() if b"level" in example["present"] else None
        return {**decode_context(example), "level": level}

    @classmethod
    def convert(cls, record: Mapping[str, Any], split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`; every HotpotQA question takes two hops."""
        passages, fields = convert_context(record)
        # Both settings share the training file, whose contexts are distractor ones.
        setting = "distractor" if split == "train" else setting
        return Question(**fields, hops=2, split=split, setting=setting), passages
