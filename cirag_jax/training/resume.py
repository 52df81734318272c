"""What every trainer asks about the run that it goes on with."""

import pathlib
import time
from collections.abc import Collection
from typing import Any

import jax

from cirag_jax import io
from cirag_jax.models.io.fingerprint import check_same, of_model, of_packages
from cirag_jax.models.io.pretrained_decoder import DEFAULT_DECODER
from cirag_jax.training.metrics import MetricWriter
from cirag_jax.types import Config

EXAMPLES = "the training examples"  # what a run holds a digest of, beside its settings
# Settings that may change between a run and its continuation.
_FREE = frozenset({"stop_after_minutes", "save_every", "eval_every", "keep_checkpoints", "mesh"})


def absolute(spec: str) -> str:
    """A local folder's full path, so that the checkpoint can be opened from anywhere."""
    path = pathlib.Path(spec)
    return str(path.resolve()) if path.is_dir() else spec


def out_of_time(start: float, minutes: float) -> bool:
    """Whether ``minutes`` (0: no limit) have passed since ``start`` (`time.monotonic`)."""
    return bool(minutes) and time.monotonic() - start > 60 * minutes


def announce(text: str) -> None:
    """Tells the user, once however many processes train."""
    if jax.process_index() == 0:
        io.say(text)


def open_metrics(
    config: Config, workdir: pathlib.Path, total_steps: int, first_step: int
) -> MetricWriter:
    """Where the figures from ``first_step`` on go; the first of several processes writes them."""
    return MetricWriter(
        workdir,
        total_steps,
        first_step,
        evaluate_every=config.eval_every,
        enabled=jax.process_index() == 0,
    )


def fingerprint(config: Config, free: Collection[str] = ()) -> dict[str, Any]:
    """What must not change between a run and its continuation; ``free`` names further fields."""
    fields = {k: v for k, v in config.to_dict().items() if k not in _FREE and k not in free}
    base = of_model(config.model.spec or DEFAULT_DECODER)
    return {**fields, "base": base, "packages": of_packages("tokenizers")}


def check_same_run(saved: dict[str, Any], wanted: dict[str, Any], workdir: pathlib.Path) -> None:
    """Compares the ``run`` of two checkpoints' descriptions.

    Raises:
      UserError: they differ; the message names the fields.
    """
    remedy = "choose another --workdir or the same config and data"
    check_same(workdir, saved.get("run", {}), wanted["run"], remedy)
