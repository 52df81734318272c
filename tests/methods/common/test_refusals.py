"""Paraphrased refusals, and answers that resemble refusals."""

import pytest

from cirag_jax.methods.common.refusals import refuses


@pytest.mark.parametrize(
    "answer",
    [
        "Unanswerable",
        "It is unanswerable from these triples",
        "Unknown",
        "**Unknown.**",
        "(unknown)",
        "The answer is unknown.",
        "Unknown. The text names no director.",
        "Unknown, based on the given passages",
        "N/A",
        "None",
        "None of the above",
        "Not specified.",
        "Not mentioned in the triples",
        "I don't know",
        "The answer is not possible to determine from the given triples.",
        "It is not possible to say which of them is older",
        "It is impossible to determine the answer.",
        "This can't be determined",
        "This can\u2019t be answered with the given information",
        "The birthplace of her mother cannot be definitively determined.",
        "We cannot determine the country",
        "I am unable to answer this question.",
        "This question is too vague to answer",
        "The name of the company is not specified in the question.",
        "The director isn't explicitly mentioned",
        "His father is unknown",
        "The date remains unclear from the sentences",
        "There is no information about his wife in the triples",
        "There's not enough information to answer",
        "Insufficient information",
        "No direct evidence",
        "The provided triples do not mention the county.",
        "The passages don't contain the answer",
        "None of these triples does not state it, and the text about Lund does not say",
        "The evidence on Lund does not explicitly state its county",
        "He is Andy, a tennis player, so the answer is: Unknown",
        "The triples name her, but it is not possible to determine her birthplace",
        "The documents do not provide\nenough details",
    ],
)
def test_refuses_paraphrases_are_refusals(answer):
    assert refuses(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Skane",
        "no",
        "No, it is not.",
        "Not Without My Daughter",
        "Unknown Pleasures",
        "None but the Lonely Heart",
        "Nonesuch Records",
        "The Unknown",
        "Tomb of the Unknown Soldier",
        "The Unknown Known",
        "Known Unknown",
        "Not Given Lightly",
        "Not Known at This Address",
        "Not Specified Enough",
        "No Mercy",
        "No Answer Came",
        "No Information Society",
        "Insufficient Funds",
        "I Don't Know How to Love Him",
        "I Cannot Say Farewell",
        "I Cannot Tell a Lie",
        "Can't Tell Me Nothing",
        "It Doesn't Have to Be That Way",
        "Hips Don't Lie",
        "Wait Wait... Don't Tell Me!",
        "Impossible to Forget",
        "The Answer",
        "Nothing but the Truth",
        "The Man Who Knew Too Little",
        "The Impossible",
        "The Text of Light",
        "Evidence of Absence",
        "Greg Anthony did not play for Portland",
        "released from prison, determined to find out who framed him",
        "Lund (the street is not mentioned)",
        "Lund, although its province is not mentioned in the triples",
        "The first triple does not mention it, but the second says Lund",
    ],
)
def test_refuses_similar_answers_are_not_refusals(answer):
    assert not refuses(answer)
