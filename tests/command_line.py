"""Runs a command with a small config in this process."""

import pathlib
import types

import pytest

from cirag_jax import cli

CONFIG = """
from ml_collections import config_dict

from cirag_jax.errors import UserError


def get_config(preset="quick"):
    if preset not in ("quick", "paper"):
        raise UserError(f"there is no preset {preset!r}")
    config = config_dict.create(
        data=dict(dir=config_dict.placeholder(str), limit=0),
        ks=(2, 5),
        quiet=False,
        key="NAME_OF_A_VARIABLE",
        name=config_dict.placeholder(str),
        train=dict(learning_rate=1e-3 if preset == "quick" else 1e-5, steps=5),
    )
    config.name = "somebody"
    return config
"""


def write_config(folder: pathlib.Path) -> pathlib.Path:
    """Writes the command's config file."""
    path = folder / "config.py"
    path.write_text(CONFIG)
    return path


def runner(config_file: pathlib.Path, workdir: pathlib.Path, capsys):
    """Returns a function that runs the command and returns its exit code, output and configs."""

    def run(*arguments, main=None, workdir=workdir, **fields):
        seen = []

        def record(config, workdir):
            seen.append(config)
            return {"steps": config.train.steps}

        argv = ["command.py", *map(str, arguments)]
        if workdir is not None:
            argv.append(f"--workdir={workdir}")
        with pytest.raises(SystemExit) as exit_:
            cli.run(main or record, str(config_file), argv, **fields)
        out, err = capsys.readouterr()
        return types.SimpleNamespace(code=exit_.value.code, out=out, err=err, seen=seen)

    return run


def refused(done, *words):
    """Checks for exit code 2, empty stdout, and one sentence on stderr that has all the words."""
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("command.py: ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err
    return True
