"""Runs planned stages as processes or Slurm jobs, and reports what each stage made."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from cirag_jax.errors import InUse, UserError
from cirag_jax.io import one_line, read_object, say, write_json
from cirag_jax.reports import tables
from experiments.paths import processes
from experiments.paths.planning import ROOT, Plan, PlannedStage

State = Literal["finished", "failed", "incomplete", "not run", "submitted"]

JOBS = "jobs.json"  # in the runner's workdir: the Slurm job of each stage
RESULT = "result.json"  # in a stage's folder; the last thing that a command writes
TRY_AGAIN = 75  # exit code of a command that continues if it is run again
_ATTEMPTS = 3
_NEWS_SECONDS = 30.0


def say_with_time(text: str) -> None:
    """Prints a line with the time of day to standard error."""
    say(f"{time.strftime('%H:%M:%S')}  {text}")


def read_result(stage: PlannedStage) -> dict[str, Any] | None:
    """Returns the result of a finished stage, or None."""
    path = stage.folder / RESULT
    result = read_object(path) if path.is_file() else None
    return None if result is None or result.get("complete") is False else result


def _record_path(stage: PlannedStage) -> pathlib.Path:
    return stage.folder.with_name(stage.folder.name + ".json")


def read_record(stage: PlannedStage) -> dict[str, Any]:
    """Returns the record of a stage: identity, command, seconds and exit code."""
    path = _record_path(stage)
    return read_object(path) if path.is_file() else {}


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Locks the folder of all stages for this process."""
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(
                f"--workdir={workdir} is in use by another experiments/run.py; wait until it ends "
                "or use another --workdir."
            ) from None
        yield


# --------------------------------------------------------------------------------------- processes


@dataclasses.dataclass
class _Running:
    """A stage whose command runs.

    Attributes:
      started: when the first attempt started, by `time.monotonic`.
      begun: when this attempt started.
      news: when its progress was last shown.
    """

    stage: PlannedStage
    process: BaseProcess | processes.Command
    started: float
    begun: float
    news: float
    attempt: int = 1


