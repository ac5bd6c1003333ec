"""Snapshots as JSON: nothing is lost, and nothing else gets in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sidecar_help import a_file
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.program import (
    CacheCensus,
    ProgramSnapshot,
    PromptCacheSnapshot,
    RequestsSnapshot,
)
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot
from veloxquant_mlx.telemetry.snapshot_json import (
    MAX_FILE_BYTES,
    SchemaError,
    SnapshotFile,
    SnapshotFormatError,
    encode_file,
    encode_shrunk,
    parse_file,
    parse_header,
    pool_from_dict,
    pool_to_dict,
    process_from_dict,
    process_to_dict,
)

FILE = a_file()
DATA = encode_file(FILE)


# Bounds that are equal stand once in a file, so 1 and 1.0 are not told apart: only one of them comes.
BOUNDS = st.integers(0, 10**9) | st.floats(0, 1e9).filter(lambda bound: not bound.is_integer())


@st.composite
def histograms(draw: st.DrawFn) -> HistogramSnapshot:
    """Any histogram."""
    bounds = tuple(sorted(draw(st.sets(BOUNDS, max_size=5))))
    n = len(bounds) + 1
    counts = tuple(draw(st.lists(st.integers(0, 2**70), min_size=n, max_size=n)))
    return HistogramSnapshot(bounds, counts, draw(st.floats()))


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that is declared as ``kind``."""
    if kind is HistogramSnapshot:
        return histograms()
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return st.builds(kind, **{item.name: anything(hints[item.name]) for item in fields(kind)})
    plain = {int: st.integers(), float: st.floats(), str: st.text(max_size=8), bool: st.booleans()}
    if kind in plain:
        return plain[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        return st.lists(anything(args[0]), max_size=3, unique_by=lambda one: one.name).map(tuple)
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(st.text(max_size=4), anything(args[1]), max_size=3)
    return st.none() | anything(args[0])


def same(one: object, other: object) -> bool:
    """Equal, NaN and the kind of number included."""
    return repr(one) == repr(other)


@settings(max_examples=30, deadline=None)
@given(anything(PoolSnapshot))
def test_a_pool_comes_back_from_json_as_it_was(pool: PoolSnapshot) -> None:
    """Whatever the values: lossless."""
    text = json.dumps(pool_to_dict(pool), allow_nan=False)
    assert same(pool_from_dict(json.loads(text)), pool)


@settings(max_examples=20, deadline=None)
@given(anything(ProcessSnapshot))
def test_a_process_comes_back_from_json_as_it_was(process: ProcessSnapshot) -> None:
    """Whatever the values, and through a whole file as well."""
    text = json.dumps(process_to_dict(process), allow_nan=False)
    assert same(process_from_dict(json.loads(text)), process)
    file = replace(FILE, snapshot=process, resource={"service.name": "é\\ud800"})
    assert same(parse_file(encode_file(file)), file)


def test_a_file_is_one_json_document_with_the_header_on_its_first_line() -> None:
    """Other programs can read it, and ours need the first line only."""
    raw = json.loads(DATA)
    assert raw["header"]["process"] == "worker-0" and raw["schema"] == 1
    assert parse_header(DATA[: DATA.index(b"\n") + 1]) == FILE.header == parse_header(DATA)


def test_text_that_cannot_be_encoded_does_not_stop_a_file() -> None:
    """A lone surrogate in a pool's name costs that letter, not the process."""
    pool = replace(FILE.snapshot.pools[0], name="a\udc80b")
    read = parse_file(encode_file(replace(FILE, snapshot=replace(FILE.snapshot, pools=(pool,)))))
    assert read.snapshot.pools[0].name == "a?b"


def test_every_cut_is_refused() -> None:
    """A file that was cut anywhere is refused, as nothing else than what it is."""
    for length in range(0, len(DATA) - 1, 7):
        with pytest.raises(SnapshotFormatError):
            parse_file(DATA[:length])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    """Bytes changed at random: a snapshot of the right types, or a SnapshotFormatError."""
    damaged = bytearray(DATA)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = parse_file(bytes(damaged))
    except SnapshotFormatError:
        return
    assert same(parse_file(encode_file(read)), read)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    """Bytes that nobody of us wrote."""
    for parse in (parse_file, parse_header):
        with pytest.raises(SnapshotFormatError):
            parse(data)


def changed(path: str, value: Any) -> bytes:
    """The file with one value, by its path, replaced."""
    raw = json.loads(DATA)
    *parents, last = path.split("/")
    inner = raw
    for key in parents:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    head = json.dumps(raw.pop("header"))
    return f'{{"header":{head},\n{json.dumps(raw)[1:]}'.encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("header/state", "running late"),
        ("header/sequence", True),
        ("header/sequence", 1.5),
        ("header/interval_s", 0),
        ("header/interval_s", "NaN"),
        ("header/process", ""),
        ("header/process", "a\nb"),
        ("header/process", "x" * 129),
        ("header/identity", None),
        ("snapshot/pools/0/n_blocks", "8"),
        ("snapshot/pools/0/n_blocks", None),
        ("snapshot/pools/0/streams", []),
        ("snapshot/pools/0/rejected", {"free": "1"}),
        ("snapshot/pools/0/lock_wait", [99, [1], 0]),
        ("snapshot/pools/0/lock_wait", [0, [1], 0]),
        ("snapshot/pools", {}),
        ("snapshot/process", 5),
        ("snapshot", None),
        ("bounds", 7),
        ("resource", {"a": 1}),
        ("events", [1]),
    ],
)
def test_a_value_of_another_type_is_refused(path: str, value: Any) -> None:
    """Nothing gets in that the declared types do not allow."""
    assert same(parse_file(changed("header/sequence", 1)), FILE)
    with pytest.raises(SnapshotFormatError, match=path.rsplit("/", maxsplit=1)[-1]):
        parse_file(changed(path, value))


