"""Builds index folders: the command ``launch/index.py``.

An index folder contains ``ids.jsonl`` (the passage id of every row), ``vectors-*.npy`` (shards of
embeddings), ``index.faiss`` for faiss, ``bm25/`` for BM25, and ``manifest.json``, which is written
last. Files are written atomically, so an interrupted build resumes after its last complete shard.
Passages are read shard by shard, so the corpus may be larger than memory.
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
from cirag_jax.io import (
    bar,
    read_json,
    read_object,
    remove_parts,
    replacing,
    say,
    write_json,
    write_text,
)
from cirag_jax.retrieval import bm25, faiss_index, foreign
from cirag_jax.retrieval import index as index_lib
from cirag_jax.retrieval.bm25 import BM25
from cirag_jax.retrieval.encode import Progress
from cirag_jax.retrieval.encoders import Encoder, open_encoder_for
from cirag_jax.retrieval.faiss_index import COMPRESSED, FAISS_KINDS, FaissIndex, IndexOptions
from cirag_jax.retrieval.search import save_array
from cirag_jax.retrieval.server_encoder import ServerEncoder
from cirag_jax.types import Config, Passage

PLAN = "building.json"
# While an index is built: number of texts in each shard of which the encoder read only a part.
TRUNCATED = "truncated.json"
_COMPARED = 8  # Passages that are embedded to compare the encoder with foreign vectors.


class Shard(NamedTuple):
    """Passages that are embedded together, and the file for their vectors."""

    name: str
    file: pathlib.Path
    texts: Sequence[str]


Spread = Callable[[dict[str, Any], Iterable[Shard]], Iterable[tuple[Shard, int]]]


def index_dataset(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Builds ``workdir/index`` over all passages of ``config.data.dir`` (configs/index.py)."""
    start = time.monotonic()
    index_lib.check_kind(config.retriever.kind)
    spread = None
    if config.engine == "ray" and config.encoder.backend == "openai":
        raise UserError(
            "config.engine=ray does not support config.encoder.backend=openai; raise "
            "config.encoder.server.max_concurrency instead."
        )
    if cluster.is_chosen(config):
        if config.retriever.kind == "bm25":
            raise UserError("config.engine=ray does not support config.retriever.kind=bm25.")
        spread = functools.partial(_spread, config, workdir)
    if config.vectors is None and config.vector_ids is not None:
        raise UserError("config.vector_ids needs config.vectors.")
    if (config.vectors is not None or config.write_vectors) and config.retriever.kind == "bm25":
        raise UserError(
            "config.vectors and config.write_vectors need an index of vectors, not bm25."
        )
    options = IndexOptions.of(config.retriever)
    folder, source, agreement = workdir / "index", None, None
    with CorpusScan(config.data.dir) as passages:
        encoder = None if config.retriever.kind == "bm25" else _open_encoder(config)
        if config.vectors is not None:
            if spread is not None:
                raise UserError("config.engine=ray does not support config.vectors.")
            required = index_lib.require_encoder(encoder, "exact")
            vectors = _open_vectors(config, passages, required)
            texts = [passage_text(passage) for passage in itertools.islice(passages, _COMPARED)]
            agreement = vectors.check(required.encode(texts, "passage"))
            spread = functools.partial(_copy, vectors)
            source = {"file": vectors.name, "size": pathlib.Path(vectors.name).stat().st_size}
        elif isinstance(encoder, ServerEncoder):
            say(encoder.estimate(passage_text(passage) for passage in passages))
        with bar("indexing", len(passages), "passage") as progress:
            counts = build_index(
                passages,
                encoder,
                folder,
                config.retriever.kind,
                options=options,
                shard_rows=config.shard_rows,
                progress=progress.update,
                spread=spread,
                source=source,
            )
        if config.write_vectors:
            shards = index_lib.Shards(folder, index_lib.read_manifest(folder))
            foreign.write(workdir, shards, [passage.id for passage in passages])
    manifest = index_lib.read_manifest(folder)
    server = encoder.usage() if isinstance(encoder, ServerEncoder) else None
    seconds = time.monotonic() - start
    return {
        "folder": str(folder),
        "kind": manifest["kind"],
        "num_passages": manifest["rows"],
        "resumed": counts["resumed"],
        "dimension": manifest.get("dimension"),
        "encoder": manifest["encoder"],
        "truncated_texts": manifest.get("truncated"),
        "server": server,
        "agreement": agreement,
        "bytes": sum(file.stat().st_size for file in folder.rglob("[!.]*") if file.is_file()),
        "seconds": seconds,
        "passages_per_second": counts["embedded"] / counts["seconds"] if counts["seconds"] else 0.0,
    }


