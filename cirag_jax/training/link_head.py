"""Trains the head that weighs aligner, links and words (`retrieval/linked.py`).

No annotation but the gold passages is needed. The aligner searches for the training questions with
the head of the round before, at first with none; at every step those gold passages count as right
that its chain does not have yet. So the head learns on the very states that it will see, wrong ones
included (as DAgger, Ross et al., 2011), and the order of the hops is left to it.

The aligner scores the questions that it was trained on better than any others. Those that were held
out from it to choose its checkpoint are therefore the better teachers of the head, and count more.
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
from cirag_jax.evaluation.evidence import passage_substitutes
from cirag_jax.evaluation.recall import recall_at
from cirag_jax.io import bar
from cirag_jax.models import link_head as link_head_model
from cirag_jax.models.io.fingerprint import of_model
from cirag_jax.models.io.workdir import open_encoder
from cirag_jax.models.link_head import LinkHead, LinkHeadModule, StopRule
from cirag_jax.retrieval import stopping
from cirag_jax.retrieval.candidates import FEATURES, GROUPS, Candidates
from cirag_jax.retrieval.encoders import Encoder, FlaxEncoder, RememberingEncoder, kept_on_disk
from cirag_jax.retrieval.linked import Found, LinkedIndex, Score
from cirag_jax.training import state as state_lib
from cirag_jax.training.data.splits import Questions
from cirag_jax.training.preemption import PreemptionGuard
from cirag_jax.types import Config, Dataset, Question

_KS = (2, 5)
CORPORA = ("all", "own")
_SHARP = 20.0  # The aligner's loss divides by 0.05.
_NEVER = 1e9  # Standardised by it, a feature says nothing.


class Task(NamedTuple):
    """Questions over one corpus: those that are trained on, and those that are only measured."""

    index: LinkedIndex
    ids: tuple[str, ...]  # Of the passages, by row.
    train: tuple[Question, ...]
    dev: tuple[Question, ...]


class State(NamedTuple):
    """The candidates of one step, and which of them are gold passages still to be found.

    ``question`` is the place of the step's question among those that were searched for.
    """

    question: int
    feature_RF: np.ndarray
    is_gold_R: np.ndarray


class Ranking(NamedTuple):
    """The first passages that a search found, ``seen_KF``, and which of them are gold."""

    seen_KF: np.ndarray
    is_gold_K: np.ndarray


class Stopped(Exception):
    """The training was told to stop before its head was whole."""


ShouldStop = Callable[[], bool]  # Asked between blocks of texts or questions, and between epochs.


def _never() -> bool:
    return False


def _stop_if(should_stop: ShouldStop) -> None:
    if should_stop():
        raise Stopped


# --------------------------------------------------------------------------- beside an aligner


def train_head(
    config: Config, workdir: pathlib.Path, sets: Sequence[Questions], start: float
) -> dict[str, Any] | None:
    """Trains the head on the searches of the best checkpoint in ``workdir``, in one process.

    Writes ``link_head.safetensors`` into ``workdir``. Keeps the file that is there if it was
    trained on this checkpoint, with these questions and settings.

    Args:
      config: of the aligner; ``head`` are the head's own settings.
      workdir: of the aligner's training, which has ended.
      sets: questions of each dataset.
      start: `time.monotonic` from which ``config.stop_after_minutes`` count.

    Returns:
      The head's figures, none if several processes train. None if it was stopped before the head
      was whole: the next call starts it again.
    """
    if jax.process_count() > 1:
        logging.warning("several processes trained: run this again with one, which trains the head")
        return {}
    digest = _digest_of_inputs(config, workdir, sets)
    record = link_head_model.read_record(workdir)
    if record.get("run") == digest:
        state_lib.announce(
            f"{workdir / link_head_model.FILE} is kept: it was trained on this checkpoint, with "
            "these questions and settings"
        )
        return record["figures"]
    try:
        with PreemptionGuard(start, config.stop_after_minutes) as preemption:
            head, figures = _train_on(config, workdir, sets, lambda: preemption.should_stop(0))
    except Stopped:
        state_lib.announce(
            "the head was not ready when the training was told to stop; the same command begins "
            "it again, and nothing else"
        )
        return None
    taught = sorted(q.id for one in sets for q in one.dev) if held_out_teach(config) else []
    record = {"run": digest, "figures": figures, link_head_model.TAUGHT: taught}
    dataclasses.replace(head, record=record).save(workdir)
    return figures


def _digest_of_inputs(config: Config, workdir: pathlib.Path, sets: Sequence[Questions]) -> str:
    names = ("head", "seed", "query_max_length", "unit_max_length")
    settings = {name: config.to_dict()[name] for name in names}
    checkpoint = {k: v for k, v in of_model(str(workdir)).items() if k != "head"}

    def texts(dataset: Dataset, *questions: Sequence[Question]) -> Iterator[Any]:
        yield from questions
        for id in passage_ids(dataset, config.head.corpus, *questions):
            yield dataset.corpus[id], units_of(dataset, id, config.data.units)

    reads = [FEATURES, stopping.num_features(config.head.steps)]
    parts = [config.data.units, reads, settings, checkpoint]
    return state_lib.digest(parts, *(texts(*one) for one in sets))


def _train_on(
    config: Config, workdir: pathlib.Path, sets: Sequence[Questions], should_stop: ShouldStop
) -> tuple[LinkHead, dict[str, float]]:
    encoder = open_aligner(str(workdir), config)
    kind, settings = config.data.units, config.head.copy_and_resolve_references()
    settings.held_out = config.head.held_out if held_out_teach(config) else 0
    tasks = [
        make_task(dataset, train, dev, kind, encoder, settings, should_stop)
        for dataset, train, dev in sets
    ]
    return train_link_head(settings, tasks, kind, config.seed, should_stop)


def held_out_teach(config: Config) -> bool:
    """Whether the head learns from the dev questions: not from those of another split or fold."""
    chosen = config.dev.split or config.dev.fold
    return bool(config.head.held_out and not chosen)


# ------------------------------------------------------------------------- searching and fitting


def train_link_head(
    config: Config,
    tasks: Sequence[Task],
    units: UnitKind,
    seed: int,
    should_stop: ShouldStop = _never,
) -> tuple[LinkHead, dict[str, float]]:
    """The head after ``rounds`` of ``config``, and dev recall with it and by the aligner alone.

    The held-out questions count ``held_out`` times. Where that is not 0, heads that have learnt
    from one half of them alone are measured on the other, and what these find teaches when to stop,
    beside what the last round found for the training questions.

    Raises:
      Stopped: ``should_stop`` said so.
    """

    def fitted(half: int | None) -> tuple[LinkHead, float]:
        """A head without what that half of the held-out questions teaches, nor when to stop."""
        kept = [state for state in held_out if state.question % 2 != half]
        module, loss = fit_head(states + config.held_out * kept, config, seed, should_stop)
        return LinkHead(module, FEATURES, units, config.steps), loss

    score, states, held_out, found = by_aligner, list[State](), list[State](), None
    rankings = list[Ranking]()
    for number in range(1, config.rounds + 1):
        label = f"round {number}, searching"
        rankings = []
        for task in tasks:
            new, ranked = search_states(task, task.train, score, label, should_stop)
            states, rankings = states + new, rankings + ranked
            if config.held_out:
                held_out += search_states(task, task.dev, score, label, should_stop)[0]
        if not states:
            raise UserError("no search of a training question came upon a gold passage")
        found = fitted(None)
        score = found[0].score
    assert found is not None
    halves = (fitted(0)[0].score, fitted(1)[0].score) if held_out else (score, score)
    before, _ = _dev(tasks, (by_aligner, by_aligner), "aligner", should_stop)
    after, ranked = _dev(tasks, halves, "linked", should_stop)
    head = dataclasses.replace(found[0], stop=fit_stop(rankings + config.held_out * ranked))
    return head, {"head_loss": found[1], **before, **after}


def check_settings(config: Config) -> None:
    """Raises UserError where a setting of ``config`` is out of range."""
    counts = ("rounds", "steps", "hidden", "epochs", "batch_size")
    check_at_least(1, config, *counts, prefix="config.head.")
    check_at_least(0, config, "held_out", prefix="config.head.")
    check_choice("config.head.corpus", config.corpus, CORPORA)
    for group in config.without:
        check_choice("config.head.without", group, tuple(GROUPS))
    if not 0.0 <= config.hide < 1.0:
        raise UserError(f"config.head.hide={config.hide} must be at least 0 and below 1.")


def check_questions(train: Iterable[Question]) -> None:
    """Raises UserError where no question has gold passages, before hours of training."""
    if not any(question.supporting for question in train):
        raise UserError(
            "config.head.rounds asks for a head, which learns from gold passages (`supporting`), "
            "and no training question has one"
        )


def open_aligner(spec: str, config: Config) -> Encoder:
    """The aligner of a workdir as it embeds here; vectors of whole corpora are kept."""
    encoder, _ = open_encoder(spec)
    embeds = FlaxEncoder(
        encoder,
        query_max_length=config.query_max_length,
        passage_max_length=config.unit_max_length,
    )
    # A head that begins anew and an evaluation of all read the same sentences once more.
    return kept_on_disk(RememberingEncoder(embeds))


def make_task(
    dataset: Dataset,
    train: Sequence[Question],
    dev: Sequence[Question],
    kind: UnitKind,
    encoder: Encoder,
    config: Config,
    should_stop: ShouldStop = _never,
) -> Task:
    """Searches among the passages that ``config.corpus`` says, see `passage_ids`.

    Raises:
      Stopped: ``should_stop`` said so.
    """
    ids, steps = passage_ids(dataset, config.corpus, train, dev), config.steps
    texts = [[unit.text for unit in units_of(dataset, id, kind)] for id in ids]
    passages = [dataset.corpus[id] for id in ids]
    with bar("encoding, as passage", sum(map(len, texts))) as shown:
        progress = _watched(shown.update, should_stop)
        index = LinkedIndex(passages, texts, encoder, None, kind, steps=steps, progress=progress)
    answerable = [tuple(q for q in part if q.supporting) for part in (train, dev)]
    return Task(index, ids, *answerable)


def passage_ids(dataset: Dataset, corpus: str, *questions: Sequence[Question]) -> tuple[str, ...]:
    """All of the corpus, or its ``own`` of these questions: each once, in the contexts' order."""
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


