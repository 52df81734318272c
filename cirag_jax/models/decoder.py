"""Decoder language models in Flax NNX; `io.decoder_weights.FAMILIES` lists the families.

They are pre-norm transformers with rotary positions, grouped-query attention and gated feed-forward
layers. `decoder_params` declares the parameters. The arithmetic is in pure functions of plain
pytrees, so that one implementation of a layer can be scanned (in training), unrolled (in
generation), rematerialized and sharded.

``params["layers"]`` has one of two forms. One dictionary of arrays stacked over layers runs with
`jax.lax.scan`, and a 28-layer model compiles about as fast as one layer. A tuple of dictionaries,
one per layer (`decoder_params.unstack_layers`), is unrolled. On a CPU a scan copies the weights of
every layer at every step, which takes six times as long as decoding one token (SmolLM2-135M).

In a mixture of experts, layers may differ (`layers_with`). A parameter is then stacked over the
layers that have it, and the layers are always unrolled.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from cirag_jax import sharding
from cirag_jax.models import attention, block_attention, experts, paged_cache, precision
from cirag_jax.models.activations import Activation, activate
from cirag_jax.models.attention import Branches, Implementation, Scoring
from cirag_jax.models.low_rank import dropout, low_rank
from cirag_jax.models.paged_cache import Cache
from cirag_jax.models.precision import Dtype, Packed
from cirag_jax.models.rope import Rope, rope_tables, rotate
from cirag_jax.sharding import ShapesAndAxes

Params = Any  # the dictionary described in `decoder_params.Decoder`
Adapter = Any  # {"layers": {name: {"a": [L, in, R], "b": [L, R, out]}}}; see models/lora.py
Remat = Literal["off", "projections", "full"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DENSE = ("gate_proj", "up_proj", "down_proj", "gate_bias", "up_bias", "down_bias")
# Projections that Phi-3 stores, and adapts, as one matrix.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERTS = ("expert_gate", "expert_up", "expert_down")
SHARED = ("shared_gate_proj", "shared_up_proj", "shared_down_proj", "shared_score_proj")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Hyper-parameters of a decoder; hashable, so usable as a static argument.

    Attributes:
      max_positions: the context length in tokens.
      ropes: rotary positions of each layer, or one entry for all layers; None means no positions.
      rotary_dim: number of rotated dimensions of each head; None is all.
      norm_eps, norm_offset: RMS norm; the scale is ``norm_offset + weight`` (Gemma stores w - 1).
      activation: activation of the gate; Gemma uses ``gelu_tanh``.
      qkv_bias, out_bias, mlp_bias: which projections have a bias.
      qk_norm: whether an RMS norm is applied to each query and key head (Qwen 3,
        Gemma 3).
      fused: whether adapters have one pair of factors for each group of `FUSED` (Phi-3).
      post_norms: whether there are also norms after attention and feed-forward, before the residual
        sum (Gemma).
      tie_embeddings: whether the output layer is the transposed embedding.
      embedding_scale: factor on token embeddings (Gemma: sqrt(d_model)).
      query_scale: factor on attention scores; None is ``head_dim ** -0.5``.
      attention_softcap, final_softcap: ``cap * tanh(x / cap)`` on scores and logits; None is off.
      num_experts: experts of a feed-forward layer; 0 is a dense model.
      experts_per_token: how many of them each token uses.
      d_expert: feed-forward width of an expert.
      d_shared: feed-forward width of an expert that all tokens use, weighted by the sigmoid of a
        score; 0 means none (Qwen 2 MoE).
      normalize_experts: whether the weights of a token's experts sum to one.
      dense_layers: layers with a dense feed-forward layer in a model with experts.
      windows: for each layer, how many tokens a token attends to, counted back from itself; 0 means
        all. Empty means 0 in every layer.
      causal: whether a token attends only to earlier tokens; otherwise windows extend to both
        sides (models of embeddings, which cannot generate).
      dtype: compute dtype; softmax, norms and logits are always fp32.
      param_dtype: dtype of the weights.
      attention: see `choose_attention`.
      remat: what the backward pass recomputes: nothing (``off``), all of each layer (``full``), or
        all except the outputs of projections and of block attention (``projections``).
      initializer_range: standard deviation of random weights.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_positions: int = 2048
    ropes: tuple[Rope | None, ...] = (Rope(),)
    rotary_dim: int | None = None
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    activation: Activation = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused: bool = False
    post_norms: bool = False
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    query_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    d_expert: int = 0
    d_shared: int = 0
    normalize_experts: bool = True
    dense_layers: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    causal: bool = True
    dtype: Dtype = "float32"
    param_dtype: Dtype = "float32"
    attention: Implementation = "xla"
    remat: Remat = "off"
    initializer_range: float = 0.02

    @property
    def score_scale(self) -> float:
        """Factor on attention scores."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def scoring(self) -> Scoring:
        """Scale and soft cap of attention scores."""
        return Scoring(self.score_scale, self.attention_softcap)

    @property
    def cache_dtype(self) -> Literal["float32", "bfloat16", "uint16"]:
        """Dtype of cached keys and values; uint16 stores bf16 bits, see `paged_cache.pack`."""
        only_weights_are_bf16 = (self.dtype, self.param_dtype) == ("float32", "bfloat16")
        return "uint16" if only_weights_are_bf16 else self.dtype

    @property
    def windowed(self) -> bool:
        """Whether any layer has a window."""
        return any(self.windows)

    @property
    def rope_switch(self) -> int | None:
        """The length above which a text has other rotary frequencies, if any; see `Rope.switch`."""
        return next((rope.switch for rope in self.ropes if rope and rope.switch), None)


