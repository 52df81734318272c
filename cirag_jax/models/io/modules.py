"""Reads and writes the modules of sentence-transformers: pooling and dense layers.

``modules.json`` lists the modules of a model folder. Pooling and dense layers have a subfolder
each, with a ``config.json`` and, for dense layers, weights.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from cirag_jax.datasets.records import convert
from cirag_jax.errors import UserError
from cirag_jax.io import read_json, read_object, write_json
from cirag_jax.models.activations import Activation
from cirag_jax.models.dense import DenseConfig
from cirag_jax.models.io.folders import ConfigFields
from cirag_jax.models.io.tensor_files import TensorFiles, save_tensors
from cirag_jax.models.pooling import Pooling

# Older folders have one flag per mode.
_FLAGS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_TORCH = "torch.nn.modules.activation."
_ACTIVATIONS: Mapping[str, Activation] = {
    "torch.nn.modules.linear.Identity": "identity",
    f"{_TORCH}Tanh": "tanh",
    f"{_TORCH}ReLU": "relu",
    f"{_TORCH}GELU": "gelu",
    f"{_TORCH}SiLU": "silu",
    f"{_TORCH}Sigmoid": "sigmoid",
}


@dataclasses.dataclass(frozen=True)
class Modules:
    """Modules after the transformer.

    Attributes:
      pooling: the pooling mode; None if the folder does not name one.
      include_prompt: whether tokens of the prompt (the prefix) are pooled.
      dense: the dense layers.
    """

    pooling: Pooling | None = None
    include_prompt: bool = True
    dense: tuple[DenseConfig, ...] = ()


class _Module(msgspec.Struct):
    type: str
    path: str = ""


def read_modules(folder: Path, width: int) -> Modules:
    """Returns the modules of a folder whose hidden states have ``width`` dimensions.

    Supported are ``Transformer``, then ``Pooling``, any number of ``Dense``, and ``Normalize`` at
    the end. Vectors are always normalized, so ``Normalize`` may be absent.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return Modules()
    modules = convert(str(file), read_json(file), list[_Module])
    kinds = [module.type.rsplit(".", 1)[-1] for module in modules]
    for kind in kinds:
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize"):
            raise UserError(f"{file}: module {kind!r} is not supported")
    order = ("Transformer", "Pooling", "Dense", "Normalize")
    places = [order.index(kind) for kind in kinds]
    repeated = any(kinds.count(kind) > 1 for kind in kinds if kind != "Dense")
    if places != sorted(places) or repeated:
        raise UserError(
            f"{file}: the modules {', '.join(kinds)} are not supported in this order; expected "
            "Transformer, Pooling, Dense (any number), Normalize"
        )
    pooling, include_prompt, dense = None, True, []
    for kind, module in zip(kinds, modules, strict=True):
        if kind == "Pooling":
            pooling, include_prompt = _read_pooling(folder / module.path / "config.json")
        elif kind == "Dense":
            dense.append(_read_dense(folder, module.path, width))
            width = dense[-1].d_out
    return Modules(pooling or "mean", include_prompt, tuple(dense))


def _read_pooling(file: Path) -> tuple[Pooling, bool]:
    raw = read_object(file, optional=True)
    mode = raw.get("pooling_mode")
    modes = {str(kind) for kind in (mode if isinstance(mode, list) else [mode]) if kind}
    for key, value in raw.items():
        if key.startswith("pooling_mode_") and value is True:
            modes.add(_FLAGS.get(key, key))
    known = get_args(Pooling)
    if len(modes) != 1 or not modes <= {*known}:
        raise UserError(
            f"{file}: pooling {sorted(modes)} is not supported; expected {' or '.join(known)}"
        )
    (pooling,) = modes
    return pooling, ConfigFields(raw, str(file)).flag("include_prompt", True)  # pyright: ignore[reportReturnType]


