"""Indexes over passages, in memory or from a folder.

A folder contains the index and a manifest. The manifest identifies the encoder and the corpus, and
both are compared with the current ones before use.
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import msgspec
import numpy as np

from cirag_jax.datasets.chains import UnitKind, passage_text, role_of, unit_texts
from cirag_jax.datasets.corpus import WHOLE
from cirag_jax.datasets.passage_file import PassageFile
from cirag_jax.datasets.records import convert
from cirag_jax.errors import UserError, check_choice, parsing
from cirag_jax.identity import START_OVER, check_same, of_records
from cirag_jax.io import machine_memory, read_json
from cirag_jax.retrieval import bm25
from cirag_jax.retrieval.bm25 import BM25
from cirag_jax.retrieval.encode import Progress
from cirag_jax.retrieval.encoders import Encoder
from cirag_jax.retrieval.faiss_index import COMPRESSED, FAISS_KINDS, FaissIndex, IndexOptions
from cirag_jax.retrieval.linked import LinkedIndex, require_link_head
from cirag_jax.retrieval.search import ExactIndex, accelerators
from cirag_jax.retrieval.unit_index import UnitIndex
from cirag_jax.types import Config, Count, Feedback, Passage, Triple, UnitInterval
from cirag_jax.validation import check_value

KINDS = ("exact", *FAISS_KINDS, "bm25")
LINKED = "linked"  # `LinkedIndex`, which is never stored in a folder.
MANIFEST = "manifest.json"
FORMAT = 2  # Since 2, the corpus hash covers sentences, and the encoder identity covers files.
# Fields of a manifest that may differ: the same weights may be in another folder, and the maximum
# query length and the instructions of queries and triples do not change the vectors of passages.
MAY_DIFFER = (
    *("encoder.model", "encoder.query_max_length"),
    *("encoder.query_prefix", "encoder.triple_prefix"),
)


@dataclasses.dataclass(frozen=True)
class PassageIndex:
    """A searchable index over passages; row i is the passage ``ids[i]``."""

    kind: str
    corpus_hash: str
    _search: ExactIndex | FaissIndex | BM25
    _encoder: Encoder | None
    _read_ids: Callable[[], tuple[str, ...]]
    _corpus: PassageFile | None = None

    @functools.cached_property
    def ids(self) -> tuple[str, ...]:
        """The id of the passage of every row; those of a folder are read when they are used."""
        return self._read_ids()

    @classmethod
    def in_memory(
        cls,
        passages: Sequence[Passage],
        encoder: Encoder | None,
        kind: str = "exact",
        *,
        options: IndexOptions | None = None,
        progress: Progress | None = None,
    ) -> "PassageIndex":
        """Embeds and indexes ``passages``; ``bm25`` needs no ``encoder``."""
        check_kind(kind)
        if not passages:
            raise UserError("nothing to index: the corpus has no passages")
        refuse_large(passages)
        texts = [passage_text(passage) for passage in passages]
        if kind == "bm25":
            bm25.check_memory(sum(map(len, texts)))
            search: ExactIndex | FaissIndex | BM25 = BM25(texts)
        else:
            vectors_ND = require_encoder(encoder, kind).encode(texts, "passage", progress)
            search = make_search(vectors_ND, kind, options or IndexOptions())
        ids = tuple(passage.id for passage in passages)
        return cls(kind, hash_corpus(passages), search, encoder, lambda: ids)

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        encoder: Encoder | None,
        *,
        options: IndexOptions | None = None,
    ) -> "PassageIndex":
        """Opens an index folder that ``launch/index.py`` has written.

        ``encoder`` must be the encoder that embedded the passages, or None for ``bm25``.
        """
        folder = pathlib.Path(folder).expanduser()
        manifest = read_manifest(folder)
        kind, options = manifest["kind"], options or IndexOptions()
        rows = manifest["rows"]
        _check_ids(folder, rows)
        if kind == "bm25":
            now = {**manifest, "tokens": bm25.TOKENS, "packages": bm25.packages()}
            check_manifest(folder, manifest, now, "build it again or install that version")
            search: ExactIndex | FaissIndex | BM25 = BM25.load(folder / "bm25", rows)
        else:
            encoder = require_encoder(encoder, kind)
            now = {**manifest, "encoder": dict(encoder.identity)}
            remedy = f"build it again or use that encoder ({manifest['encoder'].get('model')})"
            check_manifest(folder, manifest, now, remedy)
            encoder.truncated["passage"] += manifest.get("truncated", 0)
            if kind == "exact":
                search = make_search(Shards(folder, manifest), kind, options)
            else:
                vectors_ND = Shards(folder, manifest) if kind == COMPRESSED else None
                search = FaissIndex.load(folder / "index.faiss", kind, options, vectors_ND)
        if len(search) != rows:
            raise UserError(
                f"{folder} is damaged: it has {len(search)} vectors for {rows} passages; "
                "remove it and build it again"
            )
        read_ids = functools.partial(_read_ids, folder)
        return cls(kind, manifest["corpus"], search, encoder, read_ids)

    def __len__(self) -> int:
        return len(self._search)

    @functools.cached_property
    def _row(self) -> dict[str, int]:
        return {passage_id: row for row, passage_id in enumerate(self.ids)}

    def _row_of(self, passage_id: str) -> int:
        row = self._row[passage_id] if self._corpus is None else self._corpus.row(passage_id)
        assert row is not None  # The passage was retrieved.
        return row

    def check_corpus(self, passages: Sequence[Passage], name: str = "the index") -> None:
        """Raises UserError unless the index was built from exactly these passages, in order."""
        if hash_corpus(passages) == self.corpus_hash:
            return
        if len(passages) < len(self) and {p.id for p in passages} <= self._row.keys():
            raise UserError(
                f"{name} was built from all {len(self):,} passages, but config.data.corpus selects "
                f"{len(passages):,} of them; set --config.data.corpus={WHOLE}"
            )
        if not any(p.id in self._row for p in passages):
            raise UserError(
                f"{name} was built from another dataset, of which no passage is searched; set "
                "--config.data.dir to that dataset, or build the index again (launch/index.py)"
            )
        raise UserError(
            f"{name} was built from passages that differ from the corpus; build it again "
            "(launch/index.py)"
        )

    def search(
        self,
        queries: Sequence[str],
        k: int,
        allowed: Sequence[np.ndarray] | None = None,
        feedback: Sequence[Feedback | None] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the k best rows for every query, best first.

        Args:
          queries: texts, without the encoder's prefix.
          k: number of rows, at most the number of passages.
          allowed: for each query, the rows that it may find; if there are fewer than k, the
            remaining places have row -1 and score -inf. None allows all.
          feedback: for each query, relevance feedback that moves its vector, or None. Scores are
            inner products with the moved vector, whose length is not 1. Empty means none.

        Returns:
          ``row_QK`` int32 (see `ids`) and ``score_QK`` float32.
        """
        if isinstance(self._search, BM25):
            if any(feedback):
                raise UserError(f"an index of kind {self.kind} does not support relevance feedback")
            return self._search.search(queries, k, allowed)
        encoder = require_encoder(self._encoder, self.kind)
        query_QD = np.array(encoder.encode(list(queries), "query"))
        for row, query_feedback in enumerate(feedback):
            if query_feedback is not None:
                query_QD[row] *= query_feedback.query_weight
                if query_feedback.passages:
                    rows = [self._row_of(passage_id) for passage_id, _ in query_feedback.passages]
                    weight_P = np.array([w for _, w in query_feedback.passages], np.float32)
                    query_QD[row] += weight_P @ self._search.vectors(rows)
        return self._search.search(query_QD, k, allowed)


