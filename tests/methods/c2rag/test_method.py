"""C2RAG: plans, anchors, the sufficiency check, propagation, recovery and all settings."""

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
from tests.methods.fakes import FakeHandlers, prompt

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
# The second hop's relations rank first, so that the hop has the paper's candidates.
RELATIONS = {triple.relation: 1.0 for triple in HOP2}
RECOVERED = "Marn Keep — used as a prison until — ?year"


def plan(*constraints) -> str:
    return json.dumps({"constraints": constraints or CONSTRAINTS})


def run(scores=CERTAIN, planner=None, reader="1952", question=QUESTION, passages=None, **settings):
    """Returns the handlers and the prediction."""
    fakes = FakeHandlers(
        passages or {QUESTION: PASSAGES, None: PASSAGES[::-1]},
        TRIPLES,
        {"planner": [plan()] if planner is None else list(planner), "reader": [reader]},
        RELATIONS | scores,
    )
    settings = {"num_relations": 3, **settings}
    return fakes, fakes.drive(c2rag(Question("q", question, ()), C2ragConfig(**settings)))


def states(result) -> list[str]:
    return [step.notes["state"] for step in result.steps[1:]]


def names(result) -> dict[str, list[str]]:
    return {v: n for step in result.steps[1:] for v, n in step.notes["names"].items()}


def test_case_study_first_hop_is_unresolved():
    fakes, result = run(CASE, neff_rule="shift_if_nonpositive")
    assert [round(step.notes["n_eff"] or 0, 3) for step in result.steps[1:]] == [1.547, 0]
    assert states(result) == ["unresolved", "unresolved"] and not names(result)
    # Text is retrieved for both constraints.
    assert [r.query for r in fakes.received(Retrieve)] == [
        QUESTION,
        "Silent Road — written in prison — ?prison",
        "?prison — used as a prison until — ?year",
    ]  # fmt: skip


def test_case_study_higher_gamma_resolves_first_hop():
    fakes, result = run(
        CASE | {"end": 1.0}, neff_rule="shift_if_nonpositive", gamma=1.6, max_bound=1
    )
    assert [round(step.notes["n_eff"], 3) for step in result.steps[1:]] == [1.547, 2.996]
    assert states(result) == ["resolved", "unresolved"]
    assert names(result) == {"?prison": ["Marn Keep"]}  # Retrieved text binds no unknown.
    first, second = result.steps[1:]
    assert first.kept == (HOP1[0],) and second.kept == ()
    assert set(second.candidates) == set(HOP2) and second.passages[0] == "end"
    assert fakes.received(Retrieve)[-1].query == RECOVERED
    last = prompt(fakes.received(Generate, "reader")[0])
    assert last.index("Fact 1: Silent Road") < last.index("It sold well")
    assert last.index("It sold well") < last.index("Fact 2: ?prison") < last.index("until 1952")
    assert result.answer == "1952" and result.triples == (HOP1[0],)


def test_case_study_bind_from_text_reads_unknown():
    scores = CASE | {"end": 1.0}
    fills = [plan(), "Marn Keep."]
    fakes, result = run(scores, fills, neff_rule="shift_if_nonpositive", bind_from_text=True)
    assert names(result) == {"?prison": ["Marn Keep"]}
    assert states(result) == ["unresolved", "unresolved"]
    assert "what ?prison is" in prompt(fakes.received(Generate, "planner")[1])
    assert fakes.received(Retrieve)[-1].query == RECOVERED  # Only needed unknowns are requested.
    _, result = run(
        scores, [plan(), "The passages do not say."], neff_rule="shift_if_nonpositive",
        bind_from_text=True,
    )  # fmt: skip
    assert not names(result)


def test_ground_plan_constraints_are_grounded_in_order():
    fakes, result = run()
    assert fakes.kinds() == [
        "Retrieve", "Extract", "planner", *["Rank"] * 2, *["Rank"] * 6, "reader"
    ]  # fmt: skip
    assert states(result) == ["resolved", "resolved"]
    assert names(result)["?prison"] == ["Marn Keep", "Pale Tower", "Marn"]  # All of E_i(v).
    assert names(result)["?year"][0] == "1078"
    relations, triples = fakes.received(Rank)[:2]
    assert (relations.query, relations.ranker) == ("written in prison", "relations")
    assert relations.texts == tuple(t.relation for t in HOP1)
    assert triples.query == f"{QUESTION}\nSilent Road — written in prison — ?prison"
    assert (triples.texts, triples.ranker, triples.n) == (tuple(HOP1), "triples", 3)
    assert result.passages == ("road", "keep") and not result.parse_errors.get("plan_invalid")
    assert result.parse_errors == {"passage_not_extracted": 1, "passage_without_triples": 1}
    graph = result.steps[0].notes["graph"]
    assert graph == {"passages": 4, "entities": 6, "relations": 6, "triples": 6}
    assert result.steps[0].next_query == result.steps[1].query and not result.steps[-1].next_query


