"""Comparison of runs: scores and differences computed by hand, and rejected runs."""

import dataclasses
import pathlib

import matplotlib.image
import pytest

from cirag_jax.commands import comparison as command
from cirag_jax.errors import UserError
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.types import Step
from configs import comparison
from tests.reports import made_up
from tests.reports.made_up import PREDICTION, many, write_journal


def workdir(root, name, pairs, **kwargs):
    (root / name).mkdir()
    write_journal(root / name / JOURNAL, pairs, **kwargs)
    return str(root / name)


def compare(tmp_path, *specs, **fields):
    config = comparison.get_config()
    config.runs = specs
    config.update_from_flattened_dict({"bootstrap_samples": 200, **fields})
    (tmp_path / "c").mkdir(exist_ok=True)
    return command.compare(config.lock(), tmp_path / "c")


def answered(pairs, change):
    return [(q, change(i, p)) for i, (q, p) in enumerate(pairs)]


def test_compare_two_runs_gives_scores_and_differences(tmp_path, capsys):
    """Of six questions, the first run answers four correctly; the second run only one."""
    pairs = many(6)
    worse = answered(
        pairs,
        lambda i, p: (
            None
            if i == 2
            else dataclasses.replace(
                PREDICTION,
                answer="Orlin County" if i == 0 else "Orlin Bay",
                granularity="triple" if i < 4 else "passage",
                passages=("p-other", "p-bay", "p-ferry", "p-varga"),
            )
        ),
    )
    first = workdir(tmp_path, "a", pairs)
    second = workdir(tmp_path, "b", worse, failed=[pairs[2][0]])
    result = compare(tmp_path, f"student={first}", second)
    student, other = result["systems"]["student"], result["systems"]["b"]
    # Gold: Orlin County or Orlin. "Ferry County" and "Orlin Bay" have one gold word each.
    assert student["em"]["value"] == pytest.approx(4 / 6)
    assert student["f1"]["value"] == pytest.approx((4 + 2 * 0.5) / 6)
    assert other["em"]["value"] == pytest.approx(1 / 6)
    assert other["f1"]["value"] == pytest.approx((1 + 4 * 2 / 3) / 6)
    # Each question has four gold passages, one of which does not exist.
    assert student["recall@3"]["value"] == student["recall@5"]["value"] == pytest.approx(3 / 4)
    assert other["recall@3"]["value"] == pytest.approx(5 / 6 * 1 / 4)
    assert other["recall@5"]["value"] == pytest.approx(5 / 6 * 2 / 4)
    assert student["granularities"] == {"triple": 0, "sentence": 4, "passage": 0, "default": 2}
    assert other["granularities"] == {"triple": 3, "sentence": 0, "passage": 2, "default": 0}
    assert (student["failures"], other["failures"]) == (0, 1)
    assert student["generated_tokens"] == 31 and student["calls"] == 2
    lead = result["differences"]["student-b"]["em"]
    assert lead["difference"] == pytest.approx(0.5) and lead["low"] <= 0.5 <= lead["high"]
    assert list(result["differences"]) == ["student-b"]
    assert (result["num_questions"], result["num_annotated"]) == (6, 6)
    table = (tmp_path / "c" / "table.md").read_text()
    assert "| student " in table and "+50.0 [" in table and "67 %" in table and "33 %" in table
    assert table.strip() in capsys.readouterr().err
    assert matplotlib.image.imread(tmp_path / "c" / "granularities.png").shape[:2] == (390, 1050)
    against = compare(tmp_path, f"student={first}", second, baseline="student")["differences"]
    assert list(against) == ["b-student"]
    assert against["b-student"]["em"]["difference"] == pytest.approx(-0.5)


