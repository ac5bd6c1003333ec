"""Freeze a twin: copy the allocator of one commit into `benchmarks/guard/twin`.

    python -m benchmarks.guard.freeze_twin REV

The twin stands beside the allocator in the timed layer: same mix of operations, known shape. Freeze it
anew only when the design changed so much that the level no longer says anything, and only from a
commit whose shape was checked by the counts.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TWIN = Path(__file__).resolve().parent / "twin"
SOURCE = "veloxquant_mlx.memory"
START = "block_pool"


def show(rev: str, module: str) -> str:
    """The text of a module of the allocator's package at `rev`."""
    path = f"{SOURCE.replace('.', '/')}/{module}.py"
    done = subprocess.run(
        ["git", "-C", str(ROOT), "show", f"{rev}:{path}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def closure(rev: str) -> dict[str, str]:
    """Texts by module of the allocator and all that it imports from its own package."""
    found: dict[str, str] = {}
    wanted = [START]
    while wanted:
        module = wanted.pop()
        if module not in found:
            found[module] = show(rev, module)
            wanted += re.findall(rf"from {re.escape(SOURCE)}\.(\w+) import", found[module])
    return found


def main() -> int:
    """Write the twin, and where it came from."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{sys.argv[1]}^{{commit}}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    for old in TWIN.glob("*.py"):
        old.unlink()
    TWIN.mkdir(exist_ok=True)
    for module, text in sorted(closure(commit).items()):
        moved = text.replace(SOURCE, "benchmarks.guard.twin")
        (TWIN / f"{module}.py").write_text(moved, "utf-8")
    (TWIN / "__init__.py").write_text(
        f'"""Frozen copy of the allocator at {commit[:12]}; see freeze_twin.py. Never edited."""\n',
        "utf-8",
    )
    print(f"froze {commit[:12]}: {len(list(TWIN.glob('*.py')))} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
