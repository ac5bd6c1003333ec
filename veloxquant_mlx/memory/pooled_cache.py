"""PooledKVCache: charges any vector-by-vector KV cache to a block pool. Imports no MLX."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Final, NoReturn, Self

from veloxquant_mlx.core.abstractions import KVCache
from veloxquant_mlx.core.exceptions import ArgumentTypeError, PoolReentryError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.memory.checks import check_format, check_owner
from veloxquant_mlx.memory.token_charge import TokenCharge, give_back_later, grow, held, shrink

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.core as mx

    from veloxquant_mlx.memory.block import Owner

__all__ = ["PooledKVCache"]

_METHODS: Final = (
    "append",
    "append_key",
    "append_value",
    "attend",
    "memory_bytes",
    "reset",
    "__len__",
)


class PooledKVCache(KVCache):
    """A `KVCache` whose tokens are charged to a pool: a block for every `block_size` of them.

    The wrapped cache keeps the vectors; this one takes a block of a stream when the last one is
    full, and tells the pool how full it is. Keys are charged to "k", values to "v".

    When the pool or the wrapped cache raises, nothing stays charged: a block taken for the token
    goes back (the pool has counted it as allocated and freed, and keeps what it grew by). `append`
    charges both streams or none. What a wrapped cache keeps of a call that it failed is its own.

    Owners may be shared with other caches. `release` and `reset` free the blocks that this cache
    was charged for and no others. When somebody else frees them (``pool.free_all(owner)``), the
    next append raises until `release` or `reset`, since its tokens are charged to nobody.

    A cache that is dropped gives its blocks back at the next call on the pool. `copy.deepcopy`
    makes a cache that is charged for its own blocks: to the same owner if one was given.

    Used by one thread at a time; the pool may be shared by many.

    Args:
        inner: The cache that keeps the vectors. Tokens that it holds already are charged now.
        pool: The pool to charge.
        owner: The request's id; None takes one that no other cache has.
        format: Tag recorded on the blocks, 1 to 64 characters.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ValueError: A bad format.
        BlockPoolExhaustedError: Too few free blocks for the tokens of `inner`.
    """

    def __init__(
        self,
        inner: KVCache,
        pool: BlockPoolAllocator,
        owner: Owner | None = None,
        format: str = "fp16",
    ) -> None:
        lacking = [name for name in _METHODS if not callable(getattr(inner, name, None))]
        if lacking:
            raise ArgumentTypeError(
                f"inner must be a KVCache, got {inner!r} without {', '.join(lacking)}"
            )
        if not isinstance(pool, BlockPoolAllocator):
            raise ArgumentTypeError(f"pool must be a BlockPoolAllocator, got {pool!r}")
        given = None if owner is None else check_owner(owner)
        n_tokens = len(inner)
        self._bind(inner, pool, given, check_format(format), n_tokens, n_tokens)

    def _bind(
        self,
        inner: KVCache,
        pool: BlockPoolAllocator,
        owner: Owner | None,
        fmt: str,
        n_keys: int,
        n_values: int,
    ) -> None:
        self._inner = inner
        self._pool = pool
        self._owner_given = owner is not None
        self._owner = pool.fresh_owner() if owner is None else owner
        self._format = fmt
        self._keys = TokenCharge("k", pool, self._owner, fmt)
        self._values = TokenCharge("v", pool, self._owner, fmt)
        charges = (self._keys, self._values)
        # At exit the pool ends too, and nobody is left to use its blocks.
        weakref.finalize(self, give_back_later, pool, charges).atexit = False
        grow(charges, (n_keys, n_values))

    @property
    def inner(self) -> KVCache:
        """The cache that keeps the vectors."""
        return self._inner

    @property
    def pool(self) -> BlockPoolAllocator:
        """The pool that is charged."""
        return self._pool

    @property
    def owner(self) -> Owner:
        """Whom the blocks are checked out to."""
        return self._owner

    @property
    def format(self) -> str:
        """Tag recorded on the blocks."""
        return self._format

    def append_key(self, k: mx.array) -> None:
        """Append the key of the next token, and charge it.

        Raises:
            BlockPoolExhaustedError: A block is needed and none is free; nothing was changed.
            PoolError: Somebody else freed the blocks of this cache; nothing was changed.
        """
        self._append((self._keys,), lambda: self._inner.append_key(k))

    def append_value(self, v: mx.array) -> None:
        """Append the value of the next token, and charge it; raises like `append_key`."""
        self._append((self._values,), lambda: self._inner.append_value(v))

    def append(self, k: mx.array, v: mx.array) -> None:
        """Append key and value of the next token, and charge both or, raising, neither.

        Raises:
            BlockPoolExhaustedError: A block is needed and none is free; nothing was changed.
            PoolError: Somebody else freed the blocks of this cache; nothing was changed.
        """
        self._append((self._keys, self._values), lambda: self._inner.append(k, v))

    def _append(self, charges: tuple[TokenCharge, ...], store: Callable[[], None]) -> None:
        before = [charge.n_tokens for charge in charges]
        try:
            grow(charges, [n_tokens + 1 for n_tokens in before])
            store()
        except Exception:
            shrink(charges, before)
            raise
        except BaseException:
            self._free_strays()
            shrink(charges, before)
            raise

    def _free_strays(self) -> None:
        """Free what the pool handed out, and an interrupt kept from being noted here.

        Only of an owner of this cache's own: under a given one others may hold blocks.
        """
        if not self._owner_given:
            noted = {*self._keys.blocks, *self._values.blocks}
            strays = [block for block in self._pool.blocks_for(self._owner) if block not in noted]
            self._pool.free_held(strays, *{block.lease for block in strays})

    def attend(self, q: mx.array) -> mx.array:
        """What the wrapped cache's `attend` returns."""
        return self._inner.attend(q)

    def memory_bytes(self) -> int:
        """Bytes that the wrapped cache says it holds; the charge is `n_blocks_held`."""
        return self._inner.memory_bytes()

    def n_blocks_held(self) -> int:
        """Blocks of both streams that this cache is charged for now; linear in their number."""
        return self._keys.n_held() + self._values.n_held()

    def reset(self) -> None:
        """Empty the wrapped cache and give the blocks back; the cache can be used anew."""
        self._inner.reset()
        blocks, leases = held((self._keys, self._values))
        try:
            self._pool.free_held(blocks, *leases)
        except PoolReentryError:
            # A signal handler or finalizer inside a call of the pool, which then does it.
            self._pool.free_held_later(blocks, *leases)
        self._keys.forget()
        self._values.forget()

    def release(self) -> None:
        """End the request: the same as `reset`. Calling it twice is harmless."""
        self.reset()

    def __len__(self) -> int:
        return len(self._inner)

    def __repr__(self) -> str:
        return (
            f"<PooledKVCache of {self._inner!r}: {self._keys.n_tokens} keys and "
            f"{self._values.n_tokens} values in {self.n_blocks_held()} blocks, "
            f"owner {self._owner!r}, format {self._format!r}>"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = type(self).__new__(type(self))
        twin._bind(
            copy.deepcopy(self._inner, memo),
            self._pool,
            self._owner if self._owner_given else None,
            self._format,
            self._keys.n_tokens,
            self._values.n_tokens,
        )
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PooledKVCache cannot be pickled or copied shallowly: a pool hands each block to one "
            "holder. Use copy.deepcopy, which is charged anew, or pickle the wrapped cache (inner)"
        )
