"""The extraction of one passage, driven by hand: requests, parsing, identity."""

import dataclasses
from typing import Any

import pytest

from cirag_jax.methods.common import extraction
from cirag_jax.methods.common.extraction import ExtractionSettings, extract
from cirag_jax.runtime.requests import Generate, Generated, RequestError
from cirag_jax.types import Passage, Triple

SETTINGS = ExtractionSettings()
PASSAGE = Passage("p", "Ule", "Ule feeds Tarn. Tarn governs Osk.")


def drive(*answers, **settings) -> tuple[list[Any], Any]:
    """The program by hand: answers are (text, finish reason); returns its requests, its result."""
    program = extract(PASSAGE, ExtractionSettings(**settings))
    requests = [next(program)]
    for text, reason in answers:
        try:
            requests.append(program.send(Generated(text, reason)))
        except StopIteration as end:
            return requests, end.value
    raise AssertionError("the program asked for more")


def test_two_requests_and_triples_with_their_sentences():
    requests, found = drive(
        ('{"named_entities": ["Ule", "Osk"]}', "stop"),
        ('{"triples": [["Tarn", "governs", "Osk"], ["Ule", "feeds", "Tarn"]]}', "stop"),
        entity_tokens=7,
        triple_tokens=9,
    )
    assert all(isinstance(r, Generate) and r.role == "extractor" for r in requests)
    assert [r.max_tokens for r in requests] == [7, 9] and requests[0].json_schema is None
    assert '["Ule", "Osk"]' in requests[1].messages[-1].text
    assert found.status == "ok" and found.parse_errors == {}
    assert found.triples == (
        Triple("Tarn", "governs", "Osk", "p", 1),
        Triple("Ule", "feeds", "Tarn", "p", 0),
    )


EXAMPLE = '["Agnes Thorley", "discovered", "comet Oriel"]'


@pytest.mark.parametrize(
    ("first", "second", "status", "cause", "problems"),
    [
        ("no idea", '{"triples": [["a", "b", "c"]]}', "ok", None, {"entities: no_json": 1}),
        ('{"named_entities": []}', '{"triples": []}', "empty", None, {}),
        ("[]", "", "failed", "answer: no_json",
         {"entities: wrong_shape": 1, "triples: no_json": 1}),
        ('["Ule"]', '{"triples": [["a", "b"]]}', "failed", "answer: wrong_shape",
         {"entities: wrong_shape": 1, "triples: wrong_shape": 1}),
        ('{"named_entities": ["Ule"]}', f'{{"triples": [{EXAMPLE}]}}', "failed",
         "answer: example", {"triples: example": 1}),
        ('{"named_entities": ["Ule"]}', f'{{"triples": [{EXAMPLE}, ["a", "b", "c"]]}}', "ok",
         None, {"triples: example": 1}),
    ],
)  # fmt: skip
def test_what_becomes_of_answers(first, second, status, cause, problems):
    _, found = drive((first, "stop"), (second, "stop"))
    assert (found.status, found.cause) == (status, cause)
    assert found.parse_errors == problems
    assert bool(found.answer) == (status != "ok" and bool(second))


NAMES = '{"named_entities": ["Ule"]}'
GIVEN = [  # triples' answer, how it ended -> status, triples with their sentences
    ('{"triples": [["Ule", "feeds", "Tarn"], ["ULE", "Feeds", "tarn"]]}', "stop",
     "ok", [("Ule", "feeds", "Tarn", 0)]),
    ('Sure: {"triples": [["Tarn", "governs", "Osk"], ["Ule", "feeds"], ["a", 3, "b\\n c"]]}',
     "stop", "ok", [("Tarn", "governs", "Osk", 1), ("a", "3", "b c", 0)]),
    ('{"triples": [["Ule", "feeds", "Tarn"], ["Tarn", "gov', "length",
     "ok", [("Ule", "feeds", "Tarn", 0)]),
    ("{'triples': [{'subject': 'Ule', 'predicate': 'feeds', 'object': 'Tarn'},]}", "stop",
     "ok", [("Ule", "feeds", "Tarn", 0)]),
    ('[["Ule", "feeds", "Tarn"]]', "stop", "ok", [("Ule", "feeds", "Tarn", 0)]),
    (f'{{"triples": [{EXAMPLE}]}}', "stop", "failed", []),
    ('{"triples": []}', "stop", "empty", []),
]  # fmt: skip


def test_the_parser_gives_what_its_version_gave():
    """Where this fails for an intended change, raise `extraction.PARSER` and correct both."""
    found = []
    for answer, reason, *_ in GIVEN:
        _, made = drive((NAMES, "stop"), (answer, reason))
        rows = [(t.head, t.relation, t.tail, t.sentence) for t in made.triples]
        found.append((answer, reason, made.status, rows))
    assert (extraction.PARSER, found) == (1, GIVEN)


def test_a_failed_request_is_the_failure_of_the_passage():
    program = extract(PASSAGE, ExtractionSettings())
    next(program)
    with pytest.raises(RequestError, match="away"):
        program.throw(RequestError("the server is away"))


def test_what_the_passage_does_not_name_is_dropped():
    text = '{"triples": [["Ule", "feeds", "Oskar"], ["ULE", "gives to", "Tarn"]]}'
    answers = ("[]", "stop"), (text, "stop")
    _, found = drive(*answers, grounded=True)
    assert [(t.head, t.relation, t.tail) for t in found.triples] == [("ULE", "gives to", "Tarn")]
    assert found.parse_errors["triples: ungrounded"] == 1
    assert len(drive(*answers)[1].triples) == 2
    _, found = drive(("[]", "stop"), ('{"triples": [["Ur", "is", "old"]]}', "stop"), grounded=True)
    assert (found.status, found.cause) == ("failed", "answer: ungrounded")


def test_the_words_of_a_triple_are_looked_for_in_title_and_text():
    passage = Passage("p", "Café Ule", "It opened on 3 May 1920, in Saint-Osk.")
    for head, tail, grounded in (
        ("Café Ule", "1920", True),
        ("café", "saint osk", True),
        ("Cafe Ule", "1920", False),
        ("Ule", "May 192", False),
    ):
        assert extraction.is_grounded((head, "opened in", tail), passage) == grounded


def test_constrained_answers_have_schemas():
    requests, _ = drive(("[]", "stop"), ("[]", "stop"), constrained=True)
    keys = [next(iter(r.json_schema["properties"])) for r in requests]
    assert keys == ["named_entities", "triples"]


def test_what_makes_other_triples_is_another_extractor():
    made_by = {"model": "m", "backend": "jax", "dtype": "float32", "adapter": "/here/a"}
    found = [
        extraction.extractor_identity({**made_by, **other}, dataclasses.replace(SETTINGS, **how))
        for other, how in (
            ({}, {}), ({"model": "n"}, {}), ({"dtype": "bfloat16"}, {}), ({"weights": "w"}, {}),
            ({"no_repeat_ngram_size": 8}, {}), ({"base_url": "http://there/v1"}, {}),
            ({}, {"grounded": True}), ({}, {"constrained": True}), ({}, {"entity_tokens": 9}),
            ({}, {"triple_tokens": 9}), ({}, {"dialect": "kirag"}),
        )
    ]  # fmt: skip
    assert all(one not in found[:place] for place, one in enumerate(found))
    moved = extraction.extractor_identity({**made_by, "adapter": "/there/a"}, SETTINGS)
    assert moved == found[0]
    assert found[0]["model"] == "m" and found[0]["sentencex"]
