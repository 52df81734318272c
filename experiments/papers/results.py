"""The measured values of the papers' tables: one JSON file each, and the page of all of them."""

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cirag_jax.io import read_object, write_json, write_text
from cirag_jax.reports.tables import markdown
from experiments.papers import drawings
from experiments.papers.answers import Score
from experiments.papers.printed import PAPERS, TITLES, Column, Printed
from experiments.paths.declare import Cell, Experiment, Measured
from experiments.paths.planning import ROOT, Plan
from experiments.paths.running import read_result

FOLDER = ROOT / "experiments" / "results"
PAGE = ROOT / "docs" / "reproduction.md"
NOT_RUN = "not run"
_MOST_COLUMNS = 12  # A wider table is split by its first axis.
_INTRO = """# Reproduction

This page is written by `python experiments/run.py --collect`. Do not edit it.

For every table and figure of the papers, it shows the paper's value, our value with its 95 % \
interval, and the difference in brackets. *n* is the number of questions. A dash is a \
cell for which the paper prints no number. \
[The papers' paths](papers.md#tables-and-figures) describes the commands and the scales: values at \
scale `small` come from much smaller models, fewer questions and fewer passages than the paper's, \
so that only differences between rows can be compared with the paper's.

Below a table are the differences of its rows from the paper's own system, in points, if both \
answered the same questions in our runs: 95 % intervals of the paired bootstrap, and p of the \
two-sided permutation test with Holm's correction for all pairs of runs in a comparison. A dash \
there means that the score is undefined, that both rows have the same run, or that a run followed \
its output format in at most half of its responses."""


# ----------------------------------------------------------------------------------------- one file


def collect(experiment: Experiment, scale: str, plan: Plan, folder: pathlib.Path) -> bool:
    """Writes ``EXPERIMENT.json`` if one of the table's cells was measured; returns whether."""
    assert experiment.table is not None
    folders = plan.names.get(experiment.name, {})
    results = {
        name: result
        for name, path in folders.items()
        if (result := read_result(plan.stages[path])) is not None
    }
    cells = _cells(experiment, experiment.scales[scale]().cells, results)
    if all(cell["state"] != "measured" for cell in cells):
        return False
    environments = [
        read_object(path)
        for name in results
        if (path := folders[name] / "environment.json").is_file()
    ]
    write_json(
        folder / f"{experiment.name}.json",
        {
            "experiment": experiment.name,
            "title": experiment.title,
            "scale": scale,
            "cells": cells,
            "commits": sorted({str(e.get("git_commit")) for e in environments}),
            "machines": sorted({_machine(environment) for environment in environments}),
            "stages": {
                name: {
                    "command": plan.stages[folders[name]].identity["command"],
                    "variables": plan.stages[folders[name]].identity["variables"],
                    "identity": plan.stages[folders[name]].identity["digest"],
                    "seed": result.get("settings", {}).get("seed"),
                }
                for name, result in results.items()
            },
        },
    )
    return True


