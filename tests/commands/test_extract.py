"""Extraction of triples: updates, failures, selections, estimates."""

import json

import pytest

from cirag_jax.errors import UserError
from cirag_jax.methods.common import extraction
from cirag_jax.methods.common import extraction_prompts as prompts
from cirag_jax.triples.store import TripleStore
from cirag_jax.types import Triple
from tests.commands.extracting import TEXTS, content, corpus, run, triples
from tests.commands.model_server import model_server


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with model_server() as running:
        yield running


def test_extract_outcomes_are_counted_by_kind(server, tmp_path):
    result = run(server, corpus(tmp_path / "c", TEXTS), tmp_path / "w")
    assert (result["passages"], result["ok"], result["empty"], result["failed"]) == (6, 3, 1, 2)
    assert result["triples"] == 6 and result["complete"] and result["left"] == 0
    (refused,) = (cause for cause in result["failures"] if cause.startswith("request: "))
    assert result["failures"] == {"answer: no_json": 1, refused: 1} and "status #" in refused
    assert result["parse_errors"] == {
        "entities: truncated": 1,
        "triples: truncated": 1,
        "triples: no_json": 1,
    }
    assert result["calls"] == 11 and result["generated_tokens"] == 70
    assert result["cached_tokens"] == 20 and result["prompt_tokens"] > 70
    stored, status = triples(tmp_path / "w", TEXTS)
    assert status == dict(zip(TEXTS, ["ok", "empty", "failed", "ok", "ok", "failed"], strict=True))
    assert stored["p0"] == (
        Triple("Ule", "feeds", "Tarn", "p0", 0),
        Triple("Tarn", "governs", "Osk", "p0", 1),
    )
    assert stored["p1"] == () and stored["p2"] is None and stored["p5"] is None
    assert [t.head for t in stored["p3"] or ()] == ["Dunn", "Ule"]  # the third was truncated
    with TripleStore.open(tmp_path / "w") as held:
        entry = held.entry("p0")
        assert entry and entry.extractor["model"] == "m"


HOSTILE = (
    r"""{"triples": [["\ud800x", "is\u0000", "c"], ["'); DROP TABLE passages", "</a>", ""]]}""",
    "[" * 500,
    '{"triples": [[' + "9" * 5000 + ', NaN, "c"]]}',
    "\x00\u202e__import__('os')",
)  # fmt: skip


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_extract_hostile_text_is_stored_or_counted(server, tmp_path, answer):
    texts = {"'; --": "'); DROP TABLE passages; --", "a\x00b\u202e": "{}\x00 [[", "../../x": "x"}
    server.answer = lambda text, wants: (answer, "stop")
    result = run(server, corpus(tmp_path / "c", texts), tmp_path / "w")
    assert result["complete"] and result["passages"] == 3
    assert result["ok"] + result["failed"] == 3 and set(result["parse_errors"].values()) == {3}
    stored, _ = triples(tmp_path / "w", texts)
    parts = {part for one in stored.values() for t in one or () for part in (t.head, t.tail)}
    assert not any("\ud800" in part or "\x00" in part for part in parts)
    assert run(server, tmp_path / "c", tmp_path / "w")["reused"] == 3


def test_extract_retry_setting_selects_failures(server, tmp_path):
    folder = corpus(tmp_path / "c", TEXTS)
    run(server, folder, tmp_path / "w")
    for retry, asked in (("never", 0), ("errors", 1), ("all", 3)):
        server.asked.clear()
        result = run(server, folder, tmp_path / "w", retry=retry)
        assert len(server.asked) == asked and result["failed"] == 2
    server.answer = lambda text, wants: ('{"triples": [["a", "b", "c"]]}', "stop")
    result = run(server, folder, tmp_path / "w")
    assert result["failed"] == 1 and triples(tmp_path / "w", ["p5"])[1] == {"p5": "ok"}


def test_extract_failure_is_not_retried_in_same_run(server, tmp_path):
    run(server, corpus(tmp_path / "c", TEXTS), tmp_path / "w")
    server.asked.clear()
    more = {"n1": "Osk refused Ule.", **TEXTS, "n2": "Ule joins Osk."}
    result = run(server, corpus(tmp_path / "c", more), tmp_path / "w", block=1)
    assert (result["extracted"], result["left"], result["failed"]) == (3, 0, 3)
    assert len(server.asked) == 4


def test_extract_update_equals_new_extraction(server, tmp_path):
    old = {**TEXTS, "q1": "Ule joins Osk.", "q2": "Tarn joins Osk."}
    new = {
        "n1": "Osk joins Brum.",
        **{name: text for name, text in TEXTS.items() if name != "p0"},
        "q2": "Tarn leaves Osk.",
        "n2": "It says nothing.",
    }
    run(server, corpus(tmp_path / "c", old), tmp_path / "w", block=3)
    server.asked.clear()
    result = run(server, corpus(tmp_path / "c", new), tmp_path / "w", block=3, retry="never")
    texts = {text.split("\n")[0] for _, text in server.asked}
    assert texts == {"Title: n1", "Title: q2", "Title: n2"}  # only new and changed passages
    assert (result["extracted"], result["deleted"], result["reused"]) == (3, 2, 5)
    run(server, corpus(tmp_path / "c", new), tmp_path / "scratch")
    names = {**old, **new}
    assert triples(tmp_path / "w", names) == triples(tmp_path / "scratch", names)
    (old_rows, _), (new_rows, _) = content(tmp_path / "w"), content(tmp_path / "scratch")
    assert old_rows == new_rows


