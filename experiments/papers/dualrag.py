"""DualRAG: Tables 1 to 6 and Figures 3 and 4."""

import functools
from collections.abc import Mapping
from typing import Any

from experiments.papers import benches
from experiments.papers.answers import (
    Answers,
    Bench,
    System,
    declare,
    share,
    without_stages,
)
from experiments.paths import dualrag
from experiments.paths.declare import Reader

DUALRAG = System("DualRAG", "dualrag:paper")
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
}
_FT = "not run: no stage here trains its roles (docs/methods/dualrag.md)"
MISSING = {name: _FT for name in ("DualRAG-FT", "w/o R-FT", "w/o EI-FT", "w/o KS-FT")}


@functools.cache
def smoke() -> Bench:
    """Returns the tiny bench."""
    return benches.smoke("dualrag:paper")


@functools.cache
def paper() -> Bench:
    """Returns the bench of section 4; the server has the judge."""
    judge = "--config.judge.backend=openai --config.judge.base_url={server} "
    judge += "--config.judge.model=Qwen/Qwen2.5-72B-Instruct"
    return benches.paper_of(
        "dualrag:paper", dualrag.paper, benches.ENCODERS["bge-small"], judge=judge
    )


def row(name: str, axes: Mapping[str, Any]) -> System | None:
    """Returns the system of a row."""
    return SYSTEMS.get(name)


def _steps(name: str, run: str, axes: Mapping[str, Any]) -> Reader:
    return share(run, "histograms.steps", str(axes["iterations"]))


def _queries(name: str, run: str, axes: Mapping[str, Any]) -> Reader:
    return share(run, "histograms.queries", str(axes["queries"]))


_NO_CORPUS = "no stage prepares passages for {}"
_SCORING = "--config.profile=dualrag"
_JUDGE = "--config.profile=dualrag --config.text=response"
_BIG, _SMALL = {"model": "Qwen2.5-72B"}, {"model": "Qwen2.5-7B"}
EXPERIMENTS = [
    without_stages("dualrag", "table1", "no stage here distills the roles of DualRAG-FT"),
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
        {"smoke": smoke, "small": benches.small, "paper": paper},
        MISSING,
        {
            "table5": {scale: _NO_CORPUS.format("NQ and PopQA") for scale in ("small", "paper")},
            "table6": {scale: _NO_CORPUS.format("ASQA and ELI5") for scale in ("small", "paper")},
        },
    ),
]
