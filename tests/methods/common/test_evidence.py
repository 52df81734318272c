"""The order in which evidence is read and reported."""

from cirag_jax.methods.common.evidence import (
    Evidence,
    rank_facts,
    rank_passages,
    rank_sentences,
    sentences_by_text,
)
from cirag_jax.types import Passage, Sentence, Step, Triple
from tests.methods.ada import ANSWERS, BORN, CHURCH, MINE, NEXT, PAINTS, PLACE, hand, run
from tests.methods.by_hand import decision


def test_evidence_is_ranked_by_round_then_score_then_the_rest():
    first = decision(
        "", '{"fact": [["kiruna", "has", "mine"], ["ada moen", "born in", "lund"]]}', NEXT
    )
    second = decision("", '{"fact": [["lund", "has", "cathedral"]]}', "<no question>")
    found = run(hand([first, second], [ANSWERS]))
    # The second round saw Lund's and Ada's triples: of the rest, the best score comes first.
    assert found.triples == (BORN, MINE, CHURCH, PLACE, PAINTS)
    assert found.sentences == (("a", 0), ("c", 0), ("b", 1), ("b", 0), ("a", 1))
    assert found.passages == ("a", "c", "b")


def test_the_rankings_themselves():
    unknown = Triple("x", "y", "z")
    steps = [
        Step("q", ("c", "a"), (BORN, MINE), (0.5, 0.4), kept=(MINE,)),
        Step("r", ("b", "d"), (PLACE, BORN, unknown), (0.3, 0.7, 0.6), kept=(PLACE,)),
    ]
    ranked = rank_facts(steps, "ascii")
    assert ranked == (MINE, PLACE, BORN, unknown)
    assert rank_sentences(ranked) == (("c", 0), ("b", 0), ("a", 0))
    assert rank_passages(ranked, steps) == ("c", "b", "a", "d")


def test_a_fact_that_two_passages_state_is_one_with_two_sources():
    ada, lund = (Passage(id, id, "Ada was born in Lund.") for id in "ab")
    evidence = Evidence("ascii")
    evidence.add_retrieved([ada, lund])
    evidence.keep([Triple("Ada", "born in", "Lund", "a", 0)])
    evidence.keep([Triple("ada", "born in", "lund", "b", 0)])
    assert len(evidence.triples) == 1
    assert evidence.sentences == (("a", 0), ("b", 0)) and evidence.passages == (ada, lund)


def test_a_sentence_of_two_chunks_is_the_first_ones():
    chunks = [Passage(f"doc#{i}", "Ada", text) for i, text in enumerate(["Born.", "Born. Died."])]
    places = sentences_by_text(chunks)
    assert list(places.values()) == [Sentence("doc#0", 0), Sentence("doc#1", 1)]
