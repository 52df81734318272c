"""Decoder families: the names of their tensors in checkpoints, for reading and for writing."""

import dataclasses
from collections.abc import Mapping

from cirag_jax.models import decoder_params
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.sharding import ShapesAndAxes


@dataclasses.dataclass(frozen=True)
class Entry:
    """A mapping from a checkpoint tensor to a parameter.

    Attributes:
      source: name in the checkpoint; ``{layer}`` stands for the layer index, ``{expert}`` for the
        number of an expert.
      target: parameter of `decoder_params.Decoder`, or of its layers if ``source`` has ``{layer}``.
      transpose: whether the parameter is the transpose; linear kernels are (out, in) in torch and
        (in, out) here.
      fused: name of a tensor whose rows are those of several entries (Phi-3); it is written in
        their place, and either form is read.
    """

    source: str
    target: str
    transpose: bool = False
    fused: str = ""


def _layer_entries(norms: Mapping[str, str]) -> tuple[Entry, ...]:
    base = "model.layers.{layer}."
    entries = [Entry(f"{base}{source}.weight", target) for source, target in norms.items()]
    for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))):
        for name in names:
            entries.append(Entry(f"{base}{part}.{name}_proj.weight", f"{name}_proj", True))
            entries.append(Entry(f"{base}{part}.{name}_proj.bias", f"{name}_bias"))
    for name in "qk":
        entries.append(Entry(f"{base}self_attn.{name}_norm.weight", f"{name}_norm"))
    return tuple(entries)


_OUTER = (
    Entry("model.embed_tokens.weight", "embedding"),
    Entry("model.norm.weight", "final_norm"),
    Entry("lm_head.weight", "lm_head", True),
)
_LLAMA = (
    *_OUTER,
    *_layer_entries({"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}),
)
_GEMMA = (
    *_OUTER,
    *_layer_entries(
        {
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "attention_post_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_post_norm",
        }
    ),
)


def _fuse(entry: Entry) -> Entry:
    for name, parts in decoder_params.FUSED.items():
        if entry.target in parts:
            return dataclasses.replace(entry, fused=entry.source.replace(entry.target, name))
    return entry


def _experts(part: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """Returns the entries of a mixture of experts; ``part`` is the name of the layer."""
    base, targets = f"model.layers.{{layer}}.{part}.", ("expert_gate", "expert_up", "expert_down")
    return (
        Entry(f"{base}gate.weight", "router", True),
        *(
            Entry(f"{base}experts.{{expert}}.{name}.weight", target, True)
            for name, target in zip((gate, up, down), targets, strict=True)
        ),
    )


_QWEN_EXPERTS = (
    *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    *(
        Entry(f"model.layers.{{layer}}.mlp.shared_expert.{name}.weight", f"shared_{name}", True)
        for name in ("gate_proj", "up_proj", "down_proj")
    ),
    Entry("model.layers.{layer}.mlp.shared_expert_gate.weight", "shared_score_proj", True),
)

# model_type -> all possible tensors; the model's configuration determines which are required.
FAMILIES: Mapping[str, tuple[Entry, ...]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "smollm3"), _LLAMA),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
    "phi3": tuple(map(_fuse, _LLAMA)),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), (*_LLAMA, *_QWEN_EXPERTS)),
    "mixtral": (*_LLAMA, *_experts("block_sparse_moe", "w1", "w3", "w2")),
}

_LATENT = "model.latent_attention_model."
_ATTEND, _FEED = (f"{_LATENT}cross_attend_blocks.{block}." for block in (0, 1))
# NV-Embed-v2: Mistral, and latent attention in the names of its official code.
_NV_EMBED = (
    *_LLAMA,
    Entry(f"{_LATENT}latents", "latents"),
    Entry(f"{_ATTEND}norm.weight", "latent_norm"),
    Entry(f"{_ATTEND}norm.bias", "latent_norm_bias"),
    Entry(f"{_ATTEND}norm_context.weight", "latent_context_norm"),
    Entry(f"{_ATTEND}norm_context.bias", "latent_context_norm_bias"),
    Entry(f"{_ATTEND}fn.to_q.weight", "latent_query", True),
    Entry(f"{_ATTEND}fn.to_kv.weight", "latent_key_value", True),
    Entry(f"{_ATTEND}fn.to_out.weight", "latent_out", True),
    Entry(f"{_FEED}norm.weight", "latent_mlp_norm"),
    Entry(f"{_FEED}norm.bias", "latent_mlp_norm_bias"),
    Entry(f"{_FEED}fn.net.0.weight", "latent_up", True),
    Entry(f"{_FEED}fn.net.0.bias", "latent_up_bias"),
    Entry(f"{_FEED}fn.net.2.weight", "latent_down", True),
    Entry(f"{_FEED}fn.net.2.bias", "latent_down_bias"),
)
# Models that only embed texts, as in `FAMILIES`.
EMBEDDERS: Mapping[str, tuple[Entry, ...]] = {"nvembed": _NV_EMBED}

# Buffers of older checkpoints, which are computed instead of loaded, parts for images, and the copy
# of the embedding that some checkpoints store as output layer; see `has_own_head`.
IGNORED = (
    *("*.rotary_emb.inv_freq", "*.self_attn.bias", "*.self_attn.masked_bias"),
    *("model.vision_tower.*", "model.multi_modal_projector.*"),
    "lm_head.weight",
)


@dataclasses.dataclass(frozen=True)
class ParameterTensors:
    """A parameter with the checkpoint tensors that it consists of.

    Attributes:
      path: path of the parameter: ``("embedding",)`` or ``("layers", "q_proj")``.
      names: full name of the tensor, of one tensor per layer, or of one per layer and expert.
      shape: shape of each tensor in the checkpoint.
      transpose: whether the parameter is the transpose.
      layers: the layers that have the parameter.
      experts: number of experts, 0 if the parameter has no such axis.
      fused: for each name, the tensor that may contain its rows (`Entry.fused`); empty if none.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    transpose: bool
    layers: tuple[int, ...] = ()
    experts: int = 0
    fused: tuple[str, ...] = ()

    @property
    def stacked(self) -> bool:
        """Whether the parameter has a leading layer axis."""
        return self.path[0] == "layers"


def parameter_tensors(
    config: DecoderConfig, model_type: str, more: ShapesAndAxes | None = None
) -> list[ParameterTensors]:
    """Returns all parameters of a model with their checkpoint tensors; layers come last.

    ``more`` are parameters outside the layers, next to those of `decoder_params.outer_parameters`.
    """
    family = {**FAMILIES, **EMBEDDERS}[model_type]
    entries = {("{layer}" in entry.source, entry.target): entry for entry in family}
    result = []
    for in_layers, parameters in (
        (False, {**decoder_params.outer_parameters(config), **(more or {})}),
        (True, decoder_params.layer_parameters(config)),
    ):
        for target, (shape, _) in parameters.items():
            entry = entries[in_layers, target]
            layers = decoder_params.layers_with(config, target) if in_layers else ()
            count = config.num_experts if "{expert}" in entry.source else 0
            names = tuple(
                entry.source.format(layer=layer, expert=expert)
                for layer in (layers if in_layers else (0,))
                for expert in range(count or 1)
            )
            path = ("layers", target) if in_layers else (target,)
            shape = shape[1:] if count else shape
            stored_shape = shape[::-1] if entry.transpose else shape
            fused = tuple(entry.fused.format(layer=layer) for layer in layers if entry.fused)
            result.append(
                ParameterTensors(path, names, stored_shape, entry.transpose, layers, count, fused)
            )
    return result
