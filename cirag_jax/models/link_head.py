"""The link head: scores the candidate passages of a linked search (`retrieval/linked.py`).

The score is the sum of a linear map, which starts as the aligner's score, and a hidden layer.
``link_head.safetensors`` is in the training workdir of its aligner, or next to the weights of an
exported one. It holds the tensors, the feature names in order, and a record of the training.
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
TAUGHT = "taught"  # Key of the record: ids of questions that trained only the head.
_STOP_WEIGHT, _STOP_BIAS = "stop_weight_F", "stop_bias"  # names of tensors in the file
_MOST_DIGITS = 9  # digits of the number of steps; Python refuses to parse 5,000
_LEAST_ROWS = 1024  # calls are padded to this number of rows, or a power of two above


class LinkHeadModule(nnx.Module):
    """Scores of candidates from their features, ``[..., F]`` to ``[...]``, float32.

    Features are standardized by ``mean_F`` and ``scale_F``, which are not trained. Before training
    the score is the first feature.
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
        """Returns scores; features with a ``keep`` of 0 are replaced by their mean."""
        x = (x - self.mean_F[...]) / self.scale_F[...]
        x = x if keep is None else x * keep
        hidden = nnx.gelu(x @ self.hidden_FH[...] + self.bias_H[...])
        return x @ self.linear_F[...] + hidden @ self.out_H[...]


@dataclasses.dataclass(frozen=True)
class StopRule:
    """A logistic regression that estimates whether a retrieved passage is needed.

    Attributes:
      weight_F: float32 weights of the features `retrieval.stopping.stop_features`.
      bias: float32 scalar.
    """

    weight_F: np.ndarray
    bias: np.ndarray

    def probability(self, x_KF: np.ndarray) -> np.ndarray:
        """Returns the probabilities ``p_K``."""
        return expit(x_KF @ self.weight_F + self.bias)


@dataclasses.dataclass(frozen=True)
class LinkHead:
    """A trained link head.

    Attributes:
      module: the scoring module.
      features: names of its features, in order.
      units: units of its aligner: triple, sentence or passage.
      steps: number of search steps in training.
      stop: stopping rule, or None if it was not trained.
      record: inputs of the training; see `read_record`.
      source: file that it was read from.
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
        """Returns an array of scores ``[R]`` for each feature matrix ``feature_RF``."""
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
    """Returns the `LinkHead.record` of the head in a folder, empty if it cannot be read."""
    try:
        with opened(folder / FILE) as tensors:
            found = json.loads((tensors.metadata() or {}).get("record", ""))
    except (UserError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def load_link_head(folder: pathlib.Path, features: Sequence[str]) -> LinkHead | None:
    """Returns the head in a folder, or None if there is none."""
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
    """Returns the stopping rule among a file's tensors, or None."""
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
