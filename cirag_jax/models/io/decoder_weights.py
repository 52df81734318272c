"""Reads and writes decoder weights as safetensors, with the names of `decoder_families`.

To save memory, stacked parameters are loaded one by one. Each is assembled on the host from the
slices that this process needs, placed on the devices, and freed on the host.
"""

import dataclasses
import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.io import replacing, write_json
from cirag_jax.models import decoder_params, nf4
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_params import Params
from cirag_jax.models.io.decoder_families import (
    FAMILIES,
    IGNORED,
    ParameterTensors,
    parameter_tensors,
)
from cirag_jax.models.io.tensor_files import TensorFiles, fetch, match_tensors, save_tensors
from cirag_jax.models.nf4 import Nf4
from cirag_jax.sharding import ShapesAndAxes

_ROWS = 4096  # rows of an embedding that are compared at a time
_SHARD_BYTES = 5 * 10**9  # larger checkpoints are split into several files with an index


class TensorSource(Protocol):
    """Named tensors that can be read in slices."""

    @property
    def shapes(self) -> Sequence[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the slice ``index`` of a tensor."""
        ...


def _canonical(name: str) -> str:
    """Adds the prefix ``model.``, which some checkpoints lack.

    Also removes the prefix of the text part of models with images, and of NV-Embed-v2.
    """
    for prefix in ("language_model.", "model.language_model.", "embedding_model."):
        name = name.removeprefix(prefix)
    if name.startswith("model.") or name == "lm_head.weight":
        return name
    return f"model.{name}"


def _assign(target: np.ndarray, value: np.ndarray) -> None:
    """Sets ``target[...] = value``; copies 16-bit floats as integers, which is faster in NumPy."""
    if target.dtype == value.dtype and target.dtype.itemsize == 2:
        target, value = target.view(np.uint16), value.view(np.uint16)
    target[...] = value


def _assembler(
    source: TensorSource,
    parameter: ParameterTensors,
    names: Sequence[str],
    shape: Sequence[int],
    dtype: np.dtype,
) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    """Returns the callback of `jax.make_array_from_callback` for ``parameter``.

    A shard that several devices share is read once.
    """
    blocks: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
    leading = len(shape) - len(parameter.shape)  # axes over layers and experts
    named = np.asarray(names, object).reshape(shape[:leading])

    def assemble(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * len(shape)
        bounds = [slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=True)]
        key = tuple((s.start, s.stop) for s in bounds)
        if key in blocks:
            return blocks[key]
        block = np.empty([s.stop - s.start for s in bounds], dtype)
        inner = tuple(bounds[leading:][::-1] if parameter.transpose else bounds[leading:])
        for row, name in np.ndenumerate(named[tuple(bounds[:leading])]):
            tensor = source.read(name, inner)
            _assign(block[row], tensor.T if parameter.transpose else tensor)
        blocks[key] = block
        return block

    return assemble


class _SeparateExperts:
    """A source of separate tensors for each expert, from tensors ``[E, out, in]`` of all experts.

    transformers 5 can store the experts of a layer as ``mlp.experts.gate_up_proj`` and
    ``mlp.experts.down_proj``, in all families; GGUF files have one tensor for each of gate, up and
    down.
    """

    _NAME = re.compile(r".*\b(\d+)\.(?:mlp|block_sparse_moe)\.(gate|experts\.\w+)(?:\.weight)?")
    _PARTS: Mapping[str, tuple[str, ...]] = {
        "gate": ("router",),
        "experts.gate_up_proj": ("expert_gate", "expert_up"),
        **dict.fromkeys(("experts.gate_proj", "experts.w1"), ("expert_gate",)),
        **dict.fromkeys(("experts.up_proj", "experts.w3"), ("expert_up",)),
        **dict.fromkeys(("experts.down_proj", "experts.w2"), ("expert_down",)),
    }

    def __init__(self, source: TensorSource, model_type: str):
        self._source = source
        self._places: dict[str, tuple[str, int | None, int]] = {}
        self.shapes: list[tuple[str, tuple[int, ...]]] = []
        names = {entry.target: entry.source for entry in FAMILIES[model_type]}
        for name, shape in source.shapes:
            match = self._NAME.fullmatch(name)
            parts = self._PARTS.get(match[2], ()) if match else ()
            if match is None or len(shape) != 3 - (parts == ("router",)) or shape[-2] % len(parts):
                self.shapes.append((name, shape))
                continue
            rows = shape[-2] // len(parts)
            for expert in range(shape[0]) if len(shape) == 3 else (None,):
                for i, part in enumerate(parts):
                    separate = names[part].format(layer=match[1], expert=expert)
                    self.shapes.append((separate, (rows, shape[-1])))
                    self._places[separate] = name, expert, i * rows

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the slice ``index``, which has no steps, of a tensor."""
        stored, expert, start = self._places.get(name, (name, None, 0))
        if expert is None:
            return self._source.read(stored, index)
        rows = slice(start + index[0].start, start + index[0].stop)
        return self._source.read(stored, (slice(expert, expert + 1), rows, index[1]))[0]


class _SeparateRows:
    """A source of separate tensors, from tensors that contain the rows of several parameters."""

    def __init__(self, source: TensorSource, parameters: Sequence[ParameterTensors]):
        self._source = source
        stored = {_canonical(name): (name, shape) for name, shape in source.shapes}
        self._places: dict[str, tuple[str, int]] = {}
        ends: dict[str, int] = {}
        parts: list[tuple[str, tuple[int, ...]]] = []
        for parameter in parameters:
            for name, fused in zip(parameter.names, parameter.fused, strict=False):
                if fused in stored:
                    self._places[name] = stored[fused][0], ends.get(fused, 0)
                    ends[fused] = ends.get(fused, 0) + parameter.shape[0]
                    parts.append((name, (parameter.shape[0], *stored[fused][1][1:])))
        # A tensor with another number of rows is not split, so that it is reported.
        split = {stored[fused][0] for fused, end in ends.items() if stored[fused][1][0] == end}
        self.shapes = [(name, shape) for name, shape in source.shapes if name not in split]
        self.shapes += [(name, shape) for name, shape in parts if self._places[name][0] in split]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the slice ``index``, which has no steps, of a tensor."""
        if name not in self._places:
            return self._source.read(name, index)
        stored, start = self._places[name]
        rows = slice(start + index[0].start, start + index[0].stop)
        return self._source.read(stored, (rows, *index[1:]))


def has_own_head(source: TensorSource) -> bool:
    """Returns whether a checkpoint has an output layer that differs from its embedding.

    Reads both in blocks of rows, up to the first difference.
    """
    shapes = {_canonical(name): (name, shape) for name, shape in source.shapes}
    if "lm_head.weight" not in shapes or "model.embed_tokens.weight" not in shapes:
        return False
    (head, shape), (embedding, other) = (
        shapes[name] for name in ("lm_head.weight", "model.embed_tokens.weight")
    )
    if shape != other:
        return True
    for start in range(0, shape[0], _ROWS):
        rows = (slice(start, min(start + _ROWS, shape[0])), *map(slice, shape[1:]))
        if not np.array_equal(source.read(head, rows), source.read(embedding, rows)):
            return True
    return False


def load_from_source(
    source: TensorSource,
    where: str | os.PathLike,
    config: DecoderConfig,
    model_type: str,
    mesh: jax.sharding.Mesh | None = None,
    more: ShapesAndAxes | None = None,
) -> nnx.State:
    """Returns the decoder state that ``source`` contains; see `load_decoder_state`.

    ``more`` are further parameters, see `parameter_tensors`.
    """
    tensors = parameter_tensors(config, model_type, more)
    by_path = {parameter.path: parameter for parameter in tensors}
    source = _SeparateExperts(source, model_type) if config.num_experts else source
    if any(parameter.fused for parameter in tensors):
        source = _SeparateRows(source, tensors)
    expected = {name: parameter.shape for parameter in by_path.values() for name in parameter.names}
    names = match_tensors(where, source.shapes, expected, _canonical, IGNORED)
    dtype = np.dtype(jax.numpy.dtype(config.param_dtype))
    filled = []
    like = dict(nnx.to_flat_state(decoder_params.abstract_params(config, more)))
    dense = dataclasses.replace(config, quantization=None)
    for path, variable in nnx.to_flat_state(decoder_params.abstract_params(dense, more)):
        parameter = by_path[tuple(str(part) for part in path)]
        target: jax.sharding.Sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        if mesh is not None:
            target = sharding.variable_sharding(variable, mesh)
        stored_names = [names[name] for name in parameter.names]
        assemble = _assembler(source, parameter, stored_names, variable.shape, dtype)
        value = jax.make_array_from_callback(variable.shape, target, assemble)
        # Dispatch is asynchronous, so without waiting several host copies would exist at a time.
        jax.block_until_ready(value)
        if path in like:
            filled.append((path, variable.replace(value)))
        else:
            kernel = {(*path, name): like[*path, name] for name in Nf4._fields}
            filled.extend(_quantize(value, kernel, mesh))
        # JAX frees a copied host array at Python's next garbage collection; see jax issue 14882.
        del assemble
        gc.collect(0)
    return nnx.from_flat_state(filled)


def _quantize(
    kernel: jax.Array, like: Mapping[Any, nnx.Variable], mesh: jax.sharding.Mesh | None
) -> list[tuple[Any, nnx.Variable]]:
    """Returns the variables ``like`` of a kernel in 4 bits; frees the kernel."""
    targets = None
    if mesh is not None:
        targets = Nf4(*(sharding.variable_sharding(each, mesh) for each in like.values()))
    packed = jax.block_until_ready(jax.jit(nf4.quantize, out_shardings=targets)(kernel))
    kernel.delete()
    return [(path, each.replace(x)) for (path, each), x in zip(like.items(), packed, strict=True)]


def load_decoder_state(
    folder: str | os.PathLike,
    config: DecoderConfig,
    model_type: str,
    mesh: jax.sharding.Mesh | None = None,
) -> nnx.State:
    """Loads the state of `decoder_params.Decoder` from a checkpoint, in ``config.param_dtype``.

    Parameters are sharded over ``mesh`` according to their logical axes; without a mesh they are on
    the first device. Each process reads only the slices for its devices.
    """
    with TensorFiles(folder) as files:
        return load_from_source(files, folder, config, model_type, mesh)


def decoder_tensors(
    params: Params, config: DecoderConfig, model_type: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, host array in the checkpoint's layout), the inverse of `load_decoder_state`.

    Fetches one tensor at a time, in the dtype of ``params``, whose layers may be stacked or
    unstacked. With several processes, all must iterate.
    """
    parameters = parameter_tensors(config, model_type)
    for parameter in parameters:
        members = [other for other in parameters if other.fused == parameter.fused]
        if parameter.fused and parameter is not members[0]:
            continue  # it was a part of an earlier tensor
        names = iter(parameter.fused or parameter.names)
        for row in range(len(parameter.layers) or 1):
            parts = [_host_tensor(params, part, row) for part in members if parameter.fused]
            host = np.concatenate(parts) if parts else _host_tensor(params, parameter, row)
            for tensor in host if parameter.experts else (host,):
                yield next(names), np.ascontiguousarray(tensor)


def _host_tensor(params: Params, parameter: ParameterTensors, row: int) -> np.ndarray:
    """Returns a parameter in the checkpoint's layout, of its ``row``-th layer if it has layers."""
    name = parameter.path[-1]
    if not parameter.stacked:
        array = params[name]
    elif isinstance(params["layers"], tuple):
        array = params["layers"][parameter.layers[row]][name]
    else:
        array = params["layers"][name][row]
    host = fetch(array)
    return host.swapaxes(-1, -2) if parameter.transpose else host


def _write_shards(tensors: Iterator[tuple[str, np.ndarray]], folder: Path, dtype: np.dtype) -> None:
    """Writes ``model.safetensors``, or shards of at most `_SHARD_BYTES` and their index."""
    shard: dict[str, np.ndarray] = {}
    shard_size = total = 0
    shards: list[list[str]] = []

    def flush() -> None:
        nonlocal shard, shard_size
        shards.append(list(shard))
        if jax.process_index() == 0:
            save_tensors(shard, folder / f"part-{len(shards)}.safetensors")
        shard, shard_size = {}, 0

    for name, array in tensors:
        array = array.astype(dtype, copy=False)
        if shard and shard_size + array.nbytes > _SHARD_BYTES:
            flush()
        shard[name] = array
        shard_size, total = shard_size + array.nbytes, total + array.nbytes
    flush()
    if jax.process_index() != 0:
        return
    if len(shards) == 1:
        (folder / "part-1.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(shards, 1):
        final = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{i}.safetensors").rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def write_checkpoint(
    folder: str | os.PathLike,
    params: Params,
    config: DecoderConfig,
    hf_config: Mapping[str, Any],
    companions: Callable[[Path], None],
) -> None:
    """Writes a model folder for transformers, atomically.

    Tensors have the dtype of ``params``. ``hf_config`` is written as ``config.json`` with that
    dtype; it must contain ``model_type``. ``companions`` is called with the unfinished folder to
    add tokenizer files.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty; choose a new folder for the model")
    name = str(params["embedding"].dtype)
    tensors = decoder_tensors(params, config, str(hf_config["model_type"]))
    np_dtype = np.dtype(jax.numpy.dtype(name))
    if jax.process_index() != 0:
        _write_shards(tensors, folder, np_dtype)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as aside:
        aside.mkdir()
        _write_shards(tensors, aside, np_dtype)
        write_json(aside / "config.json", dict(sorted({**hf_config, "dtype": name}.items())))
        companions(aside)
