"""Vectors of a store's triples: one ``.npy`` per segment and encoder, memory-mapped when read.

They lie in ``embeddings/<encoder>/<segment>.npy``, row by row as the segment's triples (those under
tombstones too), with a manifest of the encoder beside them.
"""

import contextlib
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cirag_jax.triples.segments import damaged, write_file
from cirag_jax.types import Triple

if TYPE_CHECKING:
    from cirag_jax.triples.store import SegmentInfo, TripleStore

FOLDER = "embeddings"
MANIFEST = "manifest.json"
_ENCODED = 4096  # triples encoded at a time

# New segment's name -> where its rows come from: (old segment's name, first row, rows).
Sources = dict[str, list[tuple[str, int, int]]]
Encode = Callable[[Sequence[str]], np.ndarray]


def embed_store(
    store: "TripleStore",
    identity: Mapping[str, Any],
    encode: Encode,
    text: Callable[[Triple], str],
    dtype: Any = np.float16,
    progress: Callable[[int], None] = lambda rows: None,
) -> None:
    """Computes the embeddings that are missing; killed at any instant, it goes on from there.

    Args:
        store: Whose triples.
        identity: Everything that decides a vector, as JSON: the encoder's, and the form of
            the text.
        encode: Texts to float32 of shape [N, D].
        text: A triple as the encoder reads it.
        dtype: Of the files, float16 or float32.
        progress: Called with the number of rows after each batch.

    Raises:
        UserError: The disk is full.
    """
    for info in store.segments():
        if _path(store.folder, identity, info.name).exists():
            continue
        rows = store.segment(info.id)
        parts = []
        for first in range(0, info.num_rows, _ENCODED):
            triples = rows.triples(first, min(_ENCODED, info.num_rows - first))
            parts.append(np.asarray(encode([text(t) for t in triples])).astype(dtype))
            progress(len(triples))
        write_embeddings(store, info, identity, np.concatenate(parts))


def write_embeddings(
    store: "TripleStore", info: "SegmentInfo", identity: Mapping[str, Any], vectors_ND: np.ndarray
) -> None:
    """Writes the vectors of one segment: float16 or float32 of shape [its rows, D].

    Raises:
        UserError: The disk is full.
        ValueError: The shape does not fit.
    """
    if vectors_ND.ndim != 2 or len(vectors_ND) != info.num_rows:
        raise ValueError(f"{vectors_ND.shape} vectors for {info.num_rows} rows")
    path = _path(store.folder, identity, info.name)
    manifest = path.with_name(MANIFEST)
    if not manifest.exists():
        text = json.dumps(dict(identity), indent=2, sort_keys=True, ensure_ascii=False)
        write_file(manifest, f"{text}\n".encode())
    write_file(path, _npy(vectors_ND))


def read_embeddings(
    store: "TripleStore", info: "SegmentInfo", identity: Mapping[str, Any]
) -> np.ndarray | None:
    """The vectors of one segment, mapped, of shape [its rows, D]; None where there are none.

    Raises:
        UserError: The file is damaged.
    """
    path = _path(store.folder, identity, info.name)
    if not path.exists():
        return None
    vectors_ND = _load(path)
    if vectors_ND.ndim != 2 or len(vectors_ND) != info.num_rows:
        raise damaged(path, f"shape {vectors_ND.shape} for {info.num_rows} triples")
    return vectors_ND


def carry_over(store: "TripleStore", sources: Sources) -> None:
    """Writes the embeddings of new segments from those of the old ones, where all are there."""
    for folder in _encoders(store.folder):
        for name, parts in sources.items():
            path = folder / f"{name}.npy"
            old = {part: folder / f"{part}.npy" for part, _, _ in parts}
            if path.exists() or not all(file.exists() for file in old.values()):
                continue
            mapped = {part: _load(file) for part, file in old.items()}
            rows = [mapped[part][first : first + count] for part, first, count in parts]
            write_file(path, _npy(np.concatenate(rows)))


def remove_others(store_folder: Path, names: set[str]) -> None:
    """Removes the embeddings of segments that are gone."""
    for folder in _encoders(store_folder):
        for path in folder.glob("*.npy"):
            if path.name.removesuffix(".npy") not in names:
                path.unlink(missing_ok=True)
        if not any(folder.glob("*.npy")):
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


def _encoders(store_folder: Path) -> Iterator[Path]:
    if (store_folder / FOLDER).is_dir():
        yield from sorted(path for path in (store_folder / FOLDER).iterdir() if path.is_dir())


def _path(store_folder: Path, identity: Mapping[str, Any], segment: str) -> Path:
    text = json.dumps(dict(identity), sort_keys=True)
    return store_folder / FOLDER / hashlib.sha256(text.encode()).hexdigest()[:16] / f"{segment}.npy"


def _npy(vectors_ND: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(vectors_ND), allow_pickle=False)
    return file.getvalue()


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise damaged(path, error) from None
