"""Trace files: whole, cut at every byte, damaged, and made to do harm."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgpack", reason="traces are the extra trace")
pytest.importorskip("zstandard", reason="traces are the extra trace")
pytest.importorskip("numpy", reason="traces are the extra trace")

import numpy as np
import zstandard

from tests.recorder_help import history, play, small_pool
from veloxquant_exporters.replay import Driver
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import record, uninstrument
from veloxquant_mlx.telemetry.trace import OPERATIONS, OUTCOMES, Trace, TraceError, load_trace
from veloxquant_mlx.telemetry.trace.libraries import load_library
from veloxquant_mlx.telemetry.trace.schema import COLUMNS, FRAME, MAGIC, MAX_PLAIN_BYTES, VERSION

msgpack = load_library("msgpack")  # without types


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file of several chunks, with everything in it."""
    path = tmp_path_factory.mktemp("traces") / "t.vqtrace"
    pool = small_pool(separate=True, grow=True)
    recorder = record(pool, path, owners=True, folder=path.parent, flush_s=0.0, snapshot_s=86_400)
    for seed in range(3):
        play(pool, history(seed, 12))
        recorder.flush()
    recorder.stop()
    uninstrument(pool)
    return path.read_bytes()


def loaded(data: bytes, folder: Path) -> Trace:
    """What `load_trace` makes of these bytes."""
    path = folder / "x.vqtrace"
    path.write_bytes(data)
    return load_trace(path)


def frame(kind: bytes, content: Any, *, packed: bytes | None = None) -> bytes:
    """A frame as the writer makes it, of any content."""
    body = packed
    if body is None:
        body = zstandard.compress(msgpack.packb(content))
    return FRAME.pack(len(body), zlib.crc32(body, zlib.crc32(kind)), kind) + body


def numbers(*values: int, code: str = "q") -> list[Any]:
    """A packed column."""
    return [code, array(code, values).tobytes()]


def no_holdings() -> dict[str, Any]:
    """Nothing held."""
    return {
        "n": 0,
        **{name: numbers() for name in ("owner", "stream", "format", "blocks", "slack")},
    }


def header(**changes: Any) -> dict[str, Any]:
    """A header of a pool of 8 blocks."""
    return {
        "version": VERSION,
        "pool": "p",
        "config": {
            "block_size": 16,
            "n_blocks": 8,
            "separate_kv": False,
            "grow_on_exhaustion": False,
            "max_blocks": None,
        },
        "began_wall_s": 1.7e9,
        "began_ns": 5,
        "reason": "asked",
        "streams": ["kv"],
        "holdings": no_holdings(),
        "levels": [[8, 8]],
        "newborn": True,
        "versions": {},
        "n_owners": 0,
        "formats": [],
        **changes,
    }


def chunk(n: int = 1, **changes: Any) -> dict[str, Any]:
    """A chunk of one allocation of 2 blocks."""
    one = dict(zip(COLUMNS, (0, 1, 0, 0, 0, 0, 0, 2, 32, 0), strict=True))
    columns = {name: numbers(*[value] * n) for name, value in one.items()}
    return {"n": n, **columns, "n_owners": 1, "formats": ["fp16"], **changes}


def file_of(*frames: bytes) -> bytes:
    """A file of these frames."""
    return MAGIC + bytes([VERSION]) + b"".join(frames)


def made(head: dict[str, Any] | None = None, *chunks: dict[str, Any]) -> bytes:
    """A file of a header and chunks."""
    return file_of(
        frame(b"H", header() if head is None else head), *(frame(b"C", c) for c in chunks)
    )


def test_what_the_pool_did_is_in_the_columns(tmp_path: Path) -> None:
    """Each call a row a part, with its outcome, tokens and what was free after it."""
    pool = BlockPoolAllocator(PoolConfig(16, 8, separate_kv=True))
    recorder = record(pool, owners=True, folder=tmp_path)
    pool.allocate("k", 20, "a")
    pool.allocate_kv(10, "b", "int4", n_filled=4)
    with pytest.raises(RuntimeError, match="has 1 of 2 blocks"):
        pool.allocate("k", 32, "c")
    pool.free(pool.blocks_for("a")[:1])
    pool.free_all("b")
    pool.shrink("v", 1)
    trace = load_trace(recorder.dump(tmp_path / "t.vqtrace"))
    recorder.stop()
    uninstrument(pool)
    rows = [
        (
            int(trace.call[row]),
            OPERATIONS[trace.operation[row]],
            OUTCOMES[trace.outcome[row]],
            trace.header.streams[trace.stream[row]],
            trace.formats[trace.format[row]],
            trace.owners[trace.owner[row]] if trace.owner[row] >= 0 else None,
            int(trace.blocks[row]),
            int(trace.tokens[row]),
            int(trace.free_after[row]),
        )
        for row in range(trace.n_rows)
    ]
    assert rows == [
        (0, "allocate", "ok", "k", "fp16", "a", 2, 20, 2),
        (1, "allocate", "ok", "k", "int4", "b", 1, 10, 1),
        (1, "allocate", "ok", "v", "int4", "b", 1, 10, 3),
        (2, "allocate", "exhausted", "k", "fp16", "c", 2, 32, 1),
        (3, "free", "ok", "k", "fp16", "a", 1, 16, 2),
        (4, "free_all", "ok", "k", "int4", "b", 1, 4, 3),
        (4, "free_all", "ok", "v", "int4", "b", 1, 4, 4),
        (5, "shrink", "ok", "v", "fp16", None, 3, -1, 1),
    ]
    assert trace.picks.rows.tolist() == [4] and trace.picks.positions.tolist() == [0]
    assert Counter(event.kind for event in trace.events) == {"exhausted": 1, "shrunk": 1}
    assert trace.snapshots[0].pool["n_allocations"] == 4
    assert trace.header.config == pool.config and trace.header.pool == "pool-0"
    assert np.all(np.diff(trace.at_ns) >= 0) and len(trace.samples.at_ns) > 0


