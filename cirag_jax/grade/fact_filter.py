"""A classifier that selects sentences that state facts (section 3.1)."""

from collections.abc import Sequence

from cirag_jax.grade.claims import ClaimSettings
from cirag_jax.models.io.workdir import open_cross_encoder
from cirag_jax.retrieval.pairs import score_pairs

_CHARACTERS = 512  # of a sentence, as in the released code


def find_facts(sentences: Sequence[str], settings: ClaimSettings) -> list[int]:
    """Returns the indices of the sentences that ``settings.classifier`` calls facts.

    The probability of ``settings.label`` is above one half.
    """
    assert settings.classifier is not None
    model, _ = open_cross_encoder(settings.classifier, label=settings.label)
    scores = score_pairs(model, None, [sentence[:_CHARACTERS] for sentence in sentences])
    return [index for index, score in enumerate(scores) if score > 0]
