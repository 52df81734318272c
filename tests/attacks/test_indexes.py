"""Corrupt folders of indexes, which must be rejected or give the right ranking."""

import collections
import json
import pathlib
import resource
import shutil

import numpy as np
import pytest
from hypothesis import example

from cirag_jax.commands import index as index_command
from cirag_jax.commands.index import build_index
from cirag_jax.errors import UserError
from cirag_jax.retrieval.encoders import CachedEncoder, open_encoder_for
from cirag_jax.retrieval.faiss_index import FaissIndex, IndexOptions
from cirag_jax.retrieval.index import PassageIndex
from cirag_jax.retrieval.rankers import BiEncoderRanker
from cirag_jax.retrieval.search import ExactIndex
from configs import retrievers
from tests import tiny
from tests.attacks.hostile import (
    CORRUPTIONS,
    MUTATIONS,
    attack,
    attempt,
    corrupt,
    mutate_json,
    replaced,
    unchanged,
)

_PASSAGES = list(tiny.dataset().corpus.values())
_QUERY = "who is the patron of corum?"
FILES = {
    "bm25": (
        *("manifest.json", "ids.jsonl", "bm25/params.index.json", "bm25/vocab.index.json"),
        *("bm25/data.csc.index.npy", "bm25/indices.csc.index.npy", "bm25/indptr.csc.index.npy"),
    ),
    "exact": ("manifest.json", "ids.jsonl", "vectors-00000.npy"),
    "faiss_flat": ("index.faiss",),
}
_INDEX_FILES = [(kind, name) for kind, names in FILES.items() for name in names]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    config = retrievers.encoder()
    config.model = str(tiny.model_folder(tmp_path_factory.mktemp("encoder") / "model"))
    return open_encoder_for(config.lock())


@pytest.fixture(scope="module")
def folders(tmp_path_factory, encoder):
    root = tmp_path_factory.mktemp("indexes")
    for kind in FILES:
        build_index(_PASSAGES, encoder, root / kind, kind)
    return root


class _FixedEncoder:
    """An encoder with a precomputed vector for the only query."""

    def __init__(self, encoder):
        self.identity, self.dim = encoder.identity, encoder.dim
        self.truncated = encoder.truncated
        self.encode = lambda texts, kind: self._vectors
        self._vectors = encoder.encode([_QUERY], "query")


@pytest.fixture(scope="module")
def search_corrupt(encoder, folders):
    """Returns a function that replaces a file of an index, opens the index and searches it."""
    fixed_encoder = _FixedEncoder(encoder)

    def search(kind: str, name: str, content: bytes) -> None:
        with replaced(folders / kind / name, content), unchanged(folders):
            index = attempt(lambda: PassageIndex.open(folders / kind, fixed_encoder))
            if index is not None:
                row_QK, score_QK = index.search([_QUERY], 3)
                assert ((row_QK >= -1) & (row_QK < len(_PASSAGES))).all()
                assert np.isfinite(score_QK[row_QK >= 0]).all()
                attempt(lambda: index.check_corpus(_PASSAGES))

    return search


@pytest.mark.parametrize("kind", FILES)
def test_intact_folder_equals_index_in_memory(folders, encoder, kind):
    results = PassageIndex.open(folders / kind, encoder).search([_QUERY], 3)
    expected = PassageIndex.in_memory(_PASSAGES, encoder, kind).search([_QUERY], 3)
    for actual, desired in zip(results, expected, strict=True):
        np.testing.assert_allclose(actual, desired, rtol=1e-6)


@pytest.mark.parametrize(("kind", "name"), _INDEX_FILES)
@example([("put", 41, b"\n")])  # the length of faiss_flat's vectors
@attack(12, CORRUPTIONS)
def test_corrupt_bytes(search_corrupt, folders, kind, name, damages):
    search_corrupt(kind, name, corrupt((folders / kind / name).read_bytes(), damages))


@pytest.mark.parametrize(
    ("kind", "name"), [place for place in _INDEX_FILES if place[1].endswith(".json")]
)
@example((False, [(59, True)]))  # the encoder in BM25's manifest, where it must be null
@attack(25, MUTATIONS)
def test_mutated_json(search_corrupt, folders, kind, name, changes):
    content = json.loads((folders / kind / name).read_text())
    search_corrupt(kind, name, mutate_json(content, changes))


@example((False, [(29, True)]), [("cut", 0, b"")])  # the encoder
@attack(15, MUTATIONS, CORRUPTIONS)
def test_stopped_build(tmp_path_factory, changes, damages):
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_command, "_build_bm25", _interrupt)
        build_index(_PASSAGES, None, folder, "bm25")
    plan = (folder / index_command.PLAN).read_bytes()
    for content in (mutate_json(json.loads(plan), changes), corrupt(plan, damages)):
        (folder / index_command.PLAN).write_bytes(content)
        with unchanged(folder):
            attempt(lambda: PassageIndex.open(folder, None))
        if attempt(lambda: build_index(_PASSAGES, None, folder, "bm25")) is None:
            assert (folder / index_command.PLAN).read_bytes() == content  # kept for inspection
        else:
            assert attempt(lambda: PassageIndex.open(folder, None)) is not None


