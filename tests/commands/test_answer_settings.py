"""The settings and data that identify a run of launch/answer.py."""

import dataclasses
import pathlib

import jax
import pytest

from cirag_jax.commands import distill, identity, opening, task
from cirag_jax.commands.answer import (
    PlannedRun,
    warn_of_training_questions,
    warn_of_untrained_integrators,
)
from cirag_jax.config_files import load_config
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.errors import UserError
from cirag_jax.methods.common import extraction
from cirag_jax.methods.registry import find_method
from cirag_jax.models.io import workdir
from cirag_jax.triples.store import FILE, Record, TripleStore, content_hash
from cirag_jax.types import Dataset, Passage, Question, Triple

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
    empty_task = task.Task(needs, dataset, (), corpus)
    return identity.of_run(config, entry.program.__module__, empty_task)


def different(old, new):
    return {name for name in (*old, *new) if old.get(name) != new.get(name)}


@pytest.mark.parametrize("method", ["cirag", "kirag"])
def test_method_settings_over_own_documents_may_refuse(method):
    for documents, answers in (("", True), ("notes", False)):
        override = f"--config.documents={documents}"
        config = load_config(str(_ROOT / f"configs/methods/{method}.py"), (override,))
        for given in (None, True, False):
            with config.unlocked():
                config[method].force_answer = config[method].grounded_answers = given
            filled = task.method_settings(config)
            expected = (answers, not answers) if given is None else (given, given)
            assert (filled.force_answer, filled.grounded_answers) == expected


def test_identity_changes_with_edited_passage():
    edited = Corpus("ircot_full", (dataclasses.replace(LUND, text="Lund is in Halland."),))
    old, new = settings("native_rag"), settings("native_rag", corpus=edited)
    assert old == settings("native_rag") and different(old, new) == {"passages"}


@pytest.mark.parametrize(
    "triples",
    [(), (FACT, FACT), (FACT._replace(tail="Halland"),),
     (FACT._replace(sentence=None),)],
)  # fmt: skip
def test_identity_changes_with_edited_triples(triples):
    old = settings()
    assert old == settings() and old["triples"] is None
    assert different(old, settings(triples=triples)) == {"triples.content"}
    # The identity of methods without triples does not depend on the triples.
    assert settings("native_rag") == settings("native_rag", triples=triples)


@pytest.mark.parametrize("backend", ["jax", "transformers"])
def test_identity_records_default_dtype(monkeypatch, backend):
    if backend == "transformers":
        pytest.importorskip("torch")
    chosen = f"--config.reader.backend={backend}"
    old = settings("direct", chosen)
    assert old["reader.dtype"] == "float32"
    assert old == settings("direct", chosen, "--config.reader.dtype=float32")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    if backend == "transformers":
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    new = settings("direct", chosen)
    assert different(old, new) == {"reader.dtype"}
    assert new["reader.dtype"] == {"jax": "bfloat16", "transformers": "auto"}[backend]


@pytest.mark.parametrize(
    ("method", "overrides", "names"),
    [
        ("direct", (), ()),
        ("native_rag", (), ("sentencex", "tokenizers")),
        ("native_rag", ("retriever.kind=bm25",), ("sentencex", "bm25s", "PyStemmer")),
        ("native_rag", ("retriever.kind=faiss_flat",), ("sentencex", "faiss", "tokenizers")),
        ("cirag", ("retriever.kind=bm25", "rankers.triples.kind=bm25"),
         ("sentencex", "bm25s", "PyStemmer")),
        ("native_rag", ("encoder.backend=sentence_transformers",),
         ("sentencex", "tokenizers", "sentence-transformers", "transformers")),
    ],
)  # fmt: skip
def test_identity_has_packages_in_use(method, overrides, names):
    if "sentence-transformers" in names:
        pytest.importorskip("sentence_transformers")
    fields = settings(method, *(f"--config.{override}" for override in overrides))
    assert set(fields["packages"]) == set(names)


def test_identity_ignores_how_vectors_are_read():
    old = settings("native_rag")
    for more in ("stream=true", "pq_bytes=8", "pq_rerank=3"):
        assert settings("native_rag", f"--config.retriever.{more}") == old
    codes = "--config.retriever.kind=faiss_ivfpq"
    old = settings("native_rag", codes)
    new = settings("native_rag", codes, "--config.retriever.pq_rerank=3")
    assert different(old, new) == {"retriever.pq_rerank"}


