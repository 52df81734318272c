import contextlib
import json
import sqlite3
import sys
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from cirag_jax.errors import UserError
from cirag_jax.training import trackers
from cirag_jax.training.metrics import MetricWriter
from tests.training.students import read_metrics

CONFIG = ConfigDict({"seed": 3, "data": {"dir": "d"}})
VARIABLES = ("WANDB_MODE", "WANDB_ERROR_REPORTING", "MLFLOW_DISABLE_TELEMETRY")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in (*VARIABLES, "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")  # Restores also variables that the test sets.
        monkeypatch.delenv(name)


def write(folder, tracker, *steps, start=0):
    with MetricWriter(folder, 9, start, tracker=tracker, config=CONFIG) as writer:
        for step in steps:
            writer.write(step, {"dev/recall@5": step / 4, "norm": float("inf")})


class Wandb:
    """Records what wandb receives."""

    def __init__(self):
        self.started, self.logged, self.finished = [], [], 0
        self.Settings = dict

    def init(self, **arguments):
        self.started.append(arguments)
        return SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, scalars, step):
        self.logged.append((step, scalars))

    def finish(self):
        self.finished += 1


def test_wandb_receives_config_and_scalars_and_resumes(tmp_path, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write(tmp_path, "wandb", 1, 2)
    write(tmp_path, "wandb", 2, 3, start=1)
    assert wandb.logged == [(s, {"dev/recall@5": s / 4}) for s in (1, 2, 2, 3)]
    first, second = wandb.started
    assert first["config"] == {"seed": 3, "data": {"dir": "d"}} and first["dir"] == str(tmp_path)
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert wandb.finished == 2
    assert trackers.os.environ["WANDB_MODE"] == "offline"
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    write(tmp_path, "wandb", 1)  # From step 0: another run, which may log step 1 again.
    assert wandb.started[-1]["id"] != first["id"]


def test_wandb_mode_of_user_is_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    monkeypatch.setenv("WANDB_MODE", "online")
    trackers.check_tracker("wandb")
    assert trackers.os.environ["WANDB_MODE"] == "online"


class MlflowError(Exception):
    pass


class Mlflow(SimpleNamespace):
    """Records what MLflow receives; a server that is ``down`` raises."""

    def __init__(self):
        super().__init__(
            exceptions=SimpleNamespace(MlflowException=MlflowError),
            entities=SimpleNamespace(Param=lambda *p: p, Metric=lambda *m: m),
        )
        self.metrics, self.params, self.ended, self.down = [], {}, [], False

    def MlflowClient(self, tracking_uri):  # noqa: N802
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return "7"

    def create_run(self, experiment, run_name):
        assert experiment == "7"
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def update_run(self, run_id, status):
        if run_id != "abc":
            raise MlflowError("Run not found")

    def log_batch(self, run_id, metrics=(), params=()):
        if self.down:
            raise MlflowError("no connection")
        self.params |= dict(params)
        self.metrics += [(run_id, key, value, step) for key, value, _, step in metrics]

    def set_terminated(self, run_id):
        self.ended.append(run_id)


def test_mlflow_receives_config_and_scalars_and_resumes(tmp_path, monkeypatch, capsys):
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "alembic", mlflow)
    write(tmp_path, "mlflow", 1)
    write(tmp_path, "mlflow", 2, start=1)
    assert mlflow.metrics == [("abc", "dev/recall_at_5", step / 4, step) for step in (1, 2)]
    assert mlflow.params == {"seed": "3", "data.dir": "d"} and mlflow.ended == ["abc", "abc"]
    assert mlflow.uri == f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.down = True
    write(tmp_path, "mlflow", 3, 4, start=2)
    assert capsys.readouterr().err.count("MLflow failed") == 1
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    (tmp_path / "tracker.json").write_text(json.dumps({"mlflow": "deleted"}))
    with pytest.raises(UserError, match=r"tracker=mlflow cannot start \(Run not found\)"):
        write(tmp_path, "mlflow", start=4)


def test_none_writes_only_metrics(tmp_path):
    write(tmp_path, "none", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_has_config(tmp_path):
    write(tmp_path, "tensorboard", 1)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"    data.dir = 'd'" in events.read_bytes()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_library_is_named_before_training(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    message = rf"config.tracker={name} needs {name}, .*: pip install -r requirements-trackers.txt"
    with pytest.raises(UserError, match=message):
        trackers.check_tracker(name)
    with pytest.raises(UserError, match="config.tracker='aim' is not one of tensorboard, wandb"):
        trackers.check_tracker("aim")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_real_library_writes_only_to_workdir(tmp_path, name, monkeypatch):
    for variable, value in trackers._OFFLINE[name].items():
        monkeypatch.setenv(variable, value)
    pytest.importorskip(name)
    write(tmp_path, name, 1, 2)
    write(tmp_path, name, 3, start=2)
    (run_id,) = json.loads((tmp_path / "tracker.json").read_text()).values()
    if name == "wandb":
        assert len(list(tmp_path.glob(f"wandb/offline-run-*-{run_id}/*.wandb"))) == 2
    else:
        with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
            query = "SELECT step, value FROM metrics WHERE run_uuid = ? AND key = 'dev/recall_at_5'"
            rows = database.execute(query, [run_id]).fetchall()
        assert sorted(rows) == [(1, 0.25), (2, 0.5), (3, 0.75)]
