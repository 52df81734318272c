"""A small corpus with links: passages about films name their directors."""

import collections
import re
import zlib

import numpy as np
from flax import nnx

from cirag_jax.datasets.chains import sentence_texts
from cirag_jax.models.link_head import LinkHead, LinkHeadModule
from cirag_jax.retrieval.candidates import FEATURES
from cirag_jax.retrieval.linked import LinkedIndex
from cirag_jax.types import Dataset, Passage, Question

_FIRST = ("Grey", "Red", "Long", "Old", "Quiet", "Far", "High", "Lost", "New", "Wild")
_PEOPLE = ("Anna", "Bo", "Carl", "Dora", "Erik", "Fia", "Gun", "Hans", "Ida", "Jon")


class Words:
    """An encoder whose vectors are normalized sums of one random vector per word."""

    dim = 64

    def __init__(self):
        self.identity = {"model": "nowhere"}
        self.truncated = collections.Counter()

    def encode(self, texts, kind="passage", progress=None):
        if progress is not None:
            progress(len(texts))
        vectors = [sum(map(self._vector, re.findall(r"\w+", t.lower())), 1e-6) for t in texts]
        return np.array([v / np.linalg.norm(v) for v in vectors], np.float32).reshape(-1, 64)

    def _vector(self, word):
        return np.random.default_rng(zlib.crc32(word.encode())).normal(size=self.dim)


def _world():
    """Returns a dataset: passages about films, which name their directors, and about directors."""
    corpus, questions = {}, []
    for first, person in zip(_FIRST, _PEOPLE, strict=True):
        film, name = f"{first} Harbour", f"{person} Berg"
        corpus[film] = Passage(film, film, f"{film} is a film. {name} made it.")
        corpus[name] = Passage(name, name, "Born by the sea. Later a baker.")
        questions.append(
            Question(film, f"Where was the director of {film} born?", (), supporting=(film, name))
        )
    corpus["blank"] = Passage("blank", "Blank", " ", ())
    return Dataset("world", tuple(questions), corpus, {})


DATASET = _world()
PASSAGES = list(DATASET.corpus.values())
TEXTS = [list(sentence_texts(passage)) for passage in PASSAGES]
ROW = {passage.id: row for row, passage in enumerate(PASSAGES)}
QUESTION = DATASET.questions[0]


def make_index(head=None, **options):
    """Returns an index over the films and directors."""
    return LinkedIndex(PASSAGES, TEXTS, Words(), head, "sentence", **options)


def make_head(**weights):
    """Returns a linear link head with these feature weights."""
    zeros = np.zeros(len(FEATURES), np.float32)
    module = LinkHeadModule(zeros, zeros + 1, 4, nnx.Rngs(0))
    module.linear_F[...] = np.array([weights.get(name, 0.0) for name in FEATURES], np.float32)
    return LinkHead(module, FEATURES, "sentence", 2)
