"""Search of synonyms: exact for few entities, approximate for many."""

import numpy as np

from cirag_jax.retrieval import synonyms as synonyms_lib
from cirag_jax.retrieval.synonyms import synonyms


def clustered(number, dim=32, seed=0):
    rng = np.random.default_rng(seed)
    vectors_ED = np.repeat(rng.normal(size=(number // 4 + 1, dim)), 4, axis=0)[:number]
    vectors_ED = rng.permutation(vectors_ED + 0.25 * rng.normal(size=vectors_ED.shape))
    return (vectors_ED / np.linalg.norm(vectors_ED, axis=1, keepdims=True)).astype(np.float32)


def test_synonyms_few_entities_are_compared_exactly():
    vectors_ED = clustered(300)
    near_EM, score_EM = synonyms(vectors_ED, np.ones(300, bool), 0.8, 4)
    product = vectors_ED @ vectors_ED.T - 2 * np.eye(300)
    for entity in range(300):
        best = [n for n in np.argsort(-product[entity], kind="stable") if product[entity, n] >= 0.8]
        found = near_EM[entity][near_EM[entity] >= 0]
        assert found.tolist() == best[:4]
        np.testing.assert_allclose(
            score_EM[entity, : len(found)], product[entity, found], atol=1e-6
        )


def test_synonyms_many_entities_are_found_without_comparing_all_pairs(monkeypatch):
    compared = []
    add = synonyms_lib._add_nearest

    def counting(near, score, vectors, rows, others, min_score):
        compared.append(len(rows) * len(others))
        add(near, score, vectors, rows, others, min_score)

    monkeypatch.setattr(synonyms_lib, "_add_nearest", counting)
    vectors_ED = clustered(6000)
    near_EM, _ = synonyms(vectors_ED, np.ones(6000, bool), 0.8, 8)
    assert sum(compared) < 6000**2 / 8
    product = vectors_ED[:500] @ vectors_ED.T
    product[np.arange(500), np.arange(500)] = 0
    pairs = {(int(a), int(b)) for a, b in np.argwhere(product >= 0.8)}
    found = {(a, int(b)) for a in range(500) for b in near_EM[a] if b >= 0}
    assert found <= pairs and len(found) >= 0.95 * len(pairs) > 100
