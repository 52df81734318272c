"""Caching of prefixes, which must not change responses or leak pages."""

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
from cirag_jax.llm.engine.shapes import chunks, prefix_keys
from cirag_jax.llm.types import Score
from cirag_jax.models import decoder, decoder_params
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import DEFAULT_LORA
from cirag_jax.models.io.pretrained_decoder import load_decoder
from tests import tiny_decoder
from tests.llm.engine.engines import (
    ask,
    mixed_requests,
    numbers,
    open_engine,
    pages_are_free,
    set_attention,
    text,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def small_caching_engine(folder):
    """An engine with few pages, so that cached prefixes are evicted often."""
    return open_engine(folder, cache_tokens=1024, prefix_tokens=1024)


def reusable(engine, prompt, earlier):
    """Returns how many tokens of a prompt the engine may reuse after earlier prompts."""
    sizes, encode = engine.options.prefill_chunks, engine.tokenizer.encode_prompt
    tokens, *others = (encode(request.messages)[:-1] for request in (prompt, *earlier))
    grid = list(chunks(0, len(tokens), sizes))
    keys = prefix_keys(tokens, grid)
    longest = max(
        (common(keys, prefix_keys(o, list(chunks(0, len(o), sizes)))) for o in others), default=0
    )
    ends = [start for start, _ in grid] + [len(tokens)]
    return max(end for end in ends if end <= longest // 128 * 128 and end % 128 == 0)


def common(a, b):
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differ[0]) if len(differ) else n


def test_prefix_reuse_same_numbers(engine, caching_engine):
    shared = text(90, 99)
    requests = [ask(f"{shared} {text(5 + 9 * i, i)}", top_logprobs=5) for i in range(7)]
    plain, reused = engine.generate(requests), caching_engine.generate(requests)
    for i in range(len(requests)):
        assert reused[i].tokens == plain[i].tokens
        assert plain[i].usage.cached_tokens == 0
        expected = reusable(caching_engine, requests[i], requests[:i])
        assert reused[i].usage.cached_tokens == expected
    assert reused[-1].usage.cached_tokens >= 128


@pytest.mark.parametrize("attention", ["transposed", "xla"])
@pytest.mark.parametrize("sizes", [(64, 16), (128, 32), (256, 128)])
@pytest.mark.parametrize(("words", "most"), [(140, 256), (70, 128)])
def test_numbers_do_not_depend_on_earlier_requests(folder, attention, sizes, words, most):
    """Numbers are equal alone and after equal, longer, shorter, branching and continued prompts.

    The short prompt is computed in calls of at most 128 tokens; for longer prompts, a call of 256
    tokens computes the same pages.
    """
    target = text(words, 5)
    request = ask(f"{target} in a", top_logprobs=5, max_tokens=12)
    scored = Score(request.messages, ("a town", "the patron saint"))
    histories = [
        [],
        [request],
        [ask(target)],
        [ask(f"{target} {text(60, 7)}")],
        [ask(target), ask(f"{text(50, 5)} {text(80, 8)}"), ask(f"{target} {text(31, 6)}")],
        [ask(text(60, 5)), ask(text(60, 5), "in a town", text(30, 9))],
    ]
    results, cached = [], []
    for history in histories:
        engine = open_engine(folder, prefill_chunks=sizes)
        set_attention(engine, attention)
        engine.generate(history)
        (response,) = engine.generate([request])
        results.append((response.tokens, engine.score([scored])[0].tokens))
        cached.append(response.usage.cached_tokens)
    assert all(result == results[0] for result in results)
    assert cached[0] == 0 and cached[1] == max(cached) == most


def test_continued_conversation_reuses_its_prompt(engine, caching_engine):
    first = ask(text(90, 1), top_logprobs=2)
    answer = caching_engine.generate([first])[0]
    second = ask(text(90, 1), answer.text, text(30, 2), top_logprobs=2)
    continued = caching_engine.generate([second])[0]
    assert continued.usage.cached_tokens == reusable(caching_engine, second, [first]) >= 128
    assert continued.tokens == engine.generate([second])[0].tokens
    # Another conversation, which differs in one token of the beginning.
    other = ask(text(90, 1).replace("sailor", "weaver", 1), answer.text, text(30, 2))
    answered = caching_engine.generate([other])[0]
    assert answered.usage.cached_tokens == 0
    assert answered.text == engine.generate([other])[0].text


def test_small_cache_gives_same_texts(engine, folder):
    small = open_engine(folder, prefix_tokens=100)
    for _ in range(2):
        responses = small.generate(mixed_requests())
        assert [r.text for r in responses] == [r.text for r in engine.generate(mixed_requests())]
        assert len(small._model.store.allocator.tree) <= 1


def test_release_frees_memory_until_next_use(engine, caching_engine):
    def num_bytes():
        return sum(array.nbytes for array in jax.live_arrays())

    before = num_bytes()
    expected = [r.text for r in caching_engine.generate(mixed_requests())]
    full = num_bytes()
    caching_engine.release()
    assert num_bytes() - before < 0.01 * (full - before)
    assert [r.text for r in caching_engine.generate(mixed_requests())] == expected


def test_contiguous_cache_gives_same_tokens(engine, folder):
    """Attention over complete page tables, as on accelerators, gives the same tokens."""
    loaded = load_decoder(str(folder))
    config = dataclasses.replace(loaded.config, attention="xla")
    params, options = decoder_params.to_params(loaded.state), engine.options
    table_engine = Engine(config, params, engine.tokenizer, options=options)
    chosen = ask(text(150, 8), json_schema={"enum": ["in a harbour", "in a town"]})
    sent = [ask(text(200, 9)), *mixed_requests(), chosen]
    together = table_engine.generate(sent)
    for i in (1, 2):  # these decode next to the long row
        assert numbers(table_engine.generate([sent[i]])[0]) == numbers(together[i])
    for ours, theirs in zip(together, engine.generate(sent), strict=True):
        assert ours.text == theirs.text
        np.testing.assert_allclose(
            [t[1] for t in numbers(ours)], [t[1] for t in numbers(theirs)], atol=5e-6
        )


def test_contiguous_cache_has_bounded_size(folder, monkeypatch):
    """The cache has room for two long rows that decode together, or for four short ones."""
    engine = open_engine(folder, batch_size=4, cache_tokens=1024, lookup_tokens=0)
    set_attention(engine, "xla")
    shapes, decode = set(), steps.decode

    def noted(config, weights, cache, rows, *rest, **fields):
        shapes.add(rows.tables_BN.shape)
        return decode(config, weights, cache, rows, *rest, **fields)

    monkeypatch.setattr(steps, "decode", noted)
    sent = [ask(text(length, length), max_tokens=5) for length in (120, 125, 130, 3, 4, 5)]
    assert all(response.error is None for response in engine.generate(sent))
    assert {rows * width * 128 for rows, width in shapes} <= {1024, 512} and (2, 4) in shapes


def test_programs_compile_once_per_bucket(caching_engine):
    caching_engine.generate(mixed_requests())
    programs: Any = (steps.prefill, steps.decode)
    before = [program._cache_size() for program in programs]
    caching_engine.generate([ask(text(50, 7), max_tokens=3), ask(text(4, 8))])
    assert [program._cache_size() for program in programs] == before


@pytest.mark.parametrize("program", ["prefill", "decode"])
def test_interruption_leaves_engine_usable(engine, caching_engine, monkeypatch, program):
    real = getattr(steps, program)

    def interrupted(*args, **fields):
        real(*args, **fields)  # this deletes the donated cache
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps, program, interrupted)
        with pytest.raises(KeyboardInterrupt):
            caching_engine.generate(mixed_requests())
    assert pages_are_free(caching_engine)
    expected = [r.text for r in engine.generate(mixed_requests())]
    assert [r.text for r in caching_engine.generate(mixed_requests())] == expected