def test_extract_limit_keeps_other_passages(server, tmp_path):
    folder = corpus(tmp_path / "c", TEXTS)
    result = run(server, folder, tmp_path / "w", limit=2)
    assert (result["passages"], result["extracted"]) == (2, 2)
    result = run(server, folder, tmp_path / "w")
    assert (result["extracted"], result["reused"]) == (4, 2)
    server.asked.clear()
    result = run(server, folder, tmp_path / "w", limit=1)
    assert (result["passages"], result["deleted"]) == (6, 0) and not server.asked


def test_extract_other_model_needs_replace(server, tmp_path):
    folder = corpus(tmp_path / "c", {"p0": TEXTS["p0"]})
    run(server, folder, tmp_path / "w")
    with pytest.raises(
        UserError, match=r"started with model=\"m\", not \"n\"; set --config.replace=true"
    ):
        run(server, folder, tmp_path / "w", **{"extractor.model": "n"})
    result = run(server, folder, tmp_path / "w", replace=True, **{"extractor.model": "n"})
    assert result["extracted"] == 1 and result["passages"] == 1
    # The server reports the name of its only model.
    with pytest.raises(UserError, match='not "only"'):
        run(server, folder, tmp_path / "w", **{"extractor.model": None})


def test_extract_other_server_needs_replace(server, tmp_path):
    """Both servers name their model "only", so only the addresses distinguish them."""
    folder = corpus(tmp_path / "c", {"p0": TEXTS["p0"]})
    run(server, folder, tmp_path / "w", **{"extractor.model": None})
    run(server, folder, tmp_path / "named")
    with model_server() as other:
        with pytest.raises(UserError, match=r"extractor\.base_url=.*; set --config\.replace=true"):
            run(other, folder, tmp_path / "w", **{"extractor.model": None})
        assert run(other, folder, tmp_path / "named")["reused"] == 1
        assert not other.asked


def test_extract_other_settings_need_replace(server, tmp_path):
    folder = corpus(tmp_path / "c", {"p0": TEXTS["p0"]})
    run(server, folder, tmp_path / "w")
    num_requests = len(server.asked)
    for field, value in (
        ("entity_tokens", 9), ("triple_tokens", 9), ("constrained", True), ("grounded", True),
        ("extractor.extra_body", '{"top_k": 1}'), ("extractor.overflow", "truncate"),
        ("extractor.omit", ("temperature",)), ("extractor.server", "vllm"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=rf"with {field}=.*; set --config\.replace=true"):
            run(server, folder, tmp_path / "w", **{field: value})
    for field, value in (
        ("extractor.max_concurrency", 1), ("extractor.timeout", 9.0), ("extractor.max_retries", 1),
        ("extractor.api_key_env", "MINE"), ("block", 1), ("in_flight", 1),
    ):  # fmt: skip
        assert run(server, folder, tmp_path / "w", **{field: value})["reused"] == 1
    assert len(server.asked) == num_requests


def test_extract_old_store_needs_replace(server, tmp_path, monkeypatch):
    folder = corpus(tmp_path / "c", {"p0": TEXTS["p0"]})
    with monkeypatch.context() as patch:
        early = {"model": "m", **extraction.extractor_version()}
        patch.setattr(extraction, "extractor_identity", lambda *_: early)
        run(server, folder, tmp_path / "w")
    assert triples(tmp_path / "w", ["p0"])[1] == {"p0": "ok"}  # it can still be read
    with pytest.raises(
        UserError, match="was written by an earlier version, .*; set --config.replace=true"
    ):
        run(server, folder, tmp_path / "w")


def test_extract_other_parser_needs_replace(server, tmp_path, monkeypatch):
    folder = corpus(tmp_path / "c", {"p0": TEXTS["p0"]})
    with monkeypatch.context() as patch:  # a store without a version
        patch.setattr(extraction, "extractor_version", lambda *_: {"prompt": prompts.prompt_hash()})
        run(server, folder, tmp_path / "w")
    for fields in ({}, {"estimate_only": True}):
        with pytest.raises(UserError, match=r"parser=null, not \d+; set --config.replace=true"):
            run(server, folder, tmp_path / "w", **fields)
    assert run(server, folder, tmp_path / "w", replace=True)["extracted"] == 1
    assert run(server, folder, tmp_path / "w")["reused"] == 1
    monkeypatch.setattr(extraction, "PARSER", extraction.PARSER + 1)
    with pytest.raises(UserError, match=rf"parser={extraction.PARSER - 1}, not"):
        run(server, folder, tmp_path / "w")
    assert run(server, folder, tmp_path / "w", replace=True)["extracted"] == 1


def test_extract_selected_questions_reads_only_their_contexts(server, tmp_path):
    folder = corpus(tmp_path / "c", TEXTS)
    contexts = {"q0": ["p0", "p3"], "q1": ["p3", "p1"], "q2": ["p4"]}
    rows = [
        {"id": name, "question": "?", "answers": ["a"], "split": "dev", "context": ids}
        for name, ids in contexts.items()
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(server, folder, tmp_path / "w", limit=1)
    fields = {"data.corpus": "selected_questions", "data.split": "dev", "data.limit": 2}
    server.asked.clear()
    result = run(server, folder, tmp_path / "w", **fields)
    assert {text.split("\n")[0] for _, text in server.asked} == {"Title: p1", "Title: p3"}
    assert (result["passages"], result["reused"], result["deleted"]) == (3, 1, 0)
    estimated = run(server, folder, tmp_path / "e", estimate_only=True, **fields)
    assert estimated["passages"] == 3
    # Then the rest of the corpus is extracted, and no passage twice.
    assert run(server, folder, tmp_path / "w")["reused"] == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data.limit": 2}, "config.data.limit selects questions, .*corpus=selected_questions"),
        ({"data.corpus": "all"}, "config.data.corpus='all' is not one of ircot_full"),
        ({"data.corpus": "selected_questions", "import_openie": "x"}, "imports the complete file"),
    ],
)
def test_extract_bad_selection_is_refused(server, tmp_path, fields, words):
    folder = corpus(tmp_path / "c", TEXTS)
    question = {"id": "q", "question": "?", "answers": ["a"], "split": "dev", "context": ["p0"]}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")
    with pytest.raises(UserError, match=words):
        run(server, folder, tmp_path / "w", **fields)


