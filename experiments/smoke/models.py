"""Writes a tiny decoder with random weights, which ``--scale=smoke`` trains adapters for.

    python experiments/smoke/models.py --workdir=M

Writes M/decoder, whose tokenizer knows the words of experiments/smoke/files.py.
"""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.io import standard_streams
from cirag_jax.methods.cirag import compact
from experiments.smoke import files
from tests import tiny_decoder

VOCABULARY = 1024


def write(folder: pathlib.Path) -> None:
    """Writes the decoder and its tokenizer to ``folder/decoder``."""
    sentences = [fact.sentence for facts in files.world().values() for fact in facts]
    lines = [f"1. {fact[0]} | {fact[1]} | {fact[2]}" for f in files.world().values() for fact in f]
    turns = compact.messages("Question?", (), ())
    texts = [*sentences, *lines, *(message.text for message in turns), "Keep: 1 2\nNext: done"]
    tiny_decoder.folder(
        folder / "decoder",
        texts=texts,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        max_position_embeddings=2048,
    )


if __name__ == "__main__":
    with standard_streams():
        parser = argparse.ArgumentParser(prog="python experiments/smoke/models.py")
        parser.add_argument("--workdir", required=True, type=pathlib.Path)
        write(parser.parse_args().workdir)
        print(json.dumps({"complete": True}))
