"""Supervised examples: tokenized conversations, and the tokens that the student predicts.

The code of inference (`integration_messages` and the chat template) renders the conversations, so
that training and inference have the same prompts. The loss is only on the teacher's decisions y_t
(CIRAG, equation 8); instruction, question and observations are context. The token that ends a
decision is supervised, too, because the student must learn to stop.
"""

import bisect
import collections
import enum
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cirag_jax.distill.trajectories import UNCLEAR
from cirag_jax.errors import UserError
from cirag_jax.llm.chat import ChatTokenizer, PromptError
from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag import compact, prompts
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Trajectory


class Part(enum.IntEnum):
    """The part of the output that a supervised token belongs to.

    ``RATIONALE`` is the thought r_t, ``QUESTION`` the next query, ``STOP`` the text that replaces
    the next query in the last round, and ``ANSWER`` the answer of a reader or of any other role.
    """

    NONE = 0
    RATIONALE = 1
    FACTS = 2
    QUESTION = 3
    ANSWER = 4
    STOP = 5


class Example(NamedTuple):
    """One conversation.

    Attributes:
      tokens_T: int32 ids of the complete conversation, including the chat template.
      weight_T: float32 loss weight of each token as a target; 0 if it is not supervised.
      part_T: uint8, the `Part` of each supervised token; 0 for other tokens.
      source: id of the question or passage of the conversation.
    """

    tokens_T: np.ndarray
    weight_T: np.ndarray
    part_T: np.ndarray
    source: str


# Splits a turn into parts; returns ascending pairs (index of the first character, part) from 0 on.
Split = Callable[[str], Sequence[tuple[int, Part]]]


class UnstableTemplateError(ValueError):
    """The chat template renders a turn differently when another turn follows."""


def chat_examples(
    tokenizer: ChatTokenizer,
    turns: Sequence[Message],
    supervised: Collection[int],
    *,
    source: str = "",
    split: Split | None = None,
) -> Example:
    """Returns a conversation, up to its last supervised turn, as one example.

    The text and the end token of supervised turns are targets. The tokens before a supervised turn
    equal the prompt from ``tokenizer.encode_prompt``. ``supervised`` are indices of at least one
    assistant turn. ``split`` splits a turn into parts; by default it is one part, `Part.FACTS`.

    Raises:
      UnstableTemplateError: several turns are supervised, and the prompt of a later turn does not
        begin with the prompt of an earlier turn.
      PromptError: the chat template does not accept the conversation.
    """
    places = sorted(supervised)
    if not places or any(turns[place].role != "assistant" for place in places):
        raise ValueError("supervised must list at least one turn, and only assistant turns")
    tokens_T, spans = _render(tokenizer, turns, places)
    weight_T = np.zeros(len(tokens_T), np.float32)
    part_T = np.zeros(len(tokens_T), np.uint8)
    for place, (start, end) in zip(places, spans, strict=True):
        weight_T[start:end] = 1.0
        parts = split(turns[place].text) if split else ((0, Part.FACTS),)
        for first, part in _token_parts(tokenizer, tokens_T[start:end], parts):
            part_T[start + first : end] = part
    return Example(tokens_T, weight_T, part_T, source)


