"""Compares the communication between devices in a train step with its theoretical amount.

The trainers' steps (aligner, integrator, cross-encoder) are compiled for fake CPU devices, as in
`launch/plan.py`. Collectives are counted in the compiled programs; one in a loop counts once per
iteration. This needs only a CPU and no weights, and measures no times. A GPU's compiler may combine
or split collectives, which changes their number. Prints a table in Markdown and one JSON object.
Exits with 1 if a mesh differs from its theory by more than 10 %.

    python experiments/benchmarks/scaling.py [--components=aligner,integrator] [--meshes=8x1x1]
        [--dtype=bfloat16] [--processes=2]

With ``--processes``, real processes share the devices of every mesh and compile together; smaller
meshes are skipped. In bfloat16, only the encoders' steps are counted, if tensor is 1,
because XLA's CPU compiler exchanges activations in fp32.

A mesh is data x fsdp x tensor. Bytes are the size of the complete array on one device: the result
of an all-gather, the input of a reduce-scatter, and the sum of an all-reduce (for which a ring
moves up to twice as many bytes). `encoder_theory` and `adapter_theory` compute ``theory`` from
shapes only. The models are tiny, in fp32 unless ``--dtype`` is set, and all texts have the same
length.

The necessary communication of a step, with model width D, L layers, and A the bytes of all hidden
states of one device's rows in a step (tokens x D x 4):

- data: each shard has the gradient of its own rows. The sum of the gradients is as large
  as the trained parameters. It is needed once per step, for any number of chunks.
- fsdp: each device stores a part of the weights and computes with all of them. An encoder's weights
  are gathered once per step; the layers' weights are gathered in the dtype of the computation. The
  gradient is scattered once, in fp32, and then summed over data groups. The base of an adapter does
  not fit on a device, so every micro-batch gathers each layer's kernels forward and backward, and
  the output layer once. The embedding table is not gathered; the embeddings of tokens are exchanged
  (A, and the tokens' ids). Every device has the complete adapter.
- tensor: a product over a split axis gives a part of each sum on every device, which needs an
  all-reduce of A. A layer has two such products forward (attention's output, feed-forward's second)
  and two backward (the inputs of attention and of feed-forward). The embeddings add one, because
  their vocabulary is split. The total is (4 L + 1) A, without weights. An adapter adds its low-rank
  states, R / D of A each: two per layer forward (o_proj and down_proj have a split input), and five
  backward (the others have a split output). Its loss over a split vocabulary adds A and three
  numbers per token.
- The aligner's loss is over all texts, so each device receives the embeddings of all shards.

Results: docs/cluster.md.
"""

import argparse
import dataclasses
import importlib
import json
import logging
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax

from cirag_jax.commands import plan
from cirag_jax.errors import UserError, check_choice
from cirag_jax.io import standard_streams
from cirag_jax.reports import tables
from launch.plan import extend

MESHES = (
    *("1x1x1", "2x1x1", "4x1x1", "8x1x1", "1x2x1", "1x4x1", "1x8x1", "1x1x2", "1x1x4", "1x1x8"),
    *("4x2x1", "4x1x2", "2x2x2"),
)
TOLERANCE = 0.1  # allowed relative difference from the theory

LENGTH = 64  # tokens of a text
VOCABULARY, WIDTH, FEED_FORWARD, LAYERS, HEADS, POSITIONS = 2048, 64, 256, 2, 8, 128
RANK = 16

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}
_ENCODER = {"model_type": "bert", "type_vocab_size": 2, "hidden_act": "gelu"}
_DECODER = {
    "model_type": "llama",
    "num_key_value_heads": HEADS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}

# Each config has 128 texts, 128 pairs or 16 rows; every mesh has several chunks of them.
_SETTINGS: dict[str, dict[str, Any]] = {
    "aligner": {
        "batch_size": 16,
        "prefixes_per_question": 1,
        "num_negatives": 6,
        "query_max_length": LENGTH,
        "unit_max_length": LENGTH,
        "chunk_tokens": 8 * LENGTH,
    },
    "integrator": {
        "length": LENGTH,
        "buckets": (),
        "batch_size": 16,
        "chunk": LENGTH,
        "lora.rank": RANK,
    },
    "cross_encoder": {
        "max_length": LENGTH,
        "buckets": (LENGTH,),
        "targets_per_step": 32,
        "negatives.own": 2,
        "chunk_rows": 64,
    },
}
TEXTS, ROWS = 128, 16


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Sizes of a mesh's axes."""

    data: int
    fsdp: int
    tensor: int

    @property
    def shards(self) -> int:
        """The number of shards of the batch."""
        return self.data * self.fsdp

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.shards * self.tensor

    @property
    def name(self) -> str:
        """The name on the command line."""
        return f"{self.data}x{self.fsdp}x{self.tensor}"


