"""Reads and writes encoder weights as safetensors; one mapping table serves both directions."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models.encoder import RELATIVE_BUCKETS, Encoder, EncoderConfig
from cirag_jax.models.io.tensor_files import TensorFiles, fetch, match_tensors, read_tensors

PREFIXES = ("bert.", "roberta.", "xlm-roberta.", "mpnet.", "model.")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A mapping from a checkpoint tensor to a parameter.

    Attributes:
      source: name in the checkpoint; ``{layer}`` stands for the layer index.
      target: parameter of `Encoder`, or of `Layer` if ``source`` has ``{layer}``.
      shape: the shape in the checkpoint, as letters: D (width), F (feed-forward width), V
        (vocabulary), P (positions), Y (token types), R (buckets of relative positions), N (heads).
      transpose: whether the parameter is the transpose; linear kernels are (out, in) in torch and
        (in, out) here.
      part: index on axis ``part_axis`` of the parameter if the tensor is only a part of it (query,
        key or value of the fused kernel); otherwise None.
    """

    source: str
    target: str
    shape: str
    transpose: bool = False
    part: int | None = None
    part_axis: int = 0


def _layer_entries(query: str, key: str, value: str, out: str, norm: str) -> tuple[Entry, ...]:
    """Returns the entries of a layer; the arguments are the names of attention tensors."""
    base = "encoder.layer.{layer}."
    entries = []
    for part, name in enumerate((query, key, value)):
        source = f"{base}attention.{name}"
        entries.append(Entry(f"{source}.weight", "qkv_kernel", "DD", True, part, 1))
        entries.append(Entry(f"{source}.bias", "qkv_bias", "D", part=part))
    for source, target, shape in (
        (f"attention.{out}", "out", "DD"),
        ("intermediate.dense", "up", "FD"),
        ("output.dense", "down", "DF"),
    ):
        entries.append(Entry(f"{base}{source}.weight", f"{target}_kernel", shape, True))
        entries.append(Entry(f"{base}{source}.bias", f"{target}_bias", shape[0]))
    for source, target in (
        (f"attention.{norm}", "attention_norm"),
        ("output.LayerNorm", "output_norm"),
    ):
        entries.append(Entry(f"{base}{source}.weight", f"{target}_scale", "D"))
        entries.append(Entry(f"{base}{source}.bias", f"{target}_bias", "D"))
    return tuple(entries)


_EMBEDDINGS = (
    Entry("embeddings.word_embeddings.weight", "token_embedding", "VD"),
    Entry("embeddings.position_embeddings.weight", "position_embedding", "PD"),
    Entry("embeddings.LayerNorm.weight", "embedding_norm_scale", "D"),
    Entry("embeddings.LayerNorm.bias", "embedding_norm_bias", "D"),
)
BERT: tuple[Entry, ...] = (
    *_EMBEDDINGS,
    Entry("embeddings.token_type_embeddings.weight", "type_embedding", "YD"),
    *_layer_entries("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm"),
)
MPNET: tuple[Entry, ...] = (
    *_EMBEDDINGS,
    Entry("encoder.relative_attention_bias.weight", "relative_embedding", "RN"),
    *_layer_entries("attn.q", "attn.k", "attn.v", "attn.o", "LayerNorm"),
)

# RoBERTa and XLM-RoBERTa have the tensor names of BERT; only their positions are different.
FAMILIES: Mapping[str, tuple[Entry, ...]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), BERT),
    "mpnet": MPNET,
}

# Tensors that embeddings do not need: index buffers, next-sentence pooler, pre-training heads.
IGNORED = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.*", "cls.*", "lm_head.*")


@dataclasses.dataclass(frozen=True)
class _Place:
    """Destination of a checkpoint tensor: path and part of the parameter, and expected shape."""

    path: tuple[Any, ...]
    index: tuple[Any, ...]
    shape: tuple[int, ...]
    transpose: bool


