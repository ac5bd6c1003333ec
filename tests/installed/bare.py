"""What a bare installation must do: run by scripts/test-wheel, outside of the checkout, no extras."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import veloxquant_exporters
import veloxquant_mlx
from veloxquant_mlx.memory import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, take_snapshot

for package in (veloxquant_mlx, veloxquant_exporters):
    assert "site-packages" in Path(str(package.__file__)).parts, (
        f"{package} is not the installed one"
    )
assert metadata.version("veloxquant-mlx-monitor") == veloxquant_mlx.__version__

pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=64))
instrument(pool, name="bare")
pool.allocate("k", 40, 1)
(seen,) = take_snapshot().pools
assert (seen.name, seen.blocks_in_use) == ("bare", 3)
pool.free_all(1)

# Without the extra the command says what to install, and shows no traceback.
vqmon = Path(sys.executable).with_name("vqmon")
told = subprocess.run([str(vqmon), "demo"], capture_output=True, text=True, check=False)
assert told.returncode == 2, told
assert "veloxquant-mlx-monitor[" in told.stderr, told.stderr
assert len(told.stderr.splitlines()) == 1, told.stderr
