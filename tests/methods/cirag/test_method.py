"""CIRAG driven by hand through every branch, with canned retrievals and texts."""

import math

import pytest

from cirag_jax.methods.cirag.integrators import keep_top
from cirag_jax.runtime.requests import Generate, Generated, Rank, Retrieve, Score
from cirag_jax.types import Triple
from tests.methods.ada import (
    ADA,
    ANSWERS,
    BORN,
    CHURCH,
    ENDS,
    ENDS_BORN,
    FACT_BORN,
    GOES_ON,
    LUND,
    MINE,
    NEXT,
    NO_FACT,
    OTHER,
    PAINTS,
    PLACE,
    QUESTION,
    hand,
    run,
)
from tests.methods.by_hand import decision, prompt

# ---------------------------------------------------------------------------------------- the loop


def test_two_rounds_and_an_answer_from_triples():
    hands = hand([GOES_ON, ENDS], [ANSWERS])
    found = run(hands)
    assert hands.kinds() == [
        *("Retrieve", "Extract", "Rank", "integrator") * 2,
        "reader",
    ]
    assert [r.query for r in hands.asked(Retrieve)] == [QUESTION, NEXT]
    assert [r.query for r in hands.asked(Rank)] == [QUESTION, NEXT]
    assert {r.k for r in hands.asked(Retrieve)} == {10}
    assert {r.n for r in hands.asked(Rank)} == {30}
    assert (found.answer, found.granularity, found.parse_errors) == ("Skane", "triple", {})
    assert [step.kept for step in found.steps] == [(BORN,), (PLACE,)]
    assert [step.next_query for step in found.steps] == [NEXT, None]
    assert [step.thought for step in found.steps] == ["Lund is her town.", "Lund is in Skane."]
    assert [step.response for step in found.steps] == [GOES_ON, ENDS]
    assert found.steps[0].passages == ("a", "c")
    assert found.steps[0].candidates == (BORN, PAINTS, MINE)
    assert found.steps[0].scores == (0.9, 0.3, 0.1)
    assert [(a.granularity, a.sufficient) for a in found.attempts] == [("triple", True)]
    assert found.attempts[0].evidence == (
        "('ada moen', 'born in', 'lund')",
        "('lund', 'in', 'sk ne')",
    )


@pytest.mark.parametrize(
    "question",
    [
        "<no question>",
        "",
        "  \n ",
        "< No Question >",
        "no question.",
        "None",
        "I know: <no_question>",
    ],
)
def test_no_question_ends_the_loop(question):
    found = run(hand([decision("Enough.", FACT_BORN, question)], [ANSWERS]))
    assert len(found.steps) == 1 and found.steps[0].next_query is None


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_step_limit_ends_the_loop(limit):
    texts = [decision("More.", FACT_BORN, f"question {i}?") for i in range(limit)]
    found = run(hand(texts, [ANSWERS]), max_steps=limit)
    assert len(found.steps) == limit
    assert found.steps[-1].next_query == f"question {limit - 1}?"


def test_the_rule_keeps_the_best_three_and_asks_again():
    hands = hand(reader=[ANSWERS])
    found = run(hands, integrator="top_k", max_steps=2)
    assert hands.kinds() == [*("Retrieve", "Extract", "Rank") * 2, "reader"]
    assert [r.query for r in hands.asked(Retrieve)] == [QUESTION, QUESTION]
    assert [step.kept for step in found.steps] == [(BORN, PAINTS, MINE)] * 2
    assert [step.next_query for step in found.steps] == [QUESTION] * 2
    assert len(found.attempts[0].evidence) == 3 and found.parse_errors == {}
    found = run(hand(reader=[ANSWERS]), integrator="top_k", max_steps=4, on_repeat="stop")
    assert len(found.steps) == 1
    four = (PLACE, BORN, CHURCH, MINE)
    assert keep_top(QUESTION, four).kept == four[:3]
    # It may also ask for what follows from what it kept.
    hands = hand(reader=[ANSWERS])
    run(hands, integrator="top_k", next_query="chain", max_steps=2)
    first, second = (request.query for request in hands.asked(Retrieve))
    assert first == QUESTION and second.startswith(QUESTION)
    assert all(part.lower() in second.lower() for t in (BORN, PAINTS, MINE) for part in t[:3])


def test_no_facts_but_a_question_goes_on():
    hands = hand([decision("Nothing yet.", NO_FACT, NEXT), ENDS], [ANSWERS])
    found = run(hands)
    assert [step.kept for step in found.steps] == [(), (PLACE,)]
    assert found.attempts[0].evidence == ("('lund', 'in', 'sk ne')",)
    assert found.parse_errors == {}


