"""The table of a retrieval evaluation, at the K that were asked for."""

import pytest

from cirag_jax.reports.tables import NAMES, table_of


@pytest.mark.parametrize("leading", ["trained", "linked"])
@pytest.mark.parametrize(
    ("ks", "main"), [((2, 3, 5, 10), 5), ((4, 1), 4)], ids=["the papers", "others"]
)
def test_the_columns_are_the_k_of_the_config(ks, main, leading):
    recalls = {f"recall@{k}": k / 20 for k in ks}
    lead = {f"recall@{main}": {"difference": 0.1, "low": 0.05, "high": 0.15}}
    result = {
        **{name: recalls for name in NAMES if name in (leading, "trained", "bm25")},
        "differences": {f"{leading}-bm25": lead},
        "per_fold": {},
        "num_questions": 7,
        "num_passages": 9,
        "settings": {"data": "x", "units": "triple", "steps": 4, "k": 10},
    }
    header, _, first, *_ = table_of(result).split("\n\n")[1].splitlines()
    cells = [cell.strip() for cell in header.split("|")[1:-1]]
    wanted = [f"R@{k}" for k in sorted(ks)]
    assert cells == ["passages found by", *wanted, f"{leading} leads R@{main} by"]
    assert [cell.strip() for cell in first.split("|")[2:-2]] == [f"{5 * k:.1f}" for k in sorted(ks)]
    assert "+10.0 [+5.0, +15.0]" in first and first.startswith("| BM25")
