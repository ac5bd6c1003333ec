"""A naive block pool, the yardstick of the real one: lists, loops, no lock, nothing cached.

Every figure is recounted from the lists when it is asked for, and every argument is checked
before the first list changes, so that a call that raises has changed nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from veloxquant_mlx.core.exceptions import (
    ArgumentTypeError,
    BlockPoolExhaustedError,
    OwnerAlreadyActiveError,
)

Owner = int | str

REASONS = ("repeated", "free", "foreign", "retired", "copied", "stale")
HISTORY_LENGTH = 256
MAX_FORMAT_LENGTH = 64


class Config(Protocol):
    """What the naive pool reads of a `PoolConfig`."""

    @property
    def block_size(self) -> int: ...
    @property
    def n_blocks(self) -> int: ...
    @property
    def separate_kv(self) -> bool: ...
    @property
    def grow_on_exhaustion(self) -> bool: ...
    @property
    def max_blocks(self) -> int | None: ...


@dataclass(eq=False)
class NaiveLease:
    """One unbroken holding of blocks by an owner, in one stream and format."""

    owner: Owner
    stream: str
    format: str
    block_ids: list[int] = field(default_factory=list)
    filled: int = 0

    @property
    def live(self) -> bool:
        """Whether a block is held under this lease."""
        return bool(self.block_ids)


@dataclass(eq=False)
class NaiveBlock:
    """One block; `pool` is None for a detached one, `made` tells those built by hand."""

    block_id: int
    stream: str = "kv"
    format: str = "fp16"
    n_used: int = 0
    owner: Owner | None = None
    ever_allocated: bool = False
    lease: NaiveLease | None = None
    pool: NaivePool | None = None
    made: bool = False

    def detached(self) -> NaiveBlock:
        """Return a copy that no pool knows."""
        return replace(self, lease=None, pool=None, made=False)


@dataclass
class NaiveStats:
    """The counters of a pool at one moment."""

    n_blocks: int
    n_allocations: int = 0
    n_frees: int = 0
    n_reused: int = 0
    n_exhausted: int = 0
    n_grown: int = 0
    n_retired: int = 0
    peak_blocks_in_use: int = 0
    fragmented: int = 0

    def blocks_in_use(self) -> int:
        """Return the number of blocks held by owners."""
        return self.n_allocations - self.n_frees

    def fragmentation(self) -> float:
        """Return the share of managed blocks that are neither empty nor full."""
        return self.fragmented / self.n_blocks if self.n_blocks else 0.0

    def snapshot(self) -> NaiveStats:
        """Return a copy."""
        return replace(self)

    def samples(self, prefix: str = "veloxquant_block_pool") -> dict[str, tuple[str, float]]:
        """Return {metric name: (type, value)} of the Prometheus text."""
        return {
            f"{prefix}_blocks_in_use": ("gauge", self.blocks_in_use()),
            f"{prefix}_blocks_total": ("gauge", self.n_blocks),
            f"{prefix}_fragmentation": ("gauge", self.fragmentation()),
            f"{prefix}_peak_blocks_in_use": ("gauge", self.peak_blocks_in_use),
            f"{prefix}_allocations_total": ("counter", self.n_allocations),
            f"{prefix}_frees_total": ("counter", self.n_frees),
            f"{prefix}_reused_total": ("counter", self.n_reused),
            f"{prefix}_exhausted_total": ("counter", self.n_exhausted),
            f"{prefix}_grown_total": ("counter", self.n_grown),
            f"{prefix}_retired_total": ("counter", self.n_retired),
        }

    def to_prometheus(self, prefix: str = "veloxquant_block_pool") -> str:
        """Render the counters as Prometheus text."""
        lines = []
        for name, (kind, value) in self.samples(prefix).items():
            lines += [f"# TYPE {name} {kind}", f"{name} {value!r}"]
        return "\n".join(lines) + "\n"


def check_int(name: str, value: object, low: int, high: float = float("inf")) -> int:
    """Return `value` when it is an int (no bool) within low..high."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be an int, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be within {low}..{high}, not {value}")
    return value


def check_fill(name: str, value: object, most: int) -> int:
    """Return `value` when it is an int within 0..most; a wrong type is a wrong value here."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{name} must be an int within 0..{most}, not {value!r}")
    return value


def check_owner(value: object) -> Owner:
    """Return `value` when it may name an owner."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ArgumentTypeError(f"owner must be an int or a str, not {value!r}")
    return value


