import pytest

from cirag_jax.datasets.records import Record, read_lines
from cirag_jax.errors import UserError


def test_a_boolean_is_no_index():
    with pytest.raises(UserError, match="field 'n' must be an integer, not a boolean"):
        Record("f:1", {"n": True}).maybe_count("n")


def test_a_nested_field_is_named_in_full():
    part = (Record("f:3", {"steps": [{}, {"a": 1}]}).parts("steps") or [])[1]
    with pytest.raises(UserError, match=r"f:3: field 'steps\[1\]\.a' must be a string"):
        part.text("a")


def test_blank_lines_keep_the_line_numbers(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('\ufeff{"a": 1}\n\n{"a": 2}\r\n', encoding="utf-8")
    assert [(r.place, r.value["a"]) for r in read_lines(path)] == [
        (f"{path}:1", 1),
        (f"{path}:3", 2),
    ]
