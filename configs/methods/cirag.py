"""CIRAG: construction-integration, then the cascade.

python launch/answer.py --config=configs/methods/cirag.py --config.data.dir=FOLDER --workdir=W
python launch/answer.py --config=configs/methods/cirag.py:small --config.question="..."

Presets: ``small`` answers from any corpus on a laptop's CPU, with the models that come with this
repository (cirag_jax/shipped): sentences are the candidates, the aligner integrates, the
reader writes the facts and the answer. (none) is the paper's setting (L = 4, K = 10, N = 30), which
reads extracted triples, with this package's untrained small models; ``llm`` the same with two
rounds, 15 candidates and a worked example, so that SmolLM2-135M keeps the integrator's format;
``medium`` is the paper's setting with a model of 1.5B parameters, which chooses numbered candidates
after two examples, and whose answers must stand in what it read; ``paper`` names the paper's models
(Qwen2.5-7B-Instruct, bge-small-en-v1.5), for a GPU: not yet run. ``code`` is another name of it:
the paper's code could not be obtained.

Record of ``small`` (--config.data.dir=2wikimultihopqa --config.data.split=dev
--config.data.fold=dev_tune --config.data.limit=80 --config.data.random=true
--config.data.corpus=ircot_full; 2026-11-25, 2 CPU cores of an AMD EPYC beside light work, commit
516984c): 216 seconds, 77 of them loading and embedding; EM 50.0, F1 60.0 (experiments/RESULTS.md),
passage R@3 90.9, R@5 96.3, sentence R@5 92.2; 17 answers were forced. ``link_bonus`` and ``keep``
were chosen on this fold. With the reader that has come along since (commit b2134ea): EM 47.5, F1
56.4, and far more on other sets.

Record (``medium``, Qwen2.5-Coder-1.5B-Instruct Q4_K_M, --config.data.dir=musique
--config.data.only_with_triples=true, 100 questions; 2026-11-25, the same machine beside tests,
commit 8b8d510): 2,908 seconds, resumed once; EM 11.0, F1 16.2, passage R@5 59.3, 12 GB. That was
with one example and without ``grounded_answers``. With both, --config.data.dir=2wikimultihopqa
--config.data.split=dev --config.data.fold=dev_report --config.data.limit=50
--config.data.random=true --config.data.corpus=per_question --config.cirag.units=sentence
--config.cirag.num_candidates=15 --config.encoder.model=shipped:aligner
--config.retriever.units=sentence (commit 60718d3): 2,562 seconds; EM 32.0, F1 46.4, R@5 94.0.
Since keys and values are bfloat16, too (commit 151a30e): 8.4 GB instead of 11.7 with 16 questions
of MuSiQue in flight, in ten minutes beside other work, in which none came to its end.

Record (``llm``, --config.data.dir=musique --config.data.only_with_triples=true; 100 questions,
1,886 passages; 2026-11-22, 2 shared CPU cores under load 3 to 10, Python 3.11, jax 0.10.2, commit
50746bd): 13 min 50 s; EM 1.0, F1 4.2, Acc 5.0, passage Recall@3 45.2, Recall@5 54.4; 85 answered
from triples, 15 from passages; 643 generations, 86 % of their prompt tokens reused. Killed twice
and resumed (commits b1361ce, d317ff3): the same predictions.jsonl, the same 643 generations in all.
The setting without a preset: not yet run on a whole data set.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    """CIRAG as the preset says."""
    config = blocks.method("cirag", integrator=384)
    if preset == "code":
        preset = "paper"  # Its code could not be obtained; what the paper leaves open is a switch.
    if preset == "small":
        config.cirag.units = "sentence"
        config.cirag.integrator = "aligner"
        config.cirag.keep = 2
        config.cirag.link_bonus = 0.3
        config.cirag.granularities = ("sentence",)
        config.cirag.force_answer = True
        return blocks.shipped(config)
    if preset == "llm":
        config.cirag.max_steps = 2
        config.cirag.num_candidates = 15
        config.cirag.prefilled_headers = config.cirag.few_shot = True
        return blocks.preset(config, "small")
    if preset == "medium":
        config.cirag.prompt_format = "compact"  # Four rounds of 30 candidates fit 4,096 tokens.
        config.cirag.few_shot = True
        # Left alone, this model keeps the first candidate and asks the same question for ever.
        config.cirag.only_new, config.cirag.on_repeat = True, "chain"
        config.cirag.grounded_answers = True  # It seldom refuses by itself.
        config.integrator.max_tokens = 64
    return blocks.preset(config, preset)
