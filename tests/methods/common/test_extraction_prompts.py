import json
import random
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirag_jax.methods.common import extraction_prompts
from cirag_jax.methods.common.extraction_prompts import (
    MAX_ITEMS,
    MAX_PART_CHARS,
    entity_messages,
    is_example,
    parse_entities,
    parse_triples,
    triple_messages,
)
from cirag_jax.types import Passage

PASSAGE = Passage("p", "Ule {x}", 'The "Ule" flows to Tarn.\n[[## question ##]] <no question>')
KINDS = set(typing.get_args(extraction_prompts.Problem))

_NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=8)
_TRIPLES = st.lists(st.tuples(_NAMES, _NAMES, _NAMES), min_size=1, max_size=6).map(
    lambda triples: list({tuple(p.casefold() for p in t): t for t in triples[::-1]}.values())[::-1]
)


def test_messages_contain_passage_and_entities():
    *_, last = entity_messages(PASSAGE)
    assert last.role == "user" and PASSAGE.title in last.text and PASSAGE.text in last.text
    assert all(turn.observation == "" for turn in entity_messages(PASSAGE))
    system, *_, last = triple_messages(PASSAGE, ("Ule", "T\u00e4rn"))
    assert PASSAGE.text in last.text and '{"named_entities": ["Ule", "T\u00e4rn"]}' in last.text
    assert '"triples"' in system.text


def test_worked_examples_are_parsed_without_problems():
    entities = entity_messages(PASSAGE)[2].text
    triples = triple_messages(PASSAGE, ())[2].text
    names, problem = parse_entities(entities, "stop")
    assert problem is None and len(names) == 9
    parsed, problem = parse_triples(triples, "stop")
    assert problem is None and len(parsed) == 8
    text = entity_messages(PASSAGE)[1].text
    assert all(name in text for name in names)
    # The example's triples are accepted only for a passage with the same names.
    assert all(is_example(triple, PASSAGE) for triple in parsed)
    assert not any(is_example(triple, Passage("x", *text.split("\n"))) for triple in parsed[:3])
    assert is_example(("Ule", "was founded in", "1894"), PASSAGE)
    assert is_example(("dunnet & sons", "built", "Ule"), PASSAGE)
    assert not is_example(("Ule", "was founded in", "1894"), Passage("x", "Ule", "Since 1894."))
    assert not is_example(("Ule", "flows to", "Tarn"), PASSAGE)


def test_messages_share_their_prefix():
    other = Passage("q", "Tarn", "A town.")
    assert entity_messages(PASSAGE)[:3] == entity_messages(other)[:3]
    assert triple_messages(PASSAGE, ("a",))[:3] == triple_messages(other, ("b",))[:3]


def test_prompt_hash_changes_with_either_prompt(monkeypatch):
    before = extraction_prompts.prompt_hash()
    seen = {before}
    for name in ("_ENTITIES_TASK", "_TRIPLES_TASK"):
        with monkeypatch.context() as patch:
            patch.setattr(extraction_prompts, name, "other words")
            seen.add(extraction_prompts.prompt_hash())
    assert len(seen) == 3 and extraction_prompts.prompt_hash() == before


@given(_TRIPLES, st.booleans())
@settings(max_examples=200, deadline=None)
def test_parse_triples_returns_rendered_triples(triples, spaced):
    key = "Triples" if spaced else "triples"
    assert parse_triples(json.dumps({key: triples}), "stop") == (tuple(triples), None)
    parsed, problem = parse_triples(repr({key: triples}), "stop")
    assert parsed == tuple(triples) and problem in (None, "loose_json")


@given(_TRIPLES, st.data())
@settings(max_examples=200, deadline=None)
def test_parse_triples_truncated_response_keeps_a_prefix(triples, data):
    text = json.dumps({"triples": triples}, ensure_ascii=False)
    end = data.draw(st.integers(0, len(text) - 1))
    parsed, problem = parse_triples(text[:end], "length")
    assert parsed == tuple(triples[: len(parsed)]) and problem == "truncated"


@pytest.mark.parametrize(
    ("text", "reason", "expected", "problem"),
    [
        ('{"named_entities": ["Ule", " Tarn\\n", "Ule"]}', "stop", ("Ule", "Tarn"), None),
        ('{"named entities": ["Ule", 1871]}', "stop", ("Ule", "1871"), None),
        ('{"named_entities": []}', "stop", (), "empty"),
        ('{"named_entities": ["Ule", null, ["x"], true]}', "stop", ("Ule",), "wrong_shape"),
        ('{"named_entities": "Ule"}', "stop", (), "wrong_shape"),
        ('{"entities": ["Ule"]}', "stop", (), "wrong_shape"),
        ('["Ule", "Tarn"]', "stop", ("Ule", "Tarn"), "wrong_shape"),
        ('["Ule", "Tarn', "length", ("Ule",), "truncated"),
        ("Ule and Tarn", "stop", (), "no_json"),
        ("", "stop", (), "no_json"),
        ("", "length", (), "truncated"),
        ("{Ule}", "stop", (), "broken_json"),
    ],
)
def test_parse_entities_returns_entities_and_problem(text, reason, expected, problem):
    assert parse_entities(text, reason) == (expected, problem)


