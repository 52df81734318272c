"""Tables that compare the checkpoints of a training run, or the runs of a sweep."""

import math
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.evaluation import ranking
from cirag_jax.identity import check_same
from cirag_jax.io import read_object
from cirag_jax.reports.tables import markdown
from cirag_jax.training.state import component_of, is_training
from cirag_jax.types import Config

Figures = dict[str, float | None]

# The main metric of an evaluation, by component.
_METRICS = {
    "integrator": "systems.student.teacher.f1",
    "extractor": "systems.student.soft.f1",
    "reader": "systems.student.all.f1",
}
# Definitions of recall@K in tables: of an evaluation of retrieval, and of training by component.
_RECALLS = {
    None: "share of the gold passages among the first K",
    "aligner": "share of steps with the next unit among the first K; linked_recall@K, "
    "aligner_recall@K: share of the gold passages among the first K",
    "cross_encoder": "share of the gold texts among the first K",
}
# Fields of a config that may change when a run is resumed, because they do not affect the result.
MAY_DIFFER = (
    *("mesh", "in_flight", "cache", "stop_after_minutes"),
    *("save_every", "keep_checkpoints", "profile_steps", "tracker", "follow", "metric"),
)


def metric_of(config: Config) -> str:
    """Returns ``config.metric``, or the main metric of this kind of run."""
    if config.get("metric") is not None:
        return config.metric
    if is_training(config):
        return config.best_metric
    component = config.get("component")
    if component is None and config.recall_at:
        ks = tuple(config.recall_at)
        return f"trained.recall@{5 if 5 in ks else max(ks)}"
    if component not in _METRICS:
        raise UserError(
            "config.metric is required: the name of a number in result.json, such as block.name."
        )
    return _METRICS[component]


def recall_note(config: Config) -> str:
    """Returns the definition of recall@K for the caption of a table, or "" without recall."""
    component = component_of(config) if is_training(config) else config.get("component")
    return f" recall@K: {_RECALLS[component]}." if component in _RECALLS else ""


def figures(result: Mapping[str, Any], metric: str) -> Figures:
    """Returns the value of ``metric`` in a result, and the other numbers in its block.

    The keys are the names without the block. Scores with intervals are reduced to their values.
    """
    numbers = dict(_numbers(result))
    if metric not in numbers:
        names = ", ".join(sorted(numbers))
        raise UserError(f"config.metric={metric} is not in the result; choose one of {names}.")
    block, last = _split(metric)
    others = {_split(name)[1]: v for name, v in numbers.items() if _split(name)[0] == block}
    return {last: numbers[metric], **others}


def _split(name: str) -> tuple[str, str]:
    """Splits ``block.name`` or ``block/name`` before the last name."""
    start = max(name.rfind("."), name.rfind("/")) + 1
    return name[:start], name[start:]


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
        and not abs(value) > sys.float_info.max  # not an integer of 400 digits; NaN passes
    )


def best_of(values: Mapping[Any, float | None], metric: str) -> Any:
    """Returns the key of the best value, the last one if several are equal; None without values.

    Lower is better for losses.
    """
    sign = -1 if "loss" in metric else 1
    keys = [key for key, value in values.items() if value is not None and math.isfinite(value)]
    return max(reversed(keys), key=lambda key: sign * (values[key] or 0.0), default=None)


def table(rows: Mapping[tuple[str, ...], Figures], keys: Sequence[str]) -> str:
    """Returns a Markdown table; each row has the parts of its key, then its numbers.

    Of the ranking scores, only a metric, the first number of a row, is a column.
    """
    metrics = {next(iter(row)) for row in rows.values() if row}
    names = [
        name
        for name in dict.fromkeys(name for row in rows.values() for name in row)
        if name in metrics or name == "mrr" or name.partition("@")[0] not in ranking.TITLES
    ]
    cells = [[*key, *(cell(row.get(name)) for name in names)] for key, row in rows.items()]
    return markdown([[*keys, *names], *cells])


def cell(value: float | None) -> str:
    """Formats a number of a table."""
    return "" if value is None else f"{value:.4g}"


def finished(folder: pathlib.Path, config: Config) -> dict[str, Any] | None:
    """Returns the result in a run's folder, or None if the run is not complete."""
    result = read_object(folder / "result.json", optional=True)
    if not result or result.get("complete") is False:
        return None
    old = read_object(folder / "config.json")
    check_same(folder, old, config.to_dict(), may_differ=MAY_DIFFER)
    return result
