"""Reads and writes PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

PEFT stores ``lora_A.weight`` [R, in] and ``lora_B.weight`` [out, R] for each layer. The arrays in
this package are the transposes, stacked over layers. Layers that an adapter leaves out have zeros,
and differing ranks and scales become one (`Scaling`). Unsupported settings that would change the
arithmetic raise an error.
"""

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.io import read_object, replacing, write_json, write_text
from cirag_jax.models import decoder_params, lora
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_params import PROJECTIONS
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
    **dict.fromkeys(("kasa_config", "monteclora_config", "velora_config"), (None,)),
    **dict.fromkeys(("trainable_token_indices",), (None,)),
    **dict.fromkeys(("lora_bias", "use_bdlora", "use_dora", "use_qalora"), (None, False)),
    **dict.fromkeys(("modules_to_save", "target_parameters"), (None, [])),
    "bias": (None, "none"),
    "layers_pattern": (None, "", [], "layers", ["layers"]),
    # All other values (pissa, olora, corda, loftq, lora_ga) also change the base.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
_READ = (
    *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern"),
    *("alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform"),
)
# Fields without effect on the arithmetic of linear layers; PEFT ignores `fan_in_fan_out` there.
_WITHOUT_EFFECT = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config"),
    *("eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config"),
    "ensure_weight_tying",
)


# Tensors of a model with images that do not belong to its text part.
_IGNORED = ("*.vision_tower.*", "*.multi_modal_projector.*")


def _module(layer: int, name: str, inside: str = "") -> str:
    part = "self_attn" if name[0] in "qkvo" else "mlp"
    return f"model.{inside}layers.{layer}.{part}.{name}"


