"""Hyper-parameters of a text encoder."""

import dataclasses

from cirag_jax.models.activations import Activation
from cirag_jax.models.attention import Implementation, choose_implementation
from cirag_jax.models.dense import DenseConfig, output_width
from cirag_jax.models.pooling import Pooling
from cirag_jax.models.precision import Dtype
from cirag_jax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Hyper-parameters of an encoder; hashable, so usable as a static argument.

    Attributes:
      type_vocab_size: number of token types; 0 for MPNet, which has none.
      position_offset: index of the first real position: 0 for BERT, ``pad_id + 1`` for XLM-R.
      max_positions: rows of the position table, including the offset; with ``rope``, the maximum
        number of tokens.
      rope: rotary positions; None means a position table.
      local_rope: rotary positions of layers with a window, if they differ.
      rotary_dim: number of rotated dimensions of each head; None is all.
      windows: for each layer, how many tokens a token attends to on each side; 0 means all. Empty
        means 0 in every layer.
      pre_norm: whether layers normalize the inputs of attention and feed-forward, with one more
        norm after the last layer (ModernBERT). Otherwise, they normalize the residual sums.
      first_norm: whether the first layer has a norm before attention (not in ModernBERT).
      gated: whether the feed-forward layer is ``act(x W) * (x V)`` (Shazeer, 2020).
      attention_bias, up_bias, down_bias, norm_bias: which layers have biases; ``up`` and ``down``
        are the two layers of the feed-forward layer.
      relative_bias: whether one relative position bias is added to the scores of all layers
        (MPNet).
      hidden_dropout, attention_dropout: dropout rates; used only in calls with a dropout key.
      dtype: compute dtype. Softmax, layer norm and the embedding output are always fp32. Parameters
        are fp32, too, except after `precision.round_weights`.
      attention: see `choose_attention`.
      remat: whether the backward pass recomputes each layer.
      scan_layers: whether the parameters of all layers are stacked and run with `jax.lax.scan`.
      unroll: layers per iteration of the scan; with all layers, there is no loop.
      pooling: how `pooling.embed` turns hidden states into one vector.
      dense: layers that `pooling.embed` applies to the pooled vector.
      dimensions: number of leading dimensions that `pooling.embed` keeps (Matryoshka representation
        learning, Kusupati et al., 2022); None keeps all.
      tasks: numbers of the checkpoint's task adapters for queries and passages; one number if they
        are equal, empty without adapters.
      num_tasks: number of task adapters in the checkpoint.
      task_rank, task_scale: inner dimension of the task adapters, and the factor on their output.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    max_positions: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    position_offset: int = 0
    hidden_act: Activation = "gelu"
    pad_id: int = 0
    relative_bias: bool = False
    rope: Rope | None = None
    local_rope: Rope | None = None
    rotary_dim: int | None = None
    windows: tuple[int, ...] = ()
    pre_norm: bool = False
    first_norm: bool = True
    gated: bool = False
    attention_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    norm_bias: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    dtype: Dtype = "float32"
    attention: Implementation = "xla"
    remat: bool = False
    scan_layers: bool = False
    unroll: int = 1
    pooling: Pooling = "mean"
    dense: tuple[DenseConfig, ...] = ()
    dimensions: int | None = None
    tasks: tuple[int, ...] = ()
    num_tasks: int = 0
    task_rank: int = 0
    task_scale: float = 1.0

    @property
    def embedding_size(self) -> int:
        """Dimension of an embedding."""
        return self.dimensions or output_width(self.dense, self.d_model)

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.d_model // self.num_heads

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a text, including special tokens."""
        return self.max_positions - self.position_offset


def choose_attention(
    dtype: str,
    head_dim: int,
    *,
    platform: str | None = None,
    dropout: float = 0.0,
    relative_bias: bool = False,
) -> Implementation:
    """Returns the attention implementation; see `attention.choose_implementation`.

    Attention dropout needs ``transposed``. ``cudnn`` does not support a ``relative_bias``.
    """
    return choose_implementation(
        dtype, head_dim, platform, plain=dropout > 0.0, fusible=not relative_bias
    )
