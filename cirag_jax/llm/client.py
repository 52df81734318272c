"""The backend protocol over any OpenAI-compatible endpoint, with the official client library.

The key comes from the environment and goes nowhere but into the request: every text that leaves
this module is scrubbed.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import email.utils
import json
import logging
import math
import os
import random
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.io import visible
from cirag_jax.llm import openai_format as wire
from cirag_jax.llm.chat import OMITTED, Overflow
from cirag_jax.llm.types import (
    Done,
    Generate,
    Generated,
    Message,
    More,
    Progress,
    Score,
    Scored,
    Usage,
    failed,
)

log = logging.getLogger(__name__)

_RETRIABLE = (408, 409, 425, 429)
# Errors of the library's transport: a connection that was never made cannot have been billed.
_UNSENT = ("ConnectError", "ConnectTimeout", "PoolTimeout")
_KEY_LIKE = re.compile(r"\bsk-[\w*.\-]{4,}")
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = "[key]"


@dataclasses.dataclass(frozen=True)
class OpenAIConfig:
    """Settings of `OpenAIBackend`.

    Attributes:
      model: name of the model on the server; empty: the one model that it has.
      base_url: address up to ``/v1``; None is the library's default, api.openai.com.
      server: kind of server: ``openai``, ``vllm``, ``transformers`` or ``llamacpp``.
      api_key_env: environment variable that holds the key; needed where ``base_url`` is None.
      max_concurrency: requests under way at once.
      timeout: seconds until one attempt is given up.
      max_retries: further attempts after the first.
      backoff: seconds; attempt n waits a random part of ``backoff * 2 ** n``.
      max_backoff: most seconds of that wait.
      max_retry_after: a server that asks for a longer wait, in seconds, fails the request.
      budget_tokens: most tokens, prompt and generated, to spend.
      overflow: ``truncate`` leaves out observations, oldest first, when the server says that the
        prompt is too long.
      omit: fields of the request never to send, such as ``temperature`` for reasoning models.
      extra_body: more fields for every request.
    """

    model: str
    base_url: str | None = None
    server: wire.Server = "openai"
    api_key_env: str = "OPENAI_API_KEY"
    max_concurrency: int = 8
    timeout: float = 120.0
    max_retries: int = 6
    backoff: float = 1.0
    max_backoff: float = 60.0
    max_retry_after: float = 600.0
    budget_tokens: int | None = None
    overflow: Overflow = "error"
    omit: tuple[str, ...] = ()
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class _Failure(Exception):
    """One attempt failed; the server asks for ``wait`` seconds, and may have ``billed`` it."""

    def __init__(self, reason: str, *, retriable: bool, wait: float | None = None, billed=False):
        super().__init__(reason)
        self.retriable, self.wait, self.billed = retriable, wait, billed


class _TooLong(Exception):
    """The server says that the prompt does not fit."""


class _OutOfBudget(Exception):
    """Sending this would exceed the budget."""


class Budget:
    """Counts the tokens that are spent and under way; once full, it stays full."""

    def __init__(self, limit: int | None, spent: int):
        self._limit, self._spent, self._held = limit, spent, 0
        self.exhausted = False
        self.reason = ""

    def admit(self, tokens: int) -> None:
        """Sets tokens aside before a request is sent; raises `_OutOfBudget` where it is none."""
        total = self._spent + self._held + tokens
        if self._limit is not None and not self.exhausted and total > self._limit:
            self.exhausted = True
            self.reason = (
                f"the budget of {self._limit} tokens would be exceeded ({self._spent} spent, "
                f"{self._held} under way, {tokens} at most for the next request)"
            )
        if self.exhausted:
            raise _OutOfBudget(f"not sent: {self.reason}")
        self._held += tokens

    def settle(self, held: int, spent: int) -> None:
        """Replaces tokens set aside by those that were spent."""
        self._held -= held
        self._spent += spent


class OpenAIBackend:
    """Generates through an OpenAI-compatible server; see `cirag_jax.llm.types.Backend`.

    Attributes:
      usage: of all requests answered so far.
      budget_exhausted: a request was not sent, and none will be, for want of budget.
    """

    takes_more = True

    def __init__(
        self,
        config: OpenAIConfig,
        *,
        spent: Usage | None = None,
    ):
        """Reads the key from the environment; without ``config.model``, asks the server for it.

        ``spent`` counts against the budget already.
        """
        _check(config)
        self.config = config
        self.usage = Usage()
        self._key = _key(config)
        if not config.model:
            self.config = dataclasses.replace(config, model=self._only_model())
        used = spent or Usage()
        self._budget = Budget(config.budget_tokens, used.prompt_tokens + used.generated_tokens)
        self._limits: set[asyncio.Timeout] = set()

    def _only_model(self) -> str:
        """The model of a server that has just one."""
        import openai

        url = self.config.base_url
        if url is None:
            raise UserError("model must name one of the models of api.openai.com.")
        try:
            with openai.OpenAI(
                api_key=self._key or "none",
                base_url=url,
                timeout=self.config.timeout,
                max_retries=self.config.max_retries,
            ) as client:
                names = [wire.whole(model.id) for model in client.models.list()]
        except (
            *(openai.OpenAIError, ValueError, TypeError, AttributeError, RecursionError),
        ) as error:
            reason = self._scrub(f"{type(error).__name__}: {error}")
            raise UserError(f"{url} does not say which models it has ({reason}).") from None
        if len(names) != 1:
            listed = ", ".join(names[:8]) or "none"
            raise UserError(f"model must name one of the models of {url}: {listed}.")
        return names[0]

    @property
    def budget_exhausted(self) -> bool:
        """Whether the budget has stopped the sending of requests."""
        return self._budget.exhausted

    def estimate(self, requests: Sequence[Generate]) -> str:
        """Tokens that the requests may take: prompts on the high side, texts at full length."""
        prompt = sum(wire.estimate_tokens(request.messages) for request in requests)
        generated = sum(request.max_tokens for request in requests)
        return (
            f"{len(requests)} requests: at most about {prompt} prompt tokens and "
            f"{generated} generated tokens"
        )

    def generate(
        self,
        requests: Sequence[Generate],
        progress: Progress | None = None,
        done: Done | None = None,
        more: More | None = None,
    ) -> list[Generated]:
        """One response a request, in order; failures are reported in the responses.

        ``more`` is called whenever another request may be under way and none waits: what it returns
        is answered as well.
        """
        if not requests:
            return []
        run = self._generate(requests, progress, done, more)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(run)
        # Called from within an event loop, as in a notebook: a thread has room for another.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, run).result()

    def score(self, requests: Sequence[Score]) -> list[Scored]:
        """Raises `UserError`: chat completions do not return the probability of given text."""
        raise UserError("Scoring given text is not available over HTTP; use backend=jax.")

    def close(self) -> None:
        """Nothing is held between calls."""

    # ------------------------------------------------------------------------------- the requests

    async def _generate(
        self,
        requests: Sequence[Generate],
        progress: Progress | None,
        done: Done | None,
        more: More | None,
    ) -> list[Generated]:
        import openai

        responses: list[Generated | None] = []
        waiting: collections.deque[tuple[int, Generate]] = collections.deque()
        busy = finished = generated = 0
        limit = self.config.timeout
        client = openai.AsyncOpenAI(
            api_key=self._key or "none",
            base_url=self.config.base_url or "https://api.openai.com/v1",
            # A connection that is never made must show as such before the attempt's own limit,
            # which alone bounds the rest.
            timeout=openai.Timeout(None, connect=0.9 * limit, pool=0.9 * limit),
            max_retries=0,
        )

        def admit(requests: Sequence[Generate]) -> None:
            waiting.extend(enumerate(requests, len(responses)))
            responses.extend([None] * len(requests))

        def start() -> None:
            nonlocal busy
            while busy < self.config.max_concurrency:
                if not waiting and more is not None:
                    admit(self._undisturbed(more))
                if not waiting:
                    return
                busy += 1
                group.create_task(work(*waiting.popleft()))

        async def work(index: int, request: Generate) -> None:
            nonlocal busy, finished, generated
            response = await self._respond(client, request)
            responses[index] = response
            self.usage += response.usage
            busy -= 1
            finished += 1
            generated += response.usage.generated_tokens
            if done is not None:
                done(index, response)
            if progress is not None:
                progress(finished, generated)
            start()

        admit(requests)
        async with client, asyncio.TaskGroup() as group:
            start()
        if self.budget_exhausted:
            log.warning("Stopped: %s.", self._budget.reason)
        return [response for response in responses if response is not None]

    def _undisturbed(self, more: More) -> Sequence[Generate]:
        """What ``more`` returns; answers that arrive while it works do not become late by it."""
        start = asyncio.get_running_loop().time()
        try:
            return more()
        finally:
            passed = asyncio.get_running_loop().time() - start
            for limit in self._limits:
                if not limit.expired():
                    limit.reschedule((limit.when() or 0.0) + passed)

    async def _respond(self, client: Any, request: Generate) -> Generated:
        """Every outcome of one request, failures included, as a response."""
        start = time.monotonic()
        truncated = 0
        try:
            while True:
                try:
                    answer = await self._attempts(client, request)
                    break
                except _TooLong as error:
                    shorter = _leave_out_oldest(request.messages)
                    if self.config.overflow != "truncate" or shorter is None:
                        raise wire.Refused(str(error)) from None
                    request, truncated = dataclasses.replace(request, messages=shorter), 1
        except (_Failure, _OutOfBudget, wire.Refused) as error:
            usage = Usage(seconds=time.monotonic() - start, truncated=truncated)
            return failed(self._scrub(str(error)), usage)
        usage = self._usage(request, answer)
        return Generated(
            text=answer.text,
            finish_reason=answer.finish_reason,
            usage=dataclasses.replace(usage, seconds=time.monotonic() - start, truncated=truncated),
            tokens=answer.tokens,
        )

    async def _attempts(self, client: Any, request: Generate) -> wire.Answer:
        """Tries until there is an answer, the failure is final or the attempts are used up.

        Not by the library's own retries: the budget must admit every attempt before it is sent,
        and those do not try again after an answer that is cut short or no JSON, nor after a
        trickle, nor wait longer than a minute where the server asks for it.
        """
        body = wire.request_body(request, self.config.model, self.config.server, self.config.omit)
        prompt = wire.estimate_tokens(request.messages)
        held = prompt + request.max_tokens
        for attempt in range(self.config.max_retries + 1):
            self._budget.admit(held)
            spent = 0
            try:
                answer = await self._attempt(client, request, body)
                usage = self._usage(request, answer)
                spent = usage.prompt_tokens + usage.generated_tokens
                return answer
            except wire.Refused:
                spent = held
                raise
            except _Failure as error:
                # An answer that was lost on its way may have been billed all the same.
                spent = held if error.billed else spent
                if not error.retriable:
                    raise
                failure = error
            finally:
                self._budget.settle(held, spent)
            if attempt < self.config.max_retries:
                await self._wait(attempt, failure)
        raise _Failure(f"gave up after {attempt + 1} attempts: {failure}", retriable=False)

    async def _wait(self, attempt: int, failure: _Failure) -> None:
        """Exponential back-off with full jitter, never less than the server asks for."""
        if failure.wait is not None and failure.wait > self.config.max_retry_after:
            raise _Failure(f"{failure}, to be tried again in {failure.wait:g} s", retriable=False)
        ceiling = min(self.config.max_backoff, self.config.backoff * 2**attempt)
        jitter = ceiling * random.random()
        # Those whom the server sends away together must not come back together.
        await asyncio.sleep(jitter if failure.wait is None else failure.wait + jitter)

    async def _attempt(
        self, client: Any, request: Generate, body: Mapping[str, Any]
    ) -> wire.Answer:
        import openai

        known = {name: body[name] for name in ("model", "messages") if name in body}
        extra = {name: value for name, value in body.items() if name not in known}
        limit = f"no answer within {self.config.timeout:g} s"
        try:
            # The library's own limit would hold for every read: a trickle would never end.
            async with self._limit():
                raw = await client.chat.completions.with_raw_response.create(
                    **known, extra_body={**extra, **self.config.extra_body}
                )
                content = raw.http_response.content
        except (openai.APITimeoutError, TimeoutError) as error:
            billed = type(error.__cause__).__name__ not in _UNSENT
            raise _Failure(limit, retriable=True, billed=billed) from None
        except openai.APIStatusError as error:
            raise self._status_failure(error) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            billed = type(cause).__name__ not in _UNSENT
            reason = f"the connection failed ({type(cause).__name__}: {cause})"
            raise _Failure(self._scrub(reason), retriable=True, billed=billed) from None
        except (openai.OpenAIError, ValueError) as error:
            reason = f"the client refuses the request ({type(error).__name__}: {error})"
            raise _Failure(self._scrub(reason), retriable=False) from None
        try:
            return wire.read_answer(content, request)
        except wire.BadAnswer as error:
            raise _Failure(str(error), retriable=True, billed=True) from None

    @contextlib.asynccontextmanager
    async def _limit(self) -> AsyncIterator[asyncio.Timeout]:
        """Ends an attempt in time, see `_undisturbed`."""
        async with asyncio.timeout(self.config.timeout) as limit:
            self._limits.add(limit)
            try:
                yield limit
            finally:
                self._limits.remove(limit)

    def _status_failure(self, error: Any) -> Exception:
        status, text = error.status_code, _error_text(error)
        reason = self._scrub(f"the server answered {status}: {text}")
        if wire.is_too_long(status, text):
            return _TooLong(reason)
        retriable = status in _RETRIABLE or status >= 500
        if "insufficient_quota" in text:  # a 429 that no waiting cures
            retriable = False
        wait = retry_after(error.response.headers, time.time())
        return _Failure(reason, retriable=retriable, wait=wait)

    # --------------------------------------------------------------------------------- accounting

    def _usage(self, request: Generate, answer: wire.Answer) -> Usage:
        """Tokens as the server counts them, else estimated on the high side."""
        prompt, generated = answer.prompt_tokens, answer.generated_tokens
        if prompt is None:
            prompt = wire.estimate_tokens(request.messages)
        if generated is None:
            generated = math.ceil(len(answer.text.encode("utf-8", "replace")) / 3)
        cached = min(answer.cached_tokens, prompt)
        return Usage(prompt, cached, generated)

    def _scrub(self, text: str) -> str:
        if self._key:
            text = text.replace(self._key, _SECRET)
        # Others' words go into the journal, to the terminal and onto pages.
        return visible(" ".join(_KEY_LIKE.sub(_SECRET, text).split()))


# ------------------------------------------------------------------------------------- helpers


def _leave_out_oldest(messages: Sequence[Message]) -> tuple[Message, ...] | None:
    """The messages without their oldest observation; None where there is none left."""
    for index, message in enumerate(messages):
        if message.observation and message.observation != OMITTED:
            shorter = dataclasses.replace(message, observation=OMITTED)
            return (*messages[:index], shorter, *messages[index + 1 :])
    return None


def _error_text(error: Any) -> str:
    """What the server says about a refusal, at most 300 characters of it."""
    text = ""
    with contextlib.suppress(Exception):  # the body may be anything
        text = error.response.text
    with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
        inner = json.loads(text)
        inner = inner.get("error", inner)
        if isinstance(inner, dict) and inner.get("message"):
            text = " ".join(str(inner[k]) for k in ("code", "message") if inner.get(k))
    return (" ".join(text.split()) or "no reason given")[:300]


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds (at least 0) that a server asks to wait, by Retry-After as seconds or as an HTTP
    date.

    ``now`` is in seconds since 1970. None where the header is absent or unusable.
    """
    value = (headers.get("retry-after") or "").strip()
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _key(config: OpenAIConfig) -> str:
    key = os.environ.get(config.api_key_env, "").strip()
    if not key and config.base_url is None:
        raise UserError(f"The environment variable {config.api_key_env} must hold the API key.")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"The environment variable {config.api_key_env} holds no usable API key.")
    return key


def is_environment_name(text: str) -> bool:
    """Whether ``text`` may name an environment variable; a key pasted instead mostly may not."""
    return bool(_ENVIRONMENT_NAME.fullmatch(text)) and not _KEY_LIKE.match(text)


def _check(config: OpenAIConfig) -> None:
    if not is_environment_name(config.api_key_env):
        raise UserError("api_key_env must be the name of an environment variable, not a key.")
    check_choice("server", config.server, wire.SERVERS)
    if config.base_url is not None:
        try:
            url = urllib.parse.urlsplit(config.base_url)
            usable = url.scheme in ("http", "https") and bool(url.hostname)
        except ValueError:
            usable, url = False, urllib.parse.urlsplit("")
        if url.username or url.password or url.query:
            raise UserError("base_url must hold no credentials; the key goes into api_key_env.")
        if not usable:
            raise UserError(f"base_url={config.base_url!r} is not like http://localhost:8000/v1.")
    for name in ("max_concurrency", "timeout"):
        if getattr(config, name) <= 0:
            raise UserError(f"{name} must be positive.")
    check_at_least(0, config, "max_retries", "backoff", "max_backoff", prefix="")
    if config.budget_tokens is not None:
        check_at_least(0, config, "budget_tokens", prefix="")
