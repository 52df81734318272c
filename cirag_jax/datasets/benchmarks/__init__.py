"""The benchmarks from their official files, as TFDS builders.

The records lie in ArrayRecord files and are read through ``as_data_source`` and Grain; TensorFlow
is never imported. `to_dataset` turns them into the project's own types.
"""

from cirag_jax.datasets.benchmarks.base import data_source, prepare_builder, to_dataset
from cirag_jax.datasets.benchmarks.hotpotqa import HotpotQA
from cirag_jax.datasets.benchmarks.long_form import ASQA, ELI5
from cirag_jax.datasets.benchmarks.multihop_rag import MultiHopRAG
from cirag_jax.datasets.benchmarks.musique import MuSiQue
from cirag_jax.datasets.benchmarks.open_domain import Bamboogle, NQOpen, PopQA, WebQuestions
from cirag_jax.datasets.benchmarks.two_wiki import TwoWiki

__all__ = ["BENCHMARKS", "data_source", "prepare_builder", "to_dataset"]

BENCHMARKS = {
    "hotpotqa": HotpotQA,
    "two_wiki": TwoWiki,
    "musique": MuSiQue,
    "multihop_rag": MultiHopRAG,
    "bamboogle": Bamboogle,
    "web_questions": WebQuestions,
    "nq_open": NQOpen,
    "popqa": PopQA,
    "asqa": ASQA,
    "eli5": ELI5,
}
