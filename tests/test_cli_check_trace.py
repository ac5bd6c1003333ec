"""`vqmon check` of a trace: real recordings pass, cut and damaged ones are told, impossible ones too."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click", reason="the extra cli")
pytest.importorskip("msgpack", reason="the extra trace")
pytest.importorskip("zstandard", reason="the extra trace")
pytest.importorskip("numpy", reason="the extra trace")

import numpy as np

from tests.sidecar_help import a_file, put
from veloxquant_exporters.check import trace as trace_check
from veloxquant_exporters.cli.group import run
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry.recorder import record
from veloxquant_mlx.telemetry.trace import Trace, load_trace

pytestmark = pytest.mark.timeout(60)

Said = pytest.CaptureFixture[str]


def recorded(path: Path, config: PoolConfig, seed: int, n_calls: int = 300) -> Path:
    """The trace of a pool under mixed calls, some of them refused."""
    rng = random.Random(seed)
    pool = BlockPoolAllocator(config)
    streams = ("k", "v") if config.separate_kv else ("kv",)
    if seed % 2:  # a recording that begins in the middle of things
        pool.allocate_kv(40, "early")
    recorder = record(pool, path)
    for _ in range(n_calls):
        owner, size = rng.randrange(6), rng.randrange(1, 90)
        try:
            match rng.randrange(6):
                case 0:
                    pool.allocate(rng.choice(streams), size, owner, rng.choice(["fp16", "int4"]))
                case 1:
                    pool.allocate_kv(size, owner)
                case 2:
                    pool.free_all(owner)
                case 3:
                    pool.free(pool.blocks_for(owner)[: rng.randrange(4)])
                case 4:
                    pool.shrink(rng.choice(streams), rng.randrange(9))
                case 5:
                    for block in pool.blocks_for(owner)[-1:]:
                        pool.mark_used(block, rng.randrange(config.block_size + 1))
        except BlockPoolExhaustedError:
            continue
    recorder.stop()
    return path


CONFIGS = (
    PoolConfig(n_blocks=24, block_size=8),
    PoolConfig(n_blocks=24, block_size=16, separate_kv=False),
    PoolConfig(n_blocks=4, block_size=8, grow_on_exhaustion=True, max_blocks=40),
    PoolConfig(n_blocks=4, block_size=4, separate_kv=False, grow_on_exhaustion=True),
)


@pytest.mark.parametrize("seed", range(8))
def test_a_real_recording_is_right(seed: int, tmp_path: Path, capsys: Said) -> None:
    """With refusals, growth and shrinks, from a new pool and from one in use."""
    path = recorded(tmp_path / "a.vqtrace", CONFIGS[seed % 4], seed)
    assert run(["check", str(path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ok       trace of pool ")
    assert line.endswith(", whole, written as continuous")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording, not to be changed."""
    return recorded(tmp_path_factory.mktemp("traces") / "real.vqtrace", CONFIGS[0], 1)


@pytest.fixture(scope="module")
def trace(path: Path) -> Trace:
    """The same, loaded."""
    return load_trace(path)


def test_a_trace_is_known_by_its_content_or_name(path: Path, tmp_path: Path, capsys: Said) -> None:
    """Under another name; and garbage under the right one."""
    (tmp_path / "renamed").write_bytes(path.read_bytes())
    assert run(["check", str(tmp_path / "renamed"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["trace"]["cut"], report["trace"]["n_lost"]) == (
        "trace",
        False,
        0,
    )
    (tmp_path / "x.vqtrace").write_bytes(b"garbage")
    assert run(["check", str(tmp_path / "x.vqtrace"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["trace"]) == ("trace", None)


def test_a_cut_trace_is_a_warning(path: Path, tmp_path: Path, capsys: Said) -> None:
    """It is read up to there."""
    cut = tmp_path / "cut.vqtrace"
    cut.write_bytes(path.read_bytes()[:-1])
    assert run(["check", str(cut)]) == 0
    out = capsys.readouterr().out
    assert ", cut, " in out
    assert "warning  the file ends without its end" in out


def test_no_damage_raises(path: Path, tmp_path: Path, capsys: Said) -> None:
    """Bytes changed, cut out or doubled: a finding each time, or a trace that is still right."""
    data, rng = path.read_bytes(), random.Random(7)
    for n in range(60):
        at, size = rng.randrange(len(data)), rng.randrange(1, 40)
        new = [b"", data[at : at + size] * 2, rng.randbytes(size)][n % 3]
        broken = tmp_path / "broken.vqtrace"
        broken.write_bytes(data[:at] + new + data[at + size :])
        assert run(["check", str(broken)]) in (0, 1)
        assert capsys.readouterr().out.startswith(("ok ", "problem "))


def changed(trace: Trace, column: str, row: int, value: int) -> Trace:
    """The trace with one number changed."""
    values: Any = getattr(trace, column).copy()
    values[row] = value
    return replace(trace, **{column: values})


def first(trace: Trace, operation: int, outcome: int) -> int:
    """The first row of that kind."""
    rows = np.flatnonzero((trace.operation == operation) & (trace.outcome == outcome))
    return int(rows[0])


def whats(trace: Trace) -> list[str]:
    """What is found in a trace."""
    return [finding.what for finding in trace_check._findings(trace)]


def test_what_no_pool_does_is_told(trace: Trace) -> None:
    """Each is one number away from a real trace."""
    assert whats(trace) == []
    taken, refused = first(trace, 0, 0), first(trace, 0, 1)
    freed, shrunk = first(trace, 2, 0), first(trace, 3, 0)
    for made_up, text in (
        (changed(trace, "tokens", taken, 10**6), "asks for more tokens than its blocks have slots"),
        (changed(trace, "blocks", taken, 0), "takes no block"),
        (changed(trace, "tokens", freed, 10**6), "frees more tokens than fit"),
        (changed(trace, "owner", shrunk, 0), "shrinks for an owner"),
        (changed(trace, "growth", taken, 1), "grows a fixed pool"),
        (changed(trace, "outcome", freed, 1), "is refused"),
        (replace(trace, free_after=trace.free_after + 10**6), "although there are enough free"),
    ):
        found = whats(made_up)
        assert any(text in what for what in found), (text, found)
    assert refused >= 0  # there was one: the last of these has something to look at


def test_lost_calls_and_empty_traces_are_warnings(trace: Trace) -> None:
    """With what to do."""
    assert any("5 calls were lost in 0 gaps" in what for what in whats(replace(trace, n_lost=5)))
    none = {name: getattr(trace, name)[:0] for name in ("call", "at_ns", "operation", "outcome")}
    assert any("not one call" in what for what in whats(replace(trace, **none)))


def test_traces_in_a_folder_are_looked_at(path: Path, tmp_path: Path, capsys: Said) -> None:
    """Beside snapshot files, or alone: they are no snapshot files that cannot be read."""
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "good.vqtrace").write_bytes(path.read_bytes())
    assert run(["check", str(folder)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ok       good.vqtrace: trace of pool ")
    (folder / "bad.vqtrace").write_bytes(b"VQTRACE")
    put(folder, a_file())
    assert run(["check", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert set(report["traces"]) == {"good.vqtrace", "bad.vqtrace"}
    assert len(report["files"]) == 1
    assert {finding["level"] for finding in report["findings"]} == {"ok", "problem"}
