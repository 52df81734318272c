"""The cascade of readers: triples first, then their sentences, then their passages."""

import pytest

from cirag_jax.methods.cirag.cascade import contains_answer
from cirag_jax.runtime.requests import Generate, Generated, RequestError
from cirag_jax.types import Triple
from tests.methods.ada import (
    ADA,
    ANSWER,
    CONTINUE,
    FINAL,
    FINAL_BORN,
    LUND,
    NEXT,
    NO_FACT,
    OTHER,
    QUESTION,
    REFUSAL,
    fake,
    run,
)
from tests.methods.fakes import decision, prompt


@pytest.mark.parametrize(
    ("refusals", "granularity"), [(0, "triple"), (1, "sentence"), (2, "passage")]
)
def test_cascade_first_sufficient_granularity_answers(refusals, granularity):
    fakes = fake([CONTINUE, FINAL], [REFUSAL] * refusals + [ANSWER])
    result = run(fakes)
    assert (result.answer, result.granularity) == ("Skane", granularity)
    assert [a.sufficient for a in result.attempts] == [False] * refusals + [True]
    pools = [
        ("('ada moen', 'born in', 'lund')", "('lund', 'in', 'sk ne')"),
        ("Ada Moen: Ada Moen was born in Lund.", "Lund: Lund is in Skane."),
        (f"Ada Moen\n{ADA.text}", f"Lund\n{LUND.text}"),
    ]
    for attempt, request, pool in zip(
        result.attempts, fakes.received(Generate, "reader"), pools, strict=False
    ):
        assert attempt.evidence == pool
        last = request.messages[-1]
        assert last.observation == "\n".join(pool)  # Truncation may drop it.
        assert QUESTION in last.ending and attempt.granularity in last.content.lower()


def test_cascade_all_refuse_answer_is_empty():
    result = run(fake([CONTINUE, FINAL], [REFUSAL] * 3))
    assert (result.answer, result.granularity) == ("", "default")
    assert [a.sufficient for a in result.attempts] == [False] * 3


@pytest.mark.parametrize(
    "granularities",
    [
        *(("triple",), ("sentence",), ("passage",)),
        *(("triple", "sentence"), ("sentence", "passage"), ("triple", "passage")),
    ],
)
def test_cascade_any_subset_of_granularities_is_read(granularities):
    refused = [REFUSAL] * (len(granularities) - 1)
    result = run(fake([CONTINUE, FINAL], [*refused, ANSWER]), granularities=granularities)
    assert tuple(a.granularity for a in result.attempts) == granularities
    assert (result.answer, result.granularity) == ("Skane", granularities[-1])
    result = run(fake([CONTINUE, FINAL], [*refused, REFUSAL]), granularities=granularities)
    assert (result.answer, result.granularity) == ("", "default")


def test_cascade_failed_reader_reads_no_further():
    down = RequestError("the server is down")
    result = run(fake([CONTINUE, FINAL], [REFUSAL, down]), force_answer=True)
    assert [a.granularity for a in result.attempts] == ["triple", "sentence"]
    assert (result.answer, result.error) == ("", "the server is down")


def test_cascade_single_empty_pool_gives_no_answer():
    fakes = fake([decision("", NO_FACT, "")])
    result = run(fakes, granularities=("triple",))
    assert not fakes.received(Generate, "reader")
    assert (result.answer, result.granularity) == ("", "default")


def test_cascade_no_core_passages_reads_first_round():
    texts = [decision("", NO_FACT, NEXT), decision("", NO_FACT, "")]
    result = run(fake(texts, [ANSWER]))
    assert result.attempts[-1].evidence == (f"Ada Moen\n{ADA.text}", f"Kiruna\n{OTHER.text}")


def test_cascade_triple_without_sentence_gives_empty_pool():
    unknown = Triple("Ada Moen", "born in", "Lund", "a", None)
    fakes = fake([FINAL_BORN], [REFUSAL, ANSWER], triples={"a": (unknown,)})
    result = run(fakes)
    assert [bool(a.evidence) for a in result.attempts] == [True, False, True]
    assert result.attempts[-1].evidence == (f"Ada Moen\n{ADA.text}",)


def test_cascade_force_answer_repeats_without_refusal():
    fakes = fake([CONTINUE, FINAL], [REFUSAL] * 3 + [ANSWER])
    result = run(fakes, force_answer=True)
    asked = fakes.received(Generate, "reader")
    assert [a.granularity for a in result.attempts] == ["triple", "sentence", "passage", "passage"]
    assert result.attempts[3].evidence == result.attempts[2].evidence
    assert all("Unanswerable" in prompt(r) for r in asked[:3])
    assert "Unanswerable" not in prompt(asked[3])
    assert (result.answer, result.granularity) == ("Skane", "default")


