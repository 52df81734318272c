"""Soft clusters against hard ones."""

import dataclasses
import sys

import numpy as np
import pytest

from cirag_jax.errors import UserError
from cirag_jax.grade.clusters import ClusterSettings, clusters, mixture, reduce

GaussianMixture = pytest.importorskip("sklearn.mixture").GaussianMixture


def two_groups():
    """Two round groups of 40 in a plane, and one claim midway; the last row."""
    rng = np.random.default_rng(0)
    groups = [center + 0.25 * rng.normal(size=(40, 2)) for center in ((-1.0, 0.0), (1.0, 0.0))]
    return np.concatenate([*groups, [[0.0, 0.0]]]).astype(np.float32)


# With eleven dimensions to a claim nothing is clustered within a cluster.
SETTINGS = {"reduction": "pca", "dim": 200, "most_components": 2}


def test_a_claim_midway_is_in_both_clusters_and_in_one_where_they_are_hard():
    soft = clusters(two_groups(), ClusterSettings(**SETTINGS))
    assert sorted(map(len, soft)) == [41, 41]
    assert [80 in rows for rows in soft] == [True, True]
    assert {frozenset(rows) - {80} for rows in soft} == {
        frozenset(range(40)),
        frozenset(range(40, 80)),
    }
    hard = clusters(two_groups(), ClusterSettings(**SETTINGS, soft=False))
    assert sorted(map(len, hard)) == [40, 41]
    assert [80 in rows for rows in hard] == [True, False]  # the first alone, as the released code


def test_a_threshold_that_nothing_exceeds_leaves_a_claim_where_it_fits_best():
    found = clusters(two_groups(), ClusterSettings(**SETTINGS, threshold=1.0))
    assert sorted(row for rows in found for row in rows) == list(range(81))


def test_every_claim_is_in_a_cluster_within_its_cluster():
    rng = np.random.default_rng(1)
    centers_CD = 6 * rng.normal(size=(6, 30))
    vector_ND = (centers_CD[np.arange(180) % 6] + rng.normal(size=(180, 30))).astype(np.float32)
    settings = ClusterSettings(reduction="pca", most_components=8)
    found = clusters(vector_ND, settings)
    assert {row for rows in found for row in rows} == set(range(180))
    assert all(len({row % 6 for row in rows}) == 1 for rows in found)
    assert found == clusters(vector_ND, settings)


def test_a_sample_is_fitted_to_and_places_the_others(monkeypatch):
    vector_ND = np.concatenate([two_groups()[:80]] * 4)
    settings = ClusterSettings(**{**SETTINGS, "dim": 2}, fitted=30)
    fit, fitted = GaussianMixture.fit, set()
    monkeypatch.setattr(GaussianMixture, "fit", lambda m, x: fitted.add(len(x)) or fit(m, x))
    probability_NC = mixture(vector_ND.astype(float), settings)
    assert fitted == {30} and probability_NC.shape == (320, 2)
    assert (probability_NC.argmax(1) == probability_NC.argmax(1)[:80].tolist() * 4).all()
    assert len(set(probability_NC.argmax(1)[:40])) == len(set(probability_NC.argmax(1)[40:80])) == 1
    assert (mixture(vector_ND.astype(float), settings) == probability_NC).all()


def test_the_number_of_components_is_that_of_the_lowest_bic():
    assert mixture(two_groups().astype(float), ClusterSettings(most_components=6)).shape == (81, 2)


@pytest.mark.parametrize("count", range(6))
def test_few_claims_are_clustered_too(count):
    vector_ND = np.eye(6, dtype=np.float32)[:count]
    found = clusters(vector_ND, ClusterSettings(reduction="pca"))
    assert {row for rows in found for row in rows} == set(range(count))


def test_equal_claims_are_clustered_too():
    found = clusters(np.ones((40, 8), np.float32), ClusterSettings(reduction="pca"))
    assert {row for rows in found for row in rows} == set(range(40))


@pytest.fixture
def interpreted_umap(monkeypatch):
    """UMAP's own code without numba, which compiles for longer than all else here takes."""
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    yield pytest.importorskip("umap")
    for name in [name for name in sys.modules if name.startswith(("umap", "pynndescent"))]:
        del sys.modules[name]  # Whoever imports it next gets it compiled.


def test_umap_reduces_the_same_each_time(interpreted_umap):
    rng = np.random.default_rng(0)
    vector_ND = rng.normal(size=(14, 16)).astype(np.float32)
    settings = ClusterSettings(dim=4)
    found = reduce(vector_ND, settings, 5)
    assert found.shape == (14, 4) and (found == reduce(vector_ND, settings, 5)).all()
    assert reduce(vector_ND[:5], settings, 5).shape == (5, 3)
    assert {r for rows in clusters(vector_ND, settings) for r in rows} == set(range(14))
    sampled = dataclasses.replace(settings, fitted=8)
    whole, found = found, reduce(vector_ND, sampled, 5)
    assert found.shape == (14, 4) and np.isfinite(found).all() and (found != whole).any()
    assert (found == reduce(vector_ND, sampled, 5)).all()


@pytest.mark.parametrize(
    "fields",
    [{"reduction": "tsne"}, {"dim": 0}, {"threshold": -0.1}, {"neighbours": 1}, {"fitted": 11}],
)
def test_settings_that_cannot_be(fields):
    with pytest.raises(UserError, match="config.clusters"):
        ClusterSettings(**fields)
