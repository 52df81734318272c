import jax
import jax.numpy as jnp
import numpy as np
import torch

from cirag_jax.training.contrastive import contrastive_loss


def _case(seed=0, queries=3, candidates=5, width=4):
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(queries, width)), jnp.float32),
        jnp.asarray(rng.normal(size=(candidates, width)), jnp.float32),
        jnp.asarray([0, 3, 1], jnp.int32),
    )


def test_contrastive_loss_unmasked_equals_torch():
    query, candidate, positive = _case()
    loss, metrics = contrastive_loss(
        query, candidate, positive, jnp.ones((3, 5)), jnp.ones(3), temperature=0.1
    )
    scores = torch.tensor(np.array(query)) @ torch.tensor(np.array(candidate)).T / 0.1
    target = torch.tensor(np.array(positive)).long()
    expected = torch.nn.functional.cross_entropy(scores, target)
    np.testing.assert_allclose(loss, expected.numpy(), rtol=1e-6)
    accuracy = (scores.argmax(1) == target).float().mean().numpy()
    np.testing.assert_allclose(metrics["accuracy"], accuracy)


def test_contrastive_loss_masked_candidate_has_no_gradient():
    query, candidate, positive = _case()
    count = jnp.ones((3, 5)).at[:, 4].set(0)

    def loss(candidate):
        return contrastive_loss(query, candidate, positive, count, jnp.ones(3), 0.1)[0]

    without = contrastive_loss(query, candidate[:4], positive, jnp.ones((3, 4)), jnp.ones(3), 0.1)
    np.testing.assert_allclose(loss(candidate), without[0], rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(loss)(candidate)[4], 0)


def test_contrastive_loss_count_of_two_equals_two_candidates():
    query, candidate, positive = _case()
    count = jnp.ones((3, 5)).at[:, 2].set(2)
    twice = jnp.concatenate([candidate, candidate[2:3]])
    counted = contrastive_loss(query, candidate, positive, count, jnp.ones(3), 0.1)[0]
    written = contrastive_loss(query, twice, positive, jnp.ones((3, 6)), jnp.ones(3), 0.1)[0]
    np.testing.assert_allclose(counted, written, rtol=1e-6)


def test_contrastive_loss_padding_query_has_no_effect():
    query, candidate, positive = _case()
    weight = jnp.asarray([1.0, 1.0, 0.0])
    count = jnp.ones((3, 5)).at[2].set(0)

    def loss(query, count, weight, positive):
        return contrastive_loss(query, candidate, positive, count, weight, 0.1)[0]

    padded, gradient = jax.value_and_grad(loss)(query, count, weight, positive)
    alone = loss(query[:2], jnp.ones((2, 5)), jnp.ones(2), positive[:2])
    np.testing.assert_allclose(padded, alone, rtol=1e-6)
    np.testing.assert_array_equal(gradient[2], 0)
    assert np.isfinite(gradient).all()


def test_contrastive_loss_temperature_divides_scores():
    query, candidate, positive = _case()
    ones = jnp.ones((3, 5))
    cold = contrastive_loss(query, candidate, positive, ones, jnp.ones(3), 0.05)[0]
    scaled = contrastive_loss(query * 20, candidate, positive, ones, jnp.ones(3), 1.0)[0]
    np.testing.assert_allclose(cold, scaled, rtol=1e-5)
