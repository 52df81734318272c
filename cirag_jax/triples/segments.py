"""A segment of the triple store: one immutable Arrow IPC file, named by its content."""

import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from cirag_jax.errors import UserError
from cirag_jax.types import Triple


def encode_segment(passages: Iterable[tuple[str, tuple[Triple, ...]]]) -> bytes:
    """The triples of ``passages`` as an Arrow IPC file, uncompressed so that it can be mapped.

    One row a triple, in order: ``passage`` (dictionary of int32 and string), ``head``,
    ``relation``, ``tail`` (string), ``sentence`` (int32 or null). Equal triples give equal bytes.
    """
    import pyarrow as pa

    places: list[int] = []
    ids: list[str] = []
    triples: list[Triple] = []
    for passage_id, found in passages:
        if found:
            places.extend([len(ids)] * len(found))
            ids.append(passage_id)
            triples.extend(found)
    table = pa.table(
        {
            "passage": pa.DictionaryArray.from_arrays(
                pa.array(places, pa.int32()), pa.array(ids, pa.string())
            ),
            "head": pa.array([t.head for t in triples], pa.string()),
            "relation": pa.array([t.relation for t in triples], pa.string()),
            "tail": pa.array([t.tail for t in triples], pa.string()),
            "sentence": pa.array([t.sentence for t in triples], pa.int32()),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def segment_name(content: bytes) -> str:
    """The file's name: the same triples are the same file."""
    return f"{hashlib.sha256(content).hexdigest()[:32]}.arrow"


_COLUMNS = ("passage", "head", "relation", "tail", "sentence")


class Segment:
    """A memory-mapped segment; only what is asked for is read from the disk."""

    def __init__(self, path: Path, num_rows: int):
        """Maps the file.

        Raises:
            UserError: It is missing, is no Arrow file, or has not ``num_rows`` rows.
        """
        import pyarrow as pa

        self.path = path
        try:
            with pa.memory_map(str(path)) as source:
                table = pa.ipc.open_file(source).read_all()
            self._columns = [table[name].combine_chunks() for name in _COLUMNS]
        except (pa.ArrowException, OSError, KeyError) as error:
            raise damaged(path, error) from None
        if table.num_rows != num_rows:
            raise damaged(path, f"it has {table.num_rows} rows, not {num_rows}")

    def triples(self, first: int, count: int) -> tuple[Triple, ...]:
        """The triples of rows ``first`` to ``first + count``, with passage and sentence.

        Raises:
            UserError: The file's content is damaged.
        """
        import pyarrow as pa

        try:
            parts = [column.slice(first, count).to_pylist() for column in self._columns]
            return tuple(
                Triple(head, relation, tail, passage_id, sentence)
                for passage_id, head, relation, tail, sentence in zip(*parts, strict=True)
            )
        except (pa.ArrowException, ValueError, IndexError) as error:
            raise damaged(self.path, error) from None


# ------------------------------------------------------------------------------------------- files


def damaged(path: Path, reason: object) -> UserError:
    """The exception about a file of the store that cannot be what was written."""
    text = " ".join(str(reason).split())[:200]
    return UserError(f"{path} is damaged ({text}); restore it, or extract into another --workdir.")


def cannot_write(path: Path, error: OSError) -> UserError:
    """The exception about a file that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"{path} cannot be written: the disk is full; what is recorded is kept, so make room "
            "and run the same command again."
        )
    return UserError(f"{path} cannot be written: {error.strerror or error}.")


def write_file(path: Path, content: bytes) -> None:
    """Writes aside, then renames: the file is there whole or not at all.

    Raises:
        UserError: It cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
            sync_folder(path.parent)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None


def sync_folder(folder: Path) -> None:
    """Makes renames in ``folder`` survive a power cut, where the system can."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
