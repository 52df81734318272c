"""`cirag_jax.Retriever`, over the built-in and a tiny dataset, with BM25 and a tiny encoder."""

import asyncio
import concurrent.futures
import sys
import threading

import numpy as np
import pandas as pd
import pytest

import cirag_jax
from cirag_jax.commands import index as index_command
from cirag_jax.commands import session
from cirag_jax.datasets import demo, jsonl
from cirag_jax.errors import UserError
from cirag_jax.types import Dataset, Passage
from tests import tiny

TEXTS = ["Balum is a town. The patron of Balum is Ule.", "Ule was born in Tarn. Ule was a weaver."]
QUERIES = ["Where was the patron of Balum born?", "Who was a weaver?"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.dataset_folder(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return str(tiny.model_folder(tmp_path_factory.mktemp("tiny") / "encoder"))


@pytest.fixture(scope="module")
def dense(data, encoder):
    with cirag_jax.Retriever.open(encoder, documents=data) as opened:
        yield opened


@pytest.fixture(scope="module")
def builtin():
    with cirag_jax.Retriever.open() as opened:
        yield opened


def ids(results):
    return [[result.id for result in found] for found in results]


def test_retriever_bm25_finds_gold_of_built_in_dataset(builtin):
    questions = demo.build().questions[:8]
    found = builtin.search([question.question for question in questions], 3)
    assert all(len(results) <= 3 for results in found)
    for question, results in zip(questions, found, strict=True):
        assert set(question.supporting or ()) & {result.id for result in results}
        scores = [result.score for result in results]
        assert scores == sorted(scores, reverse=True) and scores[-1] > 0
        assert all(result.passage.id == result.id for result in results)


def test_retriever_over_texts_has_no_empty_places():
    with cirag_jax.Retriever.open("bm25", documents=(text for text in TEXTS)) as opened:
        assert ids(opened.search(QUERIES, 5))[1] == ["document 2#1"]
        assert opened.search([]) == [] and opened.search(["zzz"]) == [[]]
        assert opened.run({"a": "weaver"}).keys() == {"a"}
    with pytest.raises(UserError, match="the retriever is closed"):
        opened.search(QUERIES)


def test_retriever_links_follow_titles(tmp_path):
    """A link leads to a passage without a word of the query."""
    texts = {"Balum": "A town, whose patron is Ulena.", "Ulena": "A weaver.", "Tarn": "A river."}
    corpus = {name: Passage(name, name, text) for name, text in texts.items()}
    jsonl.write_dataset(Dataset("links", (), corpus, {}), tmp_path)
    with cirag_jax.Retriever.open("links", documents=tmp_path) as opened:
        (results,) = opened.search(["Balum"], 5)
    assert [(result.id, result.score) for result in results] == [("Balum", -1), ("Ulena", -2)]


def test_retriever_uses_index_of_command(data, encoder, dense, tmp_path):
    passages = tuple(tiny.dataset().corpus.values())
    index_command.build_index(passages, None, tmp_path / "words" / "index", "bm25")
    index_command.build_index(passages, dense._encoder, tmp_path / "vectors")
    with cirag_jax.Retriever.open(documents=data, index=tmp_path / "words") as opened:
        assert opened._encoder is None and ids(opened.search([passages[3].title], 1))
    with cirag_jax.Retriever.open(documents=data, index=tmp_path / "vectors") as opened:
        assert opened.search(QUERIES, 4) == dense.search(QUERIES, 4)
    with pytest.raises(UserError, match="built from another dataset"):
        cirag_jax.Retriever.open(documents=TEXTS, index=tmp_path / "words")


def test_retriever_reads_other_formats(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d1", "title": "Ule", "text": "A weaver."}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": "Who was a weaver?"}\n')
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    with cirag_jax.Retriever.open(documents=tmp_path) as opened:
        assert ids(opened.search(["weaver"])) == [["d1"]]


def test_retriever_sentence_transformers_evaluator_agrees_with_search(dense):
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    questions = [q for q in tiny.dataset().questions if q.split == "train"]
    queries = {q.id: q.question for q in questions}
    relevant = {q.id: set(q.supporting or ()) for q in questions}
    evaluator = evaluation.InformationRetrievalEvaluator(
        queries, dense.texts(), relevant, precision_recall_at_k=[3], write_csv=False
    )
    metrics = evaluator(dense.sentence_model())
    run = dense.run(queries, 3)
    recalls = [len(relevant[name] & run[name].keys()) / len(relevant[name]) for name in queries]
    assert 0 < np.mean(recalls) < 1
    assert metrics["cosine_recall@3"] == pytest.approx(np.mean(recalls))


def test_retriever_sentence_model_vectors(dense, builtin):
    model = dense.sentence_model()
    vectors_ND = model.encode_document(TEXTS)
    assert isinstance(vectors_ND, np.ndarray) and vectors_ND.shape == (2, 32)
    assert model.encode_query(TEXTS[0]).shape == (32,)
    short_ND = model.encode(TEXTS, truncate_dim=8)
    assert short_ND.shape == (2, 8)
    np.testing.assert_allclose(np.linalg.norm(short_ND, axis=1), 1, rtol=1e-6)
    with pytest.raises(UserError, match="has its own prompts"):
        model.encode_query(TEXTS, prompt="query: ")
    with pytest.raises(UserError, match="has no encoder; use Retriever.run"):
        builtin.sentence_model().encode(TEXTS)


def test_retriever_transforms_topics(builtin):
    topics = pd.DataFrame({"qid": ["7", "8"], "query": ["zzz", "capital of France"], "note": "x"})
    found = builtin.transform(topics, 2)
    assert list(found.columns) == ["qid", "query", "note", "docno", "score", "rank"]
    assert list(found.qid) == ["8", "8"] and list(found["rank"]) == [0, 1]
    assert list(found.docno) == ids(builtin.search(["capital of France"], 2))[0]
    assert builtin.transform(found, 2).equals(found)  # the topics of an earlier stage
    empty = builtin.transform(topics[:0])
    assert not len(empty) and list(empty.columns) == list(found.columns)
    with pytest.raises(UserError, match="columns qid and query"):
        builtin.transform(topics.drop(columns="query"))


def test_retriever_without_pandas(builtin, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="needs pandas, .*pip install pandas"):
        builtin.transform(None)


def test_retriever_threads_find_the_same_one_at_a_time(dense, monkeypatch):
    queries = [question.question for question in tiny.dataset().questions]
    expected = [dense.search([query], 4) for query in queries]
    search, inside = dense._index.search, threading.Semaphore(1)

    class Exclusive:
        def search(self, *arguments):
            assert inside.acquire(blocking=False), "two threads search at once"
            try:
                return search(*arguments)
            finally:
                inside.release()

    monkeypatch.setattr(dense, "_index", Exclusive())
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: dense.search([query], 4), queries)) == expected


