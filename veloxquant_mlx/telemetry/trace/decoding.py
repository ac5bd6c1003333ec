"""Decoding: the frames of a trace file, and the values in them, checked before anyone relies on them.

Nothing a file says is trusted: lengths are bounded before memory is taken for them, numbers are in
their range, and what is not as it should be raises a `TraceError` of one line.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from veloxquant_mlx.telemetry.trace.columns import CODES
from veloxquant_mlx.telemetry.trace.libraries import load_library
from veloxquant_mlx.telemetry.trace.schema import (
    CHUNK,
    END,
    FRAME,
    HEADER,
    MAGIC,
    MAX_COUNT,
    MAX_FRAME_BYTES,
    MAX_NS,
    MAX_PLAIN_BYTES,
    VERSION,
    TraceError,
)

__all__ = ["Frames", "column", "columns", "integer", "mapping", "sequence", "text"]


# Maps and arrays in a frame. A frame of the largest size that is nothing but empty ones would take
# seventy times its size in memory; a real one has some thousand, nearly all of them in snapshots.
MAX_CONTAINERS: Final = 1 << 17


class _TooMany(ValueError):  # noqa: N818 - told as a TraceError
    """More containers than a frame may have."""


class _Containers:
    """Counts what MessagePack makes while it makes it."""

    def __init__(self) -> None:
        self._n = 0

    def __call__(self, container: Any) -> Any:
        self._n += 1
        if self._n > MAX_CONTAINERS:
            raise _TooMany(f"more than {MAX_CONTAINERS} maps and arrays in a frame")
        return container


class Frames:
    """The frames of a file, one after another.

    Attributes:
        cut: True once the data ended within a frame, or without the frame that ends a trace.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._unpack = load_library("msgpack").unpackb
        zstandard = load_library("zstandard")
        self._zstd_error = zstandard.ZstdError
        self._size_of = zstandard.frame_content_size
        self._decompress = zstandard.ZstdDecompressor(max_window_size=MAX_PLAIN_BYTES).decompress
        self.cut = True

    def __iter__(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        data, at = self._data, len(MAGIC) + 1
        if data[: len(MAGIC)] != MAGIC[: len(data)]:
            raise TraceError("this is no trace: it does not begin with VQTRACE")
        if len(data) < at:
            raise TraceError("the file was cut before it said anything")
        if data[at - 1] != VERSION:
            raise TraceError(
                f"the trace is of format version {data[at - 1]}; this program reads version {VERSION}"
            )
        while len(data) - at >= FRAME.size:
            length, checksum, kind = FRAME.unpack_from(data, at)
            if kind not in (HEADER, CHUNK, END) or not 0 < length <= MAX_FRAME_BYTES:
                raise TraceError(f"damaged at byte {at}: no frame begins there")
            begin = at + FRAME.size
            if len(data) - begin < length:
                return
            body = data[begin : begin + length]
            if zlib.crc32(body, zlib.crc32(kind)) != checksum:
                raise TraceError(f"damaged at byte {at}: the checksum does not fit")
            yield kind, self._content(body, at)
            at = begin + length
            if kind == END:
                self.cut = False
                if at != len(data):
                    raise TraceError(f"damaged at byte {at}: there is more after the end")
                return

    def _content(self, body: bytes, at: int) -> dict[str, Any]:
        try:
            if not 0 <= self._size_of(body) <= MAX_PLAIN_BYTES:
                raise TraceError(
                    f"damaged at byte {at}: a frame unpacks to more than {MAX_PLAIN_BYTES} bytes"
                )
            plain, count = self._decompress(body), _Containers()
            content = self._unpack(
                plain,
                strict_map_key=True,
                max_str_len=MAX_PLAIN_BYTES,
                max_bin_len=MAX_PLAIN_BYTES,
                max_array_len=len(plain),
                max_map_len=len(plain),
                max_ext_len=0,
                object_hook=count,
                list_hook=count,
            )
        except TraceError:
            raise
        except (self._zstd_error, ValueError, TypeError, RecursionError, MemoryError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise TraceError(f"damaged at byte {at}: {reason}") from None
        return mapping(content, "a frame")


def mapping(value: object, what: str) -> dict[str, Any]:
    """`value`, which must be a map with text for keys."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise TraceError(f"{what} is no map")
    return value


def sequence(value: object, what: str) -> list[Any]:
    """`value`, which must be an array."""
    if not isinstance(value, list):
        raise TraceError(f"{what} is no array")
    return value


def integer(value: object, what: str, low: int = 0, high: int = MAX_COUNT) -> int:
    """`value`, which must be a whole number of `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise TraceError(f"{what} must be a whole number in {low}..{high}, is {value!r:.40}")
    return value


def text(value: object, what: str, most: int = 256) -> str:
    """`value`, which must be text of at most `most` characters."""
    if not isinstance(value, str) or len(value) > most:
        raise TraceError(f"{what} must be text of at most {most} characters, is {value!r:.40}")
    return value


def column(value: object, n: int, what: str, low: int = 0, high: int = MAX_COUNT) -> Any:
    """A packed column of `n` numbers of `low` to `high`, as an int64 array."""
    numpy = load_library("numpy")
    packed = sequence(value, what)
    if len(packed) != 2 or packed[0] not in CODES or not isinstance(packed[1], bytes):
        raise TraceError(f"{what} is no column")
    code, data = packed
    if len(data) != n * CODES[code]:
        raise TraceError(f"{what} has {len(data)} bytes for {n} numbers of {CODES[code]}")
    numbers = numpy.frombuffer(data, f"<i{CODES[code]}").astype(numpy.int64)
    if n and not (low <= int(numbers.min()) and int(numbers.max()) <= high):
        raise TraceError(f"{what} has a number outside of {low}..{high}")
    return numbers


def columns(value: Mapping[str, Any], n: int, names: Mapping[str, bool], what: str) -> Any:
    """The columns of these names (whose value says whether -1 is allowed), by name.

    Times, which end in `_ns`, may be longer than any count: a server idles for a weekend.
    """
    return {
        name: column(
            value.get(name),
            n,
            f"{what} {name}",
            -1 if negative else 0,
            MAX_NS if name.endswith("_ns") else MAX_COUNT,
        )
        for name, negative in names.items()
    }
