"""The papers' paths at ``--scale=smoke``, from official files to the table, killed and resumed.

The environment variable CIRAG_SEED changes the stage during which the runner is killed.
"""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys

import pytest

from experiments import paths

_ROOT = pathlib.Path(__file__).resolve().parents[2]
SMOKE = sorted(name for name, made in paths.experiments().items() if "smoke" in made.scales)
pytestmark = pytest.mark.slow


def command(name, workdir):
    flags = [f"--only={name}", "--scale=smoke", f"--workdir={workdir}"]
    return [sys.executable, "experiments/run.py", *flags]


def run(name, workdir):
    """Returns the stages of a finished experiment, and the log."""
    done = subprocess.run(command(name, workdir), cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)[name]["stages"], done.stderr


def kill_during(name, workdir, stage):
    """Runs the experiment, and kills the runner when a stage has begun."""
    process = subprocess.Popen(
        command(name, workdir), cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    begins = re.compile(rf"\] {name}/{stage}: python .*--(?:workdir|out)=(\S+)")
    folder = next(m[1] for line in process.stderr if (m := begins.search(line)))
    while not pathlib.Path(folder).exists():
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()


def scores(stages):
    """Returns the results of the tables, without times and paths."""
    left_out = ("seconds", "settings", "different", "runs", "load")
    tables = [stage["result"] for stage_name, stage in stages.items() if "table" in stage_name]
    return [_without(table, left_out) for table in tables]


def _without(value, names):
    if isinstance(value, dict):
        return {
            key: _without(item, names) for key, item in value.items() if not key.startswith(names)
        }
    return value


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """One folder for all paths, which share stages."""
    return tmp_path_factory.mktemp("paths")


@pytest.mark.parametrize("name", SMOKE)
def test_path_leads_from_official_files_to_a_table(name, workdir):
    stages = run(name, workdir)[0]
    _check_items(stages)
    _check_systems_differ(scores(stages))


def test_path_killed_at_random_stage_resumes_to_same_table(workdir):
    rng = random.Random(int(os.environ.get("CIRAG_SEED", "0")))
    name = rng.choice(SMOKE)
    stages = run(name, workdir)[0]
    table, names = scores(stages), list(stages)
    first = rng.randrange(1, len(names))
    for later in names[first:]:  # these run again
        shutil.rmtree(stages[later]["folder"], ignore_errors=True)
    kill_during(name, workdir, names[first])
    resumed, log = run(name, workdir)
    assert scores(resumed) == table
    assert log.count("finished before") == first


def _check_items(stages):
    """Checks that every stage hands at least five items to the next."""
    keys = ("num_questions", "passages", "num_passages", "triples", "trajectories", "num_examples")
    for name, stage in stages.items():
        counts = {key: stage["result"].get(key) for key in keys}
        numbers = [value for value in counts.values() if isinstance(value, int)]
        assert all(number >= 5 for number in numbers), (name, counts)


def _check_systems_differ(table):
    """Checks that the rows of a table differ, so that leaving out a stage would show."""
    for result in table:
        rows = [json.dumps(system, sort_keys=True) for system in result["systems"].values()]
        assert len(set(rows)) == len(rows) > 1
