"""Improves the link head by policy gradients on sampled searches.

Supervised training (`training.link_head`) calls every gold passage that is not yet in the chain a
correct choice. Here, a choice is as good as the ranking at the end of its search. A passage that is
not gold but leads to gold passages is therefore worth choosing, and the first ranks matter most.
Each question is searched several times, and searches are compared with the others of their question
(as in GRPO). Q-RAG (Sorokin et al., 2025) trains a retriever for such rewards, by values.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cirag_jax.errors import UserError
from cirag_jax.evaluation.evidence import passage_substitutes
from cirag_jax.evaluation.recall import recall_at
from cirag_jax.io import bar
from cirag_jax.models.link_head import LinkHead, LinkHeadModule
from cirag_jax.retrieval.candidates import FEATURES, StepCandidates
from cirag_jax.retrieval.linked import LinkedIndex
from cirag_jax.training import policy
from cirag_jax.types import Config, Question

KS = (2, 5)  # The reward is the mean recall at these ranks.


class Choice(NamedTuple):
    """A sampled choice: the search, the candidates' features, and the index of the chosen one."""

    search: int
    feature_RF: np.ndarray
    chosen: int


def sample(
    index: LinkedIndex, head: LinkHead, questions: Sequence[str], rng: np.random.Generator
) -> tuple[list[list[int]], list[Choice]]:
    """Searches with choices drawn from the softmax of the head's scores.

    Returns:
      For each question, the rows of its ranking; and all choices.
    """
    pending: list[StepCandidates] = []
    choices: list[Choice] = []

    def score(features: Sequence[np.ndarray]) -> list[np.ndarray]:
        scores = []
        for candidates, score_R in zip(pending, head.score(features), strict=True):
            score_R = score_R.astype(np.float64)
            if len(score_R):
                # The largest of scores with Gumbel noise is a sample of their softmax.
                chosen = int((score_R + rng.gumbel(size=len(score_R))).argmax())
                choices.append(Choice(candidates.question, candidates.feature_RF, chosen))
                score_R[chosen] = score_R.max() + 1.0
            scores.append(score_R)
        pending.clear()
        return scores

    results = index.explore(questions, score, observe=pending.append)
    return [result.rows for result in results], choices


def recalls(rows: Sequence[int], question: Question, ids: Sequence[str]) -> list[float]:
    """Returns the recall of a ranking at each of `KS`; ``ids`` has the id of each row."""
    found, substitutes = [ids[row] for row in rows], passage_substitutes(question)
    return [recall_at(found, question.supporting or (), k, substitutes) for k in KS]


def reinforce(
    head: LinkHead,
    tasks: Sequence[tuple[LinkedIndex, Sequence[str], Sequence[Question]]],
    config: Config,
    seed: int,
    check_stop: Callable[[], None] = lambda: None,
) -> tuple[LinkHead, list[float]]:
    """Returns the head after ``config.updates`` updates, and the mean reward of each.

    Args:
      head: the head to start from.
      tasks: for each corpus, its index, the ids of its rows, and training questions.
      config: ``config.head`` of configs/aligner.py. Each update searches ``config.per_update``
        questions, ``config.searches`` times each.
      seed: seed of the questions and choices.
      check_stop: called before each update; it may raise an exception to stop.
    """
    rng = np.random.default_rng(seed)
    module = nnx.clone(head.module)
    tx = optax.adamw(config.policy_learning_rate, weight_decay=0.0)
    optimizer = nnx.Optimizer(module, tx, wrt=nnx.Param)
    rewards: list[float] = []
    with bar("improving the head", config.updates, "update") as progress:
        for update in range(config.updates):
            check_stop()
            index, ids, questions = tasks[update % len(tasks)]
            count = min(config.per_update, len(questions))
            drawn = [questions[i] for i in rng.choice(len(questions), count, replace=False)]
            repeated = [question for question in drawn for _ in range(config.searches)]
            current = dataclasses.replace(head, module=module)
            rankings, choices = sample(index, current, [q.question for q in repeated], rng)
            pairs = zip(rankings, repeated, strict=True)
            reward_S = np.array([np.mean(recalls(rows, q, ids)) for rows, q in pairs])
            reward_QG = reward_S.reshape(count, config.searches)
            rewards.append(float(reward_QG.mean()))
            groups = [policy.advantages(row_G.tolist(), scale=False) for row_G in reward_QG]
            advantage_S = np.concatenate(
                [np.zeros(config.searches) if group is None else group for group in groups]
            )
            useful = [choice for choice in choices if advantage_S[choice.search]]
            if useful:
                loss = _update(module, optimizer, *_padded(useful, advantage_S))
                if not np.isfinite(loss):
                    raise UserError(
                        f"the loss of update {update + 1} of the link head is not finite; lower "
                        f"config.head.policy_learning_rate={config.policy_learning_rate:g}"
                    )
            progress.update()
    return dataclasses.replace(head, module=module), rewards


def _padded(
    choices: Sequence[Choice], advantage_S: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns features, mask, the chosen candidates and advantages, padded to powers of two."""
    rows = 1 << (len(choices) - 1).bit_length()
    width = 1 << (max(len(c.feature_RF) for c in choices) - 1).bit_length()
    x_CRF = np.zeros((rows, width, len(FEATURES)), np.float32)
    mask_CR = np.zeros((rows, width), bool)
    mask_CR[:, 0] = True  # A padded row must have a candidate.
    chosen_C, advantage_C = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    for row, choice in enumerate(choices):
        count = len(choice.feature_RF)
        x_CRF[row, :count], mask_CR[row, :count] = choice.feature_RF, True
        chosen_C[row], advantage_C[row] = choice.chosen, advantage_S[choice.search]
    return x_CRF, mask_CR, chosen_C, advantage_C / len(choices)


@nnx.jit
def _update(module, optimizer, x_CRF, mask_CR, chosen_C, weight_C):
    def loss(module: LinkHeadModule) -> jax.Array:
        score_CR = jnp.where(mask_CR, module(x_CRF), -jnp.inf)
        log_p_CR = jax.nn.log_softmax(score_CR)
        return -(weight_C * jnp.take_along_axis(log_p_CR, chosen_C[:, None], 1)[:, 0]).sum()

    value, gradient = nnx.value_and_grad(loss)(module)
    optimizer.update(module, gradient)
    return value