def open_retriever(
    config: Config,
    passages: Sequence[Passage],
    encoder: Encoder | None,
    *,
    triples: Mapping[str, Sequence[Triple]] | None = None,
) -> PassageIndex | UnitIndex | LinkedIndex:
    """Opens the index of a ``configs.retrievers.retriever()`` block over ``passages``.

    ``triples`` maps passage ids to triples; it is only used with ``units=triple``.
    """
    check_choice("config.retriever.kind", config.kind, (*KINDS, LINKED))
    options = IndexOptions.of(config)
    check_value("config.retriever.units", config.units, UnitKind)
    if config.stop is not None and config.kind != LINKED:
        raise UserError("config.retriever.stop needs config.retriever.kind=linked")
    check_value("config.retriever.stop", config.stop, UnitInterval | None)

    if config.kind == LINKED or config.units != "passage":
        refuse_large(passages, f"config.retriever.kind={config.kind}, units={config.units}")

    def texts_of(units: UnitKind) -> list[list[str]]:
        return [unit_texts(p, units, (triples or {}).get(p.id, ())) for p in passages]

    if config.kind == LINKED:
        encoder = require_encoder(encoder, config.kind)
        return _open_linked(config, passages, texts_of, encoder)
    if config.units != "passage":
        if config.kind != "exact" or config.folder:
            raise UserError(
                f"config.retriever.units={config.units} needs config.retriever.kind=exact and no "
                "folder"
            )
        encoder = require_encoder(encoder, config.kind)
        role = role_of(config.units)
        return UnitIndex(texts_of(config.units), encoder, role, dtype=options.dtype)
    if not config.folder:
        return PassageIndex.in_memory(passages, encoder, config.kind, options=options)
    index = PassageIndex.open(config.folder, encoder, options=options)
    if index.kind != config.kind:
        raise UserError(
            f"config.retriever.folder={config.folder} contains an index of kind {index.kind}, not "
            f"{config.kind}; set --config.retriever.kind={index.kind}"
        )
    index.check_corpus(passages, f"the index in config.retriever.folder={config.folder}")
    if isinstance(passages, PassageFile):  # Its rows are those of the index.
        return dataclasses.replace(index, _corpus=passages)
    return index


