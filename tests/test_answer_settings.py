"""What binds a workdir of launch/answer.py to its run."""

import pathlib

from cirag_jax import answer, cli
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.methods.registry import find_method
from cirag_jax.types import Passage

_ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_a_passage_that_was_edited_is_another_run():
    config = cli.load_config(str(_ROOT / "configs/methods/native_rag.py"))

    def settings(text):
        corpus = Corpus("ircot_full", (Passage("a", "Lund", text),))
        return answer._settings(config, find_method("native_rag"), corpus)

    assert settings("Lund is in Skane.") == settings("Lund is in Skane.")
    old, new = settings("Lund is in Skane."), settings("Lund is in Halland.")
    assert {name for name in old if old[name] != new[name]} == {"passages"}
