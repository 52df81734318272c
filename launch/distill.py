"""Collects training data from language models: conversations, trajectories or chains of triples.

python launch/distill.py --config=configs/methods/kirag.py --config.model=TEACHER --workdir=E
python launch/distill.py --config=configs/trajectories.py --workdir=T
python launch/distill.py --config=configs/chains.py:trace --workdir=C

The first command writes ``examples.jsonl`` for the roles of a method, the second
``trajectories.jsonl`` for CIRAG's integrator, the third ``chains.jsonl`` for the aligner. The first
two also write their settings (``.json``). The same command resumes an interrupted run.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    if "teacher" in config:
        from cirag_jax.commands import distill

        return distill.distill(config, workdir)
    if "examples" in config:
        from cirag_jax.commands import examples

        return examples.collect(config, workdir)
    from cirag_jax.commands import chains

    return chains.build(config, workdir)


def extend(config):
    """Adds the fields for collecting examples to the config of a method."""
    from ml_collections import ConfigDict
    from ml_collections.config_dict import placeholder

    if "question" not in config:  # Not a config of configs/methods.
        return
    config.data.split = "train"  # The questions that the teacher answers.
    config.examples = ConfigDict()
    # Roles whose conversations are kept: "('reasoner','summarizer')"; () is all roles.
    config.examples.roles = ()
    # Questions whose conversations are kept: all | correct (exact match, by config.profile) |
    # found (gold passages retrieved) | judge (correct according to examples.judgements)
    config.examples.keep = "correct"
    config.examples.found_at = 5  # keep=found: among this number of best passages; 0 is all.
    # keep=judge: a workdir of configs/judge.py that judged this workdir.
    config.examples.judgements = placeholder(str)
    # Targets: teacher (its responses) | dualrag_ft (dualrag only: labels by gold passages, and
    # prompts without worked examples)
    config.examples.labels = "teacher"
    # Keep the worked examples in the prompts. false needs a method with the setting few_shot; the
    # student is then used with few_shot=false.
    config.examples.few_shot = True


if __name__ == "__main__":
    default = "configs/trajectories.py"
    cli.run(main, default, resumes=True, several_processes=True, extend=extend)
