"""The embedded dataset: real facts from data packages, said in passages and asked in chains."""

from cirag_jax.datasets.embedded.build import build, statistics

__all__ = ["build", "statistics"]
