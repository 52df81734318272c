"""Trains the link head, which combines aligner scores, links and words (`retrieval/linked.py`).

Training needs gold passages and no other annotation. Each round searches with the aligner and the
head of the previous round; the first round has no head. At every search step, the gold passages
that are not yet in the chain are the correct choices. The head thus learns from the states of its
own searches, mistakes included (as in DAgger, Ross et al., 2011), and is free to choose the order
of the hops.

The aligner ranks better on its own training questions. The dev questions, which selected the
aligner's checkpoint, are therefore more representative and have more weight.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import nnx
from scipy.optimize import minimize
from scipy.special import expit

from cirag_jax.datasets.chains import UnitKind, units_of
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.io import bar
from cirag_jax.models import link_head as link_head_model
from cirag_jax.models.io.fingerprint import model_identity
from cirag_jax.models.io.workdir import open_encoder
from cirag_jax.models.link_head import LinkHead, LinkHeadModule, StopRule
from cirag_jax.retrieval import stopping
from cirag_jax.retrieval.candidates import FEATURES, GROUPS, StepCandidates
from cirag_jax.retrieval.encoders import Encoder, FlaxEncoder, MemoizingEncoder, with_disk_cache
from cirag_jax.retrieval.linked import LinkedIndex, Score, SearchResult
from cirag_jax.training import link_policy
from cirag_jax.training import state as state_lib
from cirag_jax.training.data.splits import Questions
from cirag_jax.training.preemption import PreemptionGuard
from cirag_jax.types import Config, Dataset, Question

_INVERSE_TEMPERATURE = 20.0  # 1 / 0.05, the temperature of the aligner's loss.
_DISABLED = 1e9  # A scale that makes a standardized feature negligible.
# 1 where group G contains feature F.
_MEMBERSHIP_GF = np.array([[f in group for f in FEATURES] for group in GROUPS.values()], np.float32)


class Task(NamedTuple):
    """Training and dev questions on one corpus; ``ids`` has the passage id of each index row."""

    index: LinkedIndex
    ids: tuple[str, ...]
    train: tuple[Question, ...]
    dev: tuple[Question, ...]


class State(NamedTuple):
    """The candidates of one search step; gold passages not yet in the chain are marked.

    ``question`` is the index of the question.
    """

    question: int
    feature_RF: np.ndarray
    is_gold_R: np.ndarray


class Ranking(NamedTuple):
    """Features of the first passages of a search, for the stopping rule, and which are gold."""

    feature_KF: np.ndarray
    is_gold_K: np.ndarray


class TrainingStopped(Exception):
    """Raised if training must stop before the head is finished."""


# A function that raises `TrainingStopped` to stop training. It is called between blocks of texts or
# questions, and between epochs.
CheckStop = Callable[[], None]


def _continue() -> None:
    """A `CheckStop` that never stops."""


def train_head(
    config: Config, workdir: pathlib.Path, sets: Sequence[Questions], start: float
) -> dict[str, Any] | None:
    """Trains the head for the best checkpoint in ``workdir``, in a single process.

    Writes ``link_head.safetensors`` to ``workdir``, unless it already has a head for the same
    checkpoint, questions and settings.

    Args:
      config: config of the aligner. ``config.head`` has the settings of the head.
      workdir: workdir of the finished training of the aligner.
      sets: questions of each dataset.
      start: start of ``config.stop_after_minutes``, on the clock `time.monotonic`.

    Returns:
      The metrics of the head; empty with several processes. None if training was stopped before the
      head was finished; the next call then trains it from the start.
    """
    if jax.process_count() > 1:
        logging.warning("the head was not trained; run the same command with a single process")
        return {}
    digest = _digest_of_inputs(config, workdir, sets)
    record = link_head_model.read_record(workdir)
    if record.get("run") == digest:
        state_lib.announce(
            f"keeping {workdir / link_head_model.FILE}, which has the same checkpoint, questions "
            "and settings"
        )
        return record["figures"]
    try:
        with PreemptionGuard(start, config.stop_after_minutes) as preemption:

            def check_stop() -> None:
                if preemption.should_stop(0):
                    raise TrainingStopped

            head, metrics = _train_on(config, workdir, sets, check_stop)
    except TrainingStopped:
        state_lib.announce(
            "training stopped before the head was finished; run the same command to train the head"
        )
        return None
    trained_on = sorted(q.id for s in sets for q in s.dev) if uses_dev_questions(config) else []
    record = {"run": digest, "figures": metrics, link_head_model.HEAD_TRAINED_ON: trained_on}
    dataclasses.replace(head, record=record).save(workdir)
    return metrics


def _digest_of_inputs(config: Config, workdir: pathlib.Path, sets: Sequence[Questions]) -> str:
    names = ("head", "seed", "query_max_length", "unit_max_length")
    settings = {name: config.to_dict()[name] for name in names}
    checkpoint = {k: v for k, v in model_identity(str(workdir)).items() if k != "head"}

    def texts(dataset: Dataset, *questions: Sequence[Question]) -> Iterator[Any]:
        yield from questions
        for id in passage_ids(dataset, config.head.corpus, *questions):
            yield dataset.corpus[id], units_of(dataset, id, config.data.units)

    features = [FEATURES, stopping.num_features(config.head.steps)]
    parts = [config.data.units, config.model.dtype, features, settings, checkpoint]
    return state_lib.digest(parts, *(texts(*questions) for questions in sets))


def _train_on(
    config: Config, workdir: pathlib.Path, sets: Sequence[Questions], check_stop: CheckStop
) -> tuple[LinkHead, dict[str, float]]:
    encoder = open_aligner(str(workdir), config)
    kind, settings = config.data.units, config.head.copy_and_resolve_references()
    settings.held_out = config.head.held_out if uses_dev_questions(config) else 0
    tasks = [
        make_task(dataset, train, dev, kind, encoder, settings, check_stop)
        for dataset, train, dev in sets
    ]
    return train_link_head(settings, tasks, kind, config.seed, check_stop)


def uses_dev_questions(config: Config) -> bool:
    """Returns whether the head is also trained on the dev questions."""
    return bool(config.head.held_out and not (config.dev.split or config.dev.fold))


# ----------------------------------------------------------------------------------------- rounds


def train_link_head(
    config: Config,
    tasks: Sequence[Task],
    units: UnitKind,
    seed: int,
    check_stop: CheckStop = _continue,
) -> tuple[LinkHead, dict[str, float]]:
    """Trains a head for ``config.rounds`` rounds, and measures dev recall with and without it.

    Dev questions have the weight ``config.held_out`` in training. If the weight is not 0, recall is
    measured by cross-validation: searches with either half of the dev questions use a head that was
    trained without this half. The stopping rule is fitted on the last searches with training
    questions and, with the same weight, on the searches with dev questions.
    """

    def fit_without(half: int | None) -> tuple[LinkHead, float]:
        """Fits a head without a stopping rule, leaving out one half of the dev questions."""
        kept = [state for state in held_out if state.question % 2 != half]
        module, loss = fit_head(states + config.held_out * kept, config, seed, check_stop)
        return LinkHead(module, FEATURES, units, config.steps), loss

    score, states, held_out = score_by_aligner, list[State](), list[State]()
    rewards: list[float] = []
    rankings = list[Ranking]()
    for number in range(1, config.rounds + 1):
        label = f"round {number}, searching"
        rankings = []
        for task in tasks:
            new_states, new_rankings = search_states(task, task.train, score, label, check_stop)
            states, rankings = states + new_states, rankings + new_rankings
            if config.held_out:
                held_out += search_states(task, task.dev, score, label, check_stop)[0]
        if not states:
            raise UserError("no search for a training question retrieved a gold passage")
        head, loss = fit_without(None)
        score = head.score
    if config.updates:
        parts = [(task.index, task.ids, task.train) for task in tasks]
        head, rewards = link_policy.reinforce(head, parts, config, seed, check_stop)
        score = head.score
    halves = (fit_without(0)[0].score, fit_without(1)[0].score) if held_out else (score, score)
    by_aligner = (score_by_aligner, score_by_aligner)
    aligner_recall, _ = _dev_recall(tasks, by_aligner, "aligner", check_stop)
    head_recall, dev_rankings = _dev_recall(tasks, halves, "linked", check_stop)
    head = dataclasses.replace(head, stop=fit_stop(rankings + config.held_out * dev_rankings))
    metrics = {"head_loss": loss, **aligner_recall, **head_recall}
    if config.updates:
        metrics |= {"first_reward": rewards[0], "last_reward": rewards[-1]}
    return head, metrics


def check_settings(config: Config) -> None:
    """Raises `UserError` for invalid settings of ``config.head``."""
    counts = ("rounds", "steps", "hidden", "epochs", "batch_size")
    check_at_least(1, config, *counts, prefix="config.head.")
    check_at_least(0, config, "held_out", "updates", prefix="config.head.")
    check_at_least(1, config, "per_update", prefix="config.head.")
    check_at_least(2, config, "searches", prefix="config.head.")
    if config.updates and config.held_out:
        raise UserError(
            "config.head.updates needs config.head.held_out=0, so that the dev questions, on which "
            "recall is measured, are not trained on."
        )
    check_choice("config.head.corpus", config.corpus, ("all", "own"))
    for group in config.without:
        check_choice("config.head.without", group, GROUPS)
    if not 0.0 <= config.hide < 1.0:
        raise UserError(f"config.head.hide={config.hide} must be at least 0 and below 1.")


def check_questions(train: Iterable[Question]) -> None:
    """Raises `UserError` if no question has gold passages."""
    if not any(question.supporting for question in train):
        raise UserError(
            "config.head.rounds needs training questions with gold passages (`supporting`); set "
            "it to 0 to train the aligner without a head"
        )


def open_aligner(spec: str, config: Config) -> Encoder:
    """Loads the aligner of a workdir in the dtype of its training.

    Vectors of a complete corpus are cached on disk. launch/evaluate.py reads them if its
    ``config.dtype`` is the same.
    """
    encoder, _ = open_encoder(spec, dtype=config.model.dtype)
    aligner = FlaxEncoder(
        encoder, query_max_length=config.query_max_length, passage_max_length=config.unit_max_length
    )
    return with_disk_cache(MemoizingEncoder(aligner))


def make_task(
    dataset: Dataset,
    train: Sequence[Question],
    dev: Sequence[Question],
    kind: UnitKind,
    encoder: Encoder,
    config: Config,
    check_stop: CheckStop = _continue,
) -> Task:
    """Returns a task with an index of the passages of ``config.corpus``; see `passage_ids`."""
    ids, steps = passage_ids(dataset, config.corpus, train, dev), config.steps
    texts = [[unit.text for unit in units_of(dataset, id, kind)] for id in ids]
    passages = [dataset.corpus[id] for id in ids]
    with bar("encoding, as passage", sum(map(len, texts))) as progress_bar:
        progress = _stoppable(progress_bar.update, check_stop)
        index = LinkedIndex(passages, texts, encoder, None, kind, steps=steps, progress=progress)
    answerable = [tuple(q for q in part if q.supporting) for part in (train, dev)]
    return Task(index, ids, *answerable)


def passage_ids(dataset: Dataset, corpus: str, *questions: Sequence[Question]) -> tuple[str, ...]:
    """Returns the ids of the passages to search: all, or only the passages of the questions.

    ``corpus`` is ``all``, or ``own`` for the contexts and gold passages of ``questions``. Ids are
    distinct and, for ``own``, in the order of the contexts.
    """
    if corpus == "all":
        return tuple(dataset.corpus)
    return tuple(
        dict.fromkeys(
            id
            for question in itertools.chain(*questions)
            for id in (*(question.context or ()), *(question.supporting or ()))
            if id in dataset.corpus
        )
    )


def _stoppable(progress: Callable[[int], Any], check_stop: CheckStop) -> Callable[[int], None]:
    """Returns a progress callback that also calls ``check_stop``."""

    def update(count: int) -> None:
        progress(count)
        check_stop()

    return update


def score_by_aligner(features: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the aligner's score of every candidate, scaled for a softmax."""
    return [_INVERSE_TEMPERATURE * feature_RF[:, 0] for feature_RF in features]


