"""Trains a role of a method by reinforcement: ``launch/train.py --config=configs/grpo.py``.

Every step samples several runs of the method on each of a few questions, rewards them, and moves
the role's model toward the runs that were better than the others of their question (GRPO, see
`training.policy`). Retriever, engine and trainer are in this process; the engine takes the new
adapter after each step. Tokens of prompts and passages never have a loss, because the engine says
which tokens it sampled.
"""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from cirag_jax import sharding
from cirag_jax.commands import backends, rollouts, task
from cirag_jax.commands.rollouts import Planned
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.evaluation import answers
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.methods import prompt_digests
from cirag_jax.methods.cirag.settings import PROMPT_FIELDS
from cirag_jax.methods.common import own_prompts
from cirag_jax.methods.registry import method_block
from cirag_jax.models import decoder_params, lora
from cirag_jax.models.decoder_config import DecoderConfig, choose_attention
from cirag_jax.models.io import peft_format
from cirag_jax.models.io import workdir as workdir_lib
from cirag_jax.models.io.pretrained_decoder import check_tokenizer, load_decoder, text_prefix
from cirag_jax.models.lora import LoraConfig
from cirag_jax.training import adapter as adapter_lib
from cirag_jax.training import lora_step, optimizers, policy
from cirag_jax.training import state as state_lib
from cirag_jax.training.fit import BatchIterator, fit
from cirag_jax.training.policy import PolicyBatch, Sample
from cirag_jax.types import Config

ROLLOUTS = "rollouts"  # The folder with the journal of each step.


