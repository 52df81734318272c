"""CIRAG: Tables 1 to 8 and Figures 3 to 8."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from experiments.papers import benches
from experiments.papers import dualrag as dualrag_tables
from experiments.papers.answers import (
    Answers,
    Bench,
    System,
    declare,
    interval_of,
    metric_of,
    plain,
    share,
    slug,
)
from experiments.paths import cirag, dualrag
from experiments.paths.declare import Measured, Reader, Stage, export

_ALIGNER = {"rankers.aligner.model": "aligner"}

CIRAG = System("CIRAG", "cirag:paper", trained={"integrator.adapter": "integrator"})
BASE = CIRAG.but("w/o TD").without("integrator.adapter")
SYSTEMS = {
    "nativerag": System("NativeRAG", "native_rag:paper"),
    "ircot": System("IRCoT", "ircot:cirag"),
    "flare": System("FLARE", "flare:cirag"),
    "metarag": System("MetaRAG", "metarag:cirag"),
    "kirag": System("KiRAG", "kirag:paper", ("kirag.max_steps=4",), _ALIGNER),
    "dualrag": System("DualRAG", "dualrag:paper", ("dualrag.max_steps=4",)),
    "dualrag-ft": dualrag_tables.FINE_TUNED.but("DualRAG-FT", "dualrag.max_steps=4"),
    "cirag": CIRAG,
    "cirag (full)": CIRAG,
    "ours": CIRAG,
    "w/o td": BASE,
    "w/o reranker": CIRAG.but("w/o reranker", "cirag.use_reranker=false"),
    "w/o passage": CIRAG.but("w/o Passage", "cirag.granularities=('triple','sentence')"),
    "w/o triple": CIRAG.but("w/o Triple", "cirag.granularities=('sentence','passage')"),
    "w/o sentence + passage": CIRAG.but("triple", "cirag.granularities=('triple',)"),
    "w/o triple + passage": CIRAG.but("sentence", "cirag.granularities=('sentence',)"),
    "w/o triple + sentence": CIRAG.but("passage", "cirag.granularities=('passage',)"),
    "cirag (online)": CIRAG.but("CIRAG (Online)", "triples=online"),
}
_ALONE = {
    granularity: SYSTEMS[row]
    for granularity, row in (
        ("triple", "w/o sentence + passage"),
        ("sentence", "w/o triple + passage"),
        ("passage", "w/o triple + sentence"),
    )
}
_QUANTITIES = ("1000", "2000", "3000", "4000")
_EXPORTED = {quantity: f"{{export_{quantity}}}/model" for quantity in _QUANTITIES}


@functools.cache
def smoke() -> Bench:
    """Returns the tiny bench, with an integrator for each number of trajectories of Table 8."""
    bench = benches.smoke("cirag:paper", trained=_EXPORTED)
    stages = dict(bench.stages)
    for quantity in _QUANTITIES:  # 1 trajectory stands for 250
        own = f"--config.num_trajectories={int(quantity) // 250}"
        stages[f"train_{quantity}"] = Stage(f"{stages['train'].command} {own}")
        stages[f"export_{quantity}"] = export(f"train_{quantity}")
    return dataclasses.replace(bench, stages=stages)


@functools.cache
def paper() -> Bench:
    """Returns the bench of section 4 and Appendix B.4; KiRAG's aligner is a variable."""
    trained = {"integrator": "{export}/model", "aligner": "{aligner}", **_EXPORTED}
    trained[benches.FULL] = "{export_ft}/model"
    bench = benches.paper_of("cirag:paper", cirag.paper, benches.ENCODERS["bge-small"], trained)
    stages = dict(bench.stages)
    for quantity in _QUANTITIES:
        own = f"{stages['train'].command} --config.num_trajectories={quantity}"
        stages[f"train_{quantity}"] = dataclasses.replace(stages["train"], command=own)
        stages[f"export_{quantity}"] = export(f"train_{quantity}")
    stages |= dualrag.paper_student("corpus_train", "index_train", 1000)
    variables = {**bench.variables, "aligner": ""}
    return dataclasses.replace(bench, stages=stages, variables=variables)


