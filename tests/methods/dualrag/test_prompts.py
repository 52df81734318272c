"""DualRAG's prompts and parsers."""

import json

import pytest

from cirag_jax.methods.dualrag import prompts as dualrag
from cirag_jax.methods.dualrag.prompts import (
    Entity,
    Thought,
    parse_entities,
    parse_summary,
    parse_thought,
)
from tests.methods.fakes import mutated_texts

A_THOUGHT = '{"thought": "Lund is  a town.", "need_retrieve": true}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (A_THOUGHT, Thought("Lund is a town.", True, None)),
        ("{'Thought': 'x', 'need_retrieve': False}", Thought("x", False, None)),
        ('{"thought": "x"}', Thought("x", None, "wrong_shape")),
        ('{"thought": "x", "need_retrieve": "yes"}', Thought("x", None, "wrong_shape")),
        ('{"thought": ["x"], "need_retrieve": true}', Thought("", True, "wrong_shape")),
        ("Lund is\na town.", Thought("Lund is a town.", None, "no_json")),
        ("{Lund", Thought("", None, "broken_json")),
        ("", Thought("", None, "no_json")),
    ],
)
def test_parse_thought_returns_thought_and_flag(text, expected):
    assert parse_thought(text) == expected


def entities(*items):
    return json.dumps({"entities": list(items)})


LUND = {"entity": "Lund", "keywords": ["Lund", "where is Lund"]}


@pytest.mark.parametrize(
    ("text", "demands", "problems"),
    [
        (entities(LUND), (Entity("Lund", ("Lund", "where is Lund")),), ()),
        (entities(LUND, {"entity": "lund", "keywords": "x"}),
         (Entity("Lund", ("Lund", "where is Lund")),), ()),
        (entities({"entity": "Lund", "keywords": []}), (Entity("Lund", ("Lund",)),),
         ("without_keywords",)),
        (entities({"entity": " ", "keywords": ["x"]}), (Entity("else", ("x",)),), ("unnamed",)),
        (entities({"keywords": []}), (), ("unnamed",)),
        (entities("Lund", LUND), (Entity("Lund", ("Lund", "where is Lund")),), ("wrong_shape",)),
        (entities({"entity": "x" * 201, "keywords": ["y"]}), (Entity("else", ("y",)),),
         ("unnamed",)),
        ('{"entities": {"Lund": 1}}', (), ("wrong_shape",)),
        (entities(), (), ("wrong_shape",)),
        ("Lund", (), ("no_json",)),
    ],
)  # fmt: skip
def test_parse_entities_returns_entities_and_problems(text, demands, problems):
    assert parse_entities(text, 3, 2) == (demands, problems)


def test_parse_entities_limits_entities_and_queries():
    many = entities(*({"entity": f"e{i}", "keywords": ["a", "b", "c"]} for i in range(9)))
    demands, _ = parse_entities(many, 3, 2)
    assert [d.name for d in demands] == ["e0", "e1", "e2"]
    assert all(d.queries == ("a", "b") for d in demands)


@pytest.mark.parametrize("text", ["None", " none. ", '"None"', "", "\n"])
def test_parse_summary_none_is_empty(text):
    assert parse_summary(text) == ""


def test_parse_summary_text_containing_none_is_kept():
    assert parse_summary("None of them was\n\nborn there.") == "None of them was\nborn there."


def test_parse_summary_headings_are_removed():
    assert "####" not in parse_summary("x\n#### Osk\ny")


def test_worked_examples_are_parsed_without_problems():
    turns = dualrag.reasoning_messages("", "x?", ())
    thoughts = [parse_thought(m.text) for m in turns if m.role == "assistant"]
    assert [t.need_retrieve for t in thoughts] == [True, True, False]
    assert all(t.problem is None for t in thoughts)
    for turn in dualrag.entity_messages("", "x?", (), ()):
        if turn.role == "assistant":
            demands, problems = parse_entities(turn.text, 3, 2)
            assert demands and not problems
    assert len(dualrag.reasoning_messages("", "x?", (), few_shot=False)) == 2


def test_names_in_returns_capitalized_runs():
    text = "Which film is later, El Extraño Viaje or Ada's Sky? The Isle of Osk. It is"
    assert dualrag.names_in(text) == ("El Extraño Viaje", "Ada's Sky", "Isle of Osk")
    assert dualrag.names_in("Queen Ada (Osk) reigned\nLund") == ("Queen Ada", "Osk", "Lund")
    assert dualrag.names_in("who was it?") == ()


def test_parsers_mutated_outputs_never_raise():
    outputs = (A_THOUGHT, entities(LUND, LUND), "None", "#### Lund\nA town of Skane.")
    pieces = ("{", "}", "[", "]", '"', ",", ":", "\\", "\n", "null", "\x00", "\ud800", "[" * 40)
    for text, rng in mutated_texts(outputs, pieces, seed=7):
        cut = rng.random() < 0.5
        thought = parse_thought(text, truncated=cut)
        assert thought.problem or (thought.text and thought.need_retrieve is not None)
        entities_, problems = parse_entities(text, 3, 2, truncated=cut)
        assert entities_ or problems
        assert all(e.name and e.queries and "\n" not in e.name for e in entities_)
        assert isinstance(parse_summary(text), str)
        dualrag.names_in(text)
