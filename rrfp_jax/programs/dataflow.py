"""Which outputs of a traced function depend on which inputs, leaf by leaf.

Every value carries a set of labels, written as the bits of an integer; an equation's outputs get the labels of all its
inputs. Calls, conditionals and loops are followed inside, loops until nothing changes any more. What is unknown mixes
everything: the answer may name too many dependencies, never too few.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from rrfp_jax.programs.splitting.versions import called_jaxpr, scan_shape


def output_labels(jaxpr: jex.Jaxpr, labels: Sequence[int]) -> list[int]:
    """The labels of the outputs of ``jaxpr`` when its inputs carry ``labels``; its constants carry none."""
    known: dict[Any, int] = dict(zip(jaxpr.invars, labels, strict=True))

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, jex.Literal) else known.get(atom, 0)

    for eqn in jaxpr.eqns:
        outputs = _equation(eqn, [read(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: jex.JaxprEqn, labels: list[int]) -> list[int]:
    match eqn.primitive.name:
        case "cond":
            return _cond(eqn.params, labels)
        case "while":
            return _while(eqn.params, labels)
        case "scan":
            return _scan(eqn, labels)
    called = called_jaxpr(eqn)
    if called is not None:
        return output_labels(_open(called), labels)
    return [_union(labels)] * len(eqn.outvars)


def _cond(params: dict[str, Any], labels: list[int]) -> list[int]:
    predicate, operands = labels[0], labels[1:]
    branches = [output_labels(_open(branch), operands) for branch in params["branches"]]
    return [predicate | _union(outputs) for outputs in zip(*branches, strict=True)]


def _while(params: dict[str, Any], labels: list[int]) -> list[int]:
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = labels[:num_cond], labels[num_cond : num_cond + num_body]
    carry = labels[num_cond + num_body :]
    while True:
        (predicate,) = output_labels(_open(params["cond_jaxpr"]), cond_consts + carry)
        body = output_labels(_open(params["body_jaxpr"]), body_consts + carry)
        grown = [old | new | predicate for old, new in zip(carry, body, strict=True)]
        if grown == carry:
            return carry
        carry = grown


def _scan(eqn: jex.JaxprEqn, labels: list[int]) -> list[int]:
    num_consts, num_carry = scan_shape(eqn)
    consts, carry = labels[:num_consts], labels[num_consts : num_consts + num_carry]
    sliced = labels[num_consts + num_carry :]
    while True:
        outputs = output_labels(_open(eqn.params["jaxpr"]), consts + carry + sliced)
        grown = [old | new for old, new in zip(carry, outputs, strict=False)]
        if grown == carry:
            return carry + outputs[num_carry:]
        carry = grown


def _open(jaxpr: Any) -> jex.Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _union(labels: Sequence[int]) -> int:
    union = 0
    for label in labels:
        union |= label
    return union