def row(name: str, axes: Mapping[str, Any]) -> System | None:
    """Returns the system of a row, at the values of the axes."""
    system = SYSTEMS.get(name.casefold())
    if system is None:
        return None
    method = system.method
    if (steps := axes.get("steps")) is not None:
        field = "max_thoughts" if method == "ircot" else "max_steps"
        return system.but(system.name, f"{method}.{field}={steps}")
    if (candidates := axes.get("candidates")) is not None:
        return system.but(system.name, f"cirag.num_candidates={candidates}")
    return system


def _units(name: str, axes: Mapping[str, Any]) -> System | None:
    """Table 5: NV-Embed-v2 retrieves units of each granularity by itself."""
    if name != "NVEmbed-v2":
        return row(name, axes)
    unit = axes["unit"]
    return System(
        f"NVEmbed-v2, {unit}s", "native_rag:paper",
        (f"native_rag.units={unit}", "native_rag.reader_format=thought"),
    )  # fmt: skip


def _quantity(name: str, axes: Mapping[str, Any]) -> System:
    """Table 8: the integrator of some number of trajectories."""
    return dataclasses.replace(CIRAG, name=name, trained={"integrator.adapter": name})


def _row_of_granularity(name: str, axes: Mapping[str, Any]) -> System | None:
    return row(name.rpartition(", ")[0], axes)


def _granularity(name: str, run: str, axes: Mapping[str, Any]) -> Reader:
    """Figures 3 and 5: the share of questions answered at a granularity."""
    return share(run, "granularities", name.rpartition(", ")[2])


def _stage_of(name: str, run: str, axes: Mapping[str, Any]) -> Reader:
    """Figure 4: a stage of the cascade, or its granularity alone, on the stage's questions."""
    cascade, _, stage = name.rpartition(", ")
    key = "cascade" if cascade else "same"
    granularity = stage.removesuffix(" alone")

    def read(result: Mapping[str, Any]) -> Measured:
        for entry in result["stages"]:
            if entry["stage"] == granularity and entry["num_questions"]:
                return interval_of(entry[axes["metric"]][key], entry["num_questions"])
        return Measured(None, reason="no question was answered at this granularity")

    return read


def _cascade(name: str, axes: Mapping[str, Any]) -> System:
    return _ALONE[name.removesuffix(" alone")] if name.endswith(" alone") else CIRAG


def _latency(name: str, run: str, axes: Mapping[str, Any]) -> Reader:
    """Figure 6: seconds of a question alone, and F1."""
    run = slug(run)
    return (
        plain(run, "seconds_alone") if axes["metric"] == "seconds" else metric_of(name, run, axes)
    )


_MAIN = {"encoder": "NV-Embed-v2"}
_TWO_WIKI = {"data": "two_wiki", **_MAIN}
EXPERIMENTS = declare(
    "cirag",
    {
        "table1": Answers(row, _MAIN),
        "table2": Answers(row, _MAIN),
        "table3": Answers(row, _MAIN),
        "table4": Answers(row, _MAIN),
        "table5": Answers(_units, _TWO_WIKI, of_result=("metric",)),
        "table6": Answers(row, {**_MAIN, "model": "Llama-3-8B"}),
        "table7": Answers(row, {"encoder": "bge-small"}),
        "table8": Answers(_quantity, _MAIN),
        "figure3": Answers(lambda *_: CIRAG, _MAIN, _granularity),
        "figure4": Answers(_cascade, _MAIN, _stage_of),
        "figure5": Answers(_row_of_granularity, _MAIN, _granularity),
        "figure6": Answers(row, _TWO_WIKI, _latency, latency=4),
        "figure7": Answers(row, _TWO_WIKI),
        "figure8": Answers(row, _MAIN),
    },
    {"smoke": smoke, "small": benches.small, "paper": paper},
    {},
    {
        "table4": {
            "small": "its questions have no passages at this scale",
            "paper": "its questions need DPR's passages, which no stage prepares",
        },
        "table8": {"small": "100 training questions give too few trajectories"},
    },
)
