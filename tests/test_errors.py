"""What a library's parser runs into, as one sentence."""

import pytest

from cirag_jax.errors import UserError, parsing


class Panic(BaseException):
    """As pyo3 raises where Rust code panics."""


@pytest.mark.parametrize("fault", [Panic("out of\n range"), ValueError("out of\n range")])
def test_whatever_a_parser_runs_into_is_one_sentence(fault):
    with pytest.raises(UserError) as told, parsing("x cannot be read", "; mend it"):
        raise fault
    assert str(told.value) == "x cannot be read (out of range); mend it."


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), SystemExit(2), UserError("said already")])
def test_what_is_no_fault_of_the_file_passes(fault):
    with pytest.raises(type(fault)) as found, parsing("x cannot be read"):
        raise fault
    assert found.value is fault


def test_a_fault_without_words_is_named():
    with (
        pytest.raises(UserError, match=r"x cannot be read \(RecursionError\)\."),
        parsing("x cannot be read"),
    ):
        raise RecursionError