def test_retriever_in_running_event_loop(dense):
    async def ask():
        return dense.search(QUERIES, 2), await asyncio.to_thread(dense.search, QUERIES, 2)

    here, thread = asyncio.run(ask())
    assert here == thread == dense.search(QUERIES, 2)


def test_retriever_after_fork_is_refused(builtin, monkeypatch):
    opened = cirag_jax.Retriever.open(documents=TEXTS)
    process = session.os.getpid()
    with monkeypatch.context() as child, opened._lock:  # copied while another thread holds it
        child.setattr(session.os, "getpid", lambda: process + 1)
        for call in (
            lambda: opened.search(QUERIES),
            lambda: opened.sentence_model().encode(TEXTS),
            lambda: cirag_jax.Retriever.open(documents=TEXTS),
        ):
            with pytest.raises(UserError, match=r"before os.fork\(\), .*get_context\('spawn'\)"):
                call()
        opened.close()
    assert opened.search(QUERIES)
    opened.close()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": ""}, "model must be a name or None"),
        ({"settings": {"reader.model": "x"}}, "'reader.model' is of neither encoder nor retriever"),
        ({"settings": {"retriever.kin": "x"}}, "unknown config key 'retriever.kin'"),
        ({"settings": {"retriever.kind": "exact"}}, "model='bm25' is no search of kind exact"),
        ({"model": "linked"}, "model='linked' needs the setting encoder.model"),
        ({"model": "links", "index": "x"}, "x is not an index folder"),
        ({"documents": "/nowhere"}, "config.documents=/nowhere is neither"),
        ({"documents": b"x"}, "documents must be a path or a list of strings"),
        ({"documents": "a\0b"}, "is neither a folder nor a file"),
    ],
)
def test_retriever_bad_arguments_are_refused(fields, words):
    with pytest.raises(UserError, match=words):
        cirag_jax.Retriever.open(**{"model": "bm25", "documents": TEXTS, **fields})


def test_retriever_bad_queries_are_refused(builtin):
    for queries in ("Who?", None, {"a": "b"}):
        with pytest.raises(UserError, match="queries must be a list of strings"):
            builtin.search(queries)
    for k in (0, 2.5):
        with pytest.raises(UserError, match="k"):
            builtin.search(QUERIES, k)
    with pytest.raises(UserError, match="queries must be a dictionary"):
        builtin.run(QUERIES)
    with pytest.raises(UserError, match="empty"):
        builtin.search([" "])
