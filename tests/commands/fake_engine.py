"""A server of an engine without a model, which answers in common batches of known texts."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import transformers

from cirag_jax.commands.serve_http import ApiServer, Models
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.engine.engine import CANCELLED
from cirag_jax.llm.types import Complete, Completed, Generate, Generated, Token, Usage, failed
from tests import tiny_decoder

TEXT = "the sailor was born in a harbour — 港 — and the mill"


class FakeEngine:
    """An engine that writes `TEXT`, one token per chunk, in batches of four requests.

    ``most`` is the largest number of requests in a batch. While ``gate`` is not set, no request is
    taken. The text of a request whose last message is "forever" does not end. The message "boom"
    is a bug, and "nan" an error of the model.
    """

    def __init__(self) -> None:
        backend = tiny_decoder.tokenizer()
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=tiny_decoder.SPECIAL[2]
        )
        fast.chat_template = tiny_decoder.CHAT_TEMPLATE
        self.tokenizer = ChatTokenizer(fast)
        self.ids = self.tokenizer.encode(TEXT).tolist()
        self.most = 0
        self.cancelled = 0
        self.gate = threading.Event()
        self.gate.set()

    def serve(self, requests, done, more, on_part) -> None:
        self.gate.wait()
        running: dict[int, Row] = {}
        count = 0
        while True:
            while len(running) < 4 and (new := more()):
                for request in new:
                    running[count] = Row(self, request)
                    count += 1
            if not running:
                return
            self.most = max(self.most, len(running))
            for index, row in list(running.items()):
                if row.message == "boom":
                    raise ValueError("a bug")
                row.step()
                if row.message == "nan":
                    response = failed("the numbers are bad")
                elif row.is_done:
                    response = row.part(0)
                elif not on_part(index, row.part):
                    response = failed(CANCELLED)
                    self.cancelled += 1
                else:
                    continue
                del running[index]
                done(index, response)


class Row:
    """A request in the engine."""

    def __init__(self, engine: FakeEngine, request: Generate):
        self.engine, self.request = engine, request
        self.message = request.messages[-1].content if request.messages else ""
        self.count = 0

    def step(self) -> None:
        # The clock of an endless text; others take no time.
        self.count += self.count < min(len(self.engine.ids), self.request.max_tokens)
        if self.message == "forever":
            threading.Event().wait(0.01)

    @property
    def is_done(self) -> bool:
        limit = min(len(self.engine.ids), self.request.max_tokens)
        stopped = any(stop in self._text() for stop in self.request.stop)
        return self.message != "forever" and (stopped or self.count >= limit)

    def _text(self) -> str:
        return self.engine.tokenizer.decode(self.engine.ids[: self.count])

    def part(self, start: int) -> Generated:
        text, tokenizer = self._text(), self.engine.tokenizer
        ends = [text.find(stop) for stop in self.request.stop if stop in text]
        reason = "stop" if ends or self.count == len(self.engine.ids) else "length"
        tokens = None
        if self.request.wants_tokens:
            tokens = tuple(
                Token(
                    tokenizer.piece(token),
                    token,
                    -0.5 * i,
                    ((tokenizer.piece(token), token, -0.5 * i),),
                    offset=len(tokenizer.decode(self.engine.ids[:i])),
                )
                for i, token in enumerate(self.engine.ids[: self.count])
            )[start:]
        usage = Usage(7, 0, self.count)
        text = text[: min(ends, default=None)]
        if isinstance(self.request, Complete) and self.request.echo:
            prompt = tuple(Token(tokenizer.piece(t), t, -1.0) for t in self.request.tokens)
            return Completed(text, reason, usage, tokens=tokens, prompt=prompt)
        return Generated(text, reason, usage, tokens=tokens)


class FakeEncoder:
    """An encoder whose vectors are the lengths of texts; texts of more than 50 are too long."""

    dim = 4

    def lengths(self, texts: Sequence[str], kind: str) -> tuple[list[int], int]:
        return [len(text) for text in texts], 50

    def encode(self, texts: Sequence[str], kind: str) -> np.ndarray:
        rows = [[len(text), 1.0, 2.0, float(kind == "query")] for text in texts]
        x_ND = np.asarray(rows, np.float32)
        return x_ND / np.linalg.norm(x_ND, axis=1, keepdims=True)


@contextlib.contextmanager
def serving(engine: Any, encoder: Any = None, **limits: Any) -> Iterator[ApiServer]:
    """Runs a server of the models ``m`` and ``e`` until the end of the block."""
    settings = {"max_bytes": 1 << 20, "max_connections": 32, **limits}
    waiting = settings.pop("max_waiting", 64)
    models = Models({"m": engine}, encoder and ("e", encoder), max_tokens=50, max_waiting=waiting)
    with ApiServer(("127.0.0.1", 0), models, **settings) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            engine_gate = getattr(engine, "gate", None)
            if engine_gate is not None:
                engine_gate.set()
            server.shutdown()
            thread.join()
            server.is_closing = True
            assert models.close()
            server.close_all()
