"""Loading of models and adapters for the engine."""

import contextlib
import logging
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError, check_choice
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.models import decoder_params
from cirag_jax.models import lora as lora_lib
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import DEFAULT_LORA, Adapter, LoraOptions
from cirag_jax.models.io import peft_format
from cirag_jax.models.io.pretrained_decoder import check_tokenizer, load_decoder
from cirag_jax.models.lora import LoraConfig

log = logging.getLogger(__name__)

CPU_FEATURES = pathlib.Path("/proc/cpuinfo")  # exists on Linux only


class Loaded(NamedTuple):
    """A model with unstacked weights, and its adapter."""

    config: DecoderConfig
    params: decoder_params.Params
    tokenizer: ChatTokenizer
    adapter: Adapter | None
    lora: LoraOptions


def load(
    model: str,
    adapter: str | tuple[nnx.State, LoraConfig] | None,
    merge_adapter: bool,
    dtype: Literal["float32", "bfloat16", "int8"] | None,
    mesh: jax.sharding.Mesh | None,
    template_kwargs: Mapping[str, Any] | None,
) -> Loaded:
    """Loads a model; see `engine.Engine.open`."""
    check_choice("dtype", dtype, (None, "float32", "bfloat16", "int8"))
    if dtype == "int8":
        if jax.default_backend() != "cpu" or mesh is not None:
            raise UserError("dtype=int8 is for one CPU; use dtype=bfloat16 on other devices.")
        computed, stored = "float32", "bfloat16"  # rounds again below
    elif jax.default_backend() == "cpu" and dtype == "bfloat16":
        computed, stored = "float32", _cpu_weight_dtype()
    else:
        computed = stored = dtype
    loaded = load_decoder(model, dtype=computed, param_dtype=stored, mesh=mesh)
    tokenizer = ChatTokenizer.load(loaded.folder, template_kwargs)
    check_tokenizer(tokenizer, loaded.config.vocab_size, loaded.folder)
    with on_mesh(mesh):
        params = decoder_params.to_params(loaded.state)
        # A second copy of a large model would not fit in memory.
        params = decoder_params.unstack_layers(params, loaded.config, consume=True)
    pairs, lora_options = None, DEFAULT_LORA
    if adapter is not None:
        pairs, lora_options = load_adapter(adapter, loaded.config, mesh)
        if merge_adapter:
            scale = lora_options.scale
            unstacked = unstack(pairs, loaded.config)
            params = lora_lib.merge(params, unstacked, scale, consume=True)
            pairs = None
    params = fuse_kernels(params, mesh)
    if mesh is None and computed == "float32" and stored == "bfloat16":
        params = decoder_params.pack_kernels(loaded.config, params, int8=dtype == "int8")
    return Loaded(loaded.config, params, tokenizer, pairs, lora_options)


def load_adapter(
    adapter: str | tuple[nnx.State, LoraConfig],
    config: DecoderConfig,
    mesh: jax.sharding.Mesh | None,
) -> tuple[Adapter, LoraOptions]:
    """Returns an adapter for inference, from a folder in PEFT's format or from memory."""
    if isinstance(adapter, str):
        state, lora_config = peft_format.load_adapter(adapter, config, mesh=mesh)
    else:
        state, lora_config = adapter
        state = state if mesh is None else sharding.shard_state(state, mesh)
    return lora_lib.to_adapter(state), lora_lib.lora_options(lora_config, train=False)


def unstack(tree: Any, config: DecoderConfig) -> Any:
    """Returns weights or an adapter with separate layers; copies stacked layers one by one."""
    if tree is None or isinstance(tree["layers"], tuple):
        return tree
    return decoder_params.unstack_layers(tree, config)


def fuse_kernels(params: decoder_params.Params, mesh: jax.sharding.Mesh | None) -> Any:
    """Returns unstacked weights with fused kernels if they are on one accelerator.

    On a CPU, wide products of many rows are not faster. On a mesh, the columns of the parts would
    have to be interleaved by device.
    """
    if mesh is not None or jax.default_backend() == "cpu":
        return params
    return decoder_params.fuse_kernels(params)


def on_mesh(mesh: jax.sharding.Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which programs run on ``mesh``; None is one device."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _cpu_weight_dtype() -> Literal["float32", "bfloat16"]:
    """Returns bf16 if the CPU has instructions for it (detected only on Linux), otherwise fp32."""
    try:
        features = set(CPU_FEATURES.read_text("utf-8").split())
    except OSError:
        features = set()
    if features & {"avx512_bf16", "amx_bf16", "bf16"}:
        return "bfloat16"
    log.info("this CPU has no instructions for bfloat16; weights are float32")
    return "float32"
