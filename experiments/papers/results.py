"""The measured values of the papers' tables: one JSON file each, and the page of all of them."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cirag_jax.io import read_object, write_json, write_text
from cirag_jax.reports.tables import markdown
from experiments.papers import drawings
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
so that only differences between rows can be compared with the paper's."""


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
            found.append(
                {
                    "row": row,
                    "column": table.axis_values(column),
                    "paper": printed,
                    "state": state,
                    **value._asdict(),
                    "difference": (value.value or 0.0) - (printed or 0.0) if differs else None,
                }
            )
    return found


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
    return parts + [markdown(rows) for rows in _rows(table, measured)]


def _state(table: Printed, result: Mapping[str, Any] | None) -> str:
    if result is None:
        values = "The paper's values:" if table.values else "The paper prints no values."
        return f"Ours: {NOT_RUN}. {values}"
    counts = sorted({cell["count"] for cell in result["cells"] if cell["count"] is not None})
    questions = "-".join(str(n) for n in dict.fromkeys((counts[0], counts[-1]))) if counts else "0"
    commits = ", ".join(commit[:8] for commit in result["commits"])
    return (
        f"Ours: scale `{result['scale']}`, n = {questions}, commit {commits}, "
        f"{'; '.join(result['machines'])}."
    )


def _rows(table: Printed, measured: Mapping[Any, Mapping[str, Any]]) -> list[list[list[str]]]:
    """Returns the table, split by its first axis if it is wide."""
    if not measured and not table.values:
        return []
    columns = table.columns
    split = len(columns) > _MOST_COLUMNS and len(table.axes) > 1
    groups = (
        [[c for c in columns if c[0] == value] for value in next(iter(table.axes.values()))]
        if split
        else [columns]
    )
    return [
        [
            ["", *(" ".join(TITLES.get(v, f"{v}") for v in column) for column in group)],
            *(
                [row, *(_text(table, row, column, measured) for column in group)]
                for row in table.rows
            ),
        ]
        for group in groups
    ]


def _text(
    table: Printed, row: str, column: Sequence[Any], measured: Mapping[Any, Mapping[str, Any]]
) -> str:
    decimals = 3 if max(table.values.values(), default=100.0) <= 1 else 1
    printed = table.values.get((row, tuple(column)))
    texts = ["–" if printed is None else f"{printed:.{decimals}f}"]
    if cell := measured.get((row, tuple(column))):
        if cell["value"] is None:
            texts.append(cell["reason"] or cell["state"])
        else:
            texts.append(f"{cell['value']:.{decimals}f}")
        if cell["low"] is not None:
            texts.append(f"[{cell['low']:.{decimals}f}, {cell['high']:.{decimals}f}]")
        if cell["difference"] is not None:
            texts.append(f"({cell['difference']:+.{decimals}f})")
    return " ".join([texts[0], "→", *texts[1:]]) if texts[1:] else texts[0]
