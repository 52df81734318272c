"""MetaRAG."""

import json

import pytest

from cirag_jax.commands import opening
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.methods.baselines.metarag import (
    MetaragConfig,
    agree,
    metarag,
    parse_answer,
    parse_check,
    parse_query,
    parse_verdict,
)
from cirag_jax.runtime.requests import Generate, Rank, RequestError, Retrieve
from cirag_jax.types import Passage, Question
from tests.methods.fakes import FakeHandlers, mutated_texts, prompt

QUESTION = "In which province was Ada Moen born?"
PASSAGES = [Passage(f"p{i}", f"Title {i}", f"Text {i}.") for i in range(9)]
CORRECT = '{"judgement": "correct", "feedback": ""}'


def reply(answer, reason="She was born there."):
    return json.dumps({"reason": reason, "answer": answer})


def run(answers, critic=(), experts=("Skane",), others=None, scores=None, found=None, **settings):
    """Answers that equal the expert's are accepted: only their score is above the threshold."""
    texts = {"generator": list(answers), "critic": list(critic), "expert": list(experts)}
    passages = found or {QUESTION: PASSAGES[:2], None: PASSAGES[1:4]}
    fakes = FakeHandlers(passages, {}, texts | (others or {}), {"Skane": 1.0} | (scores or {}))
    program = metarag(Question("q", QUESTION, ()), MetaragConfig(**{"num_passages": 2} | settings))
    return fakes, fakes.drive(program)


def test_metarag_accepted_answer_is_not_revised():
    fakes, result = run([reply("Skane")])
    assert fakes.kinds() == ["Retrieve", "generator", "expert", "Rank"]
    assert fakes.received(Rank) == [Rank("Skane", ("Skane",), 1, "answers")]
    expert = fakes.received(Generate, "expert")[0]
    assert [m.role for m in expert.messages] == ["user"] and "Text 1." in prompt(expert)
    assert (result.answer, result.passages, result.parse_errors) == ("Skane", ("p0", "p1"), {})
    assert result.steps[0].notes["similarity"] == 1.0


@pytest.mark.parametrize(
    ("internal", "external", "nli", "advice", "retrieves"),
    [
        ("yes", "yes", ["yes"], "Check the answer once more", False),
        ("yes", "yes", ["no"], "Reason in several steps", False),
        ("yes", "no", [], "answer from what you know", True),
        ("no", "yes", [], "from the documents alone", False),
        ("No.", "No", [], "Split the question", True),
        ("I know", "Hm", ["yes"], "Check the answer once more", False),
    ],
)
def test_metarag_plan_follows_the_critique(internal, external, nli, advice, retrieves):
    critic = [CORRECT, internal, external, *(["Query: Lund province"] if retrieves else [])]
    fakes, result = run(
        [reply("Lund"), reply("Skane")], critic, ["Skane"] * 2, others={"nli": list(nli)}
    )
    again = prompt(fakes.received(Generate, "generator")[1])
    assert advice in again and "Think step by step." in again
    queries = [QUESTION, "Lund province"] if retrieves else [QUESTION]
    assert [request.query for request in fakes.received(Retrieve)] == queries
    assert ("Text 2." in again) == retrieves and "Text 0." in again
    assert result.answer == "Skane" and result.steps[0].next_query == (
        "Lund province" if retrieves else None
    )
    verdicts = 2 if internal == "I know" else 0
    assert sum(result.parse_errors.values()) == verdicts


def test_metarag_passages_are_ranked_by_their_best_score():
    critic = [CORRECT, "no", "no", "Query: Lund province"]
    found = {QUESTION: PASSAGES[:3], None: [PASSAGES[2], PASSAGES[1]]}
    answers = [reply("Lund"), reply("Skane")]
    _, result = run(answers, critic, ["Skane"] * 2, found=found, num_passages=3)
    assert result.passages == ("p0", "p2", "p1")


