"""What MLX says of its memory, on devices that are not here: Metal, CUDA, and one that says nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from veloxquant_mlx.telemetry import CATALOGUE, process, take_snapshot
from veloxquant_mlx.telemetry.process import ProcessSnapshot, mlx_memory
from veloxquant_mlx.telemetry.program import CacheCensus, ProgramSnapshot

ROWS = {row.name: row for row in CATALOGUE}
# As backends of MLX 0.32 answer.
METAL = {
    "architecture": "applegpu_g16s",
    "max_buffer_length": 9,
    "max_recommended_working_set_size": 48,
    "memory_size": 64,
}
CUDA = {"architecture": "sm_90", "device_name": "a GPU", "total_memory": 140, "free_memory": 100}
CPU = {"architecture": "x86_64", "device_name": "a CPU"}


class Device:
    """A device that tells `info`, and how often it was asked."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.info = dict(info)
        self.n_asked = 0

    def device_info(self) -> dict[str, Any]:
        """See `mlx.core.device_info`."""
        self.n_asked += 1
        return self.info


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked before is another device's."""
    monkeypatch.setattr(process, "_info_of_device", [])


def use(monkeypatch: pytest.MonkeyPatch, info: Mapping[str, Any]) -> Device:
    """Let MLX have that device."""
    device = Device(info)
    numbers = {f"get_{what}_memory": lambda: 7 for what in ("active", "cache", "peak")}
    module = SimpleNamespace(device_info=device.device_info, __version__="0.32.4", **numbers)
    monkeypatch.setitem(sys.modules, "mlx.core", module)
    return device


def test_on_metal_the_limit_is_the_recommended_working_set(monkeypatch: Any) -> None:
    """Asked once: asking starts the device's runtime."""
    device = use(monkeypatch, METAL)
    for _ in range(3):
        found = mlx_memory()
        assert (found.limit, found.device_total, found.device_free) == (48, None, None)
    assert device.n_asked == 1


def test_on_cuda_the_free_memory_is_that_of_the_moment(monkeypatch: Any) -> None:
    """And the device's memory is the limit."""
    device = use(monkeypatch, CUDA)
    assert (mlx_memory().limit, mlx_memory().device_total) == (140, 140)
    device.info["free_memory"] = 3
    assert mlx_memory().device_free == 3


@pytest.mark.parametrize("info", [CPU, {}])
def test_a_device_that_says_nothing_has_no_limit(monkeypatch: Any, info: Any) -> None:
    """None, not 0."""
    use(monkeypatch, info)
    found = mlx_memory()
    assert (found.limit, found.device_total, found.device_free) == (None, None, None)
    assert found.active == 7


def snapshot(**changes: Any) -> ProcessSnapshot:
    """A process with numbers of its own."""
    known = {"resident_bytes": 100, "footprint_bytes": None, "mlx_active_bytes": 60}
    known |= {"mlx_cache_bytes": 10}
    return replace(take_snapshot(), **{**known, **changes})


def read(name: str, process: ProcessSnapshot) -> dict[tuple[str, ...], Any]:
    """The series of a row."""
    row = ROWS[f"veloxquant_{name}"]
    assert row.read_process is not None
    return dict(row.read_process(process))


def test_what_is_beside_mlx_is_the_rest_of_the_process() -> None:
    """Of the footprint where there is one; not where MLX's memory is a device's own."""
    assert read("process_unaccounted_bytes", snapshot()) == {(): 30}
    assert read("process_unaccounted_bytes", snapshot(footprint_bytes=90)) == {(): 20}
    assert read("process_unaccounted_bytes", snapshot(resident_bytes=50)) == {(): -20}
    for gone in ({"mlx_device_total_bytes": 140}, {"resident_bytes": None}):
        assert read("process_unaccounted_bytes", snapshot(**gone)) == {}
    assert read("process_unaccounted_bytes", snapshot(mlx_active_bytes=None)) == {}


def test_the_parts_of_the_account_add_up_to_what_is_active() -> None:
    """With what is known of them; negative where copies share buffers."""
    caches = {"KVCache": CacheCensus(n_bytes=15), "other": CacheCensus(n_bytes=5)}
    whole = ProgramSnapshot(weights_bytes=30, caches=caches)
    found = read("mlx_memory_account_bytes", snapshot(program=whole))
    assert found == {("weights",): 30, ("kv_cache",): 20, ("rest",): 10}
    found = read("mlx_memory_account_bytes", snapshot(program=whole, mlx_active_bytes=40))
    assert found["rest",] == -10
    found = read("mlx_memory_account_bytes", snapshot(program=ProgramSnapshot()))
    assert found == {("rest",): 60}
    assert read("mlx_memory_account_bytes", snapshot(program=None)) == {}
    assert read("mlx_memory_account_bytes", snapshot(program=whole, mlx_active_bytes=None)) == {}
