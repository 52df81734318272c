"""Comparisons are concluded from the facts that a reader writes, not from its last word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cirag_jax.prompts.conclusions import conclude, order, same_country, written_facts
from cirag_jax.prompts.reading import parse_answer

FILMS = """Grey Harbour; director; Ann Lund
Blue Coast; director; Bo Dahl
Ann Lund; date of birth; 3 May 1949
Bo Dahl; date of birth; June 1, 1930
1930; before; 1949
Bo Dahl; before; Ann Lund
{asked}; is; {named}
Answer: {answer}"""


@pytest.mark.parametrize(
    ("asked", "answer", "concluded"),
    [
        ("earlier", "Grey Harbour", "Blue Coast"),  # whatever the reader names in the end
        ("earlier", "Blue Coast", "Blue Coast"),
        ("later", "Blue Coast", "Grey Harbour"),
        ("sooner", "Grey Harbour", "Grey Harbour"),  # what is asked for is not said: its own word
    ],
)
def test_the_earlier_or_the_later_is_what_the_dates_say(asked, answer, concluded):
    text = FILMS.format(asked=asked, named="Ann Lund", answer=answer)
    question = "Which film has the director who is older, Grey Harbour or Blue Coast?"
    assert parse_answer(text, question=question)[:2] == (concluded, True)
    assert parse_answer(text)[0] == answer  # without the question nothing is concluded


def test_the_person_is_named_where_the_question_names_no_film():
    text = FILMS.format(asked="later", named="Bo Dahl", answer="Bo Dahl")
    assert parse_answer(text, question="Who was born later?")[0] == "Ann Lund"
    assert parse_answer(text, question="Is Bo Dahl younger than Ann Lund?")[0] == "Ann Lund"


@pytest.mark.parametrize(
    ("first", "second", "answer"),
    [("India", "Indian", "yes"), ("American", "United States", "yes"), ("Spain", "Chile", "no")],
)
def test_countries_are_compared_by_name(first, second, answer):
    for said in ("yes", "no"):
        for relation in ("same as", "other than"):
            facts = [("a", "country", first), ("b", "country", second), (first, relation, second)]
            assert conclude("Are a and b from the same country?", facts, said) == answer
    assert conclude("?", [(first, "same as", second)], first) == first  # no question of yes or no
    assert same_country(first, second) == (answer == "yes")


def test_what_is_not_decided_stays_as_written():
    pair = [("Ann", "date of birth", "1930"), ("Bob", "date of birth", "1930")]
    later = ("later", "is", "Bob")
    assert conclude("?", [*pair, later], "Bob") == "Bob"  # the same year
    third = ("Cid", "date of birth", "1901")
    assert conclude("?", [*pair, third, later], "Bob") == "Bob"  # three dates
    assert conclude("?", [*pair[:1], later], "Bob") == "Bob"  # one date
    refused, sufficient, _ = parse_answer("later; is; Bob\nAnswer: Unanswerable", question="?")
    assert (refused, sufficient) == ("Unanswerable", False)


def test_dates_are_ordered_as_far_as_they_tell():
    assert order("12 May 1950", "June 1, 1951") == -1
    assert order("2 June 1950", "12 May 1950") == 1
    assert order("1950", "12 May 1950") is None
    assert order("unknown", "1950") is None and order("May", "1950") is None


def test_facts_are_lines_of_three_parts():
    assert written_facts("a; b; c; d\nno fact\n; b; c\nAnswer: x; y; z") == [
        ("a", "b", "c; d"),
        ("Answer: x", "y", "z"),
    ]


@given(st.text(max_size=300), st.text(max_size=40))
def test_whatever_is_written_nothing_is_raised(text, question):
    facts = [*written_facts(text), ("a", "date of birth", text), ("b", "date of birth", "1950")]
    assert isinstance(conclude(question, [*facts, ("later", "is", "b")], text), str)
