"""The answer that a chain of thought states."""

import pytest

from cirag_jax.methods.common.written_answers import first_sentence, has_answer, written_answer
from tests.methods.fakes import mutated_texts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ada was born in Lund. So the answer is: Skane.", ("Skane", None)),
        ("so THE final answer is **Skane**", ("Skane", None)),
        ("The answer is A. So the answer is: St. John's\nMore text.", ("St. John's", None)),
        ("So the answer is: yes. Because it is so.", ("yes", None)),
        ("So the answer is:", ("", "empty")),
        ("Ada was born in Lund. It is in Skane.", ("It is in Skane.", "no_answer_mark")),
        (" \n", ("", "empty")),
    ],
)
def test_written_answer_text_gives_answer_and_problem(text, expected):
    assert written_answer(text) == expected
    assert has_answer(text) == ("answer is" in text.lower())


def test_first_sentence_is_empty_without_text():
    assert first_sentence(" Ada paints. She sings.") == "Ada paints." and first_sentence("\n") == ""


def test_written_answer_mutated_texts_never_raise():
    outputs = ("Ada was born in Lund. So the answer is: Skane.", "The final answer is **St. X**.")
    pieces = (".", "\n", "The answer is", ":", "*", "\x00", "\ud800", " " * 40, "…", "。")
    for seed in range(5):
        for text, _ in mutated_texts(outputs, pieces, seed):
            answer, problem = written_answer(text)
            assert len(answer) <= 300 and (answer or problem)
