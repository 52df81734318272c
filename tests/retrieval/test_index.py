"""Indexes over passages, in memory and as folders."""

import dataclasses
import errno
import json
import os
import weakref

import jax
import numpy as np
import pytest

from cirag_jax.commands import index as command
from cirag_jax.config_files import load_config
from cirag_jax.datasets.chains import passage_text
from cirag_jax.datasets.corpus_scan import CorpusScan
from cirag_jax.datasets.passage_file import PassageFile
from cirag_jax.errors import UserError
from cirag_jax.retrieval import bm25, faiss_index, search
from cirag_jax.retrieval import index as index_lib
from cirag_jax.retrieval.encoders import FlaxEncoder, open_encoder_for
from cirag_jax.retrieval.faiss_index import FAISS_KINDS, FaissIndex, IndexOptions
from cirag_jax.retrieval.index import KINDS, PassageIndex, open_retriever
from cirag_jax.types import Feedback, Passage
from configs import retrievers
from tests import tiny

_QUERIES = ["where was baldia born?", "patron of corum", "saint saint"]
_PASSAGES = list(tiny.dataset().corpus.values())
# Approximate kinds search all lists, so their results equal exact search.
_OPTIONS = IndexOptions(ivf_lists=4, ivf_probes=4, hnsw_ef_search=64)


class _Counting:
    """An encoder that records its passages, and fails after ``fail_after`` passages."""

    def __init__(self, encoder):
        self._encoder = encoder
        self.identity, self.dim = encoder.identity, encoder.dim
        self.truncated = encoder.truncated
        self.passages = []
        self.fail_after: int | None = None

    def encode(self, texts, kind="passage", progress=None):
        if kind == "passage":
            if self.fail_after is not None and len(self.passages) >= self.fail_after:
                raise KeyboardInterrupt
            self.passages += texts
        return self._encoder.encode(texts, kind, progress)


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory):
    config = retrievers.encoder()
    config.model = str(tiny.model_folder(tmp_path_factory.mktemp("tiny") / "model"))
    return open_encoder_for(config.lock())


@pytest.fixture
def encoder(tiny_encoder):
    return _Counting(tiny_encoder)


def _files(folder):
    return {f.relative_to(folder): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_index_folder_equals_index_in_memory(encoder, tmp_path, kind):
    memory = PassageIndex.in_memory(_PASSAGES, encoder, kind, options=_OPTIONS)
    command.build_index(_PASSAGES, encoder, tmp_path / "i", kind, options=_OPTIONS, shard_rows=7)
    folder = PassageIndex.open(tmp_path / "i", encoder, options=_OPTIONS)
    assert folder.ids == memory.ids == tuple(passage.id for passage in _PASSAGES)
    allowed = [np.array([3, 1, 20]), np.arange(24), np.array([5])]
    for may in (None, allowed):
        for ours, theirs in zip(
            memory.search(_QUERIES, 5, may), folder.search(_QUERIES, 5, may), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
    rows, scores = folder.search(_QUERIES, 5, allowed)
    assert rows.dtype == np.int32 and scores.dtype == np.float32
    assert set(rows[2]) == {5, -1} and np.isneginf(scores[2, 1:]).all()
    # BM25 returns only passages that share a word with the query.
    assert set(rows[0]) == ({20, -1} if kind == "bm25" else {1, 3, 20, -1})


@pytest.mark.parametrize("kind", FAISS_KINDS)
def test_index_faiss_equals_exact_search(encoder, kind):
    exact = PassageIndex.in_memory(_PASSAGES, encoder)
    faiss = PassageIndex.in_memory(_PASSAGES, encoder, kind, options=_OPTIONS)
    expected, found = exact.search(_QUERIES, 6), faiss.search(_QUERIES, 6)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], atol=1e-6)


@pytest.mark.parametrize("kind", FAISS_KINDS)
def test_faiss_scores_all_allowed_rows(kind):
    rng = np.random.default_rng(0)
    vector_ND, query_QD = (rng.normal(size=(n, 16)).astype(np.float32) for n in (2000, 3))
    allowed = [np.array([1999, 3, 3, 1]), rng.permutation(2000)[:20], np.array([], int)]
    found = FaissIndex.build(vector_ND, kind, IndexOptions()).search(query_QD, 24, allowed)
    expected = search.ExactIndex(vector_ND).search(query_QD, 24, allowed)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], atol=3e-6)
    assert [rows.dtype for rows in found] == [np.int32, np.float32]


