"""The retrieval result as a table and a figure."""

import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax.io import write_text
from cirag_jax.reports import figures

# Key in the result -> what people read.
NAMES = {
    "bm25": "BM25",
    "one_shot_frozen": "one-shot, frozen",
    "one_shot_trained": "one-shot, trained",
    "frozen": "iterative, frozen",
    "trained": "iterative, trained",
    "links": "links from BM25",
    "links_one_shot_frozen": "links from one-shot, frozen",
    "linked": "aligner and links, trained",
    "links_trained": "links from iterative, trained",
}


class Table(NamedTuple):
    """Rows of cells under a caption; the first row is the header."""

    caption: str
    rows: Sequence[Sequence[str]]


def write_report(result: Mapping[str, Any], workdir: pathlib.Path, show: bool = True) -> None:
    """Writes ``table.md``, ``recall.png`` and ``.svg``; ``show`` prints the table, too."""
    write_table(table_of(result), workdir, show)
    figures.save(_draw(result), workdir, "recall")


def table_of(result: Mapping[str, Any]) -> str:
    """Recall in per cent, one row a system, and the lead of what was trained with its 95 %
    interval; a column for each fold, where questions of several were asked.
    """
    ks, main = _ks(result), _main(result)
    first = _first(result)
    folds = result["per_fold"] if len(result["per_fold"]) > 1 else {}
    header = [
        "passages found by",
        *(f"R@{k}" for k in ks),
        f"{first} leads R@{main} by",
        *(f"R@{main}, {recalls['num_questions']} {fold}" for fold, recalls in folds.items()),
    ]
    rows = []
    for system, name in _names(result).items():
        figures = [f"{100 * result[system][f'recall@{k}']:.1f}" for k in ks]
        ahead = result["differences"].get(f"{first}-{system}", {}).get(f"recall@{main}")
        of_folds = [f"{100 * recalls[system][f'recall@{main}']:.1f}" for recalls in folds.values()]
        rows.append([name, *figures, lead(ahead), *of_folds])
    settings = result["settings"]
    caption = (
        f"{result['num_questions']} questions over {result['num_passages']} passages of "
        f"{settings['data']}; units: {settings['units']}, {settings['steps']} steps of "
        f"{settings['k']} passages"
    )
    return f"{caption}\n\n{markdown([header, *rows])}{_stops_of(result)}"


def _stops_of(result: Mapping[str, Any]) -> str:
    """What a search along links reads that stops by itself, as a second table; or nothing."""
    if not result.get("stops"):
        return ""
    header = ["stops below", "passages read", "recall", "exactly the gold ones", "F1"]
    rows = [
        [f"{one['stop']:g}", f"{one['read']:.1f}"]
        + [f"{100 * one[name]:.1f}" for name in ("recall", "exact", "f1")]
        for one in result["stops"]
    ]
    caption = f"{NAMES[_first(result)]}, where it leaves out what is needed with less probability"
    return f"\n\n{caption}\n\n{markdown([header, *rows])}"


def _first(result: Mapping[str, Any]) -> str:
    """The system that the others are compared with, and whose searches stop."""
    return "linked" if "linked" in result else "trained"


def _ks(result: Mapping[str, Any]) -> list[int]:
    """The K of the result's recall@K, ascending."""
    recalls = result[next(iter(_names(result)))]
    return sorted(int(name.partition("@")[2]) for name in recalls)


def _names(result: Mapping[str, Any]) -> dict[str, str]:
    """`NAMES` of the systems that were evaluated."""
    return {system: name for system, name in NAMES.items() if system in result}


def _main(result: Mapping[str, Any]) -> int:
    """The K whose lead is shown: 5 as in the papers, else the largest."""
    ks = _ks(result)
    return 5 if 5 in ks else ks[-1]


def figure(score: Mapping[str, float] | None, bounds: bool = False) -> str:
    """A score of `significance.interval` in per cent, with its interval if asked; "" for none."""
    if score is None or score["value"] != score["value"]:
        return ""
    text = f"{100 * score['value']:.1f}"
    if bounds:
        text += f" [{100 * score['low']:.1f}, {100 * score['high']:.1f}]"
    return text


def lead(difference: Mapping[str, float] | None) -> str:
    """A difference of `significance.paired_interval` in points, with its interval; "" for none."""
    if difference is None or difference["difference"] != difference["difference"]:
        return ""
    value, low, high = (100 * difference[name] for name in ("difference", "low", "high"))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def bounded(score: Mapping[str, float]) -> str:
    """`figure` with the interval."""
    return figure(score, bounds=True)


class Column(NamedTuple):
    """A column of a table of systems.

    Attributes:
      title: its header.
      path: keys of its value in what a result says of a system, joined by "/".
      show: formats the value of a system.
      compared: whether differences of two systems have it.
    """

    title: str
    path: str
    show: Callable[[Any], str] = figure
    compared: bool = True

    def of_system(self, block: Any) -> str:
        """Returns the cell of a system; empty without a value."""
        value = self._value(block)
        return "" if value is None else self.show(value)

    def of_difference(self, block: Any) -> str:
        """Returns the cell of a difference; empty without a value."""
        return lead(self._value(block)) if self.compared else ""

    def _value(self, block: Any) -> Any:
        for key in self.path.split("/"):
            block = None if block is None else block.get(key)
        return block


def system_rows(
    label: str, columns: Sequence[Column], result: Mapping[str, Any]
) -> list[list[str]]:
    """Returns the header, a row per system of a result, and a row per difference."""
    return [
        [label, *(column.title for column in columns)],
        *(
            [name, *(column.of_system(block) for column in columns)]
            for name, block in result["systems"].items()
        ),
        *(
            [name, *(column.of_difference(block) for column in columns)]
            for name, block in result["differences"].items()
        ),
    ]


def write_table(table: str, workdir: pathlib.Path, show: bool = True) -> None:
    """Writes ``table.md``; ``show`` prints it on standard error, too."""
    write_text(workdir / "table.md", (table, "\n"))
    if show:
        print(table, file=sys.stderr)


def captioned(caption: str, rows: Sequence[Sequence[str]], complete: bool) -> str:
    """A table below what it is of; says how to go on where not all of it is there."""
    if not complete:
        caption += "; not complete, run the command again to go on"
    return f"{caption}\n\n{markdown(rows)}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """An aligned Markdown table; the first row is its header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        return f"| {' | '.join(padded)} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def _draw(result: Mapping[str, Any]) -> Any:
    ks = _ks(result)
    drawn, axes = figures.pyplot().subplots(figsize=(6, 4), layout="constrained")
    for system, name in _names(result).items():
        style: dict[str, Any] = {"linewidth": 2.5} if system == "trained" else {"linestyle": "--"}
        axes.plot(
            ks, [100 * result[system][f"recall@{k}"] for k in ks], marker="o", label=name, **style
        )
    if stops := result.get("stops"):
        read, recall = ([one[name] for one in stops] for name in ("read", "recall"))
        axes.plot(
            read,
            [100 * value for value in recall],
            "k.-",
            label=f"{NAMES[_first(result)]}, stopping",
        )
    axes.set_xticks(ks)
    axes.set_xlabel("K passages")
    axes.set_ylabel("Recall@K, %")
    data = figures.plain(result["settings"]["data"])
    axes.set_title(f"{data}, {result['num_questions']} questions")
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn
