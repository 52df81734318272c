"""Policy gradients: conversations from turns, advantages, weights, and the clipped loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirag_jax.models import decoder, decoder_params, lora
from cirag_jax.models.lora import LoraConfig
from cirag_jax.training import lora_step, policy
from cirag_jax.training.data.packing import Layout
from cirag_jax.training.policy import Clip, Sample, Turn
from tests import tiny_adapter

LORA = LoraConfig(rank=4, alpha=6.0)
CLIP = Clip(0.2, 0.3)


def turn(prompt, text):
    logprobs = -np.arange(1, len(text) + 1, dtype=np.float32)
    return Turn(np.asarray(prompt, np.int32), np.asarray(text, np.int32), logprobs)


def test_turns_that_continue_a_conversation_are_one_sample():
    samples = policy.samples_of([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 9], [5])])
    (sample,) = samples
    assert sample.tokens_T.tolist() == [1, 2, 3, 4, 9, 5]
    assert sample.sampled_T.tolist() == [False, False, True, True, False, True]
    assert sample.logprob_T.tolist() == [0, 0, -1, -2, 0, -1]


def test_retokenized_turns_begin_a_new_sample():
    # The second prompt writes the first text with other tokens.
    first, second = policy.samples_of([turn([1, 2], [3, 4]), turn([1, 2, 34, 9], [5])])
    assert (first.num_sampled, second.num_sampled) == (2, 1)
    assert second.tokens_T.tolist() == [1, 2, 34, 9, 5]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), min_size=1)),
        min_size=1,
        max_size=5,
    )
)
def test_only_sampled_tokens_are_marked(turns):
    """Whatever passages contain, the marked tokens are exactly the texts, in order."""
    conversation: list[int] = []
    made = []
    for given_tokens, text in turns:
        made.append(turn([*conversation, *given_tokens], text))
        conversation += [*given_tokens, *text]
    samples = policy.samples_of(made)
    marked = np.concatenate([s.tokens_T[s.sampled_T] for s in samples])
    logprobs = np.concatenate([s.logprob_T[s.sampled_T] for s in samples])
    assert marked.tolist() == [token for _, text in turns for token in text]
    assert logprobs.tolist() == [p for t in made for p in t.logprob_U]
    assert all(not s.logprob_T[~s.sampled_T].any() for s in samples)


def test_advantages_are_relative_to_the_group():
    np.testing.assert_allclose(policy.advantages([1.0, 0.0, 0.5], scale=False), [0.5, -0.5, 0.0])
    np.testing.assert_allclose(policy.advantages([3.0, 1.0, 2.0], scale=True), [1.0, -1.0, 0.0])
    assert policy.advantages([0.5, 0.5], scale=True) is None
    assert policy.advantages([1.0], scale=True) is None


def sample(length, start, advantage=1.0, seed=0, **more):
    rng = np.random.default_rng(seed)
    sampled_T = np.arange(length) >= start
    tokens_T = rng.integers(3, 320, length).astype(np.int32)
    logprob_T = (sampled_T * -rng.random(length)).astype(np.float32)
    return Sample(tokens_T, sampled_T, logprob_T, advantage=advantage, **more)


def test_weights_by_token_sequence_or_constant():
    samples = [sample(10, 8), sample(10, 4)]
    assert policy.token_weights(samples, "token", 16) == [1 / 8, 1 / 8]
    assert policy.token_weights(samples, "sequence", 16) == [1 / 4, 1 / 12]
    assert policy.token_weights(samples, "constant", 16) == [1 / 32, 1 / 32]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    _, ours, adapter = tiny_adapter.both(folder, LORA)
    return ours.config, decoder_params.to_params(ours.state), adapter


def placed(samples, packing=True):
    layout = Layout(64, packing, (64,), 1 << 30, 1)
    weights = policy.token_weights(samples, "token", 64)
    return policy.policy_batches(samples, weights, layout, pad_id=0)


OPTIONS = lora.lora_options(LORA, train=False)


def summed(function, adapter, items):
    """Returns the sums over items of a function's value, gradient, and other sums."""
    compiled = jax.jit(jax.value_and_grad(function, has_aux=True))
    results = [compiled(adapter, item) for item in items]
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *results)


def by_hand(model):
    """Returns the loss of one sample, without packing and chunks."""
    config, params, _ = model

    def loss(adapter, item):
        tokens_T, sampled_T, logprob_T, advantage = item
        batch = lora_step.Batch(tokens_T[None], None, None)
        hidden_BTD = lora_step.hidden(config, params, adapter, batch, OPTIONS)
        logits_TV = decoder.logits(config, params, hidden_BTD)[0, :-1]
        logprobs_TV = jax.nn.log_softmax(logits_TV)
        now_T = jnp.take_along_axis(logprobs_TV, tokens_T[1:, None], -1)[:, 0]
        ratio_T = jnp.exp(now_T - logprob_T[1:])
        limited_T = jnp.clip(ratio_T, 1 - CLIP.low, 1 + CLIP.high)
        gain_T = jnp.minimum(ratio_T * advantage, limited_T * advantage)
        return -jnp.where(sampled_T[1:], gain_T, 0.0).sum(), {}

    return loss


