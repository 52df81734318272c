r"""GRADE: multi-hop questions of controlled difficulty from documents.

python launch/generate_questions.py --config=configs/grade.py:rules --workdir=G
python launch/generate_questions.py --config=configs/grade.py:medium --config.documents=FOLDER \
    --config.llm.model=FILE.gguf --workdir=G

Presets: ``rules`` asks no language model (the built-in dataset, or a folder with openie.jsonl);
``small`` asks SmolLM2-135M, which is too small for good questions; ``medium`` a model of 1.5B
parameters; ``paper`` has the paper's sizes, for a server or a GPU. docs/methods/grade_generation.md
describes the steps.

Record (2026-11-25, two shared CPU cores beside other work, Python 3.11, commit 834c6e2):
  rules (2026-11-26, commit 5d2c64b): 585 questions of the built-in facts, 150 each of 2, 3 and 4
  hops and 135 of 5; 11 s.
  rules with --config.documents=F --config.questions.one_source=false (F: the 600 passages of
  MuSiQue that have triples first): 2,042 claims in 48 clusters, 422 in several; 9 exact and 12
  contextual groups, 9 and 9 of them right (read by hand); 47 edges added to 5,173; one question,
  for relations of open extraction have no templates; 18 s.
  small with --config.limit=4: 2 of 22 sentences became claims, 1 triple, no path; 134 s.
  medium (2026-11-26; claims and triples at commit 21fe1a8, the rest at ba0f106 with --config.cache)
  with 30 passages of 2WikiMultihopQA, 1,369 words: 55 questions of 2 hops, none longer; 35 min. At
  commit 5d2c64b, asked for whole paths and ten claims a request, 30 longer ones: 9 paths, no
  question; 73 min beside other work. paper: not yet run.
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

PRESETS = ("", "rules", "small", "medium", "paper")


def get_config(preset: str = "") -> Any:
    """Which documents, and how every step works."""
    if preset not in PRESETS:
        raise common.no_preset(preset, PRESETS[1:])
    config: Any = ConfigDict()
    # A folder with documents.jsonl (text, title, source, date), with a corpus.jsonl, or of .txt and
    # .md files; or one such file. null: the built-in dataset.
    config.documents = placeholder(str)
    config.min_words = 0  # Shorter documents are left out.
    config.max_words = 0  # Longer documents are left out; 0: none.
    config.limit = 0  # The first N documents; 0: all.

    # Fields and defaults of the steps' dataclasses, which describe them (cirag_jax/grade).
    config.claims = config_words.block_of(ClaimSettings())
    config.triples = config_words.block_of(TripleSettings())
    config.clusters = config_words.block_of(ClusterSettings())
    config.equivalence = config_words.block_of(EquivalenceSettings())
    config.paths = config_words.block_of(PathSettings())
    config.questions = config_words.block_of(QuestionSettings())
    config.chunks = config_words.block_of(ChunkSettings())
    config.review = 30  # Equivalence groups in review.jsonl (A.6).
    config.context = 8  # Chunks beside the evidence in a question's own context.

    config.llm = common.language_model()  # Whoever is asked, in all steps.
    config.encoder = retrievers.encoder()  # Embeds the claims.
    config.seed = 0  # Of what is drawn.
    config.in_flight = 64  # Requests under way at once.
    config.cache = placeholder(str)  # A file of responses that several runs share; null: none.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on from there. 0: never.
    # Prints what the first step that asks would take, and ends: later ones depend on its results.
    config.estimate_only = False
    return {"rules": _rules, "small": _small, "medium": _medium, "paper": _paper}.get(
        preset, lambda c: c
    )(config)


def _rules(config: Any) -> Any:
    config.claims.filter = config.claims.kind = "rules"
    config.triples.kind = "dataset"
    config.clusters.reduction = "pca"
    config.equivalence.kind = config.questions.kind = config.questions.validation = "rules"
    config.questions.one_source = True
    config.paths.per_hop = 150
    config.paths.most_per_start, config.paths.most_per_end = 3, 4
    return config


def _small(config: Any) -> Any:
    config.claims.context_words = 150
    config.triples.claims, config.triples.max_tokens = 4, 256
    config.equivalence.claims, config.equivalence.max_tokens = 10, 128
    config.clusters.reduction = "pca"
    config.paths.per_hop = 20
    config.llm.no_repeat_ngram_size = 20
    config.llm.overflow = "truncate"
    return config


def _medium(config: Any) -> Any:
    config.llm.model = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    config.llm.context = 4096
    config.llm.overflow = "truncate"
    config.claims.context_words = 400
    config.triples.claims, config.triples.max_tokens = 1, 192
    config.llm.no_repeat_ngram_size = 20  # Greedy lists may go round in circles.
    config.questions.kind = "hops"
    config.equivalence.claims = 20
    config.in_flight = 16
    return config


def _paper(config: Any) -> Any:
    config.min_words, config.max_words = 512, 8192
    config.llm.model = "Qwen/Qwen2.5-7B-Instruct"
    config.questions.validation = "model"
    config.questions.context_words = config.chunks.most  # A.9.5: a chunk of the evidence.
    return config