def encoder_theory(component: str, mesh: Mesh, dtype: str) -> float:
    """Returns the bytes that a device exchanges in a step of the aligner or cross-encoder."""
    d, f = WIDTH, FEED_FORWARD
    rounded = LAYERS * (4 * d * d + 2 * d * f)  # to the dtype of the computation
    kernels = VOCABULARY * d + rounded  # split over fsdp and tensor
    tables = (POSITIONS + 2) * d  # split over fsdp
    wide_biases = LAYERS * (3 * d + f)  # split over tensor
    others = 2 * d + LAYERS * 6 * d  # norms, biases of outputs
    if component == "cross_encoder":
        others += d * d + 2 * d + 1
    gathered = kernels / mesh.tensor + tables
    whole = wide_biases / mesh.tensor + others
    numbers = 0.0
    if mesh.fsdp > 1:
        numbers += 2 * gathered + whole
        numbers -= (1 - _ITEM_BYTES[dtype] / 4) * rounded / mesh.tensor
        if mesh.data > 1:
            numbers += gathered / mesh.fsdp
    elif mesh.data > 1:
        numbers += gathered + whole
    if component == "aligner" and mesh.shards > 1:
        numbers += TEXTS * d
    if mesh.tensor > 1:
        numbers += (4 * LAYERS + 1) * TEXTS * LENGTH / mesh.shards * d
    return 4 * numbers


def adapter_theory(component: str, mesh: Mesh, dtype: str) -> float:
    """Returns the bytes that a device exchanges in a step of the integrator, in fp32."""
    del component, dtype
    d, f = WIDTH, FEED_FORWARD
    tokens = ROWS * LENGTH / mesh.shards
    numbers = 0.0
    if mesh.shards > 1:  # the output of q, k, v, gate and up is split, and the input of o and down
        numbers += LAYERS * RANK * (7 * d + (4 * d + 3 * f) / mesh.tensor)
    if mesh.fsdp > 1:
        kernels = LAYERS * (4 * d * d + 3 * d * f)
        micro_batches = ROWS / mesh.shards
        numbers += micro_batches * (2 * kernels + VOCABULARY * d) / mesh.tensor
        numbers += tokens * (d + mesh.fsdp)
    if mesh.tensor > 1:
        numbers += tokens * ((4 * LAYERS + 2) * d + 7 * LAYERS * RANK + 3)
    return 4 * numbers


_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_THEORY = {"aligner": encoder_theory, "integrator": adapter_theory, "cross_encoder": encoder_theory}


def make_config(component: str, mesh: Mesh, dtype: str, folder: pathlib.Path) -> Any:
    """Returns the component's default config, with a tiny model in ``folder``."""
    config = importlib.import_module(f"configs.{component}").get_config()
    extend(config)
    architecture = _DECODER if component == "integrator" else _ENCODER
    (folder / "config.json").write_text(json.dumps({**_SHAPE, **architecture}))
    config.model.spec, config.model.dtype = str(folder), dtype
    if component == "cross_encoder":
        config.encoder.model = str(folder)
    config.update_from_flattened_dict(_SETTINGS[component])
    config.mesh.update({**dataclasses.asdict(mesh), "devices": mesh.devices})
    return config


