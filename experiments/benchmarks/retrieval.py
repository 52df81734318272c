"""Compares our exact search with faiss.IndexFlatIP in one run.

Both sides search random float32 vectors (1M x 384 by default) with k = 10 and batches of 1, 8 and
64 queries. The sides are measured alternately, so that other load affects both. ``ratio`` is our
median over faiss's, below 1 if we are faster. ``agree`` is the share of equal
results (random vectors have near-ties, which rounding may swap).

On a CPU, both sides use all cores. ``--mode=bandwidth``, for an accelerator, stores rows in
bfloat16 and in float32, and reports the rate of reading rows as a share of the memory bandwidth. It
also measures PyTorch in bfloat16 (product with all rows, then ``topk``) if PyTorch has CUDA, and
faiss-gpu if it is installed. Rows repeat after 65,536, which does not change the time.

Results
  CPU: two cores of a busy AMD EPYC virtual machine (load 10 to 12, hence slow on both sides);
  2026-11-22, jax 0.10.2, faiss-cpu 1.15.1, 1M x 384, k = 10, ``--repeats 3``, at most 7.4 GiB in
  total (the vectors, faiss's copy and ours):

    batch  ours     theirs    ratio  processor ratio  agree
    1      0.580 s   0.568 s  1.02   0.64             1.0
    8      0.662 s   1.628 s  0.41   0.39             1.0
    64     5.225 s  14.227 s  0.37   0.24             1.0

  With less load (2 to 3), the same searches took 0.058 s and 0.085 s, 0.149 s and 0.268 s, 0.543 s
  and 1.949 s. Both sides are bound by reading the rows at batch 1, and by the products at batch 64.
  A full sort of the scores (``jax.lax.top_k``) took 2.9 s at batch 64; our two-stage top-k takes
  0.02 s. GPU results are in gpu.py.
"""

import argparse
import json
import math
import pathlib
import resource
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.io import standard_streams
from cirag_jax.retrieval.search import ExactIndex
from cirag_jax.training import mfu
from experiments.benchmarks import measure


class Repeated:
    """A small matrix, repeated to the shape of a large one, that supports row slices."""

    def __init__(self, rows_RD: np.ndarray, count: int):
        self.shape = count, rows_RD.shape[1]
        self._rows_RD = rows_RD

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self._rows_RD[np.arange(*rows.indices(self.shape[0])) % len(self._rows_RD)]


