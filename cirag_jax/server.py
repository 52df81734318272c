"""A client for OpenAI-compatible servers: keys, budgets, retries and errors.

The API key is read from the environment, and removed from every message of this module.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import email.utils
import json
import math
import os
import random
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from cirag_jax.errors import UserError
from cirag_jax.io import replace_surrogates, visible
from cirag_jax.types import Count, NonNegativeFloat, PositiveFloat, PositiveInt
from cirag_jax.validation import check_fields

T = TypeVar("T")

_RETRIABLE = (408, 409, 425, 429)
# HTTP library errors that occur before a request is sent, so the request cannot have been billed.
_UNSENT = ("ConnectError", "ConnectTimeout", "PoolTimeout")
_KEY_LIKE = re.compile(r"\bsk-[\w*.\-]{4,}")
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = "[key]"


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Settings of a `ServerClient`.

    Attributes:
      model: name of the model on the server; if empty, the server must have exactly one model.
      base_url: address up to ``/v1``; None means api.openai.com.
      api_key_env: environment variable with the key; required if ``base_url`` is None.
      max_concurrency: maximum number of concurrent requests.
      timeout: seconds until an attempt is abandoned.
      max_retries: maximum number of attempts after the first.
      backoff: base of the wait in seconds; retry n waits a random part of ``backoff * 2 ** n``.
      max_backoff: maximum of ``backoff * 2 ** n``, in seconds.
      max_retry_after: maximum wait in seconds that the server may request; if it requests more, the
        request fails.
      budget_tokens: maximum total of all tokens, read and generated.
      omit: request fields that are not sent, such as ``temperature`` for reasoning models.
      extra_body: additional fields of every request.
    """

    model: str
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    max_concurrency: PositiveInt = 8
    timeout: PositiveFloat = 120.0
    max_retries: Count = 6
    backoff: NonNegativeFloat = 1.0
    max_backoff: NonNegativeFloat = 60.0
    max_retry_after: float = 600.0
    budget_tokens: Count | None = None
    omit: tuple[str, ...] = ()
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def field(self, name: str) -> str:
        """Returns the name of a field in error messages."""
        return name


class MalformedResponse(Exception):
    """A response violates the API; a retry may succeed."""


class RequestRejected(Exception):
    """A request cannot be served, and a retry will not help."""


class Failure(Exception):
    """An attempt failed.

    ``wait`` is the wait in seconds that the server requests. ``billed`` is True if the attempt may
    have been billed.
    """

    def __init__(self, reason: str, *, retriable: bool, wait: float | None = None, billed=False):
        super().__init__(reason)
        self.retriable, self.wait, self.billed = retriable, wait, billed


class TooLong(Exception):
    """The server rejected the prompt as too long, by about the share ``excess`` of its tokens."""

    def __init__(self, reason: str, excess: float):
        super().__init__(reason)
        self.excess = excess


class OutOfBudget(Exception):
    """A request would exceed the budget."""


class Budget:
    """Counts spent and reserved tokens, and rejects all requests after the budget is exhausted.

    Attributes:
      spent: tokens that were spent so far.
    """

    def __init__(self, limit: int | None, spent: int):
        self.spent = spent
        self._limit, self._reserved = limit, 0
        self.exhausted = False
        self.reason = ""

    def reserve(self, tokens: int) -> None:
        """Reserves tokens before a request is sent, or raises `OutOfBudget`."""
        total = self.spent + self._reserved + tokens
        if self._limit is not None and not self.exhausted and total > self._limit:
            self.exhausted = True
            self.reason = (
                f"the budget of {self._limit} tokens would be exceeded ({self.spent} spent, "
                f"{self._reserved} under way, {tokens} at most for the next request)"
            )
        if self.exhausted:
            raise OutOfBudget(f"not sent: {self.reason}")
        self._reserved += tokens

    def settle(self, reserved: int, spent: int) -> None:
        """Replaces reserved tokens with the tokens that were spent."""
        self._reserved -= reserved
        self.spent += spent


