"""The values of a segment while it is built, and where a program's values lie among them."""

from __future__ import annotations

from math import prod
from typing import Any

import mlx.core as mx

from quire.executor.segments.places import Place, UnsupportedNode, fixed, joined_axes, row_shape
from quire.program.values import Program


class SegmentValues:
    """Numbers a segment's values: given ones, computed ones, and constants.

    Args:
        native: the extension's segment.
    """

    def __init__(self, program: Program, native: Any) -> None:
        self._program, self._native = program, native
        self._places: dict[int, Place] = {}
        self._constants: dict[int, int] = {}
        self._given: dict[int, int] = {}
        self._integers = set[int]()

    def _place(self, id: int) -> Place:
        """Return where a value's rows lie; a value from outside is given to the segment."""
        if id not in self._places:
            constant = self._program.constants.get(id)
            if constant is not None:
                shape = fixed(self._program.values[id].shape)
                self._places[id] = Place.of(self._constant(constant.array), shape)
            else:
                value = self._program.values[id]
                shape = row_shape(value)
                number = self._native.given(prod(shape), integers=value.dtype == mx.int32)
                self._given[id] = number
                if value.dtype == mx.int32:
                    self._integers.add(number)
                self._places[id] = Place.of(number, shape)
        return self._places[id]

    def _whole(self, id: int) -> int:
        """Return the segment's value that holds a value's rows, element by element."""
        place = self._place(id)
        if not place.whole or place.value in self._constants.values():
            place = self._places[id] = self._copied(place)
        return place.value

    def _copied(self, place: Place) -> Place:
        shape, (strides,) = joined_axes([place])
        number = self._value(prod(place.shape), integers=place.value in self._integers)
        self._native.copy(place.value, strides, place.offset, number, shape)
        return Place.of(number, place.shape)

    def _new(self, id: int) -> int:
        shape = row_shape(self._program.values[id])
        number = self._value(prod(shape), integers=self._program.values[id].dtype == mx.int32)
        self._places[id] = Place.of(number, shape)
        return number

    def _value(self, width: int, *, integers: bool) -> int:
        number: int = self._native.value(width, integers=integers)
        if integers:
            self._integers.add(number)
        return number

    def _constant(self, array: mx.array) -> int:
        if array.dtype != mx.float32:
            raise UnsupportedNode("constants of other types than float32")
        if id(array) not in self._constants:
            self._constants[id(array)] = self._native.constant(array)
        return self._constants[id(array)]
