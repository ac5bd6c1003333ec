# ruff: noqa: ARG001 - the interpreter says what hooks are called with
"""Instructions: count bytecode instructions of everything but the harness.

By `sys.monitoring` where there is one: on 3.13 the first `settrace` run of a process saw no
instruction at all. By `sys.settrace` on 3.11.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from veloxquant_exporters.bench.counting.meter import METER

__all__ = ["BlindCounterError", "counted"]

_HARNESS: Final = str(Path(__file__).resolve().parent.parent)
_CALIBRATION: Final = str(Path(__file__).resolve().with_name("calibration.py"))


def _is_harness(code: CodeType) -> bool:
    filename = code.co_filename
    return filename.startswith(_HARNESS) and filename != _CALIBRATION


class BlindCounterError(Exception):
    """The counter saw less than what certainly happened; its counts mean nothing."""


@contextmanager
def counted() -> Iterator[None]:
    """Count into the meter until the block ends.

    Raises:
        BlindCounterError: Something else took the hook away meanwhile, or has it already.
    """
    METER.reset()
    with _monitored() if sys.version_info >= (3, 12) else _traced():
        yield


@contextmanager
def _traced() -> Iterator[None]:
    if sys.gettrace() is not None:
        raise BlindCounterError("a debugger or coverage has the trace function")

    def local(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "opcode":
            METER.steps += 1
        return local

    def enter(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if _is_harness(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    sys.settrace(enter)
    try:
        yield
    finally:
        ours = sys.gettrace() is enter
        sys.settrace(None)
    if not ours:
        raise BlindCounterError("the trace function was taken away while counting")


@contextmanager
def _monitored() -> Iterator[None]:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    tool = monitoring.PROFILER_ID
    if monitoring.get_tool(tool) is not None:
        raise BlindCounterError(f"{monitoring.get_tool(tool)} has the monitoring tool id")

    def step(code: CodeType, offset: int) -> Any:
        if _is_harness(code):
            return monitoring.DISABLE
        METER.steps += 1
        return None

    monitoring.use_tool_id(tool, "veloxquant-bench")
    try:
        monitoring.restart_events()
        monitoring.register_callback(tool, monitoring.events.INSTRUCTION, step)
        monitoring.set_events(tool, monitoring.events.INSTRUCTION)
        yield
    finally:
        monitoring.set_events(tool, 0)
        ours = monitoring.register_callback(tool, monitoring.events.INSTRUCTION, None) is step
        monitoring.free_tool_id(tool)
    if not ours:
        raise BlindCounterError("the monitoring callback was taken away while counting")
