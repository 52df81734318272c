"""Guessed tokens, which must change neither texts nor numbers."""

import dataclasses

import jax
import pytest

from cirag_jax.llm.engine.engine import Engine
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
        engine.config = dataclasses.replace(engine.config, attention="xla")
        engine._store._config = engine.config
    sent = [ask(text(30, 3), max_tokens=100), *mixed_requests()[:3]]
    expected, responses = (engine.generate(sent) for engine in others)
    assert [r.text for r in responses] == [r.text for r in expected]
    assert others[1].usage.drafted_tokens > 0
