"""Heat maps of the difficulty matrix: axes, colors and text."""

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from matplotlib import colors

from cirag_jax.evaluation.difficulty import undefined
from cirag_jax.reports import difficulty, figures


def cell(value, count=5):
    return {"value": value, "low": value, "high": value, "num_questions": count}


@pytest.fixture
def drawn():
    made = []

    def draw(*arguments, **more):
        made.append(difficulty.draw(*arguments, **more))
        return made[-1]

    yield draw
    for figure in made:
        figures.pyplot().close(figure)


MATRIX = {
    2: [cell(0.0), cell(0.25), cell(0.5), cell(1.0, 7)],
    4: [undefined("fewer than 4 questions (3)")] * 4,
}


def test_draw_axes_and_cells(drawn):
    figure = drawn({"cost $1 or $2": MATRIX, "b": MATRIX}, "error (1 - EM)")
    first, _, bar = figure.axes
    assert list(figure.get_size_inches()) == pytest.approx([9.95, 3.36])
    assert first.get_xlabel() == "retrieval difficulty $D_r$, quartile of the hop"
    assert first.get_ylabel() == "hops"
    assert [label.get_text() for label in first.get_xticklabels()] == list(difficulty.QUARTILES)
    assert [label.get_text() for label in first.get_yticklabels()] == ["2", "4"]
    assert bar.get_ylabel() == "error (1 - EM), %"
    # Low D_r is on the left, few hops at the top.
    texts = {text.get_position(): text.get_text() for text in first.texts}
    assert texts[0, 0] == "0\nn=5" and texts[3, 0] == "100\nn=7" and texts[1, 1] == "n/a"
    assert first.yaxis.get_inverted()
    figure.canvas.draw()  # Fails if a title that contains dollar signs is drawn as a formula.
    assert figure.axes[0].get_title() == r"cost \$1 or \$2"


def test_draw_colors_suit_color_blind_readers(drawn):
    (image,) = drawn({"a": MATRIX}, "error").axes[0].get_images()
    assert (image.cmap.name, image.norm.vmin, image.norm.vmax) == ("cividis", 0, 100)
    assert np.ma.is_masked(image.get_array()[1, 0])  # n/a has no color
    pair = {2: [cell(-0.4), cell(0.0), cell(0.1), undefined("no question")]}
    figure = drawn({"a-b": pair}, "error", signed=True)
    (image,) = figure.axes[0].get_images()
    assert (image.cmap.name, image.norm.vmin, image.norm.vmax) == ("PuOr", -40, 40)
    assert figure.axes[1].get_ylabel() == "error, points"
    assert [text.get_text() for text in figure.axes[0].texts][:2] == ["-40\nn=5", "+0\nn=5"]


@pytest.mark.parametrize(("signed", "name"), [(False, "cividis"), (True, "PuOr")])
def test_draw_cells_have_color_of_their_value(signed, name, drawn, tmp_path):
    """Rows are hops and columns are quartiles; all cells have different values."""
    value = {(row, column): (4 * row + column) / 15 for row in range(4) for column in range(4)}
    matrix = {
        hop: [cell(value[row, column] - 0.5 * signed) for column in range(4)]
        for row, hop in enumerate((2, 3, 4, 5))
    }
    matrix[3][2] = undefined("no question")
    figure = drawn({"a": matrix}, "error", signed=signed)
    figures.save(figure, tmp_path, "matrix")
    result = matplotlib.image.imread(tmp_path / "matrix.png")
    height, width, _ = result.shape
    panel = figure.axes[0].get_position()
    for (row, column), place in value.items():
        # Sampled at an eighth of the cell's width, left of the text.
        x = panel.x0 + (column + 1 / 8) / 4 * panel.width
        y = panel.y1 - (row + 1 / 2) / 4 * panel.height
        seen = result[round((1 - y) * height), round(x * width), :3]
        wanted = matplotlib.colormaps[name](place)[:3]
        if (row, column) == (1, 2):
            wanted = colors.to_rgb("#e6e6e6")
        assert list(seen) == pytest.approx(wanted, abs=1 / 255), (row, column)


@pytest.mark.parametrize("signed", [False, True])
def test_draw_text_has_contrast(drawn, signed):
    """The contrast, as defined by WCAG 2, is at least 3 to 1."""
    values = [i / 20 - signed * (1 - i / 20) for i in range(21)]
    figure = drawn({"a": {i: [cell(v)] * 4 for i, v in enumerate(values)}}, "x", signed=signed)
    axes = figure.axes[0]
    (image,) = axes.get_images()

    def luminance(color):
        rgb = np.array(colors.to_rgb(color))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    for text in axes.texts:
        column, row = text.get_position()
        behind = image.cmap(image.norm(image.get_array()[row, column]))
        low, high = sorted((luminance(text.get_color()), luminance(behind)))
        assert (high + 0.05) / (low + 0.05) >= 3


def test_draw_matrix_without_values(drawn):
    figure = drawn({"a": {2: [undefined("x")] * 4}}, "error", signed=True)
    assert [text.get_text() for text in figure.axes[0].texts] == ["n/a"] * 4


def test_p_values_are_never_shown_as_zero():
    sure = {"value": 0.5, "p": 4e-5, "num_points": 32}
    system = {
        "error": cell(0.5, 32),
        "matrix": MATRIX,
        "correlations": {"min": {"questions": {"all": sure}}},
        "failures": {"reason": "the run retrieved nothing"},
    }
    assert "r(D_r, error) +0.50 (p<0.001; 32)" in difficulty.sentence("a", system, "min")
