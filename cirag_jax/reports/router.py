"""Table and figure of the granularity router: calls saved against F1 lost."""

import pathlib
from collections.abc import Mapping
from typing import Any

from cirag_jax.reports import figures
from cirag_jax.reports.tables import captioned, lead, percent, write_table

FIGURE = "router"


def write(result: Mapping[str, Any], workdir: pathlib.Path) -> None:
    """Writes ``table.md`` and the figure; ``result`` is that of `train_router.evaluate`."""
    write_table(table_of(result), workdir)
    figures.save(draw(result), workdir, FIGURE)


def table_of(result: Mapping[str, Any]) -> str:
    """Returns a row per system; F1 in per cent, calls per question."""
    alone = f"always {result['finest']}s"
    header = ["system", "F1", "calls"]
    header += [f"{what} {name}" for name in ("cascade", alone) for what in _COMPARED]
    rows = [header]
    for name, system in result["systems"].items():
        cells = [percent(system["f1"], bounds=True), _calls(system["calls"])]
        for reference in ("cascade", "first"):
            saved = system.get(f"calls_saved/{reference}")
            cells += [
                _calls(saved, "difference") if saved else "",
                lead(system.get(f"f1_lost/{reference}")),
            ]
        rows.append([alone if name == "first" else name, *cells])
    caption = (
        f"{result['num_evaluated']} questions; the router skips granularities with a probability "
        "below the number after @; calls of the reader per question, F1 in per cent, differences "
        "in points, with 95 % intervals (paired bootstrap)"
    )
    return captioned(caption, rows)


_COMPARED = ("calls saved, to", "F1 lost, to")


def _calls(bounds: Mapping[str, float], key: str = "value") -> str:
    return f"{bounds[key]:.2f} [{bounds['low']:.2f}, {bounds['high']:.2f}]"


def draw(result: Mapping[str, Any]) -> Any:
    """Draws F1 against calls: a line of routers, and the two references."""
    figure, axes = figures.pyplot().subplots(figsize=(7, 4), layout="constrained")
    groups = {"router": [], "cascade": [], f"always {result['finest']}s": []}
    for name, system in result["systems"].items():
        label = name.partition("@")[0].replace("first", f"always {result['finest']}s")
        groups[label].append((system["calls"]["value"], 100 * system["f1"]["value"]))
    for index, (label, points) in enumerate(groups.items()):
        x, y = zip(*points, strict=True)
        line = "-" if label == "router" else "none"
        axes.plot(x, y, label=label, linestyle=line, **figures.style(index))
    figures.finish(axes, "calls of the reader per question", "F1, %")
    return figure
