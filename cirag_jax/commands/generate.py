"""Generation for a file of prompts: what ``launch/generate.py`` runs."""

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from cirag_jax.commands import backends
from cirag_jax.errors import UserError
from cirag_jax.io import say, write_lines
from cirag_jax.llm.prompts_file import read_prompts
from cirag_jax.llm.types import Backend, Generate, Generated, Token, Usage
from cirag_jax.models.io.fingerprint import check_same

log = logging.getLogger(__name__)

RESPONSES = "responses.jsonl"
JOURNAL = "journal.jsonl"


def generate_file(config: Any, workdir: Path) -> dict[str, Any]:
    """Answers every request of ``config.prompts``; goes on with what ``workdir`` holds.

    Writes ``responses.jsonl`` (in input order) and, while it runs, ``journal.jsonl``.

    Args:
      config: of configs/generate.py.
      workdir: an existing folder.

    Returns:
      Counts, tokens, seconds, tokens per second and cost.

    Raises:
      UserError: the prompts, the config or the model cannot be used, or ``workdir`` was started
        with other settings.
    """
    _check_config(config, workdir)
    requests = read_prompts(
        Path(config.prompts).expanduser(),
        _defaults(config),
        check_schemas=config.backend != "openai",
    )
    with Journal(workdir / JOURNAL, backends.fingerprint(config)) as journal:
        pending = {
            name: request
            for name, request in requests.items()
            if journal.find(name, request) is None
        }
        run = _Run(0.0, 0.0, 0)
        name, exhausted = backends.model_name(config), False
        if pending:
            if len(pending) < len(requests):
                kept = len(requests) - len(pending)
                say(f"going on: {kept} of {len(requests)} requests are answered already")
            start = time.perf_counter()
            backend = backends.open_backend(config, spent=journal.spent)
            loading = time.perf_counter() - start
            with contextlib.closing(backend):
                run = _answer(backend, pending, journal)
                run = dataclasses.replace(run, load_seconds=loading)
                exhausted = bool(getattr(backend, "budget_exhausted", False))
                name = getattr(getattr(backend, "config", None), "model", None) or name
        rows = [journal.row(name) for name in requests]
        write_lines(workdir / RESPONSES, rows)
    result = summary(rows, run, resumed=len(requests) - len(pending))
    if result["failures"]:
        first = next(row["error"] for row in rows if row["error"])
        say(f"{result['failures']} of {len(rows)} requests failed; the first: {first}")
    return {**result, "budget_exhausted": exhausted, "backend": config.backend, "model": name}


@dataclasses.dataclass(frozen=True)
class _Run:
    """Work of this process: seconds, and tokens generated in them."""

    load_seconds: float
    seconds: float
    generated_tokens: int


def _answer(backend: Backend, requests: Mapping[str, Generate], journal: "Journal") -> _Run:
    """Generates, with a progress bar on stderr; every response goes into the journal."""
    names, asked = list(requests), list(requests.values())
    estimate = getattr(backend, "estimate", None)
    if estimate is not None:
        say(f"estimate: {estimate(asked)}")
    start, before = time.perf_counter(), backend.usage.generated_tokens
    with tqdm(total=len(asked), unit="row", file=sys.stderr, mininterval=1) as bar:

        def progress(rows: int, tokens: int) -> None:
            rate = tokens / max(time.perf_counter() - start, 1e-9)
            bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
            bar.update(rows - bar.n)

        backend.generate(asked, progress, lambda i, response: journal.append(names[i], response))
    return _Run(0.0, time.perf_counter() - start, backend.usage.generated_tokens - before)


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
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "generated_tokens": usage.generated_tokens,
        "cost": usage.cost,
        "load_seconds": run.load_seconds,
        "seconds": run.seconds,
        "tokens_per_second": run.generated_tokens / run.seconds if run.seconds else 0.0,
    }


# ------------------------------------------------------------------------------------- the config


def _defaults(config: Any) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "seed", "logprobs", "top_logprobs")
    return {**{name: config[name] for name in names}, "stop": tuple(config.stop)}


def _check_config(config: Any, workdir: Path) -> None:
    from cirag_jax.llm.client import is_environment_name

    if not is_environment_name(config.api_key_env):
        raise UserError("api_key_env must be the name of an environment variable, not a key.")
    if config.prompts is None:
        raise UserError("--config.prompts=FILE.jsonl is required: the conversations to answer.")


# ------------------------------------------------------------------------------------ the journal


class Journal:
    """Responses as they came, so that a run that was stopped goes on; a context manager.

    The first line holds the settings; every other one a row of ``responses.jsonl`` and the hash of
    its request, so that a changed prompt is answered anew. Of several rows the last one counts.

    Attributes:
      spent: tokens and cost of all rows.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        """Opens or begins the journal.

        Raises:
          UserError: it was begun with other settings, or cannot be read or written.
        """
        self._path = path
        self._rows: dict[str, dict[str, Any]] = {}
        self._hashes: dict[str, str] = {}
        self.spent = Usage()
        try:
            end = self._read(settings) if path.exists() else 0
            self._file: IO[bytes] = path.open("r+b" if end else "wb")
            self._file.truncate(end)  # half a line, left by a run that was killed
            self._file.seek(end)
            if not end:
                self._write({"settings": settings})
        except OSError as error:
            raise UserError(f"{path} cannot be used: {error.strerror or error}.") from None

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, settings: Mapping[str, Any]) -> int:
        """Reads whole lines; returns where they end, in bytes, or 0 to begin anew."""
        end, old = 0, {}
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    break
                try:
                    record = json.loads(raw)
                    if number == 1:
                        old = dict(record["settings"])
                    else:
                        self._keep(record["request"], record["row"])
                except (ValueError, KeyError, TypeError):
                    raise UserError(
                        f"{self._path}:{number} is damaged; remove the file to begin anew."
                    ) from None
                end += len(raw)
        if not self._rows:
            return 0  # a run that failed before its first response binds nobody
        self._check(old, settings)
        return end

    def _check(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        check_same(self._path, old, new)

    def _keep(self, request: str, row: dict[str, Any]) -> None:
        self._rows[row["id"]], self._hashes[row["id"]] = row, request
        self.spent += Usage(**row["usage"])

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def find(self, name: str, request: Generate) -> dict[str, Any] | None:
        """The row that answers this very request without an error, if there is one."""
        row, old = self._rows.get(name), self._hashes.get(name)
        if row is not None and row["error"] is None and old == _hash(request):
            return row
        self._hashes[name] = _hash(request)
        return None

    def append(self, name: str, response: Generated) -> None:
        """Adds a response to a request that `find` did not know."""
        row = response_row(name, response)
        digest = self._hashes[name]
        self._write({"request": digest, "row": row})
        self._keep(digest, row)

    def row(self, name: str) -> dict[str, Any]:
        """The row of a request that has been answered."""
        return self._rows[name]


def _hash(request: Generate) -> str:
    text = json.dumps(dataclasses.asdict(request), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def response_row(name: str, response: Generated) -> dict[str, Any]:
    """The line of ``responses.jsonl``."""
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
