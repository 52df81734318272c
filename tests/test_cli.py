import errno
import fcntl
import importlib
import json
import logging
import math
import os
import pathlib
import re
import resource
import sys

import numpy as np
import pytest
from ml_collections.config_dict import placeholder

from cirag_jax import cli, config_files
from cirag_jax.errors import TryAgain, UserError
from tests.command_line import refused, runner, write_config


@pytest.fixture
def config_file(tmp_path):
    return write_config(tmp_path)


@pytest.fixture
def run(tmp_path, config_file, capsys):
    return runner(config_file, tmp_path / "work", capsys)


# ------------------------------------------------------------------------------------- success


def test_run_prints_and_saves_result(run, tmp_path):
    done = run("--config.train.steps=7")
    assert (done.code, json.loads(done.out)) == (0, {"steps": 7})
    assert json.loads((tmp_path / "work" / "result.json").read_text()) == {"steps": 7}
    assert done.seen[0].is_locked


def test_run_applies_presets_and_overrides(run, config_file):
    arguments = [f"--config={config_file}:paper", "--config.data.dir=D", "--config.train.steps", 3]
    arguments += ["--config.ks=(1,2,3)", "--config.quiet", "--config.train.learning_rate=1"]
    config = run(*arguments).seen[0]
    assert config.data.dir == "D"
    assert config.train.to_dict() == {"learning_rate": 1.0, "steps": 3}
    assert config.ks == (1, 2, 3)
    assert config.quiet is True
    assert run(f"--config={config_file}:paper").seen[0].train.learning_rate == 1e-5


def test_run_default_workdir_depends_on_the_question(run, tmp_path, monkeypatch):
    def extend(config):
        config.question = placeholder(str)

    monkeypatch.chdir(tmp_path)
    fields = {"extend": extend, "default_workdir": "all", "question_workdir": "one"}
    assert run(workdir=None, **fields).code == 0
    assert (tmp_path / "all" / "result.json").exists() and not (tmp_path / "one").exists()
    assert run("--config.question=Who?", workdir="given", **fields).code == 0
    assert (tmp_path / "given" / "result.json").exists() and not (tmp_path / "one").exists()
    assert run("--config.question=Who?", workdir=None, **fields).code == 0
    assert (tmp_path / "one" / "result.json").exists()
    assert "default all, or one with config.question" in run("--help", **fields).out


@pytest.mark.parametrize("word", ["null", "None"])
def test_override_null_unsets_optional_field(run, word):
    assert run("--config.data.dir=D", f"--config.data.dir={word}").seen[0].data.dir is None
    found = run(f"--config.ks={word}", f"--config.name={word}").seen[0]
    assert found.ks == () and found.name is None  # even if the config file had set it


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--config.data.dir=null", "--config.data.dir=D"], "D"),
        (["--config.data.dir=D", "--config.data.dir", "null"], None),
    ],
)
def test_override_field_twice_last_value_wins(run, given, expected):
    assert run(*given).seen[0].data.dir == expected


def test_override_several_values_of_a_tuple_are_joined(run):
    assert run("--config.ks=7", "--config.train.steps=1", "--config.ks", 9).seen[0].ks == (7, 9)


@pytest.mark.parametrize(
    ("file", "field", "unset"),
    [
        ("reader", "model.spec", ", or be null"),
        ("reader", "lora.start", ", or be null"),
        ("aligner", "model.spec", ""),
        ("generate", "model", ", or be null"),
        ("methods/direct", "reader.adapter", ", or be null"),
        ("methods/c2rag", "rankers.passages.model", ", or be null"),
        ("methods/cirag", "encoder.model", ""),
    ],
)
def test_override_empty_model_name_is_refused(repository, file, field, unset):
    told = f"config.{field}='' must name a model{unset}."
    with pytest.raises(UserError, match=f"^{re.escape(told)}$"):
        config_files.load_config(str(repository / f"configs/{file}.py"), [f"--config.{field}="])


def test_configs_offer_no_word_for_null():
    """``--config.x=none`` unsets x, so "none" must not be one of its values."""
    files = list((pathlib.Path(__file__).parents[1] / "configs").rglob("*.py"))
    assert len(files) > 10
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            _, _, comment = line.partition("#")
            offered = re.findall(r"(\w+) \||\| (\w+)", comment)
            words = {word for pair in offered for word in pair}
            assert not words & set(config_files._NULL_WORDS), f"{file}: {line}"


