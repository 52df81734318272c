"""Makes web pages about runs: ``python launch/report.py --config.run=W --workdir=W2``.

If W is a workdir of launch/answer.py or launch/distill.py, W2/trace.html shows the run step by
step. If W is a workdir of launch/compare.py, W2/index.html shows its runs side by side, with their
traces. ``--config.runs="('A=W1', 'B=W2')"`` shows other runs of the same questions side by side.
The pages open in any browser, without a server or a network.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    from cirag_jax.commands import results

    return results.report(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/report.py")
