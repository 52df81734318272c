"""The difficulty matrix as tables, heat maps and sentences."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cirag_jax.evaluation.difficulty import AGGREGATES, CAUSES, NUM_BINS
from cirag_jax.evaluation.metrics import title
from cirag_jax.io import say
from cirag_jax.reports import figures, pages
from cirag_jax.reports.tables import Table, captioned, write_table

MATRIX, DIFFERENCE = "matrix", "difference"
QUARTILES = ("Q1, low", "Q2", "Q3", "Q4, high")

_NAMES = {"min": "minimum", "mean": "mean", "power_mean": "power mean"}
_X, _Y = "retrieval difficulty $D_r$, quartile of the hop", "hops"
_WIDTH, _HEIGHT, _MARGIN = 4.6, 0.62, 1.5  # Inches of a panel, a row and the margins.


def write(result: Mapping[str, Any], workdir: pathlib.Path) -> None:
    """Writes ``table.md`` and the figures; prints the tables and a sentence per run.

    ``result`` is that of `commands.difficulty.evaluate`.
    """
    text = (captioned(*table) for table in tables(result))
    write_table("\n\n".join([*text, *notes(result)]), workdir)
    for name, figure in heat_maps(result):
        figures.save(figure, workdir, name)
    for line in sentences(result):
        say(line)


def sections(result: Mapping[str, Any]) -> list[pages.Section]:
    """Returns the sections of a page; ``result`` may also be read from ``result.json``."""
    pictures = {name: figures.svg(figure) for name, figure in heat_maps(result)}
    paragraphs = [*sentences(result), *notes(result)]
    return [
        pages.Section("Difficulty", pictures=pictures, notes=paragraphs),
        pages.Section("Difficulty in tables", tables(result)),
    ]


# -------------------------------------------------------------------------------------- in words


def sentences(result: Mapping[str, Any]) -> list[str]:
    """Returns one sentence about each run; see `sentence`."""
    aggregate = result["settings"]["aggregate"]
    return [sentence(name, system, aggregate) for name, system in result["systems"].items()]


def sentence(name: str, system: Mapping[str, Any], aggregate: str) -> str:
    """Returns a summary of a run in one sentence."""
    error, cells = system["error"], list(_filled(system["matrix"]))
    if error["value"] is None:
        return f"{name}: error n/a ({error['reason']})"
    count = error["num_questions"]
    parts = [f"{name}: error {_percent(error)} of {count} question{'s' * (count != 1)}"]
    if cells:
        low, high = (by(cells, key=lambda c: c[2]["value"]) for by in (min, max))
        parts.append(f"from {_place(low)} to {_place(high)}")
    overall = system["correlations"][aggregate]["questions"]["all"]
    if overall["value"] is None:
        parts.append(f"r(D_r, error) n/a ({overall['reason']})")
    else:
        parts.append(f"r(D_r, error) {_r(overall)}")
    split = system["failures"]
    if "reason" in split:
        parts.append(split["reason"])
    else:
        labels = {"retriever": "lack a gold passage", "reader": "have all gold passages"}
        counts = [f"{split[cause]['errors']:g} {label}" for cause, label in labels.items()]
        if split["unanswered"]["errors"]:
            counts.append(f"{split['unanswered']['errors']:g} have no answer")
        parts.append("of the errors " + ", ".join(counts))
    return "; ".join(parts)


def _place(cell: tuple[int, int, Mapping[str, Any]]) -> str:
    hop, column, values = cell
    return f"{_percent(values)} (hops {hop}, Q{column + 1})"


def _filled(matrix: Mapping[int, Any]) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    for hop, row in matrix.items():
        for column, values in enumerate(row):
            if values["value"] is not None:
                yield hop, column, values


def notes(result: Mapping[str, Any]) -> list[str]:
    """Returns notes about undefined values and ignored questions."""
    lines = [
        f"Hops {hop}: no quartiles, {row['reason']}."
        for hop, row in result["hops"].items()
        if row.get("reason")
    ]
    left_out = {"Questions": result["left_out"]}
    left_out |= {f"Predictions of {n}": s["left_out"] for n, s in result["systems"].items()}
    for label, by_reason in left_out.items():
        if by_reason:
            counts = ", ".join(f"{reason} ({count})" for reason, count in by_reason.items())
            lines.append(f"{label} left out: {counts}.")
    least = result["settings"].get("least_in_cell", 1)
    if least > 1:
        lines.append(f"Cells with fewer than {least} questions are n/a and ignored by r.")
    for name, system in result["systems"].items():
        if "reason" in system["failures"]:
            lines.append(f"Failures of {name}: n/a, {system['failures']['reason']}.")
    return lines


# ------------------------------------------------------------------------------------- in tables


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Returns tables: the matrices of all runs and pairs, the failures and the correlations."""
    label, settings = _error_label(result), result["settings"]
    unit, chunks = f"{settings['unit']}s", settings["chunks"]
    if unit == "chunks":
        counted = f"tokens of {chunks['tokenizer']}" if chunks["tokenizer"] else "words"
        unit += f" of {chunks['least']} to {chunks['most']} {counted}"
    caption = (
        f"{{}}: {label} in per cent with 95 % intervals (questions); {result['num_questions']} "
        f"questions of {settings['data']}, D_r by the {_NAMES[settings['aggregate']]} over {unit}"
    )
    matrices = [
        Table(caption.format(name), _matrix_rows(system))
        for name, system in result["systems"].items()
    ]
    matrices += [
        Table(f"{name}, in points", _matrix_rows(pair, "+"))
        for name, pair in result["differences"].items()
    ]
    return [*matrices, _failures(result), _correlations(result)]


