"""Errors of library parsers, which are reported as one sentence."""

import pytest

from cirag_jax.errors import UserError, parsing


class Panic(BaseException):
    """An exception like the one that pyo3 raises for a panic of Rust code."""


@pytest.mark.parametrize("fault", [Panic("out of\n range"), ValueError("out of\n range")])
def test_parsing_any_error_is_one_sentence(fault):
    with pytest.raises(UserError) as told, parsing("x cannot be read", "; mend it"):
        raise fault
    assert str(told.value) == "x cannot be read (out of range); mend it."


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), SystemExit(2), UserError("said already")])
def test_parsing_interrupts_and_user_errors_pass(fault):
    with pytest.raises(type(fault)) as found, parsing("x cannot be read"):
        raise fault
    assert found.value is fault


def test_parsing_error_without_text_is_named():
    with (
        pytest.raises(UserError, match=r"x cannot be read \(RecursionError\)\."),
        parsing("x cannot be read"),
    ):
        raise RecursionError
