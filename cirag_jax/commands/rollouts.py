"""Rollouts for training by reinforcement: the questions, the runs of the method, and their samples.

`commands.reinforce` trains on them.
"""

import collections
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cirag_jax import config_files
from cirag_jax.commands import distill, identity, opening, task
from cirag_jax.commands.pool import Pool
from cirag_jax.datasets import load
from cirag_jax.errors import UserError
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.methods.common.extraction import ONLINE
from cirag_jax.methods.registry import find_method
from cirag_jax.runtime.handlers import GenerateHandler, SamplingHandler
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Call, Handler, Job
from cirag_jax.runtime.store import Journal
from cirag_jax.sqlite import MEMORY
from cirag_jax.training import policy, rewards
from cirag_jax.training import state as state_lib
from cirag_jax.training.data import conversations
from cirag_jax.training.policy import Sample
from cirag_jax.training.rewards import Rollout
from cirag_jax.types import Config, Prediction, Question


class Planned(NamedTuple):
    """The method, its questions, and the run's identity.

    Attributes:
      config: the method's config, with the data and the settings of the trainer.
      program: the method.
      settings: the method's settings.
      task: all questions and the passages.
      train, dev: the questions to train on, and those held out.
      identity: determines what a run answers, apart from the trained model.
    """

    config: Config
    program: Callable[..., Any]
    settings: Any
    task: task.Task
    train: Sequence[Question]
    dev: Sequence[Question]
    identity: dict[str, Any]


def plan(config: Config) -> Planned:
    """Loads the method's config and the questions."""
    name, _, preset = str(config.method).partition(":")
    overrides = config_files.texts_of(config.set)
    method_config = task.method_config(name, preset, overrides)
    with method_config.unlocked():
        method_config.data = config.data
        method_config.in_flight, method_config.seed = config.in_flight, config.seed
        if "triples" in method_config:
            method_config.triples = method_config.data.get_ref("triples")
    method, settings = find_method(method_config.method), task.method_settings(method_config)
    needs = settings.needs
    if config.role not in needs.roles:
        raise UserError(
            f"config.role={config.role} is not a role of {config.method}, which has "
            f"{', '.join(needs.roles) or 'none'}."
        )
    if task.asks_schemas(needs, config.role):
        raise UserError(
            f"config.role={config.role} of {config.method} writes JSON by a schema, so its tokens "
            "are not sampled from the model alone; choose another role or another setting."
        )
    block = method_config[config.role]
    if block.backend != "jax" or block.dtype == "int8":
        raise UserError(
            f"config.role={config.role} must run on our engine (backend=jax) without int8."
        )
    if method_config.get("triples") == ONLINE:
        raise UserError(
            "config.data.triples=online is not supported; extract triples first "
            "(launch/extract.py)."
        )
    opening.check(method_config, needs)
    dataset = load.load_dataset(config.data, on_request=not task.loads_triples(method_config))
    run_task = task.select(dataset, config.data, "train", needs)
    own_prompts = task.read_prompts(method_config, settings)
    run_task = run_task._replace(own_prompts=own_prompts)
    rewards.check(config.rewards, run_task.questions)
    distill.warn_of_held_out(run_task.questions)
    train, dev = conversations.hold_out(config, run_task.questions, lambda q: q.id)
    run_identity = identity.of_run(method_config, method.program.__module__, run_task)
    trained = f"{config.role}."  # The trained model is part of the trainer's identity.
    run_identity = {k: v for k, v in run_identity.items() if not k.startswith(trained)}
    return Planned(method_config, method.program, settings, run_task, train, dev, run_identity)


# ---------------------------------------------------------------------------------------- rollouts


@contextlib.contextmanager
def open_others(
    planned: Planned, role: str, group_size: int
) -> Iterator[Mapping[type | str, Handler]]:
    """Opens the models and indexes of a method, except the model of ``role``."""
    run_task, corpus = planned.task, planned.task.corpus
    if corpus.allowed is not None:  # Rollouts search the passages of their questions.
        allowed = {
            program: rows
            for name, rows in corpus.allowed.items()
            for program in (name, *(rollout_id(name, i) for i in range(group_size)))
        }
        run_task = run_task._replace(corpus=dataclasses.replace(corpus, allowed=allowed))
    roles = tuple(name for name in run_task.needs.roles if name != role)
    run_task = run_task._replace(needs=dataclasses.replace(run_task.needs, roles=roles))
    with Pool() as pool, contextlib.ExitStack() as stack:
        journal = stack.enter_context(Journal(MEMORY, planned.identity))
        rows = planned.config.in_flight
        yield opening.open_handlers(planned.config, run_task, stack, journal, rows=rows, pool=pool)


def rollout_id(question_id: str, index: int) -> str:
    """Returns the id of a question's rollout in the journal of its step."""
    return f"{question_id}#{index}"


