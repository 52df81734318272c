import msgspec
import pytest

from cirag_jax.datasets.records import convert, read_lines
from cirag_jax.errors import UserError
from cirag_jax.types import Count


class Part(msgspec.Struct):
    a: str


class Row(msgspec.Struct, forbid_unknown_fields=True):
    a: int = 0
    n: Count | None = None
    steps: list[Part] | None = None
    counts: dict[str, Count] = {}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"n": True}, "field 'n' must be an integer, not a boolean"),
        ({"n": -1}, "field 'n' must not be negative"),
        ({"n": 1.5}, "field 'n' must be an integer, not a number"),
        ({"steps": [{"a": ""}, {"a": 1}]}, "field 'steps[1].a' must be a string, not an integer"),
        ({"steps": [{}]}, "field 'steps[0].a' is missing"),
        ({"counts": {"x": "1"}}, "field 'counts.*' must be an integer, not a string"),
        ({"stepps": []}, "field 'stepps' is unknown; did you mean 'steps'?"),
        (["a"], "must be a JSON object, not a list"),
    ],
)
def test_decode_mismatch_names_the_whole_field(value, problem):
    with pytest.raises(UserError) as error:
        convert("f:3", value, Row)
    assert str(error.value) == f"f:3: {problem}."


def test_read_lines_blank_lines_count_as_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('\ufeff{"a": 1}\n\n{"a": 2}\r\n', encoding="utf-8")
    assert [(place, row.a) for place, row in read_lines(path, Row)] == [
        (f"{path}:1", 1),
        (f"{path}:3", 2),
    ]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"steps": [{"a": "\ud800"}]}, "field 'steps[0].a' contains half of a surrogate pair"),
        ({"counts": {"\udfff": 1}}, "field 'counts' contains half of a surrogate pair"),
        ({"\udfff": 1}, r"contains half of a surrogate pair ('\udfff'); replace it."),
        ("\ud800", "contains half of a surrogate pair"),
    ],
)
def test_convert_half_surrogate_is_named(value, field):
    with pytest.raises(UserError) as error:
        convert("f:3", value, Row)
    assert str(error.value).startswith(f"f:3: {field}")