def test_kg_scope_corpus_requests_anchors_and_passages():
    fakes, result = run(
        passages={QUESTION: PASSAGES[2:3], None: PASSAGES}, kg_scope="corpus", num_anchors=2
    )
    anchors = fakes.received(Anchor)
    assert [(a.surface, a.n, a.match) for a in anchors[:1]] == [("Silent Road", 2, "coverage")]
    assert not fakes.received(Extract) and "graph" not in result.steps[0].notes
    assert [r.passage_ids for r in fakes.received(Fetch)] == [("road", "keep")]
    assert states(result) == ["resolved", "resolved"] and result.passages == ("road", "keep")
    local, other = run()
    assert [s.kept for s in other.steps] == [s.kept for s in result.steps]
    fakes, _ = run(kg_scope="corpus", anchor_match="ratio")
    assert {a.match for a in fakes.received(Anchor)} == {"ratio"}
    assert not fakes.received(Fetch)  # All source passages are retrieved.


def test_fetch_sources_off_skips_other_passages():
    fakes, result = run(
        passages={QUESTION: PASSAGES[:1], None: PASSAGES}, kg_scope="corpus", fetch_sources=False
    )
    assert not fakes.received(Fetch) and states(result) == ["resolved", "resolved"]
    assert [step.passages for step in result.steps[1:]] == [
        ("road",),
        (),
    ]  # Marn Keep has no source passage.
    assert result.steps[2].kept


def test_bindings_shared_unknown_takes_intersection():
    both = [
        {"head": "Silent Road", "relation": "written in", "tail": "?place"},
        {"head": "Marn Keep", "relation": "located in", "tail": "?place"},
    ]
    scores = {triple_key(HOP1[2]): 1.0, triple_key(HOP2[2]): 1.0}
    _, result = run(scores, [plan(*both)])
    assert states(result) == ["resolved", "resolved"] and names(result) == {"?place": ["Marn"]}
    assert [step.kept for step in result.steps[1:]] == [(HOP1[2],), (HOP2[2],)]
    _, union = run(scores, [plan(*both)], intersect=False)
    assert len(names(union)["?place"]) == 5
    assert len(union.steps[1].kept) == 3
    _, loose = run(scores, [plan(*both)], consistent_only=False)
    assert names(loose) == {"?place": ["Marn"]}
    assert [len(step.kept) for step in loose.steps[1:]] == [3, 3]


def test_bindings_disjoint_constraints_take_union():
    both = [
        {"head": "Silent Road", "relation": "written in", "tail": "?place"},
        {"head": "Marn Keep", "relation": "built in", "tail": "?place"},
    ]
    _, result = run({}, [plan(*both)], num_structural=1)
    assert names(result) == {"?place": ["Marn Keep", "1078"]}


def test_bindings_constraint_without_a_name_does_not_restrict_others():
    """The third constraint has no candidate, so the others' intersection remains (code)."""
    asks = [
        {"head": "Silent Road", "relation": "written in", "tail": "?place"},
        {"head": "Marn Keep", "relation": "located in", "tail": "?place"},
        {"head": "Nowhere", "relation": "near", "tail": "?place"},
    ]
    scores = {triple_key(HOP1[2]): 1.0, triple_key(HOP2[2]): 1.0}
    code = {"neff_unit": "variable", "binding_end": "other_end", "gamma": 9.0}
    _, result = run(scores, [plan(*asks)], num_anchors=1, **code)
    assert names(result) == {"?place": ["Marn"]}


def test_propagation_fixpoint_reaches_the_end_of_the_chain():
    chain = [
        {"head": "Silent Road", "relation": "written in", "tail": "?a"},
        {"head": "?a", "relation": "located in", "tail": "?b"},
        {"head": "?b", "relation": "near", "tail": "?c"},
    ]
    settings = {"num_structural": 1, "num_anchors": 1}
    scores = {triple_key(HOP1[0]): 2.0, triple_key(HOP2[2]): 2.0}
    _, result = run(scores, [plan(*chain)], **settings)
    assert states(result) == ["resolved"] * 3
    _, once = run(scores, [plan(*chain)], propagation="single_pass", **settings)
    assert states(once) == ["resolved", "resolved", "unresolved"]


