"""launch/plan.py with configs/index.py."""

import pathlib
import runpy

import numpy as np
import pytest

from cirag_jax.commands import plan
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.retrieval import search
from cirag_jax.retrieval.faiss_index import FAISS_KINDS, FaissIndex, IndexOptions
from cirag_jax.retrieval.search import ExactIndex
from tests import tiny

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_EXTEND = runpy.run_path(str(_ROOT / "launch/plan.py"))["extend"]
_DPR = 21_015_324


def planned(*flags):
    overrides = [f"--config.{flag}" for flag in flags]
    return plan.plan(load_config(str(_ROOT / "configs/index.py"), overrides, _EXTEND))


def test_plan_index_states_disk_and_memory(capsys):
    kinds = planned(f"examples={_DPR}", "retriever.dtype=bfloat16")["kinds"]
    vectors = _DPR * 384 * 2
    assert set(kinds) == {"exact", "exact, stream", *FAISS_KINDS}
    assert all(vectors <= kind["disk_bytes"] for kind in kinds.values())
    assert kinds["exact"]["memory_bytes"] > vectors
    for bounded in ("exact, stream", "faiss_ivfpq"):
        assert max(kinds[bounded].values()) == kinds[bounded]["disk_bytes"] < 1.1 * vectors
        assert kinds[bounded]["memory_bytes"] < vectors / 4
    assert "index of 21,015,324 passages, 384 dimensions, bfloat16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "flags", "peak"),
    [("exact", (), 760), ("exact, stream", ("retriever.dtype=bfloat16",), 375)],
)
def test_plan_index_exact_search_is_at_most_a_quarter_above_the_measured_peak(kind, flags, peak):
    """MiB of experiments/benchmarks/large_index.py --rows=100000, see experiments/RESULTS.md."""
    estimate = planned("examples=100000", *flags)["kinds"][kind]["memory_bytes"] / 2**20
    assert peak < estimate < 1.25 * peak


def test_plan_index_counts_the_blocks_of_the_search():
    index = ExactIndex(np.zeros((4096, 4), np.float32), stream=True)
    assert index._rows == search.streamed_rows() == 2048


def test_plan_index_faiss_size_equals_the_file(tmp_path):
    """The estimate is the size of a real index, apart from its small tables."""
    rows, dim = 20_000, 32
    flags = (f"examples={rows}", f"encoder.dimensions={dim}", "retriever.ivf_lists=50")
    kinds = planned(*flags)["kinds"]
    vector_ND = np.random.default_rng(0).normal(size=(rows, dim)).astype(np.float32)
    for kind in ("faiss_flat", "faiss_ivf", "faiss_ivfpq"):
        FaissIndex.build(vector_ND, kind, IndexOptions(ivf_lists=50)).save(tmp_path / kind)
        estimate = kinds[kind]["disk_bytes"] - rows * (4 * dim + 12)
        assert estimate == pytest.approx((tmp_path / kind).stat().st_size, abs=40_000)


def test_plan_index_counts_passages_and_reads_the_width(tmp_path):
    data, model = tiny.dataset_folder(tmp_path / "data"), tiny.model_folder(tmp_path / "model")
    result = planned(f"data.dir={data}", f"encoder.model={model}")
    assert (result["passages"], result["dimension"]) == (24, 32)
    (data / "corpus.jsonl").unlink()
    with pytest.raises(UserError, match=r"corpus\.jsonl cannot be read .* set --config.examples"):
        planned(f"data.dir={data}", f"encoder.model={model}")
    with pytest.raises(
        UserError, match=r"openai does not tell the size .*--config.encoder.dimensions"
    ):
        planned("encoder.backend=openai", "examples=5")
