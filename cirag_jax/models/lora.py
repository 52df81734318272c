"""Low-rank adapters (LoRA, Hu et al., 2022) for the decoder's linear layers.

The adapter's state is separate from the frozen base. `init_adapter` returns the `nnx.State` that is
trained, checkpointed and sharded. `to_adapter` converts it to the plain dictionary that
`decoder.forward` accepts. `models.io.peft_format` reads and writes PEFT's format.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models import decoder_params
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import Adapter, LoraOptions
from cirag_jax.models.decoder_params import FUSED, PROJECTIONS, Params

ALL_LINEAR = "all-linear"
TARGETS = (*PROJECTIONS, *FUSED)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Hyper-parameters of an adapter; hashable, so usable as a static argument.

    Attributes:
      rank: inner dimension R.
      alpha: the adapter's output is multiplied by ``alpha / rank``.
      dropout: probability of dropping an element of the adapter's input in training.
      targets: the linear layers to adapt, by their names in transformers (``q_proj`` ...
        ``down_proj``; in Phi-3 ``qkv_proj`` and ``gate_up_proj``). ``"all-linear"`` stands for all
        `supported_targets` of the model.
      rank_stabilised: whether to scale by ``alpha / sqrt(rank)`` instead (Kalajdzievski, 2023).
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    rank_stabilised: bool = False

    def __post_init__(self):
        targets = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        object.__setattr__(self, "targets", targets)
        if self.rank < 1:
            raise UserError(f"LoRA rank is {self.rank}; it must be at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"LoRA dropout is {self.dropout}; it must be in [0, 1)")
        unknown = [name for name in self.targets if name not in (*TARGETS, ALL_LINEAR)]
        if unknown or not self.targets:
            raise UserError(
                f"LoRA targets must be linear layers of the decoder, not "
                f"{', '.join(unknown) or 'empty'}; known: {', '.join(TARGETS)} and {ALL_LINEAR}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The adapted layers, in the order of `TARGETS`."""
        if ALL_LINEAR in self.targets:
            return PROJECTIONS
        return tuple(name for name in TARGETS if name in self.targets)

    def for_model(self, config: DecoderConfig) -> "LoraConfig":
        """Returns this configuration with the targets that the model supports."""
        known = supported_targets(config)
        if ALL_LINEAR in self.targets:
            return dataclasses.replace(self, targets=known)
        absent = [name for name in self.names if name not in known]
        if absent:
            reason = "are not linear layers of the model"
            if config.num_experts:
                reason = (
                    "are feed-forward layers of a mixture of experts, which cannot have adapters"
                )
            raise UserError(
                f"LoRA targets {', '.join(absent)} {reason}; choose from {', '.join(known)}"
            )
        return dataclasses.replace(self, targets=self.names)

    @property
    def scale(self) -> float:
        """Factor on the adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


def supported_targets(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the linear layers that can have adapters: all layers of a model have them."""
    if config.fused:  # as in the checkpoint, so that PEFT can load the adapter
        parts = [part for parts in FUSED.values() for part in parts]
        return tuple(name for name in TARGETS if name not in parts)
    return PROJECTIONS[:4] if config.num_experts else PROJECTIONS


class _Pair(nnx.Module):
    """The two factors of one adapted parameter: ``a`` [L, in, R] and ``b`` [L, R, out].

    As in PEFT, ``a`` is initially uniform in +-1/sqrt(in) and ``b`` is zero.
    """

    def __init__(
        self,
        num_layers: int,
        rank: int,
        shape: tuple[int, ...],
        axes: Sequence[str | None],
        key: Any,
    ):
        bound = 1.0 / math.sqrt(shape[0])
        a = jax.random.uniform(
            key, (num_layers, shape[0], rank), jnp.float32, minval=-bound, maxval=bound
        )
        self.a = nnx.LoRAParam(a, logical_axes=("layers", axes[0], "lora_rank"))
        b = jnp.zeros((num_layers, rank, shape[1]), jnp.float32)
        self.b = nnx.LoRAParam(b, logical_axes=("layers", "lora_rank", axes[1]))


