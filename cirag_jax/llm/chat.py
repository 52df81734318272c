"""Tokenization of conversations with a model's chat template, and truncation to the context."""

import bisect
import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers

from cirag_jax.errors import UserError, parsing
from cirag_jax.io import (
    cache_folder,
    read_object,
    replace_surrogates,
    replacing,
    write_json,
)
from cirag_jax.llm.types import Message

log = logging.getLogger(__name__)

OMITTED = "[omitted]"
Overflow = Literal["error", "truncate"]

# Tokens that end an assistant's turn in some model family, if the chat template contains them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>")


class PromptError(UserError):
    """A conversation cannot be encoded; only the request with this conversation fails."""


class PromptTooLong(PromptError):
    """A prompt has more tokens than fit."""


class ChatTokenizer:
    """A fast tokenizer with its chat template and its end-of-turn tokens.

    A special token in a message's text (a passage that quotes ``<|im_end|>``) is encoded as
    ordinary text, so only the template opens and closes turns.

    Attributes:
      tokenizer: the ``transformers`` tokenizer.
      eos_ids: tokens that end the assistant's turn.
      pad_id: padding token, which is always masked.
      vocab_size: number of tokens, including added tokens; the model's output layer may have more
        rows.
    """

    def __init__(
        self,
        tokenizer: Any,
        extra_eos_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        """Wraps a fast tokenizer.

        Args:
          tokenizer: the ``transformers`` tokenizer.
          extra_eos_ids: ends of turns in generation_config.json.
          template_kwargs: variables of the chat template, such as ``enable_thinking``.
        """
        self.tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self.vocab_size = len(tokenizer)
        self.eos_ids = frozenset(_eos_ids(tokenizer, extra_eos_ids))
        pad = tokenizer.pad_token_id
        self.pad_id = int(min(self.eos_ids, default=0) if pad is None else pad)
        self._has_system_turns: bool | None = None
        self._pieces: dict[int, str] = {}
        anchor = tokenizer.encode("a", add_special_tokens=False)
        self._anchor = [int(anchor[-1])] if anchor else []
        self._anchor_text = self._decode(self._anchor)
        if not tokenizer.chat_template:
            log.warning("The tokenizer has no chat template; turns are joined by newlines.")

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], template_kwargs: Mapping[str, Any] | None = None
    ) -> "ChatTokenizer":
        """Reads the tokenizer of a model folder or of a ``.gguf`` file, without network access.

        Converting a GGUF tokenizer takes seconds, so the result is stored in the user's cache
        folder (``CIRAG_JAX_CACHE``), under a hash of the file.
        """
        path = Path(path)
        if path.suffix == ".gguf":
            return _load_gguf(path, template_kwargs)
        if not path.is_dir():
            raise UserError(f"{path} is neither a model folder nor a .gguf file.")
        with parsing(f"{path} has no readable tokenizer"):
            tokenizer = cls(_open_tokenizer(path), _generation_eos_ids(path), template_kwargs)
            tokenizer.encode("")  # Copies the tokenizer, which fails if its ids are inconsistent.
            return tokenizer

    def encode_prompt(
        self, messages: Sequence[Message], continue_final: bool = False
    ) -> np.ndarray:
        """Returns the tokens (int32 ``[S]``) that precede the assistant's new text.

        If the template has no system turns (Gemma), system texts are prepended to the first user
        turn. With ``continue_final``, the last turn is an assistant turn and stays open, so
        generation continues this turn. If the last turn is empty, it is ignored.

        Raises:
          PromptError: there are no messages, ``continue_final`` is set without a final assistant
            turn, or the template rejects the conversation.
        """
        turns = [(message.role, replace_surrogates(message.text)) for message in messages]
        return self._encode_turns(turns, continue_final)

    def _encode_turns(self, turns: list[tuple[str, str]], continue_final: bool) -> np.ndarray:
        if not turns:
            raise PromptError("the conversation has no messages")
        if continue_final and turns[-1][0] != "assistant":
            raise PromptError("continue_final needs a final assistant message to continue")
        if continue_final and not turns[-1][1]:
            turns, continue_final = turns[:-1], False
            if not turns:
                raise PromptError("the conversation has no messages before the one to continue")
        if not self.tokenizer.chat_template:
            return self._encode_plain(turns)
        if not self._supports_system():
            turns = _fold_system(turns)
        return np.asarray(self._render(turns, continue_final), np.int32)

    def _encode_plain(self, turns: list[tuple[str, str]]) -> np.ndarray:
        ids = self._encode_text(plain_text(turns), closed=True)
        while ids and ids[-1] in self.eos_ids:  # some tokenizers end every text with EOS
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
                **self._template_kwargs,
            )
        except (jinja2.TemplateError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise PromptError(f"the chat template rejects the conversation: {reason}") from None

    def _supports_system(self) -> bool:
        """Returns whether the template supports system turns; some drop them or raise an error."""
        if self._has_system_turns is None:
            marker = "zqsystemzq"
            try:
                ids = self._render([("system", marker), ("user", "a")], False)
                self._has_system_turns = marker in self.tokenizer.decode(ids)
            except PromptError:
                self._has_system_turns = False
        return self._has_system_turns

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of plain text, without special tokens around it: int32 ``[S]``."""
        return np.asarray(self._encode_text(text), np.int32)

    def _encode_text(self, text: str, closed: bool = False) -> list[int]:
        """Encodes ``text`` as ordinary text; ``closed`` adds the tokenizer's special tokens."""
        return self._plain_tokenizer.encode(replace_surrogates(text), add_special_tokens=closed).ids

    @functools.cached_property
    def _plain_tokenizer(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that encodes special tokens as ordinary text.

        Changing this setting of ``tokenizer`` for a call would change the calls of other threads.
        """
        copied = copy.deepcopy(self.tokenizer.backend_tokenizer)
        copied.encode_special_tokens = True
        return copied

    @functools.cached_property
    def documents(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that reads and writes special tokens, for other threads.

        `transformers` changes the settings of ``tokenizer``, which fails while a thread uses it.
        """
        copied = copy.deepcopy(self.tokenizer.backend_tokenizer)
        copied.no_truncation()
        copied.no_padding()
        return copied

    def encode_document(self, text: str) -> list[int]:
        """Returns the tokens of a text with its special tokens, after the start of a text if any.

        Threads may call this function at the same time.
        """
        ids = self.documents.encode(replace_surrogates(text)).ids
        return ids[:-1] if self._ends_documents else ids

    @functools.cached_property
    def _ends_documents(self) -> bool:
        """Whether the tokenizer adds an end to every text."""
        ids = self.documents.encode("a").ids
        return bool(ids) and ids[-1] in self.eos_ids

    def _decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def decode(self, ids: Sequence[int] | np.ndarray, continuing: bool = False) -> str:
        """Returns the text of tokens, without special tokens.

        ``continuing`` means that the tokens continue a text; without it, SentencePiece tokenizers
        drop the space before the first word.
        """
        ids = [int(i) for i in ids]
        if not continuing:
            return self._decode(ids, skip_special=True)
        text = self._decode([*self._anchor, *ids], skip_special=True)
        return text.removeprefix(self._anchor_text)

    def piece(self, token_id: int) -> str:
        """Returns the text of one token with its leading space; the token may be special."""
        token_id = int(token_id)
        if token_id not in self._pieces:
            text = self._decode([*self._anchor, token_id])
            self._pieces[token_id] = text.removeprefix(self._anchor_text)
        return self._pieces[token_id]


def plain_text(turns: Sequence[tuple[str, str]]) -> str:
    """Joins the turns (role, text) of a conversation, for models without a chat template."""
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


def fit_prompt(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    limit: int,
    overflow: Overflow = "error",
    continue_final: bool = False,
    room: int = 0,
) -> tuple[np.ndarray, int]:
    """Returns at most ``limit`` tokens (int32 ``[S]``), and the number of shortened observations.

    With ``overflow="truncate"``, observations are shortened until the conversation fits, see
    `shorten`, and leaves ``room`` tokens of the limit if possible. With ``"error"`` nothing is
    omitted.

    Raises:
      PromptTooLong: the conversation does not fit.
      PromptError: the conversation cannot be encoded.
    """
    ids = tokenizer.encode_prompt(messages, continue_final)
    if len(ids) <= limit - room:
        return ids, 0
    problem = f"the prompt has {len(ids)} tokens but only {limit} fit"
    total = observation_length(messages) if overflow == "truncate" else 0
    if not total:
        if len(ids) <= limit:
            return ids, 0
        more = ", and it has no observations to omit" if overflow == "truncate" else ""
        raise PromptTooLong(problem + more)

    def encode(num_chars: int) -> np.ndarray:
        return tokenizer.encode_prompt(shorten(messages, num_chars)[0], continue_final)

    shortest = encode(total)
    if len(shortest) > limit:
        raise PromptTooLong(f"{problem}; without observations, {len(shortest)} tokens remain")
    limit = max(limit - room, len(shortest))
    step = max(1, total // 1024)  # a finer search encodes the prompt more often
    lengths = [*range(step, total, step), total]
    num_chars = lengths[bisect.bisect_left(lengths, True, key=lambda n: len(encode(n)) <= limit)]
    return encode(num_chars), shorten(messages, num_chars)[1]


def observation_length(messages: Sequence[Message]) -> int:
    """Returns the number of characters that `shorten` can remove."""
    return sum(len(_kept(message)) for message in messages)


def shorten(messages: Sequence[Message], num_chars: int) -> tuple[tuple[Message, ...], int]:
    """Removes about ``num_chars`` characters of observations, and counts the shortened ones.

    Oldest messages are shortened first, each from its end, so that the last passages go first. A
    text is cut between words, and ``[omitted]`` marks the cut.
    """
    shortened: list[Message] = []
    count = 0
    for message in messages:
        kept = _kept(message)
        if num_chars > 0 and kept:
            length = max(0, len(kept) - num_chars)
            num_chars -= len(kept) - length
            kept, count = _cut(kept, length), count + 1
            rest = f"{kept} {OMITTED}" if kept else OMITTED
            message = dataclasses.replace(message, observation=rest)
        shortened.append(message)
    return tuple(shortened), count


def _kept(message: Message) -> str:
    """Returns the observation without the mark of an earlier cut."""
    return message.observation.removesuffix(OMITTED).rstrip()


def _cut(text: str, length: int) -> str:
    """Returns at most ``length`` characters, up to the last space if there is one nearby."""
    start = max(0, length - 40)
    words, space, _ = text[start : length + 1].rpartition(" ")
    return (text[:start] + words if space else text[:length]).rstrip()


def token_counter(path: str | os.PathLike[str]) -> Callable[[str], int]:
    """Returns a function that counts the tokens of a text, without special tokens.

    ``path`` is a model folder or a ``.gguf`` file.
    """
    path = Path(path)
    with parsing(f"{path} has no readable tokenizer"):
        is_gguf = path.suffix == ".gguf"
        tokenizer = _load_gguf(path, None).tokenizer if is_gguf else _open_tokenizer(path)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


# Tokenizer classes that a tokenizer.json describes completely.
_PLAIN_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend", "GPT2Tokenizer", "Qwen2Tokenizer")


def _open_tokenizer(folder: Path) -> Any:
    cls = _tokenizer_class(folder)
    tokenizer = cls.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{folder} has no fast tokenizer; save it with a tokenizer.json.")
    return tokenizer


def _tokenizer_class(folder: Path) -> Any:
    """Returns a tokenizer class; avoids AutoTokenizer, because importing torch takes seconds."""
    file = folder / "tokenizer_config.json"
    if file.is_file() and (folder / "tokenizer.json").is_file():
        name = read_object(file).get("tokenizer_class")
        if str(name).removesuffix("Fast") in _PLAIN_CLASSES:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _generation_eos_ids(folder: Path) -> list[int]:
    """Returns the end-of-turn tokens of the model's generation_config.json."""
    path = folder / "generation_config.json"
    value = read_object(path, optional=True).get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in values):
        raise UserError(f"{path}: field 'eos_token_id' must be a token id or a list of token ids.")
    return values


def _load_gguf(path: Path, template_kwargs: Mapping[str, Any] | None) -> ChatTokenizer:
    from cirag_jax.models.io import fingerprint, gguf_weights

    if not path.is_file():
        raise UserError(f"{path} does not exist.")
    cache, version = cache_folder("tokenizers"), importlib.metadata.version("transformers")
    folder = cache / f"6-{version}-{fingerprint.model_digest(str(path))}" if cache else None
    if folder is not None and (folder / "tokenizer.json").is_file():
        with contextlib.suppress(UserError):  # a damaged copy is replaced
            return ChatTokenizer.load(folder, template_kwargs)
    source = gguf_weights.open_gguf(path)
    tokenizer = gguf_weights.tokenizer_from_gguf(source)
    end_of_turn = source.metadata.get("tokenizer.ggml.eot_token_id")
    extra = [] if end_of_turn is None else [int(end_of_turn)]
    if folder is not None:
        with contextlib.suppress(OSError):  # the home folder may be read-only
            folder.parent.mkdir(parents=True, exist_ok=True)
            with replacing(folder) as temporary:
                tokenizer.save_pretrained(str(temporary))
                write_json(temporary / "generation_config.json", {"eos_token_id": extra})
    return ChatTokenizer(tokenizer, extra, template_kwargs)