def test_no_facts_and_no_question_ends_with_empty_pools():
    hands = hand([decision("Nothing.", NO_FACT, "<no question>")], [ANSWERS])
    found = run(hands)
    assert [(a.granularity, a.evidence, a.sufficient) for a in found.attempts[:2]] == [
        ("triple", (), False),
        ("sentence", (), False),
    ]
    assert len(hands.asked(Generate, "reader")) == 1  # empty pools are refused without a call
    assert found.granularity == "passage" and found.answer == "Skane"


def test_a_missing_question_is_asked_for_once_and_the_loop_goes_on():
    silent = f"[[## thought ##]]\nHm.\n[[## fact_after_filter ##]]\n{FACT_BORN}"
    hands = hand([silent, f"[[## question ##]]\n{NEXT}", ENDS], [ANSWERS])
    found = run(hands)
    assert [step.next_query for step in found.steps] == [NEXT, None]
    assert found.steps[0].kept == (BORN,) and found.steps[0].response == silent
    assert found.parse_errors == {"asked_again": 1, "no_question": 1}
    first, again = hands.asked(Generate, "integrator")[:2]
    assert again.messages[: len(first.messages)] == first.messages
    assert again.messages[-2].text == silent and "question" in again.messages[-1].text


@pytest.mark.parametrize(
    ("second", "parse_errors"),
    [
        ("", {"no_question": 2, "no_decision": 1}),
        ("no idea", {"no_question": 2, "no_decision": 1}),
        (
            Generated("[[## question", "length"),
            {"no_question": 2, "truncated": 1, "no_decision": 1},
        ),
        ("<no question>", {"no_question": 1, "question_without_header": 1}),
        ("[[## question ##]]\n<no question>", {"no_question": 1}),
    ],
)
def test_a_question_missing_twice_ends_the_loop_but_did_not_stop(second, parse_errors):
    silent = f"[[## fact_after_filter ##]]\n{FACT_BORN}"
    found = run(hand([silent, second], [ANSWERS]))
    assert len(found.steps) == 1 and found.steps[0].next_query is None
    assert found.parse_errors == {"asked_again": 1, **parse_errors}


def test_a_reply_that_is_plainly_a_question_is_taken_without_its_header():
    silent = f"[[## fact_after_filter ##]]\n{FACT_BORN}"
    found = run(hand([silent, NEXT, ENDS], [ANSWERS]))
    assert [step.next_query for step in found.steps] == [NEXT, None]
    assert found.parse_errors == {
        **{"asked_again": 1, "no_question": 1, "question_without_header": 1}
    }


def test_without_retry_a_missing_question_ends_the_loop():
    hands = hand([f"[[## fact_after_filter ##]]\n{FACT_BORN}"], [ANSWERS])
    found = run(hands, retry=False)
    assert len(found.steps) == 1
    assert found.parse_errors == {"no_question": 1, "no_decision": 1}


def test_a_repeated_query_may_become_the_question_with_what_was_kept():
    again = decision("Once more.", FACT_BORN, QUESTION)
    hands = hand([again] * 3, [ANSWERS])
    run(hands, max_steps=3, on_repeat="chain")
    first, second, third = (request.query for request in hands.asked(Retrieve))
    assert first == QUESTION and QUESTION in second and second != QUESTION and third == second
    empty = hand([decision("Nothing.", NO_FACT, QUESTION)] * 2, [ANSWERS])
    run(empty, max_steps=2, on_repeat="chain")
    assert [request.query for request in empty.asked(Retrieve)] == [QUESTION, QUESTION]


def test_rounds_may_search_with_the_question_and_what_was_kept_until_the_integrator_stops():
    hands = hand([decision("Born.", FACT_BORN, NEXT), ENDS], [ANSWERS])
    found = run(hands, next_query="chain")
    first, second = (request.query for request in hands.asked(Retrieve))
    assert first == QUESTION and second.startswith(QUESTION) and "Lund" in second
    assert NEXT not in second and [step.next_query for step in found.steps] == [NEXT, None]


