"""Mixtures of data sets by weight."""

import collections
import math
from typing import Any

import grain
import pytest

from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.training import adapter
from cirag_jax.training.data import mixture


class _Number(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return element, int(rng.integers(1 << 60))


def test_endless_without_weights_shuffles_all_together():
    """Compares order and random numbers with one data set of all examples."""
    sets = [["a", "b", "c"], ["d", "e"]]
    whole = grain.MapDataset.source([*"abcde"]).seed(3).shuffle().repeat(1 << 32)
    expected, mixed = (d.random_map(_Number()) for d in (whole, mixture.endless(sets, None, 3)))
    assert [mixed[i] for i in range(20)] == [expected[i] for i in range(20)]


@pytest.mark.parametrize("weights", [(2, 1, 1), (0.1, 0.3, 0.25), (1,)])
def test_drawn_counts_the_draws_of_each_set(weights):
    sets = [[(which, i) for i in range(3 + which)] for which in range(len(weights))]
    order = mixture.endless(sets, weights, 0)
    draws: Any = [order[i] for i in range(300)]
    for count in (0, 1, 7, 299, 300):
        counts = collections.Counter(which for which, _ in draws[:count])
        assert mixture.drawn(weights, count) == [counts[which] for which in range(len(weights))]
    whole = round(sum(weights) * 100 / min(weights))  # the period of the pattern
    expected = [round(weight * 100 / min(weights)) for weight in weights]
    assert mixture.drawn(weights, 1000 * whole) == [1000 * count for count in expected]


@pytest.mark.parametrize(
    "weights",
    [(1,), (1, 2, 3), (1, -1), (0, 1), (0, 0), (1, math.inf), (1, math.nan), (1, True), ("1", 2),
     (1, 10_001), 2, ()],
)  # fmt: skip
def test_check_weights_refuses_bad_weights(weights):
    with pytest.raises(UserError, match=r"data\.weights=.* each folder of config\.data\.dir \(2\)"):
        mixture.check_weights(weights, 2)


@pytest.mark.parametrize(
    ("script", "field"),
    [("integrator", "trajectories"), ("reader", "folders"), ("role", "conversations")],
)
def test_check_config_of_adapter_refuses_bad_weights(script, field):
    flags = [f"--config.{field}=('a', 'b')", "--config.weights=(1, 2)"]
    adapter.check_config(load_config(f"configs/{script}.py", flags))
    config = load_config(f"configs/{script}.py", [*flags, "--config.weights=(1, 0)"])
    message = rf"config\.weights=\(1, 0\) must .* each entry of config\.{field} \(2\), none over"
    with pytest.raises(UserError, match=message):
        adapter.check_config(config)
    with pytest.raises(UserError, match=r"\(1\), none over"):  # Null is a single source.
        adapter.check_config(load_config(f"configs/{script}.py", flags[1:]))


def test_endless_set_without_examples_is_refused():
    with pytest.raises(UserError, match=r"have 3, 0 training examples, but weights=\(1, 2\) needs"):
        mixture.endless([range(3), []], (1, 2), 0)


def test_by_source_adds_the_counts_of_equal_sources():
    assert mixture.by_source(["a", None, "a"], [2, 3, 4]) == {"a": 6, "None": 3}


def test_check_weights_accepts_numbers_and_null():
    for weights in (None, (1, 2), [0.5, 10]):
        mixture.check_weights(weights, 2)
