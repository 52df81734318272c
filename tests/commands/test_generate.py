"""The generation command: strict prompts, order, resuming, budget, exit codes."""

import json
import pathlib
import sqlite3

import pytest

from cirag_jax import cli
from cirag_jax.commands import generate, identity
from cirag_jax.commands.generate import generate_file
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Generate, Message
from configs import generate as generate_config
from tests import tiny_decoder
from tests.llm.faulty_server import faulty_server

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with faulty_server() as running:
        yield running


def config_of(prompts, **fields):
    config = generate_config.get_config()
    config.prompts = str(prompts)
    config.update_from_flattened_dict(fields)
    return config.lock()


def served(running, prompts, **fields):
    return config_of(
        prompts,
        **{"backend": "openai", "base_url": running.url, "model": "m", "max_retries": 0, **fields},
    )


def line(name, text="", **fields):
    turns = [{"role": "user", "content": text or name}]
    return {"id": name, "messages": turns, **fields}


def write(path, *lines):
    path.write_text("".join(json.dumps(record) + "\n" for record in lines), encoding="utf-8")
    return path


def read(workdir):
    text = (workdir / "responses.jsonl").read_text(encoding="utf-8")
    return [json.loads(row) for row in text.splitlines()]


# ------------------------------------------------------------------------------------ through HTTP


def test_generate_responses_in_input_order(server, tmp_path):
    prompts = write(tmp_path / "p.jsonl", *(line(f"q{i}") for i in range(7)))
    server.script["q2"] = [400]
    result = generate_file(served(server, prompts, max_concurrency=4), tmp_path)
    rows = read(tmp_path)
    assert [row["id"] for row in rows] == [f"q{i}" for i in range(7)]
    assert [row["text"] for row in rows] == [f"echo q{i}" if i != 2 else "" for i in range(7)]
    assert set(rows[0]) == {"id", "text", "finish_reason", "usage", "error"}
    assert rows[0]["error"] is None and "400" in rows[2]["error"]
    expected = {
        "num_requests": 7,
        "resumed": 0,
        "failures": 1,
        "finish_reasons": {"stop": 6, "length": 0, "error": 1},
        "truncated": 0,
        "prompt_tokens": 60,
        "cached_tokens": 24,
        "generated_tokens": 30,
        "budget_exhausted": False,
        "backend": "openai",
        "model": "m",
    }
    assert {name: result[name] for name in expected} == expected
    assert result["tokens_per_second"] == pytest.approx(30 / result["seconds"])


def test_generate_all_fields_reach_server(server, tmp_path):
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q", "observation": " seen"},
        {"role": "assistant", "content": "so"},
    ]
    fields = {
        "max_tokens": 9,
        "temperature": 1,
        "top_p": 0.5,
        "seed": 4,
        "stop": "\n",
        "continue_final": True,
        "json_schema": {"type": "object"},
    }
    prompts = write(tmp_path / "p.jsonl", {"id": "a", "messages": turns, **fields}, line("b"))
    defaults = {"max_tokens": 5, "stop": ("x", "y"), "temperature": 0.5, "seed": 2}
    generate_file(served(server, prompts, server="vllm", max_concurrency=1, **defaults), tmp_path)
    first, second = server.bodies
    assert [m["content"] for m in first["messages"]] == ["s", "q seen", "so"]
    assert (first["max_tokens"], first["temperature"], first["top_p"]) == (9, 1.0, 0.5)
    assert (first["seed"], first["stop"], first["continue_final_message"]) == (4, ["\n"], True)
    assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (second["max_tokens"], second["temperature"], second["stop"]) == (5, 0.5, ["x", "y"])
    assert second["seed"] == 2 and "response_format" not in second