class Runner:
    """Runs stages, each after those that it reads.

    Args:
      plan: the stages.
      jobs: number of stages that run at the same time.
      shared: whether answers are computed by few processes, one after another, which compile
        programs only once; only for tiny models.

    Attributes:
      states: the state of each stage by folder.
    """

    def __init__(self, plan: Plan, jobs: int = 1, *, shared: bool = False):
        self.states: dict[pathlib.Path, State] = {}
        self._plan = plan
        self._jobs = jobs
        self._url = ""
        self._waiting = dict(enumerate(plan.stages.values(), start=1))
        self._running: list[_Running] = []
        self._workers = processes.Workers() if shared else None

    def run(self) -> dict[pathlib.Path, State]:
        """Runs all stages that are not finished; a failure only stops stages that read it.

        Raises:
          KeyboardInterrupt: after SIGINT or SIGTERM, when the running stages have ended.
        """
        with contextlib.ExitStack() as stack:
            received = stack.enter_context(self._passing_on_signals())
            if self._workers is not None:
                stack.enter_context(self._workers)
            while self._running or (self._waiting and not received):
                if not received:
                    self._start_stages(stack)
                self._wait(bool(received))
        if received:
            raise KeyboardInterrupt
        # In the order of the plan.
        self.states = {folder: self.states[folder] for folder in self._plan.stages}
        return self.states

    @contextlib.contextmanager
    def _passing_on_signals(self) -> Iterator[list[int]]:
        """Passes SIGINT and SIGTERM on to the stages; yields the list of received signals."""
        received: list[int] = []

        def forward(signum: int, _: Any) -> None:
            received.append(signum)
            for running in self._running:
                assert running.process.pid is not None
                with contextlib.suppress(ProcessLookupError):  # It has just ended.
                    os.kill(running.process.pid, signum)

        numbers = (signal.SIGINT, signal.SIGTERM)
        old = {number: signal.signal(number, forward) for number in numbers}
        try:
            yield received
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _start_stages(self, stack: contextlib.ExitStack) -> None:
        """Starts stages in the plan's order, until all jobs are busy."""
        for number, stage in list(self._waiting.items()):
            if any(folder not in self.states for folder in stage.after):
                continue
            place = f"[{number}/{len(self._plan.stages)}] {stage.experiments[0]}/{stage.name}"
            if read_result(stage) is not None:
                self.states[stage.folder] = "finished"
                say_with_time(f"{place}: finished before ({stage.folder.name})")
            elif any(self.states[folder] != "finished" for folder in stage.after):
                self.states[stage.folder] = "not run"
                say_with_time(f"{place}: not run, because an earlier stage did not finish")
            elif len(self._running) < self._jobs:
                if self._plan.server and not self._url and "{server}" in str(stage.words):
                    self._url = stack.enter_context(_server(self._plan.server))
                say_with_time(f"{place}: {_shown(stage.command(self._url))}")
                self._running.append(self._start(stage))
            else:
                continue
            del self._waiting[number]

    def _start(self, stage: PlannedStage) -> _Running:
        stage.folder.parent.mkdir(parents=True, exist_ok=True)
        words = stage.command(self._url)
        log = _log_path(stage)
        with log.open("ab") as errors:
            errors.write(f"$ {_shown(words)}\n".encode())
        now = time.monotonic()
        start = processes.start
        if self._workers is not None and stage.program == "answer":
            start = self._workers.start
        process = start(words, ROOT, _output_path(stage), log)
        return _Running(stage, process, now, now, now)

    def _wait(self, is_ending: bool) -> None:
        """Waits until a stage ends, or half a second; shows the progress of the others."""
        if not self._running:
            return
        connection.wait([running.process.sentinel for running in self._running], timeout=0.5)
        for running in list(self._running):
            stage, now = running.stage, time.monotonic()
            code = running.process.exitcode
            if code is not None:
                self._running.remove(running)
                self._end(running, code, now, is_ending)
            elif now - running.news > _NEWS_SECONDS:
                running.news = now
                seconds = f"{now - running.begun:,.0f} s"
                say_with_time(f"{stage.name}, {seconds}: {_last_line(_log_path(stage))}")

    def _end(self, running: _Running, code: int, now: float, is_ending: bool) -> None:
        """Records the end of a stage's command; starts it again if it asks for that."""
        stage = running.stage
        if code == 0 and not stage.is_launch:
            lines = _output_path(stage).read_text("utf-8").strip().splitlines()
            stage.folder.mkdir(exist_ok=True)
            write_json(stage.folder / RESULT, json.loads(lines[-1]) if lines else {})
        self._record(stage, code, now - running.begun)
        if code == TRY_AGAIN and running.attempt < _ATTEMPTS and not is_ending:
            say_with_time(f"{stage.name} asks to be run again (attempt {running.attempt})")
            again = self._start(stage)
            again.started, again.attempt = running.started, running.attempt + 1
            self._running.append(again)
            return
        seconds = f"{now - running.started:,.0f} s"
        if code:
            say_with_time(
                f"{stage.experiments[0]}/{stage.name} failed ({_ending(code)}, {seconds}): "
                f"{_last_line(_log_path(stage))}; log: {_log_path(stage)}"
            )
            self.states[stage.folder] = "failed"
        elif read_result(stage) is None:
            say_with_time(f"{stage.name} is not complete; run the same command to continue")
            self.states[stage.folder] = "incomplete"
        else:
            say_with_time(f"{stage.name} finished in {seconds}: {summary(stage) or 'done'}")
            self.states[stage.folder] = "finished"

    def _record(self, stage: PlannedStage, code: int, seconds: float) -> None:
        record = read_record(stage)
        write_json(
            _record_path(stage),
            {
                "stage": stage.name,
                "experiments": stage.experiments,
                "command": ["python", *stage.words],
                "identity": dict(stage.identity),
                "seconds": record.get("seconds", 0.0) + seconds,
                "attempts": record.get("attempts", 0) + 1,
                "exit_code": code,
            },
        )


def _ending(code: int) -> str:
    """Returns the exit code or the signal in words."""
    if code == -signal.SIGKILL:
        return "killed, perhaps because memory was full"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


@contextlib.contextmanager
def _server(script: str) -> Iterator[str]:
    """Runs a server of language models; yields its URL."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = pathlib.Path(folder) / "out", pathlib.Path(folder) / "err"
        process = processes.start([script], ROOT, output, errors)
        try:
            while not (url := output.read_text("utf-8").strip() if output.exists() else ""):
                if process.exitcode is not None:
                    reason = _last_line(errors)
                    raise UserError(f"python {script} ended without printing its URL: {reason}")
                time.sleep(0.05)
            say_with_time(f"{_shown([script])} serves language models at {url}")
            yield url
        finally:
            process.kill()
            process.join()


def _log_path(stage: PlannedStage) -> pathlib.Path:
    return stage.folder.with_name(stage.folder.name + ".log")


def _output_path(stage: PlannedStage) -> pathlib.Path:
    return _log_path(stage).with_suffix(".out")


def _last_line(log: pathlib.Path) -> str:
    """Returns the last line of a log, or of a progress bar in it."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
        text = file.read().decode("utf-8", "replace")
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    return one_line(lines[-1])[:300] if lines else ""


