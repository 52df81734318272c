"""Policy gradients on sampled texts: advantages within groups, and the clipped loss (GRPO).

Sources: GRPO (Shao et al., 2024, section 4.1), Dr. GRPO (Liu et al., 2025, section 3.2), DAPO (Yu
et al., 2025, section 3).
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import LoraOptions
from cirag_jax.models.decoder_params import Params
from cirag_jax.training import cross_entropy, lora_step
from cirag_jax.training.data import packing
from cirag_jax.training.data.examples import Example, Part
from cirag_jax.training.data.packing import Layout, Row
from cirag_jax.training.lora_step import Batch

Normalize = Literal["token", "sequence", "constant"]


class Turn(NamedTuple):
    """A sampled text: int32 tokens of the prompt and the text, and fp32 log-probabilities of it."""

    prompt_T: np.ndarray
    text_U: np.ndarray
    logprob_U: np.ndarray


class Sample(NamedTuple):
    """A conversation with sampled texts.

    Attributes:
      tokens_T: int32 ids.
      sampled_T: whether the model sampled each token; all others come from prompts and passages.
      logprob_T: fp32 log-probability of each sampled token when it was sampled, 0 elsewhere.
      group: the group that its advantage is computed in, such as a question's id.
      advantage: advantage of every sampled token.
      kl: weight of the divergence from the reference model.
    """

    tokens_T: np.ndarray
    sampled_T: np.ndarray
    logprob_T: np.ndarray
    group: str = ""
    advantage: float = 0.0
    kl: float = 0.0

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return int(self.sampled_T.sum())


def samples_of(turns: Sequence[Turn]) -> list[Sample]:
    """Joins the turns of one program to conversations.

    A turn continues a conversation if its prompt begins with exactly the conversation's tokens.
    Otherwise it begins a new conversation, because re-tokenized text is not what was sampled.
    """
    samples: list[Sample] = []
    for turn in turns:
        text = Sample(turn.text_U, np.ones(len(turn.text_U), bool), turn.logprob_U)
        earlier = samples[-1] if samples else None
        if earlier is not None and np.array_equal(
            turn.prompt_T[: len(earlier.tokens_T)], earlier.tokens_T
        ):
            samples[-1] = _joined(earlier, turn.prompt_T[len(earlier.tokens_T) :], text)
        else:
            samples.append(_joined(_EMPTY, turn.prompt_T, text))
    return samples


_EMPTY = Sample(np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32))


def _joined(earlier: Sample, prompt_T: np.ndarray, text: Sample) -> Sample:
    given = Sample(prompt_T, np.zeros(len(prompt_T), bool), np.zeros(len(prompt_T), np.float32))
    tokens_T, sampled_T, logprob_T = (
        np.concatenate(parts) for parts in zip(earlier[:3], given[:3], text[:3], strict=True)
    )
    return Sample(tokens_T, sampled_T, logprob_T)


def advantages(reward_G: Sequence[float], *, scale: bool) -> np.ndarray | None:
    """Returns rewards minus their mean, fp64 ``[G]``, or None if all rewards are equal.

    With ``scale``, they are divided by their standard deviation (GRPO, equation 21); without, hard
    and easy questions have no larger weight than others (Dr. GRPO).
    """
    rewards = np.asarray(reward_G, np.float64)
    if len(rewards) < 2 or np.ptp(rewards) < 1e-9:
        return None
    centered = rewards - rewards.mean()
    return centered / rewards.std(ddof=1) if scale else centered


def token_weights(samples: Sequence[Sample], normalize: Normalize, max_tokens: int) -> list[float]:
    """Returns the weight of each sample's tokens in the loss of a step.

    ``token``: all tokens of the step have the same weight (DAPO). ``sequence``: all samples have
    the same weight (GRPO). ``constant``: the same for all tokens, whatever their number, so that
    long texts have no smaller gradient per token (Dr. GRPO); the divisor is ``max_tokens``.
    """
    if normalize == "token":
        total = sum(sample.num_sampled for sample in samples)
        return [1.0 / max(total, 1)] * len(samples)
    if normalize == "sequence":
        return [1.0 / (max(sample.num_sampled, 1) * len(samples)) for sample in samples]
    return [1.0 / (max_tokens * len(samples))] * len(samples)


# ------------------------------------------------------------------------------------ the batches


class PolicyBatch(NamedTuple):
    """A micro-batch; its arrays follow the targets, see `lora_step.Batch`.

    Attributes:
      batch: tokens and targets; ``mask_BT`` has the fp32 weights of sampled targets, 0 elsewhere.
      logprob_BT: fp32 log-probabilities of the targets when they were sampled.
      reference_BT: fp32 log-probabilities in the reference model; ignored where ``kl_BT`` is 0.
      advantage_BT: fp32 advantages.
      kl_BT: fp32 weights of the divergence from the reference model.
    """

    batch: Batch
    logprob_BT: Any
    reference_BT: Any
    advantage_BT: Any
    kl_BT: Any


def policy_batches(
    samples: Sequence[Sample], weights: Sequence[float], layout: Layout, pad_id: int
) -> list[PolicyBatch]:
    """Returns the micro-batches of an optimizer step, with ``reference_BT`` still 0.

    The samples of a group share the prefix of their prompts, which packed rows contain only once.
    """
    pairs = list(zip(samples, weights, strict=True))
    sampled = [_example(s, s.sampled_T * np.float32(weight)) for s, weight in pairs]
    places: dict[str, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample.group, []).append(place)
    rows: list[Row] = []
    for group in places.values():
        plan = packing.make_plan([sampled[place] for place in group], layout, seed=0)
        rows += [
            Row(tuple(group[place] for place in row.places), row.shared)
            for step in plan.steps
            for row in step
        ]
    # Rows of similar lengths in a micro-batch save padding.
    lengths = [len(sample.tokens_T) for sample in samples]
    rows.sort(key=lambda row: row.size(lengths))

    def along(values: Sequence[np.ndarray]) -> list[Any]:
        examples = [_example(s, v) for s, v in zip(samples, values, strict=True)]
        return [b.mask_BT for b in _batches(examples, rows, layout, pad_id)]

    return [
        PolicyBatch(batch, logprob_BT, np.zeros_like(logprob_BT), advantage_BT, kl_BT)
        for batch, logprob_BT, advantage_BT, kl_BT in zip(
            _batches(sampled, rows, layout, pad_id),
            along([s.logprob_T for s in samples]),
            along([s.sampled_T * np.float32(s.advantage) for s in samples]),
            along([s.sampled_T * np.float32(s.kl) for s in samples]),
            strict=True,
        )
    ]


def _batches(
    examples: Sequence[Example], rows: Sequence[Row], layout: Layout, pad_id: int
) -> list[Batch]:
    return [piece.batch for piece in packing.micro_batches(examples, rows, layout, pad_id)]


def _example(sample: Sample, weight_T: np.ndarray) -> Example:
    part_T = sample.sampled_T.astype(np.uint8) * np.uint8(Part.ANSWER)
    return Example(sample.tokens_T, weight_T.astype(np.float32), part_T, sample.group)


# --------------------------------------------------------------------------------------- the loss


class Clip(NamedTuple):
    """The ratio of probabilities is clipped to ``[1 - low, 1 + high]`` (DAPO, section 3.1)."""

    low: float
    high: float


def token_logprobs(
    config: DecoderConfig,
    params: Params,
    adapter: Any,
    batch: Batch,
    options: LoraOptions | None,
    chunk: int,
) -> jax.Array:
    """Returns the log-probability of each target with a weight, fp32 ``[B, T]``, 0 elsewhere."""
    hidden_BTD = lora_step.hidden(config, params, adapter, batch, options)
    return -cross_entropy.token_losses(
        config,
        params,
        hidden_BTD,
        batch.targets_BT,
        batch.mask_BT,
        chunk=chunk,
        train_head=adapter is None,
    )


def make_loss(clip: Clip) -> Any:
    """Returns the loss for `lora_step.TrainStep`, on micro-batches of type `PolicyBatch`.

    The loss is the sum over sampled tokens of ``weight * (-min(r A, clip(r) A) + kl * D)``, where
    ``r`` is the ratio of the token's probability to that when it was sampled, ``A`` the advantage,
    and ``D`` Schulman's estimate of the divergence from the reference, which is never negative
    (GRPO, equations 3 and 4). The other sums are ``tokens`` (0, because the weights already
    normalize the loss), ``kl``, ``clipped`` (the share of tokens whose gradient is 0) and
    ``ratio_change`` (the mean of ``|r - 1|``).
    """

    def loss(config, params, adapter, batch: PolicyBatch, options, key, chunk):
        del key  # Dropout would change probabilities between sampling and training.
        logprob_BT = token_logprobs(config, params, adapter, batch.batch, options, chunk)
        weight_BT = batch.batch.mask_BT
        is_sampled_BT = weight_BT != 0
        change_BT = jnp.where(is_sampled_BT, logprob_BT - batch.logprob_BT, 0.0)
        ratio_BT = jnp.exp(change_BT)
        limited_BT = jnp.clip(ratio_BT, 1.0 - clip.low, 1.0 + clip.high)
        gain_BT = ratio_BT * batch.advantage_BT
        limited_gain_BT = limited_BT * batch.advantage_BT
        log_odds_BT = jnp.where(batch.kl_BT != 0, batch.reference_BT - logprob_BT, 0.0)
        divergence_BT = jnp.exp(log_odds_BT) - log_odds_BT - 1.0
        total_BT = batch.kl_BT * divergence_BT - jnp.minimum(gain_BT, limited_gain_BT)

        def mean(x_BT: jax.Array) -> jax.Array:
            return jax.lax.stop_gradient((weight_BT * x_BT).sum())

        sums = {
            "tokens": jnp.zeros((), jnp.float32),
            "kl": mean(divergence_BT),
            "clipped": mean((limited_gain_BT < gain_BT).astype(jnp.float32)),
            "ratio_change": mean(jnp.abs(ratio_BT - 1.0)),
        }
        return (weight_BT * total_BT).sum(), sums

    return loss
