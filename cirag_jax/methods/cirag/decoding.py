"""Decoding of a language model's decision.

The paper generates the response as free text. Our alternatives generate the response section by
section, or keep candidates by the probabilities of their numbers. Each function returns the
response, and whether generation ended at its token limit.
"""

import numpy as np

from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag import compact, prompts
from cirag_jax.methods.cirag.decisions import Section
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.runtime.requests import Generate, Generated, Program, Score, Scored


def write_decision(
    messages: tuple[Message, ...], num_candidates: int, config: CiragConfig
) -> Program[tuple[str, bool]]:
    """Returns the integrator's response to ``messages``, and whether it was truncated."""
    if config.keep_above:
        return (yield from _keep_probable(messages, num_candidates, config))
    if config.prefilled_headers:
        return (yield from _fill_sections(messages, config))
    response: Generated = yield Generate(
        messages,
        "integrator",
        max_tokens=config.decision_tokens,
        stop=prompts.stops(config.prompt_format),
    )
    return response.text, response.finish_reason == "length"


def _keep_probable(
    messages: tuple[Message, ...], num_candidates: int, config: CiragConfig
) -> Program[tuple[str, bool]]:
    """Keeps the candidates whose numbers have a probability of at least ``keep_above``."""
    choices = [*map(str, range(1, num_candidates + 1)), compact.NONE]
    scored: Scored = yield Score(
        (*messages, Message("assistant", compact.PROMPT.write(compact.KEEP))),
        tuple(f" {choice}\n" for choice in choices),
        "integrator",
        continue_final=True,
    )
    logprob_N = np.asarray(scored.logprobs, np.float64)
    weight_N = np.exp(logprob_N - logprob_N.max())
    share_N = weight_N / weight_N.sum()
    numbers = choices[:-1]
    kept = [n for n, share in zip(numbers, share_N, strict=False) if share >= config.keep_above]
    text = compact.PROMPT.write(f"{compact.KEEP} {' '.join(kept) or compact.NONE}\n")
    return (yield from _fill_section(messages, text, compact.SECTIONS[1], config))


def _fill_sections(messages: tuple[Message, ...], config: CiragConfig) -> Program[tuple[str, bool]]:
    """Generates the sections of a response one by one, each after a prefilled header."""
    text, truncated = "", False
    for section in prompts.sections(config.prompt_format):
        text, is_cut = yield from _fill_section(messages, text, section, config)
        truncated |= is_cut
    return text, truncated


def _fill_section(
    messages: tuple[Message, ...], text: str, section: Section, config: CiragConfig
) -> Program[tuple[str, bool]]:
    """Appends a section to the response ``text``; the model generates the section's content."""
    text += prompts.prompt_of(config.prompt_format).write(section.opening)
    response: Generated = yield Generate(
        (*messages, Message("assistant", text)),
        "integrator",
        max_tokens=config.decision_tokens or section.max_tokens,
        stop=section.stop,
        continue_final=True,
    )
    text += response.text.rstrip() + section.closing
    return text, response.finish_reason == "length"