@pytest.mark.parametrize("kind", ["exact", "bfloat16", *FAISS_KINDS])
def test_search_feedback_moves_the_query(encoder, kind):
    half, kind = kind == "bfloat16", "exact" if kind == "bfloat16" else kind
    options = dataclasses.replace(_OPTIONS, dtype="bfloat16" if half else "float32")
    index = PassageIndex.in_memory(_PASSAGES, encoder, kind, options=options)
    rocchio = Feedback(0.4, ((_PASSAGES[3].id, 0.3), (_PASSAGES[20].id, 0.3)))
    rows, scores = index.search(_QUERIES, 6, None, [None, rocchio, Feedback(1.0, ())])
    plain = index.search(_QUERIES, 6)
    for place in (0, 2):  # The other queries are not changed.
        np.testing.assert_array_equal(rows[place], plain[0][place])
        np.testing.assert_array_equal(scores[place], plain[1][place])
    passage_ND = encoder.encode([passage_text(p) for p in _PASSAGES])
    moved_D = 0.4 * encoder.encode([_QUERIES[1]], "query")[0]
    moved_D = moved_D + 0.3 * passage_ND[3] + 0.3 * passage_ND[20]
    expected_N = passage_ND @ moved_D
    near = {"atol": 1e-2} if half else {"atol": 1e-5}
    np.testing.assert_allclose(scores[1], expected_N[rows[1]], **near)
    np.testing.assert_allclose(scores[1], np.sort(expected_N)[::-1][:6], **near)


def test_search_bm25_refuses_feedback(encoder):
    index = PassageIndex.in_memory(_PASSAGES, None, "bm25")
    with pytest.raises(UserError, match="bm25 does not support relevance feedback"):
        index.search(["x"], 1, None, [Feedback(1.0, ())])
    assert len(index.search(["x"], 1, None, [None])[0]) == 1


def _index_folder(folder, workdir):
    more = [f"--config.data.dir={folder}", "--config.shard_rows=7"]
    return command.index_dataset(load_config("configs/index.py", more), workdir)


def test_build_keeps_one_shard_in_memory(encoder, tmp_path, monkeypatch):
    """The build reads at most one shard in addition to the embedded passages."""
    read, passages, ahead, encode = 0, CorpusScan.__iter__, [], encoder.encode

    def counting(corpus):
        nonlocal read
        read = 0
        for passage in passages(corpus):
            read += 1
            yield passage

    def recording(*arguments):
        ahead.append(read - len(encoder.passages))
        return encode(*arguments)

    monkeypatch.setattr(command, "_open_encoder", lambda config: encoder)
    monkeypatch.setattr(CorpusScan, "__iter__", counting)
    monkeypatch.setattr(encoder, "encode", recording)
    assert _index_folder(tiny.dataset_folder(tmp_path / "data"), tmp_path)["num_passages"] == 24
    assert ahead == [7, 7, 7, 3]
    command.build_index(_PASSAGES, encoder, tmp_path / "list", shard_rows=7)
    assert _files(tmp_path / "index") == _files(tmp_path / "list")


def test_build_changing_corpus_is_refused(encoder, tmp_path, monkeypatch):
    folder, encode = tiny.dataset_folder(tmp_path / "data"), encoder.encode
    corpus = folder / "corpus.jsonl"

    def changing(*arguments):
        corpus.write_text(corpus.read_text().replace("saint", "Saint"))
        return encode(*arguments)

    monkeypatch.setattr(command, "_open_encoder", lambda config: encoder)
    monkeypatch.setattr(encoder, "encode", changing)
    with pytest.raises(UserError, match="the passages changed during indexing"):
        _index_folder(folder, tmp_path)
    assert not (tmp_path / "index" / index_lib.MANIFEST).exists()


