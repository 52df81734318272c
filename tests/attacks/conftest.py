"""Says how many cases were tried."""

from tests.attacks import hostile


def pytest_terminal_summary(terminalreporter):
    if hostile.tried:
        terminalreporter.write_line(f"attacks: {hostile.tried} cases")
