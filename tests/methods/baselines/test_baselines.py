"""Iter-RetGen, beam retrieval and the oracle, and functions that the baselines share."""

import collections

import pytest

from cirag_jax.errors import UserError
from cirag_jax.methods.baselines.beam_retrieval import BeamRetrievalConfig, beam_retrieval
from cirag_jax.methods.baselines.dragin import DraginConfig
from cirag_jax.methods.baselines.iter_retgen import IterRetgenConfig, iter_retgen
from cirag_jax.methods.baselines.oracle import OracleConfig, oracle
from cirag_jax.methods.common.reading import read, search
from cirag_jax.runtime.requests import (
    Fetch,
    Generate,
    Generated,
    Rank,
    RequestError,
    Retrieve,
    Retrieved,
)
from cirag_jax.types import Passage, Question, SubQuestion
from configs.methods import iter_retgen as iter_retgen_config
from tests.methods.fakes import FakeHandlers, prompt

QUESTION = "In which province was Ada Moen born?"
UNANNOTATED = Question("q", QUESTION, ())
ADA = Passage(
    "a", "Ada Moen", "She was born in Lund. She paints.", ("She was born in Lund.", "She paints.")
)
LUND = Passage("l", "Lund", "Lund is in Skane.")
NOISE = Passage("n", "Adam", "A name.")


CUT = "Ada Moen; born in; Lund; Lund; in the"  # The response is cut before its answer.


def test_search_reranked_passages_pass_the_threshold():
    fakes = FakeHandlers({None: (NOISE, ADA, LUND)}, {}, {}, {"a": 2.0, "l": 0.5, "n": -1.0})
    config = DraginConfig(num_passages=5, rerank_from=9, min_score=0.5)
    retrieved = fakes.drive(search("q?", config))
    assert fakes.requests == [Retrieve("q?", 9), Rank("q?", (NOISE, ADA, LUND), 5, "passages")]
    assert retrieved == Retrieved((ADA,), (2.0,))
    assert fakes.drive(search("q?", DraginConfig(num_passages=2))).passages == (NOISE, ADA)
    assert FakeHandlers({None: ()}, {}, {}).drive(search("q?", config)).passages == ()


@pytest.mark.parametrize(
    ("reader_format", "response", "answer", "sufficient", "errors"),
    [
        ("documents", "Answer: Skane\n", "Skane", True, {}),
        ("documents", " ", "", False, {"answer_empty": 1}),
        ("documents", Generated("Skan", "length"), "Skan", True, {"answer_truncated": 1}),
        ("chain", "Ada; born in; Lund\nAnswer: Lund", "Lund", True, {}),
        ("chain", Generated(CUT, "length"), "", False, {"answer_truncated": 1}),
        ("chain", "Lund", "Lund", True, {"answer_no_answer_mark": 1}),
    ],
)
def test_read_response_gives_attempt_and_errors(
    reader_format, response, answer, sufficient, errors
):
    fakes, counted = FakeHandlers({}, {}, {"reader": [response]}), collections.Counter()
    attempt = fakes.drive(read(QUESTION, "passage", (ADA,), reader_format, counted))
    assert (attempt.answer, attempt.sufficient, dict(counted)) == (answer, sufficient, errors)
    assert attempt.evidence == ("Ada Moen\nShe was born in Lund. She paints.",)


def run_iter(answers, **settings):
    fakes = FakeHandlers({QUESTION: (NOISE, ADA), None: (LUND, ADA)}, {}, {"reader": answers})
    return fakes, fakes.drive(iter_retgen(UNANNOTATED, IterRetgenConfig(**settings)))


def test_iter_retgen_answer_extends_next_query():
    fakes, result = run_iter(["Lund", "Skane", "Skane"], num_read=1)
    queries = [r.query for r in fakes.received(Retrieve)]
    assert queries == [QUESTION, f"{QUESTION} Lund", f"{QUESTION} Skane"]
    read_last = prompt(fakes.received(Generate)[-1])
    assert LUND.text in read_last and "She paints" not in read_last
    assert (result.answer, result.passages) == ("Skane", ("l", "a"))  # The last round.
    assert [step.next_query for step in result.steps] == [*queries[1:], None]
    assert len(result.attempts) == 3 and result.parse_errors == {}


def test_iter_retgen_repeated_query_ends_rounds():
    fakes, result = run_iter(["Lund", "Lund"])
    assert len(fakes.received(Retrieve)) == 2 and result.parse_errors == {"repeated_query": 1}
    fakes, result = run_iter([""])
    assert result.parse_errors == {"answer_empty": 1, "repeated_query": 1}
    assert result.steps[-1].next_query is None


def test_iter_retgen_failed_reader_ends_rounds():
    fakes, result = run_iter(["Lund", RequestError("the server is down")])
    assert len(fakes.received(Retrieve)) == 2
    assert (result.error, result.passages) == ("the server is down", ("l", "a"))
    assert len(result.steps) == 2 and result.parse_errors == {}


def test_iter_retgen_response_extends_next_query():
    said = "Thought: Ada was.\nAnswer: Lund"
    fakes, result = run_iter(
        [said, "Answer: Skane"], num_rounds=2, query_with="response", reader_format="thought"
    )
    assert fakes.received(Retrieve)[1].query == f"{QUESTION} Thought: Ada was. Answer: Lund"
    assert result.answer == "Skane"


