"""The train state of all trainers, and the check that a resumed run has the same settings."""

import functools
import hashlib
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cirag_jax import io, processes, sharding
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.identity import check_same, of_packages, without
from cirag_jax.models.io.checkpoint_folders import folder_of, open_folder, steps_in
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.models.io.fingerprint import model_identity
from cirag_jax.models.io.pretrained_decoder import DEFAULT_DECODER
from cirag_jax.training import optimizers
from cirag_jax.training.profile import parse_steps
from cirag_jax.training.trackers import check_tracker
from cirag_jax.types import Config, Dataset
from cirag_jax.validation import check_value

T = TypeVar("T")

EXAMPLES = "the training examples"  # Key of the examples' digest in a run's identity.
_REMEDY = "choose another --workdir or the same config and data"
# Fields of a config that may differ when training resumes.
MAY_DIFFER = frozenset(
    {
        "stop_after_minutes",
        "save_every",
        "save_minutes",
        "max_skipped_steps",
        "eval_every",
        "keep_checkpoints",
        "checkpoints",
        "mesh",
        "profile_steps",
        "tracker",
        "head",  # Trained at the end and checked separately.
    }
)


class TrainState(NamedTuple):
    """The fp32 parameters, optimizer state, numbers of steps and skipped steps, and RNG key."""

    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array
    key: jax.Array
    skipped_steps: jax.Array


def make_state(
    params: nnx.State, tx: optax.GradientTransformation, seed: int, mesh: jax.sharding.Mesh
) -> TrainState:
    """Returns the state before the first step, on the mesh.

    Optimizer moments are sharded like the parameters. ``params`` are copied. ``seed`` is the seed
    of dropout.
    """
    init = functools.partial(_init, tx, seed)
    placed = sharding.state_sharding(jax.eval_shape(init, params), mesh)
    return jax.jit(init, out_shardings=placed)(params)


def abstract_state(params: nnx.State, tx: optax.GradientTransformation) -> TrainState:
    """Returns the result of `make_state` with shapes and dtypes in place of arrays."""
    return jax.eval_shape(functools.partial(_init, tx, 0), params)


def _init(tx: optax.GradientTransformation, seed: int, params: nnx.State) -> TrainState:
    # Without a copy, donation would delete the caller's parameters.
    params = jax.tree.map(jnp.copy, params)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, tx.init(params), zero, jax.random.key(seed), jnp.copy(zero))


