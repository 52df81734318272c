"""The cascade with a router: skipped granularities, and the features that the router reads."""

import pytest

from cirag_jax.llm.types import Generated, Token
from cirag_jax.methods.cirag import routing
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.runtime.requests import Generate, Route
from cirag_jax.types import Attempt, Step, Triple
from tests.methods.ada import ANSWER, CONTINUE, FINAL, QUESTION, REFUSAL, fake, run


def said(text, *logprobs):
    tokens = tuple(Token("x", 1, logprob) for logprob in logprobs)
    return Generated(text, "stop", tokens=tokens)


def routed(fakes, **fields):
    return run(fakes, router="W", **fields)


@pytest.mark.parametrize(
    ("probabilities", "skip", "levels"),
    [
        ((0.9, 0.9), 0.5, ["triple"]),
        ((0.1, 0.9), 0.5, ["sentence"]),
        ((0.1, 0.2), 0.5, ["passage"]),
        ((0.5, 0.0), 0.5, ["triple"]),
        ((0.1, 0.2), 0.15, ["sentence"]),
    ],
)
def test_cascade_router_skips_granularities(probabilities, skip, levels):
    fakes = fake([CONTINUE, FINAL], [ANSWER])
    fakes.routed = dict(zip(("triple", "sentence"), probabilities, strict=True))
    result = routed(fakes, router_skip=skip)
    assert [a.granularity for a in result.attempts if a.evidence] == levels
    assert (result.answer, result.granularity) == ("Skane", levels[0])
    assert all(request.logprobs for request in fakes.received(Generate, "reader"))


def test_cascade_router_reads_the_first_refusal():
    fakes = fake([CONTINUE, FINAL], [said(REFUSAL, -0.5, -1.5), ANSWER])
    fakes.routed = {"triple": 1.0, "sentence": 0.0}
    result = routed(fakes)
    assert [bool(a.evidence) for a in result.attempts] == [True, False, True]
    assert result.attempts[0].logprobs == (-0.5, -1.5)
    first, second = fakes.received(Route)
    assert (first.question, first.granularity, first.refused) == (QUESTION, "triple", False)
    assert (second.granularity, second.refused) == ("sentence", True)
    assert second.scalars == (*first.scalars, -0.5, -1.0, -1.5)
    assert len(first.scalars) == routing.NUM_SCALARS[False]
    assert len(second.scalars) == routing.NUM_SCALARS[True]


def test_cascade_router_last_granularity_is_never_skipped():
    fakes = fake([CONTINUE, FINAL], [ANSWER])
    fakes.routed = {"triple": 0.0}
    result = routed(fakes, granularities=("triple", "sentence"))
    assert [request.granularity for request in fakes.received(Route)] == ["triple"]
    assert result.granularity == "sentence"


def test_cascade_without_router_makes_no_route_request():
    fakes = fake([CONTINUE, FINAL], [said(ANSWER, -0.5)])
    result = run(fakes, answer_logprobs=True)
    assert not fakes.received(Route) and result.attempts[0].logprobs == (-0.5,)
    (request,) = fakes.received(Generate, "reader")
    assert request.logprobs
    fakes = fake([CONTINUE, FINAL], [ANSWER])
    run(fakes)
    assert not fakes.received(Generate, "reader")[0].logprobs


def test_scalars_of_rounds():
    a, b, c = (Triple(name, "r", "t") for name in "abc")
    steps = [Step("q", (), (a, b), (0.9, 0.2), kept=(b, a)), Step("q", (), (c,), (0.4,), kept=(b,))]
    assert routing.scalars(steps) == pytest.approx((2, 3, 0.9, 0.55, 0.2, 0.4))
    assert routing.scalars([]) == (0, 0, 0, 0, 0, 0)
    refusal = Attempt("triple", ("x",), "", "", False)
    assert routing.scalars([], refusal) == (0, 0, 0, 0, 0, 0)


def test_settings_router_needs_router_and_log_probabilities():
    needs = CiragConfig(router="W").needs
    assert needs.router and needs.abilities["reader"] == ("logprobs",)
    assert not CiragConfig().needs.router and "reader" not in CiragConfig().needs.abilities