def test_iter_retgen_reranks_every_round():
    fakes = FakeHandlers(
        {None: (NOISE, ADA, LUND)}, {}, {"reader": ["Lund", "Skane"]}, {"a": 2.0, "l": 1.0}
    )
    settings = IterRetgenConfig(num_rounds=2, rerank_from=9)
    result = fakes.drive(iter_retgen(UNANNOTATED, settings))
    assert [r.k for r in fakes.received(Retrieve)] == [9, 9] and len(fakes.received(Rank)) == 2
    assert result.passages == ("a", "l") and settings.needs.rankers == ("passages",)
    assert IterRetgenConfig().needs.rankers == ()


def test_iter_retgen_presets_of_papers_have_their_values():
    dualrag, cirag = map(iter_retgen_config.get_config, ("dualrag", "cirag"))
    assert (dualrag.iter_retgen.num_rounds, cirag.iter_retgen.num_rounds) == (5, 4)
    assert (dualrag.iter_retgen.rerank_from, cirag.iter_retgen.rerank_from) == (50, 0)
    assert dualrag.iter_retgen.num_passages == cirag.iter_retgen.num_read == 10


def test_beam_retrieval_extends_chains_and_adds_scores():
    third = Passage("t", "Third", "Else.")
    ada_query = f"{QUESTION}\nknowledge passages: Ada Moen. {ADA.text}"
    noise_query = f"{QUESTION}\nknowledge passages: Adam. {NOISE.text}"
    fakes = FakeHandlers(
        {QUESTION: (NOISE, ADA, LUND), noise_query.rstrip(" ."): (), noise_query: (NOISE, third),
         ada_query: (LUND, ADA)},
        {}, {"reader": ["Skane"]},
    )  # fmt: skip
    settings = BeamRetrievalConfig(num_chains=2, num_passages=2, num_read=2)
    result = fakes.drive(beam_retrieval(UNANNOTATED, settings))
    # A longer chain retrieves more, because it may retrieve its own passages.
    assert fakes.requests[:3] == [
        Retrieve(QUESTION, 2), Retrieve(noise_query, 3), Retrieve(ada_query, 3),
    ]  # fmt: skip
    first, second = (step.notes["chains"] for step in result.steps)
    assert first == [{"passages": ["n"], "score": 1.0}, {"passages": ["a"], "score": 0.5}]
    # 1 + 1/2 and 1/2 + 1 tie; the order of the earlier chains decides.
    assert second == [
        {"passages": ["n", "t"], "score": 1.5}, {"passages": ["a", "l"], "score": 1.5},
    ]  # fmt: skip
    assert result.passages == ("n", "t", "a", "l")
    read_last = prompt(fakes.received(Generate)[0])
    assert third.text in read_last and LUND.text not in read_last


def test_beam_retrieval_ends_without_new_passages():
    fakes = FakeHandlers({None: (ADA,)}, {}, {"reader": ["Lund"]})
    result = fakes.drive(beam_retrieval(UNANNOTATED, BeamRetrievalConfig(max_hops=4)))
    assert len(result.steps) == 1 and result.passages == ("a",)


GOLD = Question(
    "q", QUESTION, ("Skane",), supporting=("a", "l"), supporting_sentences=(("a", 0), ("a", 7)),
    evidences=(("Ada Moen", "place of birth", "Lund"), ("Lund", "province", "Skane")),
)  # fmt: skip


def run_oracle(question, **settings):
    fakes = FakeHandlers({None: (NOISE, ADA, LUND)}, {}, {"reader": ["Answer: Skane"]})
    return fakes, fakes.drive(oracle(question, OracleConfig(**settings)))


def test_oracle_reads_gold_passages():
    fakes, result = run_oracle(GOLD)
    assert fakes.requests[0] == Fetch(("a", "l"))
    asked = prompt(fakes.received(Generate)[0])
    assert ADA.text in asked and LUND.text in asked and NOISE.text not in asked
    assert (result.answer, result.granularity, result.passages) == ("Skane", "passage", ("a", "l"))


def test_oracle_reads_gold_sentences():
    _, result = run_oracle(GOLD, units="sentence", reader_format="brief")
    # All of l counts without annotations; the eighth sentence of a does not exist.
    assert result.sentences == (("a", 0), ("l", 0))
    assert result.attempts[0].evidence == (
        "Ada Moen: She was born in Lund.", "Lund: Lund is in Skane.",
    )  # fmt: skip


def test_oracle_reads_gold_triples():
    fakes, result = run_oracle(GOLD, units="triple", reader_format="brief")
    assert fakes.kinds() == ["reader"] and len(result.triples) == 2
    assert result.attempts[0].evidence[0] == "('ada moen', 'place of birth', 'lund')"
    steps = (
        SubQuestion("Ada Moen >> place of birth", "Lund"),
        SubQuestion("Where is #1?", "Skane"),
    )
    _, result = run_oracle(
        Question("q", QUESTION, (), decomposition=steps), units="triple", reader_format="brief"
    )
    assert result.triples[0][:3] == ("Ada Moen", "place of birth", "Lund")
    assert result.triples[1][:3] == ("Where is Lund?", "", "Skane")


def test_oracle_without_gold_reads_nothing():
    fakes, result = run_oracle(UNANNOTATED)
    assert fakes.kinds() == ["reader"] and result.parse_errors == {"question_without_gold": 1}


def test_oracle_needs_gold_without_index():
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
def test_baseline_configs_invalid_settings_are_refused(config, settings, words):
    with pytest.raises(UserError, match=words):
        config(**settings)
