"""The extraction of one passage: requests, parsing and identity."""

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
    """Returns the requests and the result. Answers are pairs (text, finish reason)."""
    program = extract(PASSAGE, ExtractionSettings(**settings))
    requests = [next(program)]
    for text, reason in answers:
        try:
            requests.append(program.send(Generated(text, reason)))
        except StopIteration as end:
            return requests, end.value
    raise AssertionError("the program made further requests")


def test_extract_two_requests_give_triples_with_sentences():
    requests, result = drive(
        ('{"named_entities": ["Ule", "Osk"]}', "stop"),
        ('{"triples": [["Tarn", "governs", "Osk"], ["Ule", "feeds", "Tarn"]]}', "stop"),
        entity_tokens=7,
        triple_tokens=9,
    )
    assert all(isinstance(r, Generate) and r.role == "extractor" for r in requests)
    assert [r.max_tokens for r in requests] == [7, 9] and requests[0].json_schema is None
    assert '["Ule", "Osk"]' in requests[1].messages[-1].text
    assert result.status == "ok" and result.parse_errors == {}
    assert result.triples == (
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
def test_extract_responses_give_status_and_problems(first, second, status, cause, problems):
    _, result = drive((first, "stop"), (second, "stop"))
    assert (result.status, result.cause) == (status, cause)
    assert result.parse_errors == problems
    assert bool(result.answer) == (status != "ok" and bool(second))


NAMES = '{"named_entities": ["Ule"]}'
EXPECTED_RESULTS = [  # Response, finish reason, status, triples with sentences.
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


def test_extract_results_match_the_parser_version():
    """If a change is intended, increase `extraction.PARSER` and update the results."""
    result = []
    for answer, reason, *_ in EXPECTED_RESULTS:
        _, made = drive((NAMES, "stop"), (answer, reason))
        rows = [(t.head, t.relation, t.tail, t.sentence) for t in made.triples]
        result.append((answer, reason, made.status, rows))
    assert (extraction.PARSER, result) == (1, EXPECTED_RESULTS)


def test_extract_failed_request_raises():
    program = extract(PASSAGE, ExtractionSettings())
    next(program)
    with pytest.raises(RequestError, match="away"):
        program.throw(RequestError("the server is away"))


def test_extract_grounded_drops_names_not_in_passage():
    text = '{"triples": [["Ule", "feeds", "Oskar"], ["ULE", "gives to", "Tarn"]]}'
    answers = ("[]", "stop"), (text, "stop")
    _, result = drive(*answers, grounded=True)
    assert [(t.head, t.relation, t.tail) for t in result.triples] == [("ULE", "gives to", "Tarn")]
    assert result.parse_errors["triples: ungrounded"] == 1
    assert len(drive(*answers)[1].triples) == 2
    _, result = drive(("[]", "stop"), ('{"triples": [["Ur", "is", "old"]]}', "stop"), grounded=True)
    assert (result.status, result.cause) == ("failed", "answer: ungrounded")


def test_is_grounded_searches_title_and_text():
    passage = Passage("p", "Café Ule", "It opened on 3 May 1920, in Saint-Osk.")
    for head, tail, grounded in (
        ("Café Ule", "1920", True),
        ("café", "saint osk", True),
        ("Cafe Ule", "1920", False),
        ("Ule", "May 192", False),
    ):
        assert extraction.is_grounded((head, "opened in", tail), passage) == grounded


def test_extract_constrained_requests_have_schemas():
    requests, _ = drive(("[]", "stop"), ("[]", "stop"), constrained=True)
    keys = [next(iter(r.json_schema["properties"])) for r in requests]
    assert keys == ["named_entities", "triples"]


def test_extractor_identity_changes_with_what_changes_triples():
    made_by = {"model": "m", "backend": "jax", "dtype": "float32", "adapter": "/here/a"}
    result = [
        extraction.extractor_identity({**made_by, **other}, dataclasses.replace(SETTINGS, **how))
        for other, how in (
            ({}, {}), ({"model": "n"}, {}), ({"dtype": "bfloat16"}, {}), ({"weights": "w"}, {}),
            ({"no_repeat_ngram_size": 8}, {}), ({"base_url": "http://there/v1"}, {}),
            ({}, {"grounded": True}), ({}, {"constrained": True}), ({}, {"entity_tokens": 9}),
            ({}, {"triple_tokens": 9}), ({}, {"dialect": "kirag"}),
        )
    ]  # fmt: skip
    assert all(one not in result[:place] for place, one in enumerate(result))
    moved = extraction.extractor_identity({**made_by, "adapter": "/there/a"}, SETTINGS)
    assert moved == result[0]
    assert result[0]["model"] == "m" and result[0]["sentencex"]
