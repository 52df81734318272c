"""Model-FLOPs utilisation (mfu): what a trained token costs, and what devices can do."""

from cirag_jax.models import decoder
from cirag_jax.models.decoder import DecoderConfig

# Dense bf16 peak in FLOP/s by the name that the driver gives; from the makers' data sheets.
PEAK_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA RTX A6000": 155e12,
}


def peak_flops(kind: str) -> float | None:
    """Peak of the longest name in the table that ``kind`` starts with; None if there is none."""
    names = [name for name in PEAK_FLOPS if kind.startswith(name)]
    return PEAK_FLOPS[max(names, key=len)] if names else None


def lora_flops(
    config: DecoderConfig,
    rank: int,
    targets: tuple[str, ...],
    *,
    tokens: int,
    supervised: int,
    attended: int,
) -> float:
    """Floating-point operations of one gradient of an adapter, its base frozen.

    With P weights in the linear layers, V D in the output layer and A in the adapter, L layers and
    N heads of size H: ``(4 P + 6 A) tokens + 4 V D supervised + 6 L N H attended``. The base is
    frozen, so that its backward pass is one product, not two; attention is causal, so that half of
    its scores are; only supervised tokens need the output layer; recomputation, padding, norms and
    the optimiser do not count.

    ``tokens`` are real ones, ``supervised`` those that the loss counts; ``attended`` is the sum
    over examples of their squared lengths.
    """
    shapes = {n: s for n, (s, _) in decoder.layer_parameters(config).items() if n.endswith("_proj")}
    linear = config.num_layers * sum(rows * columns for rows, columns in shapes.values())
    adapter = config.num_layers * rank * sum(sum(shapes[name]) for name in targets)
    head = config.d_model * config.vocab_size
    attention = config.num_layers * config.num_heads * config.head_dim
    dense = (4.0 * linear + 6.0 * adapter) * tokens
    return dense + 4.0 * head * supervised + 6.0 * attention * attended
