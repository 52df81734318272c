"""Blocks that several configs share."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def data(split: str, units: str | None = "triple") -> Any:
    """``config.data``: which questions, over which corpus, in which units."""
    config: Any = ConfigDict()
    config.dir = placeholder(str)  # A dataset folder (docs/data.md); null is the embedded dataset.
    config.split = split
    config.fold = placeholder(str)
    config.setting = placeholder(str)  # HotpotQA: distractor or fullwiki.
    config.only_with_triples = False  # Keep questions whose every context passage has triples.
    config.limit = 0  # The first N questions after filtering; 0 is all.
    config.seed = 0
    config.units = units or placeholder(str)  # triple | sentence | passage
    config.corpus = "ircot_full"  # ircot_full | selected_questions | supporting_only | per_question
    return config


def mesh() -> Any:
    """The device mesh: sizes multiply to the number of devices, -1 takes what is left."""
    config: Any = ConfigDict()
    config.data = -1
    config.fsdp = 1
    config.tensor = 1
    return config
