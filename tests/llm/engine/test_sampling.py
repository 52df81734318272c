"""Sampling, compared with sorting and with the exact distribution."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirag_jax.llm.engine import sampling
from cirag_jax.llm.engine.sampling import Details, Sampling

TOKENS = st.lists(st.integers(0, 2), max_size=12)
forbid_repeats = jax.jit(sampling.forbid_repeats, static_argnums=3)
find_drafts = jax.jit(sampling.find_drafts, static_argnums=2)


def by_sorting(probs, top_p):
    """Returns the nucleus computed from its definition."""
    order = np.argsort(-probs, kind="stable")
    count = int((np.cumsum(probs[order]) < top_p).sum()) + 1
    inside = np.zeros(len(probs), bool)
    inside[order[:count]] = True
    return inside


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 0.98))
def test_nucleus_equals_sorting(seed, top_p):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (2, 50)).astype(np.float32)
    probs = np.asarray(jax.nn.softmax(jnp.asarray(logits), axis=-1))
    ours = np.asarray(sampling.nucleus(jnp.asarray(probs), jnp.full(2, top_p, jnp.float32)))
    for row, inside in zip(probs, ours, strict=True):
        total = row.astype(np.float64)
        # If the sum equals top_p up to rounding, both sets are correct.
        if abs(np.cumsum(np.sort(total)[::-1]) - top_p).min() > 1e-5:
            assert inside.tolist() == by_sorting(total, top_p).tolist()


def draw(logits, seeds, temperature=1.0, top_p=1.0, step=0):
    count = len(seeds)
    settings = Sampling(
        jnp.full(count, temperature, jnp.float32),
        jnp.full(count, top_p, jnp.float32),
        jnp.asarray(seeds, jnp.uint32),
    )
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    return np.asarray(sampling.choose(rows, settings, jnp.full(count, step), greedy=False))


def test_nucleus_is_computed_only_if_needed():
    """The nucleus is computed only if a sampled row needs it; other rows do not change."""
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 2, (4, 40)), jnp.float32)

    def samples(temperature, top_p):
        settings = Sampling(
            jnp.asarray(temperature, jnp.float32),
            jnp.asarray(top_p, jnp.float32),
            jnp.arange(4, dtype=jnp.uint32),
        )
        calls = []
        real = jax.lax.fori_loop

        def counted(*args):
            calls.append(args)
            return real(*args)

        with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
            patch.setattr(sampling.jax.lax, "fori_loop", counted)
            actual = sampling.choose(logits, settings, jnp.zeros(4, jnp.int32), greedy=False)
        return np.asarray(actual).tolist(), len(calls)

    unrestricted, searches = samples([1, 1, 0, 1], [1, 1, 0.5, 1])  # the greedy row is not sampled
    assert searches == 0
    mixed, searches = samples([1, 1, 0, 1], [1, 0.3, 0.5, 1])
    assert searches == 1 and [mixed[i] for i in (0, 2, 3)] == [unrestricted[i] for i in (0, 2, 3)]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.7)])
def test_samples_follow_the_distribution(temperature, top_p):
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1]))
    expected = np.exp(logits / temperature)
    expected /= expected.sum()
    if top_p < 1:
        expected = np.where(by_sorting(expected, top_p), expected, 0.0)
        expected /= expected.sum()
    samples = draw(logits, np.arange(20000), temperature, top_p)
    actual = np.bincount(samples, minlength=4) / len(samples)
    np.testing.assert_allclose(actual, expected, atol=0.012)  # over three standard deviations
    assert actual[expected == 0].sum() == 0


def test_samples_depend_on_step_and_temperature_zero_is_greedy():
    logits = np.zeros(50)
    assert draw(logits, [3], step=0) != draw(logits, [3], step=1)
    assert (draw(np.arange(5.0), np.arange(100), temperature=0.0) == 4).all()


def test_apply_mask_reads_bits():
    logits = jnp.zeros((1, 70), jnp.float32)
    mask = np.zeros((1, 3), np.uint32)
    for token in (0, 31, 32, 69):
        mask[0, token // 32] |= np.uint32(1 << token % 32)
    allowed = np.flatnonzero(np.asarray(sampling.apply_mask(logits, mask))[0] == 0)
    assert allowed.tolist() == [0, 31, 32, 69]


@settings(max_examples=60, deadline=None)
@given(st.lists(TOKENS, min_size=3, max_size=3), st.integers(2, 4))
def test_forbid_repeats_equals_transformers(rows, size):
    """Rows may have different lengths; entries after a row's tokens are ignored."""
    import torch
    import transformers

    history = np.random.default_rng(0).integers(0, 3, (len(rows), 12)).astype(np.int32)
    for row_history, tokens in zip(history, rows, strict=True):
        row_history[: len(tokens)] = tokens
    count = np.asarray([len(tokens) for tokens in rows], np.int32)
    actual = forbid_repeats(jnp.zeros((len(rows), 3), jnp.float32), history, count, size)
    theirs: Any = transformers.NoRepeatNGramLogitsProcessor(size)
    for ours, tokens in zip(np.asarray(actual), rows, strict=True):
        expected = theirs(torch.tensor([tokens], dtype=torch.long), torch.zeros(1, 3))
        assert (ours < 0).tolist() == torch.isinf(expected[0]).tolist()


