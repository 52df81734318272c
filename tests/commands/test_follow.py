"""Evaluation of checkpoints during training, with a fake evaluation."""

import json
import os
import shutil
import signal

import numpy as np
import pytest

from cirag_jax.commands.follow import follow
from cirag_jax.errors import UserError
from cirag_jax.models.io.checkpoints import Checkpoints
from configs import reader_eval, retrieval

VALUES = {1: 0.25, 2: 0.75, 3: 0.5}


class Training:
    """A fake training run that saves and deletes checkpoints on request."""

    def __init__(self, folder, learning_rate=0.1):
        self.folder, self._meta = folder, {"run": {"learning_rate": learning_rate}}

    def save(self, step, delete=()):
        with Checkpoints(self.folder / "checkpoints", keep=9) as checkpoints:
            checkpoints.save(step, {"params": np.full(3, step)}, None, self._meta)
        for other in delete:
            shutil.rmtree(self.folder / "checkpoints" / str(other))

    def end(self, complete=True):
        (self.folder / "result.json").write_text(json.dumps({"complete": complete}))


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path / "w")


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "e").mkdir()
    return tmp_path / "e"


def config_of(training, **fields):
    config = retrieval.get_config()
    config.follow, config.metric = True, None
    config.checkpoint = str(training.folder)
    config.update_from_flattened_dict(fields)
    return config.lock()


class Evaluation:
    """A fake evaluation that reads the step from the weights; calls ``before`` first."""

    def __init__(self, before=lambda step: None):
        self.asked, self._before = [], before

    def __call__(self, config, workdir):
        assert config.systems == ("trained",) and str(workdir) == config.checkpoint
        with Checkpoints(config.checkpoint, read_only=True) as checkpoints:
            self._before(checkpoints.latest_step())
            state = checkpoints.restore(None, {"params": np.zeros(3, int)}, subset=True).state
        step = int(state["params"][0])
        self.asked.append(step)
        (workdir / "rankings.jsonl").write_text(str(step))
        scores = {"recall@2": 0.125, "recall@5": VALUES[step], "ndcg@5": 0.5}
        return {"trained": scores, "num_questions": 4}


def never(seconds):
    raise AssertionError("waited")


def test_follow_running_training_until_it_ends(training, workdir, capsys):
    moments = iter(
        [
            lambda: training.save(1),
            lambda: training.end(complete=False),  # stopped, and resumed
            lambda: training.save(2),
            lambda: (training.save(3, delete=(1, 2)), training.end()),
        ]
    )
    evaluate = Evaluation()
    result = follow(config_of(training), workdir, evaluate, lambda _: next(moments)())
    assert evaluate.asked == [1, 2, 3] and next(moments, None) is None
    rows = [{"step": s, "recall@5": VALUES[s], "recall@2": 0.125, "ndcg@5": 0.5} for s in (1, 2, 3)]
    assert result == {
        "metric": "trained.recall@5", "checkpoints": rows, "best_step": 2, "best": 0.75,
        "best_checkpoint": str(workdir / "step_2"), "complete": True,
    }  # fmt: skip
    assert json.loads((workdir / "result.json").read_text()) == result
    said = capsys.readouterr().err
    assert said.count("waiting for the first checkpoint") == 1
    assert "step 1: trained.recall@5 0.25; best so far 0.25 at step 1\n" in said
    assert "step 3: trained.recall@5 0.5; best so far 0.75 at step 2\n" in said
    table = (workdir / "table.md").read_text().splitlines()
    assert [cell.strip() for cell in table[5].split("|")[1:-1]] == ["2", "0.75", "0.125"]
    assert table[0].endswith("recall@K: share of the gold passages among the first K.")
    # Training has deleted its best checkpoint, which is kept only here.
    assert [path.name for path in workdir.glob("step_*/checkpoints/*")] == ["2"]
    assert (workdir / "step_3" / "rankings.jsonl").read_text() == "3"
    # Running the same command again evaluates no checkpoint.
    assert follow(config_of(training), workdir, evaluate, never) == result
    assert evaluate.asked == [1, 2, 3]


