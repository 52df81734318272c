"""Makes pages to look at runs: ``python launch/report.py --config.run=W --workdir=W2``.

W is the workdir of a run of launch/answer.py or launch/distill.py: W2/trace.html shows it step by
step; or one of launch/compare.py: W2/index.html shows its runs side by side, with their traces.
Other runs of the same questions: --config.runs="('A=W1', 'B=W2')". The pages open in any browser,
without a server or a network.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Writes the page that the config describes."""
    from cirag_jax.commands import results

    return results.report(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/report.py")
