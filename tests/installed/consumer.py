"""A user's program, type-checked by scripts/test-wheel against the installed wheel; never run."""

from __future__ import annotations

from opentelemetry.metrics import get_meter_provider
from prometheus_client import CollectorRegistry

from veloxquant_exporters.opentelemetry import instrument_meter
from veloxquant_exporters.prometheus import PoolCollector
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory import AllocationStats, Block, BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import PoolSnapshot, instrument, take_snapshot, uninstrument


def serve(pool: BlockPoolAllocator, request_id: str, n_tokens: int) -> int:
    """Take blocks for a request, and give them back."""
    try:
        blocks: list[Block] = pool.allocate("k", n_tokens, request_id)
    except BlockPoolExhaustedError as error:
        raise SystemExit(f"no room: {error}") from error
    try:
        return sum(block.n_used for block in blocks)
    finally:
        pool.free_all(request_id)


pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=256, separate_kv=False))
instrument(pool, name="typed")
n_tokens: int = serve(pool, "a", 40)
stats: AllocationStats = pool.stats.snapshot()
snapshots: tuple[PoolSnapshot, ...] = take_snapshot().pools
registry = CollectorRegistry()
registry.register(PoolCollector())
instrument_meter(get_meter_provider())
uninstrument(pool)
