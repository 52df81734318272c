"""The figures of a comparison and of a reader: axes, data and files."""

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest

from cirag_jax.commands import evaluate_reader
from cirag_jax.reports import comparison_figures, comparison_tables, figures, tables
from tests.reports.test_tables import result_of


def bounded(value, low, high):
    return {"value": value, "low": low, "high": high}


def system(counts, steps, seconds, f1, sees_gold=False, tokens=((30, 2),), parse_rate=1.0):
    stages = ("triple", "sentence", "passage", "default")
    return {
        "roles": {
            str(role): {"prompt_tokens": prompt, "generated_tokens": new}
            for role, (prompt, new) in enumerate(tokens)
        },
        "parse_rate": bounded(parse_rate, parse_rate, parse_rate),
        "is_ranked": parse_rate >= 0.5,
        "granularities": dict(zip(stages, counts, strict=True)),
        "recall_by_step": [bounded(value, value, value) for value in steps],
        "seconds_alone": bounded(*seconds) if seconds else None,
        "f1": bounded(*f1),
        "sees_gold": sees_gold,
    }


RESULT = {
    "systems": {
        "a": system((2, 1, 0, 1), (0.25, 0.5, 0.75), (2.0, 1.5, 4.0), (0.5, 0.4, 0.7)),
        "$b": system((0, 0, 3, 0), (0.4,), (0.5, 0.25, 1.0), (0.25, 0.0, 0.5), sees_gold=True),
        "c": system((0, 0, 0, 0), (), None, (0.0, 0.0, 0.0), tokens=()),
    }
}
# The same with a run that is not ranked.
UNRANKED = {
    "systems": {
        "lost": system((1, 0, 0, 0), (), (9.0, 8.0, 10.0), (0.9, 0.8, 1.0), parse_rate=0.25),
        **RESULT["systems"],
        "d": system((1, 0, 0, 0), (), None, (0.1, 0.0, 0.2), tokens=((300, 20), (1000, 0))),
    }
}
CALIBRATION = {
    "bins": [
        {"confidence": 0.15, "right": 0.4, "count": 5},
        {"confidence": 0.95, "right": 0.8, "count": 10},
    ],
    "error": 0.18,
    "coverage": [{"answered": 0.9, "right": 0.6}, {"answered": 0.3, "right": 0.7}],
}
READERS = {
    "student": {"calibration": CALIBRATION},
    "base": {"calibration": {"bins": [], "error": None, "coverage": []}},
}


@pytest.fixture
def drawn():
    made = []

    def draw(function, *arguments):
        made.append(function(*arguments))
        return made[-1]

    yield draw
    for figure in made:
        figures.pyplot().close(figure)


def texts(artists):
    return [artist.get_text() for artist in artists]


def points(line):
    """Returns the x and y values of a line."""
    return [np.asarray(values, float).tolist() for values in line.get_data()]


def test_draw_granularities_bars_are_shares(drawn):
    (axes,) = drawn(comparison_figures.draw_granularities, RESULT).axes
    assert axes.get_xlabel() == "questions answered from, %" and axes.get_ylabel() == ""
    assert axes.get_xlim() == (0, 100) and axes.yaxis.get_inverted()  # the first run is at the top
    assert texts(axes.get_yticklabels()) == ["a", r"\$b", "c"]
    assert texts(axes.get_legend().get_texts()) == ["triple", "sentence", "passage", "default"]
    bars = [[(b.get_x(), b.get_width()) for b in of_stage] for of_stage in axes.containers]
    assert [of_stage[0] for of_stage in bars] == [(0, 50), (50, 25), (75, 0), (75, 25)]
    assert [of_stage[1] for of_stage in bars] == [(0, 0), (0, 0), (0, 100), (100, 0)]
    assert [of_stage[2] for of_stage in bars] == [(0, 0)] * 4
    rows = [round(bar.get_y() + bar.get_height() / 2) for bar in axes.containers[0]]
    assert rows == [0, 1, 2]


def test_draw_steps_plots_recall(drawn):
    (axes,) = drawn(comparison_figures.draw_steps, RESULT).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "recall of gold passages so far, %")
    assert axes.get_ylim() == (0, 103)
    assert [points(line) for line in axes.lines] == [[[1, 2, 3], [25, 50, 75]], [[1], [40]]]
    assert texts(axes.get_legend().get_texts()) == ["a", r"\$b *"]


