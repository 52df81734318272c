"""Compares our scheduler with a loop over questions, as in public implementations of methods.

Four sides answer the same questions with the same model (SmolLM2-135M-Instruct, fp32, no adapter),
prompts and retrieval. Each side runs in its own process, after a warm-up on other questions:

- ``transformers``: ``transformers.generate``, one question and one request at a time. Requests with
  a JSON schema use our grammar.
- ``one at a time``: the same loop with our engine.
- ``together``: all questions through the scheduler, 64 in flight.
- ``no reuse``: like ``together``, without prefix reuse.

The first two sides answer ``--serial`` questions, ``together`` answers all ``--questions``, and
``no reuse`` answers a quarter. Times are per question, without loading and embedding the corpus.
``differ`` is the number of answers that differ from the first side's. ``tie`` is, for the first
request whose texts differ, the gap in nats between the two most probable tokens at the first
different token. Floating-point noise can flip gaps up to about 1e-4.

``--mode=overhead`` measures only the scheduler and the journal: 1,000 programs make eight requests
each, and the handler does nothing.

Results
  ``cirag``, CPU: two idle cores of an AMD EPYC virtual machine; 2026-11-26, jax 0.10.2, torch
  2.13.0, transformers 5.23.0, ``--serial 4``, commit cf1d90e. The goal was 8 times the speed.
  Most of the remaining time is decoding: prefill takes 27 %, computed from the processor times of
  ``together`` and ``no reuse`` in the second table. ``no reuse`` was stopped early:

    side           questions s/question  times    cpu prefilled   cached generated differ
    transformers           4      26.30   1.00   1.00      6673        0       226      0
    one at a time          4      11.59   2.27   2.78       872     5801       226      0
    together              64       4.64   5.66   6.74       688     5755       208      0

  ``cirag``, all sides, on a slower EPYC with two cores; 2026-11-27, the same versions and command,
  commit 83ba04d, 36 minutes. Tests ran during the second half of ``no reuse``, so read its
  processor time:

    transformers           4      38.36   1.00   1.00      6673        0       226      0
    one at a time          4      20.52   1.87   2.36       872     5801       226      0
    together              64       8.23   4.66   5.81       688     5755       208      0
    no reuse              16      35.03   1.10   1.79      6340        0       218      0

  ``ircot``, the same kind of machine, under load; 2026-11-26, ``--questions 16 --serial 2``, commit
  8b23ab4:

    transformers           2      17.91   1.00   1.00      1706        0        60      0
    one at a time          2       6.40   2.80   2.79      1140      566        60      0
    together              16       5.26   3.41   3.28      1126      587        71      0
    no reuse               4       9.41   1.90   1.72      1656        0        60      0

  ``kirag``, ``c2rag``, ``dualrag``, under light load; 2026-11-26, ``--questions 12 --serial 1``,
  commit 6312e05. One question is a small sample:

    kirag    transformers           1      23.40   1.00   1.00      3339        0       234      0
             one at a time          1      14.07   1.66   1.78      1908     1431       234      0
             together              12      10.08   2.32   4.12      2059     1621       240      0
    c2rag    transformers           1      14.53   1.00   1.00      1088        0       134      0
             one at a time          1      15.03   0.97   1.43      1085        3       134      0
             together              12       5.61   2.59   4.97       390      642       117      0
             no reuse               3      11.24   1.29   2.13       949        0       120      0
    dualrag  transformers           1      23.21   1.00   1.00      3623        0       212      0
             one at a time          1      14.69   1.58   2.04      2091     1532       212      0
             together              12       8.91   2.61   3.96      1140     2521       244      0

  ``no reuse`` of ``kirag`` and ``dualrag``: not run. Overhead: 0.092 ms per request, under load.
  GPU: not measured.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.io import standard_streams

SIDES: dict[str, dict[str, Any]] = {
    "transformers": {"backend": "transformers", "batch_size": 1, "in_flight": 1},
    "one at a time": {"backend": "jax", "batch_size": 1, "in_flight": 1},
    "together": {"backend": "jax", "in_flight": 64},
    "no reuse": {"backend": "jax", "in_flight": 64, "prefix_tokens": 0},
}
SERIAL = ("transformers", "one at a time")

# Method -> its preset, and settings with which SmolLM2 runs all steps. SmolLM2 rarely writes
# candidates, and the papers' numbers of passages do not fit its context.
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cirag": ("llm", ()),
    "ircot": ("", ("ircot.max_passages=10",)),
    "kirag": ("", ("kirag.append_best=true",)),
    "dualrag": (
        "",
        (
            "dualrag.max_steps=3",
            "dualrag.min_retrievals=2",
            "dualrag.num_retrieved=10",
            "dualrag.num_documents=3",
            "dualrag.max_entities=2",
            "dualrag.max_keywords=2",
        ),
    ),
    "c2rag": ("", ("c2rag.num_passages=10", "c2rag.plan_schema=true")),
}


def config_of(method: str, side: str, questions: int, split: str) -> Any:
    """Returns the method's config for the first questions of the built-in dataset."""
    from cirag_jax.commands import task
    from cirag_jax.methods.registry import find_method

    preset, values = METHODS[method]
    config = task.method_config(method, preset, values)
    settings = dict(SIDES[side])
    with config.unlocked():
        config.in_flight = settings.pop("in_flight")
        config.data.split, config.data.limit = split, questions
        config.data.corpus = "ircot_full"  # the same passages for every side
        for role in find_method(method).config(**task.plain(config[method])).needs.roles:
            config[role].update(settings | {"dtype": "float32"})
    return config