class ServerClient:
    """Sends requests to a server, with retries, within a budget.

    Attributes:
      budget: the budget in tokens.
      timeouts: the running timeouts of attempts.
    """

    def __init__(self, config: ServerConfig, spent: int = 0):
        """Reads the key from the environment, and a missing model name from the server.

        ``spent`` tokens were used earlier; they count against the budget.
        """
        _check(config)
        self.config = config
        self._key = _key(config)
        if not config.model:
            self.config = dataclasses.replace(config, model=self._only_model())
        self.budget = Budget(config.budget_tokens, spent)
        self.timeouts: set[asyncio.Timeout] = set()

    def _only_model(self) -> str:
        import openai

        url, field = self.config.base_url, self.config.field("model")
        if url is None:
            raise UserError(f"{field} must be the name of a model of api.openai.com.")
        try:
            with openai.OpenAI(
                api_key=self._key or "none",
                base_url=url,
                timeout=self.config.timeout,
                max_retries=self.config.max_retries,
            ) as client:
                names = [replace_surrogates(model.id) for model in client.models.list()]
        except Exception as error:  # including any error of parsing a strange response
            reason = self.scrub(f"{type(error).__name__}: {error}")
            raise UserError(f"{url} does not list its models ({reason}).") from None
        if len(names) != 1:
            listed = ", ".join(names[:8]) or "none"
            raise UserError(f"{field} must be one of the models of {url}: {listed}.")
        return names[0]

    def open_client(self) -> Any:
        """Returns a client of the library, to be used as a context manager in one event loop."""
        import openai

        timeout = 0.9 * self.config.timeout
        return openai.AsyncOpenAI(
            api_key=self._key or "none",
            base_url=self.config.base_url or "https://api.openai.com/v1",
            # A failing connection must be reported before the attempt's own timeout expires,
            # which covers everything else.
            timeout=openai.Timeout(None, connect=timeout, pool=timeout),
            max_retries=0,
        )

    async def retry(
        self,
        send: Callable[[], Awaitable[Any]],
        read: Callable[[bytes], T],
        *,
        reserved: int,
        spent: Callable[[T], int],
        remedies: Mapping[str, str],
    ) -> T:
        """Sends a request until it succeeds, fails permanently, or has no attempts left.

        The library's retries are not used, because the budget must reserve tokens for every
        attempt. The library also does not retry after a malformed response or a slow stream, and
        never waits for more than a minute.

        Args:
          send: sends one attempt, and returns the library's raw response.
          read: parses the body of a successful response.
          reserved: upper bound of the tokens of an attempt.
          spent: returns the tokens of a response.
          remedies: what to do if the server rejects an optional field of the request, by field.

        Raises:
          Failure, TooLong, OutOfBudget, RequestRejected: there is no response.
        """
        for attempt in range(self.config.max_retries + 1):
            self.budget.reserve(reserved)
            used = 0
            try:
                response = await self._attempt(send, read, remedies)
                used = spent(response)
                return response
            except RequestRejected:
                used = reserved
                raise
            except Failure as error:
                used = reserved if error.billed else used
                if not error.retriable:
                    raise
                failure = error
            finally:
                self.budget.settle(reserved, used)
            if attempt < self.config.max_retries:
                await self._wait(attempt, failure)
        raise Failure(f"gave up after {attempt + 1} attempts: {failure}", retriable=False)

    async def _wait(self, attempt: int, failure: Failure) -> None:
        """Waits for a random time (exponential backoff), plus the wait that the server requests."""
        if failure.wait is not None and failure.wait > self.config.max_retry_after:
            raise Failure(f"{failure}; retry after {failure.wait:g} s", retriable=False)
        ceiling = min(self.config.max_backoff, self.config.backoff * 2**attempt)
        jitter = ceiling * random.random()
        # The jitter spreads the retries of requests that were rejected together.
        await asyncio.sleep(jitter if failure.wait is None else failure.wait + jitter)

    async def _attempt(
        self,
        send: Callable[[], Awaitable[Any]],
        read: Callable[[bytes], T],
        remedies: Mapping[str, str],
    ) -> T:
        import openai

        try:
            # The library's timeout applies to each read, so a slow stream would never time out.
            async with self._timeout():
                raw = await send()
                content = raw.http_response.content
        except (openai.APITimeoutError, TimeoutError) as error:
            billed = type(error.__cause__).__name__ not in _UNSENT
            reason = f"no answer within {self.config.timeout:g} s"
            raise Failure(reason, retriable=True, billed=billed) from None
        except openai.APIStatusError as error:
            raise self._status_failure(error, remedies) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            billed = type(cause).__name__ not in _UNSENT
            reason = f"the connection failed ({type(cause).__name__}: {cause})"
            raise Failure(self.scrub(reason), retriable=True, billed=billed) from None
        except (openai.OpenAIError, ValueError) as error:
            reason = f"the request cannot be sent ({type(error).__name__}: {error})"
            raise Failure(self.scrub(reason), retriable=False) from None
        try:
            return read(content)
        except MalformedResponse as error:
            raise Failure(str(error), retriable=True, billed=True) from None

    @contextlib.asynccontextmanager
    async def _timeout(self) -> AsyncIterator[asyncio.Timeout]:
        """Limits the time of an attempt; `timeouts` may be extended."""
        async with asyncio.timeout(self.config.timeout) as timeout:
            self.timeouts.add(timeout)
            try:
                yield timeout
            finally:
                self.timeouts.remove(timeout)

    def _status_failure(self, error: Any, remedies: Mapping[str, str]) -> Exception:
        status, text = error.status_code, _error_text(error)
        reason = self.scrub(f"the server answered {status}: {text}")
        if is_too_long(status, text):
            return TooLong(reason, excess(text))
        remedy = next((remedies[name] for name in remedies if name in text), None)
        if status in (400, 422) and remedy:
            reason += f"; {remedy}"
        # The status of an exhausted quota is 429, but waiting does not help.
        retriable = (status in _RETRIABLE or status >= 500) and "insufficient_quota" not in text
        wait = retry_after(error.response.headers, time.time())
        return Failure(reason, retriable=retriable, wait=wait)

    def scrub(self, text: str) -> str:
        """Removes keys, and control characters that could affect a terminal or a web page."""
        if self._key:
            text = text.replace(self._key, _SECRET)
        return visible(" ".join(_KEY_LIKE.sub(_SECRET, text).split()))


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, also if an event loop is running (in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    # A second event loop needs its own thread.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


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


def _key(config: ServerConfig) -> str:
    key = os.environ.get(config.api_key_env, "").strip()
    if not key and config.base_url is None:
        raise UserError(f"The environment variable {config.api_key_env} must contain the API key.")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"The environment variable {config.api_key_env} has no valid API key.")
    return key


