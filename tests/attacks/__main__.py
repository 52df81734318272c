"""Runs the attacks with new seeds until time runs out or a case fails: `make attack`.

A failure is printed in Hypothesis's format. To repeat it, paste the printed arguments above the
test as ``@example(...)``, or start with the printed seed.
"""

import argparse
import os
import pathlib
import random
import re
import subprocess
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(prog="make attack", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="no round starts after this time"
    )
    parser.add_argument("--seed", type=int, help="seed of the first round; random by default")
    parser.add_argument(
        "--factor", type=int, default=10, help="multiplies the number of cases in the test suite"
    )
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    cases = rounds = 0
    while time.monotonic() < until:
        # Each round has its own process, because a library may crash.
        process = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider",
             f"--hypothesis-seed={seed}", str(pathlib.Path(__file__).parent)],
            env={**os.environ, "CIRAG_JAX_ATTACK": str(options.factor)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        summary = re.search(r"attacks: (\d+) cases", process.stdout)
        cases += int(summary[1]) if summary else 0
        if process.returncode:
            print(process.stdout)
            print(f"seed {seed}: a case failed after {cases} cases; repeat it with --seed {seed}")
            return 1
        rounds += 1
        print(f"seed {seed}: {summary[1] if summary else 0} cases, no failure", flush=True)
        seed = random.randrange(1 << 32)
    print(f"{cases} cases in {rounds} rounds, no failure")
    return 0


if __name__ == "__main__":
    sys.exit(main())
