"""Scores of ranked passages, compared with ir_measures and sentence-transformers."""

import ir_measures
import numpy as np
import pytest
from ir_measures import AP, RR, nDCG

from cirag_jax.commands.evaluate_retrieval import evaluate
from cirag_jax.datasets import load
from cirag_jax.datasets.formats import trec
from cirag_jax.evaluation.ranking import ranking_scores
from cirag_jax.retrieval.search import ExactIndex
from configs import retrieval

KS = (2, 5, 10)


def test_ranking_scores_equal_ir_measures():
    rng = np.random.default_rng(0)
    for number in range(50):
        ranked = [f"p{i}" for i in rng.permutation(12)[: rng.integers(0, 12)]]
        gold = {f"p{i}" for i in rng.choice(15, rng.integers(1, 6), replace=False)}
        qrels = [ir_measures.Qrel("q", passage, 1) for passage in gold]
        run = [ir_measures.ScoredDoc("q", p, float(-i)) for i, p in enumerate(ranked)]
        measures = {"map": AP, "mrr": RR, **{f"ndcg@{k}": nDCG @ k for k in KS}}
        theirs = ir_measures.calc_aggregate(measures.values(), qrels, run)
        ours = ranking_scores(ranked, gold, KS)
        assert {name: ours[name] for name in measures} == pytest.approx(
            {name: theirs[measure] for name, measure in measures.items()}
        ), number
        complete = {k: ir_measures.calc_aggregate([ir_measures.R @ k], qrels, run) for k in KS}
        assert [ours[f"complete@{k}"] for k in KS] == [
            float(complete[k][ir_measures.R @ k] == 1) for k in KS
        ]


def test_ranking_scores_of_odd_rankings():
    assert ranking_scores((), {"a"}, (1,)) == {"complete@1": 0, "ndcg@1": 0, "map": 0, "mrr": 0}
    repeated = ranking_scores(["x", "a", "a", "b"], {"a", "b"}, (4,))
    assert repeated["map"] == (1 / 2 + 2 / 3) / 2 and repeated["complete@4"] == 1
    # A substitute completes the evidence, but is not relevant in a ranking.
    replaced = ranking_scores(["y", "b"], {"a", "b"}, (1, 2), {"a": [{"a", "y"}]})
    assert replaced["complete@1"] == 0 and replaced["complete@2"] == 1 and replaced["mrr"] == 0.5


def test_rank_list_has_the_same_scores_in_every_tool(tmp_path):
    """Here, in ir_measures and in sentence-transformers, for made-up vectors of built-in data."""
    torch = pytest.importorskip("torch")
    evaluators = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    config = retrieval.get_config()
    config.data.split, config.data.limit, config.recall_at = "test", 60, KS
    config.data.corpus = "selected_questions"
    dataset, rng = load.load_dataset(config.data), np.random.default_rng(0)
    questions = load.select_questions(dataset, config.data)
    names = [p.id for p in load.select_corpus(dataset, questions, config.data).passages]
    row_of = {name: row for row, name in enumerate(names)}
    passage_ND = rng.normal(size=(len(row_of), 16)).astype(np.float32)
    query_QD = np.stack(
        [passage_ND[[row_of[name] for name in q.supporting or ()]].mean(0) for q in questions]
    )
    query_QD += 1.2 * rng.normal(size=query_QD.shape).astype(np.float32)

    row_QK, _ = ExactIndex(passage_ND).search(query_QD, max(KS))
    rankings = {q.id: [names[i] for i in row] for q, row in zip(questions, row_QK, strict=True)}
    trec.write_run(tmp_path / "aligner.trec", rankings, "aligner")
    config.runs, config.systems = (f"aligner={tmp_path / 'aligner.trec'}",), ("bm25",)
    config.bootstrap_samples = 2
    ours = evaluate(config, tmp_path, show=False)["aligner"]

    qrels = list(ir_measures.read_trec_qrels(str(tmp_path / "qrels.trec")))
    run = list(ir_measures.read_trec_run(str(tmp_path / "aligner.trec")))
    measures = {"map": AP, "mrr": RR, "ndcg@10": nDCG @ 10}
    measures |= {f"recall@{k}": ir_measures.R @ k for k in KS}
    theirs = ir_measures.calc_aggregate(measures.values(), qrels, run)
    expected = {name: ours[name] for name in measures}
    assert expected == pytest.approx({name: theirs[m] for name, m in measures.items()})

    class Evaluator(evaluators.InformationRetrievalEvaluator):
        def embed_inputs(self, model, sentences, *args, **kwargs):
            return torch.from_numpy(vectors[len(sentences)])

    vectors = {len(questions): query_QD, len(passage_ND): passage_ND}
    evaluator = Evaluator(
        {q.id: q.id for q in questions},
        {name: name for name in names},
        {q.id: set(q.supporting or ()) for q in questions},
        mrr_at_k=[10],
        ndcg_at_k=[10],
        map_at_k=[10],
        precision_recall_at_k=list(KS),
        score_functions={"dot": lambda a, b: a @ b.T},
    )
    theirs = evaluator.compute_all_metrics(None)["dot"]
    values = {"map": theirs["map@k"][10], "mrr": theirs["mrr@k"][10]}
    values |= {"ndcg@10": theirs["ndcg@k"][10]}
    values |= {f"recall@{k}": theirs["recall@k"][k] for k in KS}
    assert expected == pytest.approx(values)
    assert all(0.1 < value < 0.9 for value in values.values()), values
