"""``launch/extract.py`` with a model of its own: a tiny decoder that writes nonsense."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from cirag_jax.graph.store import TripleStore
from tests import tiny, tiny_decoder

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
    assert sum(result["problems"].values()) == 12  # both answers of every passage
    assert result["generated_tokens"] <= 60 and result["calls"] == 12
    assert "estimate: 6 passages" in stopped.stderr
    assert json.loads((tmp_path / "w" / "result.json").read_text()) == result
    with TripleStore.open(tmp_path / "w") as store:
        assert store.triples(["p0"]) == {"p0": None} and store.status("p0") == "failed"
