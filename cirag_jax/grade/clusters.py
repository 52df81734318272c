"""Soft clusters of claims: reduced vectors, Gaussian mixtures, clusters within clusters.

As in RAPTOR (Sarthi et al., 2024), which the paper follows (section 3.1): the vectors of all claims
are reduced and a mixture is fitted, its number of components by BIC; then the same within every
cluster. A claim is in every cluster whose probability exceeds a threshold.
"""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.grade.records import extra

Clusters = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class ClusterSettings:
    """How claims are clustered.

    Attributes:
      reduction: umap (the paper) or pca.
      dim: of the reduced vectors.
      most_components: of a mixture, at most.
      threshold: the probability that a cluster's claims exceed.
      soft: off: a claim is in the first of its clusters alone, as in the released code.
      neighbours: of UMAP within a cluster; among all claims they are the root of their number.
      fitted: UMAP and mixtures are fitted to a sample of so many claims, which places the others;
        0: to all. Their time grows with it.
      seed: of sample, reduction and mixture.
    """

    reduction: Literal["umap", "pca"] = "umap"
    dim: int = 10
    most_components: int = 49
    threshold: float = 0.1
    soft: bool = True
    neighbours: int = 10
    fitted: int = 20_000
    seed: int = 0

    def __post_init__(self):
        check_choice("config.clusters.reduction", self.reduction, ("umap", "pca"))
        check_at_least(1, self, "dim", "most_components", prefix="config.clusters.")
        check_at_least(2, self, "neighbours", prefix="config.clusters.")
        check_at_least(0, self, "threshold", prefix="config.clusters.")
        if self.fitted and self.fitted < self.dim + 2:
            raise UserError(
                f"config.clusters.fitted={self.fitted} must be 0 or at least "
                f"config.clusters.dim + 2, which is {self.dim + 2}."
            )


def clusters(vector_ND: np.ndarray, settings: ClusterSettings) -> Clusters:
    """Rows of every cluster, ascending; each row is in at least one.

    Args:
      vector_ND: of claims, float32.
      settings: how.
    """
    if not len(vector_ND):
        return ()
    for name in ("sklearn.decomposition", "sklearn.mixture"):
        extra(name)  # The limit holds for libraries that are loaded already.
    # On matrices of ten columns threads cost fifty times what they save, and order sums otherwise.
    with extra("threadpoolctl").threadpool_limits(1), warnings.catch_warnings():
        # Claims alike have no variance; a mixture that has not converged has a BIC like the others;
        # small clusters are graphs in pieces.
        warnings.simplefilter("ignore")
        found: list[tuple[int, ...]] = []
        taken: set[int] = set()
        fitted = len(_sample(len(vector_ND), settings))
        for rows in _split(vector_ND, settings, int((fitted - 1) ** 0.5)):
            within = [rows]
            if len(rows) > settings.dim + 1:
                parts = _split(vector_ND[rows], settings, settings.neighbours)
                within = [rows[part] for part in parts]
            for part in within:
                own = [row for row in part.tolist() if settings.soft or row not in taken]
                taken.update(own)
                found += [tuple(own)] if own else []
    return tuple(dict.fromkeys(found))


def _split(vector_ND: np.ndarray, settings: ClusterSettings, neighbours: int) -> Iterator[Any]:
    """Rows of every component, ascending."""
    if len(vector_ND) < 3:
        yield np.arange(len(vector_ND))
        return
    reduced_ND = reduce(vector_ND, settings, neighbours)
    probability_NC = mixture(reduced_ND, settings)
    member_NC = probability_NC > settings.threshold
    # With a high threshold, or many components alike, a row may exceed it nowhere.
    member_NC[np.arange(len(member_NC)), probability_NC.argmax(1)] = True
    for member_N in member_NC.T:
        if member_N.any():
            yield np.flatnonzero(member_N)


def _sample(count: int, settings: ClusterSettings) -> np.ndarray:
    """The rows to fit to, ascending: all, or ``settings.fitted`` of them."""
    if not settings.fitted or count <= settings.fitted:
        return np.arange(count)
    drawn = np.random.default_rng(settings.seed).choice(count, settings.fitted, replace=False)
    return np.sort(drawn)


def reduce(vector_ND: np.ndarray, settings: ClusterSettings, neighbours: int) -> np.ndarray:
    """Vectors of ``settings.dim`` numbers, float64; fewer where there are few rows."""
    count = len(vector_ND)
    if settings.reduction == "pca":
        dim = min(settings.dim, count - 1, vector_ND.shape[1])
        decomposition = extra("sklearn.decomposition")
        made = decomposition.PCA(dim, svd_solver="covariance_eigh")
        return made.fit_transform(vector_ND.astype(np.float64))
    rows = _sample(count, settings)
    dim = min(settings.dim, len(rows) - 2)  # UMAP starts from as many eigenvectors
    made = extra("umap").UMAP(
        n_neighbors=max(2, min(neighbours, len(rows) - 1)),
        n_components=dim,
        metric="cosine",
        random_state=settings.seed,
        n_jobs=1,
    )
    reduced_ND = np.empty((count, dim), np.float64)
    reduced_ND[rows] = made.fit_transform(vector_ND[rows])
    others = np.setdiff1d(np.arange(count), rows)
    if len(others):
        reduced_ND[others] = made.transform(vector_ND[others])
    return reduced_ND


def mixture(vector_ND: np.ndarray, settings: ClusterSettings) -> np.ndarray:
    """Probabilities [N, C] of a Gaussian mixture, the best by BIC of those of 1, 2, ... parts."""
    mixtures = extra("sklearn.mixture")
    fitted_ND = vector_ND[_sample(len(vector_ND), settings)]
    best, lowest = None, np.inf
    for components in range(1, min(settings.most_components, len(fitted_ND) - 1) + 1):
        model = mixtures.GaussianMixture(components, random_state=settings.seed).fit(fitted_ND)
        bic = model.bic(fitted_ND)
        if best is None or bic < lowest:
            best, lowest = model, bic
    assert best is not None
    return best.predict_proba(vector_ND)
