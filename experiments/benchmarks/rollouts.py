"""Measures the rollouts of GRPO: with shared prefixes, without, and one at a time.

    python experiments/benchmarks/rollouts.py --data=2wikimultihopqa --workdir=W

Trains the shipped reader (configs/grpo.py:reader) for two steps in each of three ways, in one
process, and reads the second step, in which nothing is compiled. Every question has several
rollouts, so their prompts are equal: with shared prefixes, the engine reads a prompt once. Prints
one JSON object: seconds of rollouts and of the update, sampled tokens per second, and ratios.
"""

import argparse
import json
import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.commands import jobs
from cirag_jax.config_files import load_config
from cirag_jax.io import standard_streams

# Settings of the trained role, and the number of rollouts that run concurrently.
WAYS = {
    "shared prefixes": (("reader.batch_size=32",), 32),
    "without shared prefixes": (("reader.batch_size=32", "reader.prefix_tokens=0"), 32),
    "one at a time": (("reader.batch_size=1", "reader.prefix_tokens=0"), 1),
}


def main() -> None:
    """Prints the times of all ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=pathlib.Path, required=True, help="a dataset folder")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts of each question")
    arguments = parser.parse_args()
    results = {}
    for name, (settings, in_flight) in WAYS.items():
        values = {
            "data.dir": arguments.data,
            "data.limit": 100,
            "questions_per_step": arguments.questions,
            "group_size": arguments.rollouts,
            "max_draws": 1,  # The same questions in all ways.
            "in_flight": in_flight,
            "set": settings,
            "num_dev": 0,
            "dev_fraction": 0.0,
            "num_steps": 2,
            "eval_every": 0,
            "max_saturated_steps": 3,
        }
        overrides = [f"--config.{key}={value}" for key, value in values.items()]
        workdir = arguments.workdir / name.replace(" ", "_")
        workdir.mkdir(parents=True)
        jobs.train(load_config("configs/grpo.py:reader", overrides), workdir)
        lines = (workdir / "metrics.jsonl").read_text("utf-8").splitlines()
        last = json.loads(lines[-1])
        tokens = last["train/tokens"] * arguments.questions * arguments.rollouts
        results[name] = {
            "rollout_seconds": last["train/rollout_seconds"],
            "update_seconds": last["train/update_seconds"],
            "tokens_per_second": tokens / last["train/rollout_seconds"],
        }
    first = results["shared prefixes"]["tokens_per_second"]
    for result in results.values():
        result["slower_than_shared"] = first / result["tokens_per_second"]
    print(json.dumps(results))


if __name__ == "__main__":
    with standard_streams():
        main()
