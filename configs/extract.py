r"""Extracts knowledge triples from the passages of a corpus.

python launch/extract.py --config=configs/extract.py --config.data.dir=FOLDER --workdir=W
python launch/extract.py --config=configs/extract.py:small --config.data.dir=FOLDER --workdir=W
python launch/extract.py --config.data.dir=FOLDER --config.data.corpus=selected_questions \
    --config.data.split=dev --config.data.limit=100 --config.extractor.adapter=STUDENT --workdir=W
python launch/extract.py --config.data.dir=FOLDER --config.import_openie=FILE --workdir=W

Presets: (none) is for a good model of your own; ``small`` is the default model with the extractor
that comes with this repository, and drops what the passage does not name. docs/triples.md describes
the store that is left in W/triples.sqlite, resumption, updates and costs.

Record (``small``, 26 passages of two sentences, those of tests/test_shipped.py, 2026-11-25, 2 CPU
cores of an AMD EPYC, of which other work left little): 794 s; 25 with triples (75 in all), 1 failed
(answer: ungrounded). Before there was an extractor, ``small`` forced the untrained model into JSON
(--config.constrained=true --config.entity_tokens=64 --config.triple_tokens=160; the first 50
passages of MuSiQue, 2026-11-22): 49 with triples (115 in all, 16 of them the prompt's example).
  --config.data.dir=2wikimultihopqa --config.data.corpus=selected_questions --config.data.split=dev
--config.data.limit=30 --config.grounded=true with configs/extractor.py's model (2026-11-23, two
cores, tests beside it, commit 6e1523a): 241 of 253 passages ok, 1,297 triples; 12 failed; 69 lists
of triples and 73 of entities were cut: on other passages than MuSiQue's it still does not know when
to end; 98,528 tokens generated in 32 min. The day before, from a model trained on another machine,
the same figures.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config(preset: str = "") -> Any:
    """SmolLM2-135M-Instruct; any instructed model of 7B or more does better."""
    config: Any = ConfigDict()
    # The whole corpus.jsonl; config.data.corpus=selected_questions: only the contexts of the
    # questions that split, fold and limit select.
    config.data = common.data(split="", units=None)
    config.limit = 0  # Only the first passages of those; 0 is all.
    config.import_openie = placeholder(str)  # An openie.jsonl to import instead of extracting.

    config.extractor = common.extractor()
    # openie (entities, then triples, as JSON) | kirag | trace (<head; relation; tail>, one call).
    config.dialect = "openie"
    config.entity_tokens = 192  # Most new tokens of a passage's list of entities.
    config.triple_tokens = 512  # And of its list of triples.
    config.constrained = False  # Forces the JSON asked for, where the backend can.
    # Drops triples whose head or tail has a word that the passage lacks: small models invent names.
    config.grounded = False

    config.retry = "errors"  # Failed passages tried again: never | errors (of requests) | all.
    config.replace = False  # Extract again what another model or prompt extracted.
    config.max_empty_share = 0.5  # More passages than this without a triple stop the run.
    config.min_passages = 50  # Passages that must have been asked before that.

    config.block = 256  # Passages of a transaction of the store, and of a shard of engine=ray.
    config.in_flight = 256  # Passages under way at once.
    # local | ray: shards of the passages go to workers on a Ray cluster (docs/cluster.md).
    config.engine = "local"
    # engine=ray: so many workers; 0: one a GPU, or one a node where none is needed.
    config.workers = 0
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command resumes from there. 0: never.
    config.estimate_only = False  # Prints what it would take, and ends.
    if preset == "small":
        config.extractor.adapter = "shipped:extractor"
        config.grounded = True
    elif preset:
        raise common.no_preset(preset, ["small"])
    return config