def test_draw_hops_plots_recall_at_the_largest_k(drawn):
    """Run c has no second hop."""
    names = ("hop1_recall@2", "hop1_recall@10", "hop2_recall@10", "hop1_unsupported")
    missing = bounded(np.nan, np.nan, np.nan)
    scores = ((0.5, 0.25, 0.75, 1), (0.5, 1, 0.5, 1), (0.5, 0.75, None, 1))
    systems = {
        run: {
            **old,
            **{
                name: bounded(v, v - 0.125, v + 0.25) if v is not None else missing
                for name, v in zip(names, own, strict=True)
            },
        }
        for (run, old), own in zip(RESULT["systems"].items(), scores, strict=True)
    }
    (axes,) = drawn(comparison_figures.draw_hops, {"systems": systems, "scores": names}).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("hop", "recall@10, %")
    lines = [points(line) for line, _, _ in axes.containers]
    assert lines == [[[1, 2], [25, 75]], [[1, 2], [100, 50]], [[1], [75]]]
    _, _, (along,) = axes.containers[0]
    np.testing.assert_allclose(along.get_segments(), [[(1, 12.5), (1, 50)], [(2, 62.5), (2, 100)]])
    assert texts(axes.get_legend().get_texts()) == ["a", r"\$b *", "c"]


def test_draw_robustness_plots_scores_by_ratio_and_kind(drawn):
    values = {
        "m": (0.5, 0.75),
        "m-n": (0.25, 0.5),
        "m-d": (0.125, 0.25),
        "x": (1, 1),
        "x-d": (0, 0),
    }
    systems = {
        run: {"em": bounded(em, em - 0.125, em + 0.25), "f1": bounded(f1, f1, f1)}
        for run, (em, f1) in values.items()
    }
    curves = [
        {"name": name, "kind": kind, "points": [{"run": r, "ratio": p} for r, p in pairs]}
        for name, kind, pairs in (
            ("m", "noise", [("m", 0), ("m-n", 0.2)]),
            ("m", "deletion", [("m", 0), ("m-d", 0.1)]),
            ("x", "deletion", [("x", 0), ("x-d", 0.05)]),
        )
    ]
    result = {"systems": systems, "scores": ("em", "f1"), "robustness": curves}
    panels = drawn(comparison_figures.draw_robustness, result).axes
    assert [axes.get_title() for axes in panels] == ["noise", "deletion", "", ""]
    assert [axes.get_xlabel() for axes in panels] == ["", "", *["facts changed, %"] * 2]
    assert [axes.get_ylabel() for axes in panels] == ["EM, %", "", "F1, %", ""]
    lines = [[points(line) for line, _, _ in axes.containers] for axes in panels]
    assert lines == [
        [[[0, 20], [50, 25]]],
        [[[0, 10], [50, 12.5]], [[0, 5], [100, 0]]],
        [[[0, 20], [75, 50]]],
        [[[0, 10], [75, 25]], [[0, 5], [100, 0]]],
    ]
    _, _, (along,) = panels[0].containers[0]
    np.testing.assert_allclose(along.get_segments(), [[(0, 37.5), (0, 75)], [(20, 12.5), (20, 50)]])
    looks = [[line.get_color() for line, _, _ in axes.containers] for axes in panels]
    assert looks[0] + looks[1][1:] == looks[1] == looks[3] and len(set(looks[1])) == 2
    assert texts(panels[1].get_legend().get_texts()) == ["m", "x"]


@pytest.mark.parametrize("lowest", [140, 2_300, 41_000])
def test_tokens_axis_has_few_labels_with_separators(drawn, lowest):
    spent = [lowest, 2 * lowest, 3 * lowest]
    f1 = (0.5, 0.4, 0.6)
    systems = {str(n): system((1, 0, 0, 0), (), None, f1, tokens=((n, 0),)) for n in spent}
    figure = drawn(comparison_figures.draw_tokens, {"systems": systems})
    figure.draw_without_rendering()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    shown = [x for x in axes.get_xticks() if low <= x <= high]
    labels = [t.get_text() for t in axes.get_xticklabels() if low <= t.get_position()[0] <= high]
    assert labels == [f"{x:,.9g}" for x in shown] and len(labels) >= 2
    boxes = [t.get_window_extent() for t in axes.get_xticklabels(which="both") if t.get_text()]
    boxes = sorted((box.x0, box.x1) for box in boxes)
    assert all(a[1] < b[0] for a, b in zip(boxes, boxes[1:], strict=False))


@pytest.mark.parametrize("shown", [RESULT, UNRANKED], ids=["all", "unranked"])
def test_draw_latency_plots_f1(drawn, shown):
    (axes,) = drawn(comparison_figures.draw_latency, shown).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("seconds per question, alone", "F1, %")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert texts(axes.get_legend().get_texts()) == ["a", r"\$b *"]  # c has no latency
    result = []
    for point, _, (across, along) in axes.containers:
        (left, y), (right, _) = across.get_segments()[0]
        (x, low), (_, high) = along.get_segments()[0]
        assert points(point) == [[x], [y]]
        result.append((x, left, right, y, low, high))
    assert result == [
        pytest.approx((2, 1.5, 4, 50, 40, 70)),
        pytest.approx((0.5, 0.25, 1, 25, 0, 50)),
    ]