@pytest.mark.parametrize("kind", ["exact", "faiss_ivfpq"])
def test_build_stopped_build_resumes_to_the_same_bytes(encoder, tmp_path, kind):
    command.build_index(_PASSAGES, encoder, tmp_path / "whole", kind, shard_rows=5)
    encoder.passages, encoder.fail_after = [], 10
    with pytest.raises(KeyboardInterrupt):
        command.build_index(_PASSAGES, encoder, tmp_path / "cut", kind, shard_rows=5)
    with pytest.raises(UserError, match="is not complete"):
        PassageIndex.open(tmp_path / "cut", encoder)
    encoder.passages, encoder.fail_after = [], None
    done = []
    counts = command.build_index(
        _PASSAGES, encoder, tmp_path / "cut", kind, shard_rows=5, progress=done.append
    )
    assert counts["resumed"] == 10 and counts["embedded"] == len(_PASSAGES) - 10
    assert len(encoder.passages) == len(_PASSAGES) - 10  # No passage is embedded twice.
    assert sum(done) == len(_PASSAGES)
    assert _files(tmp_path / "cut") == _files(tmp_path / "whole")
    assert not (tmp_path / "cut" / command.PLAN).exists()
    encoder.passages = []
    command.build_index(_PASSAGES, encoder, tmp_path / "cut", kind, shard_rows=5)
    assert not encoder.passages  # The build is complete.


def test_build_removes_files_of_a_killed_build(encoder, tmp_path):
    def kill(*_):
        (tmp_path / "i" / ".bm25.0123.part").mkdir()
        (tmp_path / "i" / ".vectors-00001.npy.0123.part").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        command.build_index(_PASSAGES, encoder, tmp_path / "i", shard_rows=5, progress=kill)
    command.build_index(_PASSAGES, encoder, tmp_path / "i", shard_rows=5)
    assert not list((tmp_path / "i").glob(".*"))


def test_build_bm25_ignores_the_dtype(tmp_path):
    half = IndexOptions(dtype="bfloat16")
    command.build_index(_PASSAGES, None, tmp_path / "i", "bm25")
    file = tmp_path / "i" / index_lib.MANIFEST
    manifest = json.loads(file.read_text())
    assert "dtype" not in manifest
    for old in ({}, {"dtype": "float32"}):  # Earlier versions wrote the latter.
        file.write_text(json.dumps(manifest | old))
        counts = command.build_index(_PASSAGES, None, tmp_path / "i", "bm25", options=half)
        assert counts["resumed"] == len(_PASSAGES)


def test_full_disk_keeps_the_progress(encoder, tmp_path, monkeypatch):
    save = np.save

    def failing(stream, array, **options):
        if encoder.passages[5:]:
            stream.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(stream, array, **options)

    monkeypatch.setattr(search.np, "save", failing)
    with pytest.raises(UserError, match="No space left on device.*run the same command to resume"):
        command.build_index(_PASSAGES, encoder, tmp_path / "i", shard_rows=5)
    monkeypatch.setattr(search.np, "save", save)
    assert command.build_index(_PASSAGES, encoder, tmp_path / "i", shard_rows=5)["resumed"] == 5
    assert len(PassageIndex.open(tmp_path / "i", encoder)) == len(_PASSAGES)


def test_open_bm25_of_other_packages_is_refused(tmp_path, monkeypatch):
    command.build_index(_PASSAGES, None, tmp_path / "i", "bm25")
    file = tmp_path / "i" / index_lib.MANIFEST
    manifest = json.loads(file.read_text())
    assert set(manifest["packages"]) == {"bm25s", "PyStemmer"}
    with monkeypatch.context() as patch:
        patch.setattr(bm25, "TOKENS", "later")
        with pytest.raises(UserError, match='tokens="words.*", not "later"; build it again'):
            PassageIndex.open(tmp_path / "i", None)
        with pytest.raises(UserError, match='tokens=.* not "later"; use another'):
            command.build_index(_PASSAGES, None, tmp_path / "i", "bm25")
    with monkeypatch.context() as patch:
        other = {**manifest["packages"], "PyStemmer": "0.1"}
        patch.setattr(bm25, "packages", lambda: other)
        with pytest.raises(UserError, match='not "0.1"; build it again or install that version'):
            PassageIndex.open(tmp_path / "i", None)
        with pytest.raises(UserError, match='packages.PyStemmer=.* not "0.1"; use another'):
            command.build_index(_PASSAGES, None, tmp_path / "i", "bm25")
    del manifest["packages"]  # Earlier versions did not record the packages.
    file.write_text(json.dumps(manifest))
    assert len(PassageIndex.open(tmp_path / "i", None)) == len(_PASSAGES)
    del manifest["tokens"]  # They had other tokens.
    file.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match='was started with tokens=null, not "words.*; build it'):
        PassageIndex.open(tmp_path / "i", None)