def _matrix_rows(block: Mapping[str, Any], sign: str = "") -> list[list[str]]:
    rows = [["hops", *QUARTILES, "all"]]
    for hop, cells in block["matrix"].items():
        values = [*cells, block["by_hops"][hop]]
        rows.append([str(hop), *(_bounded(v, sign) for v in values)])
    return [*rows, ["all", *[""] * NUM_BINS, _bounded(block["error"], sign)]]


def _failures(result: Mapping[str, Any]) -> Table:
    header = ["run", "errors", "gold missing", "gold retrieved", "no answer"]
    rows = [[*header, "error, gold missing", "error, gold retrieved"]]
    for name, system in result["systems"].items():
        split = system["failures"]
        if "reason" in split:
            rows.append([name, *["n/a"] * 6])
            continue
        sums = [split[cause]["errors"] for cause in CAUSES]
        counts = (f"{value:g}" for value in (sum(sums), *sums))
        rates = (_bounded(split[cause]) for cause in ("retriever", "reader"))
        rows.append([name, *counts, *rates])
    return Table(
        "Errors by cause: a gold passage is missing (retriever), or all are retrieved (reader)",
        rows,
    )


def _correlations(result: Mapping[str, Any]) -> Table:
    hops = list(result["hops"])
    columns = [*(f"{hop} hops" for hop in hops), "their mean", "diagonal", "questions"]
    rows = [["run, aggregate", *columns, "hops, questions"]]
    for name, system in result["systems"].items():
        for how in AGGREGATES:
            r = system["correlations"][how]
            cells = [*(r["bins"][hop] for hop in hops), r["mean"], r["diagonal"]]
            cells += [r["questions"]["all"], r["hops"]]
            best = " *" if how in system["strongest"] else ""
            rows.append([f"{name}, {_NAMES[how]}{best}", *map(_r, cells)])
    return Table(
        "Pearson's r between difficulty and error (p; number of points): over the quartiles of "
        "each number of hops (weak evidence, with at most four points); the mean of these (* "
        "highest of a run); along the matrix's diagonal; over single questions; and between the "
        "number of hops and error, over single questions",
        rows,
    )


def _error_label(result: Mapping[str, Any]) -> str:
    settings = result["settings"]
    judged = settings.get("judgements") is not None
    return "error (by the judge)" if judged else f"error (1 - {title(settings['score'])})"


