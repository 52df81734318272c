"""Identities of runs and of their parts: models, encoders, extractors and triples.

A workdir keeps the identity of its run, see `cirag_jax.identity`.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from cirag_jax.commands import backends
from cirag_jax.commands import task as task_lib
from cirag_jax.commands.backends import DEFAULT_MODEL
from cirag_jax.datasets import triple_files
from cirag_jax.datasets.corruption import read_corrupted
from cirag_jax.errors import parsing
from cirag_jax.identity import of_code, of_packages, of_records
from cirag_jax.io import local_path
from cirag_jax.methods.common import extraction, own_prompts
from cirag_jax.methods.common.extraction import ONLINE, ExtractionSettings
from cirag_jax.methods.registry import block_name
from cirag_jax.models.io.fingerprint import model_identity
from cirag_jax.models.io.pretrained_decoder import default_dtype
from cirag_jax.models.router import router_digest
from cirag_jax.retrieval import bm25, faiss_index
from cirag_jax.retrieval.faiss_index import COMPRESSED
from cirag_jax.retrieval.index import hash_corpus, read_manifest
from cirag_jax.retrieval.rankers import TripleText, triple_text_of
from cirag_jax.retrieval.run_index import RUN
from cirag_jax.runtime import codec
from cirag_jax.runtime.requests import Needs
from cirag_jax.triples.store import TripleStore
from cirag_jax.types import Config, Dataset

_LOCAL = ("backend", "adapter", "overflow", "merge_adapter", "dtype", "context")
_SERVER = ("backend", "overflow", "server", "omit", "extra_body")


def of_run(config: Config, code: str, task: task_lib.Task) -> dict[str, Any]:
    """Returns the identity of a run: everything that determines its results.

    An error message names the first field that differs.

    ``config`` is a config of configs/methods, or has the same blocks. ``code`` is the name of the
    module with the method's program.
    """
    needs, block = task.needs, block_name(config.method)
    blocks = _search_blocks(config, needs)
    return {
        "method": config.method,
        "seed": config.seed,
        **_flat({block: config[block], **blocks}),
        **_search_models(config, blocks),
        "packages": _packages(config, needs, blocks),
        **_passages(config, task),
        "code": of_code(code),
        **_roles(config, needs),
        **({"prompt_file": own_prompts.digest(task.own_prompts)} if task.own_prompts else {}),
        **_triples(config, task),
        **({"router": router_digest(config[block]["router"])} if needs.router else {}),
        **_demonstrations(task),
    }


def _search_blocks(config: Config, needs: Needs) -> dict[str, Config]:
    """Returns the blocks of the rankers, retriever and encoder that the method uses."""
    blocks = {f"rankers.{name}": config.rankers[name] for name in needs.rankers}
    if needs.index:
        blocks["retriever"] = config.retriever
    if needs.graph:
        blocks["graph"] = config.graph.copy_and_resolve_references()
        with blocks["graph"].unlocked():
            del blocks["graph"].folder  # A stored graph equals a new one.
    if task_lib.needs_encoder(config, needs):
        blocks["encoder"] = config.encoder
    return blocks


def _search_models(config: Config, blocks: Mapping[str, Config]) -> dict[str, Any]:
    """Returns the index manifest, the weights, and the text format of triples for rankers."""
    fields: dict[str, Any] = {}
    if _uses_bm25(blocks):
        fields["bm25.tokens"] = bm25.TOKENS
    if "retriever" in blocks and config.retriever.kind == RUN:
        with parsing(f"config.retriever.folder={config.retriever.folder} cannot be read"):
            content = pathlib.Path(config.retriever.folder).expanduser().read_bytes()
        fields["retriever.run"] = hashlib.sha256(content).hexdigest()
    elif "retriever" in blocks and config.retriever.folder:
        fields["retriever.index"] = read_manifest(pathlib.Path(config.retriever.folder))
    for name, block in blocks.items():
        if block.get("model") and not _is_served(config, block):
            fields[f"{name}.weights"] = model_identity(block.model)
        if name.startswith("rankers."):
            text, _ = triple_text_of(config, name.removeprefix("rankers."))
            if text != TripleText("tuple", block.normalization):  # older journals omit the default
                fields[f"{name}.writes"] = dataclasses.asdict(text)
    return fields


def _is_served(config: Config, block: Config) -> bool:
    """Returns whether the model of the encoder's or a ranker's block is on a server."""
    if block.get("kind", "bi_encoder") != "bi_encoder":
        return False
    return config.encoder.backend == "openai"


def _uses_bm25(blocks: Mapping[str, Config]) -> bool:
    return any(block.get("kind") in ("bm25", "linked") for block in blocks.values())


def _packages(config: Config, needs: Needs, blocks: Mapping[str, Config]) -> dict[str, str]:
    """Returns the packages that split, index, rank and embed passages."""
    kinds = {block.get("kind") for block in blocks.values()}
    packages = of_packages("sentencex") if needs.corpus else {}
    if _uses_bm25(blocks):
        packages |= bm25.packages()
    if kinds & {*faiss_index.FAISS_KINDS}:
        packages |= faiss_index.packages()
    if "encoder" in blocks or kinds & {"bi_encoder", "aligner", "cross_encoder"}:
        packages |= _encoder_packages(config.encoder)
    return packages


def _passages(config: Config, task: task_lib.Task) -> dict[str, Any]:
    if not task.needs.corpus:
        return {}
    # The policy has no effect on the documents of a single question.
    policy = {} if config.get("question") is not None else {"data.corpus": task.corpus.policy}
    return {**policy, "passages": hash_corpus(task.corpus.passages)}


def _roles(config: Config, needs: Needs) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for role in task_lib.roles_of(config, needs):
        model = of_language_model(config[role], task_lib.asks_schemas(needs, role))
        fields |= {f"{role}.{name}": value for name, value in model.items()}
        fields[f"{role}.max_tokens"] = task_lib.most_tokens(config, role)
    return fields


def _triples(config: Config, task: task_lib.Task) -> dict[str, Any]:
    if not task.needs.triples:
        return {}
    if config.triples == ONLINE:
        with own_prompts.active(task.own_prompts):
            version = extraction.extractor_version(config.extractor.dialect)
        return {"triples": ONLINE, **{f"extractor.{k}": value for k, value in version.items()}}
    ids = [passage.id for passage in task.corpus.passages]
    settings = {}
    if not triple_files.is_store(config.triples):
        content = of_triples(task.dataset, ids)
    else:
        with TripleStore.open(config.triples) as store:
            content = store.digest(ids)
        if corrupted := read_corrupted(config.triples):
            content = f"{content} {corrupted.digest}"
            names = {"kind": "triples.corruption", "ratio": "triples.ratio"}
            settings = {names[name]: value for name, value in corrupted.settings.items()}
    return {"triples": config.triples, "triples.content": content, **settings}


def _demonstrations(task: task_lib.Task) -> dict[str, Any]:
    if not task.needs.demonstrations:
        return {}
    shown = codec.encode(task_lib.demonstrations(task))
    return {"demonstrations": codec.digest(codec.dump(shown))}


def _flat(blocks: Mapping[str, Config]) -> dict[str, Any]:
    return {
        f"{name}.{field}": value
        for name, block in blocks.items()
        for field, value in _that_matter(_without_server(task_lib.plain(block))).items()
    }


def _that_matter(block: dict[str, Any]) -> dict[str, Any]:
    """Returns a retriever's block without settings that do not change its results.

    Other blocks are unchanged. Journals of earlier versions lack these settings.
    """
    unused = {"stream"} if block.get("kind") == COMPRESSED else {"stream", "pq_bytes", "pq_rerank"}
    return {name: value for name, value in block.items() if name not in unused}


def _without_server(block: dict[str, Any]) -> dict[str, Any]:
    """Returns an encoder's block with only those settings of a server that determine vectors."""
    if "server" not in block:
        return block
    server = block.pop("server")
    if block["backend"] == "openai":
        block["server"] = {"extra_body": server["extra_body"]}
    return block


