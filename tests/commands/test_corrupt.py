"""Corruption of single questions: the store stays equal, and only these questions change."""

import json
from typing import Any

import pytest

from cirag_jax.commands import corrupt as command
from cirag_jax.commands import opening, task
from cirag_jax.commands.extract import extract_corpus
from cirag_jax.datasets import corruption
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Generated
from cirag_jax.runtime import handlers
from cirag_jax.runtime.records import RequestKey
from cirag_jax.runtime.requests import Extract
from cirag_jax.runtime.scheduler import Call
from cirag_jax.triples.store import TripleStore
from configs import corrupt as corrupt_config
from configs import extract as extract_config
from tests import tiny
from tests.answering import lines
from tests.commands.model_server import model_server

DATA = tiny.dataset()


@pytest.fixture
def folder(tmp_path):
    return tiny.dataset_folder(tmp_path / "data")


def run(folder, workdir, **fields):
    config = corrupt_config.get_config()
    config.update_from_flattened_dict({"data.dir": str(folder), "ratio": 0.5, **fields})
    workdir.mkdir(exist_ok=True)
    return command.corrupt(config.lock(), workdir)


def rows_of(workdir):
    with TripleStore.open(workdir) as store:
        names = list(store.passage_ids())
        return {name: (text, store.entry(name)) for name, text in store._texts(names)}


def test_corrupt_copies_the_store_and_changes_selected_questions(folder, tmp_path):
    config = extract_config.get_config()
    openie = str(folder / "openie.jsonl")
    config.update_from_flattened_dict({"data.dir": str(folder), "import_openie": openie})
    (tmp_path / "base").mkdir()
    extract_corpus(config.lock(), tmp_path / "base")
    (tmp_path / "ids.txt").write_text("q0\nq1\n")
    fields = {"data.triples": str(tmp_path / "base"), "data.ids": str(tmp_path / "ids.txt")}
    result = run(folder, tmp_path / "w", kind="deletion", **fields)
    assert rows_of(tmp_path / "w") == rows_of(tmp_path / "base")
    assert (result["num_questions"], result["critical_facts"]) == (2, 8)
    assert (result["requested"], result["edits"], result["passages"]) == (4, 4, 4)
    changed = {(x["question_id"], x["passage_id"]) for x in lines(tmp_path / "w/corrupted.jsonl")}
    # q0 also has the passages of q1 in its context, but its facts around them do not change.
    assert changed == {("q0", "p0"), ("q0", "t0"), ("q1", "p1"), ("q1", "t1")}
    first = (tmp_path / "w/corrupted.jsonl").read_bytes()
    run(folder, tmp_path / "w", kind="deletion", **fields)
    assert (tmp_path / "w/corrupted.jsonl").read_bytes() == first
    corrupted = corruption.read_corrupted(str(tmp_path / "w"))
    assert corrupted and corrupted.settings == {"kind": "deletion", "ratio": 0.5}
    with pytest.raises(UserError, match="is in --workdir"):
        run(folder, tmp_path / "base", **fields)


def test_corrupt_kind_names_editor_and_patterns():
    config = corrupt_config.get_config()
    assert command._kind(config) == "noise"
    config.patterns, config.editor.kind = ("mis_bound", "semantic_flip"), "llm"
    assert command._kind(config) == "noise (mis_bound, semantic_flip) by a language model"
    config.kind = "deletion"
    assert command._kind(config) == "deletion by a language model"


def test_corrupt_openie_file_is_imported(folder, tmp_path):
    result = run(folder, tmp_path / "w", **{"data.limit": 1})
    with TripleStore.open(tmp_path / "w") as store:
        assert store.triples(DATA.corpus) == dict(DATA.triples)
    assert result["edits"] == 2 and result["without_facts"] == 0 and result["facts"] == 16
    nothing = run(folder, tmp_path / "w", ratio=0.0)
    assert nothing["edits"] == 0 and (tmp_path / "w/corrupted.jsonl").read_bytes() == b""


def test_handler_gives_each_question_its_own_facts(folder, tmp_path):
    run(folder, tmp_path / "w", kind="deletion", **{"data.limit": 1})
    corrupted = corruption.read_corrupted(str(tmp_path / "w"))
    assert corrupted
    with TripleStore.open(tmp_path / "w") as store:
        handler = handlers.ExtractHandler(store.triples, corrupted.by_question)
        request = Extract((DATA.corpus["p0"], DATA.corpus["p1"]))
        responses: dict[int, Any] = {}
        calls = [Call(RequestKey(name, 0), request) for name in ("q0", "q1")]
        handler(calls, lambda index, response: responses.update({index: response}))
    assert responses[1].triples == (DATA.triples["p0"], DATA.triples["p1"])
    assert responses[0].triples == (DATA.triples["p0"][1:], DATA.triples["p1"])