def test_result_nan_and_infinity_become_null(run):
    values = {
        "nan": math.nan,
        "inf": np.float32(np.inf),
        "array": np.array([1.5, np.nan]),
        "path": pathlib.Path("a/b"),
        "nested": ({"n": np.int64(3)},),
    }
    done = run(main=lambda config, workdir: values)
    assert json.loads(done.out) == {
        "nan": None,
        "inf": None,
        "array": [1.5, None],
        "path": "a/b",
        "nested": [{"n": 3}],
    }


def test_run_records_config_and_environment(run, tmp_path):
    run("--config.train.steps=7")
    config = json.loads((tmp_path / "work" / "config.json").read_text())
    assert config["train"]["steps"] == 7
    assert config["data"]["dir"] is None
    environment = json.loads((tmp_path / "work" / "environment.json").read_text())
    assert "--config.train.steps=7" in environment["command"]
    assert len(environment["devices"]) == 8
    assert environment["packages"]["jax"]


def test_record_refused_command_restores_old_record(run, tmp_path):
    def refuse(config, workdir):
        raise UserError("not with this config")

    record = tmp_path / "work" / "config.json"
    assert run("--config.train.steps=5", main=refuse).code == 2
    assert not record.exists()
    run("--config.train.steps=7")
    before = record.read_bytes()
    assert run("--config.train.steps=5", main=refuse).code == 2
    assert record.read_bytes() == before


def test_record_command_failing_later_keeps_own_record(run, tmp_path):
    def fail(config, workdir):
        (workdir / "journal.sqlite").write_text("an hour's work")
        raise UserError("the server is gone")

    assert run("--config.train.steps=5", main=fail).code == 2
    config = json.loads((tmp_path / "work" / "config.json").read_text())
    assert config["train"]["steps"] == 5 and (tmp_path / "work" / "environment.json").exists()


def test_record_is_restored_completely_or_not_at_all(run, tmp_path, monkeypatch):
    def refuse(config, workdir):
        def full(path, content):
            path.write_text(content.decode()[:9])
            raise OSError(errno.ENOSPC, "No space left on device", "config.json")

        monkeypatch.setattr(pathlib.Path, "write_bytes", full)
        raise UserError("not with this config")

    run("--config.train.steps=7")
    record = tmp_path / "work" / "config.json"
    assert run("--config.train.steps=5", main=refuse).code == 2
    assert (
        json.loads(record.read_text())["train"]["steps"] == 5
    )  # complete, not half of the old record
    assert not list(record.parent.glob("*.part"))


def test_default_config_found_from_other_directory(tmp_path, monkeypatch, capsys):
    inside = pathlib.Path(cli.__file__).parent.parent / "configs"
    if not (inside / "aligner.py").exists():
        pytest.skip("configs/aligner.py is not there")
    monkeypatch.chdir(tmp_path)
    assert config_files.load_config("configs/aligner.py").is_locked


def test_load_config_other_package_named_configs_is_kept(tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "configs"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("OWNER = 'user'\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("configs")
    assert config_files.load_config("configs/aligner.py").is_locked
    assert sys.modules["configs"] is module and module.OWNER == "user"


# ---------------------------------------------------------------------------------- user faults


def test_flag_unknown_is_refused_with_suggestion(run):
    assert refused(run("--wrokdir=x"), "unknown flag --wrokdir", "did you mean --workdir?")
    assert refused(run("--question=x"), "unknown flag --question; set fields of the config with")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("train.lerning_rate=1", "train.learning_rate"), ("learning_rate=1", "train.learning_rate")],
)
def test_override_unknown_key_is_refused_with_suggestion(run, given, meant):
    assert refused(run(f"--config.{given}"), "unknown config key", f"did you mean {meant}?")


def test_override_key_below_value_is_refused(run):
    assert refused(run("--config.train.steps.more=1"), "unknown config key 'train.steps.more'")


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--config.train.steps=0.5", "an integer"),
        ("--config.train.learning_rate=fast", "a number"),
        ("--config.quiet=perhaps", "true or false"),
        ("--config.train=3", "one of its fields"),
        ("--config.key=null", "expected a string, got 'null'"),
        ("--config.key=None", "expected a string, got 'None'"),
    ],
)
def test_override_wrong_type_is_refused(run, flag, expected):
    other = "--config.data.limit=4"
    assert refused(run(other, flag), flag, expected)
    assert refused(run(flag), flag, expected)


