"""Writing a model as a folder that sentence-transformers loads unchanged."""

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from cirag_jax.errors import UserError
from cirag_jax.models import cross_encoder
from cirag_jax.models.cross_encoder import PairEncoder
from cirag_jax.models.io import weights
from cirag_jax.models.io.pretrained import MARKER, TextEncoder

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "sentencepiece.bpe.model",
)

_MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))

_CARD = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags:
- sentence-transformers
- feature-extraction
---

# Aligner

A bi-encoder exported by cirag_jax from `{source}` ({revision}): {pooling} pooling, unit-length
vectors of {dim} dimensions, at most {max_length} tokens.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
queries = model.encode_query(["..."])  # prefix {query_prefix!r}
passages = model.encode_document(["..."])  # prefix {passage_prefix!r}
scores = queries @ passages.T
```
"""


_CROSS_CARD = """---
library_name: sentence-transformers
pipeline_tag: text-ranking
tags:
- sentence-transformers
- cross-encoder
- reranker
---

# Cross-encoder

Exported by cirag_jax from `{source}` ({revision}). It scores a query and a passage, or a query and
a triple, of at most {max_length} tokens; trained with binary cross-entropy: above 0.5 (logit 0) it
takes the text for more likely relevant than not.

```python
from sentence_transformers import CrossEncoder

model = CrossEncoder("path/to/this/folder")
probabilities = model.predict([("query", "passage")])
```
"""


def export_sentence_transformers(
    encoder: TextEncoder,
    params: Any,
    folder: str | os.PathLike,
    *,
    max_length: int | None = None,
) -> Path:
    """Writes ``folder``; embeddings of sentence-transformers equal ours within 1e-5.

    Everything is written aside and renamed at the end. An earlier export in ``folder`` is replaced.
    In a run of several processes all must call it, and process 0 writes.

    Args:
      encoder: tokenizer, prefixes, pooling and architecture.
      params: state to export; None means ``encoder.state``.
      folder: where; its parents are created.
      max_length: limit recorded in the folder; default ``encoder.max_length``.

    Returns:
      The folder.

    Raises:
      UserError: ``folder`` holds something that is not such an export, or the tokenizer's files
        are gone.
    """
    folder = Path(folder)
    _check_target(folder)
    state = encoder.state if params is None else params
    tensors = weights.to_tensors(state, encoder.config, encoder.model_type)
    if jax.process_index() != 0:
        return folder
    tensors.update(weights.passed_through(encoder.folder))
    limit = max_length or encoder.max_length
    return _write_aside(folder, lambda aside: _write(encoder, tensors, aside, limit))


def export_cross_encoder(model: PairEncoder, params: Any, folder: str | os.PathLike) -> Path:
    """Writes ``folder`` for ``sentence_transformers.CrossEncoder``, which gives the same scores.

    Its ``predict`` applies a sigmoid by default, as for any model of one label: probabilities, of
    which ours are the logits. Otherwise as `export_sentence_transformers`.

    Args:
      model: tokenizer, limit and architecture.
      params: state to export; None means ``model.state``.
      folder: where; its parents are created.

    Returns:
      The folder.

    Raises:
      UserError: ``folder`` holds something that is not such an export, or the tokenizer's files
        are gone.
    """
    folder = Path(folder)
    _check_target(folder)
    state = model.state if params is None else params
    tensors = cross_encoder.to_tensors(state, model.config, model.model_type)
    if jax.process_index() != 0:
        return folder
    return _write_aside(folder, lambda aside: _write_cross_encoder(model, tensors, aside))


def _write_aside(folder: Path, write: Callable[[Path], Any]) -> Path:
    """Fills a folder beside ``folder``, then renames it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    try:
        aside.mkdir()
        write(aside)
        _replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _check_target(folder: Path) -> None:
    if folder.is_dir():
        if any(folder.iterdir()) and not (folder / MARKER).is_file():
            raise UserError(f"{folder}: not empty and not an earlier export; it is left as it is.")
    elif folder.exists():
        raise UserError(f"{folder}: exists and is not a folder.")


def _replace(aside: Path, folder: Path) -> None:
    """Renames ``aside`` to ``folder``, removing what was there."""
    old = aside.with_name(f"{aside.name}.old")
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _write(encoder: TextEncoder, tensors: dict[str, Any], folder: Path, max_length: int) -> None:
    config = {key: value for key, value in encoder.hf_config.items() if key != "torch_dtype"}
    _write_json(folder / "config.json", config | {"dtype": "float32"})
    weights.save_tensors(tensors, folder / "model.safetensors")
    _write_tokenizer(encoder, folder)
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(_MODULES)
    ]
    _write_json(folder / "modules.json", modules)
    for path, _ in _MODULES[1:]:
        (folder / path).mkdir()
    pooling = {
        "word_embedding_dimension": encoder.dim,
        "pooling_mode_cls_token": encoder.pooling == "cls",
        "pooling_mode_mean_tokens": encoder.pooling == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "include_prompt": True,
    }
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    _write_json(folder / "2_Normalize" / "config.json", {})
    _write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False}
    )
    prompts = {"query": encoder.query_prefix, "document": encoder.passage_prefix}
    _write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    _write_json(folder / MARKER, encoder.manifest() | {"max_length": max_length})
    card = _CARD.format(max_length=max_length, **_card_fields(encoder))
    (folder / "README.md").write_text(card, "utf-8")


def _write_cross_encoder(model: PairEncoder, tensors: dict[str, Any], folder: Path) -> None:
    config = {key: value for key, value in model.hf_config.items() if key != "torch_dtype"}
    config |= {
        "architectures": [cross_encoder.ARCHITECTURES[model.model_type]],
        "dtype": "float32",
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
    }
    # What a cross-encoder made elsewhere may say of its own activation.
    config.pop("sbert_ce_default_activation_function", None)
    _write_json(folder / "config.json", config)
    weights.save_tensors(tensors, folder / "model.safetensors")
    _write_tokenizer(model, folder)
    file = folder / "tokenizer_config.json"
    described = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    # The library cuts pairs where the tokenizer says.
    _write_json(file, described | {"model_max_length": model.max_length})
    _write_json(
        folder / MARKER,
        {"model": model.source, "revision": model.revision, "max_length": model.max_length},
    )
    card = _CROSS_CARD.format(
        source=model.source, revision=model.revision, max_length=model.max_length
    )
    (folder / "README.md").write_text(card, "utf-8")


def _card_fields(encoder: TextEncoder) -> dict[str, Any]:
    fields = ("source", "revision", "pooling", "dim", "query_prefix", "passage_prefix")
    return {name: getattr(encoder, name) for name in fields}


def _write_tokenizer(encoder: TextEncoder | PairEncoder, folder: Path) -> None:
    copied = False
    for name in TOKENIZER_FILES:
        source = encoder.folder / name
        if source.is_file():
            shutil.copyfile(source, folder / name)
            copied = True
    if not copied:
        raise UserError(f"{encoder.folder}: the tokenizer's files are gone.")
