"""Building an index folder, shard by shard: what ``launch/index.py`` runs.

A folder holds ``ids.jsonl`` (passage id of every row), ``vectors-*.npy`` (shards of embeddings),
for faiss ``index.faiss``, for BM25 ``bm25/``, and ``manifest.json``, written last. Every file is
written aside, then renamed, so that a build that was stopped goes on after its last whole shard.
Passages are read when their shard is embedded: there may be more of them than memory holds.
"""

import functools
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from cirag_jax import sharding
from cirag_jax.commands import cluster
from cirag_jax.datasets.chains import passage_text
from cirag_jax.datasets.corpus_scan import CorpusScan
from cirag_jax.errors import UserError
from cirag_jax.io import bar, read_json, remove_parts, replacing, write_json, write_text
from cirag_jax.retrieval import bm25, faiss_index
from cirag_jax.retrieval import index as index_lib
from cirag_jax.retrieval.bm25 import BM25
from cirag_jax.retrieval.encoders import Encoder, Progress, open_encoder_for
from cirag_jax.retrieval.faiss_index import FAISS_KINDS, FaissIndex, IndexOptions
from cirag_jax.retrieval.search import save_array
from cirag_jax.types import Config, Passage

PLAN = "building.json"


class Shard(NamedTuple):
    """Passages that are embedded together, and the file that their vectors go to."""

    name: str
    file: pathlib.Path
    texts: Sequence[str]


Spread = Callable[[dict[str, Any], Iterable[Shard]], Iterable[Shard]]