@pytest.mark.parametrize("is_start", [True, False])
def test_prefill_on_gpus_uses_cudnn(monkeypatch, is_start):
    """The first call of a prompt has a causal kernel, and later calls have one with a mask."""
    checks = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(checks, lambda: 91002)  # not installed on a CPU
    types = {"dtype": "bfloat16", "param_dtype": "bfloat16", "attention": "cudnn"}
    config = DecoderConfig(64, 32, 2, 4, 2, 16, 48, 4096, **types)

    def arrays():
        params = decoder_params.unstack_layers(tiny_decoder.random_params(config))
        return steps.Weights(params, None), decoder.empty_cache(config, 8, 128)

    table_N, tokens_T, start = np.arange(4, dtype=np.int32), np.zeros(128, np.int32), np.int32(0)
    traced = steps.prefill.trace(
        config,
        *jax.eval_shape(arrays),
        table_N,
        tokens_T,
        start,
        start,
        lora=DEFAULT_LORA,
        is_start=is_start,
    )
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernel, other = "__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmax"
    assert (kernel in program, other in program) == (is_start, not is_start)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_programs_do_not_copy_the_cache(stored):
    """XLA must not copy a bf16 cache to fp32 at every write."""
    config = DecoderConfig(
        64, 32, 1, 4, 2, 16, 48, 4096, param_dtype=stored, attention="transposed"
    )
    params = decoder_params.unstack_layers(tiny_decoder.random_params(config))
    weights, lora = steps.Weights(params, None), DEFAULT_LORA
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
        steps.prefill.lower(config, weights, cache, table_N, tokens_NT[0], start, start, lora=lora),
        steps.score.lower(
            config, weights, cache, table_N, tokens_NT, tokens_NT, start, start, lora=lora
        ),
    ]
    size = sum(array.nbytes for array in jax.tree.leaves(cache))
    for program in programs:
        memory: Any = program.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= size
        assert memory.temp_size_in_bytes < size / 8


