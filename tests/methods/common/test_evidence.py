"""Evidence that a method keeps, and its rankings."""

from cirag_jax.methods.common.evidence import (
    Evidence,
    rank_facts,
    rank_passages,
    rank_sentences,
    sentences_by_text,
)
from cirag_jax.types import Passage, Sentence, Step, Triple
from tests.methods.ada import ANSWER, BORN, CHURCH, MINE, NEXT, PAINTS, PLACE, fake, run
from tests.methods.fakes import decision


def test_cirag_evidence_is_ranked_by_round_then_score():
    first = decision(
        "", '{"fact": [["kiruna", "has", "mine"], ["ada moen", "born in", "lund"]]}', NEXT
    )
    second = decision("", '{"fact": [["lund", "has", "cathedral"]]}', "<no question>")
    result = run(fake([first, second], [ANSWER]))
    # The candidates that were not kept follow by their scores.
    assert result.triples == (BORN, MINE, CHURCH, PLACE, PAINTS)
    assert result.sentences == (("a", 0), ("c", 0), ("b", 1), ("b", 0), ("a", 1))
    assert result.passages == ("a", "c", "b")


def test_rankings_follow_rounds_and_scores():
    unknown = Triple("x", "y", "z")
    steps = [
        Step("q", ("c", "a"), (BORN, MINE), (0.5, 0.4), kept=(MINE,)),
        Step("r", ("b", "d"), (PLACE, BORN, unknown), (0.3, 0.7, 0.6), kept=(PLACE,)),
    ]
    ranked = rank_facts(steps, "ascii")
    assert ranked == (MINE, PLACE, BORN, unknown)
    assert rank_sentences(ranked) == (("c", 0), ("b", 0), ("a", 0))
    assert rank_passages(ranked, steps) == ("c", "b", "a", "d")


def test_evidence_repeated_fact_has_two_sources():
    ada, lund = (Passage(id, id, "Ada was born in Lund.") for id in "ab")
    evidence = Evidence("ascii")
    evidence.add_retrieved([ada, lund])
    evidence.keep([Triple("Ada", "born in", "Lund", "a", 0)])
    evidence.keep([Triple("ada", "born in", "lund", "b", 0)])
    assert len(evidence.triples) == 1
    assert evidence.sentences == (("a", 0), ("b", 0)) and evidence.passages == (ada, lund)


def test_sentences_by_text_repeated_sentence_keeps_first_chunk():
    chunks = [Passage(f"doc#{i}", "Ada", text) for i, text in enumerate(["Born.", "Born. Died."])]
    places = sentences_by_text(chunks)
    assert list(places.values()) == [Sentence("doc#0", 0), Sentence("doc#1", 1)]
