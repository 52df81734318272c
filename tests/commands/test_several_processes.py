"""Commands in several processes, which must give the same results as in one."""

import json
import pathlib
import runpy

import jax
import pytest

from cirag_jax import cli, processes
from cirag_jax.commands import opening, task
from cirag_jax.errors import UserError
from cirag_jax.runtime.records import read_records
from cirag_jax.runtime.run import run_jobs
from cirag_jax.runtime.scheduler import Job
from cirag_jax.triples.store import TripleStore
from tests import tiny
from tests.answering import VOLATILE, arguments, journalled, lines, tiny_folders
from tests.commands.model_server import model_server

pytestmark = pytest.mark.slow

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def run_command(name, argv, capsys):
    """Runs a command in this process; returns the exit code, the result and stderr."""
    main = runpy.run_path(str(_ROOT / "launch" / f"{name}.py"))["main"]
    with pytest.raises(SystemExit) as end:
        cli.run(main, "configs/methods/cirag.py", [f"{name}.py", *map(str, argv)])
    out, err = capsys.readouterr()
    return end.value.code, json.loads(out) if out else None, err


class SimulatedProcesses:
    """Simulates the processes of a run, one after the other."""

    def __init__(self, monkeypatch, workdir):
        self.workdir, self.asked, self.here = workdir, [], 0
        monkeypatch.setattr(jax, "process_count", lambda: 3)
        monkeypatch.setattr(jax, "process_index", lambda: self.here)
        monkeypatch.setattr(processes, "together", lambda work: work())
        monkeypatch.setattr(processes, "check_equal", lambda fields: None)

    def job(self, name):
        def program():
            self.asked.append(name)
            return name
            yield

        return Job(name, {"id": name}, program)

    def run(self, names, stopped=()):
        """Runs the first process last, because it merges."""
        jobs = [self.job(name) for name in names]
        for self.here in (2, 1, 0):
            until = 0.0 if self.here in stopped else None
            found = run_jobs(jobs, lambda *_: {}, self.workdir, {}, 4, 0.0, until)
            assert (found is None) == (self.here > 0)
        assert found is not None
        return found


NAMES = [f"question {index}" for index in range(40)]


def test_run_jobs_selection_does_not_move_questions(tmp_path, monkeypatch):
    simulated = SimulatedProcesses(monkeypatch, tmp_path)
    for chosen in (NAMES[:30], NAMES[4:]):
        found = simulated.run(chosen)
        assert found.complete and set(found.records) == set(chosen)
    assert sorted(simulated.asked) == sorted(NAMES)  # each question is answered once
    assert len(read_records(tmp_path / "journal.sqlite")) == len(NAMES)


def test_run_jobs_is_complete_only_if_all_processes_are(tmp_path, monkeypatch):
    simulated = SimulatedProcesses(monkeypatch, tmp_path)
    found = simulated.run(NAMES, stopped=(1,))
    assert not found.complete and 0 < len(found.records) < len(NAMES)
    assert simulated.run(NAMES).complete
    order = [record.id for record in read_records(tmp_path / "journal.sqlite")]
    assert order == NAMES


def test_answer_two_processes_give_the_same_predictions(tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(_ROOT)
    folders, two = tiny_folders(tmp_path), tmp_path / "two"
    code, expected, err = run_command("answer", arguments(folders, tmp_path / "one"), capsys)
    assert code == 0 and expected, err
    completed = command.together("answer.py", *arguments(folders, two))
    assert [done.returncode for done in completed] == [0, 0] and completed[1].stdout == "", (
        completed
    )
    shares = [journalled(two, f"journal.{number}-of-2.sqlite") for number in (1, 2)]
    asked = [{program for program, _, _ in share} for share in shares]
    assert asked[0] | asked[1] == {f"q{i}" for i in range(8)} and not asked[0] & asked[1]
    assert asked[0] and asked[1]
    name = "predictions.jsonl"
    assert (two / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert len(lines(two / name)) == 8
    result = json.loads(completed[0].stdout)
    volatile = {*VOLATILE, "cached_tokens"}  # depends on the prefixes that a process has cached
    for name in expected.keys() - volatile:
        assert result[name] == expected[name], name
    # The merged journal can be read, but not resumed with another number of processes.
    assert (two / "journal.sqlite").exists()
    code, _, err = run_command("answer", arguments(folders, two), capsys)
    assert code == 2, err
    assert "two was started by 2 processes, not 1; resume it with the same number" in err


def test_extract_two_processes_give_the_same_triples(tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(_ROOT)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    data, places = tiny.dataset_folder(tmp_path / "data"), [tmp_path / "one", tmp_path / "two"]
    with model_server() as server:
        given = [
            f"--config.data.dir={data}", "--config.extractor.backend=openai",
            f"--config.extractor.base_url={server.url}", "--config.extractor.model=m",
            "--config.block=5", "--config=configs/extract.py",
        ]  # fmt: skip
        code, expected, err = run_command("extract", [*given, f"--workdir={places[0]}"], capsys)
        assert code == 0 and expected and expected["extracted"] == 24, err
        completed = command.together("extract.py", *given, f"--workdir={places[1]}")
        assert [done.returncode for done in completed] == [0, 0] and completed[1].stdout == "", (
            completed
        )
        asked = len(set(server.asked))
        assert len(server.asked) == 2 * asked  # no passage in both processes
        code, _, err = run_command("extract", [*given, f"--workdir={places[1]}"], capsys)
        assert code == 2, err
        assert "two was started by 2 processes, not 1; resume it with the same number" in err
    result = json.loads(completed[0].stdout)
    for name in expected.keys() - {"seconds", "store"}:
        assert result[name] == expected[name], name
    shares = []
    for number in (1, 2):
        with TripleStore.open(places[1] / f"triples.{number}-of-2.sqlite") as store:
            shares.append(len(store))
    assert min(shares) > 0 and sum(shares) == 24
    found = []
    for place in places:
        with TripleStore.open(place) as store:
            found.append(store.triples(store.passage_ids()))
    assert found[0] == found[1] and len(found[0]) == 24


def test_check_budget_of_several_processes_is_refused(monkeypatch):
    config = task.method_config("direct", "", ["reader.budget_tokens=9"])
    needs = task.method_settings(config).needs
    with pytest.raises(UserError, match=r"config\.in_flight=0 must be at least 1"):
        opening.check(task.method_config("direct", "", ["in_flight=0"]), needs)
    opening.check(config, needs)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"config\.reader\.budget_tokens works in one process"):
        opening.check(config, needs)
