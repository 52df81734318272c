r"""Writes a teacher's trajectories, the training data of configs/integrator.py.

python launch/distill.py --config=configs/trajectories.py:annotations --config.data.dir=FOLDER \
    --config.data.fold=train --workdir=T

Needs a dataset folder with triples (openie.jsonl or --config.triples), or config.cirag.units set to
sentence. Writes trajectories to T (docs/distillation.md); run the same command to resume.

Presets: ``annotations`` (the default) decides from gold evidence, without a language model. ``llm``
uses ``config.teacher.llm``. ``paper`` is
CIRAG's teacher: Qwen-max over an OpenAI-compatible server, at temperature 0, on 1,000 random
training questions. Run it once for each of the three datasets, and train
configs/integrator.py:paper on the three workdirs. Not yet run.

Record of ``annotations`` (2 CPU cores, jax 0.10.2):
  --config.data.dir=musique --config.data.fold=train (2026-11-24, commit a60aeca): 60 trajectories,
  1.95 rounds each, 52 % solved (every hop supported), none stopped unsolved, 29 % of the rounds
  without a core triple; 106 s.
Older records, in which teachers inserted no facts and could stop with unsupported hops
(2026-11-22, commit 82b4ef8 unless stated otherwise):
  --config.data.dir=musique --config.data.fold=train: 60 trajectories, 2.75 rounds each, 40 %
  solved, 53 % stopped unsolved, 90 % of the gold passages retrieved; in 53 % of the rounds no
  candidate supported an open hop; 96 s. With fold=test: 30, 2.67 rounds each, 40 % solved; 56 s.
  --config.data.limit=250 (built-in): 250 trajectories, 1.95 rounds each, 99 % solved; 90 s.
  --config.data.dir=2wikimultihopqa --config.data.split=train --config.triples=G
  --config.data.limit=150 (commit ebd761e; G has only the dataset's own triples, from
  launch/extract.py --config.import_openie=gold_triples.jsonl): 150 trajectories, 1.73 rounds each,
  4.6 candidates and 1.4 core triples per round (none in 4 % of the rounds), 99 % solved; 55 s.
  With --config.data.limit=300 --config.min_steps=2 --config.limit=110 (commit 9604270): 110, 2.37
  rounds each, 5.5 candidates and 1.1 core triples per round (none in 7 %), 93 % solved; 121 s.
  --config.data.dir=2wikimultihopqa --config.data.split=dev --config.data.limit=30
  --config.triples=X (just before commit 9604270; X from configs/extract.py): 30 trajectories, 3.07
  rounds each, 20 % solved, 93 % of the gold passages retrieved; in 66 % of the rounds no candidate
  supported a hop, because the extractor misses many facts; 33 s.
Record over sentences (--config.cirag.units=sentence --config.cirag.prompt_format=compact
--config.data.dir=2wikimultihopqa --config.data.split=train --config.data.corpus=selected_questions
--config.encoder.model=shipped:aligner --config.retriever.units=sentence; 2026-11-25, commit
14c1657): 494 trajectories over 3,112 passages (6 questions without gold sentences), 1.76 rounds
each (203 of one, 206 of two, 85 of three), 15 candidates and 1.34 core sentences per round, 99.8 %
solved; 128 s. Only one of 870 rounds keeps nothing, so students hardly learn to do so. With
--config.min_steps=2: 291 trajectories.
Record of ``llm``:
  SmolLM2-135M as its own teacher (commit 9604270; --config.data.limit=3 --config.cirag.max_steps=2
  --config.cirag.few_shot=true): all three dropped, because they do not parse; 45 s.
  Qwen2.5-Coder-1.5B-Instruct Q4_K_M (2026-11-25, AMD EPYC, commit 7d5c4c3;
  --config.data.dir=musique --config.data.fold=train --config.data.limit=30, see
  experiments/RESULTS.md): 30 trajectories of three rounds and one fact each, none stops, one has a
  right answer; 1,225 s. At that commit, annotated facts were also inserted for ``llm``.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import common
from configs.methods import blocks, cirag

# The teachers of cirag_jax/distill/teachers.py, and the paper's.
PRESETS = ("annotations", "llm", "paper")


def get_config(preset: str = "annotations") -> Any:
    if preset not in PRESETS:
        raise common.unknown_preset(preset, PRESETS)
    is_paper = preset == "paper"
    # The paper's student answers with configs/methods/cirag.py:paper, so the teacher has its L, K,
    # N, encoder and limits.
    config = cirag.get_config("paper" if is_paper else "")
    max_tokens = config.integrator.max_tokens
    if not is_paper:
        config.cirag.num_candidates = 15  # The paper has 30, too many for a small student.
        config.reader.max_tokens = 192  # The reader runs only with config.answer.
    del config.question, config.integrator
    config.data.split = "train"  # paper: 1,000 questions of each of three datasets (section 4.1)

    config.teacher = ConfigDict()
    config.teacher.kind = "llm" if is_paper else preset  # Teacher: annotations | llm
    config.teacher.llm = blocks.role(max_tokens)
    if is_paper:
        config.teacher.llm.backend = "openai"  # Name the server with config.teacher.llm.base_url.
        config.teacher.llm.model = "qwen-max-2025-01-25"

    # Also answer from the collected evidence, to find out which trajectories of a language model
    # are right.
    config.answer = False
    # Trajectories to keep: all | parsed (every turn is well-formed) | correct_only (also solved)
    config.keep = "parsed"
    # Minimum rounds of a trajectory; many short trajectories teach students to stop too early.
    config.min_steps = 1
    config.limit = 0  # Maximum trajectories to write, drawn at random; 0 is all.
    return config
