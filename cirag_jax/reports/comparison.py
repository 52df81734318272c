"""Writes a comparison of methods: tables in Markdown and HTML, and figures."""

import collections
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from cirag_jax.io import write_text
from cirag_jax.reports import comparison_figures as drawings
from cirag_jax.reports import figures, pages
from cirag_jax.reports.comparison_tables import hop_recalls, tables
from cirag_jax.reports.tables import markdown, write_table

PAGE = "table.html"
STYLE = ("page.css", "results.css")
GRANULARITIES_FIGURE, STEPS_FIGURE = "granularities", "recall_by_step"
HISTOGRAMS_FIGURE, TOKENS_FIGURE, LATENCY_FIGURE = "histograms", "tokens", "latency"
HOPS_FIGURE, ROBUSTNESS_FIGURE = "recall_by_hop", "robustness"


def write(result: Mapping[str, Any], workdir: pathlib.Path, show: bool = True) -> None:
    """Writes ``table.md``, ``table.html`` and the figures.

    ``result`` is that of `commands.comparison.compare`. ``show`` also prints the tables to standard
    error.
    """
    text = (f"{table.caption}\n\n{markdown(table.rows)}" for table in tables(result).values())
    write_table("\n\n".join([*text, *_notes(result)]), workdir, show)
    pictures = {}
    for name, figure in draw(result):
        figures.save(figure, workdir, name)
        pictures[name] = (workdir / f"{name}.svg").read_bytes()
    html = pages.sections(sections(result, pictures))
    page = pages.template("table.html", "Comparison", STYLE, images=True, sections=html)
    write_text(workdir / PAGE, page)


def draw(result: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the figures with their names; the caller closes the figures."""
    yield GRANULARITIES_FIGURE, drawings.draw_granularities(result)
    if "Recall by step" in tables(result):
        yield STEPS_FIGURE, drawings.draw_steps(result)
    if hop_recalls(result):
        yield HOPS_FIGURE, drawings.draw_hops(result)
    if result["robustness"]:
        yield ROBUSTNESS_FIGURE, drawings.draw_robustness(result)
    yield HISTOGRAMS_FIGURE, drawings.draw_histograms(result)
    if any(drawings.spent(result)):
        yield TOKENS_FIGURE, drawings.draw_tokens(result)
    if any(drawings.timed(result)):
        yield LATENCY_FIGURE, drawings.draw_latency(result)


def sections(result: Mapping[str, Any], pictures: Mapping[str, bytes]) -> list[pages.Section]:
    """Returns the tables as sections of a page, with the ``pictures`` of `draw`."""
    picture_of = {
        "Scores": GRANULARITIES_FIGURE,
        "Recall by step": STEPS_FIGURE,
        "Hops": HOPS_FIGURE,
        "Robustness": ROBUSTNESS_FIGURE,
        "Iterations and queries": HISTOGRAMS_FIGURE,
        "Language models": TOKENS_FIGURE,
        "Time": LATENCY_FIGURE,
    }
    parts = []
    for heading, table in tables(result).items():
        shown = {name: svg for name, svg in pictures.items() if name == picture_of.get(heading)}
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
