"""Sampling of the next token of every row: greedy, with a temperature, or from a nucleus."""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_MASKED = -1e30
_REPEATED = -1e20  # above _MASKED, so that a grammar may still force a repetition
_BISECTIONS = 40  # halvings of [0, 1], down to the spacing of relevant fp32 probabilities
_NGRAM = 3  # longest n-gram that is looked up for drafts


class Sampling(NamedTuple):
    """Per-row settings on the device.

    Attributes:
      temperature_B: fp32; 0 is greedy.
      top_p_B: fp32 in (0, 1].
      seed_B: uint32.
    """

    temperature_B: jax.Array | np.ndarray
    top_p_B: jax.Array | np.ndarray
    seed_B: jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True, order=True)
class Details:
    """The details to report about each token; static, because they change the compiled program."""

    logprobs: bool = False
    top_logprobs: int = 0
    entropy: bool = False
    attention: int = 0

    @property
    def distribution(self) -> bool:
        """Whether the normalized distribution is needed."""
        return self.logprobs or self.top_logprobs > 0 or self.entropy


def apply_mask(logits_BV: jax.Array, mask_BW: jax.Array | np.ndarray) -> jax.Array:
    """Masks the logits of all tokens whose bit in ``mask_BW`` (uint32, little-endian) is 0."""
    ids_V = jnp.arange(logits_BV.shape[-1], dtype=jnp.uint32)
    words_BV = mask_BW[:, ids_V >> 5]
    allowed_BV = (words_BV >> (ids_V & jnp.uint32(31))) & jnp.uint32(1)
    return jnp.where(allowed_BV == 1, logits_BV, _MASKED)


def _suffix_matches(text_BS: jax.Array, count_B: jax.Array, size: int) -> list[jax.Array]:
    """Compares the last ``size`` of ``count_B`` tokens with the tokens before each position.

    Returns masks ``[B, S]``. The mask at index i is true where the token ``i + 1`` places before a
    position equals the token ``i + 1`` places before the end.
    """
    count_B1, masks = count_B[:, None], []
    for distance in range(1, size + 1):
        last_B1 = jnp.take_along_axis(text_BS, jnp.maximum(count_B1 - distance, 0), axis=1)
        masks.append(jnp.roll(text_BS, distance, axis=1) == last_B1)
    return masks


