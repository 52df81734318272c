"""Choosing the next token of every row: greedy, temperature and nucleus, and what is said of it."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_MASKED = -1e30
_REPEATED = -1e20  # above what a grammar forbids: where nothing else is allowed, it may come again
_BISECTIONS = 40  # halvings of [0, 1]: below the spacing of fp32 probabilities that matter


class Sampling(NamedTuple):
    """Per-row settings on the device.

    Attributes:
      temperature_B: fp32; 0 is greedy.
      top_p_B: fp32 in (0, 1].
      seed_B: uint32, each request's own.
    """

    temperature_B: jax.Array | np.ndarray
    top_p_B: jax.Array | np.ndarray
    seed_B: jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Details:
    """What is reported beside each token; static, since it changes the compiled program."""

    logprobs: bool = False
    top_logprobs: int = 0
    entropy: bool = False
    attention: int = 0

    @property
    def distribution(self) -> bool:
        """Whether the normalised distribution is needed at all."""
        return self.logprobs or self.top_logprobs > 0 or self.entropy


def apply_mask(logits_BV: jax.Array, mask_BW: jax.Array | np.ndarray) -> jax.Array:
    """Logits with every token forbidden whose bit in ``mask_BW`` (uint32, little-endian) is 0."""
    ids_V = jnp.arange(logits_BV.shape[-1], dtype=jnp.uint32)
    words_BV = mask_BW[:, ids_V >> 5]
    allowed_BV = (words_BV >> (ids_V & jnp.uint32(31))) & jnp.uint32(1)
    return jnp.where(allowed_BV == 1, logits_BV, _MASKED)


def forbid_repeats(
    logits_BV: jax.Array, history_BS: jax.Array, count_B: jax.Array, size: int
) -> jax.Array:
    """Logits with every token pushed down that would write an n-gram of ``history`` again.

    The ``no_repeat_ngram_size`` of transformers, over what was generated alone: an answer may copy
    its prompt.

    Args:
      logits_BV: fp32.
      history_BS: int32, the tokens generated so far.
      count_B: int32, how many they are.
      size: tokens of an n-gram, at least 2 (static).
    """
    count_B1 = count_B[:, None]
    place_S = jnp.arange(history_BS.shape[1])
    same_BS = (place_S >= size - 1) & (place_S < count_B1)
    for back in range(1, size):  # The token `back` before each place is the row's `back`-th last.
        own_B1 = jnp.take_along_axis(history_BS, jnp.maximum(count_B1 - back, 0), axis=1)
        same_BS &= jnp.roll(history_BS, back, axis=1) == own_B1

    def push(state):
        """The first of every row's places that are left: mostly there is none at all."""
        logits_BV, same_BS = state
        row_B, place_B = jnp.arange(len(same_BS)), jnp.argmax(same_BS, axis=1)
        found_B = same_BS[row_B, place_B]
        token_B = jnp.where(found_B, history_BS[row_B, place_B], logits_BV.shape[-1])
        logits_BV = logits_BV.at[row_B, token_B].min(_REPEATED, mode="drop")
        return logits_BV, same_BS.at[row_B, place_B].set(False)

    # A scatter of all places at once takes as long on a CPU as the decoder's step.
    return jax.lax.while_loop(lambda state: state[1].any(), push, (logits_BV, same_BS))[0]


def nucleus(probs_BV: jax.Array, top_p_B: jax.Array | np.ndarray) -> jax.Array:
    """The smallest set of most probable tokens whose probability reaches ``top_p``, as a mask.

    Found by bisecting the least probability inside (Holtzman et al., 2020, define the set; sorting
    the vocabulary would cost more than the decoder's step on a CPU). Tokens tied with the least
    probable one inside are inside.
    """

    def halve(_, bounds):
        low_B, high_B = bounds
        middle_B = (low_B + high_B) / 2
        kept_B = jnp.where(probs_BV >= middle_B[:, None], probs_BV, 0.0).sum(-1)
        enough_B = kept_B >= top_p_B
        return jnp.where(enough_B, middle_B, low_B), jnp.where(enough_B, high_B, middle_B)

    bounds = jnp.zeros_like(top_p_B), jnp.ones_like(top_p_B)
    low_B, _ = jax.lax.fori_loop(0, _BISECTIONS, halve, bounds)
    most_BV = probs_BV >= probs_BV.max(-1, keepdims=True)
    return (probs_BV >= low_B[:, None]) | most_BV


def _draw(logits_BV: jax.Array, sampling: Sampling, step_B: jax.Array) -> jax.Array:
    temperature_B = jnp.maximum(sampling.temperature_B, 1e-6)
    scaled_BV = logits_BV / temperature_B[:, None]
    whole_B = (sampling.top_p_B >= 1.0) | (sampling.temperature_B <= 0.0)

    def find() -> jax.Array:
        probs_BV = jax.nn.softmax(scaled_BV, axis=-1)
        return nucleus(probs_BV, sampling.top_p_B) | whole_B[:, None]

    # Bisecting reads the vocabulary forty times: only where a row's nucleus is not all of it.
    everything = functools.partial(jnp.ones, logits_BV.shape, bool)
    keep_BV = jax.lax.cond(whole_B.all(), everything, find)

    def noise(seed, step):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return jax.random.gumbel(key, logits_BV.shape[-1:], jnp.float32)

    noise_BV = jax.vmap(noise)(sampling.seed_B, step_B)
    drawn_B = jnp.argmax(jnp.where(keep_BV, scaled_BV + noise_BV, _MASKED), axis=-1)
    return jnp.where(sampling.temperature_B > 0.0, drawn_B, jnp.argmax(logits_BV, axis=-1))


def choose(
    logits_BV: jax.Array, sampling: Sampling, step_B: jax.Array, *, greedy: bool
) -> jax.Array:
    """Next token, int32 ``[B]``.

    A row's draw depends on its logits, its seed and ``step_B`` (its count of tokens) alone. With
    ``greedy`` (static) the program has no sampling in it, whatever the temperatures.
    """
    if greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return _draw(logits_BV, sampling, step_B).astype(jnp.int32)


def describe(
    logits_BV: jax.Array, tokens_B: jax.Array | np.ndarray, details: Details
) -> dict[str, jax.Array]:
    """What ``details`` asks of the distribution, before temperature, top-p and grammar.

    Returns:
      ``logprob`` fp32 [B], ``top_ids`` int32 and ``top_logprobs`` fp32 [B, k], ``entropy`` fp32 [B]
      in nats; those not asked for are absent.
    """
    if not details.distribution:
        return {}
    logprobs_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    found = {"logprob": jnp.take_along_axis(logprobs_BV, tokens_B[:, None], axis=-1)[:, 0]}
    if details.top_logprobs:
        found["top_logprobs"], ids = jax.lax.top_k(logprobs_BV, details.top_logprobs)
        found["top_ids"] = ids.astype(jnp.int32)
    if details.entropy:
        probs_BV = jnp.exp(logprobs_BV)
        found["entropy"] = -jnp.where(probs_BV > 0, probs_BV * logprobs_BV, 0.0).sum(-1)
    return found