def trajectory_examples(
    tokenizer: ChatTokenizer,
    trajectory: Trajectory,
    *,
    normalization: Normalization,
    prompt_format: str,
    few_shot: bool,
    max_length: int,
    units: compact.Units = "triple",
    weights: Mapping[Part, float] | None = None,
) -> tuple[list[Example], dict[str, int]]:
    """Returns the examples of a trajectory.

    There is a single example in which all decisions are supervised; or one example per step, if
    ``prompt_format="paper"`` or if the chat template renders earlier turns differently (some
    templates drop the thinking).

    Unclear decisions (`distill.trajectories.UNCLEAR`) are context and not supervised. Steps beyond
    ``max_length`` tokens are dropped. An example is dropped if its first decision does not fit.
    Decisions are never cut.

    Args:
      tokenizer: tokenizer of the student.
      trajectory: trajectory of the teacher.
      normalization: normalization of triples.
      prompt_format: as in `methods.cirag.prompts.integration_messages`.
      few_shot: whether the prompt contains the worked example.
      max_length: maximum tokens of an example.
      units: the kind of candidates.
      weights: loss weight per token of each part, by default 1.

    Returns:
      The examples, and five counts. ``dropped_no_steps``: trajectories without steps.
      ``split_turns``: trajectories with one example per step because of the template.
      ``dropped_too_long``: dropped examples. ``cut_trajectories``: trajectories with dropped steps.
      ``cut_steps``: dropped steps.
    """
    reasons: collections.Counter[str] = collections.Counter()
    steps = trajectory.steps
    while steps and steps[-1].notes.get(UNCLEAR):
        steps = steps[:-1]
    if not steps:
        return [], {"dropped_no_steps": 1}

    def turns(count: int) -> list[Message]:
        """Returns the conversation that ends with decision ``count``."""
        messages = prompts.integration_messages(
            trajectory.question,
            steps[: count - 1],
            steps[count - 1].candidates,
            normalization=normalization,
            prompt_format=prompt_format,
            few_shot=few_shot,
            units=units,
        )
        decision = prompts.render_decision(steps[count - 1], normalization, prompt_format)
        return [*messages, Message("assistant", prompts.prompt_of(prompt_format).write(decision))]

    def render(count: int, decisions: int) -> Example:
        """Renders ``turns(count)``; supervises the clear decisions among the last ``decisions``."""
        conversation = turns(count)
        first = len(conversation) - 2 * decisions + 1
        places = [
            first + 2 * index
            for index, step in enumerate(steps[count - decisions : count])
            if not step.notes.get(UNCLEAR)
        ]
        example = chat_examples(
            tokenizer, conversation, places, source=trajectory.question_id, split=split
        )
        return weighted(example, weights or {})

    split = compact_parts if prompt_format == "compact" else decision_parts
    if prompt_format != "paper":
        try:
            example = _shortened(render(len(steps), len(steps)), max_length, reasons)
            return ([] if example is None else [example]), dict(reasons)
        except UnstableTemplateError:
            reasons["split_turns"] += 1
    clear = [index for index, step in enumerate(steps) if not step.notes.get(UNCLEAR)]
    examples = [render(index + 1, 1) for index in clear]
    kept = [example for example in examples if len(example.tokens_T) <= max_length]
    reasons["dropped_too_long"] += len(examples) - len(kept)
    return kept, {name: count for name, count in reasons.items() if count}


def weighted(example: Example, weights: Mapping[Part, float]) -> Example:
    """Returns the example with the given loss weights of some parts."""
    weight_T = example.weight_T.copy()
    for part, weight in weights.items():
        weight_T[example.part_T == part] = weight
    return example._replace(weight_T=weight_T)


def _shortened(
    example: Example, max_length: int, reasons: collections.Counter[str]
) -> Example | None:
    """Cuts an example after the last decision that fits; returns None if no decision fits."""
    if len(example.tokens_T) <= max_length:
        return example
    supervised = example.weight_T > 0
    ends = np.flatnonzero(supervised & ~np.append(supervised[1:], False)) + 1
    fitting = ends[ends <= max_length]
    if not len(fitting):
        reasons["dropped_too_long"] += 1
        return None
    reasons["cut_trajectories"] += 1
    reasons["cut_steps"] += len(ends) - len(fitting)
    end = int(fitting[-1])
    return Example(
        example.tokens_T[:end], example.weight_T[:end], example.part_T[:end], example.source
    )


def decision_parts(text: str) -> list[tuple[int, Part]]:
    """Splits a decision into its sections; see `Split`. A section begins with its header.

    Searches from the end, because a thought may contain headers. Facts and question are single
    lines (see `prompts.render_decision`).
    """
    write = prompts.PROMPT.write
    _, facts, question = (write(f"\n\n[[## {name} ##]]\n") for name in prompts.HEADERS)
    at_question = text.rfind(question)
    at_facts = text.rfind(facts, 0, max(at_question, 0))
    if at_facts < 0:
        raise ValueError("the text is not a rendered decision")
    ends = text[at_question + len(question) :].strip() == write(prompts.NO_QUESTION).strip()
    last = Part.STOP if ends else Part.QUESTION
    return [(0, Part.RATIONALE), (at_facts + 2, Part.FACTS), (at_question + 2, last)]


