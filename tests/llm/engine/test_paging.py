"""What is kept of texts, and where: no response depends on it, and nothing is held too long."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirag_jax.llm.engine import steps
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.engine.rows import to_arrays
from cirag_jax.llm.engine.sampling import Details
from cirag_jax.models import decoder, decoder_params
from cirag_jax.models.io.pretrained_decoder import load_decoder
from tests import tiny_decoder
from tests.llm.engine.asking import ask, make, mixed, numbers, pages_are_free, text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reusing_always(folder):
    """It has few pages, so that what is kept comes and goes."""
    return make(folder, cache_tokens=1024, prefix_tokens=1024)


def test_prefix_reuse_gives_the_same_tokens(engine, reusing):
    shared = text(30, 99)
    requests = [ask(f"{shared} {text(5 + i, i)}") for i in range(7)]
    plain, reused = engine.generate(requests), reusing.generate(requests)
    assert [r.text for r in plain] == [r.text for r in reused]
    for a, b in zip(plain, reused, strict=True):
        np.testing.assert_allclose(
            [t.logprob for t in a.tokens], [t.logprob for t in b.tokens], atol=2e-6
        )
    assert plain[3].usage.cached_tokens == 0
    assert reused[0].usage.cached_tokens == 0
    encoded = [reusing.tokenizer.encode_prompt(r.messages) for r in requests]
    for i in range(1, len(requests)):
        # All but the last token of a prompt are prefilled.
        longest = max(common(encoded[i][:-1], earlier[:-1]) for earlier in encoded[:i])
        assert reused[i].usage.cached_tokens == longest >= 60


def common(a, b):
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def test_a_conversation_that_goes_on_computes_only_what_is_new(engine, reusing):
    first = ask(text(20, 1))
    answer = reusing.generate([first])[0]
    prompt = reusing.tokenizer.encode_prompt(first.messages)
    held = np.concatenate([prompt, [t.id for t in answer.tokens[:-1]]])
    second = ask(text(20, 1), answer.text, text(10, 2))
    going_on = reusing.generate([second])[0]
    encoded = reusing.tokenizer.encode_prompt(second.messages)
    assert going_on.usage.cached_tokens == common(held, encoded[:-1])
    assert going_on.usage.cached_tokens > len(prompt)
    assert going_on.text == engine.generate([second])[0].text
    # Another conversation with the same beginning but one other token in it.
    other = ask(text(20, 1).replace("sailor", "weaver", 1), answer.text, text(10, 2))
    encoded = reusing.tokenizer.encode_prompt(other.messages)
    answered = reusing.generate([other])[0]
    assert answered.usage.cached_tokens < len(prompt)
    assert answered.text == engine.generate([other])[0].text


def test_a_small_store_forgets_but_stays_right(engine, folder):
    small = make(folder, prefix_tokens=100)
    for _ in range(2):
        responses = small.generate(mixed())
        assert [r.text for r in responses] == [r.text for r in engine.generate(mixed())]
        assert len(small._store.allocator.tree) <= 1


def test_what_is_released_is_taken_again(engine, reusing):
    def held():
        return sum(array.nbytes for array in jax.live_arrays())

    before = held()
    expected = [r.text for r in reusing.generate(mixed())]
    full = held()
    reusing.release()
    assert held() - before < 0.01 * (full - before)
    assert [r.text for r in reusing.generate(mixed())] == expected


def test_whole_tables_give_the_same_tokens(engine, folder):
    """Off the CPU a step reads whole tables, as wide as a row's own length asks."""
    loaded = load_decoder(str(folder))
    config = dataclasses.replace(loaded.config, attention="xla")
    params, options = decoder_params.to_params(loaded.state), engine.options
    whole = Engine(config, params, engine.tokenizer, options=options)
    chosen = ask(text(150, 8), json_schema={"enum": ["in a harbour", "in a town"]})
    asked = [ask(text(200, 9)), *mixed(), chosen]
    together = whole.generate(asked)
    for i in (1, 2):  # which decode beside the long one, if any
        assert numbers(whole.generate([asked[i]])[0]) == numbers(together[i])
    for ours, theirs in zip(together, engine.generate(asked), strict=True):
        assert ours.text == theirs.text
        np.testing.assert_allclose(
            [t[1] for t in numbers(ours)], [t[1] for t in numbers(theirs)], atol=5e-6
        )