def apply_gradient(
    tx: optax.GradientTransformation, state: TrainState, gradient: nnx.State, loss: jax.Array
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns the state after a step, and metrics.

    The metrics are the norms of gradient, update and parameters, and the number of skipped steps so
    far. A step is skipped, without a change of parameters and optimizer state, if ``loss``, the
    gradient or the update is not finite.

    ``gradient`` has one gradient per shard (`sharding.zeros_per_shard`), which are summed over the
    devices here, once per step.
    """
    gradient = sharding.sum_shards(gradient)
    updates, opt_state = tx.update(gradient, state.opt_state, state.params)
    gradient_norm, update_norm = optax.tree.norm(gradient), optax.tree.norm(updates)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm) & jnp.isfinite(update_norm)

    def if_finite(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(is_finite, x, y), new, old)

    params = if_finite(optax.apply_updates(state.params, updates), state.params)
    skipped_steps = state.skipped_steps + jnp.where(is_finite, 0, 1)
    metrics = {
        "gradient_norm": gradient_norm,
        "update_norm": update_norm,
        "parameter_norm": optax.tree.norm(params),
        "skipped_steps": skipped_steps,
    }
    opt_state = if_finite(opt_state, state.opt_state)
    return TrainState(params, opt_state, state.step + 1, state.key, skipped_steps), metrics


def place_rows(arrays: Any, mesh: jax.sharding.Mesh) -> Any:
    """Places host arrays (equal on all processes) on the mesh; rows are sharded."""

    def place(array: np.ndarray) -> jax.Array:
        array = np.asarray(array)
        return sharding.place(array, sharding.batch_sharding(mesh, array.ndim, array.shape))

    return jax.tree.map(place, arrays)


# ---------------------------------------------------------------------------------------- settings

Component = Literal["aligner", "cross_encoder", "integrator", "extractor", "reader", "role", "grpo"]


def is_training(config: Config) -> bool:
    """Returns whether a config is for training, and not for evaluation."""
    return "optimizer" in config


def component_of(config: Config) -> Component:
    """Returns the component that a config trains."""
    if not is_training(config):
        raise UserError(
            "--config is not a training config; choose configs/aligner.py, cross_encoder.py, "
            "integrator.py, extractor.py, reader.py, role.py, grpo.py or router.py."
        )
    component = config.get("component", "aligner")
    check_value("config.component", component, Component)
    return component


def check_training(config: Config) -> None:
    """Raises `UserError` for invalid values of the settings that all trainers have."""
    check_at_least(1, config, "keep_checkpoints")
    check_at_least(0, config, "num_epochs", "num_steps", "eval_every", "stop_after_minutes")
    check_at_least(0, config, "save_every", "save_minutes", "max_skipped_steps")
    if not config.num_steps and not config.num_epochs:
        raise UserError("config.num_epochs or config.num_steps must be above 0")
    optimizers.check_optimizer(config)
    if config.get("profile_steps") is not None:
        parse_steps(config.profile_steps)
    check_tracker(config.get("tracker", "tensorboard"))


def check_lengths(config: Config, max_positions: int, *fields: str) -> None:
    """Raises `UserError` if a limit of tokens in ``config`` exceeds the positions of the model."""
    for field in fields:
        if config[field] > max_positions:
            raise UserError(
                f"config.{field}={config[field]} exceeds the {max_positions} positions of the "
                f"model; set it to at most {max_positions}"
            )


def num_steps(config: Config, num_examples: int, examples_per_step: int) -> int:
    """Returns the number of training steps: ``num_steps``, or else those of ``num_epochs``."""
    steps_per_epoch = max(num_examples // examples_per_step, 1)
    return config.num_steps or max(round(config.num_epochs * steps_per_epoch), 1)


def check_metric(name: str, measured: Collection[str]) -> None:
    """Raises `UserError` if there are ``measured`` dev metrics but ``name`` is not one of them."""
    if measured and name not in measured:
        raise UserError(
            f"config.best_metric={name} is not measured; choose one of {', '.join(measured)}"
        )


# ---------------------------------------------------------------------------------------- resuming


def absolute(spec: str) -> str:
    """Makes the path of a local folder absolute, so that training can resume in any directory."""
    path = pathlib.Path(spec)
    return str(path.resolve()) if path.is_dir() else spec


def announce(text: str) -> None:
    """Prints a message in the first process."""
    if jax.process_index() == 0:
        io.say(text)


def open_checkpoints(config: Config, workdir: pathlib.Path) -> Checkpoints:
    """Opens the checkpoints of the run in ``workdir``.

    If they are in ``config.checkpoints.dir``, the file ``workdir/checkpoints`` names this folder,
    so that other commands find it.
    """
    place, given = workdir / "checkpoints", config.checkpoints.dir
    folder = place if given is None else open_folder(given)

    def record() -> None:
        if place.exists() and str(folder_of(workdir)) != str(folder):
            raise UserError(
                f"{workdir} has its checkpoints in {folder_of(workdir)}; set "
                "config.checkpoints.dir as at the start of the run, or choose another --workdir"
            )
        if given is not None and jax.process_index() == 0:
            workdir.mkdir(parents=True, exist_ok=True)
            io.write_text(place, [str(folder), "\n"])

    processes.together(record)
    return Checkpoints(folder, keep=config.keep_checkpoints, best_metric=config.best_metric)


def identity_of(config: Config, may_differ: Collection[str] = ()) -> dict[str, Any]:
    """Returns the identity of a run: its config, base model and packages.

    The fields of `MAY_DIFFER` and ``may_differ`` are excluded.
    """
    fields = without(config.to_dict(), {*MAY_DIFFER, *may_differ})
    # In all processes, because the model may be missing on some hosts.
    base = processes.together(lambda: model_identity(config.model.spec or DEFAULT_DECODER))
    return {**fields, "base": base, "packages": of_packages("tokenizers")}


def load_equally(load: Callable[[], T], digests_of: Callable[[T], Mapping[str, str]]) -> T:
    """Returns ``load()``; all processes raise `UserError` if it fails or its digests differ."""
    loaded = processes.together(load)
    if jax.process_count() > 1:
        processes.check_equal(digests_of(loaded))
    return loaded


def dataset_digests(datasets: Sequence[Dataset]) -> dict[str, str]:
    """Returns the digests of the files of all datasets."""
    return {
        "questions.jsonl": digest(*(dataset.questions for dataset in datasets)),
        "corpus.jsonl": digest(*(dataset.corpus.values() for dataset in datasets)),
        "openie.jsonl": digest(*(dataset.triples.items() for dataset in datasets)),
    }


def digest(*parts: Iterable[Any]) -> str:
    """Returns the SHA-256 of several sequences of records, such as examples."""
    sha256 = hashlib.sha256()
    for part in parts:
        for record in part:
            sha256.update(repr(record).encode() + b"\n")
        sha256.update(b"\n")
    return sha256.hexdigest()


def restore(
    checkpoints: Checkpoints,
    state: TrainState,
    meta: Mapping[str, Any],
    total_steps: int,
    batches: Any,
) -> tuple[TrainState, int, dict[str, float] | None]:
    """Returns state, step and dev metrics of the latest checkpoint.

    Without a checkpoint, these are ``state``, 0 and None. The metrics are also None if the
    checkpoint has none.

    Sets the iterator ``batches`` to its saved position. ``meta["run"]`` is the identity of this
    run; it must equal the identity in the checkpoint.
    """
    if checkpoints.latest_step() is None:
        return state, 0, None
    saved = checkpoints.meta().get("run", {})
    folder = checkpoints.directory
    check_same(
        folder.parent if folder.name == "checkpoints" else folder, saved, meta["run"], _REMEDY
    )
    restored = checkpoints.restore(None, state)
    batches.set_state(restored.data_state)
    announce(f"resuming from step {restored.step} of {total_steps}")
    return restored.state, restored.step, restored.metrics


def check_same_run(workdir: pathlib.Path, run: dict[str, Any]) -> None:
    """Raises `UserError` if ``workdir`` has a checkpoint of a run with a different identity.

    `restore` also compares the examples. This earlier check avoids long preparations before the
    error.
    """
    if steps_in(folder_of(workdir)):
        with Checkpoints(workdir, read_only=True) as checkpoints:
            saved = checkpoints.meta().get("run", {})
        check_same(workdir, {name: saved.get(name) for name in run}, run, _REMEDY)
