"""A local OpenAI-compatible server that fails as scripted, and records its requests."""

import base64
import contextlib
import http.server
import json
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

COMPLETION_TOKENS = 5
PROMPT_TOKENS = 10


class FaultyServer(http.server.ThreadingHTTPServer):
    """A server whose response depends on the text of the last message.

    ``script[text]`` lists the response to each attempt: a status, a (status, headers) pair, the
    name of a method of `_Handler`, or bytes to send with status 200. Otherwise the text is echoed.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: dict[str, list[Any]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models: list[str] = []
        self.dimension = 8  # of embeddings
        self.lock = threading.Lock()
        self.under_way = self.most_under_way = 0
        self.gate: threading.Barrier | None = None
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def texts(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    def handle_error(self, request, client_address) -> None:
        pass  # the client closed the connection


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FaultyServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.body = body
        is_chat = "messages" in body
        text = body["messages"][-1]["content"] if is_chat else body["input"][0]
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.headers.append({k.lower(): v for k, v in self.headers.items()})
            self.server.under_way += 1
            self.server.most_under_way = max(self.server.most_under_way, self.server.under_way)
            steps = self.server.script.get(text, [])
            step = steps.pop(0) if steps else "echo" if is_chat else "embed"
        try:
            if self.server.gate is not None:
                self.server.gate.wait(timeout=120)  # seconds; the machine may be busy
        finally:
            with self.server.lock:
                self.server.under_way -= 1
        if isinstance(step, str):
            getattr(self, f"_{step}")(text)
        elif isinstance(step, bytes):
            self._send(200, step)
        elif isinstance(step, dict):
            self._send(200, json.dumps(step).encode())
        else:
            status, headers, *message = step if isinstance(step, tuple) else (step, {})
            error = {"error": {"message": message[0] if message else "told to fail", "code": None}}
            self._send(status, json.dumps(error).encode(), headers)

    def do_GET(self) -> None:
        models = [
            {"id": name, "object": "model", "created": 1, "owned_by": "us"}
            for name in self.server.models
        ]
        self._send(200, json.dumps({"object": "list", "data": models}).encode())

    def _send(self, status: int, body: bytes, headers=None, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body) if length is None else length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _echo(self, text: str) -> None:
        self._send(200, json.dumps(completion(f"echo {text}")).encode())

    def _embed(self, text: str) -> None:
        self._send(200, json.dumps(embeddings(self.body, self.server.dimension)).encode())

    def _half(self, text: str) -> None:  # closes the connection in the middle
        body = json.dumps(completion(f"echo {text}")).encode()
        self._send(200, body[: len(body) // 2], length=len(body))
        self.close_connection = True

    def _cut(self, text: str) -> None:  # half a body, with a matching content-length
        body = json.dumps(completion(f"echo {text}")).encode()
        self._send(200, body[: len(body) // 2])

    def _nothing(self, text: str) -> None:
        self.close_connection = True

    def _slow(self, text: str) -> None:
        self.server.closing.wait(timeout=30)
        self.close_connection = True

    def _trickle(self, text: str) -> None:  # sends bytes but never finishes
        self.send_response(200)
        self.send_header("content-length", "1000000")
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.server.closing.wait(timeout=0.02):
                self.wfile.write(b" ")
        self.close_connection = True

    def log_message(self, format, *args) -> None:
        pass


def completion(text: Any, finish_reason: str | None = "stop", **more: Any) -> dict[str, Any]:
    """Returns a chat completion."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": finish_reason,
                **more,
            }
        ],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": COMPLETION_TOKENS,
            "total_tokens": PROMPT_TOKENS + COMPLETION_TOKENS,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def embedding(text: str, dimension: int) -> list[float]:
    """Returns the embedding of a text, which is not of unit length."""
    rng = np.random.default_rng(zlib.crc32(text.encode()))
    return (3.0 * rng.normal(size=dimension)).astype(np.float32).tolist()


def embeddings(body: dict[str, Any], dimension: int, **usage: Any) -> dict[str, Any]:
    """Returns the response to a request for embeddings, in reverse order with indices."""
    vectors: list[Any] = [embedding(text, dimension) for text in body["input"]]
    if body.get("encoding_format") == "base64":
        vectors = [base64.b64encode(np.array(v, "<f4").tobytes()).decode() for v in vectors]
    data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)]
    used = usage or {"prompt_tokens": PROMPT_TOKENS, "total_tokens": PROMPT_TOKENS}
    return {"object": "list", "data": data[::-1], "model": body["model"], "usage": used}


@contextlib.contextmanager
def faulty_server() -> Iterator[FaultyServer]:
    """Runs a server."""
    with FaultyServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()
