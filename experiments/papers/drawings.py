"""The figures of the papers with our values; values that were not run are left out."""

import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cirag_jax.reports import difficulty, figures
from experiments.papers.printed import TITLES, Column, Printed

Values = Mapping[tuple[str, Column], Mapping[str, Any]]  # measured cells by row and column

# Axes of curves, and their labels.
_CURVES = {
    "steps": "maximum number of steps L", "hop": "hop", "hops": "hops",
    "passages": "passages of each retrieval, K_0", "candidates": "candidate triples N",
    "ratio": "share of corrupted facts", "setting": "value", "iterations": "iterations",
    "queries": "queries",
}  # fmt: skip
_SHARES = ("iterations", "queries")
# Parts of stacked bars, from the most to the least concise evidence.
_GRANULARITIES = ("triple", "sentence", "passage", "default")
# Figures of errors; in the others, except for shares, higher is better.
_ERRORS = {"c2rag_figure3c", "grade_figure3", "grade_figure4"}
_PANELS = 3  # in a row
_PANEL, _HEIGHT = 4.2, 3.6  # inches


class _Panel(NamedTuple):
    """A part of a figure.

    Attributes:
      title: what all its values share.
      ticks: the labels of the horizontal axis.
      lines: name of a system -> its cell at each tick, or None.
    """

    title: str
    ticks: Sequence[str]
    lines: Mapping[str, Sequence[Mapping[str, Any] | None]]


def draw(table: Printed, cells: Iterable[Mapping[str, Any]], folder: pathlib.Path) -> bool:
    """Writes ``PAPER_FIGURE.png`` and ``.svg`` into a folder.

    Args:
      table: a figure of a paper; nothing is drawn for a table.
      cells: our cells, as in the JSON files of `results`.
      folder: created if something is drawn.

    Returns:
      Whether a value was drawn.
    """
    values = {
        (cell["row"], tuple(cell["column"].values())): cell
        for cell in cells
        if cell["value"] is not None
    }
    if not values or not table.name.startswith("figure"):
        return False
    name = f"{table.paper}_{table.name}"
    if "seconds" in table.axes.get("metric", ()):
        figure, better = _scatter(table, values), "upper left is better"
    elif "quartile" in table.axes:
        figure, better = _heat_maps(table, values), "lower is better"
    elif table.rows[0].endswith(_GRANULARITIES[0]) and "metric" not in table.axes:
        figure, better = _stacks(table, values), "more triples need shorter evidence"
    else:
        axis = next((axis for axis in table.axes if axis in _CURVES), "")
        panels = list(_panels(table, values, axis or "data"))
        figure = _curves(panels, _CURVES[axis]) if axis else _bars(panels)
        better = "lower is better" if name in _ERRORS else "higher is better"
        if axis in _SHARES:
            better = "further left is cheaper"
    if figure is None:
        return False
    figure.suptitle(f"{figures.plain(table.title)}\n({better})")
    folder.mkdir(parents=True, exist_ok=True)
    figures.save(figure, folder, name)
    return True


def _title(values: Iterable[Any]) -> str:
    return figures.plain(" ".join(TITLES.get(value, f"{value}") for value in values))


def _panels(table: Printed, values: Values, axis: str) -> Iterator[_Panel]:
    """Yields a panel for each value of the other axes, or for each row with values of its own."""
    place = list(table.axes).index(axis)
    groups: dict[Column, list[Column]] = {}
    for column in table.columns:
        groups.setdefault((*column[:place], *column[place + 1 :]), []).append(column)
    for rest, columns in groups.items():
        lines = {row: [values.get((row, column)) for column in columns] for row in table.rows}
        lines = {row: cells for row, cells in lines.items() if any(cells)}
        ticks = [_title([column[place]]) for column in columns]
        if axis == "setting":  # A row is such as "gamma = 0.5, 1".
            for row, cells in lines.items():
                field, _, own = row.partition(" = ")
                yield _Panel(_title([field, *rest]), own.split(", "), {field: cells})
        elif lines:
            yield _Panel(_title(rest), ticks, lines)