def search_states(
    task: Task,
    questions: Sequence[Question],
    score: Score,
    label: str,
    check_stop: CheckStop = _continue,
) -> tuple[list[State], list[Ranking]]:
    """Runs searches; returns the states that have gold candidates, and the rankings."""
    gold, states = _gold_rows(task, questions), []

    def keep(candidates: StepCandidates) -> None:
        # Passages in the chain are not candidates.
        is_gold_R = np.isin(candidates.row_R, gold[candidates.question])
        if is_gold_R.any():
            states.append(State(candidates.question, candidates.feature_RF, is_gold_R))

    texts = [question.question for question in questions]
    with bar(label, len(questions), "question") as progress_bar:
        progress = _stoppable(progress_bar.update, check_stop)
        searches = task.index.explore(texts, score, None, keep, progress)
    return states, _rankings(searches, gold)


def _gold_rows(task: Task, questions: Sequence[Question]) -> list[list[int]]:
    row = {id: place for place, id in enumerate(task.ids)}
    return [[row[id] for id in q.supporting or () if id in row] for q in questions]


def _rankings(searches: Sequence[SearchResult], gold: Sequence[Sequence[int]]) -> list[Ranking]:
    return [
        Ranking(feature_KF, np.isin(rows[: len(feature_KF)], gold_rows))
        for (rows, feature_KF), gold_rows in zip(searches, gold, strict=True)
    ]