def answer_in_process(method: str, side: str, questions: int, workdir: str) -> dict[str, Any]:
    """Runs one side in this process."""
    from cirag_jax.commands import answer

    others = config_of(method, side, 2 if side in SERIAL else 8, "dev")
    with tempfile.TemporaryDirectory() as warm:
        answer.answer(others, pathlib.Path(warm))
    start = time.process_time()
    result = answer.answer(config_of(method, side, questions, "test"), pathlib.Path(workdir))
    return {**result, "processor": time.process_time() - start}


def measure(method: str, side: str, questions: int, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs one side in a new process."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--worker", method, side, str(questions), str(workdir)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def responses(workdir: pathlib.Path) -> dict[str, list[tuple[str, dict[str, Any], str]]]:
    """Returns (hash, request, text) of the generations of each question, in order."""
    import sqlite3

    with sqlite3.connect(workdir / "journal.sqlite") as db:
        rows = db.execute(
            "SELECT program, request_hash, request, response FROM responses WHERE "
            "json_extract(request, '$.kind') = 'generate' ORDER BY program, ordinal, part"
        ).fetchall()
    found: dict[str, list[tuple[str, dict[str, Any], str]]] = {}
    for program, digest, request, response in rows:
        found.setdefault(program, []).append(
            (digest, json.loads(request), json.loads(response)["text"])
        )
    return found


def ties(ours: pathlib.Path, theirs: pathlib.Path) -> list[float]:
    """Returns the gap in nats at the first different token, for each question that has one."""
    from cirag_jax.llm.engine.engine import Engine
    from cirag_jax.llm.types import Generate, Message

    pairs = []
    a, b = responses(ours), responses(theirs)
    for question in a.keys() & b.keys():
        for (hash_a, request, text_a), (hash_b, _, text_b) in zip(
            a[question], b[question], strict=False
        ):
            if hash_a != hash_b:
                break
            if text_a != text_b:
                pairs.append((request, text_a, text_b))
                break
    if not pairs:
        return []
    engine = Engine.open(dtype="float32")
    gaps = []
    for request, text_a, text_b in pairs:
        messages = tuple(Message(**message) for message in request["messages"])
        response = engine.generate(
            [
                Generate(
                    messages,
                    max_tokens=request["max_tokens"] or 96,
                    stop=tuple(request["stop"]),
                    continue_final=request["continue_final"],
                    json_schema=request["json_schema"],
                    top_logprobs=2,
                )
            ]
        )[0]
        shared = len(os.path.commonprefix([text_a, text_b]))
        seen = 0
        for token in response.tokens or ():
            seen += len(token.text)
            if seen > shared:
                gaps.append(token.top[0][2] - token.top[1][2])
                break
        else:
            gaps.append(0.0)  # one side ended earlier
    return gaps


def compare(method: str, questions: int, serial: int, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Measures all sides and prints the table."""
    found, rows = {}, []
    print(f"{'side':14} {'questions':>9} {'s/question':>10} {'times':>6} {'cpu':>6}", end=" ")
    print(f"{'prefilled':>9} {'cached':>8} {'generated':>9} {'differ':>6} {'tie':>8}", flush=True)
    for side in SIDES:
        count = serial if side in SERIAL else questions
        if side == "no reuse":
            count = max(questions // 4, serial)
        workdir = folder / side.replace(" ", "_")
        workdir.mkdir()
        run = found[side] = measure(method, side, count, workdir)
        base = found["transformers"]
        seconds = (run["seconds"] - run["load_seconds"]) / count
        base_seconds = (base["seconds"] - base["load_seconds"]) / serial
        differ, gaps = 0, [0.0]
        if side != "transformers":
            texts = [
                {row["id"]: row["answer"] for row in map(json.loads, path.open(encoding="utf-8"))}
                for path in (
                    workdir / "predictions.jsonl",
                    folder / "transformers/predictions.jsonl",
                )
            ]
            differ = sum(texts[0][name] != answer for name, answer in texts[1].items())
            gaps = ties(workdir, folder / "transformers") or [0.0]
        row = {
            "side": side,
            "questions": count,
            "seconds_per_question": round(seconds, 2),
            "times_transformers": round(base_seconds / seconds, 2),
            "times_transformers_processor": round(
                base["processor"] / serial / (run["processor"] / count), 2
            ),
            "prefilled_per_question": round((run["prompt_tokens"] - run["cached_tokens"]) / count),
            "cached_per_question": round(run["cached_tokens"] / count),
            "generated_per_question": round(run["generated_tokens"] / count),
            "answers_that_differ": differ,
            "largest_tie": max(gaps),
        }
        rows.append(row)
        print(
            f"{side:14} {count:9d} {seconds:10.2f} {row['times_transformers']:6.2f} "
            f"{row['times_transformers_processor']:6.2f} {row['prefilled_per_question']:9d} "
            f"{row['cached_per_question']:8d} {row['generated_per_question']:9d} {differ:6d} "
            f"{row['largest_tie']:8.1e}",
            flush=True,
        )
    return rows


def overhead(programs: int = 1000, requests: int = 8) -> dict[str, Any]:
    """Returns the time of the scheduler and the journal, in milliseconds per request."""
    from cirag_jax.llm.types import Message
    from cirag_jax.runtime.requests import Generate, Generated
    from cirag_jax.runtime.scheduler import Job, Scheduler
    from cirag_jax.runtime.store import Journal

    class Instant:
        is_slow = True
        is_exhausted = False

        def __call__(self, calls: Any, respond: Any) -> None:
            for index in range(len(calls)):
                respond(index, Generated("text " * 50, "stop"))

    def program(name: int) -> Any:
        prompt = f"{name} " + "fact " * 500
        for step in range(requests):
            yield Generate((Message("user", f"{prompt}{step}"),), "reader")
        return "done"

    jobs = [Job(str(i), i, lambda i=i: program(i)) for i in range(programs)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal(pathlib.Path(folder) / "journal.sqlite", {}) as journal,
    ):
        start = time.perf_counter()
        complete = Scheduler({"reader": Instant()}, journal).run(jobs)
        seconds = time.perf_counter() - start
    assert complete
    count = programs * requests
    return {"requests": count, "milliseconds_per_request": round(1e3 * seconds / count, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", choices=("compare", "overhead"), default="compare")
    parser.add_argument("--method", choices=METHODS, default="cirag", help="method to compare")
    parser.add_argument("--questions", type=int, default=64, help="number of questions")
    parser.add_argument(
        "--serial", type=int, default=8, help="number of questions for the serial sides"
    )
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        method, side, questions, workdir = arguments.worker
        print(json.dumps(answer_in_process(method, side, int(questions), workdir)))
        return
    if arguments.mode == "overhead":
        print(json.dumps(overhead()))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(
            arguments.method, arguments.questions, arguments.serial, pathlib.Path(folder)
        )
    print(json.dumps({"method": arguments.method, "rows": rows}))


if __name__ == "__main__":
    with standard_streams():
        main()