def test_what_was_kept_may_be_no_candidate_again():
    once = decision("Kept.", FACT_BORN, QUESTION)
    found = run(hand([once] * 2, [ANSWERS]), max_steps=2, only_new=True)
    first, second = found.steps
    assert BORN in first.candidates and BORN not in second.candidates
    assert len(second.candidates) == len(second.scores) == len(first.candidates) - 1
    assert second.kept == ()
    usual = run(hand([once] * 2, [ANSWERS]), max_steps=2)
    assert usual.steps[1].candidates == usual.steps[0].candidates


def test_an_empty_response_is_not_asked_for_again():
    hands = hand([""], [ANSWERS])
    found = run(hands)
    assert len(found.steps) == 1
    assert found.parse_errors == {"empty": 1, "no_decision": 1}


def test_a_repeated_query_ends_the_loop_only_where_asked():
    again = decision("Once more.", NO_FACT, QUESTION)
    found = run(hand([again], [ANSWERS]), on_repeat="stop")
    assert len(found.steps) == 1
    back = decision("Back.", NO_FACT, NEXT)
    found = run(hand([back, again], [ANSWERS]), on_repeat="stop")
    assert len(found.steps) == 2
    found = run(hand([again] * 3, [ANSWERS]), max_steps=3)
    assert [step.query for step in found.steps] == [QUESTION] * 3


def test_a_cut_off_response_is_counted():
    text = decision("Lund.", '{"fact": [["ada moen", "born in", "lund"], ["ada', NEXT)
    cut = Generated(text.partition("[[## question")[0].rstrip(), "length")
    found = run(hand([cut, f"[[## question ##]]\n{NEXT}", ENDS], [ANSWERS]))
    assert found.steps[0].kept == (BORN,)
    expected = {
        "asked_again": 1,
        "truncated": 1,
        "facts_truncated": 1,
        "no_question": 1,
        "not_a_triple": 1,
    }
    assert found.parse_errors == expected


def test_no_steps_reads_the_first_retrieval():
    hands = hand([], [ANSWERS])
    found = run(hands, max_steps=0)
    assert hands.kinds() == ["Retrieve", "reader"]
    assert [a.granularity for a in found.attempts] == ["triple", "sentence", "passage"]
    assert found.attempts[-1].evidence == (f"Ada Moen\n{ADA.text}", f"Kiruna\n{OTHER.text}")
    assert found.passages == ("a", "c") and found.steps[0].query == QUESTION


def test_nothing_retrieved_at_all():
    hands = hand([decision("Nothing.", NO_FACT, "")], [], found={None: ()})
    found = run(hands)
    assert hands.kinds() == ["Retrieve", "Extract", "integrator"]
    assert (found.answer, found.granularity) == ("", "default")
    assert (found.passages, found.sentences, found.triples) == ((), (), ())


# ------------------------------------------------------------------------------------ construction


def test_without_reranker_all_triples_are_candidates_in_passage_order():
    hands = hand([decision("", NO_FACT, "")], [ANSWERS])
    found = run(hands, use_reranker=False, num_candidates=1)
    assert not hands.asked(Rank)
    assert found.steps[0].candidates == (BORN, PAINTS, MINE)
    assert found.steps[0].scores == (0.0, 0.0, 0.0)


def test_candidates_and_passages_are_limited():
    hands = hand([decision("", NO_FACT, "")], [ANSWERS])
    found = run(hands, num_passages=1, num_candidates=1)
    assert found.steps[0].candidates == (BORN,) and found.steps[0].passages == ("a",)


def test_a_fact_of_several_passages_takes_its_best_ranked_source():
    same = Triple("ADA MOEN", "Born in", "Lund!", "c", 0)
    first = run(hand([ENDS_BORN], [ANSWERS], triples={"a": (BORN,), "c": (same,)}))
    assert first.steps[0].candidates == first.steps[0].kept == (BORN,)
    assert first.passages == ("a", "c")
    turned = hand([ENDS_BORN], [ANSWERS], triples={"a": (BORN,), "c": (same,)})
    turned.found = {None: (OTHER, ADA)}
    found = run(turned)
    assert found.steps[0].candidates == found.steps[0].kept == (same,)
    assert found.sentences == (("c", 0),)


def test_passages_without_triples_are_counted_apart():
    hands = hand([decision("", NO_FACT, "")], [ANSWERS], triples={"a": (), "c": None})
    found = run(hands)
    assert not hands.asked(Rank)  # there is nothing to rank
    assert found.parse_errors == {"passage_not_extracted": 1, "passage_without_triples": 1}


def test_a_triple_of_nothing_but_blanks_is_no_candidate():
    blank = Triple(" ", "", "\t", "a", 0)
    found = run(hand([decision("", NO_FACT, "")], [ANSWERS], triples={"a": (blank, BORN)}))
    assert found.steps[0].candidates == (BORN,)


