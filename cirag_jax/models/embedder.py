"""Decoders as text encoders: Qwen3-Embedding, E5-Mistral, NV-Embed-v2, EmbeddingGemma and others.

The final hidden states of a decoder (`models.decoder`) take the place of a BERT-like encoder's.
`pooling.embed` pools them. An adapter (`models.lora`) can be trained while the decoder is frozen.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cirag_jax import sharding
from cirag_jax.models import attention, decoder, lora
from cirag_jax.models.activations import activate
from cirag_jax.models.attention import Scoring
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import DEFAULT_LORA, multiply
from cirag_jax.models.decoder_params import Decoder
from cirag_jax.models.dense import DenseConfig, add_dense, output_width
from cirag_jax.models.layers import layer_norm
from cirag_jax.models.lora import LoraConfig
from cirag_jax.models.pooling import Pooling
from cirag_jax.models.precision import Dtype
from cirag_jax.sharding import ShapesAndAxes

_EPS = 1e-5  # of the layer norms of latent attention; PyTorch's default


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Latent attention over the decoder's hidden states (NV-Embed, Lee et al., 2024, section 3.1).

    Each hidden state attends to trained latent vectors. A gated feed-forward layer follows. Both
    have residual sums, and layer norms before them.

    Attributes:
      num_latents: number of latent vectors.
      num_heads, head_dim: attention heads; in NV-Embed, a head is as wide as the model.
      widening: feed-forward width divided by the model's width.
    """

    num_latents: int = 512
    num_heads: int = 8
    head_dim: int = 4096
    widening: int = 4


@dataclasses.dataclass(frozen=True)
class EmbedderConfig:
    """Hyper-parameters of an embedding model over a decoder; hashable.

    Attributes:
      decoder: hyper-parameters of the decoder, which has no output layer.
      pad_id: padding token, which is always masked.
      pooling: how `pooling.embed` turns hidden states into one vector.
      latent: latent attention before pooling, or None.
      dense: layers that `pooling.embed` applies to the pooled vector.
      dimensions: see `encoder_config.EncoderConfig`.
      lora: adapter of the decoder's linear layers, or None.
    """

    decoder: DecoderConfig
    pad_id: int
    pooling: Pooling = "lasttoken"
    latent: LatentConfig | None = None
    dense: tuple[DenseConfig, ...] = ()
    dimensions: int | None = None
    lora: LoraConfig | None = None

    @property
    def embedding_size(self) -> int:
        """Dimension of an embedding."""
        return self.dimensions or output_width(self.dense, self.decoder.d_model)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return self.decoder.vocab_size

    @property
    def d_model(self) -> int:
        """Width of the decoder."""
        return self.decoder.d_model

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return self.decoder.num_layers

    @property
    def num_heads(self) -> int:
        """Query heads of the decoder."""
        return self.decoder.num_heads

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a text, including special tokens."""
        return self.decoder.max_positions

    @property
    def dtype(self) -> Dtype:
        """Compute dtype."""
        return self.decoder.dtype


def latent_parameters(config: EmbedderConfig) -> ShapesAndAxes:
    """Returns shape and logical axes of each parameter of latent attention."""
    if config.latent is None:
        return {}
    latent, d = config.latent, config.d_model
    inner, wide = latent.num_heads * latent.head_dim, latent.widening * d
    return {
        "latents": ((latent.num_latents, d), (None, "embed")),
        "latent_norm": ((d,), ("norm",)),
        "latent_norm_bias": ((d,), ("norm",)),
        "latent_context_norm": ((d,), ("norm",)),
        "latent_context_norm_bias": ((d,), ("norm",)),
        "latent_query": ((d, inner), ("embed", "heads")),
        "latent_key_value": ((d, 2 * inner), ("embed", None)),
        "latent_out": ((inner, d), ("heads", "embed")),
        "latent_mlp_norm": ((d,), ("norm",)),
        "latent_mlp_norm_bias": ((d,), ("norm",)),
        "latent_up": ((d, 2 * wide), ("embed", None)),
        "latent_up_bias": ((2 * wide,), ("norm",)),
        "latent_down": ((wide, d), ("mlp", "embed")),
        "latent_down_bias": ((d,), ("norm",)),
    }


class Embedder(Decoder):
    """A decoder without output layer, with optional latent attention, dense layers and adapter.

    ``dense`` is a list of `dense.Dense`, and ``lora`` a `lora.Lora`; both may be absent.
    """

    def __init__(self, config: EmbedderConfig, *, rngs: nnx.Rngs):
        super().__init__(config.decoder, latent_parameters(config), rngs=rngs)
        self.config = config
        add_dense(self, config.dense, rngs)
        if config.lora is not None:
            self.lora = lora.Lora(config.decoder, config.lora, rngs=rngs)

    def __call__(
        self,
        tokens_BT: jax.Array,
        mask_BT: jax.Array,
        *,
        passage_B: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the hidden states to pool, ``hidden_BTD`` in the compute dtype.

        Args:
          tokens_BT: int32 token ids.
          mask_BT: nonzero or True at real tokens. Padding may be on either side; with cuDNN
            attention, only on the right.
          passage_B: ignored; as in `encoder.Encoder`.
          dropout_key: key of the adapter's dropout; None disables it.
        """
        del passage_B
        config, params = self.config, nnx.to_pure_dict(nnx.state(self))
        adapter, options = params.pop("lora", None), DEFAULT_LORA
        if config.lora is not None:
            options = lora.lora_options(config.lora, train=dropout_key is not None)
        real_BT = mask_BT.astype(bool)
        count_BT = jnp.cumsum(real_BT, axis=1, dtype=jnp.int32)
        placing: dict[str, Any] = {"lengths_B": count_BT[:, -1]}
        if config.decoder.attention != "cudnn":
            placing = {
                "segments_BT": real_BT.astype(jnp.int32),
                "positions_BT": jnp.maximum(count_BT - 1, 0),
            }
        hidden_BTD = decoder.forward(
            config.decoder,
            params,
            tokens_BT,
            **placing,
            adapter=adapter,
            lora=options,
            dropout_key=dropout_key,
        )
        if config.latent is None:
            return hidden_BTD
        # One gathered copy of the parameters, as in the decoder's layers.
        shapes = latent_parameters(config)
        gathered = {n: sharding.gather_parameter(params[n], *shapes[n]) for n in shapes}
        return attend_latents(config.latent, gathered, hidden_BTD)


