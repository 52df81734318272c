"""Results of one kind, of a training's checkpoints or the runs of a sweep, beside each other."""

import math
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.identity import check_same
from cirag_jax.io import read_object
from cirag_jax.reports.tables import markdown
from cirag_jax.training.state import is_training
from cirag_jax.types import Config

Figures = dict[str, float | None]

# The main figure of an evaluation, by its component.
_METRICS = {
    "integrator": "systems.student.teacher.f1",
    "extractor": "systems.student.soft.f1",
    "reader": "systems.student.all.f1",
}
# Fields of a config that may differ when a run is resumed: they do not change its result.
MAY_DIFFER = (
    *("mesh", "in_flight", "cache", "stop_after_minutes"),
    *("save_every", "keep_checkpoints", "profile_steps", "follow", "metric"),
)


def metric_of(config: Config) -> str:
    """The figure to compare by: ``config.metric``, or the main one of such a result."""
    if config.get("metric") is not None:
        return config.metric
    if is_training(config):
        return config.best_metric
    component = config.get("component")
    if component is None and config.recall_at:
        ks = tuple(config.recall_at)
        return f"trained.recall@{5 if 5 in ks else max(ks)}"
    if component not in _METRICS:
        raise UserError("config.metric is required: a number of the result, block.block.name.")
    return _METRICS[component]


def figures(result: Mapping[str, Any], metric: str) -> Figures:
    """The number ``metric`` of a result, and after it those of the same block, by their last names.

    Of a score with its interval it is the value.
    """
    numbers = dict(_numbers(result))
    if metric not in numbers:
        known = ", ".join(sorted(numbers))
        raise UserError(f"config.metric={metric} is no number of the result; it has {known}.")
    block = metric[: _last_name(metric)]
    beside = {
        name[len(block) :]: value
        for name, value in numbers.items()
        if name[: _last_name(name)] == block
    }
    return {metric[len(block) :]: numbers[metric], **beside}


def _last_name(name: str) -> int:
    """Where it begins."""
    return max(name.rfind("."), name.rfind("/")) + 1


def _numbers(result: Mapping[str, Any], block: str = "") -> Iterator[tuple[str, float | None]]:
    for name, value in result.items():
        if isinstance(value, Mapping) and "value" in value:
            value = value["value"]
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{block}{name}.")
        elif value is None or _is_number(value):
            yield f"{block}{name}", value


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and not abs(value) > sys.float_info.max  # an integer of 400 digits; NaN is a number here
    )


def best_of(values: Mapping[Any, float | None], metric: str) -> Any:
    """The key of the best value, the last of several; the lower the better where ``metric`` has
    "loss" in its name. None where there is no value.
    """
    sign = -1 if "loss" in metric else 1
    known = [key for key, value in values.items() if value is not None and math.isfinite(value)]
    return max(reversed(known), key=lambda key: sign * (values[key] or 0.0), default=None)


def table(rows: Mapping[tuple[str, ...], Figures], keys: Sequence[str]) -> str:
    """Markdown, a line for each row: its key's parts under ``keys``, then its figures."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    cells = [[*key, *(cell(row.get(name)) for name in names)] for key, row in rows.items()]
    return markdown([[*keys, *names], *cells])


def cell(value: float | None) -> str:
    """A number of a table."""
    return "" if value is None else f"{value:.4g}"


def finished(folder: pathlib.Path, config: Config) -> dict[str, Any] | None:
    """The result in the folder of a run with this config; None: the run has not come to its end."""
    result = read_object(folder / "result.json", optional=True)
    if not result or result.get("complete") is False:
        return None
    old = read_object(folder / "config.json")
    check_same(folder, old, config.to_dict(), may_differ=MAY_DIFFER)
    return result
