"""Writes small files in the formats of other projects."""

import gzip
import json
import zipfile

import pyarrow
import pyarrow.parquet

from cirag_jax.types import Dataset, Passage, Question, Triple


def lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def value(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def parquet(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def arrow(folder, *rows):
    """Writes the file that ``datasets.Dataset.save_to_disk`` writes."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(list(rows))
    path = folder / "data-00000-of-00001.arrow"
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    value(folder / "state.json", {"_data_files": [{"filename": path.name}]})
    value(folder / "dataset_info.json", {"features": {}})


def archive(path, folder):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                target.write(file, file.relative_to(folder.parent))


def dataset():
    """Returns a dataset with equal titles, quotes, non-ASCII text and unknown annotations."""
    passages = (
        Passage("p 1", "Skerry Light", "It was lit in 1871.\nIt stands on Brum."),
        Passage("p2", '"Brum"', "An island, the “Skerry”.", ("An island,", "the “Skerry”.")),
        Passage("p3", "Osk", "A county."),
        Passage("p4", "Osk", "A poet."),
        Passage("p5", "Tårn", ""),
    )
    questions = (
        Question(
            "q 1",
            "Which county has the light?",
            ("Osk", "the Osk"),
            "bridge",
            2,
            "train",
            supporting=("p 1", "p3"),
            context=("p 1", "p2", "p3", "p4"),
            supporting_sentences=(("p 1", 0), ("p3", 0)),
            aliases=("the Osk",),
        ),
        Question("q2", "Who was Osk?", ("a poet",), split="dev", supporting=("p4",)),
        Question("q3", "What is Tårn?", (), split=None),
    )
    triples = {
        "p 1": (Triple("Skerry Light", "lit in", "1871", "p 1", 0),),
        "p5": (),
    }
    return Dataset("rivers", questions, {p.id: p for p in passages}, triples)
