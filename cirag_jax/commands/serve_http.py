"""The HTTP server of ``launch/serve.py``: connections, limits and errors."""

import concurrent.futures
import contextlib
import http.server
import json
import logging
import select
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cirag_jax.llm import api_format
from cirag_jax.llm.api_format import ApiError, EmbeddingJob, Job
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.engine.rows import NUMBERS_NOT_FINITE
from cirag_jax.llm.serving import INTERNAL_ERROR, Batcher, Busy, Cancelled, Embedder, Exchange
from cirag_jax.llm.types import Generated
from cirag_jax.retrieval.encoders import FlaxEncoder

log = logging.getLogger(__name__)

_READ_SECONDS = 60.0  # time in which a client must send its request
_IO_SECONDS = 30.0  # time without progress after which a connection is closed
_DISCARDED = 1 << 26  # bytes of a refused body that are read, so that the client reads the error
_JSON = "application/json"
_GET = ("/v1/models",)
_POST = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_SHUTTING_DOWN = ApiError("the server is shutting down", 503)


class _Cancels(Protocol):
    def cancel(self) -> Any: ...


class Models:
    """The models of a server, and the threads that run them.

    Args:
      engines: language models by name.
      encoder: name and encoder of embeddings; None if there is none.
      bases: name of the base model of each adapter.
      max_tokens: default limit of new tokens in a chat.
      max_waiting: maximum number of waiting requests to each kind of model.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        encoder: tuple[str, FlaxEncoder] | None = None,
        bases: Mapping[str, str] | None = None,
        *,
        max_tokens: int = 1024,
        max_waiting: int = 1024,
    ):
        self._engines = engines
        self._encoder_name, self._encoder = encoder or ("", None)
        self._max_tokens = max_tokens
        bases = bases or {}
        self.names = {name: bases.get(name) for name in engines}
        self._embedder: Embedder | None = None
        if self._encoder is not None:
            self.names[self._encoder_name] = None
            self._embedder = Embedder(self._encoder, max_waiting)
        self._batcher = Batcher(engines, max_waiting)
        for engine in engines.values():
            engine.tokenizer.encode_document("a")  # copies the tokenizer before threads use it
        self.created = int(time.time())

    def close(self) -> bool:
        """Cancels all requests; returns whether the threads have ended."""
        ended = self._batcher.close()
        return (self._embedder is None or self._embedder.close()) and ended

    def parse(self, path: str, body: Mapping[str, Any]) -> Job | EmbeddingJob:
        """Parses a request for the URL ``path``."""
        is_embedding = path == "/v1/embeddings"
        model = body.get("model")
        if not isinstance(model, str):
            raise ApiError("model must be the name of a model", param="model")
        allowed = [self._encoder_name] if is_embedding else list(self._engines)
        if model not in allowed or not model:
            there = f"; choose one of {', '.join(allowed)}" if any(allowed) else ""
            message = f"the model {model[:100]!r} does not exist for {path}{there}"
            raise ApiError(message, 404, param="model", code="model_not_found")
        if is_embedding:
            return api_format.parse_embedding(body)
        if path == "/v1/chat/completions":
            return api_format.parse_chat(body, self._max_tokens)
        tokenizer = self._engines[model].tokenizer
        return api_format.parse_completion(
            body,
            tokenizer.encode_document,
            lambda ids: tokenizer.documents.decode(list(ids), skip_special_tokens=False),
        )

    def submit(self, job: Job) -> Exchange:
        """Queues a request for texts."""
        return self._batcher.submit(job.model, job.requests, job.streams)

    def submit_texts(self, job: EmbeddingJob) -> tuple["concurrent.futures.Future[Any]", int]:
        """Queues texts; returns the future of their vectors, and their number of tokens."""
        assert self._encoder is not None and self._embedder is not None
        if job.dimensions is not None and job.dimensions > self._encoder.dim:
            message = f"dimensions={job.dimensions} must be at most {self._encoder.dim}"
            raise ApiError(message, param="dimensions")
        lengths, limit = self._encoder.lengths(job.texts, job.role)
        longest = max(lengths)
        if longest > limit:
            raise ApiError(
                f"text {lengths.index(longest)} of input has {longest} tokens, but the maximum "
                f"context length is {limit}",
                param="input",
                code="context_length_exceeded",
            )
        return self._embedder.submit(job.texts, job.role), sum(lengths)


class ApiServer(http.server.ThreadingHTTPServer):
    """A server with one thread per connection.

    The thread that accepts connections also stops reading requests that arrive too slowly, and
    cancels the work for clients that have gone.

    Attributes:
      models: the models.
      max_bytes: maximum size of a request's body.
      num_requests: number of requests so far.
      is_closing: whether clients whose requests are cancelled get an error.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], models: Models, *, max_bytes: int, max_connections: int
    ):
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.models = models
        self.max_bytes = max_bytes
        self.num_requests = 0
        self.is_closing = False
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float | None] = {}  # of all open connections
        self._work: dict[socket.socket, _Cancels] = {}
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """The address of the API."""
        host, port = self.server_address[:2]
        host = f"[{host}]" if ":" in str(host) else host
        return f"http://{host}:{port}/v1"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread, or refuses the connection if there are too many."""
        with self._lock:
            is_full = len(self._deadlines) >= self._max_connections
            if not is_full:
                self._deadlines[request] = None
        if is_full:
            body = json.dumps(
                api_format.error_body(ApiError("the server has too many connections", 503))
            ).encode()
            head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {_JSON}\r\n"
            head += f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
            request.setblocking(False)
            with contextlib.suppress(OSError):
                request.send(head.encode() + body)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection until it is closed."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._deadlines.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error of a connection's thread, unless the client has gone."""
        del request, client_address
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("a connection failed")

    def reading(self, connection: socket.socket, is_reading: bool) -> None:
        """Starts or ends the time in which a client must send its request."""
        with self._lock:
            deadline = time.monotonic() + _READ_SECONDS if is_reading else None
            self._deadlines[connection] = deadline
            self.num_requests += not is_reading

    @contextlib.contextmanager
    def working(self, connection: socket.socket, work: _Cancels) -> Any:
        """A context in which ``work`` is cancelled if the client closes the connection."""
        with self._lock:
            self._work[connection] = work
        try:
            yield
        finally:
            with self._lock:
                del self._work[connection]
            work.cancel()

    def service_actions(self) -> None:
        """Ends slow requests, and cancels the work for closed connections."""
        now, poll = time.monotonic(), select.poll()
        with self._lock:
            # A connection is not closed by its thread before it has left `_work`.
            for connection, deadline in self._deadlines.items():
                if deadline is not None and now > deadline:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)
            by_number = {c.fileno(): c for c in self._work if c.fileno() >= 0}
            for number in by_number:
                poll.register(number, select.POLLIN)
            for number, event in poll.poll(0):
                connection = by_number[number]
                if event & (select.POLLERR | select.POLLHUP) or _has_ended(connection):
                    self._work[connection].cancel()

    def close_all(self) -> None:
        """Closes all connections."""
        with self._lock:
            for connection in self._deadlines:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def _has_ended(connection: socket.socket) -> bool:
    """Returns whether a readable connection has ended, instead of having further data."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ApiServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "cirag_jax", ""
    timeout = _IO_SECONDS

    def handle_one_request(self) -> None:
        self.server.reading(self.connection, True)
        super().handle_one_request()

    def do_GET(self) -> None:
        self._respond(self._get)

    def do_POST(self) -> None:
        self._respond(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs no requests."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends an error of the HTTP protocol as JSON."""
        del explain
        self.close_connection = True
        self._send_error(ApiError(message or http.HTTPStatus(code).phrase, code))

    def _respond(self, answer: Any) -> None:
        try:
            answer()
        except ApiError as error:
            self._send_error(error)
        except Busy:
            self._send_error(ApiError("too many requests are waiting; try again later", 429))
        except (Cancelled, concurrent.futures.CancelledError):
            self.close_connection = True
            if self.server.is_closing:  # otherwise, the client has gone
                self._send_error(_SHUTTING_DOWN)
        except OSError:
            self.close_connection = True
        except BaseException:  # Rust panics are not Exceptions
            log.exception("a request failed")
            self._send_error(ApiError(INTERNAL_ERROR, 500))

    def _get(self) -> None:
        path = self._path()
        self.server.reading(self.connection, False)
        if "content-length" in self.headers or "transfer-encoding" in self.headers:
            self.close_connection = True  # a body may follow
        if path not in _GET:
            raise self._wrong_path(path, _GET)
        models = self.server.models
        self._send(200, api_format.models_body(models.names, models.created))

    def _post(self) -> None:
        path = self._path()
        if path not in _POST:
            raise self._wrong_path(path, _POST)
        body = api_format.parse_json(self._read())
        models = self.server.models
        job = models.parse(path, body)
        if isinstance(job, EmbeddingJob):
            vectors, tokens = models.submit_texts(job)
            with self.server.working(self.connection, vectors):
                try:
                    vectors_ND = vectors.result()
                except concurrent.futures.CancelledError:
                    raise
                except Exception as error:
                    raise ApiError(str(error), 500) from None
            self._send(200, api_format.embedding_body(job, vectors_ND, tokens))
            return
        exchange = models.submit(job)
        with self.server.working(self.connection, exchange):
            self._stream(job, exchange) if job.streams else self._complete(job, exchange)

    def _path(self) -> str:
        return urllib.parse.urlsplit(self.path).path.rstrip("/")

    def _wrong_path(self, path: str, others: Sequence[str]) -> ApiError:
        self.close_connection = True  # a body may follow
        if path in (*_GET, *_POST):
            return ApiError(f"{path} does not support {self.command}", 405)
        return ApiError(f"{path[:100]!r} does not exist; there are {', '.join(others)}", 404)

    def _read(self) -> bytes:
        """Returns the body of the request; the connection is closed after an error."""
        stays_open, self.close_connection = not self.close_connection, True
        lengths = self.headers.get_all("content-length", [])
        if self.headers.get("transfer-encoding") or not lengths:
            raise ApiError("the header Content-Length is required", 411)
        if len(lengths) > 1 or not (lengths[0].isascii() and lengths[0].isdigit()):
            raise ApiError("the header Content-Length must be one number")
        length = int(lengths[0][:20])  # enough digits to exceed the limit
        if length > self.server.max_bytes:
            self._discard(length)
            raise ApiError(f"the body has more than {self.server.max_bytes} bytes", 413)
        content = self.rfile.read(length)
        self.server.reading(self.connection, False)
        if len(content) < length:
            raise ApiError("the body is incomplete")
        self.close_connection = not stays_open
        if self.headers.get_content_type() != _JSON:
            # Pages of other origins cannot send this type without permission of the server.
            raise ApiError(f"the header Content-Type must be {_JSON}", 415)
        return content

    def _discard(self, length: int) -> None:
        while 0 < length <= _DISCARDED and (part := self.rfile.read(min(length, 1 << 16))):
            length -= len(part)

    def _complete(self, job: Job, exchange: Exchange) -> None:
        responses: list[Generated | None] = [None] * len(job.requests)
        for update in exchange.updates():
            responses[update.index] = _checked(update.response)
        self._send(200, api_format.job_body(job, [r for r in responses if r is not None]))

    def _stream(self, job: Job, exchange: Exchange) -> None:
        """Sends events; an error before the first one is a usual response."""
        stream, updates = api_format.Stream(job), exchange.updates()
        update = next(updates)
        _checked(update.response)
        self.close_connection = True  # the end of the connection ends the response
        self.send_response(200)
        for name, value in (("Content-Type", "text/event-stream"), ("Cache-Control", "no-cache")):
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            self._send_events(stream.start())
            while update is not None:
                response = _checked(update.response)
                self._send_events(stream.update(update.index, response, update.is_final))
                update = next(updates, None)
            self._send_events(stream.end())
        except (ApiError, Cancelled) as error:
            error = error if isinstance(error, ApiError) else _SHUTTING_DOWN
            self._send_events([api_format.error_body(error)])
            return
        self.wfile.write(b"data: [DONE]\n\n")

    def _send_events(self, events: Any) -> None:
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _send_error(self, error: ApiError) -> None:
        with contextlib.suppress(OSError):
            self._send(error.status, api_format.error_body(error))

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        content = json.dumps(body, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", _JSON)
        self.send_header("Content-Length", str(len(content)))
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)


def _checked(response: Generated) -> Generated:
    """Returns the response, or raises the error of its request."""
    if response.error is None:
        return response
    if response.error in (INTERNAL_ERROR, NUMBERS_NOT_FINITE):
        raise ApiError(response.error, 500)
    code = "context_length_exceeded" if "fit" in response.error.split() else None
    raise ApiError(response.error, code=code)
