"""Importing openie.jsonl, which must give the same triples as the dataset reader."""

import json

import pytest

from cirag_jax.commands.extract import extract_corpus
from cirag_jax.datasets import jsonl
from cirag_jax.errors import UserError
from cirag_jax.triples.store import TripleStore
from cirag_jax.types import Triple
from configs import extract as extract_config
from tests import tiny
from tests.commands.model_server import model_server


def run(folder, workdir, openie, **fields):
    config = extract_config.get_config()
    config.update_from_flattened_dict(
        {"data.dir": str(folder), "import_openie": openie and str(openie), **fields}
    )
    workdir.mkdir(exist_ok=True)
    return extract_corpus(config.lock(), workdir)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path):
    folder = tiny.dataset_folder(tmp_path / "data")
    rows = [json.loads(line) for line in (folder / "openie.jsonl").read_text().splitlines()]
    del rows[3]["triple_sentences"], rows[5]
    rows[2]["triple_sentences"][0] = 99
    rows[4]["triples"].append(["only", "two"])
    rows[4]["triple_sentences"].append(None)
    rows[6] |= {"triples": [], "triple_sentences": []}
    rows[7] |= {"triples": None}
    again = {"passage_id": rows[0]["passage_id"], "triples": [["balia", "is", "a person"]]}
    again["triples"].append(rows[0]["triples"][0])
    write(folder / "openie.jsonl", *rows, {"passage_id": rows[8]["passage_id"]}, again)
    return folder


def test_import_gives_same_triples_as_dataset_reader(folder, tmp_path):
    result = run(folder, tmp_path / "w", folder / "openie.jsonl", block=5)
    dataset = jsonl.read_dataset(folder)
    with TripleStore.open(tmp_path / "w") as store:
        expected = {name: dataset.triples.get(name) for name in dataset.corpus}
        assert store.triples(dataset.corpus) == expected
        store.check_corpus(dataset.corpus.values())
    assert result["passages"] == result["imported"] == len(dataset.triples) == 22
    assert (result["empty"], result["malformed"], result["failed"]) == (1, 1, 0)
    assert result["out_of_range"] == 1
    again = run(folder, tmp_path / "w", folder / "openie.jsonl", block=5)
    assert (again["imported"], again["reused"]) == (0, 22)


def test_import_then_extraction_adds_other_passages(folder, tmp_path):
    run(folder, tmp_path / "w", folder / "openie.jsonl")
    with model_server() as server:
        result = run(
            folder,
            tmp_path / "w",
            None,
            max_empty_share=1.0,
            **{"extractor.backend": "openai", "extractor.base_url": server.url},
        )
    assert (result["reused"], result["extracted"], result["passages"]) == (22, 2, 24)
    with TripleStore.open(tmp_path / "w") as store:
        entries = map(store.entry, store.passage_ids())
        counted = [entry.extractor.get("import") for entry in entries if entry]
    assert counted.count("openie.jsonl") == 22 and counted.count(None) == 2


def test_import_changed_file_and_corpus_update_store(folder, tmp_path):
    run(folder, tmp_path / "w", folder / "openie.jsonl")
    lines = (folder / "corpus.jsonl").read_text().splitlines()
    (folder / "corpus.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    gone = json.loads(lines[-1])["id"]
    with pytest.raises(UserError, match=rf"openie.jsonl:\d+: field 'passage_id' names .*{gone}"):
        run(folder, tmp_path / "w", folder / "openie.jsonl")
    first = json.loads(lines[0])["id"]
    new = write(tmp_path / "new.jsonl", {"passage_id": first, "triples": [["a", "b", "c"]]})
    result = run(folder, tmp_path / "w", new)
    assert (result["imported"], result["deleted"], result["passages"]) == (1, 1, 21)
    with TripleStore.open(tmp_path / "w") as store:
        assert store.triples([first]) == {first: (Triple("a", "b", "c", first, 0),)}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"triples": []}, "new.jsonl:1: field 'passage_id' is missing"),
        ({"passage_id": "p0", "triples": "x"}, "new.jsonl:1: field 'triples' must be a list"),
        ({"passage_id": "p0", "triples": [["a", "b", "c"]], "triple_sentences": []},
         "new.jsonl:1: field 'triple_sentences' must have one entry per triple"),
        ({"passage_id": "p0", "triples": [["a", "b", "c"]], "triple_sentences": [-1]},
         "new.jsonl:1: field 'triple_sentences.0.' must not be negative"),
    ],
)  # fmt: skip
def test_import_broken_line_is_refused(folder, tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        run(folder, tmp_path / "w", write(tmp_path / "new.jsonl", row))
    with pytest.raises(UserError, match="does not exist"):
        run(folder, tmp_path / "w", tmp_path / "none.jsonl")


def test_export_is_imported_unchanged(folder, tmp_path):
    """A store survives export and import in both formats, without sentences in HippoRAG's."""
    run(folder, tmp_path / "w", folder / "openie.jsonl")
    with TripleStore.open(tmp_path / "w") as store:
        expected = store.triples(jsonl.read_corpus(folder))
    for name in ("out.jsonl", "out.json"):
        result = run(folder, tmp_path / "w", None, export_openie=str(tmp_path / name))
        assert (result["exported"], result["without_triples"]) == (22, 2)
        again = run(folder, tmp_path / name.replace(".", "_"), tmp_path / name)
        assert (again["imported"], again["triples"]) == (22, result["triples"])
        with TripleStore.open(tmp_path / name.replace(".", "_")) as store:
            assert store.triples(expected) == expected
    docs = json.loads((tmp_path / "out.json").read_text())
    assert docs["docs"][0]["idx"].startswith("chunk-") and docs["avg_ent_chars"] > 0
    assert docs["docs"][0]["passage"].count("\n") == 1


def test_export_bad_settings_are_refused(folder, tmp_path):
    run(folder, tmp_path / "w", folder / "openie.jsonl")
    for fields, message in (
        ({"export_openie": "x.txt"}, "must end in .jsonl"),
        ({"export_openie": str(tmp_path / "no" / "x.json")}, "no is not a folder"),
        ({"export_openie": "x.json", "import_openie": "y.jsonl"}, "are alternatives"),
        ({"export_openie": "x.json", "data.corpus": "selected_questions"}, "complete store"),
    ):
        with pytest.raises(UserError, match=message):
            run(folder, tmp_path / "w", fields.pop("import_openie", None), **fields)
    text = (folder / "corpus.jsonl").read_text()
    first = json.loads(text.splitlines()[0])
    write(folder / "corpus.jsonl", first | {"text": "Changed.", "sentences": None})
    with pytest.raises(UserError, match=f"passage '{first['id']}' has changed since"):
        run(folder, tmp_path / "w", None, export_openie=str(tmp_path / "x.json"))
    with pytest.raises(UserError, match="has no triple store"):
        run(folder, tmp_path / "w2", None, export_openie=str(tmp_path / "x.json"))