def _shown(words: list[str]) -> str:
    return shlex.join(["python", *words])


# -------------------------------------------------------------------------------------- dry runs


def show(plan: Plan, *, with_costs: bool, as_jobs: bool) -> None:
    """Prints the commands, and launch/plan.py's estimates of memory and time.

    With ``as_jobs``, prints the commands of sbatch, with folder names instead of job numbers.
    """
    for number, stage in enumerate(plan.stages.values(), start=1):
        state = "" if read_result(stage) is None else " (finished)"
        say(f"[{number}/{len(plan.stages)}] {', '.join(stage.experiments)}/{stage.name}{state}")
        job = sbatch(stage, [folder.name for folder in stage.after])
        say(f"    {shlex.join(job) if as_jobs else _shown(list(stage.words))}")
        if with_costs and stage.stage.plan is not None:
            say(f"    {_cost(stage)}")


def _cost(stage: PlannedStage) -> str:
    """Returns the estimate of launch/plan.py for a stage, as one line."""
    flags = [word for word in stage.words[1:] if word.startswith("--config")]
    words = ["launch/plan.py", *flags, *shlex.split(stage.stage.plan or "")]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *words, f"--workdir={folder}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return f"no estimate: {one_line(done.stderr.strip().splitlines()[-1])}"
    result = json.loads(done.stdout)
    gpus = [
        f"{name} {gpu['run_hours']:.3g} h" + ("" if gpu["fits"] else " (does not fit)")
        for name, gpu in result["gpus"].items()
        if gpu["run_hours"] is not None
    ]
    times = f"; {', '.join(gpus)}" if gpus else ""
    return (
        f"launch/plan.py expects {result['peak_bytes'] / 2**30:.1f} GiB on each of "
        f"{result['devices']} devices{times}"
    )


def collect(plan: Plan) -> dict[pathlib.Path, State]:
    """Returns the states of stages without running any."""
    return {
        stage.folder: "not run" if read_result(stage) is None else "finished"
        for stage in plan.stages.values()
    }


# ----------------------------------------------------------------------------------------- Slurm


def submit(plan: Plan, workdir: pathlib.Path) -> dict[pathlib.Path, State]:
    """Submits a Slurm job for each stage that is not finished; a job waits for its inputs.

    Stages that already have a pending or running job keep this job.
    """
    states: dict[pathlib.Path, State] = {}
    jobs: dict[pathlib.Path, str] = {}
    old_jobs = read_object(path) if (path := workdir / JOBS).is_file() else {}
    for stage in plan.stages.values():
        if read_result(stage) is not None:
            states[stage.folder] = "finished"
            continue
        old_job = old_jobs.get(stage.folder.name)
        if old_job is not None and _is_queued(old_job):
            jobs[stage.folder], states[stage.folder] = old_job, "submitted"
            say(f"{stage.name} is job {old_job}")
            continue
        stage.folder.parent.mkdir(parents=True, exist_ok=True)
        words = sbatch(stage, [jobs[folder] for folder in stage.after if folder in jobs])
        say(shlex.join(words))
        try:
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        except FileNotFoundError:
            raise UserError(
                "--slurm needs the command sbatch; use --dry_run to see the jobs."
            ) from None
        if done.returncode:
            raise UserError(f"sbatch refused {stage.name}: {one_line(done.stderr)}.")
        jobs[stage.folder] = done.stdout.strip().partition(";")[0]
        states[stage.folder] = "submitted"
        old_jobs[stage.folder.name] = jobs[stage.folder]
        write_json(path, old_jobs)
    return states


def _is_queued(job: str) -> bool:
    words = ["squeue", "--noheader", f"--jobs={job}"]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.returncode == 0 and bool(done.stdout.strip())


