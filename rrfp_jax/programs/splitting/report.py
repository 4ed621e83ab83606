"""The bytes per microbatch that a split hands on, array by array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rrfp_jax.programs.splitting.ir import Operand, Var, variables
from rrfp_jax.programs.splitting.joined import Joined


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One array of the residuals or of the weight-gradient residuals."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    origin: str
    """`input`, `output`, `output gradient`, `input gradient`, `weight gradient`, `residual`, or the name of the
    operation that makes it."""

    def __str__(self) -> str:
        return f"{self.num_bytes:>12,} B  {self.dtype}{list(self.shape)}  {self.origin}"


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """Bytes are those of global arrays, for one microbatch unless said otherwise."""

    residuals: tuple[Crossing, ...]
    """The arrays from forward to backward."""
    weight_residuals: tuple[Crossing, ...]
    """The arrays from the backward to the weight gradient; entries of origin `residual` or `input` are not copies."""
    vjp_bytes: int
    """Bytes of the residuals that `jax.vjp` would keep, parameters and duplicates included."""
    fixed_vjp_bytes: int
    """The part of these that is derived from parameters and constants alone, parameters included."""
    derived_bytes: int
    """Bytes that `prepare` makes: one copy per update, whatever the number of microbatches."""

    @property
    def residual_bytes(self) -> int:
        """Bytes of the residuals."""
        return _bytes_from(self.residuals)

    @property
    def input_bytes(self) -> int:
        """The part of `residual_bytes` that is inputs as they came: no memory beyond theirs."""
        return _bytes_from(self.residuals, "input")

    @property
    def output_bytes(self) -> int:
        """The part of `residual_bytes` that is outputs as they go: no memory beyond theirs."""
        return _bytes_from(self.residuals, "output")

    @property
    def weight_residual_bytes(self) -> int:
        """Bytes of the weight-gradient residuals."""
        return _bytes_from(self.weight_residuals)

    @property
    def aliased_bytes(self) -> int:
        """The part of `weight_residual_bytes` that was among the residuals: deferring W keeps it alive, uncopied."""
        return _bytes_from(self.weight_residuals, "residual", "input")

    def __str__(self) -> str:
        lines = [
            f"jax.vjp keeps {self.vjp_bytes:,} B, {self.fixed_vjp_bytes:,} B of it from parameters alone",
            f"residuals {self.residual_bytes:,} B, as they are: {self.input_bytes:,} B in, {self.output_bytes:,} B out",
            *map(str, self.residuals),
            f"for weight gradients {self.weight_residual_bytes:,} B ({self.aliased_bytes:,} B are residuals)",
            *map(str, self.weight_residuals),
            f"derived from parameters once per update: {self.derived_bytes:,} B",
        ]
        return "\n".join(lines)


def make_report(joined: Joined, crossing: Sequence[Var]) -> SplitReport:
    """Returns the report of a split whose values `crossing` go to the weight gradient."""
    makers = {output: node.operation.name for node in joined.forward for output in node.outputs}
    makers |= dict.fromkeys(variables(joined.outputs), "output") | dict.fromkeys(joined.inputs, "input")
    later = {output: node.operation.name for node in joined.backward for output in node.outputs}
    later |= dict.fromkeys(variables(joined.inputs_grad), "input gradient")
    later |= dict.fromkeys(joined.cotangents, "output gradient") | dict.fromkeys(joined.residuals, "residual")
    later |= dict.fromkeys(joined.inputs, "input")
    later |= dict.fromkeys(variables(joined.params_grad), "weight gradient")
    vjp_residuals = variables(joined.vjp_residuals)
    return SplitReport(
        residuals=tuple(_crossing(value, makers[value]) for value in joined.residuals),
        # a value that no node of the backward makes as it stands is a stack of a loop that was split
        weight_residuals=tuple(_crossing(value, later.get(value, "scan")) for value in crossing),
        vjp_bytes=_num_bytes(vjp_residuals),
        fixed_vjp_bytes=_num_bytes(value for value in vjp_residuals if value.fixed),
        derived_bytes=_num_bytes(joined.derived),
    )


def _bytes_from(crossings: Iterable[Crossing], *origins: str) -> int:
    return sum(each.num_bytes for each in crossings if not origins or each.origin in origins)


def _crossing(value: Var, origin: str) -> Crossing:
    return Crossing(shape=value.shape, dtype=str(value.dtype), num_bytes=value.num_bytes, origin=origin)


def _num_bytes(operands: Iterable[Operand]) -> int:
    return sum(value.num_bytes for value in variables(operands))