def of_language_model(config: Any, schemas: bool = False) -> dict[str, Any]:
    """Returns the identity of a language model.

    Rate limits and budgets are left out. A server's address is included only if the config names
    no model; the identity then has the model that the server reports.

    Args:
      config: a block of `configs.common.language_model`.
      schemas: whether requests constrain the output to a JSON schema.
    """
    is_served = config.backend == "openai"
    fields = {name: config[name] for name in (_SERVER if is_served else _LOCAL)}
    fields["model"] = name = backends.model_name(config)
    if template := backends.template_kwargs(config):
        fields["chat_template_kwargs"] = template
    if is_served:
        if name is None:
            fields |= {"model": backends.served_model(config), "base_url": config.base_url}
        return json.loads(json.dumps(fields))
    fields["dtype"] = config.dtype or _default_dtype(config.backend)
    if config.no_repeat_ngram_size:
        fields["no_repeat_ngram_size"] = config.no_repeat_ngram_size
    fields["weights"] = model_identity(name or DEFAULT_MODEL)
    if config.adapter is not None and local_path(config.adapter).exists():
        fields["adapter_weights"] = model_identity(config.adapter)
    packages = ["tokenizers", "transformers", "jinja2"]  # render the prompt in both backends
    if schemas:
        packages.append("llguidance")
    return {**fields, "packages": of_packages(*packages)}


def _default_dtype(backend: str) -> str | None:
    """Returns the default dtype on this machine; None if PyTorch is needed but not installed."""
    if backend == "jax":
        return default_dtype()
    try:
        from torch import cuda
    except ModuleNotFoundError:
        return None
    return "auto" if cuda.is_available() else "float32"


def of_extractor(config: Any, settings: ExtractionSettings) -> dict[str, Any]:
    """Returns the identity of an extractor, the language model of ``config``."""
    model = of_language_model(config, settings.constrained)
    return extraction.extractor_identity(model, settings)


def of_encoder(config: Any) -> dict[str, Any]:
    """Returns the identity of an encoder: settings, weights and packages."""
    return {
        **_without_server(config.to_dict()),
        **({} if config.backend == "openai" else model_identity(config.model)),
        "packages": _encoder_packages(config),
    }


def of_classifier(spec: str, label: str) -> dict[str, Any]:
    """Returns the identity of a classifier: label, weights and packages."""
    return {"label": label, **model_identity(spec), "packages": of_packages("tokenizers")}


def _encoder_packages(config: Any) -> dict[str, str]:
    names = [] if config.backend == "openai" else ["tokenizers"]
    if config.backend == "sentence_transformers":
        names += ["sentence-transformers", "transformers"]
    return of_packages(*names)


def of_triples(dataset: Dataset, passage_ids: Sequence[str]) -> str:
    """Returns a hash of the triples that the dataset has for these passages."""
    return of_records([i, codec.encode(dataset.triples.get(i))] for i in passage_ids)
