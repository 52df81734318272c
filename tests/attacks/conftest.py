"""Reports the number of cases, and checks that all databases are closed."""

import sqlite3

import pytest

from tests.attacks import hostile


def pytest_terminal_summary(terminalreporter):
    if hostile.num_cases:
        terminalreporter.write_line(f"attacks: {hostile.num_cases} cases")


@pytest.fixture(autouse=True)
def closed_databases(monkeypatch):
    """Fails if a test leaves a database open. Python reports this only from 3.13 on."""
    connect, connections = sqlite3.connect, []

    def recording_connect(*args, **fields):
        connections.append(connect(*args, **fields))
        return connections[-1]

    monkeypatch.setattr(sqlite3, "connect", recording_connect)
    yield
    for db in connections:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            db.total_changes  # noqa: B018