def test_owner_ids_stay_out_unless_asked_for(tmp_path: Path) -> None:
    """A trace is shared; who the requests were is nobody's business."""
    pool = BlockPoolAllocator(PoolConfig(16, 8))
    recorder = record(pool, folder=tmp_path)
    pool.allocate("k", 20, "a-secret-name")
    path = recorder.dump(tmp_path / "t.vqtrace")
    recorder.stop()
    uninstrument(pool)
    trace = load_trace(path)
    assert trace.owners == () and trace.owner.tolist() == [0] and trace.n_owners == 1
    data = path.read_bytes()
    begin = len(MAGIC) + 1
    while begin < len(data):
        length, _, _ = FRAME.unpack_from(data, begin)
        begin += FRAME.size
        assert b"a-secret-name" not in zstandard.decompress(data[begin : begin + length])
        begin += length


def check_cuts(data: bytes, step: int, folder: Path) -> list[int]:
    """Cut `data` at every `step`-th byte; returns how many rows could be read of each."""
    full = loaded(data, folder)
    lengths, refusals = [], []
    for end in range(0, len(data), step):
        try:
            trace = loaded(data[:end], folder)
        except TraceError as error:
            refusals.append(str(error))
            continue
        assert trace.cut
        assert trace.at_ns.tolist() == full.at_ns.tolist()[: trace.n_rows]
        assert trace.free_after.tolist() == full.free_after.tolist()[: trace.n_rows]
        lengths.append(trace.n_rows)
    assert lengths == sorted(lengths)
    assert all("no trace" in line or "cut" in line for line in refusals)
    assert not any("\n" in line for line in refusals)
    return lengths


def test_a_cut_file_is_read_up_to_the_cut(whole: bytes, tmp_path: Path) -> None:
    """A shorter trace of the same rows, or one line that says what is missing."""
    full = loaded(whole, tmp_path)
    assert not full.cut and full.n_rows > 20
    lengths = check_cuts(whole, 7, tmp_path)
    assert len(set(lengths)) >= 3 and lengths[-1] == full.n_rows


def test_a_small_file_can_be_cut_at_every_byte(tmp_path: Path) -> None:
    """No byte is one too few or too many for the reader."""
    more = chunk(2, delta_ns=numbers(3, 4), n_owners=0, formats=[])
    data = made(None, chunk(), more) + frame(b"E", chunk(0, n_owners=0, formats=[]))
    assert set(check_cuts(data, 1, tmp_path)) == {0, 1, 3}


def test_a_damaged_file_is_refused_or_cut_short(whole: bytes, tmp_path: Path) -> None:
    """A flipped bit anywhere never gives other rows than were written."""
    full, refusals = loaded(whole, tmp_path), []
    for at in (*range(128), *range(128, len(whole), 11)):
        data = bytearray(whole)
        data[at] ^= 0x10
        try:
            trace = loaded(bytes(data), tmp_path)
        except TraceError as error:
            refusals.append(str(error))
            continue
        # A length that reaches beyond the end of the file looks like a cut.
        assert trace.cut and trace.at_ns.tolist() == full.at_ns.tolist()[: trace.n_rows]
    assert refusals and all(str(tmp_path) in line and "\n" not in line for line in refusals)


def test_made_up_files_are_as_good_as_written_ones(tmp_path: Path) -> None:
    """What the hostile ones below are changed from."""
    trace = loaded(made(None, chunk(2, owner=numbers(0, 0))), tmp_path)
    assert trace.free_after.tolist() == [6, 4] and trace.cut
    assert [moved.outcome for moved in Driver(trace).run()] == ["ok", "ok"]


