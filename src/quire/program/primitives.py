"""MLX's primitives: capturing them from a function, and what each of them computes.

`mx.export_function` reports a function's primitives to a callback. Their names and arguments are no
public interface of MLX, so only this module knows them; tests/program replays all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from quire.device.device import current_device

Array = tuple[str, tuple[int, ...], mx.Dtype]
"""An array of a recorded function: its name, shape and type."""
Meaning = Callable[[list[mx.array], tuple[Any, ...], tuple[int, ...]], Any]
"""A function that computes a primitive from its inputs, its arguments and the shape of its first
output.
"""


@dataclass
class Primitives:
    """The primitives of a function, as MLX names them.

    Attributes:
        constants: arrays that the function captured, by name.
        primitives: dictionaries with "name", "inputs", "outputs" and "arguments".
    """

    inputs: list[Array] = field(default_factory=list)
    outputs: list[Array] = field(default_factory=list)
    constants: list[tuple[str, mx.array]] = field(default_factory=list)
    primitives: list[dict[str, Any]] = field(default_factory=list)


def recorded(function: Callable[..., Sequence[mx.array]], inputs: Sequence[mx.array]) -> Primitives:
    """Record the primitives of a function for inputs of these shapes; computes nothing."""
    found = Primitives()

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "primitive":
            found.primitives.append(event)
        elif event["type"] in ("inputs", "outputs", "constants"):
            setattr(found, event["type"], event[event["type"]])

    mx.export_function(note, function, *inputs)
    return found


def frozen(value: Any) -> Any:
    """Return a primitive's arguments as nested tuples."""
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def compute(
    kind: str,
    inputs: list[mx.array],
    arguments: tuple[Any, ...],
    shape: tuple[int, ...],
    dtypes: Sequence[mx.Dtype],
) -> list[mx.array]:
    """Compute a primitive.

    Args:
        shape: shape of its first output.
        dtypes: types of its outputs.

    Raises:
        KeyError: this primitive is not known.
    """
    out = MEANINGS[kind](inputs, arguments, shape)
    found = list(out)[: len(dtypes)] if isinstance(out, list | tuple) else [out]
    return [y if y.dtype == d else y.astype(d) for y, d in zip(found, dtypes, strict=True)]


# -- meanings --------------------------------------------------------------------------------------


def _plain(function: Callable[..., mx.array]) -> Meaning:
    return lambda x, a, shape: function(*x)


def _gather(x: list[mx.array], a: tuple[Any, ...], shape: tuple[int, ...]) -> mx.array:
    source, *indices = x
    axes, sizes = a
    wanted = tuple(1 if i in axes else n for i, n in enumerate(source.shape))
    assert tuple(sizes) == wanted, "a gather of parts"
    rest = [axis for axis in range(source.ndim) if axis not in axes]
    return source.transpose(*axes, *rest)[tuple(indices)].reshape(shape)


def _scatter(x: list[mx.array], a: tuple[Any, ...], shape: tuple[int, ...]) -> mx.array:
    source, rows, values = x
    reduction, axes = a
    assert axes == (0,), "a scatter along other axes than the first"
    values = values.squeeze(rows.ndim)
    return source.at[rows].add(values) if reduction == 2 else _written(source, rows, values)


def _written(source: mx.array, place: Any, values: mx.array) -> mx.array:
    copy = mx.array(source)
    copy[place] = values
    return copy


def _cuts(a: tuple[Any, ...]) -> tuple[slice, ...]:
    return tuple(slice(*each) for each in zip(*a, strict=True))


def _padded(x: list[mx.array], a: tuple[Any, ...], shape: tuple[int, ...]) -> mx.array:
    axes, low, high = a
    around = dict(zip(axes, zip(low, high, strict=True), strict=True))
    widths = [around.get(axis, (0, 0)) for axis in range(x[0].ndim)]
    return mx.pad(x[0], widths, constant_values=x[1])


def _convolved(x: list[mx.array], a: tuple[Any, ...], shape: tuple[int, ...]) -> mx.array:
    stride, low, high, kernel_dilation, input_dilation, groups, flip = a
    return mx.conv_general(
        x[0],
        x[1],
        stride,
        padding=(low, high),
        kernel_dilation=kernel_dilation,
        input_dilation=input_dilation,
        groups=groups,
        flip=flip,
    )


