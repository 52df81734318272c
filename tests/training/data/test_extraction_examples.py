"""Examples for the extractor: prompts as in inference, and answers that the parser accepts."""

from typing import Any

import numpy as np
import pytest

from cirag_jax.datasets.references import Reference, select_references
from cirag_jax.methods.common import extraction_prompts as prompts
from cirag_jax.methods.common.extraction import ExtractionSettings, extract
from cirag_jax.runtime.requests import Generated
from cirag_jax.training.data.extraction_examples import (
    extraction_examples,
    in_order_of_mention,
)
from cirag_jax.types import Passage, Triple
from configs import common
from tests.distill import by_hand

PASSAGE = Passage("p1", "Ule", 'The river Ule feeds the Tarn. "Osk" is a town; Ål lies there.')
REFERENCE = Reference(
    PASSAGE,
    ("Tarn", "Ål", "Ule", "Osk", "river Ule"),
    (
        Triple("Ule", "feeds", "Tarn", "p1", 0),
        Triple('"Osk"', "is", "a  town", "p1", 1),
        Triple("Ål", "lies in", "Osk", "p1", 1),
    ),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return by_hand.tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def make(tokenizer, reference=REFERENCE, max_length=100_000):
    return extraction_examples(tokenizer, [reference], max_length=max_length)


def answers(tokenizer, examples):
    """Returns the supervised text of each example, without the end token."""
    texts = []
    for example in examples:
        (place,) = np.flatnonzero(np.diff(example.weight_T))  # A single run, up to the end.
        ids = example.tokens_T[place + 1 :]
        assert example.weight_T[-1] == 1 and int(ids[-1]) in tokenizer.eos_ids
        assert not set(ids[:-1].tolist()) & tokenizer.eos_ids
        texts.append(tokenizer.decode(ids[:-1], True))
    return texts


@pytest.mark.parametrize("name", ["tokenizer", "smollm2"])
def test_extraction_examples_prompts_match_inference(name, request):
    """If `extract` gets the examples' answers, its prompts are the examples' prompts."""
    tokenizer = request.getfixturevalue(name)
    examples, reasons = make(tokenizer)
    assert reasons == {} and [example.source for example in examples] == ["p1", "p1"]
    entity_answer, triple_answer = answers(tokenizer, examples)
    program: Any = extract(PASSAGE, ExtractionSettings())
    calls = [next(program), program.send(Generated(entity_answer, "stop"))]
    for call, example in zip(calls, examples, strict=True):
        prompt = tokenizer.encode_prompt(call.messages)
        np.testing.assert_array_equal(example.tokens_T[: len(prompt)], prompt)
        assert not example.weight_T[: len(prompt)].any()
        assert example.weight_T[len(prompt) :].all()
    with pytest.raises(StopIteration) as end:
        program.send(Generated(triple_answer, "stop"))
    assert end.value.value.parse_errors == {} and end.value.value.status == "ok"
    parsed = [(t.head, t.relation, t.tail) for t in end.value.value.triples]
    # Spelling and order are the reference's, except for repeated spaces.
    assert parsed == [("Ule", "feeds", "Tarn"), ('"Osk"', "is", "a town"), ("Ål", "lies in", "Osk")]
    assert prompts.parse_entities(entity_answer, "stop") == (
        ("Ule", "river Ule", "Tarn", "Osk", "Ål"),
        None,
    )


def test_in_order_of_mention_absent_names_come_last():
    names = ("zebra", "Osk", "tarn", "absent", "Ule", "also absent")
    assert in_order_of_mention(names, PASSAGE) == (
        "Ule", "tarn", "Osk", "zebra", "absent", "also absent"
    )  # fmt: skip


def test_extraction_examples_unparsable_items_are_counted(tokenizer):
    long = "x" * 401
    triples = (
        Triple("Ule", "feeds", long, "p1", 0),
        Triple("Ule", "feeds", "Tarn", "p1", 0),
        Triple("ule", "FEEDS", "tarn", "p1", 0),  # A repetition in another case.
    )
    examples, reasons = make(tokenizer, Reference(PASSAGE, ("Ule", long, "\n"), triples))
    assert reasons == {"dropped_entities": 2, "dropped_triples": 2}
    entity_answer, triple_answer = answers(tokenizer, examples)
    assert entity_answer == prompts.render_entities(["Ule"])
    assert triple_answer == prompts.render_triples([("Ule", "feeds", "Tarn")])
    nothing = Reference(PASSAGE, ("Ule",), triples[:1])
    assert make(tokenizer, nothing) == ([], {"dropped_triples": 1, "dropped_empty": 1})


def test_extraction_examples_too_long_is_dropped(tokenizer):
    examples, _ = make(tokenizer)
    shorter, longer = sorted(examples, key=lambda example: len(example.tokens_T))
    kept, reasons = make(tokenizer, max_length=len(longer.tokens_T))
    assert len(kept) == 2 and reasons == {}
    kept, reasons = make(tokenizer, max_length=len(longer.tokens_T) - 1)
    assert reasons == {"dropped_too_long": 1} and len(kept) == 1
    np.testing.assert_array_equal(kept[0].tokens_T, shorter.tokens_T)
    many, reasons = extraction_examples(
        tokenizer, [REFERENCE, REFERENCE], max_length=len(shorter.tokens_T)
    )
    assert len(many) == 2 and reasons == {"dropped_too_long": 2}


def test_extraction_examples_musique_folds_are_disjoint(smollm2, shared_data):
    """Folds have no passage in common, and the parser accepts every reference."""
    data = common.data(split="")
    data.dir = str(shared_data / "musique")
    names = {}
    for fold in ("train", "tune", "test"):
        data.fold = fold
        references, counts = select_references(data)
        assert counts["passages"] == sum(counts[k] for k in ("kept", "shared", "empty"))
        assert counts["without_triples"] == 0
        names[fold] = {reference.passage.id for reference in references}
        examples, reasons = extraction_examples(smollm2, references[:20], max_length=2048)
        assert len(examples) == 40 and not reasons.keys() - {"dropped_triples"}
    assert not names["train"] & names["test"] and not names["tune"] & names["test"]
    assert not names["train"] & names["tune"] and len(names["test"]) > 500
