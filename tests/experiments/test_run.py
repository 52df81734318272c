"""experiments/run.py on made-up stages, and the plans of all declared experiments."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from ml_collections import config_dict

from cirag_jax.errors import UserError
from experiments import papers, paths, run
from experiments.paths import declare, planning, running
from experiments.paths.declare import Experiment, Setup, Stage
from tests import tiny

_ROOT = pathlib.Path(__file__).resolve().parents[2]
MADE_UP = "-m tests.experiments.made_up_stage --out={out}"


@pytest.fixture
def declared(monkeypatch):
    """A function that declares experiments: name -> stages, as commands after `MADE_UP`."""

    def declare_experiments(server=None, variables=None, **experiments):
        made = {
            name: Experiment(
                name,
                f"title of {name}",
                {
                    "smoke": lambda stages=stages: Setup(
                        {n: Stage(f"{MADE_UP} {rest}") for n, rest in stages.items()},
                        variables or {},
                        server,
                    )
                },
            )
            for name, stages in experiments.items()
        }
        monkeypatch.setattr(paths, "experiments", lambda: made)
        monkeypatch.setattr(papers, "experiments", dict)

    return declare_experiments


def execute(capsys, workdir, *more) -> tuple[int, Any, str]:
    """Returns the exit code, the result and the text on standard error."""
    code = run.main([f"--workdir={workdir}", *more])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def num_calls(result, experiment, stage):
    folder = result[experiment]["stages"][stage]["folder"]
    return len(pathlib.Path(folder + ".calls").read_text())


def sums(result, experiment):
    return {n: s["result"]["sum"] for n, s in result[experiment]["stages"].items()}


A = {"first": "--add=1", "second": "--add=2 --input={first}", "table": "--input={second}"}


def test_run_finished_stages_are_skipped_and_changed_flag_reruns_those_below(
    declared, tmp_path, capsys
):
    declared(a=A)
    code, result, err = execute(capsys, tmp_path)
    assert code == 0 and sums(result, "a") == {"first": 1, "second": 3, "table": 3}
    assert "python -m tests.experiments.made_up_stage --out=" in err and "the sum is 3" in err
    assert execute(capsys, tmp_path)[1] == result
    assert [num_calls(result, "a", n) for n in A] == [1, 1, 1]
    declared(a={**A, "second": "--add=5 --input={first}"})
    _, changed, _ = execute(capsys, tmp_path)
    assert sums(changed, "a") == {"first": 1, "second": 6, "table": 6}
    assert [num_calls(changed, "a", n) for n in A] == [1, 1, 1]
    assert changed["a"]["stages"]["table"]["folder"] != result["a"]["stages"]["table"]["folder"]


def test_run_stages_at_the_same_time(declared, tmp_path, capsys):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    stages = {"one": f"--meet={fifo}:r", "two": f"--meet={fifo}:w --add=1"}
    declared(a={**stages, "last": "--input={one} --input={two} --add=1"})
    code, result, err = execute(capsys, tmp_path / "w", "--jobs=2")
    assert code == 0 and sums(result, "a") == {"one": 0, "two": 1, "last": 2}, err
    assert list(result["a"]["stages"]) == ["one", "two", "last"]
    assert run.main([f"--workdir={tmp_path}", "--jobs=0"]) == 2
    assert "--jobs=0 must be at least 1" in capsys.readouterr().err


def test_server_that_does_not_start_is_named_with_its_error():
    words = r"python missing\.py ended without printing its URL: .*No such file"
    with pytest.raises(UserError, match=words), running._server("missing.py"):
        pass


def test_run_folder_without_result_is_not_finished(declared, tmp_path, capsys):
    declared(a={"first": "--add=1"})
    _, result, _ = execute(capsys, tmp_path)
    folder = pathlib.Path(result["a"]["stages"]["first"]["folder"])
    (folder / "result.json").unlink()
    _, result, _ = execute(capsys, tmp_path)
    assert num_calls(result, "a", "first") == 2 and sums(result, "a") == {"first": 1}


def test_run_equal_stages_are_shared_by_identity(declared, tmp_path, capsys):
    declared(a=A, b={"other_name": "--add=1", "last": "--add=2 --input={other_name}"})
    _, result, _ = execute(capsys, tmp_path)
    assert sums(result, "b") == {"other_name": 1, "last": 3}
    assert num_calls(result, "b", "other_name") == num_calls(result, "b", "last") == 1
    record = json.loads(
        pathlib.Path(result["a"]["stages"]["first"]["folder"] + ".json").read_text()
    )
    assert record["experiments"] == ["a", "b"]


def test_run_failing_stage_is_named_and_other_experiments_finish(declared, tmp_path, capsys):
    declared(a={**A, "second": "--fail --input={first}"}, b=A)
    code, result, err = execute(capsys, tmp_path)
    assert code == 1 and "a/second failed (exit code 3" in err and "the stage is broken" in err
    states = {n: s["state"] for n, s in result["a"]["stages"].items()}
    assert states == {"first": "finished", "second": "failed", "table": "not run"}
    assert result["b"]["complete"] and not result["a"]["complete"]


def test_run_stage_that_asks_to_be_run_again_is_retried(declared, tmp_path, capsys):
    declared(a={"first": "--again=2"}, b={"first": "--again=3 --add=1"})
    code, result, _ = execute(capsys, tmp_path)
    assert code == 1 and result["a"]["complete"] and num_calls(result, "a", "first") == 3
    assert result["b"]["stages"]["first"]["state"] == "failed"
    code, result, _ = execute(capsys, tmp_path)
    assert code == 0 and sums(result, "b") == {"first": 1}


def test_run_incomplete_stage_has_exit_code_75(declared, tmp_path, capsys):
    declared(a={**A, "first": "--incomplete"})
    code, result, _ = execute(capsys, tmp_path)
    assert code == 75 and result["a"]["stages"]["second"]["state"] == "not run"


def test_run_until_ends_with_this_stage(declared, tmp_path, capsys):
    declared(a=A)
    _, result, _ = execute(capsys, tmp_path, "--until=second")
    assert sums(result, "a") == {"first": 1, "second": 3}
    assert execute(capsys, tmp_path)[1]["a"]["stages"].keys() == A.keys()


def test_run_until_leaves_out_experiments_without_this_stage(declared, tmp_path, capsys):
    declared(a=A, b={"first": "--add=7", "table": "--input={first}"})
    _, result, err = execute(capsys, tmp_path, "--until=second")
    assert result.keys() == {"a"} and sums(result, "a") == {"first": 1, "second": 3}
    assert "b has no stage second, so that --until leaves it out" in err
    code, _, err = execute(capsys, tmp_path, "--until=second", "--only=b")
    assert code == 2 and "unknown --until=second; the stages are first, table" in err


def test_run_changed_data_file_reruns_its_stage(declared, tmp_path, capsys):
    data = tmp_path / "data"
    (data / "b").mkdir(parents=True)
    (data / "b" / "dev.json").write_text("1")
    declared(a={"first": "--file={data}/b", "second": "--input={first}", "third": "--add=1"})
    flags = (f"--data={data}",)
    _, result, _ = execute(capsys, tmp_path / "w", *flags)
    (data / "b" / "dev.json").write_text("2")
    _, changed, _ = execute(capsys, tmp_path / "w", *flags)
    same = [
        result["a"]["stages"][n]["folder"] == changed["a"]["stages"][n]["folder"]
        for n in ("first", "second", "third")
    ]
    assert same == [False, False, True]


def test_run_collect_reports_without_running(declared, tmp_path, capsys):
    declared(a=A)
    execute(capsys, tmp_path, "--until=first")
    code, result, err = execute(capsys, tmp_path, "--collect")
    states = [stage["state"] for stage in result["a"]["stages"].values()]
    assert code == 0 and states == ["finished", "not run", "not run"]
    assert not result["a"]["complete"] and "| table " in err


def test_run_collect_without_workdir_is_refused(declared, tmp_path, capsys):
    declared(a=A)
    code, result, err = execute(capsys, tmp_path / "none", "--collect")
    assert code == 2 and result is None and "none does not exist" in err


def test_run_slurm_with_own_server_is_refused(declared, tmp_path, capsys):
    declared(a=A, server="experiments/smoke/server.py")
    code, result, err = execute(capsys, tmp_path, "--slurm")
    assert code == 2 and result is None and "run it without --slurm" in err


def test_run_variable_file_of_another_folder_is_found(declared, tmp_path, monkeypatch, capsys):
    declared(a={"first": "--file={model}"}, variables={"model": "x"})
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    for value, word in (("m.gguf", tmp_path / "m.gguf"), ("owner/name", "owner/name")):
        _, _, err = execute(capsys, tmp_path, f"--set=model={value}", "--dry_run")
        assert f"--file={word}\n" in err


def test_run_dry_run_prints_commands_and_starts_nothing(declared, tmp_path, capsys):
    declared(a=A, variables={"model": ""})
    code, result, err = execute(capsys, tmp_path / "w", "--dry_run")
    assert code == 0 and result is None and err.count("python -m tests.experiments") == 3
    _, _, err = execute(capsys, tmp_path / "w", "--dry_run", "--slurm")
    assert err.count("sbatch --parsable") == 3 and "--dependency=afterok:made_up_stage-" in err
    assert not (tmp_path / "w").exists()


def test_show_leaves_no_estimates_in_the_workdir(monkeypatch, tmp_path, capsys):
    folders = []

    def plans(words, **_):
        folders.append(pathlib.Path(words[-1].removeprefix("--workdir=")))
        (folders[-1] / "deep").mkdir(parents=True)
        return subprocess.CompletedProcess(words, 0, '{"gpus": {}, "peak_bytes": 0, "devices": 1}')

    monkeypatch.setattr(subprocess, "run", plans)
    stage = Stage(f"{MADE_UP} --add=1", plan="")
    experiment = Experiment("a", "title", {"paper": lambda: Setup({"first": stage})})
    plan = planning.plan([experiment], "paper", tmp_path / "w", None, {}, dry_run=True)
    running.show(plan, with_costs=True, as_jobs=False)
    assert "launch/plan.py expects 0.0 GiB on each of 1 devices" in capsys.readouterr().err
    assert len(folders) == 1 and not folders[0].exists() and not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only=b"], "unknown --only=b; the experiments are a"),
        (["--scale=huge"], "unknown --scale=huge; choose one of smoke, small, paper"),
        (["--scale=paper"], "a has no --scale=paper; choose one of smoke"),
        (["--until=last"], "unknown --until=last; the stages are first, second, table"),
        (["--set=model"], "--set=model must have the form --set=NAME=VALUE"),
        (["--set=x=1"], "--set=x=... names no variable of these experiments; the variables are m"),
        (["--no_such"], "unrecognized arguments: --no_such"),
        ([], "a/second needs a value: --set=m=VALUE"),
    ],
)
def test_run_bad_flag_is_one_sentence_with_exit_code_2(declared, tmp_path, capsys, flags, words):
    declared(a={**A, "second": "--add={m} --input={first}"}, variables={"m": ""})
    code, result, err = execute(capsys, tmp_path, *flags)
    assert code == 2 and result is None and words in err and err.count("\n") == 1


def test_run_without_workdir_or_data_is_refused(declared, tmp_path, capsys):
    declared(a={"first": "--file={data}/x"})
    assert run.main([]) == 2 and "--workdir=DIRECTORY is required" in capsys.readouterr().err
    assert "a/first: --data=DIR is required" in execute(capsys, tmp_path)[2]
    _, _, err = execute(capsys, tmp_path, f"--data={tmp_path / 'none'}")
    assert f"{tmp_path / 'none'}/x does not exist" in err


def test_plan_unknown_reference_and_flag_are_refused(tmp_path):
    def plan(command):
        experiment = Experiment("a", "", {"smoke": lambda: Setup({"s": Stage(command)})})
        planning.plan([experiment], "smoke", tmp_path, None, {})

    with pytest.raises(UserError, match=r"a/s: \{typo\} is neither a stage nor a variable"):
        plan(f"{MADE_UP} --input={{typo}}")
    with pytest.raises(UserError, match="a/s: unknown config key 'checkpoin'"):
        plan("launch/export.py --config=configs/export.py --config.checkpoin=x")
    with pytest.raises(UserError, match="a/s: the command needs --config=FILE"):
        plan("launch/export.py --config.checkpoint=x")


def test_plan_identity_contains_config_values_and_code(monkeypatch, tmp_path):
    def folder():
        planning._code_of_config.cache_clear()
        stage = Stage("launch/answer.py --config=configs/methods/direct.py")
        experiment = Experiment("a", "", {"smoke": lambda: Setup({"s": stage})})
        return next(iter(planning.plan([experiment], "smoke", tmp_path, None, {}).stages))

    first = folder()
    assert folder() == first
    with monkeypatch.context() as patch:
        patch.setattr(planning.identity, "of_code", lambda module: f"other {module}")
        assert folder() != first
    load = planning.config_files.load_config
    with monkeypatch.context() as patch:
        changed = load("configs/methods/direct.py", ["--config.seed=7"])
        patch.setattr(planning.config_files, "load_config", lambda *_: changed)
        assert folder() != first
    with monkeypatch.context() as patch:  # a new optional field
        extended = load("configs/methods/direct.py").unlock()
        extended.prompt_file = config_dict.placeholder(str)
        patch.setattr(planning.config_files, "load_config", lambda *_: extended)
        assert folder() == first
    planning._code_of_config.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_run_killed_with_its_stage_resumes(tmp_path, signum):
    """Stops the runner during a stage, which must end too, because it holds its workdir."""
    script = (
        "import sys; from experiments import papers, paths, run\n"
        "from experiments.paths.declare import *\n"
        f"stages = {{'first': Stage('{MADE_UP} --add=1'),\n"
        f"          'second': Stage('{MADE_UP} --wait --input={{first}}')}}\n"
        "made = Experiment('a', '', {'smoke': lambda: Setup(stages)})\n"
        "paths.experiments, papers.experiments = lambda: {'a': made}, dict; sys.exit(run.main())"
    )
    command = [sys.executable, "-c", script, f"--workdir={tmp_path}"]
    runner = subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.PIPE, text=True)
    while not (started := list(tmp_path.glob("*/started"))):
        assert runner.poll() is None
    children = pathlib.Path(f"/proc/{runner.pid}/task/{runner.pid}/children")
    child = int(children.read_text().split()[0]) if children.exists() else None
    runner.send_signal(signum)
    _, err = runner.communicate()
    if signum != signal.SIGKILL:
        assert runner.returncode == 130 and "run the same command to resume" in err
    while child and os.path.exists(f"/proc/{child}"):
        pass
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    result = json.loads(done.stdout)
    assert done.returncode == 0 and sums(result, "a") == {"first": 1, "second": 1}
    assert num_calls(result, "a", "first") == 1 and num_calls(result, "a", "second") == 2
    assert pathlib.Path(result["a"]["stages"]["second"]["folder"]) == started[0].parent


def test_sbatch_jobs_wait_for_their_inputs(tmp_path):
    experiment = Experiment(
        "a",
        "",
        {
            "paper": lambda: Setup(
                {
                    "prepare": Stage(f"{MADE_UP} --add=1"),
                    "train": Stage(
                        "launch/export.py --config=configs/export.py --config.checkpoint={prepare}",
                        slurm="--gpus-per-node=4",
                    ),
                }
            )
        },
    )
    plan = planning.plan([experiment], "paper", tmp_path, None, {})
    prepare, train = plan.stages.values()
    words = running.sbatch(prepare, [])
    assert words[-1].startswith("--wrap=mkdir -p ") and "--dependency" not in " ".join(words)
    assert words[-1].endswith(f"mv {prepare.folder}/result.json.part {prepare.folder}/result.json")
    words = running.sbatch(train, ["17", "18"])
    assert "--dependency=afterok:17:18" in words and "--gpus-per-node=4" in words
    assert words[words.index("launch/slurm/job.sh") :] == [
        "launch/slurm/job.sh", "export", "--config=configs/export.py",
        f"--config.checkpoint={prepare.folder}", f"--workdir={train.folder}",
    ]  # fmt: skip


def test_submit_sends_job_numbers_to_later_jobs(declared, tmp_path, monkeypatch, capsys):
    declared(a=A)
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\nwc -l < {tmp_path}/log\n')
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text('#!/bin/sh\n[ "$2" = --jobs=2 ] && echo running\n')
    for program in (sbatch, squeue):
        program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    code, result, _ = execute(capsys, tmp_path / "w", "--slurm")
    states = [stage["state"] for stage in result["a"]["stages"].values()]
    assert code == 0 and states == ["submitted"] * 3
    jobs = (tmp_path / "log").read_text().splitlines()
    waits = [word for job in jobs for word in job.split() if word.startswith("--dependency")]
    assert waits == ["--dependency=afterok:1", "--dependency=afterok:2"]
    # Job 2 is in the queue; the others have ended without a result.
    execute(capsys, tmp_path / "w", "--slurm")
    again = (tmp_path / "log").read_text().splitlines()[3:]
    assert [[w for w in job.split() if w.startswith("--dep")] for job in again] == [
        [],
        ["--dependency=afterok:2"],
    ]


_SBATCH = """#!/bin/bash
# Runs the job at once, and prints a job number.
while [[ $1 == --* ]]; do
  case $1 in
    --wrap=*) wrap=${1#--wrap=} ;;
    --job-name=*) export SLURM_JOB_NAME=${1#--job-name=} ;;
    --export=ALL,*) export "${1#--export=ALL,}" ;;
  esac
  shift
