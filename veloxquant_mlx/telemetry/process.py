"""ProcessSnapshot: the pools of a process with its memory, MLX's, and the telemetry's own health."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from veloxquant_mlx.telemetry.program import ProgramSnapshot
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot

__all__ = ["MlxMemory", "ProcessSnapshot", "footprint_bytes", "mlx_memory", "resident_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """One process at one moment. Bytes are None where the platform does not tell.

    Attributes:
        process: Label that tells processes apart; "" in the process itself.
        sequence: Rises with each snapshot.
        wall_s: Seconds since the epoch.
        version, python, mlx: Versions; mlx is "" in a process that has not imported it.
        resident_bytes, footprint_bytes: Memory of the process.
        mlx_active_bytes, mlx_cache_bytes, mlx_peak_bytes, mlx_limit_bytes: Memory of MLX.
        errors: Failures of the telemetry, by reason; every reason is there.
        dropped: What telemetry left out, by reason; every reason is there.
        overhead_s: Seconds spent on telemetry.
        pools: By name; at most 64 and "other".
        n_unread_pools: Pools that are left out because their snapshot failed.
        mlx_device_total_bytes, mlx_device_free_bytes: Memory of MLX's device; None where that is the
            machine's.
        program: The program that `vqmon run` watches; None in any other process.
    """

    process: str
    sequence: int
    wall_s: float
    version: str
    python: str
    mlx: str
    resident_bytes: int | None
    footprint_bytes: int | None
    mlx_active_bytes: int | None
    mlx_cache_bytes: int | None
    mlx_peak_bytes: int | None
    mlx_limit_bytes: int | None
    errors: Mapping[str, int]
    dropped: Mapping[str, int]
    overhead_s: float
    pools: tuple[PoolSnapshot, ...]
    n_unread_pools: int = 0
    mlx_device_total_bytes: int | None = None
    mlx_device_free_bytes: int | None = None
    program: ProgramSnapshot | None = None


@dataclass(frozen=True, slots=True)
class MlxMemory:
    """What MLX says of its memory, in bytes; None where it does not tell."""

    active: int | None = None
    cache: int | None = None
    peak: int | None = None
    limit: int | None = None
    version: str = ""
    device_total: int | None = None
    device_free: int | None = None


def mlx_memory() -> MlxMemory:
    """MLX's memory, without importing MLX into a process that has not, and evaluating nothing."""
    mx: Any = sys.modules.get("mlx.core")
    if mx is None or not hasattr(mx, "get_active_memory"):
        return MlxMemory()
    info = _device_info(mx)
    return MlxMemory(
        active=mx.get_active_memory(),
        cache=mx.get_cache_memory(),
        peak=mx.get_peak_memory(),
        limit=_first(info, "max_recommended_working_set_size", "memory_size", "total_memory"),
        version=getattr(mx, "__version__", ""),
        device_total=_first(info, "total_memory"),
        device_free=_first(info, "free_memory"),
    )


# Asked once, but on CUDA, whose free memory changes: asking Metal starts its runtime.
_info_of_device: list[Mapping[str, Any]] = []


def _device_info(mx: Any) -> Mapping[str, Any]:
    """What MLX says of its device; empty where it says nothing."""
    if not _info_of_device or "free_memory" in _info_of_device[0]:
        try:
            info = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
        except Exception:  # noqa: BLE001 - a backend without such a call is not an error
            info = {}
        _info_of_device[:] = [info]
    return _info_of_device[0]


def _first(info: Mapping[str, Any], *names: str) -> int | None:
    """The first of these numbers that is there and not 0."""
    return next((int(info[name]) for name in names if info.get(name)), None)


_PAGE: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STATM: Final = Path("/proc/self/statm")


def resident_bytes() -> int | None:
    """Resident memory of this process; None where it cannot be had without a dependency."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        usage = _mac_usage()
        return usage[0] if usage else None


def footprint_bytes() -> int | None:
    """Physical footprint of this process, which macOS alone keeps."""
    usage = _mac_usage()
    return usage[1] if usage else None


class _RusageInfo(ctypes.Structure):
    """`struct rusage_info_v0` of libproc (sys/resource.h)."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        *(
            (name, ctypes.c_uint64)
            for name in (
                "user_time",
                "system_time",
                "pkg_idle_wkups",
                "interrupt_wkups",
                "pageins",
                "wired_size",
                "resident_size",
                "phys_footprint",
                "proc_start_abstime",
                "proc_exit_abstime",
            )
        ),
    )


def _mac_usage() -> tuple[int, int] | None:
    if sys.platform != "darwin":
        return None
    info = _RusageInfo()
    call = ctypes.CDLL(None).proc_pid_rusage
    if call(os.getpid(), 0, ctypes.byref(info)) != 0:
        return None
    return int(info.resident_size), int(info.phys_footprint)


@cache
def own_version() -> str:
    """The distribution's version, or "unknown" in a checkout that is not installed."""
    try:
        return metadata.version("veloxquant-mlx-monitor")
    except metadata.PackageNotFoundError:
        return "unknown"


@cache
def python_version() -> str:
    """As in 3.11.7."""
    return platform.python_version()
