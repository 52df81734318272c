"""Helpers of the benchmarks: alternating measurements of two sides, and a check for PyTorch."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Seconds(NamedTuple):
    """Wall time and processor time of one call, in seconds."""

    wall: float
    processor: float


def time_call(call: Callable[[], Any]) -> Seconds:
    """Measures one call."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return Seconds(time.perf_counter() - wall, time.process_time() - processor)


def alternately(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Seconds]:
    """Returns the median of each side; sides are measured in turn, after an unmeasured call."""
    for call in sides.values():
        call()
    measured: dict[str, list[Seconds]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            measured[name].append(time_call(call))
    return {
        name: Seconds(*map(statistics.median, zip(*values, strict=True)))
        for name, values in measured.items()
    }


def row(seconds: dict[str, Seconds], **rest: Any) -> dict[str, Any]:
    """Returns the seconds of both sides, and the ratios of wall time and of processor time."""
    ours, theirs = seconds["ours"], seconds["theirs"]
    return {
        "ours_seconds": round(ours.wall, 4),
        "theirs_seconds": round(theirs.wall, 4),
        "ratio": round(ours.wall / theirs.wall, 3),
        "processor_ratio": round(ours.processor / theirs.processor, 3),
        **rest,
    }


def has_torch(device: str) -> bool:
    """Returns whether PyTorch is installed and has the device; False for ``none``."""
    if device == "none":
        return False
    try:
        import torch
    except ImportError:
        return False
    return device != "cuda" or torch.cuda.is_available()
