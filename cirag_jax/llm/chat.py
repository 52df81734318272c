"""Conversations as tokens: the model's own tokenizer and chat template, and prompts that fit."""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cirag_jax.errors import UserError, parsing
from cirag_jax.io import cache_folder, read_object, replacing, write_json
from cirag_jax.llm.types import Message

log = logging.getLogger(__name__)

OMITTED = "[omitted]"
Overflow = Literal["error", "truncate"]

# Tokens that end an assistant's turn, by family. One counts only where the template writes it.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>")


class PromptError(UserError):
    """A conversation that cannot be given to the model: one sentence, for this request alone."""


class PromptTooLong(PromptError):
    """A prompt with more tokens than there is room for."""


class ChatTokenizer:
    """A fast tokenizer with its chat template and its ends of turn.

    Special tokens that stand in a message's text (a passage that quotes ``<|im_end|>``) are encoded
    as ordinary text: only the template opens and closes turns.

    Attributes:
      tokenizer: the ``transformers`` tokenizer.
      eos_ids: tokens that end the assistant's turn.
      pad_id: token to pad with; never looked at by the model.
      vocab_size: tokens of the tokenizer, added ones included; the model may have more rows.
    """

    def __init__(self, tokenizer: Any, extra_eos_ids: Sequence[int] = ()):
        """``tokenizer``: a fast one; ``extra_eos_ids``: of generation_config.json."""
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.eos_ids = frozenset(_eos_ids(tokenizer, extra_eos_ids))
        pad = tokenizer.pad_token_id
        self.pad_id = int(min(self.eos_ids, default=0) if pad is None else pad)
        self._system_in_template: bool | None = None
        self._pieces: dict[int, str] = {}
        anchor = tokenizer.encode("a", add_special_tokens=False)
        self._anchor = [int(anchor[-1])] if anchor else []
        self._anchor_text = self._decode(self._anchor)
        if not tokenizer.chat_template:
            log.warning(
                "The tokenizer has no chat template: turns are joined by newlines, without roles."
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ChatTokenizer":
        """Reads the tokenizer of a model folder or of a ``.gguf`` file; no network, no remote code.

        Converting a GGUF's tokenizer takes seconds, so the result is kept in the user's cache
        (``CIRAG_JAX_CACHE``, as for compiled programs), under a hash of the file.
        """
        path = Path(path)
        if path.suffix == ".gguf":
            return _load_gguf(path)
        if not path.is_dir():
            raise UserError(f"{path} is neither a model folder nor a .gguf file.")
        with parsing(f"{path} has no tokenizer that can be read"):
            return cls(_open_tokenizer(path), _generation_eos_ids(path))

    # ------------------------------------------------------------------------------------ encoding

    def encode_prompt(
        self, messages: Sequence[Message], continue_final: bool = False
    ) -> np.ndarray:
        """Tokens (int32 ``[S]``) of a conversation, up to where the assistant's new text begins.

        System turns of a model without them (Gemma) become the start of the first user turn. With
        ``continue_final`` the last turn is the assistant's and stays open, so that generation goes
        on with it; an empty one is the same as none.

        Raises:
          PromptError: there is no turn, ``continue_final`` without a final assistant turn, or the
            template refuses the conversation.
        """
        text_parts = [(message.role, message.text) for message in messages]
        return self._encode_turns(text_parts, continue_final)

    def _encode_turns(self, turns: list[tuple[str, str]], continue_final: bool) -> np.ndarray:
        if not turns:
            raise PromptError("the conversation has no messages")
        if continue_final and turns[-1][0] != "assistant":
            raise PromptError("continue_final needs a final assistant message to go on with")
        if continue_final and not turns[-1][1]:
            turns, continue_final = turns[:-1], False
            if not turns:
                raise PromptError("the conversation has no messages before the one to go on with")
        if not self.tokenizer.chat_template:
            return self._encode_plain(turns)
        if not self._takes_system():
            turns = _fold_system(turns)
        return np.asarray(self._render(turns, continue_final), np.int32)

    def _encode_plain(self, turns: list[tuple[str, str]]) -> np.ndarray:
        ids = self._encode_text(plain_text(turns), closed=True)
        while ids and ids[-1] in self.eos_ids:  # some tokenizers close every text
            ids.pop()
        return np.asarray(ids, np.int32)

    def _render(self, turns: list[tuple[str, str]], continue_final: bool) -> list[int]:
        import jinja2

        try:
            return self.tokenizer.apply_chat_template(
                [{"role": role, "content": text} for role, text in turns],
                add_generation_prompt=not continue_final,
                continue_final_message=continue_final,
                sanitize_control_tokens=True,
                return_dict=False,
            )
        except (jinja2.TemplateError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise PromptError(
                f"the model's chat template refuses the conversation: {reason}"
            ) from None

    def _takes_system(self) -> bool:
        """Whether the template writes a system turn; some drop it, some raise."""
        if self._system_in_template is None:
            mark = "zqsystemzq"
            try:
                ids = self._render([("system", mark), ("user", "a")], False)
                self._system_in_template = mark in self.tokenizer.decode(ids)
            except PromptError:
                self._system_in_template = False
        return self._system_in_template

    def encode(self, text: str) -> np.ndarray:
        """Tokens of plain text without special tokens around it: int32 ``[S]``."""
        return np.asarray(self._encode_text(text), np.int32)

    def _encode_text(self, text: str, closed: bool = False) -> list[int]:
        """Text in which special tokens are ordinary text; ``closed``: with the tokenizer's own
        around it.
        """
        return self.tokenizer.encode(text, add_special_tokens=closed, split_special_tokens=True)

    # ------------------------------------------------------------------------------------ decoding

    def _decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def decode(self, ids: Sequence[int] | np.ndarray, continuing: bool = False) -> str:
        """The text of tokens, special ones left out, spaces as they are.

        With ``continuing`` the tokens go on with a text: SentencePiece tokenizers otherwise drop
        the space before the first word.
        """
        ids = [int(i) for i in ids]
        if not continuing:
            return self._decode(ids, skip_special=True)
        text = self._decode([*self._anchor, *ids], skip_special=True)
        return text.removeprefix(self._anchor_text)

    def piece(self, token_id: int) -> str:
        """Surface form of one token, its space and special tokens included."""
        token_id = int(token_id)
        if token_id not in self._pieces:
            text = self._decode([*self._anchor, token_id])
            self._pieces[token_id] = text.removeprefix(self._anchor_text)
        return self._pieces[token_id]


def plain_text(turns: Sequence[tuple[str, str]]) -> str:
    """The turns (role, text) of a conversation as one text, for models without a chat template."""
    return "\n".join(text for _, text in turns if text)


def _fold_system(turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Moves system texts to the start of the first user turn."""
    system = [text for role, text in turns if role == "system" and text]
    rest = [turn for turn in turns if turn[0] != "system"]
    if not system:
        return rest
    for index, (role, text) in enumerate(rest):
        if role == "user":
            rest[index] = (role, "\n\n".join([*system, text]))
            return rest
    return [("user", "\n\n".join(system)), *rest]


def _eos_ids(tokenizer: Any, extra: Sequence[int]) -> set[int]:
    ids = {int(i) for i in extra}
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    template = tokenizer.chat_template or ""
    template = template if isinstance(template, str) else json.dumps(template)
    vocabulary = tokenizer.get_added_vocab()
    ids.update(vocabulary[t] for t in _TURN_ENDS if t in vocabulary and t in template)
    return ids


# ----------------------------------------------------------------------------- prompts that fit


def fit_prompt(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    limit: int,
    overflow: Overflow = "error",
    continue_final: bool = False,
) -> tuple[np.ndarray, int]:
    """Tokens of a conversation that fits, and how many observations were left out of it.

    ``overflow`` is ``error``, or ``truncate`` to replace `Message.observation` parts by
    ``[omitted]``, oldest first, until the rest fits; `Message.content` is never touched. The tokens
    are int32 ``[S]`` with ``S <= limit``.

    Raises:
      PromptTooLong: it does not fit, whatever may be left out; the message gives the numbers.
      PromptError: the conversation itself cannot be encoded.
    """
    ids = tokenizer.encode_prompt(messages, continue_final)
    if len(ids) <= limit:
        return ids, 0
    long = f"the prompt has {len(ids)} tokens but only {limit} fit"
    if overflow == "error":
        raise PromptTooLong(long)
    # The shortest prompt with enough left out is found by bisection: every try encodes it all.
    order = [i for i, message in enumerate(messages) if message.observation]
    if not order:
        raise PromptTooLong(f"{long}, and it has no observations that could be left out")
    shortest = tokenizer.encode_prompt(_without(messages, order), continue_final)
    if len(shortest) > limit:
        raise PromptTooLong(f"{long}, and without its observations {len(shortest)} tokens are left")
    low, high, best = 0, len(order), shortest  # leaving out `low` is too little, `high` enough
    while high - low > 1:
        middle = (low + high) // 2
        ids = tokenizer.encode_prompt(_without(messages, order[:middle]), continue_final)
        if len(ids) <= limit:
            high, best = middle, ids
        else:
            low = middle
    return best, high


def _without(messages: Sequence[Message], indices: Sequence[int]) -> list[Message]:
    dropped = set(indices)
    return [
        dataclasses.replace(message, observation=OMITTED) if index in dropped else message
        for index, message in enumerate(messages)
    ]


# -------------------------------------------------------------------------------------- loading


# Tokenizer classes that add nothing to a tokenizer.json.
_WHOLE_IN_JSON = ("PreTrainedTokenizer", "TokenizersBackend", "GPT2Tokenizer", "Qwen2Tokenizer")


def _open_tokenizer(folder: Path) -> Any:
    opener = _tokenizer_class(folder)
    tokenizer = opener.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{folder} has only a slow tokenizer; save it with a tokenizer.json.")
    return tokenizer


def _tokenizer_class(folder: Path) -> Any:
    """AutoTokenizer imports torch (seconds of every command's start); often it is not needed."""
    file = folder / "tokenizer_config.json"
    if file.is_file() and (folder / "tokenizer.json").is_file():
        name = read_object(file).get("tokenizer_class")
        if str(name).removesuffix("Fast") in _WHOLE_IN_JSON:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _generation_eos_ids(folder: Path) -> list[int]:
    """Ends of turn that the model's own generation settings name."""
    path = folder / "generation_config.json"
    value = read_object(path, optional=True).get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in values):
        raise UserError(f"{path}: field 'eos_token_id' must be a token id or a list of them.")
    return values


def _load_gguf(path: Path) -> ChatTokenizer:
    from cirag_jax.models.io import fingerprint, gguf_weights

    if not path.is_file():
        raise UserError(f"{path} cannot be read: there is no such file.")
    cache, version = cache_folder("tokenizers"), importlib.metadata.version("transformers")
    folder = cache / f"6-{version}-{fingerprint.digest(str(path))}" if cache else None
    if folder is not None and (folder / "tokenizer.json").is_file():
        with contextlib.suppress(UserError):  # a damaged copy is made again
            return ChatTokenizer.load(folder)
    source = gguf_weights.open_gguf(path)
    tokenizer = gguf_weights.tokenizer_from_gguf(source)
    end_of_turn = source.metadata.get("tokenizer.ggml.eot_token_id")
    extra = [] if end_of_turn is None else [int(end_of_turn)]
    if folder is not None:
        with contextlib.suppress(OSError):  # a read-only home costs time, nothing else
            folder.parent.mkdir(parents=True, exist_ok=True)
            with replacing(folder) as aside:
                tokenizer.save_pretrained(str(aside))
                write_json(aside / "generation_config.json", {"eos_token_id": extra})
    return ChatTokenizer(tokenizer, extra)
