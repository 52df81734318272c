import dataclasses
import pathlib

import pytest
from ml_collections import ConfigDict

from cirag_jax import config_words
from cirag_jax.config_files import find_block, leaves, load_config
from configs import common

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "configs"
CONFIGS = [path for path in sorted(_FOLDER.rglob("*.py")) if "def get_config" in path.read_text()]

_FILE = """
from ml_collections import ConfigDict

def get_config():
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
    return config
"""


def test_fields_are_described_by_the_comments_of_the_lines_that_set_them(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(_FILE)
    plain = ConfigDict.__setattr__
    with config_words.recorded() as words:
        config = load_config(str(path))
        assert {key: words(*find_block(config, key)) for key, _ in leaves(config)} == {
            "behind": "Said behind it, with a '#' more.",
            "above": "Said above it, in two lines.",
            "silent": "Said at last.",
            "block.many": "Of all that follow.",
            "one": "Of both.",
            "two": "Of both.",
            "far": "",
        }
        # A block of another file has its comments; a field set before has none here.
        data = common.data(split="dev")
        assert words(data, "setting") == "HotpotQA: distractor or fullwiki."
    assert ConfigDict.__setattr__ is plain
    with config_words.recorded() as words:
        assert words(data, "setting") == words(config, "behind") == ""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_field_of_every_config_is_described(path):
    with config_words.recorded() as words:
        config = load_config(str(path))
        silent = [key for key, _ in leaves(config) if not words(*find_block(config, key))]
    assert not silent


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Settings.

    Attributes:
      steps: how many; ``0``:
        none.
      first, second: both.

    Raises:
      further: no field.
    """

    steps: int = 3
    first: bool = True
    second: bool = False
    further: str = ""


def test_the_docstring_of_a_dataclass_describes_its_block():
    with config_words.recorded() as words:
        block = config_words.block_of(_Settings())
        block.first = False
        assert block.to_dict() == {**dataclasses.asdict(_Settings()), "first": False}
        assert [words(block, name) for name in ("steps", "first", "second", "further")] == [
            "how many; 0: none.", "both.", "both.", "",
        ]  # fmt: skip


def test_most_fields_of_a_method_are_described():
    with config_words.recorded() as words:
        config = load_config("configs/methods/cirag.py:small")
        said = [bool(words(*find_block(config, key))) for key, _ in leaves(config)]
    assert sum(said) > 0.95 * len(said)
