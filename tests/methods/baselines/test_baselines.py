"""The text baselines by hand: Iter-RetGen, beam retrieval, the oracle, and what they share."""

import collections

import pytest

from cirag_jax.errors import UserError
from cirag_jax.methods.baselines.beam_retrieval import BeamRetrievalConfig, beam_retrieval
from cirag_jax.methods.baselines.iter_retgen import IterRetgenConfig, iter_retgen
from cirag_jax.methods.baselines.oracle import OracleConfig, oracle
from cirag_jax.methods.common.reading import read, search
from cirag_jax.runtime.requests import Fetch, Generate, Generated, Rank, Retrieve, Retrieved
from cirag_jax.types import Passage, Question, SubQuestion
from tests.methods.by_hand import Hand, prompt

QUESTION = "In which province was Ada Moen born?"
ASKED = Question("q", QUESTION, ())
ADA = Passage(
    "a", "Ada Moen", "She was born in Lund. She paints.", ("She was born in Lund.", "She paints.")
)
LUND = Passage("l", "Lund", "Lund is in Skane.")
NOISE = Passage("n", "Adam", "A name.")


# ----------------------------------------------------------------------------------- what is shared

CUT = "Ada Moen; born in; Lund; Lund; in the"  # before the answer


def test_a_search_may_be_reranked():
    hands = Hand({None: (NOISE, ADA, LUND)}, {}, {}, {"a": 2.0, "l": 0.5, "n": -1.0})
    found = hands.drive(search("q?", 5, rerank_from=9, min_score=0.5))
    assert hands.requests == [Retrieve("q?", 9), Rank("q?", (NOISE, ADA, LUND), 5, "passages")]
    assert found == Retrieved((ADA,), (2.0,))
    assert hands.drive(search("q?", 2)).passages == (NOISE, ADA)
    assert Hand({None: ()}, {}, {}).drive(search("q?", 2, 9)).passages == ()


@pytest.mark.parametrize(
    ("reader_format", "said", "answer", "sufficient", "errors"),
    [
        ("documents", "Answer: Skane\n", "Skane", True, {}),
        ("documents", " ", "", False, {"answer_empty": 1}),
        ("documents", Generated("Skan", "length"), "Skan", True, {"answer_truncated": 1}),
        ("chain", "Ada; born in; Lund\nAnswer: Lund", "Lund", True, {}),
        ("chain", Generated(CUT, "length"), CUT, False, {"answer_truncated": 1}),
        ("chain", "Lund", "Lund", True, {"answer_no_answer_mark": 1}),
    ],
)
def test_a_reading(reader_format, said, answer, sufficient, errors):
    hands, found = Hand({}, {}, {"reader": [said]}), collections.Counter()
    attempt = hands.drive(read(QUESTION, "passage", (ADA,), reader_format, found))
    assert (attempt.answer, attempt.sufficient, dict(found)) == (answer, sufficient, errors)
    assert attempt.evidence == ("Ada Moen\nShe was born in Lund. She paints.",)


# -------------------------------------------------------------------------------------- Iter-RetGen


def run_iter(answers, **settings):
    hands = Hand({QUESTION: (NOISE, ADA), None: (LUND, ADA)}, {}, {"reader": answers})
    return hands, hands.drive(iter_retgen(ASKED, IterRetgenConfig(**settings)))


def test_the_answer_joins_the_next_query():
    hands, found = run_iter(["Lund", "Skane", "Skane"], num_read=1)
    queries = [r.query for r in hands.asked(Retrieve)]
    assert queries == [QUESTION, f"{QUESTION} Lund", f"{QUESTION} Skane"]
    read_last = prompt(hands.asked(Generate)[-1])
    assert LUND.text in read_last and "She paints" not in read_last
    assert (found.answer, found.passages) == ("Skane", ("l", "a"))  # of the last round
    assert [step.next_query for step in found.steps] == [*queries[1:], None]
    assert len(found.attempts) == 3 and found.parse_errors == {}


def test_the_same_query_ends_it():
    hands, found = run_iter(["Lund", "Lund"])
    assert len(hands.asked(Retrieve)) == 2 and found.parse_errors == {"repeated_query": 1}
    hands, found = run_iter([""])
    assert found.parse_errors == {"answer_empty": 1, "repeated_query": 1}
    assert found.steps[-1].next_query is None


def test_the_whole_response_may_be_the_query():
    said = "Thought: Ada was.\nAnswer: Lund"
    hands, found = run_iter(
        [said, "Answer: Skane"], num_rounds=2, query_with="response", reader_format="thought"
    )
    assert hands.asked(Retrieve)[1].query == f"{QUESTION} Thought: Ada was. Answer: Lund"
    assert found.answer == "Skane"


# -------------------------------------------------------------------------------------------- beams


