"""The parse rate: counts by hand, and kinds of errors that exist."""

import math
import pathlib

import pytest

import cirag_jax.methods
from cirag_jax.evaluation.parsing import WELL_FORMED, parse_rate


def test_parse_rate_is_the_share_of_usable_responses():
    questions = [
        (4, {"no_json": 1, "repeated_query": 2}),  # three usable responses
        (2, {"no_json": 2, "truncated": 1}),  # none, as a response may have several errors
        (3, {"no_chain": 3}),  # all
        (0, {"no_json": 1}),
    ]
    rate = parse_rate(questions)
    assert rate.top_Q.tolist() == [3, 0, 3, 0] and rate.value == pytest.approx(6 / 9)
    assert math.isnan(parse_rate([(0, {})]).value) and math.isnan(parse_rate([]).value)


def test_parse_rate_well_formed_kinds_are_counted_by_methods():
    (folder,) = cirag_jax.methods.__path__
    code = "".join(path.read_text("utf-8") for path in pathlib.Path(folder).rglob("*.py"))
    assert not [kind for kind in WELL_FORMED if f'"{kind}"' not in code]
