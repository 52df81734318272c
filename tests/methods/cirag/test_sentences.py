"""CIRAG over sentences; the integrator is an aligner or a language model."""

import pytest

from cirag_jax.runtime.requests import Follow, Generate, Rank, Retrieve
from cirag_jax.types import Sentence
from tests.methods.ada import (
    ADA,
    ANSWER,
    BORN,
    LUND,
    NEXT,
    OTHER,
    PLACE,
    QUESTION,
    REFUSAL,
    fake,
    run,
)

SENTENCES = {
    "Ada Moen: Ada Moen was born in Lund.": 0.9,
    "Lund: Lund is in Skane.": 0.8,
    "Lund: It has a cathedral.": 0.3,
    "Ada Moen: She paints.": 0.2,
}


def test_aligner_keeps_best_sentence_and_searches_with_chain():
    fakes = fake(reader=[ANSWER], scores=SENTENCES)
    result = run(fakes, units="sentence", integrator="aligner", max_steps=3)
    chain = "\nknowledge sentences: Ada Moen: Ada Moen was born in Lund."
    queries = [request.query for request in fakes.received(Retrieve)]
    assert queries[:2] == [QUESTION, QUESTION + chain]
    assert queries == [request.query for request in fakes.received(Rank)]
    assert fakes.kinds() == ["Retrieve", "Rank"] * 3 + ["reader"]
    assert [step.kept for step in result.steps] == [
        (Sentence("a", 0),), (Sentence("b", 0),), (Sentence("b", 1),)
    ]  # fmt: skip
    assert result.steps[0].candidates[0] == Sentence("a", 0) and result.steps[0].scores[0] == 0.9
    assert [(a.granularity, a.evidence) for a in result.attempts] == [
        (
            "sentence",
            (
                "Ada Moen: Ada Moen was born in Lund.",
                "Lund: Lund is in Skane.",
                "Lund: It has a cathedral.",
            ),
        )
    ]
    assert (result.answer, result.triples) == ("Skane", ())
    assert result.sentences[:3] == (("a", 0), ("b", 0), ("b", 1))
    assert result.passages == ("a", "b", "c")


def test_aligner_stops_below_threshold():
    fakes = fake(reader=[ANSWER], scores=SENTENCES)
    result = run(fakes, units="sentence", integrator="aligner", stop_below=0.5)
    assert [step.kept for step in result.steps] == [(Sentence("a", 0),), (Sentence("b", 0),), ()]
    assert result.steps[-1].next_query is None


def test_aligner_keeps_more_facts_than_the_chain():
    fakes = fake(reader=[ANSWER], scores=SENTENCES)
    result = run(fakes, units="sentence", integrator="aligner", max_steps=3, keep=2)
    assert [step.kept for step in result.steps] == [
        (Sentence("a", 0), Sentence("a", 1)),
        (Sentence("b", 0), Sentence("b", 1)),
        (Sentence("b", 1),),  # A fact that was kept earlier extends the chain later.
    ]
    chain = "\nknowledge sentences: Ada Moen: Ada Moen was born in Lund. Lund: Lund is in Skane."
    assert result.steps[2].query == QUESTION + chain
    assert len(result.attempts[0].evidence) == 4


def test_links_add_passages_named_by_kept_facts():
    everywhere = {None: (ADA, OTHER)}  # Only links lead to Lund.
    scores = {**SENTENCES, "Kiruna: Kiruna has a mine.": 0.85, "Lund: Lund is in Skane.": 0.6}
    settings = {"units": "sentence", "integrator": "aligner", "max_steps": 2}
    named = {"Lund": LUND, "Ada": ADA}
    alone = run(fake(reader=[ANSWER], passages=everywhere, scores=scores, linked=named), **settings)
    assert [step.kept for step in alone.steps] == [(Sentence("a", 0),), (Sentence("c", 0),)]
    fakes = fake(reader=[ANSWER], passages=everywhere, scores=scores, linked=named)
    result = run(fakes, link_bonus=0.3, **settings)
    first, second = fakes.received(Follow)
    assert first.texts == (QUESTION,) and first.k == 20
    assert second.texts == (QUESTION, "Ada Moen: Ada Moen was born in Lund.")
    assert [step.kept for step in result.steps] == [(Sentence("a", 0),), (Sentence("b", 0),)]
    # Ada's passage gets no bonus, because the chain has visited it.
    score = dict(zip(result.steps[1].candidates, result.steps[1].scores, strict=True))
    assert (score[Sentence("b", 0)], score[Sentence("a", 0)]) == (pytest.approx(0.9), 0.9)
    assert result.steps[1].passages == ("a", "c", "b") and result.passages[:2] == ("a", "b")