def test_generate_restart_sends_only_missing_requests(server, tmp_path, capfd):
    prompts = write(tmp_path / "p.jsonl", line("a"), line("b"), line("c"))
    server.script["b"] = [400]
    generate_file(served(server, prompts), tmp_path)
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:  # as after a kill
        lost = "c"
        for table, column in (("responses", "program"), ("programs", "id")):
            db.execute(f"DELETE FROM {table} WHERE {column} LIKE 'c@%'")
    db.close()
    server.bodies.clear()
    write(tmp_path / "p.jsonl", line("c"), line("new"), line("b"), line("a", "changed"))
    result = generate_file(served(server, prompts, max_retries=3, timeout=900.0), tmp_path)
    assert sorted(server.texts()) == sorted({"new", "b", "changed", lost} - {"a"})
    assert [(row["id"], row["text"]) for row in read(tmp_path)] == [
        ("c", "echo c"),
        ("new", "echo new"),
        ("b", "echo b"),
        ("a", "echo changed"),
    ]
    assert result["failures"] == 0 and result["num_requests"] == 4
    server.bodies.clear()
    again = generate_file(served(server, prompts), tmp_path)
    assert server.bodies == [] and again["resumed"] == 4
    assert again["generated_tokens"] == result["generated_tokens"]


def test_generate_other_settings_are_refused(server, tmp_path):
    prompts = write(tmp_path / "p.jsonl", line("a"))
    generate_file(served(server, prompts), tmp_path)
    before = (tmp_path / "responses.jsonl").read_bytes()
    with pytest.raises(UserError, match='started with model="m", not "n"'):
        generate_file(served(server, prompts, model="n"), tmp_path)
    assert (tmp_path / "responses.jsonl").read_bytes() == before
    generate_file(served(server, prompts, max_tokens=9), tmp_path)  # another request
    assert len(server.bodies) == 2
    (tmp_path / "journal.sqlite").write_text("{}\n" * 9)
    with pytest.raises(UserError, match="journal.sqlite cannot be used: file is not a database"):
        generate_file(served(server, prompts), tmp_path)
    (tmp_path / "journal.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="journal.jsonl was written by an earlier version"):
        generate_file(served(server, prompts), tmp_path)


def test_generate_budget_spans_restarts(server, tmp_path, capfd):
    prompts = write(tmp_path / "p.jsonl", *(line(f"q{i}", max_tokens=20) for i in range(4)))
    fields = {"budget_tokens": 50, "max_concurrency": 1}
    result = generate_file(served(server, prompts, **fields), tmp_path)
    # Each request reserves 10 + 20 tokens and uses 15.
    assert result["budget_exhausted"] and result["finish_reasons"]["stop"] == 2
    assert "not sent: the budget" in read(tmp_path)[3]["error"]
    assert "estimate: 4 requests: at most about 40 prompt tokens and 80" in capfd.readouterr().err
    again = generate_file(served(server, prompts, **fields), tmp_path)
    assert again["budget_exhausted"] and len(server.bodies) == 2
    more = generate_file(served(server, prompts, **{**fields, "budget_tokens": 80}), tmp_path)
    assert not more["budget_exhausted"] and more["failures"] == 0 and more["resumed"] == 2


def test_generate_only_model_of_server_needs_no_name(server, tmp_path):
    prompts = write(tmp_path / "p.jsonl", line("a"))
    server.models = ["llama"]
    result = generate_file(served(server, prompts, model=None), tmp_path)
    assert result["model"] == "llama" and server.bodies[0]["model"] == "llama"
    server.models = ["llama", "qwen"]
    with pytest.raises(UserError, match="model must be one of .*: llama, qwen"):
        generate_file(served(server, write(prompts, line("b")), model=None), tmp_path)


def test_generate_unnamed_models_of_two_servers_differ(server, tmp_path):
    """If the config names no model, the server's model name and its address identify the model."""
    prompts = write(tmp_path / "p.jsonl", line("a"))
    server.models = ["llama"]
    generate_file(served(server, prompts, model=None), tmp_path)
    generate_file(served(server, prompts, model=None, timeout=900.0), tmp_path)
    server.models = ["qwen"]
    with pytest.raises(UserError, match='started with model="llama", not "qwen"'):
        generate_file(served(server, prompts, model=None), tmp_path)
    with faulty_server() as other:
        other.models = ["llama"]
        with pytest.raises(UserError, match=f'with base_url="{server.url}", not "{other.url}"'):
            generate_file(served(other, prompts, model=None), tmp_path)
        assert not other.bodies and len(server.bodies) == 1
        # A named model is the same at every address, because jobs of a cluster move.
        blocks = [served(running, prompts, model="llama") for running in (server, other)]
        assert identity.of_language_model(blocks[0]) == identity.of_language_model(blocks[1])


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": []}, "field 'messages' is empty"),
        ({"messages": "hi"}, "field 'messages' must be a list"),
        ({"messages": [{"role": "user"}]}, r"field 'messages\[0\].content' is missing"),
        ({"messages": [{"role": "tool", "content": ""}]}, "must be one of system, user, assistant"),
        ({"messages": [{"role": "user", "content": "", "name": "x"}]}, "name' is unknown"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"id": 3}, "field 'id' must be a string, not an integer"),
        ({"id": ""}, "field 'id' is empty"),
        ({"id": "first"}, "repeats the id 'first'"),
        ({"max_tokens": 0}, "field 'max_tokens' must be at least 1"),
        ({"max_tokens": True}, "must be an integer, not a boolean"),
        ({"temperature": -1}, "field 'temperature' must not be neg"),
        ({"temperature": float("nan")}, r"invalid or truncated JSON \(invalid character"),
        ({"top_p": 0}, "field 'top_p' must be above 0"),
        ({"seed": 1 << 32}, "field 'seed' must be at most"),
        ({"stop": ["a", 3]}, r"field 'stop\[1\]' must be a string"),
        ({"stop": ""}, "empty string"),
        ({"json_schema": [1]}, "must be an object"),
        ({"json_schema": {"type": "strin"}}, "field 'json_schema': json_schema cannot"),
        ({"continue_final": True}, "needs a last message with the role 'assistant'"),
    ],
)
def test_generate_bad_line_is_named(tmp_path, record, words):
    prompts = write(tmp_path / "p.jsonl", line("first"), {**line("second"), **record})
    with pytest.raises(UserError, match=f"p.jsonl:2: .*{words}"):
        generate_file(config_of(prompts), tmp_path)
    assert not (tmp_path / "responses.jsonl").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"backend": "vllm"}, "backend='vllm' is not one of jax, openai, transformers"),
        ({"overflow": "drop"}, "error, truncate"),
        ({"base_url": "http://localhost/v1"}, "base_url needs backend=openai"),
        ({"temperature": -1.0}, "config: field 'temperature'"),
        ({"top_logprobs": 21}, "at most 20"),
        ({"batch_size": -1}, "batch_size"),
        ({"no_repeat_ngram_size": 1}, "no_repeat_ngram_size must be at least 2"),
        ({"backend": "openai", "adapter": "x"}, "backend=openai does not support adapter"),
        ({"backend": "openai", "extra_body": "[1]"}, "extra_body must be"),
        ({"backend": "openai", "base_url": None}, "OPENAI_API_KEY must contain"),
    ],
)
def test_generate_bad_config_is_named(tmp_path, monkeypatch, fields, words):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    prompts = write(tmp_path / "p.jsonl", line("a"))
    fields = (
        {"base_url": "http://localhost:1/v1", **fields} if "openai" in fields.values() else fields
    )
    with pytest.raises(UserError, match=words):
        generate_file(config_of(prompts, **fields), tmp_path)


