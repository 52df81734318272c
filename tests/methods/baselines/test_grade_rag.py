"""GRADE's multi-step and query-decomposition RAG, and the parser of sub-queries."""

import json

import pytest

from cirag_jax.errors import UserError
from cirag_jax.methods.baselines.decomposition import (
    DecompositionConfig,
    decomposition,
    parse_queries,
)
from cirag_jax.methods.baselines.multi_step import MultiStepConfig, multi_step
from cirag_jax.runtime.requests import Generate, Generated, Rank, RequestError, Retrieve
from cirag_jax.types import Passage, Question
from configs.methods import decomposition as decomposition_config
from configs.methods import multi_step as multi_step_config
from tests.methods.fakes import FakeHandlers, mutated_texts, prompt

QUESTION = "In which province was Ada Moen born?"
BORN, WHERE = "Where was Ada Moen born?", "In which province is Lund?"
PASSAGES = [Passage(f"p{i}", f"Title {i}", f"Text {i}.") for i in range(9)]


def steps_of(reader, scores=None, **settings):
    """Runs multi-step RAG; the second round retrieves other passages."""
    passages = {QUESTION: PASSAGES[:3], None: PASSAGES[2:6]}
    fakes = FakeHandlers(passages, {}, {"reader": list(reader)}, scores or {})
    return fakes, fakes.drive(multi_step(Question("q", QUESTION, ()), MultiStepConfig(**settings)))


def parts_of(decomposer, reader=("Skane",), scores=None, **settings):
    """Runs query decomposition; each sub-query retrieves other passages."""
    passages = {BORN: PASSAGES[:3], WHERE: PASSAGES[2:5], QUESTION: PASSAGES[6:8]}
    texts = {"decomposer": [decomposer], "reader": list(reader)}
    fakes = FakeHandlers(passages, {}, texts, scores or {})
    program = decomposition(Question("q", QUESTION, ()), DecompositionConfig(**settings))
    return fakes, fakes.drive(program)


def queries(*texts):
    return json.dumps({"queries": texts})


def test_multi_step_second_query_has_answer_and_passages():
    fakes, result = steps_of(["Lund", "Skane"])
    assert fakes.kinds() == ["Retrieve", "reader", "Retrieve", "reader"]
    second = f"{QUESTION} Lund Title 0 Text 0. Title 1 Text 1. Title 2 Text 2."
    assert fakes.received(Retrieve) == [Retrieve(QUESTION, 10), Retrieve(second, 10)]
    last = prompt(fakes.received(Generate)[1])
    assert "Text 5." in last and "Text 0." not in last
    assert result.answer == "Skane" and len(result.attempts) == 2
    assert result.passages == ("p2", "p3", "p4", "p5", "p0", "p1")  # The last round comes first.
    assert [step.next_query for step in result.steps] == [second, None]


def test_multi_step_num_in_query_limits_the_passages():
    fakes, _ = steps_of(["Lund", "Skane"], num_in_query=1)
    assert fakes.received(Retrieve)[1].query == f"{QUESTION} Lund Title 0 Text 0."


def test_multi_step_refusal_is_not_part_of_the_query():
    fakes, _ = steps_of(["Answer: Unanswerable", "Answer: x"], reader_format="brief")
    assert "nanswerable" not in fakes.received(Retrieve)[1].query


def test_multi_step_unchanged_query_ends_the_rounds():
    fakes, result = steps_of(["Answer: Unanswerable"], reader_format="brief", num_in_query=0)
    assert len(fakes.received(Retrieve)) == 1 and result.parse_errors == {"repeated_query": 1}
    assert result.steps[0].next_query is None


def test_multi_step_failed_reader_ends_the_rounds():
    _, result = steps_of([RequestError("too long")])
    assert result.error == "too long" and result.passages == ("p0", "p1", "p2")


def test_multi_step_reranks_by_the_question():
    scores = {f"p{i}": float(i) for i in range(9)}
    fakes, result = steps_of(["Lund", "Skane"], scores, rerank_from=20, num_passages=2, num_read=2,
                             num_in_query=0)  # fmt: skip
    assert [r.k for r in fakes.received(Retrieve)] == [20, 20]
    assert {r.query for r in fakes.received(Rank)} == {QUESTION}
    assert result.passages == ("p5", "p4", "p2", "p1")
    assert MultiStepConfig(rerank_from=20).needs.rankers == ("passages",)
    assert MultiStepConfig().needs.rankers == ()


