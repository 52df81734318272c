"""Ends commands at random moments, resumes them and compares with an undisturbed run.

    python -m tests.attacks.faults --moments 10 [--only train,index] [--seed 0]

Each of six commands is run on tiny models: once undisturbed, then for every moment in a workdir of
its own, where it is killed (signal 9), stopped (SIGTERM) or finds the disk full, at a random share
of the processor time, or of the largest file, that the undisturbed run took. The same command is
then given again. Those that ask a language model are also run over a server that tears random
connections: it resets them, ends them after half an answer, or lets the client wait in vain.
Prints a table: how many runs ended by their fault, or met a torn connection (the others were done
before), results that differ from the undisturbed one's, and requests asked again although the
answer was recorded. Exits with 1 where there is one of these.
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

ENDS = ("kill", "stop", "full")
FAULTS = (*ENDS, "tear")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}
# As in the tests: small programs, no network, each program compiled once.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_TIMEOUT = 10  # seconds that a client waits for an answer that does not come
_TORN = 0.2  # of the connections of a run over a server
Place = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Command:
    """A script of launch/ with its arguments, and what is compared of its workdir.

    ``roles`` are the blocks of its language models ("": the config itself is one), ``served`` more
    arguments where these are a server's.
    """

    script: str
    arguments: Sequence[object]
    outcome: Callable[[pathlib.Path], Any]
    roles: Sequence[str] = ()
    served: Sequence[str] = ()

    def over(self, url: str) -> "Command":
        """The same, asking a server."""
        values = {
            "backend": "openai", "base_url": url, "model": "m", "timeout": _TIMEOUT,
            "max_concurrency": 4,
        }  # fmt: skip
        more = [
            f"--config.{role}{'.' * bool(role)}{name}={value}"
            for role in self.roles
            for name, value in values.items()
        ]
        return dataclasses.replace(self, arguments=(*self.arguments, *self.served, *more))


def commands(root: pathlib.Path) -> dict[str, Command]:
    """The six commands over folders made in ``root``."""
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
            ["--config=configs/trajectories.py:mixture", *flags(
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
    """What the server says: another text to every prompt, and triples where these are wanted."""
    word = hashlib.sha256(text.encode()).hexdigest()[:8]
    return json.dumps({"triples": [["Ule", "feeds", word]]}) if wants_triples else word, "stop"


def _prompt(number: int) -> str:
    turn = {"role": "user", "content": f"question: where was the weaver {number} born?"}
    return json.dumps({"id": f"q{number}", "messages": [turn]}) + "\n"


def _trained(folder: pathlib.Path) -> Any:
    """Parameters, bit by bit, and every metric but the seconds."""
    encoder, meta = workdirs.open_encoder(str(folder))
    metrics = answering.lines(folder / "metrics.jsonl")
    for line in metrics:
        for name in [name for name in line if "second" in name or "mfu" in name]:
            del line[name]
    return workdirs.hash_arrays(encoder.state), meta["step"], metrics


def _distilled(folder: pathlib.Path) -> Any:
    """The trajectories, and what became of every question: a random model's are not written."""
    records = read_records(folder / JOURNAL)
    ends = [(record.id, record.outcome, record.error, record.usage.tokens) for record in records]
    return (folder / "trajectories.jsonl").read_bytes(), ends


def _stored(folder: pathlib.Path) -> Any:
    with TripleStore.open(folder) as store:
        with JournalReader(folder / JOURNAL) as book:
            totals = book.totals()
        ids = list(store.passage_ids())
        usage = {role: used.tokens for role, used in totals.usage.items()}
        return store.digest(ids), store.counts(), store.failures(), totals.calls, usage


def _recorded(folder: pathlib.Path) -> tuple[set[Place], set[str]]:
    """Places of the responses that are kept, and programs whose results are."""
    places: set[Place] = set()
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


# ------------------------------------------------------------------------------------- one command


@dataclasses.dataclass
class Tally:
    """What became of the disturbed runs of a command."""

    tried: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    ended: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    differences: int = 0
    repeated: int = 0
    tracebacks: int = 0
    requests: int = 0

    def count(self, fault: str, has_ended: bool) -> None:
        """Counts a run, and whether its fault came before its end."""
        self.tried[fault] += 1
        self.ended[fault] += has_ended

    def compare(self, told: str, differs: bool, *runs: Done) -> None:
        """Counts what is wrong with a run and its continuation, and tells of it."""
        self.differences += differs
        broken = sum("Traceback" in done.stderr for done in runs)
        self.tracebacks += broken
        print(f"{told}; {'DIFFERS' if differs else 'same'}", file=sys.stderr, flush=True)
        if differs or broken:
            print(*(done.stderr[-2000:] for done in runs), sep="\n---\n", file=sys.stderr)


