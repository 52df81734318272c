"""Splash attention, the fused kernel of TPUs, for packed and padded rows. Not tried on a TPU."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import PartitionSpec

from cirag_jax.models.attention import Scoring

_BLOCK = 128  # rows are padded to a multiple of it


def attend(
    scoring: Scoring,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array,
    window: int = 0,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Causal grouped-query attention within segments: returns ``mixed_BTNH``.

    Args:
      scoring: scale and soft cap of the scores.
      q_BTNH: queries.
      k_BTKH: keys.
      v_BTKH: values.
      segments_BT: int32 segments, without shared prefixes; 0 is padding, whose outputs are
        undefined.
      window: how many tokens a token attends to, counted back from itself; 0 means all.
      interpret: run the kernel's steps one by one, on any platform (for tests).
    """

    def run(q_BTNH, k_BTKH, v_BTKH, segments_BT):
        length, heads = q_BTNH.shape[1:3]
        missing = -length % _BLOCK
        shape = (length + missing, length + missing)

        def heads_first(x_BTNH):
            return jnp.pad(x_BTNH, ((0, 0), (0, missing), (0, 0), (0, 0))).transpose(0, 2, 1, 3)

        mask = splash_attention.CausalMask(shape)
        if window:
            mask = splash_attention.LocalMask(shape, (window - 1, 0), 0)
        kernel: Any = splash_attention.make_splash_mha_single_device(
            splash_attention.MultiHeadMask([mask] * heads),
            attn_logits_soft_cap=scoring.softcap,
            interpret=interpret,
        )
        scaled_BTNH = (q_BTNH.astype(jnp.float32) * scoring.scale).astype(q_BTNH.dtype)
        ids_BT = jnp.pad(segments_BT, ((0, 0), (0, missing)))
        operands = (heads_first(x) for x in (scaled_BTNH, k_BTKH, v_BTKH))
        mixed_BNTH = jax.vmap(kernel)(*operands, splash_attention.SegmentIds(ids_BT, ids_BT))
        return mixed_BNTH.transpose(0, 2, 1, 3)[:, :length]

    # The compiler cannot split a kernel over devices.
    mesh = jax.sharding.get_abstract_mesh()
    auto = {*mesh.auto_axes}
    if auto and mesh.size > 1:
        batch = tuple(axis for axis in ("data", "fsdp") if axis in auto) or None
        spec = PartitionSpec(batch, None, "tensor" if "tensor" in auto else None, None)
        run = jax.shard_map(
            run,
            in_specs=(spec, spec, spec, PartitionSpec(batch, None)),
            out_specs=spec,
            axis_names=auto,
            check_vma=False,
        )
    return run(q_BTNH, k_BTKH, v_BTKH, segments_BT)