def compile_step(component: str, mesh: Mesh, dtype: str = "float32") -> dict[str, Any]:
    """Compiles a step, and returns a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(component, mesh, dtype, pathlib.Path(folder))
        rehearsal = plan.rehearse(config).rehearsal
    exchanged = rehearsal.exchanged()
    num_bytes = sum(each.bytes for each in exchanged.values())
    theory = _THEORY[component](component, mesh, dtype)
    within = abs(num_bytes - theory) <= TOLERANCE * theory
    return {
        "component": component,
        "mesh": dataclasses.asdict(mesh),
        "devices": mesh.devices,
        "dtype": dtype,
        "processes": jax.process_count(),
        "collectives": {name: each._asdict() for name, each in exchanged.items()},
        "bytes": num_bytes,
        "theory_bytes": round(theory),
        "ratio": round(num_bytes / theory, 4) if theory else None,
        "within": within,
        "peak_bytes": rehearsal.peak,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows in Markdown."""
    head = ("step", "data x fsdp x tensor", "dtype", "processes", "collectives", "KiB", "theory")
    cells: list[tuple[str, ...]] = [(*head, "ratio", "within 10 %", "peak, MiB")]
    for row in rows:
        numbers = [f"{each['number']} {name}" for name, each in sorted(row["collectives"].items())]
        cells.append(
            (
                row["component"],
                " x ".join(str(size) for size in row["mesh"].values()),
                row["dtype"],
                str(row["processes"]),
                ", ".join(numbers) or "none",
                f"{row['bytes'] / 2**10:,.1f}",
                f"{row['theory_bytes'] / 2**10:,.1f}",
                "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
                "yes" if row["within"] else "NO",
                f"{row['peak_bytes'] / 2**20:.1f}",
            )
        )
    return tables.markdown(cells)


def _names(text: str, options: Sequence[str], flag: str) -> list[str]:
    names = text.split(",")
    for name in names:
        check_choice(f"--{flag}", name, options)
    return names


def compile_all(
    components: Sequence[str], meshes: Sequence[Mesh], dtype: str
) -> list[dict[str, Any]]:
    """Returns all rows, and prints each row as soon as it is measured."""
    rows = []
    for component in components:
        for mesh in meshes:
            rows.append(compile_step(component, mesh, dtype))
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    return rows


def in_processes(count: int, meshes: Sequence[Mesh], argv: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the rows of ``count`` processes, with one run per number of devices."""
    rows = []
    for devices in sorted({mesh.devices for mesh in meshes}):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        names = [mesh.name for mesh in meshes if mesh.devices == devices]
        command = [sys.executable, __file__, *argv, f"--meshes={','.join(names)}"]
        started = [
            subprocess.Popen(
                [*command, f"--join={address}", f"--process_id={index}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if index else None,
                text=True,
            )
            for index in range(count)
        ]
        outputs = [process.communicate()[0] for process in started]
        if any(process.returncode not in (0, 1) for process in started):
            raise UserError(f"one of the {count} processes of {devices} devices failed")
        rows += json.loads(outputs[0].splitlines()[-1])["rows"]  # after the table
    return rows


def main(argv: list[str]) -> int:
    """Prints the table and a JSON object; returns 1 if a mesh differs from its theory."""
    logging.basicConfig(level=logging.WARNING)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--components", default=",".join(_THEORY), help="comma-separated")
    parser.add_argument("--meshes", default=",".join(MESHES), help="data x fsdp x tensor")
    parser.add_argument("--dtype", default="float32", choices=tuple(_ITEM_BYTES))
    parser.add_argument("--processes", type=int, default=1, help="processes that share the devices")
    parser.add_argument("--join", help=argparse.SUPPRESS)  # address of the first process
    parser.add_argument("--process_id", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    try:
        components = _names(flags.components, list(_THEORY), "components")
        meshes = [
            Mesh(*map(int, name.split("x"))) for name in _names(flags.meshes, MESHES, "meshes")
        ]
        if flags.dtype == "bfloat16":
            components = [name for name in components if name != "integrator"]
            meshes = [mesh for mesh in meshes if mesh.tensor == 1]
        meshes = [mesh for mesh in meshes if mesh.devices % flags.processes == 0]
        if not components or not meshes:
            raise UserError("no mesh or component remains with these flags")
        if flags.processes > 1 and not flags.join:
            rows = in_processes(flags.processes, meshes, argv)
        else:
            # Adding devices later would drop the compiled programs.
            max_devices = max(mesh.devices for mesh in meshes)
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", max_devices // flags.processes)
            if flags.join:
                jax.distributed.initialize(flags.join, flags.processes, flags.process_id)
            rows = compile_all(components, meshes, flags.dtype)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(rows))
    print()
    print(json.dumps({"jax": jax.__version__, "load": round(os.getloadavg()[0], 1), "rows": rows}))
    return 0 if all(row["within"] for row in rows) else 1


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main(sys.argv[1:]))