class Driver:
    """Runs commands with faults, in processes of their own."""

    def __init__(self, server: CommandServer, root: pathlib.Path, rng: random.Random):
        self._server, self._root, self._rng = server, root, rng

    def run(self, name: str, command: Command, moments: int) -> Tally:
        """Disturbs a command at so many moments, and tears its network as often if it has one."""
        tally = Tally()
        self._end(name, command, moments, tally)
        if command.roles:
            self._tear(f"{name}-served", command, moments, tally)
        return tally

    def _end(self, name: str, command: Command, moments: int, tally: Tally) -> None:
        """Ends a command by what is no network's fault, and has it go on."""
        whole, asked = self._undisturbed(name, command)
        wanted = command.outcome(whole)
        # Again, now that its programs are compiled: that takes as long as the disturbed ones.
        _, _, seconds = self._execute(command, self._root / f"{name}-again", [])
        tally.requests = len(asked)
        largest = max(path.stat().st_size for path in whole.rglob("*") if path.is_file())
        for moment in range(moments):
            fault, folder = ENDS[moment % len(ENDS)], self._root / f"{name}-{moment}"
            share = self._rng.uniform(0.05, 0.95)
            if fault == "full":
                hook = ["limit_files", max(int(share * largest), 1024)]
            else:
                hook = ["signal_at_cpu", share * seconds, int(_SIGNALS[fault])]
            done, first, _ = self._execute(command, folder, [hook])
            places, programs = _recorded(folder)
            again, second, _ = self._execute(command, folder, [])
            tally.count(fault, done.returncode != 0)
            tally.repeated += sum(p in places or p[0] in programs for p in set(second))
            differs = again.returncode != 0 or command.outcome(folder) != wanted
            told = f"{name} {moment}: {fault} at {share:.0%}, exit {done.returncode}"
            tally.compare(
                f"{told}; asked {len(first)} and {len(second)} of {len(asked)}",
                differs,
                done,
                again,
            )

    def _tear(self, name: str, command: Command, moments: int, tally: Tally) -> None:
        """Tears the connections of a command that asks a server; it does not end by that."""
        with model_server(_answer) as server:
            served = command.over(server.url)
            whole, _ = self._undisturbed(name, served)
            wanted, answered = command.outcome(whole), server.answered
            for moment in range(moments):
                server.answered, torn = collections.Counter(), list[str]()
                server.tear = functools.partial(self._torn, torn)
                folder = self._root / f"{name}-{moment}"
                done, _, _ = self._execute(served, folder, [])
                repeated = (server.answered - answered).total()
                tally.count("tear", bool(torn))
                tally.repeated += repeated
                differs = done.returncode != 0 or command.outcome(folder) != wanted
                told = ", ".join(f"{torn.count(kind)} {kind}" for kind in TEARS)
                told = f"{name} {moment}: torn: {told}, exit {done.returncode}"
                tally.compare(f"{told}; answered {repeated} twice", differs, done)

    def _torn(self, torn: list[str]) -> str | None:
        """What becomes of the next answer, which is noted; one at most lets the client wait."""
        kind = self._rng.choice([k for k in TEARS if k != "late" or k not in torn])
        if self._rng.random() >= _TORN:
            return None
        torn.append(kind)
        return kind

    def _undisturbed(self, name: str, command: Command) -> tuple[pathlib.Path, list[Place]]:
        """Its workdir, and what it asked."""
        whole = self._root / f"{name}-whole"
        done, asked, _ = self._execute(command, whole, [])
        if done.returncode:
            raise SystemExit(f"{name} fails undisturbed:\n{done.stderr}")
        return whole, asked

    def _execute(self, command: Command, folder: pathlib.Path, hooked: list[list]):
        """How it ended, what its language models were asked, and its seconds of processor time."""
        log, clock = self._root / "asked.log", self._root / "clock"
        log.unlink(missing_ok=True)
        hooks = [["watch_backends", str(log)], ["note_cpu", str(clock)], *hooked]
        arguments = (*command.arguments, f"--workdir={folder}")
        done = self._server(command.script, *arguments, hooks=hooks)
        batches = [json.loads(line) for line in log.read_text().splitlines()]
        asked = [tuple(p) for kind, places in batches if kind == "GenerateHandler" for p in places]
        return done, asked, float(clock.read_text())


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--only", default="", help="commands, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        os.environ.update(_ENVIRONMENT, JAX_COMPILATION_CACHE_DIR=str(root / "programs"))
        with CommandServer() as server:
            wrong = _disturb(server, root, options)
    return int(wrong > 0)


def _disturb(server: CommandServer, root: pathlib.Path, options: argparse.Namespace) -> int:
    """Prints the table; returns how much was wrong."""
    wrong, chosen = 0, commands(root)
    names = options.only.split(",") if options.only else list(chosen)
    print("| command | requests | killed | stopped | disk full | torn | differences | repeated |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in names:
        driver = Driver(server, root, random.Random(f"{options.seed}/{name}"))
        tally = driver.run(name, chosen[name], options.moments)
        cells = [f"{tally.ended[fault]} of {tally.tried[fault]}" for fault in FAULTS]
        row = [name, tally.requests, *cells, tally.differences, tally.repeated]
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        wrong += tally.differences + tally.repeated + tally.tracebacks
    return wrong


if __name__ == "__main__":
    sys.exit(main())
