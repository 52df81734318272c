"""The table of a retrieval evaluation, at the K that were asked for."""

import matplotlib.image
import pytest

from cirag_jax.reports.tables import NAMES, table_of, write_report


def result_of(ks, main, leading="trained", data="x"):
    recalls = {f"recall@{k}": k / 20 for k in ks}
    lead = {f"recall@{main}": {"difference": 0.1, "low": 0.05, "high": 0.15}}
    return {
        **{name: recalls for name in NAMES if name in (leading, "trained", "bm25")},
        "differences": {f"{leading}-bm25": lead},
        "per_fold": {},
        "num_questions": 7,
        "num_passages": 9,
        "settings": {"data": data, "units": "triple", "steps": 4, "k": 10},
    }


def test_the_figure_is_a_picture_of_both_kinds_and_a_name_no_mathematics(tmp_path):
    write_report(result_of((2, 5), 5, data="a$\\frac$\x00"), tmp_path)
    assert matplotlib.image.imread(tmp_path / "recall.png").shape[:2] == (600, 900)
    assert "<!-- a$\\frac$\\x00, 7 questions -->" in (tmp_path / "recall.svg").read_text()


@pytest.mark.parametrize("leading", ["trained", "linked"])
@pytest.mark.parametrize(
    ("ks", "main"), [((2, 3, 5, 10), 5), ((4, 1), 4)], ids=["the papers", "others"]
)
def test_the_columns_are_the_k_of_the_config(ks, main, leading):
    header, _, first, *_ = table_of(result_of(ks, main, leading)).split("\n\n")[1].splitlines()
    cells = [cell.strip() for cell in header.split("|")[1:-1]]
    wanted = [f"R@{k}" for k in sorted(ks)]
    assert cells == ["passages found by", *wanted, f"{leading} leads R@{main} by"]
    assert [cell.strip() for cell in first.split("|")[2:-2]] == [f"{5 * k:.1f}" for k in sorted(ks)]
    assert "+10.0 [+5.0, +15.0]" in first and first.startswith("| BM25")
