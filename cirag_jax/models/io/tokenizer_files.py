"""Reads the tokenizer of an encoder's folder, and its limit of tokens per text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from cirag_jax.errors import UserError, parsing
from cirag_jax.io import read_object
from cirag_jax.models.embedder import EmbedderConfig
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.io import pretrained_embedder
from cirag_jax.models.io.folders import IMAGE_TOKEN, ConfigFields, check_token_ids


def read_tokenizer(folder: Path, vocab_size: int) -> tokenizers.Tokenizer:
    """Reads a folder's tokenizer, without padding.

    transformers converts slow tokenizers. The end token that ``tokenizer_config.json`` asks for
    (``add_eos_token`` of E5-Mistral) is added if the tokenizer does not add it; transformers 5
    ignores this field. The ids of the tokenizer must be below ``vocab_size``, the number of rows of
    the embedding table.
    """
    file = folder / "tokenizer.json"
    with parsing(f"{folder}: the tokenizer cannot be read"):
        if file.is_file():
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            ).backend_tokenizer
    if (tokenizer.token_to_id(IMAGE_TOKEN) or 0) >= vocab_size:
        tokenizer = _without_image_token(tokenizer)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _add_end_token(tokenizer, folder)
    pair = tokenizer.encode("", "")  # its template may have ids outside the vocabulary
    ids = {**tokenizer.get_vocab(), **dict(zip(pair.tokens, pair.ids, strict=True))}
    check_token_ids(ids, vocab_size, folder)
    return tokenizer


def _without_image_token(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns a tokenizer that reads `IMAGE_TOKEN` as ordinary text."""
    described = json.loads(tokenizer.to_str())
    tokens = [token for token in described["added_tokens"] if token["content"] != IMAGE_TOKEN]
    return tokenizers.Tokenizer.from_str(json.dumps({**described, "added_tokens": tokens}))


def token_text(folder: Path, name: str) -> str | None:
    """Returns a token in ``tokenizer_config.json``, such as ``eos_token``; None if absent."""
    token = read_object(folder / "tokenizer_config.json", optional=True).get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _add_end_token(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    settings = read_object(folder / "tokenizer_config.json", optional=True)
    end, row = token_text(folder, "eos_token"), tokenizer.encode("").tokens
    if settings.get("add_eos_token") is not True or end is None or row[-1:] == [end]:
        return
    if tokenizer.token_to_id(end) is None or len(row) > 1:
        raise UserError(f"{folder}: the tokenizer cannot add its eos_token {end!r} to texts")
    single = [*row, "$A", end]
    tokens = [(token, tokenizer.token_to_id(token)) for token in {*row, end}]
    pair = [*single, *(f"{token}:1" for token in (*row, "$B", end))]
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single=single, pair=pair, special_tokens=tokens
    )


def read_suffix(folder: Path, raw: Mapping[str, Any]) -> str:
    """Returns what the model's code appends to every text: NV-Embed-v2's end token."""
    is_nv_embed = raw["model_type"] == pretrained_embedder.NV_EMBED
    fields = ConfigFields(raw, str(folder / "config.json"))
    if not is_nv_embed or not fields.flag("add_eos", True):
        return ""
    return token_text(folder, "eos_token") or "</s>"


def read_max_length(folder: Path, config: EncoderConfig | EmbedderConfig) -> int:
    """Returns the folder's limit of tokens per text, at most the encoder's maximum.

    As in sentence-transformers, ``max_seq_length`` precedes the tokenizer's ``model_max_length``.
    """
    files = sorted(folder.glob("sentence_*_config.json"))  # such as sentence_bert_config.json
    fields = [(file, "max_seq_length") for file in files]
    fields += [(folder / "tokenizer_config.json", "model_max_length")]
    for file, name in fields:
        limit = read_object(file, optional=True).get(name)
        if limit is None:
            continue
        # transformers writes 1e30 for tokenizers without a limit.
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 1:
            raise UserError(f"{file}: field {name} is {limit!r}; expected a number of tokens")
        return int(min(limit, config.max_length))
    return config.max_length
