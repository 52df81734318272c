"""Separating the thoughts of reasoning models from their answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cirag_jax.llm.thoughts import drop_thoughts, without_thoughts
from cirag_jax.llm.types import Generated, Token, Usage

HARMONY = (
    "<|channel|>analysis<|message|>Lund or Malmo?<|end|><|start|>assistant<|channel|>final"
    "<|message|>Lund<|return|>"
)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Lund", "Lund"),
        ("  Lund\n", "  Lund\n"),  # without thoughts nothing changes
        ("<think>Malmo?</think>Lund", "Lund"),
        ("<think>\nMalmo?\n</think>\n\nLund\n", "Lund"),
        ("Malmo? No.\n</think>\n\nLund", "Lund"),  # the template opened the thoughts
        ("<think>Malmo</think><think>Oslo</think>Lund", "Lund"),
        ("<THINK>Malmo</THINK>Lund", "Lund"),
        ("<thinking>Malmo</thinking> Lund", "Lund"),
        ("<thought>Malmo</thought>Lund", "Lund"),
        ("<reasoning>Malmo</reasoning>Lund", "Lund"),
        ("<seed:think>Malmo</seed:think>Lund", "Lund"),
        ("[THINK]Malmo[/THINK]Lund", "Lund"),
        ("◁think▷Malmo◁/think▷Lund", "Lund"),
        (HARMONY, "Lund"),
        ("<think>Answer: Malmo. But is it", ""),  # cut off
        ("<think></think>", ""),
        ("Answer: Lund\n<think>Or Malmo?</think>", "Answer: Lund"),
        ("Answer: Lund\n<think>Or Mal", "Answer: Lund"),
        ('{"fact": ["</think>"]}', '{"fact": ["</think>"]}'),
        ('<think>{"a": 1}</think>{"fact": ["<think>"]}', '{"fact": ["<think>"]}'),
        ("The Thinker <i>think</i> 2 < 3", "The Thinker <i>think</i> 2 < 3"),
    ],
)
def test_without_thoughts_returns_the_answer(response, answer):
    assert without_thoughts(response) == answer


@given(st.text("a <>/think[]THINK|\n", max_size=60))
def test_without_thoughts_any_text_gives_a_part_of_it(text):
    answer = without_thoughts(text)
    assert answer in text and without_thoughts(without_thoughts(answer)) == without_thoughts(answer)


def test_drop_thoughts_keeps_tokens_of_the_answer_and_counts():
    pieces = ["<think>", "Malmo", "</think>", "\n", " Lund", " it is"]
    offsets = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
    tokens = tuple(
        Token(p, i, offset=o) for i, (p, o) in enumerate(zip(pieces, offsets, strict=True))
    )
    response = drop_thoughts(Generated("".join(pieces), "stop", Usage(5, 0, 6), tokens=tokens))
    assert (response.text, response.thoughts) == ("Lund it is", "<think>Malmo</think>")
    assert [(t.text, t.offset) for t in response.tokens or ()] == [(" Lund", 0), (" it is", 4)]
    assert response.usage == Usage(5, 0, 6, thoughts=1)
    assert drop_thoughts(response) is not response and drop_thoughts(response).text == "Lund it is"


def test_drop_thoughts_of_a_server_field_are_counted():
    response = drop_thoughts(Generated("Lund", "stop", thoughts="Malmo?"))
    assert (response.text, response.thoughts, response.usage.thoughts) == ("Lund", "Malmo?", 1)
    plain = Generated("Lund", "stop")
    assert drop_thoughts(plain) is plain
