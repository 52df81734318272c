"""C2RAG: Tables 1 to 8 and Figures 3 and 4."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from experiments.papers import benches
from experiments.papers.answers import (
    Answers,
    Bench,
    Score,
    System,
    declare,
    metric_of,
    needed,
    plain,
    slug,
)
from experiments.papers.printed import tables
from experiments.paths import c2rag
from experiments.paths.declare import Cell, Experiment, Measured, Reader, Setup, Stage, comparison

C2RAG = System("C2RAG", "c2rag:paper")
SYSTEMS = {
    "BM25": System("BM25", "native_rag:c2rag", ("retriever.kind=bm25",)),
    "IRCoT": System("IRCoT", "ircot:paper"),
    "Iter-RetGen": System("Iter-RetGen", "iter_retgen:paper"),
    "HippoRAG2": System("HippoRAG2", "hipporag2:paper"),
    "C2RAG": C2RAG,
    "w/o Constraint": C2RAG.but("w/o Constraint", "c2rag.use_constraints=false"),
    "w/o Relation": C2RAG.but("w/o Relation", "c2rag.use_relations=false"),
    "w/o Placeholder": C2RAG.but("w/o Placeholder", "c2rag.use_placeholders=false"),
    "w/o Check": C2RAG.but("w/o Check", "c2rag.sufficiency=off"),
    "w/o Dist": C2RAG.but("w/o Dist", "c2rag.sufficiency=score", "c2rag.min_score=0.0"),
    "w/o Intersection": C2RAG.but("w/o Intersection", "c2rag.intersect=false"),
    "w/o Typed-Var": C2RAG.but("w/o Typed-Var", "c2rag.typed_variables=false"),
    "w/o Rerank (Con)": C2RAG.but("w/o Rerank (Con)", "c2rag.rerank_structural=false"),
    "w/o Rerank (Rel)": C2RAG.but("w/o Rerank (Rel)", "c2rag.rerank_texts=false"),
    **{
        name: C2RAG.but(name, f"c2rag.plain_hops={hops}")
        for name, hops in (("NoC2RAG", 9), ("NoC2RAG-1", 1), ("NoC2RAG-1&2", 2), ("Full", 0))
    },
}
MISSING = {
    "LightRAG": "not implemented: another kind of graph, with its own indexing",
    "G-retriever": "not implemented: another kind of graph, with its own indexing",
    "HippoRAG": "not implemented: HippoRAG2 is its successor",
    "GFM-RAG": "not implemented: a graph model trained by its authors",
    "NeuroPath": "not implemented: paths chosen by a language model",
    "SubgraphRAG": "not implemented: a trained scorer of triples",
    "PathRAG": "not implemented: a graph with its own indexing",
    **{
        f"HippoRAG2, {kind}": "not run: its graph joins the facts of all questions, but facts are "
        "corrupted for single questions"
        for kind in ("noise", "deletion")
    },
}
_RATIOS = (0.05, 0.1, 0.15, 0.2)
_CORRUPTED = {
    f"corrupt_{kind}_{ratio}": (kind, ratio) for kind in ("noise", "deletion") for ratio in _RATIOS
}
# Settings of Figure 4.
_FIELDS = {"gamma": "gamma", "m": "num_variants", "K_s": "num_structural", "K_t": "num_texts"}


def _with_corruption(bench: Bench, questions: str, triples: str, editor: str = "") -> Bench:
    """Adds the stages that corrupt MuSiQue's triples (Figure 3)."""
    stages = dict(bench.stages)
    for name, (kind, ratio) in _CORRUPTED.items():
        stages[slug(name)] = Stage(
            f"launch/corrupt.py --config=configs/corrupt.py {questions} "
            f"--config.data.triples={triples} --config.kind={kind} --config.ratio={ratio} "
            f"{editor}".strip()
        )
    return dataclasses.replace(bench, stages=stages)


_TRIPLES = {name: f"{{{slug(name)}}}" for name in _CORRUPTED}


@functools.cache
def smoke() -> Bench:
    """Returns the tiny bench; rules corrupt the triples."""
    bench = benches.smoke("c2rag:paper", "c2rag", trained=_TRIPLES)
    questions = "--config.data.dir={corpus_musique} --config.data.split=dev "
    questions += "--config.data.limit={questions}"
    return _with_corruption(bench, questions, "{extract_c2rag_musique}")


@functools.cache
def small() -> Bench:
    """Returns the bench of 1.5B parameters; rules corrupt the triples."""
    bench = benches.small(_TRIPLES, corpus="per_question")
    return _with_corruption(bench, benches.small_questions("musique"), "{extract_musique}")


@functools.cache
def paper() -> Bench:
    """Returns the bench of section 4: GPT-4o-mini in every role."""
    bench = benches.paper_of(
        "c2rag:paper",
        c2rag.paper,
        "sentence-transformers/all-MiniLM-L6-v2",
        _TRIPLES,
        model="gpt-4o-mini",
    )
    editor = "--config.editor.kind=llm --config.editor.backend=openai "
    editor += "--config.editor.model=gpt-4o-mini"
    questions = "--config.data.dir={prepare_musique} --config.data.split=dev "
    questions += "--config.data.limit=1000"
    return _with_corruption(bench, questions, "{extract_musique}", editor)