def test_open_vectors_of_other_packages_is_refused(encoder, tmp_path, monkeypatch):
    command.build_index(_PASSAGES, encoder, tmp_path / "i", "faiss_flat")
    file = tmp_path / "i" / index_lib.MANIFEST
    manifest = json.loads(file.read_text())
    assert set(manifest["packages"]) == {"faiss"}
    assert set(manifest["encoder"]["packages"]) == {"tokenizers"}
    with monkeypatch.context() as patch:  # Another version of faiss may search the index.
        patch.setattr(faiss_index, "packages", lambda: {"faiss": "0.1"})
        PassageIndex.open(tmp_path / "i", encoder)
        assert command.build_index(_PASSAGES, encoder, tmp_path / "i", "faiss_flat")["resumed"]
    other = _Counting(encoder)
    other.identity = {**encoder.identity, "packages": {"tokenizers": "0.1"}}
    with pytest.raises(UserError, match='encoder.packages.tokenizers=.* not "0.1"; build it again'):
        PassageIndex.open(tmp_path / "i", other)
    del (
        manifest["packages"],
        manifest["encoder"]["packages"],
    )  # Earlier versions did not record them.
    file.write_text(json.dumps(manifest))
    assert len(PassageIndex.open(tmp_path / "i", other)) == len(_PASSAGES)


def test_open_index_of_another_encoder_is_refused(encoder, tmp_path):
    command.build_index(_PASSAGES, encoder, tmp_path / "i")
    moved = _Counting(encoder)
    moved.identity = {**encoder.identity, "model": "elsewhere", "query_max_length": 9}
    PassageIndex.open(tmp_path / "i", moved)  # Equal weights may have another name.
    for field, value in (
        ("revision", "sha256:0"),
        ("pooling", "cls"),
        ("passage_prefix", "p: "),
        ("normalize", False),
        ("dimension", 33),
        ("passage_max_length", 9),
    ):
        moved.identity = {**encoder.identity, field: value}
        told = f"encoder.{field}=" if field != "revision" else "other weights of the encoder;"
        with pytest.raises(UserError, match=f"was started with {told}"):
            PassageIndex.open(tmp_path / "i", moved)
        with pytest.raises(UserError, match=f"was started with {told}"):
            command.build_index(_PASSAGES, moved, tmp_path / "i")
    with pytest.raises(UserError, match="needs an encoder"):
        PassageIndex.open(tmp_path / "i", None)


def test_open_index_with_other_instructions_of_queries_and_triples(encoder, tmp_path):
    command.build_index(_PASSAGES, encoder, tmp_path / "i")
    other = _Counting(encoder)
    other.identity = {**encoder.identity, "query_prefix": "q: ", "triple_prefix": "t: "}
    assert len(PassageIndex.open(tmp_path / "i", other)) == len(_PASSAGES)
    other.identity = {**other.identity, "passage_prefix": "p: "}
    with pytest.raises(UserError, match="passage_prefix"):
        PassageIndex.open(tmp_path / "i", other)


def test_open_index_of_another_corpus_is_refused(encoder, tmp_path):
    command.build_index(_PASSAGES, encoder, tmp_path / "i")
    changed = [*_PASSAGES[:-1], dataclasses.replace(_PASSAGES[-1], text="Changed.")]
    index = PassageIndex.open(tmp_path / "i", encoder)
    index.check_corpus(_PASSAGES)
    count = len(_PASSAGES)
    for passages, message in (
        (changed, "the index was built from passages that differ from the corpus; build it again"),
        (_PASSAGES[::-1], "passages that differ from the corpus"),
        (
            _PASSAGES[:-1],
            f"all {count} passages, but config.data.corpus selects {count - 1} of them; set "
            "--config.data.corpus=ircot_full",
        ),
        (
            [dataclasses.replace(p, id=f"other {p.id}") for p in _PASSAGES],
            "another dataset, of which no passage is searched; set --config.data.dir",
        ),
    ):
        with pytest.raises(UserError, match=message):
            index.check_corpus(passages)
        with pytest.raises(UserError, match="was started with "):
            command.build_index(passages, encoder, tmp_path / "i")
    config = retrievers.retriever()
    config.folder = str(tmp_path / "i")
    opened = open_retriever(config, _PASSAGES, encoder)
    assert isinstance(opened, PassageIndex) and opened.ids == index.ids
    named = f"the index in config.retriever.folder={tmp_path / 'i'} was built from passages that"
    with pytest.raises(UserError, match=named):
        open_retriever(config, changed, encoder)
    config.kind = "bm25"
    with pytest.raises(UserError, match="contains an index of kind exact, not bm25"):
        open_retriever(config, _PASSAGES, encoder)