def test_compare_run_with_malformed_responses_is_not_ranked(tmp_path):
    """Each question has one response; in the first run, three of four are malformed."""
    pairs = many(4)
    lost = answered(
        pairs,
        lambda i, p: dataclasses.replace(
            p, answer=" " if i == 1 else p.answer, parse_errors={"no_facts": 2} if i else {}
        ),
    )
    half = answered(pairs, lambda i, p: dataclasses.replace(p, parse_errors={"no_facts": i // 2}))
    most = answered(pairs, lambda i, p: dataclasses.replace(p, parse_errors={"no_facts": i // 3}))
    gone = [(q, None if i == 0 else p) for i, (q, p) in enumerate(pairs)]
    folders = [
        workdir(tmp_path, "lost", lost),
        workdir(tmp_path, "half", half),
        workdir(tmp_path, "most", most),
        workdir(tmp_path, "gone", gone, failed=[pairs[0][0]]),
    ]
    result = compare(tmp_path, *folders)
    systems = result["systems"]
    assert [s["parse_rate"]["value"] for s in systems.values()] == [0.25, 0.5, 0.75, 1.0]
    assert [s["is_ranked"] for s in systems.values()] == [False, False, True, True]
    assert list(result["differences"]) == ["most-gone"]
    shares = [tuple(s["outcomes"].values()) for s in systems.values()]
    assert shares == [(0.75, 0.25, 0), (1, 0, 0), (1, 0, 0), (0.75, 0, 0.25)]
    assert systems["lost"]["parse_errors"] == {"no_facts": 1.5}
    assert systems["gone"]["parse_errors"] == {"passage_without_triples": 1.5}
    table = (tmp_path / "c" / "table.md").read_text("utf-8")
    scores, outcomes = table.split("\n\n")[:4:2], table.split("\n\n")[1:4:2]
    assert "malformed: lost (parse rate 25.0 %), half (parse rate 50.0 %)" in scores[0]
    assert [line.split()[1] for line in outcomes[0].splitlines()[2:]] == [
        "most",
        "gone",
        "lost",
        "half",
    ]
    row = next(line for line in outcomes[1].splitlines() if line.startswith("| lost †"))
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells[3].startswith("25.0 [")
    assert cells[:3] + cells[4:] == ["75.0", "25.0", "0.0", "no_facts 1.50", "900", "31"]
    for kind in ("png", "svg"):
        assert (tmp_path / "c" / f"tokens.{kind}").is_file()
    assert 'alt="tokens"' in (tmp_path / "c" / "table.html").read_text("utf-8")


def test_compare_recall_by_step_is_cumulative(tmp_path):
    pairs = many(3)
    short = answered(pairs, lambda i, p: dataclasses.replace(p, steps=p.steps[: i or None]))
    lost = answered(pairs, lambda i, p: None if i == 2 else p)
    folders = [
        workdir(tmp_path, "a", short),
        workdir(tmp_path, "b", lost, failed=[pairs[2][0]]),
        workdir(tmp_path, "c", answered(pairs, lambda i, p: dataclasses.replace(p, steps=()))),
    ]
    systems = compare(tmp_path, *folders)["systems"]
    values = {n: [step["value"] for step in s["recall_by_step"]] for n, s in systems.items()}
    assert values["a"] == pytest.approx([1 / 4, (2 + 1 + 2) / 12, (3 + 1 + 2) / 12])
    assert values["b"] == pytest.approx([1 / 6, 2 / 6, 3 / 6]) and values["c"] == []
    table = (tmp_path / "c" / "table.md").read_text()
    header = next(line for line in table.splitlines() if "step 1" in line)
    assert "step 3" in header and "| a   | 25.0 [" in table
    assert "Recall by step" in (tmp_path / "c" / "table.html").read_text()
    assert matplotlib.image.imread(tmp_path / "c" / "recall_by_step.png").shape[:2] == (600, 1050)


def test_compare_undefined_score_has_a_reason(tmp_path):
    """Here, one run ranks no triples, and no question has gold sentences."""
    pairs = [(dataclasses.replace(q, supporting_sentences=()), p) for q, p in many(2)]
    bare = answered(pairs, lambda i, p: dataclasses.replace(p, triples=()))
    folders = [workdir(tmp_path, "a", pairs), workdir(tmp_path, "b", bare)]
    families = ("answers", "recall", "hits", "by_granularity")
    result = compare(tmp_path, *folders, metrics=families, recall_at=(3,))
    a, b = result["systems"].values()
    reasons = {name: b[name].get("reason") for name in result["scores"]}
    assert reasons == {
        **dict.fromkeys(("em", "f1", "acc", "recall@3", "sentence_em", "sentence_f1")),
        "sentence_recall@3": "no gold sentences",
        "triple_recall@3": "ranks no triples",
        "hit@3": "gold passages are known",
        **{
            f"{stage}_{name}": "no question was answered at this granularity"
            for stage in ("triple", "passage", "default")
            for name in ("em", "f1")
        },
    }
    assert all(
        (b[n]["value"] != b[n]["value"]) == (reason is not None) for n, reason in reasons.items()
    )
    assert "reason" not in a["triple_recall@3"]
    differences = result["differences"]["a-b"]
    assert differences["triple_recall@3"]["reason"] == "ranks no triples"
    assert "reason" not in differences["f1"]
    table = (tmp_path / "c" / "table.md").read_text()
    assert "; n/a for b: ranks no triples (triple R@3)\n" in table
    without_answers = [(dataclasses.replace(q, answers=()), p) for q, p in pairs]
    none = compare(tmp_path, workdir(tmp_path, "d", without_answers))
    assert none["systems"]["d"]["f1"]["reason"] == "no gold answer"


def test_compare_method_without_corpus_has_no_recall(tmp_path, monkeypatch):
    folders = [workdir(tmp_path, name, many(2)) for name in "ab"]
    monkeypatch.setattr(
        command.FinishedRun, "needs", property(lambda run: command.Needs(corpus=run.name == "a"))
    )
    result = compare(tmp_path, *folders, metrics=("answers", "recall"), recall_at=(3,))
    assert result["systems"]["b"]["recall@3"]["reason"] == "retrieves nothing"
    assert "recall@3" not in result["differences"]["a-b"]
    table = (tmp_path / "c" / "table.md").read_text()
    assert "; n/a for b: retrieves nothing (R@3, sentence R@3, triple R@3)\n" in table


def test_compare_small_p_value_is_shown_as_bound(tmp_path):
    pairs = many(30)
    wrong = answered(pairs, lambda i, p: dataclasses.replace(p, answer="Bergen"))
    first, second = workdir(tmp_path, "a", pairs), workdir(tmp_path, "b", wrong)
    compare(tmp_path, first, second, bootstrap_samples=3000)
    table = (tmp_path / "c" / "table.md").read_text()
    assert "p<0.001" in table and "p=0.000" not in table


def test_compare_folder_with_equals_sign_is_read(tmp_path):
    folder = workdir(tmp_path, "k=5", many(1))
    assert list(compare(tmp_path, folder)["systems"]) == ["k=5"]
    assert list(compare(tmp_path, f"five={folder}")["systems"]) == ["five"]


def test_compare_one_run_ignores_questions_without_gold(tmp_path):
    pairs = many(2)
    pairs[1] = (dataclasses.replace(pairs[1][0], answers=(), supporting=None), pairs[1][1])
    result = compare(tmp_path, workdir(tmp_path, "a", pairs))
    assert result["systems"]["a"]["em"]["value"] == 1 and result["num_annotated"] == 1
    assert result["differences"] == {}


def write_repeats(tmp_path, pairs, count=2, passages=made_up.PASSAGES):
    """Writes a run that has online extractions and equal answers for several seeds."""
    folder = workdir(tmp_path, "a", pairs)
    for number in range(2, count + 1):
        workdir(tmp_path / "a", f"repeat-{number}", pairs, passages=passages)
    for path in ("", *(f"repeat-{number}" for number in range(2, count + 1))):
        write_journal(tmp_path / "a" / path / "extractions.sqlite", pairs)
    return folder


def test_compare_repeats_without_answer_scores_have_std(tmp_path):
    pairs = many(2)
    unanswered = [(dataclasses.replace(q, answers=()), p) for q, p in pairs]
    folder = write_repeats(tmp_path, unanswered)
    for metrics in (("recall",), ("answers", "recall")):
        result = compare(tmp_path, folder, metrics=metrics)
        assert result["systems"]["a"]["repeats"] == {
            "count": 2,
            "std": {
                name: 0.0 for name in result["scores"] if name.startswith(("rec", "sen", "tr"))
            },
        }
        table = (tmp_path / "c" / "table.md").read_text("utf-8")
        assert "means over runs with different seeds: a over 2\n" in table
        assert "nan" not in table


def test_compare_seed_is_scored_with_its_own_passages(tmp_path):
    pairs = [
        (dataclasses.replace(q, answers=("Ilse Varga",), supporting=None), p) for q, p in many(1)
    ]
    only = {"p-lantern": made_up.PASSAGES["p-lantern"]}
    folder = workdir(tmp_path, "a", pairs, passages=only)
    workdir(tmp_path / "a", "repeat-2", pairs)
    assert compare(tmp_path, folder)["systems"]["a"]["hit@3"]["value"] == 0.5


def test_compare_repeats_limit_ignores_further_seeds(tmp_path):
    folder = write_repeats(tmp_path, many(2), count=3)
    assert compare(tmp_path, folder)["systems"]["a"]["roles"]["reader"]["calls"] == 2
    config = comparison.get_config()
    config.bootstrap_samples = 20
    for repeats in (1, 2):
        result = command.compare_runs(
            config.lock(), [("a", tmp_path / "a")], tmp_path / "c", True, repeats
        )
        assert result["systems"]["a"]["repeats"]["count"] == repeats
        assert result["systems"]["a"]["roles"]["reader"]["calls"] == 2


def test_compare_trajectories_without_answers_are_refused(tmp_path):
    bare = answered(many(1), lambda i, p: dataclasses.replace(p, attempts=()))
    teacher = {"teacher.kind": "annotations"}
    folder = workdir(tmp_path, "a", bare, **teacher)
    with pytest.raises(UserError, match=r"a is a run of launch/distill.py without answers"):
        compare(tmp_path, folder)
    # Other methods need not record attempts.
    assert compare(tmp_path, workdir(tmp_path, "b", bare))["num_questions"] == 1
    assert compare(tmp_path, workdir(tmp_path, "d", many(1), **teacher))["num_questions"] == 1


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            lambda pairs: pairs[:2],
            "answered different questions from .*a: 1 are in only one of them, such as made-up-3",
        ),
        (lambda pairs: [*pairs[:2], (pairs[2][0], None)], "not complete: 1 of 3 questions remain"),
        (
            lambda pairs: [(dataclasses.replace(q, answers=("x",)), p) for q, p in pairs],
            "have different data for question made-up-1",
        ),
    ],
)
def test_compare_different_questions_are_refused(tmp_path, second, message):
    pairs = many(3)
    first = workdir(tmp_path, "a", pairs)
    with pytest.raises(UserError, match=message):
        compare(tmp_path, first, workdir(tmp_path, "b", second(pairs)))


def test_compare_different_passages_or_equal_names_are_refused(tmp_path, monkeypatch):
    first, second = (workdir(tmp_path, name, many(2)) for name in "ab")
    with pytest.raises(UserError, match="two runs named x"):
        compare(tmp_path, f"x={first}", f"x={second}")
    with pytest.raises(UserError, match="config.runs names .*/a twice"):
        compare(tmp_path, f"x={first}", f"y={second}", f"z={tmp_path / 'b' / '..' / 'a'}")
    read = command.records_lib.read_settings
    monkeypatch.setattr(
        command.records_lib, "read_settings", lambda file: {**read(file), "passages": str(file)}
    )
    with pytest.raises(UserError, match="b searched different passages from"):
        compare(tmp_path, first, second)


def test_compare_different_settings_are_refused_or_listed(tmp_path, monkeypatch):
    both = {"reader.model": "m", "encoder.weights": {"version": "1"}, "passages": "p"}
    own = {
        "a": {"method": "cirag", "cirag.num_passages": 10, "cirag.max_steps": 4, **both},
        "b": {"method": "native_rag", "native_rag.num_passages": 10, "code": "2", **both},
        "c": {"method": "cirag", "cirag.num_passages": 5, "cirag.max_steps": 4, **both},
        "d": {**{"method": "direct"}, "reader.model": "m"},
    }
    own["c"] |= {"reader.model": "n", "encoder.weights": {"version": "2"}}
    own["a"]["packages"] = {"sentencex": "1"}  # without BM25
    own["b"]["packages"] = own["d"]["packages"] = {"sentencex": "1", "PyStemmer": "3.1.0"}
    own["a"]["reader.packages"], own["b"]["reader.packages"] = {"jinja2": "3"}, {"llguidance": "1"}
    own["c"]["packages"] = {"sentencex": "2"}
    folders = {name: workdir(tmp_path, name, many(2)) for name in own}
    monkeypatch.setattr(command.records_lib, "read_settings", lambda file: own[file.parent.name])
    # Settings that only one method has do not count as different.
    result = compare(tmp_path, folders["a"], folders["b"], folders["d"])
    assert result["different"] == {"b": {}, "d": {}}
    assert "Settings of" not in (tmp_path / "c" / "table.md").read_text()
    for other in ("a", "b"):
        with pytest.raises(
            UserError, match=r"c has method\.num_passages=5, but .* [23] other sett"
        ):
            compare(tmp_path, folders[other], folders["c"])
    result = compare(tmp_path, folders["a"], folders["c"], allow_different=True)
    assert result["different"]["c"] == {
        "method.num_passages": (10, 5),
        "reader.model": ("m", "n"),
        "encoder.weights.version": ("1", "2"),
        "packages.sentencex": ("1", "2"),
    }
    table = (tmp_path / "c" / "table.md").read_text()
    assert 'Settings of a / c: method.num_passages 10 / 5; reader.model "m" / "n"; ' in table
    own["d"] = own["c"]
    folders = [folders[name] for name in ("a", "c", "d")]
    compare(tmp_path, *folders, allow_different=True)
    assert "Settings of a / c, d: method" in (tmp_path / "c" / "table.md").read_text()


def test_compare_bad_input_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.runs is required"):
        compare(tmp_path)
    with pytest.raises(UserError, match="is not a workdir of launch/answer.py: it has no journal"):
        compare(tmp_path, str(tmp_path))
    assert command.named_folders(5) == [("5", pathlib.Path("5"))]  # a flag's value may be a number
    with pytest.raises(UserError, match=r"config\.profile='x' is an unknown profile"):
        compare(tmp_path, workdir(tmp_path, "a", many(1)), profile="x")
    with pytest.raises(UserError, match=r"config\.baseline='x' is not one of null, a"):
        compare(tmp_path, tmp_path / "a", baseline="x")


GRAPH = {"passages": 2, "entities": 1_000, "relations": 4, "triples": 5}


def test_compare_hops_have_a_table_with_reasons(tmp_path):
    pairs = many(2)
    steps = (Step("q", ("p-lantern", "p-other"), notes={"graph": GRAPH}),)
    short = answered(pairs, lambda i, p: dataclasses.replace(p, steps=steps * (i + 1)))
    folders = [workdir(tmp_path, "a", pairs), workdir(tmp_path, "b", short)]
    result = compare(tmp_path, *folders, metrics=("answers", "hops"), recall_at=(2,))
    first, second = result["systems"].values()
    assert first["hop2_recall@2"]["value"] == 1 and first["hop1_unsupported"]["value"] == 0
    assert second["hop1_unsupported"]["value"] == 0.5
    assert second["resolved"]["reason"] == "plans no constraints"
    assert second["hop3_unsupported"]["reason"] == "no question has this hop"
    assert second["histograms"] == {"steps": {"1": 1, "2": 1}, "queries": {"1": 2}}
    assert first["graphs"] == {"reason": "builds no graph per question"}
    table = (tmp_path / "c" / "table.md").read_text()
    scores, hops = table.partition("Hops, in per cent")[::2]
    assert "hop 2 R@2" in hops and "hop 2 R@2" not in scores and "hop 3 unsupported" in hops
    assert "; n/a for b: plans no constraints (resolved, precision" in hops
    assert "| a   |        steps | 0 % |   0 % |  0 % | 100 % |" in hops
    # The second question of b has two steps, each with a graph.
    assert "| b   |         3 |        6 |    3,000 |        12 |      15 |" in hops
    for name in ("histograms.png", "recall_by_hop.png", "recall_by_hop.svg"):
        assert (tmp_path / "c" / name).is_file()
    assert 'alt="recall_by_hop"' in (tmp_path / "c" / "table.html").read_text("utf-8")


def test_compare_robustness_joins_runs_of_one_store(tmp_path):
    """The runs of a curve differ in their corruption only; a run without it is at ratio 0."""

    def folder(name, content, kind=None, ratio=None, **settings):
        corruption = {"triples.corruption": kind, "triples.ratio": ratio} if kind else {}
        triples = {"triples": name, "triples.content": content, **corruption}
        settings = {"reader.model": "small", **triples, **settings}
        return workdir(tmp_path, name, many(3), **settings)

    other = {"reader.model": "other"}
    runs = [
        folder("noise-20", "x n20", "noise", 0.2),
        folder("clean", "x"),
        folder("noise-10", "x n10", "noise", 0.1),
        folder("copy", "x n0", "deletion", 0),
        folder("deletion-10", "x d10", "deletion", 0.1),
        folder("other-store", "y"),
        folder("other-reader", "x", **other),
        folder("other-reader-10", "x n10", "noise", 0.1, **other),
        folder("other-method", "x d10", "deletion", 0.1, method="kirag"),
    ]
    result = compare(tmp_path, *runs, allow_different=True, metrics=("answers",))
    curves = [
        (c["name"], c["kind"], [(p["run"], p["ratio"]) for p in c["points"]])
        for c in result["robustness"]
    ]
    zero = [("clean", 0.0), ("copy", 0.0)]
    assert curves == [
        ("clean", "noise", [*zero, ("noise-10", 0.1), ("noise-20", 0.2)]),
        ("clean", "deletion", [*zero, ("deletion-10", 0.1)]),
        ("other-reader", "noise", [("other-reader", 0.0), ("other-reader-10", 0.1)]),
    ]
    table = (tmp_path / "c" / "table.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines()]
    assert ["noise-20", "noise", "20 %"] in rows and ["clean", "deletion", "0 %"] in rows
    for kind in ("png", "svg"):
        assert (tmp_path / "c" / f"robustness.{kind}").is_file()
    assert 'alt="robustness"' in (tmp_path / "c" / "table.html").read_text("utf-8")


def test_compare_stage_of_a_cascade_with_its_granularity_alone(tmp_path):
    """The cascade answers two questions from sentences, of which the run alone fails one."""
    pairs = answered(
        many(4),
        lambda i, p: dataclasses.replace(
            p, answer="Orlin County", granularity="sentence" if i < 2 else "triple"
        ),
    )
    alone = answered(pairs, lambda i, p: dataclasses.replace(p, answer="Orlin" if i else "Marn"))
    three = ["triple", "sentence", "passage"]
    folders = [
        workdir(tmp_path, "a", pairs, **{"cirag.granularities": three}),
        workdir(tmp_path, "b", alone, **{"cirag.granularities": ["sentence"]}),
        workdir(tmp_path, "d", alone, **{"method": "other", "other.granularities": ["triple"]}),
    ]
    (row,) = compare(tmp_path, *folders, allow_different=True)["stages"]
    names = ("cascade", "stage", "single", "num_questions")
    assert tuple(row[name] for name in names) == ("a", "sentence", "b", 2)
    kinds = ("cascade", "all", "same")
    assert [row["em"][kind]["value"] for kind in kinds] == [1.0, 0.75, 0.5]
    assert row["em"]["difference"]["difference"] == 0.5
    assert "| a, sentence |     b |" in (tmp_path / "c" / "table.md").read_text()
