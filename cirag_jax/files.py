"""Writing files that are never seen half-written."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object a line: aside, to disk, then renamed.

    Raises:
      OSError: the folder cannot be written; what ``path`` held before is still there.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("w", encoding="utf-8", newline="\n") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
