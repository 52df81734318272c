"""One layer of a decoder: projections with adapters, norms, and feed-forward layers or experts."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from cirag_jax import sharding
from cirag_jax.models import experts, nf4, precision
from cirag_jax.models.activations import activate
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_params import EXPERTS, FUSED, PROJECTIONS, layer_parameters
from cirag_jax.models.low_rank import dropout, low_rank
from cirag_jax.models.nf4 import Nf4
from cirag_jax.models.precision import Packed
from cirag_jax.models.rope import rotate

Adapter = Any  # {"layers": {name: {"a": [L, in, R], "b": [L, R, out]}}}; see models/lora.py


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """RMS norm over the last axis, in fp32, returned in the dtype of ``x``."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    scale32 = scale.astype(jnp.float32)
    if not offset:  # Llama and similar models round before scaling, Gemma after
        return normed.astype(x.dtype) * scale32.astype(x.dtype)
    return (normed * (offset + scale32)).astype(x.dtype)


def multiply(
    x: jax.Array, kernel: jax.Array | Packed | Nf4, axis: int = 0, dtype: Any = None
) -> jax.Array:
    """Returns ``x`` times ``kernel``, contracting ``axis`` of a kernel that is not `Packed`.

    ``dtype`` is the dtype of the result, by default the dtype of ``x``. If ``x`` is fp32 and the
    kernel bf16, they are multiplied in bf16 and summed in fp32. XLA does this fast on a CPU with
    bf16 instructions, whereas products with bf16 results are slow.
    """
    dtype, scale_O = dtype or x.dtype, None
    if isinstance(kernel, Nf4):
        kernel = nf4.dequantize(kernel, x.dtype)
    if isinstance(kernel, Packed):
        kernel, scale_O, axis = kernel.values_OI, kernel.scale_O, 1
    mixed = x.dtype == jnp.float32 and kernel.dtype == jnp.bfloat16
    # A single row takes XLA's slow path on CPUs; two rows do not.
    single = (mixed or scale_O is not None) and x.ndim > 1 and x.size == x.shape[-1]
    x = jnp.concatenate([x, x], axis=-2) if single else x
    if scale_O is not None:
        y = precision.multiply_int8(x, kernel, scale_O).astype(dtype)
    else:
        x, kernel = (x.astype(kernel.dtype), kernel) if mixed else (x, kernel.astype(x.dtype))
        if dtype == x.dtype == jnp.bfloat16:
            y: jax.Array = precision.multiply_kernel(x, kernel, axis)
        else:
            contracted = (((x.ndim - 1,), (axis,)), ((), ()))
            y = jax.lax.dot_general(x, kernel, contracted, preferred_element_type=dtype)
    return y[..., :1, :] if single else y