def index_dataset(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Builds ``workdir/index`` over every passage of ``config.data.dir`` (configs/index.py).

    Returns counts, bytes, seconds and passages per second.
    """
    start = time.monotonic()
    index_lib.check_kind(config.retriever.kind)
    spread = None
    if cluster.is_chosen(config):
        if config.retriever.kind == "bm25":
            raise UserError("config.engine=ray has nothing to do for config.retriever.kind=bm25.")
        spread = functools.partial(_spread, config, workdir)
    options = IndexOptions.of(config.retriever)
    folder = workdir / "index"
    with CorpusScan(config.data.dir) as passages:
        encoder = None if config.retriever.kind == "bm25" else _open_encoder(config)
        with bar("indexing", len(passages), "passage") as shown:
            counts = build_index(
                passages,
                encoder,
                folder,
                config.retriever.kind,
                options=options,
                shard_rows=config.shard_rows,
                progress=shown.update,
                spread=spread,
            )
    manifest = index_lib.read_manifest(folder)
    seconds = time.monotonic() - start
    return {
        "folder": str(folder),
        "kind": manifest["kind"],
        "num_passages": manifest["rows"],
        "resumed": counts["resumed"],
        "dimension": manifest.get("dimension"),
        "encoder": manifest["encoder"],
        "bytes": sum(file.stat().st_size for file in folder.rglob("[!.]*") if file.is_file()),
        "seconds": seconds,
        "passages_per_second": counts["embedded"] / counts["seconds"] if counts["seconds"] else 0.0,
    }


def _open_encoder(config: Config) -> Encoder:
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    return open_encoder_for(config.encoder, mesh if mesh.size > 1 else None)


def build_index(
    passages: Collection[Passage],
    encoder: Encoder | None,
    folder: str | os.PathLike[str],
    kind: str = "exact",
    *,
    options: IndexOptions | None = None,
    shard_rows: int = 2048,
    progress: Progress | None = None,
    spread: Spread | None = None,
) -> dict[str, Any]:
    """Writes the index of ``passages`` into ``folder``, or finishes one that was begun.

    The rows are in the order of the passages, whose ids differ and which are gone through several
    times; ``shard_rows`` of them are saved together. ``encoder`` may be None for ``bm25``.
    ``progress`` is called with the number of passages just done, at once with those that a run
    before has done. ``spread`` has others embed the shards, by an encoder of the same identity.

    Returns ``resumed`` and ``embedded``, passages done before and now, and ``seconds`` of
    embedding.
    """
    index_lib.check_kind(kind)
    options, folder = options or IndexOptions(), pathlib.Path(folder)
    plan = _plan(passages, encoder, kind, options, shard_rows)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / index_lib.MANIFEST).is_file():
            index_lib.check_manifest(folder, index_lib.read_manifest(folder), plan)
            if progress is not None:
                progress(len(passages))
            return {"resumed": len(passages), "embedded": 0, "seconds": 0.0}
        _begin(folder, plan)
        remove_parts(folder)
        ids = (json.dumps(passage.id) + "\n" for passage in passages)
        write_text(folder / "ids.jsonl", ids)
        if kind == "bm25":
            counts = _build_bm25(passages, folder, progress)
        else:
            counts = _embed_shards(
                passages, index_lib.needed(encoder, kind), folder, plan, progress, spread
            )
        if index_lib.hash_corpus(passages) != plan["corpus"]:
            raise UserError(
                f"{folder}: the passages were changed while they were indexed; remove the folder "
                "and build it anew."
            )
        if kind in FAISS_KINDS:
            index = FaissIndex.build(index_lib.Shards(folder, plan), kind, options)
            with replacing(folder / "index.faiss") as aside:
                index.save(aside)
        write_json(folder / index_lib.MANIFEST, plan)
        (folder / PLAN).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}: the index cannot be written ({error.strerror or error}); what is whole is "
            "kept, the same command goes on from there"
        ) from error
    return counts


def _plan(
    passages: Collection[Passage],
    encoder: Encoder | None,
    kind: str,
    options: IndexOptions,
    shard_rows: int,
) -> dict[str, Any]:
    """The manifest of the index to be built."""
    if not passages:
        raise UserError("there is no passage to index")
    if shard_rows < 1:
        raise UserError(f"config.shard_rows={shard_rows} must be at least 1")
    plan: dict[str, Any] = {
        "format": index_lib.FORMAT,
        "kind": kind,
        "rows": len(passages),
        "corpus": index_lib.hash_corpus(passages),
        "encoder": None,
    }
    if kind == "bm25":
        return {**plan, "packages": bm25.packages()}
    if kind in FAISS_KINDS:
        plan["packages"] = faiss_index.packages()
    encoder = index_lib.needed(encoder, kind)
    plan |= {
        "encoder": dict(encoder.identity),
        "dtype": options.dtype,
        "dimension": encoder.dim,
        "shard_rows": shard_rows,
        "shards": -(-len(passages) // shard_rows),
    }
    if kind == "faiss_ivf":
        plan["ivf_lists"] = options.ivf_lists
    if kind == "faiss_hnsw":
        plan |= {
            "hnsw_links": options.hnsw_links,
            "hnsw_ef_construction": options.hnsw_ef_construction,
        }
    return json.loads(json.dumps(plan))


def _begin(folder: pathlib.Path, plan: dict[str, Any]) -> None:
    """Notes what is being built, or checks that a build that was stopped is the same."""
    file = folder / PLAN
    if file.is_file():
        old = read_json(file)
        if not isinstance(old, dict) or not isinstance(old.get("encoder"), dict | None):
            raise UserError(f"{file} is damaged; remove the folder to begin anew.")
        index_lib.check_manifest(folder, old, plan)
    elif any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise UserError(f"{folder}: not empty and not an index; it is left as it is.")
    else:
        write_json(file, plan)


def _embed_shards(
    passages: Collection[Passage],
    encoder: Encoder,
    folder: pathlib.Path,
    plan: dict[str, Any],
    progress: Progress | None,
    spread: Spread | None,
) -> dict[str, Any]:
    rows, resumed, start = plan["shard_rows"], 0, time.monotonic()
    told = progress or (lambda count: None)

    def missing() -> Iterator[Shard]:
        nonlocal resumed
        unread = iter(passages)
        parts = iter(lambda: list(itertools.islice(unread, rows)), [])
        for number, part in enumerate(parts):
            file = folder / index_lib.shard_name(number)
            if file.is_file():  # It was renamed, hence whole.
                resumed += len(part)
                told(len(part))
                continue
            yield Shard(file.name, file.resolve(), [passage_text(passage) for passage in part])

    if spread is None:
        for shard in missing():
            _embed(encoder, plan["dtype"], shard, told)
    else:
        for shard in spread(plan, missing()):
            told(len(shard.texts))
    return {
        "resumed": resumed,
        "embedded": plan["rows"] - resumed,
        "seconds": time.monotonic() - start,
    }


def _embed(encoder: Encoder, dtype: str, shard: Shard, progress: Progress | None = None) -> None:
    vectors_ND = encoder.encode(shard.texts, "passage", progress)
    if progress is not None:
        progress(len(shard.texts) - len(set(shard.texts)))  # Equal texts are embedded once.
    save_array(shard.file, index_lib.to_stored(vectors_ND, dtype))


class _Worker:
    """Embeds shards, in a process of a Ray cluster."""

    def __init__(self, config: Config, plan: dict[str, Any]):
        """Opens the encoder, which must be the one of ``plan``."""
        self._encoder, self._dtype = _open_encoder(config), plan["dtype"]
        own = {**plan, "encoder": dict(self._encoder.identity)}
        remedy = "a worker of the Ray cluster has other software, or another model"
        index_lib.check_manifest("the index", plan, own, remedy)

    def __call__(self, shard: Shard) -> None:
        _embed(self._encoder, self._dtype, shard)


def _spread(
    config: Config, workdir: pathlib.Path, plan: dict[str, Any], shards: Iterable[Shard]
) -> Iterator[Shard]:
    """Yields the shards, in order, once workers of a Ray cluster have written them."""
    work = functools.partial(_Worker, config, plan)
    for shard, _ in cluster.in_order(work, shards, config, workdir, on_devices=True):
        yield shard


def _build_bm25(
    passages: Collection[Passage], folder: pathlib.Path, progress: Progress | None
) -> dict[str, Any]:
    start = time.monotonic()
    with replacing(folder / "bm25") as aside:
        BM25([passage_text(passage) for passage in passages]).save(aside)
    if progress is not None:
        progress(len(passages))
    return {"resumed": 0, "embedded": len(passages), "seconds": time.monotonic() - start}