def test_decomposition_merges_and_reranks_passages():
    scores = {f"p{i}": float(i) for i in range(9)}
    fakes, result = parts_of(queries(BORN, WHERE), scores=scores, num_read=2)
    assert fakes.kinds() == ["decomposer", "Retrieve", "Retrieve", "Rank", "reader"]
    assert fakes.received(Retrieve) == [Retrieve(BORN, 10), Retrieve(WHERE, 10)]
    assert fakes.received(Rank) == [Rank(QUESTION, tuple(PASSAGES[:5]), 0, "passages")]
    assert result.passages == ("p4", "p3", "p2", "p1", "p0")
    read = prompt(fakes.received(Generate, "reader")[0])
    assert "Text 3." in read and "Text 2." not in read
    (step,) = result.steps
    assert (step.query, step.more_queries, step.kept) == (BORN, (WHERE,), ("p4", "p3"))
    assert (result.answer, result.parse_errors) == ("Skane", {})


def test_decomposition_with_question_also_searches_it():
    for response in (queries(BORN), queries(BORN, QUESTION)):
        fakes, _ = parts_of(response, with_question=True)
        assert [r.query for r in fakes.received(Retrieve)] == [QUESTION, BORN]


def test_decomposition_without_passages_ranks_nothing():
    fakes = FakeHandlers({None: []}, {}, {"decomposer": [queries(BORN)], "reader": ["Skane"]}, {})
    fakes.drive(decomposition(Question("q", QUESTION, ()), DecompositionConfig()))
    assert fakes.kinds()[:2] == ["decomposer", "Retrieve"] and fakes.received(Rank) == []


@pytest.mark.parametrize("response", ["Where?", '{"queries": []}', '{"queries": "'])
def test_decomposition_without_sub_query_searches_the_question(response):
    fakes, result = parts_of(response)
    assert [r.query for r in fakes.received(Retrieve)] == [QUESTION]
    assert sum(result.parse_errors.values()) == 1
    assert next(iter(result.parse_errors)).startswith("decomposition_")


def test_decomposition_cut_off_response_keeps_complete_queries():
    cut = Generated('{"queries": ["Where was Ada Moen born?", "In whi', "length")
    fakes, result = parts_of(cut)
    assert [r.query for r in fakes.received(Retrieve)] == [BORN]
    assert result.parse_errors == {"decomposition_truncated": 1}


def test_decomposition_schema_is_used_only_if_constrained():
    fakes, _ = parts_of(queries(BORN))
    assert fakes.received(Generate, "decomposer")[0].json_schema is not None
    fakes, _ = parts_of(queries(BORN), constrained=False)
    assert fakes.received(Generate, "decomposer")[0].json_schema is None
    assert DecompositionConfig(constrained=False).needs.abilities == {}


@pytest.mark.parametrize(
    ("text", "found", "problems"),
    [
        (queries(BORN, WHERE, BORN), (BORN, WHERE), ()),
        (json.dumps([BORN]), (BORN,), ()),
        (json.dumps({"Queries": [{"query": BORN}, WHERE]}), (BORN, WHERE), ()),
        (json.dumps({"queries": BORN}), (BORN,), ()),
        (queries("a", "b", "c", "d"), ("a", "b", "c"), ("too_many_queries",)),
        (queries("a", "b", "c", "a"), ("a", "b", "c"), ()),
        (json.dumps({"queries": [BORN, 3, "", None, "x" * 301]}), (BORN,), ("not_a_query",) * 4),
        (json.dumps({"queries": {"a": 1}}), (), ("wrong_shape",)),
        ("", (), ("no_json",)),
    ],
)
def test_parse_queries_returns_queries_and_problems(text, found, problems):
    assert parse_queries(text, 3) == (found, problems)


def test_parse_queries_mutated_outputs_never_raise():
    outputs = (queries(BORN, WHERE), json.dumps([BORN]), json.dumps({"queries": [{"q": BORN}]}))
    pieces = ("{", "}", '"', "[", "]", ",", ":", "\\", "\n", "\x00", "\ud800", "[" * 40, "null")
    for seed in range(5):
        for text, rng in mutated_texts(outputs, pieces, seed):
            parsed = parse_queries(text, 3, truncated=rng.random() < 0.5)
            assert len(parsed.queries) <= 3 and (parsed.queries or parsed.problems)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_rounds": 0}, "num_rounds"),
        ({"num_read": 11}, "num_read=11 must not exceed num_passages=10"),
        ({"num_passages": 5, "num_read": 5}, "num_in_query=10 must not exceed num_passages=5"),
        ({"reader_format": "xml"}, "reader_format='xml'"),
    ],
)
def test_multi_step_config_invalid_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        MultiStepConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_queries": 0}, "max_queries"),
        ({"num_read": 51}, "num_read=51 must not exceed 50"),
        ({"constrained": 1}, "constrained"),
    ],
)
def test_decomposition_config_invalid_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        DecompositionConfig(**settings)


def test_paper_presets_have_the_values_of_grade():
    parts, steps = (c.get_config("paper") for c in (decomposition_config, multi_step_config))
    assert parts.rankers.passages.model == "BAAI/bge-reranker-large"
    assert parts.decomposition.num_passages == steps.multi_step.num_passages == 10
    assert steps.multi_step.num_rounds == 2
