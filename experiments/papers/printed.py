"""The tables and figures of the papers, and the values that they print (``values/*.toml``)."""

import functools
import itertools
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

VALUES = pathlib.Path(__file__).resolve().parent / "values"
# Name of a paper's file and of its experiments -> the paper's name for its system.
PAPERS = {
    "cirag": "CIRAG",
    "kirag": "KiRAG",
    "dualrag": "DualRAG",
    "c2rag": "C2RAG",
    "grade": "GRADE",
}

# Values of axes -> how tables and figures show them.
TITLES = {
    "two_wiki": "2Wiki", "hotpotqa": "HotpotQA", "musique": "MuSiQue", "bamboogle": "Bamboogle",
    "dpr_nq": "NQ", "nq_open": "NQ", "dpr_web_questions": "WebQ", "popqa": "PopQA",
    "asqa": "ASQA", "eli5": "ELI5", "f1": "F1", "em": "EM", "acc": "Acc", "acc_judge": "Acc†",
    "recall@2": "R@2", "recall@3": "R@3", "recall@5": "R@5", "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
}  # fmt: skip

Column = tuple[Any, ...]  # one value of each axis


class Printed(NamedTuple):
    """A table or figure of a paper.

    Attributes:
      paper: a name of `PAPERS`.
      name: such as ``table1``.
      title: the title in our words.
      axes: the axes of the columns, with their values.
      rows: the names of the rows.
      values: the printed value of (row, column). Cells that the paper does not print are absent.
      statistics: the tests that the paper states for its values.
      systems: the paper's own systems. Other rows are compared with them.
      errata: which values contradict others, or "".
      note: a remark about our version, or "".
    """

    paper: str
    name: str
    title: str
    axes: Mapping[str, Sequence[Any]]
    rows: Sequence[str]
    values: Mapping[tuple[str, Column], float]
    statistics: str = ""
    systems: Sequence[str] = ()
    errata: str = ""
    note: str = ""

    @property
    def columns(self) -> list[Column]:
        """The columns in their order."""
        return list(itertools.product(*self.axes.values()))

    def axis_values(self, column: Column) -> dict[str, Any]:
        """Returns the value of each axis at a column."""
        return dict(zip(self.axes, column, strict=True))

    def own_row(self, row: str) -> str | None:
        """Returns the row of the paper's own system to compare a row with, or None.

        It has the same other parts: the one of ``Qwen2.5, RAG`` is ``Qwen2.5, KiRAG``.
        """
        parts = row.split(", ")
        for place, system in itertools.product(range(len(parts)), self.systems):
            own = ", ".join([*parts[:place], system, *parts[place + 1 :]])
            if own in self.rows:
                return own if own != row else None
        return None


@functools.cache
def tables(paper: str) -> Mapping[str, Printed]:
    """Returns the tables and figures of a paper by name."""
    content = tomllib.loads((VALUES / f"{paper}.toml").read_text("utf-8"))
    shared = {key: content.pop(key) for key in ("note", "statistics", "systems") if key in content}
    return {name: _table(paper, name, {**shared, **fields}) for name, fields in content.items()}


def _table(paper: str, name: str, fields: Mapping[str, Any]) -> Printed:
    axes = fields["columns"]
    columns = list(itertools.product(*axes.values()))
    values = {}
    for row, *cells in fields["rows"]:
        if len(cells) not in (0, len(columns)):
            raise ValueError(f"{paper} {name}, {row}: {len(cells)} cells, {len(columns)} columns")
        for column, cell in zip(columns, cells, strict=False):
            if not isinstance(cell, str):
                values[row, column] = float(cell)
    names = [row for row, *_ in fields["rows"]]
    texts = {key: fields.get(key, "") for key in ("statistics", "errata", "note")}
    systems = fields.get("systems", ())
    return Printed(paper, name, fields["title"], axes, names, values, systems=systems, **texts)
