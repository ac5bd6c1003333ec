"""MLX: whether it computes here, asked of a process of its own, as importing it may crash or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util
from typing import Any, Final

from veloxquant_exporters.doctor.settings import Settings
from veloxquant_exporters.findings import Finding, printable
from veloxquant_exporters.missing import DISTRIBUTION, backend_extra

__all__ = ["PROGRAM", "ask", "find"]

# -P: a folder called mlx where the user stands is none of MLX.
_OPTIONS: Final = ("-P", "-c")
_MARK: Final = "veloxquant-doctor:"
PROGRAM: Final = f"""
import json
import mlx.core as mx
device = mx.default_device()
found = {{"version": mx.__version__, "device": str(device), "sum": (mx.arange(8) + 1).sum().item()}}
try:
    found["info"] = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
except Exception as error:
    found["info"] = {{}}
print({_MARK!r} + json.dumps(found, default=str))
"""
_SUM: Final = 36
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Reply:
    """How the process ended.

    Attributes:
        code: Exit code; below 0 the signal that ended it; None if it had to be ended.
        found: What it said, None if nothing.
        error: The last line on its stderr.
    """

    code: int | None
    found: dict[str, Any] | None
    error: str


def find(settings: Settings) -> Iterator[Finding]:
    """The findings; see `checks`."""
    if not _is_there():
        yield Finding(
            "note",
            "MLX is not installed",
            "a process that serves a model needs it; a sidecar and the exporters do not",
            f"pip install '{DISTRIBUTION}[{backend_extra()}]'",
        )
        return
    reply = ask(PROGRAM, settings.device_timeout_s)
    if reply.code == 0 and reply.found is not None:
        yield from _computed(reply.found)
    else:
        yield _fault(reply, settings.device_timeout_s)


def _is_there() -> bool:
    try:
        return util.find_spec("mlx") is not None
    except (ImportError, ValueError):
        return False


def ask(program: str, timeout_s: float) -> Reply:
    """Run a program of Python in a process of its own; it and its children end within the time."""
    with subprocess.Popen(  # noqa: S603 - our own interpreter, and a text of this module
        [sys.executable, *_OPTIONS, program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return Reply(None, None, "")
        except BaseException:
            _end(process)
            raise
    lines = [line.strip() for line in err.decode("utf-8", "replace").splitlines() if line.strip()]
    return Reply(process.returncode, _said(out), lines[-1] if lines else "")


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (OSError, AttributeError):
        process.kill()


def _said(out: bytes) -> dict[str, Any] | None:
    for line in out.decode("utf-8", "replace").splitlines():
        if line.startswith(_MARK):
            try:
                found = json.loads(line.removeprefix(_MARK))
            except ValueError:
                return None
            return found if isinstance(found, dict) else None
    return None


def _computed(found: dict[str, Any]) -> Iterator[Finding]:
    version, device = printable(str(found.get("version"))), printable(str(found.get("device")))
    if found.get("sum") != _SUM:
        yield Finding(
            "problem",
            f"MLX {version} computes wrongly on {device}: 1 + ... + 8 gives {found.get('sum')!r}",
            "its backend does not fit this machine",
            f"pip install --force-reinstall '{DISTRIBUTION}[{backend_extra()}]'",
        )
        return
    info = found.get("info") or {}
    name = info.get("device_name") or info.get("architecture") or ""
    memory = info.get("max_recommended_working_set_size") or info.get("memory_size")
    text = f"MLX {version} computes on {device}" + (f", {printable(str(name))}" if name else "")
    if isinstance(memory, int):
        text += f", {memory / _MIB:,.0f} MiB to stay within"
    yield Finding("ok", text)
    if sys.platform == "darwin" and "gpu" not in device:
        yield Finding(
            "warning",
            "MLX computes on the CPU of a Mac",
            "a process without access to Metal (over ssh into a container, in CI) is far slower",
            "run it in a login session of the Mac itself",
        )
    if not isinstance(memory, int):
        yield Finding(
            "note",
            "the device does not tell its memory",
            "veloxquant_mlx_memory_limit_bytes is absent, and what divides by it stays empty",
        )


def _fault(reply: Reply, timeout_s: float) -> Finding:
    fix = f"pip install --force-reinstall '{DISTRIBUTION}[{backend_extra()}]'"
    said = f": {printable(reply.error, 200)}" if reply.error else ""
    if reply.code is None:
        return Finding(
            "problem",
            f"MLX does not compute a sum within {timeout_s:g} s",
            "its device is busy or stuck, or a server that uses it would hang in the same way",
            f"{sys.executable} -X faulthandler -c 'import mlx.core as mx; print(mx.arange(8).sum())'",
        )
    if reply.code < 0:
        try:
            name = signal.Signals(-reply.code).name
        except ValueError:
            name = f"signal {-reply.code}"
        why = "its backend does not fit this machine or its drivers"
        return Finding("problem", f"importing MLX ends the process with {name}{said}", why, fix)
    return Finding(
        "problem",
        f"MLX is installed and does not work{said}",
        "on Linux, plain mlx has no backend: one of the extras cpu, cuda and cuda12 brings it",
        fix,
    )
