"""What a joint scorer thinks of an aligner's candidates, for the aligner to learn.

A cross-encoder reads question, chain and candidate together, which an aligner never does: it embeds
them apart. Its logits of what a step of a search chooses from, as shares that sum to 1, are soft
labels of the aligner's own loss (a listwise distillation, as RocketQAv2, Ren et al., 2021).
"""

import functools
import pathlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict
from scipy.special import softmax

from cirag_jax.errors import UserError, check_at_least, check_choice, check_positive
from cirag_jax.io import bar
from cirag_jax.models.io.fingerprint import of_model
from cirag_jax.models.io.workdir import trained_on
from cirag_jax.retrieval.joint import open_chain_reader
from cirag_jax.retrieval.linked import needed_link_head
from cirag_jax.retrieval.pairs import score_groups
from cirag_jax.training.choices import Asked, Choice, choices_of
from cirag_jax.training.data.pools import Example
from cirag_jax.training.link_head import CORPORA
from cirag_jax.training.mining import found_once
from cirag_jax.training.state import digest
from cirag_jax.types import Config

_JOINT = "config.distill.joint"


def soft_examples(
    config: Config, workdir: pathlib.Path, sets: Sequence[Asked]
) -> dict[str, list[Example]]:
    """By question id, the steps of its searches and a joint scorer's shares of their candidates.

    The searches are those of ``config.distill.checkpoint`` for the questions that are trained on.
    They and the logits stay in ``workdir`` (``searched-*.npy``, ``logits-*.npy``), so that a
    training that goes on has the same.
    """
    spec, kind = config.distill.checkpoint, config.data.units
    units = needed_link_head(spec).units
    if units != kind:
        raise UserError(
            f"config.distill.checkpoint={spec} ranks {units}s, but config.data.units={kind}"
        )
    searched = ConfigDict({"checkpoint": spec, "depth": config.distill.depth})
    searched.corpus = config.head.corpus
    searched.query_max_length = config.query_max_length
    searched.unit_max_length = config.unit_max_length
    choices, _ = choices_of(searched, workdir, [(one[0], one[1], ()) for one in sets])

    told = digest([of_model(config.distill.joint)], ((c.query, c.texts) for c in choices))
    bits_SK = found_once(
        workdir / f"logits-{told[:16]}.npy",
        (len(choices), config.distill.depth),
        functools.partial(_score, config.distill.joint, choices),
        lambda bits_SK: bool(np.isfinite(bits_SK[:, :2].view(np.float32)).all()),
    )
    examples: dict[str, list[Example]] = defaultdict(list)
    for choice, bits_K in zip(choices, bits_SK, strict=True):
        logit_K = bits_K[: len(choice.texts)].view(np.float32)
        first, *others = choice.texts
        shares = tuple(softmax(logit_K.astype(np.float64)).tolist())
        example = Example(choice.query, (first,), tuple(others), shares, config.distill.weight)
        examples[choice.question_id].append(example)
    return dict(examples)


def _score(joint: str, choices: Sequence[Choice], bits_SK: np.ndarray) -> None:
    """Writes down the bits of the float32 logits of each choice's candidates."""
    model = open_chain_reader(joint, _JOINT)
    queries, texts = [choice.query for choice in choices], [choice.texts for choice in choices]
    with bar("reading", sum(map(len, texts)), "candidate") as shown:
        logits = score_groups(model, None, queries, texts, progress=shown.update)
    for bits_K, logit_K in zip(bits_SK, logits, strict=True):
        bits_K[: len(logit_K)] = logit_K.astype(np.float32).view(np.int32)


def teachers_trained_on(config: Config) -> frozenset[str]:
    """Ids of the questions that the joint scorer, the head and their aligner have learnt from."""
    return frozenset().union(
        *(trained_on(spec) or () for spec in (config.distill.joint, config.distill.checkpoint))
    )


def check_config(config: Config) -> None:
    """Raises UserError where a setting of ``config.distill`` cannot be."""
    if not config.distill.checkpoint:
        raise UserError(
            f"{_JOINT} needs config.distill.checkpoint: a workdir of configs/aligner.py:linked, "
            "whose searches are read"
        )
    check_at_least(2, config, "distill.depth")
    check_at_least(1, config, "distill.steps_per_question")
    check_choice("config.head.corpus", config.head.corpus, CORPORA)
    check_positive(config, "distill.weight")