def test_argument_without_dashes_is_refused(run):
    assert refused(run("stray"), "unexpected argument 'stray'")


def test_config_file_missing_is_refused_with_suggestion(run, tmp_path):
    assert refused(run(f"--config={tmp_path}/none.py"), "there is no config file")
    (tmp_path / "cirag.py").touch()
    meant = f"did you mean {tmp_path}/cirag.py?"
    assert refused(run(f"--config={tmp_path}/cirga.py:small"), "there is no config file", meant)


def test_config_file_user_error_is_reported(run, config_file):
    assert refused(run(f"--config={config_file}:large"), "there is no preset 'large'")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def get_config(:\n", ["line 1", "SyntaxError"]),
        ("\nimport no_such_module\n", ["line 2", "no_such_module"]),
        ("x = 1\n", ["no get_config()"]),
        ("def get_config():\n    return 3\n", ["returned int"]),
        ("def get_config(preset):\n    return {'a': 1}[preset]\n", ["needs a preset"]),
    ],
)
def test_config_file_broken_is_reported_with_line(run, tmp_path, text, words):
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert refused(run(f"--config={path}"), str(path), *words)


def test_config_file_without_presets_refuses_preset(run, tmp_path):
    path = tmp_path / "plain.py"
    path.write_text("def get_config():\n    return 3\n")
    assert refused(run(f"--config={path}:quick"), "takes no preset")


@pytest.mark.parametrize("name", ["aligner", "extract", "grade", "trajectories", "methods/cirag"])
def test_preset_unknown_lists_presets(run, name):
    root = pathlib.Path(__file__).parents[1]
    done = run(f"--config={root}/configs/{name}.py:smal")
    assert refused(done, "there is no preset 'smal'; the presets are ")


def test_workdir_file_is_refused(run, tmp_path):
    (tmp_path / "notes").touch()
    assert refused(run(workdir=tmp_path / "notes"), "it is a file")


def test_workdir_missing_is_refused(run):
    assert refused(run(workdir=None), "--workdir=DIRECTORY is required")


def test_workdir_unwritable_is_refused(run, config_file):
    assert refused(run(workdir=config_file / "inside"), f"--workdir={config_file}/inside")


def test_shown_result_leaves_workdir_unchanged(run, tmp_path):
    def shown(config, workdir):
        return cli.PrintOnly(seconds=3)

    def contents():
        files = {path.name: path.read_bytes() for path in (tmp_path / "work").iterdir()}
        assert files.pop(cli.LOCK) == b""
        return files

    done = run("--config.train.steps=8", main=shown)
    assert (done.code, json.loads(done.out), contents()) == (0, {"seconds": 3}, {})
    run("--config.train.steps=7")
    before = contents()
    assert {"result.json", "config.json", "environment.json"} <= before.keys()
    done = run("--config.train.steps=8", main=shown)
    assert (done.code, json.loads(done.out), contents()) == (0, {"seconds": 3}, before)


def test_user_error_is_one_sentence(run, tmp_path):
    def main(config, workdir):
        raise UserError("corpus.jsonl, line 3:\n  'id' is missing")

    assert refused(run(main=main), "corpus.jsonl, line 3: 'id' is missing")
    assert not (tmp_path / "work" / "result.json").exists()


@pytest.mark.parametrize("flags", [["--process_id=1"], ["--num_processes=2", "--process_id=0"]])
def test_distributed_flags_must_be_given_together(run, flags):
    assert refused(run(*flags), "must be given together")


def test_process_id_out_of_range_is_refused(run):
    flags = ["--coordinator_address=localhost:1", "--num_processes=2", "--process_id=2"]
    assert refused(run(*flags), "--process_id=2 must be less than --num_processes=2")


# ------------------------------------------------------------------------------- other endings


def test_bug_has_traceback_and_exit_code_1(run):
    def main(config, workdir):
        raise ValueError("a bug")

    done = run(main=main)
    assert (done.code, done.out) == (1, "")
    assert "Traceback" in done.err and "ValueError: a bug" in done.err


