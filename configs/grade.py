r"""Generates multi-hop questions of controlled difficulty from documents (GRADE).

python launch/generate_questions.py --config=configs/grade.py:rules --workdir=G
python launch/generate_questions.py --config=configs/grade.py:medium --config.documents=FOLDER \
    --config.llm.model=FILE.gguf --workdir=G

Needs documents, or none for the built-in dataset. Writes a dataset folder to G; run the same
command to resume. docs/methods/grade_generation.md describes the steps and files.

Presets: ``rules`` needs the built-in dataset or a folder with openie.jsonl, but no language model.
``medium`` has a model of 1.5B parameters. ``small`` has SmolLM2-135M, which is too small for good
questions. ``paper`` has the paper's sizes, for a server or a GPU; not yet run.

Record (2 CPU cores, Python 3.11, commit 834c6e2 of 2026-11-25 unless stated otherwise):
  ``rules`` (2026-11-26, commit 5d2c64b): 585 questions of the built-in facts, 150 each of 2, 3 and
  4 hops and 135 of 5; 11 s.
  ``rules`` with --config.documents=F --config.questions.one_source=false (F: MuSiQue's first 600
  passages with triples): 2,042 claims in 48 clusters, 422 of them in several clusters; 9
  exact and 12 contextual groups, 9 of each right according to a person; 47 edges added to 5,173;
  one question, because relations of open extraction have no templates; 18 s.
  ``small`` with --config.limit=4: 2 of 22 sentences became claims, 1 triple, no path; 134 s.
  ``medium`` (2026-11-26; claims and triples at commit 21fe1a8, the rest at ba0f106 with
  --config.cache) on 30 passages of 2WikiMultihopQA, 1,369 words: 55 questions, all of 2 hops;
  35 min. With complete paths and ten claims per request (commit 5d2c64b) on 30 longer
  passages: 9 paths, no question; 73 min.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from cirag_jax import config_words
from cirag_jax.datasets.chunks import ChunkSettings
from cirag_jax.grade.claims import ClaimSettings
from cirag_jax.grade.clusters import ClusterSettings
from cirag_jax.grade.equivalence import EquivalenceSettings
from cirag_jax.grade.paths import PathSettings
from cirag_jax.grade.questions import QuestionSettings
from cirag_jax.grade.triples import TripleSettings
from configs import common, retrievers


def get_config(preset: str = "") -> Any:
    if preset and preset not in PRESETS:
        raise common.unknown_preset(preset, PRESETS)
    config: Any = ConfigDict()
    # A folder with documents.jsonl (text, title, source, date), corpus.jsonl, or other documents
    # (docs/documents.md), or one such file. null is the built-in dataset.
    config.documents = placeholder(str)
    config.min_words = 0  # Minimum words of a document.
    config.max_words = 0  # Maximum words of a document; 0 is no limit.
    config.limit = 0  # The first N documents; 0 is all.

    # The steps' settings, described by their dataclasses (cirag_jax/grade).
    config.claims = config_words.block_of(ClaimSettings())
    config.triples = config_words.block_of(TripleSettings())
    config.clusters = config_words.block_of(ClusterSettings())
    config.equivalence = config_words.block_of(EquivalenceSettings())
    config.paths = config_words.block_of(PathSettings())
    config.questions = config_words.block_of(QuestionSettings())
    config.chunks = config_words.block_of(ChunkSettings())
    config.review = 30  # Equivalence groups in review.jsonl, for manual review (A.6).
    config.context = 8  # Distracting chunks in a question's own context.

    config.llm = common.language_model()  # Language model of all steps.
    config.encoder = retrievers.encoder()  # Encoder of the claims.
    config.seed = 0  # Seed for sampling.
    config.in_flight = 64  # Concurrent requests.
    common.resumable(config)
    # Only print the expected tokens of the first step that calls the language model; later steps
    # depend on its results.
    config.estimate_only = False
    if preset:
        PRESETS[preset](config)
    return config


def _rules(config: Any) -> None:
    config.claims.filter = config.claims.kind = "rules"
    config.triples.kind = "dataset"
    config.clusters.reduction = "pca"
    config.equivalence.kind = config.questions.kind = config.questions.validation = "rules"
    config.questions.one_source = True
    config.paths.per_hop = 150
    config.paths.most_per_start, config.paths.most_per_end = 3, 4


def _small(config: Any) -> None:
    config.claims.context_words = 150
    config.triples.claims, config.triples.max_tokens = 4, 256
    config.equivalence.claims, config.equivalence.max_tokens = 10, 128
    config.clusters.reduction = "pca"
    config.paths.per_hop = 20
    config.llm.no_repeat_ngram_size = 20
    config.llm.overflow = "truncate"


def _medium(config: Any) -> None:
    config.llm.model = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    config.llm.context = 4096
    config.llm.overflow = "truncate"
    config.claims.context_words = 400
    config.triples.claims, config.triples.max_tokens = 1, 192
    config.llm.no_repeat_ngram_size = 20  # Greedy lists may repeat themselves.
    config.questions.kind = "hops"
    config.equivalence.claims = 20
    config.in_flight = 16


def _paper(config: Any) -> None:
    config.min_words, config.max_words = 512, 8192
    config.claims.classifier = "lighteternal/fact-or-opinion-xlmr-el"
    config.llm.model = "Qwen/Qwen2.5-7B-Instruct"
    config.triples.max_tokens, config.equivalence.max_tokens = 4000, 3000  # As in the code.
    config.questions.validation = "model"
    config.chunks.tokenizer = config.llm.model  # Near the released code's tiktoken (cl100k_base).
    config.questions.context_words = config.chunks.most  # A.9.5: a chunk of the evidence.


PRESETS = {"rules": _rules, "small": _small, "medium": _medium, "paper": _paper}
