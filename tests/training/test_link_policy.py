"""Policy gradients for the link head, on searches whose best choices are known."""

import types
from typing import Any

import numpy as np
import pytest
from flax import nnx

from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.models.link_head import LinkHead, LinkHeadModule
from cirag_jax.retrieval.candidates import FEATURES, StepCandidates
from cirag_jax.training import link_head, link_policy
from cirag_jax.types import Question

pytestmark = pytest.mark.usefixtures("standard_promotion")
WIDTH = 4  # candidates per step


class Searches:
    """Two steps of searches: row 3 leads to the gold passage, which the head does not know."""

    def explore(self, questions, score, allowed=None, observe: Any = None):
        rows = [[] for _ in questions]
        for step in range(2):
            features = []
            for question in range(len(questions)):
                feature_RF = np.zeros((WIDTH, len(FEATURES)), np.float32)
                feature_RF[0, 0] = 1.0  # the only feature of an untrained head
                feature_RF[3, 1] = 1.0
                features.append(feature_RF)
                observe(StepCandidates(question, np.arange(WIDTH), np.arange(WIDTH), feature_RF))
            for question, score_R in enumerate(score(features)):
                chosen = int(score_R.argmax())
                # The gold row 9 appears only after row 3, which is not gold.
                rows[question].append(9 if step and rows[question][0] == 3 else chosen)
        return [types.SimpleNamespace(rows=found) for found in rows]


def head():
    size = len(FEATURES)
    module = LinkHeadModule(np.zeros(size), np.ones(size), 8, nnx.Rngs(0))
    return LinkHead(module, FEATURES, "sentence", 2)


def settings(**values):
    config = load_config("configs/aligner.py").head
    config.update(values)
    return config


IDS = [f"p{row}" for row in range(10)]
QUESTIONS = [Question(f"q{i}", "?", ("a",), supporting=("p9",)) for i in range(4)]


def test_reinforce_learns_a_choice_that_only_leads_to_gold():
    config = settings(updates=15, per_update=4, searches=16, policy_learning_rate=0.1)
    searches: Any = Searches()
    before = head()
    after, rewards = link_policy.reinforce(before, [(searches, IDS, QUESTIONS)], config, seed=0)
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
    feature_RF = np.eye(len(FEATURES), dtype=np.float32)[:2]  # row 0's and row 3's candidates
    (old_R,), (new_R,) = before.score([feature_RF]), after.score([feature_RF])
    assert old_R[0] > old_R[1] and new_R[1] > new_R[0]


def test_samples_follow_the_softmax_of_the_scores():
    searches: Any = Searches()
    _, choices = link_policy.sample(searches, head(), ["?"] * 4000, np.random.default_rng(0))
    shares = np.bincount([c.chosen for c in choices], minlength=WIDTH) / len(choices)
    expected = np.exp([1.0, 0, 0, 0])
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.02)


def test_reward_is_recall_of_the_first_ranks():
    question = Question("q", "?", ("a",), supporting=("p1", "p2"))
    assert link_policy.recalls([1, 2, 0], question, IDS) == [1.0, 1.0]
    assert link_policy.recalls([1, 0, 3, 4, 2], question, IDS) == [0.5, 1.0]
    assert link_policy.recalls([0, 3], question, IDS) == [0.0, 0.0]


def test_updates_need_dev_questions_that_are_not_trained_on():
    with pytest.raises(UserError, match="config.head.updates needs config.head.held_out=0"):
        link_head.check_settings(settings(updates=1, rounds=1))
    link_head.check_settings(settings(updates=1, held_out=0, rounds=1))
