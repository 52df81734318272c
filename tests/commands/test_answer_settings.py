"""What binds a workdir of launch/answer.py to its run."""

import dataclasses
import pathlib

import pytest

from cirag_jax.commands import opening, task
from cirag_jax.config_files import load_config
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.errors import UserError
from cirag_jax.methods import extraction
from cirag_jax.methods.registry import find_method
from cirag_jax.triples.store import FILE, Record, TripleStore, content_hash
from cirag_jax.types import Dataset, Passage, Triple

_ROOT = pathlib.Path(__file__).resolve().parents[2]
LUND = Passage("a", "Lund", "Lund is in Skane.")
CORPUS = Corpus("ircot_full", (LUND,))
FACT = Triple("Lund", "is in", "Skane", "a", 0)


def settings(method="cirag", *overrides, corpus=CORPUS, triples=(FACT,)):
    config = load_config(str(_ROOT / f"configs/methods/{method}.py"), overrides)
    passages = {passage.id: passage for passage in corpus.passages}
    dataset = Dataset("towns", (), passages, {"a": triples, "elsewhere": (FACT,)})
    entry = find_method(method)
    needs = entry.config(**task.plain(config[method])).needs
    asked = opening.Task(needs, dataset, (), corpus)
    return task.settings(config, entry.program.__module__, asked)


def different(old, new):
    return {name for name in (*old, *new) if old.get(name) != new.get(name)}


def test_a_passage_that_was_edited_is_another_run():
    edited = Corpus("ircot_full", (dataclasses.replace(LUND, text="Lund is in Halland."),))
    old, new = settings("native_rag"), settings("native_rag", corpus=edited)
    assert old == settings("native_rag") and different(old, new) == {"passages"}


@pytest.mark.parametrize(
    "triples",
    [(), (FACT, FACT), (FACT._replace(tail="Halland"),),
     (FACT._replace(sentence=None),)],
)  # fmt: skip
def test_triples_of_the_dataset_that_were_edited_are_another_run(triples):
    old = settings()
    assert old == settings() and old["triples"] is None
    assert different(old, settings(triples=triples)) == {"triples.content"}
    # Who uses no triples is bound to none.
    assert settings("native_rag") == settings("native_rag", triples=triples)


def test_a_store_that_was_changed_is_another_run(tmp_path):
    def commit(passage, triples):
        with TripleStore.create(tmp_path / FILE) as store:
            record = Record(passage.id, content_hash(passage), triples)
            store.commit([record], {"model": "m"})
        return settings("cirag", f"--config.triples={tmp_path}")

    old = commit(LUND, (FACT,))
    assert old["triples"] == str(tmp_path)
    assert commit(Passage("b", "", ""), (FACT._replace(passage_id="b"),)) == old
    new = commit(LUND, (FACT._replace(tail="Halland"),))
    assert different(old, new) == {"triples.content"}
    with pytest.raises(UserError, match="nowhere holds no triple store"):
        settings("cirag", f"--config.triples={tmp_path / 'nowhere'}")


def test_another_parser_is_another_run_of_online_extraction(monkeypatch):
    old = settings("cirag", "--config.triples=online")
    assert old["triples"] == "online" and "triples.content" not in old
    assert old == settings("cirag", "--config.triples=online", triples=())
    monkeypatch.setattr(extraction, "PARSER", extraction.PARSER + 1)
    new = settings("cirag", "--config.triples=online")
    assert different(old, new) == {"extractor.parser"}
