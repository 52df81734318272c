"""Plans a training: ``python launch/plan.py --config=configs/integrator.py:paper``.

Says what a step takes of each device's memory, what the devices exchange, and how long the run is
where a stated share of the GPU's peak is reached. Neither the devices nor the weights need exist.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Plans the training that the config describes."""
    from cirag_jax.commands import plan

    return plan.plan(config)


def extend(config):
    """What a plan is told beside the training's own settings."""
    from ml_collections.config_dict import placeholder

    if "mesh" in config:
        config.mesh.devices = placeholder(int)  # null: as many as the mesh's sizes say.
    config.gpu = placeholder(str)  # One of training/mfu.py's table; null: all of them.
    config.memory_gib = placeholder(float)  # Of a device; null: what the table says.
    config.peak_share = 0.4  # Assumed: of the GPU's peak that the training reaches.
    # Training examples (of the aligner: chains; of the cross-encoder: positives), on which the
    # number of steps depends; null: not known.
    config.examples = placeholder(int)


if __name__ == "__main__":
    cli.run(main, "configs/aligner.py", default_workdir="runs/plan", extend=extend)
