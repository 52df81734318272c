"""KiRAG: Tables 1 to 7, 9 to 13 and 15, and Figures 3, 4 and 9 to 12."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from experiments.papers import benches
from experiments.papers.answers import (
    Answers,
    Bench,
    Score,
    System,
    counted,
    declare,
    metric_of,
    plain,
    slug,
)
from experiments.paths import kirag
from experiments.paths.declare import Cell, Measured, Reader

KIRAG = System("KiRAG", "kirag:paper", trained={"rankers.aligner.model": "aligner"})
_UNALIGNED = KIRAG.without("rankers.aligner.model")
SYSTEMS = {
    "RAG": System("RAG", "native_rag:kirag"),
    "Vector-PRF": System("Vector-PRF", "vector_prf:paper"),
    "FLARE": System("FLARE", "flare:paper"),
    "DRAGIN": System("DRAGIN", "dragin:paper", ("retriever.kind=exact",)),
    "IRCoT": System("IRCoT", "ircot:paper"),
    "KiRAG-Doc": KIRAG.but("KiRAG-Doc", "kirag.units=passage"),
    "KiRAG-Sent": KIRAG.but("KiRAG-Sent", "kirag.units=sentence"),
    "KiRAG": KIRAG,
    "KiRAG (Llama3)": KIRAG,
    "KiRAG (Mistral)": KIRAG.but(
        "KiRAG (Mistral)", models=("constructor.model=mistralai/Mistral-7B-Instruct-v0.2",)
    ),
    "KiRAG (Gemma2)": KIRAG.but(
        "KiRAG (Gemma2)", models=("constructor.model=google/gemma-2-9b-it",)
    ),
    "KiRAG (online)": KIRAG.but("KiRAG (online)", "triples=online"),
    "KiRAG w/o Retriever": dataclasses.replace(
        KIRAG.but("w/o Retriever", "retriever.units=triple", "kirag.num_passages=20"),
        trained={"rankers.aligner.model": "aligner", "encoder.model": "aligner"},
    ),
    "KiRAG w/o Aligner": _UNALIGNED.but(
        "w/o Aligner", "kirag.use_aligner=false", "kirag.append_best=false"
    ),
    "KiRAG w/o Constructor": KIRAG.but("w/o Constructor", "kirag.use_constructor=false"),
    "KiRAG w/o Training": _UNALIGNED.but("w/o Training", "rankers.aligner.kind=bi_encoder"),
    "E5": System(
        "E5", "native_rag:paper", ("native_rag.units=triple", "native_rag.reader_format=thought")
    ),
}
_READERS = {
    "Qwen2.5": ("reader.model=Qwen/Qwen2.5-7B-Instruct",),
    "Flan-T5": ("reader.backend=transformers", "reader.model=google/flan-t5-xl"),
}
_OTHERS = "not implemented: a reader over the passages of the other systems"
MISSING = {
    "BeamDR": "not implemented: its trained encoder",
    **{
        f"{reader}, BeamDR": "not implemented: its trained encoder"
        for reader in ("Qwen2.5", "Flan-T5", "TRACE")
    },
    **{f"TRACE, {row}": _OTHERS for row in SYSTEMS},
}


@functools.cache
def smoke() -> Bench:
    """Returns the tiny bench with triples in KiRAG's form."""
    return benches.smoke("kirag:paper", "kirag")


@functools.cache
def paper() -> Bench:
    """Returns the bench of section 4 and Appendix B."""
    return benches.paper_of(
        "kirag:paper", kirag.paper, "intfloat/e5-large-v2", {"aligner": "{export}/model"}
    )


def row(name: str, axes: Mapping[str, Any]) -> System | None:
    """Returns the system of a row, at the values of the axes."""
    system = SYSTEMS.get(name)
    for axis, field in (
        ("steps", "max_steps"),
        ("passages", "num_passages"),
        ("candidates", "num_candidates"),
    ):
        if system is not None and axis in axes:
            system = system.but(system.name, f"kirag.{field}={axes[axis]}")
    return system


def _reader(name: str, axes: Mapping[str, Any]) -> System | None:
    """Table 11: a system with another reader."""
    reader, _, name = name.partition(", ")
    system = SYSTEMS.get(name)
    if system is None or reader not in _READERS:
        return None
    return system.but(f"{name}, {reader}", models=_READERS[reader])