def _watched(progress: Callable[[int], Any], should_stop: ShouldStop) -> Callable[[int], None]:
    """``progress``, after which a training may stop."""

    def watched(count: int) -> None:
        progress(count)
        _stop_if(should_stop)

    return watched


def by_aligner(features: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The aligner's own score of every candidate, sharp enough for a softmax."""
    return [_SHARP * feature_RF[:, 0] for feature_RF in features]


def search_states(
    task: Task,
    questions: Sequence[Question],
    score: Score,
    label: str,
    should_stop: ShouldStop = _never,
) -> tuple[list[State], list[Ranking]]:
    """What every step of these questions' searches chose from, where gold was among it; and what
    they found.
    """
    gold, states = _gold_rows(task, questions), []

    def keep(candidates: Candidates) -> None:
        # Candidates are passages that the chain does not have.
        is_gold_R = np.isin(candidates.row_R, gold[candidates.question])
        if is_gold_R.any():
            states.append(State(candidates.question, candidates.feature_RF, is_gold_R))

    found = explore(task, questions, score, label, keep, should_stop)
    return states, _rankings(found, gold)


def explore(
    task: Task,
    questions: Sequence[Question],
    score: Score,
    label: str,
    observe: Callable[[Candidates], None],
    should_stop: ShouldStop = _never,
) -> list[Found]:
    """`LinkedIndex.explore` for these questions, behind a progress bar.

    Raises:
      Stopped: ``should_stop`` said so.
    """
    with bar(label, len(questions), "question") as shown:
        progress = _watched(shown.update, should_stop)
        return task.index.explore([q.question for q in questions], score, None, observe, progress)


def _gold_rows(task: Task, questions: Sequence[Question]) -> list[list[int]]:
    row = {id: place for place, id in enumerate(task.ids)}
    return [[row[id] for id in q.supporting or () if id in row] for q in questions]


def _rankings(found: Sequence[Found], gold: Sequence[Sequence[int]]) -> list[Ranking]:
    return [
        Ranking(seen_KF, np.isin(rows[: len(seen_KF)], right))
        for (rows, seen_KF), right in zip(found, gold, strict=True)
    ]


def fit_stop(rankings: Sequence[Ranking]) -> StopRule:
    """Logistic regression of which passages are gold, by their likelihood and a normal prior.

    Features are standardised first, so that the prior's variance of 1 suits all of them.
    """
    x_NF = np.concatenate([seen_KF for seen_KF, _ in rankings]).astype(np.float64)
    sign_N = np.where(np.concatenate([is_gold_K for _, is_gold_K in rankings]), 1, -1)
    mean_F, scale_F = x_NF.mean(0), x_NF.std(0) + 1e-3
    z_NF = (x_NF - mean_F) / scale_F

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        margin_N = sign_N * (z_NF @ w[1:] + w[0])
        slope_N = -sign_N * expit(-margin_N)
        gradient = np.concatenate([[slope_N.sum()], slope_N @ z_NF + w[1:]])
        return np.logaddexp(0, -margin_N).sum() + w[1:] @ w[1:] / 2, gradient

    w = minimize(loss, np.zeros(1 + len(mean_F)), jac=True, method="L-BFGS-B").x
    weight_F = w[1:] / scale_F
    bias = np.asarray(w[0] - weight_F @ mean_F, np.float32)
    return StopRule(weight_F.astype(np.float32), bias)


def fit_head(
    states: Sequence[State], config: Config, seed: int, should_stop: ShouldStop = _never
) -> tuple[LinkHeadModule, float]:
    """A head by the likelihood of the gold candidates under a softmax over all of a step.

    Returns:
      The head and its loss in the last epoch.
    """
    x_SRF, is_gold_SR, there_SR = _padded(states)
    seen_NF = x_SRF[there_SR]
    mean_F, scale_F = seen_NF.mean(0), seen_NF.std(0) + 1e-3
    without = {name for group in config.without for name in GROUPS[group]}
    scale_F[[name in without for name in FEATURES]] = _NEVER
    module = LinkHeadModule(mean_F, scale_F, config.hidden, nnx.Rngs(seed))
    x_SRF = np.where(there_SR[..., None], x_SRF, mean_F)

    num_batches = max(len(states) // config.batch_size, 1)
    schedule = optax.cosine_decay_schedule(config.learning_rate, config.epochs * num_batches)
    optimizer = nnx.Optimizer(
        module, optax.adamw(schedule, weight_decay=config.weight_decay), wrt=nnx.Param
    )
    order, key = np.random.default_rng(seed), jax.random.key(seed)
    losses = []
    for epoch in range(config.epochs):
        _stop_if(should_stop)
        drawn = order.permutation(len(states))
        losses = []
        for number, rows in enumerate(np.array_split(drawn, num_batches)):
            # The same size for all, so that one program is compiled.
            rows = np.resize(rows, -(-len(states) // num_batches))
            step_key = jax.random.fold_in(key, epoch * num_batches + number)
            batch = (x_SRF[rows], is_gold_SR[rows], there_SR[rows])
            losses.append(_step(module, optimizer, batch, step_key, config.hide))
    return module, float(np.mean(jax.device_get(losses)))


@functools.partial(nnx.jit, static_argnums=4)
def _step(
    module: LinkHeadModule, optimizer: nnx.Optimizer, batch: Any, key: jax.Array, hide: float
) -> jax.Array:
    x_BRF, is_gold_BR, there_BR = batch
    hidden_BG = jax.random.bernoulli(key, hide, (len(x_BRF), len(GROUPS)))
    keep_BF = 1.0 - jnp.minimum(hidden_BG.astype(jnp.float32) @ _members(), 1.0)

    def loss(module: LinkHeadModule) -> jax.Array:
        score_BR = jnp.where(there_BR, module(x_BRF, keep_BF[:, None]), -jnp.inf)
        log_p_BR = jax.nn.log_softmax(score_BR)
        return -jax.nn.logsumexp(log_p_BR, axis=1, where=is_gold_BR).mean()

    value, gradient = nnx.value_and_grad(loss)(module)
    optimizer.update(module, gradient)
    return value


def _members() -> np.ndarray:
    """Which group has which features, ``[G, F]``."""
    return np.array([[name in group for name in FEATURES] for group in GROUPS.values()], np.float32)


def _padded(states: Sequence[State]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All states as ``x_SRF``, ``is_gold_SR`` and ``there_SR``."""
    most = max(len(state.is_gold_R) for state in states)
    x_SRF = np.zeros((len(states), most, len(FEATURES)), np.float32)
    is_gold_SR = np.zeros((len(states), most), bool)
    there_SR = np.zeros((len(states), most), bool)
    for place, (_, feature_RF, is_gold_R) in enumerate(states):
        count = len(is_gold_R)
        x_SRF[place, :count], is_gold_SR[place, :count] = feature_RF, is_gold_R
        there_SR[place, :count] = True
    return x_SRF, is_gold_SR, there_SR


def _dev(
    tasks: Sequence[Task], scores: tuple[Score, Score], name: str, should_stop: ShouldStop
) -> tuple[dict[str, float], list[Ranking]]:
    """Recall of the dev questions of all sets together, every second with the second score, and
    what was found; nothing where there are none.
    """
    found: dict[int, list[float]] = {k: [] for k in _KS}
    rankings = list[Ranking]()
    progress = _watched(lambda count: None, should_stop)
    for task, half in itertools.product(tasks, (0, 1)):
        questions = task.dev[half::2]
        texts = [question.question for question in questions]
        searched = task.index.explore(texts, scores[half], progress=progress)
        rankings += _rankings(searched, _gold_rows(task, questions))
        for question, one in zip(questions, searched, strict=True):
            top, elsewhere = [task.ids[row] for row in one.rows], passage_substitutes(question)
            for k in _KS:
                found[k].append(recall_at(top, question.supporting or (), k, elsewhere))
    return {f"dev/{name}_recall@{k}": float(np.mean(v)) for k, v in found.items() if v}, rankings
