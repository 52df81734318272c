"""A search's chain, step by step, and what it ranks."""

import numpy as np
import pytest

from cirag_jax.retrieval.candidates import FEATURES, SearchState, StepCandidates
from tests.retrieval.films import DATASET, PASSAGES, QUESTION, ROW, make_head, make_index


def _begun():
    return SearchState(
        question="?", index=0, question_D=np.zeros(1), question_best=0.0,
        question_words=frozenset(), bm25={}, walk_N=np.zeros(9), named={}, num_titles=0,
        allowed_R=None, query_D=np.zeros(1), nearest=[], left_N=np.zeros(9), told_N=np.zeros(9),
    )  # fmt: skip


def _choices(**likely):
    """Candidates of a step and their scores: row r3 has the probability given under its name."""
    rows = np.array([int(name[1:]) for name in likely], np.int32)
    none = np.zeros((len(rows), len(FEATURES)), np.float32)
    score_R = np.log(np.array(list(likely.values()), np.float64))
    return StepCandidates(0, rows, 10 + rows.astype(np.int64), none), score_R


def test_search_ranked_three_chain_passages_come_before_the_likeliest_candidates():
    search = _begun()
    search.choose(*_choices(r0=0.6, r1=0.2, r7=0.2))
    search.choose(*_choices(r1=0.5, r7=0.4, r2=0.1))
    search.choose(*_choices(r2=0.7, r7=0.3))
    search.choose(*_choices(r3=0.51, r4=0.49))
    assert search.rows == [0, 1, 2, 3] and search.units == [10, 11, 12, 13]
    # Row 7 is missed with 0.8 * 0.6 * 0.7, row 3 with 0.49.
    assert search.ranked() == [0, 1, 2, 7, 3, 4]


def test_search_choose_without_candidates_ends_the_search_and_keeps_its_chain():
    search = _begun()
    search.choose(*_choices(r1=0.6, r0=0.4))
    assert search.probabilities == [pytest.approx({1: 0.6, 0: 0.4})] and not search.ended
    search.choose(*_choices())
    assert search.ended and len(search.probabilities) == 1
    assert search.rows == [1] and search.ranked() == [1, 0]


def test_finder_follow_each_search_reads_the_passages_of_its_own_chain():
    index = make_index(make_head())
    finder = index._finder
    query_QD = np.zeros((3, 64), np.float32)
    begun, *followed = finder.start([QUESTION.question] * 3, query_QD, None)
    for search, name in zip(followed, ("Grey Harbour", "Red Harbour"), strict=True):
        search.rows.append(ROW[name])
        search.units.append(2 * ROW[name])
    finder.update(followed, query_QD[:2])
    grey, red = (search.chain_words for search in followed)
    assert "grey" in grey and "grey" not in red and "red" in red and not begun.chain_words


def test_explore_questions_of_a_block_do_not_mix_and_stay_within_what_is_allowed():
    head = make_head(named=9.0, named_by_passages=5.0, score=1.0)
    texts = [question.question for question in DATASET.questions]
    index = make_index(head, steps=2)
    rows = index.search(texts, 5)[0]
    assert rows[4].tolist() == index.search(texts[4:5], 5)[0][0].tolist()
    allowed = [np.array([ROW["Grey Harbour"], ROW["Bo Berg"]])]
    found = index.search([QUESTION.question], 4, allowed)[0][0]
    assert [PASSAGES[row].id for row in found[:2]] == ["Grey Harbour", "Bo Berg"]
    assert found[2:].tolist() == [-1, -1]
