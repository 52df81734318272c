"""Tokenizers with ids beyond the embedding table, which JAX would read as the table's last row."""

import contextlib
import json
import pathlib
from typing import Any

from hypothesis import example
from hypothesis import strategies as st

from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.types import Message
from cirag_jax.models.io.pretrained import load_encoder
from cirag_jax.models.io.pretrained_decoder import check_tokenizer
from tests import tiny, tiny_decoder
from tests.attacks.hostile import TEXTS, attack, attempt

_WORDS = ("<|think|>", "zyx", "日本", "\u0645", " q", "[SEP]", "<|im_end|>")
_IDS = st.integers(-2, 3) | st.integers(300, 340) | st.sampled_from((10**4, 10**6, 2**31, 2**32))
# Where an id or a word is put, the word, and the id.
_CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["add", "added", "vocabulary", "template", "end", "pad", "chat"]),
        st.sampled_from(_WORDS),
        _IDS,
    ),
    min_size=1,
    max_size=3,
)


def _change(folder: pathlib.Path, kind: str, word: str, number: int) -> None:
    """Changes a tokenizer or a config; the embedding table stays the same."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    match kind:
        case "add":
            with contextlib.suppress(Exception):  # An earlier change damaged the file.
                tiny.add_words(folder, *(f"{word}{i}" for i in range(number % 4 + 1)))
            return
        case "added":
            entry = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            entry |= {"id": number, "content": word, "special": number % 2 == 0}
            tokenizer["added_tokens"].append(entry)
        case "vocabulary":
            vocabulary = tokenizer["model"]["vocab"]
            vocabulary[sorted(vocabulary)[number % len(vocabulary)]] = number
            vocabulary[word] = number + 1
        case "template" if tokenizer.get("post_processor"):
            for token in tokenizer["post_processor"].get("special_tokens", {}).values():
                token["ids"] = [number]
        case "end" | "pad":
            for name in ("config.json", "generation_config.json"):
                if (folder / name).exists():
                    raw = json.loads((folder / name).read_text())
                    field = "eos_token_id" if kind == "end" else "pad_token_id"
                    (folder / name).write_text(json.dumps(raw | {field: number}))
        case "chat" if (folder / "tokenizer_config.json").exists():
            raw = json.loads((folder / "tokenizer_config.json").read_text())
            raw["chat_template"] = word + raw.get("chat_template", "")
            (folder / "tokenizer_config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _changed(folder: pathlib.Path, changes: list[tuple[str, str, int]]) -> pathlib.Path:
    for change in changes:
        _change(folder, *change)
    return folder


def _encode_all(tokenizer: Any, texts: list[str]) -> set[int]:
    pairs = [tokenizer.encode(text, second) for text in texts for second in ("", text)]
    return {id for encoding in pairs for id in encoding.ids}


def _texts(text: str, folder: pathlib.Path) -> list[str]:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    clean = text.encode(errors="replace").decode()
    added = [f"a {word}{number}" for word in _WORDS for number in "012"]
    return [clean, " ".join(vocabulary), *_WORDS, *added]


@example([("add", "zyx", 1)], "")
@example([("template", "", 5000)], "")
@attack(12, _CHANGES, TEXTS)
def test_encoder_ids_are_in_the_table_or_refused(tmp_path_factory, changes, text):
    folder = _changed(tiny.model_folder(tmp_path_factory.mktemp("encoder")), changes)
    encoder = attempt(lambda: load_encoder(str(folder)))
    if encoder is not None:
        ids = _encode_all(encoder.tokenizer, _texts(text, folder))
        assert min(ids) >= 0 and max(ids) < encoder.config.vocab_size


@example([("add", "<|think|>", 0)], "")
@example([("end", "", 327)], "")
@example([("vocabulary", "zyx", 305)], "")
@attack(25, _CHANGES, TEXTS)
def test_decoder_ids_are_in_the_table_or_refused(tmp_path_factory, changes, text):
    folder = _changed(tiny_decoder.folder(tmp_path_factory.mktemp("decoder")), changes)

    def opened() -> ChatTokenizer:
        tokenizer = ChatTokenizer.load(folder)
        check_tokenizer(tokenizer, tiny_decoder.VOCABULARY, folder)
        return tokenizer

    tokenizer = attempt(opened)
    if tokenizer is not None:
        ids = {*tokenizer.eos_ids}
        for words in _texts(text, folder):
            ids |= {*tokenizer.encode(words)}
            prompt = attempt(lambda words=words: tokenizer.encode_prompt([Message("user", words)]))
            ids |= {*(prompt if prompt is not None else ())}
        assert min(ids) >= 0 and max(ids) < tiny_decoder.VOCABULARY
