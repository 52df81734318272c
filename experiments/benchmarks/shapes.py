"""Shapes of models, for benchmarks on random weights."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from cirag_jax.models import decoder_params
from cirag_jax.models.decoder_config import DecoderConfig, choose_attention
from cirag_jax.models.io.pretrained_decoder import parse_decoder_config

QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}

# A tiny version, to check on any machine that a benchmark runs.
TINY = QWEN2_7B | {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

SHAPES = {"7b": QWEN2_7B, "tiny": TINY}


def bf16_decoder(raw: dict[str, Any]) -> DecoderConfig:
    """Returns the hyper-parameters of a shape, with weights and arithmetic in bfloat16."""
    config = parse_decoder_config(raw, "experiments/benchmarks/shapes.py")
    config = dataclasses.replace(config, dtype="bfloat16", param_dtype="bfloat16")
    return dataclasses.replace(config, attention=choose_attention(config))


def random_params(config: DecoderConfig) -> decoder_params.Params:
    """Returns random weights of a decoder, drawn by one compiled function."""
    state = jax.jit(lambda: nnx.state(decoder_params.Decoder(config, rngs=nnx.Rngs(0))))()
    return decoder_params.to_params(state)


def parameter_count(config: DecoderConfig) -> int:
    """Returns the number of weights of a decoder."""
    return sum(leaf.size for leaf in jax.tree.leaves(decoder_params.abstract_params(config)))