def test_rows_that_are_laid_out_have_a_bounded_room(folder, monkeypatch):
    """Long rows decode two at a time, short ones as many as the batch has."""
    engine = make(folder, batch_size=4, cache_tokens=1024)
    engine.config = dataclasses.replace(engine.config, attention="xla")
    engine._store._config = engine.config
    shapes, decode = set(), steps.decode

    def noted(config, weights, cache, rows, *rest, **fields):
        shapes.add(rows.tables_BN.shape)
        return decode(config, weights, cache, rows, *rest, **fields)

    monkeypatch.setattr(steps, "decode", noted)
    asked = [ask(text(length, length), max_tokens=5) for length in (120, 125, 130, 3, 4, 5)]
    assert all(response.error is None for response in engine.generate(asked))
    assert {rows * width * 128 for rows, width in shapes} <= {1024, 512} and (2, 4) in shapes


def test_programs_compile_once_a_bucket(reusing):
    reusing.generate(mixed())
    programs: Any = (steps.prefill, steps.decode)
    before = [program._cache_size() for program in programs]
    reusing.generate([ask(text(50, 7), max_tokens=3), ask(text(4, 8))])
    assert [program._cache_size() for program in programs] == before


@pytest.mark.parametrize("program", ["prefill", "decode"])
def test_an_interruption_leaves_the_engine_usable(engine, reusing, monkeypatch, program):
    real = getattr(steps, program)

    def interrupted(*args, **fields):
        real(*args, **fields)  # the cache that was handed over is gone now
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps, program, interrupted)
        with pytest.raises(KeyboardInterrupt):
            reusing.generate(mixed())
    assert pages_are_free(reusing)
    expected = [r.text for r in engine.generate(mixed())]
    assert [r.text for r in reusing.generate(mixed())] == expected


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_no_program_makes_a_copy_of_the_cache(stored):
    """XLA would make one in fp32 of a cache in bf16, at every write."""
    config = decoder.DecoderConfig(
        64, 32, 1, 4, 2, 16, 48, 4096, param_dtype=stored, attention="transposed"
    )
    params = decoder_params.unstack_layers(tiny_decoder.random_params(config))
    weights, lora = steps.Weights(params, None), decoder.PLAIN_LORA
    cache = decoder.empty_cache(config, 4 * 32, 128)
    table_N, tokens_NT = np.arange(32, dtype=np.int32), np.zeros((2, 8), np.int32)
    start = np.int32(100)
    programs = [
        steps.decode.lower(
            config,
            weights,
            cache,
            to_arrays([None] * 4, 32, 4 * 32),
            None,
            lora=lora,
            details=Details(),
            greedy=True,
            eos_ids=(1,),
            steps=2,
        ),
        steps.prefill.lower(config, weights, cache, table_N, tokens_NT[0], start, lora=lora),
        steps.score.lower(config, weights, cache, table_N, tokens_NT, tokens_NT, start, lora=lora),
        steps.copy_page.lower(cache, start, start),
    ]
    size = sum(array.nbytes for array in jax.tree.leaves(cache))
    for program in programs:
        memory: Any = program.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= size
        assert memory.temp_size_in_bytes < size / 8


def test_another_engine_over_the_same_weights(folder, engine):
    """Other sizes, the same texts; what one keeps of a prompt the other reuses; each is closed."""
    first = make(folder, prefix_tokens=512)
    second = first.with_options(dataclasses.replace(first.options, batch_size=1))
    wider = dataclasses.replace(first.options, batch_size=4)
    assert first.with_options(wider)._store is first._store  # which grows, not being in use
    asked = mixed()
    expected = [response.text for response in engine.generate(asked)]
    assert [response.text for response in first.generate(asked)] == expected
    assert first.usage.generated_tokens > 0 == second.usage.generated_tokens
    again = second.generate(asked)
    assert [response.text for response in again] == expected
    assert sum(response.usage.cached_tokens for response in again) > 0
    alone = first.with_options(dataclasses.replace(first.options, prefix_tokens=0))
    assert not any(response.usage.cached_tokens for response in alone.generate(asked))
    shorter = first.with_options(dataclasses.replace(first.options, context=256))
    longer = shorter.with_options(first.options)
    assert shorter._store is longer._store is first._store is not alone._store
    assert first.with_options(wider)._store is first._store
    widest = dataclasses.replace(wider, batch_size=5)
    assert first.with_options(widest)._store is not first._store
    assert [response.text for response in shorter.generate(asked)] == expected
    first.close()
    assert [response.text for response in second.generate(asked)] == expected
    second.close()


