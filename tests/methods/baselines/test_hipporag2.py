"""HippoRAG 2: linking, recognition, walk, and the fallback to dense retrieval."""

import json

import pytest

from cirag_jax.commands import task
from cirag_jax.errors import UserError
from cirag_jax.methods.baselines.hipporag2 import (
    Hipporag2Config,
    hipporag2,
    relative_scores,
)
from cirag_jax.methods.cirag.prompts import parse_facts
from cirag_jax.runtime.requests import Generate, Generated, Link, Linked, Retrieve, Walk
from cirag_jax.triples.normalization import triple_key
from cirag_jax.types import Passage, Question, Triple
from configs.methods import hipporag2 as hipporag2_config
from tests.methods.fakes import FakeHandlers, mutated_texts, prompt

QUESTION = "In which province was Ada Moen born?"
PASSAGES = [Passage(f"p{i}", f"Title {i}", f"Text {i}.") for i in range(6)]
BORN = Triple("Ada Moen", "born in", "Lund", "p2", 0)
IN = Triple("Lund", "lies in", "Skane", "p4", 0)
POTTER = Triple("Ada Moen", "is", "potter", "p2", 1)
SCORES = {triple_key(BORN): 0.8, triple_key(IN): 0.6, triple_key(POTTER): 0.4}


def facts(*triples):
    return json.dumps({"fact": [triple_key(t) for t in triples]})


def run(recognizer=(), triples=(POTTER, IN, BORN), **settings):
    texts = {"recognizer": list(recognizer), "reader": ["Thought: x.\nAnswer: Skane"]}
    fakes = FakeHandlers({None: PASSAGES}, {"p2": triples}, texts, SCORES)
    program = hipporag2(Question("q", QUESTION, ()), Hipporag2Config(**settings))
    return fakes, fakes.drive(program)


def test_hipporag2_relevant_triples_start_the_walk():
    fakes, result = run([facts(IN, BORN)], num_passages=4, num_read=2)
    assert fakes.kinds() == ["Link", "recognizer", "Walk", "reader"]
    assert fakes.received(Link) == [Link(QUESTION, 5)]
    (walk,) = fakes.received(Walk)
    assert walk == Walk(QUESTION, (IN, BORN), (pytest.approx(0.5), 1.0), 4, 5, 0, 0.05, 0.5)
    read = prompt(fakes.received(Generate, "reader")[0])
    assert "Text 4." in read and "Text 2." in read and "Text 0." not in read
    assert (result.answer, result.parse_errors) == ("Skane", {})
    assert result.passages == ("p4", "p2", "p0", "p1")
    assert result.triples == (IN, BORN, POTTER)  # The relevant triples come first.
    (step,) = result.steps
    assert (step.candidates, step.kept) == ((BORN, IN, POTTER), (IN, BORN))
    assert step.scores == (0.8, 0.6, 0.4) and step.response == facts(IN, BORN)


def test_hipporag2_recognition_shows_the_linked_triples():
    fakes, _ = run([facts(BORN)], num_triples=2)
    last = fakes.received(Generate, "recognizer")[0].messages[-1].text
    assert last.startswith(f"Question: {QUESTION}\n")
    assert "lund" in last and "skane" in last and "potter" not in last


@pytest.mark.parametrize(
    ("response", "errors"),
    [
        ('{"fact": []}', {}),
        ("None of them.", {"recognition_facts_no_json": 1}),
        (Generated('{"fact": [["ada', "length"),
         {"recognition_facts_truncated": 1, "recognition_not_a_triple": 1}),
        ('{"fact": [["Who", "knows", "what"], 3]}',
         {"recognition_not_a_candidate": 1, "recognition_not_a_triple": 1}),
    ],
)  # fmt: skip
def test_hipporag2_without_relevant_triple_retrieves_densely(response, errors):
    fakes, result = run([response])
    assert fakes.kinds() == ["Link", "recognizer", "Retrieve", "reader"]
    assert fakes.received(Retrieve) == [Retrieve(QUESTION, 10)]
    assert result.passages == tuple(f"p{i}" for i in range(6)) and result.parse_errors == errors


def test_hipporag2_misspelled_triples_are_matched_up_to_the_cutoff():
    spelled = json.dumps({"fact": [["Ada Moen", "was born in", "Lund"]]})
    fakes, _ = run([spelled])
    assert fakes.received(Walk)[0].triples == (BORN,)
    fakes, result = run([spelled], match_cutoff=1.0)
    assert fakes.received(Walk) == []
    assert result.parse_errors == {"recognition_not_a_candidate": 1}


def test_hipporag2_recognition_by_score_needs_no_model():
    fakes, result = run(recognition="score", min_score=0.6)
    assert fakes.kinds() == ["Link", "Walk", "reader"]
    assert fakes.received(Walk)[0].triples == (BORN, IN) and result.parse_errors == {}
    fakes, _ = run(recognition="score", min_score=0.9)
    assert fakes.kinds() == ["Link", "Retrieve", "reader"]
    assert Hipporag2Config(recognition="score").needs.roles == ("reader",)


def test_hipporag2_corpus_without_triples_retrieves_densely():
    fakes, result = run(triples=())
    assert fakes.kinds() == ["Link", "Retrieve", "reader"]
    assert result.parse_errors == {"no_triples": 1}


def test_hipporag2_settings_of_the_walk_are_passed_on():
    fakes, _ = run([facts(BORN)], num_passages=3, num_read=3, num_entities=1, num_seeds=20,
                   passage_weight=0.2, restart=0.3)  # fmt: skip
    assert fakes.received(Walk) == [Walk(QUESTION, (BORN,), (1.0,), 3, 1, 20, 0.2, 0.3)]


def test_relative_scores_equal_scores_are_1():
    assert relative_scores(Linked((BORN, IN), (0.4, 0.4), 0.4)) == {BORN: 1.0, IN: 1.0}
    assert relative_scores(Linked((), (), 0.0)) == {}


def test_hipporag2_needs_match_its_requests():
    needs = Hipporag2Config().needs
    assert needs.roles == ("recognizer", "reader") and needs.graph and needs.triples and needs.index


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"restart": 0.0}, "restart=0.0 must lie between 0 and 1"),
        ({"restart": 1.0}, "restart=1.0"),
        ({"num_read": 11}, "num_read=11 must not exceed num_passages=10"),
        ({"recognition": "none"}, "recognition='none'"),
        ({"passage_weight": -1.0}, "passage_weight"),
    ],
)
def test_hipporag2_config_invalid_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        Hipporag2Config(**settings)


def test_parse_facts_mutated_outputs_never_raise():
    outputs = (facts(BORN, IN), facts(POTTER), '{"fact": []}')
    pieces = ("{", "}", '"', "[", "]", ",", "\\", "\n", "\x00", "\ud800", "[" * 40, "null", "fact")
    for seed in range(5):
        for text, rng in mutated_texts(outputs, pieces, seed):
            cut = rng.random() < 0.5
            kept, problems = parse_facts(text, (BORN, IN, POTTER), "ascii", 0.8, cut)
            assert set(kept) <= {BORN, IN, POTTER} and all(map(str.isidentifier, problems))


def test_hipporag2_paper_preset_has_the_defaults():
    config = hipporag2_config.get_config("paper")
    assert Hipporag2Config(**task.plain(config.hipporag2)) == Hipporag2Config()
    assert (config.graph.synonym_score, config.graph.max_synonyms) == (0.8, 100)


def test_hipporag2_normalization_applies_to_the_graph():
    config = hipporag2_config.get_config()
    config.hipporag2.normalization = "unicode"
    assert config.graph.normalization == "unicode"