def train_and_evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains an adapter by reinforcement, or resumes; returns the best dev scores.

    Writes ``checkpoints/``, ``metrics.jsonl``, and in ``rollouts/`` the journals of all sampled
    runs and of the greedy runs of each evaluation. ``config`` comes from configs/grpo.py.

    Returns:
      ``complete``, ``step``, ``total_steps``, ``best_step``, the ``dev/...`` scores of that
      checkpoint, ``num_questions``, ``num_dev_questions`` and ``seconds`` of this process.
    """
    start = time.monotonic()
    check_config(config)

    # ---- Method, questions and base model -------------------------------------------------------
    planned = rollouts.plan(config)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    block = planned.config[config.role]
    spec = config.model.spec or backends.model_name(block) or backends.DEFAULT_MODEL
    base = load_decoder(spec, dtype=config.model.dtype, mesh=mesh, remat=config.model.remat)
    tokenizer = ChatTokenizer.load(base.folder, backends.template_kwargs(block))
    check_tokenizer(tokenizer, base.config.vocab_size, base.folder)
    params = decoder_params.to_params(base.state)
    first, lora_config, start_meta = first_adapter(config, block.adapter, base.config, mesh)
    engine = Engine(
        base.config,
        params,
        tokenizer,
        adapter=lora.to_adapter(first),
        lora=lora.lora_options(lora_config, train=False),
        mesh=mesh if mesh.size > 1 else None,
        options=backends.engine_options(block),
    )

    # ---- Step -----------------------------------------------------------------------------------
    attention = choose_attention(base.config, packed=config.packing)
    model = dataclasses.replace(base.config, attention=attention)
    # A step has as many rows as its samples need.
    layout = adapter_lib.layout_of_rows(config, mesh, model, rows_per_step=1 << 30)
    total_steps = config.num_steps
    tx = optimizers.make_optimizer(config.optimizer, total_steps * config.num_updates)
    state = state_lib.make_state(first, tx, config.seed, mesh)
    train_step = lora_step.TrainStep(
        model,
        lora_config,
        tx,
        state,
        mesh,
        chunk=config.chunk,
        loss=policy.make_loss(policy.Clip(config.clip_low, config.clip_high)),
    )
    reference = None
    if config.kl:
        reference = Reference(config, model, lora_config, params, first, tokenizer, mesh)

    def update(state: state_lib.TrainState, samples: Sequence[Sample]) -> Any:
        weights = policy.token_weights(samples, config.normalize, config.length)
        batches = policy.policy_batches(samples, weights, layout, tokenizer.pad_id)
        placed: list[Any] = [state_lib.place_rows(batch, mesh) for batch in batches]
        if reference is not None:
            placed = [reference.add_to(batch) for batch in placed]
        for _ in range(config.num_updates):
            state, metrics = train_step(state, params, placed)
        return state, metrics

    run_identity = {
        **state_lib.identity_of(config),
        "method": planned.identity,
        "questions": state_lib.digest(planned.train, planned.dev),
    }
    meta = {
        "component": config.role,
        "model": state_lib.absolute(spec),
        "inside": text_prefix(base.folder),
        "lora": adapter_lib.lora_description(lora_config),
        "length": config.length,
        **prompts_of(planned, config.role, start_meta),
        "trained_on": sorted(
            {*(q.id for q in planned.train), *(start_meta.get("trained_on") or ())}
        ),
        "run": run_identity,
    }

    # ---- Fit ------------------------------------------------------------------------------------
    questions = rollouts.Questions(
        planned.train, config.seed, config.questions_per_step, config.max_draws
    )
    with contextlib.ExitStack() as stack:
        handlers = stack.enter_context(
            rollouts.open_others(planned, config.role, config.group_size)
        )
        sampler = rollouts.Sampler(
            config, planned, engine, handlers, workdir / ROLLOUTS, run_identity
        )
        state_lib.check_metric(config.best_metric, sampler.metric_names())
        batches = BatchIterator(lambda step: step)

        def train_on(state: state_lib.TrainState, step: int) -> Any:
            engine.update(lora.to_adapter(state.params))
            started = time.monotonic()
            groups, metrics = sampler.sample(step, questions)
            metrics["rollout_seconds"] = time.monotonic() - started
            if not groups:
                metrics |= {**_NO_UPDATE, "skipped_steps": state.skipped_steps}
                return state._replace(step=state.step + 1), metrics
            started = time.monotonic()
            state, updated = update(state, [sample for group in groups for sample in group])
            updated = {name: float(value) for name, value in updated.items() if name != "tokens"}
            metrics["update_seconds"] = time.monotonic() - started
            return state, {**metrics, **updated}

        def evaluate(trained: nnx.State) -> dict[str, float]:
            engine.update(lora.to_adapter(trained))
            return sampler.evaluate(batches.get_state()["step"])

        checkpoints = stack.enter_context(state_lib.open_checkpoints(config, workdir))
        stack.enter_context(jax.set_mesh(mesh))
        result = fit(
            config,
            workdir,
            train_on,
            state,
            batches,
            evaluate,
            checkpoints,
            meta,
            total_steps=total_steps,
            start=start,
            advice="Lower config.optimizer.learning_rate",
            describe=lambda values, batch, seconds: None,
            synchronous=True,
        )
    return {
        **result.summary(),
        "num_questions": len(planned.train),
        "num_dev_questions": len(planned.dev),
        "seconds": round(time.monotonic() - start, 1),
    }


_NO_UPDATE = dict.fromkeys(
    ("loss", "kl", "clipped", "ratio_change", "gradient_norm", "update_norm", "update_seconds"), 0.0
)


# ---------------------------------------------------------------------------------------- settings


def check_config(config: Config) -> None:
    """Raises `UserError` for invalid settings."""
    state_lib.check_training(config)
    check_at_least(1, config, "num_steps", "length", "rows_per_device", "chunk")
    check_at_least(
        1,
        config,
        "questions_per_step",
        "max_draws",
        "num_updates",
        "in_flight",
        "max_saturated_steps",
    )
    check_at_least(2, config, "group_size")
    check_at_least(0, config, "num_dev", "clip_low", "clip_high", "kl")
    check_choice("config.normalize", config.normalize, ("token", "sequence", "constant"))
    check_choice("config.kl_on", config.kl_on, ("all", "wrong"))
    answers.check_profile(config.profile)
    if config.lora.dropout:
        raise UserError(
            f"config.lora.dropout={config.lora.dropout} must be 0, because dropout changes the "
            "probabilities of the tokens that the engine sampled."
        )
    if config.full_parameters:
        raise UserError("config.full_parameters=true is not supported: GRPO trains an adapter.")
    if config.model.quantization:
        raise UserError(
            f"config.model.quantization={config.model.quantization} must be null, because GRPO's "
            "engine samples with unquantized weights, and the adapter must be trained on the same."
        )
    if jax.process_count() > 1:
        raise UserError("GRPO runs in one process only; use the devices of one machine.")


def first_adapter(
    config: Config, own: str | None, model: Any, mesh: jax.sharding.Mesh
) -> tuple[nnx.State, LoraConfig, Mapping[str, Any]]:
    """Returns the adapter to start from, its hyper-parameters and its training metadata.

    It is ``config.lora.start``, or the method's own adapter for the role, or a new adapter.
    """
    spec = config.lora.start or own
    if spec is None:
        lora_config = adapter_lib.make_lora(config, model)
        assert lora_config is not None
        return lora.init_adapter(model, lora_config, config.seed, mesh=mesh), lora_config, {}
    meta = workdir_lib.check_role(spec, config.role)
    with workdir_lib.adapter_folder(spec) as folder:
        state, lora_config = peft_format.load_adapter(str(folder), model, mesh)
    return state, dataclasses.replace(lora_config, dropout=0.0), meta


def prompts_of(planned: Planned, role: str, start: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the prompt settings for the checkpoint, which inference must share."""
    block = method_block(planned.config)
    if role in ("integrator", "reader"):
        fields = PROMPT_FIELDS if role == "integrator" else ("reader_format",)
        prompt = {name: block[name] for name in fields if name in block}
    else:
        settings = task.plain(block)
        prompt = {"method": planned.config.method, "roles": [role], "settings": settings}
    kept = ("num_candidates", "inputs")
    return {
        "prompt": prompt,
        "prompt_digest": prompt_digests.prompt_digest(prompt),
        "own_prompts": own_prompts.of_role(planned.task.own_prompts, role),
        **{name: start.get(name) for name in kept if start.get(name)},
    }


