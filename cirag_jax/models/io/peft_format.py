"""Reads and writes PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

PEFT stores ``lora_A.weight`` [R, in] and ``lora_B.weight`` [out, R] for each layer. The arrays in
this package are the transposes, stacked over layers. Unsupported settings that would change the
arithmetic raise an error.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.io import read_object, replacing, write_json, write_text
from cirag_jax.models import decoder, lora
from cirag_jax.models.decoder import PROJECTIONS, DecoderConfig
from cirag_jax.models.io.tensor_files import (
    check_tensor,
    fetch,
    match_tensors,
    open_tensors,
    save_tensors,
)
from cirag_jax.models.lora import ALL_LINEAR, LoraConfig

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
TRAINING_FILE = "training.json"

_PREFIX = "base_model.model."
_SIDES = {"a": "lora_A.weight", "b": "lora_B.weight"}

# Fields that change the arithmetic -> their supported values.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "layer_replication"), (None,)),
    **dict.fromkeys(("layers_to_transform", "trainable_token_indices", "velora_config"), (None,)),
    **dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_bdlora"), (None, False)),
    **dict.fromkeys(("use_dora", "use_qalora"), (None, False)),
    **dict.fromkeys(("alpha_pattern", "rank_pattern"), (None, {})),
    **dict.fromkeys(("modules_to_save", "target_parameters"), (None, [])),
    "bias": (None, "none"),
    # All other values (pissa, olora, corda, loftq, lora_ga) also change the base.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


def _module(layer: int, name: str) -> str:
    part = "self_attn" if name[0] in "qkvo" else "mlp"
    return f"model.layers.{layer}.{part}.{name}"


def adapter_tensors(state: nnx.State) -> dict[str, np.ndarray]:
    """Returns PEFT's name -> fp32 host array in PEFT's layout; all processes must call this."""
    tensors = {}
    for name, pair in lora.to_adapter(state)["layers"].items():
        for side, suffix in _SIDES.items():
            stacked = fetch(pair[side]).astype(np.float32)
            for layer, array in enumerate(stacked):
                key = f"{_PREFIX}{_module(layer, name)}.{suffix}"
                tensors[key] = np.ascontiguousarray(array.T)
    return tensors


def config_json(
    base_model_name: str | None, rank: int, alpha: float, targets: Any, task: str, **more: Any
) -> dict[str, Any]:
    """Returns the contents of ``adapter_config.json``."""
    return {
        "alpha_pattern": {},
        "base_model_name_or_path": base_model_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {},
        "target_modules": targets,
        "task_type": task,
        "use_dora": False,
        "use_rslora": False,
        **more,
    }


def save_adapter(
    state: nnx.State,
    config: LoraConfig,
    folder: str | os.PathLike,
    base_model_name: str | None = None,
    *,
    dtype: str = "float32",
    training: Mapping[str, Any] | None = None,
    card: str | None = None,
) -> Path:
    """Writes an adapter as ``PeftModel.save_pretrained`` does, and returns ``folder``.

    Writing is atomic and replaces an earlier adapter in ``folder``. With several processes, all
    must call this, and process 0 writes. ``dtype`` is ``float32`` or ``bfloat16``. ``training`` is
    the record that `read_training` returns; PEFT ignores it. ``card`` is the text of README.md.
    """
    folder = Path(folder)
    _check_target(folder)
    tensors = {name: array.astype(dtype) for name, array in adapter_tensors(state).items()}
    if jax.process_index() == 0:
        peft_config = config_json(
            base_model_name,
            config.rank,
            config.alpha,
            targets=sorted(lora.to_adapter(state)["layers"]),
            task="CAUSAL_LM",
            lora_dropout=config.dropout,
            use_rslora=config.rank_stabilised,
        )
        write_adapter(folder, tensors, peft_config, training, card)
    return folder


def write_adapter(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    training: Mapping[str, Any] | None,
    card: str | None = None,
) -> None:
    """Writes an adapter's files atomically; see `save_adapter`."""
    _check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as aside:
        aside.mkdir()
        save_tensors(tensors, aside / TENSOR_FILE)
        if training is not None:
            write_json(aside / TRAINING_FILE, training)
        if card is not None:
            write_text(aside / "README.md", [card])
        write_json(aside / CONFIG_FILE, config)


