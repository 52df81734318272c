"""Runs the experiments of the papers, from a benchmark's files to a table (docs/papers.md).

    python experiments/run.py --list
    python experiments/run.py --only=cirag_path --scale=smoke --workdir=W
    python experiments/run.py --only=cirag_table1,cirag_figure7 --scale=smoke --workdir=W
    python experiments/run.py --collect --scale=small --data=DIR --workdir=W
    python experiments/run.py --only=cirag_path --scale=paper --data=DIR --workdir=W --dry_run

Every stage is a command, which is printed before it runs. Run the same command to resume: finished
stages are skipped, and stages whose command, config, code or input has changed run again. Prints
the stages and tables on stderr and one JSON object on stdout. Exit codes: 0 if all stages finished,
1 if a stage failed or an experiment cannot run, 2 for bad input, 75 if a stage is incomplete, 130
for an interrupt.

With ``--collect``, writes the values of the papers' tables to experiments/results and
docs/reproduction.md, and at the scale smoke to the workdir instead. Without ``--workdir``, only
writes docs/reproduction.md again.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from cirag_jax.errors import UserError
from cirag_jax.io import check_arguments, one_line, say, standard_streams
from experiments import papers, paths
from experiments.papers import costs, results
from experiments.paths import planning, running
from experiments.paths.declare import SCALES, Experiment


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parser() -> argparse.ArgumentParser:
    made = _Parser(prog="run.py", description="Runs the experiments of the papers.")
    made.add_argument("--list", action="store_true", help="list the experiments and their scales")
    made.add_argument("--only", help="names of experiments, separated by commas (default: all)")
    made.add_argument("--scale", default="smoke", help=f"{' | '.join(SCALES)} (default: smoke)")
    made.add_argument("--data", type=pathlib.Path, help="folder of the benchmarks' files")
    made.add_argument("--workdir", type=pathlib.Path, help="folder for all stages")
    made.add_argument("--until", help="last stage; leaves out experiments without it")
    made.add_argument("--set", action="append", default=[], help="NAME=VALUE of a variable")
    made.add_argument("--dry_run", action="store_true", help="only print the commands")
    made.add_argument("--collect", action="store_true", help="only print what is finished")
    made.add_argument(
        "--jobs",
        type=int,
        help="stages that run at the same time (default: 2 at the scale smoke, otherwise 1)",
    )
    made.add_argument("--slurm", action="store_true", help="submit one Slurm job per stage")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        return _main(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        say(f"run.py: {one_line(str(error))}")
        return 2
    except KeyboardInterrupt:
        say("run.py: interrupted; run the same command to resume")
        return 130


def _main(arguments: Sequence[str]) -> int:
    check_arguments(arguments)
    flags = parser().parse_args(arguments)
    declared = {**paths.experiments(), **papers.experiments()}
    if flags.list:
        _list(declared.values())
        return 0
    if flags.collect and flags.workdir is None and not flags.only:
        results.write_page(papers.experiments().values(), results.FOLDER, results.PAGE)
        say(f"wrote {results.PAGE}")
        return 0
    chosen = []
    for name in dict.fromkeys(flags.only.split(",") if flags.only else declared):
        if name not in declared:
            raise UserError(f"unknown --only={name}; the experiments are {', '.join(declared)}.")
        chosen.append(declared[name])
    if not flags.only:  # all experiments that have the scale
        chosen = [made for made in chosen if flags.scale in made.scales] or chosen
    if flags.workdir is None:
        raise UserError("--workdir=DIRECTORY is required: the folder for all stages.")
    settings = {}
    for word in flags.set:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"--set={word} must have the form --set=NAME=VALUE.")
        settings[name] = value
    # Commands run in the repository's folder.
    workdir, data = flags.workdir, flags.data
    if pathlib.Path.cwd() != planning.ROOT:
        workdir, data = workdir.absolute(), data.absolute() if data else None
        files = {name: pathlib.Path(value) for name, value in settings.items() if value}
        settings |= {name: str(file.absolute()) for name, file in files.items() if file.exists()}
    plan = planning.plan(
        chosen, flags.scale, workdir, data, settings, until=flags.until, dry_run=flags.dry_run
    )
    if flags.dry_run or (flags.scale == "paper" and not flags.collect):
        running.show(plan, with_costs=flags.scale == "paper", as_jobs=flags.slurm)
    if flags.dry_run:
        return 0
    if flags.collect:
        if not workdir.is_dir():
            raise UserError(f"--workdir={workdir} does not exist, so nothing is finished.")
        print(json.dumps(running.report(plan, running.collect(plan), workdir)))
        _collect([e for e in chosen if e.table is not None], flags.scale, plan, workdir)
        return 1 if plan.problems else 0
    if flags.slurm and plan.server:
        raise UserError(
            f"--scale={flags.scale} starts a server on this machine, which the jobs of --slurm "
            "cannot use; run it without --slurm."
        )
    jobs = (2 if flags.scale == "smoke" else 1) if flags.jobs is None else flags.jobs
    if jobs < 1:
        raise UserError(f"--jobs={jobs} must be at least 1.")
    with running.locked(workdir):
        states = (
            running.submit(plan, workdir)
            if flags.slurm
            else running.Runner(plan, jobs, shared=flags.scale == "smoke").run()
        )
        print(json.dumps(running.report(plan, states, workdir)))
    if "failed" in states.values() or plan.problems:
        return 1
    return running.TRY_AGAIN if "incomplete" in states.values() else 0


def _collect(
    tables: Sequence[Experiment], scale: str, plan: planning.Plan, workdir: pathlib.Path
) -> None:
    """Writes the measured values of tables, and the page of all tables."""
    if not tables:
        return
    # Scores of the scale smoke mean nothing, so that they stay out of the documentation.
    folder, page = results.FOLDER, results.PAGE
    if scale == "smoke":
        folder, page = workdir / "results", workdir / "reproduction.md"
    folder.mkdir(parents=True, exist_ok=True)
    written = [table.name for table in tables if results.collect(table, scale, plan, folder)]
    results.write_page(papers.experiments().values(), folder, page)
    say(f"wrote {page} and the values of {len(written)} tables to {folder}")


def _list(experiments: Iterable[Experiment]) -> None:
    shared: dict[str, dict[str, costs.Cost]] = {}  # scale -> stages of all tables
    for experiment in experiments:
        print(f"{experiment.name:<16}{', '.join(experiment.scales):<24}{experiment.title}")
        if experiment.table is not None:
            _list_table(experiment, shared)
            continue
        for scale, setup in experiment.scales.items():
            variables = {n: v or "required" for n, v in setup().variables.items()}
            if variables:
                shown = ", ".join(f"--set={n}=... ({v})" for n, v in variables.items())
                print(f"{'':<16}{scale}: {shown}")
    print("All tables and figures, with each shared stage counted once:")
    for scale, stages in shared.items():
        print(f"{'':<16}{scale}: {len(stages)} stages, {costs.text(stages.values(), scale)}")
    print(f"{'':<16}--scale=paper --dry_run prints the hours of the trainings (launch/plan.py)")


def _list_table(experiment: Experiment, shared: dict[str, dict[str, costs.Cost]]) -> None:
    """Prints the state, the size and the cost of a table at each scale, and what it lacks.

    Adds the costs of its stages to those of all tables.
    """
    sizes = []
    for scale, setup in experiment.scales.items():
        own = costs.stages(setup(), scale)
        shared.setdefault(scale, {}).update(own)
        size = f"{len(setup().cells)} cells, {len(own)} stages"
        sizes.append(f"{scale}: {size}, {costs.text(own.values(), scale)}")
    print(f"{'':<16}{results.state(experiment, results.FOLDER)}; {'; '.join(sizes)}")
    for what, reason in {**experiment.unsupported, **experiment.missing}.items():
        print(f"{'':<16}{what}: {reason}")


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())
