"""Texts link to the passages whose titles they name."""

import pytest

from cirag_jax.retrieval.links import TitleIndex
from cirag_jax.types import Passage


def index(*titles):
    return TitleIndex([Passage(str(row), title, "text") for row, title in enumerate(titles)])


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("Tuos was directed by Roderick Cabrido.", (1, 0)),  # a title without its parentheses
        ("the film Grey Harbour, then Tuos", (1,)),
        ("RODERICK CABRIDO, and Roderick Cabrido again", (0,)),
        ("Roderick Cabrido Santos", (2,)),  # the longer title is meant
        ("a roderick cabrido in small letters", ()),
        ("He went on a Run with It.", ()),  # too short for names of one word
        ("Ünlü was born in 1950", (4,)),
        ("", ()),
    ],
)
def test_titles_are_found_in_the_order_of_the_text(text, rows):
    found = index("Roderick Cabrido", "Tuos (film)", "Roderick Cabrido Santos", "Run", "Ünlü")
    assert found.named(text) == rows


def test_several_passages_may_share_a_title():
    assert index("Lund", "Lund (city)", "Lund").named("in Lund") == (0, 1, 2)


def test_passages_without_a_title_are_never_named():
    assert index("", "()", "...").named("nothing () ... to name") == ()
