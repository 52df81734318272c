"""Soft clustering of claims by Gaussian mixtures, first over all claims, then within each cluster.

Like the paper (section 3.1), this follows RAPTOR (Sarthi et al., 2024). The vectors are reduced and
a Gaussian mixture is fitted; BIC selects its number of components. A claim is in its most probable
cluster, and in every cluster whose probability exceeds a threshold.
"""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from cirag_jax.errors import UserError
from cirag_jax.grade.records import extra
from cirag_jax.types import NonNegativeFloat, PositiveInt
from cirag_jax.validation import check_fields

Clusters = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class ClusterSettings:
    """Settings of the clustering.

    Attributes:
      reduction: method of reducing vectors: umap (paper) or pca.
      dim: dimension of the reduced vectors.
      most_components: maximum number of components of a mixture.
      threshold: a claim is in each cluster with a higher probability, and in its most probable one.
      soft: allow several clusters per claim; if false, a claim is only in its first cluster, as in
        the released code.
      neighbours: UMAP's number of neighbors within a cluster. For the mixture over all claims, this
        number is the square root of the number of claims.
      fitted: size of the random sample of claims to which UMAP and mixtures are fitted; 0 uses all
        claims, which takes longer.
      seed: seed for sample, reduction and mixture.
    """

    reduction: Literal["umap", "pca"] = "umap"
    dim: PositiveInt = 10
    most_components: PositiveInt = 49
    threshold: NonNegativeFloat = 0.1
    soft: bool = True
    neighbours: Annotated[int, msgspec.Meta(ge=2)] = 10
    fitted: int = 20_000
    seed: int = 0

    def __post_init__(self):
        check_fields(self, prefix="config.clusters.")
        if self.fitted and self.fitted < self.dim + 2:
            raise UserError(
                f"config.clusters.fitted={self.fitted} must be 0 or at least "
                f"config.clusters.dim + 2, which is {self.dim + 2}."
            )


def clusters(vector_ND: np.ndarray, settings: ClusterSettings) -> Clusters:
    """Returns the row indices of each cluster, ascending; each row is in at least one cluster."""
    if not len(vector_ND):
        return ()
    for name in ("sklearn.decomposition", "sklearn.mixture"):
        extra(name)  # threadpool_limits only affects loaded libraries.
    # With ten columns, threads are much slower, and they change the order of sums.
    with extra("threadpoolctl").threadpool_limits(1), warnings.catch_warnings():
        # Warnings about equal claims, unconverged mixtures and disconnected graphs are harmless.
        warnings.simplefilter("ignore")
        result: list[tuple[int, ...]] = []
        assigned: set[int] = set()
        fitted = len(_sample(len(vector_ND), settings))
        for rows in _split(vector_ND, settings, int((fitted - 1) ** 0.5)):
            inner = [rows]
            if len(rows) > settings.dim + 1:
                parts = _split(vector_ND[rows], settings, settings.neighbours)
                inner = [rows[part] for part in parts]
            for part in inner:
                members = [row for row in part.tolist() if settings.soft or row not in assigned]
                assigned.update(members)
                result += [tuple(members)] if members else []
    return tuple(dict.fromkeys(result))


def _split(vector_ND: np.ndarray, settings: ClusterSettings, neighbours: int) -> Iterator[Any]:
    """Yields the row indices of each component, in ascending order."""
    if len(vector_ND) < 3:
        yield np.arange(len(vector_ND))
        return
    reduced_ND = reduce(vector_ND, settings, neighbours)
    probability_NC = mixture(reduced_ND, settings)
    member_NC = probability_NC > settings.threshold
    # With a high threshold or many similar components, all probabilities may be below it.
    member_NC[np.arange(len(member_NC)), probability_NC.argmax(1)] = True
    for member_N in member_NC.T:
        if member_N.any():
            yield np.flatnonzero(member_N)


def _sample(count: int, settings: ClusterSettings) -> np.ndarray:
    """Returns the row indices to fit, ascending: all, or a sample of ``settings.fitted`` rows."""
    if not settings.fitted or count <= settings.fitted:
        return np.arange(count)
    drawn = np.random.default_rng(settings.seed).choice(count, settings.fitted, replace=False)
    return np.sort(drawn)


def reduce(vector_ND: np.ndarray, settings: ClusterSettings, neighbours: int) -> np.ndarray:
    """Reduces vectors to ``settings.dim`` float64 columns, or fewer if there are few rows."""
    count = len(vector_ND)
    if settings.reduction == "pca":
        dim = min(settings.dim, count - 1, vector_ND.shape[1])
        decomposition = extra("sklearn.decomposition")
        pca = decomposition.PCA(dim, svd_solver="covariance_eigh")
        return pca.fit_transform(vector_ND.astype(np.float64))
    rows = _sample(count, settings)
    dim = min(settings.dim, len(rows) - 2)  # UMAP's initialization needs dim + 2 rows
    umap = extra("umap").UMAP(
        n_neighbors=max(2, min(neighbours, len(rows) - 1)),
        n_components=dim,
        metric="cosine",
        random_state=settings.seed,
        n_jobs=1,
    )
    reduced_ND = np.empty((count, dim), np.float64)
    reduced_ND[rows] = umap.fit_transform(vector_ND[rows])
    others = np.setdiff1d(np.arange(count), rows)
    if len(others):
        reduced_ND[others] = umap.transform(vector_ND[others])
    return reduced_ND


def mixture(vector_ND: np.ndarray, settings: ClusterSettings) -> np.ndarray:
    """Returns probabilities [N, C] of the Gaussian mixture with the best BIC."""
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
