"""What every trainer shares: its state, and the run that it resumes."""

import functools
import hashlib
import pathlib
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from cirag_jax import io, sharding
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.identity import check_same, of_packages, without
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.models.io.fingerprint import of_model
from cirag_jax.models.io.pretrained_decoder import DEFAULT_DECODER
from cirag_jax.training import optimizers
from cirag_jax.training.profile import parse_steps
from cirag_jax.types import Config

EXAMPLES = "the training examples"  # what a run holds a digest of, beside its settings
_REMEDY = "choose another --workdir or the same config and data"
# Fields of a config that may differ when a training is resumed.
MAY_DIFFER = frozenset(
    {
        "stop_after_minutes",
        "save_every",
        "eval_every",
        "keep_checkpoints",
        "mesh",
        "profile_steps",
        "head",  # trained at the end; it has a record of its own
    }
)


class TrainState(NamedTuple):
    """All that a step changes: fp32 parameters, optimiser state, steps done; and the RNG key."""

    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array
    key: jax.Array


def make_state(
    params: nnx.State, tx: optax.GradientTransformation, seed: int, mesh: jax.sharding.Mesh
) -> TrainState:
    """The state before the first step, on the mesh; optimiser moments lie like their parameters.

    ``params`` is what is trained (copied); ``seed`` is of dropout.
    """
    init = functools.partial(_init, tx, seed)
    placed = sharding.state_sharding(jax.eval_shape(init, params), mesh)
    return jax.jit(init, out_shardings=placed)(params)


def abstract_state(params: nnx.State, tx: optax.GradientTransformation) -> TrainState:
    """What `make_state` gives, with shapes and dtypes in place of arrays."""
    return jax.eval_shape(functools.partial(_init, tx, 0), params)


def _init(tx: optax.GradientTransformation, seed: int, params: nnx.State) -> TrainState:
    # A copy: donation would otherwise delete the caller's own.
    params = jax.tree.map(jnp.copy, params)
    return TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), jax.random.key(seed))


def apply_gradient(
    tx: optax.GradientTransformation, state: TrainState, gradient: nnx.State
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after a step, and the norms of gradient, update and parameters.

    ``gradient`` comes by shard (`sharding.zeros_by_shard`): here, once a step, it is summed over
    the devices.
    """
    gradient = sharding.sum_shards(gradient)
    updates, opt_state = tx.update(gradient, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    norms = {
        "gradient_norm": optax.tree.norm(gradient),
        "update_norm": optax.tree.norm(updates),
        "parameter_norm": optax.tree.norm(params),
    }
    return TrainState(params, opt_state, state.step + 1, state.key), norms


COMPONENTS = ("aligner", "cross_encoder", "integrator", "extractor", "reader")


def is_training(config: Config) -> bool:
    """Whether a config describes a training, not an evaluation."""
    return "optimizer" in config


def component_of(config: Config) -> str:
    """Which of `COMPONENTS` a config trains."""
    if not is_training(config):
        raise UserError(
            "--config is not one to train by; there are configs/aligner.py, cross_encoder.py, "
            "integrator.py, extractor.py and reader.py."
        )
    component = config.get("component", "aligner")
    if component not in COMPONENTS:
        raise UserError(
            f"config.component is {component!r}; it must be aligner, cross_encoder, integrator, "
            "extractor or reader."
        )
    return component


def check_training(config: Config) -> None:
    """Raises UserError where a setting that every trainer has cannot be."""
    check_at_least(1, config, "keep_checkpoints")
    zeros = ("num_epochs", "num_steps", "eval_every", "save_every", "stop_after_minutes")
    check_at_least(0, config, *zeros)
    if not config.num_steps and not config.num_epochs:
        raise UserError("config.num_epochs and config.num_steps must not both be 0")
    optimizers.check_optimizer(config)
    if config.get("profile_steps") is not None:
        parse_steps(config.profile_steps)


def check_metric(name: str, measured: Collection[str]) -> None:
    """Raises UserError where dev examples are ``measured``, but not by the metric that chooses."""
    if measured and name not in measured:
        raise UserError(
            f"config.best_metric={name} is not measured here; there are {', '.join(measured)}"
        )


# ---------------------------------------------------------------------------------------- resuming


def absolute(spec: str) -> str:
    """A local folder's full path, so that the checkpoint can be opened from anywhere."""
    path = pathlib.Path(spec)
    return str(path.resolve()) if path.is_dir() else spec


def announce(text: str) -> None:
    """Tells the user, once however many processes train."""
    if jax.process_index() == 0:
        io.say(text)


def open_checkpoints(config: Config, workdir: pathlib.Path) -> Checkpoints:
    """Those of a run in ``workdir``, as many as its config keeps."""
    return Checkpoints(
        workdir / "checkpoints", keep=config.keep_checkpoints, best_metric=config.best_metric
    )


def identity_of(config: Config, may_differ: Collection[str] = ()) -> dict[str, Any]:
    """Returns the identity of a training: its config, its base model, and packages.

    ``may_differ`` names fields that are left out in addition to `MAY_DIFFER`.
    """
    fields = without(config.to_dict(), {*MAY_DIFFER, *may_differ})
    base = of_model(config.model.spec or DEFAULT_DECODER)
    return {**fields, "base": base, "packages": of_packages("tokenizers")}


def digest(*parts: Iterable[Any]) -> str:
    """SHA-256 of what is trained on and measured, records of texts: what `EXAMPLES` holds."""
    found = hashlib.sha256()
    for part in parts:
        for record in part:
            found.update(repr(record).encode() + b"\n")
        found.update(b"\n")
    return found.hexdigest()


def restore(
    checkpoints: Checkpoints,
    state: TrainState,
    meta: dict[str, Any],
    total_steps: int,
    data: Any = None,
) -> tuple[TrainState, int]:
    """The state of the latest checkpoint and its step; ``state`` and 0 where there is none.

    ``meta`` is what this run would write beside its checkpoints; its ``run`` must be theirs.
    ``data`` is the iterator that goes on where it was, if there is one.
    """
    if checkpoints.latest_step() is None:
        return state, 0
    saved = checkpoints.meta().get("run", {})
    check_same(checkpoints.directory.parent, saved, meta["run"], _REMEDY)
    restored = checkpoints.restore(None, state, data)
    announce(f"resuming from step {restored.step} of {total_steps}")
    return restored.state, restored.step


def refuse_other(workdir: pathlib.Path, run: dict[str, Any]) -> None:
    """Compares ``run`` with what ``workdir`` was started with, where it has a checkpoint.

    `restore` does so again, and with the examples; this is for what would take long before.
    """
    # A killed process leaves folders of other names: steps that were not whole.
    if any(folder.name.isdigit() for folder in (workdir / "checkpoints").glob("*")):
        with Checkpoints(workdir, read_only=True) as checkpoints:
            saved = checkpoints.meta().get("run", {})
        check_same(workdir, {name: saved.get(name) for name in run}, run, _REMEDY)
