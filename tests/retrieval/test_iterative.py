import numpy as np
import pytest

from cirag_jax.datasets.chains import Unit
from cirag_jax.errors import UserError
from cirag_jax.retrieval.iterative import UnitStore, by_passage, by_unit, iterative_retrieve
from cirag_jax.retrieval.search import ExactIndex

# Passage 0 answers the question, passage 1 extends it, passage 2 is near the question only.
UNITS = {
    0: [Unit("start", "p0"), Unit("noise", "p0")],
    1: [Unit("bridge", "p1")],
    2: [Unit("decoy", "p2")],
    3: [],
}
VECTORS = {
    "start": [1, 0, 0], "noise": [0.1, 0, 0], "bridge": [0, 0.5, 0], "decoy": [0.8, 0, 0],
    "q": [1, 0, 0],
    "q\nknowledge triples: start.": [0.1, 1, 0],
    "q\nknowledge triples: start. bridge.": [0, 0, 1],
    "q\nknowledge triples: start. noise.": [0, 0, 1],
}  # fmt: skip
PASSAGES = np.array([[1, 0, 0], [0, 1, 0], [0.8, 0, 0], [0, 0, 1]], np.float32)


class _Embedder:
    def __init__(self):
        self.texts = []

    def __call__(self, texts, role):
        self.texts += [text for text in texts if role == "passage"]
        return np.array([VECTORS[text] for text in texts], np.float32)


def _run(steps, k=2, *, search="passage", ranking="score", allowed=None):
    embed = _Embedder()
    store = UnitStore(UNITS.__getitem__, embed)
    if search == "passage":
        find = by_passage(ExactIndex(PASSAGES), embed, k, allowed)
    else:
        find = by_unit(store, len(UNITS), k, allowed=allowed)
    rankings = iterative_retrieve(["q"], "triple", embed, store, find, steps=steps, ranking=ranking)
    return rankings[0], embed


def test_one_step_ranks_by_the_question():
    ranking, _ = _run(1)
    assert ranking.passages == (0, 2)
    assert [unit.text for unit in ranking.chain] == ["start"]


def test_the_second_step_reaches_the_bridge():
    ranking, _ = _run(2)
    assert [unit.text for unit in ranking.chain] == ["start", "bridge"]
    assert ranking.passages == (0, 2, 1)  # A passage keeps the best score of any step.
    np.testing.assert_allclose(ranking.scores, [1.0, 0.8, 0.5], rtol=1e-6)


def test_units_are_embedded_once_and_passages_without_units_come_last():
    ranking, embed = _run(3)
    assert sorted(embed.texts) == ["bridge", "decoy", "noise", "start"]
    assert ranking.passages[-1] == 3 and ranking.scores[-1] == float("-inf")
    # The third step's best unit is taken already; the chain grows by the best new one.
    assert len({unit.text for unit in ranking.chain}) == 3


def test_only_allowed_passages_are_found():
    ranking, _ = _run(3, allowed=[np.array([0, 3])])
    assert set(ranking.passages) == {0, 3}


def test_search_over_all_units_finds_their_passages():
    ranking, embed = _run(2, search="unit")
    assert ranking.passages == (0, 2, 1)
    assert sorted(embed.texts) == ["bridge", "decoy", "noise", "start"]
    assert set(_run(2, search="unit", allowed=[np.array([0, 2])])[0].passages) == {0, 2}
    assert len(_run(1, k=1, search="unit")[0].passages) == 1


def test_ranking_by_chain_puts_the_chain_first():
    """The decoy's score at step one is above the bridge's at step two."""
    by_score, by_chain = (_run(2, ranking=ranking)[0] for ranking in ("score", "chain"))
    assert by_score.chain == by_chain.chain
    assert by_score.passages == (0, 2, 1) and by_chain.passages == (0, 1, 2)
    with pytest.raises(UserError, match="ranking is 'best'"):
        _run(1, ranking="best")
