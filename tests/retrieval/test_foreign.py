"""Vectors of other programs as an index, and back."""

import json

import faiss
import numpy as np
import pytest

from cirag_jax.commands import index
from cirag_jax.config_files import load_config
from cirag_jax.datasets.formats import flashrag
from cirag_jax.errors import UserError
from cirag_jax.retrieval import foreign
from cirag_jax.retrieval.encoders import open_encoder_for
from cirag_jax.retrieval.index import PassageIndex
from tests import tiny

IDS = [f"d{i}" for i in range(20)]
VECTORS = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)


def save(path, kind):
    if kind == "npy":
        np.save(path, VECTORS.astype(np.float16 if path.name.startswith("half") else np.float32))
        return
    flat = faiss.IndexFlatIP(6)
    built = {
        "flat": flat,
        "hnsw": faiss.IndexHNSWFlat(6, 8, faiss.METRIC_INNER_PRODUCT),
        "ivf": faiss.IndexIVFFlat(flat, 6, 2, faiss.METRIC_INNER_PRODUCT),
        "idmap": faiss.IndexIDMap(faiss.IndexFlatIP(6)),
        "sq": faiss.IndexScalarQuantizer(6, faiss.ScalarQuantizer.QT_8bit),
    }[kind]
    built.train(VECTORS)
    if kind == "idmap":
        built.add_with_ids(VECTORS, np.arange(100, 120))
    else:
        built.add(VECTORS)
    faiss.write_index(built, str(path))


@pytest.mark.parametrize("kind", ["npy", "flat", "hnsw", "ivf"])
def test_vectors_are_put_into_the_order_of_the_passages(tmp_path, kind):
    path = tmp_path / ("v.npy" if kind == "npy" else "v.index")
    save(path, kind)
    (tmp_path / "ids.txt").write_text("".join(f"{name}\n" for name in IDS))
    wanted = ["d3", "d19", "d0"]
    vectors = foreign.ForeignVectors(str(path), str(tmp_path / "ids.txt"), wanted)
    assert vectors.shape == (3, 6)
    np.testing.assert_array_equal(vectors[0:3], VECTORS[[3, 19, 0]])
    in_order = foreign.ForeignVectors(str(path), None, IDS)
    np.testing.assert_array_equal(in_order[5:7], VECTORS[5:7])


def test_vectors_of_an_id_map_have_its_ids(tmp_path):
    save(tmp_path / "v.faiss", "idmap")
    vectors = foreign.ForeignVectors(str(tmp_path / "v.faiss"), None, ["119", "100"])
    np.testing.assert_array_equal(vectors[0:2], VECTORS[[19, 0]])


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.jsonl", "b.jsonl", "a.npy"])
def test_ids_of_every_file_are_read(tmp_path, name):
    path = tmp_path / name
    if name == "a.npy":
        np.save(path, np.array(["x", "7"]))
    else:
        rows = [{"_id": "x"}, {"id": 7}] if name == "b.jsonl" else ["x", 7]
        texts = ["x", "7"] if name == "a.txt" else [json.dumps(row) for row in rows]
        path.write_text(json.dumps(rows) if name == "a.json" else "\n".join(texts) + "\n")
    assert foreign.read_ids(str(path)) == ["x", "7"]


@pytest.mark.parametrize(
    ("ids", "wanted", "message"),
    [
        (None, ["d0"], "has 20 vectors for 1 passages; set config.vector_ids"),
        (IDS[1:], ["d1"], "has 20 vectors, but there are 19 ids"),
        ([*IDS[:19], "d0"], ["d0"], "1 ids are repeated"),
        (IDS, ["d0", "p"], "has no vector for 1 of 2 passages, such as 'p'"),
    ],
)
def test_bad_ids_are_refused(tmp_path, ids, wanted, message):
    save(tmp_path / "v.npy", "npy")
    file = None if ids is None else str(tmp_path / "ids.json")
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    with pytest.raises(UserError, match=message):
        foreign.ForeignVectors(str(tmp_path / "v.npy"), file, wanted)


def test_bad_files_are_refused(tmp_path):
    save(tmp_path / "v.index", "sq")
    with pytest.raises(UserError, match="type IndexScalarQuantizer, which does not store"):
        foreign.ForeignVectors(str(tmp_path / "v.index"), None, IDS)
    np.save(tmp_path / "v.npy", np.arange(4))
    with pytest.raises(UserError, match="must be a matrix of floating-point numbers"):
        foreign.ForeignVectors(str(tmp_path / "v.npy"), None, IDS)
    (tmp_path / "v.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(UserError, match="v.npy cannot be read"):
        foreign.ForeignVectors(str(tmp_path / "v.npy"), None, IDS)
    (tmp_path / "v.index").write_bytes(b"nothing")
    with pytest.raises(UserError, match="faiss cannot read"):
        foreign.ForeignVectors(str(tmp_path / "v.index"), None, IDS)
    np.save(tmp_path / "v.npy", np.full((20, 6), np.nan, np.float32))
    with pytest.raises(UserError, match="not finite"):
        foreign.ForeignVectors(str(tmp_path / "v.npy"), None, IDS)[0:1]


def test_index_of_written_vectors_equals_the_index(tmp_path, one_device, capsys):
    """The encoder's vectors, written and read in another order, give the same index."""
    data = tmp_path / "data"
    data.mkdir()
    flashrag.write(tiny.dataset(), data)
    model = tiny.model_folder(tmp_path / "encoder")
    flags = [f"--config.data.dir={data}", f"--config.encoder.model={model}"]
    flags.append("--config.shard_rows=5")

    def build(name, *more):
        (tmp_path / name).mkdir()
        return index.index_dataset(
            load_config("configs/index.py", [*flags, *more]), tmp_path / name
        )

    build("own", "--config.write_vectors=true")
    order = np.random.default_rng(1).permutation(24)
    ids = (tmp_path / "own/ids.txt").read_text().splitlines()
    np.save(tmp_path / "v.npy", np.load(tmp_path / "own/vectors.npy")[order])
    (tmp_path / "ids.json").write_text(json.dumps([ids[row] for row in order]))
    given = f"--config.vectors={tmp_path / 'v.npy'}", f"--config.vector_ids={tmp_path / 'ids.json'}"
    result = build("foreign", *given)
    assert result["agreement"] == pytest.approx(1, abs=1e-5)
    assert "WARNING" not in capsys.readouterr().err
    for number in range(5):
        name = f"index/vectors-{number:05d}.npy"
        np.testing.assert_array_equal(
            np.load(tmp_path / "own" / name), np.load(tmp_path / "foreign" / name)
        )
    encoder = open_encoder_for(load_config("configs/index.py", flags).encoder)
    opened = PassageIndex.open(tmp_path / "foreign/index", encoder)
    opened.check_corpus(tuple(tiny.dataset().corpus.values()))

    np.save(tmp_path / "v.npy", np.load(tmp_path / "own/vectors.npy")[order[::-1]])
    assert build("wrong", *given)["agreement"] < 0.95
    assert "differently from" in capsys.readouterr().err
