"""TFDS builders that read the benchmarks from their official files.

Records are stored in ArrayRecord files and read through ``as_data_source`` and Grain, without
importing TensorFlow. `to_dataset` converts them to the project's types.
"""

from cirag_jax.datasets.benchmarks.base import data_source, prepare_builder, to_dataset
from cirag_jax.datasets.benchmarks.dpr import DprNQ, DprWebQuestions
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
    "dpr_nq": DprNQ,
    "dpr_web_questions": DprWebQuestions,
}
