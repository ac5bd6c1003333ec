"""Schema: what a trace file holds, and the limits that reader and writer keep. docs/traces.md.

A file is `MAGIC`, a version byte, and frames: little-endian length and CRC-32 of what follows, a
kind byte, and a MessagePack map that Zstandard compressed. A header comes first, chunks follow, an
end closes it. A file without an end was cut, by a crash or because it is still being written.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from veloxquant_mlx.memory.pool_config import PoolConfig

__all__ = [
    "OPERATIONS",
    "OUTCOMES",
    "Header",
    "Holding",
    "Level",
    "Opening",
    "TraceError",
]

MAGIC: Final = b"VQTRACE"
VERSION: Final = 1
SUFFIX: Final = ".vqtrace"

# Length of the compressed map, CRC-32 of the kind byte and the map, kind.
FRAME: Final = struct.Struct("<IIc")
HEADER: Final = b"H"
CHUNK: Final = b"C"
END: Final = b"E"

MAX_FRAME_BYTES: Final = 16 << 20
MAX_PLAIN_BYTES: Final = 64 << 20
CHUNK_ROWS: Final = 32768  # of a writer; of a reader the frame's limits
MAX_ROWS: Final = 20_000_000
MAX_NAME_CHARS: Final = 256
# Of whatever is counted: as many of it as a trace may have rows still add up within 64 bits.
MAX_COUNT: Final = 1 << 36
MAX_NS: Final = 1 << 60  # 36 years

# By index, as the columns `operation` and `outcome` have them. "resumed" is of rows that a reader
# makes up for calls that were lost, so that the books go on from what was held after them.
OPERATIONS: Final = ("allocate", "free", "free_all", "shrink")
OUTCOMES: Final = ("ok", "exhausted", "resumed")
ALLOCATE_OP, FREE_OP, FREE_ALL_OP, SHRINK_OP = range(4)
OK, EXHAUSTED_OUTCOME, RESUMED = range(3)

# Of the rows: name and whether less than 0 is allowed.
COLUMNS: Final = {
    "delta_ns": False,
    "new_call": False,
    "operation": False,
    "outcome": False,
    "stream": False,
    "format": False,
    "owner": True,  # -1: nobody's, of a shrink
    "blocks": False,
    "tokens": True,  # -1: not known
    "growth": False,
}
SAMPLE_COLUMNS: Final = {"at_ns": False, "operation": False, "blocks": False, "took_ns": False}
HOLDING_COLUMNS: Final = {
    "owner": False,
    "stream": False,
    "format": False,
    "blocks": False,
    "slack": False,
}


class TraceError(ValueError):
    """A file is no trace, is damaged, or says what cannot be; the message is one line."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one owner held in one stream and format when a trace began.

    Attributes:
        owner: Number of the owner in the trace.
        stream: Index into the header's `streams`.
        format: Index into the trace's `formats`.
        blocks: Blocks held, >= 1.
        slack: Token slots in them that were not filled.
    """

    owner: int
    stream: int
    format: int
    blocks: int
    slack: int


@dataclass(frozen=True, slots=True)
class Level:
    """Blocks of a stream: free, and managed in all."""

    free: int
    managed: int


@dataclass(frozen=True, slots=True)
class Opening:
    """The books when a trace began, or when it went on after calls that were lost.

    Attributes:
        holdings: One an owner, stream and format.
        levels: One a stream, in the order of the header's `streams`.
        newborn: True if the pool had never handed out a block, so that block ids are known too.
    """

    holdings: tuple[Holding, ...]
    levels: tuple[Level, ...]
    newborn: bool = False


@dataclass(frozen=True, slots=True)
class Header:
    """What a trace says of itself.

    Attributes:
        version: Of the file format.
        pool: Name of the pool.
        config: The pool's settings.
        began_wall_s: Unix time of the beginning.
        began_ns: The recording process' monotonic clock at the beginning; `at_ns` counts from it.
        reason: Why it was written: "continuous", "asked", "exhausted" or "violation".
        streams: Names of the streams, ("k", "v") or ("kv",).
        opening: The books at the beginning.
        versions: Program versions: "veloxquant", "python", "mlx" where it was loaded.
    """

    version: int
    pool: str
    config: PoolConfig
    began_wall_s: float
    began_ns: int
    reason: str
    streams: tuple[str, ...]
    opening: Opening
    versions: dict[str, str]