def _open_vectors(config: Config, passages: CorpusScan, encoder: Encoder) -> foreign.ForeignVectors:
    ids = (passage.id for passage in passages)
    vectors = foreign.ForeignVectors(config.vectors, config.vector_ids, ids)
    if vectors.shape[1] != encoder.dim:
        raise UserError(
            f"{vectors.name} has {vectors.shape[1]} dimensions, but config.encoder.model="
            f"{config.encoder.model} has {encoder.dim}; set config.encoder to the encoder that "
            "made the vectors."
        )
    return vectors


def _copy(
    vectors: foreign.ForeignVectors, plan: dict[str, Any], shards: Iterable[Shard]
) -> Iterator[tuple[Shard, int]]:
    """Fills shards with foreign vectors."""
    for shard in shards:
        start = int(shard.file.stem.rpartition("-")[2]) * plan["shard_rows"]
        vectors_ND = vectors[start : start + len(shard.texts)]
        save_array(shard.file, index_lib.to_stored(vectors_ND, plan["dtype"]))
        yield shard, 0


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
    source: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes the index of ``passages`` into ``folder``, or finishes an interrupted build.

    Args:
      passages: passages with unique ids, in the order of the rows; iterated several times.
      encoder: embeds the passages; may be None for ``bm25``.
      folder: the index folder.
      kind: the kind of index.
      options: options of the index.
      shard_rows: passages per shard.
      progress: called with the number of passages just done, also for shards of earlier runs.
      spread: embeds the shards in other processes, with an identical encoder.
      source: the file of foreign vectors, for the manifest.

    Returns:
      The numbers of passages ``resumed`` from earlier runs and ``embedded`` by this run, and the
      ``seconds`` of embedding.
    """
    index_lib.check_kind(kind)
    options, folder = options or IndexOptions(), pathlib.Path(folder)
    progress = progress or (lambda count: None)
    plan = _plan(passages, encoder, kind, options, shard_rows)
    if source is not None:
        plan["vectors"] = source
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / index_lib.MANIFEST).is_file():
            index_lib.check_manifest(folder, index_lib.read_manifest(folder), plan)
            progress(len(passages))
            return {"resumed": len(passages), "embedded": 0, "seconds": 0.0}
        _start_or_resume(folder, plan)
        remove_parts(folder)
        ids = (json.dumps(passage.id) + "\n" for passage in passages)
        write_text(folder / "ids.jsonl", ids)
        if kind == "bm25":
            counts = _build_bm25(passages, folder, progress)
        else:
            counts = _embed_shards(
                passages, index_lib.require_encoder(encoder, kind), folder, plan, progress, spread
            )
        if index_lib.hash_corpus(passages) != plan["corpus"]:
            raise UserError(
                f"{folder}: the passages changed during indexing; remove the folder and build the "
                "index again."
            )
        if kind in FAISS_KINDS:
            index = FaissIndex.build(index_lib.Shards(folder, plan), kind, options)
            with replacing(folder / "index.faiss") as temporary:
                index.save(temporary)
        if kind != "bm25":
            plan["truncated"] = sum(read_object(folder / TRUNCATED, optional=True).values())
            _warn_of_truncated(plan)
        write_json(folder / index_lib.MANIFEST, plan)
        for name in (PLAN, TRUNCATED):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}: the index cannot be written ({error.strerror or error}); progress is "
            "saved; run the same command to resume"
        ) from error
    return counts


def _plan(
    passages: Collection[Passage],
    encoder: Encoder | None,
    kind: str,
    options: IndexOptions,
    shard_rows: int,
) -> dict[str, Any]:
    """Returns the manifest of the index to build."""
    if not passages:
        raise UserError("there are no passages to index")
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
        return {**plan, "tokens": bm25.TOKENS, "packages": bm25.packages()}
    if kind in FAISS_KINDS:
        plan["packages"] = faiss_index.packages()
    encoder = index_lib.require_encoder(encoder, kind)
    plan |= {
        "encoder": dict(encoder.identity),
        "dtype": options.dtype,
        "dimension": encoder.dim,
        "shard_rows": shard_rows,
        "shards": -(-len(passages) // shard_rows),
    }
    if kind in ("faiss_ivf", COMPRESSED):
        plan["ivf_lists"] = options.ivf_lists
    if kind == COMPRESSED:
        plan["pq_bytes"] = faiss_index.code_bytes(encoder.dim, options)
    if kind == "faiss_hnsw":
        plan |= {
            "hnsw_links": options.hnsw_links,
            "hnsw_ef_construction": options.hnsw_ef_construction,
        }
    return json.loads(json.dumps(plan))


def _start_or_resume(folder: pathlib.Path, plan: dict[str, Any]) -> None:
    """Records the plan, or checks that an interrupted build has the same plan."""
    file = folder / PLAN
    if file.is_file():
        old = read_json(file)
        if not isinstance(old, dict) or not isinstance(old.get("encoder"), dict | None):
            raise UserError(f"{file} is damaged; remove the folder to start over.")
        index_lib.check_manifest(folder, old, plan)
    elif any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise UserError(f"{folder} is neither empty nor an index; use another --workdir.")
    else:
        write_json(file, plan)


def _embed_shards(
    passages: Collection[Passage],
    encoder: Encoder,
    folder: pathlib.Path,
    plan: dict[str, Any],
    progress: Progress,
    spread: Spread | None,
) -> dict[str, Any]:
    rows, resumed, start = plan["shard_rows"], 0, time.monotonic()
    truncated = read_object(folder / TRUNCATED, optional=True)

    def record(shard: Shard, count: int) -> None:
        if count:
            truncated[shard.name] = count
            write_json(folder / TRUNCATED, truncated)

    def missing() -> Iterator[Shard]:
        nonlocal resumed
        remaining = iter(passages)
        parts = iter(lambda: list(itertools.islice(remaining, rows)), [])
        for number, part in enumerate(parts):
            file = folder / index_lib.shard_name(number)
            if file.is_file():  # complete, since files are written atomically
                resumed += len(part)
                progress(len(part))
                continue
            yield Shard(file.name, file.resolve(), [passage_text(passage) for passage in part])

    if spread is None:
        for shard in missing():
            _embed(encoder, plan["dtype"], shard, progress, record)
    else:
        for shard, count in spread(plan, missing()):
            record(shard, count)
            progress(len(shard.texts))
    return {
        "resumed": resumed,
        "embedded": plan["rows"] - resumed,
        "seconds": time.monotonic() - start,
    }


def _warn_of_truncated(manifest: dict[str, Any]) -> None:
    if manifest["truncated"]:
        limit = manifest["encoder"].get("passage_max_length")
        say(
            f"WARNING: the encoder read only the beginning of {manifest['truncated']:,} of "
            f"{manifest['rows']:,} passages, because its limit is {limit} tokens "
            "(config.encoder.passage_max_length)"
        )


def _embed(
    encoder: Encoder,
    dtype: str,
    shard: Shard,
    progress: Progress | None = None,
    record: Callable[[Shard, int], None] = lambda shard, count: None,
) -> int:
    """Embeds and saves a shard; returns the number of texts that were cut."""
    before = encoder.truncated["passage"]
    vectors_ND = encoder.encode(shard.texts, "passage", progress)
    if progress is not None:
        progress(len(shard.texts) - len(set(shard.texts)))  # equal texts are embedded once
    count = encoder.truncated["passage"] - before
    record(shard, count)  # before the file that marks the shard as complete
    save_array(shard.file, index_lib.to_stored(vectors_ND, dtype))
    return count


class _Worker:
    """Embeds shards, in a process of a Ray cluster."""

    def __init__(self, config: Config, plan: dict[str, Any]):
        """Loads the encoder and checks that it has the identity in ``plan``."""
        self._encoder, self._dtype = _open_encoder(config), plan["dtype"]
        worker_plan = {**plan, "encoder": dict(self._encoder.identity)}
        remedy = "a worker of the Ray cluster has different software or another model"
        index_lib.check_manifest("the index", plan, worker_plan, remedy)

    def __call__(self, shard: Shard) -> int:
        return _embed(self._encoder, self._dtype, shard)


def _spread(
    config: Config, workdir: pathlib.Path, plan: dict[str, Any], shards: Iterable[Shard]
) -> Iterator[tuple[Shard, int]]:
    """Yields the shards and their numbers of cut texts, in order, as Ray workers finish them."""
    work = functools.partial(_Worker, config, plan)
    yield from cluster.in_order(work, shards, config, workdir, on_devices=True)


def _build_bm25(
    passages: Collection[Passage], folder: pathlib.Path, progress: Progress
) -> dict[str, Any]:
    start = time.monotonic()
    bm25.check_memory(sum(len(passage.title) + len(passage.text) for passage in passages))
    with replacing(folder / "bm25") as temporary:
        BM25([passage_text(passage) for passage in passages]).save(temporary)
    progress(len(passages))
    return {"resumed": 0, "embedded": len(passages), "seconds": time.monotonic() - start}
