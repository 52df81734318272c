"""The invented world of ``--scale=smoke``, and the rules that answer the methods' prompts."""

import json
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from cirag_jax.datasets.chains import triple_text
from cirag_jax.datasets.prepare import prepare
from cirag_jax.errors import UserError
from cirag_jax.methods.cirag import prompts
from cirag_jax.methods.common import dialects, extraction_prompts, reading_prompts, short_answers
from cirag_jax.methods.kirag import prompts as kirag
from cirag_jax.types import Passage, Step, Triple
from experiments.smoke import files, server

QUESTION = "What is the birthplace of the director of the film Copper Mile?"
FILM = Triple("Copper Mile", "director", "Alma Varn", "p1", 1)
PERSON = Triple("Alma Varn", "birthplace", "Balmouth", "p2", 1)
OTHER = Triple("Alma Varn", "birth year", "1880", "p2", 3)
TEXTS = tuple(files.Fact(*fact[:3]).sentence for fact in (FILM, PERSON, OTHER))


def reply(messages):
    return server.reply([{"role": m.role, "content": m.text} for m in messages])


@pytest.mark.parametrize(
    ("benchmark", "config", "hops"),
    [("two_wiki", "default", 2), ("hotpotqa", "distractor", 2), ("musique", "ans", 3)],
)
def test_files_convert_to_questions_with_gold_facts(benchmark, config, hops, tmp_path):
    counts = files.write(tmp_path)["num_questions"]
    folder = tmp_path / benchmark
    made = prepare(benchmark, tmp_path / "out", config=config, manual_dir=folder)
    splits = [question.split for question in made.questions]
    assert splits.count("train") == files.NUM_TRAIN and splits.count("dev") == files.NUM_DEV
    assert len(splits) == counts[benchmark]
    for question in made.questions:
        assert len(question.supporting or ()) == hops and len(question.context or ()) == 6
        texts = [made.corpus[i].text for i in question.supporting or ()]
        used, left, answer = server.follow(question.question, server.facts_in(" ".join(texts)))
        assert not left and answer == question.answers[0] and len(used) == hops


def test_prepare_split_keeps_only_its_questions(tmp_path):
    files.write(tmp_path)
    made = prepare(
        "two_wiki", tmp_path / "out", manual_dir=tmp_path / "two_wiki",
        split="dev", corpus="selected_questions",
    )  # fmt: skip
    assert {question.split for question in made.questions} == {"dev"}
    contexts = {i for question in made.questions for i in question.context or ()}
    assert set(made.corpus) == contexts
    with pytest.raises(UserError, match="--split=test has no questions; the splits are dev, train"):
        prepare("two_wiki", tmp_path / "out", manual_dir=tmp_path / "two_wiki", split="test")


def test_rules_extract_triples_of_a_passage():
    passage = Passage("p", "Alma Varn", " ".join(TEXTS))
    entities, problem = extraction_prompts.parse_entities(
        reply(extraction_prompts.entity_messages(passage)), "stop"
    )
    assert problem is None and set(entities) >= {"Alma Varn", "Balmouth"}
    triples, problem = extraction_prompts.parse_triples(
        reply(extraction_prompts.triple_messages(passage, entities)), "stop"
    )
    assert problem is None and set(triples) == {FILM[:3], PERSON[:3], OTHER[:3]}


def test_rules_integrate_round_by_round():
    first = prompts.parse_decision(
        reply(prompts.integration_messages(QUESTION, (), (OTHER, FILM))), (OTHER, FILM)
    )
    assert first.kept == (FILM,) and first.next_query == "What is the birthplace of alma varn?"
    step = Step(QUESTION, (), (OTHER, FILM), (), first.thought, first.kept, first.next_query)
    messages = prompts.integration_messages(QUESTION, (step,), (OTHER, PERSON))
    last = prompts.parse_decision(reply(messages), (OTHER, PERSON))
    assert last.kept == (PERSON,) and last.next_query is None and last.has_question
    assert not first.parse_errors and not last.parse_errors


def test_rules_read_and_refuse():
    def answer(granularity, evidence):
        messages = reading_prompts.answer_messages(QUESTION, granularity, evidence)
        return reading_prompts.parse_answer(reply(messages))[:2]

    lines = [str(tuple(fact[:3])) for fact in (FILM, PERSON)]
    assert answer("triple", lines) == ("Balmouth", True)
    assert answer("triple", lines[:1]) == ("", False)
    assert answer("sentence", [f"Title: {text}" for text in TEXTS]) == ("Balmouth", True)
    messages = short_answers.reading_messages(QUESTION, [Passage("p", "T", " ".join(TEXTS))])
    assert reply(messages) == "Balmouth"


def test_rules_extract_triples_as_lines():
    passage = Passage("p", "Alma Varn", " ".join(TEXTS))
    for dialect in ("kirag", "trace"):
        text = reply(dialects.messages(passage, dialect))
        triples, problem = dialects.parse(text, "stop", dialect, passage)
        assert problem is None and {*triples} == {FILM[:3], PERSON[:3], OTHER[:3]}


def test_rules_construct_a_chain_and_read_passages():
    def complete(candidates, chain):
        messages = kirag.constructor_messages(
            QUESTION, candidates, chain, "triple", continues=False
        )
        return reply(messages)

    film, person, other = map(triple_text, (FILM, PERSON, OTHER))
    assert complete([other, film], []) == film
    assert complete([other, film, person], []) == f"{film}, {person}. So the answer is: Balmouth."
    assert complete([other, person], [film]) == f"{person}. So the answer is: Balmouth."
    assert complete([other], [film, person]) == "So the answer is: Balmouth."
    assert complete([other], [film]) == ""
    passages = [Passage("p", "T", " ".join(TEXTS))]
    assert reply(kirag.reading_messages(QUESTION, passages)) == "Balmouth"
    assert reply(kirag.reading_messages(QUESTION, [])) == "I do not know"


def test_server_answers_rules_and_rejects_other_prompts():
    process = subprocess.Popen([sys.executable, server.__file__], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()

        def ask(text):
            body = {"model": "smoke", "messages": [{"role": "user", "content": text}]}
            request = urllib.request.Request(
                f"{url}/chat/completions", json.dumps(body).encode(), method="POST"
            )
            with urllib.request.urlopen(request) as response:
                return json.load(response)["choices"][0]["message"]["content"]

        lines = [str(tuple(fact[:3])) for fact in (FILM, PERSON)]
        messages = reading_prompts.answer_messages(QUESTION, "triple", lines)
        assert ask(messages[-1].text).endswith("Answer: Balmouth")
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            ask("Write a poem.")
        assert "no rule for the prompt 'Write a poem.'" in refused.value.read().decode()
        with urllib.request.urlopen(f"{url}/models") as response:
            assert json.load(response)["data"][0]["id"] == "smoke"
    finally:
        process.kill()
        process.communicate()