# ---------------------------------------------------------------------------------------- fitting


def fit_stop(rankings: Sequence[Ranking]) -> StopRule:
    """Fits a logistic regression that predicts which passages are gold."""
    weight_F, bias = fit_logistic(
        np.concatenate([feature_KF for feature_KF, _ in rankings]),
        np.concatenate([is_gold_K for _, is_gold_K in rankings]),
    )
    return StopRule(weight_F.astype(np.float32), np.asarray(bias, np.float32))


def fit_logistic(
    x_NF: np.ndarray, is_true_N: np.ndarray, precision: float = 1.0
) -> tuple[np.ndarray, float]:
    """Fits a logistic regression; returns ``weight_F`` and the bias.

    Features are standardized, because all weights have the same prior: normal with variance
    1 / ``precision``.
    """
    x_NF = x_NF.astype(np.float64)
    sign_N = np.where(is_true_N, 1, -1)
    mean_F, scale_F = x_NF.mean(0), x_NF.std(0) + 1e-3
    z_NF = (x_NF - mean_F) / scale_F

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        margin_N = sign_N * (z_NF @ w[1:] + w[0])
        slope_N = -sign_N * expit(-margin_N)
        gradient = np.concatenate([[slope_N.sum()], slope_N @ z_NF + precision * w[1:]])
        return np.logaddexp(0, -margin_N).sum() + precision * (w[1:] @ w[1:]) / 2, gradient

    w = minimize(loss, np.zeros(1 + len(mean_F)), jac=True, method="L-BFGS-B").x
    weight_F = w[1:] / scale_F
    return weight_F, float(w[0] - weight_F @ mean_F)


