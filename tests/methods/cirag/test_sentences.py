"""CIRAG over sentences, integrated by an aligner or by a language model."""

import math

import pytest

from cirag_jax.runtime.requests import Follow, Generate, Rank, Retrieve, Score
from cirag_jax.types import Sentence
from tests.methods.ada import (
    ADA,
    ANSWERS,
    BORN,
    LUND,
    NEXT,
    OTHER,
    PLACE,
    QUESTION,
    REFUSES,
    hand,
    run,
)

SENTENCES = {
    "Ada Moen: Ada Moen was born in Lund.": 0.9,
    "Lund: Lund is in Skane.": 0.8,
    "Lund: It has a cathedral.": 0.3,
    "Ada Moen: She paints.": 0.2,
}


def test_an_aligner_keeps_the_best_new_sentence_and_searches_with_the_chain():
    hands = hand(reader=[ANSWERS], scores=SENTENCES)
    found = run(hands, units="sentence", integrator="aligner", max_steps=3)
    chain = "\nknowledge sentences: Ada Moen: Ada Moen was born in Lund."
    queries = [request.query for request in hands.asked(Retrieve)]
    assert queries[:2] == [QUESTION, QUESTION + chain]
    assert queries == [request.query for request in hands.asked(Rank)]
    assert hands.kinds() == ["Retrieve", "Rank"] * 3 + ["reader"]
    assert [step.kept for step in found.steps] == [
        (Sentence("a", 0),), (Sentence("b", 0),), (Sentence("b", 1),)
    ]  # fmt: skip
    assert found.steps[0].candidates[0] == Sentence("a", 0) and found.steps[0].scores[0] == 0.9
    assert [(a.granularity, a.evidence) for a in found.attempts] == [
        (
            "sentence",
            (
                "Ada Moen: Ada Moen was born in Lund.",
                "Lund: Lund is in Skane.",
                "Lund: It has a cathedral.",
            ),
        )
    ]
    assert (found.answer, found.triples) == ("Skane", ())
    assert found.sentences[:3] == (("a", 0), ("b", 0), ("b", 1))
    assert found.passages == ("a", "b", "c")


def test_an_aligner_stops_below_its_threshold():
    hands = hand(reader=[ANSWERS], scores=SENTENCES)
    found = run(hands, units="sentence", integrator="aligner", stop_below=0.5)
    assert [step.kept for step in found.steps] == [(Sentence("a", 0),), (Sentence("b", 0),), ()]
    assert found.steps[-1].next_query is None


def test_an_aligner_keeps_more_than_extends_its_chain():
    hands = hand(reader=[ANSWERS], scores=SENTENCES)
    found = run(hands, units="sentence", integrator="aligner", max_steps=3, keep=2)
    assert [step.kept for step in found.steps] == [
        (Sentence("a", 0), Sentence("a", 1)),
        (Sentence("b", 0), Sentence("b", 1)),
        (Sentence("b", 1),),  # the chain takes up what was kept beside it before
    ]
    chain = "\nknowledge sentences: Ada Moen: Ada Moen was born in Lund. Lund: Lund is in Skane."
    assert found.steps[2].query == QUESTION + chain
    assert len(found.attempts[0].evidence) == 4


def test_links_bring_the_passages_that_kept_facts_name():
    everywhere = {None: (ADA, OTHER)}  # retrieval alone never finds Lund
    scores = {**SENTENCES, "Kiruna: Kiruna has a mine.": 0.85, "Lund: Lund is in Skane.": 0.6}
    settings = {"units": "sentence", "integrator": "aligner", "max_steps": 2}
    named = {"Lund": LUND, "Ada": ADA}
    alone = run(hand(reader=[ANSWERS], found=everywhere, scores=scores, named=named), **settings)
    assert [step.kept for step in alone.steps] == [(Sentence("a", 0),), (Sentence("c", 0),)]
    hands = hand(reader=[ANSWERS], found=everywhere, scores=scores, named=named)
    found = run(hands, link_bonus=0.3, **settings)
    first, second = hands.asked(Follow)
    assert first.texts == (QUESTION,) and first.k == 20
    assert second.texts == (QUESTION, "Ada Moen: Ada Moen was born in Lund.")
    assert [step.kept for step in found.steps] == [(Sentence("a", 0),), (Sentence("b", 0),)]
    # The bonus is not for Ada's passage, where the chain has been.
    score = dict(zip(found.steps[1].candidates, found.steps[1].scores, strict=True))
    assert (score[Sentence("b", 0)], score[Sentence("a", 0)]) == (pytest.approx(0.9), 0.9)
    assert found.steps[1].passages == ("a", "c", "b") and found.passages[:2] == ("a", "b")


