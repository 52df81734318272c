import ast
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirag_jax.methods.common.tolerant_json import MAX_CHARS, MAX_DEPTH, find_json

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_LEAVES = st.none() | st.booleans() | st.integers(-(10**15), 10**15) | _TEXTS
_LEAVES |= st.floats(allow_nan=False, allow_infinity=False, width=32)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)
_CONTAINERS = st.lists(_VALUES, max_size=4) | st.dictionaries(_TEXTS, _VALUES, max_size=4)


@given(_CONTAINERS, st.booleans(), st.sampled_from([None, 2]))
@settings(max_examples=300, deadline=None)
def test_find_json_valid_json_equals_json_loads(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert find_json(f"Sure, here it is:\n```json\n{text}\n```\nAnything else?") == (value, None)


@given(_CONTAINERS)
@settings(max_examples=300, deadline=None)
def test_find_json_python_literals_equal_literal_eval(value):
    text = repr(value)
    value, problem = find_json(f"The answer is {text}")
    assert value == ast.literal_eval(text)
    assert problem in (None, "loose_json")


@given(st.text(max_size=200), st.sampled_from([None, "fact"]), st.booleans())
@settings(max_examples=500, deadline=None)
def test_find_json_any_text_never_raises(text, key, truncated):
    value, problem = find_json(text, key, truncated)
    assert value is not None or problem is not None
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


@given(st.text("[]{}()\"'“”,:\\ \nabu0x1-.", max_size=60), st.sampled_from([None, "a"]))
@settings(max_examples=1000, deadline=None)
def test_find_json_any_structure_never_raises(text, key):
    value, problem = find_json(text, key)
    assert value is not None or problem is not None
    assert key is None or value is None or key in value
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


def test_find_json_truncated_list_keeps_complete_elements():
    rows = [["Ule", "flows to", "Tarn, a town"], ["Tarn", 'is "old"', "{x}"], ["Tarn", "has", "1"]]
    text = json.dumps({"thought": "[rivers]", "fact": rows})
    start = text.index("[[")
    for end in range(start + 1, len(text)):
        value, problem = find_json(text[:end], "fact", truncated=True)
        assert problem == "truncated" and value is not None
        flat = [part for row in value["fact"] for part in row]
        assert flat == [part for row in rows for part in row][: len(flat)]
        complete = [row for row in rows if text[:end].count(json.dumps(row))]
        assert value["fact"][: len(complete)] == complete
        assert find_json(text[:end], "fact") == (value, "broken_json")
    assert find_json(text, "fact", truncated=True)[1] is None


@pytest.mark.parametrize(
    ("text", "value", "problem"),
    [
        ('{"fact": [["a", "b", "c"],]}', [["a", "b", "c"]], "loose_json"),
        ("{'fact': [['Bob\\'s', 'is', 'Tim's house']]}", [["Bob's", "is", "Tim's house"]],
         "loose_json"),
        ('{"fact": [("a", "b", "c")]}', [["a", "b", "c"]], "loose_json"),
        ('{"fact": [["a", "says "no" to", "c"]]}', [["a", 'says "no" to', "c"]], "loose_json"),
        ('{“fact”: [[“a”, “b”, “c”]]}', [["a", "b", "c"]], "loose_json"),
        ('{"fact": [["a", "b", "c"]', [["a", "b", "c"]], "broken_json"),
        ('{"fact": [["a", b, "c"]]}', [["a", "c"]], "broken_json"),
        ('{"fact": [["a", "b", "c"\n["d", "e", "f"]}', [["a", "b", "c", ["d", "e", "f"]]],
         "loose_json"),
        ('{"Fact": []}', [], None),
        ('{"facts": []} {"fact": [1]}', [1], None),
        ('The set {a, b} [1] gives {"r": {"fact": [1]}}', [1], None),
        ('{"fact": [x {"fact": [2]}', [{"fact": [2]}], "broken_json"),
        ('fact: [["a", "b", "c"]]', [["a", "b", "c"]], "loose_json"),
        ('"fact" = [["a", "b", "c"]', [["a", "b", "c"]], "broken_json"),
        ('<think>{"fact": [1]}</think>{"fact": [2]}', [2], None),
        ('I think [1]\n</think>\n{"fact": [2]}', [2], None),
        ('{"fact": ["</think>"]}', ["</think>"], None),
        ('{"fact": [NaN, 1e999, true]}', [None, None, True], None),
        ('{"fact": ["\\ud83d\\ude00", "\\ud83d"]}', ["😀", "\ufffd"], None),
        ("{'fact': ['\\ud83d\\ude00', '\\ud83d']}", ["😀", "\ufffd"], "loose_json"),
    ],
)  # fmt: skip
def test_find_json_malformed_json_is_repaired(text, value, problem):
    assert find_json(text, "fact") == ({"fact": value}, problem)


@pytest.mark.parametrize(
    ("text", "truncated", "problem"),
    [
        ("", False, "no_json"),
        ("I found nothing.", False, "no_json"),
        ("I found noth", True, "truncated"),
        ('{"other": 1}', False, "broken_json"),
        ("{fact}", False, "broken_json"),
        ('{"fact":', False, "broken_json"),
    ],
)
def test_find_json_unreadable_text_gives_none(text, truncated, problem):
    assert find_json(text, "fact", truncated) == (None, problem)


def test_find_json_key_may_have_spaces():
    assert find_json('{"Named Entities": ["a"]}', "named_entities") == (
        {"named_entities": ["a"]},
        None,
    )


def test_find_json_without_key_returns_broken_container():
    text = '[["a", "b", "c"], [Radio], ["d", "e", "f"]] ["g"]'
    value, problem = find_json(text)
    assert value == [["a", "b", "c"], [], ["d", "e", "f"]] and problem == "broken_json"


def test_find_json_depth_is_bounded():
    def nested(depth):
        return "[" * depth + "]" * depth

    assert find_json(nested(MAX_DEPTH))[1] is None
    value, problem = find_json(nested(MAX_DEPTH + 1))
    assert json.dumps(value).count("[") <= MAX_DEPTH and problem is None  # An inner part.


@pytest.mark.parametrize(
    "unit", ["[", "{", '{"a"', '["', '"', "[{(", '[1,"', "{'a':[", "\\", "['a", '{"fact":', "\n"]
)
@pytest.mark.parametrize("key", [None, "fact"])
def test_find_json_endless_repetition_takes_bounded_time(unit, key):
    text = unit * (MAX_CHARS // len(unit))
    started = time.process_time()
    find_json(text, key)
    assert time.process_time() - started < 30  # Quadratic work would take hours.
