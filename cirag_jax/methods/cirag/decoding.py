"""How a language model writes a decision: freely (paper), section by section, or by probability."""

import numpy as np

from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag import compact, prompts
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.runtime.requests import Generate, Generated, Program, Score, Scored


def write_decision(
    messages: tuple[Message, ...], num_candidates: int, config: CiragConfig
) -> Program[tuple[str, bool]]:
    """The integrator's response.

    Returns:
      The text, and whether generation ended at its token limit.
    """
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
    """A compact response that keeps the candidates of at least ``keep_above`` probability."""
    choices = [*map(str, range(1, num_candidates + 1)), compact.NONE]
    scored: Scored = yield Score(
        (*messages, Message("assistant", compact.KEEP)),
        tuple(f" {choice}\n" for choice in choices),
        "integrator",
        continue_final=True,
    )
    logprob_N = np.asarray(scored.logprobs, np.float64)
    weight_N = np.exp(logprob_N - logprob_N.max())
    share_N = weight_N / weight_N.sum()
    *names, _ = choices
    kept = [name for name, p in zip(names, share_N, strict=False) if p >= config.keep_above]
    question = compact.SECTIONS[1]
    text = f"{compact.KEEP} {' '.join(kept) or compact.NONE}\n{question.opening}"
    response: Generated = yield Generate(
        (*messages, Message("assistant", text)),
        "integrator",
        max_tokens=config.decision_tokens or question.max_tokens,
        stop=question.stop,
        continue_final=True,
    )
    return text + response.text.rstrip(), response.finish_reason == "length"


def _fill_sections(messages: tuple[Message, ...], config: CiragConfig) -> Program[tuple[str, bool]]:
    """A response whose headers are given and whose sections are generated one by one."""
    text, truncated = "", False
    for section in prompts.sections(config.prompt_format):
        text += section.opening
        response: Generated = yield Generate(
            (*messages, Message("assistant", text)),
            "integrator",
            max_tokens=config.decision_tokens or section.max_tokens,
            stop=section.stop,
            continue_final=True,
        )
        text += response.text.rstrip() + section.closing
        truncated |= response.finish_reason == "length"
    return text, truncated
