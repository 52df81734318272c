"""Encoding requests, responses and predictions as JSON."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirag_jax.llm.types import Message, Usage
from cirag_jax.runtime import codec
from cirag_jax.runtime.requests import (
    Anchor,
    Anchored,
    Demonstrate,
    Demonstrated,
    Extract,
    Extracted,
    Fetch,
    Follow,
    Generate,
    Generated,
    Link,
    Linked,
    Rank,
    Ranked,
    RequestError,
    Retrieve,
    Retrieved,
    Route,
    Routed,
    Walk,
)
from cirag_jax.types import Attempt, Feedback, Passage, Prediction, Sentence, Step, Triple
from tests import tiny
from tests.runtime.recording import passage, response_to, say

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
COUNT = st.integers(0, 10**6)
TRIPLE = st.builds(
    Triple, TEXT, TEXT, TEXT, st.one_of(st.none(), TEXT), st.one_of(st.none(), st.integers(0, 99))
)
PASSAGE = st.builds(Passage, TEXT, TEXT, TEXT, st.one_of(st.none(), st.tuples(TEXT, TEXT)))
USAGE = st.builds(Usage, COUNT, COUNT, COUNT, NUMBER, COUNT)
QUESTIONS = tiny.dataset().questions[:3]
UNIT = st.one_of(TRIPLE, TEXT, st.builds(Sentence, TEXT, COUNT))
NOTES = st.dictionaries(TEXT, st.one_of(st.none(), NUMBER, TEXT, st.lists(TEXT)), max_size=3)


def tuples(strategy, **sizes):
    return st.lists(strategy, max_size=5, **sizes).map(tuple)


@st.composite
def exchanges(draw):
    """A request and a response to it."""
    kind = draw(
        st.sampled_from(
            [
                *("retrieve", "fetch", "follow", "extract", "anchor", "rank", "demonstrate"),
                *("link", "walk"),
                *("generate", "error"),
            ]
        )
    )
    passages = draw(tuples(PASSAGE, unique_by=lambda p: p.id))
    if kind in ("retrieve", "error"):
        scores = tuple(draw(NUMBER) for _ in passages)
        response = Retrieved(passages, scores) if kind == "retrieve" else RequestError(draw(TEXT))
        moved = st.builds(Feedback, NUMBER, tuples(st.tuples(TEXT, NUMBER)))
        feedback = draw(st.one_of(st.none(), moved))
        return Retrieve(draw(TEXT), draw(COUNT), feedback), response, passages
    if kind == "follow":
        response = Retrieved(passages, tuple(draw(NUMBER) for _ in passages))
        return Follow(draw(tuples(TEXT)), draw(COUNT)), response, passages
    if kind == "fetch":
        ids, ones = tuple(p.id for p in passages), (1.0,) * len(passages)
        return Fetch(ids), Retrieved(passages, ones), passages
    if kind == "extract":
        triples = tuple(draw(st.one_of(st.none(), tuples(TRIPLE))) for _ in passages)
        return Extract(passages), Extracted(triples), passages
    if kind == "anchor":
        request = Anchor(draw(TEXT), draw(COUNT), draw(st.sampled_from(["coverage", "ratio"])))
        return request, Anchored(draw(tuples(TEXT)), draw(tuples(TRIPLE))), passages
    if kind == "link":
        linked = Linked(draw(tuples(TRIPLE)), draw(tuples(NUMBER)), draw(NUMBER))
        return Link(draw(TEXT), draw(COUNT)), linked, passages
    if kind == "walk":
        settings = draw(COUNT), draw(COUNT), draw(COUNT), draw(NUMBER), draw(NUMBER)
        request = Walk(draw(TEXT), draw(tuples(TRIPLE)), draw(tuples(NUMBER)), *settings)
        return request, Retrieved(passages, tuple(draw(NUMBER) for _ in passages)), passages
    if kind == "route":
        scalars = tuple(draw(tuples(NUMBER)))
        route = Route(draw(TEXT), "triple", scalars, draw(st.booleans()))
        return route, Routed(draw(NUMBER)), passages
    if kind == "demonstrate":
        return Demonstrate(draw(TEXT), draw(COUNT)), Demonstrated(QUESTIONS), passages
    if kind == "rank":
        texts = draw(tuples(st.one_of(TRIPLE, TEXT, PASSAGE), unique=True))
        order = draw(st.permutations(texts))[: draw(st.integers(0, 5))]
        response = Ranked(tuple(order), tuple(draw(NUMBER) for _ in order))
        return Rank(draw(TEXT), texts, draw(COUNT), draw(TEXT)), response, passages
    message = st.builds(Message, st.sampled_from(["system", "user", "assistant"]), TEXT, TEXT, TEXT)
    request = Generate(
        draw(tuples(message)),
        "reader",
        draw(st.integers(0, 99)),
        draw(st.floats(0, 2)),
        draw(st.floats(0, 1, exclude_min=True)),
        draw(COUNT),
        draw(tuples(TEXT)),
        draw(st.booleans()),
        draw(st.one_of(st.none(), st.just({"type": "object"}))),
    )
    reason = draw(st.sampled_from(["stop", "length"]))
    return request, Generated(draw(TEXT), reason, draw(USAGE)), passages


def through_json(value):
    return json.loads(codec.dump(value))


@settings(max_examples=200, deadline=None)
@given(exchanges())
def test_response_round_trip(exchange):
    request, response, passages = exchange
    data = through_json(codec.encode_response(request, response))
    by_id = {p.id: p for p in passages}
    decoded = codec.decode_response(request, data, by_id.__getitem__)
    if isinstance(response, RequestError):
        assert isinstance(decoded, RequestError) and str(decoded) == str(response)
    else:
        assert decoded == response


@settings(max_examples=200, deadline=None)
@given(exchanges(), exchanges())
def test_digests_differ_as_requests_do(one, two):
    a, b = (codec.dump(codec.encode_request(e[0])) for e in (one, two))
    assert json.loads(a)["kind"] == codec.KINDS[type(one[0])]
    # Passages are identified by their ids, because their texts come from the corpus.
    if not isinstance(one[0], Extract | Rank):
        assert (codec.digest(a) == codec.digest(b)) == (one[0] == two[0])


@settings(max_examples=100, deadline=None)
@given(
    st.builds(
        Prediction,
        TEXT,
        st.sampled_from(["triple", "sentence", "passage", "default"]),
        tuples(TEXT),
        tuples(st.tuples(TEXT, st.integers(0, 9))),
        tuples(TRIPLE),
        tuples(
            st.builds(
                Step, TEXT, tuples(TEXT), tuples(UNIT), tuples(NUMBER), TEXT, tuples(UNIT),
                st.one_of(st.none(), TEXT), TEXT, tuples(TEXT), NOTES,
            )
        ),
        tuples(st.builds(Attempt, st.just("triple"), tuples(TEXT), TEXT, TEXT, st.booleans())),
        st.dictionaries(TEXT, st.integers(1, 9), max_size=3),
    )
)  # fmt: skip
def test_prediction_round_trip(prediction):
    assert msgspec.convert(through_json(codec.encode(prediction)), Prediction) == prediction


@pytest.mark.parametrize(
    ("request_", "response"),
    [
        (Retrieve("x", 1), Generated("x", "stop")),
        (say("x"), Retrieved((), ())),
        (Rank("x", (), 1, "r"), Extracted(())),
        (Extract(()), None),
    ],
)
def test_encode_response_wrong_kind_is_rejected(request_, response):
    with pytest.raises(TypeError, match="does not answer"):
        codec.encode_response(request_, response)


def test_encode_request_wrong_type_is_rejected():
    with pytest.raises(TypeError, match="yielded str"):
        codec.encode_request("who?")  # pyright: ignore[reportArgumentType]


def test_equal_values_have_equal_text():
    assert codec.dump({"b": 1, "a": "é"}) == codec.dump({"a": "é", "b": 1}) == '{"a":"é","b":1}'
    assert codec.digest("x") == codec.digest("x") != codec.digest("y")
    assert len(codec.digest("\ud800")) == 32  # a command line may contain a lone surrogate


def test_encode_request_contains_every_field():
    request = say("x")
    texts = {codec.dump(codec.encode_request(request))}
    changes = (
        {"max_tokens": 3},
        {"temperature": 0.5},
        {"stop": ("a",)},
        {"continue_final": True},
        {"json_schema": {}},
    )
    for change in changes:
        texts.add(codec.dump(codec.encode_request(say("x", **change))))
    texts.add(codec.dump(codec.encode_request(say("x", "judge"))))
    # The part of the turn matters, because truncation drops observations only.
    texts.add(codec.dump(codec.encode_request(Generate((Message("user", "", "x"),), "reader"))))
    assert len(texts) == 8


def test_encode_passages_as_ids_and_texts_as_indices():
    triples = tuple(Triple(name, "is", "x", "p") for name in "abc")
    ranked = Ranked((triples[2], triples[0]), (0.5, 0.25))
    assert codec.encode_response(Rank("q", triples, 2, "r"), ranked) == {
        "order": [2, 0],
        "scores": [0.5, 0.25],
    }
    request = codec.encode_request(Rank("q", ("a b", passage("p")), 1, "r"))
    assert request["texts"] == ["a b", {"passage": "p"}]
    response = response_to(Retrieve("q", 1))
    assert response.passages == (passage("q0"),)
    assert codec.encode_response(Retrieve("q", 1), response) == {
        "passages": ["q0"],
        "scores": [1.0],
    }
