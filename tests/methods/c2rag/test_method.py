"""C2RAG by hand: plans, anchors, the check, propagation, recovery, and each switch."""

import dataclasses
import inspect
import json
import random

import pytest

from cirag_jax.commands import task
from cirag_jax.errors import UserError
from cirag_jax.methods.c2rag.method import c2rag
from cirag_jax.methods.c2rag.settings import C2ragConfig
from cirag_jax.runtime.requests import Anchor, Extract, Fetch, Generate, Rank, Retrieve
from cirag_jax.triples.normalization import triple_key
from cirag_jax.types import Passage, Question, Triple
from configs.methods import c2rag as c2rag_config
from tests.methods.by_hand import Hand, prompt

QUESTION = "Until which year was the prison where Silent Road was written a prison?"
PASSAGES = (
    Passage("road", "Silent Road", "Silent Road was written in Marn Keep. It sold well."),
    Passage("keep", "Marn Keep", "Marn Keep dates from 1078. A king lived in Marn Keep."),
    Passage("end", "Prisons of Marn", "Marn Keep held prisoners until 1952."),
    Passage("tower", "Pale Tower", "The Pale Tower stands in Marn."),
)
TRIPLES = {
    "road": [
        Triple("Silent Road", "written during imprisonment in", "Marn Keep", "road", 0),
        Triple("Silent Road", "written while held at", "Pale Tower", "road", 0),
        Triple("Silent Road", "written in", "Marn", "road", 0),
    ],
    "keep": [
        Triple("Marn Keep", "built in", "1078", "keep", 0),
        Triple("Marn Keep", "served as", "residence", "keep", 1),
        Triple("Marn Keep", "located in", "Marn", "keep", 0),
    ],
    "end": [],
    "tower": None,
}
HOP1, HOP2 = TRIPLES["road"], TRIPLES["keep"]
CONSTRAINTS = (
    {"head": "Silent Road", "relation": "written in prison", "tail": "?prison"},
    {"head": "?prison", "relation": "used as a prison until", "tail": "?year"},
)
CASE = {triple_key(t): z for t, z in zip(HOP1, (0.79, 0.12, 0.09), strict=True)} | {
    triple_key(t): z for t, z in zip(HOP2, (0.35, 0.33, 0.32), strict=True)
}
CERTAIN = {triple_key(HOP1[0]): 5.0, triple_key(HOP2[0]): 5.0, "end": 3.0, "keep": 1.0}
# The second hop's relations are the nearest, so that its pool is that of the paper.
RELATIONS = {triple.relation: 1.0 for triple in HOP2}
RECOVERED = "Marn Keep — used as a prison until — ?year"


def plan(*constraints) -> str:
    return json.dumps({"constraints": constraints or CONSTRAINTS})


def run(scores=CERTAIN, planner=None, reader="1952", asked=QUESTION, found=None, **settings):
    """What was asked, and the prediction, of one question."""
    hand = Hand(
        found or {QUESTION: PASSAGES, None: PASSAGES[::-1]},
        TRIPLES,
        {"planner": [plan()] if planner is None else list(planner), "reader": [reader]},
        RELATIONS | scores,
    )
    settings = {"num_relations": 3, **settings}
    return hand, hand.drive(c2rag(Question("q", asked, ()), C2ragConfig(**settings)))


def states(found) -> list[str]:
    return [step.notes["state"] for step in found.steps[1:]]


def names(found) -> dict[str, list[str]]:
    return {v: n for step in found.steps[1:] for v, n in step.notes["names"].items()}


# ------------------------------------------------------------------------ the paper's case (Fig. 5)


def test_the_first_hop_of_the_case_study_is_not_resolved_at_its_gamma():
    hand, found = run(CASE, neff_rule="shift_if_nonpositive")
    assert [round(step.notes["n_eff"] or 0, 3) for step in found.steps[1:]] == [1.547, 0]
    assert states(found) == ["unresolved", "unresolved"] and not names(found)
    # Neither is looked up in the graph any further: both are looked up in text.
    assert [r.query for r in hand.asked(Retrieve)] == [
        QUESTION,
        "Silent Road — written in prison — ?prison",
        "?prison — used as a prison until — ?year",
    ]  # fmt: skip