def test_links_select_candidates_from_all_ranked():
    fakes = fake(reader=[ANSWER], scores=SENTENCES, linked={"Lund": LUND})
    settings = {"units": "sentence", "integrator": "aligner", "max_steps": 2, "num_candidates": 2}
    result = run(fakes, link_bonus=0.1, **settings)
    assert {request.n for request in fakes.received(Rank)} == {0}
    assert [len(step.candidates) for step in result.steps] == [2, 2]


def test_aligner_extends_chain_of_triples():
    result = run(fake(reader=[ANSWER]), integrator="aligner", max_steps=2)
    assert [step.kept for step in result.steps] == [(BORN,), (PLACE,)]
    chain = "\nknowledge triples: <Ada Moen; born in; Lund>."
    assert result.steps[1].query == QUESTION + chain
    assert result.granularity == "triple"


DECISIONS = [f"Keep: 1\nNext: {NEXT}", "Keep: 2\nNext: done"]


def test_model_keeps_sentences_by_number():
    fakes = fake(DECISIONS, [ANSWER], scores=SENTENCES)
    result = run(fakes, units="sentence", prompt_format="compact", few_shot=True)
    assert fakes.kinds() == [*("Retrieve", "Rank", "integrator") * 2, "reader"]
    assert [step.kept for step in result.steps] == [(Sentence("a", 0),), (Sentence("b", 0),)]
    first, second = fakes.received(Generate, "integrator")
    assert "each of them a sentence" in first.messages[0].text
    # The second round shows the sentences of the first one again.
    shown = "Facts:\n1. Ada Moen: Ada Moen was born in Lund.\n2. Ada Moen: She paints.\n3. Kiruna"
    assert first.messages[13].text == second.messages[13].text
    assert shown in first.messages[13].text
    assert second.messages[15].text.startswith(
        "Facts:\n1. Ada Moen: Ada Moen was born in Lund.\n2. L"
    )
    assert [a.evidence for a in result.attempts] == [
        ("Ada Moen: Ada Moen was born in Lund.", "Lund: Lund is in Skane.")
    ]
    # If prompts are not recorded, sentences have no texts.
    plain = run(fake(reader=[ANSWER], scores=SENTENCES), units="sentence", integrator="top_k")
    assert {one.text for step in plain.steps for one in step.candidates} == {None}
    assert result.steps[0].candidates[0].text == "Ada Moen: Ada Moen was born in Lund."


def test_links_work_with_a_model():
    settings = {"units": "sentence", "prompt_format": "compact", "max_steps": 2}
    everywhere = {None: (ADA, OTHER)}  # Only links lead to Lund.
    scores = {**SENTENCES, "Kiruna: Kiruna has a mine.": 0.85, "Lund: Lund is in Skane.": 0.6}
    fakes = fake(
        [f"Keep: 1\nNext: {NEXT}", "Keep: 1\nNext: done"],
        [ANSWER], passages=everywhere, scores=scores, linked={"Lund": LUND},
    )  # fmt: skip
    result = run(fakes, link_bonus=0.4, **settings)
    assert fakes.received(Follow)[1].texts == (QUESTION, "Ada Moen: Ada Moen was born in Lund.")
    assert [step.kept for step in result.steps] == [(Sentence("a", 0),), (Sentence("b", 0),)]


def test_cascade_forced_answer_not_credited_to_passages():
    fakes = fake(reader=[REFUSAL, REFUSAL, ANSWER], scores=SENTENCES)
    result = run(fakes, units="sentence", integrator="top_k", max_steps=1, force_answer=True)
    assert [a.granularity for a in result.attempts] == ["sentence", "passage", "passage"]
    assert (result.answer, result.granularity) == ("Skane", "default")
