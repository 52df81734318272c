"""Attacks launch/serve.py with mutated requests and dropped connections, and watches its memory.

    python -m tests.attacks.served --minutes 30 [--seed 0]

The server has a tiny language model and a tiny encoder. Several threads send valid requests,
requests with mutated JSON or bytes, and requests whose connection they close before, during or
after the answer. A valid request must succeed, all other responses must be JSON with a status
below 500, and the server must end with exit code 0. Prints the statuses, and the server's memory,
threads and open files every minute. Exits with 1 if something is wrong.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from tests import tiny, tiny_decoder
from tests.attacks import hostile
from tests.attacks.faults import ENVIRONMENT

_THREADS = 6
_TIMEOUT = 120.0  # seconds without an answer, after which the server counts as hanging
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "model": "decoder",
            "messages": [
                {"role": "system", "content": "you are a sailor"},
                {"role": "user", "content": [{"type": "text", "text": "who is the saint?"}]},
            ],
            "max_tokens": 12,
            "temperature": 0.5,
            "seed": 3,
            "n": 2,
            "stop": ["town", "mill"],
            "logprobs": True,
            "top_logprobs": 2,
        },
        {
            "model": "decoder",
            "messages": [{"role": "user", "content": "where was the weaver born?"}],
            "max_tokens": 30,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {
            "model": "decoder",
            "messages": [{"role": "user", "content": "answer"}],
            "max_tokens": 9,
            "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}},
        },
    ],
    "/v1/completions": [
        {
            "model": "decoder",
            "prompt": ["the sailor was born", "the weaver"],
            "max_tokens": 1,
            "echo": True,
            "logprobs": 1,
            "temperature": 0,
        },
        {"model": "decoder", "prompt": [[5, 6, 7, 8], [9]], "max_tokens": 8, "user": "me"},
    ],
    "/v1/embeddings": [
        {"model": "encoder", "input": ["a sailor", "a town"], "encoding_format": "base64"},
        {"model": "encoder", "input": "a mill", "input_type": "query", "dimensions": 4},
    ],
}


def http_request(path: str, body: bytes, method: str = "POST") -> bytes:
    """Returns the bytes of a request."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def status_of(response: bytes) -> int:
    """Returns the status of a complete response; checks that its body is JSON or a stream."""
    head, _, body = response.partition(b"\r\n\r\n")
    if b"text/event-stream" in head:
        events = body.decode().split("\n\n")[:-1]
        assert events[-1] == "data: [DONE]" or "error" in json.loads(events[-1][6:]), events[-1]
        return 200
    value = json.loads(body)
    status = int(head.split()[1])
    error = value.get("error")
    assert (error is None) == (status == 200), value
    assert error is None or (error["message"] and "Traceback" not in error["message"]), value
    return status


class _Attack:
    def __init__(self, port: int, until: float):
        self.port, self.until = port, until
        self.statuses: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < self.until and not self.faults:
            path = rng.choice(list(REQUESTS))
            content = json.dumps(rng.choice(REQUESTS[path])).encode()
            kind = rng.choice(["valid", "json", "body", "bytes", "drop", "drop"])
            sent = http_request(path, self._mutated(rng, content, kind))
            if kind == "bytes":
                sent = hostile.corrupt(sent, [_damage(rng)])
            try:
                outcome = self._send(rng, sent, kind)
            except Exception as error:
                self.faults.append(f"{kind}: {type(error).__name__}: {error}: {sent[:3000]!r}")
                return
            with self._lock:
                self.statuses[f"{kind} {outcome}"] += 1

    def _mutated(self, rng: random.Random, content: bytes, kind: str) -> bytes:
        if kind == "json":
            value = rng.choice([*hostile.VALUES, *hostile.WORDS])
            changes = [(rng.randrange(200), value) for _ in range(rng.randint(1, 2))]
            return hostile.mutate_json(json.loads(content), (rng.random() < 0.5, changes))
        return hostile.corrupt(content, [_damage(rng)]) if kind == "body" else content

    def _send(self, rng: random.Random, sent: bytes, kind: str) -> str:
        with socket.create_connection(("127.0.0.1", self.port), timeout=_TIMEOUT) as connection:
            if kind == "drop":
                _drop(rng, connection, sent)
                return "dropped"
            response = b""
            try:
                connection.sendall(sent)
                if kind == "bytes":  # the request may be incomplete
                    connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(1 << 16):
                    response += part
            except OSError as error:  # the server may close the connection early
                if kind != "bytes" or isinstance(error, TimeoutError):
                    raise
        if kind == "bytes" and not response.startswith(b"HTTP/1."):
            return "closed"
        status = status_of(response) if kind != "bytes" else int(response.split()[1])
        assert status < 500 or (kind == "bytes" and status in (501, 505)), response[:2000]
        assert kind != "valid" or status in (200, 429), response[:2000]
        return str(status)


