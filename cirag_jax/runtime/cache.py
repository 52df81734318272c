"""Responses of language models by what was asked: several methods on the same questions share them.

The journal belongs to one run; this file may serve many, at the same time too.
"""

import dataclasses
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.llm.types import Request, Usage
from cirag_jax.runtime import codec
from cirag_jax.runtime.requests import Generated


class ResponseCache:
    """A SQLite file from (model, parameters, messages) to texts.

    Args:
      path: created where absent.

    Raises:
      UserError: the file is no such cache.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).expanduser()
        try:
            # A server's client may report from a thread of its own, while this one waits for it.
            self._db = sqlite3.connect(
                self.path, isolation_level=None, timeout=60.0, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS responses "
                "(key TEXT PRIMARY KEY, response TEXT NOT NULL) WITHOUT ROWID"
            )
        except sqlite3.Error as error:
            raise UserError(f"config.cache={path} cannot be used: {error}.") from None

    def find(self, identity: Any, request: Request) -> Generated | None:
        """The response to an equal request to an equal model; it took no time and no money."""
        rows = self._execute(
            "SELECT response FROM responses WHERE key = ?", (_key(identity, request),)
        )
        row = rows.fetchone()
        if row is None:
            return None
        data = json.loads(row[0])
        usage = Usage(data["prompt_tokens"], data["prompt_tokens"], data["generated_tokens"])
        return Generated(data["text"], data["finish_reason"], usage)

    def keep(self, identity: Any, request: Request, response: Generated) -> None:
        """Adds a response."""
        data = {
            "text": response.text,
            "finish_reason": response.finish_reason,
            "prompt_tokens": response.usage.prompt_tokens,
            "generated_tokens": response.usage.generated_tokens,
        }
        self._execute(
            "INSERT OR REPLACE INTO responses VALUES (?, ?)",
            (_key(identity, request), codec.dump(data)),
        )

    def _execute(self, statement: str, values: tuple[str, ...]) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise UserError(f"config.cache={self.path} cannot be used: {error}.") from None

    def close(self) -> None:
        """Closes the file."""
        self._db.close()


def _key(identity: Any, request: Request) -> str:
    fields = dataclasses.asdict(request)
    del fields["id"]
    return codec.digest(codec.dump({"model": identity, "request": fields}))