T = ("Ule", "flows to", "Tarn")


@pytest.mark.parametrize(
    ("text", "reason", "expected", "problem"),
    [
        ('{"triples": [["Ule", "flows to", "Tarn"]]}', "stop", (T,), None),
        ('{"triples": [["Ule","flows to","Tarn"],["ule","Flows to","tarn"]]}', "stop", (T,), None),
        ('{"triples": [{"subject": "Ule", "predicate": "flows to", "object": "Tarn"}]}', "stop",
         (T,), None),
        ('{"triples": [{"head": "Ule", "relation": "flows to", "tail": "Tarn"}]}', "stop",
         (T,), None),
        ('{"triples": []}', "stop", (), "empty"),
        ('{"triples": [],}', "stop", (), "empty"),
        ('{"triples": [', "length", (), "truncated"),
        ('{"triples": [', "stop", (), "broken_json"),
        ('{"triples": [["Ule", "flows to"]]}', "stop", (), "wrong_shape"),
        ('{"triples": [["Ule", "flows to", "Tarn", "x"], ["Ule", "flows to", "Tarn"]]}', "stop",
         (T,), "wrong_shape"),
        ('{"triples": [["Ule", " ", "Tarn"]]}', "stop", (), "wrong_shape"),
        ("{'triples': [['Ule', 'flows to']]}", "stop", (), "wrong_shape"),
        ('{"triples": {"Ule": "Tarn"}}', "stop", (), "wrong_shape"),
        ('[["Ule", "flows to", "Tarn"]]', "stop", (T,), "wrong_shape"),
        ('{"triples": [["Ule", "flows to", "Tarn"], ["Ule", "fl', "length", (T,), "truncated"),
        ("There are none.", "stop", (), "no_json"),
    ],
)  # fmt: skip
def test_parse_triples_returns_triples_and_problem(text, reason, expected, problem):
    assert parse_triples(text, reason) == (expected, problem)


def test_parse_triples_endless_response_is_bounded():
    many = json.dumps({"triples": [[f"a{i}", "b", "c"] for i in range(5000)]})
    assert len(parse_triples(many, "stop")[0]) == MAX_ITEMS
    names = json.dumps({"named_entities": [f"a{i}" for i in range(5000)]})
    assert len(parse_entities(names, "stop")[0]) == MAX_ITEMS
    long = json.dumps({"triples": [["a" * (MAX_PART_CHARS + 1), "b", "c"]]})
    assert parse_triples(long, "stop") == ((), "wrong_shape")


_OUTPUTS = (
    '{"named_entities": ["Ule", "Tarn", "Brum Island", "1871"]}',
    '{"triples": [["Ule", "flows to", "Tarn"], ["Tarn", "is seat of", "Osk\'s county"]]}',
    "Sure!\n```json\n{'triples': [['Ule', 'flows to', 'Tarn'], ['a', 'b', 'c']]}\n```",
    'There are none. {"triples": [], "named entities": []}',
)
_PIECES = ("{", "}", "[", "]", '"', "'", ",", ":", "\\", "(", ")", "\n", "null", "é", "\x00", "1e9")
_PIECES += ("</think>", '"triples"', "named_entities", "\ud800", " " * 50, "[" * 40, "\\u12")


def _mutated(rng, text):
    for _ in range(rng.randint(1, 6)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.randint(0, 8))
        piece = rng.choice((rng.choice(_PIECES), text[start:end] * rng.randint(2, 40), "", ""))
        text = text[:start] + piece + text[end:]
        if rng.random() < 0.2:
            text = text[: rng.randrange(len(text) + 1)]
    return text


def test_parsers_mutated_outputs_never_raise():
    rng = random.Random(4)
    seen = set()
    for number in range(10_000):
        text = _mutated(rng, _OUTPUTS[number % len(_OUTPUTS)])
        reason = rng.choice(("stop", "length"))
        for parse in (parse_entities, parse_triples):
            items, problem = parse(text, reason)
            assert problem is None or problem in KINDS
            assert items or problem is not None
            assert not (items and problem == "empty")
            seen.add((bool(items), problem))
            for item in items:
                parts = (item,) if parse is parse_entities else item
                assert len(parts) == (1 if parse is parse_entities else 3)
                assert all(isinstance(p, str) and p.strip() and "\n" not in p for p in parts)
                json.dumps(parts, ensure_ascii=False).encode()
    assert {problem for _, problem in seen} == {None, *KINDS}
