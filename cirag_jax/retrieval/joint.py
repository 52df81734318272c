"""A cross-encoder's look at what a step of a search along links chooses from.

The head (`models/link_head.py`) knows a candidate by numbers alone. A cross-encoder trained by
configs/joint.py reads question, chain and candidate together. It costs some twenty pairs a step, so
it is asked about the head's best alone.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cirag_jax.errors import UserError, check_at_least
from cirag_jax.io import bar
from cirag_jax.models.cross_encoder import PairEncoder
from cirag_jax.models.io.workdir import open_cross_encoder
from cirag_jax.retrieval.bm25 import best_places
from cirag_jax.retrieval.pairs import score_groups
from cirag_jax.types import Config


class JointScorer:
    """Adds ``weight`` times a cross-encoder's logit to the scores of each step's ``depth`` best.

    What it was not asked about counts as the least of what it was asked about.

    Args:
      model: reads (question and chain, unit).
      weight: of its logits; 0 leaves all scores as they are.
      depth: candidates of a step that it is asked about.
      mesh: whose devices share the work; None: one does it all.
      shown: behind a progress bar.
    """

    def __init__(
        self,
        model: PairEncoder,
        weight: float = 0.5,
        depth: int = 20,
        mesh: jax.sharding.Mesh | None = None,
        shown: bool = False,
    ):
        self._model, self._weight, self._depth = model, weight, depth
        self._mesh, self._shown = mesh, shown

    def __call__(
        self,
        queries: Sequence[str],
        texts: Sequence[Sequence[str]],
        scores: Sequence[np.ndarray],
    ) -> list[np.ndarray]:
        """New scores of the candidates ``texts`` of every query, given the head's ``[R]`` each."""
        best = [best_places(score_R, self._depth) for score_R in scores]
        asked = [
            [group[place] for place in map(int, rows)]
            for group, rows in zip(texts, best, strict=True)
        ]
        total = sum(map(len, asked))
        shows = bar("reading", total, "candidate") if self._shown else contextlib.nullcontext()
        with shows as shown:
            progress = None if shown is None else shown.update
            how: Any = {"mesh": self._mesh, "progress": progress}
            logits = score_groups(self._model, None, queries, asked, **how)
        return [
            _added(score_R, rows, self._weight * logit_K)
            for score_R, rows, logit_K in zip(scores, best, logits, strict=True)
        ]


def _added(score_R: np.ndarray, rows: np.ndarray, gain_K: np.ndarray) -> np.ndarray:
    if not len(rows):
        return score_R
    # Logits of different steps have no common zero: only what they say within one step counts.
    added_R = np.full(len(score_R), gain_K.min() - gain_K.max(), np.float32)
    added_R[rows] = gain_K - gain_K.max()
    return score_R + added_R


def open_joint(
    config: Config, name: str, mesh: jax.sharding.Mesh | None = None, shown: bool = False
) -> JointScorer | None:
    """The scorer of a `configs.retrievers.joint()` block, ``name``; None where it has no model."""
    if config.model is None:
        return None
    check_at_least(1, config, "depth", prefix=f"{name}.")
    check_at_least(0, config, "weight", prefix=f"{name}.")
    model = open_chain_reader(config.model, f"{name}.model")
    return JointScorer(model, config.weight, config.depth, mesh, shown)


def open_chain_reader(spec: str, field: str) -> PairEncoder:
    """The cross-encoder that ``field`` names, of questions with their chains."""
    model, meta = open_cross_encoder(spec)
    if meta and meta.get("reads") != "chain":
        raise UserError(
            f"{field}={spec} was trained on questions alone; configs/joint.py trains one that "
            "reads their chains"
        )
    return model
