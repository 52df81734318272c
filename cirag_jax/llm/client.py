"""A backend for OpenAI-compatible servers, using the official client library.

The API key is read from the environment, and removed from every message of this module.
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

from cirag_jax.errors import UserError
from cirag_jax.io import replace_surrogates, visible
from cirag_jax.llm import openai_format as wire
from cirag_jax.llm import types as llm
from cirag_jax.llm.chat import Overflow, observation_length, shorten
from cirag_jax.types import Count, NonNegativeFloat, PositiveFloat, PositiveInt
from cirag_jax.validation import check_fields

log = logging.getLogger(__name__)

_RETRIABLE = (408, 409, 425, 429)
# HTTP library errors that occur before a request is sent, so the request cannot have been billed.
_UNSENT = ("ConnectError", "ConnectTimeout", "PoolTimeout")
_KEY_LIKE = re.compile(r"\bsk-[\w*.\-]{4,}")
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = "[key]"


@dataclasses.dataclass(frozen=True)
class OpenAIConfig:
    """Settings of `OpenAIBackend`.

    Attributes:
      model: name of the model on the server; if empty, the server must have exactly one model.
      base_url: address up to ``/v1``; None means api.openai.com.
      server: kind of server: ``openai``, ``vllm``, ``transformers`` or ``llamacpp``.
      api_key_env: environment variable with the key; required if ``base_url`` is None.
      max_concurrency: maximum number of concurrent requests.
      timeout: seconds until an attempt is abandoned.
      max_retries: maximum number of attempts after the first.
      backoff: base of the wait in seconds; retry n waits a random part of ``backoff * 2 ** n``.
      max_backoff: maximum of ``backoff * 2 ** n``, in seconds.
      max_retry_after: maximum wait in seconds that the server may request; if it requests more, the
        request fails.
      budget_tokens: maximum total of prompt and generated tokens.
      overflow: ``truncate`` shortens observations, oldest first, if the server rejects a prompt as
        too long.
      omit: request fields that are not sent, such as ``temperature`` for reasoning models.
      extra_body: additional fields of every request.
    """

    model: str
    base_url: str | None = None
    server: wire.Server = "openai"
    api_key_env: str = "OPENAI_API_KEY"
    max_concurrency: PositiveInt = 8
    timeout: PositiveFloat = 120.0
    max_retries: Count = 6
    backoff: NonNegativeFloat = 1.0
    max_backoff: NonNegativeFloat = 60.0
    max_retry_after: float = 600.0
    budget_tokens: Count | None = None
    overflow: Overflow = "error"
    omit: tuple[str, ...] = ()
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class _Failure(Exception):
    """An attempt failed.

    ``wait`` is the wait in seconds that the server requests. ``billed`` is True if the attempt may
    have been billed.
    """

    def __init__(self, reason: str, *, retriable: bool, wait: float | None = None, billed=False):
        super().__init__(reason)
        self.retriable, self.wait, self.billed = retriable, wait, billed


class _TooLong(Exception):
    """The server rejected the prompt as too long, by about the share ``excess`` of its tokens."""

    def __init__(self, reason: str, excess: float):
        super().__init__(reason)
        self.excess = excess


class _OutOfBudget(Exception):
    """A request would exceed the budget."""


class _Budget:
    """Counts spent and reserved tokens, and rejects all requests after the budget is exhausted."""

    def __init__(self, limit: int | None, spent: int):
        self._limit, self._spent, self._reserved = limit, spent, 0
        self.exhausted = False
        self.reason = ""

    def reserve(self, tokens: int) -> None:
        """Reserves tokens before a request is sent, or raises `_OutOfBudget`."""
        total = self._spent + self._reserved + tokens
        if self._limit is not None and not self.exhausted and total > self._limit:
            self.exhausted = True
            self.reason = (
                f"the budget of {self._limit} tokens would be exceeded ({self._spent} spent, "
                f"{self._reserved} under way, {tokens} at most for the next request)"
            )
        if self.exhausted:
            raise _OutOfBudget(f"not sent: {self.reason}")
        self._reserved += tokens

    def settle(self, reserved: int, spent: int) -> None:
        """Replaces reserved tokens with the tokens that were spent."""
        self._reserved -= reserved
        self._spent += spent


class OpenAIBackend:
    """Generates through an OpenAI-compatible server; see `cirag_jax.llm.types.Backend`.

    ``usage`` is the total over all responses.
    """

    accepts_more = True

    def __init__(self, config: OpenAIConfig, *, spent: llm.Usage | None = None):
        """Reads the key from the environment, and a missing model name from the server.

        The tokens in ``spent`` were used earlier; they count against the budget.
        """
        _check(config)
        self.config = config
        self.usage = llm.Usage()
        self._key = _key(config)
        if not config.model:
            self.config = dataclasses.replace(config, model=self._only_model())
        spent = spent or llm.Usage()
        self._budget = _Budget(config.budget_tokens, spent.prompt_tokens + spent.generated_tokens)
        self._timeouts: set[asyncio.Timeout] = set()

    def _only_model(self) -> str:
        import openai

        url = self.config.base_url
        if url is None:
            raise UserError("model must be the name of a model of api.openai.com.")
        try:
            with openai.OpenAI(
                api_key=self._key or "none",
                base_url=url,
                timeout=self.config.timeout,
                max_retries=self.config.max_retries,
            ) as client:
                names = [replace_surrogates(model.id) for model in client.models.list()]
        except Exception as error:  # including any error of parsing a strange response
            reason = self._scrub(f"{type(error).__name__}: {error}")
            raise UserError(f"{url} does not list its models ({reason}).") from None
        if len(names) != 1:
            listed = ", ".join(names[:8]) or "none"
            raise UserError(f"model must be one of the models of {url}: {listed}.")
        return names[0]

    @property
    def budget_exhausted(self) -> bool:
        """Whether the budget is exhausted, so no further requests are sent."""
        return self._budget.exhausted

    def estimate(self, requests: Sequence[llm.Generate]) -> str:
        """Returns a sentence with the estimated maximum numbers of tokens of the requests."""
        prompt = sum(wire.estimate_tokens(request.messages) for request in requests)
        generated = sum(request.max_tokens for request in requests)
        return (
            f"{len(requests)} requests: at most about {prompt} prompt tokens and "
            f"{generated} generated tokens"
        )

    def generate(
        self,
        requests: Sequence[llm.Generate],
        progress: llm.OnProgress | None = None,
        done: llm.OnResponse | None = None,
        more: llm.MoreRequests | None = None,
    ) -> list[llm.Generated]:
        """Returns one response per request, in order; failed requests have an ``error``.

        ``more`` is called for further requests if there is room for a request and none is waiting.
        """
        if not requests:
            return []
        run = self._generate(requests, progress, done, more)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(run)
        # If an event loop is already running (in a notebook), a second loop needs its own thread.
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            return executor.submit(asyncio.run, run).result()

    def score(self, requests: Sequence[llm.Score]) -> list[llm.Scored]:
        """Raises `UserError`: chat completions do not return the probability of given text."""
        raise UserError("Scoring given text is not available over HTTP; use backend=jax.")

    def close(self) -> None:
        """Does nothing, because no connection outlives a call."""

    async def _generate(
        self,
        requests: Sequence[llm.Generate],
        progress: llm.OnProgress | None,
        done: llm.OnResponse | None,
        more: llm.MoreRequests | None,
    ) -> list[llm.Generated]:
        import openai

        responses: list[llm.Generated | None] = []
        waiting: collections.deque[tuple[int, llm.Generate]] = collections.deque()
        busy = finished = generated = 0
        timeout = 0.9 * self.config.timeout
        client = openai.AsyncOpenAI(
            api_key=self._key or "none",
            base_url=self.config.base_url or "https://api.openai.com/v1",
            # A failing connection must be reported before the attempt's own timeout expires,
            # which covers everything else.
            timeout=openai.Timeout(None, connect=timeout, pool=timeout),
            max_retries=0,
        )

        def admit(requests: Sequence[llm.Generate]) -> None:
            waiting.extend(enumerate(requests, len(responses)))
            responses.extend([None] * len(requests))

        def start() -> None:
            nonlocal busy
            while busy < self.config.max_concurrency:
                if not waiting and more is not None:
                    admit(self._call_more(more))
                if not waiting:
                    return
                busy += 1
                group.create_task(work(*waiting.popleft()))

        async def work(index: int, request: llm.Generate) -> None:
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

    def _call_more(self, more: llm.MoreRequests) -> Sequence[llm.Generate]:
        """Calls ``more``, and extends all timeouts by the time that it takes."""
        start = asyncio.get_running_loop().time()
        try:
            return more()
        finally:
            elapsed = asyncio.get_running_loop().time() - start
            for timeout in self._timeouts:
                if not timeout.expired():
                    timeout.reschedule((timeout.when() or 0.0) + elapsed)

    async def _respond(self, client: Any, request: llm.Generate) -> llm.Generated:
        """Returns the response to a request, with an ``error`` if the request fails."""
        start = time.monotonic()
        truncated = 0
        try:
            while True:
                try:
                    completion = await self._retry(client, request)
                    break
                except _TooLong as error:
                    if self.config.overflow != "truncate" or not observation_length(
                        request.messages
                    ):
                        raise wire.RequestRejected(str(error)) from None
                    length = sum(len(message.text) for message in request.messages)
                    shorter, _ = shorten(request.messages, math.ceil(length * error.excess))
                    request, truncated = dataclasses.replace(request, messages=shorter), 1
        except (_Failure, _OutOfBudget, wire.RequestRejected) as error:
            usage = llm.Usage(seconds=time.monotonic() - start, truncated=truncated)
            return llm.failed(self._scrub(str(error)), usage)
        usage = self._usage(request, completion)
        return llm.Generated(
            text=completion.text,
            finish_reason=completion.finish_reason,
            usage=dataclasses.replace(usage, seconds=time.monotonic() - start, truncated=truncated),
            tokens=completion.tokens,
            thoughts=completion.thoughts,
        )

    async def _retry(self, client: Any, request: llm.Generate) -> wire.Completion:
        """Sends a request until it succeeds, fails permanently, or has no attempts left.

        The library's retries are not used, because the budget must reserve tokens for every
        attempt. The library also does not retry after a malformed response or a slow stream, and
        never waits for more than a minute.
        """
        body = wire.request_body(request, self.config.model, self.config.server, self.config.omit)
        reserved = wire.estimate_tokens(request.messages) + request.max_tokens
        for attempt in range(self.config.max_retries + 1):
            self._budget.reserve(reserved)
            spent = 0
            try:
                completion = await self._attempt(client, request, body)
                usage = self._usage(request, completion)
                spent = usage.prompt_tokens + usage.generated_tokens
                return completion
            except wire.RequestRejected:
                spent = reserved
                raise
            except _Failure as error:
                spent = reserved if error.billed else spent
                if not error.retriable:
                    raise
                failure = error
            finally:
                self._budget.settle(reserved, spent)
            if attempt < self.config.max_retries:
                await self._wait(attempt, failure)
        raise _Failure(f"gave up after {attempt + 1} attempts: {failure}", retriable=False)

    async def _wait(self, attempt: int, failure: _Failure) -> None:
        """Waits for a random time (exponential backoff), plus the wait that the server requests."""
        if failure.wait is not None and failure.wait > self.config.max_retry_after:
            raise _Failure(f"{failure}; retry after {failure.wait:g} s", retriable=False)
        ceiling = min(self.config.max_backoff, self.config.backoff * 2**attempt)
        jitter = ceiling * random.random()
        # The jitter spreads the retries of requests that were rejected together.
        await asyncio.sleep(jitter if failure.wait is None else failure.wait + jitter)

    async def _attempt(
        self, client: Any, request: llm.Generate, body: Mapping[str, Any]
    ) -> wire.Completion:
        import openai

        known = {name: body[name] for name in ("model", "messages") if name in body}
        extra = {name: value for name, value in body.items() if name not in known}
        try:
            # The library's timeout applies to each read, so a slow stream would never time out.
            async with self._timeout():
                raw = await client.chat.completions.with_raw_response.create(
                    **known, extra_body={**extra, **self.config.extra_body}
                )
                content = raw.http_response.content
        except (openai.APITimeoutError, TimeoutError) as error:
            billed = type(error.__cause__).__name__ not in _UNSENT
            reason = f"no answer within {self.config.timeout:g} s"
            raise _Failure(reason, retriable=True, billed=billed) from None
        except openai.APIStatusError as error:
            raise self._status_failure(error, body) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            billed = type(cause).__name__ not in _UNSENT
            reason = f"the connection failed ({type(cause).__name__}: {cause})"
            raise _Failure(self._scrub(reason), retriable=True, billed=billed) from None
        except (openai.OpenAIError, ValueError) as error:
            reason = f"the request cannot be sent ({type(error).__name__}: {error})"
            raise _Failure(self._scrub(reason), retriable=False) from None
        try:
            return wire.read_completion(content, request)
        except wire.MalformedResponse as error:
            raise _Failure(str(error), retriable=True, billed=True) from None

    @contextlib.asynccontextmanager
    async def _timeout(self) -> AsyncIterator[asyncio.Timeout]:
        """Limits the time of an attempt; `_call_more` may extend it."""
        async with asyncio.timeout(self.config.timeout) as timeout:
            self._timeouts.add(timeout)
            try:
                yield timeout
            finally:
                self._timeouts.remove(timeout)

    def _status_failure(self, error: Any, body: Mapping[str, Any]) -> Exception:
        status, text = error.status_code, _error_text(error)
        reason = self._scrub(f"the server answered {status}: {text}")
        if wire.is_too_long(status, text):
            return _TooLong(reason, wire.excess(text))
        rejected = [name for name in body if name not in ("model", "messages") and name in text]
        if status in (400, 422) and rejected:
            reason += f"; set server to the server's kind, or add {rejected[0]!r} to `omit`"
        # The status of an exhausted quota is 429, but waiting does not help.
        retriable = (status in _RETRIABLE or status >= 500) and "insufficient_quota" not in text
        wait = retry_after(error.response.headers, time.time())
        return _Failure(reason, retriable=retriable, wait=wait)

    def _usage(self, request: llm.Generate, completion: wire.Completion) -> llm.Usage:
        """Returns the server's token counts, or high estimates if the server reports none."""
        prompt, generated = completion.prompt_tokens, completion.generated_tokens
        if prompt is None:
            prompt = wire.estimate_tokens(request.messages)
        if generated is None:
            generated = math.ceil(len(completion.text.encode("utf-8", "replace")) / 3)
        return llm.Usage(prompt, min(completion.cached_tokens, prompt), generated)

    def _scrub(self, text: str) -> str:
        """Removes keys, and control characters that could affect a terminal or a web page."""
        if self._key:
            text = text.replace(self._key, _SECRET)
        return visible(" ".join(_KEY_LIKE.sub(_SECRET, text).split()))


