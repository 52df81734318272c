"""Saves a trained encoder as a low-rank adapter of its base model, in PEFT's format.

For each linear layer, the difference between trained and base weights is reduced to its largest
singular values. Changes of embeddings, biases and norms are dropped. Rank 48 reduces MiniLM from
90 MB to 4 MB.
"""

import errno
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import msgspec
import numpy as np

from cirag_jax.datasets.records import convert
from cirag_jax.errors import UserError
from cirag_jax.io import local_path, read_object
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.io import peft_format, weights
from cirag_jax.models.io.tensor_files import check_finite, check_tensor, open_tensors
from cirag_jax.models.pooling import Pooling

TASK = "FEATURE_EXTRACTION"
_PREFIX = "base_model.model."
_SIDE = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight")


def find_adapter(spec: str) -> Path | None:
    """Returns the folder of ``spec`` if it contains an adapter and no complete model, else None."""
    folder = local_path(spec)
    has_adapter = (folder / peft_format.CONFIG_FILE).is_file()
    return folder if has_adapter and not (folder / "config.json").is_file() else None


def base_model_of(spec: str) -> str | None:
    """Returns the base model of an encoder adapter; None if ``spec`` is not an encoder adapter."""
    folder = find_adapter(spec)
    if folder is None:
        return None
    task = read_object(folder / peft_format.CONFIG_FILE).get("task_type")
    return read_base_model(folder)[0] if task == TASK else None


def save_encoder_adapter(
    trained: Mapping[str, np.ndarray],
    base: Mapping[str, np.ndarray],
    folder: Path,
    *,
    rank: int,
    base_model_name: str,
    training: Mapping[str, Any],
) -> float:
    """Writes the difference between two encoders as an adapter of rank ``rank``, in fp16.

    ``SentenceTransformer(base).load_adapter(folder)`` reads the adapter. An earlier adapter in
    ``folder`` is replaced. ``trained`` and ``base`` are tensors from `weights.to_tensors`;
    ``training`` is the training record. Returns the fraction of the squared difference, summed over
    all tensors, that the adapter retains.
    """
    if rank < 1:
        raise UserError(f"config.rank={rank} must be at least 1")
    kept, total, tensors, layers = 0.0, 0.0, {}, weights.linear_tensors()
    for name, array in trained.items():
        change = array.astype(np.float32) - base[name].astype(np.float32)
        total += float(np.square(change).sum())
        if weights.any_layer(name) not in layers:
            continue
        u_OR, s_R, v_RI = np.linalg.svd(change, full_matrices=False)
        kept += float(np.square(s_R[:rank]).sum())
        root_R = np.sqrt(s_R[:rank])
        module = f"{_PREFIX}{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = (root_R[:, None] * v_RI[:rank]).astype(np.float16)
        tensors[f"{module}.lora_B.weight"] = (u_OR[:, :rank] * root_R).astype(np.float16)
    modules = {weights.any_layer(name).removesuffix(".weight") for name in trained}
    modules &= {name.removesuffix(".weight") for name in layers}
    targets = "|".join(re.escape(name).replace(r"\{layer\}", r"\d+") for name in sorted(modules))
    config = peft_format.config_json(base_model_name, rank, rank, targets, TASK)
    peft_format.write_adapter(folder, tensors, config, training)
    return kept / total if total else 1.0


def read_base_model(folder: Path) -> tuple[str, dict[str, Any]]:
    """Returns the name of an encoder adapter's base model, and the training record."""
    file = folder / peft_format.CONFIG_FILE
    raw = read_object(file)
    base, task = raw.get("base_model_name_or_path"), raw.get("task_type")
    if not isinstance(base, str) or not base or not _is_possible_path(base):
        raise UserError(f"{file}: field base_model_name_or_path does not name a model")
    if task != TASK:
        raise UserError(f"{file}: field task_type is {task!r}; expected {TASK}")
    training = peft_format.read_training(folder)
    convert(str(folder / peft_format.TRAINING_FILE), training, _Training)
    return base, training


class _Training(msgspec.Struct):
    """Fields of a training record that determine how texts are encoded; all are optional."""

    query_prefix: str = ""
    passage_prefix: str = ""
    triple_prefix: str | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    pooling: Pooling = "mean"
    bidirectional: bool | None = None


def _is_possible_path(name: str) -> bool:
    """Returns False for names that the file system rejects, such as names of 3,000 letters."""
    try:
        os.lstat(name)
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    except ValueError:
        return False
    return True


def add_adapter(
    state: Any,
    config: EncoderConfig,
    family: str,
    folder: Path,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> Any:
    """Adds an adapter to the parameters of a BERT-like encoder, and returns them."""
    file, config_file = folder / peft_format.TENSOR_FILE, folder / peft_format.CONFIG_FILE
    raw = read_object(config_file)
    scaling = peft_format.read_scaling(raw, config_file)
    tensors = weights.to_tensors(state, config, family)
    pairs: dict[str, dict[str, np.ndarray]] = {}
    with open_tensors(file) as content:
        for key in list(content.keys()):
            match = _SIDE.fullmatch(key)
            if match is None or f"{match[1]}.weight" not in tensors:
                raise UserError(f"{file}: tensor {key[:80]} does not belong to this encoder")
            array = check_tensor(content.get_tensor(key), key, file).astype(np.float32)
            pairs.setdefault(f"{match[1]}.weight", {})[match[2]] = array
    for name, pair in pairs.items():
        shape = tensors[name].shape
        rank, alpha = scaling.of(name.removesuffix(".weight"))
        factor = np.float32(scaling.factor(rank, alpha))
        shapes = {side: array.shape for side, array in pair.items()}
        if shapes != {"A": (rank, shape[1]), "B": (shape[0], rank)}:
            raise UserError(f"{file}: the factors of {name} have unexpected shapes {shapes}")
        with np.errstate(over="ignore", invalid="ignore"):
            merged = tensors[name] + pair["B"] @ pair["A"] * factor
        tensors[name] = check_finite(merged, str(file))
    return weights.from_tensors(tensors, state, config, family, mesh=mesh)


def adapter_digest(folder: Path) -> str:
    """Returns the SHA-256 of an adapter's tensors."""
    with peft_format.tensor_file(folder).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
