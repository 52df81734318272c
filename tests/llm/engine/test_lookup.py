"""Guessed tokens, which must change neither texts nor numbers."""

import copy
import dataclasses

import jax
import numpy as np
import pytest

from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.engine.rows import to_arrays
from cirag_jax.llm.engine.shapes import EngineConfig
from cirag_jax.llm.types import Score
from cirag_jax.models import lora
from cirag_jax.models.io.pretrained_decoder import load_decoder
from tests import tiny_decoder
from tests.llm.engine.engines import (
    SIZES,
    ask,
    mixed_requests,
    numbers,
    open_engine,
    pages_are_free,
    set_attention,
    text,
)

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def with_lookup(engine, tokens, **options):
    options = dataclasses.replace(engine.options, lookup_tokens=tokens, **options)
    return engine.with_options(options)


@pytest.fixture(scope="module")
def plain(folder):
    return open_engine(folder, batch_size=8, lookup_tokens=0)


def requests(plain):
    """Returns requests of every kind; the answers of a random model repeat themselves."""
    long = ask(text(30, 3), max_tokens=100, top_logprobs=5, entropy=True)
    written = plain.generate([long])[0]
    eos = [token for token in written.tokens if token.id in plain.tokenizer.eos_ids]
    return [
        long,
        *mixed_requests(),
        dataclasses.replace(long, stop=("@@", written.text[9:12])),
        dataclasses.replace(long, stop=(written.text[-1],)),
        *(dataclasses.replace(long, max_tokens=count) for count in (1, 2, 3, 17)),
        dataclasses.replace(long, max_tokens=1000 if eos else 400),
        ask(text(20, 4), temperature=0.9, seed=3, max_tokens=30),
        ask(text(20, 4), json_schema=SCHEMA, max_tokens=30),
        ask(text(20, 4), attention=3),
    ]


def test_guesses_change_no_number(plain):
    """Numbers are equal bit for bit: alone, together with others, and at the end of the context."""
    sent = requests(plain)
    expected = [numbers(response) for response in plain.generate(sent)]
    guessing = with_lookup(plain, 7)
    together = guessing.generate(sent)
    assert [numbers(response) for response in together] == expected
    assert [r.finish_reason for r in together] == [r.finish_reason for r in plain.generate(sent)]
    assert [numbers(guessing.generate([request])[0]) for request in sent] == expected
    assert pages_are_free(guessing) and plain.usage.drafted_tokens == 0
    # Rows that sample, that have a grammar, or that report attention have no guesses.
    assert [r.usage.drafted_tokens for r in together[-3:]] == [0, 0, 0]
    usage = guessing.usage
    assert 0 < usage.drafted_tokens < usage.generated_tokens


@pytest.mark.parametrize(("batch_size", "lookup"), [(1, 7), (1, 1), (3, 2), (20, 30)])
def test_guesses_any_batch_size_same_numbers(plain, batch_size, lookup):
    sent = requests(plain)[:12]
    guessing, exact = (with_lookup(plain, count, batch_size=batch_size) for count in (lookup, 0))
    responses, expected = guessing.generate(sent), exact.generate(sent)
    assert [numbers(r) for r in responses] == [numbers(r) for r in expected]
    assert guessing.usage.drafted_tokens > 0


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])  # gemma2 has windows of 6 tokens
def test_guesses_forbidden_repeats_and_adapter_same_numbers(tmp_path, family):
    folder = tiny_decoder.folder(tmp_path, family, max_position_embeddings=512)
    config = lora.LoraConfig(rank=4, alpha=32)
    state = lora.init_adapter(load_decoder(str(folder)).config, config, seed=1)
    state = jax.tree.map(lambda x: x + 0.05, state)
    sizes = {**SIZES, "batch_size": 4, "lookup_tokens": 0, "no_repeat_ngram_size": 3}
    plain = Engine.open(str(folder), adapter=(state, config), options=EngineConfig(**sizes))
    sent = [ask(text(n, n), max_tokens=60) for n in (9, 30)]
    guessing = with_lookup(plain, 3)
    expected = [numbers(response) for response in plain.generate(sent)]
    assert [numbers(response) for response in guessing.generate(sent)] == expected
    assert guessing.usage.drafted_tokens > 0
    ids = [token[0] for token in expected[0]]
    assert len({*zip(ids, ids[1:], ids[2:], strict=False)}) == len(ids) - 2


def test_guesses_leave_cached_prefixes_and_scores(plain):
    guessing, shared = with_lookup(plain, 7), text(90, 99)
    sent = [ask(f"{shared} {text(5 + 9 * i, i)}", max_tokens=40) for i in range(4)]
    expected = [numbers(response) for response in plain.generate(sent)]
    for _ in range(2):
        assert [numbers(response) for response in guessing.generate(sent)] == expected
    score = Score(sent[0].messages, ("the town", "a sailor"))
    assert guessing.score([score])[0].tokens == plain.score([score])[0].tokens


