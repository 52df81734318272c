"""Plans experiments: the stages to run, with their commands and identities."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import runpy
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from cirag_jax import cli, config_files, identity
from cirag_jax.errors import UserError
from cirag_jax.io import say
from cirag_jax.methods.common import extraction
from cirag_jax.methods.registry import find_method
from experiments.paths.declare import DATA, OUT, SCALES, Experiment, Setup, Stage

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVER = "server"  # the variable with the URL of the setup's server
_NAME = re.compile(r"\{([\w.]+)\}")
_DATA_PATH = re.compile(r"\{data\}([^\s'\",()\[\]]*)")


@dataclasses.dataclass(frozen=True)
class PlannedStage:
    """A stage of one or more experiments.

    Attributes:
      name: the name in the experiment that declares it first.
      stage: the declaration.
      folder: the stage's folder, whose name contains the identity.
      identity: everything that determines the stage's output.
      words: the command after ``python``; contains ``{server}``, whose URL differs between runs.
      after: the folders of the stages that it reads.
      experiments: the experiments that need it.
    """

    name: str
    stage: Stage
    folder: pathlib.Path
    identity: Mapping[str, Any]
    words: tuple[str, ...]
    after: tuple[pathlib.Path, ...]
    experiments: list[str]

    @property
    def is_launch(self) -> bool:
        """Whether the command is a script of launch/, which writes ``result.json``."""
        return self.words[0].startswith("launch/")

    @property
    def program(self) -> str:
        """The name of the command, such as ``train`` or ``prepare``."""
        return _program(self.words)

    def command(self, url: str) -> list[str]:
        """Returns the command after ``python``, with the URL of the server."""
        return [word.replace("{server}", url) for word in self.words]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The stages of the chosen experiments, each after those that it reads.

    Attributes:
      stages: the stages by folder.
      names: for each experiment, stage name -> folder.
      server: the Python file that serves language models, or None.
      problems: experiments that cannot run, and why.
    """

    stages: Mapping[pathlib.Path, PlannedStage]
    names: Mapping[str, Mapping[str, pathlib.Path]]
    server: str | None
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)


def plan(
    chosen: Sequence[Experiment],
    scale: str,
    workdir: pathlib.Path,
    data: pathlib.Path | None,
    settings: Mapping[str, str],
    *,
    until: str | None = None,
    dry_run: bool = False,
) -> Plan:
    """Plans experiments at a scale; checks every command's config.

    If some of the experiments cannot run, names them and plans the others.

    Args:
      chosen: the experiments.
      scale: a name of `SCALES`.
      workdir: the folder of all stages.
      data: the folder of the benchmarks' files.
      settings: values of variables.
      until: the last stage to run, in the declared order; None is all stages. Experiments without
        this stage are left out.
      dry_run: whether variables and files may be missing.
    """
    if scale not in SCALES:
        raise UserError(f"unknown --scale={scale}; choose one of {', '.join(SCALES)}.")
    setups, problems = {}, {}
    for experiment in chosen:
        setup = experiment.scales[scale]() if scale in experiment.scales else None
        if setup is not None and (setup.cells or experiment.table is None):
            setups[experiment.name] = setup
        else:
            problems[experiment.name] = _no_scale(experiment, scale)
    _check_names(setups, settings, until)
    if until is not None:
        for name in [name for name, setup in setups.items() if until not in setup.stages]:
            say(f"{name} has no stage {until}, so that --until leaves it out")
            del setups[name]
    servers = {setup.server for setup in setups.values() if setup.server}
    if len(servers) > 1:
        names = " and ".join(sorted(servers))
        raise UserError(f"{names} serve different experiments; run one of them with --only.")
    planner = _Planner(workdir, data, settings, dry_run)
    names = {}
    for name, setup in setups.items():
        try:
            names[name] = planner.add(name, setup, until)
        except UserError as error:
            problems[name] = str(error)
    if problems and not names:
        raise UserError(next(iter(problems.values())))
    for problem in problems.values():
        say(f"left out: {problem}")
    return Plan(planner.stages, names, next(iter(servers), None), problems)


def _no_scale(experiment: Experiment, scale: str) -> str:
    if scale in experiment.scales:
        return f"{experiment.name} has no --scale={scale}: this scale has none of its data sets."
    if reason := experiment.unsupported.get(scale):
        return f"{experiment.name} has no --scale={scale}: {reason}."
    scales = ", ".join(experiment.scales)
    return f"{experiment.name} has no --scale={scale}; choose one of {scales}."


def _check_names(
    setups: Mapping[str, Setup], settings: Mapping[str, str], until: str | None
) -> None:
    variables = {name for setup in setups.values() for name in setup.variables}
    for name in settings:
        if name not in variables:
            known = f"the variables are {', '.join(sorted(variables))}" if variables else "none"
            raise UserError(f"--set={name}=... names no variable of these experiments; {known}.")
    stages = dict.fromkeys(stage for setup in setups.values() for stage in setup.stages)
    if until is not None and until not in stages:
        raise UserError(f"unknown --until={until}; the stages are {', '.join(stages)}.")


