"""Writes a comparison of methods: tables in Markdown and HTML, and figures."""

import collections
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from cirag_jax.io import write_text
from cirag_jax.reports import comparison_figures as drawings
from cirag_jax.reports import figures, pages
from cirag_jax.reports.comparison_tables import hop_recalls, stepwise, tables
from cirag_jax.reports.tables import captioned, write_table

PAGE = "table.html"
STYLE = ("page.css", "results.css")
# Heading of a table -> the name of its figure, and the function that draws it.
_FIGURES = {
    "Scores": ("granularities", drawings.draw_granularities),
    "Recall by step": ("recall_by_step", drawings.draw_steps),
    "Hops": ("recall_by_hop", drawings.draw_hops),
    "Robustness": ("robustness", drawings.draw_robustness),
    "Iterations and queries": ("histograms", drawings.draw_histograms),
    "Language models": ("tokens", drawings.draw_tokens),
    "Time": ("latency", drawings.draw_latency),
}


def write(result: Mapping[str, Any], workdir: pathlib.Path, show: bool = True) -> None:
    """Writes ``table.md``, ``table.html`` and the figures.

    ``result`` is that of `commands.comparison.compare`. ``show`` also prints the tables to standard
    error.
    """
    text = (captioned(*table) for table in tables(result).values())
    write_table("\n\n".join([*text, *_notes(result)]), workdir, show)
    pictures = {}
    for name, figure in draw(result):
        figures.save(figure, workdir, name)
        pictures[name] = (workdir / f"{name}.svg").read_bytes()
    html = pages.sections(sections(result, pictures))
    page = pages.template("table.html", "Comparison", STYLE, images=True, sections=html)
    write_text(workdir / PAGE, page)


def draw(result: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the figures that have data, with their names; the caller closes the figures."""
    has_data = {
        "Recall by step": stepwise(result),
        "Hops": hop_recalls(result),
        "Robustness": result["robustness"],
        "Language models": any(drawings.spent(result)),
        "Time": any(drawings.timed(result)),
    }
    for heading, (name, draw_figure) in _FIGURES.items():
        if has_data.get(heading, True):
            yield name, draw_figure(result)


def sections(result: Mapping[str, Any], pictures: Mapping[str, bytes]) -> list[pages.Section]:
    """Returns the tables as sections of a page, with the ``pictures`` of `draw`."""
    parts = []
    for heading, table in tables(result).items():
        name, _ = _FIGURES.get(heading, ("", None))
        shown = {name: pictures[name]} if name in pictures else {}
        parts.append(pages.Section(heading, [table], shown))
    notes = _notes(result)
    return [*parts, pages.Section("Settings that differ", notes=notes)] if notes else parts


def _notes(result: Mapping[str, Any]) -> list[str]:
    """Returns the settings that differ between the first run and other runs, equal ones once."""
    first, runs = next(iter(result["systems"])), collections.defaultdict[str, list[str]](list)
    for name, fields in result["different"].items():
        pairs = (f"{field} {json.dumps(a)} / {json.dumps(b)}" for field, (a, b) in fields.items())
        if fields:
            runs["; ".join(pairs)].append(name)
    return [f"Settings of {first} / {', '.join(names)}: {text}" for text, names in runs.items()]
