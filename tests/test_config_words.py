import dataclasses
import pathlib
from typing import Literal

import pytest
from ml_collections import ConfigDict

from cirag_jax import config_words
from cirag_jax.config_files import get_config_of, load_config

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "configs"
CONFIGS = [path for path in sorted(_FOLDER.rglob("*.py")) if "def get_config" in path.read_text()]

_FILE = """
from ml_collections import ConfigDict
from configs import common

def get_config():
    return finished(begun())

def begun():
    config = ConfigDict()
    config.behind = 1  # Said behind it, with a '#' more.
    # Said above it,
    # in two lines.
    config.above = "# no comment"
    config.silent = 3
    config.block = ConfigDict()
    config.block.many = (  # Of all that follow.
        "a",
        "b",
    )
    config.one = config.two = 0  # Of both.
    config.above = "changed"  # Changed.
    config.silent = 4  # Said at last.

    # Of nothing.

    config.far = 5
    config.made = made()
    config.named = ConfigDict()
    for name in ("first",):
        config.named[name] = 2  # Of a part of a computed name.
    return config

def made():
    config = ConfigDict()
    config.depth = 3  # Of the block.
    config.data = common.data(split="dev")
    return config

def finished(config):
    config.behind = 2  # Changed, too.
    return config
"""


def described(config, path):
    return config_words.describe_fields(config, [get_config_of(str(path))])


def test_describe_fields_uses_comments_of_statements(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(_FILE)
    words = described(load_config(str(path)), path)
    expected = {
        "behind": "Said behind it, with a '#' more.",
        "above": "Said above it, in two lines.",
        "silent": "Said at last.",
        "block.many": "Of all that follow.",
        "one": "Of both.",
        "two": "Of both.",
        "far": "",
        # Comments in other functions and files describe their blocks.
        "made.depth": "Of the block.",
        "made.data.setting": "HotpotQA: distractor, fullwiki or abstracts.",
        "named.first": "Of a part of a computed name.",
    }
    assert {key: words[key] for key in expected} == expected


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_describe_fields_covers_every_config(path):
    words = described(load_config(str(path)), path)
    assert words and all(words.values())


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Settings.

    Attributes:
      steps: how many; ``0``:
        none.
      first, second: both.
      order: of the ``steps``.
      kinds: one, or two.

    Raises:
      further: no field.
    """

    steps: int = 3
    first: bool = True
    second: bool = False
    further: str = ""
    order: Literal["up", "down"] | None = None
    kinds: tuple[Literal["one", "two"], ...] = ()


def test_describe_fields_uses_docstring_of_dataclass():
    config = ConfigDict()
    config.block = block = config_words.block_of(_Settings())
    block.first = False
    assert block.to_dict() == {**dataclasses.asdict(_Settings()), "first": False}
    assert config_words.describe_fields(config, ()) == {
        "block.first": "both.",
        "block.further": "",
        "block.kinds": "one, or two.",
        "block.order": "of the steps. (up | down)",
        "block.second": "both.",
        "block.steps": "how many; 0: none.",
    }


def test_describe_fields_covers_methods():
    file = "configs/methods/cirag.py:small"
    words = described(load_config(file), file)
    assert sum(map(bool, words.values())) > 0.95 * len(words)
