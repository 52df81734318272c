"""``launch/extract.py``: a tiny decoder with nonsense output, interruptions, estimates."""

import json
import pathlib
import runpy

import pytest

from cirag_jax import cli
from cirag_jax.runtime.records import JournalReader
from cirag_jax.runtime.store import JOURNAL, Journal
from cirag_jax.triples.store import TripleStore
from tests import tiny, tiny_decoder
from tests.commands.model_server import model_server

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
    """Runs the command on a tiny corpus; returns the exit code, the result and stderr."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    main = runpy.run_path(str(_ROOT / "launch" / "extract.py"))["main"]
    data = tiny.dataset_folder(tmp_path / "data")

    def run(*arguments):
        flags = (f"--config.data.dir={data}", f"--workdir={tmp_path / 'w'}", *arguments)
        with pytest.raises(SystemExit) as end:
            cli.run(
                main, str(_ROOT / "configs" / "extract.py"), ["extract.py", *flags], resumes=True
            )
        out, err = capsys.readouterr()
        return end.value.code, json.loads(out) if out else None, err

    return run


def tiny_model(folder):
    """Returns flags to extract six passages with a tiny decoder."""
    model = tiny_decoder.folder(folder / "model", max_position_embeddings=4096)
    return (
        f"--config.extractor.model={model}", "--config.limit=6", "--config.entity_tokens=5",
        "--config.triple_tokens=5", "--config.min_passages=3", "--config.extractor.batch_size=2",
    )  # fmt: skip


@pytest.mark.slow
def test_command_nonsense_output_is_counted_and_stops_run(command, tmp_path):
    arguments = tiny_model(tmp_path)
    code, result, err = command(*arguments)
    assert (code, result) == (2, None) and "estimate: 6 passages" in err
    assert "gave no triple" in err and "Traceback" not in err
    code, result, err = command(*arguments, "--config.max_empty_share=1")
    assert code == 0 and result, err
    assert (result["passages"], result["failed"], result["triples"]) == (6, 6, 0)
    assert sum(result["failures"].values()) == 6 and result["complete"]
    assert all(cause.startswith("answer: ") for cause in result["failures"])
    assert sum(result["parse_errors"].values()) == 12  # both answers of every passage
    assert result["generated_tokens"] <= 60 and result["calls"] == 12
    assert json.loads((tmp_path / "w" / "result.json").read_text()) == result
    with TripleStore.open(tmp_path / "w") as store:
        assert store.triples(["p0"]) == {"p0": None}


@pytest.mark.slow
def test_command_ctrl_c_keeps_all_answers(command, tmp_path, monkeypatch):
    arguments = (*tiny_model(tmp_path), "--config.max_empty_share=1", "--config.in_flight=2")
    record, count = Journal.record, 0

    def interrupted(*given):
        nonlocal count
        record(*given)
        count += 1
        if count == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", interrupted)
        code, result, err = command(*arguments)
    assert (code, result) == (130, None) and "interrupted; progress is saved" in err
    assert not (tmp_path / "w" / "result.json").exists()
    with JournalReader(tmp_path / "w" / JOURNAL) as book:
        assert book.totals().calls == 3
    code, result, err = command(*arguments)
    assert code == 0 and result, err
    assert (result["passages"], result["failed"], result["calls"]) == (6, 6, 12)


def test_command_estimate_keeps_earlier_result(command, tmp_path):
    def kept():
        return {path.name: path.read_bytes() for path in tmp_path.glob("w/*") if path.is_file()}

    with model_server() as server:
        flags = (
            "--config.extractor.backend=openai", f"--config.extractor.base_url={server.url}",
            "--config.extractor.model=m",
        )  # fmt: skip
        code, done, _ = command(*flags, "--config.max_empty_share=1", "--config.limit=2")
        before = kept()
        assert code == 0 and done and done["passages"] == 2
        assert json.loads(before["result.json"]) == done
        code, estimate, _ = command(*flags, "--config.estimate_only=true")
        assert code == 0 and estimate
        assert estimate["passages"] == 22 and not estimate["complete"]
    assert kept() == before


def test_command_old_store_is_refused(command, tmp_path):
    old = tmp_path / "w" / "triples"
    (old / "segments").mkdir(parents=True)
    (old / "index.sqlite").write_bytes(b"")
    code, result, err = command()
    assert (code, result) == (2, None)
    assert "earlier version; extract the corpus again with launch/extract.py and another" in err
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == [".lock", "triples"]
