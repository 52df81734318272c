"""The experiments of the papers' tables: their declarations, JSON files, and page."""

import collections
import json
import re
import shlex
import subprocess
import sys

import pytest

from cirag_jax import config_files
from cirag_jax.commands import task
from experiments import papers, paths, run
from experiments.papers import (
    benches,
    c2rag,
    cirag,
    costs,
    drawings,
    dualrag,
    grade,
    printed,
    results,
)
from experiments.papers.answers import Score, interval_of, needed, share
from experiments.paths import planning
from experiments.paths.declare import BENCHMARKS, SCALES, Cell, Experiment, Measured, Setup, Stage

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


def value_of(cell, results_of):
    measured = cell.measure(results_of)
    assert measured is not None
    return measured.value


def cells_of(workdir, name="cirag_table1"):
    content = json.loads((workdir / "results" / f"{name}.json").read_text())
    return {(c["row"], c["column"]["metric"]): c for c in content["cells"]}


def test_every_table_and_figure_is_declared():
    declared = papers.experiments()
    values = [table for paper in printed.PAPERS for table in printed.tables(paper).values()]
    assert {f"{table.paper}_{table.name}" for table in values} == declared.keys()
    assert len(declared) == 70  # C2RAG's Figure 3 is two of them


def test_every_row_is_measured_or_has_a_reason():
    for name, experiment in papers.experiments().items():
        table = experiment.table
        assert table is not None
        assert "smoke" in experiment.scales, name  # where every row is run
        assert experiment.missing.keys() <= {*table.rows}, name
        reasons = [reason.partition(": ") for reason in experiment.missing.values()]
        assert all(s in ("not implemented", "not run") and text for s, _, text in reasons), name
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


def test_costs_count_questions_and_shared_stages_once():
    def cost_of(name, scale):
        return costs.stages(papers.experiments()[name].scales[scale](), scale)

    table = cost_of("cirag_table2", "paper")  # three systems, 1,000 questions of each benchmark
    assert costs.text(table.values(), "paper") == "9,000 questions to answer, 1 trainings"
    kirag = cost_of("kirag_figure4", "paper").values()  # five values of L, and all dev questions
    assert sum(cost.questions for cost in kirag) == 5 * (7405 + 12576 + 2417)
    small = cost_of("cirag_table3", "small")
    seconds = [cost.seconds for cost in small.values() if cost.seconds]
    assert seconds == [47 * 100] * 18  # six variants on three benchmarks
    assert costs.text(small.values(), "small") == "about 24 h and 10 stages without an estimate"
    latency = cost_of("cirag_figure6", "paper")  # one command answers with all systems
    assert max(cost.questions for cost in latency.values()) == 7000
    smoke = cost_of("cirag_table2", "smoke")
    assert (
        costs.text(smoke.values(), "smoke")
        == f"about {costs.SECONDS_PER_STAGE * len(smoke) / 60:.0f} min"
    )
    both = {**smoke, **cost_of("cirag_table3", "smoke")}
    assert (
        len(both) == len(smoke) + 18
    )  # five further variants, and a comparison, on each benchmark
    generated = cost_of("grade_table11", "paper").values()
    assert "3 runs over generated questions" in costs.text(generated, "paper")


def test_plan_of_a_table_has_valid_commands(tmp_path):
    experiment = papers.experiments()["c2rag_figure3c"]
    plan = planning.plan([experiment], "smoke", tmp_path, None, {}, dry_run=True)
    commands = [" ".join(stage.words) for stage in plan.stages.values()]
    assert sum("plain_hops" in command for command in commands) == 3  # 0 is the preset's value


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["small", "paper"])
def test_commands_have_valid_configs(scale):
    seen = set()
    for experiment in {**papers.experiments(), **paths.experiments()}.values():
        setup = experiment.scales[scale]() if scale in experiment.scales else Setup({})
        # "" is a model of the user's own.
        values = {name: value or "own" for name, value in setup.variables.items()}
        for stage in setup.stages.values():
            command = stage.command
            for name, value in values.items():
                command = command.replace(f"{{{name}}}", value)
            if command in seen or not command.startswith("launch/answer.py"):
                continue
            seen.add(command)
            _, config, *flags = shlex.split(command)
            task.method_settings(config_files.load_config(config.partition("=")[2], flags))
    assert len(seen) > 100