def choose_attention(
    config: DecoderConfig, *, platform: str | None = None, packed: bool = False
) -> Implementation:
    """Returns the attention implementation for training; see `attention.choose_implementation`.

    ``transposed`` (CPU) uses `block_attention` for rows longer than one block. ``cudnn`` does not
    support soft caps. It is also not chosen for packed rows, or if layers have different windows:
    it then needs a mask per row, whose speed is not measured yet (``make test-gpu`` checks its
    results).
    """
    one_window = len(set(config.windows)) <= 1
    fusible = config.attention_softcap is None and one_window and not packed
    return attention.choose_implementation(config.dtype, config.head_dim, platform, fusible=fusible)


def layers_with(config: DecoderConfig, name: str) -> tuple[int, ...]:
    """Returns the layers that have the parameter ``name`` of `layer_parameters`."""
    layers = range(config.num_layers)
    if config.num_experts and name in DENSE:
        return config.dense_layers
    if name in ("router", *EXPERTS, *SHARED):
        return tuple(i for i in layers if config.num_experts and i not in config.dense_layers)
    return tuple(layers)


def target_parameter(
    config: DecoderConfig, name: str
) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
    """Returns shape and logical axes of a kernel, or of a group of `FUSED` kernels."""
    shapes = layer_parameters(config)
    if name not in FUSED:
        return shapes[name]
    kernels = [shapes[part] for part in FUSED[name]]
    (rows, _), (axis, _) = kernels[0]
    return (rows, sum(columns for (_, columns), _ in kernels)), (axis, None)


