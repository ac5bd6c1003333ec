"""Plain JSON values of frozen dataclasses and back, by their declared types.

What is decoded has the declared types all the way down, so that nothing else gets in; what is
encoded is walked only where it is not plain JSON already, which is most of it.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

__all__ = ["Bounds", "SnapshotFormatError", "decode", "dumps", "encode", "loads"]


class SnapshotFormatError(ValueError):
    """The data are no snapshot; the text says what and where."""


class Bounds:
    """Distinct bucket bounds, each by its index: they are the same for many histograms."""

    def __init__(self) -> None:
        self._index: dict[tuple[float, ...], int] = {}

    def index(self, bounds: tuple[float, ...]) -> int:
        """The index of `bounds`, a new one at first."""
        return self._index.setdefault(bounds, len(self._index))

    def rows(self) -> list[list[Any]]:
        """All of them, by index."""
        return [[number(bound) for bound in row] for row in self._index]


# -- encoding ------------------------------------------------------------------------------------


def dumps(value: object) -> str:
    """`value` as JSON without spaces; text stays as it is."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def number(value: float) -> Any:
    # `value - value` is 0 for all that JSON can hold.
    if type(value) is float and value - value != 0:
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"  # noqa: PLR0124
    return value


# Compiled from the declared types: what is plain JSON as it stands is not walked, which is most.
_Encoder = Callable[[Any, Bounds], Any]


def encode(value: Any, bounds: Bounds) -> Any:
    """The dataclass `value` as plain JSON values, its bucket bounds put into `bounds`."""
    kind: Any = type(value)
    return _dataclass_encoder(kind)(value, bounds)


@cache
def _encoder(kind: Any) -> _Encoder | None:
    """What encodes a value that is declared as `kind`; None where it is JSON already."""
    if kind is HistogramSnapshot:
        return _encode_histogram
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass_encoder(kind)
    if kind is float:
        return lambda value, _bounds: number(value)
    if kind in (int, str, bool, Any):
        return None
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _optional_encoder(next(arg for arg in args if arg is not type(None)))
    if origin is tuple:
        inner = _encoder(args[0])
        return inner and (lambda value, bounds: [inner(item, bounds) for item in value])
    return _mapping_encoder(args[1])


def _encode_histogram(value: HistogramSnapshot, bounds: Bounds) -> list[Any]:
    return [bounds.index(value.bounds), value.counts, number(value.total)]


def _optional_encoder(kind: Any) -> _Encoder | None:
    inner = _encoder(kind)
    return inner and (lambda value, bounds: None if value is None else inner(value, bounds))


def _mapping_encoder(kind: Any) -> _Encoder:
    inner = _encoder(kind)
    if inner is None:
        return lambda value, _bounds: value if type(value) is dict else dict(value)
    return lambda value, bounds: {key: inner(item, bounds) for key, item in value.items()}


@cache
def _dataclass_encoder(kind: type) -> _Encoder:
    hints = get_type_hints(kind)
    plain = tuple(item.name for item in fields(kind) if _encoder(hints[item.name]) is None)
    others = tuple(
        (item.name, encoder)
        for item in fields(kind)
        if (encoder := _encoder(hints[item.name])) is not None
    )

    def encode_one(value: Any, bounds: Bounds) -> dict[str, Any]:
        encoded = {name: getattr(value, name) for name in plain}
        for name, encoder in others:
            encoded[name] = encoder(getattr(value, name), bounds)
        return encoded

    return encode_one


# -- decoding: by the declared types, so that nothing else gets in --------------------------------

_NOT_NUMBERS: Final = {
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
_ESCAPED_SURROGATE: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89a-fA-F]")
_Decoder = Callable[[Any, list[Any], str], Any]


def loads(data: bytes) -> dict[str, Any]:
    """A JSON object; whatever else `data` is ends in a SnapshotFormatError."""
    # The writer leaves text as it is. An escaped surrogate would pass here, and no page could show it.
    if b"\\u" in data and _ESCAPED_SURROGATE.search(data):
        raise SnapshotFormatError("text holds an escaped surrogate")
    try:
        raw = _DECODER.decode(data.decode("utf-8"))
    except (ValueError, RecursionError, MemoryError) as error:
        raise SnapshotFormatError(f"not JSON, or cut: {error}") from None
    if not isinstance(raw, dict):
        raise SnapshotFormatError(f"must be an object, got {type(raw).__name__}")
    return raw


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def decode(kind: Any, raw: Any, bounds: list[Any], where: str) -> Any:
    """The value of the declared type `kind` of which `encode` made `raw`.

    Args:
        kind: A dataclass, str, int, float, bool, tuple[X, ...], Mapping[str, X] or X | None.
        raw: JSON values.
        bounds: Decoded rows of `Bounds`.
        where: What it is, for errors.

    Raises:
        SnapshotFormatError: `raw` is something else.
    """
    return _decoder(kind)(raw, bounds, where)


