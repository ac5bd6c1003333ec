"""The comparison with the peer: its verdicts on made-up times, and its work on a small scale."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def load(name: str) -> ModuleType:
    """Import a file of `benchmarks`, which is no package of the distribution."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


against_peer: Any = load("against_peer")
allocator_work: Any = load("allocator_work")

# A peer that takes 1,000 us for everything, and times that reach every target with room.
PEER = dict.fromkeys(
    [row.name for row in against_peer.ROWS if row.name] + ["floor", "held_bytes"], 1000.0
)
OURS = dict.fromkeys(PEER, 1.0) | {"held_bytes": 90.0, "mark_used": 1000.0}


def missed(**changed: float) -> list[str]:
    """Labels of the rows that miss their target when these times of ours are different."""
    results = against_peer.compare([(OURS | changed, PEER)])
    return [result.row.label for result in results if not result.holds]


def test_all_targets_hold() -> None:
    """Times that are good enough miss nothing."""
    assert missed() == []


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("free_all_16384", 1000 / 499),
        ("free_all_65536", 4.1),
        ("allocate_16384", 1000 / 11.9),
        ("grow", 1000 / 3.4),
        ("cycle", 1000 / 2.6),
        ("free_reversed_4096", 1000 / 79),
        ("mark_used", 1101.0),
        ("construct_1m", 1000 / 2.4),
        ("held_bytes", 111.0),
    ],
)
def test_each_target_can_be_missed(name: str, ours: float) -> None:
    """A number just on the wrong side of its target fails its row, and no other."""
    assert len(missed(**{name: ours})) == 1


def test_the_median_of_the_pairs_counts() -> None:
    """One bad pair of three is noise, and shown as such; two are a verdict."""
    bad = OURS | {"grow": 1000.0}
    one, two = (
        next(
            result
            for result in against_peer.compare([(times, PEER) for times in runs])
            if result.row.name == "grow"
        )
        for runs in ([OURS, bad, OURS], [bad, OURS, bad])
    )
    assert one.holds
    assert one.noise > 0.9
    assert not two.holds


def test_a_missed_target_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The table names it, and with --check the exit status does."""
    slow = OURS | {"cycle": 1000.0}
    monkeypatch.setattr(against_peer, "peer_python", lambda _: Path("peer"))
    monkeypatch.setattr(
        against_peer, "run_work", lambda python, _: PEER if python == Path("peer") else slow
    )
    monkeypatch.setattr(against_peer, "draw", lambda *_: [])
    assert against_peer.main(["--cache", str(tmp_path)]) == 0
    assert against_peer.main(["--cache", str(tmp_path), "--check"]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("MISSED") == 2
    assert "missed: allocate one block, then free_all" in shown.err


def test_a_run_that_fails_is_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the peer there is nothing to compare, which is not a pass."""

    def fail(_: object) -> Path:
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(against_peer, "peer_python", fail)
    assert against_peer.main(["--cache", str(tmp_path), "--check"]) == 2


def test_the_work_does_its_work() -> None:
    """Each timed part checks what it moved, and gives a time."""
    assert allocator_work.free_all(64, 4)() > 0
    assert allocator_work.allocate(64, 4)() > 0
    assert allocator_work.grow(allocator_work.used_pool_of(7000 + 1000)) > 0
    assert allocator_work.grow_k_and_v(allocator_work.pool_of(8000, separate_kv=True)) > 0
    assert allocator_work.cycle() > 0
    assert allocator_work.mark_used() > 0
    assert allocator_work.free_reversed(64) > 0
    assert allocator_work.construct(1000) > 0
    assert 80 < allocator_work.held_bytes(16384) < 110


def test_work_that_frees_nothing_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that does nothing is infinitely fast, so it must fail."""
    sample = allocator_work.free_all(64, 4)
    monkeypatch.setattr(allocator_work.BlockPoolAllocator, "free_all", lambda *_: None)
    with pytest.raises(AssertionError):
        sample()