def _interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("count", [None, 0, 23, 25, 24.0, "24", 10**400])  # found by `make attack`
def test_bm25_wrong_number_of_texts_is_rejected(folders, tmp_path, count):
    shutil.copytree(folders / "bm25", tmp_path / "index")
    file = tmp_path / "index" / "bm25" / "params.index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_docs": count}))
    with pytest.raises(UserError, match="is damaged"):
        PassageIndex.open(tmp_path / "index", None)


def test_wrong_number_of_vectors_is_rejected(folders, tmp_path):  # found by `make attack`
    shutil.copytree(folders / "exact", tmp_path / "index")
    file = tmp_path / "index" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "shards": 0}))
    with pytest.raises(UserError, match="it has 0 vectors for 24 passages"):
        PassageIndex.open(tmp_path / "index", _exact_encoder(folders))


def test_bm25_nan_scores_are_rejected(folders, tmp_path):
    shutil.copytree(folders / "bm25", tmp_path / "index")
    file = tmp_path / "index" / "bm25" / "data.csc.index.npy"
    np.save(file, np.full_like(np.load(file), np.nan))
    with pytest.raises(UserError, match="a score is not finite"):
        PassageIndex.open(tmp_path / "index", None)


_ARRAYS = {
    "no number": np.full((24, 32), np.nan, np.float32),
    "no end": np.full((24, 32), np.inf, np.float32),
    "integers": np.zeros((24, 32), int),
    "texts": np.full((24, 32), "a"),
    "one number": np.float32(1),
    "a row": np.zeros(24, np.float32),
    "another width": np.zeros((24, 31), np.float32),
    "other rows": np.zeros((23, 32), np.float32),
}


@pytest.mark.parametrize("name", _ARRAYS)
def test_bad_shard_is_rejected(search_corrupt, folders, tmp_path, name):
    np.save(tmp_path / "x.npy", _ARRAYS[name])
    search_corrupt("exact", "vectors-00000.npy", (tmp_path / "x.npy").read_bytes())
    copy = tmp_path / "copy"
    shutil.copytree(folders / "exact", copy)
    shutil.copyfile(tmp_path / "x.npy", copy / "vectors-00000.npy")
    with pytest.raises(UserError):
        PassageIndex.open(copy, _exact_encoder(folders))


def _exact_encoder(folders: pathlib.Path):
    """Returns a stand-in for the exact index's encoder. It has only an identity."""
    manifest = json.loads((folders / "exact" / "manifest.json").read_text())
    fields = {"identity": manifest["encoder"], "dim": 32, "truncated": collections.Counter()}
    return type("Encoder", (), fields)()


@pytest.mark.parametrize(("kind", "name"), _INDEX_FILES)
def test_disk_one_byte_too_small(folders, encoder, tmp_path, kind, name):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (folders / kind / name).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot be written"):
            build_index(_PASSAGES, encoder, tmp_path / "index", kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "index" / "manifest.json").exists()
    build_index(_PASSAGES, encoder, tmp_path / "index", kind)
    for path in (folders / kind).rglob("*.*"):
        assert (tmp_path / "index" / path.relative_to(folders / kind)).read_bytes() == (
            path.read_bytes()
        )


def test_faiss_reports_full_disk(tmp_path):
    index = FaissIndex.build(np.eye(8, dtype=np.float32), "faiss_flat", IndexOptions())
    index.save(tmp_path / "whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "whole").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            index.save(tmp_path / "cut")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture(scope="module")
def nan_encoder(tmp_path_factory):
    """An encoder whose weights are finite, but so large that its vectors are NaN."""
    from safetensors.numpy import load_file, save_file

    folder = tiny.model_folder(tmp_path_factory.mktemp("nan_encoder") / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in (name for name in tensors if name.endswith("output.LayerNorm.weight")):
        tensors[name][:] = np.finfo(np.float32).max
    save_file(tensors, folder / "model.safetensors")
    config = retrievers.encoder()
    config.model = str(folder)
    return open_encoder_for(config.lock())


def test_encoder_with_nan_vectors_is_rejected(nan_encoder, tmp_path):
    with pytest.raises(UserError, match="not finite"):
        PassageIndex.in_memory(_PASSAGES, nan_encoder)
    with pytest.raises(UserError, match="not finite"):
        CachedEncoder(nan_encoder, tmp_path / "cache").encode([_QUERY])
    assert not (tmp_path / "cache").exists()
    with pytest.raises(UserError, match="not finite"):
        BiEncoderRanker(nan_encoder).score([_QUERY], [["a text"]])


@pytest.mark.parametrize("values", [(np.nan, 0), (np.inf, 0), (np.inf, -np.inf)])
def test_non_finite_vector_is_rejected(values):
    vectors_ND = np.eye(4, dtype=np.float32)
    vectors_ND[2, :2] = values
    with pytest.raises(UserError, match="not finite"):
        ExactIndex(vectors_ND)


def test_corrupt_cached_vectors_are_recomputed(encoder, tmp_path):
    cached = CachedEncoder(encoder, tmp_path)
    original = cached.encode(["a text"])
    (file,) = tmp_path.iterdir()
    for content in (b"", b"[" * 100_000, file.read_bytes()[:-4] + b"\x00\x00\xc0\x7f"):
        file.write_bytes(content)
        np.testing.assert_array_equal(cached.encode(["a text"]), original)
