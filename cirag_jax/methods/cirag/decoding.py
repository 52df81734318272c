"""Decoding of a language model's decision.

The paper generates the response as free text. Our alternative generates it section by section.
Each function returns the response, and whether generation ended at its token limit.
"""

from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag import prompts
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.runtime.requests import Generate, Generated, Program


def write_decision(messages: tuple[Message, ...], config: CiragConfig) -> Program[tuple[str, bool]]:
    """Returns the integrator's response to ``messages``, and whether it was truncated."""
    if config.prefilled_headers:
        return (yield from _fill_sections(messages, config))
    response: Generated = yield Generate(
        messages,
        "integrator",
        max_tokens=config.decision_tokens,
        stop=prompts.stops(config.prompt_format),
    )
    return response.text, response.finish_reason == "length"


def _fill_sections(messages: tuple[Message, ...], config: CiragConfig) -> Program[tuple[str, bool]]:
    """Generates the sections of a response one by one, each after a prefilled header."""
    text, truncated = "", False
    prompt = prompts.prompt_of(config.prompt_format)
    for section in prompts.sections(config.prompt_format):
        text += prompt.write(section.opening)
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
