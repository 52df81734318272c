"""Trains the joint scorer of a search along links (`retrieval/joint.py`), and measures it.

The aligner and its head search for the training questions. Where a gold passage is among a step's
best candidates, a cross-encoder that reads question, chain and candidate learns to put it before
those that are not gold: a listwise loss. As with the head, no annotation but the gold passages is
needed, and wrong chains are learnt from, too.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from cirag_jax import sharding
from cirag_jax.datasets import load
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.models import cross_encoder as model_lib
from cirag_jax.models.cross_encoder import PairEncoder
from cirag_jax.models.io.fingerprint import of_model
from cirag_jax.retrieval.joint import JointScorer
from cirag_jax.retrieval.pairs import PairTokens, tokenize_pairs
from cirag_jax.training import cross_encoder, link_head, optimizers
from cirag_jax.training import state as state_lib
from cirag_jax.training.aligner import split_questions
from cirag_jax.training.choices import Choice, choices_of
from cirag_jax.training.data import pairs as data_lib
from cirag_jax.training.preemption import PreemptionGuard
from cirag_jax.training.profile import StepProfile
from cirag_jax.types import Config


def train_and_evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains to the end (or from the last checkpoint on), and measures on held-out questions.

    Leaves ``checkpoints/``, ``metrics.jsonl``, TensorBoard events and what was searched
    (``searched-*.npy``) in ``workdir``.
    """
    start = time.monotonic()
    check_config(config)
    if config.checkpoint is None:
        raise UserError("config.checkpoint is required: a workdir of configs/aligner.py:linked")

    # ---- Data -----------------------------------------------------------------------------------
    run = state_lib.fingerprint(config, ("component",))
    run["checkpoint.weights"] = of_model(config.checkpoint)
    state_lib.refuse_other(workdir, run)  # Before the searches.
    sets = [split_questions(dataset, config) for dataset in load.load_datasets(config.data)]
    train, dev = choices_of(config, workdir, sets)
    state_lib.check_metric(config.best_metric, list(_metrics(dev, [c.score_K for c in dev])))
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    total_steps = num_steps(config, len(train))

    # ---- Model ----------------------------------------------------------------------------------
    model = model_lib.load_cross_encoder(
        config.model.spec,
        dtype=config.model.dtype,
        mesh=mesh,
        new_head=config.seed,
        max_length=config.max_length,
        dropout=config.model.dropout,
        remat=config.model.remat,
    )
    tx = optimizers.make_optimizer(config.optimizer, total_steps)
    state = state_lib.make_state(model.state, tx, config.seed, mesh)
    state_lib.announce(
        f"{len(train):,} choices, {len(dev):,} of dev questions, {total_steps:,} steps of "
        f"{config.choices_per_step}, mesh {dict(mesh.shape)}"
    )

    # ---- Restore --------------------------------------------------------------------------------
    meta = {
        "component": "cross_encoder",
        "reads": "chain",
        "model": state_lib.absolute(config.model.spec),
        "max_length": model.max_length,
        "triple_text": None,
        "trained_on": sorted(question.id for one in sets for question in one.train),
        "run": {
            **run,
            state_lib.EXAMPLES: state_lib.digest((c.query, c.texts) for c in (*train, *dev)),
        },
    }
    checkpoints = state_lib.open_checkpoints(config, workdir)
    state, first_step = state_lib.restore(checkpoints, state, meta, total_steps)

    # ---- Train ----------------------------------------------------------------------------------
    evaluate = make_evaluate(config, dev, model, mesh)
    complete = True
    with (
        checkpoints,
        state_lib.open_metrics(config, workdir, total_steps, first_step) as writer,
        StepProfile(config.get("profile_steps"), workdir) as profile,
        PreemptionGuard(start, config.stop_after_minutes) as preemption,
    ):
        report = state_lib.Report(writer, profile, "Lower config.optimizer.learning_rate")
        for step in range(first_step + 1, total_steps + 1):
            batch = make_batch(config, model, choices_of_step(train, step - 1, config), mesh)
            sent = time.monotonic()
            with jax.set_mesh(mesh):
                state, metrics = cross_encoder.train_step(
                    model.graphdef, tx, state, batch, config, mesh
                )
            report.sent(step, metrics, batch, sent)

            last, measured = step == total_steps, None
            stop = preemption.should_stop(step)
            if last or (config.eval_every and step % config.eval_every == 0):
                report.finish()
                measured = writer.evaluate(step, evaluate, state.params)
            due = config.save_every and step % config.save_every == 0
            if measured is not None or stop or due:
                report.finish()  # Never save a state that is not finite.
                checkpoints.save(step, state, {"step": step}, meta, measured or None)
            if stop and not last:
                complete = False
                break
        best = state_lib.best(checkpoints)
    # ---- Result ---------------------------------------------------------------------------------
    return {
        "complete": complete,
        "step": int(state.step),
        "total_steps": total_steps,
        **best,
        "num_choices": len(train),
        "num_dev_choices": len(dev),
        "seconds": round(time.monotonic() - start, 1),
    }


