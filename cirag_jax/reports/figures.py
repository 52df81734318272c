"""What figures share: colours and markers that everyone can tell apart, and the files."""

import io
import pathlib
from typing import Any

from cirag_jax.io import replacing, visible

# Okabe and Ito (2008), without the yellow that vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def pyplot() -> Any:
    """Matplotlib's, which needs no screen and writes the same SVG for the same figure."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "cirag_jax"
    from matplotlib import pyplot as plt

    return plt


def plain(name: str) -> str:
    """A name that Matplotlib does not take for mathematics, and that XML can hold."""
    return visible(name).replace("$", r"\$")


def save(figure: Any, folder: pathlib.Path, name: str) -> None:
    """Writes ``NAME.png`` and ``NAME.svg``, and closes the figure."""
    for kind, told in (("png", "Software"), ("svg", "Date")):  # what differs from run to run
        with replacing(folder / f"{name}.{kind}") as aside:
            figure.savefig(aside, format=kind, dpi=150, metadata={told: None})
    pyplot().close(figure)


def svg(figure: Any) -> bytes:
    """The figure as an SVG file; closes it."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    pyplot().close(figure)
    return file.getvalue()
