"""Sweeps over grids of settings, with fake training runs except in the last test."""

import json
import math
import os
import pathlib
import runpy

import pytest

from cirag_jax import cli
from cirag_jax.commands import jobs
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from tests import tiny

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_EXTEND = runpy.run_path(str(_ROOT / "launch/sweep.py"))["extend"]
GRID = ("--config.sweep.optimizer.learning_rate=1e-4,3e-5", "--config.sweep.seed=0,1")
NAMES = [
    f"optimizer.learning_rate={rate},seed={seed}" for rate in ("1e-4", "3e-5") for seed in "01"
]


@pytest.fixture
def ran(monkeypatch):
    """The names of the executed runs; seed 1 with rate 3e-5 is the best."""
    names = []

    def run(config, folder):
        names.append(folder.name)
        value = config.seed + config.optimizer.learning_rate
        return {"complete": True, "best_step": 3, "dev/mrr": value, "dev/recall@5": 0.5}

    monkeypatch.setattr(jobs, "run", run)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    return names


def sweep(workdir, *grid, config="configs/aligner.py", **fields):
    from cirag_jax.commands.sweep import sweep

    given = [f"--config.{field}={value}" for field, value in fields.items()]
    workdir.mkdir(exist_ok=True)
    return sweep(load_config(str(_ROOT / config), given, _EXTEND), workdir, grid or GRID)


def state_of(result):
    return [run["state"] for run in result["runs"]]


def test_sweep_runs_every_combination_once(ran, tmp_path):
    result = sweep(tmp_path, batch_size=32)
    assert ran == NAMES and result["complete"] and result["metric"] == "dev/mrr"
    assert result["runs"][1] == {
        "name": NAMES[1], "values": {"optimizer.learning_rate": "1e-4", "seed": "1"},
        "state": "ended", "mrr": 1.0001, "recall@5": 0.5,
    }  # fmt: skip
    assert result["best"] == NAMES[1]
    config = json.loads((tmp_path / NAMES[2] / "config.json").read_text())
    assert config["optimizer"]["learning_rate"] == 3e-5 and config["batch_size"] == 32
    assert config["seed"] == 0 and not {"metric", "dry_run", "sweep"} & config.keys()
    assert json.loads((tmp_path / "result.json").read_text()) == result
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (tmp_path / "table.md").read_text().splitlines()[2:]
    ]
    assert rows[0] == ["optimizer.learning_rate", "seed", "state", "mrr", "recall@5"]
    assert rows[3] == ["1e-4", "1", "ended", "1", "0.5"] and len(rows) == 6
    # With another value, completed runs are not repeated.
    more = (GRID[0], "--config.sweep.seed=0,1,2")
    result = sweep(tmp_path, *more, batch_size=32)
    assert ran[4:] == [name[:-1] + "2" for name in NAMES[::2]] and len(result["runs"]) == 6
    with pytest.raises(UserError, match="started with batch_size=32, not 16"):
        sweep(tmp_path, *more, batch_size=16)


def test_best_of_prefers_lower_loss_and_later_of_equals():
    from cirag_jax.commands import series

    assert series.best_of({"a": 2.0, "b": 1.0, "c": None, "d": math.nan}, "dev/loss") == "b"
    assert series.best_of({"a": 2.0, "b": 1.0, "c": 2.0}, "dev/mrr") == "c"


