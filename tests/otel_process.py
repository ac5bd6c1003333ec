"""Python in a process of its own, with this checkout on its path and nothing of OTEL_* around it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 60


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a child: the checkout's packages, no proxy, no OpenTelemetry settings but `extra`."""
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("OTEL_", "VELOXQUANT_")) and not key.lower().endswith("_proxy")
    }
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "exporters")])
    return env | dict(extra or {})


def run_python(
    code: str, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `code`; warnings are errors there too."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment(extra),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