@pytest.mark.parametrize(("cache_tokens", "room"), [(16, 512), (640, 640), (9999, 8 * 512)])
def test_the_room_for_rows_is_bounded(folder, engine, cache_tokens, room):
    """Outputs stay what they are where not even two long rows have room at once."""
    small = make(folder, cache_tokens=cache_tokens, batch_size=8, prefix_tokens=256)
    asked = [ask(text(length, seed)) for seed, length in enumerate((10, 60, 150, 12, 170, 61))]
    assert [r.text for r in small.generate(asked)] == [r.text for r in engine.generate(asked)]
    assert pages_are_free(small)
    # Each row may leave most of a page empty.
    held = sum(array.nbytes for array in jax.tree.leaves(small._store.cache))
    config = small.config
    of_token = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim
    assert held == (room + 8 * 128 + 256) * of_token


def test_idle_rows_write_nowhere(folder):
    """Two rows hold all six pages; the first ends, and the other goes on, on the last page."""
    full = make(folder, batch_size=2, cache_tokens=16, prefix_tokens=0)
    asked = [ask(text(130, 1), max_tokens=5), ask(text(130, 2), max_tokens=60)]
    found = full.generate(asked)
    assert full._store.count == 6 and all(256 < r.usage.prompt_tokens < 324 for r in found)
    # Of another batch size the same tokens, but not the same bits on every machine.
    roomy = make(folder, batch_size=2, prefix_tokens=0)
    assert [numbers(r) for r in found] == [numbers(r) for r in roomy.generate(asked)]


def test_a_thousand_requests_at_once(engine, folder):
    """As below, but one long run in which pages are shared, kept and taken back all the time."""
    rng = np.random.default_rng(0)

    def draw(number):
        shared, own = rng.choice([0, 30, 70, 100]), int(rng.integers(1, 30))
        return ask(
            f"{text(shared, 0)} {text(own, number % 200)}",
            max_tokens=int(rng.integers(1, 12)),
            temperature=float(rng.choice([0.0, 0.0, 0.9])),
            seed=number % 7,
        )

    asked = [draw(number) for number in range(1000)]
    waiting = iter(asked)
    busy = make(folder, batch_size=8, cache_tokens=2048, prefix_tokens=1024)
    mixed = busy.generate(
        list(itertools.islice(waiting, 50)), more=lambda: list(itertools.islice(waiting, 9))
    )
    assert pages_are_free(busy) and busy.usage.cached_tokens > 10_000
    alone = {request: engine.generate([request])[0].text for request in set(asked)}
    assert [r.text for r in mixed] == [alone[request] for request in asked]


requests = st.builds(
    lambda shared, own, limit, temperature, top_p, seed: ask(
        f"{text(shared, 0)} {text(own, seed)}",
        max_tokens=limit,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    ),
    st.sampled_from([0, 5, 30, 45]),
    st.integers(1, 40),
    st.integers(1, 30),
    st.sampled_from([0.0, 0.0, 0.9]),
    st.sampled_from([0.7, 1.0]),
    st.integers(0, 5),
)


@settings(max_examples=20, deadline=None)
@given(waves=st.lists(st.lists(requests, min_size=1, max_size=6), min_size=1, max_size=3))
def test_any_mixture_gives_what_each_request_gives_alone(engine, reusing_always, waves):
    """Greedy and sampled, long and short, with shared beginnings, coming in waves."""
    asked = [request for wave in waves for request in wave]
    first, *later = waves
    mixed = reusing_always.generate(first, more=lambda: later.pop(0) if later else [])
    alone = [engine.generate([request])[0] for request in asked]
    assert [[t.id for t in r.tokens] for r in mixed] == [[t.id for t in r.tokens] for r in alone]
    assert pages_are_free(reusing_always) and pages_are_free(engine)
