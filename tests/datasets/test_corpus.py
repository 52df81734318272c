import dataclasses

import numpy as np
import pytest

from cirag_jax.datasets.corpus import POLICIES, SAMPLED, build_corpus
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
        ("ircot_full", "abcdef"),  # f is in no context.
        ("selected_questions", "adbc"),
        ("supporting_only", "cba"),  # The gold passages of the test question are left out.
    ],
)
def test_build_corpus_shared_policies(policy, expected):
    corpus = build_corpus(DATASET, (QUESTIONS[1], QUESTIONS[0]), policy)
    assert (corpus.policy, ids(corpus), corpus.allowed) == (policy, expected, None)


def test_build_corpus_per_question_allows_its_context_with_repeats():
    corpus = build_corpus(DATASET, QUESTIONS[1:], "per_question")
    assert ids(corpus) == "adbe"
    assert corpus.allowed is not None
    assert {key: value.tolist() for key, value in corpus.allowed.items()} == {
        "q2": [0, 1, 0, 2],
        "q3": [3],
    }
    assert corpus.allowed["q2"].dtype == np.int32


def many(count):
    corpus = {f"p{i}": Passage(f"p{i}", "", "") for i in range(count)}
    questions = (
        Question("a", "?", (), supporting=("p7", "p2")),
        Question("b", "?", (), supporting=("p9",)),
    )
    return Dataset("many", questions, corpus, {})


def sampled(dataset, questions, seed=0):
    corpus = build_corpus(dataset, questions, "supporting_and_sampled", seed)
    assert corpus.allowed is None
    return [passage.id for passage in corpus.passages]


def test_build_corpus_samples_ten_others_per_question():
    dataset = many(1000)
    first, second = (sampled(dataset, [question]) for question in dataset.questions)
    assert (len(first), len(second)) == (2 + SAMPLED, 1 + SAMPLED)
    assert {"p7", "p2"} < set(first) and "p9" in second
    both = sampled(dataset, dataset.questions)
    assert set(both) == {*first, *second}  # Each question's draw is independent of the others.
    assert both == sorted(both, key=lambda pid: int(pid[1:]))  # In corpus order.
    assert both == sampled(dataset, dataset.questions[::-1])
    assert both != sampled(dataset, dataset.questions, seed=1)
    drawn = "p2 p7 p14 p100 p248 p340 p439 p447 p601 p785 p877 p981"
    assert first == drawn.split()  # Pins the draw.


def test_build_corpus_small_dataset_is_used_completely():
    assert len(sampled(many(12), many(12).questions[:1])) == 12
    assert len(sampled(many(10), many(10).questions[:1])) == 10


def test_build_corpus_unknown_policy_is_refused():
    with pytest.raises(UserError) as error:
        build_corpus(DATASET, QUESTIONS, "everything")
    assert all(name in str(error.value) for name in ("everything", *POLICIES))


@pytest.mark.parametrize("policy", ["selected_questions", "per_question"])
def test_build_corpus_question_without_context_is_named(policy):
    questions = (QUESTIONS[0], dataclasses.replace(QUESTIONS[1], context=None))
    with pytest.raises(
        UserError, match=r"'context', which question 'q2' of set \(questions\.jsonl"
    ):
        build_corpus(DATASET, questions, policy)


def test_build_corpus_question_without_gold_is_named():
    unlabeled = dataclasses.replace(QUESTIONS[0], supporting=None)
    with pytest.raises(UserError, match="'supporting', which question 'q1'"):
        build_corpus(dataclasses.replace(DATASET, questions=(unlabeled,)), (), "supporting_only")
    with pytest.raises(
        UserError, match="'supporting', which question 'q1'.*ircot_full needs no an"
    ):
        build_corpus(DATASET, (unlabeled,), "supporting_and_sampled")