def _read_dense(folder: Path, path: str, width: int) -> DenseConfig:
    file = folder / path / "config.json"
    fields = ConfigFields(read_object(file), str(file))
    name = fields.raw.get("activation_function", f"{_TORCH}Tanh")
    if name not in _ACTIVATIONS:
        raise fields.unsupported("activation_function", name, ", ".join(_ACTIVATIONS))
    if fields.flag("use_residual", False):
        raise fields.unsupported("use_residual", True, "false")
    for key in ("module_input_name", "module_output_name"):
        value = fields.raw.get(key)
        if value not in (None, "sentence_embedding"):
            raise fields.unsupported(key, value, "sentence_embedding")
    if (d_in := fields.count("in_features")) != width:
        raise fields.unsupported("in_features", d_in, f"{width}, the width of its input")
    return DenseConfig(
        d_in=d_in,
        d_out=fields.count("out_features"),
        bias=fields.flag("bias", True),
        activation=_ACTIVATIONS[name],
        folder=path,
    )


def dense_shapes(configs: Sequence[DenseConfig]) -> dict[str, tuple[int, ...]]:
    """Returns the name and the stored shape of each tensor, such as ``dense.0.weight``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index, config in enumerate(configs):
        shapes[f"dense.{index}.weight"] = (config.d_out, config.d_in)
        if config.bias:
            shapes[f"dense.{index}.bias"] = (config.d_out,)
    return shapes


def read_dense(folder: Path, configs: Sequence[DenseConfig]) -> dict[str, np.ndarray]:
    """Returns the tensors of `dense_shapes` in fp32."""
    tensors = {}
    expected = dense_shapes(configs)
    for index, config in enumerate(configs):
        with TensorFiles(folder / config.folder) as files:
            stored = dict(files.shapes)
            for part in ("weight", "bias")[: 1 + config.bias]:
                name, source = f"dense.{index}.{part}", f"linear.{part}"
                if stored.get(source) != expected[name]:
                    raise UserError(
                        f"{folder / config.folder}: tensor {source} has shape "
                        f"{stored.get(source)}, but config.json implies {expected[name]}"
                    )
                tensors[name] = files.read(source).astype(np.float32)
    return tensors


def write_modules(
    folder: Path,
    *,
    width: int,
    pooling: Pooling,
    include_prompt: bool,
    dense: Sequence[DenseConfig],
    tensors: Mapping[str, np.ndarray],
    first: str = "Transformer",
) -> None:
    """Writes ``modules.json`` and the subfolders of all modules.

    ``first`` is the kind of the first module, ``width`` is that of hidden states, and ``tensors``
    are those of `dense_shapes`.
    """
    kinds = [first, "Pooling", *["Dense"] * len(dense), "Normalize"]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    write_json(folder / "modules.json", modules)
    for path in paths[1:]:
        (folder / path).mkdir()
    flags = {flag: pooling == mode for flag, mode in _FLAGS.items()}
    widths = {"word_embedding_dimension": width, "include_prompt": include_prompt}
    write_json(folder / paths[1] / "config.json", widths | flags)
    names = {activation: name for name, activation in _ACTIVATIONS.items()}
    for index, (config, path) in enumerate(zip(dense, paths[2:], strict=False)):
        fields = {
            "in_features": config.d_in,
            "out_features": config.d_out,
            "bias": config.bias,
            "activation_function": names[config.activation],
        }
        write_json(folder / path / "config.json", fields)
        parts = ("weight", "bias")[: 1 + config.bias]
        own = {f"linear.{part}": tensors[f"dense.{index}.{part}"] for part in parts}
        save_tensors(own, folder / path / "model.safetensors")
    write_json(folder / paths[-1] / "config.json", {})


def dense_places(configs: Sequence[DenseConfig]) -> dict[str, tuple[tuple[Any, ...], bool]]:
    """Returns tensor name -> path of the parameter, and whether it is transposed."""
    places: dict[str, tuple[tuple[Any, ...], bool]] = {}
    for name in dense_shapes(configs):
        _, index, part = name.split(".")
        kernel = part == "weight"
        places[name] = ("dense", int(index), "kernel" if kernel else "bias"), kernel
    return places