def test_binding_end_selects_slot_or_other_end():
    asks = [{"head": "?work", "relation": "written at", "tail": "Pale Tower"}]
    question = "What was written at Pale Tower?"
    _, slot = run({}, [plan(*asks)], question=question, num_anchors=1)
    assert names(slot) == {"?work": ["Silent Road"]}
    reverse = [{"head": "Pale Tower", "relation": "place of writing of", "tail": "?work"}]
    _, slot = run({}, [plan(*reverse)], question=question, num_anchors=1)
    assert names(slot) == {"?work": ["Pale Tower"]}  # Eq. 13.
    _, other = run({}, [plan(*reverse)], question=question, num_anchors=1, binding_end="other_end")
    assert names(other) == {"?work": ["Silent Road"]}
    # A triple between two anchors has no other end.
    asks = [{"head": "Marn Keep", "relation": "located in", "tail": "?place"}]
    settings = {"question": "Where is Marn Keep?", "num_structural": 1, "num_anchors": 2}
    score = {triple_key(HOP2[2]): 1.0}
    _, between = run(score, [plan(*asks)], binding_end="other_end", **settings)
    assert between.steps[1].notes["anchors"] == ["Marn Keep", "Marn"] and not names(between)
    assert names(run(score, [plan(*asks)], **settings)[1]) == {"?place": ["Marn"]}


def test_ground_constants_selects_graph_or_text():
    asks = [{"head": "Silent Road", "relation": "written in", "tail": "Marn Keep"}, *CONSTRAINTS]
    _, result = run(planner=[plan(*asks)])
    assert states(result)[0] == "unresolved" and result.parse_errors["plan_no_variable"] == 1
    _, result = run(planner=[plan(*asks)], ground_constants=True)
    assert states(result)[0] == "resolved" and result.steps[1].kept == (result.steps[1].candidates)


def test_unmatched_names_and_empty_evidence_are_recovered():
    asks = [{"head": "the prison Quell", "relation": "was", "tail": "?x"}]
    fakes, result = run(planner=[plan(*asks)])
    assert states(result) == ["unresolved"] and result.steps[1].notes["n_eff"] is None
    asks = [{"head": "Silent Road", "relation": "written in", "tail": "?place"}]
    one = {triple_key(HOP1[2]): 9.0}
    settings = {"num_structural": 1, "resolved_evidence": "sentence"}
    _, result = run(one, [plan(*asks)], **settings)
    assert result.steps[1].passages == ("road",) and result.sentences == (("road", 0),)
    apart = {"head": "Marn Keep", "relation": "served as", "tail": "?use"}
    score = {triple_key(HOP2[1]): 9.0}
    settings["question"] = "What did Marn Keep serve as?"
    _, result = run(score, [plan(apart)], **settings)
    assert (states(result), result.steps[1].passages) == (["resolved"], ())
    fakes, result = run(score, [plan(apart)], recover_if_empty=True, **settings)
    assert states(result) == ["resolved"] and len(result.steps[1].passages) == 3
    settings["resolved_evidence"] = "naming_passage"
    assert run(score, [plan(apart)], **settings)[1].steps[1].passages == ()
    del settings["question"]
    _, result = run(one, [plan(*asks)], **settings)
    assert result.attempts[0].evidence == (f"{PASSAGES[0].title}\n{PASSAGES[0].text}",)


def test_neff_unit_variable_checks_entities():
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


def test_make_plan_unusable_plan_is_requested_once_more():
    fakes, result = run(planner=["No idea.", plan()])
    assert fakes.kinds()[:4] == ["Retrieve", "Extract", "planner", "planner"]
    again = fakes.received(Generate, "planner")[1].messages
    assert again[-2].text == "No idea." and "cannot be used" in again[-1].text
    assert states(result) == ["resolved", "resolved"]
    assert (result.parse_errors["plan_invalid"], result.parse_errors["plan_no_json"]) == (1, 1)
    fakes, result = run(planner=["No idea.", "None."])
    assert [step.query for step in result.steps] == [QUESTION, QUESTION]
    assert states(result) == ["unresolved"] and result.passages == ("end", "keep", "road")
    assert fakes.received(Rank)[0].query == QUESTION
    fakes, result = run(planner=["No idea."], plan_retries=0, plan_failure="empty")
    assert fakes.kinds() == ["Retrieve", "Extract", "planner", "reader"]
    assert not result.passages and result.answer == "1952"