def adapter_tensors(state: nnx.State, inside: str = "") -> dict[str, np.ndarray]:
    """Returns PEFT's name -> fp32 host array in PEFT's layout; all processes must call this.

    ``inside`` is the prefix of the text part of a model with images (`save_adapter`).
    """
    tensors = {}
    for name, pair in lora.to_adapter(state)["layers"].items():
        for side in _SIDES:
            stacked = fetch(pair[side]).astype(np.float32)
            for layer, array in enumerate(stacked):
                tensors[_tensor(layer, name, side, inside)] = np.ascontiguousarray(array.T)
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
    task: str = "CAUSAL_LM",
    inside: str = "",
) -> Path:
    """Writes an adapter as ``PeftModel.save_pretrained`` does, and returns ``folder``.

    Writing is atomic and replaces an earlier adapter in ``folder``. With several processes, all
    must call this, and process 0 writes. ``dtype`` is ``float32`` or ``bfloat16``. ``training`` is
    the record that `read_training` returns; PEFT ignores it. ``card`` is the text of README.md, and
    ``task`` PEFT's task type. If the base is the text part of a model with images, ``inside`` is
    its prefix (`pretrained_decoder.text_prefix`), so that PEFT can load the adapter onto the whole
    model.
    """
    folder = Path(folder)
    _check_target(folder)
    arrays = adapter_tensors(state, inside)
    tensors = {name: array.astype(dtype) for name, array in arrays.items()}
    if task != "CAUSAL_LM":  # models without an output layer have no prefix "model."
        long, short = f"{_PREFIX}model.", _PREFIX
        tensors = {name.replace(long, short, 1): array for name, array in tensors.items()}
    targets: Any = sorted(lora.to_adapter(state)["layers"])
    if inside:  # The images' part has layers of the same names.
        targets = rf"model\.{re.escape(inside)}layers\..*\.({'|'.join(targets)})"
    if jax.process_index() == 0:
        peft_config = config_json(
            base_model_name,
            config.rank,
            config.alpha,
            targets=targets,
            task=task,
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

    ``target_modules`` may be names, PEFT's ``"all-linear"`` or a regular expression. The arrays are
    on ``mesh`` if given.
    """
    folder = Path(folder)
    file = folder / CONFIG_FILE
    raw = read_object(file)
    scaling = read_scaling(raw, file)
    layers = _adapted_layers(raw, file, config)
    lora_config = _lora_config(raw, file, scaling, layers)
    host = _read_tensors(folder, config, lora_config, scaling, layers)
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


class Scaling(NamedTuple):
    """Ranks and factors of the adapted modules of an adapter.

    Attributes:
      rank, alpha: defaults of all modules.
      ranks, alphas: regular expression for the end of a module's name -> its own value.
      stabilized: whether the factor is ``alpha / sqrt(rank)`` instead of ``alpha / rank``.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    stabilized: bool

    def of(self, *names: str) -> tuple[int, float]:
        """Returns rank and alpha of a module, given its possible names."""

        def find(patterns: Mapping[str, Any], default: Any) -> Any:
            for pattern, value in patterns.items():
                if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                    return value
            return default

        return find(self.ranks, self.rank), find(self.alphas, self.alpha)

    def factor(self, rank: int, alpha: float) -> float:
        """Returns the factor on the output of a module."""
        return alpha / (math.sqrt(rank) if self.stabilized else rank)


def read_scaling(raw: Mapping[str, Any], file: Path) -> Scaling:
    """Checks a parsed ``adapter_config.json``, and returns its ranks and factors."""
    if raw.get("peft_type") != "LORA":
        raise UserError(
            f"{file}: field peft_type is {raw.get('peft_type')!r}; only LORA is supported"
        )
    for field, allowed in _SUPPORTED.items():
        value = raw.get(field)
        # Also compares types: 0 is not False here.
        if not any(type(value) is type(option) and value == option for option in allowed):
            raise UserError(f"{file}: field {field} is {value!r}, which is not supported")
    for field in raw.keys() - {*_SUPPORTED, *_READ, *_WITHOUT_EFFECT}:
        if raw[field] is True:
            raise UserError(f"{file}: field {field} is True, and its meaning is not known")
    stabilized = raw.get("use_rslora")
    if stabilized not in (None, False, True):
        raise UserError(f"{file}: field use_rslora is {stabilized!r}, neither true nor false")

    def patterns(field: str, kind: type) -> dict[str, Any]:
        value = raw.get(field) or {}
        if not isinstance(value, dict):
            raise UserError(f"{file}: field {field} is {value!r}, not an object")
        for pattern in value:
            _compile(pattern, file, field)
        return {key: read_number(value, file, f"{field}.{key}", None, kind, key) for key in value}

    scaling = Scaling(
        read_number(raw, file, "r", 8, int),
        read_number(raw, file, "lora_alpha", 8),
        patterns("rank_pattern", int),
        patterns("alpha_pattern", float),
        bool(stabilized),
    )
    patterns_of = {f"rank_pattern.{pattern}": rank for pattern, rank in scaling.ranks.items()}
    for field, rank in {"r": scaling.rank, **patterns_of}.items():
        if rank < 1:
            raise UserError(f"{file}: field {field} is {rank}; it must be at least 1")
    return scaling


def _lora_config(
    raw: Mapping[str, Any], file: Path, scaling: Scaling, layers: Mapping[str, Sequence[int]]
) -> LoraConfig:
    """Returns one configuration for modules with different ranks and factors."""
    found = [scaling.of(*_names(layer, name)) for name in layers for layer in layers[name]]
    rank = max(rank for rank, _ in found)
    alpha = max((alpha for _, alpha in found), key=abs)
    dropout = read_number(raw, file, "lora_dropout", 0.0)
    try:
        return LoraConfig(rank, alpha, dropout, tuple(layers), scaling.stabilized)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def read_number(
    raw: Mapping[str, Any],
    file: Path,
    field: str,
    default: float | None,
    kind: type = float,
    key: str | None = None,
) -> Any:
    """Returns a number from an adapter's configuration; its type is ``int`` or ``kind``.

    ``key`` is its key in ``raw``, by default ``field``.
    """
    value = raw.get(field if key is None else key, default)
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
        return _compile(value, file, field).fullmatch
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return lambda module: any(module == n or module.endswith(f".{n}") for n in value)
    raise UserError(f"{file}: field {field} is neither a string nor a list of names")


def _compile(pattern: str, file: Path, field: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{file}: field {field} is not a regular expression: {error}") from error


def _names(layer: int, name: str) -> tuple[str, ...]:
    """Returns the possible names of a module.

    Models without an output layer lack the prefix "model."; models with images have another one.
    """
    full = _module(layer, name)
    inside = _module(layer, name, "language_model.")
    return full, full.removeprefix("model."), inside, f"language_model.{full}"


def _adapted_layers(
    raw: Mapping[str, Any], file: Path, config: DecoderConfig
) -> dict[str, list[int]]:
    """Returns the names of the adapted linear layers, and for each the layers of the model."""
    value = raw.get("target_modules")
    # PEFT's name for all linear layers except the output layer.
    pattern = ".*" if value in (ALL_LINEAR, [ALL_LINEAR]) else value
    targeted = _matcher(pattern, file, "target_modules")
    excluded = _matcher(raw.get("exclude_modules") or [], file, "exclude_modules")
    selected = raw.get("layers_to_transform")
    if selected is None or selected == []:
        selected = [*range(config.num_layers)]
    selected = [selected] if type(selected) is int else selected  # 0 is the first layer
    all_layers = {*range(config.num_layers)}
    if not isinstance(selected, list) or any(
        type(layer) is not int or layer not in all_layers for layer in selected
    ):
        raise UserError(
            f"{file}: field layers_to_transform is {repr(selected)[:80]}; the base has the layers "
            f"0 to {config.num_layers - 1}"
        )
    known, layers = lora.supported_targets(config), {}
    for name in known:
        layers[name] = [
            layer
            for layer in selected
            if any(map(targeted, _names(layer, name)))
            and not any(map(excluded, _names(layer, name)))
        ]
    if not any(layers.values()):
        raise UserError(
            f"{file}: field target_modules matches no linear layer of the base that can have an "
            f"adapter ({', '.join(known)})"
        )
    return {name: found for name, found in layers.items() if found}


def _read_tensors(
    folder: Path,
    config: DecoderConfig,
    lora_config: LoraConfig,
    scaling: Scaling,
    layers: Mapping[str, Sequence[int]],
) -> dict[str, dict[str, np.ndarray]]:
    """Returns target -> side -> stacked host array, with zeros where the adapter has no values."""
    file, rank = tensor_file(folder), lora_config.rank
    parameters = {name: decoder_params.target_parameter(config, name)[0] for name in layers}
    widest = max(map(max, parameters.values()))
    if rank > widest:  # the adapter would be larger than the base
        raise UserError(
            f"{folder / CONFIG_FILE}: field r is {rank}, but no layer of the base is wider than "
            f"{widest}"
        )
    host: dict[str, dict[str, np.ndarray]] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for name in layers:
        rows, columns = parameters[name]
        host[name] = {
            "a": np.zeros((config.num_layers, rows, rank), np.float32),
            "b": np.zeros((config.num_layers, rank, columns), np.float32),
        }
        for layer in layers[name]:
            own_rank, _ = scaling.of(*_names(layer, name))
            expected[_tensor(layer, name, "a")] = (own_rank, rows)
            expected[_tensor(layer, name, "b")] = (columns, own_rank)
    with open_tensors(file) as tensors:
        shapes = [(key, tuple(tensors.get_slice(key).get_shape())) for key in tensors.keys()]  # noqa: SIM118
        if config.num_experts:
            _refuse_experts(file, [key for key, _ in shapes])
        where = f"{file}: adapter of a different base model"
        keys = match_tensors(where, shapes, expected, _canonical, _IGNORED)
        for name in layers:
            for layer in layers[name]:
                own_rank, alpha = scaling.of(*_names(layer, name))
                a, b = (
                    check_tensor(tensors.get_tensor(stored), stored, file).T
                    for stored in (keys[_tensor(layer, name, side)] for side in _SIDES)
                )
                host[name]["a"][layer, :, :own_rank] = a
                own, common = scaling.factor(own_rank, alpha), lora_config.scale
                host[name]["b"][layer, :own_rank] = b * np.float32(own / common if common else 1.0)
    return host


def _tensor(layer: int, name: str, side: str, inside: str = "") -> str:
    """Returns PEFT's name of a factor."""
    return f"{_PREFIX}{_module(layer, name, inside)}.{_SIDES[side]}"


def _refuse_experts(file: Path, keys: Sequence[str]) -> None:
    for key in keys:
        if ".mlp." in key or ".block_sparse_moe." in key:  # Mixtral's name
            raise UserError(
                f"{file}: tensor {key} adapts a feed-forward layer of a mixture of experts; only "
                f"adapters of attention ({', '.join(PROJECTIONS[:4])}) are supported"
            )


def _canonical(key: str) -> str:
    """Returns the name that PEFT gives the tensor in a causal language model."""
    for prefix in ("language_model.model.", "model.language_model."):
        if key.startswith(_PREFIX + prefix):
            key = f"{_PREFIX}model.{key[len(_PREFIX + prefix) :]}"
    bare = f"{_PREFIX}layers."
    return f"{_PREFIX}model.layers.{key[len(bare) :]}" if key.startswith(bare) else key
