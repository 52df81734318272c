"""The head that weighs what `retrieval/linked.py` knows of a candidate passage.

A linear score that begins as the aligner's own, and one hidden layer beside it. Its file,
``link_head.safetensors``, lies in the training workdir of the aligner that it belongs to, or beside
the weights of an exported one, and holds its tensors, the names of the features in their order, and
how it was trained.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy.special import expit

from cirag_jax.datasets.chains import UNIT_KINDS, UnitKind
from cirag_jax.errors import UserError
from cirag_jax.models.io.tensor_files import check_finite, opened, save_tensors

FILE = "link_head.safetensors"
TAUGHT = "taught"  # In its record: ids of questions that only the head has learnt from.
_STOP_WEIGHT, _STOP_BIAS = "stop_weight_F", "stop_bias"  # Tensors of the file.
_MOST_DIGITS = 9  # Of the number of steps; Python would refuse 5,000.
_LEAST_ROWS = 1024  # A call is padded to this or to a power of two above it.


class LinkHeadModule(nnx.Module):
    """Scores of candidates from their features, ``[..., F]`` to ``[...]``, float32.

    Features are standardised with ``mean_F`` and ``scale_F``, which are not trained. Before
    training the score is the first feature.
    """

    def __init__(self, mean_F: np.ndarray, scale_F: np.ndarray, hidden: int, rngs: nnx.Rngs):
        num_features = len(mean_F)
        self.mean_F = nnx.Variable(jnp.asarray(mean_F, jnp.float32))
        self.scale_F = nnx.Variable(jnp.asarray(scale_F, jnp.float32))
        self.linear_F = nnx.Param(jnp.zeros(num_features).at[0].set(1.0))
        init = nnx.initializers.lecun_normal()
        self.hidden_FH = nnx.Param(init(rngs.params(), (num_features, hidden), jnp.float32))
        self.bias_H = nnx.Param(jnp.zeros(hidden))
        self.out_H = nnx.Param(jnp.zeros(hidden))

    def __call__(self, x: jax.Array, keep: jax.Array | None = None) -> jax.Array:
        """``keep`` is 0 for features that are hidden, which then have their mean."""
        x = (x - self.mean_F[...]) / self.scale_F[...]
        x = x if keep is None else x * keep
        hidden = nnx.gelu(x @ self.hidden_FH[...] + self.bias_H[...])
        return x @ self.linear_F[...] + hidden @ self.out_H[...]


@dataclasses.dataclass(frozen=True)
class StopRule:
    """A logistic regression: whether a passage that a search found is needed.

    Attributes:
      weight_F: of what `retrieval.stopping.stop_features` says of a passage, float32.
      bias: float32, of shape ``()``.
    """

    weight_F: np.ndarray
    bias: np.ndarray

    def probability(self, x_KF: np.ndarray) -> np.ndarray:
        """``p_K``, between 0 and 1."""
        return expit(x_KF @ self.weight_F + self.bias)


@dataclasses.dataclass(frozen=True)
class LinkHead:
    """A trained head, and how it was trained.

    Attributes:
      module: what scores.
      features: that it reads, in their order.
      units: that the aligner beside it ranks: triple, sentence or passage.
      steps: of the searches that it learnt on.
      stop: which of the found passages are needed; None: it has not learnt that.
      record: what the training that made it wants to find again; see `read_record`.
      source: the file that it was read from.
    """

    module: LinkHeadModule
    features: tuple[str, ...]
    units: UnitKind
    steps: int
    stop: StopRule | None = None
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = FILE

    @functools.cached_property
    def _apply(self):
        return nnx.jit(lambda module, x_NF: module(x_NF))

    def score(self, features: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Scores ``[R]`` for each of several ``feature_RF``."""
        sizes = [len(feature_RF) for feature_RF in features]
        total = sum(sizes)
        rows = max(_LEAST_ROWS, 1 << (total - 1).bit_length())
        x_NF = np.zeros((rows, len(self.features)), np.float32)
        x_NF[:total] = np.concatenate(features)
        score_N = check_finite(np.asarray(self._apply(self.module, x_NF))[:total], self.source)
        return np.split(score_N, np.cumsum(sizes)[:-1])

    def save(self, folder: pathlib.Path) -> None:
        """Writes ``link_head.safetensors`` into ``folder``."""
        tensors = {name: np.asarray(value[...]) for name, value in _variables(self.module)}
        if self.stop is not None:
            tensors |= {_STOP_WEIGHT: self.stop.weight_F, _STOP_BIAS: self.stop.bias}
        told = {
            "features": ",".join(self.features),
            "units": self.units,
            "steps": str(self.steps),
        }
        if self.record:
            told["record"] = json.dumps(self.record)
        save_tensors(tensors, folder / FILE, told)


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """The `LinkHead.record` of the head in a folder; empty where none can be read."""
    try:
        with opened(folder / FILE) as tensors:
            found = json.loads((tensors.metadata() or {}).get("record", ""))
    except (UserError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def load_link_head(folder: pathlib.Path, features: Sequence[str]) -> LinkHead | None:
    """The head in a folder; None where there is no file of it."""
    file = folder / FILE
    if not file.is_file():
        return None
    with opened(file) as found:
        told = found.metadata() or {}
        tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
    had = tuple(told.get("features", "").split(","))
    if had != tuple(features):
        unknown = sorted({*had} ^ {*features})
        raise UserError(
            f"{file}: its head reads other features than this version has "
            f"({', '.join(unknown) or 'in another order'}); train it again."
        )
    hidden = np.size(tensors.get("out_H", 0))
    zeros = np.zeros(len(features))
    module = LinkHeadModule(zeros, zeros, max(hidden, 1), nnx.Rngs(0))
    for name, variable in _variables(module):
        wanted, array = variable[...], tensors.get(name)
        if array is None or (array.shape, array.dtype) != (wanted.shape, wanted.dtype):
            raise UserError(f"{file}: tensor {name} is missing or has another shape or dtype.")
        variable[...] = jnp.asarray(check_finite(array, str(file)))
    units, steps = told.get("units"), told.get("steps", "")
    if units not in UNIT_KINDS or not steps.isdecimal() or len(steps) > _MOST_DIGITS:
        told = f"field units is {units!r}, field steps {steps[:80]!r}"
        raise UserError(f"{file}: {told}.")
    return LinkHead(module, had, units, int(steps), _stop_rule(tensors, file), source=str(file))


def _stop_rule(tensors: Mapping[str, np.ndarray], file: pathlib.Path) -> StopRule | None:
    """The rule among a file's tensors; None where there is none."""
    if not tensors.keys() & {_STOP_WEIGHT, _STOP_BIAS}:
        return None
    found = []
    for name, ndim in ((_STOP_WEIGHT, 1), (_STOP_BIAS, 0)):
        array = tensors.get(name)
        if array is None or (array.ndim, array.dtype) != (ndim, np.float32):
            raise UserError(f"{file}: tensor {name} is missing or has another shape or dtype.")
        found.append(check_finite(array, str(file)))
    return StopRule(*found)


def _variables(module: LinkHeadModule) -> list[tuple[str, nnx.Variable]]:
    return [
        (name, value) for name, value in vars(module).items() if isinstance(value, nnx.Variable)
    ]
