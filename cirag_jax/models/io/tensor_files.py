"""Finds, reads and writes the files of safetensors checkpoints.

Only safetensors files are read. A pickle can run code, so ``pytorch_model.bin`` is rejected.
"""

import contextlib
import fnmatch
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Returns the safetensors files of a checkpoint folder: one, or all shards in the index."""
    folder = Path(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = sorted(set(convert(str(index), read_json(index), _Index).weight_map.values()))
        present = {path.name for path in folder.iterdir() if path.is_file()}
        for name in names:
            if name not in present:  # also rejects paths and malformed names
                raise UserError(f"{index}: shard {name[:80]!r} is not in the folder")
        return [folder / name for name in names]
    if shards := sorted(folder.glob("model-*-of-*.safetensors")):
        raise UserError(
            f"{folder} has a shard, {shards[0].name}, but no {index.name}; copy the complete model"
        )
    for name in (*PICKLES, "pytorch_model.bin.index.json"):
        if (folder / name).exists():
            raise UserError(
                f"{folder / name} is a pickle or legacy file, which is never loaded; "
                "convert it to model.safetensors"
            )
    raise UserError(f"{folder} has no model.safetensors")


def gguf_parts(file: str | os.PathLike) -> list[Path]:
    """Returns the files of a GGUF model in order: ``file``, or all parts if it is split.

    llama.cpp names the parts ``NAME-00001-of-00003.gguf`` and so on.
    """
    file = Path(file)
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    name, count = match[1], int(match[3])
    parts = [file.with_name(f"{name}-{i:05d}-of-{match[3]}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise UserError(
                f"{file.name} is a part of a model in {count} files, and {part} is missing; copy "
                "all parts into the folder"
            )
    if file not in parts:
        raise UserError(f"{file}: the name has part {match[2]} of {match[3]}")
    return parts


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

# Floats that NumPy does not have.
_TINY = {
    "F8_E4M3": "float8_e4m3",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0",
    "F6_E2M3": "float6_e2m3",
    "F6_E3M2": "float6_e3m2",
    "F4": "float4_e2m1",
}


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a readable safetensors file: {error}") from error


def _check_dtypes(file: Path, tensors: Any) -> None:
    """Rejects complex weights, whose imaginary parts would be lost, and tiny floats."""
    for name in list(tensors.keys()):
        dtype = tensors.get_slice(name).get_dtype()
        if dtype.startswith("C"):
            raise UserError(f"{file}: {name} has complex numbers, which are not supported")
        if dtype in _TINY:
            raise UserError(f"{file}: {name} is of {_TINY[dtype]}, which is not supported")


@contextlib.contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """Opens a safetensors file with ``safetensors.safe_open``, to read NumPy arrays."""
    with _readable(file), safetensors.safe_open(str(file), framework="numpy") as tensors:  # pyright: ignore
        _check_dtypes(file, tensors)
        yield tensors


def check_finite(values: np.ndarray, source: str) -> np.ndarray:
    """Returns ``values`` (scores, vectors or weights from ``source``) if all are finite."""
    # A sum needs no second array, and a NaN or infinity makes it non-finite.
    with np.errstate(invalid="ignore"):
        total = np.sum(values, dtype=np.float64)
    if not np.isfinite(total):
        raise UserError(
            f"{source} gives numbers that are not finite: its weights or its file are damaged"
        )
    return values


def check_tensor(values: np.ndarray, name: str, source: str | os.PathLike) -> np.ndarray:
    """Returns a tensor of ``source`` if all its numbers are finite.

    The bits of infinity are above those of all finite numbers and below those of NaN, with either
    sign. Maxima of integers need no second array, and read 10 GB/s.
    """
    if values.dtype.kind in "iub" or not values.size:
        return values
    signed, unsigned = (np.dtype(f"{kind}{values.itemsize}") for kind in "iu")
    infinity = np.asarray([np.inf, -np.inf]).astype(values.dtype)
    if (
        values.view(signed).max() >= infinity.view(signed)[0]
        or values.view(unsigned).max() >= infinity.view(unsigned)[1]
    ):
        raise UserError(f"{source}: tensor {name} has numbers that are not finite")
    return values


def read_tensors(folder: str | os.PathLike) -> Iterator[tuple[str, Path, np.ndarray]]:
    """Yields (name, file, array) of every tensor, in the stored dtype."""
    for file in weight_files(folder):
        with open_tensors(file) as tensors:
            for name in list(tensors.keys()):
                yield name, file, tensors.get_tensor(name)


class TensorFiles(contextlib.ExitStack):
    """A context manager that opens a checkpoint folder, to read tensors or slices of tensors.

    Attributes:
      shapes: (name, shape) of every tensor, in the order of the files; names may repeat.
    """

    def __init__(self, folder: str | os.PathLike):
        super().__init__()
        self.shapes: list[tuple[str, tuple[int, ...]]] = []
        self._files: dict[str, tuple[Path, Any]] = {}
        for file in weight_files(folder):
            with _readable(file):
                tensors = self.enter_context(
                    safetensors.safe_open(str(file), framework="numpy")  # pyright: ignore
                )
                _check_dtypes(file, tensors)
                for name in list(tensors.keys()):
                    self.shapes.append((name, tuple(tensors.get_slice(name).get_shape())))
                    self._files[name] = (file, tensors)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Reads a tensor, or only the slice ``index``, in the stored dtype; checks its numbers."""
        file, tensors = self._files[name]
        with _readable(file):
            whole = index is None
            values = tensors.get_tensor(name) if whole else tensors.get_slice(name)[index]
        return check_tensor(values, name, file)


def match_tensors(
    source: str | os.PathLike,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    expected: Mapping[str, tuple[int, ...]],
    canonical: Callable[[str], str],
    ignored: Sequence[str],
) -> dict[str, str]:
    """Returns expected name -> name in the checkpoint; raises if names or shapes do not match.

    ``shapes`` lists the checkpoint's tensors. ``canonical`` converts a name in the checkpoint to
    the form of ``expected``. Names that match a pattern in ``ignored`` after conversion are
    skipped.
    """
    names: dict[str, str] = {}
    unmapped, duplicates = [], []
    for name, shape in shapes:
        key = canonical(name)
        if key not in expected:
            if not any(fnmatch.fnmatchcase(key, pattern) for pattern in ignored):
                unmapped.append(name)
        elif key in names:
            duplicates.append(name)
        elif shape != expected[key]:
            raise UserError(
                f"{source}: tensor {name} has shape {shape}, but the configuration implies "
                f"{expected[key]}"
            )
        else:
            names[key] = name
    problems = []
    unfilled = [key for key in expected if key not in names]
    kinds = {"unknown": unmapped, "duplicate": duplicates, "missing": unfilled}
    for kind, affected in kinds.items():
        if affected:
            more = f" and {len(affected) - 20} more" if len(affected) > 20 else ""
            problems.append(f"{kind}: {', '.join(affected[:20])}{more}")
    if problems:
        raise UserError(f"{source}: tensors do not fit the model; {'; '.join(problems)}")
    return names


def fetch(array: jax.Array | np.ndarray) -> np.ndarray:
    """Returns the complete array on this host, gathered from other processes if necessary."""
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
            raise UserError(f"{file} cannot be written: {error}") from None


# Files of a model folder in addition to weights and config.json, for all kinds of tokenizers.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def copy_companions(source: Path, target: Path) -> int:
    """Copies tokenizer and generation files to another folder; returns the number of files."""
    names = [name for name in COMPANIONS if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return len(names)