def test_with_options_shares_weights_and_prefixes(folder, engine):
    """Engines with other options share weights, and reuse the first engine's cached prefixes."""
    first = open_engine(folder, prefix_tokens=512)
    second = first.with_options(dataclasses.replace(first.options, batch_size=1))
    wider = dataclasses.replace(first.options, batch_size=4)
    # An unused store may still grow.
    assert first.with_options(wider)._model.store is first._model.store
    sent = mixed_requests()
    expected = [response.text for response in engine.generate(sent)]
    assert [response.text for response in first.generate(sent)] == expected
    assert first.usage.generated_tokens > 0 == second.usage.generated_tokens
    second_responses = second.generate(sent)
    assert [response.text for response in second_responses] == expected
    assert sum(response.usage.cached_tokens for response in second_responses) > 0
    separate = first.with_options(dataclasses.replace(first.options, prefix_tokens=0))
    assert not any(response.usage.cached_tokens for response in separate.generate(sent))
    shorter = first.with_options(dataclasses.replace(first.options, context=256))
    longer = shorter.with_options(first.options)
    stores = [each._model.store for each in (shorter, longer, first)]
    assert stores == [first._model.store] * 3 and separate._model.store not in stores
    assert first.with_options(wider)._model.store is first._model.store
    widest = dataclasses.replace(wider, batch_size=5)
    assert first.with_options(widest)._model.store is not first._model.store
    assert [response.text for response in shorter.generate(sent)] == expected
    first.close()
    assert [response.text for response in second.generate(sent)] == expected
    second.close()


@pytest.mark.parametrize(("cache_tokens", "room"), [(16, 512), (640, 640), (9999, 8 * 512)])
def test_cache_tokens_bounds_memory(folder, engine, cache_tokens, room):
    """Responses are the same even if the cache is too small for two long rows."""
    small = open_engine(folder, cache_tokens=cache_tokens, batch_size=8, prefix_tokens=256)
    sent = [ask(text(length, seed)) for seed, length in enumerate((10, 60, 150, 12, 170, 61))]
    assert [r.text for r in small.generate(sent)] == [r.text for r in engine.generate(sent)]
    assert pages_are_free(small)
    # Each row may have a mostly empty page.
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(small._model.store.cache))
    config = small.config
    of_token = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim
    assert num_bytes == (room + 8 * 128 + 256) * of_token


def test_idle_rows_do_not_write(folder):
    """Two rows use all six pages. After one row ends, the other row's last page stays intact."""
    full = open_engine(folder, batch_size=2, cache_tokens=16, prefix_tokens=0)
    sent = [ask(text(130, 1), max_tokens=5), ask(text(130, 2), max_tokens=60)]
    responses = full.generate(sent)
    assert full._model.store.count == 6
    assert all(256 < r.usage.prompt_tokens < 324 for r in responses)
    # Same batch size, because another one may change the last bits of numbers.
    roomy = open_engine(folder, batch_size=2, prefix_tokens=0)
    assert [numbers(r) for r in responses] == [numbers(r) for r in roomy.generate(sent)]


def test_thousand_requests_equal_separate_requests(engine, folder):
    """The result stays correct while pages are shared, cached and evicted all the time."""
    rng = np.random.default_rng(0)

    def draw(number):
        shared, own = rng.choice([0, 30, 70, 100]), int(rng.integers(1, 30))
        return ask(
            f"{text(shared, 0)} {text(own, number % 200)}",
            max_tokens=int(rng.integers(1, 12)),
            temperature=float(rng.choice([0.0, 0.0, 0.9])),
            seed=number % 7,
        )

    sent = [draw(number) for number in range(1000)]
    waiting = iter(sent)
    busy = open_engine(folder, batch_size=8, cache_tokens=2048, prefix_tokens=1024)
    mixed = busy.generate(
        list(itertools.islice(waiting, 50)), more=lambda: list(itertools.islice(waiting, 9))
    )
    assert pages_are_free(busy) and busy.usage.cached_tokens > 10_000
    separate = {request: engine.generate([request])[0].text for request in set(sent)}
    assert [r.text for r in mixed] == [separate[request] for request in sent]


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
def test_mixed_requests_equal_separate_requests(engine, small_caching_engine, waves):
    """Requests may be greedy or sampled, long or short, share prefixes, and arrive in waves."""
    sent = [request for wave in waves for request in wave]
    first, *later = waves
    mixed = small_caching_engine.generate(first, more=lambda: later.pop(0) if later else [])
    separate = [engine.generate([request])[0] for request in sent]
    assert [[t.id for t in r.tokens] for r in mixed] == [[t.id for t in r.tokens] for r in separate]
    assert pages_are_free(small_caching_engine) and pages_are_free(engine)
