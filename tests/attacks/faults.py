"""Interrupts commands at random moments, resumes them and compares with an undisturbed run.

    python -m tests.attacks.faults --moments 10 [--only train,index] [--seed 0]

Each of six commands runs with tiny models: first undisturbed, then once per moment in a new
workdir. At that moment the command is killed (signal 9), is stopped (SIGTERM) or gets a full disk.
A moment is a random share of the undisturbed run's processor time or, for the full disk, of its
largest file. Then the same command is run again. Commands with language models also run with a
server that resets random connections, closes them after half a response, or never responds.

Prints a table with three counts: runs that the fault interrupted (other runs finished before it),
results that differ from the undisturbed run, and requests that were repeated although their
response was recorded. Exits with 1 if there is a difference or a repetition.
"""

import argparse
import collections
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import random
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from cirag_jax.methods.common import extraction
from cirag_jax.models.io import workdir as workdirs
from cirag_jax.runtime.records import JournalReader, read_records
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.triples.store import TripleStore
from tests import answering, tiny
from tests.command_server import CommandServer, Done
from tests.commands.model_server import TEARS, model_server

INTERRUPTIONS = ("kill", "stop", "full")
FAULTS = (*INTERRUPTIONS, "tear")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}
# Same as in the tests: no network, little optimization, and each program is compiled once.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_TIMEOUT = 10  # seconds until a client gives up
_TORN_SHARE = 0.2  # share of torn connections
# Program, ordinal and part of a request.
RequestId = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Command:
    """A script of launch/ with its arguments, and a function that returns its outcome.

    ``roles`` are the config blocks of its language models ("" is the config itself). ``served`` are
    additional arguments for runs with a server.
    """

    script: str
    arguments: Sequence[object]
    outcome: Callable[[pathlib.Path], Any]
    roles: Sequence[str] = ()
    served: Sequence[str] = ()

    def with_server(self, url: str) -> "Command":
        """Returns the same command with a server as its language model."""
        values = {
            "backend": "openai", "base_url": url, "model": "m", "timeout": _TIMEOUT,
            "max_concurrency": 4,
        }  # fmt: skip
        settings = [
            f"--config.{role}{'.' * bool(role)}{name}={value}"
            for role in self.roles
            for name, value in values.items()
        ]
        return dataclasses.replace(self, arguments=(*self.arguments, *self.served, *settings))


def commands(root: pathlib.Path) -> dict[str, Command]:
    """Returns the six commands, with folders in ``root``."""
    folders = answering.tiny_folders(root)
    data, encoder, decoder = (folders[name] for name in ("data", "encoder", "decoder"))
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(_prompt(number) for number in range(24)))

    def flags(**values: object) -> list[str]:
        return [f"--config.{name.replace('__', '.')}={value}" for name, value in values.items()]

    return {
        "train": Command(
            "train.py",
            flags(
                model__spec=encoder, data__dir=data, dev__questions=2, num_steps=6, eval_every=2,
                batch_size=4, num_negatives=2, prefixes_per_question=2, chunk_tokens=256,
                query_max_length=128,
            ),
            _trained,
        ),
        "generate": Command(
            "generate.py",
            flags(model=decoder, prompts=prompts, max_tokens=8, batch_size=4, prefix_tokens=0),
            lambda folder: [
                [row["id"], row["text"], row["finish_reason"]]
                for row in answering.lines(folder / "responses.jsonl")
            ],
            ("",),
        ),
        "extract": Command(
            "extract.py",
            flags(
                data__dir=data, extractor__model=decoder, entity_tokens=5, triple_tokens=5,
                extractor__batch_size=4, extractor__prefix_tokens=0, block=4, max_empty_share=1,
            ),
            _stored,
            ("extractor",),
        ),
        "distill": Command(
            "distill.py",
            ["--config=configs/trajectories.py:llm", *flags(
                data__dir=data, encoder__model=encoder, in_flight=2, cirag__num_passages=4,
                cirag__num_candidates=6, cirag__max_steps=2, retriever__kind="bm25", keep="all",
                teacher__llm__model=decoder, teacher__llm__max_tokens=6,
                teacher__llm__batch_size=4, teacher__llm__prefix_tokens=0,
            )],
            _distilled,
            ("teacher.llm",),
        ),
        "answer": Command(
            "answer.py",
            answering.arguments(folders, "W")[:-1],
            lambda folder: (folder / "predictions.jsonl").read_bytes(),
            ("integrator", "reader"),
            ("--config.cirag.prefilled_headers=false",),
        ),
        "index": Command(
            "index.py",
            flags(data__dir=data, encoder__model=encoder, shard_rows=12),
            lambda folder: {
                str(path.relative_to(folder)): path.read_bytes()
                for path in sorted((folder / "index").rglob("*"))
                if path.is_file()
            },
        ),
    }  # fmt: skip


