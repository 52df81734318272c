"""C2RAG's sufficiency as CIRAG's stop signal, by hand."""

import json

import pytest

from cirag_jax.errors import UserError
from cirag_jax.methods.cirag.method import cirag
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.runtime.requests import Generate, Rank, Retrieve
from cirag_jax.types import Passage, Question, Triple
from tests.methods.by_hand import Hand, decision

QUESTION = "In which province was Ada Moen born?"
ADA = Passage("a", "Ada Moen", "Ada Moen was born in Lund. She grew up in Ystad.")
LUND = Passage("b", "Lund", "Lund is in Skane.")
BORN = Triple("Ada Moen", "born in", "Lund", "a", 0)
GREW = Triple("Ada Moen", "grew up in", "Ystad", "a", 1)
PLACE = Triple("Lund", "in", "Skane", "b", 0)
SCORES = {
    ("lund", "in", "skane"): 0.9,
    ("ada moen", "born in", "lund"): 0.8,
    ("ada moen", "grew up in", "ystad"): 0.7,
}
TOWN = {"head": "Ada Moen", "relation": "born in", "tail": "?town"}
PROVINCE = {"head": "?town", "relation": "lies in", "tail": "?province"}
MISSING = "Lund — lies in — ?province"
PLAN = json.dumps({"constraints": [TOWN, PROVINCE]})
READS = "Thought: it follows.\nAnswer: Skane"


def says(question, *facts):
    return decision("So.", json.dumps({"fact": [list(fact[:3]) for fact in facts]}), question)


def run(said, planner=(PLAN,), **settings):
    hand = Hand(
        {QUESTION: (ADA,), None: (LUND, ADA)},
        {"a": (BORN, GREW), "b": (PLACE,)},
        {"planner": list(planner), "integrator": list(said), "reader": [READS]},
        SCORES,
    )
    settings = {"stop": "c2rag", "max_steps": 4, **settings}
    return hand, hand.drive(cirag(Question("q", QUESTION, ()), CiragConfig(**settings)))


def test_the_rounds_end_when_the_facts_ground_the_plan():
    hand, found = run([says("Where is Lund?", BORN), says("Who is Ada?", PLACE)])
    assert hand.kinds() == [
        "planner",
        *("Retrieve", "Extract", "Rank", "integrator", *["Rank"] * 4),
        *("Retrieve", "Extract", "Rank", "integrator", *["Rank"] * 4),
        "reader",
    ]
    assert [step.kept for step in found.steps] == [(BORN,), (PLACE,)]
    # The integrator asks on both times; the second time it need not.
    assert [step.next_query for step in found.steps] == ["Where is Lund?", None]
    first, second = (step.notes for step in found.steps)
    # One fact is the only candidate of both constraints, and grounds one.
    assert first["n_eff"] == {"Ada Moen — born in — ?town": 1.0, "?town — lies in — ?province": 1.0}
    assert second["names"] == {"?town": ["Lund"], "?province": ["Skane", "Lund"]}
    relations, pairs = hand.asked(Rank)[1:3]
    assert (relations.ranker, relations.query) == ("relations", "born in")
    assert pairs.ranker == "triples" and pairs.query == f"{QUESTION}\nAda Moen — born in — ?town"
    assert pairs.texts == (BORN,)  # what was kept, not what was shown
    assert found.answer == "Skane" and found.parse_errors == {}


def test_an_integrator_that_stops_too_early_goes_on_with_what_is_missing():
    hand, found = run([says("<no question>", BORN), says("<no question>", PLACE)])
    assert [r.query for r in hand.asked(Retrieve)] == [QUESTION, MISSING]
    assert [step.next_query for step in found.steps] == [MISSING, None]
    _, found = run([says("<no question>", BORN)], (), stop="integrator")
    assert len(found.steps) == 1 and not found.steps[0].notes


def test_facts_that_compete_do_not_suffice():
    turns = [says("<no question>", BORN, GREW), says("<no question>", PLACE)]
    turns += [says("<no question>")] * 2
    rule = {"neff_rule": "shift_if_nonpositive"}
    hand, found = run(turns, **rule)
    # N_eff of 0.8 and 0.7: (0.8 + 0.7)^2 / (0.8^2 + 0.7^2).
    assert found.steps[1].notes["n_eff"] == {"Ada Moen — born in — ?town": 1.9912}
    assert len(found.steps) == 4 and found.steps[1].notes["names"] == {}
    open_ = "Ada Moen — born in — ?town"
    assert [r.query for r in hand.asked(Retrieve)] == [QUESTION, open_, open_, open_]
    assert len(run(turns[:1], gamma=2.0, **rule)[1].steps) == 1
    assert len(run(turns, gamma=2.0, min_score=0.95, **rule)[1].steps) == 4
    assert len(run(turns[:2], on_repeat="stop", **rule)[1].steps) == 2


def test_a_fact_is_left_to_the_constraint_that_has_no_other():
    lived = {"head": "Ada Moen", "relation": "lived in", "tail": "?town"}  # Lund or Ystad
    native = {"head": "?native", "relation": "born in", "tail": "Lund"}
    plan = json.dumps({"constraints": [lived, native]})
    settings = {"gamma": 2.0, "neff_rule": "shift_if_nonpositive", "max_steps": 2}
    _, found = run([says("<no question>", BORN, GREW)], [plan], **settings)
    assert len(found.steps) == 1


def test_without_a_plan_the_integrators_own_stop_counts():
    turns = [says("Where is Lund?", BORN), says("<no question>")]
    hand, found = run(turns, ["I cannot plan.", "{}"])
    assert len(hand.asked(Generate, "planner")) == 2 and len(found.steps) == 2
    assert not any(step.notes for step in found.steps)
    assert {r.ranker for r in hand.asked(Rank)} == {"triples"}
    assert found.parse_errors["plan_invalid"] == 2 and found.answer == "Skane"


def test_an_unknown_that_nothing_leads_to_never_ends_the_rounds():
    lost = {"head": "?someone", "relation": "knows", "tail": "?other"}
    plan = json.dumps({"constraints": [TOWN, lost]})
    _, found = run([says("More?", BORN)] * 2, [plan], max_steps=2)
    assert found.steps[-1].next_query == "More?"
    assert found.parse_errors == {"plan_unbound_variable": 2}


def test_the_aligners_rounds_may_be_ended_too():
    _, found = run([], integrator="aligner")
    assert [step.kept for step in found.steps] == [(BORN,), (PLACE,)]
    assert found.steps[-1].next_query is None


def test_what_it_opens_and_what_it_refuses():
    plain, needs = CiragConfig().needs, CiragConfig(stop="c2rag", plan_schema=True).needs
    assert needs.roles == ("planner", *plain.roles)
    assert needs.rankers == ("triples", "relations") and needs.units == "triple"
    assert needs.abilities == {"planner": ("json_schema",)}
    bare = CiragConfig(stop="c2rag", use_reranker=False).needs
    assert set(bare.rankers) == {"triples", "relations"}
    assert CiragConfig(stop="c2rag", max_steps=0).needs == CiragConfig(max_steps=0).needs
    with pytest.raises(UserError, match="stop='enough' is not one of integrator, c2rag"):
        CiragConfig(stop="enough")
    with pytest.raises(UserError, match="stop=c2rag .* needs units=triple"):
        CiragConfig(stop="c2rag", units="sentence", integrator="aligner")
    with pytest.raises(UserError, match="neff_rule='most' is not one of"):
        CiragConfig(stop="c2rag", neff_rule="most")  # pyright: ignore
