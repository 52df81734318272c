"""A tiny decoder with an adapter, in PEFT and in this package, with equal random weights."""

import contextlib
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import peft
import torch
import transformers

from cirag_jax.models import lora
from cirag_jax.models.io.pretrained_decoder import TextDecoder, load_decoder
from cirag_jax.models.lora import LoraConfig
from tests import tiny_decoder


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Ignores a warning: peft 0.21.2 uses an alias that transformers 5.23 deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def peft_model(folder: pathlib.Path, config: LoraConfig, seed: int = 0, **fields: Any) -> Any:
    """Returns PEFT's model of the checkpoint in evaluation mode, with random A and B."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings: dict[str, Any] = {
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": list(config.names),
        "use_rslora": config.rank_stabilised,
        "task_type": "CAUSAL_LM",
        **fields,
    }
    with quiet_peft():
        model = peft.get_peft_model(base, peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            values = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
            weight.data.copy_(values)
    return model.eval()


def stacked(model: Any, names: tuple[str, ...], layers: int, gradient: bool = False) -> Any:
    """Converts PEFT's weights or gradients to an adapter of this package."""

    def pair(name: str, side: str) -> np.ndarray:
        rows = []
        for layer in model.base_model.model.model.layers[:layers]:
            part = layer.self_attn if name[0] in "qkvo" else layer.mlp
            weight = getattr(getattr(part, name), side)["default"].weight
            rows.append((weight.grad if gradient else weight.detach()).numpy().T.copy())
        return np.stack(rows)

    return {"layers": {n: {"a": pair(n, "lora_A"), "b": pair(n, "lora_B")} for n in names}}


def both(
    folder: pathlib.Path, config: LoraConfig, family: str = "llama", **fields: Any
) -> tuple[Any, TextDecoder, Any]:
    """Returns PEFT's model, our decoder, and our adapter state with PEFT's weights."""
    tiny_decoder.folder(folder, family, **fields)
    model, ours = peft_model(folder, config), load_decoder(str(folder))
    adapter = stacked(model, config.names, ours.config.num_layers)
    state = lora.abstract_adapter(ours.config, config)
    leaves = jax.tree.leaves(jax.tree.map(jax.numpy.asarray, adapter))
    return model, ours, jax.tree.unflatten(jax.tree.structure(state), leaves)
