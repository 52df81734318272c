"""One request on its way through the engine, and what becomes its response."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.engine.pages import Place
from cirag_jax.llm.engine.sampling import Sampling
from cirag_jax.llm.engine.steps import Rows
from cirag_jax.llm.grammar import GrammarState
from cirag_jax.llm.types import Generate, Generated, Token, Usage


@dataclasses.dataclass(eq=False)
class Row:
    """A request in the engine: its int32 prompt, and what has been generated.

    ``index`` is the place of its response, ``limit`` how many tokens it may generate
    (``max_tokens``, or what the cache has room for), ``truncated`` how many observations were left
    out of the prompt, ``place`` where its keys and values are, once it is admitted, ``started`` the
    `time.perf_counter` then. ``found`` has, per name of `sampling.describe` and of
    `steps.decode`, one value a generated token; ``received`` (fp32, where asked for) per position
    the largest attention of the steps so far.
    """

    index: int
    request: Generate
    tokenizer: ChatTokenizer
    prompt: np.ndarray
    limit: int
    truncated: int = 0
    grammar: GrammarState | None = None
    place: Place | None = None
    started: float = 0.0
    tokens: list[int] = dataclasses.field(default_factory=list)
    found: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    received: np.ndarray | None = None

    @property
    def length(self) -> int:
        """Most tokens of prompt and answer."""
        return len(self.prompt) + self.limit

    @property
    def all_tokens(self) -> np.ndarray:
        """Prompt and generated tokens."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, np.int32)])

    def take(self, chunk: dict[str, np.ndarray], number: int) -> int:
        """Adds this row's part of a decoded chunk (`steps.decode`); returns its new tokens."""
        tokens_T = chunk["token"][:, number]
        new = int((tokens_T >= 0).sum())
        self.tokens.extend(tokens_T[:new].tolist())
        for name, values in chunk.items():
            if name == "received":
                seen = values[number][: self.length]
                if self.received is None:
                    self.received = np.zeros(self.length, np.float32)
                self.received[: len(seen)] = np.maximum(self.received[: len(seen)], seen)
            elif name != "token":
                self.found.setdefault(name, []).extend(values[:new, number])
        if self.grammar is not None and new:
            self.grammar.advance(self.tokens[-1])
        return new

    def response(self) -> Generated | None:
        """The response if the row has ended, else None; drops tokens after a stop string."""
        ended = bool(self.tokens) and self.tokens[-1] in self.tokenizer.eos_ids
        ended = ended or (self.grammar is not None and self.grammar.is_done)
        text = self._cut_at_stop() if self.request.stop else None
        ended = ended or text is not None
        if not ended and len(self.tokens) < self.limit:
            return None
        return Generated(
            self._text(self.tokens) if text is None else text,
            "stop" if ended else "length",
            self._usage(),
            tokens=self._described(),
        )

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=0 if self.place is None else self.place.reused,
            generated_tokens=len(self.tokens),
            seconds=time.perf_counter() - self.started,
            truncated=int(self.truncated > 0),
        )

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, continuing=self.request.continue_final)

    def _cut_at_stop(self) -> str | None:
        """The text before the first stop string; tokens after the one that completes it go."""
        stops = self.request.stop
        text = self._text(self.tokens)
        ends = [end for end in map(text.find, stops) if end >= 0]
        if not ends:
            return None
        low, high = 1, len(self.tokens)
        while low < high:
            middle = (low + high) // 2
            part = self._text(self.tokens[:middle])
            if any(stop in part for stop in stops):
                high = middle
            else:
                low = middle + 1
        del self.tokens[low:]
        for values in self.found.values():
            del values[low:]
        return text[: min(ends)]

    def _described(self) -> tuple[Token, ...] | None:
        if not self.request.wants_tokens:
            return None
        return tuple(self._token(i) for i in range(len(self.tokens)))

    def _token(self, i: int) -> Token:
        wanted, piece, found = self.request, self.tokenizer.piece, self.found
        top, attended, received = (), (), None
        if wanted.top_logprobs:
            pairs = zip(found["top_ids"][i], found["top_logprobs"][i], strict=True)
            top = tuple((piece(int(t)), int(t), float(p)) for t, p in pairs)
        if wanted.attention and self.received is not None:
            tokens = self.all_tokens
            pairs = zip(found["attended"][i], found["weights"][i], strict=True)
            # A text shorter than what was asked for has no more positions.
            attended = tuple((piece(int(tokens[s])), int(s), float(w)) for s, w in pairs if w > 0)
            received = float(self.received[len(self.prompt) + i])
        return Token(
            piece(self.tokens[i]),
            self.tokens[i],
            float(found["logprob"][i]) if wanted.logprobs or wanted.top_logprobs else None,
            top[: wanted.top_logprobs],
            float(found["entropy"][i]) if wanted.entropy else None,
            len(self._text(self.tokens[:i])),
            attended[: wanted.attention],
            received,
        )


def table(place: Place | None, width: int, nowhere: int) -> np.ndarray:
    """A row's pages, int32 ``[width]``, followed by ``nowhere``: what is written there is lost."""
    found_N = np.full(width, nowhere, np.int32)
    if place is not None:
        pages = place.pages[:width]
        found_N[: len(pages)] = pages
    return found_N


def upload(slots: Sequence[Row | None], width: int, nowhere: int, history: int = 0) -> Rows:
    """The rows as host arrays; idle ones stand at position 0 with nothing left to do.

    Args:
      slots: the rows.
      width: pages of a table.
      nowhere: a page that does not exist.
      history: above 0: with the tokens generated so far, in arrays of that length.
    """
    size = len(slots)
    written = np.full((size, history), -1, np.int32) if history else None
    token, position, left, step = (np.zeros(size, np.int32) for _ in range(4))
    temperature, top_p = np.zeros(size, np.float32), np.ones(size, np.float32)
    seed = np.zeros(size, np.uint32)
    for i, row in enumerate(slots):
        if row is None:
            continue
        token[i] = row.tokens[-1] if row.tokens else row.prompt[-1]
        position[i] = len(row.prompt) + len(row.tokens) - 1
        left[i] = row.limit - len(row.tokens)
        step[i] = len(row.tokens)
        temperature[i], top_p[i] = row.request.temperature, row.request.top_p
        seed[i] = row.request.seed % (1 << 32)
        if written is not None:
            written[i, : len(row.tokens)] = row.tokens
    tables = np.stack([table(None if row is None else row.place, width, nowhere) for row in slots])
    sampling = Sampling(temperature, top_p, seed)
    return Rows(token, position, left, step, sampling, tables, written)
