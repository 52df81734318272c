"""Measures the memory and communication of a training step without running it ("rehearsal").

A trainer's step function is called with a `Shape` in place of every array, and with a `Rehearsal`
in place of the function that calls compiled programs. Every program is compiled for the mesh, and
the compiler reports its memory and its collectives. Memory between programs is measured, too: a
`Shape` is counted until its last reference is deleted, like an array.

Programs are compiled for the mesh's devices. On CPUs, the compiler computes bfloat16 in fp32.
Without the options of `_options`, it would also store all weights and activations in fp32.
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
    """A placeholder for an array on a mesh, counted in ``rehearsal.held`` while it exists."""

    def __init__(self, like: Any, placed: jax.sharding.Sharding, rehearsal: "Rehearsal"):
        super().__init__(like.shape, like.dtype, sharding=placed)
        self._rehearsal = rehearsal
        rehearsal.held += bytes_of(self)

    def __del__(self):
        self._rehearsal.held -= bytes_of(self)


@contextlib.contextmanager
def quick_collection() -> Iterator[None]:
    """Excludes existing objects from garbage collection, which every `Rehearsal` call runs."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def bytes_of(tree: Any) -> int:
    """Returns the bytes per device of a tree of arrays, or of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


@dataclasses.dataclass
class Program:
    """A compiled program of a step.

    Attributes:
      name: name of the function.
      outputs: shapes and shardings of the results.
      arguments, results, temporaries, aliased: sizes in bytes per device.
      collectives: operation -> count and bytes per device; loop iterations are included.
      calls: number of calls in a step.
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
    """Compiles and measures functions instead of calling them; a step accepts it as ``run``.

    Attributes:
      held: bytes per device of all existing shapes.
      placed: bytes per device of the batch, which the step itself places on devices.
      peak: maximum bytes per device.
      peak_program: the program that needs ``peak``.
      programs: compiled programs by function and arguments.
    """

    def __init__(self, mesh: jax.sharding.Mesh, *, bfloat16: bool = False, loops: int = 1):
        """``loops`` is the assumed number of iterations of loops of unknown length."""
        self.mesh, self.loops = mesh, loops
        self.held = self.placed = self.peak = 0
        self.peak_program: Program | None = None
        self.programs: dict[Any, Program] = {}
        self._options = _options() if bfloat16 else None

    def place(self, tree: Any) -> Any:
        """Returns shapes of ``tree`` with the shardings of `sharding.state_sharding`."""
        placed = sharding.state_sharding(tree, self.mesh)
        return jax.tree.map(self.shape, tree, placed)

    def shape(self, like: Any, placed: jax.sharding.Sharding) -> Any:
        """Returns a `Shape` of an array or another shape."""
        return Shape(like, placed, self)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the shapes of the results of ``function``.

        If ``function`` is not jitted, returns the shapes of its first argument.
        """
        if not hasattr(function, "lower"):
            return self.copy(arguments[0])
        program = self.program(function, arguments)
        arrays = [leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "sharding")]
        gc.collect()  # Deletes shapes in reference cycles.
        shapes = bytes_of([leaf for leaf in arrays if isinstance(leaf, Shape)])
        others = self.held - shapes + max(self.placed - (bytes_of(arrays) - shapes), 0)
        self.update_peak(program, others + program.arguments)
        return self.copy(program.outputs)

    def program(self, function: Any, arguments: tuple[Any, ...]) -> Program:
        """Compiles ``function`` for ``arguments`` if necessary, and counts the call."""
        described = map(_describe, jax.tree.leaves(arguments))
        key = (function, jax.tree.structure(arguments), *described)
        if key not in self.programs:
            self.programs[key] = self._compile(function, arguments)
        self.programs[key].calls += 1
        return self.programs[key]

    def exchanged(self) -> dict[str, "Collective"]:
        """Returns operation -> the sum of its collectives over all calls."""
        totals: dict[str, Collective] = {}
        for program in self.programs.values():
            for operation, each in program.collectives.items():
                number, size = totals.get(operation, (0, 0))
                totals[operation] = Collective(
                    number + program.calls * each.number, size + program.calls * each.bytes
                )
        return totals

    def update_peak(self, program: Program, before: int) -> None:
        """Updates the peak with a program that starts when ``before`` bytes are in use."""
        size = before + program.results + program.temporaries - program.aliased
        if size > self.peak:
            self.peak, self.peak_program = size, program

    def copy(self, tree: Any) -> Any:
        """Returns new shapes with the sizes and shardings of ``tree``."""
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
    if type(leaf) is int:  # A program depends on the type of a dynamic number, not its value.
        return int
    return (leaf.shape, leaf.dtype, leaf.sharding) if hasattr(leaf, "sharding") else leaf


def _options() -> dict[str, Any]:
    """Returns compiler options that keep fp32 copies on CPUs inside the loop over layers."""
    passes = "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion"
    return {"xla_allow_excess_precision": False, "xla_disable_hlo_passes": passes}


_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)")
_SINGLE_DEVICE = re.compile(r"replica_groups=(?:\{\{\d+\}|\[\d+,1\]<=)")
# Groups in the syntax of JAX 0.11: a mesh, and the axes or parts of axes of a group.
_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_CALLED = re.compile(r"(?:body|calls|to_apply|(?:true|false)_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"([a-z]+\d*)\w*\[([\d,]*)\]")


class Collective(NamedTuple):
    """The number of collectives of one kind, and the bytes of their gathered arrays on a device."""

    number: int
    bytes: int


def collectives(text: str, loops: int = 1) -> dict[str, Collective]:
    """Returns operation -> collectives of one call of a compiled program.

    ``text`` is the program's partitioned HLO. ``loops`` is the assumed number of iterations of
    loops of unknown length.
    """
    operations: dict[str, list[tuple[str, int]]] = {}
    calls: dict[str, list[tuple[str, int]]] = {}
    shapes: dict[str, str] = {}
    name = entry = ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            name = start[1]
            operations[name], calls[name], shapes = [], [], {}
            entry = name if line.startswith("ENTRY") else entry
        elif instruction := _INSTRUCTION.match(line):
            result, shape, operation, rest = instruction.groups()
            shapes[result] = shape
            if (kind := operation.removesuffix("-start")) in _OPERATIONS:
                if not _has_single_devices(rest):
                    names = re.findall(r"%?([\w.\-]+)", rest.partition(")")[0])
                    operands = " ".join(shapes.get(operand, "") for operand in names)
                    gathered = operands if kind == "reduce-scatter" else shape
                    operations[name].append((kind, _array_bytes(gathered)))
                continue
            trip_count = _TRIPS.search(rest)
            times = (int(trip_count[1]) if trip_count else loops) if operation == "while" else 1
            calls[name] += [(called, times) for called in _called(rest)]

    totals: dict[str, Collective] = {}
    stack = [(entry, 1)] if entry else []
    while stack:
        name, times = stack.pop()
        for operation, size in operations.get(name, ()):
            number, total = totals.get(operation, (0, 0))
            totals[operation] = Collective(number + times, total + times * size)
        stack += [(called, times * more) for called, more in calls.get(name, ())]
    return totals


def _called(rest: str) -> Iterator[str]:
    yield from _CALLED.findall(rest)
    for branches in _BRANCHES.findall(rest):
        yield from (branch.strip().lstrip("%") for branch in branches.split(","))


def _has_single_devices(attributes: str) -> bool:
    """Returns whether each group of an operation has only one device."""
    if groups := _GROUPS.search(attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", groups[1]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", groups[2])
        return all((part or sizes[axis]) == "1" for axis, part in axes)
    return _SINGLE_DEVICE.search(attributes) is not None


def _array_bytes(shape: str) -> int:
    """Returns the bytes of an HLO type; of a tuple, the sum over its members."""
    total = 0
    for kind, dims in _ARRAY.findall(shape):
        size = _ITEM_BYTES.get(kind) or max(int(re.sub(r"\D", "", kind) or 8) // 8, 1)
        total += size * math.prod(int(dim) for dim in dims.split(",") if dim)
    return total
