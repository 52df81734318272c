"""Identifies a model by hashes of its files, its package version or its hub revision."""

import hashlib
import importlib.metadata
import io
import json
from pathlib import Path
from typing import Any, BinaryIO, cast

from cirag_jax.io import is_training_workdir, local_path
from cirag_jax.models import link_head
from cirag_jax.models.io import encoder_adapter, workdir
from cirag_jax.models.io.checkpoint_folders import Folder, files_in
from cirag_jax.models.io.folders import HUB_PATTERNS, hub_revision
from cirag_jax.models.io.pretrained_decoder import resolve_decoder
from cirag_jax.models.io.tensor_files import gguf_parts

_PATTERNS = (*HUB_PATTERNS, "*.gguf")
_BLOCK_SIZE, _NUM_BLOCKS = 1 << 12, 1 << 10


def model_identity(spec: str) -> dict[str, Any]:
    """Returns fields that identify a model or an adapter with its tokenizer and chat template.

    ``spec`` is a training workdir, a folder, ``shipped:NAME``, a ``.gguf`` file, ``package:NAME``
    or a hub id. The field is ``version`` for a package, ``revision`` for a hub snapshot, ``files``
    (name -> hash) for a folder or file, and ``checkpoint`` (a hash) for a workdir. A workdir and an
    encoder adapter also have ``base``, the identity of the base model. A workdir with a link head
    also has ``head``, a hash of the head.
    """
    if is_training_workdir(spec):
        folder, base = workdir.best_checkpoint_folder(spec)
        text = "".join(f"{file} {_hash_file(folder / file)}\n" for file in files_in(folder))
        head = local_path(spec) / link_head.FILE
        head_hash = {"head": _hash_file(head)} if head.is_file() else {}
        return {"checkpoint": _hash(text.encode()), "base": model_identity(base), **head_hash}
    path = local_path(spec)
    path = path if path.is_dir() and not any(path.glob("*.gguf")) else resolve_decoder(spec)
    if spec.startswith("package:"):
        return {"version": importlib.metadata.version(spec.removeprefix("package:"))}
    if revision := hub_revision(path):
        return {"revision": revision}
    base = encoder_adapter.base_model_of(spec)
    return {"files": _files(path)} | ({"base": model_identity(base)} if base else {})


def model_digest(spec: str) -> str:
    """Returns a hash, of 16 characters, of `model_identity`."""
    return _hash(json.dumps(model_identity(spec), sort_keys=True).encode())


def hash_small_files(folder: Path) -> dict[str, str]:
    """Returns hashes of all files of a model folder except the weights."""
    files = _files(folder)
    return {name: files[name] for name in files if not name.endswith((".safetensors", ".gguf"))}


def _files(path: Path) -> dict[str, str]:
    """Returns name -> hash of a model's files, including files in subfolders of modules."""
    if path.is_file():
        return {part.name: _hash_file(part) for part in gguf_parts(path)}
    patterns = [*_PATTERNS]
    if (path / "modules.json").is_file():
        patterns += [f"*/{pattern}" for pattern in _PATTERNS]
    files = {file for pattern in patterns for file in path.glob(pattern)}
    return {str(file.relative_to(path)): _hash_file(file) for file in sorted(files)}


def _hash_file(path: Folder) -> str:
    """Hashes the size and the bytes of a file, or a sample of the bytes if the file is large.

    The sample is the beginning and evenly spaced blocks, which avoids reading gigabytes of weights
    at every start. It detects training, because training changes every tensor and the gaps between
    blocks are shorter than a tensor.
    """
    with path.open("rb") as opened:
        file = cast(BinaryIO, opened)
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        digest = hashlib.sha256(f"{size} ".encode())
        if size <= 4 * _BLOCK_SIZE * _NUM_BLOCKS:
            digest.update(file.read())
        else:
            digest.update(file.read(256 * _BLOCK_SIZE))
            for index in range(_NUM_BLOCKS):
                file.seek(index * (size - _BLOCK_SIZE) // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_SIZE))
    return digest.hexdigest()[:16]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