def _percent(values: Mapping[str, Any]) -> str:
    return f"{100 * values['value']:.1f} %"


def _bounded(values: Mapping[str, Any], sign: str = "") -> str:
    if values["value"] is None:
        return "n/a"
    value, low, high = (f"{100 * values[n]:{sign}.1f}" for n in ("value", "low", "high"))
    return f"{value} [{low}, {high}] ({values['num_questions']})"


def _r(values: Mapping[str, Any]) -> str:
    if values["value"] is None:
        return "n/a"
    parts = [str(values["num_points"])]
    if "p" in values:
        parts.insert(0, "p<0.001" if values["p"] < 0.001 else f"p={values['p']:.3f}")
    return f"{values['value']:+.2f} ({'; '.join(parts)})"


# ------------------------------------------------------------------------------------ as pictures


def heat_maps(result: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the figures with their names; the caller closes the figures."""
    label = _error_label(result)
    systems = {name: system["matrix"] for name, system in result["systems"].items()}
    yield MATRIX, draw(systems, label)
    if pairs := {name: pair["matrix"] for name, pair in result["differences"].items()}:
        yield DIFFERENCE, draw(pairs, label, signed=True)


def draw(matrices: Mapping[str, Mapping[int, Any]], label: str, signed: bool = False) -> Any:
    """Draws a row of heat maps; cells without a value are gray.

    The color maps suit color-blind readers: cividis from 0 to 100 %, and PuOr around 0 for
    differences.

    Args:
      matrices: title of a panel -> hops -> four cells.
      label: label of the color bar.
      signed: whether the values are differences.
    """
    count = len(matrices)
    rows = max(3, *(len(matrix) for matrix in matrices.values()))
    figure, axes = figures.pyplot().subplots(
        1, count, squeeze=False, layout="constrained",
        figsize=(_WIDTH * count + _MARGIN / 2, _HEIGHT * rows + _MARGIN),
    )  # fmt: skip
    most = 100.0
    if signed:
        sizes = [abs(c["value"]) for m in matrices.values() for _, _, c in _filled(m)]
        most = max(100 * max(sizes, default=0), 1.0)
    image = None
    for panel, (name, matrix) in zip(axes[0], matrices.items(), strict=True):
        image = _panel(panel, matrix, most, signed)
        panel.set_title(figures.plain(name))
    figure.colorbar(image, ax=axes[0].tolist(), label=f"{label}, {'points' if signed else '%'}")
    return figure


def _panel(axes: Any, matrix: Mapping[int, Any], most: float, signed: bool) -> Any:
    value_RC = np.full((len(matrix), NUM_BINS), np.nan)
    for row, cells in enumerate(matrix.values()):
        for column, cell in enumerate(cells):
            if cell["value"] is not None:
                value_RC[row, column] = 100 * cell["value"]
    axes.set_facecolor("#e6e6e6")
    image = axes.imshow(
        value_RC,
        cmap="PuOr" if signed else "cividis",
        vmin=-most if signed else 0,
        vmax=most,
        aspect="auto",
    )
    for row, cells in enumerate(matrix.values()):
        for column, cell in enumerate(cells):
            _write(axes, image, row, column, cell, signed)
    axes.set_xticks(range(NUM_BINS), QUARTILES)
    axes.set_yticks(range(len(matrix)), [str(hop) for hop in matrix])
    axes.set_xlabel(_X)
    axes.set_ylabel(_Y)
    return image


def _write(
    axes: Any, image: Any, row: int, column: int, cell: Mapping[str, Any], signed: bool
) -> None:
    """Writes the value of a cell and its number of questions in a contrasting color."""
    if cell["value"] is None:
        axes.text(column, row, "n/a", ha="center", va="center", color="black")
        return
    value = 100 * cell["value"]
    red, green, blue, _ = image.cmap(image.norm(value))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.45
    text = f"{value:+.0f}" if signed else f"{value:.0f}"
    axes.text(
        column,
        row,
        f"{text}\nn={cell['num_questions']}",
        ha="center",
        va="center",
        fontsize="small",
        color="white" if dark else "black",
    )
