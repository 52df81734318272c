"""Folders of an index, with other bytes and other values: a right ranking, or a refusal."""

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
from tests.attacks.hostile import CHANGES, DAMAGES, attack, damaged, garbled, held, untouched

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
_PLACES = [(kind, name) for kind, names in FILES.items() for name in names]


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


class _Remembered:
    """The encoder, whose vectors of the one query are computed once."""

    def __init__(self, encoder):
        self.identity, self.dim = encoder.identity, encoder.dim
        self.encode = lambda texts, kind: self._vectors
        self._vectors = encoder.encode([_QUERY], "query")


@pytest.fixture(scope="module")
def searched(encoder, folders):
    """Attacks a file of an index of a kind, opens that and searches it."""
    remembered = _Remembered(encoder)

    def attacked(kind: str, name: str, content: bytes) -> None:
        path = folders / kind / name
        before = path.read_bytes()
        try:
            path.write_bytes(content)
            with untouched(folders):
                found = held(lambda: PassageIndex.open(folders / kind, remembered))
                if found is not None:
                    row_QK, score_QK = found.search([_QUERY], 3)
                    assert ((row_QK >= -1) & (row_QK < len(_PASSAGES))).all()
                    assert np.isfinite(score_QK[row_QK >= 0]).all()
                    held(lambda: found.check_corpus(_PASSAGES))
        finally:
            path.write_bytes(before)

    return attacked


@pytest.mark.parametrize("kind", FILES)
def test_a_whole_folder_finds_what_memory_finds(folders, encoder, kind):
    whole = PassageIndex.open(folders / kind, encoder).search([_QUERY], 3)
    expected = PassageIndex.in_memory(_PASSAGES, encoder, kind).search([_QUERY], 3)
    for found, wanted in zip(whole, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(("kind", "name"), _PLACES)
@example([("put", 41, b"\n")])  # the length of faiss_flat's vectors
@attack(12, DAMAGES)
def test_other_bytes(searched, folders, kind, name, damages):
    searched(kind, name, damaged((folders / kind / name).read_bytes(), damages))


@pytest.mark.parametrize(
    ("kind", "name"), [place for place in _PLACES if place[1].endswith(".json")]
)
@example((False, [(59, True)]))  # the encoder of BM25's manifest, which has none
@attack(25, CHANGES)
def test_other_values(searched, folders, kind, name, changes):
    whole = json.loads((folders / kind / name).read_text())
    searched(kind, name, garbled(whole, changes))


@example((False, [(29, True)]), [("cut", 0, b"")])  # the encoder
@attack(15, CHANGES, DAMAGES)
def test_a_build_that_was_stopped(tmp_path_factory, changes, damages):
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_command, "_build_bm25", _interrupt)
        build_index(_PASSAGES, None, folder, "bm25")
    plan = (folder / index_command.PLAN).read_bytes()
    for content in (garbled(json.loads(plan), changes), damaged(plan, damages)):
        (folder / index_command.PLAN).write_bytes(content)
        with untouched(folder):
            held(lambda: PassageIndex.open(folder, None))
        if held(lambda: build_index(_PASSAGES, None, folder, "bm25")) is None:
            assert (folder / index_command.PLAN).read_bytes() == content  # for who wants to look
        else:
            assert held(lambda: PassageIndex.open(folder, None)) is not None


def _interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("count", [None, 0, 23, 25, 24.0, "24", 10**400])  # of `make attack`
def test_another_number_of_texts_is_refused(folders, tmp_path, count):
    shutil.copytree(folders / "bm25", tmp_path / "index")
    file = tmp_path / "index" / "bm25" / "params.index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_docs": count}))
    with pytest.raises(UserError, match="is damaged"):
        PassageIndex.open(tmp_path / "index", None)


def test_vectors_of_another_number_are_refused(folders, tmp_path):  # of `make attack`
    shutil.copytree(folders / "exact", tmp_path / "index")
    file = tmp_path / "index" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "shards": 0}))
    with pytest.raises(UserError, match="it has 0 vectors for 24 passages"):
        PassageIndex.open(tmp_path / "index", _whole(folders))


def test_scores_that_are_no_numbers_are_refused(folders, tmp_path):
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
def test_a_shard_of_another_kind(searched, folders, tmp_path, name):
    np.save(tmp_path / "x.npy", _ARRAYS[name])
    searched("exact", "vectors-00000.npy", (tmp_path / "x.npy").read_bytes())
    copy = tmp_path / "copy"
    shutil.copytree(folders / "exact", copy)
    shutil.copyfile(tmp_path / "x.npy", copy / "vectors-00000.npy")
    with pytest.raises(UserError):
        PassageIndex.open(copy, _whole(folders))


def _whole(folders: pathlib.Path):
    """An encoder of which only the identity is looked at."""
    manifest = json.loads((folders / "exact" / "manifest.json").read_text())
    return type("Encoder", (), {"identity": manifest["encoder"], "dim": 32})()


@pytest.mark.parametrize(("kind", "name"), _PLACES)
def test_a_disk_with_room_for_all_but_a_byte(folders, encoder, tmp_path, kind, name):
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


def test_faiss_says_that_its_last_byte_found_no_room(tmp_path):
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


# --------------------------------------------------------------------------------- NaN in weights


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """An encoder one of whose weights is NaN."""
    from safetensors.numpy import load_file, save_file

    folder = tiny.model_folder(tmp_path_factory.mktemp("spoilt") / "model")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("word_embeddings.weight"))
    tensors[name][:, 3] = np.nan
    save_file(tensors, folder / "model.safetensors")
    config = retrievers.encoder()
    config.model = str(folder)
    return open_encoder_for(config.lock())


def test_an_encoder_with_nan_weights_answers_nothing(spoilt, tmp_path):
    with pytest.raises(UserError, match="not finite"):
        PassageIndex.in_memory(_PASSAGES, spoilt)
    with pytest.raises(UserError, match="not finite"):
        CachedEncoder(spoilt, tmp_path / "cache").encode([_QUERY])
    assert not (tmp_path / "cache").exists()
    with pytest.raises(UserError, match="not finite"):
        BiEncoderRanker(spoilt).score([_QUERY], [["a text"]])


@pytest.mark.parametrize("values", [(np.nan, 0), (np.inf, 0), (np.inf, -np.inf)])
def test_a_nan_row_is_refused_before_it_ranks_first(values):
    vectors_ND = np.eye(4, dtype=np.float32)
    vectors_ND[2, :2] = values
    with pytest.raises(UserError, match="not finite"):
        ExactIndex(vectors_ND)


def test_cached_vectors_that_are_no_numbers_are_computed_again(encoder, tmp_path):
    cached = CachedEncoder(encoder, tmp_path)
    whole = cached.encode(["a text"])
    (file,) = tmp_path.iterdir()
    for content in (b"", b"[" * 100_000, file.read_bytes()[:-4] + b"\x00\x00\xc0\x7f"):
        file.write_bytes(content)
        np.testing.assert_array_equal(cached.encode(["a text"]), whole)