def _answer(text: str, wants_triples: bool) -> tuple[str, str]:
    """Returns a response that differs for every prompt, with triples if requested."""
    word = hashlib.sha256(text.encode()).hexdigest()[:8]
    return json.dumps({"triples": [["Ule", "feeds", word]]}) if wants_triples else word, "stop"


def _prompt(number: int) -> str:
    turn = {"role": "user", "content": f"question: where was the weaver {number} born?"}
    return json.dumps({"id": f"q{number}", "messages": [turn]}) + "\n"


def _trained(folder: pathlib.Path) -> Any:
    """Returns a hash of the parameters, the step, and all metrics except times."""
    encoder, meta = workdirs.open_encoder(str(folder))
    metrics = answering.lines(folder / "metrics.jsonl")
    for line in metrics:
        for name in [name for name in line if "second" in name or "mfu" in name]:
            del line[name]
    return workdirs.hash_arrays(encoder.state), meta["step"], metrics


def _distilled(folder: pathlib.Path) -> Any:
    """Returns the trajectories, and the record of every question."""
    records = read_records(folder / JOURNAL)
    ends = [(record.id, record.outcome, record.error, record.usage.counts) for record in records]
    return (folder / "trajectories.jsonl").read_bytes(), ends


def _stored(folder: pathlib.Path) -> Any:
    with TripleStore.open(folder) as store:
        with JournalReader(folder / JOURNAL) as journal:
            totals = journal.totals()
        ids = list(store.passage_ids())
        usage = {role: used.counts for role, used in totals.usage.items()}
        return store.digest(ids), store.counts(), store.failures(), totals.calls, usage


def _recorded(folder: pathlib.Path) -> tuple[set[RequestId], set[str]]:
    """Returns the positions of recorded responses, and programs with recorded results."""
    places: set[RequestId] = set()
    programs: set[str] = set()
    if (folder / JOURNAL).is_file():
        with sqlite3.connect(folder / JOURNAL) as db:
            if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'responses'").fetchone():
                query = "SELECT program, ordinal, part FROM responses"
                places = set(db.execute(f"{query} WHERE json_extract(response, '$.error') IS NULL"))
        db.close()
    if (folder / "triples.sqlite").is_file():
        with sqlite3.connect(folder / "triples.sqlite") as db:
            if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'passages'").fetchone():
                corpus = tiny.dataset().corpus
                ids = [row[0] for row in db.execute("SELECT id FROM passages")]
                programs = {extraction.program_name(corpus[name]) for name in ids}
        db.close()
    return places, programs


@dataclasses.dataclass
class Tally:
    """Counts of the outcomes of a command's disturbed runs."""

    num_cases: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    hits: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    differences: int = 0
    repeated: int = 0
    tracebacks: int = 0
    requests: int = 0

    def count(self, fault: str, hit: bool) -> None:
        """Counts a run, and a hit if its fault occurred before the run ended."""
        self.num_cases[fault] += 1
        self.hits[fault] += hit

    def compare(self, description: str, differs: bool, *runs: Done) -> None:
        """Counts and prints the errors of a disturbed run and its continuation."""
        self.differences += differs
        broken = sum("Traceback" in process.stderr for process in runs)
        self.tracebacks += broken
        print(f"{description}; {'DIFFERS' if differs else 'same'}", file=sys.stderr, flush=True)
        if differs or broken:
            print(*(process.stderr[-2000:] for process in runs), sep="\n---\n", file=sys.stderr)