def test_make_plan_schema_is_optional():
    fakes, _ = run(plan_schema=True, num_variants=1, max_constraints=2)
    schema = fakes.received(Generate, "planner")[0].json_schema
    rows = schema["properties"]["constraints"]
    assert rows["maxItems"] == 2 and "Silent Road" in json.dumps(rows)
    assert C2ragConfig(plan_schema=True).needs.abilities == {"planner": ("json_schema",)}
    assert not C2ragConfig().needs.abilities


def test_c2rag_malformed_plans_never_raise():
    rng, text = random.Random(0), plan({**CONSTRAINTS[0], "variants": ["a", "b"]}, CONSTRAINTS[1])
    for _ in range(300):
        letters = list(text)
        for _ in range(rng.randrange(1, 9)):
            place = rng.randrange(len(letters))
            letters[place : place + rng.randrange(4)] = rng.choice('"{}[],:?x\n\\')
        _, result = run(planner=["".join(letters)], plan_retries=0)
        assert result.answer == "1952"


def _queries(fakes, ranker):
    return [(r.query, r.texts) for r in fakes.received(Rank) if r.ranker == ranker]


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
def test_settings_change_what_the_reranker_reads(field, value, ranker, expected):
    planned = [plan({**CONSTRAINTS[0], "variants": ["a", "b"]}, CONSTRAINTS[1])]
    fakes, _ = run(planner=planned, **{field: value})
    assert _queries(fakes, ranker)[0][0] == f"{QUESTION}\n{expected}"
    usual, _ = run(planner=planned)
    if field == "use_relations":
        assert not _queries(fakes, "relations")
        assert all(not text.relation for text in _queries(fakes, "triples")[0][1])
    else:  # Other requests do not change.
        assert _queries(fakes, "relations") == _queries(usual, "relations")
        assert _queries(fakes, "triples")[0][1] == _queries(usual, "triples")[0][1]


def test_variants_align_relations():
    planned = [plan({**CONSTRAINTS[0], "variants": ["jailed in", "a", "b"]}, CONSTRAINTS[1])]
    fakes, _ = run(planner=planned)
    assert [q for q, _ in _queries(fakes, "relations")][:3] == [
        "written in prison",
        "jailed in",
        "a",
    ]
    scores = CERTAIN | {"written in": 1.0}
    fakes, _ = run(scores, num_relations=1)
    assert _queries(fakes, "triples")[0][1] == (HOP1[2],)


def test_no_reranker_keeps_dense_scores():
    fakes, result = run(
        {"written in": 0.9, "written while held at": 0.1}, rerank_structural=False,
        rerank_texts=False, num_structural=3,
    )  # fmt: skip
    assert {r.ranker for r in fakes.received(Rank)} == {"relations"}
    assert result.steps[1].scores == (0.9, 0.1, 0.0)
    assert C2ragConfig(rerank_structural=False, rerank_texts=False).needs.rankers == ("relations",)


def test_no_constraints_ranks_triples_by_similarity():
    fakes, result = run({triple_key(HOP1[0]): 5.0}, use_constraints=False)
    assert [(r.query, r.ranker, len(r.texts), r.n) for r in fakes.received(Rank)][0] == (
        "Silent Road — written in prison — ?prison", "relations", 6, 3
    )  # fmt: skip
    assert result.steps[1].notes["anchors"] == [] and states(result)[0] == "resolved"
    fakes, result = run(CASE, plain_hops=1)  # Only the first constraint, unchecked.
    assert [len(t) for _, t in _queries(fakes, "relations")][0] == 6
    assert len(_queries(fakes, "triples")) == 3 and states(result)[0] == "resolved"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "unresolved"),
        ({"sufficiency": "off"}, "resolved"),
        ({"sufficiency": "score", "min_score": 0.5}, "resolved"),
        ({"sufficiency": "score", "min_score": 0.8}, "unresolved"),
        ({"gamma": 2.9}, "resolved"),
        ({"gamma": 2.9, "min_score": 0.8}, "unresolved"),
        ({"neff_rule": "softmax", "gamma": 2.9}, "resolved"),
    ],
)
def test_sufficiency_setting_selects_the_check(settings, expected):
    _, result = run(CASE, **{"neff_rule": "shift_if_nonpositive", **settings})
    assert states(result)[0] == expected


