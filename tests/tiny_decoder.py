"""Tiny decoder checkpoints in transformers' format: random weights and a real tokenizer."""

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers, trainers

from cirag_jax.models import decoder_params
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.io import decoder_families, gguf_weights
from cirag_jax.models.io.pretrained_decoder import parse_decoder_config
from cirag_jax.models.io.tensor_files import save_tensors

VOCABULARY = 320
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_TEXT = (
    "the sailor was born in the harbour town, and the town has a patron saint: who is it?",
    "question: where was the weaver born? answer: the weaver was born in 1984, in the mill.",
    '{"head": "the mason", "relation": "born in", "tail": "the town"}',
    "you are a helpful assistant. system user assistant",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu"},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False},
    "qwen3": {"hidden_act": "silu", "head_dim": 16},
    "qwen2_moe": {
        "hidden_act": "silu",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    },
    "mixtral": {"hidden_act": "silu", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "hidden_act": "silu",
        "head_dim": 16,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
    },
    "mistral": {"hidden_act": "silu", "sliding_window": 6},
    "smollm3": {
        "hidden_act": "silu",
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "phi3": {
        "hidden_act": "silu",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "original_max_position_embeddings": 15,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0],
        },
    },
    "gemma2": {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "tie_word_embeddings": True,
    },
}


def config(family: str = "llama", **fields: Any) -> dict[str, Any]:
    """Returns ``config.json`` of a tiny model of ``family``, overridden by ``fields``."""
    name = family.removesuffix("_text").title().replace("_", "").replace("lm", "LM")
    head = {"model_type": family, "architectures": [f"{name}ForCausalLM"], "dtype": "float32"}
    return {**head, **_BASE, **_FAMILIES[family], **fields}


def tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random fp32 tensors, large enough for every part to affect the logits."""
    rng = np.random.default_rng(seed)
    shapes = parse_decoder_config(raw, "config.json")
    found = {}
    for place in decoder_families.parameter_tensors(shapes, raw["model_type"]):
        for name in place.names:
            values = rng.normal(size=place.shape)
            if "norm" in name:
                values = 0.3 * values + (0.0 if raw["model_type"].startswith("gemma") else 1.0)
            elif name.endswith("bias"):
                values = 0.3 * values
            else:
                values = values / np.sqrt(place.shape[-1])
            found[name] = values.astype(np.float32)
        for name, fused in zip(place.names, place.fused, strict=False):
            rows = [found[fused]] if fused in found else []
            found[fused] = np.concatenate([*rows, found.pop(name)])
    return found


def tokenizer(
    texts: Sequence[str] | None = None, vocab_size: int | None = None
) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE tokenizer, by default of `VOCABULARY` tokens on four sentences."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    made.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size or VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts or _TEXT, trainer)
    return made


def write_tokenizer(
    path: pathlib.Path, texts: Sequence[str] | None = None, vocab_size: int | None = None
) -> None:
    """Writes the tokenizer's files and ``generation_config.json`` to ``path``."""
    tokenizer(texts, vocab_size).save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    generation = {"bos_token_id": 0, "eos_token_id": [2], "pad_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(generation), "utf-8")


def folder(
    path: str | pathlib.Path,
    family: str = "llama",
    *,
    seed: int = 0,
    texts: Sequence[str] | None = None,
    **fields: Any,
) -> pathlib.Path:
    """Writes a model folder that transformers and `load_decoder` can load; returns its path.

    Args:
      path: the folder, which is created if needed.
      family: a key of `decoder_families.FAMILIES`.
      seed: seed of the weights.
      texts: texts on which to train the tokenizer, of ``vocab_size`` tokens.
      **fields: fields of ``config.json``, such as ``num_hidden_layers=3``.
    """
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    raw = config(family, **fields)
    (path / "config.json").write_text(json.dumps(raw), "utf-8")
    save_tensors(tensors(raw, seed), path / "model.safetensors")
    write_tokenizer(path, texts, fields.get("vocab_size"))
    return path


def stack_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors with one ``[E, out, in]`` instead of one per expert."""
    stacked: dict[str, Any] = {}
    for name, values in tensors.items():
        together = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        if together == name:  # llama.cpp's converter drops axes of size 1
            stacked[name] = values.squeeze()
        else:
            stacked.setdefault(together, []).append(values)
    return {name: np.stack(v) if isinstance(v, list) else v for name, v in stacked.items()}


def write_gguf(
    file, raw, tensors, quantize=None, extra=None, rope_factors=None, part_tensors=0
) -> None:
    """Writes a GGUF file with the names, row order and Gemma norms of llama.cpp's converter.

    If ``part_tensors`` is above 0, it is split into parts, the first without tensors.
    """
    import gguf

    model_type = str(raw["model_type"])
    arch = {hf: name for name, hf in gguf_weights.ARCHITECTURES.items()}.get(model_type, "llama")
    parts = {"split_max_tensors": part_tensors, "small_first_shard": part_tensors > 0}
    writer = gguf.GGUFWriter(str(file), arch, **parts)
    heads, kv = raw["num_attention_heads"], raw["num_key_value_heads"]
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    rope = raw["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "longrope":
        size = raw["hidden_size"] // heads
        writer.add_rope_dimension_count(int(size * rope["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(raw["original_max_position_embeddings"])
        for kind in ("short", "long"):
            factors = np.asarray(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if "head_dim" in raw:
        writer.add_key_length(raw["head_dim"])
        writer.add_value_length(raw["head_dim"])
    if arch.startswith("gemma") or arch == "phi3":
        writer.add_sliding_window(raw.get("sliding_window") or 0)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    if experts := raw.get("num_experts", raw.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        if "shared_expert_intermediate_size" in raw:
            writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])
        if "moe_intermediate_size" in raw:
            writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
        tensors = stack_experts(tensors)
    for add, value in (extra or {}).items():
        getattr(writer, add)(*value)
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, arch.upper()), raw["num_hidden_layers"]
    )
    for name, values in tensors.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        for letter, count in (("q", heads), ("k", kv)):
            if arch in ("llama", "smollm3") and f"self_attn.{letter}_proj" in name:
                split = values.reshape(count, 2, -1, *values.shape[1:])
                values = split.swapaxes(1, 2).reshape(values.shape)
        if arch.startswith("gemma") and "norm" in name:
            values = values + np.float32(1)
        if quantize is not None and values.ndim > 1:
            packed = gguf.quants.quantize(values, quantize)
            writer.add_tensor(stored, packed, raw_dtype=quantize)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_state(config: DecoderConfig) -> nnx.State:
    """Returns the `nnx.State` of a `Decoder` with random weights; compiles only once."""
    return jax.jit(lambda: nnx.state(decoder_params.Decoder(config, rngs=nnx.Rngs(0))))()


def random_params(config: DecoderConfig) -> decoder_params.Params:
    """Returns random weights as the dictionary that `decoder` accepts."""
    return decoder_params.to_params(random_state(config))


def parameter_count(config: DecoderConfig) -> int:
    """Returns the number of a decoder's parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(decoder_params.abstract_params(config)))
