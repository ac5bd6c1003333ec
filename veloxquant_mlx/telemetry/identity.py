"""Identity: which process wrote a snapshot file, and whether that very process still runs.

A pid alone names nobody: it is reused, and two containers both have a pid 1. So a pid goes with the
time its process began, and counts only for readers in the writer's PID namespace.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

__all__ = ["Liveness", "ProcessIdentity", "liveness", "own_identity", "own_namespace"]

Liveness = Literal["alive", "gone", "unknown"]


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Who wrote a file.

    Attributes:
        pid: As the writer sees it.
        start_time: When the process began, opaque, to be compared for equality only; "" unknown.
        random_id: 16 hex digits, anew for each publisher and each fork.
        pid_namespace: Where `pid` and `start_time` mean something; "" unknown.
    """

    pid: int
    start_time: str
    random_id: str
    pid_namespace: str


def own_identity() -> ProcessIdentity:
    """This process, with a fresh random id."""
    pid = os.getpid()
    return ProcessIdentity(pid, _start_time(pid) or "", secrets.token_hex(8), own_namespace())


def own_namespace() -> str:
    """Id of this process' PID namespace, unique among machines and their boots; "" unknown."""
    if sys.platform == "darwin":
        session = _mac_boot_session()
        return f"darwin:{session}" if session else ""
    try:
        # A /proc of another namespace than ours would answer for other processes.
        if str(Path("/proc/self").readlink()) != str(os.getpid()):
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        # The start times in /proc are relative to the time namespace, where there is such a thing.
        spaces = [str(Path("/proc/self/ns/pid").readlink())]
        if os.path.lexists("/proc/self/ns/time"):
            spaces.append(str(Path("/proc/self/ns/time").readlink()))
    except OSError:
        return ""
    return "/".join((boot, *spaces))


def liveness(identity: ProcessIdentity, namespace: str) -> Liveness:
    """Whether the process of `identity` runs, asked from `namespace` (see `own_namespace`).

    "unknown" wherever it cannot be told: another namespace, or a process that may not be looked at.
    Zombies are gone. Never raises.
    """
    if not namespace or identity.pid_namespace != namespace or not identity.start_time:
        return "unknown"
    if identity.pid <= 0:
        return "unknown"
    try:
        os.kill(identity.pid, 0)
    except ProcessLookupError:
        return "gone"
    except (OSError, OverflowError):
        pass  # it exists, and is another user's
    began = _start_time(identity.pid)
    if began is not None:
        return "alive" if began == identity.start_time else "gone"
    # It does not tell when it began. A zombie is the one case that is clear.
    return "gone" if _is_zombie(identity.pid) else "unknown"


_DEAD_STATES: Final = ("Z", "X", "x")


def _linux_stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the state on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    return text.rpartition(")")[2].split()


def _start_time(pid: int) -> str | None:
    """When `pid` began; None if it does not run, is a zombie, or does not tell."""
    if sys.platform == "darwin":
        return _mac_start_time(pid)
    fields = _linux_stat(pid)
    if fields is None or len(fields) < 20 or fields[0] in _DEAD_STATES:
        return None
    return fields[19]


def _is_zombie(pid: int) -> bool:
    if sys.platform == "darwin":
        info = _mac_info(pid)
        return info is not None and info.status == _MAC_ZOMBIE
    fields = _linux_stat(pid)
    return bool(fields) and fields[0] in _DEAD_STATES if fields else False


# -- macOS, where there is no /proc --------------------------------------------------------------

_MAC_ZOMBIE: Final = 5  # SZOMB of sys/proc.h
_PROC_PIDTBSDINFO: Final = 3


class _BsdInfo(ctypes.Structure):
    """`struct proc_bsdinfo` of sys/proc_info.h."""

    _fields_ = (
        ("flags", ctypes.c_uint32),
        ("status", ctypes.c_uint32),
        ("ids", ctypes.c_uint32 * 10),
        ("comm", ctypes.c_char * 16),
        ("name", ctypes.c_char * 32),
        ("files_and_groups", ctypes.c_uint32 * 5),
        ("nice", ctypes.c_int32),
        ("start_s", ctypes.c_uint64),
        ("start_us", ctypes.c_uint64),
    )


def _mac_info(pid: int) -> _BsdInfo | None:
    info = _BsdInfo()
    size = ctypes.sizeof(info)
    call = ctypes.CDLL(None).proc_pidinfo
    call.argtypes = (
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_int,
    )
    got = call(pid, _PROC_PIDTBSDINFO, 0, ctypes.byref(info), size)
    return info if got == size else None


def _mac_start_time(pid: int) -> str | None:
    info = _mac_info(pid)
    if info is None or info.status == _MAC_ZOMBIE:
        return None
    return f"{info.start_s}.{info.start_us:06d}"


def _mac_boot_session() -> str:
    """The kernel's id of this boot; macOS has no PID namespaces."""
    buffer = ctypes.create_string_buffer(64)
    size = ctypes.c_size_t(len(buffer))
    call = ctypes.CDLL(None).sysctlbyname
    if call(b"kern.bootsessionuuid", buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return ""
    return buffer.value.decode("ascii", "replace")