def row(name: str, axes: Mapping[str, Any]) -> System | None:
    """Returns the system of a row."""
    return SYSTEMS.get(name)


def _gamma(name: str, axes: Mapping[str, Any]) -> System:
    """Table 7: a threshold."""
    return C2RAG.but(f"gamma {name}", f"c2rag.gamma={name}")


def _plan(name: str, run: str, axes: Mapping[str, Any]) -> Reader:
    """Table 8: wrong hops or wrong plans."""
    return Score(run, "plan_error" if name.startswith("Hop") else "plan_invalid")


def _cost(name: str, run: str, axes: Mapping[str, Any]) -> Reader:
    """Table 3: seconds, tokens of retrieval, and answers."""
    run = slug(run)
    if axes["metric"] == "seconds":
        return plain(run, "seconds_alone")
    if axes["metric"] != "tokens":
        return metric_of(name, run, axes)

    def read(result: Mapping[str, Any]) -> Measured:
        stages = result["systems"][run]["stages"]
        tokens = sum(
            row["prompt_tokens"] + row["generated_tokens"]
            for stage, row in stages.items()
            if stage == "retrieval"
        )
        return Measured(tokens, count=result["num_questions"])

    return read


def _corrupted(name: str, axes: Mapping[str, Any]) -> System | None:
    """Figure 3, panels a and b: a system with corrupted triples."""
    if name in MISSING:
        return None
    name, _, kind = name.partition(", ")
    part = f"corrupt_{kind}_{float(axes['ratio'])}"
    return dataclasses.replace(SYSTEMS[name], trained={"triples": part}, name=f"{name}, {kind}")


def _unsupported(name: str, run: str, axes: Mapping[str, Any]) -> Reader:
    """Figure 3, panel c: the share of evidence that supports no gold fact."""
    return Score(run, f"hop{axes['hop']}_unsupported")


def _setting(name: str, axes: Mapping[str, Any]) -> System:
    """Figure 4: the n-th value of a setting."""
    field, values = name.split(" = ")
    value = re.split(", ", values)[axes["setting"] - 1]
    return C2RAG.but(f"{field} {value}", f"c2rag.{_FIELDS[field]}={value}")


def _graph_size(quantity: str) -> Reader:
    """Table 4: a size of the questions' graphs, summed."""

    def read(result: Mapping[str, Any]) -> Measured:
        graphs = result["systems"]["C2RAG"]["graphs"]
        if "reason" in graphs:
            return Measured(None, reason=graphs["reason"])
        return Measured(graphs[quantity], count=graphs["questions"])

    return read


def _graphs(bench: Bench) -> Setup:
    """Table 4: the graphs of the answers of Table 1."""
    table = tables("c2rag")["table4"]
    stages, cells = dict(bench.stages), {}
    data_of = {"2Wiki": "two_wiki", "HotpotQA": "hotpotqa", "MuSiQue": "musique"}
    for name in table.rows:
        data = data_of[name]
        command = bench.command(C2RAG, {"data": data})
        assert command is not None
        stages[f"answer_{data}"] = Stage(command, **({"slurm": bench.slurm} if bench.slurm else {}))
        stages[f"table_{data}"] = comparison({"C2RAG": f"answer_{data}"})
        for column in table.columns:
            cells[name, column] = Cell([(f"table_{data}", _graph_size(column[0]))])
    return Setup(needed(stages, cells), bench.variables, bench.server, cells)


_RECALL = "--config.recall_at=(2,5)"
_HOPS = "--config.metrics=hops"
_MUSIQUE = {"data": "musique"}
_SCALES = {"smoke": smoke, "small": small, "paper": paper}
EXPERIMENTS = [
    *declare(
        "c2rag",
        {
            "table1": Answers(row),
            "table2": Answers(row),
            "table3": Answers(row, {"data": "hotpotqa"}, _cost, latency=4),
            "table5": Answers(row, scoring=_RECALL),
            "table6": Answers(row),
            "table7": Answers(_gamma, scoring=_HOPS),
            "table8": Answers(lambda *_: C2RAG, read=_plan, scoring=_HOPS),
            "figure3": Answers(_corrupted, _MUSIQUE),
            "figure3c": Answers(row, _MUSIQUE, _unsupported, scoring=_HOPS),
            "figure4": Answers(_setting, _MUSIQUE),
        },
        _SCALES,
        MISSING,
    ),
    Experiment(
        "c2rag_table4",
        tables("c2rag")["table4"].title,
        {
            scale: functools.cache(lambda bench=bench: _graphs(bench()))
            for scale, bench in _SCALES.items()
        },
        tables("c2rag")["table4"],
    ),
]
