"""GRPO end to end with a tiny random decoder: what it learns, and how it resumes."""

import contextlib
import gc
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from cirag_jax import sharding
from cirag_jax.commands import jobs, reinforce, rollouts
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.llm import types as llm
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.methods.common import own_prompts
from cirag_jax.models import lora
from cirag_jax.models.io import workdir as workdir_lib
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.models.io.pretrained_decoder import read_decoder_config
from cirag_jax.runtime.handlers import SamplingHandler
from cirag_jax.runtime.requests import Generate
from cirag_jax.runtime.scheduler import Call, RequestKey
from cirag_jax.training import policy, rewards
from tests import tiny, tiny_decoder
from tests.answering import journalled, lines

_ROOT = pathlib.Path(__file__).resolve().parents[2]
VALUES = {
    "method": "direct",
    "data.split": "train",
    "num_dev": 2,
    "dev_fraction": 0.5,
    "rewards.f1": 0.0,
    "rewards.format": 1.0,  # replaced by the reward of a bandit, see `bandit`
    "questions_per_step": 2,
    "group_size": 8,
    "length": 512,
    "buckets": (256,),
    "lora.rank": 8,
    "num_steps": 12,
    "eval_every": 4,
    "save_minutes": 0.0,
    "optimizer.learning_rate": 3e-2,
    "mesh.data": 1,
    "tracker": "none",
}


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """A mesh of one device, and the promotion of dtypes that optax needs."""
    make_mesh = sharding.make_mesh
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(sharding, "make_mesh", lambda *s: make_mesh(*s, devices=jax.devices()[:1]))
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {
        "data.dir": tiny.dataset_folder(root / "data"),
        "model.spec": tiny_decoder.folder(root / "decoder", max_position_embeddings=1024),
    }


@pytest.fixture(scope="module", autouse=True)
def bandit():
    """Rewards answers for the share of their letters that are from a to m, the best arms."""

    def letters(rollout):
        answer = rollout.prediction.answer
        return sum(map(answer.count, "abcdefghijklm")) / max(len(answer), 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards, "REWARDS", {**rewards.REWARDS, "format": letters})
        yield


def config_of(folders, **more) -> Any:
    values = {**VALUES, **folders, **more}
    values["set"] = ("reader.max_tokens=12", "reader.batch_size=4", *values.get("set", ()))
    return load_config(
        str(_ROOT / "configs/grpo.py"), [f"--config.{k}={v}" for k, v in values.items()]
    )


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    result = jobs.train(config_of(folders), workdir)
    return workdir, result


def adapter_of(workdir, step=None):
    """Returns the arrays of the adapter after a step, by default the last one."""
    with Checkpoints(workdir, read_only=True) as checkpoints:
        meta = checkpoints.meta()
        config, _ = read_decoder_config(pathlib.Path(meta["model"]))
        like = lora.abstract_adapter(config, lora.LoraConfig(**meta["lora"]))
        step = step or checkpoints.latest_step()
        return tiny.arrays(checkpoints.restore(step, {"params": like}, subset=True).state["params"])


def test_learns_the_best_arm_of_a_bandit(trained):
    workdir, result = trained
    assert result["complete"] and result["step"] == 12 and result["num_dev_questions"] == 2
    rows = [row for row in lines(workdir / "metrics.jsonl") if "train/reward" in row]
    assert [row["step"] for row in rows] == [*range(1, 13)]
    first, last = (np.mean([r["train/reward"] for r in part]) for part in (rows[:3], rows[-3:]))
    assert last > first + 0.1
    dev = [row for row in lines(workdir / "metrics.jsonl") if "dev/reward" in row]
    assert [row["step"] for row in dev] == [0, 4, 8, 12]
    assert dev[-1]["dev/reward"] > dev[0]["dev/reward"]
    assert all(row["dev/failed"] == 0 for row in dev)


