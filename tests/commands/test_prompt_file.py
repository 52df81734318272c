"""``config.prompt_file`` and ``config.export_prompts`` in every command that has them."""

import json
import pathlib
import runpy
import tomllib

import pytest

import cirag_jax
from cirag_jax import cli
from cirag_jax.commands import answer as answer_command
from cirag_jax.commands import latency, opening, task
from cirag_jax.commands.pool import Pool
from cirag_jax.config_files import load_config
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.errors import UserError
from cirag_jax.methods.common import own_prompts
from cirag_jax.models.io import workdir as workdir_lib
from cirag_jax.types import Dataset
from tests.commands import extracting, model_server

_ROOT = pathlib.Path(__file__).resolve().parents[2]
OWN = """
[reader.question]
system = "Reply to the {kind}."
fields = {question = "Q:", answer = "A:"}
"""


def reply(text, wants_triples):
    return (f"A: {len(text)}" if text.startswith("Q: ") else f"Answer: {len(text)}"), "stop"


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
    """Runs a command with a server; returns its exit code, result and stderr."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(script, config, *arguments):
        main = runpy.run_path(str(_ROOT / "launch" / script))["main"]
        argv = [script, f"--config={_ROOT / 'configs' / config}", *arguments]
        with pytest.raises(SystemExit) as end:
            cli.run(main, str(_ROOT / "configs" / config), argv)
        out, err = capsys.readouterr()
        return end.value.code, json.loads(out) if out else None, err

    return run


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return path


def flags(server, *more, role="reader"):
    values = {"backend": "openai", "base_url": server.url, "model": "m", "max_retries": 0}
    own = [f"--config.{role}.{name}={value}" for name, value in values.items()]
    return [*own, *(f"--config.{override}" for override in more)]


def asked(server):
    return [text for _, text in server.asked]


def test_answer_prompt_file_reaches_the_model_and_is_part_of_the_identity(command, file, tmp_path):
    def answer(*more):
        workdir = f"--workdir={tmp_path / 'w'}"
        return command("answer.py", "methods/direct.py", *flags(server, *more), workdir)

    with model_server.model_server(reply) as server:
        code, result, err = answer("data.limit=2", f"prompt_file={file}")
        assert code == 0 and result["answered"] == 2, err
        assert len(asked(server)) == 2 and all(text.startswith("Q: ") for text in asked(server))
        first = (tmp_path / "w" / "predictions.jsonl").read_text()
        assert all(json.loads(line)["answer"].isdigit() for line in first.splitlines())
        file.write_text("# A comment changes nothing.\n" + OWN)
        code, result, err = answer("data.limit=2", f"prompt_file={file}")
        assert code == 0 and len(asked(server)) == 2, err
        for change in ("Reply to", '"Q:"', '"A:"'):
            file.write_text(OWN.replace(change, f"{change[:-1]}x{change[-1]}"))
            code, _, err = answer("data.limit=2", f"prompt_file={file}")
            assert code == 2 and "other prompts (config.prompt_file has changed)" in err
        code, _, err = answer("data.limit=2")
        assert code == 2 and "was started with prompt_file, which is missing now" in err
        assert len(asked(server)) == 2


def test_answer_without_prompt_file_then_with_one_is_refused(command, file, tmp_path):
    arguments = ["--config.data.limit=1", f"--workdir={tmp_path / 'w'}"]
    with model_server.model_server(reply) as server:
        code, _, err = command("answer.py", "methods/direct.py", *flags(server), *arguments)
        assert code == 0, err
        more = [*flags(server, f"prompt_file={file}"), *arguments]
        code, _, err = command("answer.py", "methods/direct.py", *more)
    assert code == 2 and "was started with no prompt_file; use another --workdir" in err


@pytest.mark.parametrize(
    ("script", "config", "names"),
    [
        ("answer.py", "methods/cirag.py:paper", ["integrator", "reader.triple"]),
        ("answer.py", "methods/c2rag.py:paper", ["planner", "planner.fill", "reader.blocks"]),
        ("distill.py", "trajectories.py:paper", ["integrator", "reader.triple"]),
        ("extract.py", "extract.py:cirag", ["extractor.entities", "extractor.triples"]),
        ("extract.py", "extract.py:kirag", ["extractor"]),
    ],
)
def test_export_prompts_writes_a_file_and_nothing_else(command, script, config, names, tmp_path):
    file, workdir = tmp_path / "ours.toml", tmp_path / "w"
    arguments = [f"--config.export_prompts={file}", f"--workdir={workdir}"]
    code, result, err = command(script, config, *arguments)
    assert code == 0 and result["file"] == str(file), err
    assert result["prompts"][: len(names)] == names
    assert list(tomllib.loads(file.read_text()))[0] == names[0].partition(".")[0]
    assert not (workdir / "result.json").exists()
    code, _, err = command(script, config, *arguments)
    assert code == 2 and "exists; choose another name" in err


@pytest.mark.parametrize(
    ("path", "message"),
    [("ours.txt", "must end in .toml"), ("no/ours.toml", "is not a folder")],
)
def test_export_prompts_bad_path_is_refused(command, tmp_path, path, message):
    arguments = [f"--config.export_prompts={tmp_path / path}", f"--workdir={tmp_path / 'w'}"]
    code, _, err = command("extract.py", "extract.py", *arguments)
    assert code == 2 and message in err and path in err


def test_extract_prompt_file_reaches_the_model_and_the_identity(tmp_path):
    folder = extracting.corpus(tmp_path / "data", {"p": "Ule feeds Tarn."})
    file = tmp_path / "own.toml"
    file.write_text(
        '[extractor.triples]\nsystem = "S"\n[extractor.triples.fields]\n'
        'title = "About:"\ntext = "Text:"\nentities = "Named entities:"\ntriples = "facts"\n'
    )

    def respond(text, wants_triples):
        found = model_server.rules(text, wants_triples)
        assert not isinstance(found, int)
        answer, reason = found
        return answer.replace('"triples"', '"facts"'), reason

    with model_server.model_server(respond) as server:
        result = extracting.run(server, folder, tmp_path / "w", prompt_file=str(file))
        assert (result["triples"], result["failed"]) == (1, 0)
        entities, triples = asked(server)
        assert entities.startswith("Title: p") and triples.startswith("About: p")
        with pytest.raises(UserError, match="was started with other content of prompt"):
            extracting.run(server, folder, tmp_path / "w")
        file.write_text(file.read_text().replace("About:", "On:"))
        with pytest.raises(UserError, match="set --config.replace=true to extract again"):
            extracting.run(server, folder, tmp_path / "w", prompt_file=str(file))
        file.write_text(file.read_text().replace("On:", "About:").replace("facts", "triples"))
        with pytest.raises(UserError, match="was started with other content of prompt"):
            extracting.run(server, folder, tmp_path / "w", prompt_file=str(file))
        file.write_text("[reader]\nsystem = ''")
        with pytest.raises(UserError, match=r"\[reader\] is not a prompt of extract.py; its"):
            extracting.run(server, folder, tmp_path / "w", prompt_file=str(file))


def test_extract_prompt_file_edited_during_the_run_is_ignored(tmp_path):
    texts = {"p": "Ule feeds Tarn.", "q": "Tarn feeds Ule."}
    folder, file = extracting.corpus(tmp_path / "data", texts), tmp_path / "own.toml"
    file.write_text(
        '[extractor.entities]\nsystem = "S"\n[extractor.entities.fields]\n'
        'title = "About:"\ntext = "Text:"\nnamed_entities = "named_entities"\n'
    )

    def respond(text, wants_triples):
        file.write_text(file.read_text().replace("About:", "On:"))
        return model_server.rules(text, wants_triples)

    with model_server.model_server(respond) as server:
        extracting.run(server, folder, tmp_path / "w", prompt_file=str(file), block=1)
        assert [text.partition(" ")[0] for text in asked(server)] == ["About:", "Title:"] * 2


def test_session_prompt_file_reaches_the_model(file):
    file.write_text('[reader.documents]\nsystem="S"\nfields={question = "Q:", answer = "A:"}')
    with model_server.model_server(reply) as server:
        settings = dict(flag.removeprefix("--config.").split("=") for flag in flags(server))
        settings |= {"prompt_file": str(file), "retriever.kind": "bm25"}
        with cirag_jax.Cirag.open(
            "", method="native_rag", documents=["Ule feeds Tarn."], settings=settings
        ) as cirag:
            assert cirag.answer("What feeds Tarn?").text == str(len("Q: What feeds Tarn?"))


def test_latency_prompt_file_reaches_the_model(file, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with model_server.model_server(reply) as server, Pool() as pool:
        more = flags(server, "data.limit=1", f"prompt_file={file}")
        planned = answer_command.plan_run(load_config("configs/methods/direct.py", more), pool)
        ids = [question.id for question in planned.task.questions]
        assert latency.measure(planned, ids, tmp_path, pool, None)
        assert asked(server)[0].startswith("Q: ")


def test_compare_prompt_file_of_one_method_is_refused_for_another(command, file, tmp_path):
    arguments = ["--config.methods=direct,native_rag", "--config.data.limit=1"]
    more = [f"--config.set=prompt_file={file}", f"--workdir={tmp_path / 'w'}"]
    code, _, err = command("compare.py", "compare.py", *arguments, *more)
    assert code == 2
    assert f"{file}: field reader.question is unknown; native_rag has [reader.passage]" in err


def test_distill_prompt_file_without_a_model_is_refused(command, file, tmp_path):
    arguments = [f"--config.prompt_file={file}", f"--workdir={tmp_path / 'w'}"]
    code, _, err = command("distill.py", "trajectories.py", *arguments)
    assert code == 2 and "config.prompt_file is not used with config.teacher.kind=annotat" in err


# ----------------------------------------------------------------------------------------- warnings


def planned_task(config, own):
    settings = task.method_settings(config)
    empty = Dataset("d", (), {}, {})
    return task.Task(settings.needs, empty, (), Corpus("none", ()), own)


def test_unused_prompt_is_warned_of(file, capsys):
    render = "[integrator]\nsystem='S'\n[integrator.fields]\nquery='a'\ncandidates='b'\n"
    file.write_text(render + "keep='c'\nnext='d'")
    overrides = [f"--config.prompt_file={file}", "--config.cirag.prompt_format=compact"]
    config = load_config("configs/methods/cirag.py:small", overrides)
    assert list(task.read_prompts(config, task.method_settings(config))) == ["integrator"]
    assert "[integrator] is not used, because cirag has only these roles" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("component", "backend", "warns"),
    [("reader", "jax", True), ("", "jax", False), ("reader", "openai", False)],
)
def test_adapter_trained_with_our_prompts_is_warned_of(
    file, capsys, monkeypatch, component, backend, warns
):
    monkeypatch.setattr(workdir_lib, "check_role", lambda *_: {"component": component})
    overrides = [f"--config.prompt_file={file}", "--config.reader.adapter=W"]
    config = load_config(
        "configs/methods/direct.py", [*overrides, f"--config.reader.backend={backend}"]
    )
    own = task.read_prompts(config, task.method_settings(config))
    opening.warn_of_own_prompts(config, planned_task(config, own))
    message = f"W was trained with this package's prompts, but {file} has others for the reader"
    assert (message in capsys.readouterr().err) == warns


def test_adapter_trained_with_other_own_prompts_is_warned_of(file, capsys, monkeypatch):
    config = load_config(
        "configs/methods/direct.py",
        [f"--config.prompt_file={file}", "--config.reader.adapter=W"],
    )
    own = task.read_prompts(config, task.method_settings(config))
    meta = {"component": "reader", "own_prompts": own_prompts.digest(own)}
    monkeypatch.setattr(workdir_lib, "check_role", lambda *_: meta)
    opening.warn_of_own_prompts(config, planned_task(config, own))
    assert "WARNING" not in capsys.readouterr().err
    opening.warn_of_own_prompts(config, planned_task(config, {}))
    assert (
        "W was trained with the prompts of a file, but this run has the package's"
        in capsys.readouterr().err
    )
    meta["own_prompts"] = "another"
    opening.warn_of_own_prompts(config, planned_task(config, own))
    assert f"the prompts of a file, but {file} has others for the reader" in capsys.readouterr().err
