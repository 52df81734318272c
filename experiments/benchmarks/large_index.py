"""Measures memory, time and recall of search in a large index.

    python experiments/benchmarks/large_index.py --data=2wikimultihopqa --workdir=W

The vectors are those of the passages of ``--data`` (MiniLM, 384 dimensions), repeated with noise up
to ``--rows``, because embedding a million passages takes hours. The queries are questions of the
same folder. Indexes are built by ``commands.index.build_index`` and searched by `PassageIndex`.
Each index is built and searched in a process of its own:

    memory    exact, float32, in memory
    streamed  exact, bfloat16, read from disk for every search (``config.retriever.stream``)
    ivfpq     FAISS IVF-PQ with bfloat16 vectors on disk, candidates compared exactly

``peak`` is the process's maximum resident memory, and ``base`` the resident memory before the index
is opened (Python, JAX, faiss). Mapped pages of files count, above all those of libraries;
``anonymous`` is the process's own memory at the end of the searches. ``seconds`` has the wall time
and the processor time of 1,000 queries, all in one search and 32 at a time. ``recall`` is the share
of the ten best rows of exact float32 search that are found. Results are in ../RESULTS.md.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.commands import index as command
from cirag_jax.config_files import load_config
from cirag_jax.datasets import jsonl
from cirag_jax.datasets.chains import passage_text
from cirag_jax.io import standard_streams
from cirag_jax.retrieval.encoders import open_encoder_for
from cirag_jax.retrieval.faiss_index import IndexOptions
from cirag_jax.retrieval.index import PassageIndex
from cirag_jax.types import Passage

K = 10
NAMES = ("memory", "streamed", "ivfpq")


def main() -> None:
    """Prints one JSON object per index."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=pathlib.Path, required=True, help="a dataset folder")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--noise", type=float, default=0.5, help="length of the noise")
    parser.add_argument("--shard_rows", type=int, default=50_000)
    parser.add_argument("--lists", type=int, default=0, help="lists of IVF-PQ; 0: 4 sqrt(rows)")
    parser.add_argument("--probes", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--rerank", type=int, nargs="+", default=[20])
    parser.add_argument("--pq_bytes", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--step", choices=("build", "search"), help="internal")
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    if options.step:
        (name,) = options.only
        print(
            json.dumps(build(name, options) if options.step == "build" else search(name, options))
        )
        return
    if not (options.workdir / "passages.npy").is_file():
        embed(options)
    for name in options.only:
        for step in ("build", "search"):
            command_line = [sys.executable, __file__, *sys.argv[1:], "--step", step]
            print(
                subprocess.run(
                    [*command_line, "--only", name], check=True, stdout=subprocess.PIPE, text=True
                ).stdout.strip(),
                flush=True,
            )


def embed(options: argparse.Namespace) -> None:
    """Embeds the passages and the queries."""
    dataset = jsonl.read_dataset(options.data, triples=False)
    encoder = open_encoder_for(load_config("configs/index.py", []).encoder)
    queries = [question.question for question in dataset.questions][: options.queries]
    np.save(options.workdir / "queries.npy", encoder.encode(queries, "query"))
    passages = [passage_text(passage) for passage in dataset.corpus.values()]
    np.save(options.workdir / "passages.npy", encoder.encode(passages, "passage"))


class Copies:
    """An encoder whose passage texts are row numbers and whose queries are numbers of queries."""

    def __init__(self, options: argparse.Namespace):
        self._passage_ND = np.load(options.workdir / "passages.npy")
        self._query_QD = np.load(options.workdir / "queries.npy")
        self._noise = options.noise
        self.dim = self._passage_ND.shape[1]
        self.identity = {"model": "copies", "rows": options.rows, "noise": options.noise}
        self.truncated = {"passage": 0}

    def encode(self, texts: Sequence[str], kind: str = "passage", progress: Any = None):
        """Returns vectors of length 1; a row has the same vector in every process."""
        if kind == "query":
            return self._query_QD[[int(text) for text in texts]]
        rows = [int(text.rpartition(" ")[2]) for text in texts]
        noise_ND = np.random.default_rng(rows[0]).standard_normal(
            (len(rows), self.dim), dtype=np.float32
        )
        noise_ND *= self._noise / np.linalg.norm(noise_ND, axis=1, keepdims=True)
        vector_ND = self._passage_ND[np.array(rows) % len(self._passage_ND)] + noise_ND
        if progress is not None:
            progress(len(rows))
        return vector_ND / np.linalg.norm(vector_ND, axis=1, keepdims=True)


class Rows:
    """Passages without content, one for every row."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Passage]:
        return (Passage(str(row), "", str(row)) for row in range(self._count))

    def __contains__(self, passage: object) -> bool:
        return False


def build(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Builds an index, or finds it complete."""
    kind, index_options = _options(name, options)
    base, start = _memory("VmRSS"), time.monotonic()
    folder = options.workdir / name
    counts = command.build_index(
        Rows(options.rows),
        Copies(options),  # pyright: ignore[reportArgumentType]
        folder,
        kind,
        options=index_options,
        shard_rows=options.shard_rows,
    )
    return {
        "step": "build",
        "index": name,
        "resumed": counts["resumed"],
        "seconds": round(time.monotonic() - start, 1),
        **_sizes(folder),
        "base_mib": base,
        "peak_mib": _memory("VmHWM"),
    }


def search(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures the searches of an index, and its recall of the results of ``memory``."""
    kind, index_options = _options(name, options)
    count = len(np.load(options.workdir / "queries.npy"))
    queries = [str(number) for number in range(count)]
    base = _memory("VmRSS")
    start = time.monotonic()
    folder, encoder = options.workdir / name, Copies(options)
    index = PassageIndex.open(folder, encoder, options=index_options)  # pyright: ignore[reportArgumentType]
    opened = time.monotonic() - start
    rows = []
    settings = [(0, 0)]
    if kind == "faiss_ivfpq":
        settings = [(probes, rerank) for probes in options.probes for rerank in options.rerank]
    for probes, rerank in settings:
        if probes:
            more: Any = {"ivf_probes": probes, "pq_rerank": rerank}
            index = PassageIndex.open(
                folder,
                encoder,  # pyright: ignore[reportArgumentType]
                options=IndexOptions(dtype="bfloat16", **more),
            )
        index.search(queries[:32], K)  # Compiles, and reads files into the page cache.
        seconds = {}
        for batch in (count, 32):
            start, processor = time.monotonic(), time.process_time()
            parts = [index.search(queries[at : at + batch], K)[0] for at in range(0, count, batch)]
            spent = time.monotonic() - start, time.process_time() - processor
            seconds[batch] = [round(second * 1000 / count, 2) for second in spent]
            if batch == count:
                row_QK = parts[0]
        if name == "memory":
            np.save(options.workdir / "expected.npy", row_QK)
        expected_QK = np.load(options.workdir / "expected.npy")
        recall = np.mean(
            [
                len(set(a) & set(b)) / K
                for a, b in zip(row_QK.tolist(), expected_QK.tolist(), strict=True)
            ]
        )
        setting = {"probes": probes, "rerank": rerank} if probes else {}
        rows.append({**setting, "seconds": seconds, "recall": round(float(recall), 4)})
    return {
        "step": "search",
        "index": name,
        "open_seconds": round(opened, 1),
        "searches": rows,
        **_sizes(folder),
        "base_mib": base,
        "peak_mib": _memory("VmHWM"),
        "anonymous_mib": _memory("RssAnon"),
    }


def _options(name: str, options: argparse.Namespace) -> tuple[str, IndexOptions]:
    if name == "memory":
        return "exact", IndexOptions()
    if name == "streamed":
        return "exact", IndexOptions(dtype="bfloat16", stream=True)
    return "faiss_ivfpq", IndexOptions(
        dtype="bfloat16", ivf_lists=options.lists, pq_bytes=options.pq_bytes
    )


def _sizes(folder: pathlib.Path) -> dict[str, int]:
    """Returns the MiB of the vectors and of FAISS's file."""
    files = {"vectors_mib": "vectors-*.npy", "faiss_mib": "index.faiss"}
    return {
        name: round(sum(f.stat().st_size for f in folder.glob(pattern)) / 2**20)
        for name, pattern in files.items()
    }


def _memory(field: str) -> int:
    """Returns a field of /proc/self/status in MiB."""
    status = pathlib.Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) // 1024


if __name__ == "__main__":
    with standard_streams():
        main()
