"""Trains a cross-encoder with binary cross-entropy, and compares it with a bi-encoder."""

import dataclasses
import functools
import operator
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cirag_jax import sharding
from cirag_jax.datasets import load
from cirag_jax.datasets.chains import passage_text
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.evaluation import reranking
from cirag_jax.io import bar
from cirag_jax.models import cross_encoder as model_lib
from cirag_jax.models import precision
from cirag_jax.models.cross_encoder import PairEncoder
from cirag_jax.models.io.fingerprint import model_identity
from cirag_jax.retrieval.encoders import Encoder, open_encoder_for
from cirag_jax.retrieval.index import PassageIndex
from cirag_jax.retrieval.pairs import PairTokens, score_groups, tokenize_pairs
from cirag_jax.retrieval.rankers import BiEncoderRanker, TripleText
from cirag_jax.training import optimizers
from cirag_jax.training import state as state_lib
from cirag_jax.training.data import pairs as data_lib
from cirag_jax.training.data.splits import hold_out
from cirag_jax.training.fit import BatchIterator, fit
from cirag_jax.training.preemption import PreemptionGuard
from cirag_jax.types import Config, Dataset, Question


def train_and_evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains a cross-encoder, or resumes its training, and compares it with a bi-encoder.

    Writes ``checkpoints/``, ``metrics.jsonl`` and TensorBoard events to ``workdir``.
    """
    start = time.monotonic()
    check_config(config)

    # ---- Data -----------------------------------------------------------------------------------
    (dataset,) = state_lib.load_equally(
        lambda: (load.load_dataset(config.data),), state_lib.dataset_digests
    )
    questions = data_lib.training_questions(dataset, config.data)
    train_questions, dev_questions = hold_out(questions, config)
    target_sets = load_targets(config, dataset, train_questions)
    problems = reranking.passage_problems(dataset, dev_questions, None, 0)
    measured = [f"dev/{name}" for name in reranking.metrics([], [])] if problems else []
    state_lib.check_metric(config.best_metric, measured)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    bi_encoder = open_encoder_for(config.encoder, mesh if mesh.size > 1 else None)
    targets = mine_targets(config, target_sets, bi_encoder)
    sampling = data_lib.Sampling(
        config.targets_per_step,
        config.negatives.own,
        config.negatives.mined,
        config.negatives.easy,
        config.seed,
    )
    total_steps = num_steps(config, len(targets))

    # ---- Model ----------------------------------------------------------------------------------
    model = model_lib.load_cross_encoder(
        config.model.spec,
        dtype=config.model.dtype,
        mesh=mesh,
        new_head=config.seed,
        label=config.model.label,
        max_length=config.max_length,
        dropout=config.model.dropout,
        remat=config.model.remat,
    )
    state_lib.check_lengths(config, model.config.max_length, "max_length")
    tx = optimizers.make_optimizer(config.optimizer, total_steps)
    state = state_lib.make_state(model.state, tx, config.seed, mesh)
    state_lib.announce(
        f"{len(targets):,} positives ({_count_kinds(targets)}), {len(dev_questions):,} dev "
        f"questions, {total_steps:,} steps of {config.targets_per_step} positives, "
        f"mesh {dict(mesh.shape)}"
    )

    def batch_of(step: int) -> data_lib.Batch:
        pairs = data_lib.pairs_of_step(targets, step - 1, sampling)
        return make_batch(config, model, pairs, mesh)

    def train_on(state: state_lib.TrainState, batch: data_lib.Batch) -> Any:
        with jax.set_mesh(mesh):
            return train_step(model.graphdef, tx, state, batch, config, mesh)

    # ---- Fit ------------------------------------------------------------------------------------
    evaluate = make_evaluate(config, problems, model, mesh)
    # Mined negatives are excluded, because rounding on a different mesh may change them.
    texts = (records for part in target_sets for records in (part.targets, part.texts))
    examples = state_lib.digest(*texts, problems)
    meta = {
        "component": "cross_encoder",
        "model": state_lib.absolute(config.model.spec),
        "max_length": model.max_length,
        "label": config.model.label,
        "triple_text": None,
        "trained_on": sorted(question.id for question in train_questions),
        "run": {
            **state_lib.identity_of(config, ("evaluate", "component")),
            "encoder.weights": None
            if config.encoder.backend == "openai"
            else model_identity(config.encoder.model),
            state_lib.EXAMPLES: examples,
        },
    }
    if "triple" in config.kinds:
        meta["triple_text"] = dataclasses.asdict(TripleText("tuple", config.normalization))
    with state_lib.open_checkpoints(config, workdir) as checkpoints:
        result = fit(
            config,
            workdir,
            train_on,
            state,
            BatchIterator(batch_of),
            evaluate,
            checkpoints,
            meta,
            total_steps=total_steps,
            start=start,
            advice="Lower config.optimizer.learning_rate",
        )
        training_seconds = time.monotonic() - start
        state, best_step = result.state, result.best["best_step"]
        if result.complete and best_step is not None:
            state = checkpoints.restore(best_step, state).state

    # ---- Result ---------------------------------------------------------------------------------
    gains = {}
    if result.complete:
        with PreemptionGuard():  # Signals do not interrupt the comparison.
            gains = compare(config, dataset, questions, model, state.params, bi_encoder, mesh)
    return {
        **result.summary(),
        **gains,
        "num_positives": len(targets),
        "positives": _count_kinds(targets),
        "num_train_questions": len(train_questions),
        "num_dev_questions": len(dev_questions),
        "training_seconds": round(training_seconds, 1),
        "seconds": round(time.monotonic() - start, 1),
    }


# ---------------------------------------------------------------------------------------- one step


def train_step(
    graphdef: nnx.GraphDef,
    tx: optax.GradientTransformation,
    state: state_lib.TrainState,
    batch: data_lib.Batch,
    config: Config,
    mesh: jax.sharding.Mesh,
    run: Callable[..., Any] = operator.call,
) -> tuple[state_lib.TrainState, dict[str, jax.Array]]:
    """Runs one optimizer step on the mean cross-entropy of a batch's pairs.

    Donates ``state``. ``run`` calls the compiled functions, see `rehearsal`.

    Returns:
      The new state, and metrics as device scalars: loss, accuracy (threshold: logit 0) and norms.
    """
    key = None
    if config.model.dropout > 0:
        key = run(jax.random.fold_in, state.key, state.step)
    total = None
    params = sharding.gather_fsdp(
        precision.round_weights(state.params, config.model.dtype, run), run
    )
    for index, chunk in enumerate(batch.chunks):
        arrays = state_lib.place_rows(list(chunk), mesh)
        chunk_key = None if key is None else run(jax.random.fold_in, key, index)
        total = run(_add_gradient, graphdef, total, params, arrays, chunk_key)
    return run(_apply_gradient, tx, state, total)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _add_gradient(graphdef, total, params, arrays, key):
    """Adds loss, accuracy and gradient of a chunk, kept per shard, to ``total`` (may be None)."""

    def loss_of(buffers, params, arrays, key):
        params = precision.redirect_gradients(params, buffers)
        tokens_BT, types_BT, lengths_B, label_B, weight_B = arrays
        mask_BT = jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None]
        logit_B = model_lib.apply(graphdef, params, tokens_BT, mask_BT, types_BT, key)
        loss_B = optax.sigmoid_binary_cross_entropy(logit_B, label_B)
        correct_B = (logit_B > 0) == (label_B > 0)
        return (loss_B * weight_B).sum(), (correct_B * weight_B).sum()

    def shard_gradient(params, arrays, key):
        inputs = precision.gradient_buffers(params), params, arrays, key
        return jax.tree.map(lambda x: x[None], jax.value_and_grad(loss_of, has_aux=True)(*inputs))

    added = sharding.map_shards(shard_gradient)(params, arrays, key)
    sums, gradient = added if total is None else jax.tree.map(jnp.add, total, added)
    return sums, sharding.constrain_per_shard(gradient)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _apply_gradient(tx, state, total):
    (loss, correct), gradient = total
    loss = loss.sum()
    state, norms = state_lib.apply_gradient(tx, state, gradient, loss)
    return state, {"loss": loss, "accuracy": correct.sum(), **norms}


# -------------------------------------------------------------------------------------------- data


def num_steps(config: Config, num_targets: int) -> int:
    """Returns the number of training steps for ``num_targets`` positives."""
    steps = state_lib.num_steps(config, num_targets, config.targets_per_step)
    return min(steps, config.max_steps) if config.max_steps and not config.num_steps else steps


class TargetSet(NamedTuple):
    """All positives of one kind (passages or triples), and the texts to mine negatives from."""

    kind: data_lib.Kind
    targets: list[data_lib.Target]
    texts: list[str]


def load_targets(
    config: Config, dataset: Dataset, questions: Sequence[Question]
) -> list[TargetSet]:
    """Returns the positives of all kinds, without mined negatives, in a fixed order."""
    sets: list[TargetSet] = []
    if "passage" in config.kinds:
        targets = data_lib.passage_targets(dataset, questions)
        ids = _passage_ids(questions)
        texts = list(dict.fromkeys(passage_text(dataset.corpus[pid]) for pid in ids))
        sets.append(TargetSet("passage", targets, texts))
    if "triple" in config.kinds:
        usable = [q for q in questions if data_lib.may_train_triples(dataset, q)]
        targets = data_lib.triple_targets(dataset, usable, config.normalization)
        texts = list(dict.fromkeys(t for x in targets for t in (x.positive, *x.own)))
        sets.append(TargetSet("triple", targets, texts))
    if not any(part.targets for part in sets):
        raise UserError(
            f"{dataset.name} has no training pairs of config.kinds={tuple(config.kinds)}"
        )
    return sets


def _passage_ids(questions: Sequence[Question]) -> list[str]:
    """Returns the ids of all passages in contexts or annotations of the questions."""
    return list(
        dict.fromkeys(pid for q in questions for pid in (*(q.context or ()), *(q.supporting or ())))
    )


def mine_targets(
    config: Config, target_sets: Sequence[TargetSet], bi_encoder: Encoder
) -> list[data_lib.Target]:
    """Returns all positives with mined negatives, in the order of ``target_sets``."""
    mined: list[data_lib.Target] = []
    for kind, targets, texts in target_sets:
        with bar(f"mining {kind}s", len(texts)) as progress:
            depth = config.negatives.depth
            mined += data_lib.mine(targets, texts, bi_encoder, depth, progress.update)
    return mined


def make_batch(
    config: Config,
    model: PairEncoder,
    pairs: Sequence[tuple[str, str, bool]],
    mesh: jax.sharding.Mesh,
) -> data_lib.Batch:
    """Returns the pairs of a step as padded arrays, equal on all processes."""
    rows = tokenize_pairs(model, [(query, text) for query, text, _ in pairs], config.max_length)
    return pack(config, rows, [label for _, _, label in pairs], model.config.pad_id, mesh)


def pack(
    config: Config,
    rows: Sequence[PairTokens],
    labels: Sequence[bool],
    pad_id: int,
    mesh: jax.sharding.Mesh,
) -> data_lib.Batch:
    """Packs the tokens of a step into chunks for the config and the mesh."""
    buckets = (*(b for b in config.buckets if b < config.max_length), config.max_length)
    num_shards = mesh.shape["data"] * mesh.shape["fsdp"]
    chunk_rows = -(-config.chunk_rows // num_shards) * num_shards  # Rounded up.
    return data_lib.pack(rows, labels, buckets, chunk_rows, pad_id)


# ---------------------------------------------------------------------------------------- evaluate


def make_evaluate(
    config: Config,
    problems: Sequence[reranking.Reranking],
    model: PairEncoder,
    mesh: jax.sharding.Mesh,
) -> Callable[[Any], dict[str, float]]:
    """Returns a function that computes the ``dev/...`` metrics (reranking question contexts)."""
    if not problems:
        return lambda params: {}

    def evaluate(params: Any) -> dict[str, float]:
        score = _scorer(config, model, params, mesh)
        scores = score([p.query for p in problems], [p.texts for p in problems])
        values = reranking.metrics(problems, scores)
        return {f"dev/{name}": float(array.mean()) for name, array in values.items()}

    return evaluate


def compare(
    config: Config,
    dataset: Dataset,
    trained_on: Sequence[Question],
    model: PairEncoder,
    params: Any,
    bi_encoder: Encoder,
    mesh: jax.sharding.Mesh,
) -> dict[str, Any]:
    """Compares the cross-encoder with the bi-encoder on ranking passages and extracted triples.

    Uses held-out questions of ``config.evaluate.split``. The passages to rank are the question's
    context, and the passages that the bi-encoder retrieves from the contexts of all questions. The
    triples to rank are from the question's context; they are ranked for the questions of fold
    ``test``, or for the held-out questions if the fold is empty. Returns the results by kind.
    """
    data = config.data.copy_and_resolve_references()
    with data.unlocked():
        data.split, data.fold = config.evaluate.split, None
        data.only_with_triples, data.limit = False, 0
    train_ids = {question.id for question in trained_on}
    held_out: list[Question] = []
    if data.split and data.split not in {question.split for question in dataset.questions}:
        state_lib.announce(f"no question is of config.evaluate.split={data.split}: no comparison")
    else:
        selected = load.select_questions(dataset, data)
        held_out = [q for q in selected if q.supporting and q.id not in train_ids]
    limit = config.evaluate.questions or len(held_out)
    settings = {"samples": config.evaluate.bootstrap_samples, "seed": config.seed}
    score = _scorer(config, model, params, mesh, "comparing")
    baseline = BiEncoderRanker(bi_encoder).score
    result: dict[str, Any] = {}
    questions = held_out[:limit]
    if questions:
        passages = [dataset.corpus[pid] for pid in _passage_ids(questions)]
        index = PassageIndex.in_memory(passages, bi_encoder)
        problems = reranking.passage_problems(dataset, questions, index, config.evaluate.retrieved)
        result["passages"] = reranking.compare(problems, score, baseline, **settings)
    test_fold = [q for q in dataset.questions if q.fold == "test" and q.id not in train_ids]
    problems = triple_problems(dataset, (test_fold or held_out)[:limit], config.normalization)
    if problems:
        result["triples"] = reranking.compare(problems, score, baseline, **settings)
    return result


def triple_problems(
    dataset: Dataset, questions: Sequence[Question], normalization: Any
) -> list[reranking.Reranking]:
    """Returns reranking problems over the triples of contexts; the chain's triples are gold."""
    write, problems = TripleText("tuple", normalization), []
    for question in questions:
        pool = [t for pid in question.context or () for t in dataset.triples.get(pid, ())]
        texts = tuple(dict.fromkeys(map(write, pool)))
        gold = {write(triple) for triple in data_lib.gold_triples(dataset, question)}
        relevant = tuple(place for place, text in enumerate(texts) if text in gold)
        if relevant:
            problems.append(reranking.Reranking(question.question, texts, relevant))
    return problems


