"""CIRAG: rounds, construction and integration, with fake handlers."""

import pytest

from cirag_jax.methods.cirag.integrators import keep_top
from cirag_jax.runtime.requests import Generate, Generated, Rank, Retrieve
from cirag_jax.types import Triple
from tests.methods.ada import (
    ADA,
    ANSWER,
    BORN,
    CHURCH,
    CONTINUE,
    FACT_BORN,
    FINAL,
    FINAL_BORN,
    LUND,
    MINE,
    NEXT,
    NO_FACT,
    OTHER,
    PAINTS,
    PLACE,
    QUESTION,
    fake,
    run,
)
from tests.methods.fakes import decision, prompt


def test_cirag_two_rounds_answers_from_triples():
    fakes = fake([CONTINUE, FINAL], [ANSWER])
    result = run(fakes)
    assert fakes.kinds() == [*("Retrieve", "Extract", "Rank", "integrator") * 2, "reader"]
    assert [r.query for r in fakes.received(Retrieve)] == [QUESTION, NEXT]
    assert [r.query for r in fakes.received(Rank)] == [QUESTION, NEXT]
    assert {r.k for r in fakes.received(Retrieve)} == {10}
    assert {r.n for r in fakes.received(Rank)} == {30}
    assert (result.answer, result.granularity, result.parse_errors) == ("Skane", "triple", {})
    assert [step.kept for step in result.steps] == [(BORN,), (PLACE,)]
    assert [step.next_query for step in result.steps] == [NEXT, None]
    assert [step.thought for step in result.steps] == ["Lund is her town.", "Lund is in Skane."]
    assert [step.response for step in result.steps] == [CONTINUE, FINAL]
    assert result.steps[0].passages == ("a", "c")
    assert result.steps[0].candidates == (BORN, PAINTS, MINE)
    assert result.steps[0].scores == (0.9, 0.3, 0.1)
    assert [(a.granularity, a.sufficient) for a in result.attempts] == [("triple", True)]
    assert result.attempts[0].evidence == (
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
def test_cirag_no_question_ends_rounds(question):
    result = run(fake([decision("Enough.", FACT_BORN, question)], [ANSWER]))
    assert len(result.steps) == 1 and result.steps[0].next_query is None


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_cirag_max_steps_ends_rounds(limit):
    texts = [decision("More.", FACT_BORN, f"question {i}?") for i in range(limit)]
    result = run(fake(texts, [ANSWER]), max_steps=limit)
    assert len(result.steps) == limit
    assert result.steps[-1].next_query == f"question {limit - 1}?"


def test_top_k_keeps_best_three_and_repeats_question():
    fakes = fake(reader=[ANSWER])
    result = run(fakes, integrator="top_k", max_steps=2)
    assert fakes.kinds() == [*("Retrieve", "Extract", "Rank") * 2, "reader"]
    assert [r.query for r in fakes.received(Retrieve)] == [QUESTION, QUESTION]
    assert [step.kept for step in result.steps] == [(BORN, PAINTS, MINE)] * 2
    assert [step.next_query for step in result.steps] == [QUESTION] * 2
    assert len(result.attempts[0].evidence) == 3 and result.parse_errors == {}
    result = run(fake(reader=[ANSWER]), integrator="top_k", max_steps=4, on_repeat="stop")
    assert len(result.steps) == 1
    four = (PLACE, BORN, CHURCH, MINE)
    assert keep_top(QUESTION, four).kept == four[:3]
    # The kept facts may extend the next query.
    fakes = fake(reader=[ANSWER])
    run(fakes, integrator="top_k", next_query="chain", max_steps=2)
    first, second = (request.query for request in fakes.received(Retrieve))
    assert first == QUESTION and second.startswith(QUESTION)
    assert all(part.lower() in second.lower() for t in (BORN, PAINTS, MINE) for part in t[:3])


def test_cirag_no_facts_with_question_continues():
    fakes = fake([decision("Nothing yet.", NO_FACT, NEXT), FINAL], [ANSWER])
    result = run(fakes)
    assert [step.kept for step in result.steps] == [(), (PLACE,)]
    assert result.attempts[0].evidence == ("('lund', 'in', 'sk ne')",)
    assert result.parse_errors == {}


def test_cirag_no_facts_and_no_question_leaves_empty_pools():
    fakes = fake([decision("Nothing.", NO_FACT, "<no question>")], [ANSWER])
    result = run(fakes)
    assert [(a.granularity, a.evidence, a.sufficient) for a in result.attempts[:2]] == [
        ("triple", (), False),
        ("sentence", (), False),
    ]
    assert len(fakes.received(Generate, "reader")) == 1  # Empty pools are refused without a call.
    assert result.granularity == "passage" and result.answer == "Skane"


def test_cirag_missing_question_is_requested_once():
    silent = f"[[## thought ##]]\nHm.\n[[## fact_after_filter ##]]\n{FACT_BORN}"
    fakes = fake([silent, f"[[## question ##]]\n{NEXT}", FINAL], [ANSWER])
    result = run(fakes)
    assert [step.next_query for step in result.steps] == [NEXT, None]
    assert result.steps[0].kept == (BORN,) and result.steps[0].response == silent
    assert result.parse_errors == {"asked_again": 1, "no_question": 1}
    first, again = fakes.received(Generate, "integrator")[:2]
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
def test_cirag_question_missing_twice_counts_no_decision(second, parse_errors):
    silent = f"[[## fact_after_filter ##]]\n{FACT_BORN}"
    result = run(fake([silent, second], [ANSWER]))
    assert len(result.steps) == 1 and result.steps[0].next_query is None
    assert result.parse_errors == {"asked_again": 1, **parse_errors}


def test_cirag_reply_without_header_is_accepted():
    silent = f"[[## fact_after_filter ##]]\n{FACT_BORN}"
    result = run(fake([silent, NEXT, FINAL], [ANSWER]))
    assert [step.next_query for step in result.steps] == [NEXT, None]
    assert result.parse_errors == {
        **{"asked_again": 1, "no_question": 1, "question_without_header": 1}
    }


def test_cirag_missing_question_without_retry_ends_rounds():
    fakes = fake([f"[[## fact_after_filter ##]]\n{FACT_BORN}"], [ANSWER])
    result = run(fakes, retry=False)
    assert len(result.steps) == 1
    assert result.parse_errors == {"no_question": 1, "no_decision": 1}


def test_on_repeat_chain_searches_with_kept_facts():
    again = decision("Once more.", FACT_BORN, QUESTION)
    fakes = fake([again] * 3, [ANSWER])
    run(fakes, max_steps=3, on_repeat="chain")
    first, second, third = (request.query for request in fakes.received(Retrieve))
    assert first == QUESTION and QUESTION in second and second != QUESTION and third == second
    empty = fake([decision("Nothing.", NO_FACT, QUESTION)] * 2, [ANSWER])
    run(empty, max_steps=2, on_repeat="chain")
    assert [request.query for request in empty.received(Retrieve)] == [QUESTION, QUESTION]


def test_next_query_chain_searches_with_kept_facts():
    fakes = fake([decision("Born.", FACT_BORN, NEXT), FINAL], [ANSWER])
    result = run(fakes, next_query="chain")
    first, second = (request.query for request in fakes.received(Retrieve))
    assert first == QUESTION and second.startswith(QUESTION) and "Lund" in second
    assert NEXT not in second and [step.next_query for step in result.steps] == [NEXT, None]


def test_only_new_drops_kept_candidates():
    once = decision("Kept.", FACT_BORN, QUESTION)
    result = run(fake([once] * 2, [ANSWER]), max_steps=2, only_new=True)
    first, second = result.steps
    assert BORN in first.candidates and BORN not in second.candidates
    assert len(second.candidates) == len(second.scores) == len(first.candidates) - 1
    assert second.kept == ()
    usual = run(fake([once] * 2, [ANSWER]), max_steps=2)
    assert usual.steps[1].candidates == usual.steps[0].candidates


def test_cirag_empty_response_is_not_requested_again():
    fakes = fake([""], [ANSWER])
    result = run(fakes)
    assert len(result.steps) == 1
    assert result.parse_errors == {"empty": 1, "no_decision": 1}


def test_on_repeat_stop_ends_rounds():
    again = decision("Once more.", NO_FACT, QUESTION)
    result = run(fake([again], [ANSWER]), on_repeat="stop")
    assert len(result.steps) == 1
    back = decision("Back.", NO_FACT, NEXT)
    result = run(fake([back, again], [ANSWER]), on_repeat="stop")
    assert len(result.steps) == 2
    result = run(fake([again] * 3, [ANSWER]), max_steps=3)
    assert [step.query for step in result.steps] == [QUESTION] * 3


def test_cirag_truncated_response_is_counted():
    text = decision("Lund.", '{"fact": [["ada moen", "born in", "lund"], ["ada', NEXT)
    cut = Generated(text.partition("[[## question")[0].rstrip(), "length")
    result = run(fake([cut, f"[[## question ##]]\n{NEXT}", FINAL], [ANSWER]))
    assert result.steps[0].kept == (BORN,)
    expected = {
        "asked_again": 1,
        "truncated": 1,
        "facts_truncated": 1,
        "no_question": 1,
        "not_a_triple": 1,
    }
    assert result.parse_errors == expected


def test_cirag_no_steps_reads_first_retrieval():
    fakes = fake([], [ANSWER])
    result = run(fakes, max_steps=0)
    assert fakes.kinds() == ["Retrieve", "reader"]
    assert [a.granularity for a in result.attempts] == ["triple", "sentence", "passage"]
    assert result.attempts[-1].evidence == (f"Ada Moen\n{ADA.text}", f"Kiruna\n{OTHER.text}")
    assert result.passages == ("a", "c") and result.steps[0].query == QUESTION


def test_cirag_no_passages_gives_empty_answer():
    fakes = fake([decision("Nothing.", NO_FACT, "")], [], passages={None: ()})
    result = run(fakes)
    assert fakes.kinds() == ["Retrieve", "Extract", "integrator"]
    assert (result.answer, result.granularity) == ("", "default")
    assert (result.passages, result.sentences, result.triples) == ((), (), ())


def test_construct_no_reranker_keeps_passage_order():
    fakes = fake([decision("", NO_FACT, "")], [ANSWER])
    result = run(fakes, use_reranker=False, num_candidates=1)
    assert not fakes.received(Rank)
    assert result.steps[0].candidates == (BORN, PAINTS, MINE)
    assert result.steps[0].scores == (0.0, 0.0, 0.0)


def test_construct_candidates_and_passages_are_limited():
    fakes = fake([decision("", NO_FACT, "")], [ANSWER])
    result = run(fakes, num_passages=1, num_candidates=1)
    assert result.steps[0].candidates == (BORN,) and result.steps[0].passages == ("a",)


def test_construct_repeated_fact_takes_best_ranked_source():
    same = Triple("ADA MOEN", "Born in", "Lund!", "c", 0)
    first = run(fake([FINAL_BORN], [ANSWER], triples={"a": (BORN,), "c": (same,)}))
    assert first.steps[0].candidates == first.steps[0].kept == (BORN,)
    assert first.passages == ("a", "c")
    turned = fake([FINAL_BORN], [ANSWER], triples={"a": (BORN,), "c": (same,)})
    turned.passages = {None: (OTHER, ADA)}
    result = run(turned)
    assert result.steps[0].candidates == result.steps[0].kept == (same,)
    assert result.sentences == (("c", 0),)


def test_construct_passages_without_triples_are_counted():
    fakes = fake([decision("", NO_FACT, "")], [ANSWER], triples={"a": (), "c": None})
    result = run(fakes)
    assert not fakes.received(Rank)  # Without triples nothing is ranked.
    assert result.parse_errors == {"passage_not_extracted": 1, "passage_without_triples": 1}


def test_construct_blank_triple_is_dropped():
    blank = Triple(" ", "", "\t", "a", 0)
    result = run(fake([decision("", NO_FACT, "")], [ANSWER], triples={"a": (blank, BORN)}))
    assert result.steps[0].candidates == (BORN,)


def test_normalization_unicode_keeps_letters_of_every_script():
    fakes = fake([decision("", '{"fact": [["LUND", "in", "skåne"]]}', "")], [ANSWER])
    fakes.passages = {None: (LUND,)}
    result = run(fakes, normalization="unicode")
    assert result.steps[0].kept == (PLACE,)
    assert result.attempts[0].evidence == ("('lund', 'in', 'skåne')",)
    assert '["lund", "in", "skåne"]' in prompt(fakes.received(Generate, "integrator")[0])


def test_multi_turn_round_extends_the_conversation():
    third = decision("Still.", NO_FACT, "third?")
    fakes = fake([CONTINUE, third, FINAL], [ANSWER])
    run(fakes)
    first, second, last = (r.messages for r in fakes.received(Generate, "integrator"))
    assert second[: len(first)] == first and last[: len(second)] == second
    roles = [message.role for message in last]
    assert roles == ["system", *("user", "assistant") * 2, "user"]
    assert QUESTION in last[1].text and QUESTION not in last[3].text
    assert last[2].text == CONTINUE  # The parsed decision is rendered again.
    # Truncation may only drop the candidates.
    assert QUESTION in last[1].content and '{"fact": [[' in last[1].observation


def test_paper_format_is_one_turn_with_history_last():
    fakes = fake([CONTINUE, FINAL], [ANSWER])
    run(fakes, prompt_format="paper")
    first, second = fakes.received(Generate, "integrator")
    assert [m.role for m in second.messages] == ["system", "user"]
    now, history = second.messages[1].text.split("[[## historical_context ##]]\n")
    assert now.startswith(f"[[## Original Query ##]]\n{QUESTION}\n\n[[## fact_before_filter ##]]\n")
    assert '["lund", "in", "sk ne"]' in now
    assert first.messages[1].text.endswith("[[## historical_context ##]]\nnone")
    # Eq. 2: the history has the candidates of earlier rounds.
    shown = (
        '["ada moen", "born in", "lund"], ["ada moen", "is", "painter"], ["kiruna", "has", "mine"]'
    )
    assert history == f'[[## fact_before_filter ##]]\n{{"fact": [{shown}]}}\n\n{CONTINUE}'
    assert second.messages[1].observation == history  # Truncation may drop it.


def test_paper_format_history_has_every_round():
    texts = [decision("More.", FACT_BORN, f"question {i}?") for i in range(3)]
    fakes = fake(texts, [ANSWER])
    run(fakes, prompt_format="paper", max_steps=3)
    history = fakes.received(Generate, "integrator")[2].messages[1].observation
    assert history.count("[[## fact_before_filter ##]]") == history.count("[[## question ##]]") == 2
    assert history.index('"kiruna"') < history.index("question 0?") < history.index('"cathedral"')
    assert history.endswith("question 1?")


def test_compact_format_keeps_candidates_by_number():
    fakes = fake(["Keep: 1\nNext: In which province is Lund?", "Keep: 1\nNext: done"], [ANSWER])
    prediction = run(fakes, prompt_format="compact")
    first, second = fakes.received(Generate, "integrator")
    assert "1. Ada Moen | born in | Lund" in first.messages[1].text
    assert second.messages[2].text == "Keep: 1\nNext: In which province is Lund?"
    assert [step.kept for step in prediction.steps] == [
        step.candidates[:1] for step in prediction.steps
    ]
    assert prediction.steps[1].query == "In which province is Lund?"


@pytest.mark.parametrize("prompt_format", ["multi_turn", "paper", "compact"])
def test_few_shot_example_precedes_question(prompt_format):
    plain, shown = fake([CONTINUE, FINAL], [ANSWER]), fake([CONTINUE, FINAL], [ANSWER])
    run(plain, prompt_format=prompt_format)
    run(shown, prompt_format=prompt_format, few_shot=True)
    for a, b in zip(
        plain.received(Generate, "integrator"), shown.received(Generate, "integrator"), strict=True
    ):
        extra = len(b.messages) - len(a.messages)
        assert extra == {"paper": 2, "multi_turn": 4, "compact": 12}[prompt_format]
        assert b.messages[0] == a.messages[0] and b.messages[1 + extra :] == a.messages[1:]
        roles = [message.role for message in b.messages]
        assert roles == ["system", *("user", "assistant") * (len(roles) // 2 - 1), "user"]
        last = "done" if prompt_format == "compact" else "<no question>"
        assert b.messages[extra].text.endswith(last)
        assert QUESTION not in "".join(m.text for m in b.messages[: 1 + extra])


def test_prefilled_headers_sections_are_filled_in_order():
    parts = ["Lund is her town.", '["ada moen", "born in", "lund"', NEXT]
    fakes = fake([*parts, "Enough.  ", "]", "<no question>"], [ANSWER])
    result = run(fakes, prefilled_headers=True)
    asked = fakes.received(Generate, "integrator")
    assert len(asked) == 6 and all(r.continue_final for r in asked)
    openings = [r.messages[-1].text for r in asked[:3]]
    assert openings[0] == "[[## thought ##]]\n"
    assert openings[1] == (
        '[[## thought ##]]\nLund is her town.\n\n[[## fact_after_filter ##]]\n{"fact": ['
    )
    assert openings[2].startswith(openings[1]) and openings[2].endswith("[[## question ##]]\n")
    assert all(r.messages[-1].role == "assistant" for r in asked)
    assert all("\n" in r.stop and r.max_tokens for r in asked)
    assert [step.kept for step in result.steps] == [(BORN,), ()]
    assert [step.next_query for step in result.steps] == [NEXT, None]
    assert "truncated" not in result.parse_errors


def test_prefilled_headers_truncated_section_is_counted():
    parts = [Generated("Lund", "length"), '["ada moen", "born in", "lund"', "<no question>"]
    result = run(fake(parts, [ANSWER]), prefilled_headers=True, decision_tokens=7)
    assert result.parse_errors == {"truncated": 1} and result.steps[0].kept == (BORN,)


def test_token_limits_default_to_the_roles():
    fakes = fake([FINAL_BORN], [ANSWER])
    run(fakes)
    assert [r.max_tokens for r in fakes.received(Generate)] == [0, 0]
    fakes = fake([FINAL_BORN], [ANSWER])
    run(fakes, decision_tokens=11, answer_tokens=13)
    assert [r.max_tokens for r in fakes.received(Generate)] == [11, 13]


def test_match_cutoff_drops_dissimilar_facts():
    text = decision("", '{"fact": [["ada moen", "was born in", "lund"], ["x", "y", "z"]]}', "")
    result = run(fake([text], [ANSWER]))
    assert result.steps[0].kept == (BORN,) and result.parse_errors == {"not_a_candidate": 1}
    result = run(fake([text], [ANSWER]), match_cutoff=1.0)
    assert result.steps[0].kept == () and result.parse_errors == {"not_a_candidate": 2}
