"""Runs all GPU benchmarks in a few minutes.

Each benchmark has its own process, so memory and caches are not shared. If one fails or takes too
long, the others still run. ``--out`` is rewritten after each benchmark.

    python experiments/benchmarks/gpu.py --out gpu.json
    python experiments/benchmarks/gpu.py --tiny            # checks that everything runs

- ``aligner``: the training step of configs/aligner.py:paper (E5-large) and its forward pass
  (``aligner.py``), compared with PyTorch's BERT.
- ``aligner_code``: the same for the preset ``code``, which has dropout, without PyTorch.
- ``adapter``: a LoRA step of a 7B model with the settings of configs/integrator.py:paper
  (``lora_step.py``), compared with PEFT.
- ``decoding``: prefill, mixed prompts, and decoding at batch 1, 16, 64 and 256 (compared with
  transformers) of a 7B model (``decoding.py``).
- ``search``: exact search over 5M x 1024 in bfloat16 at 1, 32 and 128 queries (``retrieval.py``),
  compared with PyTorch and faiss-gpu.
- ``commands``: 20 steps of the aligner's training command, and answering 50 questions with a 7B
  model (``commands.py``).

The last printed column is a goal for our side: a share of the dense bf16 peak in training, or of
the memory bandwidth in decoding and search.

Results
  One otherwise idle NVIDIA H200, jax 0.11.2, Python 3.12, PyTorch 2.11.0 (CUDA 13), transformers
  5.23.0; 2026-11-26, in three runs, commit 53ea622. Search ran at fa86cca (before it, our search
  took 3.43, 4.14 and 6.49 ms). Prefill and decoding, with a paged cache, ran on another H200 on
  2026-11-27 at 9d69570 (decoding.py --only prefill decode transformers). The rows of aligner and
  adapter are not of presets: 256 texts of 128 tokens with all activations stored, and one row of
  4,096 tokens; both without dropout. Mixed prompts were only measured without pages. Shares are
  relative to 989 TFLOP/s or 4.8 TB/s; faiss-gpu was not installed.

    aligner, forward      811,309 tokens/s  50.6 %    transformers  623,335 tokens/s  38.9 %
    aligner, train        189,971 tokens/s  35.5 %    transformers  186,304 tokens/s  34.8 %
    adapter                14,464 tokens/s  46.4 %    PEFT            8,094 tokens/s  26.0 %
    prefill 512            39,725 tokens/s  52.8 %
    prefill 2048           40,570 tokens/s  55.2 %
    decode 1                  5.06 ms       58.5 %    transformers    31.23 ms         9.5 %
    decode 16                 5.10 ms       61.6 %    transformers    35.18 ms         8.9 %
    decode 64                 7.68 ms       48.6 %    transformers    34.08 ms        10.9 %
    64 mixed prompts          4.14 s, with reuse of prefixes 3.97 s
    search, 1 query           2.74 ms       77.9 %    torch            2.54 ms        84.1 %
    search, 32 queries        3.42 ms       62.4 %    torch            3.83 ms        55.7 %
    search, 128 queries       5.86 ms       36.4 %    torch            7.26 ms        29.4 %
    search, from the host     3.79, 4.60, 7.36 ms     torch            2.60, 3.90, 7.48 ms

  Without pages, decoding on the first H200 took 4.93, 4.97 and 7.35 ms, and transformers took
  22.34, 21.13 and 20.48 ms, much of it on the host.

  Training the aligner, decoding 1 and 64 rows, and 32 queries miss their goals. According to a
  profile, matrix products take less than half of the aligner's step, and copies of values stored by
  the scan over layers take a tenth. XLA's fusion of dynamic slices does not remove the copies
  (XLA_FLAGS=--xla_gpu_enable_dynamic_slice_fusion=true aligner.py --mode=flops --torch=none: 172.0
  ms, without it 171.8 ms). Layers without a scan had a slower forward pass. With 64 rows, a third
  of the step is attention over the cache; cuDNN would take half of that time with another layout.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.io import standard_streams

HERE = pathlib.Path(__file__).resolve().parent


class Part(NamedTuple):
    """A benchmark: its script, its arguments, and extra arguments for ``--tiny``."""

    script: str
    arguments: tuple[str, ...]
    tiny: tuple[str, ...]


_TINY_ALIGNER = (
    "--layers=2", "--d_model=64", "--heads=4", "--config.batch_size=8", "--config.num_negatives=2",
    "--config.query_max_length=32", "--config.unit_max_length=32",
)  # fmt: skip
PARTS = {
    "aligner": Part(
        "aligner.py",
        ("--mode=flops", "--repeats=3"),
        (*_TINY_ALIGNER, "--torch=cpu"),
    ),
    "aligner_code": Part(
        "aligner.py",
        ("--mode=flops", "--preset=code", "--torch=none", "--repeats=3"),
        _TINY_ALIGNER,
    ),
    "adapter": Part(
        "lora_step.py", ("--mode=flops", "--repeats=3"), ("--shape=tiny", "--length=64")
    ),
    "decoding": Part(
        "decoding.py", (), ("--shape=tiny", "--torch=cpu", "--cached=64", "--prompts=2")
    ),
    "search": Part(
        "retrieval.py",
        ("--mode=bandwidth", "--rows=5000000", "--dim=1024", "--dtypes=bfloat16", "--batches")
        + ("1", "32", "128"),
        ("--rows=20000", "--dim=64"),
    ),
    "commands": Part("commands.py", (), ("--tiny", "--questions=4")),
}

# Goals by benchmark and by the beginning of a row's name; the longest that fits counts.
GOALS = {
    "aligner": {"train": 0.45},
    "aligner_code": {},
    "adapter": {"ours": 0.50},
    "decoding": {"prefill 2048": 0.65, "decode": 0.60, "decode 64": 0.65},
    "search": {"1,": 0.70, "32,": 0.70},
    "commands": {},
}
OTHERS = ("transformers", "theirs", "torch", "faiss")


def run(part: Part, tiny: bool, limit: float) -> dict[str, Any]:
    """Returns the rows of a benchmark, or its error, and its total seconds."""
    command = [sys.executable, str(HERE / part.script), *part.arguments]
    command += part.tiny if tiny else ()
    start = time.monotonic()
    try:
        process = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {limit:.0f} s", "seconds": round(limit, 1)}
    seconds = round(time.monotonic() - start, 1)
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return {"failed": f"ended with exit code {process.returncode}", "seconds": seconds}
    result = lines[0] if "rows" in lines[0] else {"rows": lines}
    return {**result, "seconds": seconds}


def machine() -> dict[str, Any]:
    """Returns device, versions and commit; a separate process opens the device."""
    code = (
        "import jax, json; d = jax.devices(); "
        "print(json.dumps({'device': d[0].device_kind, 'devices': len(d), 'jax': jax.__version__}))"
    )
    process = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        **json.loads(process.stdout),
        "commit": commit or "unknown",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def summary(parts: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields (benchmark, row, figure, share, goal) of every row."""
    for part, result in parts.items():
        if "failed" in result:
            yield part, "failed", result["failed"], "", ""
            continue
        rows = result["rows"]
        named_rows = rows.items() if isinstance(rows, dict) else ((_name(row), row) for row in rows)
        for name, row in named_rows:
            if "not measured" in row:
                yield part, name, "not measured", row["not measured"], ""
                continue
            key = "utilization" if part == "decoding" else "share_of_bandwidth"
            share = row.get("mfu", row.get(key))
            percent = "" if share is None else f"{share:.1%}"
            yield part, name, _figure(row), percent, _goal(part, name)