def test_the_case_study_above_its_gamma():
    hand, found = run(CASE | {"end": 1.0}, neff_rule="shift_if_nonpositive", gamma=1.6, max_bound=1)
    assert [round(step.notes["n_eff"], 3) for step in found.steps[1:]] == [1.547, 2.996]
    assert states(found) == ["resolved", "unresolved"]
    assert names(found) == {"?prison": ["Marn Keep"]}  # ?year is not bound from text
    first, second = found.steps[1:]
    assert first.kept == (HOP1[0],) and second.kept == ()
    assert set(second.candidates) == set(HOP2) and second.passages[0] == "end"
    assert hand.asked(Retrieve)[-1].query == RECOVERED
    read = prompt(hand.asked(Generate, "reader")[0])
    assert read.index("Fact 1: Silent Road") < read.index("It sold well")
    assert read.index("It sold well") < read.index("Fact 2: ?prison") < read.index("until 1952")
    assert found.answer == "1952" and found.triples == (HOP1[0],)


def test_the_unknown_of_the_case_study_is_read_from_text_on_request():
    scores = CASE | {"end": 1.0}
    fills = [plan(), "Marn Keep."]
    hand, found = run(scores, fills, neff_rule="shift_if_nonpositive", bind_from_text=True)
    assert names(found) == {"?prison": ["Marn Keep"]}
    assert states(found) == ["unresolved", "unresolved"]
    assert "what ?prison is" in prompt(hand.asked(Generate, "planner")[1])
    assert hand.asked(Retrieve)[-1].query == RECOVERED  # what others wait for is asked, no more
    _, found = run(
        scores, [plan(), "The passages do not say."], neff_rule="shift_if_nonpositive",
        bind_from_text=True,
    )  # fmt: skip
    assert not names(found)


# ------------------------------------------------------------------------------------ the algorithm


def test_constraints_are_grounded_one_after_the_other():
    hand, found = run()
    assert hand.kinds() == [
        "Retrieve", "Extract", "planner", *["Rank"] * 2, *["Rank"] * 6, "reader"
    ]  # fmt: skip
    assert states(found) == ["resolved", "resolved"]
    assert names(found)["?prison"] == ["Marn Keep", "Pale Tower", "Marn"]  # all of E_i(v)
    assert names(found)["?year"][0] == "1078"
    relations, triples = hand.asked(Rank)[:2]
    assert (relations.query, relations.ranker) == ("written in prison", "relations")
    assert relations.texts == tuple(t.relation for t in HOP1)
    assert triples.query == f"{QUESTION}\nSilent Road — written in prison — ?prison"
    assert (triples.texts, triples.ranker, triples.n) == (tuple(HOP1), "triples", 3)
    assert found.passages == ("road", "keep") and not found.parse_errors.get("plan_invalid")
    assert found.parse_errors == {"passage_not_extracted": 1, "passage_without_triples": 1}
    graph = found.steps[0].notes["graph"]
    assert graph == {"passages": 4, "entities": 6, "relations": 6, "triples": 6}
    assert found.steps[0].next_query == found.steps[1].query and not found.steps[-1].next_query


def test_the_corpus_graph_is_asked_for_and_its_passages_fetched():
    hand, found = run(
        found={QUESTION: PASSAGES[2:3], None: PASSAGES}, kg_scope="corpus", num_anchors=2
    )
    anchors = hand.asked(Anchor)
    assert [(a.surface, a.n, a.match) for a in anchors[:1]] == [("Silent Road", 2, "coverage")]
    assert not hand.asked(Extract) and "graph" not in found.steps[0].notes
    assert [r.passage_ids for r in hand.asked(Fetch)] == [("road", "keep")]
    assert states(found) == ["resolved", "resolved"] and found.passages == ("road", "keep")
    local, other = run()
    assert [s.kept for s in other.steps] == [s.kept for s in found.steps]
    hand, _ = run(kg_scope="corpus", anchor_match="ratio")
    assert {a.match for a in hand.asked(Anchor)} == {"ratio"}
    assert not hand.asked(Fetch)  # every source is at hand


def test_sources_outside_of_the_questions_own_passages_may_be_left_alone():
    hand, found = run(
        found={QUESTION: PASSAGES[:1], None: PASSAGES}, kg_scope="corpus", fetch_sources=False
    )
    assert not hand.asked(Fetch) and states(found) == ["resolved", "resolved"]
    assert [step.passages for step in found.steps[1:]] == [("road",), ()]  # that of Marn Keep: none
    assert found.steps[2].kept