def test_draw_tokens_plots_f1_of_ranked_runs(drawn):
    (axes,) = drawn(comparison_figures.draw_tokens, UNRANKED).axes
    assert axes.get_xlabel() == "tokens of language models per question"
    assert (axes.get_xscale(), axes.get_ylabel()) == ("log", "F1, %")
    assert texts(axes.get_legend().get_texts()) == ["a", r"\$b *", "d"]  # c has no tokens
    result = []
    for point, _, (along,) in axes.containers:
        (x, low), (_, high) = along.get_segments()[0]
        assert points(point)[0] == [x]
        result.append((x, points(point)[1][0], low, high))
    assert result == [
        pytest.approx((32, 50, 40, 70)),
        pytest.approx((32, 25, 0, 50)),
        pytest.approx((1320, 10, 0, 20)),
    ]
    # A run has the same marker and color in both figures.
    (latency,) = drawn(comparison_figures.draw_latency, UNRANKED).axes
    looks = [[(p.get_marker(), p.get_color()) for p, *_ in a.containers] for a in (axes, latency)]
    assert len(set(looks[0])) == 3 and looks[1] == looks[0][:2]


def test_time_table_without_latency_names_the_setting():
    together = {"a": {"seconds": 1.5, "seconds_alone": None}}
    table = comparison_tables._time({"systems": together})
    assert "--config.latency_questions=5" in table.caption
    assert table.rows == [["run", "s per question, together"], ["a", "1.50"]]
    alone = {"value": 2.0, "low": 1.0, "high": 3.0, "num_questions": 4}
    table = comparison_tables._time(
        {"systems": {**together, "b": {"seconds": 2, "seconds_alone": alone}}}
    )
    assert "latency_questions" not in table.caption
    assert [row[2:] for row in table.rows[1:]] == [["", ""], ["2.00 [1.00, 3.00]", "4"]]


def test_draw_recall_at_every_k(drawn):
    (axes,) = drawn(tables._draw, result_of((2, 5, 10), 5, data="a$b")).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("K passages", "Recall@K, %")
    assert axes.get_xticks().tolist() == [2, 5, 10]
    assert axes.get_title() == r"a\$b, 7 questions"
    assert [points(line) for line in axes.lines] == [[[2, 5, 10], [10, 25, 50]]] * 2
    assert texts(axes.get_legend().get_texts()) == ["BM25", "iterative, trained"]
    assert [line.get_linestyle() for line in axes.lines] == [
        "--",
        "-",
    ]  # the trained system stands out


def test_draw_calibration_plots_confidence(drawn):
    left, right = drawn(evaluate_reader._draw, READERS).axes
    assert left.get_xlabel() == "confidence of the answer, %" and left.get_ylabel() == "right, %"
    assert right.get_xlabel() == "answered, the most confident first, %"
    for axes in (left, right):
        assert axes.get_xlim() == axes.get_ylim() == (0, 100)
    assert points(left.lines[0]) == [[0, 100], [0, 100]]  # perfect calibration
    (dots,) = left.collections
    np.testing.assert_allclose(dots.get_offsets(), [[15, 40], [95, 80]])
    assert dots.get_sizes().tolist() == [20, 30]
    np.testing.assert_allclose(points(right.lines[0]), [[90, 30], [60, 70]])
    assert texts(left.get_legend().get_texts()) == ["student, error 18 points"]
    assert texts(right.get_legend().get_texts()) == ["student"]


@pytest.mark.parametrize(
    ("draw", "result", "inches"),
    [
        (comparison_figures.draw_granularities, RESULT, (7, 3.2)),
        (comparison_figures.draw_steps, RESULT, (7, 4)),
        (comparison_figures.draw_tokens, UNRANKED, (7, 4.5)),
        (comparison_figures.draw_latency, RESULT, (7, 4.5)),
        (tables._draw, result_of((2, 5), 5), (7.5, 4)),
        (evaluate_reader._draw, READERS, (9, 4)),
    ],
    ids=["granularities", "recall_by_step", "tokens", "latency", "recall", "calibration"],
)
def test_saved_figure_is_a_nonempty_image(draw, result, inches, tmp_path):
    figures.save(draw(result), tmp_path, "x")
    pixels = matplotlib.image.imread(tmp_path / "x.png")  # 150 dots per inch
    assert pixels.shape[:2] == (round(150 * inches[1]), round(150 * inches[0]))
    colors = {
        matplotlib.colors.to_hex(p) for p in np.unique(pixels[..., :3].reshape(-1, 3), axis=0)
    }
    assert "#ffffff" in colors and len(colors) > 20
    assert "<svg" in (tmp_path / "x.svg").read_text("utf-8")