def test_metarag_feedback_of_the_critic_is_shown():
    critic = ['{"judgement": "kind", "feedback": "Name a province."}', "no", "yes"]
    fakes, result = run([reply("Lund"), reply("Skane")], critic, ["Skane"] * 2)
    again = prompt(fakes.received(Generate, "generator")[1])
    assert "Name a province." in again and "Think step by step." not in again
    assert result.steps[0].notes["feedback"] == "Name a province."


def test_metarag_max_rounds_ends_the_revisions():
    fakes, result = run([reply("Lund")], max_rounds=0)
    assert result.answer == "Lund" and "critic" not in fakes.kinds()
    critic = [CORRECT, "no", "yes"]
    _, result = run([reply("Lund")] * 3, critic * 2, ["Skane"] * 3, max_rounds=2)
    assert len(result.steps) == len(result.attempts) == 3


def test_metarag_query_is_cut_and_an_empty_one_is_the_question():
    critic = [CORRECT, "no", "no", f"Query: {'x' * 90}"]
    fakes, _ = run([reply("Lund"), reply("Skane")], critic, ["Skane"] * 2)
    assert fakes.received(Retrieve)[1].query == "x" * 64
    fakes, result = run([reply("Lund"), reply("Skane")], [*critic[:3], " "], ["Skane"] * 2)
    assert fakes.received(Retrieve)[1].query == QUESTION
    assert result.parse_errors == {"query_empty": 1}


def test_metarag_malformed_responses_are_counted():
    fakes, result = run(["Lund", reply("Skane")], ["?", "no", "yes"], ["", "Skane"])
    assert result.attempts[0].answer == "Lund"
    assert result.parse_errors == {"answer_no_json": 1, "check_no_json": 1, "expert_empty": 1}
    assert len(fakes.received(Rank)) == 1  # An empty answer of the expert accepts nothing.


def test_metarag_expert_sees_passages_only_if_set():
    fakes, _ = run([reply("Skane")], expert_sees_passages=False)
    assert "Text 0." not in prompt(fakes.received(Generate, "expert")[0])


def test_metarag_true_nli_has_the_format_of_its_model():
    fakes, _ = run(
        [reply("Lund", "A"), reply("Skane")], [CORRECT, "yes", "yes"], ["Skane"] * 2,
        others={"nli": ["1"]}, nli="true",
    )  # fmt: skip
    assert prompt(fakes.received(Generate, "nli")[0]) == "premise: A hypothesis: Lund"


@pytest.mark.parametrize(("nli", "advice"), [("Lund", "Check the answer"), ("Oslo", "Reason in")])
def test_metarag_reader_is_expert_and_nli(nli, advice):
    settings = {"expert": "reader", "nli": "reader", "reader_format": "brief"}
    assert MetaragConfig(**settings).needs.roles == ("generator", "critic", "reader")
    said = ["Answer: Skane", f"Answer: {nli}", "Answer: Skane"]
    fakes, _ = run(
        [reply("Lund"), reply("Skane")], [CORRECT, "yes", "yes"], (), others={"reader": said},
        **settings,
    )  # fmt: skip
    assert advice in prompt(fakes.received(Generate, "generator")[1])
    reads = [prompt(request) for request in fakes.received(Generate, "reader")]
    assert "Text 0." in reads[0] and "Text 0." not in reads[1] and "born there" in reads[1]


def test_metarag_failed_reader_keeps_the_passages():
    _, result = run(
        [reply("Lund")], (), (), others={"reader": [RequestError("too long")]}, expert="reader"
    )
    assert result.error == "too long" and result.passages == ("p0", "p1")


def test_metarag_failed_reader_of_the_nli_fails_the_question():
    others = {"reader": [RequestError("too long")]}
    with pytest.raises(RequestError, match="too long"):
        run([reply("Lund")], [CORRECT, "yes", "yes"], others=others, nli="reader")


def test_metarag_rerank_and_schema_are_switches():
    fakes, result = run([reply("Skane")], scores={"p1": 2.0}, rerank_from=9, constrained=False)
    assert fakes.received(Retrieve)[0].k == 9 and result.passages == ("p1", "p0")
    assert fakes.received(Generate, "generator")[0].json_schema is None
    assert run([reply("Skane")])[0].received(Generate, "generator")[0].json_schema is not None
    assert MetaragConfig(constrained=False).needs.abilities == {}


