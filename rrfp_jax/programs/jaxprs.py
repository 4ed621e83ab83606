"""Reads parts of jaxprs that JAX does not document, or that differ between JAX 0.10 and 0.12.

No private module is imported. But the parameters of the `scan`, `shard_map` and call equations, the context in which an
equation was traced, and the type that says how a shard varies are not part of JAX's public contract. All code that
relies on them stands here, so that a new release of JAX is met in one file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


class OpenJaxpr(NamedTuple):
    """The parts of an open or closed jaxpr; JAX 0.12 has made the two one class."""

    constvars: Sequence[Any]
    consts: Sequence[Any]
    invars: Sequence[Any]
    equations: Sequence[Any]
    outvars: Sequence[Any]


def open_jaxpr(jaxpr: Any) -> OpenJaxpr:
    """Returns the parts of a jaxpr, whether it is open or closed."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    consts = list(getattr(jaxpr, "consts", ()))
    return OpenJaxpr(inner.constvars, consts, inner.invars, inner.eqns, inner.outvars)


def called_jaxpr(equation: Any) -> Any | None:
    """Returns the jaxpr that a call equation runs once and as it stands, None for any other equation."""
    name = _CALLS.get(equation.primitive.name)
    return None if name is None else equation.params[name]


def is_rematerialised(equation: Any) -> bool:
    """Whether the equation is the backward of `jax.checkpoint`, to be kept from running ahead of its cotangents."""
    params = equation.params
    return bool(params.get("differentiated", False)) and params.get("prevent_cse", False) not in (False, ())


def scan_shape(equation: Any) -> tuple[int, int]:
    """Returns how many operands of a scan are constants and how many are carries; the others are slices."""
    params = equation.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carries, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carries))


def holds_references(equation: Any) -> bool:
    """Whether the equation reads or writes mutable arrays (refs), which cannot be split."""
    return any("Ref" in type(var.aval).__name__ for var in equation.invars)


def effectful(equation: Any) -> bool:
    """Whether the equation has an effect beyond naming a mesh axis."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


def manual_axes(equation: Any) -> frozenset[str]:
    """Returns the mesh axes over which a shard_map equation maps."""
    params = equation.params
    return frozenset(params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"])


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the mesh axes over which a value inside a checked shard map varies."""
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset[str]() if kind is None else frozenset(kind.varying)


def replay(equation_context: Any) -> contextlib.AbstractContextManager[Any]:
    """Restores mesh, key layout and placement hints under which an equation was traced, as JAX's own replay does."""
    manager = getattr(equation_context, "manager", None)
    return contextlib.nullcontext() if manager is None else manager


def partitioned_axes(jaxpr: Any, primitive: str, axes: frozenset[str]) -> frozenset[str]:
    """Returns those of ``axes`` over which the compiler cuts some equation of a primitive, also within others.

    A shard map leaves fewer of the axes to the compiler.
    """
    found = frozenset[str]()
    for equation in open_jaxpr(jaxpr).equations:
        if equation.primitive.name == primitive:
            return axes
        left = axes - manual_axes(equation) if equation.primitive.name == "shard_map" else axes
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    found = max(found, partitioned_axes(inner, primitive, left), key=len)
    return found
