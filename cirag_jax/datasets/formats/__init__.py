"""Files of other projects, read as data sets and written from them (docs/coming_from.md).

Each module has one format; `FORMATS` lists them in the order in which they are recognized.
"""

from collections.abc import Mapping
from pathlib import Path

from cirag_jax.datasets import jsonl
from cirag_jax.datasets.formats import beir, flashrag, hipporag, pairs, search_r1, tables
from cirag_jax.datasets.formats.base import Format, Reader, report, resolve, unique_passages
from cirag_jax.datasets.formats.files import Source
from cirag_jax.errors import UserError
from cirag_jax.types import Dataset

FORMATS: Mapping[str, Format] = {
    "hipporag": hipporag.FORMAT,
    "bright": beir.BRIGHT,
    "search_r1": search_r1.FORMAT,
    "tevatron": pairs.TEVATRON,
    "beir": beir.FORMAT,
    "flashrag": flashrag.FORMAT,
    "sentence_transformers": pairs.TRIPLETS,
    "hf": tables.FORMAT,
}
WRITABLE = tuple(name for name, found in FORMATS.items() if found.write is not None)


def is_own(path: Path) -> bool:
    """Returns whether a path is to be read as our own dataset folder."""
    path = path.expanduser()
    if not path.exists() or (path / jsonl.QUESTIONS).is_file():
        return True
    if not path.is_dir():
        return False
    return not any(found.recognizes(Source(path)) for found in FORMATS.values())


def open_reader(path: Path, name: str | None = None) -> Reader:
    """Returns a reader of the format ``name``; None recognizes the format."""
    source = Source(path)
    if name is None:
        name = next((name for name, f in FORMATS.items() if f.recognizes(source)), None)
    if name is None:
        raise UserError(
            f"{path} has none of the known formats ({', '.join(FORMATS)}); docs/coming_from.md "
            "lists the files of each."
        )
    return FORMATS[name].reader(source)


def read(
    path: Path, *, corpus: bool = True, questions: bool = True, triples: bool = True
) -> Dataset:
    """Reads a dataset of another project; see `jsonl.read_dataset`."""
    reader = open_reader(path)
    drafts = list(reader.drafts()) if questions else []
    passages = {p.id: p for p in unique_passages(reader)}
    if corpus and not passages:
        raise UserError(f"{path} has no passages, which this command needs.")
    if questions and not drafts:
        raise UserError(f"{path} has no questions, which this command needs.")
    found = resolve(drafts, passages.values(), reader.notes)
    report(path, reader.notes)
    extracted = reader.triples(passages) if triples else {}
    return Dataset(reader.source.path.resolve().stem, found, passages, extracted)


def write(name: str, dataset: Dataset, folder: Path) -> None:
    """Writes a dataset to a folder in the format ``name``, one of `WRITABLE`."""
    writer = FORMATS[name].write
    assert writer is not None
    folder.mkdir(parents=True, exist_ok=True)
    writer(dataset, folder)