class Driver:
    """Runs commands with faults in separate processes."""

    def __init__(self, server: CommandServer, root: pathlib.Path, rng: random.Random):
        self._server, self._root, self._rng = server, root, rng

    def run(self, name: str, command: Command, moments: int) -> Tally:
        """Runs a command with faults at several moments, and with torn connections."""
        tally = Tally()
        self._interrupt(name, command, moments, tally)
        if command.roles:
            self._tear(f"{name}-served", command, moments, tally)
        return tally

    def _interrupt(self, name: str, command: Command, moments: int, tally: Tally) -> None:
        """Interrupts a command at several moments, and resumes it."""
        workdir, calls = self._run_undisturbed(name, command)
        expected = command.outcome(workdir)
        # Measures the time again now that programs are compiled, as in the disturbed runs.
        _, _, seconds = self._execute(command, self._root / f"{name}-again", [])
        tally.requests = len(calls)
        largest = max(path.stat().st_size for path in workdir.rglob("*") if path.is_file())
        for moment in range(moments):
            fault = INTERRUPTIONS[moment % len(INTERRUPTIONS)]
            folder = self._root / f"{name}-{moment}"
            share = self._rng.uniform(0.05, 0.95)
            if fault == "full":
                hook = ["limit_files", max(int(share * largest), 1024)]
            else:
                hook = ["signal_at_cpu", share * seconds, int(_SIGNALS[fault])]
            process, first, _ = self._execute(command, folder, [hook])
            places, programs = _recorded(folder)
            resumed, second, _ = self._execute(command, folder, [])
            tally.count(fault, process.returncode != 0)
            tally.repeated += sum(p in places or p[0] in programs for p in set(second))
            differs = resumed.returncode != 0 or command.outcome(folder) != expected
            description = f"{name} {moment}: {fault} at {share:.0%}, exit {process.returncode}"
            tally.compare(
                f"{description}; {len(first)} and {len(second)} of {len(calls)} requests",
                differs,
                process,
                resumed,
            )

    def _tear(self, name: str, command: Command, moments: int, tally: Tally) -> None:
        """Runs a command whose server tears connections; the command must still succeed."""
        with model_server(_answer) as server:
            served = command.with_server(server.url)
            workdir, _ = self._run_undisturbed(name, served)
            expected, answered = command.outcome(workdir), server.answered
            for moment in range(moments):
                server.answered, torn = collections.Counter(), list[str]()
                server.tear = functools.partial(self._torn, torn)
                folder = self._root / f"{name}-{moment}"
                process, _, _ = self._execute(served, folder, [])
                repeated = (server.answered - answered).total()
                tally.count("tear", bool(torn))
                tally.repeated += repeated
                differs = process.returncode != 0 or command.outcome(folder) != expected
                description = ", ".join(f"{torn.count(kind)} {kind}" for kind in TEARS)
                description = f"{name} {moment}: torn: {description}, exit {process.returncode}"
                tally.compare(f"{description}; {repeated} answered twice", differs, process)

    def _torn(self, torn: list[str]) -> str | None:
        """Returns how to tear a connection, or None; at most one tear makes the client wait."""
        kind = self._rng.choice([k for k in TEARS if k != "late" or k not in torn])
        if self._rng.random() >= _TORN_SHARE:
            return None
        torn.append(kind)
        return kind

    def _run_undisturbed(self, name: str, command: Command) -> tuple[pathlib.Path, list[RequestId]]:
        """Runs a command, and returns its workdir and its requests."""
        workdir = self._root / f"{name}-whole"
        process, calls, _ = self._execute(command, workdir, [])
        if process.returncode:
            raise SystemExit(f"{name} fails without a fault:\n{process.stderr}")
        return workdir, calls

    def _execute(self, command: Command, folder: pathlib.Path, fault_hooks: list[list]):
        """Runs a command, and returns its process, its model requests and its processor time."""
        log, clock = self._root / "requests.log", self._root / "clock"
        log.unlink(missing_ok=True)
        hooks = [["watch_backends", str(log)], ["note_cpu", str(clock)], *fault_hooks]
        arguments = (*command.arguments, f"--workdir={folder}")
        process = self._server(command.script, *arguments, hooks=hooks)
        batches = [json.loads(line) for line in log.read_text().splitlines()]
        calls = [tuple(p) for kind, places in batches if kind == "GenerateHandler" for p in places]
        return process, calls, float(clock.read_text())


def main() -> int:
    """Runs the commands and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--only", default="", help="commands, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        os.environ.update(ENVIRONMENT, JAX_COMPILATION_CACHE_DIR=str(root / "programs"))
        with CommandServer() as server:
            num_errors = _disturb(server, root, options)
    return int(num_errors > 0)


def _disturb(server: CommandServer, root: pathlib.Path, options: argparse.Namespace) -> int:
    """Runs and disturbs the commands, prints the table, and returns the number of errors."""
    num_errors, commands_by_name = 0, commands(root)
    names = options.only.split(",") if options.only else list(commands_by_name)
    print("| command | requests | killed | stopped | disk full | torn | differences | repeated |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in names:
        driver = Driver(server, root, random.Random(f"{options.seed}/{name}"))
        tally = driver.run(name, commands_by_name[name], options.moments)
        cells = [f"{tally.hits[fault]} of {tally.num_cases[fault]}" for fault in FAULTS]
        row = [name, tally.requests, *cells, tally.differences, tally.repeated]
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        num_errors += tally.differences + tally.repeated + tally.tracebacks
    return num_errors


if __name__ == "__main__":
    sys.exit(main())
