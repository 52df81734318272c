"""A cross-encoder's second look at the candidates of a search along links."""

import numpy as np
import pytest

from cirag_jax.errors import UserError
from cirag_jax.retrieval import joint
from cirag_jax.retrieval.index import open_retriever
from cirag_jax.retrieval.joint import JointScorer
from cirag_jax.training import link_head as training
from configs import retrievers
from tests import tiny
from tests.retrieval.films import DATASET, PASSAGES, QUESTION, Words, make_head, make_index


@pytest.fixture()
def asked(monkeypatch):
    """The pairs that a cross-encoder was asked about; it likes texts with a "sea"."""
    seen = []

    def score_groups(model, params, queries, texts, **how):
        pairs = zip(queries, texts, strict=True)
        seen.extend((query, text) for query, group in pairs for text in group)
        return [np.array([float("sea" in t) for t in group], np.float32) for group in texts]

    monkeypatch.setattr(joint, "score_groups", score_groups)
    return seen


def _scorer(**options):
    return JointScorer(None, **options)  # type: ignore[arg-type]  # `asked` reads no model.


def test_logits_of_the_best_are_added_and_the_others_count_as_the_least(asked):
    texts = [["a", "a sea", "b", "another sea", "c"], ["x"], []]
    scores = [np.array([5.0, 3, 4, 2, 1]), np.array([7.0]), np.zeros(0)]
    found = _scorer(weight=3.0, depth=3)(["q", "r", "s"], texts, scores)
    assert asked == [("q", "a"), ("q", "b"), ("q", "a sea"), ("r", "x")]
    # One logit of three is 1, the others 0; the last two of the first were not asked about.
    np.testing.assert_allclose(found[0], [2, 3, 1, -1, -2])
    assert found[1].tolist() == [7] and not len(found[2])
    for score_R, same_R in zip(scores, _scorer(weight=0.0)(["q"] * 3, texts, scores), strict=True):
        np.testing.assert_array_equal(score_R, same_R)


def test_a_search_asks_about_the_chain_and_chooses_by_both(asked):
    head = make_head(named=9.0, named_by_passages=5.0)
    without = make_index(head, steps=2).search([QUESTION.question], 2)[0][0]
    assert [PASSAGES[row].id for row in without] == ["Grey Harbour", "Anna Berg"]
    liked = make_index(head, steps=2, joint=_scorer(weight=99.0, depth=99))
    found = liked.search([QUESTION.question], 2)[0][0]
    queries = list(dict.fromkeys(query for query, _ in asked))
    assert len(queries) == 2 and queries[0] == QUESTION.question
    assert queries[1].startswith(QUESTION.question) and "sea" in queries[1]
    assert all("Berg" in PASSAGES[row].id for row in found)


def test_training_is_told_the_chain_of_every_step():
    seen = []
    make_index(make_head(named=9.0), steps=2).explore(
        [QUESTION.question], make_head(named=9.0).score, None, seen.append
    )
    first, second = seen
    assert first.chain == () and len(second.chain) == 1
    task = training.Task(make_index(), tuple(DATASET.corpus), (), ())
    (text,) = task.index.texts(second.chain)
    assert "Grey Harbour" in text


def test_a_joint_scorer_needs_a_search_along_links_and_a_model_that_reads_chains(
    tmp_path, monkeypatch
):
    encoder, config = Words(), retrievers.retriever()
    config.joint.model = str(tmp_path)
    with pytest.raises(UserError, match=r"joint\.model needs config\.retriever\.kind=linked"):
        open_retriever(config, PASSAGES, encoder)
    encoder.identity, config.kind = {"model": str(tmp_path)}, "linked"
    make_head(named=9.0).save(tmp_path)
    told = {"component": "cross_encoder", "triple_text": None}
    monkeypatch.setattr(joint, "open_cross_encoder", lambda spec: (None, told))
    with pytest.raises(UserError, match="was trained on questions alone"):
        open_retriever(config, PASSAGES, encoder)
    told["reads"] = "chain"
    open_retriever(config, PASSAGES, encoder)
    for field, value in (("depth", 0), ("weight", -1.0)):
        config = retrievers.retriever()
        config.kind, config.joint.model, config.joint[field] = "linked", str(tmp_path), value
        with pytest.raises(UserError, match=rf"config\.retriever\.joint\.{field}={value}"):
            open_retriever(config, PASSAGES, encoder)
    monkeypatch.undo()
    tiny.model_folder(tmp_path / "encoder")
    config = retrievers.retriever()
    config.kind, config.joint.model = "linked", str(tmp_path / "encoder")
    with pytest.raises(UserError, match="is no cross-encoder"):
        open_retriever(config, PASSAGES, encoder)