def test_cascade_force_answer_empty_pool_reads_passages():
    fakes = fake([decision("", NO_FACT, "")], [ANSWER])
    result = run(fakes, granularities=("triple",), force_answer=True)
    assert [a.granularity for a in result.attempts] == ["triple", "passage"]
    assert result.attempts[-1].evidence == (f"Ada Moen\n{ADA.text}", f"Kiruna\n{OTHER.text}")
    assert result.granularity == "default"


def test_cascade_sentence_out_of_range_is_ignored():
    beyond = Triple("Ada Moen", "born in", "Kiruna", "a", 99)
    result = run(fake([FINAL_BORN], [REFUSAL, ANSWER], triples={"a": (beyond,)}))
    assert [(a.granularity, bool(a.evidence)) for a in result.attempts] == [
        ("triple", True),
        ("sentence", False),
        ("passage", True),
    ]


def test_cascade_force_answer_after_answer_does_nothing():
    result = run(fake([CONTINUE, FINAL], [ANSWER]), force_answer=True)
    assert len(result.attempts) == 1


def test_cascade_paraphrased_refusal_needs_wide_refusal():
    shy = "Thought: no.\nAnswer: This cannot be determined."
    result = run(fake([CONTINUE, FINAL], [shy]))
    assert result.granularity == "triple"
    result = run(fake([CONTINUE, FINAL], [shy, shy, ANSWER]), wide_refusal=True)
    assert result.granularity == "passage"


def test_cascade_ungrounded_answer_is_refused():
    made_up, torn = "Answer: Oslo", "Answer: in Sk"  # "in Sk" ends within a word.
    result = run(fake([CONTINUE, FINAL], [made_up]))
    assert (result.answer, result.granularity) == ("Oslo", "triple")
    result = run(fake([CONTINUE, FINAL], [made_up, torn, "Answer: LUND."]), grounded_answers=True)
    assert [a.sufficient for a in result.attempts] == [False, False, True]
    assert (result.answer, result.granularity) == ("LUND.", "passage")
    # Triples are shown in ASCII, so answers may differ in letters that ASCII lacks.
    result = run(fake([CONTINUE, FINAL], ["Answer: Sk\u00e5ne"]), grounded_answers=True)
    assert (result.answer, result.granularity) == ("Sk\u00e5ne", "triple")
    assert contains_answer(["\u041b\u0443\u043d\u0434"], "\u041b\u0443\u043d\u0434")
    assert not contains_answer(["\u041b\u0443\u043d\u0434"], "\u041e\u0441\u043b\u043e")
    # An answer without support is a refusal, unless it is forced; yes and no need no support.
    result = run(fake([CONTINUE, FINAL], [made_up] * 3), grounded_answers=True)
    assert (result.answer, result.granularity) == ("", "default")
    result = run(fake([CONTINUE, FINAL], [made_up] * 4), grounded_answers=True, force_answer=True)
    assert (result.answer, result.granularity) == ("Oslo", "default")
    result = run(fake([CONTINUE, FINAL], ["Answer: No."]), grounded_answers=True)
    assert (result.answer, result.granularity) == ("No.", "triple")


@pytest.mark.parametrize(
    ("text", "problem", "granularity"),
    [
        ("", "answer_empty", "sentence"),
        ("Answer:", "answer_empty", "sentence"),
        ("Skane", "answer_no_answer_mark", "triple"),
        ("It is unanswerable, sorry", "answer_no_answer_mark", "sentence"),
        (Generated("Thought: Ada Moen was", "length"), "answer_truncated", "sentence"),
    ],
)
def test_cascade_malformed_answers_are_counted(text, problem, granularity):
    refused = granularity == "sentence"
    result = run(fake([CONTINUE, FINAL], [text, ANSWER] if refused else [text]))
    assert result.parse_errors == {problem: 1}
    assert (result.answer, result.granularity) == ("Skane", granularity)


def test_cascade_brief_format_requests_only_the_answer():
    fakes = fake([FINAL_BORN], ["Answer: Skane"])
    result = run(fakes, reader_format="brief")
    (asked,) = fakes.received(Generate, "reader")
    assert [message.role for message in asked.messages] == ["system", "user"]
    assert "Thought" not in prompt(asked) and result.answer == "Skane"
