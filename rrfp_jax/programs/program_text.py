"""Reads a compiled program: its collectives, kernels and copies, a bound on its time, and the backend's own analysis.

The compiler prints one line for each instruction, in computations that call each other. The entry computation and the
computations that it calls as a loop, a branch or an asynchronous step run instruction by instruction; those that a
fusion or a reduction calls are part of one kernel. A loop whose number of turns the compiler knows counts so often, any
other one once.

The bound is a roofline: every kernel takes as long as its products at the device's peak or its bytes at the memory's
full speed, whichever is longer, and a launch. No program is faster; collectives are left out, since they overlap with
the rest as the device pleases.

Collectives are read as short texts that two processes can compare, and as groups of devices. The devices of a unit must
enter the same collectives in the same order, or all of them wait for ever. Every process compiles for itself, so that
another version, another partition or another model on one of them goes unnoticed until then.

JAX calls neither analysis of its backends stable: they may be missing, and their form may change between versions. So
this file alone reads them; ``tests/programs/test_analysis.py`` pins the keys, and callers must do without where there
is nothing.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
from jax.stages import Compiled

_ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+|f8\w+)\[([\d,]*)\]")
_BITS = {"pred": 8, "bf16": 16}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.+)$")
_OPCODE = re.compile(r"^([\w\-]+)\(")
_CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TURNS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_FREE = frozenset(
    [
        *("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "optimization-barrier"),
        *("while", "conditional", "call", "partition-id", "replica-id", "iota"),
    ]
)
"""Opcodes that launch no kernel of their own."""
_COLLECTIVES = frozenset(
    [
        *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
        *("collective-permute", "collective-broadcast"),
    ]
)
_MOVES = frozenset(("copy", "transpose", "reshape"))
_PEAKS = (1, 2)
"""How many times the peak of bfloat16 a GPU has, without and with both operands in float8."""
_LAUNCH_S = 2e-6
"""The least time from one kernel to the next on a GPU."""


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    rest: str
    """The text from the opcode on."""
    operands: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The opcode, without the ending by which an instruction starts or ends work that runs beside others."""
        return self.opcode.removesuffix("-start").removesuffix("-done")

    @property
    def is_collective(self) -> bool:
        """Whether devices enter a collective here; at a ``-done`` they have entered it before."""
        return self.kind in _COLLECTIVES and not self.opcode.endswith("-done")

    @property
    def result(self) -> str:
        """The shape that the instruction makes: that of an asynchronous copy names its source as well."""
        return self.shape.partition(", ")[0] if self.opcode == "copy-start" else self.shape


class Moved(NamedTuple):
    """How often something happens in a program, and with how many bytes in all."""

    times: int
    num_bytes: int