def test_first_update_has_ratios_of_one(trained):
    """Engine and trainer compute the same probabilities in fp32."""
    rows = [row for row in lines(trained[0] / "metrics.jsonl") if "train/ratio_change" in row]
    assert max(row["train/ratio_change"] for row in rows) < 1e-5
    assert all(row["train/clipped"] == 0 and row["train/gradient_norm"] > 0 for row in rows)


def test_answers_with_the_trained_adapter(trained, folders):
    workdir, _ = trained
    state, lora_config, meta = workdir_lib.open_adapter(str(workdir))
    assert meta["component"] == "reader" and len(meta["trained_on"]) > 0
    assert meta["prompt"] == {}  # this method's reader has no settings of its prompt
    engine = Engine.open(str(folders["model.spec"]), adapter=(state, lora_config))
    messages = (llm.Message("user", "question: who is it?"),)
    (response,) = engine.generate([llm.Generate(messages, max_tokens=12)])
    assert response.error is None
    engine.close()


def test_checkpoint_names_the_prompts_of_the_trained_role(folders, tmp_path):
    """An adapter is used with the prompts that its rollouts had."""
    file = tmp_path / "own.toml"
    file.write_text(
        '[reader.question]\nsystem = "Reply to the {kind}."\n'
        'fields = {question = "Q:", answer = "A:"}\n'
    )
    own, package = (
        rollouts.plan(config_of(folders, **more))
        for more in ({"set": (f"prompt_file={file}",)}, {})
    )
    meta = reinforce.prompts_of(own, "reader", {"own_prompts": "those of the start"})
    assert meta["own_prompts"] == own_prompts.of_role(own.task.own_prompts, "reader") is not None
    assert reinforce.prompts_of(package, "reader", {})["own_prompts"] is None


class Killed(BaseException):
    pass