def test_forbid_repeats_ignores_the_prompt():
    text = jnp.asarray([[1, 2, 1, 2, 0, 1]], jnp.int32)  # the answer begins at position 2
    lowered = forbid_repeats(jnp.zeros((1, 4)), text, jnp.asarray([6]), 2, jnp.asarray([2]))
    assert np.flatnonzero(np.asarray(lowered)[0]).tolist() == [2]
    lowered = forbid_repeats(jnp.zeros((1, 4)), text, jnp.asarray([6]), 2, jnp.asarray([3]))
    assert not np.asarray(lowered).any()


def drafts_of(tokens, size, ngrams):
    """Returns what followed the last occurrence of the longest repeated n-gram at the end."""
    for n in range(min(ngrams, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + size]
    return []


@settings(max_examples=60, deadline=None)
@given(st.lists(TOKENS, min_size=3, max_size=3), st.integers(1, 4))
def test_find_drafts_equals_search(rows, size):
    """Entries after a row's tokens are ignored."""
    rows = [[1, *tokens] for tokens in rows]
    text = np.random.default_rng(0).integers(0, 3, (3, 13)).astype(np.int32)
    for row_text, tokens in zip(text, rows, strict=True):
        row_text[: len(tokens)] = tokens
    drafts, found = find_drafts(text, np.asarray([*map(len, rows)], np.int32), size)
    for ours, count, tokens in zip(np.asarray(drafts), np.asarray(found), rows, strict=True):
        assert ours[:count].tolist() == drafts_of(tokens, size, 3)


def test_grammar_overrides_forbidden_repeat():
    history = jnp.asarray([[3, 4, 3, 0]], jnp.int32)
    logits = jnp.zeros((1, 8), jnp.float32)
    pushed = forbid_repeats(logits, history, jnp.asarray([3]), 2)
    assert np.flatnonzero(np.asarray(pushed)[0]).tolist() == [4]
    only = np.asarray([[1 << 4]], np.uint32)  # Only the repeated token is allowed.
    assert int(np.argmax(sampling.apply_mask(pushed, only))) == 4


def test_describe_returns_requested_details_only():
    logits = jnp.asarray([[0.0, 2.0, 1.0]], jnp.float32)
    tokens = jnp.asarray([2], jnp.int32)
    assert sampling.describe(logits, tokens, Details()) == {}
    actual = sampling.describe(logits, tokens, Details(True, 2, True))
    expected = np.exp([0.0, 2.0, 1.0]) / np.exp([0.0, 2.0, 1.0]).sum()
    np.testing.assert_allclose(actual["logprob"], np.log(expected[[2]]), rtol=1e-6)
    assert actual["top_ids"].tolist() == [[1, 2]]
    np.testing.assert_allclose(actual["entropy"], -(expected * np.log(expected)).sum(), rtol=1e-6)
