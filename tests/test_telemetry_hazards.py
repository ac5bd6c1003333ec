"""What strikes a watched pool in the middle of a call, inside the hooks too.

The scenarios and the striking are those of `test_pool_hazards`; here every pool is watched, and the
telemetry's own code is struck as well.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import veloxquant_mlx
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.telemetry import instrument, take_snapshot, uninstrument
from veloxquant_mlx.telemetry.self_check import check_pool

pytestmark = pytest.mark.timeout(100, method="thread")


def _load() -> ModuleType:
    """A copy of the pool's hazard tests of our own, which strikes in the telemetry too."""
    path = Path(__file__).with_name("test_pool_hazards.py")
    spec = importlib.util.spec_from_file_location("watched_pool_hazards", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.POOL_FILES = str(Path(veloxquant_mlx.__file__).parent)  # type: ignore[attr-defined]
    return module


hazards: Any = _load()

NAMES = (
    "one_block_for_a_new_owner",
    "one_block_more",
    "one_block_of_another_format",
    "many_blocks",
    "both_streams",
    "growth",
    "exhaustion",
    "free_some",
    "free_all_of_one_lease",
    "free_all_of_a_large_lease",
    "free_all_of_many_leases",
    "shrink_everything",
    "mark_used",
)
PRESENT = [name for name in NAMES if name in hazards.SCENARIOS]

_plain_scenarios = dict(hazards.SCENARIOS)
_last: list[BlockPoolAllocator] = []


def watch(name: str, *, sampled: bool) -> Callable[[], tuple[BlockPoolAllocator, Any]]:
    """The scenario with its pool watched: its call sampled, or as most calls are."""

    def build() -> tuple[BlockPoolAllocator, Any]:
        if _last:
            uninstrument(_last.pop())
        pool, call = _plain_scenarios[name]()
        probe = instrument(pool, name="struck")
        if not sampled:
            for slot in probe._hooks._slots:
                slot.schedule(7)
            probe._hooks._timer.disarm(pool)
        _last.append(pool)
        return pool, call

    return build


def check_watched(pool: BlockPoolAllocator, raised: BaseException | None) -> None:
    """The books are whole, the lock is free, and the hooks go on counting and sampling."""
    hazards.assert_books(pool)
    hazards.assert_unlocked(pool)
    hazards.assert_usable(pool)
    assert check_pool(pool) == []
    probe = instrument(pool)
    before = probe.snapshot()
    stream = pool._streams[0].name
    for _ in range(40):
        pool.allocate(stream, 3, 1)
        pool.free_all(1)
    now = probe.snapshot()
    assert before is not None
    assert now is not None
    assert now.calls["allocate"] == before.calls["allocate"] + 40
    assert now.calls["free_all"] == before.calls["free_all"] + 40
    for operation, n in now.calls.items():
        # The only sample of a kind may have been struck; the calls it stood for are few here.
        assert n - 8 <= now.durations[operation].n_observed <= n
    assert not any(probe.errors().values())


@pytest.fixture(autouse=True)
def _let_go() -> Any:
    yield
    while _last:
        uninstrument(_last.pop())


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("name", PRESENT)
def test_interrupted_at_every_point(
    name: str, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C anywhere, in a hook, in the timing lock, in a sample: no harm to pool or telemetry."""
    monkeypatch.setitem(hazards.SCENARIOS, name, watch(name, sampled=sampled))

    def check(pool: BlockPoolAllocator, raised: BaseException | None) -> None:
        assert isinstance(raised, KeyboardInterrupt)
        check_watched(pool, raised)

    hazards.strike_everywhere(name, lambda _: hazards.interrupt(), check, step=1)


@pytest.mark.parametrize("name", PRESENT)
def test_a_scrape_and_a_release_at_every_point(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler or finalizer inside a call may scrape and release an owner: no hang, true sums."""
    monkeypatch.setitem(hazards.SCENARIOS, name, watch(name, sampled=True))

    def act(pool: BlockPoolAllocator) -> None:
        (now,) = [p for p in take_snapshot().pools if p.name == "struck"]
        for stream in now.streams.values():
            assert stream.free + stream.in_use == stream.managed
        assert now.n_allocations - now.n_frees == now.blocks_in_use
        assert now.initial_blocks + now.n_grown - now.n_retired == now.n_blocks
        assert not any(now.invariant_violations.values())
        pool.free_all("victim")

    def check(pool: BlockPoolAllocator, raised: BaseException | None) -> None:
        hazards.check_served(pool, raised)
        check_watched(pool, raised)

    hazards.strike_everywhere(name, act, check, finalizers=True, step=3)
