"""The tables of docs/papers.md that name our config for each row of the papers' tables."""

import collections
import functools
import itertools
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from cirag_jax.commands import task
from cirag_jax.config_files import load_config

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = {"CIRAG": "000", "KiRAG": "001", "DualRAG": "002", "GRADE": "003", "C2RAG": "004"}
# Tables of statistics, examples and cases, as docs/papers.md says.
NO_RESULTS = {
    "CIRAG": {9}, "KiRAG": {6, 7, 8, 14}, "DualRAG": {1, 7}, "C2RAG": {4}, "GRADE": {4},
}  # fmt: skip
_CAPTION = re.compile(r"Table (\d+)[:.]")
_MARKUP = re.compile(r"<[^>]*>|[*$\\^]|\{?dagger\}?|†|\([A-Z]\w+ et al\., \d+\)")


# Names that the text of the papers has in another spelling than the page, and cells above rows.
MISREAD = {
    "owen2.5": "qwen2.5", "flārē": "flare", "rian-15": "flan-t5", "inace": "trace",
    "cmanta": "sports", "cmonto": "sports", "пеанн": "health", "пеаш": "health",
}  # fmt: skip
_HEADERS = {"нор", "domain", "o1-mini", "agg. func.", "x", "~"}


class Row(NamedTuple):
    """A line of a table of docs/papers.md: the papers' names, their tables, and the last cell."""

    names: Sequence[str]
    tables: frozenset[tuple[str, int]]
    text: str

    @property
    def configs(self) -> Iterator[tuple[str, list[str]]]:
        """Yields each config and its overrides."""
        spans = re.findall(r"`([^`]+)`", self.text)
        starts = [i for i, span in enumerate(spans) if re.fullmatch(r"\w+\.py(:\w+)?", span)]
        for start, end in itertools.pairwise([*starts, len(spans)]):
            name = spans[start]
            folders = ("configs/methods", "configs")
            path = next((f for f in folders if (ROOT / f / name.partition(":")[0]).is_file()), "")
            settings = [f"--config.{span}" for span in spans[start + 1 : end] if "=" in span]
            yield f"{path}/{name}", settings


@functools.cache
def rows() -> list[Row]:
    page = (ROOT / "docs" / "papers.md").read_text("utf-8")
    section = page.partition("## Rows of the papers' tables\n")[2].partition("\n## ")[0]
    found = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) != 3 or cells[0] in ("row", "---"):
            continue
        tables = {
            (paper, table)
            for part in cells[1].split(";")
            for paper, _, numbers in [part.strip().partition(" ")]
            for first, _, last in [n.strip().partition("-") for n in numbers.split(",")]
            for table in range(int(first), int(last or first) + 1)
        }
        found.append(Row(cells[0].split(", ") if "token" not in cells[0] else cells[:1],
                         frozenset(tables), cells[2]))  # fmt: skip
    return found


def simple(name: str) -> str:
    """Returns a row's name without markup, references and "(ours)", in lower case."""
    return _MARKUP.sub("", name).replace("(ours)", "").strip(" ↓-").casefold()


def text_of(paper: str, shared: pathlib.Path) -> str:
    (file,) = shared.glob(f"papers/{FILES[paper]}*.txt")
    return file.read_text("utf-8")


def printed_rows(paper: str, text: str) -> dict[int, set[str]]:
    """Returns the first cells of the rows with numbers, by table.

    A caption is below its table, and above it in C2RAG's paper.
    """
    names: dict[int, set[str]] = collections.defaultdict(set)
    pending: list[str] = []
    table = None
    for line in text.splitlines():
        if caption := _CAPTION.match(line):
            table = int(caption[1])
            if paper != "C2RAG":
                names[table].update(pending)
                pending = []
            continue
        cells = [_MARKUP.sub("", cell).strip() for cell in line.split("\t")]
        if sum(bool(re.match(r"[\W_]*\d", cell)) for cell in cells[1:]) < 2:
            continue
        # Some rows begin with a group, such as a reader or a domain.
        labels = itertools.takewhile(lambda cell: not re.match(r"[\W_]*\d", cell), cells[1:2])
        found = [simple(name) for cell in (cells[0], *labels) for name in cell.split(" - ")]
        found = [MISREAD.get(name, name) for name in found if name and name not in _HEADERS]
        if paper == "C2RAG":
            assert table is not None
            names[table].update(found)
        else:
            pending += found
    return names


def test_rows_every_config_builds():
    configs = {(name, tuple(settings)) for row in rows() for name, settings in row.configs}
    assert len(rows()) > 60 and len(configs) > 50
    for name, settings in sorted(configs):
        config = load_config(name, settings)
        if "methods/" in name:
            task.method_settings(config)


def test_rows_name_a_config_or_are_out_of_scope():
    for row in rows():
        assert list(row.configs) or row.text.startswith("out of scope: "), row


@pytest.mark.parametrize("paper", FILES)
def test_rows_of_the_papers_are_listed(paper, shared_data):
    text = text_of(paper, shared_data.parent)
    printed = printed_rows(paper, text)
    for table in NO_RESULTS[paper]:
        printed.pop(table, None)
    own = [(row, {table for name, table in row.tables if name == paper}) for row in rows()]
    for table, names in printed.items():
        listed = {simple(name) for row, tables in own if table in tables for name in row.names}
        assert not names - listed, table
    assert len(printed) == {"CIRAG": 8, "KiRAG": 11, "DualRAG": 5, "GRADE": 15, "C2RAG": 7}[paper]
    plain = _MARKUP.sub("", text).casefold()
    for row, tables in own:
        names = {simple(name) for name in row.names}
        assert not tables or any(name in plain for name in names), row
        found = {table for table, others in printed.items() if names & others}
        # The text of GRADE's paper has some rows without their names.
        assert not found or found == tables or (paper == "GRADE" and found < tables), row


def test_rows_names_appear_in_a_paper(shared_data):
    texts = {paper: text_of(paper, shared_data.parent) for paper in FILES}
    plain = {paper: _MARKUP.sub("", text).casefold() for paper, text in texts.items()}
    for row in rows():
        for name in row.names:
            assert any(simple(name) in plain[paper] for paper, _ in row.tables), name