_REDUCTIONS = (mx.all, mx.any, mx.sum, mx.prod, mx.min, mx.max)
_BITS = (mx.bitwise_and, mx.bitwise_or, mx.bitwise_xor, mx.left_shift, mx.right_shift)
_SAME_NAMES = """
    Negative Sigmoid Exp Log1p Square Erf Expm1 Sin Cos Floor Abs Sign Round Add Subtract
    Multiply Divide Maximum Minimum Power LogAddExp Greater Less Remainder Equal
"""

ELEMENTWISE: Mapping[str, Meaning] = {
    **{name: _plain(getattr(mx, name.lower())) for name in _SAME_NAMES.split()},
    # As models compute it: some devices have a kernel.
    "Tanh": lambda x, a, shape: current_device().operations.tanh(x[0]),
    "GreaterEqual": _plain(mx.greater_equal),
    "LessEqual": _plain(mx.less_equal),
    "NotEqual": _plain(mx.not_equal),
    "LogicalAnd": _plain(mx.logical_and),
    "LogicalOr": _plain(mx.logical_or),
    "LogicalNot": _plain(mx.logical_not),
    "Select": _plain(mx.where),
    "FloorDivide": _plain(mx.floor_divide),
    "Log": lambda x, a, shape: (mx.log2, mx.log10, mx.log)[a[0]](x[0]),
    "Sqrt": lambda x, a, shape: mx.rsqrt(x[0]) if a[0] else mx.sqrt(x[0]),
    "AsType": lambda x, a, shape: x[0].astype(a[0]),
    "BitwiseBinary": lambda x, a, shape: _BITS[a[0]](x[0], x[1]),
    "Arange": lambda x, a, shape: mx.arange(*a),
}
"""Primitives of which each output element depends on the same element of the inputs."""

VIEWS: Mapping[str, Meaning] = {
    **dict.fromkeys(
        ("Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze"),
        lambda x, a, shape: x[0].reshape(shape),
    ),
    "Transpose": lambda x, a, shape: x[0].transpose(a[0]),
    "Broadcast": lambda x, a, shape: mx.broadcast_to(x[0], shape),
    "Slice": lambda x, a, shape: x[0][_cuts(a)],
    "Split": lambda x, a, shape: mx.split(x[0], list(a[0]), axis=a[1]),
    **dict.fromkeys(("Full", "StopGradient", "Copy"), lambda x, a, shape: x[0]),
}
"""Primitives whose output has the input's elements in another arrangement."""

MEANINGS: Mapping[str, Meaning] = {
    **ELEMENTWISE,
    **VIEWS,
    "Concatenate": lambda x, a, shape: mx.concatenate(x, axis=a[0]),
    "Gather": _gather,
    "GatherAxis": lambda x, a, shape: mx.take_along_axis(x[0], x[1], axis=a[0]),
    "Scatter": _scatter,
    "ScatterAxis": lambda x, a, shape: mx.put_along_axis(x[0], x[1], x[2], axis=a[1]),
    "SliceUpdate": lambda x, a, shape: _written(x[0], _cuts(a[1:]), x[1]),
    "Reduce": lambda x, a, shape: _REDUCTIONS[a[0]](x[0], axis=a[1], keepdims=True),
    "ArgReduce": lambda x, a, shape: (mx.argmin, mx.argmax)[a[0]](x[0], axis=a[1], keepdims=True),
    "Scan": lambda x, a, shape: mx.cumsum(x[0], axis=a[1], reverse=a[2], inclusive=a[3]),
    "Softmax": lambda x, a, shape: mx.softmax(x[0], axis=-1, precise=a[0]),
    "LogSumExp": lambda x, a, shape: mx.logsumexp(x[0], axis=-1, keepdims=True),
    "ArgPartition": lambda x, a, shape: mx.argpartition(x[0], kth=a[0], axis=a[1]),
    "Partition": lambda x, a, shape: mx.partition(x[0], kth=a[0], axis=a[1]),
    "ArgSort": lambda x, a, shape: mx.argsort(x[0], axis=a[0]),
    "Sort": lambda x, a, shape: mx.sort(x[0], axis=a[0]),
    "Pad": _padded,
    "Depends": lambda x, a, shape: x,  # gives the first ones, and orders them behind the rest
    "Matmul": lambda x, a, shape: x[0] @ x[1],
    "Convolution": _convolved,
    "View": lambda x, a, shape: x[0].view(a[0]),
    "AddMM": lambda x, a, shape: mx.addmm(x[2], x[0], x[1], a[0], a[1]),
}
