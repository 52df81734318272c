"""Declarations of the tables and figures of the papers, which experiments/run.py runs."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # declare.py imports papers.printed.
    from experiments.paths.declare import Experiment

MODULES = ("cirag", "kirag", "dualrag", "c2rag", "grade")


def experiments() -> Mapping[str, "Experiment"]:
    """Returns the experiments of all tables and figures by name."""
    return {
        experiment.name: experiment
        for name in MODULES
        for experiment in importlib.import_module(f"experiments.papers.{name}").EXPERIMENTS
    }