def _gather(kernel: Any, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
    """Gathers a kernel of ``shape`` from the parts of all shards; see `gather_parameter`."""
    if not isinstance(kernel, Nf4):
        return sharding.gather_parameter(kernel, shape, axes)
    whole = nf4.shapes(shape)
    return Nf4(
        *(sharding.gather_parameter(*pair, axes) for pair in zip(kernel, whole, strict=True))
    )


def _fused_name(names: tuple[str, ...]) -> str:
    """Returns the name of the group of `FUSED` with these projections, or an empty string."""
    return next((name for name, parts in FUSED.items() if parts == names), "")


def _split_columns(y: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    return jnp.split(y, list(itertools.accumulate(widths[:-1])), axis=-1)


@dataclasses.dataclass(frozen=True)
class LoraOptions:
    """Scale of an adapter (alpha divided by rank), and dropout rate of the adapter's input."""

    scale: float = 1.0
    dropout: float = 0.0


DEFAULT_LORA = LoraOptions()


@dataclasses.dataclass(frozen=True)
class Layer:
    """Parameters and settings of one layer."""

    config: DecoderConfig
    p: Mapping[str, jax.Array]
    adapter: Mapping[str, Any]
    options: LoraOptions
    key: jax.Array | None

    def project(self, x: jax.Array, *names: str) -> tuple[jax.Array, ...]:
        """Returns ``x`` times the kernel of each name, plus its bias and adapter, if any.

        An adapter adds ``scale * dropout(x) A B`` (LoRA, Hu et al., 2022, equation 3). The adapters
        of one call share one dropout mask, whereas PEFT draws one for each.
        """
        dropped = x
        fused = _fused_name(names)
        adapted = [name for name in (*names, fused) if name in self.adapter]
        if self.key is not None and self.options.dropout > 0.0 and adapted:
            key = jax.random.fold_in(self.key, PROJECTIONS.index(names[0]))
            dropped = dropout(x, self.options.dropout, key)
        outputs = [
            self._add_bias(name, y) for name, y in zip(names, self._products(x, names), strict=True)
        ]
        pairs = [(self.adapter[name]["a"], self.adapter[name]["b"]) for name in adapted]
        changes: Any = low_rank(self.options.scale, dropped, pairs) if pairs else ()
        for name, delta in zip(adapted, changes, strict=True):
            if name != fused:
                outputs[names.index(name)] += delta
                continue
            deltas = _split_columns(delta, [y.shape[-1] for y in outputs])
            outputs = [y + each for y, each in zip(outputs, deltas, strict=True)]
        return tuple(checkpoint_name(y, "projection") for y in outputs)

    def _add_bias(self, name: str, y: jax.Array) -> jax.Array:
        bias = self.p.get(name.replace("_proj", "_bias"))
        return y if bias is None else y + bias.astype(y.dtype)

    def _products(self, x: jax.Array, names: tuple[str, ...]) -> tuple[jax.Array, ...]:
        shapes, fused = layer_parameters(self.config), _fused_name(names)
        if fused in self.p:  # only on one device, without gradients; see `fuse_kernels`
            y = multiply(x, self.p[fused])
            return tuple(_split_columns(y, [shapes[name][0][-1] for name in names]))
        kernels = tuple(self.p[name] for name in names)

        def multiply_all(x, *parts):
            kernels = [
                _gather(part, *shapes[name]) for part, name in zip(parts, names, strict=True)
            ]
            return sharding.multiply_columns(multiply, x, kernels)

        if kernels[0].shape != shapes[names[0]][0] or isinstance(kernels[0], Nf4):
            # The backward pass gathers kernels that are split over fsdp, and dequantizes kernels,
            # again: the results would be large.
            multiply_all = jax.checkpoint(multiply_all)
        return multiply_all(x, *kernels)

    def norm(self, x: jax.Array, name: str) -> jax.Array:
        """RMS norm of ``x`` with the scale ``name``."""
        return rms_norm(x, self.p[name], self.config.norm_eps, self.config.norm_offset)

    def heads(
        self, x_BTD: jax.Array, tables: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns rotated queries ``BTNH``, rotated keys ``BTKH`` and values ``BTKH``."""
        config, (b, t, _) = self.config, x_BTD.shape
        q_BTNH, k_BTKH, v_BTKH = (
            y.reshape(b, t, -1, config.head_dim)
            for y in self.project(x_BTD, "q_proj", "k_proj", "v_proj")
        )
        if config.qk_norm:
            q_BTNH, k_BTKH = self.norm(q_BTNH, "q_norm"), self.norm(k_BTKH, "k_norm")
        q_BTNH = sharding.constrain(rotate(q_BTNH, tables), "batch", "length", "act_heads", None)
        k_BTKH = sharding.constrain(rotate(k_BTKH, tables), "batch", "length", "kv_heads", None)
        v_BTKH = sharding.constrain(v_BTKH, "batch", "length", "kv_heads", None)
        return q_BTNH, k_BTKH, v_BTKH

    def after_attention(self, x_BTD: jax.Array, mixed_BTNH: jax.Array) -> jax.Array:
        """Applies the output projection and the feed-forward layer, each with a residual sum."""
        b, t = mixed_BTNH.shape[:2]
        (y_BTD,) = self.project(mixed_BTNH.reshape(b, t, -1), "o_proj")
        if self.config.post_norms:
            y_BTD = self.norm(y_BTD, "attention_post_norm")
        x_BTD = sharding.constrain(x_BTD + y_BTD, "batch", "length", "act_embed")
        h_BTD = self.norm(x_BTD, "mlp_norm")
        y_BTD = self._mix_experts(h_BTD) if "router" in self.p else self._feed_forward(h_BTD)
        if self.config.post_norms:
            y_BTD = self.norm(y_BTD, "mlp_post_norm")
        return sharding.constrain(x_BTD + y_BTD, "batch", "length", "act_embed")

    def _feed_forward(self, h_BTD: jax.Array, prefix: str = "") -> jax.Array:
        gate_BTF, up_BTF = self.project(h_BTD, f"{prefix}gate_proj", f"{prefix}up_proj")
        h_BTF = activate(gate_BTF, self.config.activation) * up_BTF
        h_BTF = sharding.constrain(h_BTF, "batch", "length", "act_mlp")
        return self.project(h_BTF, f"{prefix}down_proj")[0]

    def _mix_experts(self, h_BTD: jax.Array) -> jax.Array:
        config, shapes = self.config, layer_parameters(self.config)

        def feed_forward(x, gate, up, down):
            h = activate(multiply(x, gate), config.activation) * multiply(x, up)
            return multiply(h, down)

        def mix(x_BTD, weights_BTK, experts_BTK, first, *kernels):
            rows = [x.reshape(-1, x.shape[-1]) for x in (x_BTD, weights_BTK, experts_BTK)]
            y_MD = experts.apply_experts(feed_forward, rows[0], rows[1], rows[2], first, kernels)
            return y_MD.reshape(x_BTD.shape)

        def run(h_BTD, *parts):
            router, *kernels = (
                _gather(part, *shapes[name])
                for part, name in zip(parts, ("router", *EXPERTS), strict=True)
            )
            scores_BTE = multiply(h_BTD, router, dtype=jnp.float32)
            chosen = experts.route(scores_BTE, config.experts_per_token, config.normalize_experts)
            return sharding.map_experts(mix, (h_BTD, *chosen), kernels)

        if self.p["router"].shape != shapes["router"][0]:
            run = jax.checkpoint(run)  # as in `_products`
        y_BTD = run(h_BTD, self.p["router"], *(self.p[name] for name in EXPERTS))
        if config.d_shared:
            (score_BT1,) = self.project(h_BTD, "shared_score_proj")
            y_BTD = y_BTD + jax.nn.sigmoid(score_BT1) * self._feed_forward(h_BTD, "shared_")
        return checkpoint_name(y_BTD, "projection")
