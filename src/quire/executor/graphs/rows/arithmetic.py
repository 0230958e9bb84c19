"""Translates element-wise nodes to CUDA C++ expressions; their functions are in `rows.cuh`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from quire.device.activations import Gating
from quire.executor.graphs.source import C_TYPES, ROUNDED, NotGenerated, literal, literal_of
from quire.program.values import Node, Program

_INFIX = {
    "Add": "+",
    "Subtract": "-",
    "Multiply": "*",
    "Divide": "/",
    "Equal": "==",
    "NotEqual": "!=",
    "Greater": ">",
    "Less": "<",
    "GreaterEqual": ">=",
    "LessEqual": "<=",
    "LogicalAnd": "&&",
    "LogicalOr": "||",
}
_CALLS = {
    "Negative": "-{0}",
    "LogicalNot": "!{0}",
    "Square": "{0} * {0}",
    "Select": "{0} ? {1} : {2}",
    "Maximum": "larger({0}, {1})",
    "Minimum": "smaller({0}, {1})",
    "Remainder": "remainder_of({0}, {1})",
    "FloorDivide": "quotient_of({0}, {1})",
}
_SAME_NAMES = ("Tanh", "Exp", "Log1p", "Erf", "Expm1", "Sin", "Cos", "Floor")
_OF_FLOATS = {
    **{name: name.lower() + "f({0})" for name in _SAME_NAMES},
    "Abs": "fabsf({0})",
    "Round": "rintf({0})",
    "Sign": "(float)({0} > 0.f) - (float)({0} < 0.f)",
    "Power": "powf({0}, {1})",
    "LogAddExp": "log_add_exp({0}, {1})",
    "Sigmoid": "sigmoid({0})",
}
_LOGARITHMS = ("log2f", "log10f", "logf")
_BITS = ("&", "|", "^", "<<", ">>")
_ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu({0})",
    "gelu_pytorch_tanh": "gelu_tanh({0})",
    "gelu_new": "gelu_tanh({0})",
    "gelu": "gelu({0})",
}

SUPPORTED = frozenset(
    {*_INFIX, *_CALLS, *_OF_FLOATS, "Sqrt", "Log", "AsType", "BitwiseBinary", "activate", "gated"}
)
"""Kinds of nodes that `expression` translates."""


def register_type(dtype: mx.Dtype) -> str:
    """Return the C type in which a kernel computes values of a type."""
    return "float" if dtype in ROUNDED else C_TYPES[dtype]


def rounded(text: str, dtype: mx.Dtype) -> str:
    """Return a C expression that rounds a float to the storage type."""
    return text if dtype not in ROUNDED or dtype == mx.float32 else f"{ROUNDED[dtype]}({text})"


def expression(program: Program, node: Node, given: Sequence[str]) -> str:
    """Return a C expression for a node's output, rounded to its type.

    Args:
        given: names of the input variables.

    Raises:
        NotGenerated: the node is not known.
    """
    dtype = program.values[node.outputs[0]].dtype
    own = program.values[node.inputs[0]].dtype
    if node.kind == "activate":
        return activated(node.attributes["name"], given[0], dtype)
    if node.kind == "gated":
        operands = dict(zip(node.roles, given, strict=True))
        return gated(node.attributes["gating"], operands["x"], operands["y"], dtype=dtype)
    if node.kind == "AsType":
        return _converted(given[0], own, dtype)
    return rounded(_primitive(node, given, own), dtype)


def _primitive(node: Node, given: Sequence[str], own: mx.Dtype) -> str:
    if node.kind in _INFIX:
        return f"{given[0]} {_INFIX[node.kind]} {given[1]}"
    if node.kind == "BitwiseBinary":
        return f"{given[0]} {_BITS[node.arguments[0]]} {given[1]}"
    if node.kind == "Abs" and own not in ROUNDED:
        return f"{given[0]} < 0 ? -{given[0]} : {given[0]}"
    if node.kind in _OF_FLOATS or node.kind in ("Sqrt", "Log"):
        if own not in ROUNDED:
            raise NotGenerated(f"{node.kind} of {own} is not known")
        if node.kind == "Sqrt":
            return f"1.f / sqrtf({given[0]})" if node.arguments[0] else f"sqrtf({given[0]})"
        if node.kind == "Log":
            return f"{_LOGARITHMS[node.arguments[0]]}({given[0]})"
        return _OF_FLOATS[node.kind].format(*given)
    if node.kind not in _CALLS:
        raise NotGenerated(f"{node.kind} is not known")
    return _CALLS[node.kind].format(*given)


def _converted(text: str, own: mx.Dtype, dtype: mx.Dtype) -> str:
    if dtype == mx.bool_:
        return f"{text} != 0"
    if dtype in ROUNDED and own in ROUNDED:
        return rounded(text, dtype)
    return rounded(f"({register_type(dtype)})({text})", dtype)


def activated(name: str, x: str, dtype: mx.Dtype) -> str:
    """Return a C expression for an activation. Where MLX uses several operations, each result is
    rounded.
    """
    if name == "relu2":
        above = f"larger({x}, 0.f)"
        return rounded(f"{above} * {above}", dtype)
    if name == "quick_gelu":
        factor = literal_of(mx.array(1.702).astype(dtype))
        bounded = rounded(f"sigmoid({rounded(f'{x} * {factor}', dtype)})", dtype)
        return rounded(f"{x} * {bounded}", dtype)
    if name not in _ACTIVATIONS:
        raise NotGenerated(f"the activation {name} is not known")
    return rounded(_ACTIVATIONS[name].format(x), dtype)


def gated(gating: Gating, x: str, y: str, dtype: mx.Dtype) -> str:
    """Return a C expression for `activations.gated`. Bounded gates are computed in float32."""
    if gating.plain:
        return rounded(f"{activated(gating.activation, x, dtype)} * {y}", dtype)
    if gating.softcaps[0]:
        of_gate, of_value = gating.softcaps
        value = _softcapped(y, of_value) if of_value else y
        return rounded(f"{_softcapped(x, of_gate)} * sigmoid({x}) * {value}", dtype)
    high, low = literal(gating.limit, mx.float32), literal(-gating.limit, mx.float32)
    value = f"smaller(larger({y}, {low}), {high})"
    if gating.alpha:
        bounded, slope = f"smaller({x}, {high})", literal(gating.alpha, mx.float32)
        return rounded(f"{bounded} * sigmoid({bounded} * {slope}) * ({value} + 1.f)", dtype)
    if gating.inner:
        active = activated(gating.activation, f"smaller({x}, {high})", mx.float32)
    else:
        active = f"smaller({activated(gating.activation, x, dtype)}, {high})"
    return rounded(f"{active} * {value}", dtype)


def _softcapped(x: str, bound: float) -> str:
    text = literal(bound, mx.float32)
    return f"tanhf({x} / {text}) * {text}"
