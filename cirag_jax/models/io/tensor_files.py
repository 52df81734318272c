"""Safetensors checkpoints: finding, reading and writing their files.

Only safetensors files are read: a pickle can run code, so ``pytorch_model.bin`` is refused.
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
    """The safetensors files of a checkpoint folder, one or the shards of its index."""
    folder = Path(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = sorted(set(convert(str(index), read_json(index), _Index).weight_map.values()))
        there = {path.name for path in folder.iterdir() if path.is_file()}
        for name in names:
            if name not in there:  # a path, or anything else that is no name, is not
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
        raise UserError(f"{file}: a tensor is of {error.name}, which is not read.") from None


def _check_real(file: Path, tensors: Any) -> None:
    """Complex weights, as of Fourier layers, would lose their imaginary parts on the way."""
    for name in list(tensors.keys()):
        if tensors.get_slice(name).get_dtype().startswith("C"):
            raise UserError(f"{file}: {name} is of complex numbers, which are not read.")


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file, as ``safetensors.safe_open`` gives it, with tensors for NumPy."""
    with _readable(file), safetensors.safe_open(str(file), framework="numpy") as tensors:  # pyright: ignore
        _check_real(file, tensors)
        yield tensors


def check_finite(values: np.ndarray, source: str) -> np.ndarray:
    """``values``: scores, vectors or weights of a model or a file."""
    # A sum needs no array beside them, and one NaN or infinity spoils it.
    with np.errstate(invalid="ignore"):
        total = np.sum(values, dtype=np.float64)
    if not np.isfinite(total):
        raise UserError(
            f"{source} gives numbers that are not finite: its weights or its file are damaged."
        )
    return values


def read_tensors(folder: str | os.PathLike) -> Iterator[tuple[str, Path, np.ndarray]]:
    """Yields (name, file, array) of every tensor, each in its own dtype."""
    for file in weight_files(folder):
        with opened(file) as tensors:
            for name in list(tensors.keys()):
                yield name, file, tensors.get_tensor(name)


class TensorFiles(contextlib.ExitStack):
    """The tensors of a checkpoint folder, read by slices; a context that closes the files.

    Attributes:
      folder: the checkpoint.
      shapes: (name, shape) of every tensor, in the files' order; a name can be there twice.
    """

    def __init__(self, folder: str | os.PathLike):
        """Opens every file and reads its header."""
        super().__init__()
        self.folder = Path(folder)
        self.shapes: list[tuple[str, tuple[int, ...]]] = []
        self._homes: dict[str, tuple[Path, Any]] = {}
        for file in weight_files(folder):
            with _readable(file):
                tensors = self.enter_context(
                    safetensors.safe_open(str(file), framework="numpy")  # pyright: ignore
                )
                _check_real(file, tensors)
                for name in list(tensors.keys()):
                    self.shapes.append((name, tuple(tensors.get_slice(name).get_shape())))
                    self._homes[name] = (file, tensors)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The slice ``index`` of a tensor, in its own dtype; nothing else is read."""
        file, tensors = self._homes[name]
        with _readable(file):
            return tensors.get_slice(name)[index]


def misfits(unmapped: Sequence[str], doubled: Sequence[str], unfilled: Sequence[str]) -> str | None:
    """What is wrong with a checkpoint's names, or None; at most 20 names of each kind."""
    problems = []
    for kind, names in (
        ("unmapped", unmapped),
        ("doubly mapped", doubled),
        ("unfilled", unfilled),
    ):
        if names:
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            problems.append(f"{kind}: {', '.join(names[:20])}{more}")
    return "; ".join(problems) or None


def fetch(array: jax.Array | np.ndarray) -> np.ndarray:
    """The whole array on this host, gathered from other processes where they hold parts."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def save_tensors(
    tensors: Mapping[str, np.ndarray],
    file: str | os.PathLike,
    metadata: Mapping[str, str] = MappingProxyType({"format": "pt"}),
) -> None:
    """Writes a safetensors file aside, then renames it."""
    with replacing(Path(file)) as aside:
        try:
            safetensors.numpy.save_file(dict(tensors), str(aside), metadata=dict(metadata))
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be written: {error}.") from None


# What a model's folder holds besides weights and config.json, in any of the formats of
# transformers' tokenizers.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def copy_companions(source: Path, target: Path) -> int:
    """Copies tokenizer and generation files from one folder to another; returns how many."""
    found = [name for name in COMPANIONS if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, target / name)
    return len(found)
