"""Claims made from sentences, by rules and by a fake model."""

from typing import Any

import pytest

from cirag_jax.errors import UserError
from cirag_jax.grade import claims
from cirag_jax.grade.claims import ClaimSettings
from cirag_jax.grade.records import Document
from cirag_jax.llm.types import Generated

MILL = Document("m", "Osk Mill", ("Osk Mill is a mill.", "It opened in 1871.", "I love it!"))
RULES = ClaimSettings(filter="rules", kind="rules")


def drive(index, settings, *answers):
    """Runs the program; returns the requested roles and the result.

    An answer is a text or a pair (text, finish reason).
    """
    program, roles = claims.claim(MILL, index, settings), []
    try:
        request: Any = next(program)
        for answer in answers:
            roles.append(request.role)
            text, finish = answer if isinstance(answer, tuple) else (answer, "stop")
            request = program.send(Generated(text, finish))
    except StopIteration as end:
        return roles, end.value
    raise AssertionError(f"it also asks {request.role}")


def test_claim_by_rules_sends_no_request():
    assert drive(0, RULES) == ([], {"text": "Osk Mill is a mill."})
    assert drive(1, RULES) == ([], {"text": "Osk Mill opened in 1871."})
    assert drive(2, RULES) == ([], {"reason": "opinion"})


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        ("Who built it?", "question"),
        ("You should see Osk.", "opinion"),
        ("the mill is old.", "no_names"),
        ("It has 3 wheels.", None),
        ("It opened in May.", None),
    ],
)
def test_rejection_reason_examples(sentence, reason):
    assert claims.rejection_reason(sentence) == reason


@pytest.mark.parametrize(
    ("sentence", "claim"),
    [
        ("Its wheel is old.", "Osk Mill's wheel is old."),
        ("It's old.", "Osk Mill: It's old."),
        ("The wheel of osk mill is old.", "The wheel of osk mill is old."),
        ("About 30 people work there.", "Osk Mill: About 30 people work there."),
        ("Italy bought it.", "Osk Mill: Italy bought it."),
    ],
)
def test_decontextualised_replaces_first_pronoun(sentence, claim):
    assert claims.decontextualised(sentence, "Osk Mill") == claim
    assert claims.decontextualised(sentence, "") == sentence
    assert claims.decontextualised("It runs.", r"A\1 Mill") == r"A\1 Mill runs."


MODEL = ClaimSettings()


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        (("Fact", "Claim: Osk Mill opened in 1871.", "Yes"), {"text": "Osk Mill opened in 1871."}),
        (("Opinion",), {"reason": "opinion"}),
        (("Hm",), {"reason": "no_verdict"}),
        (("Fact", "Claim: none"), {"reason": "empty"}),
        (("Fact", ""), {"reason": "no_claim"}),
        (("Fact", "Claim: It opened in 1871."), {"reason": "pronoun"}),
        (("Fact", ("Claim: Osk Mill op", "length")), {"reason": "cut"}),
        (("Fact", "Claim: Osk Mill closed.", "No"), {"reason": "inconsistent"}),
        (("Fact", "Claim: Osk Mill closed.", "?"), {"reason": "no_verdict"}),
    ],
)
def test_claim_by_model_gives_claim_or_reason(answers, outcome):
    roles, result = drive(1, MODEL, *answers)
    assert result == outcome and roles == ["filter", "claimer", "checker"][: len(answers)]


def test_claim_settings_skip_requests():
    roles, _ = drive(1, ClaimSettings(filter="off", check=False), "Claim: Osk Mill opened.")
    assert roles == ["claimer"] == list(ClaimSettings(filter="off", check=False).roles)
    assert MODEL.roles == ("filter", "claimer", "checker") and RULES.roles == ()


def test_window_has_whole_sentences_around_claim():
    document = Document("d", "T", tuple(f"{word} {word}." for word in "abcdef"))
    assert claims.window(document, 2, 0) == "T: a a. b b. c c. d d. e e. f f."
    assert claims.window(document, 2, 6) == "T: b b. c c. d d."
    assert claims.window(document, 0, 4) == "T: a a. b b."
    assert claims.window(document, 5, 4) == "T: e e. f f."
    assert claims.window(document, 2, 1) == "T: c c."
    assert claims.window(document, 0, 99) == claims.window(document, 5, 99)


@pytest.mark.parametrize("fields", [{"filter": "x"}, {"kind": "off"}, {"max_tokens": 0}])
def test_settings_reject_invalid_values(fields):
    with pytest.raises(UserError, match="config.claims"):
        ClaimSettings(**fields)