def test_links_leave_n_candidates_of_all_that_were_ranked():
    hands = hand(reader=[ANSWERS], scores=SENTENCES, named={"Lund": LUND})
    settings = {"units": "sentence", "integrator": "aligner", "max_steps": 2, "num_candidates": 2}
    found = run(hands, link_bonus=0.1, **settings)
    assert {request.n for request in hands.asked(Rank)} == {0}
    assert [len(step.candidates) for step in found.steps] == [2, 2]


def test_an_aligner_extends_chains_of_triples():
    found = run(hand(reader=[ANSWERS]), integrator="aligner", max_steps=2)
    assert [step.kept for step in found.steps] == [(BORN,), (PLACE,)]
    chain = "\nknowledge triples: <Ada Moen; born in; Lund>."
    assert found.steps[1].query == QUESTION + chain
    assert found.granularity == "triple"


SAID = [f"Keep: 1\nNext: {NEXT}", "Keep: 2\nNext: done"]


def test_a_language_model_keeps_sentences_by_number():
    hands = hand(SAID, [ANSWERS], scores=SENTENCES)
    found = run(hands, units="sentence", prompt_format="compact", few_shot=True)
    assert hands.kinds() == [*("Retrieve", "Rank", "integrator") * 2, "reader"]
    assert [step.kept for step in found.steps] == [(Sentence("a", 0),), (Sentence("b", 0),)]
    first, second = hands.asked(Generate, "integrator")
    assert "each of them a sentence" in first.messages[0].text
    # Sentences of the first round are shown again in the second, as the ranker read them.
    shown = "Facts:\n1. Ada Moen: Ada Moen was born in Lund.\n2. Ada Moen: She paints.\n3. Kiruna"
    assert first.messages[13].text == second.messages[13].text
    assert shown in first.messages[13].text
    assert second.messages[15].text.startswith(
        "Facts:\n1. Ada Moen: Ada Moen was born in Lund.\n2. L"
    )
    assert [a.evidence for a in found.attempts] == [
        ("Ada Moen: Ada Moen was born in Lund.", "Lund: Lund is in Skane.")
    ]
    # Where no prompt is written, sentences stay places.
    plain = run(hand(reader=[ANSWERS], scores=SENTENCES), units="sentence", integrator="top_k")
    assert {one.text for step in plain.steps for one in step.candidates} == {None}
    assert found.steps[0].candidates[0].text == "Ada Moen: Ada Moen was born in Lund."


def test_links_and_probabilities_serve_a_language_model_too():
    settings = {"units": "sentence", "prompt_format": "compact", "max_steps": 2}
    everywhere = {None: (ADA, OTHER)}  # retrieval alone never finds Lund
    scores = {**SENTENCES, "Kiruna: Kiruna has a mine.": 0.85, "Lund: Lund is in Skane.": 0.6}
    hands = hand(
        [f"Keep: 1\nNext: {NEXT}", "Keep: 1\nNext: done"],
        [ANSWERS], found=everywhere, scores=scores, named={"Lund": LUND},
    )  # fmt: skip
    found = run(hands, link_bonus=0.4, **settings)
    assert hands.asked(Follow)[1].texts == (QUESTION, "Ada Moen: Ada Moen was born in Lund.")
    assert [step.kept for step in found.steps] == [(Sentence("a", 0),), (Sentence("b", 0),)]
    chosen = [math.log(p) for p in (0.2, 0.6, 0.1, 0.1)]
    hands = hand([chosen, " done"], [ANSWERS], scores=SENTENCES)
    found = run(hands, keep_above=0.3, **settings)
    assert found.steps[0].kept == (Sentence("a", 1),)
    assert hands.asked(Score)[0].continuations == (" 1\n", " 2\n", " 3\n", " none\n")


def test_sentences_escalate_to_passages_and_a_forced_answer_is_none_of_its_own():
    hands = hand(reader=[REFUSES, REFUSES, ANSWERS], scores=SENTENCES)
    found = run(hands, units="sentence", integrator="top_k", max_steps=1, force_answer=True)
    assert [a.granularity for a in found.attempts] == ["sentence", "passage", "passage"]
    assert (found.answer, found.granularity) == ("Skane", "default")
