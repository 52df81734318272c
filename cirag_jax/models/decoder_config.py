"""Hyper-parameters of a decoder language model."""

import dataclasses
from typing import Literal

from cirag_jax.models import attention
from cirag_jax.models.activations import Activation
from cirag_jax.models.attention import Implementation, Scoring
from cirag_jax.models.precision import Dtype
from cirag_jax.models.rope import Rope

Remat = Literal["off", "projections", "full"]
Quantization = Literal["nf4"]


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
      quantization: ``nf4`` stores the kernels of the layers in 4 bits (see `nf4`), for a frozen
        base.
      attention: see `choose_attention`.
      remat: what the backward pass recomputes: nothing (``off``), all of each layer (``full``), or
        all except the outputs of projections and of fused or block attention (``projections``).
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
    quantization: Quantization | None = None
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
    results). ``splash``, the fused kernel of TPUs, is chosen for packed rows, which then share no
    prefixes; it has not been tried on a TPU.
    """
    one_window = len(set(config.windows)) <= 1
    fusible = config.attention_softcap is None and one_window and not packed
    splash = config.causal and one_window and packed
    return attention.choose_implementation(
        config.dtype, config.head_dim, platform, fusible=fusible, splash=splash
    )