def _scorer(
    config: Config, model: PairEncoder, params: Any, mesh: jax.sharding.Mesh, name: str = ""
) -> reranking.Score:
    def score(queries: Sequence[str], texts: Sequence[Sequence[str]]) -> list[np.ndarray]:
        total = sum(len(set(group)) for group in texts)
        with bar(name, total) as progress:
            return score_groups(
                model,
                params,
                queries,
                texts,
                max_length=config.max_length,
                mesh=mesh,
                progress=progress.update,
            )

    return score


# ---------------------------------------------------------------------------------------- settings


def check_config(config: Config) -> None:
    """Raises `UserError` for invalid settings."""
    state_lib.check_training(config)
    check_at_least(1, config, "targets_per_step", "chunk_rows")
    check_at_least(5, config, "max_length")  # Up to four are special tokens.
    check_at_least(0, config, "dev.questions", "max_steps")
    check_at_least(0, config.negatives, "own", "mined", "easy", "depth", prefix="config.negatives.")
    unknown = set(config.kinds) - {"passage", "triple"}
    if unknown or not config.kinds:
        raise UserError(f"config.kinds={tuple(config.kinds)} must name passage, triple or both")
    buckets = tuple(config.buckets)
    if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
        raise UserError(f"config.buckets={buckets} must be positive and in ascending order")


def _count_kinds(targets: Sequence[data_lib.Target]) -> dict[str, int]:
    kinds = [target.kind for target in targets]
    return {kind: kinds.count(kind) for kind in ("passage", "triple")}
