"""Methods side by side: tables in Markdown and as a self-contained page, and figures."""

import base64
import html
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cirag_jax.evaluation import metrics
from cirag_jax.io import write_text
from cirag_jax.reports import figures
from cirag_jax.reports.tables import figure, lead, markdown, write_table
from cirag_jax.types import GRANULARITIES

PAGE = "table.html"
GRANULARITIES_FIGURE, LATENCY_FIGURE = "granularities", "latency"
_FIRST = ("f1", "em", "acc")  # The order of columns; the others follow as they are measured.
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;color:#111;background:#fff}"
    "table{border-collapse:collapse;margin:.5rem 0 2rem}"
    "th,td{padding:.25rem .7rem;border-bottom:1px solid #ccc;text-align:right;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}figure{margin:1rem 0}img{max-width:100%}"
)


class Table(NamedTuple):
    """Rows of cells under a caption; the first row is the header."""

    caption: str
    rows: Sequence[Sequence[str]]


def write(result: Mapping[str, Any], workdir: pathlib.Path) -> None:
    """Writes ``table.md``, ``table.html`` and the figures, and prints the tables on standard error.

    Args:
      result: of `commands.comparison.compare`.
      workdir: an existing folder.
    """
    found = tables(result)
    notes = _notes(result)
    text = "\n\n".join(f"{table.caption}\n\n{markdown(table.rows)}" for table in found)
    write_table("\n\n".join([text, *notes]), workdir)
    _draw_granularities(result, workdir)
    drawn = [GRANULARITIES_FIGURE]
    if _draw_latency(result, workdir):
        drawn.append(LATENCY_FIGURE)
    write_text(workdir / PAGE, [_page(found, notes, [workdir / f"{name}.svg" for name in drawn])])


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Scores, differences, what language models were asked, and time; those that have any row."""
    found = [_scores(result), _differences(result), _cost(result), _time(result)]
    return [table for table in found if len(table.rows) > 1]


# ------------------------------------------------------------------------------------ the tables


def _columns(result: Mapping[str, Any]) -> list[str]:
    """The scores that some run has of some question."""
    systems, names = result["systems"].values(), result["scores"]
    ordered = dict.fromkeys((*(name for name in _FIRST if name in names), *names))
    return [name for name in ordered if any(figure(system.get(name)) for system in systems)]


def _shown(name: str, system: Mapping[str, Any]) -> str:
    return f"{name} *" if system["sees_gold"] else name


def _scores(result: Mapping[str, Any]) -> Table:
    """Per cent, one row a run; intervals of F1 and of passage recall at the largest K."""
    columns, systems = _columns(result), result["systems"]
    wide = {"f1", next((name for name in reversed(columns) if name.startswith("recall@")), "")}
    header = ["run", *(f"{metrics.title(c)}{' [95 %]' * (c in wide)}" for c in columns)]
    rows = []
    for name, system in systems.items():
        scores = [figure(system.get(c), bounds=c in wide) or "n/a" for c in columns]
        total = max(sum(system["granularities"].values()), 1)
        shares = [
            f"{100 * system['granularities'][granularity] / total:.0f} %"
            for granularity in GRANULARITIES
        ]
        rows.append([_shown(name, system), *scores, *shares, str(system["failures"])])
    caption = (
        f"{result['num_questions']} questions, {result['num_annotated']} with gold passages; "
        "scores in per cent; share of the answers read from triples, sentences, passages and by "
        "default; questions that failed, which earn 0"
    )
    if any(system["sees_gold"] for system in systems.values()):
        caption += "; * sees the gold annotations"
    repeats = [
        f"{name} F1 ± {100 * system['repeats']['std']['f1']:.1f} over {system['repeats']['count']}"
        for name, system in systems.items()
        if system["repeats"]["count"] > 1
    ]
    if repeats:
        caption += "; means over repeats with other seeds: " + ", ".join(repeats)
    return Table(caption, [[*header, *GRANULARITIES, "failed"], *rows])


def _differences(result: Mapping[str, Any]) -> Table:
    """Points, one row a pair."""
    columns = [
        name
        for name in _columns(result)
        if any(name in scores for scores in result["differences"].values())
    ]
    rows = [["first - second", *map(metrics.title, columns)]]
    for name, scores in result["differences"].items():
        rows.append([name, *(_tested(scores.get(column)) or "n/a" for column in columns)])
    return Table(
        "Differences in points with 95 % intervals (paired bootstrap) and p (permutation test, "
        "corrected by Holm's rule for the pairs of a column)",
        rows,
    )


def _tested(difference: Mapping[str, float] | None) -> str:
    text = lead(difference)
    if not text or not difference:
        return ""
    p = difference["p_holm"]
    return f"{text} p<0.001" if p < 0.001 else f"{text} p={p:.3f}"


def _cost(result: Mapping[str, Any]) -> Table:
    rows = [["run", "role", "stage", "calls", "prompt tokens", "of these reused", "written tokens"]]
    for name, system in result["systems"].items():
        for role, spent in system["roles"].items():
            tokens = (f"{spent[key]:,.0f}" for key in ("prompt_tokens", "cached_tokens"))
            written = f"{spent['generated_tokens']:,.0f}"
            rows.append([name, role, spent["stage"], f"{spent['calls']:.1f}", *tokens, written])
    return Table("Language models: means a question, by role", rows)


def _time(result: Mapping[str, Any]) -> Table:
    rows = [["run", "s a question, together", "s a question, alone [95 %]", "asked alone"]]
    for name, system in result["systems"].items():
        alone = system["seconds_alone"]
        bounds = f"{alone['value']:.2f} [{alone['low']:.2f}, {alone['high']:.2f}]" if alone else ""
        count = str(alone["num_questions"]) if alone else ""
        rows.append([name, f"{system['seconds']:.2f}", bounds, count])
    return Table(
        "Time: all questions together, without loading; and one after the other with nothing else "
        "running and nothing remembered",
        rows,
    )


def _notes(result: Mapping[str, Any]) -> list[str]:
    """Which settings differ between the first run and each other one."""
    first, notes = next(iter(result["systems"])), []
    for name, fields in result["different"].items():
        told = (f"{field} {json.dumps(a)} / {json.dumps(b)}" for field, (a, b) in fields.items())
        if fields:
            notes.append(f"Settings of {first} / {name}: " + "; ".join(told))
    return notes


# -------------------------------------------------------------------------------------- the page


def _page(found: Sequence[Table], notes: Sequence[str], drawn: Sequence[pathlib.Path]) -> str:
    """HTML that fetches nothing; names of runs and settings are text in it, whatever they hold."""
    parts = [_html(table) for table in found]
    for path in drawn:
        image = base64.b64encode(path.read_bytes()).decode()
        source = f"data:image/svg+xml;base64,{image}"
        parts.append(f'<figure><img alt="{path.stem}" src="{source}"></figure>')
    parts += [f"<p>{html.escape(note)}</p>" for note in notes]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">"
        f"<title>Comparison</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _html(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    header, *rows = table.rows
    body = "\n".join(row(cells, "td") for cells in rows)
    return f"<p>{html.escape(table.caption)}</p>\n<table>{row(header, 'th')}\n{body}</table>"


# ----------------------------------------------------------------------------------- the figures


def _draw_granularities(result: Mapping[str, Any], workdir: pathlib.Path) -> None:
    """One stacked bar a run (CIRAG's Figures 3 and 5)."""
    systems = result["systems"]
    drawn, axes = figures.pyplot().subplots(
        figsize=(7, 0.6 * len(systems) + 1.4), layout="constrained"
    )
    left = np.zeros(len(systems))
    for granularity, colour in zip(GRANULARITIES, figures.COLOURS, strict=False):
        totals = [max(sum(s["granularities"].values()), 1) for s in systems.values()]
        shares = [s["granularities"][granularity] for s in systems.values()]
        width = 100 * np.array(shares) / np.array(totals)
        axes.barh(
            [figures.plain(n) for n in systems], width, left=left, label=granularity, color=colour
        )
        left += width
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("questions answered from, %")
    axes.legend(
        ncols=len(GRANULARITIES), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False
    )
    figures.save(drawn, workdir, GRANULARITIES_FIGURE)


def _draw_latency(result: Mapping[str, Any], workdir: pathlib.Path) -> bool:
    """F1 against seconds alone, one point a run (the papers' Figures 6 and 12); False for none."""
    points = [
        (name, system["seconds_alone"], system["f1"])
        for name, system in result["systems"].items()
        if system["seconds_alone"] and figure(system.get("f1"))
    ]
    if not points:
        return False
    drawn, axes = figures.pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    for index, (name, alone, f1) in enumerate(points):
        x, y = alone["value"], 100 * f1["value"]
        axes.errorbar(
            [x],
            [y],
            xerr=[[x - alone["low"]], [alone["high"] - x]],
            yerr=[[y - 100 * f1["low"]], [100 * f1["high"] - y]],
            marker=figures.MARKERS[index % len(figures.MARKERS)],
            color=figures.COLOURS[index % len(figures.COLOURS)],
            linestyle="none",
            elinewidth=0.7,
            capsize=2,
            label=figures.plain(_shown(name, result["systems"][name])),
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("seconds a question, alone")
    axes.set_ylabel("F1, %")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figures.save(drawn, workdir, LATENCY_FIGURE)
    return True