def test_guesses_without_blocks_of_pages_same_texts(plain, folder):
    """Attention over complete page tables, as on accelerators."""
    others = [open_engine(folder, batch_size=8, lookup_tokens=count) for count in (0, 7)]
    for engine in others:
        set_attention(engine, "xla")
    sent = [ask(text(30, 3), max_tokens=100), *mixed_requests()[:3]]
    expected, responses = (engine.generate(sent) for engine in others)
    assert [r.text for r in responses] == [r.text for r in expected]
    assert others[1].usage.drafted_tokens > 0


@pytest.fixture(scope="module", params=["float32", "int8"])
def exact(request, folder):
    options = EngineConfig(**{**SIZES, "lookup_tokens": 0})
    return Engine.open(str(folder), dtype=request.param, options=options)


def foresee(monkeypatch, known):
    """Makes the search for drafts find the tokens ``known`` of each answer, by prompt.

    Returns the list of the numbers of slots in each chunk, to which later chunks are added.
    """
    chunks = []

    def with_answers(slots, *sizes):
        chunks.append(len(slots))
        rows = to_arrays(slots, *sizes)
        for row, text_S in zip(slots, rows.text_BS if sizes[-1] else (), strict=False):
            if row is not None:
                end = len(row.prompt) + len(row.tokens)
                following = known[tuple(row.prompt.tolist())][len(row.tokens) :]
                text_S[: end - 1] = -2 - np.arange(end - 1)  # no tokens
                if following:
                    text_S[end - 2 - len(following) : end - 1] = text_S[end - 1], *following
        return rows

    monkeypatch.setattr("cirag_jax.llm.engine.model.to_arrays", with_answers)
    return chunks


def known_tokens(engine, requests, counts):
    """Returns the first tokens of each answer, by prompt."""
    prompts = [tuple(engine.tokenizer.encode_prompt(r.messages).tolist()) for r in requests]
    answers = [[token.id for token in r.tokens] for r in engine.generate(requests)]
    return {p: ids[:count] for p, ids, count in zip(prompts, answers, counts, strict=True)}


def test_guesses_answer_ends_inside_a_draft(exact, monkeypatch):
    """The end token, a stop string and the limit lie in the middle of a draft that is right."""
    request = ask(text(40, 3), max_tokens=12, top_logprobs=2, entropy=True)
    known = known_tokens(exact, [request], [12])
    ((ids, written),) = zip(known.values(), exact.generate([request]), strict=True)
    foresee(monkeypatch, known)
    ending = next(i for i in range(2, 7) if ids[i] not in ids[:i])
    ends = copy.copy(exact)
    ends.tokenizer = copy.copy(exact.tokenizer)
    ends.tokenizer.eos_ids = frozenset({ids[ending]})
    stops = dataclasses.replace(request, stop=("@@", written.text[3:5]))
    limited = dataclasses.replace(request, max_tokens=5)
    lengths = []
    for engine, sent in ((ends, request), (exact, stops), (exact, limited)):
        (expected,) = engine.generate([sent])
        (actual,) = with_lookup(engine, 7).generate([sent])
        assert (numbers(actual), actual.text) == (numbers(expected), expected.text)
        assert actual.finish_reason == expected.finish_reason
        assert actual.usage.drafted_tokens == len(actual.tokens) - 1
        lengths.append((len(actual.tokens), actual.finish_reason))
    assert lengths[0] == (ending + 1, "stop") and lengths[2] == (5, "length")
    assert 2 < lengths[1][0] < 8 and lengths[1][1] == "stop"


@pytest.mark.parametrize(
    ("counts", "least", "most"),
    [
        ((0, 1, 3), (0, 1, 3), (0, 1, 3)),  # 5 of the 8 slots are idle: 2 and 3 drafts
        ((8, 8, 8), (3, 3, 3), (4, 4, 4)),  # one draft per row and step, mostly right
    ],
)
def test_guesses_rows_share_the_idle_slots(exact, monkeypatch, counts, least, most):
    sent = [ask(text(40 + n, n), max_tokens=8, top_logprobs=2) for n in range(3)]
    known = known_tokens(exact, sent, counts)
    expected = [numbers(response) for response in exact.generate(sent)]
    chunks = foresee(monkeypatch, known)
    responses = with_lookup(exact, 7).generate(sent)
    assert [numbers(response) for response in responses] == expected
    for response, low, high in zip(responses, least, most, strict=True):
        assert low <= response.usage.drafted_tokens <= high
    assert chunks == [8]  # no row had to wait for another chunk
