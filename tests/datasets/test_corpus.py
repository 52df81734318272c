import dataclasses

import numpy as np
import pytest

from cirag_jax.datasets.corpus import POLICIES, build_corpus
from cirag_jax.errors import UserError
from cirag_jax.types import Dataset, Passage, Question

CORPUS = {pid: Passage(pid, pid, pid) for pid in "abcdef"}
QUESTIONS = (
    Question("q1", "?", (), split="train", supporting=("c",), context=("c", "a")),
    Question("q2", "?", (), split="dev", supporting=("b", "a"), context=("a", "d", "a", "b")),
    Question("q3", "?", (), split="test", context=("e",)),
)
DATASET = Dataset("set", QUESTIONS, CORPUS, {})


def ids(corpus):
    return "".join(passage.id for passage in corpus.passages)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("ircot_full", "abcdef"),  # f is in no context
        ("selected_questions", "adbc"),
        ("supporting_only", "cba"),  # of all questions but the test one
    ],
)
def test_shared_corpora(policy, expected):
    corpus = build_corpus(DATASET, (QUESTIONS[1], QUESTIONS[0]), policy)
    assert (corpus.policy, ids(corpus), corpus.allowed) == (policy, expected, None)


def test_per_question_gives_each_its_own_context_with_repeats():
    corpus = build_corpus(DATASET, QUESTIONS[1:], "per_question")
    assert ids(corpus) == "adbe"
    assert corpus.allowed is not None
    assert {key: value.tolist() for key, value in corpus.allowed.items()} == {
        "q2": [0, 1, 0, 2],
        "q3": [3],
    }
    assert corpus.allowed["q2"].dtype == np.int32


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(UserError) as error:
        build_corpus(DATASET, QUESTIONS, "everything")
    assert all(name in str(error.value) for name in ("everything", *POLICIES))


@pytest.mark.parametrize("policy", ["selected_questions", "per_question"])
def test_a_question_without_context_is_named(policy):
    questions = (QUESTIONS[0], dataclasses.replace(QUESTIONS[1], context=None))
    with pytest.raises(
        UserError, match=r"'context', which question 'q2' of set \(questions\.jsonl"
    ):
        build_corpus(DATASET, questions, policy)


def test_a_question_without_gold_passages_is_named():
    unlabelled = dataclasses.replace(QUESTIONS[0], supporting=None)
    with pytest.raises(UserError, match="'supporting', which question 'q1'"):
        build_corpus(dataclasses.replace(DATASET, questions=(unlabelled,)), (), "supporting_only")
