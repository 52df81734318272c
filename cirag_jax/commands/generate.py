"""Generation for a file of prompts: what ``launch/generate.py`` runs.

Every conversation is a program of one request, over the scheduler and the journal of all commands.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cirag_jax.commands import backends, identity
from cirag_jax.errors import UserError
from cirag_jax.identity import of_packages
from cirag_jax.io import say, write_lines
from cirag_jax.llm.prompts_file import read_prompts
from cirag_jax.llm.types import Generate, Generated, Token, Usage
from cirag_jax.runtime import codec, journal
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.journal import Journal, Key
from cirag_jax.runtime.requests import Program
from cirag_jax.runtime.scheduler import Job, Scheduler, progress_bar

RESPONSES = "responses.jsonl"
_OLD_JOURNAL = "journal.jsonl"
_NOT_SENT = Generated("", "error", error="not sent: the budget is exhausted")


def generate_file(config: Any, workdir: Path) -> dict[str, Any]:
    """Answers every request of ``config.prompts`` (configs/generate.py); resumes what ``workdir``
    holds.

    Writes ``responses.jsonl`` (in input order) and, while it runs, ``journal.sqlite``; returns
    counts, tokens, seconds, and tokens per second.
    """
    _check_config(config, workdir)
    names = ("max_tokens", "temperature", "top_p", "seed", "logprobs", "top_logprobs")
    requests = read_prompts(
        Path(config.prompts).expanduser(),
        {**{name: config[name] for name in names}, "stop": tuple(config.stop)},
        check_schemas=config.backend != "openai",
    )
    is_local = config.backend != "openai"
    programs = {name: _program(name, request, is_local) for name, request in requests.items()}
    with Journal(workdir / journal.FILE, identity.of_language_model(config)) as book:
        known = book.outcomes()
        pending = {name: r for name, r in requests.items() if programs[name] not in known}
        run = _Run(0.0, 0.0, 0, False, backends.model_name(config))
        if pending:
            if len(pending) < len(requests):
                kept = len(requests) - len(pending)
                say(f"resuming: {kept} of {len(requests)} requests are answered already")
            jobs = [_job(programs[name], request) for name, request in pending.items()]
            run = _answer(config, jobs, list(pending.values()), book)
        errors = {record.id: record.error for record in book.records() if record.error}
        rows = [
            _row(name, book.replay(Key(programs[name], 0), request), errors.get(programs[name]))
            for name, request in requests.items()
        ]
    write_lines(workdir / RESPONSES, rows)
    result = summary(rows, run, resumed=len(requests) - len(pending))
    if result["failures"]:
        first = next(row["error"] for row in rows if row["error"])
        say(f"{result['failures']} of {len(rows)} requests failed; the first: {first}")
    return {
        **result,
        "budget_exhausted": run.exhausted,
        "backend": config.backend,
        "model": run.model,
    }


def _program(name: str, request: Generate, is_local: bool) -> str:
    """The journal's name of a request: a prompt that was changed is another program, and so is one
    whose schema another release of the library enforces here.
    """
    decided_by = codec.encode_request(request)
    if is_local and request.json_schema is not None:
        decided_by = {**decided_by, **of_packages("llguidance")}
    return f"{name}@{codec.digest(codec.dump(decided_by))}"


def _job(program: str, request: Generate) -> Job:
    def start() -> Program[bool]:
        yield request
        return True  # the response itself is recorded once, by the journal

    return Job(program, {}, start)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Work of this process: seconds, tokens generated in them, and by which model."""

    load_seconds: float
    seconds: float
    generated_tokens: int
    exhausted: bool
    model: str | None


def _answer(config: Any, jobs: Sequence[Job], requests: Sequence[Generate], book: Journal) -> _Run:
    """Generates, with a progress bar on stderr; every response goes into the journal."""
    start = time.perf_counter()
    spent = sum(book.usage().values(), start=Usage())
    backend: Any = backends.open_backend(config, spent=spent)
    with contextlib.closing(backend), progress_bar(len(jobs), "row") as show:
        loaded = time.perf_counter()
        if hasattr(backend, "estimate"):
            say(f"estimate: {backend.estimate(requests)}")
        handler = GenerateHandler(backend, {}, seed=None)
        scheduler = Scheduler({"": handler}, book, in_flight=len(jobs), on_progress=show)
        handler.on_tokens = lambda tokens: show(scheduler.progress, tokens)
        scheduler.run(jobs)
        name = getattr(getattr(backend, "config", None), "model", None)
        return _Run(
            loaded - start,
            time.perf_counter() - loaded,
            scheduler.progress.generated_tokens,
            handler.is_exhausted,
            name or backends.model_name(config),
        )


def summary(rows: Sequence[Mapping[str, Any]], run: _Run, resumed: int) -> dict[str, Any]:
    """The result: counts and tokens of all rows, times of this run."""
    usage = sum((Usage(**row["usage"]) for row in rows), Usage())
    reasons = collections.Counter(row["finish_reason"] for row in rows)
    return {
        "num_requests": len(rows),
        "resumed": resumed,
        "failures": reasons["error"],
        "finish_reasons": {name: reasons[name] for name in ("stop", "length", "error")},
        "truncated": usage.truncated,
        **usage.tokens,
        "load_seconds": run.load_seconds,
        "seconds": run.seconds,
        "tokens_per_second": run.generated_tokens / run.seconds if run.seconds else 0.0,
    }


# ------------------------------------------------------------------------------------- the config


def _check_config(config: Any, workdir: Path) -> None:
    from cirag_jax.llm.client import is_environment_name

    if not is_environment_name(config.api_key_env):
        raise UserError("api_key_env must be the name of an environment variable, not a key.")
    if config.prompts is None:
        raise UserError("--config.prompts=FILE.jsonl is required: the conversations to answer.")
    if (workdir / _OLD_JOURNAL).exists():
        raise UserError(
            f"{workdir / _OLD_JOURNAL} is of an earlier version, which this one cannot resume; use "
            "another --workdir."
        )


# ---------------------------------------------------------------------------------------- the rows


def _row(name: str, found: Any, error: str | None) -> dict[str, Any]:
    """The line of ``responses.jsonl``."""
    if error is not None:
        found = Generated("", "error", error=error)
    response: Generated = found or _NOT_SENT
    row: dict[str, Any] = {
        "id": name,
        "text": response.text,
        "finish_reason": response.finish_reason,
        "usage": dataclasses.asdict(response.usage),
        "error": response.error,
    }
    if response.tokens is not None:
        row["tokens"] = [_token_record(token) for token in response.tokens]
    return row


def _token_record(token: Token) -> dict[str, Any]:
    record: dict[str, Any] = {"text": token.text, "id": token.id, "logprob": token.logprob}
    if token.top:
        record["top"] = [
            {"text": text, "id": index, "logprob": logprob} for text, index, logprob in token.top
        ]
    return record
