"""Examples from the calls of a program: repeated requests, worked examples, files and bad input."""

import json

import pytest

from cirag_jax.distill import examples
from cirag_jax.distill.examples import RoleExample, examples_of
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Generate, Generated, Message
from cirag_jax.runtime.records import Generation, RequestKey

TASK = Message("system", "Do it.", " Facts.")
SHOWN = (Message("user", "one?"), Message("assistant", "1"))
ASKED = Message("user", "two", "?", "!")
AGAIN = Message("user", "Again.")
PROMPT = (TASK, *SHOWN, ASKED)


def call(ordinal, messages, text, end="stop", role="planner", part=0):
    key = RequestKey("q", ordinal, part)
    return Generation(key, Generate(tuple(messages), role), Generated(text, end))


def collected(*calls, roles=("planner",), **options):
    found, dropped = examples_of(calls, roles, **options)
    return [(e.messages, e.target, e.source["call"]) for e in found], dict(dropped)


def test_examples_of_repeated_request_uses_its_first_prompt():
    second = (*PROMPT, Message("assistant", "bad"), AGAIN)
    third = (*second, Message("assistant", "worse"), AGAIN)
    calls = call(3, PROMPT, "bad"), call(4, second, "worse"), call(5, third, "2")
    assert collected(*calls) == ([(PROMPT, "2", "5.0")], {("planner", "asked_again"): 2})


def test_examples_of_repeated_request_with_another_prefill_keeps_its_own_prompt():
    """KiRAG repeats a request with the opening bracket of a triple prefilled."""
    first, second = ((*PROMPT, Message("assistant", begun)) for begun in ("Thought:", "Thought: <"))
    calls = call(1, first, " no"), call(2, second, "a; b; c>")
    assert collected(*calls) == ([(second, "a; b; c>", "2.0")], {("planner", "asked_again"): 1})


def test_examples_of_later_or_other_requests_are_not_repeats():
    longer = (*PROMPT, Message("assistant", "1"), AGAIN)
    later = call(1, PROMPT, "1"), call(3, longer, "2")  # Something was retrieved in between.
    assert [target for _, target, _ in collected(*later)[0]] == ["1", "2"]
    other = call(1, PROMPT, "1"), call(2, PROMPT, "2", role="reader")
    assert [t for _, t, _ in collected(*other, roles=("planner", "reader"))[0]] == ["1", "2"]
    parts = call(1, PROMPT, "1"), call(1, PROMPT, "2", part=1)
    assert [place for *_, place in collected(*parts)[0]] == ["1.0", "1.1"]


def test_examples_of_truncated_empty_and_other_roles_are_dropped():
    calls = (
        call(0, PROMPT, "1", "length"), call(2, PROMPT, " \n"), call(4, PROMPT, "x", role="reader"),
    )  # fmt: skip
    assert collected(*calls) == ([], {("planner", "truncated"): 1, ("planner", "empty"): 1})


def test_examples_of_without_few_shot_keeps_instruction_and_last_turn():
    begun = Message("assistant", "So")
    calls = call(0, PROMPT, "1"), call(2, (*PROMPT, begun), "2"), call(4, SHOWN[:1], "3")
    found, _ = collected(*calls, few_shot=False)
    assert [messages for messages, *_ in found] == [(TASK, ASKED), (TASK, ASKED, begun), SHOWN[:1]]


def test_examples_file_round_trip_joins_parts_of_turns(tmp_path):
    example = RoleExample("planner", "q", PROMPT, "é\n2", {"method": "m", "call": "1.0"})
    examples.write_examples(tmp_path / examples.FILE, [example])
    ((place, read),) = examples.read_examples(tmp_path)
    assert place == f"{tmp_path / examples.FILE}:1"
    assert [m.text for m in read.messages] == [m.text for m in PROMPT]
    assert (read.role, read.target, read.source) == ("planner", "é\n2", dict(example.source))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"messages": []}, "examples.jsonl:1: field 'messages' is empty"),
        ({"target": " "}, "examples.jsonl:1: field 'target' is empty"),
        ({"role": None}, "field 'role' must be a string, not null"),
        ({"messages": [{"role": "tool", "content": ""}]}, "has the role 'tool', not"),
    ],
)
def test_read_examples_bad_line_is_refused(tmp_path, changes, words):
    row = {"role": "r", "question_id": "q", "target": "t"}
    row["messages"] = [{"role": "user", "content": "u"}]
    (tmp_path / examples.FILE).write_text(json.dumps({**row, **changes}))
    with pytest.raises(UserError, match=words):
        list(examples.read_examples(tmp_path))


def test_read_examples_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="examples.jsonl does not exist; launch/distill.py writes"):
        examples.example_file(tmp_path)
    (tmp_path / examples.FILE).write_text("{}")
    (tmp_path / examples.SIDECAR).write_text('{"method": 1}')
    with pytest.raises(UserError, match="examples.json: expected the fields method and settings"):
        examples.read_sidecar(tmp_path)
