"""C2RAG's prompts and parsers."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirag_jax.llm.grammar import check_schema
from cirag_jax.methods.c2rag import prompts
from cirag_jax.methods.c2rag.prompts import Constraint, linearise, parse_fill, textual, unreachable

QUESTION = "Who founded the city where Ada Moen was born?"
LIMITS = {"num_variants": 3, "max_constraints": 4}
BORN = Constraint("Ada Moen", "born in", "?city", ("birthplace", "native of"))
FOUNDED = Constraint("?city", "founded by", "?person")
TEXT = prompts.render_plan([BORN, FOUNDED], 3)
PARSE_ERRORS = {
    *("plan_no_json", "plan_broken_json", "plan_loose_json", "plan_truncated"),
    *("plan_wrong_shape", "plan_not_a_constraint", "plan_no_variable", "plan_cycle"),
    *("plan_unbound_variable", "plan_unnamed_entity", "plan_too_long"),
}


def parse(text, question=QUESTION, **changes):
    plan = prompts.parse_plan(text, question, **{**LIMITS, **changes})
    assert set(plan.parse_errors) <= PARSE_ERRORS
    return plan


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (TEXT, ()),
        (f"Here it is:\n```json\n{TEXT}\n```", ()),
        (TEXT.replace("constraints", "triples").replace("variants", "relation_variants"), ()),
        (TEXT[len('{"constraints": ') : -1], ()),
        (TEXT.replace("?city", "? City "), ()),
        (TEXT.replace('"', "'"), ("plan_loose_json",)),
        (TEXT[:-2] + ', {"head": "?person", "relation": "is"}]}', ("plan_not_a_constraint",)),
        (TEXT[:-2] + ', {"head": "?x", "relation": "is", "tail": "?X"}]}', ("plan_cycle",)),
        (TEXT[:-2] + ', ["?city", "is", "?"]]}', ("plan_not_a_constraint",)),
        (TEXT[:-2] + ", 7, null, true]}", ("plan_not_a_constraint",) * 3),
    ],
)
def test_parse_plan_accepted_formats_are_parsed(text, errors):
    assert parse(text) == ((BORN, FOUNDED), "", errors)


@pytest.mark.parametrize(
    ("rows", "problem", "errors"),
    [
        ([], "no constraint", ()),
        ([["?a", "is", "?b"]], "has both a name", ("plan_unbound_variable",) * 2),
        ([["Ada Moen", "is", "a founded city"]], "has both a name", ("plan_no_variable",)),
        ([["Lund", "is in", "?x"]], "has both a name", ("plan_unnamed_entity",)),
        ([["Ada Moen", f"r{i}", "?x"] for i in range(5)], "more than 4", ("plan_too_long",)),
        ([["Ada Moen", "is", "?x"], ["?y", "is", "?z"]], "", ("plan_unbound_variable",) * 2),
        ([["Ada Moen", "is", "?x"], ["Ada", "is", "Moen"]], "", ("plan_no_variable",)),
        ([["Ada Moen", "is", "?x"], ["Lund", "in", "?x"]], "", ("plan_unnamed_entity",)),
    ],
)
def test_parse_plan_unusable_plan_names_its_problem(rows, problem, errors):
    plan = parse(json.dumps({"constraints": rows}))
    assert plan.parse_errors == errors
    assert (problem in plan.problem) if problem else not plan.problem


def test_parse_plan_missing_and_truncated_plans():
    assert parse("I cannot.").parse_errors == ("plan_no_json",)
    assert parse("").problem and parse('{"constraints": "x"}').parse_errors == ("plan_wrong_shape",)
    half = parse(TEXT[: TEXT.index('"founded')], truncated=True)
    assert half.constraints == (BORN,) and half.parse_errors[0] == "plan_truncated"
    one = parse(json.dumps(["Ada Moen", "born in", "?city"]))
    assert one.constraints == (Constraint("Ada Moen", "born in", "?city"),)


def test_parse_plan_variants_and_numbers():
    row = {
        "head": "Ada Moen",
        "relation": "born",
        "tail": "?y",
        "variants": ["born", "b", "c", "d"],
    }
    assert parse(json.dumps([row])).constraints[0].relations == ("born", "b", "c")
    row |= {"tail": 1978, "head": "?x"}
    assert parse(json.dumps([row]), "Who was born in 1978?").constraints[0].tail == "1978"


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.text(alphabet='{}[]",:?\\ahrt123\n')), st.booleans())
def test_parse_plan_any_text_never_raises(text, truncated):
    plan = parse(text, truncated=truncated)
    assert plan.constraints or plan.problem


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(TEXT)), st.integers(0, 12), st.text(max_size=5))
def test_parse_plan_damaged_plan_never_raises(start, length, patch):
    plan = parse(TEXT[:start] + patch + TEXT[start + length :])
    assert all(c.relation and c.head and c.tail for c in plan.constraints)


def test_plan_messages_examples_are_parsed():
    system, *shown, asked = prompts.plan_messages(QUESTION, num_examples=2, **LIMITS)
    assert "at most 4" in system.text and "2 other wordings" in system.text
    assert [m.role for m in shown] == ["user", "assistant"] * 2 and QUESTION in asked.text
    for question, answer in zip(shown[::2], shown[1::2], strict=True):
        plan = parse(answer.text, question.text)
        assert not plan.problem and not plan.parse_errors
        assert all(len(c.variants) == 2 for c in plan.constraints)
    bare = prompts.plan_messages(QUESTION, num_variants=1, max_constraints=4, num_examples=1)
    assert "wordings" not in bare[0].text and "variants" not in bare[2].text


@pytest.mark.parametrize("num_variants", [1, 3])
def test_plan_schema_accepts_the_examples(num_variants):
    schema = prompts.plan_schema(QUESTION, num_variants=num_variants, max_constraints=4)
    check_schema(schema)
    rows = schema["properties"]["constraints"]["items"]["anyOf"]
    shown = json.loads(prompts.render_plan([BORN], num_variants))["constraints"][0]
    assert all(list(shown) == row["required"] for row in rows)
    heads = [row["properties"]["head"].get("enum", "?") for row in rows]
    assert heads == [["Ada Moen"], "?", "?"]
    check_schema(prompts.plan_schema("who is it?", num_variants=1, max_constraints=1))


@pytest.mark.parametrize(
    ("question", "names"),
    [
        (QUESTION, ["Ada Moen"]),
        ("Who sang The Salt, Sea and the Moon in 1978?", ["The Salt, Sea and the Moon", "1978"]),
        ("Where do Hello Love's singers live?", ["Hello Love"]),
        ("In Lund, West Skane, who wrote O'Brien?", ["Lund, West Skane", "O'Brien"]),
        ("Brother was sung by whom?", ["Brother"]),
        ("which courts are in it?", []),
        ("", []),
        ("What?", []),
    ],
)
def test_names_in_returns_capitalized_runs(question, names):
    assert list(prompts.names_in(question)) == names


def test_linearise_joins_nonempty_parts():
    assert linearise(BORN) == "Ada Moen — born in — ?city" and linearise(BORN, "") == (
        "Ada Moen — ?city"
    )
    assert linearise(textual(QUESTION)) == QUESTION
    assert textual(QUESTION).variables == textual(QUESTION).entities == ()
    assert unreachable([BORN, FOUNDED]) == () and unreachable([FOUNDED]) == ("?city", "?person")


@pytest.mark.parametrize(
    ("text", "value"),
    [("Lund", "Lund"), ("Answer: Lund.\nmore", "Lund"), ("none", None), ("", None), ("?city", None),
     ("The passages do not say.", None), ("...", None)],
)  # fmt: skip
def test_parse_fill_returns_name_or_none(text, value):
    assert parse_fill(text) == value


def test_answer_messages_number_facts_and_texts():
    system, user = prompts.answer_messages(QUESTION, [("a — b", ["T\nx", "y"]), ("c — d", [])])
    assert user.text == (
        f"Question: {QUESTION}\n\nFact 1: a — b\n[1] T x\n[2] y\n\nFact 2: c — d\n\n"
        f"Question: {QUESTION}"
    )
    assert user.observation.startswith("Fact 1") and "?" in system.text