def test_identity_of_language_model_has_prompt_packages():
    reading = {"tokenizers", "transformers", "jinja2"}
    assert set(settings("direct")["reader.packages"]) == reading
    served = ("--config.reader.backend=openai", "--config.reader.model=m")
    assert "reader.packages" not in settings("direct", *served)
    for constrained, more in ((True, {"llguidance"}), (False, set())):
        chosen = f"--config.dualrag.constrained={constrained}"
        fields = settings("dualrag", chosen)
        assert set(fields["reasoner.packages"]) == reading | more
        assert set(fields["reader.packages"]) == reading


def test_identity_changes_with_triple_store(tmp_path):
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
    (tmp_path / "corrupted.jsonl").touch()
    (tmp_path / "corruption.json").write_text('{"kind": "noise", "ratio": 0.1}')
    corrupted = settings("cirag", f"--config.triples={tmp_path}")
    names = {"triples.content", "triples.corruption", "triples.ratio"}
    assert different(new, corrupted) == names
    assert corrupted["triples.content"].split(" ")[0] == new["triples.content"]
    assert (corrupted["triples.corruption"], corrupted["triples.ratio"]) == ("noise", 0.1)
    with pytest.raises(UserError, match="nowhere has no triple store"):
        settings("cirag", f"--config.triples={tmp_path / 'nowhere'}")


def test_identity_of_online_extraction_has_parser_version(monkeypatch):
    old = settings("cirag", "--config.triples=online")
    assert old["triples"] == "online" and "triples.content" not in old
    assert old == settings("cirag", "--config.triples=online", triples=())
    monkeypatch.setattr(extraction, "PARSER", extraction.PARSER + 1)
    new = settings("cirag", "--config.triples=online")
    assert different(old, new) == {"extractor.parser"}


def planned(method, questions):
    config = task.method_config(method, "small")
    needs = task.method_settings(config).needs
    planned_task = task.Task(needs, Dataset("d", questions, {}, {}), questions, CORPUS)
    return PlannedRun(config, planned_task, (), {})


def test_warning_counts_training_questions(capsys):
    names = sorted(workdir.training_ids("shipped:aligner") or ())[:2]
    aligner, reader = (workdir.training_ids(f"shipped:{name}") for name in ("aligner", "reader"))
    assert aligner and reader
    extra = sorted(reader - aligner)
    questions = tuple(Question(name, "who?", ()) for name in (*names, extra[0], "new"))
    warn_of_training_questions([planned("cirag", questions), planned("kirag", questions)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: ")
    assert line.count("shipped:aligner was trained on 2 of these 4 questions") == 1
    assert line.count("shipped:reader was trained on 3 of these 4 questions") == 1
    warn_of_training_questions([planned("cirag", questions[3:]), planned("direct", questions[3:])])
    assert capsys.readouterr().err == ""


def test_trajectories_without_triples_suggest_sentences():
    config = load_config(str(_ROOT / "configs/trajectories.py"))
    needs, ready = distill._prepared(config, distill._check(config))
    empty_task = task.Task(needs, Dataset("d", (), {}, {}), (), CORPUS)
    with pytest.raises(UserError, match="launch/extract.py") as refused:
        opening.check_task(ready, empty_task)
    (_, _, advice) = str(refused.value).partition("or use ")
    flags = advice.removesuffix(", which needs no triples.").split()
    other = load_config(str(_ROOT / "configs/trajectories.py"), flags)
    needs, ready = distill._prepared(other, distill._check(other))
    opening.check(ready, needs)
    opening.check_task(ready, empty_task._replace(needs=needs))
    assert other.encoder.model == "shipped:aligner"


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        (["paper"], True),
        (["paper", "integrator.adapter=W"], False),
        (["paper", "integrator.backend=openai"], False),
        (["paper", "cirag.few_shot=true"], False),
        (["paper", "cirag.prefilled_headers=true"], False),
        (["paper", "cirag.integrator=top_k"], False),
        (["small"], False),
    ],
)
def test_untrained_integrator_is_named(capsys, flags, warns):
    preset, *values = flags
    overrides = [f"--config.{value}" for value in values]
    config = load_config(str(_ROOT / f"configs/methods/cirag.py:{preset}"), overrides)
    needs = task.method_settings(config).needs
    run = PlannedRun(config, task.Task(needs, Dataset("x", (), {}, {}), (), CORPUS), (), {})
    warn_of_untrained_integrators({"cirag": run})
    stderr = capsys.readouterr().err
    assert ("WARNING: cirag: config.integrator.adapter is not set" in stderr) == warns