@pytest.mark.parametrize("version", [0, 2, 999])
def test_another_version_says_so(version: int) -> None:
    """A reader that is older or newer is told which version it met."""
    with pytest.raises(SchemaError, match=str(version)):
        parse_header(changed("header/schema", version))
    with pytest.raises(SchemaError, match=str(version)):
        parse_file(changed("schema", version))


def test_what_a_later_writer_adds_is_passed_over() -> None:
    """An unknown key is no reason to lose the rest."""
    assert same(parse_file(changed("snapshot/colour", "blue")), FILE)


def test_two_pools_of_one_name_are_refused() -> None:
    """They would be two series of one name, and cost the whole page."""
    pools = FILE.snapshot.pools * 2
    with pytest.raises(SnapshotFormatError, match="two of one name"):
        parse_file(encode_file(replace(FILE, snapshot=replace(FILE.snapshot, pools=pools))))


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"header": ' + b"9" * 10_000 + b"}",
        DATA.replace(b'"sequence":1', b'"sequence":NaN', 1),
        DATA.replace(b"worker-0", b"worker\\ud800", 1),
        b"\xff\xfe" + DATA,
    ],
    ids=["deep list", "deep object", "long number", "NaN", "surrogate", "not UTF-8"],
)
def test_json_that_is_meant_to_hurt_is_refused(data: bytes) -> None:
    """No recursion error, no other error, no surrogate that a page could not show."""
    with pytest.raises(SnapshotFormatError):
        parse_file(data)


