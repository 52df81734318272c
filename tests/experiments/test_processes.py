"""Processes that run one command after another."""

from multiprocessing import connection

import pytest

from experiments.paths import processes

SCRIPT = """
import os, signal, sys
print(os.getpid(), os.getcwd(), *sys.argv[1:])
print("said", sys.argv[1], file=sys.stderr)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "broken":
    raise ValueError("no value")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def workers():
    with processes.Workers() as made:
        yield made


def run(workers, folder, argument):
    """Runs the script; returns the exit code, and what it printed."""
    (folder / "script.py").write_text(SCRIPT)
    output, errors = folder / f"{argument}.out", folder / f"{argument}.err"
    words = [str(folder / "script.py"), argument]
    command = workers.start(words, folder, output, errors)
    connection.wait([command.sentinel])
    return command.exitcode, output.read_text().split(), errors.read_text()


def test_workers_run_one_command_after_another(workers, tmp_path):
    code, (pid, folder, argument), errors = run(workers, tmp_path, "0")
    assert (code, folder, argument, errors) == (0, str(tmp_path), "0", "said 0\n")
    code, (second, _, argument), errors = run(workers, tmp_path, "3")
    assert (code, second, argument, errors) == (3, pid, "3", "said 3\n")
    code, (third, *_), errors = run(workers, tmp_path, "broken")
    assert (code, third) == (1, pid) and "ValueError: no value" in errors


def test_workers_report_a_killed_process_and_start_another(workers, tmp_path):
    code, (pid, *_), _ = run(workers, tmp_path, "killed")
    assert code == -9
    code, (other, *_), _ = run(workers, tmp_path, "0")
    assert code == 0 and other != pid


def test_workers_start_a_process_while_another_is_busy(workers, tmp_path):
    waiting = tmp_path / "wait.py"
    waiting.write_text("import sys; open(sys.argv[1]).read()")  # until the other end is opened
    fifo = tmp_path / "fifo"
    processes.os.mkfifo(fifo)
    busy = workers.start([str(waiting), str(fifo)], tmp_path, tmp_path / "o", tmp_path / "e")
    assert run(workers, tmp_path, "0")[0] == 0 and busy.exitcode is None
    fifo.write_text("")
    connection.wait([busy.sentinel])
    assert busy.exitcode == 0
