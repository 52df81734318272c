"""The granularity router: predicts whether CIRAG's cascade should read a granularity.

CIRAG names such a router as future work; its form here is ours. It has a logistic regression for
each granularity that the cascade may skip, and another one for use after the first refusal. The
features are the question's embedding and `methods.cirag.routing.scalars`. The file ``router.json``
is in the workdir of its training (configs/router.py).
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.special import expit

from cirag_jax.errors import UserError
from cirag_jax.io import write_json

FILE = "router.json"


class Head(msgspec.Struct, frozen=True):
    """A logistic regression: ``bias`` and the weight of each feature."""

    weight: tuple[float, ...]
    bias: float


class Router(msgspec.Struct, frozen=True):
    """A trained router.

    Attributes:
      encoder: identity of the encoder of the question's embedding.
      dim: length of the embedding.
      heads: name of a granularity, or "refused/NAME" after a refusal -> its head.
    """

    encoder: dict[str, Any]
    dim: int
    heads: dict[str, Head]

    def worth(
        self, granularity: str, refused: bool, x_D: np.ndarray, scalars: Sequence[float]
    ) -> float:
        """Returns the probability that reading a granularity is worthwhile.

        Without a head for calls after a refusal, its features are ignored; a granularity without
        any head is always read.
        """
        heads = (self.heads.get(head_name(granularity, kind)) for kind in (refused, False))
        head = next((head for head in heads if head is not None), None)
        if head is None:
            return 1.0
        x_F = np.concatenate([x_D, scalars])[: len(head.weight)]
        return float(expit(x_F @ np.asarray(head.weight) + head.bias))

    def save(self, folder: Path) -> None:
        """Writes ``router.json``."""
        write_json(folder / FILE, msgspec.to_builtins(self))


def head_name(granularity: str, refused: bool) -> str:
    """Returns the name of the head of a granularity."""
    return f"refused/{granularity}" if refused else granularity


def router_file(spec: str) -> Path:
    """Returns the file of a router; raises UserError if the workdir ``spec`` has none."""
    path = Path(spec).expanduser() / FILE
    if not path.is_file():
        raise UserError(f"{spec} has no {FILE}; train a router with configs/router.py.")
    return path


def router_digest(spec: str) -> str:
    """Returns a hash of a router's file."""
    return hashlib.sha256(router_file(spec).read_bytes()).hexdigest()[:16]


def load_router(spec: str, identity: Mapping[str, Any], num_scalars: Mapping[bool, int]) -> Router:
    """Returns the router in a workdir.

    ``identity`` is that of the run's encoder, which must be that of the training. ``num_scalars``
    is the number of features besides the embedding, by whether there was a refusal.
    """
    path = router_file(spec)
    try:
        router = msgspec.json.decode(path.read_bytes(), type=Router)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {error}.") from None
    for name, head in router.heads.items():
        size = router.dim + num_scalars[name.startswith("refused/")]
        if len(head.weight) != size or not all(map(math.isfinite, (*head.weight, head.bias))):
            raise UserError(
                f"{path}: the head {name} must have {size} finite weights; train it again."
            )
    here = json.loads(json.dumps(dict(identity), default=str))
    different = sorted(k for k in here | router.encoder if here.get(k) != router.encoder.get(k))
    if different:
        raise UserError(
            f"{spec} was trained with another encoder (different: {', '.join(different)}); set "
            "config.encoder to that of its training, or train it again."
        )
    return router
