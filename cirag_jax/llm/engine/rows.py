"""The state of a request in the engine, and its upload to the device."""

import bisect
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.engine.pages import Allocation
from cirag_jax.llm.engine.sampling import Sampling
from cirag_jax.llm.engine.steps import NO_TOKEN, NOT_FINITE, Rows
from cirag_jax.llm.grammar import GrammarState
from cirag_jax.llm.types import (
    Complete,
    Completed,
    FinishReason,
    Generate,
    Generated,
    Token,
    Usage,
    failed,
)

NUMBERS_NOT_FINITE = (
    "the model computed numbers that are not finite for this prompt; "
    "check the weights of the model and of its adapter"
)


@dataclasses.dataclass(eq=False)
class Row:
    """A request in the engine.

    Attributes:
      index: index of the request's response.
      prompt: int32 tokens.
      limit: maximum number of tokens to generate: ``max_tokens``, or less if the context is short.
      truncated: number of observations that were shortened to fit.
      switch: length above which the keys and values of all tokens are computed again, because the
        model then has other rotary frequencies (`DecoderConfig.rope_switch`).
      allocation: the row's pages; None before the row is admitted.
      started: `time.perf_counter` when the row was admitted.
      tokens: the generated tokens.
      details: outputs of `sampling.describe` and `steps.decode` by name, with one value per token.
      prompt_details: outputs of `sampling.describe` for the tokens of the prompt after the first.
      drafted: number of tokens that were guessed correctly, see `sampling.find_drafts`.
      received: for each position, the largest attention weight from a later token so far; fp32.
      finite: whether all hidden states were finite so far.
    """

    index: int
    request: Generate
    tokenizer: ChatTokenizer
    prompt: np.ndarray
    limit: int
    truncated: int = 0
    switch: int | None = None
    grammar: GrammarState | None = None
    allocation: Allocation | None = None
    started: float = 0.0
    tokens: list[int] = dataclasses.field(default_factory=list)
    details: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    prompt_details: dict[str, np.ndarray] | None = None
    drafted: int = 0
    received: np.ndarray | None = None
    finite: bool = True

    @property
    def length(self) -> int:
        """Maximum number of tokens of prompt and answer."""
        return len(self.prompt) + self.limit

    @property
    def pause(self) -> int:
        """The number of generated tokens at which the row ends, or is admitted again."""
        if self.switch is None or len(self.prompt) + len(self.tokens) > self.switch:
            return self.limit
        return min(self.limit, self.switch - len(self.prompt) + 1)

    @property
    def all_tokens(self) -> np.ndarray:
        """The tokens of the prompt and the generated tokens."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, np.int32)])

    def append(self, chunk: dict[str, np.ndarray], row: int) -> int:
        """Appends a chunk's tokens for this row (`steps.decode`); returns their number."""
        own_TB = (chunk["row"] == row) & (chunk["token"] != NO_TOKEN)
        tokens_T = chunk["token"][own_TB]
        count = int((tokens_T >= 0).sum())
        self.finite = self.finite and not (tokens_T == NOT_FINITE).any()
        self.tokens.extend(tokens_T[:count].tolist())
        self.drafted += count - int((own_TB & (chunk["token"] >= 0)).any(1).sum())
        for name, values in chunk.items():
            if name == "received":
                weights = values[row][: self.length]
                if self.received is None:
                    self.received = np.zeros(self.length, np.float32)
                earlier = self.received[: len(weights)]
                np.maximum(earlier, weights, out=earlier)
            elif name not in ("token", "row"):
                self.details.setdefault(name, []).extend(values[own_TB][:count])
        if self.grammar is not None and count:
            self.grammar.advance(self.tokens[-1])
        return count

    def response(self) -> Generated | None:
        """Returns the response if the row has ended; drops tokens after a stop string."""
        if not self.finite:
            return failed(NUMBERS_NOT_FINITE, self._usage())
        ended = bool(self.tokens) and self.tokens[-1] in self.tokenizer.eos_ids
        ended = ended or (self.grammar is not None and self.grammar.is_done)
        text = self._cut_at_stop() if self.request.stop else None
        ended = ended or text is not None
        if not ended and len(self.tokens) < self.limit:
            return None
        text = self._text(self.tokens) if text is None else text
        return self._generated(text, "stop" if ended else "length", 0)

    def part(self, start: int) -> Generated:
        """Returns the response so far, with the tokens from index ``start`` on."""
        return self._generated(self._text(self.tokens), "length", start)

    def _generated(self, text: str, reason: FinishReason, start: int) -> Generated:
        tokens = None
        if self.request.wants_tokens:
            tokens = tuple(map(self._token, range(start, len(self.tokens))))
        if isinstance(self.request, Complete) and self.request.echo:
            prompt = tuple(map(self._prompt_token, range(len(self.prompt))))
            return Completed(text, reason, self._usage(), tokens=tokens, prompt=prompt)
        return Generated(text, reason, self._usage(), tokens=tokens)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=min(self.allocation.reused, len(self.prompt)) if self.allocation else 0,
            generated_tokens=len(self.tokens),
            drafted_tokens=min(self.drafted, max(len(self.tokens) - 1, 0)),
            seconds=time.perf_counter() - self.started,
            truncated=int(self.truncated > 0),
        )

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, continuing=self.request.continue_final)

    def _cut_at_stop(self) -> str | None:
        """Returns the text before the first stop string, and drops the tokens after this string."""
        stops = self.request.stop
        text = self._text(self.tokens)
        ends = [end for end in map(text.find, stops) if end >= 0]
        if not ends:
            return None

        def contains_stop(count: int) -> bool:
            part = self._text(self.tokens[:count])
            return any(stop in part for stop in stops)

        count = bisect.bisect_left(range(len(self.tokens)), True, lo=1, key=contains_stop)
        for values in (self.tokens, *self.details.values()):
            del values[count:]
        return text[: min(ends)]

    def _prompt_token(self, i: int) -> Token:
        token, details = int(self.prompt[i]), self.prompt_details
        text = self.tokenizer.piece(token)
        if details is None or not i:
            return Token(text, token)
        top = self._alternatives(details, i - 1) if self.request.top_logprobs else ()
        entropy = float(details["entropy"][i - 1]) if self.request.entropy else None
        return Token(text, token, float(details["logprob"][i - 1]), top, entropy)

    def _alternatives(
        self, details: Mapping[str, Any], i: int
    ) -> tuple[tuple[str, int, float], ...]:
        pairs = zip(details["top_ids"][i], details["top_logprobs"][i], strict=True)
        top = tuple((self.tokenizer.piece(int(t)), int(t), float(p)) for t, p in pairs)
        return top[: self.request.top_logprobs]

    def _token(self, i: int) -> Token:
        request, piece, details = self.request, self.tokenizer.piece, self.details
        top, attended, received = (), (), None
        if request.top_logprobs:
            top = self._alternatives(details, i)
        if request.attention and self.received is not None:
            tokens = self.all_tokens
            pairs = zip(details["attended"][i], details["weights"][i], strict=True)
            # Weights are 0 if the text has fewer positions than requested.
            attended = tuple((piece(int(tokens[s])), int(s), float(w)) for s, w in pairs if w > 0)
            received = float(self.received[len(self.prompt) + i])
        return Token(
            piece(self.tokens[i]),
            self.tokens[i],
            float(details["logprob"][i]) if request.logprobs or request.top_logprobs else None,
            top,
            float(details["entropy"][i]) if request.entropy else None,
            len(self._text(self.tokens[:i])),
            attended[: request.attention],
            received,
        )


