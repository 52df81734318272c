r"""Trajectories of a teacher, on which launch/train.py --config=configs/integrator.py trains.

python launch/distill.py --config=configs/trajectories.py:annotations --config.data.dir=FOLDER \
    --config.data.fold=train --workdir=T

Presets: ``annotations`` (also without a preset) decides from gold evidence and needs no language
model; ``llm`` asks ``config.teacher.llm``; ``mixture`` draws one of the two for every question.
The paper: Qwen-max at temperature 0 on 1,000 training questions of each of three datasets.

Record (``annotations``; 2026-11-24, two CPU cores beside other work, jax 0.10.2, commit a60aeca):
  --config.data.dir=musique --config.data.fold=train: 60 trajectories, 1.95 rounds each, 52 %
  solved, none stopped unsolved, 29 % of the rounds without a core triple; 106 s.
Before teachers inserted facts and stopped only when all is supported (2026-11-22, two CPU cores,
jax 0.10.2, commit 82b4ef8):
  --config.data.dir=musique --config.data.fold=train: 60 trajectories, 2.75 rounds each, 40 %
  solved (every hop supported), 53 % stopped unsolved, 90 % of the gold passages retrieved; in 53 %
  of the rounds no candidate supported a hop that could be reached; 96 s.
  the same with fold=test: 30 trajectories, 2.67 rounds each, 40 % solved; 56 s.
  --config.data.limit=250 (built-in): 250 trajectories, 1.95 rounds each, 99 % solved; 90 s.
  --config.data.dir=2wikimultihopqa --config.data.split=train --config.triples=G (G: the data set's
  evidences alone, by launch/extract.py --config.import_openie=gold_triples.jsonl) with
  --config.data.limit=150 (commit ebd761e): 150 trajectories, 1.73 rounds each, 4.6 candidates and
  1.4 core triples a round, 4 % of the rounds without one, 99 % solved; 55 s beside other work; with
  --config.data.limit=300 --config.min_steps=2 --config.limit=110 (commit 9604270): 110, 2.37 rounds
  each, 5.5 candidates and 1.1 core triples a round, 7 % without one, 93 % solved; 121 s likewise.
  --config.data.dir=2wikimultihopqa --config.data.split=dev --config.data.limit=30
  --config.triples=X (just before commit 9604270; X: the contexts by configs/extractor.py's model,
  see configs/extract.py): 30 trajectories, 3.07 rounds each, 20 % solved, 93 % of the gold passages
  retrieved; in 66 % of the rounds no candidate supported a hop: that extractor misses much; 33 s.
With --config.cirag.units=sentence --config.cirag.prompt_format=compact the candidates are sentences
(docs/distillation.md), and no triples are needed:
  --config.data.dir=2wikimultihopqa --config.data.split=train
  --config.data.corpus=selected_questions --config.encoder.model=shipped:aligner
  --config.retriever.units=sentence (2026-11-25, two CPU cores beside other work, jax 0.10.2, commit
  14c1657): 494 trajectories over 3,112 passages (6 questions lack a sentence), 1.76 rounds each
  (203 of one, 206 of two, 85 of three), 15 candidates and 1.34 core sentences a round, 99.8 %
  solved; one round of 870 kept none, so that keeping nothing is hardly taught; 128 s. 291 of them
  with --config.min_steps=2.
Record (``llm``; commit 9604270): SmolLM2-135M as its own teacher, --config.data.limit=3
--config.cirag.max_steps=2 --config.cirag.few_shot=true: all three dropped, for their turns do not
parse; 45 s. Qwen2.5-Coder-1.5B-Instruct (Q4_K_M), --config.data.dir=musique
--config.data.fold=train --config.data.limit=30 (2026-11-25, two CPU cores of an AMD EPYC beside a
training, commit 7d5c4c3; the other overrides: experiments/RESULTS.md): 30 trajectories of three
rounds and one fact each, none stops; one has a right answer; 1,225 s. ``mixture``: not yet run with
a real model.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import common
from configs.methods import blocks

PRESETS = ("annotations", "llm", "mixture")  # teachers, see cirag_jax/distill/teachers.py


def get_config(preset: str = "annotations") -> Any:
    """What is asked, of whom, and what is kept."""
    if preset not in PRESETS:
        raise common.no_preset(preset, PRESETS)
    config = blocks.method("cirag", reader=192)  # The reader is asked only with config.answer.
    del config.question, config.integrator
    config.cirag.num_candidates = 15  # The paper has 30; a small student's context holds fewer.
    config.data.split = "train"

    config.teacher = ConfigDict()
    config.teacher.kind = preset  # annotations | llm | mixture
    # annotations: facts of training questions that no triple states stand in their gold passages;
    # of sentences, the passage that a query is to find is there even where it is not retrieved.
    config.teacher.insert_missing = True
    config.teacher.share = 0.5  # mixture: the part of the questions that the language model gets.
    config.teacher.llm = blocks.role(max_tokens=384)

    # Also answer from what the language model collected: says which of its trajectories are right.
    config.answer = False
    # all | parsed (no problem in any turn of the teacher) | correct_only (parsed and solved).
    config.keep = "parsed"
    # Those of fewer rounds are left out: from many of them a student learns to stop at once.
    config.min_steps = 1
    config.limit = 0  # Most trajectories that are written, drawn at random; 0: all.
    return config