def check_format(value: object) -> str:
    """Return `value` when it may tag a block."""
    if not isinstance(value, str):
        raise ArgumentTypeError(f"format must be a str, not {value!r}")
    if not 1 <= len(value) <= MAX_FORMAT_LENGTH:
        raise ValueError(f"format must have 1..{MAX_FORMAT_LENGTH} characters")
    return value


class NaivePool:
    """The public API of `BlockPoolAllocator`, written for the eye and not for speed."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.streams = ("k", "v") if config.separate_kv else ("kv",)
        self.blocks: list[NaiveBlock] = []  # by id
        self.fresh: dict[str, list[int]] = {s: [] for s in self.streams}  # never handed out
        self.stack: dict[str, list[int]] = {s: [] for s in self.streams}  # freed, hottest last
        self.retired: set[int] = set()
        self.held: list[int] = []  # in allocation order, all owners together
        self.leases: list[NaiveLease] = []  # the live ones, oldest first
        self.registered: list[Owner] = []  # explicitly
        self.cached: list[Owner] = []
        self.queue: list[tuple[list[NaiveBlock], tuple[NaiveLease, ...]]] = []
        self.rejected = dict.fromkeys(REASONS, 0)
        self._history: deque[NaiveStats] = deque(maxlen=HISTORY_LENGTH)
        self._counts = NaiveStats(0)
        shares = [config.n_blocks] if len(self.streams) == 1 else _halves(config.n_blocks)
        for stream, share in zip(self.streams, shares, strict=True):
            self._add_blocks(stream, share)

    # -- reading ------------------------------------------------------------------------------

    @property
    def stats(self) -> NaiveStats:
        """The counters now."""
        self._drain()
        return self._now()

    @property
    def history(self) -> deque[NaiveStats]:
        """The newest records, oldest first."""
        self._drain()
        return deque(self._history, maxlen=HISTORY_LENGTH)

    def blocks_for(self, owner: object) -> list[NaiveBlock]:
        """Return the blocks that `owner` holds, in allocation order."""
        owner = check_owner(owner)
        self._drain()
        return [self.blocks[i] for i in self.held if self.blocks[i].owner == owner]

    def n_free(self, stream: object = "k") -> int:
        """Return the number of free blocks of `stream`."""
        stream = self._check_stream(stream)
        self._drain()
        return len(self.fresh[stream]) + len(self.stack[stream])

    def free_ids(self, stream: str) -> list[int]:
        """Return the ids that allocate would hand out, the next one first."""
        return self.stack[stream][::-1] + self.fresh[stream]

    def refusal(self, block: object, *, owner: object = None) -> str | None:
        """Return why `block` is no block held (by `owner`), counting it, or None."""
        block = self._check_block(block)
        owner = None if owner is None else check_owner(owner)
        self._drain()
        reason = self._reason(block, owner)
        if reason is not None:
            self.rejected[reason] += 1
        return reason

    # -- owners -------------------------------------------------------------------------------

    def register_owner(self, owner: object) -> None:
        """Mark `owner` as active."""
        owner = check_owner(owner)
        self._drain()
        if self.is_active(owner):
            raise OwnerAlreadyActiveError(f"owner {owner!r} is active")
        self.registered.append(owner)

    def release_owner(self, owner: object) -> None:
        """Forget the explicit registration of `owner`."""
        owner = check_owner(owner)
        self._drain()
        if owner in self.registered:
            self.registered.remove(owner)

    def mark_cached(self, owner: object, *, cached: bool = True) -> bool:
        """Set or take off the mark of `owner`; False for one that holds nothing or has none."""
        owner = check_owner(owner)
        self._drain()
        was = owner in self.cached
        holds = any(block.owner == owner for block in self.blocks)
        if was:
            self.cached.remove(owner)
        if cached and holds:
            self.cached.append(owner)
        return holds if cached else was

    def n_cached(self) -> int:
        """Return the number of blocks of marked owners."""
        return sum(self.blocks[i].owner in self.cached for i in self.held)

    def is_active(self, owner: Owner) -> bool:
        """Return whether `owner` is registered or holds a block."""
        return owner in self.registered or any(b.owner == owner for b in self.blocks)

    # -- allocating ---------------------------------------------------------------------------

    def allocate(
        self, stream: object, n_tokens: object, owner: object, format: object = "fp16"
    ) -> list[NaiveBlock]:
        """Hand out blocks for `n_tokens` slots of one stream."""
        stream = self._check_stream(stream)
        n_tokens = check_int("n_tokens", n_tokens, 1)
        owner = check_owner(owner)
        format = check_format(format)
        self._drain()
        self._make_room({stream: self._n_needed(n_tokens)})
        taken = self._take(stream, n_tokens, n_tokens, owner, format)
        self._record()
        return taken

    def allocate_kv(
        self,
        n_tokens: object,
        owner: object,
        format: object = "fp16",
        *,
        n_filled: object = None,
    ) -> tuple[list[NaiveBlock], list[NaiveBlock]]:
        """Hand out blocks for `n_tokens` slots of k and of v, or of neither."""
        n_tokens = check_int("n_tokens", n_tokens, 1)
        owner = check_owner(owner)
        format = check_format(format)
        filled = n_tokens if n_filled is None else check_fill("n_filled", n_filled, n_tokens)
        self._drain()
        n = self._n_needed(n_tokens)
        self._make_room({"k": n, "v": n} if self.config.separate_kv else {"kv": 2 * n})
        k_stream, v_stream = self.streams[0], self.streams[-1]
        k_blocks = self._take(k_stream, n_tokens, filled, owner, format)
        v_blocks = self._take(v_stream, n_tokens, filled, owner, format)
        self._record()
        return k_blocks, v_blocks

    def add_filled(self, n_tokens: object, *leases: NaiveLease) -> None:
        """Add to (or take from) the token fill of each live lease."""
        if isinstance(n_tokens, bool) or not isinstance(n_tokens, int):
            raise ArgumentTypeError(f"n_tokens must be an int, not {n_tokens!r}")
        self._drain()
        for lease in leases:
            if lease.live:
                capacity = len(lease.block_ids) * self.config.block_size
                lease.filled = min(max(lease.filled + n_tokens, 0), capacity)

    def mark_used(self, block: object, n_used: object) -> None:
        """Store how many slots of `block` are used."""
        block = self._check_block(block)
        n_used = check_fill("n_used", n_used, self.config.block_size)
        self._drain()
        reason = self._reason(block, None)
        if reason is not None:
            self.rejected[reason] += 1
        if reason in (None, "free"):
            block.n_used = n_used

    # -- giving back --------------------------------------------------------------------------

    def free(self, blocks: object, *, owner: object = None) -> None:
        """Take back those of `blocks` that are held (by `owner`), and count the others."""
        if not isinstance(blocks, Iterable):
            raise ArgumentTypeError(f"blocks must be an iterable of blocks, not {blocks!r}")
        given = [self._check_block(b) for b in blocks]
        owner = None if owner is None else check_owner(owner)
        self._drain()
        n_freed = 0
        for position, block in enumerate(given):
            reason = self._reason(block, owner)
            if reason == "free" and any(b is block for b in given[:position]):
                reason = "repeated"
            if reason is None:
                self._give_back(block)
                n_freed += 1
            else:
                self.rejected[reason] += 1
        if n_freed:
            self._record()

    def free_all(self, owner: object) -> None:
        """Take back every block of `owner`, lease by lease, and forget the owner."""
        owner = check_owner(owner)
        self._drain()
        mine = [i for lease in self.leases if lease.owner == owner for i in lease.block_ids]
        for block_id in mine:
            self._give_back(self.blocks[block_id])
        if owner in self.registered:
            self.registered.remove(owner)
        if mine:
            self._record()

    def free_held(self, blocks: Iterable[NaiveBlock], *leases: NaiveLease) -> int:
        """Take back those of `blocks` still held under one of these leases."""
        self._drain()
        return self._free_held(list(blocks), leases)

    def free_held_later(self, blocks: Iterable[NaiveBlock], *leases: NaiveLease) -> None:
        """Queue `free_held` for the next call."""
        self.queue.append((list(blocks), leases))

    def shrink(
        self, stream: object, target_free: object, *, victims: Sequence[int] | None = None
    ) -> int:
        """Retire free blocks; `victims` says which (the contract leaves the choice open)."""
        stream = self._check_stream(stream)
        target_free = check_int("target_free", target_free, 0)
        self._drain()
        coldest_first = self.free_ids(stream)[::-1]
        n_retired = max(0, len(coldest_first) - target_free)
        chosen = list(coldest_first[:n_retired] if victims is None else victims)
        if len(set(chosen)) != n_retired or not set(chosen) <= set(coldest_first):
            raise AssertionError(f"retired {chosen}, which are not {n_retired} of {coldest_first}")
        for ids in (self.fresh[stream], self.stack[stream]):
            ids[:] = [i for i in ids if i not in chosen]
        self.retired.update(chosen)
        self._counts.n_retired += n_retired
        if n_retired:
            self._record()
        return n_retired

    # -- inside -------------------------------------------------------------------------------

    def _check_stream(self, stream: object) -> str:
        allowed = ("k", "v") if self.config.separate_kv else ("k", "v", "kv")
        if not isinstance(stream, str) or stream not in allowed:
            raise ValueError(f"stream must be one of {allowed}, not {stream!r}")
        return stream if self.config.separate_kv else "kv"

    @staticmethod
    def _check_block(block: object) -> NaiveBlock:
        if not isinstance(block, NaiveBlock):
            raise ArgumentTypeError(f"not a block: {block!r}")
        return block

    def _reason(self, block: NaiveBlock, owner: Owner | None) -> str | None:
        if block.pool is None and not block.made:
            return "copied"
        if block.pool is not self:
            return "foreign"
        if block.block_id in self.retired:
            return "retired"
        if block.owner is None:
            return "free"
        if owner is not None and block.owner != owner:
            return "stale"
        return None

    def _n_needed(self, n_tokens: int) -> int:
        return -(-n_tokens // self.config.block_size)

    def _add_blocks(self, stream: str, n: int) -> None:
        for _ in range(n):
            block = NaiveBlock(len(self.blocks), stream, pool=self)
            self.blocks.append(block)
            self.fresh[stream].append(block.block_id)

    def _make_room(self, needed: dict[str, int]) -> None:
        short = {s: max(0, n - len(self.free_ids(s))) for s, n in needed.items()}
        total = sum(short.values())
        managed = len(self.blocks) - len(self.retired)
        cap = self.config.max_blocks
        if total and not (
            self.config.grow_on_exhaustion and (cap is None or managed + total <= cap)
        ):
            self._counts.n_exhausted += 1
            self._record()
            raise BlockPoolExhaustedError(f"{total} blocks short")
        self._counts.n_grown += total
        for stream, n in short.items():
            self._add_blocks(stream, n)

    def _take(
        self, stream: str, n_tokens: int, n_filled: int, owner: Owner, format: str
    ) -> list[NaiveBlock]:
        wanted = (owner, stream, format)
        for lease in self.leases:
            if (lease.owner, lease.stream, lease.format) == wanted:
                break
        else:
            lease = NaiveLease(*wanted)
            self.leases.append(lease)
        taken = []
        left = n_tokens
        while left > 0:
            stack, fresh = self.stack[stream], self.fresh[stream]
            block = self.blocks[stack.pop() if stack else fresh.pop(0)]
            self._counts.n_allocations += 1
            self._counts.n_reused += block.ever_allocated
            block.ever_allocated = True
            block.owner, block.format, block.lease = owner, format, lease
            block.n_used = min(left, self.config.block_size)
            left -= block.n_used
            self.held.append(block.block_id)
            lease.block_ids.append(block.block_id)
            taken.append(block)
        lease.filled += n_filled
        in_use = len(self.held)
        self._counts.peak_blocks_in_use = max(self._counts.peak_blocks_in_use, in_use)
        return taken

    def _give_back(self, block: NaiveBlock) -> None:
        lease = block.lease
        if lease is None:
            raise AssertionError(f"block {block.block_id} is held under no lease")
        lease.block_ids.remove(block.block_id)
        lease.filled = min(lease.filled, len(lease.block_ids) * self.config.block_size)
        if not lease.block_ids:
            self.leases.remove(lease)
        self.held.remove(block.block_id)
        self.stack[block.stream].append(block.block_id)
        self._counts.n_frees += 1
        owner, block.owner, block.lease, block.n_used = block.owner, None, None, 0
        if owner in self.cached and not any(self.blocks[i].owner == owner for i in self.held):
            self.cached.remove(owner)

    def _free_held(self, blocks: list[NaiveBlock], leases: tuple[NaiveLease, ...]) -> int:
        n_freed = 0
        for block in blocks:
            if block.pool is self and any(block.lease is lease for lease in leases):
                self._give_back(block)
                n_freed += 1
        if n_freed:
            self._record()
        return n_freed

    def _drain(self) -> None:
        while self.queue:
            blocks, leases = self.queue.pop(0)
            self._free_held(blocks, leases)

    def _now(self) -> NaiveStats:
        size = self.config.block_size
        return replace(
            self._counts,
            n_blocks=len(self.blocks) - len(self.retired),
            fragmented=sum(0 < self.blocks[i].n_used < size for i in self.held),
        )

    def _record(self) -> None:
        self._history.append(self._now())


def _halves(n: int) -> list[int]:
    return [n - n // 2, n // 2]


__all__ = ["REASONS", "NaiveBlock", "NaiveLease", "NaivePool", "NaiveStats", "Owner"]
