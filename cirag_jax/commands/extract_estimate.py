"""What an extraction will take, before it starts: tokens, money, time."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cirag_jax.llm.openai_format import estimate_tokens
from cirag_jax.methods.extraction import ExtractionSettings
from cirag_jax.prompts.extraction import entity_messages, triple_messages
from cirag_jax.types import Passage

# Assumed where nothing has been measured: parameters read per second, operations per second, rows
# of a batch; and a server's tokens per second.
_MACHINE = {"cpu": (2e9, 1e11, 16), "other": (5e11, 1e14, 64)}
_SERVER_RATE = 40.0
_BYTES = {".gguf": 0.6, ".safetensors": 2.0}  # a parameter, in a file of a usual kind


@dataclasses.dataclass
class Workload:
    """Passages to extract, counted on the high side.

    Attributes:
        settings: How they are extracted.
        passages: How many.
        text_tokens: Of titles and texts; read once for each of the two calls.
    """

    settings: ExtractionSettings
    passages: int = 0
    text_tokens: int = 0

    def add(self, passage: Passage) -> None:
        """Counts a passage."""
        self.passages += 1
        size = len(passage.title.encode("utf-8", "replace"))
        size += len(passage.text.encode("utf-8", "replace"))
        self.text_tokens += size // 3 + 1

    @property
    def shared_tokens(self) -> int:
        """Tokens of instruction and worked example, of both calls."""
        nothing = Passage("", "", "")
        turns = (*entity_messages(nothing), *triple_messages(nothing, ()))
        return estimate_tokens(turns)

    @property
    def new_prompt_tokens(self) -> int:
        """Prompt tokens that no other passage shares: texts twice, entities once."""
        return 2 * self.text_tokens + self.passages * self.settings.entity_tokens // 2

    @property
    def prompt_tokens(self) -> int:
        """All prompt tokens, at most about."""
        return self.passages * self.shared_tokens + self.new_prompt_tokens

    @property
    def generated_tokens(self) -> int:
        """Both answers at their full length."""
        return self.passages * (self.settings.entity_tokens + self.settings.triple_tokens)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Upper bounds, roughly; ``cost`` is None without prices, ``measured`` tells a true rate."""

    passages: int
    prompt_tokens: int
    generated_tokens: int
    cost: float | None
    seconds: float
    measured: bool

    def __str__(self) -> str:
        money = "" if self.cost is None else f", costing at most about {self.cost:.4g}"
        basis = "at the rate so far" if self.measured else "a guess until a rate is measured"
        return (
            f"{self.passages:,} passages: at most about {self.prompt_tokens:,} prompt tokens and "
            f"{self.generated_tokens:,} generated tokens{money}, in about "
            f"{duration(self.seconds)} ({basis})"
        )


def parameters(files: Iterable[Path]) -> float:
    """About how many parameters a local model's files hold."""
    return sum(file.stat().st_size / _BYTES.get(file.suffix, 2.0) for file in files)


def estimate(work: Workload, config: Any, size: float, rate: float | None) -> Estimate:
    """What ``work`` takes at most.

    Args:
        work: The passages.
        config: Of `configs.common.language_model`.
        size: Parameters of a local model; 0 for a server's.
        rate: Passages per second, measured before; None: estimated from ``size`` (every decoding
            step reads all parameters once, for all rows of the batch) or, for a server, from 40
            tokens per second and request.
    """
    if rate is not None:
        seconds = work.passages / rate
    elif config.backend == "openai":
        seconds = work.generated_tokens / (_SERVER_RATE * config.max_concurrency)
    else:
        seconds = _local_seconds(work, config, size)
    return Estimate(
        work.passages,
        work.prompt_tokens,
        work.generated_tokens,
        _cost(work, config),
        seconds,
        rate is not None,
    )


def _local_seconds(work: Workload, config: Any, size: float) -> float:
    import jax

    machine = "cpu" if jax.default_backend() == "cpu" else "other"
    reading, operations, rows = _MACHINE[machine]
    rows = min(config.batch_size or rows, max(work.passages, 1))
    decoding = work.generated_tokens / rows * size / reading
    return decoding + work.new_prompt_tokens * 2 * size / operations


def _cost(work: Workload, config: Any) -> float | None:
    prices = config.prices
    if prices.prompt is None or prices.generated is None:
        return None
    return (
        work.prompt_tokens * prices.prompt + work.generated_tokens * prices.generated
    ) / 1_000_000


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    if seconds < 172_800:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 86_400:.1f} days"
