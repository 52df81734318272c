"""Decoding under a JSON schema, with masks of allowed tokens from the llguidance library."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from cirag_jax.errors import UserError
from cirag_jax.llm.chat import ChatTokenizer

_WORD_BITS = 32
_MAX_SCHEMAS = 128  # Maximum number of compiled schemas in memory.
# With flexible white space, a small model under greedy decoding may never stop writing spaces.
_FIXED_SPACES: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class JsonGrammar:
    """A compiler of JSON schemas for one tokenizer; creating it takes about a second.

    Attributes:
      vocab_size: size V of the model's output layer; tokens unknown to the tokenizer are never
        allowed.
    """

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int | None = None):
        """``vocab_size`` is V, by default the size of the tokenizer."""
        from llguidance import LLTokenizer

        self.vocab_size = vocab_size or tokenizer.vocab_size
        self.eos_ids = tokenizer.eos_ids
        if not self.eos_ids:
            raise UserError("json_schema needs a tokenizer with an end-of-text token.")
        backend = tokenizer.tokenizer.backend_tokenizer
        self._tokenizer = LLTokenizer(
            backend.to_str(),
            n_vocab=max(self.vocab_size, tokenizer.vocab_size),
            eos_token=sorted(self.eos_ids),
            slices=LLTokenizer.json_slices(),
        )
        self._compiled: dict[str, str] = {}

    def start(self, schema: Mapping[str, Any]) -> "GrammarState":
        """Returns the state before the first token of a text that satisfies ``schema``."""
        from llguidance import LLMatcher

        key = json.dumps(schema, sort_keys=False)
        if key not in self._compiled:
            if len(self._compiled) >= _MAX_SCHEMAS:
                self._compiled.clear()
            self._compiled[key] = _compile(schema, self._tokenizer)
        matcher = LLMatcher(self._tokenizer, self._compiled[key], log_level=0)
        if matcher.is_error():
            raise UserError(_bad_schema(matcher.get_error()))
        return GrammarState(matcher, self.vocab_size)


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises `UserError` if ``schema`` cannot be enforced; needs no tokenizer."""
    _compile(schema, None)


def _compile(schema: Mapping[str, Any], tokenizer: Any) -> str:
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_FIXED_SPACES)
        problem, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    except (TypeError, ValueError) as error:
        raise UserError(_bad_schema(str(error))) from None
    if problem:
        raise UserError(_bad_schema(messages[0]))
    return grammar


def _bad_schema(reason: str) -> str:
    return f"json_schema cannot be enforced: {' '.join(reason.split())[:300]}"


class GrammarState:
    """The state of a grammar after the tokens so far; created by `JsonGrammar.start`."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def is_done(self) -> bool:
        """Whether the text is complete, so that only an end-of-turn token may follow."""
        return self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """Returns the allowed next tokens, including an end-of-turn token if the text may end.

        The mask is uint32 ``[ceil(V / 32)]``; token ``v`` is bit ``v % 32`` of word ``v // 32``.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        words = -(-self._vocab_size // _WORD_BITS)
        mask = np.zeros(words, np.uint32)
        mask[: min(words, len(bits))] = bits[:words]
        return mask

    def advance(self, token_id: int) -> None:
        """Adds a token to the text; raises ValueError if `mask` does not allow it."""
        if not self._matcher.consume_token(int(token_id)):
            reason = (self._matcher.get_error().splitlines() or ["?"])[0]
            raise ValueError(f"token {token_id} does not fit the grammar: {reason}")
