"""The state of a linked search: its chain of passages and its final ranking."""

import numpy as np
import pytest

from cirag_jax.retrieval.candidates import FEATURES, SearchState, StepCandidates
from tests.retrieval.films import DATASET, PASSAGES, QUESTION, ROW, make_head, make_index


def _new_state():
    return SearchState(
        question="?", index=0, question_D=np.zeros(1), question_best=0.0,
        question_words=frozenset(), bm25={}, walk_N=np.zeros(9), named={}, num_titles=0,
        allowed_R=None, query_D=np.zeros(1), nearest=[], left_N=np.zeros(9), told_N=np.zeros(9),
    )  # fmt: skip


def _choices(**likely):
    """Returns candidates of a step and their scores; ``r3=0.5`` gives row 3 probability 0.5."""
    rows = np.array([int(name[1:]) for name in likely], np.int32)
    none = np.zeros((len(rows), len(FEATURES)), np.float32)
    score_R = np.log(np.array(list(likely.values()), np.float64))
    return StepCandidates(0, rows, 10 + rows.astype(np.int64), none), score_R


def test_state_ranked_chain_comes_before_likeliest_candidates():
    search = _new_state()
    search.choose(*_choices(r0=0.6, r1=0.2, r7=0.2))
    search.choose(*_choices(r1=0.5, r7=0.4, r2=0.1))
    search.choose(*_choices(r2=0.7, r7=0.3))
    search.choose(*_choices(r3=0.51, r4=0.49))
    assert search.rows == [0, 1, 2, 3] and search.units == [10, 11, 12, 13]
    # Row 7 remains unchosen with probability 0.8 * 0.6 * 0.7, and row 3 with 0.49.
    assert search.ranked() == [0, 1, 2, 7, 3, 4]


def test_state_choose_without_candidates_ends_the_search():
    search = _new_state()
    search.choose(*_choices(r1=0.6, r0=0.4))
    assert search.probabilities == [pytest.approx({1: 0.6, 0: 0.4})] and not search.ended
    search.choose(*_choices())
    assert search.ended and len(search.probabilities) == 1
    assert search.rows == [1] and search.ranked() == [1, 0]


def test_finder_update_gives_each_search_its_own_chain_words():
    index = make_index(make_head())
    finder = index._finder
    query_QD = np.zeros((3, 64), np.float32)
    first, *others = finder.start([QUESTION.question] * 3, query_QD, None)
    for search, name in zip(others, ("Grey Harbour", "Red Harbour"), strict=True):
        search.rows.append(ROW[name])
        search.units.append(2 * ROW[name])
    finder.update(others, query_QD[:2])
    grey, red = (search.chain_words for search in others)
    assert "grey" in grey and "grey" not in red and "red" in red and not first.chain_words


def test_explore_questions_of_a_block_are_independent():
    head = make_head(named=9.0, named_by_passages=5.0, score=1.0)
    texts = [question.question for question in DATASET.questions]
    index = make_index(head, steps=2)
    rows = index.search(texts, 5)[0]
    assert rows[4].tolist() == index.search(texts[4:5], 5)[0][0].tolist()
    allowed = [np.array([ROW["Grey Harbour"], ROW["Bo Berg"]])]
    found = index.search([QUESTION.question], 4, allowed)[0][0]
    assert [PASSAGES[row].id for row in found[:2]] == ["Grey Harbour", "Bo Berg"]
    assert found[2:].tolist() == [-1, -1]
