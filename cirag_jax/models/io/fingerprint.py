"""Identity of a model: hashes of its files, or its package version or hub revision."""

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from cirag_jax.io import is_training_workdir, local_path
from cirag_jax.models import link_head
from cirag_jax.models.io import encoder_adapter, workdir
from cirag_jax.models.io.pretrained import HUB_PATTERNS, hub_revision
from cirag_jax.models.io.pretrained_decoder import resolve_decoder

_PATTERNS = (*HUB_PATTERNS, "*.gguf")
_BLOCK_SIZE, _NUM_BLOCKS = 1 << 12, 1 << 10


def model_identity(spec: str) -> dict[str, Any]:
    """Returns the identity of a model or an adapter: weights, tokenizer, chat template.

    ``spec`` is a training workdir, a folder, ``shipped:NAME``, a ``.gguf`` file, ``package:NAME``
    or a hub id. Returns ``version`` of a package, ``revision`` of a hub snapshot, ``files`` (name
    -> hash) of a folder or file, or ``checkpoint`` (a hash) of a workdir. ``base`` identifies the
    base model of a workdir or of an encoder's adapter.
    """
    if is_training_workdir(spec):
        folder, base = workdir.best_checkpoint_folder(spec)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        text = "".join(f"{file.relative_to(folder)} {_hash_file(file)}\n" for file in files)
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
    """Returns `model_identity` as 16 characters."""
    return _hash(json.dumps(model_identity(spec), sort_keys=True).encode())


def hash_small_files(folder: Path) -> dict[str, str]:
    """Returns hashes of a model folder's files, except its weights."""
    files = _files(folder)
    return {name: files[name] for name in files if not name.endswith((".safetensors", ".gguf"))}


def _files(path: Path) -> dict[str, str]:
    """Returns name -> hash of the files of a model, including the folders of its modules."""
    if path.is_file():
        return {path.name: _hash_file(path)}
    patterns = [*_PATTERNS]
    if (path / "modules.json").is_file():
        patterns += [f"*/{pattern}" for pattern in _PATTERNS]
    files = {file for pattern in patterns for file in path.glob(pattern)}
    return {str(file.relative_to(path)): _hash_file(file) for file in sorted(files)}


def _hash_file(path: Path) -> str:
    """Hashes a file's size and bytes; of a large file only its beginning and evenly spaced blocks.

    This avoids reading gigabytes of weights at every start. Training changes every tensor, and the
    blocks are closer together than trained tensors are long.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size} ".encode())
    with path.open("rb") as file:
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