def settings_of(bench, system):
    words = bench.command(system, {"data": "two_wiki"}).split()[2:]
    return dict(word.removeprefix("--config.").split("=", 1) for word in words)


@pytest.mark.parametrize("name", ["cirag_table1", "kirag_table1", "c2rag_table1"])
def test_rows_of_a_table_answer_the_same_questions(name):
    stages = papers.experiments()[name].scales["paper"]().stages
    questions = set()
    for command in (s.command for n, s in stages.items() if re.match("answer_.*_two_wiki", n)):
        _, config, *flags = shlex.split(command)
        made = config_files.load_config(config.partition("=")[2], flags)
        data = made.data
        questions.add((data.limit, data.random, data.corpus, data.contexts_as_corpus, made.profile))
    assert len(questions) == 1


def test_models_of_the_scale_paper_are_those_of_the_papers():
    base = settings_of(cirag.paper(), cirag.SYSTEMS["nativerag"])
    assert not {"model", "reader.model", "reader.backend"} & base.keys()  # those of the preset
    openai = settings_of(c2rag.paper(), c2rag.C2RAG)
    assert openai["planner.model"] == openai["reader.model"] == "gpt-4o-mini"


def test_students_of_dualrag_play_the_trained_roles():
    trained = ("reasoner", "entity_identifier", "summarizer")
    rows = {"DualRAG-FT": None, "w/o R-FT": "reasoner", "w/o EI-FT": "entity_identifier"}
    for bench, field in (
        (dualrag.smoke(), "adapter"), (benches.small(), "adapter"), (dualrag.paper(), "model")
    ):  # fmt: skip
        for row, untrained in rows.items():
            found = settings_of(bench, dualrag.SYSTEMS[row])
            own = [role for role in trained if found.get(f"{role}.{field}") == "{export_ft}/model"]
            assert own == [role for role in trained if role != untrained]
            assert found["dualrag.few_shot"] == "false" and "reader.adapter" not in found
        assert "dualrag.few_shot" not in settings_of(bench, dualrag.SYSTEMS["w/o FT"])
    cells = papers.experiments()["cirag_table1"].scales["paper"]().cells
    models = {column[0] for row, column in cells if row == "DualRAG-FT"}
    assert models == {"Qwen2.5-7B"}  # as in the paper


def test_kirags_counts_are_read_from_extraction_and_training():
    made_by = {
        "prepare_two_wiki": {"num_questions": {"train": 9, "dev": 7}, "num_passages": 40},
        "prepare_hotpotqa": {"num_questions": {"dev": 8}, "num_passages": 41},
        "abstracts": {"num_passages": 500},
        "extract_two_wiki": {"triples": 60, "passages": 40},
        "train": {
            "num_chains": 6, "num_dev_chains": 2, "mean_chain_length": 2.5,
            "mean_dev_chain_length": 2.0,
        },
    }  # fmt: skip
    found = {
        (name, row, *column): value_of(cell, made_by)
        for name in ("kirag_table6", "kirag_table7")
        for (row, column), cell in papers.experiments()[name].scales["paper"]().cells.items()
        if "musique" not in column
    }
    assert found == {
        ("kirag_table6", "questions", "hotpotqa"): 8,
        ("kirag_table6", "questions", "two_wiki"): 7,
        ("kirag_table6", "passages", "hotpotqa"): 500,
        ("kirag_table6", "passages", "two_wiki"): 40,
        ("kirag_table6", "triples per passage", "two_wiki"): 1.5,
        ("kirag_table7", "questions", "train"): 6,
        ("kirag_table7", "questions", "dev"): 2,
        ("kirag_table7", "mean chain length", "train"): 2.5,
        ("kirag_table7", "mean chain length", "dev"): 2.0,
    }


