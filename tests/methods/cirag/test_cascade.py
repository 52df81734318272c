"""CIRAG's reader driven by hand: triples first, their sentences, their passages."""

import pytest

from cirag_jax.methods.cirag.cascade import contains_answer
from cirag_jax.runtime.requests import Generate, Generated
from cirag_jax.types import Triple
from tests.methods.ada import (
    ADA,
    ANSWERS,
    ENDS,
    ENDS_BORN,
    GOES_ON,
    LUND,
    NEXT,
    NO_FACT,
    OTHER,
    QUESTION,
    REFUSES,
    hand,
    run,
)
from tests.methods.by_hand import decision, prompt


@pytest.mark.parametrize(
    ("refusals", "granularity"), [(0, "triple"), (1, "sentence"), (2, "passage")]
)
def test_the_first_granularity_that_answers_is_taken(refusals, granularity):
    hands = hand([GOES_ON, ENDS], [REFUSES] * refusals + [ANSWERS])
    found = run(hands)
    assert (found.answer, found.granularity) == ("Skane", granularity)
    assert [a.sufficient for a in found.attempts] == [False] * refusals + [True]
    pools = [
        ("('ada moen', 'born in', 'lund')", "('lund', 'in', 'sk ne')"),
        ("Ada Moen: Ada Moen was born in Lund.", "Lund: Lund is in Skane."),
        (f"Ada Moen\n{ADA.text}", f"Lund\n{LUND.text}"),
    ]
    for attempt, request, pool in zip(
        found.attempts, hands.asked(Generate, "reader"), pools, strict=False
    ):
        assert attempt.evidence == pool
        last = request.messages[-1]
        assert last.observation == "\n".join(pool)  # what truncation may drop
        assert QUESTION in last.ending and attempt.granularity in last.content.lower()


def test_where_all_refuse_the_last_output_stands_in_the_default_bucket():
    found = run(hand([GOES_ON, ENDS], [REFUSES] * 3))
    assert (found.answer, found.granularity) == ("Unanswerable", "default")
    assert [a.sufficient for a in found.attempts] == [False] * 3


@pytest.mark.parametrize(
    "granularities",
    [
        *(("triple",), ("sentence",), ("passage",)),
        *(("triple", "sentence"), ("sentence", "passage"), ("triple", "passage")),
    ],
)
def test_any_subset_of_granularities(granularities):
    refused = [REFUSES] * (len(granularities) - 1)
    found = run(hand([GOES_ON, ENDS], [*refused, ANSWERS]), granularities=granularities)
    assert tuple(a.granularity for a in found.attempts) == granularities
    assert (found.answer, found.granularity) == ("Skane", granularities[-1])
    found = run(hand([GOES_ON, ENDS], [*refused, REFUSES]), granularities=granularities)
    assert (found.answer, found.granularity) == ("Unanswerable", "default")


def test_a_single_level_with_an_empty_pool_answers_nothing():
    hands = hand([decision("", NO_FACT, "")])
    found = run(hands, granularities=("triple",))
    assert not hands.asked(Generate, "reader")
    assert (found.answer, found.granularity) == ("", "default")


def test_without_core_passages_the_first_rounds_documents_are_read():
    texts = [decision("", NO_FACT, NEXT), decision("", NO_FACT, "")]
    found = run(hand(texts, [ANSWERS]))
    assert found.attempts[-1].evidence == (f"Ada Moen\n{ADA.text}", f"Kiruna\n{OTHER.text}")


def test_a_triple_without_a_sentence_leaves_the_sentence_pool_empty():
    unknown = Triple("Ada Moen", "born in", "Lund", "a", None)
    hands = hand([ENDS_BORN], [REFUSES, ANSWERS], triples={"a": (unknown,)})
    found = run(hands)
    assert [bool(a.evidence) for a in found.attempts] == [True, False, True]
    assert found.attempts[-1].evidence == (f"Ada Moen\n{ADA.text}",)