def compact_parts(text: str) -> list[tuple[int, Part]]:
    """Splits a compact decision into its lines; see `Split`."""
    start = text.index(compact.PROMPT.write("\nNext:")) + 1
    ends = text[start:] == compact.PROMPT.write(compact.LAST_LINE)
    last = Part.STOP if ends else Part.QUESTION
    return [(0, Part.FACTS), (start, last)]


def _render(
    tokenizer: ChatTokenizer, turns: Sequence[Message], places: Sequence[int]
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Returns the tokens, and the span [start, end) of each supervised turn.

    Spans include the end token. It is the first end token in a turn, because `ChatTokenizer`
    encodes end tokens in a text as ordinary text.
    """
    prefixes = [tokenizer.encode_prompt(turns[:place]) for place in places]
    try:
        tokens_T = tokenizer.encode_prompt(turns[: places[-1] + 1])
    except PromptError:  # The template has no prompt after this turn.
        tokens_T = np.zeros(0, np.int32)
    spans = []
    for place, prefix in zip(places, prefixes, strict=True):
        start = len(prefix)
        ends = np.flatnonzero(np.isin(tokens_T[start:], list(tokenizer.eos_ids)))
        end = start + int(ends[0]) if len(ends) else start
        extends = len(ends) and np.array_equal(tokens_T[:start], prefix)
        # Some tokenizers first compose characters (NFC).
        decoded, text = (
            unicodedata.normalize("NFC", text)
            for text in (tokenizer.decode(tokens_T[start:end], True), turns[place].text)
        )
        if not extends or decoded != text:
            break
        spans.append((start, end + 1))
    if len(spans) == len(places):
        return tokens_T[: spans[-1][1]], spans
    if len(places) > 1:
        raise UnstableTemplateError("the chat template rewrites earlier turns")
    # Either the template adds text to the turn, or it has no end token.
    (prefix,), text = prefixes, turns[places[0]].text
    tokens_T = _completed(tokenizer, prefix, text)
    return tokens_T, [(len(prefix), len(tokens_T))]


def continued_example(
    tokenizer: ChatTokenizer, messages: Sequence[Message], target: str
) -> tuple[np.ndarray, int]:
    """Returns the tokens of a last turn that ``target`` continues, and the target's first place."""
    prefix = tokenizer.encode_prompt(messages, continue_final=True)
    return _completed(tokenizer, prefix, target), len(prefix)


def _completed(tokenizer: ChatTokenizer, prefix: np.ndarray, text: str) -> np.ndarray:
    parts = [prefix, tokenizer.encode(text), [_end_of_turn(tokenizer)]]
    return np.concatenate(parts).astype(np.int32)


def _end_of_turn(tokenizer: ChatTokenizer) -> int:
    eos_id = tokenizer.tokenizer.eos_token_id
    if eos_id is None and not tokenizer.eos_ids:
        raise UserError("the tokenizer of the student has no end-of-turn token")
    return int(min(tokenizer.eos_ids) if eos_id is None else eos_id)


def _token_parts(
    tokenizer: ChatTokenizer, ids: np.ndarray, parts: Sequence[tuple[int, Part]]
) -> list[tuple[int, Part]]:
    """Returns (first token, part) for each part, by bisection on the decoded text."""

    def decoded_length(last: int) -> int:
        # Incomplete characters decode to replacement characters.
        return len(tokenizer.decode(ids[: last + 1], True).rstrip("\ufffd"))

    text_tokens = range(len(ids) - 1)  # The end token has no text.
    return [
        (bisect.bisect_right(text_tokens, character, key=decoded_length), part)
        for character, part in parts
    ]
