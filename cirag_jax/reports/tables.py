"""Tables of results, and the table and figure of the retrieval evaluation."""

import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax.io import write_text
from cirag_jax.reports import figures

# System in the result -> name in tables and figures.
NAMES = {
    "bm25": "BM25",
    "one_shot_frozen": "one-shot, frozen",
    "one_shot_trained": "one-shot, trained",
    "frozen": "iterative, frozen",
    "trained": "iterative, trained",
    "links": "links from BM25",
    "links_one_shot_frozen": "links from one-shot, frozen",
    "graph_frozen": "graph of triples (HippoRAG 2), frozen",
    "linked": "aligner and links, trained",
    "links_trained": "links from iterative, trained",
}
LEADING = ("linked", "trained", "links")  # Systems that are compared with all others.


# The definition of recall@K in captions. Other projects count a question as 1 if any or if all gold
# passages are among the first K.
RECALL_AT = "R@K: share of the gold passages among the first K"
COMPLETE_AT = "all@K: share of questions with all gold passages among the first K"


class Table(NamedTuple):
    """Rows of cells under a caption; the first row is the header."""

    caption: str
    rows: Sequence[Sequence[str]]


def write_report(result: Mapping[str, Any], workdir: pathlib.Path, show: bool = True) -> None:
    """Writes ``table.md``, ``recall.png`` and ``recall.svg``; ``show`` also prints the table."""
    write_table(table_of(result), workdir, show)
    figures.save(_draw(result), workdir, "recall")


def table_of(result: Mapping[str, Any]) -> str:
    """Returns a table of each system's scores in per cent, overall and per fold.

    Of the other scores, only complete@K for the main K and nDCG@K for the largest K are columns.
    The table also shows the lead of the main system, the first of `LEADING`, over each other
    system, with 95 % intervals.
    """
    ks = _ks(result)
    main_k = 5 if 5 in ks else ks[-1]  # 5 as in the papers.
    first = next((system for system in LEADING if system in result), "")
    folds = result["per_fold"] if len(result["per_fold"]) > 1 else {}
    header = [
        "retrieval",
        *(f"R@{k}" for k in ks),
        f"all@{main_k}",
        f"nDCG@{ks[-1]}",
        *([f"lead of {first} in R@{main_k}"] if first else []),
        *(f"R@{main_k}, {recalls['num_questions']} {fold}" for fold, recalls in folds.items()),
    ]
    rows = []
    for system, name in _names(result).items():
        columns = (*(f"recall@{k}" for k in ks), f"complete@{main_k}", f"ndcg@{ks[-1]}")
        scores = [f"{100 * result[system][name]:.1f}" for name in columns]
        difference = result["differences"].get(f"{first}-{system}", {}).get(f"recall@{main_k}")
        of_folds = [f"{100 * fold[system][f'recall@{main_k}']:.1f}" for fold in folds.values()]
        rows.append([name, *scores, *([lead(difference)] if first else []), *of_folds])
    settings = result["settings"]
    caption = (
        f"{result['num_questions']} questions over {result['num_passages']} passages of "
        f"{settings['data']}; units: {settings['units']}, {settings['steps']} steps of "
        f"{settings['k']} passages; in per cent; {RECALL_AT}; {COMPLETE_AT}"
    )
    return captioned(caption, [header, *rows]) + _stops_table(result)


def _stops_table(result: Mapping[str, Any]) -> str:
    """Returns a table of linked search with stopping thresholds, or "" if there are none."""
    if not result.get("stops"):
        return ""
    header = ["threshold", "passages", "recall", "exact match", "F1"]
    rows = [
        [f"{scores['stop']:g}", f"{scores['read']:.1f}"]
        + [f"{100 * scores[name]:.1f}" for name in ("recall", "exact", "f1")]
        for scores in result["stops"]
    ]
    caption = (
        f"{NAMES['linked']}, without passages whose probability of being needed is "
        "below a threshold; the other passages are compared with the gold passages; recall: share "
        "of the gold passages among them"
    )
    return "\n\n" + captioned(caption, [header, *rows])