def _error_text(error: Any) -> str:
    """Returns at most 300 characters of the server's error message."""
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
    """Returns the wait in seconds from the header Retry-After; None if it is missing or invalid.

    The header contains seconds or an HTTP date; ``now`` is in seconds since 1970.
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
        raise UserError(f"The environment variable {config.api_key_env} must contain the API key.")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"The environment variable {config.api_key_env} has no valid API key.")
    return key


def is_environment_name(text: str) -> bool:
    """Returns whether ``text`` is a valid environment variable name and does not resemble a key."""
    return bool(_ENVIRONMENT_NAME.fullmatch(text)) and not _KEY_LIKE.match(text)


def _check(config: OpenAIConfig) -> None:
    if not is_environment_name(config.api_key_env):
        raise UserError("api_key_env must be the name of an environment variable, not a key.")
    check_fields(config)
    if config.base_url is not None:
        try:
            url = urllib.parse.urlsplit(config.base_url)
            usable = url.scheme in ("http", "https") and bool(url.hostname)
        except ValueError:
            usable, url = False, urllib.parse.urlsplit("")
        if url.username or url.password or url.query:
            raise UserError("base_url must not contain credentials; use api_key_env.")
        if not usable:
            raise UserError(
                f"base_url={config.base_url!r} must be a URL such as http://localhost:8000/v1."
            )