def test_chains_are_extended_and_their_scores_summed():
    third = Passage("t", "Third", "Else.")
    ada_query = f"{QUESTION}\nknowledge passages: Ada Moen. {ADA.text}"
    noise_query = f"{QUESTION}\nknowledge passages: Adam. {NOISE.text}"
    hands = Hand(
        {QUESTION: (NOISE, ADA, LUND), noise_query.rstrip(" ."): (), noise_query: (NOISE, third),
         ada_query: (LUND, ADA)},
        {}, {"reader": ["Skane"]},
    )  # fmt: skip
    settings = BeamRetrievalConfig(num_chains=2, num_passages=2, num_read=2)
    found = hands.drive(beam_retrieval(ASKED, settings))
    # A longer chain asks for as many more as it may meet again.
    assert hands.requests[:3] == [
        Retrieve(QUESTION, 2), Retrieve(noise_query, 3), Retrieve(ada_query, 3),
    ]  # fmt: skip
    first, second = (step.notes["chains"] for step in found.steps)
    assert first == [{"passages": ["n"], "score": 1.0}, {"passages": ["a"], "score": 0.5}]
    # 1 + 1/2 and 1/2 + 1 tie: the order of the chains before decides.
    assert second == [
        {"passages": ["n", "t"], "score": 1.5}, {"passages": ["a", "l"], "score": 1.5},
    ]  # fmt: skip
    assert found.passages == ("n", "t", "a", "l")
    read_last = prompt(hands.asked(Generate)[0])
    assert third.text in read_last and LUND.text not in read_last


def test_a_beam_ends_where_nothing_extends_it():
    hands = Hand({None: (ADA,)}, {}, {"reader": ["Lund"]})
    found = hands.drive(beam_retrieval(ASKED, BeamRetrievalConfig(max_hops=4)))
    assert len(found.steps) == 1 and found.passages == ("a",)


# ------------------------------------------------------------------------------------------- oracle

GOLD = Question(
    "q", QUESTION, ("Skane",), supporting=("a", "l"), supporting_sentences=(("a", 0), ("a", 7)),
    evidences=(("Ada Moen", "place of birth", "Lund"), ("Lund", "province", "Skane")),
)  # fmt: skip


def run_oracle(question, **settings):
    hands = Hand({None: (NOISE, ADA, LUND)}, {}, {"reader": ["Answer: Skane"]})
    return hands, hands.drive(oracle(question, OracleConfig(**settings)))


def test_the_oracle_reads_gold_passages():
    hands, found = run_oracle(GOLD)
    assert hands.requests[0] == Fetch(("a", "l"))
    asked = prompt(hands.asked(Generate)[0])
    assert ADA.text in asked and LUND.text in asked and NOISE.text not in asked
    assert (found.answer, found.granularity, found.passages) == ("Skane", "passage", ("a", "l"))


def test_the_oracle_reads_gold_sentences():
    _, found = run_oracle(GOLD, units="sentence", reader_format="brief")
    # No sentence of l is annotated: all of it; the eighth of a does not exist.
    assert found.sentences == (("a", 0), ("l", 0))
    assert found.attempts[0].evidence == (
        "Ada Moen: She was born in Lund.", "Lund: Lund is in Skane.",
    )  # fmt: skip


def test_the_oracle_reads_gold_triples():
    hands, found = run_oracle(GOLD, units="triple", reader_format="brief")
    assert hands.kinds() == ["reader"] and len(found.triples) == 2
    assert found.attempts[0].evidence[0] == "('ada moen', 'place of birth', 'lund')"
    steps = (
        SubQuestion("Ada Moen >> place of birth", "Lund"),
        SubQuestion("Where is #1?", "Skane"),
    )
    _, found = run_oracle(
        Question("q", QUESTION, (), decomposition=steps), units="triple", reader_format="brief"
    )
    assert found.triples[0][:3] == ("Ada Moen", "place of birth", "Lund")
    assert found.triples[1][:3] == ("Where is Lund?", "", "Skane")


def test_without_gold_the_reader_answers_alone():
    hands, found = run_oracle(ASKED)
    assert hands.kinds() == ["reader"] and found.parse_errors == {"question_without_gold": 1}


def test_the_oracle_declares_what_it_sees_and_embeds_nothing():
    needs = OracleConfig().needs
    assert needs.gold and needs.corpus and not needs.index
    assert not OracleConfig(units="triple", reader_format="chain").needs.corpus


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        (IterRetgenConfig, {"num_rounds": 0}, "num_rounds"),
        (IterRetgenConfig, {"num_read": 6}, "num_read"),
        (IterRetgenConfig, {"query_with": "all"}, "query_with='all'"),
        (BeamRetrievalConfig, {"max_hops": 0}, "max_hops"),
        (OracleConfig, {"units": "page"}, "units='page'"),
        (OracleConfig, {"units": "triple"}, "needs reader_format"),
        (OracleConfig, {"reader_format": "xml"}, "documents, thought, chain, brief"),
    ],
)
def test_settings_out_of_range_are_refused(config, settings, words):
    with pytest.raises(UserError, match=words):
        config(**settings)