def test_sweep_array_task_executes_own_run(ran, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    result = sweep(tmp_path)
    assert ran == [NAMES[2]] and result["complete"]
    assert state_of(result) == ["", "", "ended", ""]
    result = sweep(tmp_path, array_index=0)  # set by hand
    assert ran == [NAMES[2], NAMES[0]] and state_of(result) == ["ended", "", "ended", ""]
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    with pytest.raises(UserError, match=r"SLURM_ARRAY_TASK_ID=4 must be 0 to 3: .* has 4 runs"):
        sweep(tmp_path)


def test_sweep_dry_run_starts_nothing(ran, tmp_path, capsys):
    result = sweep(tmp_path, dry_run=True)
    assert ran == [] and isinstance(result, cli.PrintOnly)
    assert capsys.readouterr().err.splitlines() == [f"{i:>4}  {n}" for i, n in enumerate(NAMES)]
    assert not list(tmp_path.glob("*seed*"))


def test_sweep_failed_run_is_skipped_and_retried(ran, tmp_path, monkeypatch, capsys):
    run = jobs.run

    def failing(config, folder):
        if folder.name == NAMES[1]:
            raise UserError("loss is nan\nat step 7")
        return run(config, folder)

    monkeypatch.setattr(jobs, "run", failing)
    result = sweep(tmp_path)
    assert ran == [NAMES[0], *NAMES[2:]] and result["complete"]
    assert state_of(result)[1] == "failed: loss is nan at step 7" and "mrr" not in result["runs"][1]
    assert "seed=1 failed: loss is nan at step 7" in capsys.readouterr().err
    with pytest.raises(
        UserError, match="loss is nan"
    ):  # the scheduler of a job array sees the failure
        sweep(tmp_path, array_index=1)
    monkeypatch.setattr(jobs, "run", run)
    assert state_of(sweep(tmp_path)) == ["ended"] * 4 and ran[3:] == [NAMES[1]]


def test_sweep_stopped_run_ends_sweep_and_resumes(ran, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "run", lambda config, folder: {"complete": False})
    result = sweep(tmp_path)
    assert not result["complete"] and state_of(result) == ["begun", "", "", ""]
    monkeypatch.undo()
    monkeypatch.setattr(jobs, "run", lambda config, folder: {"complete": True, "dev/mrr": None})
    result = sweep(tmp_path)
    assert state_of(result) == ["ended"] * 4 and result["best"] is None


def test_sweep_run_in_use_is_skipped(ran, tmp_path):
    (tmp_path / NAMES[0]).mkdir()
    with cli._lock(tmp_path / NAMES[0], "sweep.py"):
        result = sweep(tmp_path)
    assert ran == NAMES[1:] and not result["complete"]
    assert state_of(result) == ["", "ended", "ended", "ended"]


def test_sweep_values_with_commas_and_special_characters(ran, tmp_path):
    result = sweep(tmp_path, "--config.sweep.data.dir=('a/b','c'),d,null")
    assert [run["values"]["data.dir"] for run in result["runs"]] == ["('a/b','c')", "d", "null"]
    names = [run["name"] for run in result["runs"]]
    assert names[0].startswith("data.dir=__a_b_,_c__-") and names[1:] == [
        "data.dir=d",
        "data.dir=null",
    ]
    dirs = [json.loads((tmp_path / n / "config.json").read_text())["data"]["dir"] for n in names]
    assert dirs == [["a/b", "c"], "d", None]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (["--config.sweep.optimizer.lr=1,2"], "unknown config key 'optimizer.lr'"),
        (["--config.sweep.seed=0,x"], "--config.seed=x: expected an integer"),
        (["--config.sweep.seed=0,,1"], "expected comma-separated values"),
        (["--config.sweep.seed"], "expected comma-separated values"),
        (["--config.sweep.seed=0,1,0"], "seed=0 and seed=0 are the same run"),
        (["--config.sweep.temperature=0.1,1e-1"], "=0.1 and temperature=1e-1 are the same run"),
        (["--config.sweep.seed=0", "--config.sweep.seed=1"], "set twice"),
        (["--config.sweep.data=1,2"], "expected one of its fields"),
    ],
)
def test_sweep_bad_grid_is_refused_before_runs(ran, tmp_path, grid, message):
    with pytest.raises(UserError) as error:
        sweep(tmp_path / "s", *grid)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert ran == [] and list((tmp_path / "s").iterdir()) == []


def test_sweep_unusable_configs_are_refused(ran, tmp_path):
    with pytest.raises(UserError, match="--config.sweep.FIELD=VALUE,VALUE is required"):
        from cirag_jax.commands.sweep import make_runs

        make_runs(load_config("configs/aligner.py", (), _EXTEND), [])
    with pytest.raises(UserError, match="config.metric is required"):
        sweep(tmp_path, GRID[1], config="configs/comparison.py")


def test_sweep_command_trains_grid(tmp_path, command):
    model, data = tiny.model_folder(tmp_path / "m"), tiny.dataset_folder(tmp_path / "d")
    given = [
        f"--config.model.spec={model}", f"--config.data.dir={data}", "--config.dev.questions=2",
        "--config.num_steps=2", "--config.eval_every=2", "--config.batch_size=4",
        "--config.num_negatives=2", "--config.prefixes_per_question=2",
        "--config.query_max_length=128",
        "--config.chunk_tokens=256", f"--workdir={tmp_path / 's'}",
    ]  # fmt: skip
    assert "SLURM_ARRAY_TASK_ID" not in os.environ
    done = command("sweep.py", "--config.sweep.seed=0,1", *given)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert state_of(result) == ["ended"] * 2 and result["best"] in ("seed=0", "seed=1")
    for run in result["runs"]:
        own = json.loads((tmp_path / "s" / run["name"] / "result.json").read_text())
        assert own["step"] == 2 and own["dev/mrr"] == run["mrr"]
    assert not (tmp_path / "s" / ".lock").exists()
    done = command("sweep.py", "--config.sweep.sead=0,1", *given)
    assert done.returncode == 2 and "did you mean seed?" in done.stderr
    assert len(done.stderr.splitlines()) == 1
