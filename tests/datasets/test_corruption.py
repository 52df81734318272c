"""Rules of corruption: critical facts, noise patterns, deletion and the file."""

import pytest

from cirag_jax.datasets import corruption
from cirag_jax.datasets.corruption import Edits
from cirag_jax.errors import UserError
from cirag_jax.types import Question, SubQuestion, Triple
from tests import tiny

DATA = tiny.dataset()
QUESTION = DATA.questions[0]
PERSON, _, TOWN = (QUESTION.evidences or (("", "", ""),))[0]


def triples_of(question=QUESTION):
    return [triple for passage_id in question.context or () for triple in DATA.triples[passage_id]]


def facts_of(question=QUESTION):
    return corruption.critical_facts(question, DATA.corpus, triples_of(question))


def test_critical_facts_have_an_entity_of_the_question_or_its_annotations():
    facts = facts_of()
    assert [(f.triple.passage_id, f.triple.relation, f.is_bridge) for f in facts] == [
        ("p0", "born in", True),
        ("p0", "worked as", False),
        ("t0", "patron", True),
        ("t0", "known for", False),
    ]
    bare = Question("q", f"Where was {PERSON.upper()} born?", ("x",))
    named = corruption.critical_facts(bare, {}, triples_of())
    assert [(f.triple.head, f.is_bridge) for f in named] == [(PERSON, False)] * 2
    steps = (SubQuestion("Corek >> patron", "saint"), SubQuestion("Where is #1?", "Marn"))
    decomposed = Question("q", "Who?", ("Marn",), decomposition=steps)
    near = [Triple("corek", "is", "a town"), Triple("x", "in", "MARN"), Triple("y", "in", "z")]
    assert [f.triple for f in corruption.critical_facts(decomposed, {}, near)] == near[:2]


def test_critical_facts_merge_equal_facts():
    twice = [Triple(PERSON, "born in", TOWN, "p0", 0), Triple(PERSON.upper(), "born in", TOWN, "x")]
    (fact,) = corruption.critical_facts(QUESTION, DATA.corpus, twice)
    assert fact.triples == tuple(twice)
    triples = {"p0": twice[:1], "x": twice[1:], "t0": DATA.triples["t0"]}
    assert corruption.edited(triples, [fact], Edits(removed=(0,))) == {"p0": (), "x": ()}
    added = Edits(added=((0, (PERSON, "died in", TOWN)),))
    assert corruption.edited(triples, [fact], added) == {
        "p0": (twice[0], Triple(PERSON, "died in", TOWN, "p0", 0))
    }


@pytest.mark.parametrize(
    ("num_facts", "ratio", "expected"),
    [(4, 0.0, 0), (0, 0.5, 0), (4, 0.05, 1), (30, 0.05, 2), (30, 0.2, 6), (4, 1.0, 4)],
)
def test_num_edits(num_facts, ratio, expected):
    assert corruption.num_edits(num_facts, ratio) == expected


def test_delete_bridges_first_and_larger_shares_contain_smaller():
    facts = facts_of()
    removed = [corruption.delete("q0", facts, share, 7).removed for share in (0.25, 0.5, 0.75, 1)]
    assert [len(r) for r in removed] == [1, 2, 3, 4]
    assert all(larger[: len(r)] == r for r, larger in zip(removed, removed[1:], strict=False))
    assert set(removed[1]) == {0, 2}  # the bridges
    orders = {corruption.delete(f"q{i}", facts, 1, 7).removed for i in range(9)}
    assert len(orders) > 1


@pytest.mark.parametrize(
    ("pattern", "is_right"),
    [
        ("over_generalized", lambda t, v: v[0] == t.head and v[2] == t.tail and v[1] != t.relation),
        ("mis_bound", lambda t, v: v[:2] == t[:2] and v[2] != t.tail),
        ("semantic_flip", lambda t, v: v == (t.head, corruption.flipped(t.relation), t.tail)),
    ],
)
def test_add_noise_writes_variants_of_a_pattern(pattern, is_right):
    facts, triples = facts_of(), triples_of()
    edits = corruption.add_noise("q0", facts, triples, 1.0, (pattern,), 3)
    assert len(edits.added) == 4 and not edits.removed
    assert all(is_right(facts[index].triple, variant) for index, variant in edits.added)
    known = {triple[:3] for triple in triples}
    assert known.isdisjoint(variant for _, variant in edits.added)
    smaller = corruption.add_noise("q0", facts, triples, 0.5, (pattern,), 3)
    assert smaller.added == edits.added[:2]
    assert corruption.add_noise("q0", facts, triples, 1.0, (pattern,), 4) != edits


def test_add_noise_dates_are_replaced_with_dates():
    triples = [Triple(PERSON, "born", "1901"), Triple("b", "died", "1950"), Triple("c", "is", "d")]
    facts = corruption.critical_facts(QUESTION, DATA.corpus, triples)
    edits = corruption.add_noise("q0", facts, triples, 1.0, ("mis_bound",), 0)
    assert edits.added == ((0, (PERSON, "born", "1950")),)
    # Without another date, there is no variant.
    assert corruption.add_noise("q0", facts, triples[:1], 1.0, ("mis_bound",), 0) == Edits()


@pytest.mark.parametrize(
    ("relation", "expected"),
    [("born in", "died in"), ("is not part of", "is part of"), ("directed by", "not directed by")],
)
def test_flipped(relation, expected):
    assert corruption.flipped(relation) == expected


def test_read_corrupted_bad_lines_are_named(tmp_path):
    assert corruption.read_corrupted(str(tmp_path)) is None
    file = tmp_path / corruption.FILE
    file.write_text("")
    empty = corruption.read_corrupted(str(tmp_path))
    assert empty and empty.by_question == {}
    file.write_text('{"question_id": "q", "passage_id": "p", "triples": [["a", "b", 3, null]]}\n')
    with pytest.raises(UserError, match=r"corrupted.jsonl:1: field 'triples"):
        corruption.read_corrupted(str(tmp_path))