def _damage(rng: random.Random) -> tuple[str, int, bytes]:
    kind = rng.choice(["cut", "put", "over", "drop", "nest"])
    return kind, rng.randrange(1 << 16), rng.choice(hostile.INSERTS)


def _drop(rng: random.Random, connection: socket.socket, sent: bytes) -> None:
    """Closes the connection within the request, or some time after it, or resets it."""
    connection.sendall(sent[: rng.choice([rng.randrange(len(sent)), len(sent)])])
    if rng.random() < 0.5:
        connection.settimeout(rng.random())
        with contextlib.suppress(TimeoutError):
            connection.recv(rng.choice([1, 1 << 12]))
    if rng.random() < 0.5:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _memory(pid: int) -> str:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    rss, threads = (int(re.search(rf"{n}:\s+(\d+)", status)[1]) for n in ("VmRSS", "Threads"))  # type: ignore[index]
    files = len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))
    return f"{rss / 1024:.1f} MiB, {threads} threads, {files} files"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        tiny_decoder.folder(root / "decoder", max_position_embeddings=512)
        tiny.model_folder(root / "encoder")
        command = [
            sys.executable, "launch/serve.py", f"--config.model={root / 'decoder'}",
            f"--config.encoder.model={root / 'encoder'}", "--config.port=0",
            f"--workdir={root / 'W'}",
        ]  # fmt: skip
        environment = {**ENVIRONMENT, "JAX_COMPILATION_CACHE_DIR": str(root / "xla")}
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        try:
            return _attack(process, options)
        finally:
            process.kill()


def _attack(process: Any, options: argparse.Namespace) -> int:
    log: list[str] = []
    for line in process.stderr:
        log.append(line)
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
            break
    else:
        print("".join(log))
        return 1
    reader = threading.Thread(target=lambda: log.extend(process.stderr), daemon=True)
    reader.start()
    attack = _Attack(int(found[1]), time.monotonic() + 60 * options.minutes)
    threads = [
        threading.Thread(target=attack.run, args=(options.seed * 1000 + i,), daemon=True)
        for i in range(_THREADS)
    ]
    print(f"start: {_memory(process.pid)}", flush=True)
    for thread in threads:
        thread.start()
    minute = 0
    while any(thread.is_alive() for thread in threads):
        threads[0].join(60)
        minute += 1
        count = sum(attack.statuses.values())
        print(f"minute {minute}: {count} requests, {_memory(process.pid)}", flush=True)
        for thread in threads[1:]:
            thread.join(_TIMEOUT if not threads[0].is_alive() else 0)
    time.sleep(2)
    print(f"end: {_memory(process.pid)}")
    process.send_signal(signal.SIGTERM)
    code = process.wait(60)
    for outcome, count in sorted(attack.statuses.items()):
        print(f"{outcome:>16} {count:>8}")
    faults = attack.faults + [line for line in log[1:] if "Traceback" in line]
    print(f"exit code {code}; {len(faults)} faults", *faults, *log[1:50], sep="\n")
    return 1 if code or faults else 0


if __name__ == "__main__":
    sys.exit(main())