def _open_linked(
    config: Config,
    passages: Sequence[Passage],
    texts_of: Callable[[UnitKind], list[list[str]]],
    encoder: Encoder,
) -> LinkedIndex:
    head = require_link_head(str(encoder.identity["model"]))
    if config.folder:
        raise UserError(
            "config.retriever.kind=linked builds its index in memory; set "
            "config.retriever.folder=null"
        )
    if config.units not in ("passage", head.units):
        raise UserError(
            f"config.retriever.units={config.units}, but the aligner ranks {head.units}s"
        )
    return LinkedIndex(
        passages,
        texts_of(head.units),
        encoder,
        head,
        head.units,
        steps=head.steps,
        stop=config.stop,
        dtype=config.dtype,
    )


def make_search(vectors_ND: Any, kind: str, options: IndexOptions) -> ExactIndex | FaissIndex:
    """Indexes a float matrix, or any object with a shape and row slices."""
    if kind == "exact":
        rows, dim = vectors_ND.shape
        size, memory = rows * dim * (2 if options.dtype == "bfloat16" else 4), machine_memory()
        if jax.default_backend() == "cpu" and not options.stream and size > memory:
            raise UserError(
                f"{rows:,} vectors of {dim} dimensions in {options.dtype} take "
                f"{size / 2**30:.1f} GiB, but this machine has {memory / 2**30:.1f} GiB of memory; "
                "set --config.retriever.stream=true, or build an index of kind faiss_ivfpq"
            )
        return ExactIndex(
            vectors_ND, dtype=options.dtype, mesh=accelerators(), stream=options.stream
        )
    return FaissIndex.build(vectors_ND, kind, options)


def check_kind(kind: str) -> None:
    """Raises UserError unless ``kind`` is one of `KINDS`."""
    check_choice("config.retriever.kind", kind, KINDS)


def require_encoder(encoder: Encoder | None, kind: str) -> Encoder:
    """Returns ``encoder``; raises UserError if it is None."""
    if encoder is None:
        raise UserError(f"an index of kind {kind} needs an encoder")
    return encoder


# ------------------------------------------------------------------------------------- the folder


def hash_corpus(passages: Iterable[Passage]) -> str:
    """Returns the SHA-256 of the passages' ids, titles, texts and sentences, in order."""
    if isinstance(passages, PassageFile) and passages.digest is not None:
        return passages.digest
    digest = of_records([p.id, p.title, p.text, p.sentences] for p in passages)
    if isinstance(passages, PassageFile):
        passages.digest = digest
    return digest


def refuse_large(
    passages: Collection[Passage], what: str = "an index that is built in memory"
) -> None:
    """Raises UserError if the passages stay on disk because there are too many for ``what``."""
    if isinstance(passages, PassageFile):
        raise UserError(
            f"{what} would need all {len(passages):,} passages in memory; build an index on disk "
            "(launch/index.py) and set --config.retriever.folder"
        )


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """Reads and checks the manifest of a complete index."""
    file = folder / MANIFEST
    if not file.is_file():
        if (folder / "building.json").is_file():
            raise UserError(f"{folder}: the index is not complete; run launch/index.py again")
        raise UserError(
            f"{folder} is not an index folder: it has no {MANIFEST}; run launch/index.py"
        )
    manifest = convert(str(file), read_json(file), dict[str, Any])
    kind = manifest.get("kind")
    if manifest.get("format") != FORMAT or kind not in KINDS:
        raise UserError(f"{file} is from another version of cirag_jax; build the index again.")
    convert(str(file), manifest, _WordManifest if kind == "bm25" else _VectorManifest)
    return manifest


class _Manifest(msgspec.Struct):
    rows: Count
    corpus: str


class _WordManifest(_Manifest):
    encoder: dict[str, Any] | None = None


class _VectorManifest(_Manifest):
    encoder: dict[str, Any]
    dtype: Literal["float32", "bfloat16"]
    dimension: Count
    shards: Count
    truncated: Count = 0


