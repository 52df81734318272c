"""Answering from a corpus and an index that stay on disk."""

import pytest

from cirag_jax.commands import answer, index
from cirag_jax.config_files import load_config
from cirag_jax.datasets import jsonl
from tests import answering

pytestmark = pytest.mark.slow


def test_answer_from_disk_gives_the_same_predictions(tmp_path, monkeypatch, one_device):
    folders = answering.tiny_folders(tmp_path)
    encoder = f"--config.encoder.model={folders['encoder']}"
    flags = [f"--config.data.dir={folders['data']}", encoder, "--config.shard_rows=5"]
    index.index_dataset(load_config("configs/index.py", flags), tmp_path)

    def predictions(name, *more):
        workdir = tmp_path / name
        workdir.mkdir()
        searched = (
            "--config.data.corpus=ircot_full",
            f"--config.retriever.folder={tmp_path / 'index'}",
        )
        config, *rest, _ = answering.arguments(
            folders, workdir, *searched, *more, method="native_rag"
        )
        answer.answer(load_config(config.removeprefix("--config="), rest), workdir)
        return answering.lines(workdir / "predictions.jsonl")

    expected = predictions("memory")
    monkeypatch.setattr(jsonl, "LARGE_CORPUS", 0)
    assert predictions("disk", "--config.retriever.stream=true") == expected
    assert len(expected) == 8 and all(line["passages"] for line in expected)
