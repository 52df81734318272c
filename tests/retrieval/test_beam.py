"""A beam over chains, and what it ranks."""

import numpy as np
import pytest

from cirag_jax.retrieval.beam import Beam
from cirag_jax.retrieval.candidates import FEATURES, Candidates, Search
from tests.retrieval.films import DATASET, PASSAGES, QUESTION, ROW, make_head, make_index


def _begun():
    return Search(
        question="?", place=0, first_D=np.zeros(1), first_best=0.0, asked=frozenset(), words={},
        walk_N=np.zeros(9), near=[], named={}, num_titles=0, allowed=None,
        left_N=np.zeros(9), told_N=np.zeros(9), query_D=np.zeros(1),
    )  # fmt: skip


def _choices(**likely):
    """What a chain chooses from: row r3 with the probability that its name has."""
    rows = np.array([int(name[1:]) for name in likely], np.int32)
    none = np.zeros((len(rows), len(FEATURES)), np.float32)
    score_R = np.log(np.array(list(likely.values()), np.float64))
    return Candidates(0, (), rows, 10 + rows.astype(np.int64), none), score_R


def test_after_three_passages_of_the_chain_the_likeliest_of_all_steps_come():
    beam = Beam(_begun())
    beam.extend([_choices(r0=0.6, r1=0.2, r7=0.2)])
    beam.extend([_choices(r1=0.5, r7=0.4, r2=0.1)])
    beam.extend([_choices(r2=0.7, r7=0.3)])
    beam.extend([_choices(r3=0.51, r4=0.49)])
    (chain,) = beam.going
    assert chain.rows == [0, 1, 2, 3] and chain.units == [10, 11, 12, 13]
    # Row 7 is missed with 0.8 * 0.6 * 0.7, row 3 with 0.49.
    assert beam.ranked() == [0, 1, 2, 7, 3, 4]


def test_the_likeliest_chains_are_kept_whatever_their_first_choice():
    beam = Beam(_begun(), width=2)
    beam.extend([_choices(r0=0.5, r1=0.4, r2=0.1)])
    assert [chain.rows for chain in beam.going] == [[0], [1]]
    beam.extend([_choices(r3=0.3, r1=0.7), _choices(r3=0.9, r0=0.1)])
    # 0.4 * 0.9 before 0.5 * 0.7.
    assert [chain.rows for chain in beam.going] == [[1, 3], [0, 1]]
    shares = 0.5 / 0.9, 0.4 / 0.9
    assert beam.likely[1] == pytest.approx(
        {3: shares[0] * 0.3 + shares[1] * 0.9, 1: shares[0] * 0.7, 0: shares[1] * 0.1}
    )
    beam.extend([_choices(), _choices(r4=0.5, r5=0.5)])
    # A chain that has nothing left to choose from is kept by its probability.
    assert [chain.rows for chain in beam.going] == [[0, 1, 4]]
    assert beam.ranked()[:2] == [1, 3]
    beam.extend([_choices()])
    assert not beam.going and len(beam.likely) == 3
    beam.extend([])


def test_the_same_passages_in_another_order_are_no_other_chain():
    beam = Beam(_begun(), width=2)
    beam.extend([_choices(r0=0.5, r1=0.4, r2=0.1)])
    beam.extend([_choices(r1=0.7, r3=0.3), _choices(r0=0.85, r3=0.15)])
    assert [chain.rows for chain in beam.going] == [[0, 1], [0, 3]]


def test_chains_that_part_have_read_what_is_their_own():
    index = make_index(make_head())
    finder = index._finder
    query_QD = np.zeros((2, 64), np.float32)
    (begun,) = finder.begin([QUESTION.question], query_QD[:1], None)
    parted = [begun.longer(ROW[name], 2 * ROW[name]) for name in ("Grey Harbour", "Red Harbour")]
    finder.follow(parted, query_QD, None)
    grey, red = (chain.read for chain in parted)
    assert "grey" in grey and "grey" not in red and "red" in red and not begun.read


def test_the_beams_of_a_block_do_not_mix_and_stay_within_what_is_allowed():
    head = make_head(named=9.0, named_by_passages=5.0, score=1.0)
    texts = [question.question for question in DATASET.questions]
    narrow = make_index(head, steps=2).search(texts, 5)[0]
    wide = make_index(head, steps=2, width=3)
    rows = wide.search(texts, 5)[0]
    assert rows[:, :2].tolist() == narrow[:, :2].tolist()
    assert rows[4].tolist() == wide.search(texts[4:5], 5)[0][0].tolist()
    allowed = [np.array([ROW["Grey Harbour"], ROW["Bo Berg"]])]
    found = wide.search([QUESTION.question], 4, allowed)[0][0]
    assert [PASSAGES[row].id for row in found[:2]] == ["Grey Harbour", "Bo Berg"]
    assert found[2:].tolist() == [-1, -1]
