"""``launch/extract.py`` with a model of its own: a tiny decoder that writes nonsense."""

import json
import os
import pathlib
import runpy
import subprocess
import sys

import pytest

from cirag_jax import cli
from cirag_jax.runtime.journal import FILE, read_records
from cirag_jax.triples.store import TripleStore
from tests import interrupting, tiny, tiny_decoder
from tests.commands.model_server import model_server

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def command(*arguments):
    return subprocess.run(
        [sys.executable, str(_ROOT / "launch" / "extract.py"), *map(str, arguments)],
        cwd=_ROOT,
        env={**os.environ, "CIRAG_JAX_CACHE": "0", "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_nonsense_is_counted_and_stops_the_run(tmp_path):
    model = tiny_decoder.folder(tmp_path / "model", max_position_embeddings=4096)
    data = tiny.dataset_folder(tmp_path / "data")
    arguments = [
        f"--config.data.dir={data}", f"--config.extractor.model={model}", "--config.limit=6",
        "--config.entity_tokens=5", "--config.triple_tokens=5", "--config.min_passages=3",
        f"--workdir={tmp_path / 'w'}",
    ]  # fmt: skip
    stopped = command(*arguments)
    assert stopped.returncode == 2 and stopped.stdout == ""
    assert "gave no triple" in stopped.stderr and "Traceback" not in stopped.stderr
    done = command(*arguments, "--config.max_empty_share=1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["passages"], result["failed"], result["triples"]) == (6, 6, 0)
    assert sum(result["failures"].values()) == 6 and result["complete"]
    assert all(cause.startswith("answer: ") for cause in result["failures"])
    assert sum(result["parse_errors"].values()) == 12  # both answers of every passage
    assert result["generated_tokens"] <= 60 and result["calls"] == 12
    assert "estimate: 6 passages" in stopped.stderr
    assert json.loads((tmp_path / "w" / "result.json").read_text()) == result
    with TripleStore.open(tmp_path / "w") as store:
        assert store.triples(["p0"]) == {"p0": None}


@pytest.mark.slow
def test_ctrl_c_loses_nothing(tmp_path):
    model = tiny_decoder.folder(tmp_path / "model", max_position_embeddings=4096)
    data = tiny.dataset_folder(tmp_path / "data")
    arguments = [
        f"--config.data.dir={data}", f"--config.extractor.model={model}", "--config.limit=6",
        "--config.entity_tokens=5", "--config.triple_tokens=5", "--config.max_empty_share=1",
        "--config.in_flight=2", "--config.extractor.batch_size=2", f"--workdir={tmp_path / 'w'}",
    ]  # fmt: skip
    ended = interrupting.run(tmp_path, "extract.py", *arguments, after=3)
    assert interrupting.is_one_sentence(ended, "extract.py")
    assert not (tmp_path / "w" / "result.json").exists()
    held = sum(record.calls["generate"] for record in read_records(tmp_path / "w" / FILE))
    assert 3 <= ended.recorded <= held <= ended.recorded + 1 and held < 12
    ended = interrupting.run(tmp_path, "extract.py", *arguments)
    assert (ended.code, ended.recorded) == (0, 12 - held), ended.err
    result = json.loads(ended.out)
    assert (result["passages"], result["failed"], result["calls"]) == (6, 6, 12)


def test_an_estimate_leaves_an_earlier_result_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    main = runpy.run_path(str(_ROOT / "launch" / "extract.py"))["main"]
    data = tiny.dataset_folder(tmp_path / "data")

    def extract(*arguments):
        overrides = (f"--config.data.dir={data}", "--config.extractor.backend=openai",
                     f"--config.extractor.base_url={server.url}", *arguments)  # fmt: skip
        with pytest.raises(SystemExit) as end:
            cli.run(main, str(_ROOT / "configs" / "extract.py"), ["extract.py", *overrides])
        assert end.value.code == 0
        return json.loads(capsys.readouterr().out)

    def kept():
        return {path.name: path.read_bytes() for path in tmp_path.glob("w/*") if path.is_file()}

    with model_server() as server:
        workdir = f"--workdir={tmp_path / 'w'}"
        model, few = "--config.extractor.model=m", "--config.max_empty_share=1"
        done = extract(workdir, model, few, "--config.limit=2")
        before = kept()
        assert json.loads(before["result.json"]) == done and done["passages"] == 2
        estimate = extract(workdir, model, "--config.estimate_only=true")
        assert estimate["passages"] == 22 and not estimate["complete"]
    assert kept() == before