class ProgramText:
    """The text of one compiled program, read once.

    Args:
        text: the text as ``Compiled.as_text()`` returns it.
    """

    def __init__(self, text: str) -> None:
        self._computations, self._entry = _computations(text)

    def each_collective(self) -> Iterator[tuple[str, str, str]]:
        """Yields every collective as it stands in the text, in order: its kind, its shape, and the text behind its
        operands."""
        for instruction in chain.from_iterable(self._computations.values()):
            if instruction.is_collective:
                yield instruction.kind, instruction.shape, instruction.rest.partition(")")[2]

    @cached_property
    def collectives(self) -> dict[str, Moved]:
        """For each kind, the bytes that a device gathers, or sums, in all instructions of the kind."""
        found: dict[str, Moved] = {}
        for instruction, turns, _ in self._run():
            if instruction.is_collective:
                # a start has the shape (arguments, results, ...): the larger is gathered, or summed
                starts = instruction.opcode.endswith("-start")
                parts = _parts(instruction.shape)[:2] if starts else [instruction.shape]
                times, known = found.get(instruction.kind, Moved(0, 0))
                size = max(map(shape_bytes, parts), default=0)
                found[instruction.kind] = Moved(times + turns, known + turns * size)
        return found

    @cached_property
    def attention(self) -> dict[str, int]:
        """How often each fused kernel of attention is called: those of cuDNN, and the TPU's own."""
        found: Counter[str] = Counter()
        for instruction, turns, _ in self._run():
            called = _TARGET.search(instruction.rest) if instruction.opcode == "custom-call" else None
            if called is not None and ("fmha" in called[1].lower() or called[1] == "tpu_custom_call"):
                found[called[1]] += turns
        return dict(found)

    @cached_property
    def products(self) -> dict[tuple[str, ...], int]:
        """How often operands of these two dtypes are multiplied, attention apart."""
        found: Counter[tuple[str, ...]] = Counter()
        for instruction, turns, shapes in self._run():
            body = self._called(instruction) if instruction.opcode == "fusion" else [instruction]
            inner = {each.name: each.shape for each in body} if instruction.opcode == "fusion" else shapes
            for each in body:
                if each.opcode == "dot" or "matmul" in _target(each) or "gemm" in _target(each):
                    found[_dtypes(each, inner)] += turns
        return dict(found)

    @cached_property
    def copied_bytes(self) -> int:
        """Bytes of results that only are other arrays in another place or order of the device's main memory."""
        return sum(turns * shape_bytes(each.result) for each, turns, _ in self._run() if self._moves(each))

    @cached_property
    def touched_bytes(self) -> int:
        """Bytes that kernels read and write, each array once for each kernel."""
        return sum(turns * _touched(instruction, shapes) for instruction, turns, shapes in self._kernels())

    def arrays_with(self, length: int) -> list[str]:
        """Returns arrays outside of kernels with at least two dimensions of this length and a third, as scores of
        attention."""
        found: dict[str, None] = {}
        for instruction, _, _ in self._run():
            for dtype, dims in _ARRAY.findall(instruction.shape):
                sizes = dims.split(",")
                if len(sizes) > 2 and sizes.count(str(length)) > 1:
                    found[f"{dtype}[{dims}]"] = None
        return list(found)

    def bound_s(self, *, flops: float, bytes_per_s: float) -> float:
        """Returns the seconds that a GPU with this peak and this speed of memory takes at least, collectives apart."""
        return sum(
            turns * (max(self._flops(each, shapes) / flops, _touched(each, shapes) / bytes_per_s) + _LAUNCH_S)
            for each, turns, shapes in self._kernels()
        )

    def _kernels(self) -> Iterator[tuple[_Instruction, int, Mapping[str, str]]]:
        for instruction, turns, shapes in self._run():
            is_over = instruction.opcode.endswith("-done")
            if instruction.opcode and not is_over and instruction.kind not in _FREE | _COLLECTIVES:
                yield instruction, turns, shapes

    def _run(self, name: str | None = None, turns: int = 1) -> Iterator[tuple[_Instruction, int, Mapping[str, str]]]:
        """Yields every instruction that runs by itself, how often it runs, and its computation's shapes by name."""
        body = self._computations.get(self._entry if name is None else name, [])
        shapes = {each.name: each.shape for each in body}
        for each in body:
            yield each, turns, shapes
            if each.opcode in ("while", "conditional", "call", "async-start"):
                known = _TURNS.search(each.rest) if each.opcode == "while" else None
                branches = _BRANCHES.search(each.rest)
                called = _CALLED.findall(each.rest) + re.findall(r"[\w.\-]+", branches[1] if branches else "")
                for inner in called:
                    yield from self._run(inner, turns * (1 if known is None else int(known[1])))

    def _moves(self, instruction: _Instruction) -> bool:
        """Whether a kernel computes nothing: a copy, a transposition, or a fusion of these."""
        if instruction.opcode == "copy-start":
            # into a TPU's on-chip memory, S(1), an array is read ahead of the kernel that would read it anyway
            return "S(1)}" not in instruction.result
        if instruction.opcode in ("copy", "transpose"):
            return True
        if instruction.opcode != "fusion":
            return False
        inner = {each.opcode for each in self._called(instruction)} - {"parameter", "bitcast", "tuple", "constant"}
        return bool(inner) and inner <= _MOVES

    def _called(self, instruction: _Instruction) -> list[_Instruction]:
        found = _CALLED.search(instruction.rest)
        return [] if found is None else self._computations.get(found[1], [])

    def _flops(self, instruction: _Instruction, shapes: Mapping[str, str]) -> float:
        """Returns the operations of the products in a kernel, a multiply-add counting as two, in float8 as one; nothing
        else counts."""
        if instruction.opcode == "fusion":
            body = self._called(instruction)
            inner = {each.name: each.shape for each in body}
            return sum(self._flops(each, inner) for each in body if each.opcode in ("dot", "fusion"))
        first = _dims(shapes.get(instruction.operands[0], "")) if instruction.operands else []
        result = _dims(instruction.shape)
        if not (first and result):
            return 0.0
        name, peaks = _target(instruction), _PEAKS[all(each.startswith("f8") for each in _dtypes(instruction, shapes))]
        if contracted := _CONTRACTED.search(instruction.rest) if instruction.opcode == "dot" else None:
            return 2.0 * prod(result[0]) * prod(first[0][int(d)] for d in contracted[1].split(",") if d) / peaks
        if "fmha" in name and len(first[0]) == 4:
            batch, length, heads, width = first[0]
            # a causal mask leaves half; the backward has five products where the forward has two
            return 2.0 * batch * heads * length**2 * width * (2.5 if "backward" in name else 1.0)
        return 2.0 * prod(result[0]) * first[0][-1] / peaks if "matmul" in name or "gemm" in name else 0.0


