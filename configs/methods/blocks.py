"""Config blocks and presets shared by all methods."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from cirag_jax import config_words
from cirag_jax.methods.registry import block_name, find_method
from configs import common, retrievers


def role(max_tokens: int, block: Callable[[], Any] = common.language_model) -> Any:
    """Returns the settings of a language model in one role of a method."""
    config = block()
    config.max_tokens = max_tokens  # Maximum new tokens; 0 is the default of the reader's format.
    return config


def method(name: str, switches: Mapping[str, Any] | None = None, **max_tokens: int) -> Any:
    """Returns the config of a method without a preset, with a block for everything it needs.

    Args:
      name: name of the method; its last part names the block of the method's settings.
      switches: alternative settings; the config also has the blocks that they need.
      **max_tokens: maximum new tokens of each role; by default 128, or for a reader the limit of
        its format (`methods.common.reading.ANSWER_TOKENS`).
    """
    config: Any = ConfigDict()
    config.method = name  # Selects the method; do not change.
    # The method's settings, described by its dataclass (cirag_jax/methods).
    settings = find_method(name).config()
    block = block_name(name)
    config[block] = config_words.block_of(settings)

    config.question = placeholder(str)  # Your own question, instead of a dataset's questions.
    if settings.needs.corpus:
        # Your own documents, for use with config.question: a folder of .txt, .md and other
        # files (docs/documents.md), or a dataset folder, which needs no questions.
        config.documents = placeholder(str)
    config.data = common.data(split="")
    config.data.split = placeholder(str)  # null is all splits, or test for the built-in dataset.
    # The contexts of the selected questions, as in CIRAG; config.question searches all passages.
    config.data.corpus = "selected_questions"
    common.scoring(config)

    needs = dataclasses.replace(settings, **(switches or {})).needs
    if needs.index:
        config.retriever = retrievers.retriever()
    if needs.graph:
        config.graph = retrievers.graph()
        if "normalization" in config[block]:  # Name entities in the form that prompts use.
            config.graph.normalization = config[block].get_ref("normalization")
    if needs.index or needs.rankers or needs.demonstrations:
        config.encoder = retrievers.encoder()
    if needs.rankers:
        config.rankers = ConfigDict()
    for ranker in needs.rankers:
        config.rankers[ranker] = _ranker(config[block])
    if needs.triples:
        # The same field as config.data.triples, which may also be "online": extracted while
        # answering.
        config.triples = config.data.get_ref("triples")
        # Runs only with triples=online.
        config.extractor = role(max_tokens=512, block=common.extractor)
        config.extractor.dialect = "openie"  # As in configs/extract.py: openie | kirag | trace
        config.extractor.entity_tokens = 192  # Maximum new tokens for a passage's entities.
        config.extractor.grounded = False  # See configs/extract.py.
    if needs.roles:
        config.model = placeholder(str)  # Language model of every role without one.
    if needs.roles and needs.triples:
        config.extractor.model = config.get_oneway_ref("model")
    common.prompts(config)
    for name in needs.roles:
        config[name] = role(max_tokens.get(name, 0 if name == "reader" else 128))
        config[name].model = config.get_oneway_ref("model")

    config.seed = 0  # Seed for sampling, random orders and resampling.
    config.in_flight = 64  # Questions answered concurrently.
    common.resumable(config)
    return config


def _ranker(method_block: Any) -> Any:
    config = retrievers.ranker()
    if "normalization" in method_block:  # Rank triples in the form that prompts use.
        config.normalization = method_block.get_ref("normalization")
    return config


def may_refuse_own_documents(settings: Any) -> None:
    """Makes two settings of a method's block depend on the questions (`task.fill_in`).

    Questions of a dataset get an answer even if the reader refuses. For your own documents,
    the answer is empty if the reader refuses, or if the evidence does not contain the answer.
    """
    with settings.ignore_type():
        settings.force_answer = placeholder(bool)
        settings.grounded_answers = placeholder(bool)


def shipped(config: Any) -> Any:
    """Returns ``config`` with the shipped aligner, reader and extractor (cirag_jax/shipped).

    A method without the setting ``reader_format`` keeps its reader, because the shipped reader
    writes only the format ``chain``.
    """
    if "retriever" in config:
        config.encoder.model = "shipped:aligner"
        config.retriever.units = "sentence"  # The aligner was trained on sentences.
    if "extractor" in config:
        config.extractor.adapter = "shipped:extractor"
        config.extractor.grounded = True
    settings = config[block_name(config.method)]
    if "reader" in config and "reader_format" in settings:
        config.reader.adapter = "shipped:reader"
        settings.reader_format = "chain"
    return config


# What the rows of each paper's main tables share: dev questions (0 is all of them), passages to
# search, scorer, and models. No paper states the seed of randomly drawn questions, so that
# config.data.seed stays 0.
_QWEN = "Qwen/Qwen2.5-7B-Instruct"
_PAPERS: Mapping[str, Mapping[str, Any]] = {
    "cirag": {  # Section 4.1, B.2 and B.4
        "data.limit": 1000,
        "data.random": True,
        "model": _QWEN,
        "encoder.model": "BAAI/bge-small-en-v1.5",
    },
    "kirag": {  # Sections 4.1, B.1 and B.3
        "data.corpus": "ircot_full",
        "data.contexts_as_corpus": False,  # HotpotQA: the abstracts of Wikipedia.
        "profile": "kirag",
        "model": "meta-llama/Meta-Llama-3-8B-Instruct",
        "encoder.model": "intfloat/e5-large-v2",
        "encoder.query_max_length": 512,
        "encoder.passage_max_length": 512,
    },
    "dualrag": {  # Sections 4.1 and 4.3
        "data.limit": 1000,
        "data.random": True,
        "data.corpus": "ircot_full",
        "data.contexts_as_corpus": False,
        "profile": "dualrag",
        "model": _QWEN,
        "encoder.model": "BAAI/bge-small-en-v1.5",
    },
    # Section 4. HippoRAG's fixed 1,000 questions: name its file with config.data.ids, or place it
    # as the dev file for `prepare`. Without it, these are the first 1,000 dev questions.
    "c2rag": {
        "data.limit": 1000,
        "data.corpus": "per_question",  # U(q) is the question's own context.
        "recall_at": (2, 5),
        "model": _QWEN,  # in place of GPT-4o-mini
        "encoder.model": "sentence-transformers/all-MiniLM-L6-v2",
    },
    "hipporag": {
        "data.limit": 1000,
        "recall_at": (2, 5),
        "profile": "hipporag",
        "model": "meta-llama/Llama-3.3-70B-Instruct",
        "encoder.model": "nvidia/NV-Embed-v2",
    },
    "grade": {  # Section 4.1, A.4: all questions and chunks of a folder of configs/grade.py
        "data.split": "test",
        "data.corpus": "ircot_full",
        "model": _QWEN,  # in place of OpenAI's models
        "encoder.model": "BAAI/bge-large-en-v1.5",  # one of its four encoders
    },
}


def preset(config: Any, name: str, others: Sequence[str] = (), *, paper: str = "cirag") -> Any:
    """Returns ``config`` with a preset that every method has.

    ``small`` is for a laptop's CPU: at most 96 tokens per thought, and a prefix cache for 64
    conversations (3 GB in float32). ``medium`` has a model of 1.5B parameters with a context of
    4,096 tokens, on 2 CPU cores with 9 GB. ``paper`` has the questions, corpus, scorer and models
    of a paper's tables, for a GPU.

    Args:
      config: a config of `method`.
      name: name of the preset; "" leaves the config unchanged.
      others: the config's own presets, for the message about an unknown one.
      paper: the paper of the preset ``paper``: cirag, kirag, dualrag, c2rag, hipporag or grade.
    """
    needs = find_method(config.method).config().needs
    if name == "small":
        for role_name in needs.roles:
            config[role_name].prefix_tokens = 65536
        if config[block_name(config.method)].get("reader_format") == "thought":
            config.reader.max_tokens = 96
    elif name == "medium":
        config.model = "Qwen/Qwen2.5-Coder-1.5B-Instruct"  # or its GGUF: --config.model=FILE.gguf
        config.in_flight = 16
        for role_name in needs.roles:
            config[role_name].context = 4096
            config[role_name].overflow = "truncate"
            config[role_name].dtype = "bfloat16"  # float32 on CPUs without bfloat16 instructions.
    elif name == "paper":
        if "extractor" in config:
            config.extractor.no_repeat_ngram_size = 0  # Needed only by small models.
        config.data.split = "dev"
        for field, value in _PAPERS[paper].items():
            block, _, last = field.rpartition(".")
            if not block or block in config:
                (config[block] if block else config)[last] = value
    elif name:
        raise common.unknown_preset(name, ("small", "medium", "paper", *others))
    return config


RUN_BY = ("dualrag", "cirag")


def as_run_by(config: Any, paper: str) -> Any:
    """Returns the config of a baseline in the tables of DualRAG (``dualrag``) or CIRAG (``cirag``).

    Also sets the number of passages. DualRAG reranks passages.
    """
    config = preset(config, "paper", paper=paper)
    settings = config[block_name(config.method)]
    settings.num_passages = 10
    if paper == "dualrag":
        ranker = config.rankers.passages
        ranker.kind, ranker.model = "cross_encoder", "BAAI/bge-reranker-v2-m3"
        settings.rerank_from = 50
    return config