def fit_head(
    states: Sequence[State], config: Config, seed: int, check_stop: CheckStop = _continue
) -> tuple[LinkHeadModule, float]:
    """Maximizes the likelihood of the gold candidates under a softmax over each step's candidates.

    Returns:
      The head and its mean loss in the last epoch.
    """
    x_SRF, is_gold_SR, mask_SR = _padded(states)
    x_NF = x_SRF[mask_SR]
    mean_F, scale_F = x_NF.mean(0), x_NF.std(0) + 1e-3
    disabled = {name for group in config.without for name in GROUPS[group]}
    scale_F[[name in disabled for name in FEATURES]] = _DISABLED
    module = LinkHeadModule(mean_F, scale_F, config.hidden, nnx.Rngs(seed))
    x_SRF = np.where(mask_SR[..., None], x_SRF, mean_F)

    num_batches = max(len(states) // config.batch_size, 1)
    schedule = optax.cosine_decay_schedule(config.learning_rate, config.epochs * num_batches)
    tx = optax.adamw(schedule, weight_decay=config.weight_decay)
    # Beyond its limit, `apply_if_finite` would apply the update, so the limit is out of reach.
    optimizer = nnx.Optimizer(
        module, optax.apply_if_finite(tx, np.iinfo(np.int32).max), wrt=nnx.Param
    )
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    losses = []
    for epoch in range(config.epochs):
        check_stop()
        order = rng.permutation(len(states))
        losses = []
        for number, rows in enumerate(np.array_split(order, num_batches)):
            # All batches have the same size, so that only one program is compiled.
            rows = np.resize(rows, -(-len(states) // num_batches))
            step_key = jax.random.fold_in(key, epoch * num_batches + number)
            batch = (x_SRF[rows], is_gold_SR[rows], mask_SR[rows])
            losses.append(_step(module, optimizer, batch, step_key, config.hide))
        losses = [loss for loss in jax.device_get(losses) if np.isfinite(loss)]
        if not losses:
            raise UserError(
                f"no loss of the link head is finite in epoch {epoch + 1}; lower "
                f"config.head.learning_rate={config.learning_rate:g}"
            )
    return module, float(np.mean(losses))


@functools.partial(nnx.jit, static_argnums=4)
def _step(
    module: LinkHeadModule, optimizer: nnx.Optimizer, batch: Any, key: jax.Array, hide: float
) -> jax.Array:
    x_BRF, is_gold_BR, mask_BR = batch
    hidden_BG = jax.random.bernoulli(key, hide, (len(x_BRF), len(GROUPS)))
    keep_BF = 1.0 - jnp.minimum(hidden_BG.astype(jnp.float32) @ _MEMBERSHIP_GF, 1.0)

    def loss(module: LinkHeadModule) -> jax.Array:
        score_BR = jnp.where(mask_BR, module(x_BRF, keep_BF[:, None]), -jnp.inf)
        log_p_BR = jax.nn.log_softmax(score_BR)
        return -jax.nn.logsumexp(log_p_BR, axis=1, where=is_gold_BR).mean()

    value, gradient = nnx.value_and_grad(loss)(module)
    optimizer.update(module, gradient)
    return value


def _padded(states: Sequence[State]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns all states as padded arrays ``x_SRF``, ``is_gold_SR`` and ``mask_SR``."""
    size = max(len(state.is_gold_R) for state in states)
    x_SRF = np.zeros((len(states), size, len(FEATURES)), np.float32)
    is_gold_SR = np.zeros((len(states), size), bool)
    mask_SR = np.zeros((len(states), size), bool)
    for index, (_, feature_RF, is_gold_R) in enumerate(states):
        count = len(is_gold_R)
        x_SRF[index, :count], is_gold_SR[index, :count] = feature_RF, is_gold_R
        mask_SR[index, :count] = True
    return x_SRF, is_gold_SR, mask_SR


def _dev_recall(
    tasks: Sequence[Task], scores: tuple[Score, Score], name: str, check_stop: CheckStop
) -> tuple[dict[str, float], list[Ranking]]:
    """Returns recall and rankings of the dev questions of all tasks.

    Searches with questions of an odd index use the second score, all others the first.
    """
    recalls: list[list[float]] = []
    rankings = list[Ranking]()
    progress = _stoppable(lambda count: None, check_stop)
    for task, half in itertools.product(tasks, (0, 1)):
        questions = task.dev[half::2]
        texts = [question.question for question in questions]
        searches = task.index.explore(texts, scores[half], progress=progress)
        rankings += _rankings(searches, _gold_rows(task, questions))
        for question, search in zip(questions, searches, strict=True):
            recalls.append(link_policy.recalls(search.rows, question, task.ids))
    by_k = zip(link_policy.KS, zip(*recalls, strict=True), strict=False)  # Empty without questions.
    return {f"dev/{name}_recall@{k}": float(np.mean(values)) for k, values in by_k}, rankings