def find_drafts(text_BS: jax.Array, count_B: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Guesses the next tokens of each text by looking up its last tokens in the text itself.

    The guess is what followed the last earlier occurrence of the longest possible n-gram, of at
    most `_NGRAM` tokens (Saxena, 2023, prompt lookup decoding).

    Args:
      text_BS: int32 tokens of prompt and answer.
      count_B: int32 number of tokens in each text.
      size: maximum number of tokens to guess (static).

    Returns:
      int32 guessed tokens ``[B, size]``, and their number, int32 ``[B]``.
    """
    length = text_BS.shape[1]
    position_S = jnp.arange(length, dtype=jnp.int32)
    matched_BS = jnp.zeros(text_BS.shape, jnp.int32)
    match_BS = position_S < count_B[:, None]
    for i, mask_BS in enumerate(_suffix_matches(text_BS, count_B, _NGRAM)):
        match_BS &= mask_BS & (position_S > i)  # a roll moves the end of the array to its start
        matched_BS += match_BS.astype(jnp.int32)
    # The longest n-gram is most important, then the last occurrence.
    best_BS = jnp.where(matched_BS > 0, matched_BS * length + position_S, -1)
    start_B = jnp.argmax(best_BS, axis=1).astype(jnp.int32)
    index_BK = start_B[:, None] + jnp.arange(size, dtype=jnp.int32)
    drafts_BK = jnp.take_along_axis(text_BS, jnp.minimum(index_BK, length - 1), axis=1)
    found_B = jnp.minimum(count_B - start_B, size)
    return drafts_BK, jnp.where(best_BS.max(1) >= 0, found_B, 0)


def forbid_repeats(
    logits_BV: jax.Array,
    text_BS: jax.Array,
    count_B: jax.Array,
    size: int,
    start_B: jax.Array | int = 0,
) -> jax.Array:
    """Lowers the logits of tokens that would repeat an n-gram of the answer.

    This is ``no_repeat_ngram_size`` of transformers, but it applies only to the generated tokens,
    so an answer may copy its prompt.

    Args:
      logits_BV: fp32.
      text_BS: int32 tokens of prompt and answer.
      count_B: int32 number of tokens in each text.
      size: number of tokens in an n-gram, at least 2 (static).
      start_B: int32 position of the first token of the answer.
    """
    count_B1, first_B1 = count_B[:, None], jnp.reshape(start_B, (-1, 1)) + size - 1
    position_S = jnp.arange(text_BS.shape[1])
    match_BS = (position_S >= first_B1) & (position_S < count_B1)
    match_BS &= functools.reduce(operator.and_, _suffix_matches(text_BS, count_B, size - 1))

    def lower(state):
        """Lowers the logit of every row's first match and removes the match."""
        logits_BV, match_BS = state
        row_B, position_B = jnp.arange(len(match_BS)), jnp.argmax(match_BS, axis=1)
        is_match_B = match_BS[row_B, position_B]
        token_B = jnp.where(is_match_B, text_BS[row_B, position_B], logits_BV.shape[-1])
        logits_BV = logits_BV.at[row_B, token_B].min(_REPEATED, mode="drop")
        return logits_BV, match_BS.at[row_B, position_B].set(False)

    # On a CPU, a scatter of all positions at once would take as long as the decoder's step.
    return jax.lax.while_loop(lambda state: state[1].any(), lower, (logits_BV, match_BS))[0]


def nucleus(probs_BV: jax.Array, top_p_B: jax.Array | np.ndarray) -> jax.Array:
    """Returns the mask of the nucleus (Holtzman et al., 2020).

    The nucleus is the smallest set of most probable tokens whose total probability reaches
    ``top_p``. The smallest probability in the nucleus is found by bisection, because sorting the
    vocabulary on a CPU would take longer than the decoder's step. Ties with the least probable
    token are included.
    """

    def halve(_, bounds):
        low_B, high_B = bounds
        middle_B = (low_B + high_B) / 2
        mass_B = jnp.where(probs_BV >= middle_B[:, None], probs_BV, 0.0).sum(-1)
        reached_B = mass_B >= top_p_B
        return jnp.where(reached_B, middle_B, low_B), jnp.where(reached_B, high_B, middle_B)

    bounds = jnp.zeros_like(top_p_B), jnp.ones_like(top_p_B)
    low_B, _ = jax.lax.fori_loop(0, _BISECTIONS, halve, bounds)
    best_BV = probs_BV >= probs_BV.max(-1, keepdims=True)
    return (probs_BV >= low_B[:, None]) | best_BV


def _sample(logits_BV: jax.Array, sampling: Sampling, step_B: jax.Array) -> jax.Array:
    temperature_B = jnp.maximum(sampling.temperature_B, 1e-6)
    scaled_BV = logits_BV / temperature_B[:, None]
    unrestricted_B = (sampling.top_p_B >= 1.0) | (sampling.temperature_B <= 0.0)

    def find_nucleus() -> jax.Array:
        probs_BV = jax.nn.softmax(scaled_BV, axis=-1)
        return nucleus(probs_BV, sampling.top_p_B) | unrestricted_B[:, None]

    # Bisection reads the vocabulary forty times, so it is skipped if no row needs it.
    all_tokens = functools.partial(jnp.ones, logits_BV.shape, bool)
    keep_BV = jax.lax.cond(unrestricted_B.all(), all_tokens, find_nucleus)

    def noise(seed, step):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return jax.random.gumbel(key, logits_BV.shape[-1:], jnp.float32)

    noise_BV = jax.vmap(noise)(sampling.seed_B, step_B)
    drawn_B = jnp.argmax(jnp.where(keep_BV, scaled_BV + noise_BV, _MASKED), axis=-1)
    return jnp.where(sampling.temperature_B > 0.0, drawn_B, jnp.argmax(logits_BV, axis=-1))


def choose(
    logits_BV: jax.Array, sampling: Sampling, step_B: jax.Array, *, greedy: bool
) -> jax.Array:
    """Returns the next token, int32 ``[B]``.

    A row's sample depends only on its logits, its seed and ``step_B`` (its number of generated
    tokens). With ``greedy`` (static), the program ignores the temperatures and does not sample.
    """
    if greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return _sample(logits_BV, sampling, step_B).astype(jnp.int32)


def describe(
    logits_BV: jax.Array, tokens_B: jax.Array | np.ndarray, details: Details
) -> dict[str, jax.Array]:
    """Describes the distribution before temperature, top-p and grammar.

    Returns:
      The values that ``details`` requests: ``logprob`` fp32 [B], ``top_ids`` int32 [B, k],
      ``top_logprobs`` fp32 [B, k], and ``entropy`` fp32 [B] in nats.
    """
    if not details.distribution:
        return {}
    logprobs_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    values = {"logprob": jnp.take_along_axis(logprobs_BV, tokens_B[:, None], axis=-1)[:, 0]}
    if details.top_logprobs:
        values["top_logprobs"], ids = jax.lax.top_k(logprobs_BV, details.top_logprobs)
        values["top_ids"] = ids.astype(jnp.int32)
    if details.entropy:
        probs_BV = jnp.exp(logprobs_BV)
        values["entropy"] = -jnp.where(probs_BV > 0, probs_BV * logprobs_BV, 0.0).sum(-1)
    return values