def _target(instruction: _Instruction) -> str:
    found = _TARGET.search(instruction.rest)
    return "" if found is None else found[1].lower()


def _dtypes(instruction: _Instruction, shapes: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the dtypes of the first two operands."""
    found = [_ARRAY.search(shapes.get(name, "")) for name in instruction.operands[:2]]
    return tuple("" if each is None else each[1] for each in found)


def shape_bytes(shape: str) -> int:
    """Returns the bytes of all arrays in a shape as the compiler prints it."""
    total = 0
    for dtype, dims in _ARRAY.findall(shape):
        bits = _BITS.get(dtype) or (8 if dtype.startswith("f8") else int(dtype[1:]))
        total += prod(map(int, filter(None, dims.split(",")))) * bits // 8
    return total


def _dims(shape: str) -> list[list[int]]:
    return [[int(d) for d in dims.split(",") if d] for _, dims in _ARRAY.findall(shape)]


def _touched(instruction: _Instruction, shapes: Mapping[str, str]) -> int:
    return shape_bytes(instruction.shape) + sum(shape_bytes(shapes.get(name, "")) for name in instruction.operands)


def _parts(shape: str) -> list[str]:
    """Returns the parts of a tuple's shape, or the shape alone."""
    if not shape.startswith("("):
        return [shape]
    depth, begin, parts = 0, 1, []
    for place, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or not depth:
            parts.append(shape[begin:place])
            begin = place + 1
    return parts


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Returns the instructions of every computation by its name, and the name of the entry."""
    found: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line[:1] not in ("", " ") and line.endswith("{") and "->" in line:
            name = line.removeprefix("ENTRY").split("(", 1)[0].strip().lstrip("%")
            current = found[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            shape, rest = _split_shape(match[2])
            opcode = _OPCODE.match(rest)
            operands = re.findall(r"%([\w.\-]+)", rest[: rest.find(")") + 1]) if opcode else []
            current.append(_Instruction(match[1], shape, opcode[1] if opcode else "", rest, tuple(operands)))
    return found, entry


def _split_shape(text: str) -> tuple[str, str]:
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: place + 1], text[place + 1 :].lstrip()
    return text, ""


# -- collectives as texts and as groups of devices ---------------------------------------------------------------------

SUM, ALL_TO_ALL, PERMUTE = "sum", "all-to-all", "permute"
"""The kinds of connections: gathering and scattering use those of sums."""
_OF_NO_MATTER = re.compile(
    r", (?:channel_id=\d+|metadata=\{.*|to_apply=[^\s,]+|backend_config=\{.*|frontend_attributes=\{.*)"
)
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(?:\{(?P<listed>(?:\{[\d,]*\},?)*)\}"
    r"|\[(?P<shape>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
    r"|mesh\[(?P<mesh>[^\]]+)\] \{(?P<axes>[^}]*)\})"
)
_AXIS = re.compile(r"'(?P<name>[^']+)'(?:=(?P<size>\d+)|:\((?P<before>\d+)\)(?P<part>\d+))?")


class Exchange(NamedTuple):
    """Devices that are connected in one way, by their places on the mesh of a program."""

    kind: str
    """One of :data:`SUM`, :data:`ALL_TO_ALL`, :data:`PERMUTE`."""
    groups: tuple[tuple[int, ...], ...]
    """Groups of devices; pairs of sender and receiver for :data:`PERMUTE`."""


def collective_lines(compiled: Compiled) -> tuple[str, ...]:
    """Returns the collectives of a program in the order in which its devices enter them, with shapes and groups."""
    found = ProgramText(compiled.as_text() or "").each_collective()
    return tuple(f"{kind} {shape}{_OF_NO_MATTER.sub('', how)}" for kind, shape, how in found)


def joint_work(name: str, compiled: Mapping[str, Compiled]) -> dict[str, str]:
    """Returns the collectives of each program of a chunk of this name, as texts by title."""
    return {f"{name}, {title}": "; ".join(collective_lines(program)) for title, program in compiled.items()}


def exchanges(programs: Iterable[Compiled], num_devices: int) -> list[Exchange]:
    """Returns the connections that programs on so many devices use, each once, in an order that depends on nothing
    else."""
    found = set()
    for line in {line for program in programs for line in collective_lines(program)}:
        op, groups = line.partition(" ")[0], _GROUPS.search(line)
        kind = PERMUTE if op == "collective-permute" else ALL_TO_ALL if op.endswith("all-to-all") else SUM
        found.add(Exchange(kind, _groups(groups, num_devices) if groups else (tuple(range(num_devices)),)))
    return sorted(each for each in found if any(len(group) > 1 for group in each.groups))


def _groups(found: re.Match[str], num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices, in whichever of three forms the compiler has written them.

    ``{{0,1},{2,3}}`` lists them, ``[2,2]<=[2,2]T(1,0)`` are the rows of an array of all numbers, transposed, and
    ``mesh['x'=2,'y'=2] {'y'}`` the devices that differ along some axes of a mesh, or along a part of one:
    ``'y':(1)2``.
    """
    if found["listed"] is not None:
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", found["listed"])]
        return tuple(groups) or (tuple(range(num_devices)),)
    if found["shape"] is not None:
        dims, order = _numbers(found["dims"]), found["order"]
        places = np.arange(prod(dims)).reshape(dims).transpose(None if order is None else _numbers(order))
        rows = places.reshape(_numbers(found["shape"]))
    else:
        wanted = {axis["name"]: axis for axis in _AXIS.finditer(found["axes"])}
        sizes: list[int] = []
        at: dict[str, int] = {}
        for axis in _AXIS.finditer(found["mesh"]):
            name, size = axis["name"], int(axis["size"])
            before, part = 1, size
            if name in wanted and wanted[name]["part"] is not None:
                before, part = int(wanted[name]["before"]), int(wanted[name]["part"])
            # an axis of which a part counts is three dimensions: those before it, the part, and those behind
            at[name] = len(sizes) + 1
            sizes += [before, part, size // (before * part)]
        inner = [at[name] for name in wanted]
        outer = [dim for dim in range(len(sizes)) if dim not in inner]
        places = np.arange(prod(sizes)).reshape(sizes).transpose(*outer, *inner)
        rows = places.reshape(-1, prod(sizes[dim] for dim in inner))
    return tuple(tuple(map(int, row)) for row in rows)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


# -- the backend's own analysis ----------------------------------------------------------------------------------------

OPTIMAL_SECONDS = "optimal_seconds"
TEMPORARIES, ARGUMENTS, OUTPUTS = "temp_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes"


class ProgramMemory(NamedTuple):
    """The memory that a program needs on one device, in bytes."""

    temporaries: int
    """Bytes while it runs, beside arguments and results."""
    arguments: int
    outputs: int


def optimal_s(program: Compiled) -> float | None:
    """Returns the seconds that the compiler's own model gives a program, as that of TPUs does; None where it has none.

    Loops count once in it, and kernels by their own estimates.
    """
    try:
        analysis: Any = program.cost_analysis()
    except (NotImplementedError, RuntimeError):
        return None
    first = analysis[0] if isinstance(analysis, list) and analysis else analysis
    seconds = first.get(OPTIMAL_SECONDS, 0) if isinstance(first, Mapping) else 0
    return float(seconds) if seconds > 0 else None


def memory_of(program: Compiled) -> ProgramMemory | None:
    """Returns the memory that a program needs; None where the backend does not say."""
    try:
        analysis = program.memory_analysis()
    except (NotImplementedError, RuntimeError):
        return None
    sizes = [getattr(analysis, name, None) for name in (TEMPORARIES, ARGUMENTS, OUTPUTS)]
    return None if None in sizes else ProgramMemory(*(int(size or 0) for size in sizes))
