"""DualRAG: Tables 1 to 6 and Figures 3 and 4."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from experiments.papers import benches
from experiments.papers.answers import (
    Answers,
    Bench,
    System,
    counted,
    declare,
    share,
)
from experiments.paths import dualrag
from experiments.paths.declare import Cell, Measured, Reader

DUALRAG = System("DualRAG", "dualrag:paper")
FINE_TUNED = dataclasses.replace(
    DUALRAG.but("DualRAG-FT", "dualrag.few_shot=false"),
    trained={f"{role}.adapter": benches.FULL for role in dualrag.TRAINED},
)
NATIVE = System("NativeRAG", "native_rag:dualrag")
IRCOT = System("IRCoT", "ircot:dualrag")
SYSTEMS = {
    "Direct": System("Direct", "direct:paper"),
    "NativeRAG": NATIVE,
    "Native": NATIVE,
    "IRCOT": IRCOT,
    "IRCoT": IRCOT,
    "MetaRAG": System("MetaRAG", "metarag:dualrag"),
    "GenGround": System("GenGround", "genground:paper"),
    "Oracle": System("Oracle", "oracle:paper"),
    "DualRAG": DUALRAG,
    "w/o R": DUALRAG.but("w/o R", "dualrag.use_reasoner=false"),
    "w/o EI": DUALRAG.but("w/o EI", "dualrag.use_entities=false"),
    "w/o KO": DUALRAG.but("w/o KO", "dualrag.use_outline=false"),
    "w/o FT": DUALRAG,
    "DualRAG-FT": FINE_TUNED,
    **{
        name: FINE_TUNED.but(name).without(f"{role}.adapter")
        for name, role in zip(("w/o R-FT", "w/o EI-FT", "w/o KS-FT"), dualrag.TRAINED, strict=True)
    },
}


@functools.cache
def smoke() -> Bench:
    """Returns the tiny bench."""
    return benches.smoke("dualrag:paper")


@functools.cache
def paper() -> Bench:
    """Returns the bench of section 4; the server has the judge."""
    judge = "--config.judge.backend=openai --config.judge.base_url={server} "
    judge += "--config.judge.model=Qwen/Qwen2.5-72B-Instruct"
    trained = {benches.FULL: "{export_ft}/model"}
    encoder = benches.ENCODERS["bge-small"]
    bench = benches.paper_of("dualrag:paper", dualrag.paper, encoder, trained, judge=judge)
    stages = {**bench.stages, **dualrag.paper_student("prepare", "index", 5000)}
    return dataclasses.replace(bench, stages=stages)


def row(name: str, axes: Mapping[str, Any]) -> System | None:
    """Returns the system of a row."""
    return SYSTEMS.get(name)


def _steps(name: str, run: str, axes: Mapping[str, Any]) -> Reader:
    return share(run, "histograms.steps", str(axes["iterations"]))


def _queries(name: str, run: str, axes: Mapping[str, Any]) -> Reader:
    return share(run, "histograms.queries", str(axes["queries"]))


_COUNTED = {
    "Reasoner": ["reasoner"],
    "Entity Identifier": ["entity_identifier"],
    "Knowledge Summarizer": ["summarizer"],
    "Sum": dualrag.TRAINED,
}


def _number(role: str) -> Reader:
    return lambda result: Measured(result["examples"][role])


def _examples(row: str, axes: Mapping[str, Any], bench: Bench) -> Cell:
    """Table 1: the examples of each role, over all benchmarks."""
    distilled = [name for name in bench.stages if name.startswith("distill_ft")]
    sources = [(name, _number(role)) for name in distilled for role in _COUNTED[row]]
    return Cell(sources, summed=True)


_SCALES = {"smoke": smoke, "small": benches.small, "paper": paper}
_NO_CORPUS = "no stage prepares passages for {}"
_SCORING = "--config.profile=dualrag"
_JUDGE = "--config.profile=dualrag --config.text=response"
_BIG, _SMALL = {"model": "Qwen2.5-72B"}, {"model": "Qwen2.5-7B"}
EXPERIMENTS = [
    counted("dualrag", "table1", _examples, _SCALES),
    *declare(
        "dualrag",
        {
            "table2": Answers(row, scoring=_SCORING, judge=_JUDGE),
            "table3": Answers(row, _BIG, scoring=_SCORING),
            "table4": Answers(row, _SMALL, scoring=_SCORING),
            "table5": Answers(row, _BIG, scoring=_SCORING, judge=_JUDGE),
            "table6": Answers(row, _BIG, scoring="--config.metrics=rouge"),
            "figure3": Answers(row, {**_BIG, "data": "hotpotqa"}, _steps),
            "figure4": Answers(row, {**_SMALL, "data": "hotpotqa"}, _queries),
        },
        _SCALES,
        {},
        {
            "table5": {scale: _NO_CORPUS.format("NQ and PopQA") for scale in ("small", "paper")},
            "table6": {scale: _NO_CORPUS.format("ASQA and ELI5") for scale in ("small", "paper")},
        },
    ),
]
