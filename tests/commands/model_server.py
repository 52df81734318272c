"""A local OpenAI-compatible server that extracts by rules and records its requests."""

import collections
import contextlib
import http.server
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

Answer = Callable[[str, bool], tuple[str, str] | int]
TEARS = ("reset", "half", "late")


def rules(text: str, wants_triples: bool) -> tuple[str, str] | int:
    """Returns (answer, finish reason), or an error status if the passage's text requires it.

    Sentences of the form "A verb B." become triples.
    """
    if "refused" in text:
        return 400
    if wants_triples:
        if "prose" in text:
            return "I am sorry.", "stop"
        if "nothing" in text:
            return '{"triples": []}', "stop"
        body = text.partition("Text: ")[2].partition("\n")[0]
        triples = re.findall(r"(\w+) (\w+) (\w+)\.", body)
        answer = json.dumps({"triples": triples})
        return (answer[:-20], "length") if "cut" in text else (answer, "stop")
    if "garbled" in text:
        return "{named_entities: [Ule", "length"
    return json.dumps({"named_entities": sorted(set(re.findall(r"[A-Z]\w+", text)))}), "stop"


class ModelServer(http.server.ThreadingHTTPServer):
    """A server that records its requests.

    ``asked`` has the model's name and the last message of every request, in order. ``answered``
    counts the complete answers to each message. ``url_of(name)`` is a separate address, and
    ``asked_at[name]`` has the messages sent to it. ``tear()`` returns one of `TEARS` to break a
    connection: it is reset, ends after half of the answer, or stalls.
    """

    daemon_threads = True

    def __init__(self, answer: Answer):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.asked: list[tuple[str, str]] = []
        self.asked_at: dict[str, list[str]] = {}
        self.answered: collections.Counter[str] = collections.Counter()
        self.tear: Callable[[], str | None] = lambda: None
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return self.url_of("all")

    def url_of(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}/v1"

    def handle_error(self, request, client_address) -> None:
        pass  # the client was killed


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ModelServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.asked.append((body["model"], text))
            self.server.asked_at.setdefault(self.path.split("/")[1], []).append(text)
        found = self.server.answer(text, "Named entities:" in text)
        if isinstance(found, int):
            self._send(found, {"error": {"message": f"status {found}", "code": None}})
            return
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": found[0]},
            "finish_reason": found[1],
        }
        usage: dict[str, Any] = {"prompt_tokens": len(text) // 4, "completion_tokens": 7}
        usage |= {"total_tokens": 7 + len(text) // 4, "prompt_tokens_details": {"cached_tokens": 2}}
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"]}
        with self.server.lock:
            torn = self.server.tear()
            self.server.answered[text] += torn is None
        self._send(200, {**head, "choices": [choice], "usage": usage}, torn)

    def do_GET(self) -> None:
        models = [{"id": "only", "object": "model", "created": 1, "owned_by": "us"}]
        self._send(200, {"object": "list", "data": models})

    def _send(self, status: int, body: Any, torn: str | None = None) -> None:
        content = json.dumps(body).encode()
        if torn is not None:
            self.close_connection = True
        if torn == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        if torn == "late":
            self.rfile.read(1)  # ends with the connection
            return
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if torn else content)

    def log_message(self, format, *args) -> None:
        pass


@contextlib.contextmanager
def model_server(answer: Answer = rules) -> Iterator[ModelServer]:
    """Runs a server until the end of the block."""
    server = ModelServer(answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
