"""Says how many cases were tried; looks for files that were left open."""

import sqlite3

import pytest

from tests.attacks import hostile


def pytest_terminal_summary(terminalreporter):
    if hostile.tried:
        terminalreporter.write_line(f"attacks: {hostile.tried} cases")


@pytest.fixture(autouse=True)
def closed_databases(monkeypatch):
    """Whoever refuses a file has closed it: of what is left open only Python 3.13 says so."""
    connect, opened = sqlite3.connect, []

    def noted(*args, **fields):
        opened.append(connect(*args, **fields))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    yield
    for db in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            db.total_changes  # noqa: B018