@pytest.mark.parametrize(
    "values", [["c2rag.kg_scope=corpus"], ["retriever.units=triple"], ["retriever.kind=linked"]]
)
def test_method_with_facts_of_all_questions_is_refused(folder, tmp_path, values):
    run(folder, tmp_path / "w", **{"data.limit": 1})
    store = [f"data.dir={folder}", f"data.triples={tmp_path / 'w'}"]
    config = task.method_config("c2rag", "", [*store, *values])
    needs = task.method_settings(config).needs
    with pytest.raises(UserError, match="corrupted facts of single questions"):
        opening.read_corrupted(config, needs)
    config = task.method_config("c2rag", "", store)
    facts = opening.read_corrupted(config, task.method_settings(config).needs)
    assert facts and set(facts) == {"q0"}
    config = task.method_config("c2rag", "", store[:1])
    assert opening.read_corrupted(config, needs) is None


def test_corrupt_by_a_language_model(folder, tmp_path):
    """The editor of q0 writes one good, one unreadable, one incomplete and one unchanged fact."""
    written = {
        "born in": '{"fact": ["balia", "buried in", "x"]}',
        "worked as": "no idea",
        "patron": 'So: {"fact": ["", "patron", "y"]}',
    }

    def answer(text, _):
        relation = text.rsplit(" | ", 2)[1]
        reply = written.get(relation) or json.dumps({"fact": text.split(": ")[-1].split(" | ")})
        return reply, "stop"

    with model_server(answer) as server:
        fields = {"editor.kind": "llm", "editor.backend": "openai", "data.limit": 1, "ratio": 1.0}
        fields |= {"editor.base_url": server.url, "editor.constrained": False}
        result = run(folder, tmp_path / "w", **fields)
        assert (result["requested"], result["edits"], result["failures"]) == (4, 1, 0)
        assert result["generated_tokens"] == 28 and result["complete"]
        again = run(folder, tmp_path / "w", **fields)
        assert again["edits"] == 1 and len(server.asked) == 4
        assert all("who is the patron" in text for _, text in server.asked)
    (line,) = lines(tmp_path / "w/corrupted.jsonl")
    assert line["passage_id"] == "p0"
    assert line["triples"][1] == ["balia", "buried in", "x", 0]


def test_corrupt_deletion_by_a_language_model_keeps_valid_numbers(folder, tmp_path):
    def answer(text, _):
        assert "Facts:\n1. balia | born in | " in text and "\n4. " in text
        return '{"remove": [3, 3, 9, "x", 0, "1", 2]}', "stop"

    with model_server(answer) as server:
        fields = {"editor.kind": "llm", "editor.backend": "openai", "data.limit": 1}
        fields |= {"editor.base_url": server.url, "editor.constrained": False}
        result = run(folder, tmp_path / "w", kind="deletion", **fields)
    assert result["edits"] == 2
    left = {
        x["passage_id"]: [t[1] for t in x["triples"]] for x in lines(tmp_path / "w/corrupted.jsonl")
    }
    assert left == {"p0": ["worked as"], "t0": ["known for"]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ratio": 1.5}, r"config.ratio=1.5 must lie between 0 and 1"),
        ({"ratio": -0.1}, r"config.ratio=-0.1 must lie between 0 and 1"),
        ({"kind": "chaos"}, "config.kind"),
        ({"patterns": ()}, "config.patterns must name"),
        ({"patterns": ("typo",)}, "config.patterns"),
        ({"editor.kind": "human"}, "config.editor.kind"),
    ],
)
def test_corrupt_bad_settings_are_refused(folder, tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        run(folder, tmp_path / "w", **fields)


def test_corrupt_store_of_other_passages_is_refused(folder, tmp_path):
    run(folder, tmp_path / "w", **{"data.limit": 1})
    corpus = (folder / "corpus.jsonl").read_text().replace("potter", "poet")
    (folder / "corpus.jsonl").write_text(corpus)
    with pytest.raises(UserError, match="has changed since"):
        run(folder, tmp_path / "v", **{"data.triples": str(tmp_path / "w")})


def test_corrupt_question_without_context_is_refused(folder, tmp_path):
    rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    rows[0]["context"] = None
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="'q0' of .* has no context"):
        run(folder, tmp_path / "w")


def test_error_of_the_editor_leaves_the_question_unchanged(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(command.backends, "open_backend", lambda *_, **__: Broken())
    fields = {"editor.kind": "llm", "data.limit": 1}
    result = run(folder, tmp_path / "w", **fields)
    assert result["failures"] == 1 and result["edits"] == 0


class Broken:
    """A backend whose requests all fail."""

    def generate(self, requests, progress=None, done=None):
        found = [Generated("", "error", error="out of memory") for _ in requests]
        for index, response in enumerate(found):
            if done:
                done(index, response)
        return found

    def close(self):
        pass