def _name(row: dict[str, Any]) -> str:
    return f"{row.get('task', row.get('batch'))}, {row['side']}"


def _figure(row: dict[str, Any]) -> str:
    for key, unit in (("tokens_per_second", "tokens/s"), ("gigabytes_per_second", "GB/s")):
        if key in row:
            return f"{row[key]:,.0f} {unit}"
    return ""


def _goal(part: str, name: str) -> str:
    if any(other in name for other in OTHERS):
        return ""
    fitting = [prefix for prefix in GOALS[part] if name.startswith(prefix)]
    return f"{GOALS[part][max(fitting, key=len)]:.0%}" if fitting else ""


def main() -> int:
    """Runs the selected benchmarks; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=pathlib.Path, help="JSON file; printed by default")
    parser.add_argument("--limit", type=float, default=240.0, help="maximum seconds per benchmark")
    parser.add_argument("--tiny", action="store_true", help="tiny models, for any machine")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    result: dict[str, Any] = {"machine": machine(), "parts": {}}
    print(result["machine"], file=sys.stderr, flush=True)
    for name in args.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        result["parts"][name] = run(PARTS[name], args.tiny, args.limit)
        if args.out:
            args.out.write_text(json.dumps(result, indent=2) + "\n")
    for row in summary(result["parts"]):
        print("{:13} {:28} {:>18} {:>8} {:>6}".format(*row), file=sys.stderr)
    if not args.out:
        print(json.dumps(result))
    return int(any("failed" in part for part in result["parts"].values()))


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())
