"""The table of model families: it is complete, and its command compares real models."""

import pathlib
import re

import pytest

from cirag_jax.models.io import decoder_families, weights
from experiments import parity

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/models.md"
ROWS = {
    cells[1].strip(" `"): [cell.strip() for cell in cells[2:-1]]
    for cells in (line.split("|") for line in PAGE.read_text("utf-8").splitlines())
    if re.fullmatch(r" `[\w-]+` +", cells[1] if len(cells) > 9 else "")
}


def test_models_page_has_row_per_family():
    families = [*decoder_families.FAMILIES, *weights.FAMILIES]
    assert sorted(ROWS) == sorted({"model_type", *families}), (
        "run: python experiments/parity.py --docs=docs/models.md"
    )
    for name, (models, _, gguf, exact, vectors, ours, theirs) in ROWS.items():
        if name == "model_type":
            continue
        assert models == parity.MODELS.get(name, "")
        assert gguf == parity.gguf_of(name)
        assert max(float(exact), float(vectors or 0)) <= parity.LIMIT
        assert float(ours) < 1.5 * float(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", parity.KINDS)
def test_parity_every_family_equals_transformers(kind):
    for family in parity.KINDS[kind][0]:
        exact, ours, theirs = parity.compare(kind, family)
        assert exact <= parity.LIMIT and ours < 1.5 * theirs, family