def test_extract_too_few_triples_stops_run(server, tmp_path):
    texts = {f"p{i}": "It says nothing." if i < 3 else "prose" for i in range(9)}
    texts["p0"] = TEXTS["p0"]
    folder = corpus(tmp_path / "c", texts)
    fields = {"min_passages": 5, "extractor.max_concurrency": 1}
    with pytest.raises(
        UserError, match=r"4 of 5 passages gave no triples .*'\{\"triples\": \[\]\}'"
    ):
        run(server, folder, tmp_path / "w", max_empty_share=0.5, **fields)
    num_requests = len(server.asked)
    with pytest.raises(UserError, match="gave no triple"):
        run(server, folder, tmp_path / "w", max_empty_share=0.5, **fields)
    result = run(server, folder, tmp_path / "w", max_empty_share=0.9, **fields)
    assert result["complete"] and (result["ok"], result["empty"]) == (1, 2)
    assert len(server.asked) == len(set(server.asked)) and num_requests <= 18  # each only once
    few = corpus(tmp_path / "few", {"p1": "It says nothing."})
    assert run(server, few, tmp_path / "v", max_empty_share=0.5, **fields)["empty"] == 1


def test_extract_estimate_comes_first(server, tmp_path, capsys):
    folder = corpus(tmp_path / "c", TEXTS)
    result = run(server, folder, tmp_path / "w", estimate_only=True)
    assert not server.asked and not list((tmp_path / "w").iterdir())
    assert result["passages"] == 6 and not result["complete"] and result["seconds"] > 0
    done = run(server, folder, tmp_path / "w")
    assert done["prompt_tokens"] <= result["prompt_tokens"]
    assert "estimate: 6 passages: at most about" in capsys.readouterr().err
    assert run(server, folder, tmp_path / "w", estimate_only=True)["passages"] == 1  # p5 again


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": "a", "title": "", "text": "x"}\n{"id": "a", "title": "", "text": "y"}\n',
         "corpus.jsonl:2: field 'id' repeats the id 'a'"),
        ('{"id": "a", "title": "", "text": "x"}\n{"id": "b", "tit', "corpus.jsonl:2: invalid"),
        ('{"id": "a", "title": ""}\n', "corpus.jsonl:1: field 'text' is missing"),
        ("", "corpus.jsonl is empty"),
        (None, "corpus.jsonl does not exist"),
    ],
)  # fmt: skip
def test_extract_broken_corpus_is_refused(server, tmp_path, content, message):
    (tmp_path / "c").mkdir()
    if content is not None:
        (tmp_path / "c" / "corpus.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        run(server, tmp_path / "c", tmp_path / "w")
    assert not server.asked


@pytest.mark.parametrize(
    ("field", "value"),
    [("block", 0), ("retry", "some"), ("max_empty_share", 1.5), ("limit", -1),
     ("entity_tokens", 0), ("data.dir", "/nowhere")],
)  # fmt: skip
def test_extract_bad_settings_are_refused(server, tmp_path, field, value):
    folder = corpus(tmp_path / "c", TEXTS)
    with pytest.raises(UserError, match=field if field != "data.dir" else "/nowhere"):
        run(server, folder, tmp_path / "w", **{field: value})