class Questions:
    """The questions of each step, in a new random order in every pass."""

    def __init__(self, questions: Sequence[Question], seed: int, per_draw: int, max_draws: int):
        self._questions, self._seed = questions, seed
        self.per_draw, self.max_draws = per_draw, max_draws
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def draw(self, step: int, draw: int) -> list[Question]:
        """Returns the questions of a draw; ``step`` and ``draw`` start at 1 and 0."""
        first = ((step - 1) * self.max_draws + draw) * self.per_draw
        return [self._at(place) for place in range(first, first + self.per_draw)]

    def _at(self, place: int) -> Question:
        epoch, place = divmod(place, len(self._questions))
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            self._epoch, self._order = epoch, rng.permutation(len(self._questions))
        return self._questions[self._order[place]]


class Sampler:
    """Runs the method with the trained role: sampled for training, and greedily for evaluation."""

    def __init__(
        self,
        config: Config,
        planned: Planned,
        engine: Engine,
        handlers: Mapping[type | str, Handler],
        folder: pathlib.Path,
        run_identity: Mapping[str, Any],
    ):
        self._config, self._planned, self._engine = config, planned, engine
        self._handlers, self._folder = handlers, folder
        self._identity = {"run": state_lib.digest([sorted(run_identity.items(), key=str)])}
        self._limits = {config.role: task.most_tokens(planned.config, config.role)}
        self._weights = {name: float(weight) for name, weight in config.rewards.items()}
        self._saturated_steps = 0
        folder.mkdir(parents=True, exist_ok=True)

    def sample(
        self, step: int, questions: Questions
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """Returns the samples of a step in groups, one per question, and the step's metrics.

        A group whose rewards are all equal teaches nothing. It is dropped, and further questions
        are drawn in place of such groups, at most ``config.max_draws`` times.
        """
        config = self._config
        handler = SamplingHandler(self._engine, self._limits, seed=f"{config.seed}/{step}")
        groups: list[list[Sample]] = []
        counts = collections.Counter[str]()
        scores: list[dict[str, float]] = []
        drawn: set[str] = set()
        with self._runner(f"step_{step:06d}", step, handler) as runner:
            for draw in range(questions.max_draws):
                found = {q.id: q for q in questions.draw(step, draw) if q.id not in drawn}
                new = list(found.values())[: config.questions_per_step - len(groups)]
                drawn.update(question.id for question in new)
                rollouts = self._run(runner, new, config.group_size)
                for question in new:
                    group, values = self._group(runner, handler, question, rollouts, counts)
                    scores += values
                    if group:
                        groups.append(group)
                if len(groups) == config.questions_per_step:
                    break
        self._check_collapse(bool(groups))
        self._delete_old(step)
        sampled = [sample for group in groups for sample in group]
        tokens = sum(sample.num_sampled for sample in sampled)
        return groups, {
            **_means(scores),
            "dropped_groups": counts["dropped_groups"] / max(len(drawn), 1),
            **{
                f"constant_{name}": counts[f"constant_{name}"] / max(len(drawn), 1)
                for name, weight in self._weights.items()
                if weight
            },
            "failed_rollouts": counts["failed"] / max(len(drawn) * config.group_size, 1),
            "dropped_too_long": float(counts["too_long"]),
            # The mean of -log p over samples of p is an estimate of the entropy.
            "entropy": -sum(float(s.logprob_T.sum()) for s in sampled) / max(tokens, 1),
            "sampled_tokens": float(tokens),
        }

    def evaluate(self, step: int) -> dict[str, float]:
        """Returns the mean rewards of greedy runs on the dev questions; {} without any.

        Failed runs are left out of the means; ``dev/failed`` is their share.
        """
        dev = self._planned.dev
        if not dev:
            return {}
        handler = GenerateHandler(self._engine, self._limits, seed=self._config.seed)
        with self._runner(f"dev_{step:06d}", step, handler) as runner:
            rollouts = self._run(runner, dev, 1)
        scores = [self._score(rollout) for rollout in rollouts.values()]
        values = {**_means(scores), "failed": 1.0 - len(rollouts) / len(dev)}
        return {f"dev/{name}": value for name, value in values.items()}

    def metric_names(self) -> list[str]:
        """Returns the names of the dev scores; none without dev questions."""
        dev = self._planned.dev
        names = ["reward", "tokens", "searches", *(n for n, w in self._weights.items() if w)]
        names += ["em", "f1"] * any(question.answers for question in dev)
        return [f"dev/{name}" for name in dict.fromkeys(names)] if dev else []

    def _runner(self, name: str, step: int, handler: Handler) -> Runner:
        """Opens the journal of a step; a step that was interrupted continues where it was."""
        handlers = {**self._handlers, self._config.role: handler}
        settings = {**self._identity, "step": step, "role": self._config.role}
        path = self._folder / f"{name}.sqlite"
        return Runner(
            path, settings, lambda *_: handlers, in_flight=self._config.in_flight, replace=True
        )

    def _run(
        self, runner: Runner, questions: Sequence[Question], group_size: int
    ) -> dict[str, Rollout]:
        """Runs the method ``group_size`` times on each question; returns the rollouts by id.

        Failed runs are left out. Without groups, the id is the question's.
        """
        planned, role = self._planned, self._config.role
        by_id: dict[str, Question] = {}
        jobs: list[Job] = []
        for question in questions:
            job = task.job(question, planned.program, planned.settings, planned.task.own_prompts)
            for index in range(group_size):
                name = job.id if group_size == 1 else rollout_id(job.id, index)
                jobs.append(dataclasses.replace(job, id=name, place=len(jobs)))
                by_id[name] = question
        runner.run(jobs)
        rollouts = {}
        for name, record in runner.records(jobs).items():
            prediction = record.result(Prediction)
            if prediction is None or prediction.error is not None:
                continue
            rollouts[name] = Rollout(
                by_id[name],
                prediction,
                _generated(record, role),
                record.calls["retrieve"],
                self._config.profile,
            )
        return rollouts

    def _score(self, rollout: Rollout) -> dict[str, float]:
        """Returns the rewards that have a weight, EM and F1 if there are answers, and the cost."""
        values = rewards.score(rollout, self._weights)
        if rollout.question.answers:
            values |= {name: rewards.REWARDS[name](rollout) for name in ("em", "f1")}
        return {**values, "tokens": float(rollout.tokens), "searches": float(rollout.searches)}

    def _group(
        self,
        runner: Runner,
        handler: GenerateHandler,
        question: Question,
        rollouts: Mapping[str, Rollout],
        counts: collections.Counter[str],
    ) -> tuple[list[Sample], list[dict[str, float]]]:
        """Returns the samples of a question's rollouts with their advantages, and the scores.

        There are no samples if all rewards are equal.
        """
        config = self._config
        names = [rollout_id(question.id, index) for index in range(config.group_size)]
        counts["failed"] += sum(name not in rollouts for name in names)
        names = [name for name in names if name in rollouts]
        scores = [self._score(rollouts[name]) for name in names]
        for name, weight in self._weights.items():
            counts[f"constant_{name}"] += bool(weight) and len({s[name] for s in scores}) < 2
        values = policy.advantages([s["reward"] for s in scores], scale=config.scale_advantages)
        if values is None:
            counts["dropped_groups"] += 1
            return [], scores
        samples = []
        for name, score, advantage in zip(names, scores, values, strict=True):
            is_wrong = not score.get("em", 0.0)
            kl = config.kl if config.kl_on == "all" or is_wrong else 0.0
            for sample in policy.samples_of(list(self._turns(runner, handler, name))):
                if len(sample.tokens_T) > config.length:
                    counts["too_long"] += 1
                    continue
                samples.append(
                    sample._replace(group=question.id, advantage=float(advantage), kl=kl)
                )
        return samples, scores

    def _turns(
        self, runner: Runner, handler: GenerateHandler, program: str
    ) -> Iterator[policy.Turn]:
        """Yields what the trained role read and wrote in a program."""
        for generation in runner.journal.generations(program):
            if generation.request.role != self._config.role:
                continue
            request: Any = handler.request(Call(generation.key, generation.request))
            tokens = generation.response.tokens or ()
            yield policy.Turn(
                self._engine.prompt(request),
                np.asarray([token.id for token in tokens], np.int32),
                np.asarray([token.logprob for token in tokens], np.float32),
            )

    def _check_collapse(self, has_groups: bool) -> None:
        self._saturated_steps = 0 if has_groups else self._saturated_steps + 1
        if self._saturated_steps >= self._config.max_saturated_steps:
            raise UserError(
                f"in the last {self._saturated_steps} steps, all rollouts of every question had "
                "the same reward, so nothing can be learned: the questions are too easy or too "
                "hard, or the model always writes the same. Look at the metrics reward and "
                "entropy; use other questions, a larger group_size or another reward, or an "
                "earlier checkpoint."
            )

    def _delete_old(self, step: int) -> None:
        if keep := self._config.keep_rollouts:
            (self._folder / f"step_{step - keep:06d}.sqlite").unlink(missing_ok=True)


def _generated(record: Record, role: str) -> int:
    usage = record.roles.get(role)
    return usage.usage.generated_tokens if usage else 0


def _means(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each score over the rollouts that have it."""
    names = dict.fromkeys(name for score in scores for name in score)
    return {
        name: float(np.mean([score[name] for score in scores if name in score])) for name in names
    }
