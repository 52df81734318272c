"""Goes on attacking with new seeds until the time is over or a case fails: `make attack`.

A failure is printed as Hypothesis prints it: the arguments can be pasted above the test that it
names, as ``@example(...)``; the seed gives the same round again.
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
    parser.add_argument("--minutes", type=float, default=5.0, help="no round begins after them")
    parser.add_argument("--seed", type=int, help="of the first round; by default at random")
    parser.add_argument("--factor", type=int, default=10, help="times the cases of the tests")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    cases = rounds = 0
    while time.monotonic() < until:
        # A process for each round: a library that crashes ends that one.
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider",
             f"--hypothesis-seed={seed}", str(pathlib.Path(__file__).parent)],
            env={**os.environ, "CIRAG_JAX_ATTACK": str(options.factor)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        found = re.search(r"attacks: (\d+) cases", done.stdout)
        cases += int(found[1]) if found else 0
        if done.returncode:
            print(done.stdout)
            print(f"seed {seed}: a case failed after {cases} cases; again: --seed {seed}")
            return 1
        rounds += 1
        print(f"seed {seed}: {found[1] if found else 0} cases, no failure", flush=True)
        seed = random.randrange(1 << 32)
    print(f"{cases} cases in {rounds} rounds, no failure")
    return 0


if __name__ == "__main__":
    sys.exit(main())
