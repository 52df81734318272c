"""A training step rehearsed on shapes: which programs it runs, and what lies in memory meanwhile.

The trainers' own steps run, with a `Shape` for every array and a `Rehearsal` to call what is
compiled. Each program is compiled for the mesh and asked for its memory and its collectives; none
is run. What a step holds between its programs is known too: like an array, a `Shape` takes memory
until nobody refers to it.

The compiler is that of the mesh's devices. A CPU's computes bfloat16 in fp32; without the two
options of `_options` it would also keep all weights and stored activations in fp32.
"""

import contextlib
import dataclasses
import gc
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from cirag_jax import sharding

_OPERATIONS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
)  # fmt: skip
_ITEM_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}


class Shape(jax.ShapeDtypeStruct):
    """Stands for an array on a mesh, and counts in ``rehearsal.held`` while it is there."""

    def __init__(self, like: Any, placed: jax.sharding.Sharding, rehearsal: "Rehearsal"):
        super().__init__(like.shape, like.dtype, sharding=placed)
        self._rehearsal = rehearsal
        rehearsal.held += bytes_of(self)

    def __del__(self):
        self._rehearsal.held -= bytes_of(self)


@contextlib.contextmanager
def quick_collection() -> Iterator[None]:
    """A rehearsal collects garbage at every call: what was there before it (the libraries, above
    all) is left out of that.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def bytes_of(tree: Any) -> int:
    """Bytes that a tree's arrays, or shapes with a sharding, have on each device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


@dataclasses.dataclass
class Program:
    """One compiled function of a step.

    Attributes:
      name: of the function.
      outputs: its results' shapes and shardings.
      arguments, results, temporaries, aliased: bytes on each device.
      collectives: operation -> its number and bytes on each device, loops counted out.
      calls: how often a step runs it.
    """

    name: str
    outputs: Any
    arguments: int
    results: int
    temporaries: int
    aliased: int
    collectives: dict[str, "Collective"]
    calls: int = 0


class Rehearsal:
    """Calls compiled functions with shapes; give it to a training step as ``run``.

    Attributes:
      held: bytes on each device of all shapes that are alive.
      placed: bytes on each device of the arrays that the step places itself, its batch.
      peak: most bytes on each device while a program ran; ``peak_program``: which one.
      programs: by their functions and arguments.
    """

    def __init__(self, mesh: jax.sharding.Mesh, *, bfloat16: bool = False, loops: int = 1):
        """``bfloat16``: the step computes in it; ``loops``: rounds of a loop of unknown length."""
        self.mesh, self.loops = mesh, loops
        self.held = self.placed = self.peak = 0
        self.peak_program: Program | None = None
        self.programs: dict[Any, Program] = {}
        self._options = _options() if bfloat16 else None

    def place(self, tree: Any) -> Any:
        """Shapes of ``tree`` on the mesh, each by its logical axes (`sharding.state_sharding`)."""
        placed = sharding.state_sharding(tree, self.mesh)
        return jax.tree.map(self.shape, tree, placed)

    def shape(self, like: Any, placed: jax.sharding.Sharding) -> Any:
        """A `Shape` like an array or another shape."""
        return Shape(like, placed, self)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The shapes of ``function``'s results.

        What is not compiled (zeros, the next key) gives what its first argument is.
        """
        if not hasattr(function, "lower"):
            return self.copy(arguments[0])
        program = self.program(function, arguments)
        arrays = [leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "sharding")]
        gc.collect()  # Of what is in no cycle, nothing waits for it.
        own = bytes_of([leaf for leaf in arrays if isinstance(leaf, Shape)])
        beside = self.held - own + max(self.placed - (bytes_of(arrays) - own), 0)
        self.note(program, beside + program.arguments)
        return self.copy(program.outputs)

    def program(self, function: Any, arguments: tuple[Any, ...]) -> Program:
        """``function`` compiled for ``arguments``, once for all like them; it counts as a call."""
        described = map(_describe, jax.tree.leaves(arguments))
        key = (function, jax.tree.structure(arguments), *described)
        if key not in self.programs:
            self.programs[key] = self._compile(function, arguments)
        self.programs[key].calls += 1
        return self.programs[key]

    def exchanged(self) -> dict[str, "Collective"]:
        """Operation -> what of it is in all calls together, on each device."""
        totals: dict[str, Collective] = {}
        for program in self.programs.values():
            for operation, each in program.collectives.items():
                number, size = totals.get(operation, (0, 0))
                totals[operation] = Collective(
                    number + program.calls * each.number, size + program.calls * each.bytes
                )
        return totals

    def note(self, program: Program, before: int) -> None:
        """Takes down what lies in memory while ``program`` runs, and ``before`` it."""
        top = before + program.results + program.temporaries - program.aliased
        if top > self.peak:
            self.peak, self.peak_program = top, program

    def copy(self, tree: Any) -> Any:
        """More shapes like those of ``tree``."""
        return jax.tree.map(lambda leaf: self.shape(leaf, leaf.sharding), tree)

    def _compile(self, function: Any, arguments: tuple[Any, ...]) -> Program:
        lowered = function.lower(*arguments)
        compiled = lowered.compile(compiler_options=self._options)
        memory: Any = compiled.memory_analysis()
        outputs = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            lowered.out_info,
            compiled.output_shardings,
        )
        return Program(
            name=function.__name__.strip("_"),
            outputs=outputs,
            arguments=memory.argument_size_in_bytes,
            results=memory.output_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            aliased=memory.alias_size_in_bytes,
            collectives=collectives(compiled.as_text() or "", self.loops),
        )


def _describe(leaf: Any) -> Any:
    if type(leaf) is int:  # Of a number the type decides what is compiled, unless it is static.
        return int
    return (leaf.shape, leaf.dtype, leaf.sharding) if hasattr(leaf, "sharding") else leaf


def _options() -> dict[str, Any]:
    """Keeps a CPU's fp32 copies of bfloat16 values inside the loop over layers."""
    passes = "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion"
    return {"xla_allow_excess_precision": False, "xla_disable_hlo_passes": passes}