def attend_latents(config: LatentConfig, p: Any, hidden_BTD: jax.Array) -> jax.Array:
    """Applies latent attention to hidden states; returns ``hidden_BTD`` in the same dtype.

    ``p`` are the arrays of `latent_parameters`. Softmax and layer norms are in fp32.
    """
    b, t, _ = hidden_BTD.shape
    size = (config.num_heads, config.head_dim)
    latents_1SD = p["latents"].astype(hidden_BTD.dtype)[None]
    latents_1SD = _norm(latents_1SD, p, "latent_context_norm")
    keys_values = multiply(latents_1SD[0], p["latent_key_value"])
    k_SNH, v_SNH = (x.reshape(-1, *size) for x in jnp.split(keys_values, 2, axis=-1))
    query = multiply(_norm(hidden_BTD, p, "latent_norm"), p["latent_query"])
    # The latents are the same for every row, so all tokens are queries of one row.
    q_1MNH = query.reshape(1, b * t, *size)
    k_1NHS, v_1NSH = k_SNH.transpose(1, 2, 0)[None], v_SNH.transpose(1, 0, 2)[None]
    everything = jnp.ones((1, 1, 1), bool)
    mixed_1MNH = attention.attend(
        Scoring(1.0 / math.sqrt(config.head_dim)), q_1MNH, k_1NHS, v_1NSH, everything
    )
    mixed = multiply(mixed_1MNH.reshape(b, t, -1), p["latent_out"])
    hidden_BTD = hidden_BTD + mixed
    up = multiply(_norm(hidden_BTD, p, "latent_mlp_norm"), p["latent_up"])
    value, gate = jnp.split(up + p["latent_up_bias"].astype(up.dtype), 2, axis=-1)
    down = multiply(value * activate(gate, "gelu"), p["latent_down"])
    return hidden_BTD + down + p["latent_down_bias"].astype(down.dtype)


def _norm(x: jax.Array, p: Any, name: str) -> Any:
    return layer_norm(x, *(p[key].astype(jnp.float32) for key in (name, f"{name}_bias")), _EPS)