def test_unicode_form_keeps_letters_of_every_script():
    hands = hand([decision("", '{"fact": [["LUND", "in", "skåne"]]}', "")], [ANSWERS])
    hands.found = {None: (LUND,)}
    found = run(hands, normalization="unicode")
    assert found.steps[0].kept == (PLACE,)
    assert found.attempts[0].evidence == ("('lund', 'in', 'skåne')",)
    assert '["lund", "in", "skåne"]' in prompt(hands.asked(Generate, "integrator")[0])


# ------------------------------------------------------------------------------------- integration


def test_a_round_extends_the_last_ones_conversation():
    third = decision("Still.", NO_FACT, "third?")
    hands = hand([GOES_ON, third, ENDS], [ANSWERS])
    run(hands)
    first, second, last = (r.messages for r in hands.asked(Generate, "integrator"))
    assert second[: len(first)] == first and last[: len(second)] == second
    roles = [message.role for message in last]
    assert roles == ["system", *("user", "assistant") * 2, "user"]
    assert QUESTION in last[1].text and QUESTION not in last[3].text
    assert last[2].text == GOES_ON  # the decision as understood, in the format asked for
    # What truncation may drop is the candidates alone.
    assert QUESTION in last[1].content and '{"fact": [[' in last[1].observation


def test_the_papers_rendering_is_one_turn_with_the_history_last():
    hands = hand([GOES_ON, ENDS], [ANSWERS])
    run(hands, prompt_format="paper")
    first, second = hands.asked(Generate, "integrator")
    assert [m.role for m in second.messages] == ["system", "user"]
    now, history = second.messages[1].text.split("[[## historical_context ##]]\n")
    assert now.startswith(f"[[## Original Query ##]]\n{QUESTION}\n\n[[## fact_before_filter ##]]\n")
    assert '["lund", "in", "sk ne"]' in now
    assert first.messages[1].text.endswith("[[## historical_context ##]]\nnone")
    # Equation 2: the earlier round's candidates too, of which it kept one.
    shown = (
        '["ada moen", "born in", "lund"], ["ada moen", "is", "painter"], ["kiruna", "has", "mine"]'
    )
    assert history == f'[[## fact_before_filter ##]]\n{{"fact": [{shown}]}}\n\n{GOES_ON}'
    assert second.messages[1].observation == history  # what truncation may drop


def test_the_papers_history_holds_every_round():
    texts = [decision("More.", FACT_BORN, f"question {i}?") for i in range(3)]
    hands = hand(texts, [ANSWERS])
    run(hands, prompt_format="paper", max_steps=3)
    history = hands.asked(Generate, "integrator")[2].messages[1].observation
    assert history.count("[[## fact_before_filter ##]]") == history.count("[[## question ##]]") == 2
    assert history.index('"kiruna"') < history.index("question 0?") < history.index('"cathedral"')
    assert history.endswith("question 1?")


def test_the_compact_format_keeps_candidates_by_number():
    hands = hand(["Keep: 1\nNext: In which province is Lund?", "Keep: 1\nNext: done"], [ANSWERS])
    prediction = run(hands, prompt_format="compact")
    first, second = hands.asked(Generate, "integrator")
    assert "1. Ada Moen | born in | Lund" in first.messages[1].text
    assert second.messages[2].text == "Keep: 1\nNext: In which province is Lund?"
    assert [step.kept for step in prediction.steps] == [
        step.candidates[:1] for step in prediction.steps
    ]
    assert prediction.steps[1].query == "In which province is Lund?"


