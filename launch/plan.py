"""Estimates a training run's cost: ``python launch/plan.py --config=configs/integrator.py:paper``.

Prints the memory per device, the communication between devices, and the time of the run at an
assumed share of the GPU's peak speed. Needs neither the devices nor the weights. With
``--config=configs/index.py --config.examples=21000000``, prints disk space and memory of an index.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    from cirag_jax.commands import plan

    return plan.plan(config)


def extend(config):
    """Adds the fields of the estimate to the config of a training run."""
    from ml_collections.config_dict import placeholder

    if "mesh" in config:
        config.mesh.devices = placeholder(
            int
        )  # Number of devices; null is the product of the mesh's sizes.
    config.gpu = placeholder(str)  # Kind of GPU, from the table in training/mfu.py; null is all.
    config.memory_gib = placeholder(float)  # GiB of memory per device; null is the GPU's.
    config.peak_share = 0.4  # Assumed share of the GPU's peak speed that training reaches.
    # Number of training examples (aligner: chains, or their prefixes with epoch=prefixes;
    # cross-encoder: positives), which determines the number of steps; null is unknown. For an
    # index, the number of passages; null counts those of config.data.dir.
    config.examples = placeholder(int)


if __name__ == "__main__":
    cli.run(main, "configs/aligner.py", default_workdir="runs/plan", extend=extend)