def is_environment_name(text: str) -> bool:
    """Returns whether ``text`` is a valid environment variable name and does not resemble a key."""
    return bool(_ENVIRONMENT_NAME.fullmatch(text)) and not _KEY_LIKE.match(text)


def _check(config: ServerConfig) -> None:
    if not is_environment_name(config.api_key_env):
        raise UserError(
            f"{config.field('api_key_env')} must be the name of an environment variable, not a key."
        )
    check_fields(config, prefix=config.field(""))
    if config.base_url is not None:
        try:
            url = urllib.parse.urlsplit(config.base_url)
            usable = url.scheme in ("http", "https") and bool(url.hostname)
        except ValueError:
            usable, url = False, urllib.parse.urlsplit("")
        if url.username or url.password or url.query:
            raise UserError(
                f"{config.field('base_url')} must not contain credentials; use api_key_env."
            )
        if not usable:
            raise UserError(
                f"{config.field('base_url')}={config.base_url!r} must be a URL such as "
                "http://localhost:8000/v1."
            )


_TOO_LONG = re.compile(
    r"context[ _](length|size|window)|maximum (context|model) length|prompt is too long"
    r"|input (\(\d+ tokens\) )?is too (long|large)"
    r"|exceeds? the (available )?context|must have less than \d+ tokens"
    r"|(maximum|max) input length",
    re.IGNORECASE,
)


def is_too_long(status: int, body: str) -> bool:
    """Returns whether an error response reports that the prompt is too long for the model.

    The status is 500 in some versions of llama.cpp.
    """
    return status in (400, 413, 422, 500) and bool(_TOO_LONG.search(body))


_LIMIT = re.compile(
    r"(?:(?:context|model|available|input)[ _](?:length|size|window)\D{0,40}?|less than "
    r"|current batch size: )(\d{2,})",
    re.IGNORECASE,
)
_SIZE = re.compile(r"(\d{2,9}) (?:\w+ ){0,2}tokens?\b|Given: (\d{2,9})")


def excess(body: str) -> float:
    """Returns the share of a prompt that must be removed, according to an error response.

    The response usually states the server's limit and the prompt's size; if not, returns 1 / 3.
    """
    limit = _LIMIT.search(body)
    size = max((int(a or b) for a, b in _SIZE.findall(body)), default=0)
    if limit is None or size <= int(limit[1]):
        return 1 / 3
    return min(0.9, 1.02 - int(limit[1]) / size)
