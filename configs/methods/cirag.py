"""CIRAG: construction and integration of evidence, then the answer cascade (docs/answering.md).

python launch/answer.py --config=configs/methods/cirag.py:small --config.data.dir=DATA --workdir=W
python launch/answer.py --config=configs/methods/cirag.py:small --config.question="..."

Needs a dataset folder (``small`` also accepts --config.documents), or none for the built-in
dataset. Writes answers, metrics and a trace to W; run the same command to resume.

Presets: ``small`` runs on a laptop's CPU with this repository's models (cirag_jax/shipped):
candidates are sentences, the aligner is the integrator, and the reader writes facts and an answer.
All other presets read extracted triples. Without a preset: the paper's setting (L = 4, K = 10, N =
30), with this package's untrained small models. ``llm`` has two rounds, 15 candidates and one
example; SmolLM2-135M then follows the integrator's format. ``medium`` is the paper's setting with a
model of 1.5B parameters, which chooses numbered candidates after two examples, and whose answers
must occur in the evidence. ``paper`` has the paper's models (Qwen2.5-7B-Instruct,
bge-small-en-v1.5), for a GPU; not yet run. ``code`` is the same as ``paper``: the paper's code
could not be obtained.

Record of ``small`` (--config.data.dir=2wikimultihopqa --config.data.split=dev
--config.data.fold=dev_tune --config.data.limit=80 --config.data.random=true
--config.data.corpus=ircot_full; 2026-11-25, 2 CPU cores of an AMD EPYC, commit 516984c): EM 50.0,
F1 60.0, passage R@3 90.9, R@5 96.3, sentence R@5 92.2; 17 answers were forced; 216 s, of which
loading and embedding take 77 s. ``link_bonus`` and ``keep`` were chosen on this fold. With the
present reader (commit b2134ea): EM 47.5, F1 56.4; this reader is far better on other datasets
(experiments/RESULTS.md).

Record of ``medium`` (Qwen2.5-Coder-1.5B-Instruct Q4_K_M; 2026-11-25, the same machine):
  --config.data.dir=musique --config.data.only_with_triples=true, 100 questions, with one example
  and without ``grounded_answers`` (commit 8b8d510): EM 11.0, F1 16.2, passage R@5 59.3; 2,908 s, 12
  GB.
  --config.data.dir=2wikimultihopqa --config.data.split=dev --config.data.fold=dev_report
  --config.data.limit=50 --config.data.random=true --config.data.corpus=per_question
  --config.cirag.units=sentence --config.cirag.num_candidates=15
  --config.encoder.model=shipped:aligner --config.retriever.units=sentence (commit 60718d3): EM
  32.0, F1 46.4, R@5 94.0; 2,562 s.
  With keys and values in bfloat16 (commit 151a30e), 16 concurrent questions of MuSiQue take 8.4 GB
  instead of 11.7, measured over the first ten minutes.

Record of ``llm`` (--config.data.dir=musique --config.data.only_with_triples=true, 100 questions,
1,886 passages; 2026-11-22, 2 busy CPU cores, Python 3.11, jax 0.10.2, commit 50746bd): EM 1.0, F1
4.2, Acc 5.0, passage Recall@3 45.2, Recall@5 54.4; 85 answers from triples, 15 from passages; 643
generations, 86 % of their prompt tokens reused; 13 min 50 s. Killed twice and resumed (commits
b1361ce, d317ff3), it wrote the same predictions.jsonl with 643 generations in total.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("cirag", integrator=384)
    if preset == "code":
        preset = "paper"
    if preset == "small":
        config.cirag.units = "sentence"
        config.cirag.integrator = "aligner"
        config.cirag.keep = 2
        config.cirag.link_bonus = 0.3
        config.cirag.granularities = ("sentence",)
        blocks.may_refuse_own_documents(config.cirag)
        return blocks.shipped(config)
    if preset == "llm":
        config.cirag.max_steps = 2
        config.cirag.num_candidates = 15
        config.cirag.prefilled_headers = config.cirag.few_shot = True
        return blocks.preset(config, "small")
    if preset == "medium":
        config.cirag.prompt_format = "compact"  # Four rounds of 30 candidates fit 4,096 tokens.
        config.cirag.few_shot = True
        # Otherwise the model keeps the first candidate and repeats its question forever.
        config.cirag.only_new, config.cirag.on_repeat = True, "chain"
        config.cirag.grounded_answers = True  # The model seldom refuses by itself.
        config.integrator.max_tokens = 64
    if preset == "paper":
        # The paper states no limits; these cut nothing in practice.
        config.integrator.max_tokens = config.reader.max_tokens = 1024
    return blocks.preset(config, preset)
