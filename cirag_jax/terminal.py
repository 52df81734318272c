"""What a person at the terminal is told while a command runs: on standard error, always."""

import sys

import tqdm


def say(text: str) -> None:
    """Prints a line on standard error; a progress bar that is shown there goes on below it."""
    tqdm.tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()
