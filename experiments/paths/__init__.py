r"""Declarations of the experiments that experiments/run.py runs, one module per paper.

A *stage* is one command, such as ``python launch/train.py ...``. An *experiment* is a dictionary of
stages at each scale (`declare.Experiment`). To add a path:

1. Write ``experiments/paths/NAME.py`` with a function per scale and ``EXPERIMENTS``::

       def smoke() -> Setup:
           return Setup(
               {
                   "files": Stage("experiments/smoke/files.py"),
                   **benchmark_stages("two_wiki", "{files}/two_wiki"),
                   "extract": Stage(
                       "launch/extract.py --config=configs/extract.py:kirag "
                       "--config.data.dir={corpus} ..."
                   ),
                   "answer": Stage(
                       "launch/answer.py --config=configs/methods/kirag.py:paper "
                       "--config.data.dir={corpus} --config.triples={extract} ..."
                   ),
               },
               server="experiments/smoke/server.py",
           )


       EXPERIMENTS = (
           Experiment("kirag_path", "KiRAG: the aligner and Table 1", {"smoke": smoke}),
       )

2. Add the module to `MODULES` below.
3. For ``smoke``, add rules for the prompts of the method to experiments/smoke/server.py.

In a command, ``{extract}`` is the folder of an earlier stage. The runner derives from these
references which stages depend on which. ``{data}`` is ``--data``; other names in braces are
variables of the setup. Every launch command names its ``--config``. The runner prints ``table.md``
of the stages whose names start with ``evaluate`` or ``table``; the last stage is a ``table``.

A stage is identified by its command, the values of its config, the code of its method, the contents
of the files in ``--data`` that it names, and the identities of the stages that it reads. Stages
with the same identity share a folder, also between experiments. To share a stage, declare the same
command, with a common function such as `declare.benchmark_stages`.

Each launch command is checked when an experiment is planned: `tests/experiments/test_run.py` plans
all experiments at all scales, so unknown flags and presets fail there.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # declare.py imports papers.printed.
    from experiments.paths.declare import Experiment

MODULES = ("cirag", "kirag", "dualrag", "c2rag", "grade")


def experiments() -> Mapping[str, "Experiment"]:
    """Returns all declared experiments by name."""
    declared: dict[str, Experiment] = {}
    for name in MODULES:
        for experiment in importlib.import_module(f"experiments.paths.{name}").EXPERIMENTS:
            if experiment.name in declared:
                raise ValueError(f"two experiments are named {experiment.name}")
            declared[experiment.name] = experiment
    return declared