def ours(model):
    config, params, _ = model
    loss = policy.make_loss(CLIP)
    return lambda adapter, batch: loss(config, params, adapter, batch, OPTIONS, None, 16)


@pytest.mark.parametrize("packing", [True, False])
def test_loss_and_gradient_equal_the_formula(model, packing):
    *_, adapter = model
    samples = [sample(46, 35, 0.7, 1, group="a"), sample(46, 12, -1.2, 2, group="b")]
    # Two samples with the same prompt, which a packed row contains once.
    prompt_T = np.arange(3, 43, dtype=np.int32)
    for seed in (3, 4):
        s = sample(46, 40, seed - 3.5, seed, group="c")
        tokens_T = np.concatenate([prompt_T, s.tokens_T[40:]])
        samples.append(s._replace(tokens_T=tokens_T))
    batches = placed(samples, packing)
    (value, _), gradient = summed(ours(model), adapter, batches)
    items = [(s.tokens_T, s.sampled_T, s.logprob_T, np.float32(s.advantage)) for s in samples]
    (total, _), plain = summed(by_hand(model), adapter, items)
    count = sum(s.num_sampled for s in samples)
    np.testing.assert_allclose(value, total / count, rtol=1e-5)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(plain)) / count
    assert largest > 1e-3
    for a, b in zip(*map(jax.tree.leaves, (gradient, plain)), strict=True):
        np.testing.assert_allclose(a, b / count, rtol=0, atol=1e-5 * largest)
    if packing:
        rows = [int(row) for batch in batches for row in batch.batch.shared_B]
        assert len(rows) == 3 and 39 in rows  # up to the last token before the sampled ones


def logprobs(model):
    config, params, adapter = model
    return jax.jit(lambda batch: policy.token_logprobs(config, params, adapter, batch, OPTIONS, 16))


def test_gradient_is_reinforce_if_nothing_has_changed(model):
    """With the current probabilities, the gradient is that of the sum of A log p."""
    config, params, adapter = model
    find, current = logprobs(model), []
    for s in (sample(20, 15, 0.7, 1, group="a"), sample(25, 12, -1.2, 2, group="b")):
        (batch,) = placed([s])
        logprob_T = np.append(np.float32(0), find(batch.batch)[0])[: len(s.tokens_T)]
        current.append(s._replace(logprob_T=logprob_T * s.sampled_T))
    batches = placed(current)

    def reinforce(adapter, b):
        logprob_BT = policy.token_logprobs(config, params, adapter, b.batch, OPTIONS, 16)
        return -(b.batch.mask_BT * b.advantage_BT * logprob_BT).sum(), {}

    (_, sums), gradient = summed(ours(model), adapter, batches)
    _, plain = summed(reinforce, adapter, batches)
    for a, b in zip(*map(jax.tree.leaves, (gradient, plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    assert float(sums["ratio_change"]) < 1e-6 and float(sums["clipped"]) == 0


def test_clipped_tokens_have_no_gradient(model):
    *_, adapter = model
    rising = sample(20, 15, 1.0)._replace(logprob_T=np.full(20, -30.0, np.float32))
    falling = rising._replace(advantage=-1.0)  # Its probability has risen; it may fall again.

    def gradient(s):
        (batch,) = placed([s])
        (_, sums), found = summed(ours(model), adapter, [batch])
        return found, float(sums["clipped"])

    zero, share = gradient(rising)
    assert share == 1.0 and not any(jnp.any(g) for g in jax.tree.leaves(zero))
    moving, share = gradient(falling)
    assert share == 0.0 and any(jnp.any(g) for g in jax.tree.leaves(moving))


def test_divergence_pulls_toward_the_reference(model):
    *_, adapter = model
    s = sample(20, 15, 0.0, kl=0.5)
    (batch,) = placed([s])
    logprob_BT = logprobs(model)(batch.batch)
    compiled = jax.jit(ours(model))
    value, sums = compiled(adapter, batch._replace(reference_BT=logprob_BT))
    assert abs(float(value)) < 1e-6 and abs(float(sums["kl"])) < 1e-6
    value, sums = compiled(adapter, batch._replace(reference_BT=logprob_BT - 1.0))
    np.testing.assert_allclose(float(sums["kl"]), np.exp(-1.0), rtol=1e-5)  # e^x - x - 1, x = -1
    np.testing.assert_allclose(float(value), 0.5 * np.exp(-1.0), rtol=1e-5)