def page_table(allocation: Allocation | None, width: int, padding: int) -> np.ndarray:
    """Returns a row's pages, int32 ``[width]``; ``padding`` is the index of a nonexistent page."""
    table_N = np.full(width, padding, np.int32)
    if allocation is not None:
        pages = allocation.pages[:width]
        table_N[: len(pages)] = pages
    return table_N


def to_arrays(slots: Sequence[Row | None], width: int, padding: int, text: int = 0) -> Rows:
    """Returns the rows as host arrays; idle slots have no tokens to generate.

    Args:
      slots: the rows; None is an idle slot.
      width: width of a page table.
      padding: index of a nonexistent page.
      text: length of the array with the tokens of prompts and answers; 0 omits it.
    """
    size = len(slots)
    text_BS = np.full((size, text), -1, np.int32) if text else None
    token, position, remaining, step = (np.zeros(size, np.int32) for _ in range(4))
    temperature, top_p = np.zeros(size, np.float32), np.ones(size, np.float32)
    seed = np.zeros(size, np.uint32)
    for i, row in enumerate(slots):
        if row is None:
            continue
        token[i] = row.tokens[-1] if row.tokens else row.prompt[-1]
        position[i] = len(row.prompt) + len(row.tokens) - 1
        remaining[i] = row.pause - len(row.tokens)
        step[i] = len(row.tokens)
        temperature[i], top_p[i] = row.request.temperature, row.request.top_p
        seed[i] = row.request.seed % (1 << 32)
        if text_BS is not None:
            text_BS[i, : position[i] + 1] = row.all_tokens
    tables = np.stack([page_table(row and row.allocation, width, padding) for row in slots])
    sampling = Sampling(temperature, top_p, seed)
    return Rows(token, position, remaining, step, sampling, tables, text_BS)
