"""Model-FLOPs utilization (MFU): the cost of training, and the peak performance of devices."""

import math
from typing import NamedTuple

from cirag_jax.models import decoder_params, encoder
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.embedder import EmbedderConfig
from cirag_jax.models.encoder_config import EncoderConfig


class Device(NamedTuple):
    """A model of GPU or TPU with the values of its data sheet.

    Attributes:
      kind: beginning of the name that the driver reports.
      memory_gib: device memory in GiB.
      flops: peak of dense bfloat16 products in FLOP/s (half of the value with sparsity).
      bandwidth: memory bandwidth in bytes per second.
      source: the data sheet.
    """

    kind: str
    memory_gib: float
    flops: float
    bandwidth: float
    source: str


GPUS = {
    "B200": Device("NVIDIA B200", 180, 2250e12, 8.0e12, "DGX B200 data sheet, an eighth"),
    "H200": Device("NVIDIA H200", 141, 989e12, 4.8e12, "H200 data sheet, SXM"),
    "H100": Device("NVIDIA H100", 80, 989e12, 3.35e12, "H100 data sheet, SXM"),
    "H100-PCIe": Device("NVIDIA H100 PCIe", 80, 756e12, 2.0e12, "H100 data sheet, PCIe"),
    "A100-80": Device("NVIDIA A100", 80, 312e12, 2.039e12, "A100 data sheet, 80 GB SXM"),
    "A100-40": Device("NVIDIA A100", 40, 312e12, 1.555e12, "A100 data sheet, 40 GB SXM"),
    "L40S": Device("NVIDIA L40S", 48, 362e12, 0.864e12, "L40S data sheet"),
    "A6000": Device("NVIDIA RTX A6000", 48, 155e12, 0.768e12, "RTX A6000 data sheet"),
}


# By the complete name, because "TPU v5" (v5p) is the beginning of "TPU v5 lite" (v5e). A device is
# a chip, except that the two halves of a TPU7x chip are devices of their own.
_TPU_DOCS = "docs.cloud.google.com/tpu/docs/"
TPUS = {
    tpu.kind: tpu
    for tpu in (
        Device("TPU v4", 32, 275e12, 1.2e12, _TPU_DOCS + "v4"),
        Device("TPU v5 lite", 16, 197e12, 0.819e12, _TPU_DOCS + "v5e"),
        Device("TPU v5", 95, 459e12, 2.765e12, _TPU_DOCS + "tpu7x, column v5p"),
        Device("TPU v6 lite", 32, 918e12, 1.638e12, _TPU_DOCS + "v6e"),
        Device("TPU7x", 96, 1153.5e12, 3.69e12, _TPU_DOCS + "tpu7x, half a chip"),
    )
}


def device_of(kind: str) -> Device | None:
    """Returns the TPU of this name, or the GPU whose name is the longest prefix of it, or None."""
    if kind in TPUS:
        return TPUS[kind]
    known = [gpu for gpu in GPUS.values() if kind.startswith(gpu.kind)]
    return max(known, key=lambda gpu: len(gpu.kind)) if known else None


def peak_flops(kind: str) -> float | None:
    """Returns the peak FLOP/s of a device kind, or None if it is not in the table."""
    gpu = device_of(kind)
    return None if gpu is None else gpu.flops


def lora_flops(
    config: DecoderConfig,
    rank: int,
    targets: tuple[str, ...],
    *,
    tokens: int,
    supervised: int,
    attended: int,
    is_frozen: bool = True,
) -> float:
    """Returns the floating-point operations of one gradient of an adapter with a frozen base.

    The number is ``(4 P + 6 A) tokens + 4 V D supervised + 6 L N H attended``, with P weights in
    the linear layers, A in the adapter and V D in the output layer, L layers and N heads of size H.
    In a mixture of experts, P counts the experts that a token uses. The backward pass of the frozen
    base needs one product instead of two; without ``is_frozen``, 4 is 6. Causal attention needs
    half of the scores. Only supervised tokens need the output layer. Recomputation, padding, norms
    and the optimizer are not counted.

    ``tokens`` counts real tokens. ``attended`` is the sum of the squared lengths of the examples.
    """
    linear = adapter = 0
    for name, (shape, _) in decoder_params.layer_parameters(config).items():
        count = len(decoder_params.layers_with(config, name))
        if name in decoder_params.EXPERTS:
            linear += count * config.experts_per_token * math.prod(shape[1:])
        elif name.endswith("_proj") or name == "router":
            linear += count * math.prod(shape)
    for name in targets:
        shape, _ = decoder_params.target_parameter(config, name)
        adapter += config.num_layers * rank * sum(shape)
    head = config.d_model * config.vocab_size
    attention = config.num_layers * config.num_heads * config.head_dim
    factor = 4.0 if is_frozen else 6.0
    dense = (factor * linear + 6.0 * adapter) * tokens
    return dense + factor * head * supervised + 6.0 * attention * attended


def embedder_flops(config: EncoderConfig | EmbedderConfig, *, tokens: int, attended: int) -> float:
    """Returns the floating-point operations of one gradient of a text encoder.

    For a decoder, see `lora_flops`. Pooling, latent attention and dense layers are not counted.
    """
    if not isinstance(config, EmbedderConfig):
        return encoder_flops(config, tokens=tokens, attended=attended)
    rank, targets = (0, ()) if config.lora is None else (config.lora.rank, config.lora.names)
    return lora_flops(
        config.decoder,
        rank,
        targets,
        tokens=tokens,
        supervised=0,
        attended=attended,
        is_frozen=config.lora is not None,
    )


def encoder_flops(config: EncoderConfig, *, tokens: int, attended: int) -> float:
    """Returns the floating-point operations of one gradient of an encoder.

    The number is ``6 P tokens + 12 L D attended``, with P weights in the linear layers, L layers
    and width D. Recomputation, padding, embeddings, norms and the optimizer are not counted.
    ``attended`` is the sum of the squared lengths of the texts.
    """
    shapes = encoder.layer_parameters(config).items()
    kernels = sum(math.prod(shape) for name, (shape, _) in shapes if name.endswith("_kernel"))
    width = config.num_layers * config.d_model
    return 6.0 * config.num_layers * kernels * tokens + 12.0 * width * attended