def test_try_again_is_one_sentence_and_exit_code_75(run):
    def main(config, workdir):
        raise TryAgain("the gradient\nis not finite")

    done = run(main=main)
    assert done.code == 75 and done.err == "command.py: the gradient is not finite\n"


@pytest.mark.parametrize("resumes", [False, True])
def test_interrupt_message_and_exit_code_130(run, resumes):
    def main(config, workdir):
        raise KeyboardInterrupt

    done = run(main=main, resumes=resumes)
    hint = "; progress is saved; run the same command to resume" * resumes
    assert (done.code, done.out, done.err) == (130, "", f"command.py: interrupted{hint}\n")


def test_result_other_than_mapping_is_a_bug(run):
    assert run(main=lambda config, workdir: 3).code == 1


def test_lock_second_command_is_refused(run, tmp_path):
    inner = []

    def main(config, workdir):
        inner.append(run("--config.train.steps=9"))
        return {"steps": config.train.steps}

    assert run(main=main).code == 0
    assert refused(inner[0], f"--workdir={tmp_path / 'work'} is in use by command.py (process ")
    assert not inner[0].seen
    # The record of the first command is unchanged, and every error releases the lock.
    assert json.loads((tmp_path / "work" / "config.json").read_text())["train"]["steps"] == 5
    for error in (UserError("no"), ValueError("a bug"), KeyboardInterrupt()):

        def fails(config, workdir, error=error):
            raise error

        assert run(main=fails).code != 0
        assert run().code == 0
    assert run(main=main, workdir=tmp_path / "other").code == 0  # another folder is free


def test_output_control_characters_are_escaped(run):
    evil = "half \ud800 a pair, \x1b[2J, \x9b31m, \u202egnp.exe"

    def main(config, workdir):
        raise UserError(f"{evil} is no model")

    assert refused(run(main=main), "\\ud800", "\\x1b[2J", "\\x9b31m", "\\u202egnp.exe")
    done = run(main=lambda config, workdir: {"answer": evil})
    assert done.code == 0 and json.loads(done.out) == {"answer": evil}
    assert not set(done.out) & set("\ud800\x1b\x9b\u202e")
    last = logging.lastResort
    assert last and "\\x1b[2J" in last.format(logging.makeLogRecord({"msg": evil}))
    assert "\x1b" not in last.format(logging.makeLogRecord({"msg": evil}))

    def fails(config, workdir):
        raise RuntimeError(evil)

    done = run(main=fails)
    assert done.code == 1 and "Traceback" in done.err and "\x1b" not in done.err


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_full_disk_is_one_sentence(run, number):
    def main(config, workdir):
        raise OSError(number, os.strerror(number), "responses.jsonl")

    assert refused(run(main=main), "responses.jsonl cannot be written", os.strerror(number))


def test_too_long_file_name_is_one_sentence(run):
    def main(config, workdir):
        return {"size": pathlib.Path("a" * 3000).stat().st_size}

    done = run(main=main)
    assert refused(done, f"{'a' * 80}... is too long for a file name")
    assert "a" * 81 not in done.err


@pytest.mark.parametrize(("room", "name"), [(0, ".lock"), (60, "config.json")])
def test_full_disk_names_first_file(run, tmp_path, room, name):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        done = run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused(done, f"{tmp_path / 'work' / name} cannot be written: File too large")


def test_lock_file_may_contain_any_bytes(run, tmp_path):
    (tmp_path / "work").mkdir()
    with (tmp_path / "work" / cli.LOCK).open("wb") as held:
        held.write(b"\xff\x1b[2J")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        assert refused(run(), "is in use by \ufffd\\x1b[2J")


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_closed_pipe_is_no_error(run, monkeypatch, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as left, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", left)
        done = run(*arguments)
    assert done.code == 0 and "Traceback" not in done.err


def test_config_half_surrogate_is_refused(run):
    def extend(config):
        config.names = ("a", "half \ud800")

    assert refused(run(extend=extend), r"config.names=('a', 'half \ud800') is not valid UTF-8")


def test_argument_invalid_utf8_is_refused(run):
    assert refused(run("--config.data.dir=\udcff"), "not valid UTF-8")