def sbatch(stage: PlannedStage, after: list[str]) -> list[str]:
    """Returns the command that submits a stage as a job."""
    log = stage.folder.with_name(stage.folder.name + ".log")
    words = ["sbatch", "--parsable", f"--job-name={stage.folder.name}", f"--output={log}"]
    words += [*shlex.split(stage.stage.slurm), f"--chdir={ROOT}"]
    words.append(f"--export=ALL,PYTHON={sys.executable}")  # for launch/slurm/job.sh
    if after:
        words.append(f"--dependency=afterok:{':'.join(after)}")
    if stage.is_launch:
        return [*words, "launch/slurm/job.sh", stage.program, *stage.words[1:]]
    result = shlex.quote(str(stage.folder / RESULT))
    command = shlex.join([sys.executable, *stage.words])
    script = f"{command} > {result}.part && mv {result}.part {result}"
    return [*words, f"--wrap=mkdir -p {shlex.quote(str(stage.folder))} && {script}"]


# ---------------------------------------------------------------------------------------- reports

# Beginnings of the names of stages whose ``table.md`` is part of the report.
TABLES = ("evaluate", "table")

# For each command, the numbers of its result that show what a stage made and lost. A name with dots
# is a path; a list in front of "|" is the label.
_FIGURES: Mapping[str, tuple[str, ...]] = {
    "files": ("questions|num_questions", "passages|num_passages"),
    "prepare": ("questions|num_questions", "passages|num_passages"),
    "extract": ("passages", "triples", "empty|empty", "failed|failed"),
    "index": ("passages|num_passages", "truncated|truncated_texts"),
    "distill": (
        "questions|num_questions", "with a hop that no triple states|unstated_questions",
        "trajectories", "dropped", "failures", "solved", "sees gold|sees_gold",
    ),
    "train": (
        "examples|num_examples", "left out|left_out", "steps|total_steps", "dev loss|dev/loss",
        "R@5|dev/recall@5",
    ),
    "evaluate": (
        "questions|num_questions", "steps|num_steps", "core F1|systems.student.gold.f1.value",
        "untrained|systems.base.gold.f1.value", "parsed|systems.student.parse_rate.value",
    ),
    "export": ("step", "rank"),
    "answer": (
        "questions|num_questions", "answered", "failures", "em", "f1",
        "from triples|granularities.triple", "parse errors|parse_errors",
    ),
}  # fmt: skip


def summary(stage: PlannedStage) -> str:
    """Returns what a finished stage made and lost, as one line."""
    result = read_result(stage) or {}
    parts = []
    for entry in _FIGURES.get(stage.program, ()):
        label, _, path = entry.partition("|")
        value = _at(result, path or label)
        if value is not None and value != {}:
            parts.append(f"{label} {_figure(value)}")
    return ", ".join(parts)


def _at(result: Any, path: str) -> Any:
    for key in path.split("."):
        result = result.get(key) if isinstance(result, Mapping) else None
    return result


def _figure(value: Any) -> str:
    if isinstance(value, Mapping):
        return " + ".join(f"{_figure(number)} {name}" for name, number in value.items())
    return f"{value:.3g}" if isinstance(value, float) else f"{value}"


def report(
    plan: Plan, states: Mapping[pathlib.Path, State], workdir: pathlib.Path
) -> dict[str, Any]:
    """Writes and prints, per experiment, its stages and the tables that they made.

    Writes ``EXPERIMENT.md`` and ``EXPERIMENT.json`` to the workdir.

    Returns:
      For each experiment, ``complete`` and ``stages``, each with ``folder``, ``state``,
      ``seconds`` and ``result``.
    """
    collected: dict[str, Any] = {}
    for experiment, folders in plan.names.items():
        rows, stages, texts = [("stage", "seconds", "state", "made and lost")], {}, []
        for name, folder in folders.items():
            stage, state = plan.stages[folder], states[folder]
            seconds = read_record(stage).get("seconds")
            rows.append((name, f"{seconds:,.0f}" if seconds else "", state, summary(stage)))
            stages[name] = {
                "folder": str(folder),
                "state": state,
                "seconds": seconds,
                "result": read_result(stage),
            }
            table = folder / "table.md"
            if name.startswith(TABLES) and state == "finished" and table.is_file():
                texts.append(f"{experiment}, {name}\n\n{table.read_text('utf-8').strip()}")
        text = "\n\n".join([f"{experiment}\n\n{tables.markdown(rows)}", *texts])
        say(f"\n{text}")
        complete = all(stage["state"] == "finished" for stage in stages.values())
        collected[experiment] = {"complete": complete, "stages": stages}
        (workdir / f"{experiment}.md").write_text(f"{text}\n", "utf-8")
        write_json(workdir / f"{experiment}.json", collected[experiment])
    return collected