def test_generate_key_in_place_of_variable_name_is_not_recorded(tmp_path, capsys):
    prompts = write(tmp_path / "p.jsonl", line("a"))
    key, workdir = "sk-test-0123456789", tmp_path / "w"
    argv = ["generate.py", f"--workdir={workdir}", f"--config.prompts={prompts}"]
    argv += ["--config.backend=openai", f"--config.api_key_env={key}"]
    with pytest.raises(SystemExit) as done:
        cli.run(generate_file, "configs/generate.py", argv)
    out, err = capsys.readouterr()
    assert done.value.code == 2 and "not a key" in err
    assert key not in out + err
    assert not any(key in path.read_text() for path in workdir.iterdir())


# ------------------------------------------------------------------------------------- as commands


def test_generate_bad_prompts_exit_code_2(tmp_path, command):
    prompts = write(tmp_path / "p.jsonl", {"id": "a"})
    done = command("generate.py", f"--config.prompts={prompts}", f"--workdir={tmp_path / 'w'}")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip().endswith("p.jsonl:1: field 'messages' is missing.")
    assert "Traceback" not in done.stderr


def test_generate_full_disk_keeps_all_answers(server, tmp_path, command):
    prompts = write(tmp_path / "p.jsonl", *(line(f"q{i}", f"q{i}" + "x" * 3000) for i in range(40)))
    arguments = (
        "generate.py", "--config.backend=openai", f"--config.base_url={server.url}",
        "--config.model=m", "--config.max_concurrency=2", "--config.max_retries=0",
        f"--config.prompts={prompts}", f"--workdir={tmp_path / 'w'}",
    )  # fmt: skip
    done = command(*arguments, hooks=[["limit_files", 600_000]])
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert "Traceback" not in done.stderr
    assert "progress is saved" in done.stderr.splitlines()[-1]
    recorded = _recorded(tmp_path / "w")
    num_requests = len(server.bodies)
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finish_reasons"] == {"stop": 40, "length": 0, "error": 0}
    assert len(server.bodies) - num_requests == 40 - recorded
    assert 0 < recorded < 40


