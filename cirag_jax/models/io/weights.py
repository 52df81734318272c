"""Converts encoder weights from and to safetensors, by one table of names for both directions."""

import dataclasses
import fnmatch
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models.encoder import RELATIVE_BUCKETS, Encoder, EncoderConfig
from cirag_jax.models.io.tensor_files import describe_mismatches, fetch, read_tensors

PREFIXES = ("bert.", "roberta.", "xlm-roberta.", "mpnet.", "model.")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint, and the parameter that it fills.

    Attributes:
      source: name in the checkpoint; ``{layer}`` stands for the layer index.
      target: parameter of `Encoder`, or of `Layer` where ``source`` contains ``{layer}``.
      shape: the checkpoint's shape in the letters D, F, V, P (positions), Y (token types), R
        (buckets of relative positions) and N (heads).
      transpose: whether to transpose a linear kernel, which torch stores as (out, in).
      part: index on axis ``part_axis`` that it fills (query, key or value of the fused kernel);
        None fills the whole parameter.
    """

    source: str
    target: str
    shape: str
    transpose: bool = False
    part: int | None = None
    part_axis: int = 0


def _layer_entries(query: str, key: str, value: str, out: str, norm: str) -> tuple[Entry, ...]:
    """Returns the entries of a layer, given the names of its attention's modules."""
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


BERT: tuple[Entry, ...] = (
    Entry("embeddings.word_embeddings.weight", "token_embedding", "VD"),
    Entry("embeddings.position_embeddings.weight", "position_embedding", "PD"),
    Entry("embeddings.token_type_embeddings.weight", "type_embedding", "YD"),
    Entry("embeddings.LayerNorm.weight", "embedding_norm_scale", "D"),
    Entry("embeddings.LayerNorm.bias", "embedding_norm_bias", "D"),
    *_layer_entries("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm"),
)

MPNET: tuple[Entry, ...] = (
    Entry("embeddings.word_embeddings.weight", "token_embedding", "VD"),
    Entry("embeddings.position_embeddings.weight", "position_embedding", "PD"),
    Entry("embeddings.LayerNorm.weight", "embedding_norm_scale", "D"),
    Entry("embeddings.LayerNorm.bias", "embedding_norm_bias", "D"),
    Entry("encoder.relative_attention_bias.weight", "relative_embedding", "RN"),
    *_layer_entries("attn.q", "attn.k", "attn.v", "attn.o", "LayerNorm"),
)

# RoBERTa and its relatives use BERT's names; only their positions differ.
FAMILIES: Mapping[str, tuple[Entry, ...]] = {
    "bert": BERT,
    "roberta": BERT,
    "xlm-roberta": BERT,
    "camembert": BERT,
    "mpnet": MPNET,
}

# Tensors that embedding models do not use: index buffers, pooler, and pre-training heads.
IGNORED = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.*", "cls.*", "lm_head.*")


@dataclasses.dataclass(frozen=True)
class _Place:
    """Destination of a checkpoint tensor: parameter path and index, and the expected shape."""

    path: tuple[Any, ...]
    index: tuple[Any, ...]
    shape: tuple[int, ...]
    transpose: bool


def _places(config: EncoderConfig, family: str) -> dict[str, _Place]:
    """Returns the place of each checkpoint name."""
    if family not in FAMILIES:
        raise UserError(
            f"model_type {family!r} has no weight mapping; known: {', '.join(sorted(FAMILIES))}."
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


def _strip_prefix(name: str) -> str:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _match(
    folder: Path, places: Mapping[str, _Place], ignored: Sequence[str]
) -> tuple[dict[str, np.ndarray], list[str], list[str]]:
    """Returns tensors by stripped name, unmapped names and doubly mapped names."""
    tensors: dict[str, np.ndarray] = {}
    unmapped, doubled = [], []
    for name, file, array in read_tensors(folder):
        short = _strip_prefix(name)
        if short not in places:
            if not any(fnmatch.fnmatchcase(short, pattern) for pattern in ignored):
                unmapped.append(name)
        elif short in tensors:
            doubled.append(name)
        elif array.shape != places[short].shape:
            raise UserError(
                f"{file}: tensor {name} has shape {array.shape}, but config.json implies "
                f"{places[short].shape}."
            )
        else:
            tensors[short] = array
    return tensors, unmapped, doubled


def load_state(
    folder: str | os.PathLike,
    config: EncoderConfig,
    family: str = "bert",
    *,
    mesh: jax.sharding.Mesh | None = None,
    ignored: Sequence[str] = IGNORED,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Loads the weights of ``folder`` in fp32 as a split `Encoder`, placed on ``mesh`` if given.

    Tensors whose names match a pattern in ``ignored`` are skipped.
    """
    folder = Path(folder)
    places = _places(config, family)
    tensors, unmapped, doubled = _match(folder, places, ignored)
    unfilled = [name for name in places if name not in tensors]
    problems = describe_mismatches(unmapped, doubled, unfilled)
    if problems:
        raise UserError(f"{folder}: tensors do not fit the encoder; {problems}.")
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
    """Returns a state with the given tensors in fp32; the inverse of `to_tensors`.

    ``state`` has parameters of the same shapes, which may be abstract, and is not changed. The new
    parameters are placed on ``mesh``, by default on the default device.
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
        array = host.pop(path)
        if mesh is None:
            value = jax.numpy.asarray(array)
        else:
            value = sharding.place(array, sharding.variable_sharding(variable, mesh))
        filled.append((path, variable.replace(value)))
    return nnx.from_flat_state(filled)


def passed_through(folder: str | os.PathLike) -> dict[str, np.ndarray]:
    """Returns the unused tensors that an export keeps: the pooler, by unprefixed name."""
    return {
        _strip_prefix(name): array
        for name, _, array in read_tensors(folder)
        if _strip_prefix(name).startswith("pooler.")
    }


def to_tensors(state: Any, config: EncoderConfig, family: str = "bert") -> dict[str, np.ndarray]:
    """Returns float32 arrays in the checkpoint's layout by name; the inverse of `load_state`."""
    host = {path: fetch(variable.get_value()) for path, variable in nnx.to_flat_state(state)}
    tensors = {}
    for name, place in _places(config, family).items():
        array = host[place.path][place.index]
        if place.transpose:
            array = array.reshape(place.shape[::-1]).T
        tensors[name] = np.ascontiguousarray(array.reshape(place.shape).astype(np.float32))
    return tensors