def layer_parameters(config: DecoderConfig) -> ShapesAndAxes:
    """Returns shape and logical axes of each parameter of a layer, without the layer axis.

    A layer may lack some of them; see `layers_with`.
    """
    d, f = config.d_model, config.d_ff
    nh, kh = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: ShapesAndAxes = {
        "attention_norm": ((d,), ("norm",)),
        "mlp_norm": ((d,), ("norm",)),
        "q_proj": ((d, nh), ("embed", "heads")),
        "k_proj": ((d, kh), ("embed", "kv_heads")),
        "v_proj": ((d, kh), ("embed", "kv_heads")),
        "o_proj": ((nh, d), ("heads", "embed")),
        "gate_proj": ((d, f), ("embed", "mlp")),
        "up_proj": ((d, f), ("embed", "mlp")),
        "down_proj": ((f, d), ("mlp", "embed")),
    }
    if config.qkv_bias:
        shapes["q_bias"] = ((nh,), ("heads",))
        shapes["k_bias"] = shapes["v_bias"] = ((kh,), ("kv_heads",))
    if config.out_bias:
        shapes["o_bias"] = ((d,), ("norm",))
    if config.mlp_bias:
        shapes["gate_bias"] = shapes["up_bias"] = ((f,), ("mlp",))
        shapes["down_bias"] = ((d,), ("norm",))
    if config.qk_norm:
        shapes["q_norm"] = shapes["k_norm"] = ((config.head_dim,), ("norm",))
    if config.post_norms:
        shapes["attention_post_norm"] = shapes["mlp_post_norm"] = ((d,), ("norm",))
    if config.num_experts:
        wide = ((config.num_experts, d, config.d_expert), ("experts", "embed", None))
        shapes["router"] = ((d, config.num_experts), ("embed", None))
        shapes["expert_gate"] = shapes["expert_up"] = wide
        shapes["expert_down"] = (
            (config.num_experts, config.d_expert, d),
            ("experts", None, "embed"),
        )
    if config.num_experts and config.d_shared:
        shapes["shared_gate_proj"] = shapes["shared_up_proj"] = (
            (d, config.d_shared),
            ("embed", "mlp"),
        )
        shapes["shared_down_proj"] = ((config.d_shared, d), ("mlp", "embed"))
        shapes["shared_score_proj"] = ((d, 1), ("embed", None))
    return {name: shape for name, shape in shapes.items() if layers_with(config, name)}


def outer_parameters(config: DecoderConfig) -> ShapesAndAxes:
    """Returns shape and logical axes of each parameter outside the layers."""
    v, d = config.vocab_size, config.d_model
    shapes: ShapesAndAxes = {
        "embedding": ((v, d), ("vocab", "embed")),
        "final_norm": ((d,), ("norm",)),
    }
    if not config.tie_embeddings:
        shapes["lm_head"] = ((d, v), ("embed", "vocab"))
    return shapes


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """RMS norm over the last axis, in fp32, returned in the dtype of ``x``."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    scale32 = scale.astype(jnp.float32)
    if not offset:  # Llama and similar models round before scaling, Gemma after
        return normed.astype(x.dtype) * scale32.astype(x.dtype)
    return (normed * (offset + scale32)).astype(x.dtype)


def multiply(
    x: jax.Array, kernel: jax.Array | Packed, axis: int = 0, dtype: Any = None
) -> jax.Array:
    """Returns ``x`` times ``kernel``, contracting ``axis`` of a kernel that is not `Packed`.

    ``dtype`` is the dtype of the result, by default the dtype of ``x``. If ``x`` is fp32 and the
    kernel bf16, they are multiplied in bf16 and summed in fp32. XLA does this fast on a CPU with
    bf16 instructions, whereas products with bf16 results are slow.
    """
    dtype, scale_O = dtype or x.dtype, None
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


@dataclasses.dataclass(frozen=True)
class LoraOptions:
    """Scale of an adapter (alpha divided by rank), and dropout rate of the adapter's input."""

    scale: float = 1.0
    dropout: float = 0.0


DEFAULT_LORA = LoraOptions()


