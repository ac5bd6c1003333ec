"""What strikes a recorded pool in the middle of a call: the pool is served, the trace can be read.

The scenarios and the striking are those of `test_pool_hazards`; here every pool is recorded, and the
recorder's own code is struck as well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgpack", reason="traces are the extra trace")
pytest.importorskip("zstandard", reason="traces are the extra trace")
pytest.importorskip("numpy", reason="traces are the extra trace")

from tests.test_telemetry_hazards import NAMES, _load
from veloxquant_exporters.replay.check import disagreement
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.telemetry import check_pool, record, uninstrument
from veloxquant_mlx.telemetry.recorder.keeper import keeper
from veloxquant_mlx.telemetry.trace import load_trace

pytestmark = pytest.mark.timeout(100, method="thread")

hazards: Any = _load()
_plain = dict(hazards.SCENARIOS)
_last: list[BlockPoolAllocator] = []
# A pool that dies while the next one is struck would be struck in its own end.
_kept: list[BlockPoolAllocator] = []


def recorded(name: str) -> Callable[[], tuple[BlockPoolAllocator, Any]]:
    """The scenario with its pool recorded, among calls before it."""

    def build() -> tuple[BlockPoolAllocator, Any]:
        let_go()
        pool, call = _plain[name]()
        record(pool, capacity=256)
        _last.append(pool)
        _kept.append(pool)
        return pool, call

    return build


def let_go() -> None:
    """End what the scenario before began."""
    while _last:
        uninstrument(_last.pop())


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dumps that nobody gave a place go with the test."""
    monkeypatch.setenv("VELOXQUANT_TRACE_DIR", str(tmp_path / "dumps"))


@pytest.fixture(autouse=True)
def _ended() -> Any:
    yield
    let_go()
    _kept.clear()


def check_recorded(pool: BlockPoolAllocator) -> None:
    """The books are whole, and so is the trace, or it says that a call is missing."""
    hazards.assert_books(pool)
    hazards.assert_unlocked(pool)
    hazards.assert_usable(pool)
    assert check_pool(pool) == []
    (recorder,) = [one for one in keeper.recorders if one.records(pool)]
    with tempfile.TemporaryDirectory() as folder:
        trace = load_trace(recorder.dump(Path(folder) / "t.vqtrace"))
    assert trace.n_calls > 0
    if trace.consistent:
        assert disagreement(trace) is None


@pytest.mark.parametrize("name", [name for name in NAMES if name in _plain])
def test_interrupted_at_every_point(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C anywhere, in the recorder too: no harm to the pool, and the trace can be read."""
    monkeypatch.setitem(hazards.SCENARIOS, name, recorded(name))

    def check(pool: BlockPoolAllocator, raised: BaseException | None) -> None:
        assert isinstance(raised, KeyboardInterrupt)
        check_recorded(pool)

    hazards.strike_everywhere(name, lambda _: hazards.interrupt(), check, step=5)


@pytest.mark.parametrize("name", ["both_streams", "free_some", "exhaustion", "growth"])
def test_a_handler_may_ask_for_a_dump_at_every_point(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside of a call a handler may ask for a dump and release an owner: the trace has it all."""
    monkeypatch.setitem(hazards.SCENARIOS, name, recorded(name))

    def act(pool: BlockPoolAllocator) -> None:
        for recorder in keeper.recorders:
            if recorder.records(pool):
                recorder.request_dump()
                recorder._wanted["asked"] = False
        pool.free_all("victim")

    def check(pool: BlockPoolAllocator, raised: BaseException | None) -> None:
        hazards.check_served(pool, raised)
        check_recorded(pool)

    hazards.strike_everywhere(name, act, check, finalizers=True, step=7)
