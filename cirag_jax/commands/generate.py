"""Text generation for a file of prompts: the command ``launch/generate.py``.

Each prompt is a `Program` with one request.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cirag_jax.commands import backends, identity
from cirag_jax.errors import UserError
from cirag_jax.identity import of_packages
from cirag_jax.io import say, write_lines
from cirag_jax.llm.prompts_file import read_prompts
from cirag_jax.llm.types import Generate, Generated, Token, Usage
from cirag_jax.runtime import codec
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.records import RequestKey
from cirag_jax.runtime.requests import Program
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Handler, Job
from cirag_jax.runtime.store import JOURNAL, Journal
from cirag_jax.server import is_environment_name

RESPONSES = "responses.jsonl"
_OLD_JOURNAL = "journal.jsonl"
_NOT_SENT = Generated("", "error", error="not sent: the budget is exhausted")


def generate_file(config: Any, workdir: Path) -> dict[str, Any]:
    """Answers every request in the file ``config.prompts``; resumes an interrupted run.

    ``config`` comes from configs/generate.py. Writes ``responses.jsonl`` in input order and, while
    it runs, ``journal.sqlite``. Returns counts, tokens, seconds, and tokens per second.
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
    handler: GenerateHandler | None = None

    def open_handlers(stack: contextlib.ExitStack, journal: Journal) -> dict[type | str, Handler]:
        nonlocal handler
        backend: Any = backends.open_for_run(config, stack, journal)
        if hasattr(backend, "estimate"):
            say(f"estimate: {backend.estimate([requests[name] for name in pending])}")
        handler = GenerateHandler(backend, {}, seed=None)
        return {"": handler}

    settings = identity.of_language_model(config)
    with Runner(workdir / JOURNAL, settings, open_handlers, in_flight=len(requests)) as runner:
        outcomes = runner.journal.outcomes()
        pending = [name for name, program in programs.items() if program not in outcomes]
        if 0 < len(pending) < len(requests):
            answered = len(requests) - len(pending)
            say(f"resuming: {answered} of {len(requests)} requests are already answered")
        runner.run([_job(programs[name], requests[name]) for name in pending], unit="row")
        seconds, journal = runner.run_seconds, runner.journal
        errors = {record.id: record.error for record in journal.records() if record.error}
        rows = [
            _row(name, journal.replay(RequestKey(program, 0), requests[name]), errors.get(program))
            for name, program in programs.items()
        ]
    write_lines(workdir / RESPONSES, rows)
    result = _counts(rows)
    if result["failures"]:
        first = next(row["error"] for row in rows if row["error"])
        say(f"{result['failures']} of {len(rows)} requests failed; the first: {first}")
    model = handler and getattr(getattr(handler.backend, "config", None), "model", None)
    return {
        "num_requests": len(rows),
        "resumed": len(requests) - len(pending),
        **result,
        "load_seconds": runner.load_seconds,
        "seconds": seconds,
        "tokens_per_second": runner.progress.generated_tokens / seconds if seconds else 0.0,
        "budget_exhausted": handler is not None and handler.is_exhausted,
        "backend": config.backend,
        "model": model or backends.model_name(config),
    }


def _program(name: str, request: Generate, is_local: bool) -> str:
    """Returns the request's name in the journal, which includes a hash of the request.

    For a local model with a schema, the hash covers the version of llguidance (the enforcer).
    """
    content = codec.encode_request(request)
    if is_local and request.json_schema is not None:
        content = {**content, **of_packages("llguidance")}
    return f"{name}@{codec.digest(codec.dump(content))}"


def _job(program: str, request: Generate) -> Job:
    def start() -> Program[bool]:
        yield request
        return True  # the journal records the response itself

    return Job(program, {}, start)


def _counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    usage = sum((Usage(**row["usage"]) for row in rows), Usage())
    reasons = collections.Counter(row["finish_reason"] for row in rows)
    return {
        "failures": reasons["error"],
        "finish_reasons": {name: reasons[name] for name in ("stop", "length", "error")},
        **usage.counts,
    }


def _check_config(config: Any, workdir: Path) -> None:
    if not is_environment_name(config.api_key_env):
        raise UserError("api_key_env must be the name of an environment variable, not a key.")
    if config.prompts is None:
        raise UserError("--config.prompts=FILE.jsonl is required: the file of conversations.")
    if (workdir / _OLD_JOURNAL).exists():
        raise UserError(
            f"{workdir / _OLD_JOURNAL} was written by an earlier version and cannot be resumed; "
            "use another --workdir."
        )


def _row(name: str, recorded: Any, error: str | None) -> dict[str, Any]:
    """Returns the line of ``responses.jsonl``."""
    if error is not None:
        recorded = Generated("", "error", error=error)
    response: Generated = recorded or _NOT_SENT
    row: dict[str, Any] = {
        "id": name,
        "text": response.text,
        "finish_reason": response.finish_reason,
        "usage": dataclasses.asdict(response.usage),
        "error": response.error,
    }
    if response.thoughts is not None:
        row["thoughts"] = response.thoughts
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