done
if [[ $wrap ]]; then bash -c "$wrap" >&2; else bash "$@" >&2; fi || exit
echo 7
"""
_SRUN = '#!/bin/bash\nshift\nexec "$@"\n'  # without --kill-on-bad-exit


@pytest.mark.slow
def test_submit_jobs_leave_results_for_collect(monkeypatch, tmp_path, capsys):
    tiny.dataset_folder(tmp_path / "data")
    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", _SBATCH), ("srun", _SRUN)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    stages = {
        "first": Stage(f"{MADE_UP} --add=1"),
        "extract": Stage(
            "launch/extract.py --config=configs/extract.py --config.data.dir={data} "
            "--config.import_openie={data}/openie.jsonl"
        ),
    }
    made = Experiment("a", "", {"smoke": lambda: Setup(stages)})
    monkeypatch.setattr(paths, "experiments", lambda: {"a": made})
    monkeypatch.setattr(papers, "experiments", dict)
    flags = (f"--data={tmp_path / 'data'}",)
    execute(capsys, tmp_path / "w", "--slurm", *flags)
    _, result, _ = execute(capsys, tmp_path / "w", "--collect", *flags)
    assert result["a"]["complete"]
    assert result["a"]["stages"]["first"]["result"]["sum"] == 1
    assert result["a"]["stages"]["extract"]["result"]["triples"] == 48


@pytest.mark.parametrize("scale", declare.SCALES)
def test_every_experiment_has_a_valid_plan(scale, tmp_path):
    chosen = [e for e in paths.experiments().values() if scale in e.scales]
    plan = planning.plan(chosen, scale, tmp_path, None, {}, dry_run=True)
    assert plan.names.keys() == {experiment.name for experiment in chosen}


# Stages that no table reads, without the benchmark's name, and what they are for.
_NOT_IN_TABLE = {
    ("cirag_path", "evaluate"): "its own table: agreement with the decisions of annotations",
    ("cirag_path", "trajectories_dev"): "the decisions that evaluate compares with",
    ("kirag_path", "evaluate"): "its own table: retrieval by the trained aligner",
    ("kirag_path", "evaluate_annotated"): "its own table: retrieval by the other aligner",
    ("dualrag_path", "evaluate_judge"): "its own table: accuracy by a judge",
}


@pytest.mark.parametrize("scale", declare.SCALES)
def test_every_stage_is_read_on_the_way_to_a_table(scale):
    """Otherwise, the tables would be the same without the stage."""
    for name, experiment in paths.experiments().items():
        stages = experiment.scales[scale]().stages
        assert list(stages)[-1].startswith("table"), name
        assert not _unread(stages, running.TABLES), name
        listed = {stage for path, stage in _NOT_IN_TABLE if path == name}
        assert _unread(stages, "table") == listed & {*map(_without_benchmark, stages)}, name


def _unread(stages, tables):
    """Returns the stages that no stage reads on the way to ``tables`` (beginnings of names)."""
    needed = set()
    for name, stage in reversed(stages.items()):
        if name.startswith(tables) or name in needed:
            needed |= {name, *re.findall(r"{(\w+)}", stage.command)}
    return {_without_benchmark(name) for name in stages if name not in needed}


def _without_benchmark(name):
    return re.sub(f"_({'|'.join(declare.BENCHMARKS)})$", "", name)


def test_list_names_scales_and_variables(capsys):
    assert run.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "cirag_path" in out and "smoke, small, paper" in out and "--set=server=" in out
    assert re.search(r"cirag_table2 .*\n.*smoke: 18 cells, 32 stages, about \d+ min;", out)
    assert re.search(r"counted once:\n *smoke: \d+ stages, about \d+ min\n", out)