def _axes(count: int) -> tuple[Any, list[Any]]:
    """Returns a figure with rows of at most three panels, and the panels."""
    rows, columns = -(-count // _PANELS), min(count, _PANELS)
    figure, axes = figures.pyplot().subplots(
        rows, columns, squeeze=False, layout="constrained",
        figsize=(_PANEL * columns + 1.6, _HEIGHT * rows + 0.4),
    )  # fmt: skip
    for unused in axes.flat[count:]:
        unused.remove()
    return figure, list(axes.flat[:count])


def _distances(cells: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    """Returns the distances to the ends of the intervals, [2, N]; None without intervals."""
    if any(cell["low"] is None for cell in cells):
        return None
    return np.array([[c["value"] - c["low"], c["high"] - c["value"]] for c in cells]).T.clip(0)


def _names(panels: Sequence[_Panel]) -> list[str]:
    """Returns the systems, each of which has one color in all panels."""
    return list(dict.fromkeys(name for panel in panels for name in panel.lines))


def _curves(panels: Sequence[_Panel], label: str) -> Any:
    figure, axes = _axes(len(panels))
    names = _names(panels)
    for own, panel in zip(axes, panels, strict=True):
        for name, cells in panel.lines.items():
            drawn = [(x, cell) for x, cell in enumerate(cells) if cell is not None]
            own.errorbar(
                [x for x, _ in drawn],
                [cell["value"] for _, cell in drawn],
                yerr=_distances([cell for _, cell in drawn]),
                label=figures.plain(name),
                capsize=3,
                **figures.style(names.index(name)),
            )
        _label(own, panel, label)
    _add_legend(axes, panels)
    return figure


def _bars(panels: Sequence[_Panel]) -> Any:
    figure, axes = _axes(len(panels))
    names = _names(panels)
    for own, panel in zip(axes, panels, strict=True):
        width = 0.8 / len(panel.lines)
        for number, (name, cells) in enumerate(panel.lines.items()):
            drawn = [(x, cell) for x, cell in enumerate(cells) if cell is not None]
            own.bar(
                [x + (number - (len(panel.lines) - 1) / 2) * width for x, _ in drawn],
                [cell["value"] for _, cell in drawn],
                width,
                yerr=_distances([cell for _, cell in drawn]),
                capsize=2,
                label=figures.plain(name),
                color=figures.style(names.index(name))["color"],
            )
        _label(own, panel, "")
    _add_legend(axes, panels)
    return figure


def _label(axes: Any, panel: _Panel, label: str) -> None:
    axes.set_xticks(range(len(panel.ticks)), panel.ticks)
    axes.set_xlabel(label)
    axes.set_title(panel.title)


def _add_legend(axes: Sequence[Any], panels: Sequence[_Panel]) -> None:
    """Adds a legend to the panel with the most systems, if there are several in a panel."""
    number = max(range(len(panels)), key=lambda n: (len(panels[n].lines), n))
    if len(panels[number].lines) > 1:
        figures.legend_on_the_right(axes[number])


def _stacks(table: Printed, values: Values) -> Any:
    """Draws a bar of granularities for each system and column."""
    bars: dict[str, dict[str, float]] = {}
    for (row, column), cell in values.items():
        system, _, granularity = row.rpartition(", ")
        bars.setdefault(_title([*([system] if system else []), *column]), {})[granularity] = cell[
            "value"
        ]
    figure, axes = _axes(1)
    own, bottom = axes[0], np.zeros(len(bars))
    for number, granularity in enumerate(_GRANULARITIES):
        heights = np.array([bar.get(granularity, 0.0) for bar in bars.values()])
        own.bar(
            list(bars), heights, 0.6, bottom=bottom, label=granularity,
            color=figures.COLORS[number], edgecolor="white",
        )  # fmt: skip
        bottom += heights
    own.set_ylabel("questions, %")
    own.tick_params("x", labelrotation=20)
    figures.legend_on_the_right(own)
    return figure


def _scatter(table: Printed, values: Values) -> Any:
    """Draws a score against the seconds of a question; None if no system has both."""
    (metric,) = (value for value in table.axes["metric"] if value != "seconds")
    pairs = [(values.get((row, ("seconds",))), values.get((row, (metric,)))) for row in table.rows]
    if not any(seconds and score for seconds, score in pairs):
        return None
    figure, axes = _axes(1)
    own = axes[0]
    for number, (row, (seconds, score)) in enumerate(zip(table.rows, pairs, strict=True)):
        if seconds and score:
            own.errorbar(
                [seconds["value"]], [score["value"]],
                xerr=_distances([seconds]), yerr=_distances([score]),
                label=figures.plain(row), linestyle="none", capsize=3, **figures.style(number),
            )  # fmt: skip
    own.set_xlabel("seconds per question")
    own.set_ylabel(_title([metric]))
    figures.legend_on_the_right(own)
    return figure


def _heat_maps(table: Printed, values: Values) -> Any:
    """Draws GRADE's matrices of errors, one for each domain and model."""
    matrices: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for row in table.rows:
        name, _, hops = row.rpartition(", ")
        cells = [values.get((row, column)) for column in table.columns]
        matrices.setdefault(name, {})[int(hops.removesuffix("-hop"))] = [
            {"value": cell and cell["value"], "num_questions": cell and cell["count"]}
            for cell in cells
        ]
    drawn = {
        name: matrix
        for name, matrix in matrices.items()
        if any(cell["value"] is not None for cells in matrix.values() for cell in cells)
    }
    return difficulty.draw(drawn, "error")
