"""The experiments of the papers' tables: their declarations, JSON files, and page."""

import json

import pytest

from experiments import papers, paths, run
from experiments.papers import printed, results
from experiments.papers.answers import interval_of, needed, share
from experiments.paths import planning
from experiments.paths.declare import SCALES, Cell, Experiment, Measured, Setup, Stage

MADE_UP = "-m tests.experiments.made_up_stage --out={out}"
TABLE = printed.Printed(
    "cirag", "table1", "Sums", {"metric": ["sum", "twice"]}, ["A", "B", "C"],
    {("A", ("sum",)): 5.0, ("A", ("twice",)): 9.0, ("C", ("sum",)): 1.0},
)  # fmt: skip


def reader(factor):
    return lambda result: Measured(factor * result["sum"], None, None, 3)


def made(name="cirag_table1", stage="--add=2"):
    cells = {("A", (metric,)): Cell([("a", reader(n))]) for n, metric in ((1, "sum"), (2, "twice"))}
    cells["B", ("sum",)] = Cell([("a", reader(1)), ("b", reader(1))])
    stages = {
        "a": Stage(f"{MADE_UP} {stage}"),
        "b": Stage(f"{MADE_UP} --add=4 --input={{a}}"),
    }
    missing = {"C": "not implemented: made up"}
    setup = Setup(stages, cells=cells)
    return Experiment(name, "Sums", {"smoke": lambda: setup}, TABLE, missing)


@pytest.fixture
def declared(monkeypatch):
    def declare(*experiments):
        monkeypatch.setattr(paths, "experiments", dict)
        monkeypatch.setattr(papers, "experiments", lambda: {e.name: e for e in experiments})

    return declare


def cells_of(workdir, name="cirag_table1"):
    content = json.loads((workdir / "results" / f"{name}.json").read_text())
    return {(c["row"], c["column"]["metric"]): c for c in content["cells"]}


def test_every_table_and_figure_is_declared():
    declared = papers.experiments()
    values = [table for paper in printed.PAPERS for table in printed.tables(paper).values()]
    assert {f"{table.paper}_{table.name}" for table in values} == declared.keys()
    assert len(declared) == 70  # C2RAG's Figure 3 is two of them
    for experiment in declared.values():
        assert experiment.scales or experiment.unsupported, experiment.name


def test_every_row_is_measured_or_has_a_reason():
    for name, experiment in papers.experiments().items():
        table = experiment.table
        assert table is not None
        for scale, setup in experiment.scales.items():
            cells = setup().cells
            assert cells, (name, scale)
            assert {row for row, _ in cells} <= {*table.rows} - experiment.missing.keys()
            assert {column for _, column in cells} <= {*table.columns}
            if scale == "smoke":  # has all data sets
                columns = {row: {c for r, c in cells if r == row} for row in table.rows}
                for row in table.rows:
                    assert row in experiment.missing or columns[row] == {*table.columns}, name


def test_every_stage_is_needed_by_a_cell():
    for name, experiment in papers.experiments().items():
        for setup in experiment.scales.values():
            stages, cells = setup().stages, setup().cells
            for left_out in (stage for cell in cells.values() for stage, _ in cell.sources):
                assert left_out in stages, name
            assert needed(stages, cells).keys() == stages.keys(), name


def test_tables_share_the_runs_of_equal_systems():
    """Figure 7's four steps are Table 1's answers, and Table 3's full cascade is Table 2's."""

    def answers(name):
        stages = papers.experiments()[name].scales["smoke"]().stages.values()
        return {stage.command for stage in stages if "launch/answer.py" in stage.command}

    first, steps = answers("cirag_table1"), answers("cirag_figure7")
    shared = {command.partition("methods/")[2].partition(".")[0] for command in first & steps}
    assert shared == {"cirag", "kirag", "ircot", "dualrag"}
    assert len(answers("cirag_table2") & answers("cirag_table3")) == 3  # one for each data set


