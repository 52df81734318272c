"""The figures of a comparison of methods."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cirag_jax.evaluation import metrics
from cirag_jax.reports import figures
from cirag_jax.reports.comparison_tables import (
    hop_recalls,
    robustness_scores,
    run_label,
    stepwise,
    tokens_of,
)
from cirag_jax.reports.tables import percent
from cirag_jax.types import GRANULARITIES


def draw_granularities(result: Mapping[str, Any]) -> Any:
    """Draws a stacked bar per run (CIRAG's Figures 3 and 5)."""
    systems = result["systems"]
    figure, axes = figures.pyplot().subplots(
        figsize=(7, 0.6 * len(systems) + 1.4), layout="constrained"
    )
    left = np.zeros(len(systems))
    for granularity, color in zip(GRANULARITIES, figures.COLORS, strict=False):
        totals = [max(sum(s["granularities"].values()), 1) for s in systems.values()]
        shares = [s["granularities"][granularity] for s in systems.values()]
        width = 100 * np.array(shares) / np.array(totals)
        axes.barh(
            [figures.plain(n) for n in systems], width, left=left, label=granularity, color=color
        )
        left += width
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("questions answered from, %")
    axes.legend(
        ncols=len(GRANULARITIES), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False
    )
    return figure


def draw_steps(result: Mapping[str, Any]) -> Any:
    """Draws recall by step, one line per run."""
    figure, axes = figures.pyplot().subplots(figsize=(7, 4), layout="constrained")
    for index, (name, recalls) in enumerate(stepwise(result)):
        axes.plot(
            range(1, len(recalls) + 1),
            [100 * recall["value"] for recall in recalls],
            label=figures.plain(run_label(name, result["systems"][name])),
            **figures.style(index),
        )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(0, 103)  # so that markers at 100 are not cut
    figures.finish(axes, "step", "recall of gold passages so far, %")
    return figure


def draw_hops(result: Mapping[str, Any]) -> Any:
    """Draws the recall of each hop's gold passage, one line per run (KiRAG's Figures 3 and 9)."""
    names = hop_recalls(result)
    figure, axes = figures.pyplot().subplots(figsize=(7, 4), layout="constrained")
    for index, (run, system) in enumerate(result["systems"].items()):
        # hop1_recall@10 is the recall of the first hop.
        points = [(int(n[3 : n.index("_")]), system[n]) for n in names if percent(system[n])]
        if points:
            _draw_line(axes, index, run_label(run, system), points)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(0, 103)  # so that markers at 100 are not cut
    figures.finish(axes, "hop", f"recall@{names[0].partition('@')[2]}, %")
    return figure


def draw_robustness(result: Mapping[str, Any]) -> Any:
    """Draws EM and F1 against the share of corrupted facts, one column per kind of corruption."""
    names, curves = robustness_scores(result), result["robustness"]
    kinds = list(dict.fromkeys(curve["kind"] for curve in curves))
    order = list(dict.fromkeys(curve["name"] for curve in curves))
    figure, panels = figures.pyplot().subplots(
        len(names),
        len(kinds),
        figsize=(3.5 * len(kinds) + 2, 3 * len(names)),
        layout="constrained",
        sharex="col",
        sharey="row",
        squeeze=False,
    )
    for row, name in enumerate(names):
        for axes, kind in zip(panels[row], kinds, strict=True):
            for curve in curves:
                if curve["kind"] == kind:
                    points = [
                        (100 * point["ratio"], result["systems"][point["run"]][name])
                        for point in curve["points"]
                    ]
                    _draw_line(axes, order.index(curve["name"]), curve["name"], points)
            axes.grid(alpha=0.3)
            if row == 0:
                axes.set_title(figures.plain(kind))
            if row == len(names) - 1:
                axes.set_xlabel("facts changed, %")
        panels[row, 0].set_ylabel(f"{metrics.title(name)}, %")
    # The last panel may lack some of the curves.
    shown = [axes.get_legend_handles_labels() for axes in panels[0]]
    lines = {label: line for pairs in shown for line, label in zip(*pairs, strict=True)}
    figures.legend_on_the_right(panels[0, -1], list(lines.values()), list(lines))
    return figure


def _draw_line(
    axes: Any, index: int, label: str, points: Sequence[tuple[float, Mapping[str, float]]]
) -> None:
    """Draws a line through scores with their intervals; ``points`` are pairs (x, score)."""
    scores = [score for _, score in points]
    axes.errorbar(
        [x for x, _ in points],
        [100 * score["value"] for score in scores],
        yerr=[
            [100 * (score["value"] - score["low"]) for score in scores],
            [100 * (score["high"] - score["value"]) for score in scores],
        ],
        elinewidth=0.7,
        capsize=2,
        label=figures.plain(label),
        **figures.style(index),
    )


def draw_histograms(result: Mapping[str, Any]) -> Any:
    """Draws the share of questions by number of steps and of queries (DualRAG's Figures 3, 4)."""
    figure, panels = figures.pyplot().subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axes, kind in zip(panels, ("steps", "queries"), strict=True):
        for index, (name, system) in enumerate(result["systems"].items()):
            counts = {int(number): count for number, count in system["histograms"][kind].items()}
            numbers = range(max(counts, default=0) + 1)
            axes.plot(
                numbers,
                [100 * counts.get(n, 0) / max(sum(counts.values()), 1) for n in numbers],
                label=figures.plain(run_label(name, system)),
                **figures.style(index),
            )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel(f"{kind} per question")
        axes.set_ylabel("questions, %")
        axes.grid(alpha=0.3)
    figures.legend_on_the_right(panels[-1])
    return figure


def draw_tokens(result: Mapping[str, Any]) -> Any:
    """Draws F1 against tokens, one point per ranked run."""
    points = [(name, {"value": tokens}, f1) for name, tokens, f1 in spent(result)]
    return _draw_f1(result, points, "tokens of language models per question")


def draw_latency(result: Mapping[str, Any]) -> Any:
    """Draws F1 against latency, one point per ranked run."""
    return _draw_f1(result, list(timed(result)), "seconds per question, alone")


def _draw_f1(
    result: Mapping[str, Any],
    points: Sequence[tuple[str, Mapping[str, float], Mapping[str, float]]],
    label: str,
) -> Any:
    """Draws F1 against a cost with a logarithmic axis.

    A point has the name of a run, its cost, and F1, each with or without its interval.
    """
    from matplotlib import ticker

    # Colors and markers are by position, so a run looks the same in all figures.
    places = {name: index for index, name in enumerate(result["systems"])}
    figure, axes = figures.pyplot().subplots(
        figsize=(7, max(4.5, 0.27 * len(points) + 0.6)), layout="constrained"
    )
    for name, cost, f1 in points:
        x, y = cost["value"], 100 * f1["value"]
        axes.errorbar(
            [x],
            [y],
            xerr=[[x - cost["low"]], [cost["high"] - x]] if "low" in cost else None,
            yerr=[[y - 100 * f1["low"]], [100 * f1["high"] - y]],
            linestyle="none",
            elinewidth=0.7,
            capsize=2,
            label=figures.plain(run_label(name, result["systems"][name])),
            **figures.style(places[name]),
        )
    axes.set_xscale("log")
    # Few ticks without minor labels, so that numbers with many digits do not overlap.
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,.9g}")
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_title("upper left is better")
    figures.finish(axes, label, "F1, %")
    return figure


def spent(result: Mapping[str, Any]) -> Iterator[tuple[str, float, Any]]:
    """Yields name, tokens and F1 of the ranked runs that called a language model."""
    for name, system in result["systems"].items():
        tokens = tokens_of(system, "prompt", "generated")
        if system["is_ranked"] and tokens and percent(system.get("f1")):
            yield name, tokens, system["f1"]


def timed(result: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, latency and F1 of the ranked runs with latencies."""
    for name, system in result["systems"].items():
        if system["is_ranked"] and system["seconds_alone"] and percent(system.get("f1")):
            yield name, system["seconds_alone"], system["f1"]
