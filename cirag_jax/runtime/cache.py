"""Responses of language models by what was asked: several methods on the same questions share them.

The journal belongs to one run; this file may serve many, at the same time too.
"""

import contextlib
import dataclasses
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cirag_jax import sqlite
from cirag_jax.errors import UserError
from cirag_jax.runtime import codec
from cirag_jax.runtime.requests import Generate, Generated, Score, Scored
from cirag_jax.types import Usage


class ResponseCache:
    """A SQLite file from (model, request) to responses; created where absent."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).expanduser()
        with contextlib.ExitStack() as stack, self._named_errors():
            # A server's client may report from a thread of its own, while this one waits for it.
            self._db = sqlite3.connect(
                self.path, isolation_level=None, timeout=60.0, check_same_thread=False
            )
            stack.enter_context(contextlib.closing(self._db))  # what is refused
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS responses "
                "(key TEXT PRIMARY KEY, response TEXT NOT NULL) WITHOUT ROWID"
            )
            stack.pop_all()

    def find(self, identity: Any, request: Generate | Score) -> Generated | Scored | None:
        """The response to an equal request to an equal model; it took no time and no money.

        One that is damaged is none: it is asked for again.
        """
        rows = self._execute(
            "SELECT response FROM responses WHERE key = ?", (_key(identity, request),)
        )
        try:
            row = rows.fetchone()
            if row is None:
                return None
            response = codec.decode_response(request, msgspec.json.decode(row[0]))
            used = response.usage
        except (*sqlite.ERRORS, *sqlite.DAMAGE):
            return None
        usage = Usage(used.prompt_tokens, used.prompt_tokens, used.generated_tokens)
        return dataclasses.replace(response, usage=usage)

    def keep(self, identity: Any, request: Generate | Score, response: Generated | Scored) -> None:
        """Adds a response."""
        self._execute(
            "INSERT OR REPLACE INTO responses VALUES (?, ?)",
            (_key(identity, request), codec.dump(codec.encode(response))),
        )

    def _execute(self, statement: str, values: tuple[str, ...]) -> sqlite3.Cursor:
        with self._named_errors():
            return self._db.execute(statement, values)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite.ERRORS as error:
            raise UserError(f"config.cache={self.path} cannot be used: {error}.") from None

    def close(self) -> None:
        """Closes the file."""
        self._db.close()


def _key(identity: Any, request: Generate | Score) -> str:
    # Who asks does not matter, only what is asked of which model.
    asked = codec.encode_request(dataclasses.replace(request, role=""))
    return codec.digest(codec.dump({"model": identity, "request": asked}))