def _ks(result: Mapping[str, Any]) -> list[int]:
    """Returns the values of K in recall@K, in ascending order."""
    scores = result[next(iter(_names(result)))]
    return sorted(int(name.partition("@")[2]) for name in scores if name.startswith("recall@"))


def _names(result: Mapping[str, Any]) -> dict[str, str]:
    """Returns the `NAMES` of the evaluated systems, and the names of run files."""
    names = {system: name for system, name in NAMES.items() if system in result}
    return names | {name: name for name in result["settings"].get("runs", ())}


def percent(score: Mapping[str, float] | None, bounds: bool = False) -> str:
    """Formats a score in per cent, with its interval if ``bounds``; "" if it is undefined."""
    if score is None or score["value"] != score["value"]:
        return ""
    text = f"{100 * score['value']:.1f}"
    if bounds:
        text += f" [{100 * score['low']:.1f}, {100 * score['high']:.1f}]"
    return text


def lead(difference: Mapping[str, float] | None) -> str:
    """Formats a result of `significance.paired_interval` in points with its bounds, or as ""."""
    if difference is None or difference["difference"] != difference["difference"]:
        return ""
    value, low, high = (100 * difference[name] for name in ("difference", "low", "high"))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def percent_with_bounds(score: Mapping[str, float]) -> str:
    """Formats a score in per cent with its interval."""
    return percent(score, bounds=True)


class Column(NamedTuple):
    """A column of a table of systems.

    Attributes:
      title: the header.
      path: keys of the value in a system's block of the result, joined by "/".
      show: formats a system's value.
      compared: whether to show this column for differences between systems.
    """

    title: str
    path: str
    show: Callable[[Any], str] = percent
    compared: bool = True

    def of_system(self, block: Any) -> str:
        """Returns the cell of a system, or ""."""
        value = self._value(block)
        return "" if value is None else self.show(value)

    def of_difference(self, block: Any) -> str:
        """Returns the cell of a difference, or ""."""
        return lead(self._value(block)) if self.compared else ""

    def _value(self, block: Any) -> Any:
        for key in self.path.split("/"):
            block = None if block is None else block.get(key)
        return block


def system_rows(
    label: str, columns: Sequence[Column], result: Mapping[str, Any]
) -> list[list[str]]:
    """Returns the header, a row per system of a result, and a row per difference."""
    rows = [[label, *(column.title for column in columns)]]
    for name, block in result["systems"].items():
        rows.append([name, *(column.of_system(block) for column in columns)])
    for name, block in result["differences"].items():
        rows.append([name, *(column.of_difference(block) for column in columns)])
    return rows


def write_table(table: str, workdir: pathlib.Path, show: bool = True) -> None:
    """Writes ``table.md``; ``show`` also prints it on standard error."""
    write_text(workdir / "table.md", (table, "\n"))
    if show:
        print(table, file=sys.stderr)


def captioned(caption: str, rows: Sequence[Sequence[str]], complete: bool = True) -> str:
    """Returns a Markdown table below its caption, with a note if the result is incomplete."""
    if not complete:
        caption += "; incomplete, run the same command to resume"
    return f"{caption}\n\n{markdown(rows)}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns an aligned Markdown table; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        return f"| {' | '.join(padded)} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def _draw(result: Mapping[str, Any]) -> Any:
    ks = _ks(result)
    figure, axes = figures.pyplot().subplots(figsize=(7.5, 4), layout="constrained")
    for system, name in _names(result).items():
        style: dict[str, Any] = {"linewidth": 2.5} if system == "trained" else {"linestyle": "--"}
        axes.plot(
            ks, [100 * result[system][f"recall@{k}"] for k in ks], marker="o", label=name, **style
        )
    if stops := result.get("stops"):
        axes.plot(
            [scores["read"] for scores in stops],
            [100 * scores["recall"] for scores in stops],
            "k.-",
            label=f"{NAMES['linked']}, stopping",
        )
    axes.set_xticks(ks)
    data = figures.plain(result["settings"]["data"])
    axes.set_title(f"{data}, {result['num_questions']} questions")
    figures.finish(axes, "K passages", "Recall@K, %")
    return figure