def _five(name: str, axes: Mapping[str, Any]) -> System | None:
    """Table 12: five passages for the reader."""
    system = SYSTEMS.get(name)
    if system is None:
        return None
    fields = {"flare": "num_passages", "dragin": "num_passages"}
    return system.but(system.name, f"{system.method}.{fields.get(system.method, 'num_read')}=5")


def _hop(name: str, run: str, axes: Mapping[str, Any]) -> Reader:
    """Figures 3 and 9: recall of the passage of a hop."""
    return Score(run, f"hop{axes['hop']}_recall@3")


def _latency(name: str, run: str, axes: Mapping[str, Any]) -> Reader:
    """Figure 12: seconds of a question alone, and recall."""
    run = slug(run)
    seconds = axes["metric"] == "seconds"
    return plain(run, "seconds_alone") if seconds else metric_of(name, run, axes)


def _extracted(row: str, axes: Mapping[str, Any], bench: Bench) -> Cell | None:
    """Table 6: numbers of questions and passages, and triples per passage."""
    data = axes["data"]
    suffix = f"_{data}" if f"prepare_{data}" in bench.stages else ""  # smoke: 2WikiMultihopQA
    names = {
        "questions": [f"prepare{suffix}"],
        "passages": ["abstracts"] if data == "hotpotqa" else [],
        "triples per passage": [f"extract_kirag{suffix}", f"extract{suffix}"],
    }
    names["passages"].append(f"prepare{suffix}")
    readers: dict[str, Reader] = {
        "questions": lambda result: Measured(result["num_questions"]["dev"]),
        "passages": lambda result: Measured(result["num_passages"]),
        "triples per passage": lambda result: Measured(result["triples"] / result["passages"]),
    }
    stage = next((name for name in names.get(row, ()) if name in bench.stages), None)
    return Cell([(stage, readers[row])]) if stage else None


def _chains(row: str, axes: Mapping[str, Any], bench: Bench) -> Cell:
    """Table 7: numbers of chains with which the aligner is trained, and their mean length."""
    own = {"train": "chain", "dev": "dev_chain"}[axes["split"]]
    key = f"num_{own}s" if row == "questions" else f"mean_{own}_length"
    stage = "train_kirag" if "train_kirag" in bench.stages else "train"
    return Cell([(stage, lambda result: Measured(result[key]))])


_SCORING = "--config.profile=kirag"
_HOPS = "--config.metrics=hops"
_BGE = {"encoder": "BGE"}
_UNSEEN = {
    "small": "its questions have no passages at this scale",
    "paper": "its questions need Wikipedia's 21 million passages, which no stage prepares",
}
EXPERIMENTS = [
    *declare(
        "kirag",
        {
            "table1": Answers(row),
            "table2": Answers(row, scoring=_SCORING),
            "table3": Answers(row),
            "table4": Answers(row, scoring=_SCORING),
            "table5": Answers(row, {"data": "two_wiki"}, scoring=_SCORING),
            "table9": Answers(row, _BGE),
            "table10": Answers(row, _BGE, scoring=_SCORING),
            "table11": Answers(_reader, scoring=_SCORING),
            "table12": Answers(_five, scoring=_SCORING),
            "table13": Answers(row, scoring=_SCORING),
            "table15": Answers(row),
            "figure3": Answers(row, read=_hop, scoring=_HOPS),
            "figure4": Answers(row),
            "figure9": Answers(row, {"data": "musique"}, _hop, scoring=_HOPS),
            "figure10": Answers(row),
            "figure11": Answers(row),
            "figure12": Answers(row, {"data": "hotpotqa"}, _latency, latency=4),
        },
        {"smoke": smoke, "small": benches.small, "paper": paper},
        MISSING,
        {"table3": _UNSEEN, "table13": _UNSEEN},
    ),
    counted(
        "kirag",
        "table6",
        _extracted,
        {"smoke": smoke, "paper": paper},
        {"entities per passage": "not run: the extraction keeps triples, not the list of entities"},
        {"small": "its passages are only those of the questions"},
    ),
    counted("kirag", "table7", _chains, {"smoke": smoke, "small": benches.small, "paper": paper}),
]