def main() -> None:
    """Prints one JSON object per row, and a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", choices=("compare", "bandwidth"), default="compare")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--dtypes", nargs="+", default=["bfloat16", "float32"], help="for --mode=bandwidth"
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    query_QD = rng.standard_normal((max(options.batches), options.dim), dtype=np.float32)
    if options.mode == "compare":
        vectors_ND = rng.standard_normal((options.rows, options.dim), dtype=np.float32)
        rows = compare(vectors_ND, query_QD, options)
    else:
        block_RD = rng.standard_normal((min(options.rows, 65536), options.dim), dtype=np.float32)
        rows = bandwidth(Repeated(block_RD, options.rows), query_QD, options)
    for row in rows:
        print(json.dumps(row))
    _print_table(rows)


def compare(vectors_ND: np.ndarray, query_QD: np.ndarray, options: Any) -> list[dict[str, Any]]:
    """Measures both sides for every batch size."""
    theirs = _faiss(vectors_ND)
    ours = ExactIndex(vectors_ND)
    rows = []
    for batch in options.batches:
        part_QD = query_QD[:batch]
        actual, _ = ours.search(part_QD, options.k)
        _, expected = theirs.search(part_QD, options.k)
        seconds = measure.alternately(
            {
                "ours": lambda part_QD=part_QD: ours.search(part_QD, options.k),
                "theirs": lambda part_QD=part_QD: theirs.search(part_QD, options.k),
            },
            options.repeats,
        )
        agree = float((actual == expected).mean())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rows.append(
            measure.row(seconds, batch=batch, agree=round(agree, 4), peak_gib=round(peak, 2))
        )
    return rows


def bandwidth(vectors_ND: Repeated, query_QD: np.ndarray, options: Any) -> list[dict[str, Any]]:
    """Measures searches on an accelerator, and their shares of the memory bandwidth."""
    rows = []
    for dtype in options.dtypes:
        index = ExactIndex(vectors_ND, dtype=dtype)
        size = index.nbytes
        for batch in options.batches:
            part_QD = query_QD[:batch]

            def queued(index=index, part_QD=part_QD) -> Any:
                # Unlike with a search per query, the device does not wait for the host.
                return jax.block_until_ready([index.dispatch(part_QD, options.k) for _ in range(8)])

            on_device = _median(queued, options.repeats) / 8
            whole = _median(
                lambda index=index, part_QD=part_QD: index.search(part_QD, options.k),
                options.repeats,
            )
            rows.append(_rate(f"ours, {dtype}", batch, size, on_device, whole))
        del index
    if measure.has_torch("cuda"):
        rows += _torch(vectors_ND, query_QD, options)
    try:
        import faiss
    except ImportError:
        return rows
    if getattr(faiss, "get_num_gpus", lambda: 0)():
        theirs = faiss.index_cpu_to_all_gpus(_faiss(vectors_ND[:]))
        for batch in options.batches:
            whole = _median(
                lambda batch=batch: theirs.search(query_QD[:batch], options.k), options.repeats
            )
            rows.append(
                _rate("faiss-gpu, float32", batch, 4 * math.prod(vectors_ND.shape), None, whole)
            )
    return rows


def _torch(vectors_ND: Repeated, query_QD: np.ndarray, options: Any) -> list[dict[str, Any]]:
    """Measures PyTorch with bfloat16 rows on the device, and queries and results on the host."""
    import torch

    rows_ND = torch.empty(vectors_ND.shape, dtype=torch.bfloat16, device="cuda")
    for start in range(0, len(rows_ND), 1 << 18):
        part = torch.from_numpy(vectors_ND[start : start + (1 << 18)])
        rows_ND[start : start + len(part)] = part.to("cuda")

    def dispatch(part_QD: np.ndarray) -> Any:
        queries_QD = torch.from_numpy(part_QD).to("cuda", torch.bfloat16)
        return (queries_QD @ rows_ND.T).topk(options.k)

    def queued(part_QD: np.ndarray) -> None:
        for _ in range(8):
            dispatch(part_QD)
        torch.cuda.synchronize()

    size = 2 * math.prod(vectors_ND.shape)
    rows = []
    for batch in options.batches:
        part_QD = query_QD[:batch]
        on_device = _median(lambda part_QD=part_QD: queued(part_QD), options.repeats) / 8
        whole = _median(
            lambda part_QD=part_QD: [x.cpu() for x in dispatch(part_QD)], options.repeats
        )
        rows.append(_rate("torch, bfloat16", batch, size, on_device, whole))
    return rows


def _rate(
    side: str, batch: int, size: int, on_device: float | None, whole: float
) -> dict[str, Any]:
    """Returns a row for reading ``size`` bytes in ``on_device`` (default: ``whole``) seconds."""
    device = jax.devices()[0]
    gpu, rate = mfu.device_of(device.device_kind), size / (on_device or whole)
    return {
        "side": side,
        "batch": batch,
        "device": device.device_kind,
        "seconds": None if on_device is None else round(on_device, 6),
        "seconds_from_host": round(whole, 6),
        "gigabytes_per_second": round(rate / 1e9, 1),
        "share_of_bandwidth": None if gpu is None else round(rate / gpu.bandwidth, 3),
    }


def _faiss(vectors_ND: np.ndarray) -> Any:
    import faiss

    index: Any = faiss.IndexFlatIP(vectors_ND.shape[1])
    index.add(vectors_ND)
    return index


def _median(call: Callable[[], Any], repeats: int) -> float:
    return measure.alternately({"call": call}, repeats)["call"].wall


def _print_table(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0])
    print("  ".join(f"{name:>20}" for name in names))
    for row in rows:
        print("  ".join(f"{row[name]!s:>20}" for name in names))


if __name__ == "__main__":
    with standard_streams():
        main()