def test_an_unknown_in_two_constraints_has_the_names_both_agree_on():
    both = [
        {"head": "Silent Road", "relation": "written in", "tail": "?place"},
        {"head": "Marn Keep", "relation": "located in", "tail": "?place"},
    ]
    scores = {triple_key(HOP1[2]): 1.0, triple_key(HOP2[2]): 1.0}
    _, found = run(scores, [plan(*both)])
    assert states(found) == ["resolved", "resolved"] and names(found) == {"?place": ["Marn"]}
    assert [step.kept for step in found.steps[1:]] == [(HOP1[2],), (HOP2[2],)]
    _, union = run(scores, [plan(*both)], intersect=False)
    assert len(names(union)["?place"]) == 5
    assert len(union.steps[1].kept) == 3
    _, loose = run(scores, [plan(*both)], consistent_only=False)
    assert names(loose) == {"?place": ["Marn"]}
    assert [len(step.kept) for step in loose.steps[1:]] == [3, 3]


def test_constraints_that_disagree_are_joined():
    both = [
        {"head": "Silent Road", "relation": "written in", "tail": "?place"},
        {"head": "Marn Keep", "relation": "built in", "tail": "?place"},
    ]
    _, found = run({}, [plan(*both)], num_structural=1)
    assert names(found) == {"?place": ["Marn Keep", "1078"]}


def test_a_chain_is_followed_to_its_end_or_by_one_pass():
    chain = [
        {"head": "Silent Road", "relation": "written in", "tail": "?a"},
        {"head": "?a", "relation": "located in", "tail": "?b"},
        {"head": "?b", "relation": "near", "tail": "?c"},
    ]
    settings = {"num_structural": 1, "num_anchors": 1}
    scores = {triple_key(HOP1[0]): 2.0, triple_key(HOP2[2]): 2.0}
    _, found = run(scores, [plan(*chain)], **settings)
    assert states(found) == ["resolved"] * 3
    _, once = run(scores, [plan(*chain)], propagation="single_pass", **settings)
    assert states(once) == ["resolved", "resolved", "unresolved"]


def test_a_reversed_triple_binds_its_slot_or_its_other_end():
    asks = [{"head": "?work", "relation": "written at", "tail": "Pale Tower"}]
    asked = "What was written at Pale Tower?"
    _, slot = run({}, [plan(*asks)], asked=asked, num_anchors=1)
    assert names(slot) == {"?work": ["Silent Road"]}
    reverse = [{"head": "Pale Tower", "relation": "place of writing of", "tail": "?work"}]
    _, slot = run({}, [plan(*reverse)], asked=asked, num_anchors=1)
    assert names(slot) == {"?work": ["Pale Tower"]}  # Eq. 13 as it stands
    _, other = run({}, [plan(*reverse)], asked=asked, num_anchors=1, binding_end="other_end")
    assert names(other) == {"?work": ["Silent Road"]}
    # A triple between two anchors has no other end.
    asks = [{"head": "Marn Keep", "relation": "located in", "tail": "?place"}]
    settings = {"asked": "Where is Marn Keep?", "num_structural": 1, "num_anchors": 2}
    score = {triple_key(HOP2[2]): 1.0}
    _, between = run(score, [plan(*asks)], binding_end="other_end", **settings)
    assert between.steps[1].notes["anchors"] == ["Marn Keep", "Marn"] and not names(between)
    assert names(run(score, [plan(*asks)], **settings)[1]) == {"?place": ["Marn"]}


def test_a_constraint_without_unknowns_is_looked_up_in_text_or_in_the_graph():
    asks = [{"head": "Silent Road", "relation": "written in", "tail": "Marn Keep"}, *CONSTRAINTS]
    _, found = run(planner=[plan(*asks)])
    assert states(found)[0] == "unresolved" and found.parse_errors["plan_no_variable"] == 1
    _, found = run(planner=[plan(*asks)], ground_constants=True)
    assert states(found)[0] == "resolved" and found.steps[1].kept == (found.steps[1].candidates)


