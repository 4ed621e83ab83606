"""The operations of a node: one primitive, a barrier, a resharding, a loop, a shard map.

Loops and shard maps keep their bodies as `Block`s, so that they can be restricted to some outputs and split in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from rrfp_jax.programs.splitting import versions
from rrfp_jax.programs.splitting.ir import Block


@dataclass(frozen=True, eq=False, kw_only=True)
class Apply:
    """One primitive of JAX, bound again in the context in which it was traced."""

    primitive: Any
    params: dict[str, Any]
    context: Any
    effectful: bool

    @property
    def name(self) -> str:
        return str(self.primitive.name)

    def run(self, *arrays: Any) -> Sequence[Any]:
        with versions.replay(self.context):
            result = self.primitive.bind(*arrays, **self.primitive.get_bind_params(self.params))
        return result if self.primitive.multiple_results else [result]


@dataclass(frozen=True, eq=False)
class Barrier:
    """Output i is input i, but none may be used before all are there: rematerialisation waits for its cotangents."""

    name = "optimization_barrier"
    effectful = False

    def run(self, *arrays: Any) -> Sequence[Any]:
        return list(jax.lax.optimization_barrier(arrays))


@dataclass(frozen=True, eq=False)
class Reshard:
    """The sharding that a nested `jit` demands of one of its arguments or results."""

    sharding: jax.sharding.Sharding
    name = "sharding_constraint"
    effectful = False

    def run(self, *arrays: Any) -> Sequence[Any]:
        return [jax.lax.with_sharding_constraint(arrays[0], self.sharding)]


@dataclass(frozen=True, eq=False, kw_only=True)
class Loop:
    """`lax.scan`. Body inputs: constants, carries, slices; body outputs: carries, slices to stack.

    A `batched` loop has no carries and runs all its passes at once, as a `vmap` over layers: faster, for more
    temporary memory.
    """

    body: Block
    num_constants: int
    num_carries: int
    length: int
    reverse: bool
    unroll: Any
    effectful: bool
    batched: bool = False
    name = "scan"

    def run(self, *arrays: Any) -> Sequence[Any]:
        constants = arrays[: self.num_constants]
        carries = list(arrays[self.num_constants : self.num_constants + self.num_carries])
        slices = list(arrays[self.num_constants + self.num_carries :])
        if self.batched:
            return jax.vmap(lambda *parts: self.body.run(*constants, *parts), axis_size=self.length)(*slices)

        def step(carry: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self.body.run(*constants, *carry, *parts)
            return results[: self.num_carries], results[self.num_carries :]

        final, stacks = jax.lax.scan(
            step, carries, slices, length=self.length, reverse=self.reverse, unroll=self.unroll
        )
        return [*final, *stacks]


@dataclass(frozen=True, eq=False)
class Port:
    """How one array passes the border of a shard map.

    A `stacked` port carries a value that had no global form: every shard's piece becomes one row of a global array.
    """

    spec: Any
    stacked: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Sharded:
    """`jax.shard_map` over the axes `axes` of `mesh`."""

    body: Block
    mesh: Any
    axes: frozenset[str]
    check_vma: bool
    ports_in: tuple[Port, ...]
    ports_out: tuple[Port, ...]
    context: Any
    effectful: bool
    name = "shard_map"

    def run(self, *arrays: Any) -> Sequence[Any]:
        def local(*shards: Any) -> tuple[Any, ...]:
            pieces = [x[0] if port.stacked else x for x, port in zip(shards, self.ports_in, strict=True)]
            results = self.body.run(*pieces)
            return tuple(
                jax.numpy.expand_dims(y, 0) if port.stacked else y
                for y, port in zip(results, self.ports_out, strict=True)
            )

        with versions.replay(self.context):
            mapped = jax.shard_map(
                local,
                mesh=self.mesh,
                axis_names=set(self.axes),
                check_vma=self.check_vma,
                in_specs=tuple(port.spec for port in self.ports_in),
                out_specs=tuple(port.spec for port in self.ports_out),
            )
            return list(mapped(*arrays))

    def crossing_port(self, varying: frozenset[str]) -> Port:
        """The border crossing of an inner value that varies over the axes `varying`."""
        axes = tuple(axis for axis in self.mesh.axis_names if axis in varying & self.axes)
        return Port(PartitionSpec(axes) if axes else PartitionSpec(None), stacked=True)

    def num_rows(self, varying: frozenset[str]) -> int:
        sizes = dict(self.mesh.shape)
        rows = 1
        for axis in varying & self.axes:
            rows *= int(sizes[axis])
        return rows
