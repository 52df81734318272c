"""The client and the command with a real OpenAI-compatible server, ``transformers serve``."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from cirag_jax.llm.client import OpenAIBackend, OpenAIConfig
from cirag_jax.llm.transformers_backend import TransformersBackend
from cirag_jax.llm.types import Generate, Message
from tests import tiny_decoder

pytestmark = pytest.mark.slow
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

_ROOT = pathlib.Path(__file__).resolve().parents[2]
TURNS = (Message("system", "you are a sailor"), Message("user", "where was the weaver born?"))
REQUESTS = [
    Generate(TURNS, "", 12),
    Generate((Message("user", "who is the patron saint"),), "", 5),
    Generate((*TURNS, Message("assistant", "in the mill"), Message("user", "when?")), "", 20),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_decoder.folder(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def url(model):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = "from transformers.cli.transformers import main; main()"
    arguments = ["serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-c", command, *arguments, "--device", "cpu", "--dtype", "float32"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    output = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            output.append(line)
            if "Uvicorn running on" in line:
                break
        else:
            pytest.fail("the server did not start: " + "".join(output[-20:]))
        # Further output is not read, because a few requests do not fill the pipe.
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        process.communicate()


def test_server_texts_equal_local_texts(model, url):
    config = OpenAIConfig(str(model), url, server="transformers", max_retries=0)
    served = OpenAIBackend(config).generate(REQUESTS)
    local = TransformersBackend.open(str(model)).generate(REQUESTS)
    assert [r.error for r in served] == [None] * 3
    assert [r.text for r in served] == [r.text for r in local]
    assert len({r.text for r in local}) == 3 and all(r.text for r in local)
    for remote, local_response in zip(served, local, strict=True):
        assert remote.finish_reason == local_response.finish_reason
        assert remote.usage.prompt_tokens == local_response.usage.prompt_tokens
        assert remote.usage.generated_tokens == local_response.usage.generated_tokens


def test_stop_strings_and_failed_requests(model, url):
    config = OpenAIConfig(str(model), url, server="transformers", max_retries=0)
    backend = OpenAIBackend(config)
    (full,) = backend.generate(REQUESTS[:1])
    stop = full.text[3:5]
    turns = (*TURNS, Message("assistant", "in"))
    cut, refused, fine = backend.generate(
        [
            Generate(TURNS, "", 12, stop=(stop,)),
            Generate(turns, "", 4, continue_final=True),
            REQUESTS[1],
        ]
    )
    assert cut.text == full.text.partition(stop)[0] and cut.finish_reason == "stop"
    assert "continue_final is not supported" in str(refused.error)
    assert fine.error is None
    other = OpenAIBackend(OpenAIConfig("another", url, server="transformers", max_retries=0))
    assert "the server answered 4" in str(other.generate(REQUESTS[:1])[0].error)


def test_generate_command_with_server(model, url, tmp_path):
    lines = [
        {"id": name, "messages": [{"role": m.role, "content": m.content} for m in r.messages]}
        for name, r in zip("abc", REQUESTS, strict=True)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    process = subprocess.run(
        [
            sys.executable, str(_ROOT / "launch" / "generate.py"),
            "--config.backend=openai", f"--config.base_url={url}", f"--config.model={model}",
            f"--config.prompts={prompts}", f"--workdir={tmp_path / 'w'}", "--config.max_tokens=6",
        ],
        cwd=_ROOT,
        env={**os.environ, "CIRAG_JAX_CACHE": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert (result["num_requests"], result["failures"], result["backend"]) == (3, 0, "openai")
    assert result["tokens_per_second"] > 0 and result["generated_tokens"] >= 3
    assert "estimate: 3 requests" in process.stderr
    rows = [
        json.loads(row) for row in (tmp_path / "w" / "responses.jsonl").read_text().split("\n")[:-1]
    ]
    assert [row["id"] for row in rows] == ["a", "b", "c"] and all(row["text"] for row in rows)