def _check_target(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} exists and is not a folder")
    adapter_files = {CONFIG_FILE, TENSOR_FILE, TRAINING_FILE, "README.md"}
    if folder.is_dir() and (others := {f.name for f in folder.iterdir()} - adapter_files):
        raise UserError(
            f"{folder} contains {min(others)}, which is not part of an adapter; choose a new folder"
        )


def load_adapter(
    folder: str | os.PathLike, config: DecoderConfig, mesh: jax.sharding.Mesh | None = None
) -> tuple[nnx.State, LoraConfig]:
    """Loads an adapter in PEFT's format in fp32; ``config`` describes the base model.

    ``target_modules`` may be names, PEFT's ``"all-linear"`` or a regular expression. It must select
    the same modules in every layer of the base. The arrays are on ``mesh`` if given.
    """
    folder = Path(folder)
    raw = read_object(folder / CONFIG_FILE)
    lora_config = _parse_config(raw, folder / CONFIG_FILE, config)
    host = _read_tensors(folder, config, lora_config)
    filled = []
    for path, variable in nnx.to_flat_state(lora.abstract_adapter(config, lora_config)):
        _, name, side = map(str, path)
        filled.append((path, sharding.place_variable(variable, host[name][side], mesh)))
    return nnx.from_flat_state(filled), lora_config


def tensor_file(folder: Path) -> Path:
    """Returns the file of an adapter's tensors."""
    file = folder / TENSOR_FILE
    if not file.is_file():
        pickle = folder / "adapter_model.bin"
        if pickle.exists():
            raise UserError(f"{pickle} is a pickle file, which is never loaded; convert it")
        raise UserError(f"{folder} has no {TENSOR_FILE}")
    return file


def read_training(folder: Path) -> dict[str, Any]:
    """Returns the training record that `save_adapter` wrote; empty if there is none."""
    return read_object(folder / TRAINING_FILE, optional=True)


def _parse_config(raw: Mapping[str, Any], file: Path, config: DecoderConfig) -> LoraConfig:
    if raw.get("peft_type") != "LORA":
        raise UserError(
            f"{file}: field peft_type is {raw.get('peft_type')!r}; only LORA is supported"
        )
    for field, allowed in _SUPPORTED.items():
        value = raw.get(field)
        # Also compares types: 0 is not False here.
        if not any(type(value) is type(option) and value == option for option in allowed):
            raise UserError(f"{file}: field {field} is {value!r}, which is not supported")

    try:
        return LoraConfig(
            rank=read_number(raw, file, "r", 8, int),
            alpha=read_number(raw, file, "lora_alpha", 8),
            dropout=read_number(raw, file, "lora_dropout", 0.0),
            targets=_resolve_targets(raw, file, config),
            rank_stabilised=bool(raw.get("use_rslora")),
        )
    except UserError as error:
        if str(error).startswith(str(file)):
            raise
        raise UserError(f"{file}: {error}") from error


def read_number(
    raw: Mapping[str, Any], file: Path, field: str, default: float | None, kind: type = float
) -> Any:
    """Returns a number from an adapter's configuration; its type is ``int`` or ``kind``."""
    value = raw.get(field, default)
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)
    if not is_number or not -sys.float_info.max <= value <= sys.float_info.max:
        raise UserError(f"{file}: field {field} is {repr(value)[:80]}, not a number")
    return value


def _matcher(value: Any, file: Path, field: str) -> Any:
    """Returns a function that tests whether a field selects a module name, as PEFT does.

    A string is a regular expression for the full name of a module. A list contains names or
    endings of names.
    """
    if isinstance(value, str):
        try:
            return re.compile(value).fullmatch
        except re.error as error:
            raise UserError(
                f"{file}: field {field} is not a regular expression: {error}"
            ) from error
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return lambda module: any(module == n or module.endswith(f".{n}") for n in value)
    raise UserError(f"{file}: field {field} is neither a string nor a list of names")


