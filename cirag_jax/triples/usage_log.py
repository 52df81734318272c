"""What the blocks of an extraction took: tokens, money, time; for the result and the estimates."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.triples.segments import cannot_write
from cirag_jax.types import Usage

FILE = "usage.jsonl"


class UsageLog:
    """One line a block, written before its segment; of several lines of one block the last counts.

    Args:
        path: Created with the first line.

    Raises:
        UserError: It cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lines: dict[str, dict[str, Any]] = {}
        self._end = 0
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
        for number, raw in enumerate(content.splitlines(keepends=True), start=1):
            if not raw.endswith(b"\n"):
                break  # half a line, left by a run that was killed
            try:
                line = json.loads(raw)
                Usage(**line["usage"])
                self._lines[line["block"]] = line
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{path}:{number} is damaged; remove the file (the triples do not need it)."
                ) from None
            self._end += len(raw)

    def add(self, block: str, passages: int, calls: int, usage: Usage, seconds: float) -> None:
        """Adds a block's line.

        Raises:
            UserError: The disk is full.
        """
        line = {
            "block": block,
            "passages": passages,
            "calls": calls,
            "usage": dataclasses.asdict(usage),
            "seconds": seconds,
        }
        raw = json.dumps(line).encode() + b"\n"
        try:
            with self.path.open("r+b" if self.path.exists() else "wb") as file:
                file.truncate(self._end)
                file.seek(self._end)
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from None
        self._end += len(raw)
        self._lines[block] = line

    @property
    def total(self) -> Usage:
        """Of all blocks."""
        return sum((Usage(**line["usage"]) for line in self._lines.values()), Usage())

    @property
    def calls(self) -> int:
        """Requests answered, of all blocks."""
        return sum(line["calls"] for line in self._lines.values())

    @property
    def rate(self) -> float | None:
        """Passages per second of the blocks so far; None before the first."""
        seconds = sum(line["seconds"] for line in self._lines.values())
        passages = sum(line["passages"] for line in self._lines.values())
        return passages / seconds if seconds > 0 else None