def _cells(
    experiment: Experiment,
    cells: Mapping[tuple[str, Column], Cell],
    results: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Returns the cells of a table, row by row."""
    table = experiment.table
    assert table is not None
    found = []
    for row in table.rows:
        for column in table.columns:
            cell = cells.get((row, column))
            measured = cell.measure(results) if cell is not None else None
            state, value = "measured", measured or Measured(None)
            if measured is None:
                state = experiment.missing.get(row, NOT_RUN).partition(":")[0]
            printed = table.values.get((row, column))
            differs = printed is not None and value.value is not None
            own = cells.get((table.own_row(row) or "", column))
            found.append(
                {
                    "row": row,
                    "column": table.axis_values(column),
                    "paper": printed,
                    "state": state,
                    **value._asdict(),
                    "difference": (value.value or 0.0) - (printed or 0.0) if differs else None,
                    "paired": _paired(cell, own, results) if measured and own else None,
                }
            )
    return found


def _paired(
    cell: Cell | None, own: Cell, results: Mapping[str, Mapping[str, Any]]
) -> dict[str, float] | None:
    """Returns the paired difference of a cell from that of the paper's system, in points.

    It is None if one comparison does not have both scores, or does not rank both systems.
    """
    if cell is None or len(cell.sources) > 1 or len(own.sources) > 1:
        return None
    (stage, read), (own_stage, read_own) = cell.sources[0], own.sources[0]
    if stage != own_stage or not isinstance(read, Score) or not isinstance(read_own, Score):
        return None
    return read.minus(read_own, results[stage])


def _machine(environment: Mapping[str, Any]) -> str:
    devices = ", ".join(environment.get("devices", ()))
    return f"{devices}; {environment.get('cpu_count')} CPU cores; {environment.get('platform')}"


def state(experiment: Experiment, folder: pathlib.Path) -> str:
    """Returns how many cells of an experiment's table were measured, in words."""
    path = folder / f"{experiment.name}.json"
    if not path.is_file():
        return NOT_RUN
    result = read_object(path)
    measured = sum(cell["state"] == "measured" for cell in result["cells"])
    return f"{measured} of {len(result['cells'])} cells measured at {result['scale']}"


# --------------------------------------------------------------------------------------------- page


def write_page(experiments: Iterable[Experiment], folder: pathlib.Path, page: pathlib.Path) -> None:
    """Writes the page of all tables, and the figures, from the JSON files in a folder."""
    parts, paper = [_INTRO], ""
    for experiment in experiments:
        table = experiment.table
        assert table is not None
        if table.paper != paper:
            paper = table.paper
            parts.append(f"## {PAPERS[paper]}")
        path = folder / f"{experiment.name}.json"
        result = read_object(path) if path.is_file() else None
        parts += _section(experiment, table, result)
        if result and drawings.draw(table, result["cells"], page.parent / "images"):
            parts.append(f"![{table.title}](images/{experiment.name}.png)")
    write_text(page, ["\n\n".join(parts), "\n"])


def _section(experiment: Experiment, table: Printed, result: Mapping[str, Any] | None) -> list[str]:
    kind = table.name.rstrip("0123456789abc").capitalize()
    number = table.name.removeprefix(kind.lower())
    parts = [f"### {PAPERS[table.paper]}, {kind} {number}: {table.title}"]
    parts += [f"Note: {table.note}"] if table.note else []
    parts += [f"Errata: {table.errata}"] if table.errata else []
    parts += [f"{row}: {reason}." for row, reason in experiment.missing.items()]
    parts.append(f"`--only={experiment.name}`. {_state(table, result)}")
    measured = {
        (cell["row"], tuple(cell["column"].values())): cell
        for cell in (result["cells"] if result else ())
    }
    if measured or table.values:
        parts += _markdown(
            table, table.rows, table.columns, functools.partial(_text, table, measured)
        )
    return [*parts, *_statistics(table, measured)]


def _statistics(table: Printed, measured: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    """Returns the paired differences between rows, and what the paper states."""
    found = {key: cell["paired"] for key, cell in measured.items() if cell.get("paired")}
    texts = [f"Statistics of the paper: {table.statistics}."] if table.statistics else []
    if not found:
        return texts

    def text(row: str, column: Column) -> str:
        if (pair := found.get((row, column))) is None:
            return "–"
        value, low, high = (pair[key] for key in ("difference", "low", "high"))
        p = pair["p_holm"]
        shown = "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
        return f"{value:+.1f} [{low:+.1f}, {high:+.1f}], {shown}"

    rows = [row for row in table.rows if any(row == other for other, _ in found)]
    columns = [column for column in table.columns if any(column == other for _, other in found)]
    own = dict.fromkeys(table.own_row(row) for row in rows)
    texts.append(f"Ours: differences from {' or '.join(map(str, own))} on the same questions:")
    return [" ".join(texts), *_markdown(table, rows, columns, text)]


def _state(table: Printed, result: Mapping[str, Any] | None) -> str:
    if result is None:
        values = "The paper's values:" if table.values else "The paper prints no values."
        return f"Ours: {NOT_RUN}. {values}"
    counts = sorted({cell["count"] for cell in result["cells"] if cell["count"] is not None})
    ends = "-".join(str(n) for n in dict.fromkeys((counts[0], counts[-1]))) if counts else ""
    commits = ", ".join(commit[:8] for commit in result["commits"])
    return (
        f"Ours: scale `{result['scale']}`{f', n = {ends}' if ends else ''}, commit {commits}, "
        f"{'; '.join(result['machines'])}."
    )


def _markdown(
    table: Printed,
    rows: Sequence[str],
    columns: Sequence[Column],
    text: Callable[[str, Column], str],
) -> list[str]:
    """Returns rows and columns of a table, split by its first axis if it is wide."""
    groups = [columns]
    if len(columns) > _MOST_COLUMNS and len(table.axes) > 1:
        groups = [list(group) for _, group in itertools.groupby(columns, lambda c: c[0])]
    return [
        markdown(
            [
                ["", *(" ".join(TITLES.get(v, f"{v}") for v in column) for column in group)],
                *([row, *(text(row, column) for column in group)] for row in rows),
            ]
        )
        for group in groups
    ]


def _text(
    table: Printed, measured: Mapping[Any, Mapping[str, Any]], row: str, column: Column
) -> str:
    decimals = 3 if max(table.values.values(), default=100.0) <= 1 else 1
    printed = table.values.get((row, column))
    texts = ["–" if printed is None else f"{printed:.{decimals}f}"]
    if cell := measured.get((row, column)):
        if cell["value"] is None:
            texts.append(cell["reason"] or cell["state"])
        else:
            texts.append(f"{cell['value']:.{decimals}f}")
        if cell["low"] is not None:
            texts.append(f"[{cell['low']:.{decimals}f}, {cell['high']:.{decimals}f}]")
        if cell["difference"] is not None:
            texts.append(f"({cell['difference']:+.{decimals}f})")
    return " ".join([texts[0], "→", *texts[1:]]) if texts[1:] else texts[0]