@dataclasses.dataclass(frozen=True)
class _Layer:
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
        fused = next((name for name, parts in FUSED.items() if parts == names), "")
        adapted = [name for name in (*names, fused) if name in self.adapter]
        if self.key is not None and self.options.dropout > 0.0 and adapted:
            key = jax.random.fold_in(self.key, PROJECTIONS.index(names[0]))
            dropped = dropout(x, self.options.dropout, key)
        outputs = [
            self._add_bias(name, y) for name, y in zip(names, self._products(x, names), strict=True)
        ]
        for name in adapted:
            pair = self.adapter[name]
            delta: Any = low_rank(self.options.scale, dropped, pair["a"], pair["b"])
            if name != fused:
                outputs[names.index(name)] += delta
                continue
            ends = itertools.accumulate(y.shape[-1] for y in outputs[:-1])
            deltas = jnp.split(delta, list(ends), axis=-1)
            outputs = [y + each for y, each in zip(outputs, deltas, strict=True)]
        return tuple(checkpoint_name(y, "projection") for y in outputs)

    def _add_bias(self, name: str, y: jax.Array) -> jax.Array:
        bias = self.p.get(name.replace("_proj", "_bias"))
        return y if bias is None else y + bias.astype(y.dtype)

    def _products(self, x: jax.Array, names: tuple[str, ...]) -> tuple[jax.Array, ...]:
        shapes = layer_parameters(self.config)
        kernels = tuple(self.p[name] for name in names)

        def multiply_all(x, *parts):
            kernels = [
                sharding.gather_parameter(part, *shapes[name])
                for part, name in zip(parts, names, strict=True)
            ]
            return sharding.multiply_columns(multiply, x, kernels)

        if kernels[0].shape != shapes[names[0]][0]:
            # Kernels split over fsdp are gathered again in the backward pass instead of stored.
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
                sharding.gather_parameter(part, *shapes[name])
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


def _layer_windows(config: DecoderConfig) -> tuple[int, ...]:
    """Returns the window of each layer, with a huge number in place of 0."""
    windows = config.windows or (0,) * config.num_layers
    return tuple(window or (1 << 30) for window in windows)


def _layer_ropes(config: DecoderConfig) -> tuple[tuple[Rope | None, ...], tuple[int, ...]]:
    """Returns the distinct ropes, and the index of each layer's."""
    distinct = tuple(dict.fromkeys(config.ropes))
    indices = tuple(map(distinct.index, config.ropes))
    return distinct, indices * config.num_layers if len(indices) == 1 else indices


def _make_tables(config, positions_BT, totals_BT):
    dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
    return rope_tables(positions_BT, dim, _layer_ropes(config)[0], totals_BT)


