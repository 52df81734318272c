"""Reads and writes encoder weights as safetensors; one mapping table serves both directions."""

import dataclasses
import fnmatch
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.models.encoder import (
    RELATIVE_BUCKETS,
    Encoder,
    embedding_parameters,
    layer_parameters,
)
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.io.modules import dense_places, dense_shapes, read_dense
from cirag_jax.models.io.tensor_files import TensorFiles, fetch, match_tensors, read_tensors

PREFIXES = (
    *("bert.", "roberta.", "xlm-roberta.", "mpnet.", "model."),
    *("nomic_bert.", "gte.", "new."),
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A mapping from a checkpoint tensor to a parameter.

    Attributes:
      source: name in the checkpoint; ``{layer}`` stands for the layer index.
      target: parameter of `Encoder`, or of `Layer` if ``source`` has ``{layer}``.
      shape: the shape in the checkpoint, as letters: D (width), F (feed-forward width), V
        (vocabulary), P (positions), Y (token types), R (buckets of relative positions), N (heads),
        Q (3 D), G (2 F), T (the tasks of `EncoderConfig.tasks`), K (rank of task adapters).
      transpose: whether the last two axes of the parameter are swapped; linear kernels are
        (out, in) in torch and (in, out) here.
      part: index on axis ``part_axis`` of the parameter if the tensor is only a part of it (query,
        key or value of the fused kernel; gate or factor of a gated layer), or a slice that reorders
        the parts; otherwise None.
      first: the first layer that has the tensor.
    """

    source: str
    target: str
    shape: str
    transpose: bool = False
    part: int | slice | None = None
    part_axis: int = 0
    first: int = 0


def _linear(source: str, target: str, shape: str, part: int | slice | None = None) -> list[Entry]:
    """Returns the entries of kernel and bias of a linear layer; ``shape`` is (out, in)."""
    return [
        Entry(f"{source}.weight", f"{target}_kernel", shape, True, part, 1),
        Entry(f"{source}.bias", f"{target}_bias", shape[0], part=part),
    ]


def _norm(source: str, target: str, first: int = 0) -> list[Entry]:
    """Returns the entries of scale and bias of a layer norm."""
    return [
        Entry(f"{source}.weight", f"{target}_scale", "D", first=first),
        Entry(f"{source}.bias", f"{target}_bias", "D", first=first),
    ]


def _layer_entries(
    base: str,
    qkv: Sequence[str],
    up: Sequence[str],
    *,
    out: str,
    down: str,
    norms: tuple[str, str],
    reverse: bool = False,
    first_norm: int = 0,
) -> tuple[Entry, ...]:
    """Returns the entries of a layer.

    Args:
      base: beginning of all names.
      qkv: the names of query, key and value, or the name of the fused layer.
      up: the name of the first feed-forward layer, or the names of gate and factor.
      out: the name of the output projection.
      down: the name of the second feed-forward layer.
      norms: the names of the norms of attention and feed-forward.
      reverse: whether a fused gated layer has the factor before the gate.
      first_norm: the first layer with a norm of attention.
    """
    entries: list[Entry] = []
    for index, name in enumerate(qkv):
        shape, part = ("DD", index) if len(qkv) > 1 else ("QD", None)
        entries += _linear(base + name, "qkv", shape, part)
    for index, name in enumerate(up):
        entries += _linear(base + name, "up", "FD", index if len(up) > 1 else None)
    if reverse:
        entries[-2:] = _linear(base + up[0], "up", "FD", slice(None, None, -1))
    entries += _linear(base + out, "out", "DD") + _linear(base + down, "down", "DF")
    entries += _norm(base + norms[0], "attention_norm", first_norm)
    entries += _norm(base + norms[1], "output_norm")
    return tuple(entries)


def _embeddings(norm: str = "embeddings.LayerNorm", *, positions: bool = False) -> list[Entry]:
    table = "embeddings.position_embeddings.weight"
    return [
        Entry("embeddings.word_embeddings.weight", "token_embedding", "VD"),
        *([Entry(table, "position_embedding", "PD")] if positions else []),
        Entry("embeddings.token_type_embeddings.weight", "type_embedding", "YD"),
        *_norm(norm, "embedding_norm"),
    ]


def _absolute(q: str, k: str, v: str, out: str, norm: str) -> tuple[Entry, ...]:
    """Returns the entries of a model with a position table; arguments are names in attention."""
    return (
        *_embeddings(positions=True),
        *_layer_entries(
            "encoder.layer.{layer}.",
            [f"attention.{name}" for name in (q, k, v)],
            ["intermediate.dense"],
            out=f"attention.{out}",
            down="output.dense",
            norms=(f"attention.{norm}", "output.LayerNorm"),
        ),
    )


def _rotary(up: Sequence[str], down: str) -> tuple[Entry, ...]:
    """Returns the entries of a post-norm rotary model, with the names in transformers."""
    return (
        *_embeddings(),
        *_layer_entries(
            "layers.{layer}.",
            [f"self_attn.{name}_proj" for name in "qkv"],
            up,
            out="self_attn.o_proj",
            down=down,
            norms=("post_attention_layernorm", "post_mlp_layernorm"),
        ),
    )


def _flash(attention: str, up: Sequence[str]) -> tuple[Entry, ...]:
    """Returns the entries of a post-norm rotary model, with the names in flash-attn."""
    return (
        *_embeddings("emb_ln"),
        *_layer_entries(
            "encoder.layers.{layer}.",
            [f"{attention}.Wqkv"],
            up,
            out=f"{attention}.out_proj",
            down="mlp.fc2",
            norms=("norm1", "norm2"),
        ),
    )


BERT = _absolute("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
MPNET = (
    Entry("encoder.relative_attention_bias.weight", "relative_embedding", "RN"),
    *_absolute("attn.q", "attn.k", "attn.v", "attn.o", "LayerNorm"),
)
MODERNBERT = (
    Entry("embeddings.tok_embeddings.weight", "token_embedding", "VD"),
    *_norm("embeddings.norm", "embedding_norm"),
    *_layer_entries(
        "layers.{layer}.",
        ["attn.Wqkv"],
        ["mlp.Wi"],
        out="attn.Wo",
        down="mlp.Wo",
        norms=("attn_norm", "mlp_norm"),
        first_norm=1,
    ),
    *_norm("final_norm", "final_norm"),
)
_GATED = _rotary(["mlp.gate_proj", "mlp.up_proj"], "mlp.down_proj")
NOMIC = (_GATED, _flash("attn", ["mlp.fc12", "mlp.fc11"]))
GTE = (
    _GATED,
    (
        *_embeddings(),
        *_layer_entries(
            "encoder.layer.{layer}.",
            ["attention.qkv_proj"],
            ["mlp.up_gate_proj"],
            out="attention.o_proj",
            down="mlp.down_proj",
            norms=("attn_ln", "mlp_ln"),
            reverse=True,
        ),
    ),
)


def _task_entries() -> Iterator[Entry]:
    """Yields the entries of the task adapters of jina-embeddings-v3, which all layouts share."""
    suffix = ".parametrizations.weight.0.lora_"
    for name, rows in (("word", "V"), ("token_type", "Y")):
        source, target = f"embeddings.{name}_embeddings{suffix}", f"{name.rpartition('_')[2]}_task_"
        target = target.replace("word", "token")
        yield Entry(f"{source}A", f"{target}a", f"T{rows}K")
        yield Entry(f"{source}B", f"{target}b", "TKD")
    for name, target, inputs, outputs in (
        ("mixer.Wqkv", "qkv", "D", "Q"),
        ("mixer.out_proj", "out", "D", "D"),
        ("mlp.fc1", "up", "D", "F"),
        ("mlp.fc2", "down", "F", "D"),
    ):
        source = f"encoder.layers.{{layer}}.{name}{suffix}"
        yield Entry(f"{source}A", f"{target}_task_a", f"TK{inputs}", True)
        yield Entry(f"{source}B", f"{target}_task_b", f"T{outputs}K", True)


JINA = (
    (*_rotary(["mlp.fc1"], "mlp.fc2"), *_task_entries()),
    (*_flash("mixer", ["mlp.fc1"]), *_task_entries()),
)

# Layouts of each family: first the names of modules in transformers, which low-rank adapters have,
# and last the names in published checkpoints, which exports have. transformers opens both. RoBERTa
# and XLM-RoBERTa have the names of BERT; only their positions are different.
FAMILIES: Mapping[str, tuple[tuple[Entry, ...], ...]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), (BERT,)),
    "mpnet": (MPNET,),
    "modernbert": (MODERNBERT,),
    "nomic_bert": NOMIC,
    "gte": GTE,
    "jina_embeddings_v3": JINA,
}

# Tensors that embeddings do not need: index buffers, next-sentence pooler, pre-training heads.
IGNORED = (
    *("embeddings.position_ids", "embeddings.token_type_ids", "pooler.*", "cls.*", "lm_head.*"),
    *("head.*", "decoder.*", "*rotary_emb.inv_freq"),
)
# Tensors of task adapters, which a model without tasks does not use.
_TASK_TENSORS = "*.parametrizations.weight.0.lora_[AB]"


@dataclasses.dataclass(frozen=True)
class _Place:
    """Destination of a checkpoint tensor: path and part of the parameter, and expected shape."""

    path: tuple[Any, ...]
    index: tuple[Any, ...]
    shape: tuple[int, ...]
    transpose: bool


def _places(config: EncoderConfig, family: str, layout: int = 0) -> dict[str, _Place]:
    """Returns checkpoint name -> destination for every tensor of ``config``."""
    sizes = {
        "D": config.d_model,
        "F": config.d_ff,
        "V": config.vocab_size,
        "P": config.max_positions,
        "Y": config.type_vocab_size,
        "R": RELATIVE_BUCKETS,
        "N": config.num_heads,
        "Q": 3 * config.d_model,
        "G": 2 * config.d_ff,
        "T": len(config.tasks),
        "K": config.task_rank,
    }
    outer, inner = embedding_parameters(config), layer_parameters(config)
    places = {}
    for entry in FAMILIES[family][layout]:
        in_layer = "{layer}" in entry.source
        if entry.target not in (inner if in_layer else outer):
            continue
        letters = entry.shape
        if config.gated and entry.target.startswith("up_") and not isinstance(entry.part, int):
            letters = letters.replace("F", "G")
        shape = tuple(sizes[letter] for letter in letters)
        index: tuple[Any, ...] = ()
        if entry.part is not None:
            index = (slice(None),) * entry.part_axis + (entry.part,)
        if not in_layer:
            places[entry.source] = _Place((entry.target,), index, shape, entry.transpose)
            continue
        for layer in range(0 if config.first_norm else entry.first, config.num_layers):
            name = entry.source.format(layer=layer)
            if config.scan_layers:
                place = _Place(("layers", entry.target), (layer, *index), shape, entry.transpose)
            else:
                place = _Place(("layers", layer, entry.target), index, shape, entry.transpose)
            places[name] = place
    for name, (path, transpose) in dense_places(config.dense).items():
        places[name] = _Place(path, (), dense_shapes(config.dense)[name], transpose)
    return places


def strip_prefix(name: str) -> str:
    """Removes the model's prefix (`PREFIXES`) from a tensor name.

    Weights with task adapters (of torch's parametrizations) get the name of other weights.
    """
    name = name.replace(".parametrizations.weight.original", ".weight")
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def any_layer(name: str) -> str:
    """Replaces the number of the layer in a tensor's name by ``{layer}``."""
    return re.sub(r"\.\d+\.", ".{layer}.", name, count=1)


def linear_tensors() -> set[str]:
    """Returns the kernels of layers in all families, as named in transformers; see `any_layer`."""
    entries = (entry for layouts in FAMILIES.values() for entry in layouts[0])
    return {entry.source for entry in entries if entry.target.endswith("_kernel")}


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
    dense = read_dense(Path(folder), config.dense)
    layouts = [_places(config, family, layout) for layout in range(len(FAMILIES[family]))]
    with TensorFiles(folder) as files:
        present = {strip_prefix(name) for name, _ in files.shapes}
        places = max(layouts, key=lambda places: len(present & places.keys()))
        expected = {n: place.shape for n, place in places.items() if n not in dense}
        of_tasks = {name for name in expected if fnmatch.fnmatchcase(name, _TASK_TENSORS)}
        for name in of_tasks:
            expected[name] = (config.num_tasks, *expected[name][1:])
        ignored = ignored if config.tasks else (*ignored, _TASK_TENSORS)
        names = match_tensors(folder, files.shapes, expected, strip_prefix, ignored)
        tensors = {key: files.read(name) for key, name in names.items()}
        tensors |= {name: tensors[name][list(config.tasks)] for name in of_tasks}
    abstract = nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    return graphdef, _fill(tensors | dense, state, places, mesh)


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
    return _fill(tensors, state, _places(config, family, 0), mesh)


def _fill(tensors, state, places: Mapping[str, _Place], mesh) -> nnx.State:
    variables = dict(nnx.to_flat_state(state))
    # The first layer may lack a norm that others have.
    host = {path: np.ones(v.shape, np.float32) for path, v in variables.items()}
    for name, place in places.items():
        target = host[place.path][place.index]
        array = tensors[name]
        array = array.swapaxes(-1, -2) if place.transpose else array
        host[place.path][place.index] = array.reshape(target.shape)
    filled = []
    for path, variable in variables.items():
        filled.append((path, sharding.place_variable(variable, host.pop(path), mesh)))
    return nnx.from_flat_state(filled)


def pooler_tensors(folder: str | os.PathLike) -> dict[str, np.ndarray]:
    """Returns the pooler's tensors, which embeddings do not use but exports preserve."""
    stripped = ((strip_prefix(name), array) for name, _, array in read_tensors(folder))
    return {name: array for name, array in stripped if name.startswith("pooler.")}


def to_tensors(
    state: Any, config: EncoderConfig, family: str = "bert", *, published: bool = False
) -> dict[str, np.ndarray]:
    """Returns checkpoint name -> fp32 array in the checkpoint's layout; inverts `load_state`.

    Names are those of modules in transformers, or those in ``published`` checkpoints.
    """
    host = {path: fetch(variable.get_value()) for path, variable in nnx.to_flat_state(state)}
    tensors = {}
    for name, place in _places(config, family, -1 if published else 0).items():
        array = host[place.path][place.index]
        if place.transpose:
            *outer, rows, columns = place.shape
            array = array.reshape(*outer, columns, rows).swapaxes(-1, -2)
        tensors[name] = np.ascontiguousarray(array.reshape(place.shape).astype(np.float32))
    return tensors


def merge_tasks(
    state: Any, config: EncoderConfig, *, passage: bool
) -> tuple[nnx.State, EncoderConfig]:
    """Returns an encoder whose weights contain the task adapter of queries or of passages."""
    if not config.tasks:
        return state, config
    task = len(config.tasks) - 1 if passage else 0
    host = {path: fetch(variable.get_value()) for path, variable in nnx.to_flat_state(state)}
    merged = []
    for path, variable in nnx.to_flat_state(state):
        *outer, name = path
        target, _, kind = str(name).rpartition("_")
        if "_task_" in str(name):
            continue
        array = host[path]
        if kind in ("kernel", "embedding") and (*outer, f"{target}_task_a") in host:
            a, b = (host[(*outer, f"{target}_task_{side}")] for side in "ab")
            stacked = config.scan_layers and "layers" in path
            a, b = (x[:, task] if stacked else x[task] for x in (a, b))
            rank = config.task_rank
            a, b = (
                (a.reshape(len(a), -1, rank), b.reshape(len(b), rank, -1))
                if stacked
                else (a.reshape(-1, rank), b.reshape(rank, -1))
            )
            array = array + (config.task_scale * (a @ b)).reshape(array.shape)
        merged.append((path, variable.replace(jnp.asarray(array, jnp.float32))))
    return nnx.from_flat_state(merged), dataclasses.replace(config, tasks=())
