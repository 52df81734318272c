"""Folders of checkpoints, on a file system or in an object store."""

import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Iterator

from etils import epath

from cirag_jax.errors import UserError, import_optional
from cirag_jax.io import replacing

Folder = pathlib.Path | epath.Path  # of a file system, or of an object store


def open_folder(directory: str | Folder) -> Folder:
    """Returns a folder of checkpoints, given its path or URL (``gs://BUCKET/FOLDER``)."""
    if "://" not in str(directory):
        return pathlib.Path(directory).expanduser().absolute()
    if not re.match("gs://[^/]", str(directory)):
        raise UserError(
            f"config.checkpoints.dir={directory} must be a folder of a file system or of Google "
            "Cloud Storage (gs://BUCKET/FOLDER); Orbax writes arrays to no other object store."
        )
    import_optional("gcsfs", f"config.checkpoints.dir={directory}", "gcs")
    return epath.Path(directory)


def is_local(folder: Folder) -> bool:
    """Returns whether a folder is on a file system."""
    return isinstance(folder, pathlib.Path)


def folder_of(workdir: Folder) -> Folder:
    """Returns the folder of a workdir's checkpoints; it may be absent.

    This is ``workdir/checkpoints``, or if that is a file, the folder that it names.
    """
    place = workdir / "checkpoints"
    return open_folder(place.read_text().strip()) if place.is_file() else place


def steps_in(directory: Folder) -> list[int]:
    """Returns the complete steps in a folder, ascending; the folder may be absent or in use."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(
            int(path.name)
            for path in directory.iterdir()
            if path.name.isdecimal() and (is_local(path) or (path / "commit_success.txt").exists())
        )
    return []


def keep_step(step: Folder, copy: pathlib.Path) -> bool:
    """Hard-links a step's folder to ``copy``, so that training does not delete the files.

    Copies the files if the file system does not support links, or from an object store. Returns
    whether ``copy`` exists and is complete. If the step is deleted before or during the call, an
    earlier copy is kept.
    """
    copy.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError), replacing(copy) as aside:
        files = files_in(step)
        for file in files:
            (aside / file).parent.mkdir(parents=True, exist_ok=True)
            if not is_local(step):
                with (step / file).open("rb") as source, (aside / file).open("wb") as target:
                    shutil.copyfileobj(source, target)
                continue
            try:
                os.link(step / file, aside / file)
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without links
                shutil.copyfile(step / file, aside / file)
        if not files or files_in(step) != files:
            raise FileNotFoundError(step)
    return copy.is_dir()


def files_in(folder: Folder) -> list[pathlib.PurePath]:
    """Returns the paths of all files in a folder, relative to it; none if it is absent."""

    def walk(place: Folder) -> Iterator[Folder]:
        for path in place.iterdir():
            yield from walk(path) if path.is_dir() else [path]

    start = len(folder.parts)
    paths = walk(folder) if folder.is_dir() else ()
    return sorted(pathlib.PurePath(*path.parts[start:]) for path in paths)