@cache
def _decoder(kind: Any) -> _Decoder:
    """What decodes a value that is declared as `kind`."""
    if kind is HistogramSnapshot:
        return _histogram
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass_decoder(kind)
    if kind in (int, str, bool):
        return _plain_decoder(kind)
    if kind is float:
        return _float
    if kind is Any:
        return lambda raw, _bounds, _where: raw
    return _compound_decoder(kind)


def _compound_decoder(kind: Any) -> _Decoder:
    origin: Any = get_origin(kind)
    args = get_args(kind)
    if origin in (Union, types.UnionType) and len(args) == 2 and type(None) in args:
        return _optional_decoder(next(arg for arg in args if arg is not type(None)))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _tuple_decoder(args[0])
    if isinstance(origin, type) and issubclass(origin, Mapping) and args[0] is str:  # pyright: ignore[reportArgumentType]
        return _mapping_decoder(args[1])
    raise TypeError(f"no JSON form is known for {kind}")


def _fail(where: str, wanted: str, raw: Any) -> SnapshotFormatError:
    return SnapshotFormatError(f"{where}: must be {wanted}, got {type(raw).__name__}")


def _plain_decoder(kind: type) -> _Decoder:
    def decode_one(raw: Any, _bounds: list[Any], where: str) -> Any:
        if type(raw) is not kind:
            raise _fail(where, kind.__name__, raw)
        return raw

    return decode_one


def _float(raw: Any, _bounds: list[Any], where: str) -> float:
    if type(raw) is float or type(raw) is int:
        return raw
    if type(raw) is str and raw in _NOT_NUMBERS:
        return _NOT_NUMBERS[raw]
    raise _fail(where, "a number", raw)


def _optional_decoder(kind: Any) -> _Decoder:
    inner = _decoder(kind)
    return lambda raw, bounds, where: None if raw is None else inner(raw, bounds, where)


def _tuple_decoder(kind: Any) -> _Decoder:
    inner = _decoder(kind)

    def decode_one(raw: Any, bounds: list[Any], where: str) -> tuple[Any, ...]:
        if type(raw) is not list:
            raise _fail(where, "a list", raw)
        return tuple([inner(item, bounds, where) for item in raw])

    return decode_one


def _mapping_decoder(kind: Any) -> _Decoder:
    inner = _decoder(kind)

    def decode_one(raw: Any, bounds: list[Any], where: str) -> dict[str, Any]:
        if type(raw) is not dict:
            raise _fail(where, "an object", raw)
        return {key: inner(item, bounds, where) for key, item in raw.items()}

    return decode_one


def _dataclass_decoder(kind: type) -> _Decoder:
    hints = get_type_hints(kind)
    rows = [
        (
            item.name,
            _decoder(hints[item.name]),
            item.default is MISSING and item.default_factory is MISSING,
        )
        for item in fields(kind)
    ]

    def decode_one(raw: Any, bounds: list[Any], where: str) -> Any:
        if type(raw) is not dict:
            raise _fail(where, "an object", raw)
        values = {}
        for name, inner, required in rows:
            if name in raw:
                values[name] = inner(raw[name], bounds, name)
            elif required:
                raise SnapshotFormatError(f"{where}.{name}: missing")
        return kind(**values)

    return decode_one


def _histogram(raw: Any, bounds: list[Any], where: str) -> HistogramSnapshot:
    if type(raw) is not list or len(raw) != 3:
        raise _fail(where, "[index of the bounds, counts, total]", raw)
    index, counts, total = raw
    if type(index) is not int or not 0 <= index < len(bounds):
        raise SnapshotFormatError(f"{where}: no bounds {index!r}")
    if type(counts) is not list or len(counts) != len(bounds[index]) + 1:
        raise SnapshotFormatError(f"{where}: must have one count more than bounds")
    if any(type(count) is not int or count < 0 for count in counts):
        raise SnapshotFormatError(f"{where}: counts must be ints of 0 or more")
    return HistogramSnapshot(bounds[index], tuple(counts), _float(total, bounds, where))