def bomb() -> bytes:
    """A frame that unpacks to more than is allowed."""
    return frame(b"C", None, packed=zstandard.compress(bytes(MAX_PLAIN_BYTES + 1)))


def without_size() -> bytes:
    """A frame that does not say how large it will be."""
    pressed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    return frame(b"C", None, packed=pressed)


def raw(data: bytes) -> bytes:
    """A frame of these MessagePack bytes."""
    return frame(b"C", None, packed=zstandard.compress(data))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut before it said anything"),
    "foreign": (b"PK\x03\x04" + bytes(64), "no trace"),
    "newer": (MAGIC + bytes([VERSION + 1]) + bytes(32), f"version {VERSION + 1}"),
    "no header": (file_of(frame(b"C", chunk())), "header must come first"),
    "two headers": (made() + frame(b"H", header()), "once"),
    "unknown frame": (made() + frame(b"X", {}), "no frame begins there"),
    "huge frame": (made() + struct.pack("<IIc", 1 << 31, 0, b"C"), "no frame begins there"),
    "zeros": (made() + bytes(64), "no frame begins there"),
    "more after the end": (made() + frame(b"E", chunk()) + b"x", "after the end"),
    "bomb": (made() + bomb(), "unpacks to more"),
    "bomb without size": (made() + without_size(), "unpacks to more"),
    "no Zstandard": (made() + frame(b"C", None, packed=b"plain text"), "damaged"),
    "no MessagePack": (made() + raw(b"\xc1\xc1"), "damaged"),
    "array of 4 billion": (made() + raw(b"\xdd\xff\xff\xff\xff"), "damaged"),
    "map of 4 billion": (made() + raw(b"\xdf\xff\xff\xff\xff"), "damaged"),
    "bytes of 4 billion": (made() + raw(b"\xc6\xff\xff\xff\xff"), "damaged"),
    "deep": (made() + raw(b"\x91" * 100_000 + b"\x90"), "damaged"),
    "a million maps": (
        made() + raw(b"\x81\xa1x\xdd\x00\x10\x00\x00" + b"\x80" * (1 << 20)),
        "maps and arrays in a frame",
    ),
    "a million arrays": (
        made() + raw(b"\x81\xa1x\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20)),
        "maps and arrays in a frame",
    ),
    "extension": (made() + raw(b"\xd4\x01\x00"), "damaged"),
    "no map": (made() + raw(b"\x90"), "no map"),
    "key that is no text": (made() + raw(b"\x81\x01\x02"), "map key"),
    "no config": (made(header(config=None)), "no map"),
    "config of wrong types": (made(header(config={"block_size": "x"})), "the config is none"),
    "config with more": (made(header(config={"evil": 1})), "the config is none"),
    "config with a line break": (
        made(header(config={"a\n\x1b[31m" + "b" * 1000: 1})),
        "the config is none",
    ),
    "block size of 2**60": (
        made(header(config={**header()["config"], "block_size": 1 << 60})),
        "block_size must be",
    ),
    "streams": (made(header(streams=["a"])), "streams are"),
    "streams of another config": (made(header(streams=["k", "v"])), "do not fit"),
    "time that is none": (made(header(began_wall_s=float("nan"))), "began_wall_s"),
    "level": (made(header(levels=[[9, 8]])), "do not add up"),
    "levels of nothing": (made(header(levels=[])), "a level a stream"),
    "negative level": (made(header(levels=[[-1, -1]])), "whole number"),
    "rows without number": (made(None, {**chunk(), "n": "many"}), "whole number"),
    "a billion rows": (made(None, {**chunk(), "n": 10**9}), "rows must be"),
    "column too short": (made(None, {**chunk(), "n": 2}), "has 8 bytes for 2 numbers"),
    "column of floats": (made(None, chunk(blocks=["d", bytes(8)])), "is no column"),
    "column that is none": (made(None, chunk(blocks=3)), "no array"),
    "operation": (made(None, chunk(operation=numbers(9))), "operation has a number"),
    "outcome": (made(None, chunk(outcome=numbers(2))), "outcome has a number"),
    "stream": (made(None, chunk(stream=numbers(1))), "stream 1 is not among"),
    "format": (made(None, chunk(format=numbers(1))), "format 1 is not among"),
    "owner": (made(None, chunk(owner=numbers(1))), "owner 1 is not among"),
    "nobody": (made(None, chunk(owner=numbers(-1))), "move for no owner"),
    "negative blocks": (made(None, chunk(blocks=numbers(-2))), "outside of 0"),
    "huge blocks": (made(None, chunk(blocks=numbers(1 << 50))), "outside of 0"),
    "more than is free": (made(None, chunk(blocks=numbers(9))), "do not add up at call 0"),
    "more than is held": (
        made(None, chunk(2, operation=numbers(0, 2), blocks=numbers(2, 3))),
        "do not add up at call 1",
    ),
    "free_all of less": (
        made(None, chunk(2, operation=numbers(0, 2), new_call=numbers(1, 1), blocks=numbers(2, 1))),
        "gives back other blocks than it holds",
    ),
    "time": (made(None, chunk(64, delta_ns=numbers(*[(1 << 36) - 1] * 64))), "x"),
    "an allocation of three": (made(None, chunk(3, new_call=numbers(1, 0, 0))), "more than 2 rows"),
    "an allocation for two": (
        made(None, chunk(2, n_owners=2, new_call=numbers(1, 0), owner=numbers(0, 1))),
        "of several owners",
    ),
    "several things at once": (
        made(None, chunk(2, new_call=numbers(1, 0), operation=numbers(0, 2))),
        "differ in their operation",
    ),
    "refused and not": (
        made(None, chunk(2, new_call=numbers(1, 0), outcome=numbers(0, 1))),
        "differ in their outcome",
    ),
    "a refused free": (made(None, chunk(operation=numbers(1), outcome=numbers(1))), "is refused"),
    "a free that grows": (
        made(None, chunk(2, operation=numbers(0, 1), growth=numbers(0, 3))),
        "grows the pool",
    ),
    "no blocks": (made(None, chunk(blocks=numbers(0), tokens=numbers(0))), "of no blocks"),
    "blocks of other tokens": (
        made(None, chunk(tokens=numbers(1 << 35))),
        "2 blocks of 16 for 34359738368 tokens",
    ),
    "call within a call": (made(None, chunk(new_call=numbers(0))), "begin within a call"),
    "a million owners": (made(None, chunk(n_owners=10**6)), "n_owners must be"),
    "a million formats": (made(None, chunk(formats=["x"] * 10**6)), "more formats than rows"),
    "long format": (made(None, chunk(formats=["x" * 65])), "a format must be text"),
    "picks of another row": (
        made(None, chunk(picks={"rows": numbers(0), "counts": numbers(1), "ids": numbers(1)})),
        "picks do not fit",
    ),
    "picks out of bounds": (
        made(None, chunk(picks={"rows": numbers(5), "counts": numbers(2), "ids": numbers(1, 2)})),
        "picks rows has a number outside",
    ),
    "picks without end": (
        made(None, chunk(picks={"rows": numbers(0), "counts": numbers(1 << 40), "ids": numbers()})),
        "picks",
    ),
    "sample of nothing": (
        made(
            None,
            chunk(
                samples={
                    "n": 1,
                    **{n: numbers(9) for n in ("at_ns", "operation", "blocks", "took_ns")},
                }
            ),
        ),
        "of no operation",
    ),
    "snapshot": (made(None, chunk(snapshots=[3])), "a snapshot is no map"),
    "gap": (
        made(None, chunk(gap={"lost": 0, "holdings": no_holdings(), "levels": [[8, 8]]})),
        "lost",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_gives_one_clear_line(name: str, tmp_path: Path) -> None:
    """Whatever a file says, it is not believed without a look."""
    data, says = HOSTILE[name]
    with pytest.raises(TraceError) as caught:
        loaded(data, tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert str(caught.value).isprintable(), "a file must not write on the terminal"


@pytest.mark.timeout(20)
def test_a_device_without_an_end_is_refused_at_once() -> None:
    """Of what has no size, no more is read than tells that it is no trace."""
    with pytest.raises(TraceError, match="no trace"):
        load_trace("/dev/zero")


def test_a_trace_of_giants_is_not_replayed(tmp_path: Path) -> None:
    """A file of some hundred bytes must not make a replay take all the memory there is."""
    n = 1 << 30
    head = header(config={**header()["config"], "n_blocks": n}, levels=[[n, n]])
    trace = loaded(made(head, chunk(blocks=numbers(n), tokens=numbers(16 * n))), tmp_path)
    with pytest.raises(TraceError, match="too large to be replayed"):
        Driver(trace)


def test_more_rows_than_asked_for_are_refused(whole: bytes, tmp_path: Path) -> None:
    """The reader bounds what it takes."""
    path = tmp_path / "x.vqtrace"
    path.write_bytes(whole)
    with pytest.raises(TraceError, match="more than 10 rows"):
        load_trace(path, max_rows=10)


def test_without_the_extra_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a traceback of somebody else's import."""
    import sys

    path = tmp_path / "x.vqtrace"
    path.write_bytes(made())
    for name in ("msgpack", "zstandard", "numpy"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match=r"pip install 'veloxquant-mlx-monitor\[trace\]'"):
                load_trace(path)
            if name != "numpy":
                with pytest.raises(ImportError, match=f"traces need {name}"):
                    record(BlockPoolAllocator(PoolConfig(16, 8)))