def test_force_answer_asks_the_last_level_again_without_a_way_out():
    hands = hand([GOES_ON, ENDS], [REFUSES] * 3 + [ANSWERS])
    found = run(hands, force_answer=True)
    asked = hands.asked(Generate, "reader")
    assert [a.granularity for a in found.attempts] == ["triple", "sentence", "passage", "passage"]
    assert found.attempts[3].evidence == found.attempts[2].evidence
    assert all("Unanswerable" in prompt(r) for r in asked[:3])
    assert "Unanswerable" not in prompt(asked[3])
    assert (found.answer, found.granularity) == ("Skane", "default")


def test_force_answer_reads_passages_where_the_last_pool_is_empty():
    hands = hand([decision("", NO_FACT, "")], [ANSWERS])
    found = run(hands, granularities=("triple",), force_answer=True)
    assert [a.granularity for a in found.attempts] == ["triple", "passage"]
    assert found.attempts[-1].evidence == (f"Ada Moen\n{ADA.text}", f"Kiruna\n{OTHER.text}")
    assert found.granularity == "default"


def test_a_sentence_that_its_passage_does_not_have_is_no_evidence():
    beyond = Triple("Ada Moen", "born in", "Kiruna", "a", 99)
    found = run(hand([ENDS_BORN], [REFUSES, ANSWERS], triples={"a": (beyond,)}))
    assert [(a.granularity, bool(a.evidence)) for a in found.attempts] == [
        ("triple", True),
        ("sentence", False),
        ("passage", True),
    ]


def test_force_answer_changes_nothing_where_a_level_answers():
    found = run(hand([GOES_ON, ENDS], [ANSWERS]), force_answer=True)
    assert len(found.attempts) == 1


def test_paraphrased_refusals_count_only_where_asked():
    shy = "Thought: no.\nAnswer: This cannot be determined."
    found = run(hand([GOES_ON, ENDS], [shy]))
    assert found.granularity == "triple"
    found = run(hand([GOES_ON, ENDS], [shy, shy, ANSWERS]), wide_refusal=True)
    assert found.granularity == "passage"


def test_an_answer_that_the_evidence_lacks_is_refused_where_asked():
    made_up, torn = "Answer: Oslo", "Answer: in Sk"  # a part of "in Skåne" is not its words
    found = run(hand([GOES_ON, ENDS], [made_up]))
    assert (found.answer, found.granularity) == ("Oslo", "triple")
    found = run(hand([GOES_ON, ENDS], [made_up, torn, "Answer: LUND."]), grounded_answers=True)
    assert [a.sufficient for a in found.attempts] == [False, False, True]
    assert (found.answer, found.granularity) == ("LUND.", "passage")
    # Triples are shown in ascii: what they lost of a letter is no difference, nothing is no word.
    found = run(hand([GOES_ON, ENDS], ["Answer: Sk\u00e5ne"]), grounded_answers=True)
    assert (found.answer, found.granularity) == ("Sk\u00e5ne", "triple")
    assert contains_answer(["\u041b\u0443\u043d\u0434"], "\u041b\u0443\u043d\u0434")
    assert not contains_answer(["\u041b\u0443\u043d\u0434"], "\u041e\u0441\u043b\u043e")
    # Where no evidence has the answer, it stands by default; a yes or a no need not be there.
    found = run(hand([GOES_ON, ENDS], [made_up] * 3), grounded_answers=True)
    assert (found.answer, found.granularity) == ("Oslo", "default")
    found = run(hand([GOES_ON, ENDS], ["Answer: No."]), grounded_answers=True)
    assert (found.answer, found.granularity) == ("No.", "triple")


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
def test_malformed_answers_are_counted(text, problem, granularity):
    refused = granularity == "sentence"
    found = run(hand([GOES_ON, ENDS], [text, ANSWERS] if refused else [text]))
    assert found.parse_errors == {problem: 1}
    assert (found.answer, found.granularity) == ("Skane", granularity)


def test_a_brief_reader_is_asked_for_the_answer_alone():
    hands = hand([ENDS_BORN], ["Answer: Skane"])
    found = run(hands, reader_format="brief")
    (asked,) = hands.asked(Generate, "reader")
    assert [message.role for message in asked.messages] == ["system", "user"]
    assert "Thought" not in prompt(asked) and found.answer == "Skane"