class _Planner:
    def __init__(
        self,
        workdir: pathlib.Path,
        data: pathlib.Path | None,
        settings: Mapping[str, str],
        dry_run: bool,
    ):
        self.stages: dict[pathlib.Path, PlannedStage] = {}
        self._workdir = workdir
        self._data = data
        self._settings = settings
        self._dry_run = dry_run
        self._files: dict[str, Any] = {}

    def add(self, experiment: str, setup: Setup, until: str | None) -> dict[str, pathlib.Path]:
        """Adds the stages of an experiment; returns their folders by name."""
        folders: dict[str, pathlib.Path] = {}
        stages = []
        for name, stage in setup.stages.items():
            stages.append(self._stage(f"{experiment}/{name}", name, stage, setup, folders))
            folders[name] = stages[-1].folder
            if name == until:
                break
        for stage in stages:  # only if all stages can be planned
            self.stages.setdefault(stage.folder, stage).experiments.append(experiment)
        return folders

    def _stage(
        self,
        place: str,
        name: str,
        stage: Stage,
        setup: Setup,
        folders: Mapping[str, pathlib.Path],
    ) -> PlannedStage:
        variables = {**setup.variables, **self._settings}
        words = shlex.split(stage.command)
        if words[0].startswith(("launch/", "experiments/")):
            words.append("--workdir={out}")
        used = dict.fromkeys(name for word in words for name in _NAME.findall(word))
        for used_name in used:
            known = (*folders, *variables, DATA, OUT, *([SERVER] if setup.server else []))
            if used_name not in known:
                raise UserError(f"{place}: {{{used_name}}} is neither a stage nor a variable.")
        described = {
            "command": words,
            "stages": {n: folders[n].name for n in used if n in folders},
            "variables": {n: self._value(place, n, variables) for n in used if n in variables},
            "files": {
                path: self._digest_of(place, path)
                for word in words
                for path in _DATA_PATH.findall(word)
            },
            "code": _code_of(words, place, variables),
        }
        if SERVER in used:
            described["server"] = _code_of_file(setup.server) if setup.server else None
            described["variables"].pop(SERVER, None)  # the same model may have another address
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]
        folder = self._workdir / f"{_program(words)}-{digest}"
        values = {
            **described["variables"],
            **{n: str(folders[n]) for n in used if n in folders},
            DATA: str(self._data or "DATA"),
            OUT: str(folder),
        }
        if variables.get(SERVER):
            values[SERVER] = variables[SERVER]
        words = tuple(_NAME.sub(lambda m: values.get(m[1], m[0]), word) for word in words)
        after = tuple(folders[n] for n in used if n in folders)
        return PlannedStage(name, stage, folder, {**described, "digest": digest}, words, after, [])

    def _value(self, place: str, name: str, variables: Mapping[str, str]) -> str:
        if not variables[name] and not self._dry_run:
            raise UserError(f"{place} needs a value: --set={name}=VALUE.")
        return variables[name] or f"{{{name}}}"

    def _digest_of(self, place: str, relative: str) -> Any:
        """Returns the name, size and SHA-256 of every file below a path in ``--data``."""
        if relative in self._files:
            return self._files[relative]
        path = None if self._data is None else self._data / relative.lstrip("/")
        if path is None or not path.exists():
            if not self._dry_run:
                missing = "--data=DIR is required" if path is None else f"{path} does not exist"
                raise UserError(f"{place}: {missing}.")
            return None
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        self._files[relative] = [
            [str(file.relative_to(path)), file.stat().st_size, _sha256(file)] for file in files
        ]
        return self._files[relative]


def _sha256(file: pathlib.Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _program(words: Sequence[str]) -> str:
    return words[1].rpartition(".")[2] if words[0] == "-m" else pathlib.Path(words[0]).stem


# --------------------------------------------------------------------------------------------- code


def _code_of(words: Sequence[str], place: str, variables: Mapping[str, str]) -> Any:
    """Returns the part of a stage's identity that depends on this repository.

    This is the values of the config without the command's flags, and the code that determines the
    results of the method or the extraction, in which the commands themselves check their workdirs.
    """
    script = words[0]
    if script == "-m":
        return None
    if not script.startswith("launch/"):
        return _code_of_file(script)
    path = next((w.partition("=")[2] for w in words if w.startswith("--config=")), None)
    if path is None:
        raise UserError(f"{place}: the command needs --config=FILE.")
    flags = tuple(
        _NAME.sub(lambda match: variables.get(match[1]) or match[0], word)
        for word in words
        if word.startswith("--config.")
    )
    if problem := _problem_of_config(script, path, flags):
        raise UserError(f"{place}: {problem}")
    return _code_of_config(path)


@functools.cache
def _problem_of_config(script: str, path: str, flags: tuple[str, ...]) -> str | None:
    """Returns why a command's config cannot be loaded, or None."""
    try:
        config_files.load_config(str(ROOT / path), flags, _extend(script))
    except UserError as error:
        return str(error)
    return None


@functools.cache
def _code_of_config(path: str) -> dict[str, Any]:
    config = config_files.load_config(str(ROOT / path))
    # Without null fields, so that a new optional field does not rerun finished stages.
    values = {name: value for name, value in config_files.leaves(config) if value is not None}
    described: dict[str, Any] = {"config": cli.jsonable(values)}
    if "method" in config:
        program = find_method(config.method).program
        described["method"] = identity.of_code(program.__module__)
    elif "dialect" in config:
        described["extraction"] = extraction.extractor_version(config.dialect)
    return described


@functools.cache
def _extend(script: str) -> Any:
    return runpy.run_path(str(ROOT / script)).get("extend")


@functools.cache
def _code_of_file(script: str) -> str:
    return identity.of_code(script.removesuffix(".py").replace("/", "."))
