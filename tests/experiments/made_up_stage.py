"""A stage for tests of experiments/run.py: writes the sum of its inputs and its own number.

    python -m tests.experiments.made_up_stage --out=F [--add=N] [--input=F2]... [--fail] [--wait]

``--fail`` exits with 3; ``--wait`` writes F/started and waits for a signal. ``--again=N`` exits
with 75 in the first N calls. Calls are counted in F.calls. ``--meet=FIFO:r`` waits until another
stage runs with ``--meet=FIFO:w``.
"""

import argparse
import json
import pathlib
import signal
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path, required=True)
parser.add_argument("--add", type=int, default=0)
parser.add_argument("--input", type=pathlib.Path, action="append", default=[])
parser.add_argument("--file", type=pathlib.Path)
parser.add_argument("--again", type=int, default=0)
parser.add_argument("--fail", action="store_true")
parser.add_argument("--wait", action="store_true")
parser.add_argument("--incomplete", action="store_true")
parser.add_argument("--meet")
flags = parser.parse_args()

flags.out.mkdir(exist_ok=True)
calls = flags.out.with_name(flags.out.name + ".calls")
count = len(calls.read_text()) if calls.exists() else 0
calls.write_text("x" * (count + 1))
if flags.wait and not (flags.out / "started").exists():
    (flags.out / "started").touch()
    signal.pause()
if flags.meet:
    signal.alarm(30)
    path, _, mode = flags.meet.rpartition(":")
    open(path, mode).close()
if flags.fail:
    print("the stage is broken", file=sys.stderr)
    sys.exit(3)
if count < flags.again:
    sys.exit(75)
inputs = [json.loads((folder / "result.json").read_text())["sum"] for folder in flags.input]
total = sum(inputs, flags.add)
(flags.out / "table.md").write_text(f"the sum is {total}")
print(json.dumps({"sum": total, "complete": not flags.incomplete}))
