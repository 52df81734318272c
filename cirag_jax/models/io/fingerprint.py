"""Identity of a model: hashes of its files, or the version or revision that stands for them."""

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
_BLOCK, _BLOCKS = 1 << 12, 1 << 10


def of_model(spec: str) -> dict[str, Any]:
    """Returns the identity of a model or an adapter: weights, tokenizer, chat template.

    ``spec`` is a training workdir, a folder, ``shipped:NAME``, a ``.gguf`` file, ``package:NAME``
    or a hub id. Returns ``version`` of a package, ``revision`` of a hub snapshot, ``files`` (name
    -> hash) of a folder or file, or ``checkpoint`` (a hash) of a workdir; and ``base``, the model
    that a workdir or an encoder's adapter changes.
    """
    if is_training_workdir(spec):
        folder, base = workdir.best_folder(spec)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        text = "".join(f"{file.relative_to(folder)} {_hash_file(file)}\n" for file in files)
        head = local_path(spec) / link_head.FILE
        beside = {"head": _hash_file(head)} if head.is_file() else {}
        return {"checkpoint": _hash(text.encode()), "base": of_model(base), **beside}
    path = local_path(spec)
    path = path if path.is_dir() and not any(path.glob("*.gguf")) else resolve_decoder(spec)
    if spec.startswith("package:"):
        return {"version": importlib.metadata.version(spec.removeprefix("package:"))}
    if revision := hub_revision(path):
        return {"revision": revision}
    adapter = encoder_adapter.base_of(spec)
    return {"files": _files(path)} | ({"base": of_model(adapter)} if adapter else {})


def digest(spec: str) -> str:
    """`of_model` in 16 characters."""
    return _hash(json.dumps(of_model(spec), sort_keys=True).encode())


def small_files(folder: Path) -> dict[str, str]:
    """Hashes of a model folder's files, its weights left out."""
    files = _files(folder)
    return {name: files[name] for name in files if not name.endswith((".safetensors", ".gguf"))}


def _files(path: Path) -> dict[str, str]:
    """Name -> hash of what belongs to a model; of one whose parts have folders, these too."""
    if path.is_file():
        return {path.name: _hash_file(path)}
    patterns = [*_PATTERNS]
    if (path / "modules.json").is_file():
        patterns += [f"*/{pattern}" for pattern in _PATTERNS]
    files = {file for pattern in patterns for file in path.glob(pattern)}
    return {str(file.relative_to(path)): _hash_file(file) for file in sorted(files)}


def _hash_file(path: Path) -> str:
    """Of a file's size and bytes; of a large file's beginning, and of blocks spread all over it.

    Gigabytes of weights are not read whole at every start: another training changes every tensor,
    and the blocks lie closer than the tensors that are trained are large.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size} ".encode())
    with path.open("rb") as file:
        if size <= 4 * _BLOCK * _BLOCKS:
            digest.update(file.read())
        else:
            digest.update(file.read(256 * _BLOCK))
            for index in range(_BLOCKS):
                file.seek(index * (size - _BLOCK) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
