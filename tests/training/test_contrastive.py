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
        jax.nn.one_hot(jnp.asarray([0, 3, 1]), candidates),
    )


def test_equals_torch_cross_entropy_when_everything_is_visible():
    query, candidate, share = _case()
    loss, metrics = contrastive_loss(
        query, candidate, share, jnp.ones((3, 5)), jnp.ones(3), temperature=0.1
    )
    scores = torch.tensor(np.array(query)) @ torch.tensor(np.array(candidate)).T / 0.1
    target = torch.tensor(np.array(share)).argmax(1)
    expected = torch.nn.functional.cross_entropy(scores, target)
    np.testing.assert_allclose(loss, expected.numpy(), rtol=1e-6)
    accuracy = (scores.argmax(1) == target).float().mean().numpy()
    np.testing.assert_allclose(metrics["accuracy"], accuracy)


def test_equals_torch_cross_entropy_with_a_teachers_shares():
    query, candidate, _ = _case()
    share = jax.nn.softmax(jnp.asarray(np.random.default_rng(1).normal(size=(3, 5)), jnp.float32))
    loss, metrics = contrastive_loss(
        query, candidate, share, jnp.ones((3, 5)), jnp.ones(3), temperature=0.1
    )
    scores = torch.tensor(np.array(query)) @ torch.tensor(np.array(candidate)).T
    shares = torch.tensor(np.array(share))
    expected = torch.nn.functional.cross_entropy(scores / 0.1, shares)
    np.testing.assert_allclose(loss, expected.numpy(), rtol=1e-6)
    accuracy = (scores.argmax(1) == shares.argmax(1)).float().mean().numpy()
    np.testing.assert_allclose(metrics["accuracy"], accuracy)
    mean_score = (scores * shares).sum(1).mean().numpy()
    np.testing.assert_allclose(metrics["positive_score"], mean_score, rtol=1e-6)


def test_masked_candidate_has_no_influence_and_no_gradient():
    query, candidate, share = _case()
    count = jnp.ones((3, 5)).at[:, 4].set(0)

    def loss(candidate):
        return contrastive_loss(query, candidate, share, count, jnp.ones(3), 0.1)[0]

    without = contrastive_loss(
        query, candidate[:4], share[:, :4], jnp.ones((3, 4)), jnp.ones(3), 0.1
    )
    np.testing.assert_allclose(loss(candidate), without[0], rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(loss)(candidate)[4], 0)


def test_count_of_two_equals_the_candidate_written_twice():
    query, candidate, share = _case()
    count = jnp.ones((3, 5)).at[:, 2].set(2)
    twice = jnp.concatenate([candidate, candidate[2:3]])
    shared = jnp.pad(share, ((0, 0), (0, 1)))
    counted = contrastive_loss(query, candidate, share, count, jnp.ones(3), 0.1)[0]
    written = contrastive_loss(query, twice, shared, jnp.ones((3, 6)), jnp.ones(3), 0.1)[0]
    np.testing.assert_allclose(counted, written, rtol=1e-6)


def test_padding_query_changes_neither_value_nor_gradient():
    query, candidate, share = _case()
    weight = jnp.asarray([1.0, 1.0, 0.0])
    count = jnp.ones((3, 5)).at[2].set(0)

    def loss(query, count, weight, share):
        return contrastive_loss(query, candidate, share, count, weight, 0.1)[0]

    padded, gradient = jax.value_and_grad(loss)(query, count, weight, share)
    alone = loss(query[:2], jnp.ones((2, 5)), jnp.ones(2), share[:2])
    np.testing.assert_allclose(padded, alone, rtol=1e-6)
    np.testing.assert_array_equal(gradient[2], 0)
    assert np.isfinite(gradient).all()


def test_a_query_counts_by_its_weight():
    query, candidate, share = _case()
    ones, weight = jnp.ones((3, 5)), jnp.asarray([0.1, 0.3, 0.2])

    def loss(rows, weight):
        given = query[rows], candidate, share[rows], ones[rows], weight
        return np.array(
            [*contrastive_loss(*given, 0.1)[1].values(), contrastive_loss(*given, 0.1)[0]]
        )

    alone = [loss(slice(row, row + 1), jnp.ones(1)) for row in range(3)]
    wanted = np.average(alone, axis=0, weights=np.array(weight))
    np.testing.assert_allclose(loss(slice(3), weight), wanted, rtol=1e-6)
    assert not np.allclose(loss(slice(3), weight), loss(slice(3), jnp.ones(3)), rtol=1e-2)


def test_temperature_divides_the_score():
    query, candidate, share = _case()
    ones = jnp.ones((3, 5))
    cold = contrastive_loss(query, candidate, share, ones, jnp.ones(3), 0.05)[0]
    scaled = contrastive_loss(query * 20, candidate, share, ones, jnp.ones(3), 1.0)[0]
    np.testing.assert_allclose(cold, scaled, rtol=1e-5)