def _places(config: EncoderConfig, family: str) -> dict[str, _Place]:
    """Returns checkpoint name -> destination for every tensor of ``config``."""
    if family not in FAMILIES:
        raise UserError(
            f"model_type {family!r} is not supported; choose from {', '.join(sorted(FAMILIES))}"
        )
    sizes = {
        "D": config.d_model,
        "F": config.d_ff,
        "V": config.vocab_size,
        "P": config.max_positions,
        "Y": config.type_vocab_size,
        "R": RELATIVE_BUCKETS,
        "N": config.num_heads,
    }
    places = {}
    for entry in FAMILIES[family]:
        shape = tuple(sizes[letter] for letter in entry.shape)
        index: tuple[Any, ...] = ()
        if entry.part is not None:
            index = (slice(None),) * entry.part_axis + (entry.part,)
        if "{layer}" not in entry.source:
            places[entry.source] = _Place((entry.target,), index, shape, entry.transpose)
            continue
        for layer in range(config.num_layers):
            name = entry.source.format(layer=layer)
            if config.scan_layers:
                place = _Place(("layers", entry.target), (layer, *index), shape, entry.transpose)
            else:
                place = _Place(("layers", layer, entry.target), index, shape, entry.transpose)
            places[name] = place
    return places


def strip_prefix(name: str) -> str:
    """Removes the model's prefix (`PREFIXES`) from a tensor name."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def load_state(
    folder: str | os.PathLike,
    config: EncoderConfig,
    family: str = "bert",
    *,
    mesh: jax.sharding.Mesh | None = None,
    ignored: Sequence[str] = IGNORED,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns a split `Encoder` with the fp32 weights of ``folder``, placed on ``mesh`` if given.

    ``ignored`` are patterns of tensor names to skip.
    """
    expected = {name: place.shape for name, place in _places(config, family).items()}
    with TensorFiles(folder) as files:
        names = match_tensors(folder, files.shapes, expected, strip_prefix, ignored)
        tensors = {key: files.read(name) for key, name in names.items()}
    abstract = nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    return graphdef, from_tensors(tensors, state, config, family, mesh=mesh)


def from_tensors(
    tensors: Mapping[str, np.ndarray],
    state: Any,
    config: EncoderConfig,
    family: str = "bert",
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> nnx.State:
    """Returns fp32 parameters from checkpoint tensors, the inverse of `to_tensors`.

    ``state`` gives the structure; its parameters may be abstract and are not changed. The new
    parameters are on ``mesh`` or the default device.
    """
    variables = dict(nnx.to_flat_state(state))
    host = {path: np.empty(v.shape, np.float32) for path, v in variables.items()}
    for name, place in _places(config, family).items():
        target = host[place.path][place.index]
        array = tensors[name]
        array = array.T if place.transpose else array
        host[place.path][place.index] = array.reshape(target.shape)
    filled = []
    for path, variable in variables.items():
        filled.append((path, sharding.place_variable(variable, host.pop(path), mesh)))
    return nnx.from_flat_state(filled)


def pooler_tensors(folder: str | os.PathLike) -> dict[str, np.ndarray]:
    """Returns the pooler's tensors, which embeddings do not use but exports preserve."""
    stripped = ((strip_prefix(name), array) for name, _, array in read_tensors(folder))
    return {name: array for name, array in stripped if name.startswith("pooler.")}


def to_tensors(state: Any, config: EncoderConfig, family: str = "bert") -> dict[str, np.ndarray]:
    """Returns checkpoint name -> fp32 array in the checkpoint's layout; inverts `load_state`."""
    host = {path: fetch(variable.get_value()) for path, variable in nnx.to_flat_state(state)}
    tensors = {}
    for name, place in _places(config, family).items():
        array = host[place.path][place.index]
        if place.transpose:
            array = array.reshape(place.shape[::-1]).T
        tensors[name] = np.ascontiguousarray(array.reshape(place.shape).astype(np.float32))
    return tensors