def test_names_that_nobody_has_and_empty_evidence():
    asks = [{"head": "the prison Quell", "relation": "was", "tail": "?x"}]
    hand, found = run(planner=[plan(*asks)])
    assert states(found) == ["unresolved"] and found.steps[1].notes["n_eff"] is None
    asks = [{"head": "Silent Road", "relation": "written in", "tail": "?place"}]
    one = {triple_key(HOP1[2]): 9.0}
    settings = {"num_structural": 1, "resolved_evidence": "sentence"}
    _, found = run(one, [plan(*asks)], **settings)
    assert found.steps[1].passages == ("road",) and found.sentences == (("road", 0),)
    apart = {"head": "Marn Keep", "relation": "served as", "tail": "?use"}
    score = {triple_key(HOP2[1]): 9.0}
    settings["asked"] = "What did Marn Keep serve as?"
    _, found = run(score, [plan(apart)], **settings)
    assert (states(found), found.steps[1].passages) == (["resolved"], ())
    hand, found = run(score, [plan(apart)], recover_if_empty=True, **settings)
    assert states(found) == ["resolved"] and len(found.steps[1].passages) == 3
    settings["resolved_evidence"] = "naming_passage"
    assert run(score, [plan(apart)], **settings)[1].steps[1].passages == ()
    del settings["asked"]
    _, found = run(one, [plan(*asks)], **settings)
    assert found.attempts[0].evidence == (f"{PASSAGES[0].title}\n{PASSAGES[0].text}",)


def test_the_check_of_the_released_code_is_of_entities():
    settings = {
        "neff_unit": "variable", "neff_rule": "shift_if_nonpositive", "floor_at_zero": True,
        "binding_end": "other_end", "max_bound": 3, "gamma": 1.0,
        "num_anchors": 1,
    }  # fmt: skip
    _, two = run({triple_key(HOP1[0]): 4.0, triple_key(HOP1[1]): 1.0}, **settings)
    assert states(two) == ["unresolved", "unresolved"]
    asks = [
        {"head": "Silent Road", "relation": "written in", "tail": "?place"},
        {"head": "Marn Keep", "relation": "located in", "tail": "?place"},
    ]
    _, one = run({triple_key(HOP1[2]): -4.0}, [plan(*asks)], **settings)
    assert names(one) == {"?place": ["Marn"]} and one.steps[1].notes["n_eff"] == 1.0


# ---------------------------------------------------------------------------------------- the plan


def test_a_plan_that_cannot_be_used_is_asked_for_once_more_then_given_up():
    hand, found = run(planner=["No idea.", plan()])
    assert hand.kinds()[:4] == ["Retrieve", "Extract", "planner", "planner"]
    again = hand.asked(Generate, "planner")[1].messages
    assert again[-2].text == "No idea." and "cannot be used" in again[-1].text
    assert states(found) == ["resolved", "resolved"]
    assert (found.parse_errors["plan_invalid"], found.parse_errors["plan_no_json"]) == (1, 1)
    hand, found = run(planner=["No idea.", "None."])
    assert [step.query for step in found.steps] == [QUESTION, QUESTION]
    assert states(found) == ["unresolved"] and found.passages == ("end", "keep", "road")
    assert hand.asked(Rank)[0].query == QUESTION
    hand, found = run(planner=["No idea."], plan_retries=0, plan_failure="empty")
    assert hand.kinds() == ["Retrieve", "Extract", "planner", "reader"]
    assert not found.passages and found.answer == "1952"


def test_the_plan_is_forced_into_its_schema_on_request():
    hand, _ = run(plan_schema=True, num_variants=1, max_constraints=2)
    schema = hand.asked(Generate, "planner")[0].json_schema
    rows = schema["properties"]["constraints"]
    assert rows["maxItems"] == 2 and "Silent Road" in json.dumps(rows)
    assert C2ragConfig(plan_schema=True).needs.abilities == {"planner": ("json_schema",)}
    assert not C2ragConfig().needs.abilities


def test_malformed_plans_never_raise():
    rng, text = random.Random(0), plan({**CONSTRAINTS[0], "variants": ["a", "b"]}, CONSTRAINTS[1])
    for _ in range(300):
        letters = list(text)
        for _ in range(rng.randrange(1, 9)):
            place = rng.randrange(len(letters))
            letters[place : place + rng.randrange(4)] = rng.choice('"{}[],:?x\n\\')
        _, found = run(planner=["".join(letters)], plan_retries=0)
        assert found.answer == "1952"


# ---------------------------------------------------------------------------------------- switches


def _queries(hand, ranker):
    return [(r.query, r.texts) for r in hand.asked(Rank) if r.ranker == ranker]


