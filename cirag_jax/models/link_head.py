"""The link head, which scores candidate passages from the features in `retrieval/linked.py`.

The score is a linear function, initialized to the aligner's score, plus one hidden layer. The file
``link_head.safetensors`` is in the aligner's training workdir, or next to the weights of an
exported aligner. It contains the tensors, the ordered names of the features, and a record of the
training.
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
from cirag_jax.models.io.tensor_files import check_finite, open_tensors, save_tensors

FILE = "link_head.safetensors"
HEAD_TRAINED_ON = "taught"  # record field: ids of questions that only the head was trained on
_STOP_WEIGHT, _STOP_BIAS = "stop_weight_F", "stop_bias"  # names of tensors in the file
_MAX_DIGITS = 9  # of the field `steps`; int() fails for 5,000 digits
_MIN_ROWS = 1024  # batches are padded to this or to a larger power of two


class LinkHeadModule(nnx.Module):
    """Maps features ``[..., F]`` of candidates to scores ``[...]``, float32.

    Features are standardized with ``mean_F`` and ``scale_F``, which are not trained. Before
    training, the score is the first feature.
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
        """Returns scores; features with ``keep`` 0 are replaced with ``mean_F``."""
        x = (x - self.mean_F[...]) / self.scale_F[...]
        x = x if keep is None else x * keep
        hidden = nnx.gelu(x @ self.hidden_FH[...] + self.bias_H[...])
        return x @ self.linear_F[...] + hidden @ self.out_H[...]


@dataclasses.dataclass(frozen=True)
class StopRule:
    """A logistic regression that predicts whether a retrieved passage is needed.

    Attributes:
      weight_F: weights of the features of `retrieval.stopping.describe`, float32.
      bias: float32, of shape ``()``.
    """

    weight_F: np.ndarray
    bias: np.ndarray

    def probability(self, x_KF: np.ndarray) -> np.ndarray:
        """Returns ``p_K``, the probabilities that the passages are needed."""
        return expit(x_KF @ self.weight_F + self.bias)


@dataclasses.dataclass(frozen=True)
class LinkHead:
    """A trained head with its settings and training record.

    Attributes:
      module: computes the scores.
      features: names of the input features, in order.
      units: what the aligner ranks: triple, sentence or passage.
      steps: number of steps of each training search.
      stop: predicts which retrieved passages are needed; None if the head has no stopping rule.
      record: the training record; see `read_record`.
      source: the file that the head was read from.
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
        """Returns the scores ``[R]`` for each feature matrix ``feature_RF``."""
        sizes = [len(feature_RF) for feature_RF in features]
        total = sum(sizes)
        rows = max(_MIN_ROWS, 1 << (total - 1).bit_length())
        x_NF = np.zeros((rows, len(self.features)), np.float32)
        x_NF[:total] = np.concatenate(features)
        score_N = check_finite(np.asarray(self._apply(self.module, x_NF))[:total], self.source)
        return np.split(score_N, np.cumsum(sizes)[:-1])

    def save(self, folder: pathlib.Path) -> None:
        """Writes ``link_head.safetensors`` into ``folder``."""
        tensors = {name: np.asarray(value[...]) for name, value in _variables(self.module)}
        if self.stop is not None:
            tensors |= {_STOP_WEIGHT: self.stop.weight_F, _STOP_BIAS: self.stop.bias}
        metadata = {
            "features": ",".join(self.features),
            "units": self.units,
            "steps": str(self.steps),
        }
        if self.record:
            metadata["record"] = json.dumps(self.record)
        save_tensors(tensors, folder / FILE, metadata)


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the training record of the head in a folder; empty if it cannot be read."""
    try:
        with open_tensors(folder / FILE) as tensors:
            record = json.loads((tensors.metadata() or {}).get("record", ""))
    except (UserError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def load_link_head(folder: pathlib.Path, features: Sequence[str]) -> LinkHead | None:
    """Returns the head in a folder; None if the folder has none."""
    file = folder / FILE
    if not file.is_file():
        return None
    with open_tensors(file) as content:
        metadata = content.metadata() or {}
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    file_features = tuple(metadata.get("features", "").split(","))
    if file_features != tuple(features):
        different = sorted({*file_features} ^ {*features})
        raise UserError(
            f"{file}: the head was trained on different features "
            f"({', '.join(different) or 'in another order'}); train it again"
        )
    hidden = np.size(tensors.get("out_H", 0))
    zeros = np.zeros(len(features))
    module = LinkHeadModule(zeros, zeros, max(hidden, 1), nnx.Rngs(0))
    for name, variable in _variables(module):
        array = _checked_tensor(tensors, name, variable[...].ndim, file)
        if array.shape != variable[...].shape:
            raise UserError(f"{file}: tensor {name} is missing or has an unexpected shape or dtype")
        variable[...] = jnp.asarray(array)
    units, steps = metadata.get("units"), metadata.get("steps", "")
    if units not in UNIT_KINDS or not steps.isdecimal() or len(steps) > _MAX_DIGITS:
        raise UserError(
            f"{file}: field units is {units!r} and field steps is {steps[:80]!r}; expected one of "
            f"{', '.join(UNIT_KINDS)} and a number"
        )
    stop = None
    if tensors.keys() & {_STOP_WEIGHT, _STOP_BIAS}:
        weight_F = _checked_tensor(tensors, _STOP_WEIGHT, 1, file)
        stop = StopRule(weight_F, _checked_tensor(tensors, _STOP_BIAS, 0, file))
    return LinkHead(module, file_features, units, int(steps), stop, source=str(file))


def _checked_tensor(
    tensors: Mapping[str, np.ndarray], name: str, ndim: int, file: pathlib.Path
) -> np.ndarray:
    array = tensors.get(name)
    if array is None or (array.ndim, array.dtype) != (ndim, np.float32):
        raise UserError(f"{file}: tensor {name} is missing or has an unexpected shape or dtype")
    return check_finite(array, str(file))


def _variables(module: LinkHeadModule) -> list[tuple[str, nnx.Variable]]:
    return [
        (name, value) for name, value in vars(module).items() if isinstance(value, nnx.Variable)
    ]