def test_follow_checkpoint_deleted_during_evaluation_is_kept(training, workdir):
    def delete(step):
        shutil.rmtree(training.folder / "checkpoints" / str(step))

    training.save(1)
    training.save(2)
    training.end()
    evaluate = Evaluation(delete)
    assert follow(config_of(training), workdir, evaluate, never)["best_step"] == 2
    assert evaluate.asked == [1, 2]


def test_follow_checkpoint_deleted_before_is_skipped(training, workdir, capsys):
    training.save(1)
    training.save(2)
    training.end()
    evaluate = Evaluation(
        lambda step: step == 1 and shutil.rmtree(training.folder / "checkpoints/2")
    )
    result = follow(config_of(training), workdir, evaluate, never)
    assert evaluate.asked == [1] and result["complete"]
    assert "step 2 was deleted before it could be evaluated" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_follow_signal_stops_and_same_command_resumes(training, workdir, capsys, number):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    training.save(1)
    training.save(2)
    evaluate = Evaluation(lambda step: step == 2 and os.kill(os.getpid(), number))
    result = follow(config_of(training), workdir, evaluate, never)
    assert not result["complete"] and [row["step"] for row in result["checkpoints"]] == [1]
    assert "run the same command to resume" in capsys.readouterr().err
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    # The interrupted evaluation is repeated, although training has deleted the checkpoint.
    training.save(3, delete=(2,))
    training.end()
    evaluate = Evaluation()
    result = follow(config_of(training), workdir, evaluate, never)
    assert evaluate.asked == [2, 3] and result["best_step"] == 2 and result["complete"]
    # A signal also stops it while it waits.
    training.end(complete=False)
    kill = lambda _: os.kill(os.getpid(), number)  # noqa: E731
    assert not follow(config_of(training), workdir, evaluate, kill)["complete"]


def test_follow_stopped_evaluation_stops_follow(training, workdir):
    config = reader_eval.get_config()
    config.follow, config.metric, config.checkpoint = True, None, str(training.folder)
    config.stop_after_minutes = 60.0
    training.save(1)
    training.end()
    evaluated = []

    def evaluate(config, folder):
        evaluated.append((config.base.run, 0 < config.stop_after_minutes <= 60))
        return {"complete": False}

    assert not follow(config.lock(), workdir, evaluate, never)["complete"]
    assert evaluated == [(False, True)] and not list(workdir.glob("step_1/table.md"))


def test_follow_other_settings_or_training_is_refused(training, workdir, tmp_path):
    training.save(1)
    training.end()
    follow(config_of(training), workdir, Evaluation(), never)
    with pytest.raises(UserError, match="step_1 was started with steps=4, not 3"):
        follow(config_of(training, steps=3), workdir, Evaluation(), never)
    shutil.rmtree(training.folder)
    other = Training(training.folder, learning_rate=0.2)
    other.save(1)
    with pytest.raises(UserError, match=r"e was started with learning_rate=0.1, not 0.2"):
        follow(config_of(other), workdir, Evaluation(), never)


def test_follow_metric_may_change_on_resume(training, workdir):
    training.save(1)
    training.save(2)
    training.end()
    evaluate = Evaluation()
    with pytest.raises(
        UserError,
        match=r"metric=em is not in the result.* num_questions, trained.ndcg@5",
    ):
        follow(config_of(training, metric="em"), workdir, evaluate, never)
    result = follow(config_of(training, metric="trained.recall@2"), workdir, evaluate, never)
    assert evaluate.asked == [1, 2] and result["best"] == 0.125
    assert list(result["checkpoints"][0]) == ["step", "recall@2", "recall@5", "ndcg@5"]


def test_follow_folder_without_training_is_refused(training, workdir):
    config = config_of(training)
    training.folder.mkdir()
    (training.folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="w is not a workdir of launch/train.py"):
        follow(config, workdir, Evaluation(), never)
    config.checkpoint = None
    with pytest.raises(UserError, match="config.checkpoint is required"):
        follow(config, workdir, Evaluation(), never)