def test_build_other_folders_are_not_changed(encoder, tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(UserError, match="is neither empty nor an index"):
        command.build_index(_PASSAGES, encoder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="is not an index folder"):
        PassageIndex.open(tmp_path, encoder)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("manifest.json", lambda b: b[:20], "manifest.json cannot be read"),
        ("manifest.json", lambda b: b.replace(b'"format": 2', b'"format": 99'), "another version"),
        ("ids.jsonl", lambda b: b[: len(b) // 2], "ids.jsonl"),
        ("vectors-00001.npy", lambda b: b[:100], "vectors-00001.npy cannot be read"),
        ("vectors-00001.npy", None, "vectors-00001.npy cannot be read"),
    ],
)
def test_open_damaged_folder_is_named(encoder, tmp_path, name, damage, message):
    command.build_index(_PASSAGES, encoder, tmp_path / "i", shard_rows=10)
    file = tmp_path / "i" / name
    content = file.read_bytes()
    file.unlink()
    if damage is not None:
        file.write_bytes(damage(content))
    with pytest.raises(UserError, match=message):
        PassageIndex.open(tmp_path / "i", encoder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_open_reads_one_shard_at_a_time(encoder, tmp_path, monkeypatch, dtype):
    options, opened = IndexOptions(dtype=dtype), []
    command.build_index(_PASSAGES, encoder, tmp_path / "i", options=options, shard_rows=5)
    whole = PassageIndex.in_memory(_PASSAGES, encoder, options=options).search(_QUERIES, 24)
    open_shard = index_lib.open_shard

    def counting(*arguments):
        assert not any(shard() is not None for shard in opened)
        opened.append(weakref.ref(array := open_shard(*arguments)))
        return array

    monkeypatch.setattr(index_lib, "open_shard", counting)
    index = PassageIndex.open(tmp_path / "i", encoder, options=options)
    for ours, theirs in zip(index.search(_QUERIES, 24), whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(opened) == 10
    shards = index_lib.Shards(tmp_path / "i", index_lib.read_manifest(tmp_path / "i"))
    assert shards[4:11].shape == (7, 32) and shards[3:3].shape == (0, 32)
    np.testing.assert_array_equal(shards[4:11], shards[0:24][4:11])


def test_open_too_many_files_is_not_reported_as_damage(encoder, tmp_path, monkeypatch):
    command.build_index(_PASSAGES, encoder, tmp_path / "i")

    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(np, "load", refuse)
    with pytest.raises(UserError, match=r"00000\.npy cannot be read: Too many open files\.$"):
        PassageIndex.open(tmp_path / "i", encoder)


def test_index_bfloat16_takes_half_the_space(encoder, tmp_path):
    half = IndexOptions(dtype="bfloat16")
    command.build_index(_PASSAGES, encoder, tmp_path / "i", options=half, shard_rows=100)
    (shard,) = (tmp_path / "i").glob("vectors-*.npy")
    assert np.load(shard).nbytes == len(_PASSAGES) * encoder.dim * 2
    whole = PassageIndex.in_memory(_PASSAGES, encoder).search(_QUERIES, 24)
    found = PassageIndex.open(tmp_path / "i", encoder, options=half).search(_QUERIES, 24)
    by_row = [np.argsort(rows, axis=1) for rows, _ in (whole, found)]
    scores = [np.take_along_axis(s, o, 1) for (_, s), o in zip((whole, found), by_row, strict=True)]
    np.testing.assert_allclose(*scores, atol=0.01)


def devices_of(index):
    assert isinstance(index._search, search.ExactIndex)
    (block_ND,) = index._search._blocks
    return block_ND.sharding.device_set


def test_index_rows_are_split_over_accelerators(encoder, tmp_path, monkeypatch):
    command.build_index(_PASSAGES, encoder, tmp_path / "i", shard_rows=7)
    alone = PassageIndex.open(tmp_path / "i", encoder)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    units = retrievers.retriever()
    units.units = "sentence"
    for index in (
        PassageIndex.open(tmp_path / "i", encoder),
        PassageIndex.in_memory(_PASSAGES, encoder),
        open_retriever(units.lock(), _PASSAGES, encoder),
    ):
        assert devices_of(index) == set(jax.local_devices())
        if isinstance(index, PassageIndex):
            found = index.search(_QUERIES, 9)[0]
            np.testing.assert_array_equal(alone.search(_QUERIES, 9)[0], found)
    assert len(devices_of(alone)) == 1  # The CPU's devices share their memory.


def test_build_repeated_ids_and_empty_corpus_are_refused(encoder, tmp_path):
    folder = tiny.dataset_folder(tmp_path / "data")
    with (folder / "corpus.jsonl").open("a") as file:
        file.write(json.dumps(dataclasses.asdict(_PASSAGES[0])))
    with pytest.raises(UserError, match=r"corpus\.jsonl:25: field 'id' repeats the id"):
        _index_folder(folder, tmp_path)
    with pytest.raises(UserError, match="no passage"):
        command.build_index([], encoder, tmp_path / "i")
    with pytest.raises(UserError, match="no passage"):
        PassageIndex.in_memory([], encoder)
    with pytest.raises(UserError, match="is not one of exact"):
        PassageIndex.in_memory(_PASSAGES, encoder, "annoy")


def test_search_finds_equal_and_unusual_texts(encoder):
    passages = [
        Passage("a", "", ""),
        Passage("b", "t", 'corum \u2028 ] " \\ <script>'),
        Passage("c", "t", "saint"),
        Passage("d", "t", "saint"),
    ]
    for kind in KINDS:
        rows, _ = PassageIndex.in_memory(passages, encoder, kind, options=_OPTIONS).search(
            ["saint"], 4
        )
        assert sorted(rows[0]) == ([-1, -1, 2, 3] if kind == "bm25" else [0, 1, 2, 3])
        assert list(rows[0]).index(2) < list(rows[0]).index(3) or kind.startswith("faiss")


def test_index_command_builds_the_configured_index(
    tiny_encoder, tmp_path, one_device, monkeypatch, capsys
):
    data = tiny.dataset_folder(tmp_path / "data")
    (data / "questions.jsonl").unlink()  # An index needs no questions.
    arguments = [
        f"--config.data.dir={data}",
        f"--config.encoder.model={tiny_encoder.identity['model']}",
        "--config.shard_rows=9",
    ]
    config = load_config("configs/index.py", arguments)
    first = command.index_dataset(config, tmp_path)
    assert first["num_passages"] == 24 and first["resumed"] == 0 and first["bytes"] > 24 * 32 * 4
    assert capsys.readouterr().err.splitlines() == ["indexing: 24 passages"]
    (tmp_path / "index" / ".nfs0001").write_bytes(b"x" * 999)
    again = command.index_dataset(config, tmp_path)
    assert (again["resumed"], again["bytes"]) == (24, first["bytes"])
    monkeypatch.setenv("HOME", str(tmp_path))
    index = PassageIndex.open("~/index", tiny_encoder)
    index.check_corpus(_PASSAGES)
    config = load_config("configs/index.py", [*arguments, "--config.retriever.kind=bm25"])
    with pytest.raises(UserError, match="was started with kind="):
        command.index_dataset(config, tmp_path)
    json.dumps(first)


def test_open_retriever_units_with_a_folder_are_refused():
    with pytest.raises(UserError, match="units"):
        load_config("configs/index.py", ["--config.retriever.units=sentence"])


def test_index_command_broken_corpus_line_is_named(tmp_path):
    data = tiny.dataset_folder(tmp_path / "data")
    with (data / "corpus.jsonl").open("a") as file:
        file.write('{"id": "x", "title": 3, "text": ""}\n')
    config = load_config("configs/index.py", [f"--config.data.dir={data}"])
    with pytest.raises(UserError, match=r"corpus\.jsonl:25: field 'title'"):
        command.index_dataset(config, tmp_path)
    assert not (tmp_path / "index").exists()
    assert index_lib.MANIFEST == "manifest.json"


def test_index_records_cut_passages_also_of_resumed_shards(tiny_encoder, tmp_path, capsys):
    limited = FlaxEncoder(tiny_encoder._encoder, passage_max_length=9)
    encoder = _Counting(limited)
    encoder.fail_after = 8
    with pytest.raises(KeyboardInterrupt):
        command.build_index(_PASSAGES, encoder, tmp_path / "i", shard_rows=4)
    cut_before = encoder.truncated["passage"]
    again = _Counting(FlaxEncoder(tiny_encoder._encoder, passage_max_length=9))
    command.build_index(_PASSAGES, again, tmp_path / "i", shard_rows=4)
    manifest = json.loads((tmp_path / "i" / "manifest.json").read_text())
    assert 0 < cut_before < manifest["truncated"] == cut_before + again.truncated["passage"]
    assert (
        f"only the beginning of {manifest['truncated']} of 24 passages" in capsys.readouterr().err
    )
    assert not (tmp_path / "i" / "truncated.json").exists()
    opened = _Counting(FlaxEncoder(tiny_encoder._encoder, passage_max_length=9))
    PassageIndex.open(tmp_path / "i", opened)
    assert opened.truncated["passage"] == manifest["truncated"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_rows", [1, 7, 100])
def test_index_streamed_equals_memory(encoder, tmp_path, dtype, shard_rows):
    options = IndexOptions(dtype=dtype)
    command.build_index(_PASSAGES, encoder, tmp_path / "i", options=options, shard_rows=shard_rows)
    allowed = [np.array([3, 1, 20]), np.arange(24), np.array([5])]
    feedback = [None, Feedback(0.4, ((_PASSAGES[3].id, 0.3),)), None]
    stream = dataclasses.replace(options, stream=True)
    memory, disk = (
        PassageIndex.open(tmp_path / "i", encoder, options=o) for o in (options, stream)
    )
    for more in ((None, ()), (allowed, ()), (None, feedback)):
        for ours, theirs in zip(
            disk.search(_QUERIES, 9, *more), memory.search(_QUERIES, 9, *more), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)


def test_shards_return_single_rows_in_the_requested_order(encoder, tmp_path):
    command.build_index(_PASSAGES, encoder, tmp_path / "i", shard_rows=7)
    shards = index_lib.Shards(tmp_path / "i", index_lib.read_manifest(tmp_path / "i"))
    for rows in ([20, 3, 8, 3, 0, 7, 6, 23], []):
        np.testing.assert_array_equal(shards[np.array(rows, np.int64)], shards[:][rows])


def _clustered(rows, dim):
    """Returns unit vectors around 20 centers, such that codes alone rank them badly."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(20, dim))[rng.integers(20, size=rows)]
    vectors += rng.normal(scale=0.3, size=(rows, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_faiss_ivfpq_reranks_candidates_by_exact_scores():
    vector_ND = _clustered(3000, 32)
    query_QD, options = vector_ND[::30] + 0.01, IndexOptions(ivf_lists=8, ivf_probes=8)
    expected, _ = search.ExactIndex(vector_ND).search(query_QD, 10)
    recalls = []
    for rerank in (1, 20):
        options = dataclasses.replace(options, pq_rerank=rerank)
        rows, scores = FaissIndex.build(vector_ND, "faiss_ivfpq", options).search(query_QD, 10)
        exact = np.einsum("qd,qkd->qk", query_QD, vector_ND[rows])
        np.testing.assert_allclose(scores, exact, atol=1e-5)
        assert (np.diff(scores, axis=1) <= 0).all()
        recalls.append(np.mean([np.isin(a, b).mean() for a, b in zip(expected, rows, strict=True)]))
    assert recalls[0] < 0.6 and recalls[1] > 0.95


def test_faiss_ivfpq_keeps_codes_and_reads_only_candidates(encoder, tmp_path, monkeypatch):
    options = dataclasses.replace(_OPTIONS, pq_rerank=2)
    command.build_index(
        _PASSAGES, encoder, tmp_path / "i", "faiss_ivfpq", options=options, shard_rows=7
    )
    index = PassageIndex.open(tmp_path / "i", encoder, options=options)
    take, taken = index_lib.Shards._take, []
    monkeypatch.setattr(
        index_lib.Shards, "_take", lambda self, rows: taken.append(rows) or take(self, rows)
    )
    index.search(_QUERIES, 3)
    (rows,) = taken  # One read for all queries.
    assert len(rows) <= 3 * 3 * 2
    assert index._search._index.code_size <= encoder.dim // 8  # pyright: ignore


def test_faiss_ivfpq_trains_on_a_bounded_sample(monkeypatch):
    sizes, sample = [], faiss_index._sample
    monkeypatch.setattr(faiss_index, "_TRAIN_BYTES", 1000 * 16 * 4)
    monkeypatch.setattr(
        faiss_index, "_sample", lambda x, size: sizes.append(size) or sample(x, size)
    )
    FaissIndex.build(_clustered(3000, 16), "faiss_ivfpq", IndexOptions(ivf_lists=20))
    assert sizes == [1000]


def test_faiss_ivfpq_code_size_must_divide_the_dimensions(encoder, tmp_path):
    assert [faiss_index.code_bytes(dim, IndexOptions()) for dim in (384, 1024, 7, 90)] == [
        *(48, 128, 1, 10),
    ]
    with pytest.raises(UserError, match=r"pq_bytes=5 must divide the 32 dimensions"):
        command.build_index(
            _PASSAGES, encoder, tmp_path / "i", "faiss_ivfpq", options=IndexOptions(pq_bytes=5)
        )
    command.build_index(
        _PASSAGES, encoder, tmp_path / "i", "faiss_ivfpq", options=IndexOptions(pq_bytes=8)
    )
    with pytest.raises(UserError, match="pq_bytes=8, not 4"):
        command.build_index(_PASSAGES, encoder, tmp_path / "i", "faiss_ivfpq")


def test_build_bm25_beyond_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bm25, "_BYTES_PER_CHARACTER", 10**12)
    for build in (
        lambda: command.build_index(_PASSAGES, None, tmp_path / "i", "bm25"),
        lambda: PassageIndex.in_memory(_PASSAGES, None, "bm25"),
    ):
        with pytest.raises(UserError, match=r"needs about \d+ GiB of memory, but this machine has"):
            build()


@pytest.fixture
def passage_file(tmp_path):
    return PassageFile(tiny.dataset_folder(tmp_path / "data") / "corpus.jsonl")


def test_open_retriever_large_corpus_uses_its_rows(encoder, tmp_path, passage_file):
    command.build_index(_PASSAGES, encoder, tmp_path / "i", shard_rows=7)
    config = retrievers.retriever()
    config.folder, config.stream = str(tmp_path / "i"), True
    index = open_retriever(config.lock(), passage_file, encoder)
    feedback = [Feedback(0.4, ((_PASSAGES[3].id, 0.3), (_PASSAGES[20].id, 0.3)))] * 3
    found = index.search(_QUERIES, 6, None, feedback)
    expected = PassageIndex.in_memory(_PASSAGES, encoder).search(_QUERIES, 6, None, feedback)
    np.testing.assert_array_equal(found[0], expected[0])
    assert isinstance(index, PassageIndex) and "ids" not in vars(index)  # Not even read.


@pytest.mark.parametrize(
    ("field", "value"), [("kind", "bm25"), ("kind", "exact"), ("units", "sentence")]
)
def test_open_retriever_large_corpus_in_memory_is_refused(encoder, passage_file, field, value):
    config = retrievers.retriever()
    config[field] = value
    with pytest.raises(UserError, match=r"24 passages in memory; build an index on disk"):
        open_retriever(config.lock(), passage_file, encoder)


def test_open_vectors_beyond_the_memory_are_refused_unless_streamed(encoder, tmp_path, monkeypatch):
    command.build_index(_PASSAGES, encoder, tmp_path / "i")
    monkeypatch.setattr(index_lib, "machine_memory", lambda: 24 * 32 * 4 - 1)
    with pytest.raises(
        UserError, match=r"24 vectors of 32 dimensions .* set --config.retriever.str"
    ):
        PassageIndex.open(tmp_path / "i", encoder)
    for options in (IndexOptions(stream=True), IndexOptions(dtype="bfloat16")):
        PassageIndex.open(tmp_path / "i", encoder, options=options)