# --------------------------------------------------------------------------------------- reference


class Reference:
    """The model that ``config.kl`` keeps the policy close to: the start, or a teacher."""

    def __init__(
        self,
        config: Config,
        model: DecoderConfig,
        lora_config: LoraConfig,
        params: Any,
        first: nnx.State,
        tokenizer: ChatTokenizer,
        mesh: jax.sharding.Mesh,
    ):
        """Opens ``config.teacher``, if it is set; otherwise the reference is the first adapter."""
        options: Any = lora.lora_options(lora_config, train=False)
        self._weights: Any = (params, first)
        if config.teacher is not None:
            teacher = load_decoder(config.teacher, dtype=config.model.dtype, mesh=mesh)
            check_same_vocabulary(tokenizer, teacher.folder, config.teacher)
            model = dataclasses.replace(teacher.config, attention=model.attention)
            options, self._weights = None, (decoder_params.to_params(teacher.state), None)
        self._logprobs = jax.jit(
            lambda params, adapter, batch: policy.token_logprobs(
                model, params, adapter, batch, options, config.chunk
            )
        )

    def add_to(self, batch: PolicyBatch) -> PolicyBatch:
        """Returns a micro-batch with the reference's log-probabilities."""
        return batch._replace(reference_BT=self._logprobs(*self._weights, batch.batch))


def check_same_vocabulary(tokenizer: ChatTokenizer, folder: Any, spec: str) -> None:
    """Raises `UserError` if a teacher has other tokens than the student."""
    other = ChatTokenizer.load(folder)
    if other.tokenizer.get_vocab() != tokenizer.tokenizer.get_vocab():
        raise UserError(
            f"config.teacher={spec} has another vocabulary than the trained model, so their "
            "probabilities cannot be compared; choose a model of the same family."
        )
