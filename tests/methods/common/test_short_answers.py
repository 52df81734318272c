"""FlashRAG's prompt and the parser of short answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cirag_jax.methods.common.short_answers import parse_short_answer, reading_messages
from cirag_jax.types import Passage


def test_reading_messages_documents_are_numbered():
    passages = [Passage("a", "Lund", "A town."), Passage("b", "Ada", "A painter.")]
    system, user = reading_messages("Who?", passages)
    assert (system.role, user.role) == ("system", "user")
    assert system.observation == "Doc 1 (Title: Lund) A town.\nDoc 2 (Title: Ada) A painter."
    assert "Who?" in user.content and "Who?" not in system.text


def test_reading_messages_no_documents_are_not_mentioned():
    system, user = reading_messages("Who?", [])
    assert "document" not in system.text and "Who?" in user.text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Lund", "Lund"),
        ("**Lund**", "Lund"),
        ("\n  Lund.\nbecause", "Lund."),
        ("Answer: Lund", "Lund"),
        ("**Answer:** Lund", "Lund"),
        ("The answer is: Lund", "Lund"),
        ("Final Answer:\n\nLund", "Lund"),
        ("Star Wars: A New Hope", "Star Wars: A New Hope"),
        ("", ""),
        (" \n\t", ""),
        ("Answer:", ""),
    ],
)
def test_parse_short_answer_returns_first_line_with_content(text, answer):
    assert parse_short_answer(text) == answer


@given(st.text(st.characters()))
def test_parse_short_answer_any_text_gives_one_line(text):
    answer = parse_short_answer(text)
    assert answer in text and len(answer.splitlines()) <= 1
