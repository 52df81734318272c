"""Finds, reads and writes the safetensors files of checkpoints.

Pickle files such as ``pytorch_model.bin`` can run code and are never loaded.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import msgspec
import numpy as np
import safetensors
import safetensors.numpy
from jax.experimental import multihost_utils

from cirag_jax.datasets.records import convert
from cirag_jax.errors import UserError
from cirag_jax.io import read_json, replacing

PICKLES = ("pytorch_model.bin", "pytorch_model.pt", "model.pt", "model.ckpt", "tf_model.h5")


def weight_files(folder: str | os.PathLike) -> list[Path]:
    """Returns the safetensors files of a checkpoint folder: a single file or all shards."""
    folder = Path(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = sorted(set(convert(str(index), read_json(index), _Index).weight_map.values()))
        files = {path.name for path in folder.iterdir() if path.is_file()}
        for name in names:
            if name not in files:  # also rejects paths to other folders
                raise UserError(f"{index}: shard {name[:80]!r} is not in the folder.")
        return [folder / name for name in names]
    for name in (*PICKLES, "pytorch_model.bin.index.json"):
        if (folder / name).exists():
            raise UserError(
                f"{folder / name} is a pickle or legacy file, which is never loaded; "
                "convert it to model.safetensors."
            )
    raise UserError(f"{folder}: there is no model.safetensors.")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a readable safetensors file: {error}.") from error
    except AttributeError as error:
        if error.obj is not np:
            raise
        raise UserError(
            f"{file}: a tensor has the type {error.name}, which is not supported."
        ) from None


def _check_real(file: Path, tensors: Any) -> None:
    """Refuses complex weights, which would lose their imaginary parts."""
    for name in list(tensors.keys()):
        if tensors.get_slice(name).get_dtype().startswith("C"):
            raise UserError(f"{file}: tensor {name} is complex, which is not supported.")


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Opens a safetensors file by ``safetensors.safe_open``, for NumPy."""
    with _readable(file), safetensors.safe_open(str(file), framework="numpy") as tensors:  # pyright: ignore
        _check_real(file, tensors)
        yield tensors


def check_finite(values: np.ndarray, source: str) -> np.ndarray:
    """Returns ``values`` if all are finite; ``source`` names their model or file in the error."""
    # A sum needs no further array, and is not finite if any value is not.
    with np.errstate(invalid="ignore"):
        total = np.sum(values, dtype=np.float64)
    if not np.isfinite(total):
        raise UserError(
            f"{source} gives numbers that are not finite; its weights or its file are damaged."
        )
    return values


def read_tensors(folder: str | os.PathLike) -> Iterator[tuple[str, Path, np.ndarray]]:
    """Yields (name, file, array) of every tensor, in its stored dtype."""
    for file in weight_files(folder):
        with opened(file) as tensors:
            for name in list(tensors.keys()):
                yield name, file, tensors.get_tensor(name)


class TensorFiles(contextlib.ExitStack):
    """The open safetensors files of a checkpoint folder, for reading slices of tensors.

    Attributes:
      folder: the checkpoint.
      shapes: (name, shape) of every tensor, in the order of the files; names can repeat.
    """

    def __init__(self, folder: str | os.PathLike):
        """Opens every file and reads its header."""
        super().__init__()
        self.folder = Path(folder)
        self.shapes: list[tuple[str, tuple[int, ...]]] = []
        self._sources: dict[str, tuple[Path, Any]] = {}
        for file in weight_files(folder):
            with _readable(file):
                tensors = self.enter_context(
                    safetensors.safe_open(str(file), framework="numpy")  # pyright: ignore
                )
                _check_real(file, tensors)
                for name in list(tensors.keys()):
                    self.shapes.append((name, tuple(tensors.get_slice(name).get_shape())))
                    self._sources[name] = (file, tensors)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads only the slice ``index`` of a tensor, in its stored dtype."""
        file, tensors = self._sources[name]
        with _readable(file):
            return tensors.get_slice(name)[index]


def describe_mismatches(
    unmapped: Sequence[str], doubled: Sequence[str], unfilled: Sequence[str]
) -> str | None:
    """Lists at most 20 names of each kind of mismatch; None if there are none."""
    problems = []
    kinds = {"unmapped": unmapped, "doubly mapped": doubled, "unfilled": unfilled}
    for kind, names in kinds.items():
        if names:
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            problems.append(f"{kind}: {', '.join(names[:20])}{more}")
    return "; ".join(problems) or None


def fetch(array: jax.Array | np.ndarray) -> np.ndarray:
    """Returns the whole array on this host, gathered from other processes if necessary."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def save_tensors(
    tensors: Mapping[str, np.ndarray],
    file: str | os.PathLike,
    metadata: Mapping[str, str] = MappingProxyType({"format": "pt"}),
) -> None:
    """Writes a safetensors file atomically."""
    with replacing(Path(file)) as aside:
        try:
            safetensors.numpy.save_file(dict(tensors), str(aside), metadata=dict(metadata))
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be written: {error}.") from None


# Files of a model folder besides weights and config.json, for every tokenizer of transformers.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def copy_companions(source: Path, target: Path) -> int:
    """Copies the tokenizer and generation files of a folder, and returns their number."""
    names = [name for name in COMPANIONS if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return len(names)