class _Pairs(nnx.Module):
    """The factors of all adapted linear layers, by name."""

    def __init__(self, config: DecoderConfig, lora: LoraConfig, rngs: nnx.Rngs):
        for name in lora.for_model(config).names:
            shape, axes = decoder_params.target_parameter(config, name)
            axes = tuple("lora_embed" if axis == "embed" else axis for axis in axes)
            setattr(self, name, _Pair(config.num_layers, lora.rank, shape, axes, rngs.params()))


class Lora(nnx.Module):
    """fp32 parameters of an adapter, stacked over layers: ``layers.<name>.a`` and ``.b``.

    A new adapter does not change the model's output, because ``b`` is zero.
    """

    def __init__(self, config: DecoderConfig, lora: LoraConfig, *, rngs: nnx.Rngs):
        self.layers = _Pairs(config, lora, rngs)


def abstract_adapter(config: DecoderConfig, lora: LoraConfig) -> nnx.State:
    """Returns the `nnx.State` of `Lora` with shapes and dtypes in place of arrays."""
    return nnx.state(nnx.eval_shape(lambda: Lora(config, lora, rngs=nnx.Rngs(0))))


def init_adapter(
    config: DecoderConfig, lora: LoraConfig, seed: int = 0, *, mesh: jax.sharding.Mesh | None = None
) -> nnx.State:
    """Returns a new adapter as an `nnx.State` of `nnx.LoRAParam`, on ``mesh`` if given."""

    def build() -> nnx.State:
        return nnx.state(Lora(config, lora, rngs=nnx.Rngs(seed)))

    if mesh is None:
        return jax.jit(build)()
    shardings = sharding.state_sharding(abstract_adapter(config, lora), mesh)
    return jax.jit(build, out_shardings=shardings)()


def to_adapter(state: nnx.State) -> Adapter:
    """Returns ``{"layers": {name: {"a": ..., "b": ...}}}``, as `decoder.forward` expects."""
    return nnx.to_pure_dict(state)


def lora_options(lora: LoraConfig, train: bool) -> LoraOptions:
    """Returns the adapter's options for `decoder.forward`, with dropout only in training."""
    return LoraOptions(scale=lora.scale, dropout=lora.dropout if train else 0.0)


@functools.partial(jax.jit, static_argnums=2)
def _merge_kernel(kernel: jax.Array, pair: Mapping[str, jax.Array], scale: float) -> jax.Array:
    a, b = (pair[name].astype(jnp.float32) for name in ("a", "b"))
    return (kernel.astype(jnp.float32) + scale * (a @ b)).astype(kernel.dtype)


def _separate_pairs(
    kernels: Mapping[str, jax.Array], pairs: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, jax.Array]]]:
    """Yields name and factors of each adapted kernel; a group of `FUSED` kernels shares ``a``."""
    for name, pair in pairs.items():
        end = 0
        for part in FUSED.get(name, (name,)):
            start, end = end, end + kernels[part].shape[-1]
            yield part, {"a": pair["a"], "b": pair["b"][..., start:end]}


def merge(params: Params, adapter: Adapter, scale: float, *, consume: bool = False) -> Params:
    """Returns the base parameters with ``scale * A B`` added in fp32 to the adapted kernels.

    The layers of ``params`` and ``adapter`` must both be stacked or both be tuples. The result
    shares unadapted arrays with ``params``. ``consume`` frees each kernel after merging it, which
    saves memory; ``params`` cannot be used afterwards.
    """

    def merge_layer(
        kernels: Mapping[str, jax.Array], pairs: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        merged = {}
        for name, pair in _separate_pairs(kernels, pairs):
            merged[name] = _merge_kernel(kernels[name], pair, float(scale))
            if consume:
                jax.block_until_ready(merged[name])
                kernels[name].delete()
        return {**kernels, **merged}

    layers, pairs = params["layers"], adapter["layers"]
    if isinstance(layers, tuple):
        return {**params, "layers": tuple(map(merge_layer, layers, pairs))}
    return {**params, "layers": merge_layer(layers, pairs)}