def test_plan_of_a_table_has_valid_commands(tmp_path):
    experiment = papers.experiments()["c2rag_figure3c"]
    plan = planning.plan([experiment], "smoke", tmp_path, None, {}, dry_run=True)
    commands = [" ".join(stage.words) for stage in plan.stages.values()]
    assert sum("plain_hops" in command for command in commands) == 3  # 0 is the preset's value


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_plans_of_all_tables_are_valid(scale, tmp_path):
    chosen = [e for e in papers.experiments().values() if scale in e.scales]
    plan = planning.plan(chosen, scale, tmp_path, None, {}, dry_run=True)
    assert not plan.problems and plan.names.keys() == {e.name for e in chosen}


def test_collect_writes_values_differences_and_states(declared, tmp_path, capsys):
    declared(made())
    flags = [f"--workdir={tmp_path}"]
    assert run.main(flags) == 0 and run.main([*flags, "--collect"]) == 0
    cells = cells_of(tmp_path)
    assert (cells["A", "sum"]["value"], cells["A", "sum"]["difference"]) == (2.0, -3.0)
    assert (cells["A", "twice"]["value"], cells["A", "twice"]["count"]) == (4.0, 3)
    assert (cells["B", "sum"]["value"], cells["B", "sum"]["difference"]) == (4.0, None)  # a mean
    assert cells["B", "twice"]["state"] == "not run" and cells["B", "twice"]["value"] is None
    assert cells["C", "sum"]["state"] == "not implemented"
    page = (tmp_path / "reproduction.md").read_text()
    assert "scale `smoke`, n = 3-6" in page and "C: not implemented: made up." in page
    lines = [
        [c.strip() for c in line.split("|")[1:-1]] for line in page.splitlines() if "|" in line
    ]
    assert ["A", "5.0 → 2.0 (-3.0)", "9.0 → 4.0 (-5.0)"] in lines
    assert ["B", "– → 4.0", "– → not run"] in lines
    first = (tmp_path / "results" / "cirag_table1.json").read_text()
    run.main([*flags, "--collect"])
    assert (tmp_path / "results" / "cirag_table1.json").read_text() == first
    capsys.readouterr()


def test_collect_without_a_stage_has_no_value(declared, tmp_path, capsys):
    declared(made())
    run.main([f"--workdir={tmp_path}", "--until=a"])
    run.main([f"--workdir={tmp_path}", "--collect"])
    cells = cells_of(tmp_path)
    assert cells["A", "sum"]["value"] == 2.0 and cells["B", "sum"]["state"] == "not run"
    capsys.readouterr()


def test_failing_experiment_is_named_and_others_finish(declared, tmp_path, capsys):
    declared(made(), made("cirag_table2", "--file={data}/x"), made("cirag_table3", "--fail"))
    assert run.main([f"--workdir={tmp_path}", "--scale=smoke"]) == 1
    out, err = capsys.readouterr()
    assert "left out: cirag_table2/a: --data=DIR is required" in err
    assert "cirag_table3/a failed (exit code 3" in err
    assert json.loads(out)["cirag_table1"]["complete"] and "cirag_table2" not in json.loads(out)
    assert run.main([f"--workdir={tmp_path}", "--collect"]) == 1
    assert cells_of(tmp_path)["A", "sum"]["value"] == 2.0
    assert not (tmp_path / "results" / "cirag_table3.json").exists()
    capsys.readouterr()


def test_unsupported_scale_states_the_reason(capsys, tmp_path):
    assert run.main(["--only=grade_table9", "--scale=small", f"--workdir={tmp_path}"]) == 2
    assert "grade_table9 has no --scale=small: no data set stands in for its domain" in (
        capsys.readouterr().err
    )


def test_page_of_all_tables_is_up_to_date(tmp_path):
    page = tmp_path / "page.md"
    results.write_page(papers.experiments().values(), results.FOLDER, page)
    written = results.PAGE.read_text("utf-8")
    assert written == page.read_text("utf-8"), "run python experiments/run.py --collect"
    assert written.count("### ") == 70 and "Ours: not run" in written


def test_readers_of_undefined_scores_return_the_reason():
    nothing = interval_of({"value": float("nan"), "reason": "no gold answer"}, 4)
    assert nothing == Measured(None, None, None, 4, "no gold answer")
    assert interval_of({"value": 0.5, "low": 0.25, "high": 0.75}, 4)[:4] == (50, 25, 75, 4)
    result = {"num_questions": 4, "systems": {"x": {"granularities": {"triple": 3, "passage": 1}}}}
    assert share("x", "granularities", "triple")(result).value == 75
