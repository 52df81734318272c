r"""Extracts knowledge triples from the passages of a corpus (docs/triples.md).

python launch/extract.py --config=configs/extract.py --config.data.dir=FOLDER --workdir=W
python launch/extract.py --config=configs/extract.py:small --config.data.dir=FOLDER --workdir=W
python launch/extract.py --config.data.dir=FOLDER --config.data.corpus=selected_questions \
    --config.data.split=dev --config.data.limit=100 --config.extractor.adapter=STUDENT --workdir=W
python launch/extract.py --config.data.dir=FOLDER --config.import_openie=FILE --workdir=W
python launch/extract.py --config.data.dir=FOLDER --config.export_openie=FILE --workdir=W

Needs a dataset folder. Writes the store W/triples.sqlite; run the same command to resume.

Presets: without one, choose your own model; 7B parameters or more do better than the default,
SmolLM2-135M-Instruct. ``small`` is the default model with this repository's extractor adapter, and
drops triples whose head or tail has words that are not in the passage. ``cirag``, ``kirag``,
``trace`` and ``c2rag`` have the papers' models (Qwen2.5-7B-Instruct, Llama-3-8B-Instruct with
dialect=kirag or trace, GPT-4o-mini over its API); not yet run.

Record of ``small`` (26 passages of two sentences of tests/test_shipped.py; 2026-11-25, 2 busy CPU
cores of an AMD EPYC): 75 triples from 25 passages, 1 failure (ungrounded); 794 s. The untrained
model, forced into JSON (--config.constrained=true --config.entity_tokens=64
--config.triple_tokens=160; the first 50 passages of MuSiQue; 2026-11-22): 115 triples from 49
passages, 16 of them copied from the prompt's example.

Record of configs/extractor.py's model (--config.data.dir=2wikimultihopqa
--config.data.corpus=selected_questions --config.data.split=dev --config.data.limit=30
--config.grounded=true; 2026-11-23, 2 CPU cores, commit 6e1523a): 1,297 triples from 241 of 253
passages, 12 failures; 98,528 tokens generated in 32 min. 69 lists of triples and 73 of entities
were cut off: trained on MuSiQue, the model often does not end its lists here.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config(preset: str = "") -> Any:
    config: Any = ConfigDict()
    # By default, the complete corpus.jsonl. With corpus=selected_questions, only the contexts of
    # the questions that split, fold and limit select.
    config.data = common.data(split="", units=None)
    config.limit = 0  # The first N of these passages; 0 is all.
    # Triples to import, instead of extraction: an openie.jsonl, or a .json file of HippoRAG.
    config.import_openie = placeholder(str)
    # File to which to export the triples of the store in the workdir, instead of extraction: .jsonl
    # (the format of openie.jsonl) or .json (HippoRAG's).
    config.export_openie = placeholder(str)

    config.extractor = common.extractor()
    # Prompt and output: openie (entities, then triples, as JSON) | kirag | trace (both write <head;
    # relation; tail> in one call).
    config.dialect = "openie"
    config.entity_tokens = 192  # Maximum new tokens for a passage's entities.
    config.triple_tokens = 512  # Maximum new tokens for a passage's triples.
    config.constrained = False  # Enforce the JSON schema, if the backend supports it.
    # Drop triples whose head or tail has a word that is not in the passage; small models invent
    # names.
    config.grounded = False

    common.prompts(config)

    config.retry = "errors"  # Failed passages to retry: never | errors (of requests) | all
    config.replace = False  # Replace triples of another model or prompt.
    # Maximum share of passages without triples; above this share, the run fails.
    config.max_empty_share = 0.5
    config.min_passages = 50  # Passages to process before max_empty_share applies.

    config.block = 256  # Passages per transaction of the store, and per shard of engine=ray.
    config.in_flight = 256  # Passages processed concurrently.
    # local | ray (workers of a Ray cluster process shards of the passages; docs/cluster.md)
    config.engine = "local"
    # Workers with engine=ray; 0 is one per GPU, or one per node if no GPU is needed.
    config.workers = 0
    # Minutes after which the run stops, to be resumed with the same command; 0 is no limit.
    config.stop_after_minutes = 0.0
    config.estimate_only = False  # Only print the expected number of tokens.
    if preset == "small":
        config.extractor.adapter = "shipped:extractor"
        config.grounded = True
    elif preset in ("cirag", "kirag", "trace", "c2rag"):
        # Greedy decoding without our limits for small models. The papers state no token limits.
        config.extractor.no_repeat_ngram_size = 0
        config.entity_tokens, config.triple_tokens = 512, 1024
        if preset == "cirag":
            config.extractor.model = "Qwen/Qwen2.5-7B-Instruct"
        elif preset in ("kirag", "trace"):
            config.extractor.model = "meta-llama/Meta-Llama-3-8B-Instruct"
            config.dialect, config.triple_tokens = preset, 512  # 512: KiRAG's code
        else:
            config.extractor.backend, config.extractor.model = "openai", "gpt-4o-mini"
    elif preset:
        raise common.unknown_preset(preset, ["small", "cirag", "kirag", "trace", "c2rag"])
    return config