def test_candidates_are_kept_by_probability():
    """BORN, PAINTS and MINE, then PLACE, CHURCH, BORN and PAINTS are the numbered candidates."""
    scores = [[math.log(p) for p in row] for row in ((0.4, 0.1, 0.3, 0.2), (0.1,) * 4 + (0.6,))]
    texts = [scores[0], " In which province is Lund? ", scores[1], Generated(" done", "length")]
    hands = hand(texts, [ANSWERS])
    found = run(hands, prompt_format="compact", keep_above=0.25)
    asked = [*hands.asked(Score), *hands.asked(Generate, "integrator")]
    assert [r.continuations for r in asked[:2]] == [
        (" 1\n", " 2\n", " 3\n", " none\n"),
        (" 1\n", " 2\n", " 3\n", " 4\n", " none\n"),
    ]
    assert [r.messages[-1].text for r in asked] == [
        "Keep:", "Keep:", "Keep: 1 3\nNext:", "Keep: none\nNext:"
    ]  # fmt: skip
    assert all(r.continue_final and r.messages[-1].role == "assistant" for r in asked)
    assert [step.kept for step in found.steps] == [(BORN, MINE), ()]
    assert [step.next_query for step in found.steps] == [NEXT, None]
    assert found.steps[0].response == f"Keep: 1 3\nNext: {NEXT}"
    assert found.parse_errors == {"truncated": 1}
    # In the next round the list stands as if the integrator had written it.
    assert asked[1].messages[2].text == f"Keep: 1 3\nNext: {NEXT}"
    # Shares, not probabilities: what else could be written does not count.
    hands = hand([[x - 5.0 for x in scores[0]], " done"], [ANSWERS])
    assert run(hands, prompt_format="compact", keep_above=0.35).steps[0].kept == (BORN,)


@pytest.mark.parametrize("prompt_format", ["multi_turn", "paper", "compact"])
def test_the_example_stands_between_instruction_and_question(prompt_format):
    plain, shown = hand([GOES_ON, ENDS], [ANSWERS]), hand([GOES_ON, ENDS], [ANSWERS])
    run(plain, prompt_format=prompt_format)
    run(shown, prompt_format=prompt_format, few_shot=True)
    for a, b in zip(
        plain.asked(Generate, "integrator"), shown.asked(Generate, "integrator"), strict=True
    ):
        extra = len(b.messages) - len(a.messages)
        assert extra == {"paper": 2, "multi_turn": 4, "compact": 12}[prompt_format]
        assert b.messages[0] == a.messages[0] and b.messages[1 + extra :] == a.messages[1:]
        roles = [message.role for message in b.messages]
        assert roles == ["system", *("user", "assistant") * (len(roles) // 2 - 1), "user"]
        last = "done" if prompt_format == "compact" else "<no question>"
        assert b.messages[extra].text.endswith(last)
        assert QUESTION not in "".join(m.text for m in b.messages[: 1 + extra])


def test_guided_sections_are_filled_one_by_one():
    parts = ["Lund is her town.", '["ada moen", "born in", "lund"', NEXT]
    hands = hand([*parts, "Enough.  ", "]", "<no question>"], [ANSWERS])
    found = run(hands, prefilled_headers=True)
    asked = hands.asked(Generate, "integrator")
    assert len(asked) == 6 and all(r.continue_final for r in asked)
    openings = [r.messages[-1].text for r in asked[:3]]
    assert openings[0] == "[[## thought ##]]\n"
    assert openings[1] == (
        '[[## thought ##]]\nLund is her town.\n\n[[## fact_after_filter ##]]\n{"fact": ['
    )
    assert openings[2].startswith(openings[1]) and openings[2].endswith("[[## question ##]]\n")
    assert all(r.messages[-1].role == "assistant" for r in asked)
    assert all("\n" in r.stop and r.max_tokens for r in asked)
    assert [step.kept for step in found.steps] == [(BORN,), ()]
    assert [step.next_query for step in found.steps] == [NEXT, None]
    assert "truncated" not in found.parse_errors


def test_a_guided_section_that_is_cut_off_is_counted():
    parts = [Generated("Lund", "length"), '["ada moen", "born in", "lund"', "<no question>"]
    found = run(hand(parts, [ANSWERS]), prefilled_headers=True, decision_tokens=7)
    assert found.parse_errors == {"truncated": 1} and found.steps[0].kept == (BORN,)


def test_token_limits_are_the_roles_unless_set():
    hands = hand([ENDS_BORN], [ANSWERS])
    run(hands)
    assert [r.max_tokens for r in hands.asked(Generate)] == [0, 0]
    hands = hand([ENDS_BORN], [ANSWERS])
    run(hands, decision_tokens=11, answer_tokens=13)
    assert [r.max_tokens for r in hands.asked(Generate)] == [11, 13]


def test_facts_below_the_cutoff_are_dropped():
    text = decision("", '{"fact": [["ada moen", "was born in", "lund"], ["x", "y", "z"]]}', "")
    found = run(hand([text], [ANSWERS]))
    assert found.steps[0].kept == (BORN,) and found.parse_errors == {"not_a_candidate": 1}
    found = run(hand([text], [ANSWERS]), match_cutoff=1.0)
    assert found.steps[0].kept == () and found.parse_errors == {"not_a_candidate": 2}