@pytest.mark.parametrize(
    ("field", "value", "ranker", "expected"),
    [
        ("use_placeholders", False, "triples", "Silent Road — written in prison"),
        ("use_relations", False, "triples", "Silent Road — ?prison"),
        ("typed_variables", False, "triples", "Silent Road — written in prison — ?v1"),
        (
            "lin_relation",
            "variants",
            "triples",
            "Silent Road — written in prison (a | b) — ?prison",
        ),
    ],
)
def test_a_switch_changes_what_the_reranker_reads(field, value, ranker, expected):
    planned = [plan({**CONSTRAINTS[0], "variants": ["a", "b"]}, CONSTRAINTS[1])]
    hand, _ = run(planner=planned, **{field: value})
    assert _queries(hand, ranker)[0][0] == f"{QUESTION}\n{expected}"
    usual, _ = run(planner=planned)
    if field == "use_relations":
        assert not _queries(hand, "relations")
        assert all(not text.relation for text in _queries(hand, "triples")[0][1])
    else:  # everything else is asked as ever
        assert _queries(hand, "relations") == _queries(usual, "relations")
        assert _queries(hand, "triples")[0][1] == _queries(usual, "triples")[0][1]


def test_variants_align_relations():
    planned = [plan({**CONSTRAINTS[0], "variants": ["jailed in", "a", "b"]}, CONSTRAINTS[1])]
    hand, _ = run(planner=planned)
    assert [q for q, _ in _queries(hand, "relations")][:3] == [
        "written in prison",
        "jailed in",
        "a",
    ]
    scores = CERTAIN | {"written in": 1.0}
    hand, _ = run(scores, num_relations=1)
    assert _queries(hand, "triples")[0][1] == (HOP1[2],)


def test_without_a_reranker_the_dense_scores_stand():
    hand, found = run(
        {"written in": 0.9, "written while held at": 0.1}, rerank_structural=False,
        rerank_texts=False, num_structural=3,
    )  # fmt: skip
    assert {r.ranker for r in hand.asked(Rank)} == {"relations"}
    assert found.steps[1].scores == (0.9, 0.1, 0.0)
    assert C2ragConfig(rerank_structural=False, rerank_texts=False).needs.rankers == ("relations",)


def test_without_constraints_triples_are_ranked_by_similarity_alone():
    hand, found = run({triple_key(HOP1[0]): 5.0}, use_constraints=False)
    assert [(r.query, r.ranker, len(r.texts), r.n) for r in hand.asked(Rank)][0] == (
        "Silent Road — written in prison — ?prison", "relations", 6, 3
    )  # fmt: skip
    assert found.steps[1].notes["anchors"] == [] and states(found)[0] == "resolved"
    hand, found = run(CASE, plain_hops=1)  # the first constraint alone, and unchecked
    assert [len(t) for _, t in _queries(hand, "relations")][0] == 6
    assert len(_queries(hand, "triples")) == 3 and states(found)[0] == "resolved"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "unresolved"),
        ({"sufficiency": "none"}, "resolved"),
        ({"sufficiency": "score", "min_score": 0.5}, "resolved"),
        ({"sufficiency": "score", "min_score": 0.8}, "unresolved"),
        ({"gamma": 2.9}, "resolved"),
        ({"gamma": 2.9, "min_score": 0.8}, "unresolved"),
        ({"neff_rule": "softmax", "gamma": 2.9}, "resolved"),
    ],
)
def test_what_suffices(settings, expected):
    _, found = run(CASE, **{"neff_rule": "shift_if_nonpositive", **settings})
    assert states(found)[0] == expected


def test_texts_are_passages_or_sentences():
    hand, found = run({"Marn Keep: Marn Keep dates from 1078.": 2.0}, ["", ""],
        recovery_unit="sentence", num_texts=1, num_dense=3, recovery_question=False)  # fmt: skip
    assert hand.asked(Retrieve)[1].k == 3
    assert found.sentences == (("keep", 0),) and found.passages == ("keep",)
    read = prompt(hand.asked(Generate, "reader")[0])
    assert "dates from 1078" in read and "A king lived" not in read
    hand, found = run(CASE, neff_rule="shift_if_nonpositive", max_texts=1)
    read = prompt(hand.asked(Generate, "reader")[0])
    assert read.count("\n[1] ") == 2 and "\n[2] " not in read
    assert len(found.steps[1].passages) == 3  # recall looks at all of them
    hand, _ = run(CASE, recovery_question=False, neff_rule="shift_if_nonpositive")
    assert _queries(hand, "passages")[0][0] == "Silent Road — written in prison — ?prison"