def _recorded(workdir):
    """Counts the responses in the journal."""
    with sqlite3.connect(workdir / "journal.sqlite") as db:
        (count,) = db.execute("SELECT COUNT(*) FROM responses").fetchone()
    db.close()
    return count


def test_generate_llguidance_version_changes_constrained_programs(monkeypatch):
    turns = (Message("user", "who is it?"),)
    plain, held = Generate(turns), Generate(turns, json_schema={"enum": ["the mill"]})

    def names():
        cases = ((held, True), (held, False), (plain, True))
        return [generate._program("a", request, is_local) for request, is_local in cases]

    old = names()
    monkeypatch.setattr(generate, "of_packages", lambda name: {name: "0.1"})
    assert [new != one for new, one in zip(names(), old, strict=True)] == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "transformers"])
def test_generate_command_with_local_model(tmp_path, backend, command):
    if backend == "transformers":
        pytest.importorskip("torch")
    model = tiny_decoder.folder(tmp_path / "model")
    prompts = write(
        tmp_path / "p.jsonl",
        line("a", "where was the weaver born?", max_tokens=6),
        line("b", "who is it?" * 99),
        line("c", "who is it?", json_schema={"enum": ["the mill"]}),
        {
            "id": "d",
            "messages": [{"role": "user", "content": "q", "observation": " the town" * 400}],
        },
    )
    fields = ["--config.overflow=truncate", "--config.logprobs", "--config.max_tokens=20"]
    arguments = (f"--config.prompts={prompts}", f"--config.model={model}", *fields)
    done = command(
        "generate.py", f"--config.backend={backend}", f"--workdir={tmp_path / 'w'}", *arguments
    )
    assert done.returncode == 0, done.stderr
    result, rows = json.loads(done.stdout), read(tmp_path / "w")
    assert [row["id"] for row in rows] == ["a", "b", "c", "d"]
    assert (result["num_requests"], result["failures"], result["truncated"]) == (4, 1, 1)
    assert "fit" in rows[1]["error"] and "1 of 4 requests failed" in done.stderr
    assert json.loads(rows[2]["text"]) == "the mill"
    for row in (rows[0], rows[2], rows[3]):
        assert len(row["tokens"]) == row["usage"]["generated_tokens"]
        assert all(token["logprob"] <= 0 for token in row["tokens"])
    assert "tokens/s" in done.stderr and result["tokens_per_second"] > 0
    assert json.loads((tmp_path / "w" / "result.json").read_text()) == result