def _resolve_targets(raw: Mapping[str, Any], file: Path, config: DecoderConfig) -> tuple[str, ...]:
    """Returns the names of the adapted linear layers, which must be the same in every layer."""
    value = raw.get("target_modules")
    # PEFT's name for all linear layers except the output layer.
    pattern = ".*" if value in (ALL_LINEAR, [ALL_LINEAR]) else value
    targeted = _matcher(pattern, file, "target_modules")
    exclude = raw.get("exclude_modules") or []
    excluded = _matcher(exclude, file, "exclude_modules")

    def adapted(layer: int, name: str) -> bool:
        # In adapters of models without an output layer, names lack the prefix "model.".
        full_name = _module(layer, name)
        names = (full_name, full_name.removeprefix("model."))
        return any(map(targeted, names)) and not any(map(excluded, names))

    targets = []
    known = lora.supported_targets(config)
    for name in known:
        layers = [layer for layer in range(config.num_layers) if adapted(layer, name)]
        if layers and len(layers) < config.num_layers:
            missing = min(set(range(config.num_layers)) - set(layers))
            raise UserError(
                f"{file}: field target_modules excludes {name} in layer {missing} of "
                f"{config.num_layers}; only adapters of all layers are supported"
            )
        if layers:
            targets.append(name)
    if not targets:
        raise UserError(
            f"{file}: field target_modules matches no linear layer of the base "
            f"that can have an adapter ({', '.join(known)})"
        )
    return tuple(targets)


def _read_tensors(
    folder: Path, config: DecoderConfig, lora_config: LoraConfig
) -> dict[str, dict[str, np.ndarray]]:
    """Returns target -> side -> stacked host array."""
    file = tensor_file(folder)
    places = _places(config, lora_config)
    shapes = decoder.layer_parameters(config)
    widest = max(max(shapes[name][0]) for name in lora_config.names)
    if lora_config.rank > widest:  # the adapter would be larger than the base
        raise UserError(
            f"{folder / CONFIG_FILE}: field r is {lora_config.rank}, but no layer of the base is "
            f"wider than {widest}"
        )
    host: dict[str, dict[str, np.ndarray]] = {}
    for name in lora_config.names:
        (rows, columns), _ = shapes[name]
        host[name] = {
            "a": np.empty((config.num_layers, rows, lora_config.rank), np.float32),
            "b": np.empty((config.num_layers, lora_config.rank, columns), np.float32),
        }
    expected = {key: host[name][side].shape[:0:-1] for key, (name, side, _) in places.items()}
    with open_tensors(file) as tensors:
        shapes = [(key, tuple(tensors.get_slice(key).get_shape())) for key in tensors.keys()]  # noqa: SIM118
        if config.num_experts:
            _refuse_experts(file, [key for key, _ in shapes])
        where = f"{file}: adapter of a different base model"
        keys = match_tensors(where, shapes, expected, _canonical, ())
        for key, (name, side, layer) in places.items():
            stored = keys[key]
            host[name][side][layer] = check_tensor(tensors.get_tensor(stored), stored, file).T
    return host


def _refuse_experts(file: Path, keys: Sequence[str]) -> None:
    for key in keys:
        if ".mlp." in key:
            raise UserError(
                f"{file}: tensor {key} adapts a feed-forward layer of a mixture of experts; only "
                f"adapters of attention ({', '.join(PROJECTIONS[:4])}) are supported"
            )


def _canonical(key: str) -> str:
    """Returns the name that PEFT gives the tensor in a causal language model."""
    bare = f"{_PREFIX}layers."
    return f"{_PREFIX}model.layers.{key[len(bare) :]}" if key.startswith(bare) else key


def _places(config: DecoderConfig, lora_config: LoraConfig) -> dict[str, tuple[str, str, int]]:
    """Returns PEFT's name -> (target, side, layer)."""
    return {
        f"{_PREFIX}{_module(layer, name)}.{suffix}": (name, side, layer)
        for name in lora_config.names
        for side, suffix in _SIDES.items()
        for layer in range(config.num_layers)
    }
