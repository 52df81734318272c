"""The life cycle of a run: opening of handlers, unfinished jobs, and saved time."""

import time

import pytest

from cirag_jax.errors import UserError
from cirag_jax.runtime import run as runtime_run
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Job
from cirag_jax.sqlite import MEMORY
from tests.runtime.recording import Killed, Recording, say


def asking(name):
    answer = yield say(name)
    return answer.text


def job(name, program=asking):
    return Job(name, {"name": name}, lambda: program(name))


def answered(name):
    return f"reader: {name}"


class Opening:
    """Opens a model, and counts how often it is opened and closed."""

    def __init__(self, model=None):
        self.model = model or Recording(is_slow=True)
        self.opened = self.closed = 0

    def __call__(self, stack, book):
        self.opened += 1
        stack.callback(self._close)
        return {"reader": self.model}

    def _close(self):
        self.closed += 1


def test_runner_opens_handlers_once_and_closes_them(tmp_path):
    opening = Opening()
    with Runner(tmp_path / "j", {}, opening) as runner:
        assert runner.run([]) and opening.opened == 0
        assert runner.run([job("a"), job("b")]) and runner.run([job("c")])
        assert (opening.opened, opening.closed) == (1, 0)
        assert runner.progress.done == runner.progress.total == 1
        outcomes = {name: record.outcome for name, record in runner.records([job("a")]).items()}
        assert outcomes == {"a": answered("a")}
    assert (opening.opened, opening.closed) == (1, 1)


def test_runner_finished_jobs_open_no_handlers(tmp_path):
    jobs, opening = [job("a"), job("b")], Opening()
    with Runner(tmp_path / "j", {}, Opening()) as runner:
        assert runner.run(jobs)
    with Runner(tmp_path / "j", {}, opening, until=0.0) as runner:
        assert runner.unfinished([*jobs, job("c")])[0].id == "c"
        assert runner.run(jobs) and (runner.progress.done, runner.load_seconds) == (2, 0.0)
        assert not runner.run([*jobs, job("c")])  # the deadline has passed
    assert not opening.model.batches


def test_runner_without_requests_opens_no_handlers():
    def silent(name):
        return name
        yield

    opening = Opening()
    with Runner(MEMORY, {}, opening) as runner:
        assert runner.run([job("a", silent)], asks=False) and not opening.opened
        with pytest.raises(UserError, match="the method requests 'reader'"):
            runner.run([job("b")], asks=False)


def test_runner_rejected_settings_close_the_journal(tmp_path):
    with Runner(tmp_path / "j", {"seed": 0}, Opening()) as runner:
        runner.run([job("a")])
    with pytest.raises(UserError, match="with seed=0, not 1"):
        Runner(tmp_path / "j", {"seed": 1}, Opening())
    with Runner(tmp_path / "j", {"seed": 1}, Opening(), replace=True) as runner:
        assert not runner.records([job("a")])


def test_runner_reads_only_its_own_programs():
    """Reading all programs would make the last questions of a session slower than the first."""
    with Runner(MEMORY, {}, Opening()) as runner:
        assert runner.run([job("a")])
        book = runner.journal
        book._db.execute("UPDATE programs SET outcome = '{' WHERE id = 'a'")  # reading it fails
        assert runner.run([job("b")])
        assert list(runner.records([job("b")])) == ["b"]
        with pytest.raises(UserError, match="'a'"):
            book.outcomes(["a"])


def test_runner_saves_time_of_runs_and_loading(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    class Slow(Opening):
        def __call__(self, stack, book):
            clock[0] += 10.0
            return super().__call__(stack, book)

    class Model(Recording):
        def __call__(self, calls, done):
            clock[0] += 3.0
            super().__call__(calls, done)

    saved = []

    def one_run(name):
        with Runner(tmp_path / "j", {}, Slow(Model()), started=clock[0] - 1.0) as runner:
            assert runner.run([job(name)])
            saved.append(runner.journal.seconds)
            clock[0] += 0.5
            return runner.load_seconds, runner.run_seconds, runner.seconds()

    assert one_run("a") == (10.0, 3.0, 14.5)
    assert one_run("b") == (10.0, 3.0, 29.0) and saved == [14.0, 28.5]
    with Runner(tmp_path / "j", {}, Opening()) as runner:
        assert (runner.journal.load_seconds, runner.journal.seconds) == (20.0, 29.0)


def test_runner_killed_loses_few_seconds(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    class Dying(Recording):
        def __call__(self, calls, done):
            for index, call in enumerate(calls):
                clock[0] += 4.0
                if index == 3:
                    raise Killed
                super().__call__([call], lambda _, response, i=index: done(i, response))

    with pytest.raises(Killed), Runner(tmp_path / "j", {}, Opening(Dying())) as runner:
        runner.run([job(name) for name in "abcde"])
    with Runner(tmp_path / "j", {}, Opening()) as runner:
        assert clock[0] - runner.journal.seconds < runtime_run._SAVE_SECONDS + 4.0
        assert runner.journal.seconds == 8.0


def test_runner_without_bar_keeps_on_tokens():
    tokens_shown: list[int] = []
    handler = GenerateHandler(object(), {})  # pyright: ignore[reportArgumentType]
    handler.on_tokens = outer = lambda tokens: tokens_shown.append(tokens)
    handlers = {"reader": Recording(), "other": handler}
    with Runner(MEMORY, {}, lambda *_: handlers) as runner:
        runner.run([job("a")])
        assert handler.on_tokens is outer
        progress: list[tuple[int, int]] = []
        runner.run([job("b")], show=lambda p, tokens: progress.append((p.done, tokens)))
        handler.on_tokens(7)
    assert not tokens_shown and progress[-1] == (1, 7)


def test_runner_shows_progress_bar(capsys):
    with Runner(MEMORY, {}, Opening()) as runner:
        runner.run([job("a"), job("b")], unit="answer", name="judge")
    output = capsys.readouterr().err
    assert "judge: 100%" in output and "2/2" in output
