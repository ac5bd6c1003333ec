"""ChargedBytes: the bytes of the charged caches, told to telemetry as those of the pool's storage."""

from __future__ import annotations

from collections import Counter

from veloxquant_mlx.memory.storage_books import StorageUsage

__all__ = ["ChargedBytes"]


class ChargedBytes:
    """Sums by format. What mlx-lm holds it has written, and evaluates at every step."""

    def __init__(self) -> None:
        self._by_format: Counter[str] = Counter()
        self._logical = self._fp16 = self._n_arrays = 0

    def add(self, fmt: str, n_bytes: int, n_logical: int, n_fp16: int, sign: int) -> None:
        """Count the two arrays of a cache in (1), or out again (-1).

        Args:
            fmt: Tag of their numbers.
            n_bytes: Of the arrays, by their shapes.
            n_logical: Of those of their slots that hold tokens.
            n_fp16: What they would take as fp16.
            sign: 1 or -1.
        """
        self._n_arrays += 2 * sign
        self._by_format[fmt] += sign * n_bytes
        self._logical += sign * n_logical
        self._fp16 += sign * n_fp16

    def usage(self) -> StorageUsage:
        """As of a storage; constant time."""
        n = sum(self._by_format.values())
        return StorageUsage(
            n_buffers=self._n_arrays,
            resident_bytes=n,
            written_bytes=n,
            evaluated_bytes=n,
            in_use_bytes=n,
            free_cached_bytes=0,
            retired_bytes=0,
            logical_bytes=self._logical,
            fp16_equivalent_bytes=self._fp16,
            pending_writes=0,
            bytes_by_format=dict(self._by_format),
        )