# ------------------------------------------------------------------------------------- collectives

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)")
_ALONE = re.compile(r"replica_groups=(?:\{\{\d+\}|\[\d+,1\]<=)")  # groups of one device
# The same as jax 0.11 writes it: a mesh, and the axes or parts of axes that a group lies along.
_OVER = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_CALLED = re.compile(r"(?:body|calls|to_apply|(?:true|false)_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"([a-z]+\d*)\w*\[([\d,]*)\]")


class Collective(NamedTuple):
    """How many operations of a kind run, and the bytes that one device exchanges in them.

    They are those of the whole array on a device: of what a gather gives, of what a scatter takes.
    """

    number: int
    bytes: int


def collectives(text: str, loops: int = 1) -> dict[str, Collective]:
    """Operation -> what of it is in one run of a compiled program.

    Args:
      text: HLO of the program, after it was partitioned.
      loops: rounds of a loop whose length the text does not say.
    """
    found: dict[str, list[tuple[str, int]]] = {}
    calls: dict[str, list[tuple[str, int]]] = {}
    shapes: dict[str, str] = {}
    name = entry = ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            name = start[1]
            found[name], calls[name], shapes = [], [], {}
            entry = name if line.startswith("ENTRY") else entry
        elif instruction := _INSTRUCTION.match(line):
            result, shape, operation, rest = instruction.groups()
            shapes[result] = shape
            if (kind := operation.removesuffix("-start")) in _OPERATIONS:
                if not _is_alone(rest):
                    taken = re.findall(r"%?([\w.\-]+)", rest.partition(")")[0])
                    operands = " ".join(shapes.get(operand, "") for operand in taken)
                    whole = operands if kind == "reduce-scatter" else shape
                    found[name].append((kind, _array_bytes(whole)))
                continue
            trips = _TRIPS.search(rest)
            times = (int(trips[1]) if trips else loops) if operation == "while" else 1
            calls[name] += [(called, times) for called in _called(rest)]

    totals: dict[str, Collective] = {}
    stack = [(entry, 1)] if entry else []
    while stack:
        name, times = stack.pop()
        for operation, size in found.get(name, ()):
            number, total = totals.get(operation, (0, 0))
            totals[operation] = Collective(number + times, total + times * size)
        stack += [(called, times * more) for called, more in calls.get(name, ())]
    return totals


def _called(rest: str) -> Iterator[str]:
    yield from _CALLED.findall(rest)
    for branches in _BRANCHES.findall(rest):
        yield from (branch.strip().lstrip("%") for branch in branches.split(","))


def _is_alone(attributes: str) -> bool:
    """Whether an operation exchanges nothing, for its groups have one device each."""
    if over := _OVER.search(attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", over[1]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", over[2])
        return all((part or sizes[axis]) == "1" for axis, part in axes)
    return _ALONE.search(attributes) is not None


def _array_bytes(shape: str) -> int:
    """Bytes of an HLO type, a tuple's members together."""
    total = 0
    for kind, dims in _ARRAY.findall(shape):
        size = _ITEM_BYTES.get(kind) or max(int(re.sub(r"\D", "", kind) or 8) // 8, 1)
        total += size * math.prod(int(dim) for dim in dims.split(",") if dim)
    return total
