"""Colors, markers, legends and files of all figures."""

import io
import pathlib
from typing import Any

from cirag_jax.io import replacing, visible

# Palette of Okabe and Ito (2008) for color-blind readers, without yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def pyplot() -> Any:
    """Returns ``matplotlib.pyplot`` without a display and with reproducible SVG files."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "cirag_jax"
    from matplotlib import pyplot as plt

    return plt


def plain(name: str) -> str:
    """Escapes a name for Matplotlib's math mode and for XML."""
    return visible(name).replace("$", r"\$")


def style(index: int) -> dict[str, str]:
    """Returns the marker and color of system number ``index``."""
    return {"marker": MARKERS[index % len(MARKERS)], "color": COLORS[index % len(COLORS)]}


def legend_on_the_right(axes: Any, *entries: Any) -> None:
    """Puts the legend next to the axes, where it hides no data.

    ``entries`` are artists and their labels; by default those of the axes.
    """
    axes.legend(*entries, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def finish(axes: Any, x: str, y: str) -> None:
    """Labels the axes, and adds a grid and a legend on the right."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    legend_on_the_right(axes)


def save(figure: Any, folder: pathlib.Path, name: str) -> None:
    """Writes ``NAME.png`` and ``NAME.svg``, and closes the figure."""
    for kind, varying in (("png", "Software"), ("svg", "Date")):  # left out, for reproducible files
        with replacing(folder / f"{name}.{kind}") as aside:
            figure.savefig(aside, format=kind, dpi=150, metadata={varying: None})
    pyplot().close(figure)


def svg(figure: Any) -> bytes:
    """Returns a figure as an SVG file, and closes it."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    pyplot().close(figure)
    return file.getvalue()
