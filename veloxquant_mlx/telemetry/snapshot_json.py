"""Snapshots as JSON, without loss: what a snapshot file holds.

A file is one JSON object. Its first line holds all but the snapshot, so that a reader who wants to
know only who wrote it, and in which state, parses that line alone (`parse_header`).

Bucket bounds are the same for many histograms and stand once, in "bounds"; a histogram is its index
there, its counts and its total. Numbers that JSON lacks are "Infinity", "-Infinity" and "NaN".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

from veloxquant_mlx.telemetry.identity import ProcessIdentity
from veloxquant_mlx.telemetry.json_codec import (
    Bounds,
    SnapshotFormatError,
    decode,
    dumps,
    encode,
    loads,
)
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.snapshot import SCHEMA, PoolSnapshot

__all__ = [
    "FILE_SUFFIX",
    "MAX_FILE_BYTES",
    "MAX_HEADER_BYTES",
    "Header",
    "SchemaError",
    "SnapshotFile",
    "SnapshotFormatError",
    "encode_file",
    "encode_shrunk",
    "parse_file",
    "parse_header",
    "pool_from_dict",
    "pool_to_dict",
    "process_from_dict",
    "process_to_dict",
]

FILE_SUFFIX: Final = ".snapshot.json"
# 65 pools with a storage take a quarter of this.
MAX_FILE_BYTES: Final = 2**20
MAX_HEADER_BYTES: Final = 4096
MAX_LABEL_CHARS: Final = 128
STATES: Final = ("running", "stopped")


class SchemaError(SnapshotFormatError):
    """The data are of another version of the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line of a snapshot file.

    Attributes:
        schema: Version of the layout.
        state: "running", or "stopped" in the last file of a clean exit.
        sequence: Rises with each write: the heartbeat.
        interval_s: Seconds between writes.
        process: The label that tells processes apart, 1 to 128 printable characters.
        born_s: When publishing began, in seconds since the epoch; tells which of two is newer.
        identity: Who wrote it.
    """

    schema: int = SCHEMA
    state: str
    sequence: int
    interval_s: float
    process: str
    born_s: float
    identity: ProcessIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """Everything in a snapshot file.

    Attributes:
        header: Its first line.
        snapshot: The process.
        resource: OpenTelemetry resource attributes of the writer.
        events: Last events of the flight recorder, newest last; empty without one.
    """

    header: Header
    snapshot: ProcessSnapshot
    resource: Mapping[str, str] = field(default_factory=dict)
    events: tuple[Mapping[str, Any], ...] = ()


# -- whole files ---------------------------------------------------------------------------------


def encode_file(file: SnapshotFile) -> bytes:
    """`file` as UTF-8 JSON, the header on the first line.

    Text that no exporter could show (lone surrogates) is replaced by "?".
    """
    head = dumps(encode(file.header, Bounds()))
    rest = dumps(
        {
            **process_to_dict(file.snapshot),
            "resource": dict(file.resource),
            "events": list(file.events),
        }
    )
    text = f'{{"header":{head},\n{rest[1:]}\n'
    return text.encode("utf-8", "replace")


def encode_shrunk(file: SnapshotFile, limit: int) -> bytes:
    """`file` in `limit` bytes: without events, then with half of its pools, a quarter, ...

    How many pools were left out stands under `dropped`, as pools_unpublished.
    """
    pools = file.snapshot.pools
    while True:
        left_out = len(file.snapshot.pools) - len(pools)
        snapshot = replace(
            file.snapshot,
            pools=pools,
            dropped={**file.snapshot.dropped, "pools_unpublished": left_out},
        )
        data = encode_file(replace(file, snapshot=snapshot, events=()))
        if len(data) <= limit or not pools:
            return data
        pools = pools[: len(pools) // 2]


def parse_header(data: bytes) -> Header:
    """The header of a file of which `data` is the beginning.

    Raises:
        SchemaError: It is of another version.
        SnapshotFormatError: It is no such file.
    """
    line, newline, _ = data[:MAX_HEADER_BYTES].partition(b"\n")
    if not newline or not line.endswith(b","):
        raise SnapshotFormatError("the first line is not the header of a snapshot file")
    return _header(loads(line[:-1] + b"}"))


def parse_file(data: bytes) -> SnapshotFile:
    """All of a file.

    Raises:
        SchemaError: It is of another version.
        SnapshotFormatError: It is no such file, or was cut.
    """
    raw = loads(data)
    header = _header(raw)
    resource = decode(Mapping[str, str], raw.get("resource", {}), [], "resource")
    events = raw.get("events", [])
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise SnapshotFormatError("events: must be a list of objects")
    return SnapshotFile(
        header=header,
        snapshot=process_from_dict(raw),
        resource=resource,
        events=tuple(events),
    )


def _header(raw: Mapping[str, Any]) -> Header:
    inner = raw.get("header")
    if not isinstance(inner, dict):
        raise SnapshotFormatError("header: must be an object")
    _check_schema(inner)
    header: Header = decode(Header, inner, [], "header")
    if header.state not in STATES:
        raise SnapshotFormatError(f"header.state: must be one of {STATES}, got {header.state!r}")
    if not 0 < header.interval_s <= 86400:
        raise SnapshotFormatError(f"header.interval_s: must be 0 to 86400, got {header.interval_s}")
    if not 0 < len(header.process) <= MAX_LABEL_CHARS or not header.process.isprintable():
        raise SnapshotFormatError("header.process: must be 1 to 128 printable characters")
    return header


def _check_schema(raw: Mapping[str, Any]) -> None:
    schema = raw.get("schema")
    if type(schema) is not int:
        raise SnapshotFormatError("schema: missing")
    if schema != SCHEMA:
        raise SchemaError(f"schema: this reads version {SCHEMA}, got {schema}")


# -- dicts ---------------------------------------------------------------------------------------


def process_to_dict(snapshot: ProcessSnapshot) -> dict[str, Any]:
    """`snapshot` as plain JSON values, with the schema version; see `process_from_dict`."""
    return _to_dict(snapshot)


def process_from_dict(raw: Mapping[str, Any]) -> ProcessSnapshot:
    """The snapshot of which `process_to_dict` made `raw`; unknown keys are passed over.

    Raises:
        SchemaError: It is of another version.
        SnapshotFormatError: It is no such dict.
    """
    snapshot: ProcessSnapshot = _from_dict(ProcessSnapshot, raw)
    names = [pool.name for pool in snapshot.pools]
    if len(set(names)) != len(names):
        raise SnapshotFormatError("snapshot.pools: two of one name")
    return snapshot


def pool_to_dict(snapshot: PoolSnapshot) -> dict[str, Any]:
    """`snapshot` as plain JSON values, with the schema version; see `pool_from_dict`."""
    return _to_dict(snapshot)


def pool_from_dict(raw: Mapping[str, Any]) -> PoolSnapshot:
    """As `process_from_dict`, for `pool_to_dict`."""
    snapshot: PoolSnapshot = _from_dict(PoolSnapshot, raw)
    return snapshot


def _to_dict(value: object) -> dict[str, Any]:
    bounds = Bounds()
    encoded = encode(value, bounds)
    return {"schema": SCHEMA, "bounds": bounds.rows(), "snapshot": encoded}


def _from_dict(kind: type, raw: Mapping[str, Any]) -> Any:
    _check_schema(raw)
    rows = raw.get("bounds")
    if not isinstance(rows, list):
        raise SnapshotFormatError("bounds: must be a list of lists of numbers")
    bounds = [decode(tuple[float, ...], row, [], f"bounds[{n}]") for n, row in enumerate(rows)]
    for n, row in enumerate(bounds):
        if any(not low < high for low, high in pairwise(row)):
            raise SnapshotFormatError(f"bounds[{n}]: must ascend")
    return decode(kind, raw.get("snapshot"), bounds, "snapshot")
