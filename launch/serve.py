"""Serves models over HTTP: ``python launch/serve.py --config.model=MODEL``.

The server understands OpenAI's API for chats, completions and embeddings (docs/generation.md). It
runs until Ctrl-C or SIGTERM.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    from cirag_jax.commands import serve

    return serve.serve(config)


if __name__ == "__main__":
    cli.run(main, "configs/serve.py", default_workdir="runs/serve", shared=True)
