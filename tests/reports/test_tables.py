"""The table and the figure of an evaluation of retrieval."""

import matplotlib.image
import pytest

from cirag_jax.reports.tables import NAMES, table_of, write_report


def result_of(ks, main, leading="trained", data="x"):
    recalls = {f"recall@{k}": k / 20 for k in ks}
    recalls |= {f"complete@{k}": k / 50 for k in ks} | {f"ndcg@{k}": k / 25 for k in ks}
    recalls |= {"map": 0.1, "mrr": 0.2}
    lead = {f"recall@{main}": {"difference": 0.1, "low": 0.05, "high": 0.15}}
    return {
        **{name: recalls for name in NAMES if name in (leading, "bm25")},
        "differences": {f"{leading}-bm25": lead},
        "per_fold": {},
        "num_questions": 7,
        "num_passages": 9,
        "settings": {"data": data, "units": "triple", "steps": 4, "k": 10},
    }


def test_write_report_saves_figure_with_escaped_name(tmp_path):
    write_report(result_of((2, 5), 5, data="a$\\frac$\x00"), tmp_path)
    assert matplotlib.image.imread(tmp_path / "recall.png").shape[:2] == (600, 1125)
    assert "<!-- a$\\frac$\\x00, 7 questions -->" in (tmp_path / "recall.svg").read_text()


def test_table_has_rows_of_stopping_searches(tmp_path):
    result = result_of((2, 5), 5, "linked")
    assert "threshold" not in table_of(result | {"stops": None})
    result["stops"] = [{"stop": 0.25, "read": 2.46, "recall": 0.9, "exact": 0.5, "f1": 0.75}]
    _, _, caption, rows = table_of(result).split("\n\n")
    assert caption.startswith("aligner and links, trained, without passages whose probability")
    assert "R@K: share of the gold passages among the first K" in table_of(result)
    assert [cell.strip() for cell in rows.splitlines()[2].split("|")[1:-1]] == [
        "0.25", "2.5", "90.0", "50.0", "75.0",
    ]  # fmt: skip
    write_report(result, tmp_path)
    assert "stopping" in (tmp_path / "recall.svg").read_text()


@pytest.mark.parametrize("leading", ["trained", "linked", "links"])
@pytest.mark.parametrize(
    ("ks", "main"), [((2, 3, 5, 10), 5), ((4, 1), 4)], ids=["the papers", "others"]
)
def test_table_columns_are_the_k_of_the_config(ks, main, leading):
    header, _, first, *_ = table_of(result_of(ks, main, leading)).split("\n\n")[1].splitlines()
    cells = [cell.strip() for cell in header.split("|")[1:-1]]
    wanted = [*(f"R@{k}" for k in sorted(ks)), f"all@{main}", f"nDCG@{max(ks)}"]
    assert cells == ["retrieval", *wanted, f"lead of {leading} in R@{main}"]
    values = [*(5 * k for k in sorted(ks)), 2 * main, 4 * max(ks)]
    assert [cell.strip() for cell in first.split("|")[2:-2]] == [f"{value:.1f}" for value in values]
    assert "+10.0 [+5.0, +15.0]" in first and first.startswith("| BM25")


def test_table_without_a_leading_system_has_no_leads():
    result = result_of((2, 5), 5)
    del result["trained"]
    assert "lead of" not in table_of(result | {"differences": {}})
