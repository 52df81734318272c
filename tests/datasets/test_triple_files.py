"""One source of triples for every command: the store, openie.jsonl, and HippoRAG's file."""

import dataclasses
import json

import pytest

from cirag_jax.config_files import load_config
from cirag_jax.datasets import jsonl, load, triple_files
from cirag_jax.errors import UserError
from cirag_jax.training.data import pools
from cirag_jax.triples.store import FILE, Record, TripleStore, content_hash
from cirag_jax.types import Passage, Triple
from tests import tiny


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A dataset folder without triples, and the same triples in each format."""
    root = tmp_path_factory.mktemp("sources")
    dataset = tiny.dataset()
    jsonl.write_dataset(dataclasses.replace(dataset, triples={}), root / "data")
    rows = [(dataset.corpus[i], triples) for i, triples in dataset.triples.items()]
    (root / "store").mkdir()
    with TripleStore.create(root / "store" / FILE) as store:
        records = [Record(p.id, content_hash(p), triples) for p, triples in rows]
        store.commit(records, {"model": "m"})
    lines = (json.dumps(jsonl.openie_record(p.id, triples)) for p, triples in rows)
    (root / "openie.jsonl").write_text("\n".join(lines))
    triple_files.write_hipporag(root / "hippo.json", rows)
    return root


def data_of(sources, **fields):
    flags = [f"--config.data.{k}={v}" for k, v in {"dir": sources / "data", **fields}.items()]
    return load_config("configs/aligner.py", flags).data


@pytest.mark.parametrize("name", ["store", "store/triples.sqlite", "openie.jsonl", "hippo.json"])
def test_load_dataset_every_format_gives_the_same_triples(sources, name):
    dataset = load.load_dataset(data_of(sources, triples=sources / name))
    assert dataset.triples == tiny.dataset().triples
    chains, _ = pools.chains_and_pools(dataset, dataset.questions, "triple")
    assert len(chains) == len(dataset.questions)  # the aligner's silver chains
    is_store = name.startswith("store")
    assert triple_files.is_store(str(sources / name)) == is_store
    lazy = load.load_dataset(data_of(sources, triples=sources / name), on_request=True)
    assert lazy.triples == ({} if is_store else dataset.triples)


def test_load_dataset_without_source_reads_the_folder(sources, tmp_path):
    assert load.load_dataset(data_of(sources)).triples == {}
    tiny.dataset_folder(tmp_path / "own")
    own = load.load_dataset(data_of(sources, dir=tmp_path / "own"))
    assert own.triples == tiny.dataset().triples
    from_folder = data_of(sources, triples=tmp_path / "own")  # a folder with an openie.jsonl
    assert load.load_dataset(from_folder).triples == own.triples


def test_load_datasets_each_folder_has_its_own_source(sources, tmp_path):
    tiny.dataset_folder(tmp_path / "own")
    config = data_of(sources)
    config.dir = (str(sources / "data"), str(tmp_path / "own"))
    config.triples = (str(sources / "hippo.json"), None)
    first, second = load.load_datasets(config)
    assert first.triples == second.triples == tiny.dataset().triples
    # A reader's folders are in config.folders.
    named = data_of(sources)
    named.dir, named.triples = None, (str(sources / "hippo.json"), None)
    folders = (str(sources / "data"), "demo")
    own = load.of_folder(named, folders[0], folders, "config.folders")
    assert load.load_dataset(own).triples == tiny.dataset().triples
    assert load.of_folder(named, "demo", folders, "config.folders").triples is None
    with pytest.raises(UserError, match="has 2 entries, but config.folders has 1 folders"):
        load.of_folder(named, folders[0], folders[:1], "config.folders")
    config.triples = str(sources / "store")
    with pytest.raises(UserError, match="triples has 1 entries, but config.data.dir has 2 folders"):
        load.load_datasets(config)


@pytest.mark.parametrize(
    "config",
    ["aligner", "cross_encoder", "integrator_eval", "reader", "reader_eval",
     "extractor", "extractor_eval", "retrieval", "trajectories", "compare", "methods/cirag",
     "methods/kirag", "methods/c2rag"],
)  # fmt: skip
def test_config_data_triples_exists_in_every_command(config):
    config = load_config(f"configs/{config}.py", ["--config.data.triples=STORE"])
    assert config.data.triples == "STORE" and config.get("triples", "STORE") == "STORE"


def test_config_triples_is_the_same_field():
    config = load_config("configs/methods/cirag.py", ["--config.triples=online"])
    assert config.data.triples == "online"


def test_hipporag_passages_are_recognized_by_text_or_id(tmp_path, capsys):
    corpus = {
        "a": Passage("a", "Ada", "Ada  was born\nin Lund."),
        "b": Passage("b", "", "No title."),
        "c": Passage("c", "Cal", "Old text."),
        "d": Passage("d", "Dan", "No triples, because its extraction failed."),
    }
    born = [["Ada", "born in", "Lund"], ["x"]]
    docs = [
        {"idx": 0, "passage": "Ada\nAda was born in Lund.", "extracted_triples": born},
        {"idx": "chunk-1", "passage": "No title.", "extracted_triples": []},
        {"idx": "c", "passage": "another text", "extracted_triples": [["Cal", "is", "old"]]},
        {"idx": "chunk-9", "passage": "Elsewhere", "extracted_triples": [["E", "is", "far"]]},
        {"idx": "chunk-2", "passage": "Failed"},
        {"idx": "d", "passage": "Dan\nNo triples, because its extraction failed."},
    ]  # fmt: skip
    path = tmp_path / "openie_results.json"
    path.write_text(json.dumps({"docs": docs, "avg_ent_chars": 3.0}))
    assert triple_files.read_triples(str(path), corpus) == {
        "a": (Triple("Ada", "born in", "Lund", "a", 0),),
        "b": (),
        "c": (Triple("Cal", "is", "old", "c", 0),),
    }
    stderr = capsys.readouterr().err
    assert "2 of 6 passages are not in the corpus" in stderr and "3 of 4 passages have" in stderr
    assert "1 of 6 passages have the id of a passage of the corpus, but another text" in stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.json", "{", "x.json cannot be read"),
        ("x.json", "[]", "x.json: field 'docs' must be a list of passages"),
        ("x.json", '{"docs": [{"idx": 1}]}', r"x.json: docs\[0\].*passage"),
        ("x.json", '{"docs": []}', "x.json has no triples of the 24 passages of the corpus"),
        ("x.jsonl", '{"passage_id": "zz"}', "passage 'zz', which corpus.jsonl does not have"),
        ("none.json", None, "none.json does not exist; expected a workdir of launch/extract.py"),
        ("folder", None, "has no triple store"),
    ],
)
def test_load_dataset_bad_source_is_named(sources, tmp_path, name, text, message):
    (tmp_path / "folder").mkdir()
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        load.load_dataset(data_of(sources, triples=tmp_path / name))


def test_load_dataset_online_is_only_for_answering(sources):
    data = data_of(sources, triples="online")
    with pytest.raises(UserError, match="triples=online extracts triples while answering"):
        load.load_dataset(data)
    assert load.load_dataset(data, on_request=True).triples == {}


def test_load_dataset_store_of_another_corpus_is_counted(sources, tmp_path):
    dataset = tiny.dataset()
    changed = {i: dataclasses.replace(p, text=p.text + "!") for i, p in dataset.corpus.items()}
    corpus = {**dataset.corpus, **dict(list(changed.items())[:3])}
    jsonl.write_dataset(dataclasses.replace(dataset, corpus=corpus, triples={}), tmp_path / "new")
    with pytest.raises(UserError, match=r"passage 'p0' has changed .* \(3 of 24 passages\)"):
        load.load_dataset(data_of(sources, dir=tmp_path / "new", triples=sources / "store"))
