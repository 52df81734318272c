"""What the configs of all methods share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from cirag_jax import config_words
from cirag_jax.evaluation.scoring import NAMES
from cirag_jax.methods.registry import block_name, find_method
from configs import common, retrievers


def role(max_tokens: int, block: Callable[[], Any] = common.language_model) -> Any:
    """A language model and how much it may write."""
    config = block()
    config.max_tokens = max_tokens  # Of an answer, at most; 0, of a reader: what its format needs.
    return config


def method(name: str, switches: Mapping[str, Any] | None = None, **max_tokens: int) -> Any:
    """Everything but the presets, with a block for whatever the method may need.

    Args:
      name: of the method; the last part of it names the block with its own settings.
      switches: settings other than the defaults whose needs get a block, too.
      **max_tokens: how much each of its roles may write; by default a reader what its format needs
        (`methods.common.reading.ANSWER_TOKENS`), others 128 tokens.
    """
    config: Any = ConfigDict()
    config.method = name  # What the launch scripts run: leave it.
    # Fields and defaults of the method's dataclass, which describes them (cirag_jax/methods).
    settings = find_method(name).config()
    block = block_name(name)
    config[block] = config_words.block_of(settings)

    config.question = placeholder(str)  # One question of your own instead of the data set's.
    if settings.needs.corpus:
        # Your own documents instead of the data set's: a folder of .txt and .md files, or a dataset
        # folder, whose questions are not needed; asked with config.question.
        config.documents = placeholder(str)
    # CIRAG's corpus: the union of the selected questions' contexts; a question of your own
    # searches everything.
    config.data = common.data(split="")
    config.data.split = placeholder(str)  # null: all; of the built-in dataset: test.
    config.data.corpus = "selected_questions"
    config.profile = "musique"  # Scorer of answers: evaluation/answers.py lists them.
    config.metrics = NAMES  # Families of cirag_jax/evaluation/metrics.py.
    config.recall_at = (3, 5)  # The K of recall@K and hit@K.

    needs = dataclasses.replace(settings, **(switches or {})).needs
    if needs.index:
        config.retriever = retrievers.retriever()
    if needs.index or needs.rankers or needs.demonstrations:
        config.encoder = retrievers.encoder()
    if needs.rankers:
        config.rankers = ConfigDict()
    for ranker in needs.rankers:
        config.rankers[ranker] = _ranker(config[block])
    if needs.triples:
        config.triples = placeholder(str)  # null: the data set's openie.jsonl; a store; "online".
        config.extractor = role(max_tokens=512, block=common.extractor)  # Asked only "online".
        config.extractor.grounded = False  # As in configs/extract.py.
    if needs.roles:
        config.model = placeholder(str)  # The language model of every role that names none.
    for who in needs.roles:
        config[who] = role(max_tokens.get(who, 0 if who == "reader" else 128))
        config[who].model = config.get_oneway_ref("model")

    config.seed = 0  # Of whatever is drawn: models that sample, an order, resamples.
    config.in_flight = 64  # Questions that advance together.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on from there. 0: never.
    config.cache = placeholder(str)  # A file of responses that several runs share; null: none.
    return config


def _ranker(method_block: Any) -> Any:
    config = retrievers.ranker()
    if "normalization" in method_block:  # Triples are ranked in the form they are shown in.
        config.normalization = method_block.get_ref("normalization")
    return config


def shipped(config: Any) -> Any:
    """``config`` with the aligner, the reader and the extractor that come with this repository."""
    if "retriever" in config:
        config.encoder.model = "shipped:aligner"
        config.retriever.units = "sentence"  # What the aligner was trained on.
    if "extractor" in config:
        config.extractor.adapter = "shipped:extractor"
        config.extractor.grounded = True
    config.reader.adapter = "shipped:reader"
    config[block_name(config.method)].reader_format = "chain"
    return config


def preset(config: Any, name: str) -> Any:
    """The presets that every method has.

    ``small`` is for a laptop's CPU: thoughts of 96 tokens at most, and what is kept of the prompts
    suffices for 64 conversations (3 GB in fp32). ``medium`` is a model of 1.5B parameters in a
    context of 4,096 tokens: two CPU cores, 9 GB. ``paper`` names the CIRAG paper's
    models, for a GPU.
    """
    needs = find_method(config.method).config().needs
    if name == "small":
        for who in needs.roles:
            config[who].prefix_tokens = 65536
        if config[block_name(config.method)].get("reader_format") == "thought":
            config.reader.max_tokens = 96
    elif name == "medium":
        config.model = "Qwen/Qwen2.5-Coder-1.5B-Instruct"  # or its GGUF: --config.model=FILE.gguf
        config.in_flight = 16
        for who in needs.roles:
            config[who].context = 4096
            config[who].overflow = "truncate"
            config[who].dtype = "bfloat16"  # On CPUs that multiply it, see `Engine.open`.
    elif name == "paper":
        config.model = "Qwen/Qwen2.5-7B-Instruct"
        if needs.index:
            config.encoder.model = "BAAI/bge-small-en-v1.5"
    elif name:
        raise common.no_preset(name, ("small", "medium", "paper"))
    return config