def test_a_file_shrinks_by_events_then_by_pools() -> None:
    """Until it fits; how many pools were left out is told."""
    pool = FILE.snapshot.pools[0]
    pools = tuple(replace(pool, name=f"pool-{n}") for n in range(8))
    file = replace(FILE, snapshot=replace(FILE.snapshot, pools=pools), events=({"a": 1},))
    whole = parse_file(encode_shrunk(file, 10**9)).snapshot
    assert (len(whole.pools), whole.dropped["pools_unpublished"]) == (8, 0)
    less = parse_file(encode_shrunk(file, len(encode_file(file)) // 2))
    assert 0 < len(less.snapshot.pools) < 8 and less.events == ()
    assert less.snapshot.dropped["pools_unpublished"] == 8 - len(less.snapshot.pools)
    assert parse_file(encode_shrunk(file, 1)).snapshot.pools == ()


def test_a_process_with_all_its_pools_fits_into_a_file() -> None:
    """65 pools, each with a storage and long numbers, take less than half of what is read."""
    pool = FILE.snapshot.pools[0]
    storage = dict.fromkeys(("resident", "written", "in_use", "free_cached", "logical"), 2**40)
    pools = tuple(replace(pool, name=f"pool-{n:0120}", storage=storage) for n in range(65))
    data = encode_file(
        SnapshotFile(header=FILE.header, snapshot=replace(FILE.snapshot, pools=pools))
    )
    assert len(data) < MAX_FILE_BYTES / 2


# -- the watched program ---------------------------------------------------------------------------

PROGRAM = ProgramSnapshot(
    mlx_lm="0.32.2",
    hooks={"cache_census": True, "server": False},
    caches={"KVCache": CacheCensus(n_objects=3, slots_held=5, slots_capacity=9, n_bytes=7)},
    prompt_cache=PromptCacheSnapshot(entries={"user": 2}, max_entries=10),
    requests={"chat": RequestsSnapshot(first_token=HistogramSnapshot((0.1, 1.0), (1, 2, 3), 4.5))},
    generation_thread_alive=False,
    weights_bytes=11,
)
WATCHED = replace(FILE, snapshot=replace(FILE.snapshot, program=PROGRAM))


def watched_with(path: str, value: Any) -> bytes:
    """The file of a watched program with one value of it, by its path, replaced."""
    raw = json.loads(encode_file(WATCHED))
    *parents, last = path.split("/")
    inner = raw["snapshot"]["program"]
    for key in parents:
        inner = inner[key]
    inner[last] = value
    head = json.dumps(raw.pop("header"))
    return f'{{"header":{head},\n{json.dumps(raw)[1:]}'.encode()


def test_a_program_comes_back_as_it_was() -> None:
    """With its histograms; and a process without one has none."""
    assert same(parse_file(encode_file(WATCHED)), WATCHED)
    assert parse_file(DATA).snapshot.program is None


def test_readers_and_writers_of_programs_may_differ_in_age() -> None:
    """A file of before there were programs, one that tells less, and one that tells more."""
    old = json.loads(DATA)
    del old["snapshot"]["program"], old["snapshot"]["mlx_device_total_bytes"]
    head = json.dumps(old.pop("header"))
    assert same(parse_file(f'{{"header":{head},\n{json.dumps(old)[1:]}'.encode()), FILE)
    less = json.loads(encode_file(WATCHED))
    less["snapshot"]["program"] = {"mlx_lm": "1"}
    head = json.dumps(less.pop("header"))
    read = parse_file(f'{{"header":{head},\n{json.dumps(less)[1:]}'.encode())
    assert read.snapshot.program == ProgramSnapshot(mlx_lm="1")
    assert same(parse_file(watched_with("colour", {"deep": ["blue"]})), WATCHED)
    assert same(parse_file(watched_with("caches/KVCache/colour", 1)), WATCHED)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("mlx_lm", 32),
        ("hooks", ["server"]),
        ("hooks", {"server": 1}),
        ("caches", []),
        ("caches", {"KVCache": 5}),
        ("caches/KVCache/n_bytes", 1.5),
        ("caches/KVCache/n_objects", None),
        ("prompt_cache", 3),
        ("prompt_cache/entries", {"user": "2"}),
        ("prompt_cache/max_entries", True),
        ("requests", {"chat": None}),
        ("requests/chat/finished", {"ok": -0.5}),
        ("requests/chat/duration", {"ok": [0, [1], 0]}),
        ("requests/chat/first_token", [99, [1], 0]),
        ("generation_thread_alive", 0),
        ("weights_bytes", "11"),
        ("active_requests", {"queued": None}),
        ("decode_batch", {}),
    ],
)
def test_a_value_of_another_type_in_a_program_is_refused(path: str, value: Any) -> None:
    """All the way down, as everywhere else."""
    assert same(parse_file(watched_with("mlx_lm", "0.32.2")), WATCHED)
    with pytest.raises(SnapshotFormatError):
        parse_file(watched_with(path, value))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_to_a_program_is_refused_or_harmless(data: st.DataObject) -> None:
    """Bytes changed at random in its part of the file."""
    whole = encode_file(WATCHED)
    start = whole.index(b'"program"')
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(start, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    try:
        read = parse_file(bytes(damaged))
    except SnapshotFormatError:
        return
    assert same(parse_file(encode_file(read)), read)