def test_resumes_bit_for_bit_within_a_rollout(trained, folders, tmp_path, monkeypatch):
    """A run that is killed while it samples step 6 ends like one that was not."""
    generate: Any = Engine.generate
    seen = {"step": 0, "calls": 0}
    sample = rollouts.Sampler.sample

    def counting(self, step, questions):
        seen["step"], seen["calls"] = step, 0
        return sample(self, step, questions)

    def killing(self, requests, progress=None, done: Any = None, more=None):
        def stop(index, response):
            done(index, response)
            seen["calls"] += 1
            if seen["step"] == 6 and seen["calls"] == 3:
                raise Killed

        return generate(self, requests, progress, stop, more)

    with monkeypatch.context() as patch:
        patch.setattr(rollouts.Sampler, "sample", counting)
        patch.setattr(Engine, "generate", killing)
        with pytest.raises(Killed):
            jobs.train(config_of(folders), tmp_path)
    assert 0 < len(journalled(tmp_path, "rollouts/step_000006.sqlite")) < 16
    jobs.train(config_of(folders), tmp_path)
    for a, b in zip(adapter_of(tmp_path), adapter_of(trained[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    expected = lines(trained[0] / "metrics.jsonl")
    timing = ("seconds", "train/rollout_seconds", "train/update_seconds")
    for row, other in zip(lines(tmp_path / "metrics.jsonl"), expected, strict=True):
        assert {k: v for k, v in row.items() if k not in timing} == {
            k: v for k, v in other.items() if k not in timing
        }


def test_engine_has_the_weights_of_the_trainer(folders, tmp_path, monkeypatch):
    """After each update, the engine's adapter equals the trained one."""
    seen = {}
    sample = rollouts.Sampler.sample

    def watch(self, step, questions):
        layers = self._engine._model.weights.adapter["layers"]
        seen[step] = jax.tree.leaves(jax.tree.map(lambda *rows: np.stack(rows), *layers))
        return sample(self, step, questions)

    monkeypatch.setattr(rollouts.Sampler, "sample", watch)
    jobs.train(config_of(folders, num_steps=3, eval_every=1, keep_checkpoints=9), tmp_path)
    for step in (1, 2):
        for a, b in zip(seen[step + 1], adapter_of(tmp_path, step), strict=True):
            np.testing.assert_array_equal(a, b)
    assert any(np.any(a != b) for a, b in zip(seen[1], seen[2], strict=True))


@pytest.mark.slow
def test_memory_does_not_grow_over_50_updates(folders, tmp_path, monkeypatch):
    """Updates leave no arrays behind."""
    seen = {}
    sample = rollouts.Sampler.sample

    def count(self, step, questions):
        gc.collect()  # earlier tests may have left cycles with arrays
        arrays = jax.live_arrays()
        seen[step] = len(arrays), sum(array.nbytes for array in arrays)
        return sample(self, step, questions)

    monkeypatch.setattr(rollouts.Sampler, "sample", count)
    more = {"num_steps": 52, "eval_every": 26, "keep_checkpoints": 1}
    jobs.train(config_of(folders, **more), tmp_path)
    assert seen[52] == seen[3]


def test_equal_rewards_teach_nothing_and_stop_the_run(folders, tmp_path):
    more = {"rewards.format": 0.0, "rewards.em": 1.0, "max_saturated_steps": 2, "eval_every": 0}
    with pytest.raises(UserError, match="in the last 2 steps, all rollouts of every question had"):
        jobs.train(config_of(folders, **more), tmp_path)
    (row,) = [r for r in lines(tmp_path / "metrics.jsonl") if "train/reward" in r]
    assert row["train/dropped_groups"] == 1.0 == row["train/constant_em"]
    assert row["train/gradient_norm"] == 0 and row["train/sampled_tokens"] == 0


def test_kl_to_a_teacher_needs_the_same_vocabulary(folders, tmp_path):
    other = tiny_decoder.folder(tmp_path / "teacher", max_position_embeddings=1024)
    path = other / "tokenizer.json"
    raw = json.loads(path.read_text("utf-8"))
    words = sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].get)
    raw["model"]["vocab"][words[-1]], raw["model"]["vocab"][words[-2]] = (
        raw["model"]["vocab"][words[-2]],
        raw["model"]["vocab"][words[-1]],
    )
    path.write_text(json.dumps(raw), "utf-8")
    with pytest.raises(UserError, match="has another vocabulary than the trained model"):
        jobs.train(config_of(folders, kl=0.1, teacher=other), tmp_path / "w")


REFUSED = {
    "role of another method": ({"role": "planner"}, "config.role=planner is not a role of direct"),
    "group of one": ({"group_size": 1}, "config.group_size=1 must be at least 2"),
    "no rewards": ({"rewards.format": 0.0}, "at least one reward must have a weight"),
    "recall without annotations": (
        {"rewards.recall": 1.0, "data.dir": "UNANNOTATED"},
        "config.rewards.recall needs the field supporting of every question, which",
    ),
    "other backend": (
        {"set": ("reader.backend=openai", "reader.model=x")},
        "must run on our engine",
    ),
    "dropout": ({"lora.dropout": 0.1}, "config.lora.dropout=0.1 must be 0"),
    "all parameters": ({"full_parameters": True}, "GRPO trains an adapter"),
    "quantization": ({"model.quantization": "nf4"}, "quantization=nf4 must be null, because GRPO"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_it_cannot_train(case, folders, tmp_path):
    more, message = REFUSED[case]
    if more.get("data.dir"):
        data = tiny.dataset_folder(tmp_path / "data")
        path = data / "questions.jsonl"
        rows = [{**row, "supporting": None} for row in lines(path)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        more = {**more, "data.dir": data}
    with pytest.raises(UserError, match=message):
        jobs.train(config_of(folders, **more), tmp_path / "w")


def test_rollouts_are_samples_with_all_tokens():
    class Backend:
        usage = llm.Usage()

        def generate(self, requests, progress=None, done: Any = None):
            (request,) = requests
            assert (request.temperature, request.top_p, request.logprobs) == (1.0, 1.0, True)
            tokens = tuple(
                llm.Token(t, i, -1.0) for i, t in enumerate(["<think>", "</think>", "a"])
            )
            done(0, llm.Generated("<think></think>a", "stop", tokens=tokens))

    request = Generate((llm.Message("user", "x"),), "reader")
    received: dict[int, Any] = {}
    SamplingHandler(Backend(), {"reader": 5}, seed="0/1")(
        [Call(RequestKey("q#0", 0), request)], received.__setitem__
    )
    assert received[0].text == "a" and [t.id for t in received[0].tokens] == [0, 1, 2]
    seeds = set()
    for seed in ("0/1", "0/2"):
        handler: Any = SamplingHandler(Backend(), {"reader": 5}, seed=seed)
        for program in ("q#0", "q#1"):
            seeds.add(handler.request(Call(RequestKey(program, 0), request)).seed)
    assert len(seeds) == 4 and 0 not in seeds


def test_engine_forgets_prefixes_of_old_weights(folders):
    messages = (llm.Message("user", "question: where was the weaver born? " * 30),)
    request = llm.Generate(messages, max_tokens=4, logprobs=True)
    model = str(folders["model.spec"])
    with contextlib.closing(Engine.open(model)) as engine:
        adapter = lora.init_adapter(engine.config, lora.LoraConfig(rank=2))
        adapter = jax.tree.map(lambda x: x + 0.1, adapter)
        (before,) = engine.generate([request])
        assert engine.generate([request])[0].usage.cached_tokens > 0
        engine.update(lora.to_adapter(adapter))
        (after,) = engine.generate([request])
    adapted = Engine.open(model, adapter=(adapter, lora.LoraConfig(rank=2, alpha=2.0)))
    with contextlib.closing(adapted) as engine:
        (expected,) = engine.generate([request])
    assert after.usage.cached_tokens == 0
    assert after.tokens == expected.tokens != before.tokens


def test_adapter_of_a_workdir_is_a_start(trained, folders, tmp_path):
    workdir, _ = trained
    more = {"lora.start": workdir, "num_steps": 1, "eval_every": 0, "kl": 0.1}
    jobs.train(config_of(folders, **more), tmp_path)
    (row,) = [r for r in lines(tmp_path / "metrics.jsonl") if "train/kl" in r]
    assert abs(row["train/kl"]) < 1e-9  # the reference is the start
    assert lora.LoraConfig(**workdir_lib.training_record(str(tmp_path))["lora"]).rank == 8


def test_questions_are_drawn_in_passes():
    questions: Any = list("abcdef")
    drawn = rollouts.Questions(questions, seed=0, per_draw=2, max_draws=1)
    passes = [drawn.draw(step, 0) for step in range(1, 7)]
    assert sorted(sum(passes[:3], [])) == sorted(sum(passes[3:], [])) == questions
    assert passes[:3] != passes[3:]
    assert policy.advantages([1.0, 2.0], scale=False) is not None


def test_means_are_over_the_rollouts_with_a_score():
    assert rollouts._means([{"recall": 1.0, "em": 0.0}, {"recall": 0.0}]) == {
        "recall": 0.5,
        "em": 0.0,
    }


def test_a_step_may_want_more_questions_than_there_are(folders, tmp_path):
    more = {"questions_per_step": 9, "group_size": 2, "num_steps": 1, "eval_every": 0}
    result = jobs.train(config_of(folders, **more), tmp_path)
    assert result["complete"] and result["num_questions"] < 9


def test_unmeasured_best_metric_is_refused(folders, tmp_path):
    with pytest.raises(UserError, match="config.best_metric=dev/recall is not measured; choose"):
        jobs.train(config_of(folders, best_metric="dev/recall"), tmp_path)
