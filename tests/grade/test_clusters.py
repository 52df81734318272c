"""Soft and hard clusters of claims."""

import dataclasses
import sys

import numpy as np
import pytest

from cirag_jax.errors import UserError
from cirag_jax.grade.clusters import ClusterSettings, clusters, mixture, reduce

GaussianMixture = pytest.importorskip("sklearn.mixture").GaussianMixture


def two_groups():
    """Returns two round groups of 40 points in a plane, and a last point midway between them."""
    rng = np.random.default_rng(0)
    groups = [center + 0.25 * rng.normal(size=(40, 2)) for center in ((-1.0, 0.0), (1.0, 0.0))]
    return np.concatenate([*groups, [[0.0, 0.0]]]).astype(np.float32)


# With more dimensions than claims, clusters are not split further.
SETTINGS = {"reduction": "pca", "dim": 200, "most_components": 2}


def test_clusters_midway_claim_is_in_both_if_soft():
    soft = clusters(two_groups(), ClusterSettings(**SETTINGS))
    assert sorted(map(len, soft)) == [41, 41]
    assert [80 in rows for rows in soft] == [True, True]
    assert {frozenset(rows) - {80} for rows in soft} == {
        frozenset(range(40)),
        frozenset(range(40, 80)),
    }
    hard = clusters(two_groups(), ClusterSettings(**SETTINGS, soft=False))
    assert sorted(map(len, hard)) == [40, 41]
    assert [80 in rows for rows in hard] == [True, False]  # as in the released code


def test_clusters_high_threshold_keeps_best_cluster():
    result = clusters(two_groups(), ClusterSettings(**SETTINGS, threshold=1.0))
    assert sorted(row for rows in result for row in rows) == list(range(81))


def test_clusters_within_clusters_have_every_claim():
    rng = np.random.default_rng(1)
    centers_CD = 6 * rng.normal(size=(6, 30))
    vector_ND = (centers_CD[np.arange(180) % 6] + rng.normal(size=(180, 30))).astype(np.float32)
    settings = ClusterSettings(reduction="pca", most_components=8)
    result = clusters(vector_ND, settings)
    assert {row for rows in result for row in rows} == set(range(180))
    assert all(len({row % 6 for row in rows}) == 1 for rows in result)
    assert result == clusters(vector_ND, settings)


def test_clusters_fit_to_sample_and_assign_others(monkeypatch):
    vector_ND = np.concatenate([two_groups()[:80]] * 4)
    settings = ClusterSettings(**{**SETTINGS, "dim": 2}, fitted=30)
    fit, fitted = GaussianMixture.fit, set()
    monkeypatch.setattr(GaussianMixture, "fit", lambda m, x: fitted.add(len(x)) or fit(m, x))
    probability_NC = mixture(vector_ND.astype(float), settings)
    assert fitted == {30} and probability_NC.shape == (320, 2)
    assert (probability_NC.argmax(1) == probability_NC.argmax(1)[:80].tolist() * 4).all()
    assert len(set(probability_NC.argmax(1)[:40])) == len(set(probability_NC.argmax(1)[40:80])) == 1
    assert (mixture(vector_ND.astype(float), settings) == probability_NC).all()


def test_mixture_has_lowest_bic():
    assert mixture(two_groups().astype(float), ClusterSettings(most_components=6)).shape == (81, 2)


@pytest.mark.parametrize("count", range(6))
def test_clusters_of_few_claims(count):
    vector_ND = np.eye(6, dtype=np.float32)[:count]
    result = clusters(vector_ND, ClusterSettings(reduction="pca"))
    assert {row for rows in result for row in rows} == set(range(count))


def test_clusters_of_equal_claims():
    result = clusters(np.ones((40, 8), np.float32), ClusterSettings(reduction="pca"))
    assert {row for rows in result for row in rows} == set(range(40))


@pytest.fixture
def interpreted_umap(monkeypatch):
    """Runs UMAP without numba, because compiling takes longer than all other tests."""
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    yield pytest.importorskip("umap")
    for name in [name for name in sys.modules if name.startswith(("umap", "pynndescent"))]:
        del sys.modules[name]  # The next import compiles it.


def test_reduce_by_umap_is_reproducible(interpreted_umap):
    rng = np.random.default_rng(0)
    vector_ND = rng.normal(size=(14, 16)).astype(np.float32)
    settings = ClusterSettings(dim=4)
    result = reduce(vector_ND, settings, 5)
    assert result.shape == (14, 4) and (result == reduce(vector_ND, settings, 5)).all()
    assert reduce(vector_ND[:5], settings, 5).shape == (5, 3)
    assert {r for rows in clusters(vector_ND, settings) for r in rows} == set(range(14))
    sampled = dataclasses.replace(settings, fitted=8)
    whole, result = result, reduce(vector_ND, sampled, 5)
    assert result.shape == (14, 4) and np.isfinite(result).all() and (result != whole).any()
    assert (result == reduce(vector_ND, sampled, 5)).all()


@pytest.mark.parametrize(
    "fields",
    [{"reduction": "tsne"}, {"dim": 0}, {"threshold": -0.1}, {"neighbours": 1}, {"fitted": 11}],
)
def test_settings_reject_invalid_values(fields):
    with pytest.raises(UserError, match="config.clusters"):
        ClusterSettings(**fields)