def test_metarag_server_without_schemas_is_refused():
    flags = ["--config.critic.backend=transformers"]
    opening.check(load_config("configs/methods/metarag.py", flags), MetaragConfig().needs)
    flags = ["--config.critic.backend=openai", "--config.critic.server=transformers"]
    config = load_config("configs/methods/metarag.py", flags)
    with pytest.raises(UserError, match="not support json_schema, which config.metarag needs"):
        opening.check(config, MetaragConfig().needs)


@pytest.mark.parametrize(
    ("text", "answer", "problem"),
    [
        (reply("Skane"), "Skane", None),
        ('{"answer": 1950}', "1950", None),
        ('{"reason": "x"}', "", "wrong_shape"),
        ('{"answer": ["x"]}', "", "wrong_shape"),
        ("Answer: Skane", "Skane", "no_json"),
        ("", "", "no_json"),
    ],
)
def test_parse_answer_response_gives_answer_and_problem(text, answer, problem):
    assert parse_answer(text)[1:] == (answer, problem)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CORRECT, ("", None)),
        ('{"judgement": "Correct.", "feedback": "x"}', ("", None)),
        ('{"judgement": "incorrect", "feedback": "x"}', ("x", None)),
        ('{"judgement": "kind"}', ("kind", None)),
        ('{"judgement": null}', ("", "wrong_shape")),
        ("fine", ("", "no_json")),
    ],
)
def test_parse_check_response_gives_feedback_and_problem(text, expected):
    assert parse_check(text) == expected


def test_parse_verdict_and_query_read_words_and_lines():
    texts = ("Yes.", "no, I know", "I know", "1", "0", "", "not")
    assert [parse_verdict(t) for t in texts] == [True, False, None, True, False, None, None]
    assert parse_query("I think.\nQuery: Ada Moen\nmore") == "Ada Moen"
    assert (parse_query("Hm.\nAda Moen\n"), parse_query("Query:")) == ("Ada Moen", "")
    assert agree("the Lund", "lund") and not agree("Lund", "") and not agree("Lund", "Oslo")


def test_metarag_parsers_mutated_texts_never_raise():
    outputs = (reply("Skane"), CORRECT, "Query: Ada Moen", "yes", "Answer: no.")
    pieces = ("{", "}", '"', "[", "]", ",", ":", "\\", "\n", "\x00", "\ud800", "[" * 40, "null")
    for seed in range(5):
        for text, rng in mutated_texts(outputs, pieces, seed):
            cut = rng.random() < 0.5
            found = parse_answer(text, truncated=cut)
            assert len(found.answer) <= 300 and (found.answer or found.problem)
            feedback, _ = parse_check(text, truncated=cut)
            assert max(len(feedback), len(parse_query(text))) <= 300
            parse_verdict(text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_passages": 0}, "num_passages"),
        ({"expert": "t5"}, "expert='t5' is not one of model, reader"),
        ({"nli": "t5"}, "nli='t5' is not one of true, model, reader"),
    ],
)
def test_metarag_config_invalid_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        MetaragConfig(**settings)


@pytest.mark.parametrize(
    ("preset", "rounds", "passages", "rerank"),
    [("paper", 3, 5, 0), ("dualrag", 5, 10, 50), ("cirag", 4, 10, 0)],
)
def test_metarag_presets_have_the_values_of_papers(preset, rounds, passages, rerank):
    config = load_config(f"configs/methods/metarag.py:{preset}")
    method = config.metarag
    assert (method.max_rounds, method.num_passages, method.rerank_from) == (
        rounds,
        passages,
        rerank,
    )
    assert (method.threshold, method.nli, config.nli.backend) == (0.3, "true", "transformers")
    small = load_config("configs/methods/metarag.py:small")
    assert (small.metarag.expert, small.metarag.nli) == ("reader", "reader")
    assert small.reader.adapter == "shipped:reader"