def check_manifest(
    place: object, old: Mapping[str, Any], new: Mapping[str, Any], remedy: str = START_OVER
) -> None:
    """Compares the manifests of two indexes, see `identity.check_same`.

    The version of faiss may differ, because every version can read the indexes of all others. The
    dtype of BM25 indexes may differ, because they have no vectors. Other packages are only compared
    if the old manifest records them.
    """
    may_differ = [*MAY_DIFFER, "truncated", "dtype" if new.get("kind") == "bm25" else "packages"]
    if "packages" not in old:
        may_differ.append("packages")
    if "packages" not in (old.get("encoder") or {}):
        may_differ.append("encoder.packages")
    check_same(place, old, new, remedy, may_differ=may_differ)


def _read_ids(folder: pathlib.Path) -> tuple[str, ...]:
    file = folder / "ids.jsonl"
    try:
        with file.open(encoding="utf-8") as lines:
            return tuple(str(json.loads(line)) for line in lines)
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{file} cannot be read; remove the folder and build it again.") from None


def _check_ids(folder: pathlib.Path, rows: int) -> None:
    """Raises UserError unless the file of ids has ``rows`` lines."""
    file = folder / "ids.jsonl"
    try:
        with file.open("rb") as lines:
            count = sum(1 for _ in lines)
    except OSError:
        raise UserError(f"{file} cannot be read; remove the folder and build it again.") from None
    if count != rows:
        raise UserError(f"{file} has {count} ids, not {rows}; build the index again.")


class Shards:
    """The ``vectors-*.npy`` files of a folder as one matrix, read when sliced.

    Only one file is open at a time, because a process may not be able to open all of them.
    """

    def __init__(self, folder: pathlib.Path, manifest: Mapping[str, Any]):
        self._folder, self._dtype = folder, manifest["dtype"]
        shapes = [self._open(number).shape for number in range(manifest["shards"])]
        self._starts = np.cumsum([0, *(rows for rows, _ in shapes)])
        self.shape = (int(self._starts[-1]), manifest["dimension"])
        if any(shape[1:] != self.shape[1:] for shape in shapes):
            raise UserError(f"{folder}: its vectors differ in length; build it again.")
        if len(self) != manifest["rows"]:
            raise UserError(
                f"{folder} is damaged: it has {len(self)} vectors for {manifest['rows']} passages; "
                "remove it and build it again."
            )

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        if not isinstance(rows, slice):
            return self._take(rows)
        start, stop, _ = rows.indices(len(self))
        block = np.empty((max(stop - start, 0), self.shape[1]), jax.numpy.dtype(self._dtype))
        for number, (first, end) in enumerate(itertools.pairwise(self._starts.tolist())):
            low, high = max(start, first), min(stop, end)
            if low < high:  # A variable for the shard would keep its file open.
                block[low - start : high - start] = self._open(number)[low - first : high - first]
        return block

    def _take(self, row_R: np.ndarray) -> np.ndarray:
        """Returns single rows, in their order; every file is opened once."""
        vector_RD = np.empty((len(row_R), self.shape[1]), jax.numpy.dtype(self._dtype))
        order_R = np.argsort(row_R, kind="stable")
        shard_R = np.searchsorted(self._starts, row_R[order_R], side="right") - 1
        numbers, firsts = np.unique(shard_R, return_index=True)
        for number, places in zip(numbers.tolist(), np.split(order_R, firsts)[1:], strict=True):
            vector_RD[places] = self._open(number)[row_R[places] - self._starts[number]]
        return vector_RD

    def _open(self, number: int) -> np.ndarray:
        file = self._folder / shard_name(number)
        with parsing(f"{file} cannot be read", "; remove the folder and build it again"):
            try:
                return open_shard(file, self._dtype)
            except FileNotFoundError:
                raise
            except OSError as error:  # Not damaged: no permission, or too many open files.
                raise UserError(f"{file} cannot be read: {error.strerror or error}.") from None


def shard_name(number: int) -> str:
    """Returns the file name of a shard."""
    return f"vectors-{number:05d}.npy"


def open_shard(file: pathlib.Path, dtype: str) -> np.ndarray:
    """Memory-maps a shard; bfloat16 is stored as uint16, because ``.npy`` files have no bfloat16.

    Raises:
      ValueError: the file is not a matrix of that dtype; other errors if it is damaged.
    """
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    if array.ndim != 2 or array.dtype != ("uint16" if dtype == "bfloat16" else "float32"):
        raise ValueError(f"it contains {array.dtype}{list(array.shape)}")
    if dtype == "bfloat16":
        return array.view(jax.numpy.bfloat16)
    return array


def to_stored(vectors_ND: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the array to store in a shard's file; see `open_shard`."""
    if dtype == "bfloat16":
        return vectors_ND.astype(jax.numpy.bfloat16).view(np.uint16)
    return vectors_ND.astype(np.float32, copy=False)