def test_examples_of_dualrags_student_are_summed_over_benchmarks():
    setup = papers.experiments()["dualrag_table1"].scales["paper"]()
    examples = {"reasoner": 5, "entity_identifier": 3, "summarizer": 4}
    results_of = {f"distill_ft_{data}": {"examples": examples} for data in BENCHMARKS}
    values = {row: value_of(cell, results_of) for (row, _), cell in setup.cells.items()}
    assert values == {
        "Reasoner": 15, "Entity Identifier": 9, "Knowledge Summarizer": 12, "Sum": 36,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_plans_of_all_tables_are_valid(scale, tmp_path):
    chosen = [e for e in papers.experiments().values() if scale in e.scales]
    plan = planning.plan(chosen, scale, tmp_path, None, {}, dry_run=True)
    assert not plan.problems and plan.names.keys() == {e.name for e in chosen}


# Tables of each paper with few stages.
_SMALL = (
    "cirag_figure3", "cirag_figure5", "kirag_table5", "kirag_table6", "dualrag_table1",
    "dualrag_table6", "dualrag_figure3", "c2rag_table3", "c2rag_table8", "c2rag_figure3c",
    "grade_table2", "grade_figure2", "grade_figure4",
)  # fmt: skip


@pytest.mark.slow
def test_tables_are_filled_at_the_scale_smoke(tmp_path):
    flags = ["--scale=smoke", f"--only={','.join(_SMALL)}", f"--workdir={tmp_path}"]
    for more in (["--set=questions=2"], ["--set=questions=2", "--collect"]):
        command = [sys.executable, "experiments/run.py", *flags, *more]
        done = subprocess.run(command, cwd=planning.ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    for name in _SMALL:
        cells = json.loads((tmp_path / "results" / f"{name}.json").read_text())["cells"]
        lacking = papers.experiments()[name].missing
        empty = [
            (cell["row"], cell["column"])
            for cell in cells
            if cell["row"] not in lacking and cell["value"] is None and not cell["reason"]
        ]
        assert not empty, name
        assert any(cell["value"] is not None for cell in cells), name


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


def test_rows_are_compared_with_the_papers_system(declared, tmp_path, capsys):
    rows = ["Q, base", "Q, own", "Q, bad", "R, base"]
    table = printed.Printed(
        "cirag", "table1", "Pairs", {"metric": ["f1"]}, rows, {}, "p < 0.05", ["own"]
    )
    assert [table.own_row(row) for row in rows] == ["Q, own", None, "Q, own", None]
    cells = {(row, ("f1",)): Cell([("a", Score(row, "f1"))]) for row in rows}
    setup = Setup({"a": Stage(f"{MADE_UP} --add=1")}, cells=cells)
    declared(Experiment("cirag_table1", "Pairs", {"smoke": lambda: setup}, table))
    flags = [f"--workdir={tmp_path}"]
    assert run.main(flags) == 0
    pair = {"difference": 0.125, "low": -0.03, "high": 0.2, "p": 0.01, "p_holm": 0.04}
    result = {
        "num_questions": 4,
        "systems": {row: {"f1": {"value": 0.5, "low": 0.4, "high": 0.6}} for row in rows},
        "differences": {
            "Q, own-Q, base": {"f1": pair, "em": {**pair, "difference": 0.9}},
            "R, base-Q, own": {"f1": pair},
        },
    }
    (file,) = tmp_path.glob("*/result.json")
    file.write_text(json.dumps(result))
    assert run.main([*flags, "--collect"]) == 0
    found = {row: cell["paired"] for (row, _), cell in cells_of(tmp_path).items()}
    own = {"difference": -12.5, "low": -20.0, "high": 3.0, "p_holm": 0.04}
    assert found == {"Q, base": pytest.approx(own), "Q, own": None, "Q, bad": None, "R, base": None}
    page = (tmp_path / "reproduction.md").read_text()
    assert "Statistics of the paper: p < 0.05. Ours: differences from Q, own on the" in page
    (line,) = [line for line in page.splitlines() if "p = 0.040" in line]
    assert line.split("|")[1:3] == [" Q, base ", " -12.5 [-20.0, +3.0], p = 0.040 "]
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
    result = {"stages": [{"stage": "triple", "num_questions": 0}]}
    stage = cirag._stage_of("cascade, triple", "x", {"metric": "f1"})(result)
    assert stage == Measured(None, reason="no question was answered at this granularity")


def test_grade_places_are_read_from_rows():
    place = grade.place_of("Sports, o1-mini, 2-hop", {"quartile": "Q1"}, {})
    assert (place["domain"], place["model"], place["hops"]) == ("Sports", "o1-mini", "2-hop")
    chunks = grade.place_of("64-128 tokens, 25 overlap, 5-hop", {}, {"domain": "Health"})
    assert (chunks["chunks"][:6], chunks["hops"], chunks["domain"]) == ("64-128", "5-hop", "Health")
    aggregates = [grade.place_of(f"Sports, {n}", {}, {})["aggregate"] for n in ("Mean", "Min")]
    assert aggregates == ["Mean", "Min"]
    assert grade.place_of("Sports, Power Mean", {}, {})["aggregate"] == "Power Mean"


def test_grade_cells_are_read_from_a_difficulty_matrix():
    def rate(value):
        return {"value": value, "low": value - 0.1, "high": value + 0.2, "num_questions": 7}

    undefined = {"value": None, "reason": "fewer than 3 points (2)"}
    correlations = {"bins": {"2": {"value": 0.9}, "3": undefined}, "mean": {"value": 0.8}}
    system = {
        "matrix": {"2": [rate(0.1), rate(0.2), rate(0.3), rate(0.4)]},
        "by_hops": {"2": rate(0.25)},
        "correlations": {"min": correlations, "mean": {"mean": {"value": 0.5}}},
    }
    hops = {"2": {"num_questions": 28}, "3": {"num_questions": 2}}
    result = {"num_questions": 30, "hops": hops, "systems": {"native_rag": system}}

    def read(reader, row, **axes):
        return reader(grade.place_of(row, axes, {}))(result)

    third = read(grade.error, "Sports, 2-hop", quartile="Q3")
    assert third == Measured(0.3, pytest.approx(0.2), 0.5, 7)
    right = read(grade.accuracy, "Sports", hops="2-hop")
    assert right == Measured(0.75, 0.55, 0.85, 7)
    none = Measured(None, count=0, reason="no 4-hop questions")
    assert read(grade.error, "4-hop", quartile="Q1") == none
    assert read(grade.correlation, "2-hop") == Measured(0.9, count=28)
    assert read(grade.correlation, "3-hop").reason == "fewer than 3 points (2)"
    assert read(grade.correlation, "Average").value == 0.8
    assert read(grade.correlation, "Health, Mean").value == 0.5
    shares = {"exact": 1.0, "context": 2.0, "either": 3.0}
    generated = {"needs_link": {"2": shares}, "hops": {"2": 9}}
    place = grade.place_of("2-hop", {"kind": "contextual", "domain": "Health"}, {})
    assert grade.links(place)(generated) == Measured(2.0, count=9)


def test_grade_smoke_shares_runs_with_its_path(tmp_path):
    chosen = [paths.experiments()["grade_path"], *grade.EXPERIMENTS]
    plan = planning.plan(chosen, "smoke", tmp_path, None, {}, dry_run=True)
    both = {"grade_path", "grade_table7"}
    shared = {stage.name for stage in plan.stages.values() if both <= {*stage.experiments}}
    assert shared == {"files", "questions", "answer_multi_step"}
    # One run of each system, and NativeRAG with two other chunks; each has a judge and a matrix.
    assert collections.Counter(stage.program for stage in plan.stages.values()) == {
        "files": 1, "generate_questions": 3, "answer": 5, "evaluate": 12,
    }  # fmt: skip


def cells_for(table, value=None):
    """Returns made-up cells; some of them were not run."""
    cells = []
    for number, row in enumerate(table.rows):
        for place, column in enumerate(table.columns):
            own = value if value is not None else 0.1 + 0.02 * (number + place) % 0.8
            measured = number < 3 or "quartile" in table.axes
            score = {"value": own, "low": own - 0.05, "high": own + 0.1, "count": 7}
            cells.append({"row": row, "column": table.axis_values(column), **score})
            if not measured:
                cells[-1]["value"] = None
    return cells


FIGURES = [
    table
    for paper in printed.PAPERS
    for table in printed.tables(paper).values()
    if table.name.startswith("figure")
]


@pytest.fixture
def drawn(monkeypatch):
    """Keeps the figures instead of writing them."""
    kept = {}

    def save(figure, folder, name):
        kept[name] = figure

    monkeypatch.setattr(drawings.figures, "save", save)
    yield kept
    for figure in kept.values():
        drawings.figures.pyplot().close(figure)


def test_every_figure_is_drawn_with_what_is_better(drawn, tmp_path):
    for table in FIGURES:
        assert drawings.draw(table, cells_for(table), tmp_path), table.name
    assert len(drawn) == len(FIGURES) == 20
    titles = {name: figure.get_suptitle() for name, figure in drawn.items()}
    assert titles["cirag_figure6"] == "Latency and F1 on 2WikiMultihopQA\n(upper left is better)"
    assert titles["c2rag_figure3c"].endswith("(lower is better)")
    assert titles["kirag_figure4"].endswith("(higher is better)")
    panels = {name: [axes.get_title() for axes in f.axes] for name, f in drawn.items()}
    assert panels["cirag_figure7"] == ["F1", "EM"]
    assert panels["c2rag_figure4"] == ["gamma EM", "m EM", "K_s EM"]  # K_t was not run
    ticks = [tick.get_text() for tick in drawn["c2rag_figure4"].axes[0].get_xticklabels()]
    assert ticks == ["0.5", "1", "1.5", "2", "2.5"]


def test_figures_show_only_measured_values(drawn, tmp_path):
    table = printed.tables("cirag")["figure7"]
    cells = cells_for(table)
    cells[1]["value"] = None  # EM of CIRAG with one step
    assert drawings.draw(table, cells, tmp_path)
    f1, em = drawn["cirag_figure7"].axes
    assert f1.get_legend() is None  # one for all panels
    assert [text.get_text() for text in em.get_legend().get_texts()] == ["CIRAG", "KiRAG", "IRCOT"]
    curve, _, (bars,) = em.containers[0]
    assert list(curve.get_xdata()) == [1, 2, 3, 4, 5]
    value = curve.get_ydata()[0]
    assert bars.get_segments()[0][:, 1] == pytest.approx([value - 0.05, value + 0.1])


def test_stacked_bars_add_up(drawn, tmp_path):
    table = printed.tables("cirag")["figure3"]
    assert drawings.draw(table, cells_for(table, 20.0), tmp_path)
    bars = drawn["cirag_figure3"].axes[0].patches
    assert [bar.get_y() for bar in bars] == [0, 0, 20, 20, 40, 40, 60, 60]
    assert [bar.get_height() for bar in bars] == [20] * 6 + [0] * 2  # default was not run


def test_nothing_is_drawn_without_values(tmp_path):
    for table in FIGURES:
        cells = [{**cell, "value": None} for cell in cells_for(table)]
        assert not drawings.draw(table, cells, tmp_path)
    table = printed.tables("cirag")["table1"]
    assert not drawings.draw(table, cells_for(table), tmp_path)
    assert not list(tmp_path.iterdir())


def test_page_shows_the_figures_that_were_run(declared, tmp_path):
    table = printed.tables("cirag")["figure3"]
    declared(Experiment("cirag_figure3", table.title, {}, table))
    result = {"scale": "small", "commits": ["a" * 9], "machines": ["m"]}
    cells = [
        {**cell, "reason": "", "state": "measured", "difference": None}
        for cell in cells_for(table, 20.0)
    ]
    (tmp_path / "cirag_figure3.json").write_text(json.dumps({**result, "cells": cells}))
    results.write_page(papers.experiments().values(), tmp_path, tmp_path / "page.md")
    assert "(images/cirag_figure3.png)" in (tmp_path / "page.md").read_text()
    files = sorted(file.name for file in (tmp_path / "images").iterdir())
    assert files == ["cirag_figure3.png", "cirag_figure3.svg"]


def test_sizes_of_graphs_are_read_from_a_comparison():
    table = papers.experiments()["c2rag_table4"]
    setup = table.scales["smoke"]()
    stages = papers.experiments()["c2rag_table1"].scales["smoke"]().stages.values()
    own = {s.command for s in setup.stages.values() if "launch/answer.py" in s.command}
    assert len(own) == 3 and own <= {stage.command for stage in stages}
    graphs = {"questions": 4, "passages": 40, "entities": 7, "relations": 5, "triples": 6}
    result = {"systems": {"C2RAG": {"graphs": graphs}}}
    cells = {
        column[0]: setup.cells["MuSiQue", column].measure({"table_musique": result})
        for _, column in setup.cells
    }
    del graphs["questions"]
    assert cells == {name: Measured(size, count=4) for name, size in graphs.items()}
