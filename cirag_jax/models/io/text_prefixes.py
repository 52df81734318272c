"""Prefixes of texts and pooling of an encoder, from its folder or its family's conventions.

Without files for sentence-transformers, a folder follows the published conventions of E5, BGE,
nomic-embed, Qwen3-Embedding, NV-Embed and EmbeddingGemma.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cirag_jax.datasets.records import convert
from cirag_jax.errors import UserError
from cirag_jax.io import read_json, read_object
from cirag_jax.models.pooling import Pooling
from cirag_jax.types import Role

BGE_INSTRUCTION = "Represent this sentence for searching relevant passages: "
BGE_CHINESE_INSTRUCTION = "为这个句子生成表示以用于检索相关文章："
_WEB_TASK = "Given a web search query, retrieve relevant passages that answer the query"
# Published query and passage prefixes, for folders without prompts of sentence-transformers.
_PUBLISHED_PREFIXES: Mapping[str, tuple[str, str]] = {
    "e5": ("query: ", "passage: "),
    "e5-instruct": (f"Instruct: {_WEB_TASK}\nQuery: ", ""),
    "bge": (BGE_INSTRUCTION, ""),
    "bge-zh": (BGE_CHINESE_INSTRUCTION, ""),
    "nomic": ("search_query: ", "search_document: "),
    "qwen3-embedding": (f"Instruct: {_WEB_TASK}\nQuery:", ""),
    "nv-embed": (
        "Instruct: Given a question, retrieve passages that answer the question\nQuery: ",
        "",
    ),
    "embeddinggemma": ("task: search result | query: ", "title: none | text: "),
}

# File in an export that records the source model, and the prefixes even if they are empty.
EXPORT_FILE = "cirag_jax.json"


def published_family(*names: str) -> str:
    """Returns a key of `_PUBLISHED_PREFIXES`, "" or the name of a family without prefixes."""
    for name in names:
        words = re.split(r"[^a-z0-9]+", name.rstrip("/").rsplit("/", 1)[-1].lower())
        for family in ("qwen3-embedding", "nv-embed", "embeddinggemma"):
            if {*family.split("-")} <= {*words}:
                return family
        if "e5" in words:
            return "e5-instruct" if {"mistral", "instruct"} & {*words} else "e5"
        if "bge" in words:
            kinds = ("m3", "noinstruct", "zh")
            return next((f"bge-{kind}" for kind in kinds if kind in words), "bge")
        if "nomic" in words or {"modernbert", "embed"} <= {*words}:
            return "nomic"
    return ""


def default_pooling(family: str) -> Pooling:
    """Returns the default pooling of a BERT-like family."""
    return "cls" if family.startswith("bge") else "mean"


class _Prefixes(msgspec.Struct):
    query_prefix: str
    passage_prefix: str
    triple_prefix: str | None = None


class _SentenceTransformers(msgspec.Struct):
    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    truncate_dim: Annotated[int, msgspec.Meta(ge=1)] | None = None


PROMPTS_FILE = "config_sentence_transformers.json"
_NAMED = "prompt:"  # precedes the name of a prompt in PROMPTS_FILE


def sentence_transformers(folder: Path) -> _SentenceTransformers:
    """Returns the fields that are used of a folder's file for sentence-transformers."""
    file = folder / PROMPTS_FILE
    return convert(str(file), read_object(file, optional=True), _SentenceTransformers)


def read_prompts(folder: Path) -> dict[str, str]:
    """Returns the prompts that a folder of sentence-transformers names."""
    prompts = sentence_transformers(folder).prompts or {}
    return {name: prompt or "" for name, prompt in prompts.items()}


def instruction(text: str, prompts: Mapping[str, str], source: str) -> str:
    """Returns an instruction of a config: its text, or the prompt named by ``prompt:NAME``."""
    name = text.removeprefix(_NAMED)
    if name == text:
        return text
    if name not in prompts:
        names = ", ".join(sorted(prompts)) or "none"
        raise UserError(
            f"the instruction {text!r} is not a prompt of {source} (its prompts: {names}); give "
            "the text itself instead"
        )
    return prompts[name]


def declared_prefixes(
    prompts: Mapping[str, str], default: str | None
) -> tuple[str, str, str | None]:
    """Returns the prefixes of queries, passages and triples in a file of sentence-transformers.

    As in its ``encode_query`` and ``encode_document``, prompts apply by name. The prompt named
    ``default`` applies to all texts if no prompt has the name of a role.
    """
    passage = next((prompts[k] for k in ("document", "passage", "corpus") if k in prompts), "")
    query, triple = prompts.get("query", ""), prompts.get("triple")
    if not (query or passage or triple) and default is not None:
        query = passage = prompts.get(default, "")
    return query, passage, triple


def prefixes_of(query: str, passage: str, triple: str | None) -> dict[Role, str]:
    """Returns the text in front of each role; by default, that of triples is that of passages."""
    return {"query": query, "passage": passage, "triple": passage if triple is None else triple}


def read_prefixes(folder: Path, family: str) -> tuple[str, str, str | None]:
    """Returns the prefixes of each role from the folder, or else the family's defaults."""
    if (file := folder / EXPORT_FILE).is_file():
        marker = convert(str(file), read_json(file), _Prefixes)
        return marker.query_prefix, marker.passage_prefix, marker.triple_prefix
    default = sentence_transformers(folder).default_prompt_name
    prompts = read_prompts(folder)
    query, passage, triple = declared_prefixes(prompts, default)
    if query or passage or triple:
        return query, passage, triple
    if "web_search_query" in prompts:  # E5-Mistral
        return prompts["web_search_query"], "", None
    return *_PUBLISHED_PREFIXES.get(family, ("", "")), None


def task_prefixes(raw: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, str]:
    """Returns the prefixes of queries and passages from a config's instructions of tasks."""
    texts = raw.get("task_instructions")
    texts = texts if isinstance(texts, dict) else {}
    query, passage = (str(texts.get(tasks[index], "")) for index in (0, -1))
    return {"query_prefix": query, "passage_prefix": passage}
