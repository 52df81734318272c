"""Vectors of other programs: FAISS indexes, and ``.npy`` matrices with ids."""

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from cirag_jax.errors import UserError, import_optional, parsing
from cirag_jax.io import replacing, say, write_text
from cirag_jax.retrieval.faiss_index import FaissIndex, IndexOptions

VECTORS, IDS = "vectors.npy", "ids.txt"  # The files that `write` writes.
_ID_FIELDS = ("id", "_id", "docid")
_BLOCK = 65536  # Rows that are converted at a time.
_UNIT = 1e-2  # Deviation from length 1 that reduced precision explains.


class ForeignVectors:
    """Vectors from a file, in the order of our passages.

    Attributes:
        shape: Numbers of passages and dimensions.
        name: The file, for messages.
    """

    def __init__(self, file: str, ids_file: str | None, passage_ids: Iterable[str]):
        self.name = file
        path = pathlib.Path(file).expanduser()
        if not path.is_file():
            raise UserError(f"config.vectors={file} does not exist.")
        ids: Sequence[str] | None = None
        if path.suffix == ".npy":
            with parsing(f"{file} cannot be read"):
                self._matrix: Any = np.load(path, mmap_mode="r", allow_pickle=False)
            if self._matrix.ndim != 2 or self._matrix.dtype.kind != "f":
                found = f"{self._matrix.dtype}{list(self._matrix.shape)}"
                raise UserError(f"{file} must be a matrix of floating-point numbers, not {found}.")
            rows, dim = self._matrix.shape
        else:
            self._matrix, ids = _open_faiss(path)
            rows, dim = len(self._matrix), self._matrix.dim
        if ids_file is not None:
            ids = read_ids(ids_file)
        wanted = list(passage_ids)
        self._row_N = _order(file, wanted, rows, ids)
        self.shape = (len(wanted), dim)

    def __getitem__(self, rows: slice) -> np.ndarray:
        row_R = self._row_N[rows]
        if isinstance(self._matrix, np.ndarray):
            vectors_RD = np.asarray(self._matrix[row_R], np.float32)
        else:
            vectors_RD = self._matrix.vectors(row_R)
        if not np.isfinite(vectors_RD).all():
            raise UserError(f"{self.name} has a vector that is not finite.")
        return vectors_RD

    def check(self, vectors_ND: np.ndarray) -> float:
        """Compares the first rows with the encoder's vectors; returns their mean cosine.

        Warns if they differ, or if the vectors do not have length 1.
        """
        own_ND = self[: len(vectors_ND)]
        lengths_N = np.linalg.norm(own_ND, axis=1)
        products_N = (own_ND * vectors_ND).sum(axis=1)
        cosine = float((products_N / np.maximum(lengths_N, 1e-12)).mean())
        if cosine < 1 - _UNIT:
            say(
                f"WARNING: config.encoder embeds the first {len(own_ND)} passages differently from "
                f"{self.name} (mean cosine {cosine:.2f}); set config.encoder to the encoder that "
                "made the vectors, with its instructions"
            )
        if np.abs(lengths_N - 1).max() > _UNIT:
            say(
                f"WARNING: {self.name} has vectors whose length is not 1; scores are inner products"
            )
        return cosine


class _FaissVectors:
    """The stored vectors of a FAISS index, which may be a part of ``owner``."""

    def __init__(self, index: Any, owner: Any):
        self._index, self.dim = index, int(index.d)
        self._owner = owner  # faiss frees the parts of an index with it.

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def vectors(self, row_R: np.ndarray) -> np.ndarray:
        return self._index.reconstruct_batch(np.ascontiguousarray(row_R, np.int64))


def _open_faiss(path: pathlib.Path) -> tuple[_FaissVectors, list[str] | None]:
    """Returns the vectors of a FAISS index, and the ids that it stores, if any."""
    faiss = import_optional("faiss", f"reading {path}", "faiss")
    owner = index = FaissIndex.load(path, "foreign", IndexOptions()).stored
    ids = None
    if isinstance(index, faiss.IndexIDMap | faiss.IndexIDMap2):
        ids = [str(number) for number in faiss.vector_to_array(index.id_map)]
        index = faiss.downcast_index(index.index)
    if isinstance(index, faiss.IndexIVFFlat):
        index.make_direct_map()
    elif not isinstance(index, faiss.IndexFlat | faiss.IndexHNSWFlat):
        raise UserError(
            f"{path} is a FAISS index of type {type(index).__name__}, which does not store the "
            "vectors; expected IndexFlat, IndexIVFFlat or IndexHNSWFlat, or use a .npy file."
        )
    return _FaissVectors(index, owner), ids


def read_ids(file: str) -> list[str]:
    """Reads ids from a ``.npy``, ``.json`` or ``.jsonl`` file, or from lines of text."""
    path = pathlib.Path(file).expanduser()
    with parsing(f"{file} cannot be read"):
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False).ravel().tolist()
        else:
            text = path.read_text("utf-8-sig")
            values: list[Any] = [line for line in text.split("\n") if line.strip()]
            if path.suffix == ".json":
                values = json.loads(text)
            elif path.suffix == ".jsonl":
                values = [json.loads(line) for line in values]
    if not isinstance(values, list):
        raise UserError(f"{file} must be a list of ids.")
    ids = []
    for number, value in enumerate(values, start=1):
        if isinstance(value, dict):
            value = next((value[name] for name in _ID_FIELDS if name in value), None)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise UserError(f"{file}:{number}: has no id (a string or an integer).")
        ids.append(str(value).strip("\r"))
    return ids


def _order(file: str, wanted: Sequence[str], rows: int, ids: Sequence[str] | None) -> np.ndarray:
    """Returns the row of the file for each passage; without ids, the rows are in our order."""
    if ids is None:
        if rows != len(wanted):
            raise UserError(
                f"{file} has {rows:,} vectors for {len(wanted):,} passages; set config.vector_ids."
            )
        return np.arange(rows)
    if len(ids) != rows:
        raise UserError(f"{file} has {rows:,} vectors, but there are {len(ids):,} ids.")
    row_of = {name: row for row, name in enumerate(ids)}
    if len(row_of) != rows:
        raise UserError(f"{file}: {rows - len(row_of):,} ids are repeated.")
    missing = [name for name in wanted if name not in row_of]
    if missing:
        raise UserError(
            f"{file} has no vector for {len(missing):,} of {len(wanted):,} passages, such as "
            f"{missing[0]!r}."
        )
    return np.array([row_of[name] for name in wanted], np.int64)


def write(folder: pathlib.Path, vectors_ND: Any, ids: Sequence[str]) -> None:
    """Writes `VECTORS`, a float32 matrix, and `IDS`, one id per line.

    Args:
      folder: the folder to write to.
      vectors_ND: a matrix, or any object with a shape and row slices.
      ids: the ids of the rows.
    """
    if line := next((name for name in ids if "\n" in name), None):
        raise UserError(f"the id {line!r} has a line end, which {IDS} cannot store.")
    header = {"descr": "<f4", "fortran_order": False, "shape": tuple(vectors_ND.shape)}
    with replacing(folder / VECTORS) as temporary, temporary.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(ids), _BLOCK):
            file.write(np.asarray(vectors_ND[start : start + _BLOCK]).astype("<f4").tobytes())
    write_text(folder / IDS, (f"{name}\n" for name in ids))