def test_passages_are_ranked_by_score_or_by_the_plan():
    scores = CASE | {"end": 5.0, "tower": 4.0, "keep": 3.0}
    asks = [CONSTRAINTS[0], {"head": "Quell prison", "relation": "r", "tail": "?y"}]
    settings = {"sufficiency": "none", "planner": [plan(*asks)]}
    _, by_score = run(scores, **settings)
    assert by_score.passages == ("end", "tower", "keep", "road")
    _, by_plan = run(scores, recall_order="plan", **settings)
    assert by_plan.passages == ("road", "end", "tower", "keep")


def test_readers_read_as_they_were_trained():
    hand, found = run(reader="Marn Keep; until; 1952\nAnswer: 1952", reader_format="chain")
    read = prompt(hand.asked(Generate, "reader")[0])
    assert "Fact 1" not in read and read.count("Marn Keep dates") == 1
    assert found.answer == "1952" and len(found.attempts[0].evidence) == 2
    _, found = run(reader=" ")
    assert (found.answer, found.parse_errors["answer_empty"]) == ("", 1)


def test_settings_that_cannot_be_are_refused():
    for settings, said in (
        ({"kg_scope": "world"}, "kg_scope='world' is not one of per_question, corpus"),
        ({"num_texts": 0}, "num_texts=0 must be at least 1"),
        ({"max_bound": -1}, "max_bound=-1 must not be negative"),
        ({"num_examples": 9}, "num_examples=9 must lie between 0 and 3"),
        ({"kg_scope": "corpus", "plain_hops": 1}, "need kg_scope=per_question"),
        ({"sufficiency": "score"}, "sufficiency=score needs min_score"),
        (
            {"use_relations": False, "rerank_structural": False},
            "use_relations=false needs rerank_structural=true",
        ),
        ({"reader_format": "poem"}, "reader_format='poem' is not one of blocks, thought"),
    ):
        with pytest.raises(UserError, match=said):
            C2ragConfig(**settings)


def test_settings_under_which_the_check_says_nothing_are_told(capsys):
    for settings, said in (
        ({}, ""),
        ({"num_structural": 2}, "resolve nearly every constraint"),
        ({"gamma": 2.0}, "resolve nearly every constraint"),
        ({"gamma": 2.0, "neff_rule": "softmax"}, ""),
        ({"gamma": 2.0, "sufficiency": "none"}, ""),
        ({"gamma": 0.5}, "gamma=0.5 resolves no constraint"),
    ):
        C2ragConfig(**settings)
        told = capsys.readouterr().err
        assert (said in told) if said else not told


def test_the_graph_of_the_corpus_is_a_need():
    assert C2ragConfig().needs.entities is None and C2ragConfig().needs.triples
    assert C2ragConfig(kg_scope="corpus").needs.entities == "unicode"
    fields = {field.name for field in dataclasses.fields(C2ragConfig)}
    documented = inspect.getdoc(C2ragConfig) or ""
    assert all(f"\n  {field}: " in documented for field in fields)


def test_the_presets_are_what_paper_and_code_say():
    paper, code, files = (
        c2rag_config.get_config(name) for name in ("paper", "code", "code_defaults")
    )
    assert C2ragConfig(**task.plain(paper.c2rag)) == C2ragConfig()
    assert {k: v for k, v in code.c2rag.items() if v != paper.c2rag[k]} == {
        "kg_scope": "corpus", "plan_retries": 2, "plan_failure": "empty", "num_anchors": 1,
        "anchor_match": "ratio", "num_relations": 3, "gamma": 1.0, "neff_unit": "variable",
        "neff_rule": "shift_if_nonpositive", "floor_at_zero": True, "binding_end": "other_end",
        "max_bound": 3, "consistent_only": False, "propagation": "single_pass",
        "ground_constants": True, "resolved_evidence": "sentence", "fetch_sources": False,
        "recovery_unit": "sentence", "recovery_question": False, "num_dense": 20, "num_texts": 8,
        "max_texts": 8, "recall_order": "plan",
    }  # fmt: skip
    assert {k: v for k, v in files.c2rag.items() if v != code.c2rag[k]} == {
        "num_anchors": 3, "num_relations": 8, "gamma": 1.5, "num_texts": 3,
    }  # fmt: skip
    for config in (paper, code, files):
        assert config.data.corpus == "per_question"
        assert config.rankers.relations.model == config.encoder.model
        assert config.rankers.relations.model == "sentence-transformers/all-MiniLM-L6-v2"
        for name in ("triples", "passages"):
            ranker = config.rankers[name]
            assert (ranker.kind, ranker.model) == ("cross_encoder", "BAAI/bge-reranker-v2-m3")
