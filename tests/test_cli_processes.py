"""Commands in one process and in two: imports, output, locks."""

import fcntl
import json
import os
import socket
import subprocess
import sys

import pytest

from cirag_jax import cli
from tests.command_line import refused, runner, write_config


@pytest.fixture
def config_file(tmp_path):
    return write_config(tmp_path)


@pytest.fixture
def run(tmp_path, config_file, capsys):
    return runner(config_file, tmp_path / "work", capsys)


@pytest.fixture
def script(tmp_path, config_file, repository):
    path = tmp_path / "command.py"
    path.write_text(
        f'''"""Counts steps."""
import os
import sys

sys.path.insert(0, {str(repository)!r})
from cirag_jax import cli, config_files, processes


def main(config, workdir):
    print("noise of Python")
    os.system("echo noise of a child")
    return {{"jax": "jax" in sys.modules, "steps": config.train.steps}}


if __name__ == "__main__":
    cli.run(main, {str(config_file)!r})
'''
    )
    return path


def start(script, *arguments, **environment):
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=600,
    )


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("{} >&-", 1),
        ("{} 2>&-", 1),
        ("{} <&- >&- 2>&-", 1),
        ("{} | true", 1),
        ("{} 2>&1 | head -1", 9999),  # more than fits into a pipe
        ("{} --help | head -1", 0),
        ("{} --help >&-", 0),
    ],
)
def test_closed_streams_do_not_stop_a_command(tmp_path, config_file, repository, command, lines):
    """Without standard streams, the file would get number 1, and what a child prints."""
    path = tmp_path / "command.py"
    path.write_text(
        f'''"""Prints lines."""
import os, sys
sys.path.insert(0, {str(repository)!r})
from cirag_jax import cli, io

def main(config, workdir):
    with open(workdir / "own.txt", "w") as file:
        print("noise of Python")
        os.system("echo noise of a child")
        for line in range({lines}):
            io.say(f"line {{line}}")
        with io.bar("bar", 3):
            file.write("own")
    return {{"lines": {lines}}}

if __name__ == "__main__":
    cli.run(main, {str(config_file)!r})
'''
    )
    own = command.format(f"{sys.executable} {path} --workdir={tmp_path / 'work'}")
    done = subprocess.run(
        ["bash", "-c", f"{own}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    if lines:
        assert json.loads((tmp_path / "work" / "result.json").read_text()) == {"lines": lines}
        assert (tmp_path / "work" / "own.txt").read_text() == "own"


@pytest.mark.parametrize("ending", ["| true", ">&-"])
def test_dataset_commands_closed_output_is_no_error(repository, monkeypatch, ending):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command = f"{sys.executable} -m cirag_jax.datasets.demo {ending}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=repository, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


_EXPERIMENTS = """
import contextlib, os, pathlib, runpy, sys

files = pathlib.Path("experiments").rglob("*.py")
scripts = [p for p in files if '__name__ == "__main__"' in p.read_text()]
scripts = [p for p in scripts if p.name not in ("triple_text.py", "workload.py")]  # No --help.
assert len(scripts) > 15
for path in scripts:
    for is_closed in (False, True):
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.close(reading)
        os.close(writing)
        sys.stdout = own = None if is_closed else open(1, "w", closefd=False)
        if is_closed:
            os.close(1)
        sys.argv = [str(path), "--help"]
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(path), run_name="__main__")
        assert sys.stdout is own, path
        os.fstat(1)  # No other file gets this number.
        if own:
            own.close()  # Writes what is buffered.
"""


def test_experiments_closed_output_is_no_error(repository):
    done = subprocess.run(
        [sys.executable, "-c", _EXPERIMENTS],
        cwd=repository, env={**os.environ, "PYTHONPATH": "."}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def start_two(script, workdir, *flags, own=((), ())):
    """Starts a script as two processes of one run; ``own`` are additional flags of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(script), f"--workdir={workdir}", "--num_processes=2", *flags]
    command += [f"--coordinator_address=127.0.0.1:{port}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen([*command, f"--process_id={i}", *own[i]], **pipes) for i in range(2)]


def together(script, workdir):
    """Runs a script as two processes of one run; returns their exit codes and output."""
    processes = start_two(script, workdir)
    try:
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


def test_stdout_of_libraries_goes_to_stderr(script, tmp_path):
    done = start(script, f"--workdir={tmp_path / 'w'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == '{"jax": true, "steps": 5}\n'
    assert "noise of Python" in done.stderr and "noise of a child" in done.stderr


def test_help_does_not_import_jax(script, tmp_path):
    # Importing this jax fails.
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "jax.py").write_text("raise RuntimeError('jax was imported')")
    done = start(script, "--help", PYTHONPATH=str(tmp_path / "blocked"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Counts steps.")
    assert "--config.train.learning_rate=0.001\n" in done.stdout
    done = start(script, "--config.train.stops=1", PYTHONPATH=str(tmp_path / "blocked"))
    assert done.returncode == 2
    assert done.stderr.endswith("did you mean train.steps?\n")


def test_deterministic_sets_flags_before_jax_reads_them(script, tmp_path):
    text = script.read_text().replace('"jax" in sys.modules', "computed()")
    computed = """def computed():
    import jax
    return os.environ["XLA_FLAGS"] + str(jax.jit(lambda x: x + 1)(1))


def main("""
    script.write_text(text.replace("def main(", computed))
    given = "--xla_gpu_deterministic_ops=false"  # XLA uses the last value.
    done = start(script, "--deterministic", f"--workdir={tmp_path / 'w'}", XLA_FLAGS=given)
    expected = f"{given} --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
    assert json.loads(done.stdout)["jax"] == f"{expected}2", done.stderr
    environment = json.loads((tmp_path / "w" / "environment.json").read_text())
    assert environment["xla_flags"] == expected


_HELP = """
import contextlib, importlib, io, pathlib, runpy, sys

scripts = sorted(pathlib.Path("launch").glob("*.py"))
configs = [p for p in pathlib.Path("configs").rglob("*.py") if "def get_config" in p.read_text()]
helps = [[path] for path in scripts]
helps += [["launch/answer.py", f"--config={path}"] for path in configs]
assert len(scripts) > 9 and len(configs) > 20
for path, *config in helps:
    sys.argv = [str(path), *config, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        runpy.run_path(str(path), run_name="__main__")
    assert "usage: python" in out.getvalue() and "Fields of " in out.getvalue(), (path, config)
    assert not {"jax", "torch", "transformers"} & sys.modules.keys(), (path, config)
for path in sorted(pathlib.Path("cirag_jax").rglob("*.py")):
    if path.stem not in ("__main__", "transformers_backend"):
        importlib.import_module(".".join(path.with_suffix("").parts))
    assert "torch" not in sys.modules, path
"""


def test_commands_import_no_more_than_needed(repository):
    done = subprocess.run(
        [sys.executable, "-c", _HELP],
        cwd=repository, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_compilation_cache_receives_programs(script, tmp_path):
    slow = script.read_text().replace(
        'print("noise of Python")',
        "import jax; jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0); "
        "jax.jit(lambda x: x * 2)(3.0).block_until_ready()",
    )
    script.write_text(slow)
    cache = tmp_path / "cache"
    for _ in range(2):
        done = start(
            script,
            f"--workdir={tmp_path / 'w'}",
            CIRAG_JAX_CACHE=str(cache),
            JAX_COMPILATION_CACHE_DIR="",
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == "noise of a child\n"
    assert list(cache.glob("*/*"))


def test_lock_is_released_by_killed_process(run, script, tmp_path):
    script.write_text(
        script.read_text().replace('print("noise of Python")', "os.write(2, b'in'); input()")
    )
    command = [sys.executable, str(script), f"--workdir={tmp_path / 'work'}"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stderr and process.stderr.read(2) == b"in"
        assert refused(run(), f"in use by command.py (process {process.pid})")
        process.kill()
        process.wait()
        assert run().code == 0


def test_single_process_command_refuses_several(script, tmp_path):
    codes, outputs = together(script, tmp_path / "w")
    assert codes == [2, 2]
    for _, err in outputs:
        assert "command.py: this command runs in one process, not in 2" in err


def test_error_in_one_process_ends_all(script, tmp_path):
    """Both processes exit, although only one of them detects the error."""
    several = script.read_text().replace("config.py')", "config.py', several_processes=True)")
    script.write_text(several)
    (tmp_path / "w").mkdir()
    with (tmp_path / "w" / cli.LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        codes, outputs = together(script, tmp_path / "w")
    assert codes == [2, 2]
    assert "w is in use by another command" in outputs[0][1]
    assert "process 0 of 2 failed: --workdir=" in outputs[1][1]
    script.write_text(
        several.replace(
            'print("noise of Python")',
            """import jax
    assert processes.together(lambda: jax.process_index()) == jax.process_index()
    processes.together(lambda: {}["no key"] if jax.process_index() else None)""",
        )
    )
    codes, outputs = together(script, tmp_path / "w")
    assert codes == [2, 1]
    assert "process 1 of 2 failed: 'no key'" in outputs[0][1]


@pytest.mark.parametrize("stopped", [0, 1])
def test_stopped_process_ends_the_other(script, tmp_path, stopped):
    text = script.read_text().replace("config.py')", "config.py', several_processes=True)")
    script.write_text(
        text.replace(
            'print("noise of Python")',
            f"""import jax, signal
    processes.together(lambda: None)
    if jax.process_index() == {stopped}:
        os.kill(os.getpid(), signal.SIGSTOP)
    processes.together(lambda: None)""",
        )
    )
    started = start_two(script, tmp_path / "w", "--process_timeout=3")
    try:
        _, err = started[1 - stopped].communicate(timeout=600)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert started[1 - stopped].returncode < 0, err  # JAX aborts
    assert "result.json" not in os.listdir(tmp_path / "w")


def test_two_processes_print_one_result(script, tmp_path):
    script.write_text(
        script.read_text()
        .replace(
            '"jax": "jax" in sys.modules',
            '"sum": float(__import__("jax").jit(lambda x: x.sum())(total()))',
        )
        .replace(
            "def main(",
            """def total():
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("data",))
    local = np.full(1, jax.process_index() + 1.0)
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), local)


def main(""",
        )
    )
    script.write_text(
        script.read_text().replace("config.py')", "config.py', several_processes=True)")
    )
    codes, outputs = together(script, tmp_path / "w")
    assert codes == [0, 0], outputs
    assert json.loads(outputs[0][0]) == {"sum": 3.0, "steps": 5}
    assert outputs[1][0] == ""


# What one of two processes does while the other one is busy or waits, and the words of its message.
_FAILURES = {
    "config": ("pass", "train.steps"),
    "file": ("open('/missing')", "No such file or directory: '/missing'"),
    "bug": ("[][0]", "list index out of range"),
    "encoder": ("raise errors.UserError('the encoder differs')", "the encoder differs"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", _FAILURES)
@pytest.mark.parametrize(
    ("failing", "other"), [(0, "time.sleep(600)"), (1, "processes.together(lambda: None)")]
)
def test_error_of_one_process_ends_all_with_its_sentence(script, tmp_path, kind, failing, other):
    """Otherwise, the other process would wait for JAX's timeout of five minutes."""
    action, words = _FAILURES[kind]
    text = script.read_text().replace("config.py')", "config.py', several_processes=True)")
    text = text.replace("cli, config_files, processes", "cli, errors, processes")
    text = text.replace(
        'print("noise of Python")',
        f"""import time, jax
    if jax.process_index() == {failing}:
        {action}
    {other}""",
    )
    script.write_text(text)
    own = [(), ()]
    if kind == "config":
        own[failing] = ("--config.train.steps=x",)
    started = start_two(script, tmp_path / "w", own=own)
    try:
        outputs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    code = 1 if kind in ("file", "bug") else 2
    assert [process.returncode for process in started] == [code, code], outputs
    assert words in outputs[failing][1]
    (line,) = [line for line in outputs[1 - failing][1].splitlines() if words in line]
    assert line.startswith(f"command.py: process {failing} of 2 failed: ")