def _select(tables, rope: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the tables of one rope; the index is traced in a scan."""
    cos, sin = (table[0] if table.shape[0] == 1 else table[rope] for table in tables)
    return cos, sin


def _totals(segments_BT: jax.Array, positions_BT: jax.Array, shared_B: jax.Array | None):
    """Returns the length of the segment of each token, ``[B, T]``.

    Segments with a shared prefix have the length of the longest segment of their row, because they
    attend to the same keys of the prefix.
    """
    if shared_B is not None:
        segments_BT = jnp.minimum(segments_BT, 1)
    largest = functools.partial(jax.ops.segment_max, num_segments=segments_BT.shape[1] + 1)
    segments_BT = jnp.maximum(segments_BT, 0)
    longest_BS = jax.vmap(largest)(positions_BT, segments_BT)
    return jnp.take_along_axis(longest_BS, segments_BT, axis=1) + 1


def _embed(config: DecoderConfig, params: Params, tokens_BT: jax.Array) -> jax.Array:
    x_BTD = sharding.lookup_embedding(params["embedding"], tokens_BT, config.d_model)
    x_BTD = x_BTD.astype(config.dtype)
    if config.embedding_scale != 1.0:
        x_BTD = x_BTD * jnp.asarray(config.embedding_scale, x_BTD.dtype)
    return x_BTD


def logits(config: DecoderConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Returns the logits of normed hidden states ``[..., D]``, fp32 ``[..., V]``."""
    head = params.get("lm_head")  # a tied layer may also be packed
    weight, axis = (params["embedding"], 1) if head is None else (head, 0)
    scores = multiply(hidden, weight, axis, jnp.float32)
    return attention.softcap(scores, config.final_softcap)


def forward(
    config: DecoderConfig,
    params: Params,
    tokens_BT: jax.Array,
    *,
    lengths_B: jax.Array | None = None,
    positions_BT: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    shared_B: jax.Array | None = None,
    adapter: Adapter | None = None,
    lora: LoraOptions = DEFAULT_LORA,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Returns hidden states after the final norm, ``hidden_BTD``, without a cache (for training).

    Args:
      config: hyper-parameters.
      params: weights with stacked layers or a tuple of layers.
      tokens_BT: int32 ids, padded on the right.
      lengths_B: int32 number of real tokens per row; None means all. Outputs at padding are
        undefined.
      positions_BT: int32 rotary positions; None means 0, 1, 2, ... in every row.
      segments_BT: int32 segments of packed rows, 0 for padding. Tokens attend only within their
        segment. Overrides ``lengths_B``, and needs ``positions_BT`` that restart in each segment.
      shared_B: int32 length of the prefix that all segments of a packed row share. Positions of
        each segment continue from the end of the prefix.
      adapter: LoRA factors, stacked like ``params["layers"]``.
      lora: scale and dropout of the adapter.
      dropout_key: key of the adapter's dropout; None disables it.
    """
    b, t = tokens_BT.shape
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    x_BTD = _embed(config, params, tokens_BT)
    index = jnp.arange(t, dtype=jnp.int32)
    packed = segments_BT is not None
    if segments_BT is None:
        real_B = jnp.full(b, t, jnp.int32) if lengths_B is None else lengths_B
        segments_BT = (index[None] < real_B[:, None]).astype(jnp.int32)
    visible = block_attention.make_visibility(
        segments_BT, positions_BT, shared_B, causal=config.causal
    )
    totals_BT = _totals(segments_BT, positions_BT, shared_B) if config.rope_switch else None
    tables = _make_tables(config, positions_BT, totals_BT)

    def layer(x_BTD, p, pairs, window, rope, key):
        block = _Layer(config, p, pairs, lora, key)
        heads = block.heads(block.norm(x_BTD, "attention_norm"), _select(tables, rope))
        if config.attention == "cudnn":
            mixed_BTNH = _attend_fused(config, *heads, visible, lengths_B, window, packed)
        else:
            mixed_BTNH = _attend_sequence(config, *heads, visible, window)
        return block.after_attention(x_BTD, mixed_BTNH)

    x_BTD = _run_layers(config, layer, x_BTD, params, adapter, dropout_key)
    return rms_norm(x_BTD, params["final_norm"], config.norm_eps, config.norm_offset)


def _attend_fused(config, q_BTNH, k_BTKH, v_BTKH, visible, lengths_B, window, packed):
    """Attention among the tokens of one call, with cuDNN.

    Packed rows pass a mask. cuDNN also supports offsets of segments, but these do not allow shared
    prefixes, and before jax 0.11.2 they read the wrong keys of grouped heads (jax#39521).
    """
    if config.attention_softcap is not None:
        raise ValueError(
            "attention 'cudnn' does not support attention_softcap; see `choose_attention`"
        )
    if packed or len(set(config.windows)) > 1:
        options = {"mask": visible.mask(q_BTNH.shape[1], window)[:, None]}
    else:
        options = {}
        if lengths_B is not None:
            options["key_value_seq_lengths"] = jnp.maximum(lengths_B, 1)
            options["query_seq_lengths"] = jnp.full_like(lengths_B, q_BTNH.shape[1])
        if config.windowed:
            size = config.windows[0] - 1
            options["local_window_size"] = (size, 0 if config.causal else size)
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        scale=config.score_scale,
        is_causal=config.causal,
        implementation="cudnn",
        **options,
    )


def _attend_sequence(config, q_BTNH, k_BTKH, v_BTKH, visible, window):
    """Attention among the tokens of one call, without a fused kernel."""
    length = q_BTNH.shape[1]
    if config.attention == "transposed" and length > block_attention.BLOCK:
        return block_attention.attend_visible(
            config.scoring, q_BTNH, k_BTKH, v_BTKH, visible, window
        )
    k_BKHS, v_BKSH = k_BTKH.transpose(0, 2, 3, 1), v_BTKH.transpose(0, 2, 1, 3)
    mask_BTS = visible.mask(length, window)
    return attention.attend(config.scoring, q_BTNH, k_BKHS, v_BKSH, mask_BTS)


def _apply_remat(config: DecoderConfig, layer: Any, *, scanned: bool) -> Any:
    if config.remat == "off":
        return layer
    policy = None
    if config.remat == "projections":
        names = ("projection", block_attention.SAVED)
        policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(layer, prevent_cse=not scanned, policy=policy)


def arrange_layers(
    config: DecoderConfig, columns: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, Any], ...]:
    """Returns the parameters of each layer; a column has an entry for each layer that has it."""
    layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
    for name, column in columns.items():
        for layer, value in zip(layers_with(config, name), column, strict=True):
            layers[layer][name] = value
    return tuple(layers)


def _split_layers(config: DecoderConfig, stacked: Any) -> tuple[dict[str, Any], ...]:
    columns = {}
    for name, tree in stacked.items():
        rows = range(len(layers_with(config, name)))
        columns[name] = [jax.tree.map(lambda x, row=row: x[row], tree) for row in rows]
    return arrange_layers(config, columns)


def _run_layers(config, layer, x_BTD, params, adapter, dropout_key):
    """Runs ``layer(x, p, pairs, window, rope, key)`` over all layers, rematerialized as configured.

    Equal layers that are stacked run as a scan.
    """
    keys = None if dropout_key is None else jax.random.split(dropout_key, config.num_layers)
    windows, layers = _layer_windows(config), params["layers"]
    _, ropes = _layer_ropes(config)
    pairs = {} if adapter is None else adapter["layers"]
    if not isinstance(layers, tuple) and config.dense_layers:
        layers, pairs = (_split_layers(config, stacked) for stacked in (layers, pairs))
    if not isinstance(layers, tuple):
        source, select = layers, lambda x, p: p
        if jax.default_backend() == "cpu" and config.param_dtype == "bfloat16":
            source = jnp.arange(config.num_layers, dtype=jnp.int32)
            select = functools.partial(_read_layer, layers)

        def run(x, source, *row):
            return layer(x, select(x, source), *row)

        run = _apply_remat(config, run, scanned=True)
        settings = (jnp.asarray(each, jnp.int32) for each in (windows, ropes))
        inputs = (source, pairs, *settings, keys)
        return jax.lax.scan(lambda x, row: (run(x, *row), None), x_BTD, inputs)[0]
    layer = _apply_remat(config, layer, scanned=False)
    for i, p in enumerate(layers):
        key = None if keys is None else keys[i]
        x_BTD = layer(x_BTD, p, pairs[i] if pairs else {}, windows[i], ropes[i], key)
    return x_BTD


def _read_layer(layers: Any, x_BTD: jax.Array, index: jax.Array) -> Any:
    """Returns the parameters of the layer ``index``, whose input is ``x_BTD``.

    XLA on a CPU slices and multiplies bf16 parameters in fp32. Without the barrier, it converts all
    layers before the scan, because that does not depend on the step.
    """
    layers, _ = jax.lax.optimization_barrier((layers, x_BTD))
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), layers)


def empty_cache(config: DecoderConfig, pages: int, size: int) -> Cache:
    """Returns a zeroed key-value cache of ``pages`` pages with ``size`` tokens each."""

    def zeros(shape):
        array = jnp.zeros(shape, config.cache_dtype)
        return sharding.constrain(array, None, "kv_heads", None, None)

    k, h = config.num_kv_heads, config.head_dim
    shapes = {"k": (pages, k, h, size), "v": (pages, k, size, h)}

    def build():
        layers = range(config.num_layers)
        return {name: tuple(zeros(shape) for _ in layers) for name, shape in shapes.items()}

    return jax.jit(build)()


def forward_cached(
    config: DecoderConfig,
    params: Params,
    tokens_BT: jax.Array,
    start_B: jax.Array,
    cache: Cache,
    tables_BN: jax.Array | None,
    *,
    branch: int = 0,
    totals_B: jax.Array | None = None,
    adapter: Adapter | None = None,
    lora: LoraOptions = DEFAULT_LORA,
) -> tuple[jax.Array, Cache, tuple[jax.Array, jax.Array]]:
    """Runs new tokens with a key-value cache.

    Args:
      config: hyper-parameters.
      params: weights with unstacked layers (`decoder_params.unstack_layers`).
      tokens_BT: int32 new tokens.
      start_B: int32 position of the first new token of each row. Cached tokens from there on are
        overwritten or masked.
      cache: keys and values; donate it under `jax.jit`.
      tables_BN: int32 pages of each row in order; None means that row i has page i. Writes beyond a
        row's pages, or to a page that does not exist, are dropped.
      branch: if above 0, the new tokens of a row are alternative branches of this length. Each
        branch continues from the cached tokens and does not attend to the other branches.
      totals_B: int32 length of each row's text, of which the new tokens may be a part; it matters
        only with `DecoderConfig.rope_switch`. None means that the text ends with the new tokens.
      adapter: LoRA factors with unstacked layers.
      lora: scale of the adapter.

    Returns:
      ``hidden_BTD`` after the final norm, the cache with the new keys and values, and the last
        layer's queries ``q_BTNH`` and mask ``mask_BTS`` (for `attention.probabilities`).
    """
    size = cache["v"][0].shape[2]
    length = size if tables_BN is None else tables_BN.shape[1] * size
    slots_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    branches = Branches(start_B, branch) if branch else None
    distance_BTS = attention.distances(slots_BT, jnp.arange(length, dtype=jnp.int32), branches)
    positions_BT = slots_BT if branches is None else slots_BT - branches.skipped(slots_BT)
    totals_B = positions_BT[:, -1] + 1 if totals_B is None else totals_B
    tables = _make_tables(config, positions_BT, totals_B[:, None])
    _, ropes = _layer_ropes(config)
    x_BTD = _embed(config, params, tokens_BT)
    at_BT = paged_cache.locate_slots(cache, tables_BN, slots_BT)
    keys, values = list(cache["k"]), list(cache["v"])
    q_BTNH = mask_BTS = None
    for i, window in enumerate(_layer_windows(config)):
        pairs = adapter["layers"][i] if adapter is not None else {}
        block = _Layer(config, params["layers"][i], pairs, lora, None)
        q_BTNH, k_BTKH, v_BTKH = block.heads(
            block.norm(x_BTD, "attention_norm"), _select(tables, ropes[i])
        )
        new = paged_cache.pack_pair(k_BTKH, v_BTKH, keys[i].dtype)
        keys[i], values[i] = paged_cache.write_slots(keys[i], values[i], at_BT, *new)
        mask_BTS = distance_BTS >= 0
        if config.windowed:
            mask_BTS &= distance_BTS < window
        if config.attention == "transposed" and tables_BN is not None:
            mixed_BTNH = paged_cache.attend_pages(
                config.scoring, q_BTNH, keys[i], values[i], tables_BN, slots_BT, window, branches
            )
        else:
            cached = keys[i], values[i]
            if tables_BN is not None:
                cached = paged_cache.read_pages(*cached, tables_BN)
            k_BKHS, v_BKSH = map(paged_cache.unpack, cached)
            mixed_BTNH = attention.attend(config.scoring, q_BTNH, k_BKHS, v_BKSH, mask_BTS)
        x_BTD = block.after_attention(x_BTD, mixed_BTNH)
    hidden_BTD = rms_norm(x_BTD, params["final_norm"], config.norm_eps, config.norm_offset)
    assert q_BTNH is not None and mask_BTS is not None
    return hidden_BTD, {"k": tuple(keys), "v": tuple(values)}, (q_BTNH, mask_BTS)