def test_recovery_unit_selects_passages_or_sentences():
    fakes, result = run({"Marn Keep: Marn Keep dates from 1078.": 2.0}, ["", ""],
        recovery_unit="sentence", num_texts=1, num_dense=3, recovery_question=False)  # fmt: skip
    assert fakes.received(Retrieve)[1].k == 3
    assert result.sentences == (("keep", 0),) and result.passages == ("keep",)
    last = prompt(fakes.received(Generate, "reader")[0])
    assert "dates from 1078" in last and "A king lived" not in last
    fakes, result = run(CASE, neff_rule="shift_if_nonpositive", max_texts=1)
    last = prompt(fakes.received(Generate, "reader")[0])
    assert last.count("\n[1] ") == 2 and "\n[2] " not in last
    assert len(result.steps[1].passages) == 3  # All passages are included in recall.
    fakes, _ = run(CASE, recovery_question=False, neff_rule="shift_if_nonpositive")
    assert _queries(fakes, "passages")[0][0] == "Silent Road — written in prison — ?prison"


def test_recall_order_selects_score_or_plan():
    scores = CASE | {"end": 5.0, "tower": 4.0, "keep": 3.0}
    asks = [CONSTRAINTS[0], {"head": "Quell prison", "relation": "r", "tail": "?y"}]
    settings = {"sufficiency": "off", "planner": [plan(*asks)]}
    _, by_score = run(scores, **settings)
    assert by_score.passages == ("end", "tower", "keep", "road")
    _, by_plan = run(scores, recall_order="plan", **settings)
    assert by_plan.passages == ("road", "end", "tower", "keep")


def test_recall_order_ranks_scores_of_each_ranker_separately():
    """The first hop has cosines, the texts of the second logits: their best passages come first."""
    scores = CASE | {"end": 5.0, "tower": 4.0, "keep": 3.0}
    asks = [CONSTRAINTS[0], {"head": "Quell prison", "relation": "r", "tail": "?y"}]
    settings = {"sufficiency": "off", "planner": [plan(*asks)], "num_structural": 1}
    _, coarse = run(scores, plain_hops=1, **settings)
    assert coarse.steps[1].scores == (0.79,)
    assert coarse.passages == ("road", "end", "tower", "keep")
    _, result = run(scores, **settings)  # all scores are logits
    assert result.passages == ("end", "tower", "keep", "road")


def test_reader_format_selects_a_trained_format():
    fakes, result = run(reader="Marn Keep; until; 1952\nAnswer: 1952", reader_format="chain")
    last = prompt(fakes.received(Generate, "reader")[0])
    assert "Fact 1" not in last and last.count("Marn Keep dates") == 1
    assert result.answer == "1952" and len(result.attempts[0].evidence) == 2
    _, result = run(reader=" ")
    assert (result.answer, result.parse_errors["answer_empty"]) == ("", 1)


def test_c2rag_config_invalid_settings_are_refused():
    for settings, message in (
        ({"kg_scope": "world"}, "kg_scope='world' is not one of per_question, corpus"),
        ({"num_texts": 0}, "num_texts=0 must be at least 1"),
        ({"max_bound": -1}, "max_bound=-1 must not be negative"),
        ({"num_examples": 9}, "num_examples=9 must lie between 0 and 3"),
        ({"kg_scope": "corpus", "plain_hops": 1}, "needs kg_scope=per_question"),
        ({"sufficiency": "score"}, "sufficiency=score needs min_score"),
        (
            {"use_relations": False, "rerank_structural": False},
            "use_relations=false needs rerank_structural=true",
        ),
        ({"reader_format": "poem"}, "reader_format='poem' is not one of blocks, thought"),
    ):
        with pytest.raises(UserError, match=message):
            C2ragConfig(**settings)


def test_c2rag_config_useless_check_warns(capsys):
    for settings, message in (
        ({}, ""),
        ({"num_structural": 2}, "resolve nearly every constraint"),
        ({"gamma": 2.0}, "resolve nearly every constraint"),
        ({"gamma": 2.0, "neff_rule": "softmax"}, ""),
        ({"gamma": 2.0, "sufficiency": "off"}, ""),
        ({"gamma": 0.5}, "gamma=0.5 resolves no constraint"),
        ({"num_structural": 9, "num_relations": 6}, "num_structural=9 has the effect of 6"),
        ({"num_structural": 9, "num_relations": 6, "use_relations": False}, ""),
    ):
        C2ragConfig(**settings)
        stderr = capsys.readouterr().err
        assert (message in stderr) if message else not stderr


def test_kg_scope_corpus_needs_entities():
    assert C2ragConfig().needs.entities is None and C2ragConfig().needs.triples
    assert C2ragConfig(kg_scope="corpus").needs.entities == "unicode"
    fields = {field.name for field in dataclasses.fields(C2ragConfig)}
    documented = inspect.getdoc(C2ragConfig) or ""
    assert all(f"\n  {field}: " in documented for field in fields)


def test_presets_match_paper_and_code():
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
