"""What a split costs in bytes per microbatch, and what each array that crosses is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rrfp_jax.programs.splitting.ir import Operand, Value, values
from rrfp_jax.programs.splitting.stash import Joined


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One array of the stash or of what is owed."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    origin: str
    """`input`, `output`, `output gradient`, `input gradient`, `weight gradient`, `stash`, or the name of the operation
    that makes it."""

    def __str__(self) -> str:
        return f"{self.num_bytes:>12,} B  {self.dtype}{list(self.shape)}  {self.origin}"


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """Bytes are those of global arrays, for one microbatch unless said otherwise."""

    stash: tuple[Crossing, ...]
    """From forward to backward."""
    owed: tuple[Crossing, ...]
    """From the backward to the weight gradient; entries of origin `stash` or `input` are not copies."""
    residual_bytes: int
    """What `jax.vjp` would keep, parameters and duplicates included."""
    fixed_residual_bytes: int
    """The part of these that is derived from parameters and constants alone, parameters included."""
    derived_bytes: int
    """What `prepare` makes: one copy per update, whatever the number of microbatches."""

    @property
    def stash_bytes(self) -> int:
        return sum(crossing.num_bytes for crossing in self.stash)

    @property
    def input_bytes(self) -> int:
        """The part of `stash_bytes` that is inputs as they came: no memory beyond theirs."""
        return sum(crossing.num_bytes for crossing in self.stash if crossing.origin == "input")

    @property
    def output_bytes(self) -> int:
        """The part of `stash_bytes` that is outputs as they go: no memory beyond theirs."""
        return sum(crossing.num_bytes for crossing in self.stash if crossing.origin == "output")

    @property
    def owed_bytes(self) -> int:
        return sum(crossing.num_bytes for crossing in self.owed)

    @property
    def owed_from_stash_bytes(self) -> int:
        """The part of `owed_bytes` that was in the stash, so that deferring W keeps it alive but copies nothing."""
        return sum(crossing.num_bytes for crossing in self.owed if crossing.origin in ("stash", "input"))

    def __str__(self) -> str:
        lines = [
            f"jax.vjp keeps {self.residual_bytes:,} B, {self.fixed_residual_bytes:,} B of it from parameters alone",
            f"stash {self.stash_bytes:,} B, as they are: {self.input_bytes:,} B in, {self.output_bytes:,} B out",
            *map(str, self.stash),
            f"owed {self.owed_bytes:,} B ({self.owed_from_stash_bytes:,} B kept from the stash)",
            *map(str, self.owed),
            f"derived from parameters once per update: {self.derived_bytes:,} B",
        ]
        return "\n".join(lines)


def make_report(joined: Joined, owed: Sequence[Value], derived: Sequence[Value]) -> SplitReport:
    gradients = set(joined.params_grad)
    makers = {output: node.operation.name for node in joined.forward for output in node.outputs}
    makers |= dict.fromkeys(values(joined.outputs), "output") | dict.fromkeys(joined.inputs, "input")
    stash = [_crossing(value, makers[value]) for value in joined.stash]

    later = {output: node.operation.name for node in joined.backward for output in node.outputs}
    later |= dict.fromkeys(values(joined.inputs_grad), "input gradient")
    later |= dict.fromkeys(joined.cotangents, "output gradient") | dict.fromkeys(joined.stash, "stash")
    later |= dict.fromkeys(joined.inputs, "input")
    origins = {value: "weight gradient" if value in gradients else later.get(value, "scan") for value in owed}
    residuals = list(values(joined.residuals))
    return SplitReport(
        stash=tuple(stash),
        owed=tuple(_crossing(value, origins[value]) for value in owed),
        residual_bytes=_num_bytes(residuals),
        fixed_residual_bytes=_num_bytes(value for value in residuals if value.fixed),
        derived_bytes=_num_bytes(derived),
    )


def _crossing(value: Value, origin: str) -> Crossing:
    return Crossing(shape=value.shape, dtype=str(value.dtype), num_bytes=value.num_bytes, origin=origin)


def _num_bytes(operands: Iterable[Operand]) -> int:
    return sum(value.num_bytes for value in values(operands))