# -------------------------------------------------------------------------------------------- data


def num_steps(config: Config, choices: int) -> int:
    """Steps of a run over so many choices."""
    per_epoch = max(choices // config.choices_per_step, 1)
    return config.num_steps or max(round(config.num_epochs * per_epoch), 1)


def choices_of_step(choices: Sequence[Choice], step: int, config: Config) -> list[Choice]:
    """The choices of a training step with at most ``config.candidates`` each, a pure function of
    its number.

    They come in a new order every epoch. Gold candidates are kept, but for as many as leave no room
    for another; the others are drawn.
    """
    first = step * config.choices_per_step
    drawn = []
    for number in range(first, first + config.choices_per_step):
        choice = choices[data_lib.place_of(number, len(choices), config.seed)]
        rng = np.random.default_rng((config.seed, number, 1))
        num_gold = int(choice.is_gold_K.sum())
        # Gold candidates first, both in a random order.
        order_K = np.lexsort((rng.permutation(len(choice.texts)), ~choice.is_gold_K))
        gold = order_K[: min(num_gold, config.candidates - 1)]
        kept = np.concatenate([gold, order_K[num_gold:][: config.candidates - len(gold)]])
        texts = tuple(choice.texts[place] for place in kept)
        found = choice.score_K[kept], choice.is_gold_K[kept]
        drawn.append(Choice(choice.question_id, choice.query, texts, *found))
    return drawn


def make_batch(
    config: Config, model: PairEncoder, choices: Sequence[Choice], mesh: jax.sharding.Mesh
) -> data_lib.Batch:
    """A step's choices as padded arrays, the same on every process."""
    pairs = [(choice.query, text) for choice in choices for text in choice.texts]
    rows = iter(tokenize_pairs(model, pairs, config.max_length))
    groups = [[next(rows) for _ in choice.texts] for choice in choices]
    return pack(config, groups, [c.is_gold_K for c in choices], model.config.pad_id, mesh)


def pack(
    config: Config,
    groups: Sequence[Sequence[PairTokens]],
    is_gold: Sequence[np.ndarray],
    pad_id: int,
    mesh: jax.sharding.Mesh,
) -> data_lib.Batch:
    """Chunks of whole choices, ``config.candidates`` rows each, those of like length together."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    return data_lib.pack_groups(
        groups,
        is_gold,
        config.candidates,
        cross_encoder.chunk_lengths(config),
        -(-config.chunk_choices // ways) * ways,  # rounded up to the mesh's row shards
        pad_id,
    )


# ---------------------------------------------------------------------------------------- evaluate


def make_evaluate(
    config: Config, choices: Sequence[Choice], model: PairEncoder, mesh: jax.sharding.Mesh
) -> Callable[[Any], dict[str, float]]:
    """A function from parameters to ``dev/...``: how often a gold candidate comes first, by head
    and cross-encoder together.
    """
    if not choices:
        return lambda params: {}

    def evaluate(params: Any) -> dict[str, float]:
        score = JointScorer(
            dataclasses.replace(model, state=params), config.weight, config.depth, mesh, shown=True
        )
        queries, texts = [c.query for c in choices], [c.texts for c in choices]
        return _metrics(choices, score(queries, texts, [c.score_K for c in choices]))

    return evaluate


def _metrics(choices: Sequence[Choice], scores: Sequence[np.ndarray]) -> dict[str, float]:
    """By ``scores``, and by the head alone; nothing of no choices."""
    if not choices:
        return {}
    right = [c.is_gold_K[score_K.argmax()] for c, score_K in zip(choices, scores, strict=True)]
    alone = [c.is_gold_K[c.score_K.argmax()] for c in choices]
    return {"dev/accuracy": float(np.mean(right)), "dev/head_accuracy": float(np.mean(alone))}


# ------------------------------------------------------------------------------------- bookkeeping


def check_config(config: Config) -> None:
    """Raises UserError where a setting cannot be."""
    state_lib.check_training(config)
    check_at_least(1, config, "choices_per_step", "chunk_choices", "max_length")
    check_at_least(2, config, "candidates", "depth")
    check_at_least(0, config, "dev.questions", "weight")
    check_choice("config.corpus", config.corpus, link_head.CORPORA)
    cross_encoder.check_buckets(config)
