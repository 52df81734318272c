"""A backend for OpenAI-compatible servers, using the official client library.

Keys, budgets and retries: `cirag_jax.server`.
"""

import asyncio
import collections
import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.llm import openai_format as wire
from cirag_jax.llm import types as llm
from cirag_jax.llm.chat import Overflow, observation_length, shorten
from cirag_jax.server import (
    Failure,
    OutOfBudget,
    ServerClient,
    ServerConfig,
    TooLong,
    run_coroutine,
)

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class OpenAIConfig(ServerConfig):
    """Settings of `OpenAIBackend`.

    Attributes:
      server: kind of server: ``openai``, ``vllm``, ``transformers`` or ``llamacpp``.
      overflow: ``truncate`` shortens observations, oldest first, if the server rejects a prompt as
        too long.
    """

    server: wire.Server = "openai"
    overflow: Overflow = "error"


class OpenAIBackend(ServerClient):
    """Generates through an OpenAI-compatible server; see `cirag_jax.llm.types.Backend`.

    ``usage`` is the total over all responses.
    """

    accepts_more = True

    def __init__(self, config: OpenAIConfig, *, spent: llm.Usage | None = None):
        """Reads the key from the environment, and a missing model name from the server.

        The tokens in ``spent`` were used earlier; they count against the budget.
        """
        spent = spent or llm.Usage()
        super().__init__(config, spent.prompt_tokens + spent.generated_tokens)
        self.config: OpenAIConfig  # narrower than in the base class
        self.usage = llm.Usage()

    @property
    def budget_exhausted(self) -> bool:
        """Whether the budget is exhausted, so no further requests are sent."""
        return self.budget.exhausted

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
        return run_coroutine(self._generate(requests, progress, done, more))

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
        responses: list[llm.Generated | None] = []
        waiting: collections.deque[tuple[int, llm.Generate]] = collections.deque()
        busy = finished = generated = 0
        client = self.open_client()

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
            log.warning("Stopped: %s.", self.budget.reason)
        return [response for response in responses if response is not None]

    def _call_more(self, more: llm.MoreRequests) -> Sequence[llm.Generate]:
        """Calls ``more``, and extends all timeouts by the time that it takes."""
        start = asyncio.get_running_loop().time()
        try:
            return more()
        finally:
            elapsed = asyncio.get_running_loop().time() - start
            for timeout in self.timeouts:
                if not timeout.expired():
                    timeout.reschedule((timeout.when() or 0.0) + elapsed)

    async def _respond(self, client: Any, request: llm.Generate) -> llm.Generated:
        """Returns the response to a request, with an ``error`` if the request fails."""
        start = time.monotonic()
        truncated = 0
        try:
            while True:
                try:
                    completion = await self._complete(client, request)
                    break
                except TooLong as error:
                    if self.config.overflow != "truncate" or not observation_length(
                        request.messages
                    ):
                        raise wire.RequestRejected(str(error)) from None
                    length = sum(len(message.text) for message in request.messages)
                    shorter, _ = shorten(request.messages, math.ceil(length * error.excess))
                    request, truncated = dataclasses.replace(request, messages=shorter), 1
        except (Failure, OutOfBudget, wire.RequestRejected) as error:
            usage = llm.Usage(seconds=time.monotonic() - start, truncated=truncated)
            return llm.failed(self.scrub(str(error)), usage)
        usage = self._usage(request, completion)
        return llm.Generated(
            text=completion.text,
            finish_reason=completion.finish_reason,
            usage=dataclasses.replace(usage, seconds=time.monotonic() - start, truncated=truncated),
            tokens=completion.tokens,
            thoughts=completion.thoughts,
        )

    async def _complete(self, client: Any, request: llm.Generate) -> wire.Completion:
        body = wire.request_body(request, self.config.model, self.config.server, self.config.omit)
        known = {name: body[name] for name in ("model", "messages") if name in body}
        extra = {name: value for name, value in body.items() if name not in known}

        def spent(completion: wire.Completion) -> int:
            usage = self._usage(request, completion)
            return usage.prompt_tokens + usage.generated_tokens

        return await self.retry(
            lambda: client.chat.completions.with_raw_response.create(
                **known, extra_body={**extra, **self.config.extra_body}
            ),
            lambda content: wire.read_completion(content, request),
            reserved=wire.estimate_tokens(request.messages) + request.max_tokens,
            spent=spent,
            remedies={
                name: f"set server to the server's kind, or add {name!r} to `omit`"
                for name in body
                if name not in known
            },
        )

    def _usage(self, request: llm.Generate, completion: wire.Completion) -> llm.Usage:
        """Returns the server's token counts, or high estimates if the server reports none."""
        prompt, generated = completion.prompt_tokens, completion.generated_tokens
        if prompt is None:
            prompt = wire.estimate_tokens(request.messages)
        if generated is None:
            generated = math.ceil(len(completion.text.encode("utf-8", "replace")) / 3)
        return llm.Usage(prompt, min(completion.cached_tokens, prompt), generated)
