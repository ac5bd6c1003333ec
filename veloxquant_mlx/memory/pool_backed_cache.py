"""PoolBackedKVCache: mlx-lm's `KVCache`, charged to a block pool.

The arrays are mlx-lm's own, grown and written by its code. What is added asks the pool first, so
that a full pool stops a request before memory does. No array is evaluated here.

Importing this module imports MLX and mlx-lm, and makes the class known to `load_prompt_cache`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from veloxquant_mlx.memory.cache_charge import CacheCharge, Request
from veloxquant_mlx.memory.kv_arrays import (
    check_input,
    checked_count,
    checked_state,
    checked_step,
    format_of,
    grown_capacity,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import mlx.core as mx
    from mlx_lm.models.cache import QuantizedKVCache

    from veloxquant_mlx.memory.block import Owner
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.memory.kv_arrays import State

__all__ = ["PoolBackedKVCache", "PooledCaches", "build_pooled_caches"]

# mlx-lm's own code, which has no annotations.
_stock: Any = KVCache
_update: Callable[[KVCache, mx.array, mx.array], tuple[mx.array, mx.array]]
_update = _stock.update_and_fetch


class PoolBackedKVCache(KVCache):
    """A drop-in for mlx-lm's `KVCache` whose capacity is charged to a pool.

    Charged are batch x ceil(capacity / block_size) blocks in each of the two streams; capacity is
    the length of the arrays, which grow by `step` tokens. The token fill that the pool is told is
    batch x offset. `trim` lowers the fill, never the charge.

    Caches of one owner are one request: `release` of any of them frees and empties all. A copy is
    another request with an owner of its own, charged anew; caches copied together share it.
    `merge` and `to_quantized` return mlx-lm's own caches, which no pool tracks: `to_quantized`
    gives the charge back, `merge` leaves that of its sources until they are released or dropped.
    A cache that is dropped without `release` gives back what it was charged.

    `from_state`, and so `load_prompt_cache`, makes an unbound cache: not charged until `attach`.

    Like the stock cache it is for one thread at a time; the pool may be shared by many. A model
    call that is refused half way leaves the layers before that point ahead of the others, as any
    error in a model does: release the request, or trim them.

    Args:
        pool: The pool to charge.
        owner: The request's id; None takes one that no other cache has.
        step: Tokens by which the arrays grow, an int >= 1; None is max(block_size, 256).

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ValueError: `step` is below 1.
    """

    step: int = KVCache.step
    keys: mx.array | None
    values: mx.array | None
    offset: int

    # None while unbound; mlx-lm makes such caches without calling __init__.
    _charge: CacheCharge | None = None
    # The input shapes last found to fit what is held: those of every token but the first.
    _fitted: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __init__(
        self, pool: BlockPoolAllocator, owner: Owner | None = None, step: int | None = None
    ) -> None:
        _stock.__init__(self)
        if step is not None:
            self.step = checked_step(step)
        self.attach(pool, owner)

    @property
    def pool(self) -> BlockPoolAllocator | None:
        """The pool that is charged; None of an unbound cache."""
        return None if self._charge is None else self._charge.request.pool

    @property
    def owner(self) -> Owner | None:
        """The owner that is charged; None of an unbound cache."""
        return None if self._charge is None else self._charge.request.owner

    def attach(self, pool: BlockPoolAllocator, owner: Owner | None = None) -> None:
        """Charge an unbound cache, with what it holds, to a pool.

        Args:
            pool: The pool to charge.
            owner: The request's id, the same for all its layers; None takes one of its own.

        Raises:
            BlockPoolExhaustedError: Too few free blocks; the cache is unbound as before.
            ArgumentTypeError: An argument has the wrong type.
            ValueError: The cache is charged to a pool already.
        """
        if self._charge is not None:
            raise ValueError(f"this cache is bound to a pool already, as owner {self.owner!r}")
        self._bind(Request.of(pool, owner))
        if "step" not in vars(self):
            self.step = max(pool.config.block_size, self.step)

    def _bind(self, request: Request) -> None:
        """Charge what is held to a request, and become a part of it; or change nothing."""
        charge = CacheCharge(request)
        self._cover(charge, self.keys, self.offset)
        self._charge = charge
        request.join(self)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values, and return all of them.

        Args:
            keys: Shape (batch, heads, tokens, key dim).
            values: Shape (batch, heads, tokens, value dim).

        Returns:
            The keys and the values of all tokens held, in the same layout.

        Raises:
            BlockPoolExhaustedError: The pool cannot cover the growth; nothing was changed.
            ValueError: The shapes do not fit each other or what is held; nothing was changed.
        """
        shape, v_shape = keys.shape, values.shape
        if (shape, v_shape) != self._fitted:
            check_input(shape, v_shape, self.keys, self.values)
            self._fitted = shape, v_shape
        charge = self._charge
        if charge is None:
            return _update(self, keys, values)
        before = self.keys, self.values, self.offset
        charged = None
        if self.offset + shape[2] > charge.covered or not charge.leases[0].live:
            charged = charge.n_blocks
            capacity = grown_capacity(self.keys, self.offset, shape[2], self.step)
            charge.cover(shape[0], capacity, format_of(keys))
        try:
            fetched = _update(self, keys, values)
        except BaseException:
            self.keys, self.values, self.offset = before
            if charged is not None:
                charge.cut_to(charged)
            raise
        charge.fill(shape[0] * self.offset)
        return fetched

    def _cover(self, charge: CacheCharge, keys: mx.array | None, offset: int) -> None:
        """Charge for arrays as they are, filled up to `offset`."""
        if keys is None:
            charge.cover(0, 0, "")
        else:
            charge.cover(keys.shape[0], keys.shape[2], format_of(keys))
            charge.fill(keys.shape[0] * offset)

    def trim(self, n: int) -> int:
        """Drop the last `n` tokens, or all there are; the charge stays.

        Returns:
            How many tokens were dropped.

        Raises:
            ArgumentTypeError: `n` is no int; nothing was changed.
            ValueError: `n` is below 0; nothing was changed.
        """
        n = checked_count("n", n)
        if n < 0:
            raise ValueError(f"can only trim 0 tokens or more, got {n}")
        trimmed: int = _stock.trim(self, n)
        if self._charge is not None and self.keys is not None:
            self._charge.fill(self.keys.shape[0] * self.offset)
        return trimmed

    @property
    def state(self) -> State:
        """Keys and values cut to offset, and offset: (None, None, 0) of an empty cache.

        Assigning a state charges for it: BlockPoolExhaustedError or ValueError change nothing.
        """
        if self.keys is None:
            return None, None, self.offset
        return (*_stock.keys_and_values(self), self.offset)

    @state.setter
    def state(self, v: State) -> None:
        keys, values, offset = checked_state(v)
        if self._charge is not None:
            self._cover(self._charge, keys, offset)
        self.keys, self.values, self.offset = keys, values, offset
        self._fitted = None

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
        """mlx-lm's quantised cache of the same tokens; this cache's charge is given back.

        A cache that is used again afterwards is charged again.
        """
        quantized = super().to_quantized(group_size=group_size, bits=bits)
        if self._charge is not None:
            self._charge.give_back()
        return quantized

    def release(self) -> None:
        """End the request: free all blocks of the owner, and empty this and its other caches.

        Blocks that a later request holds under the same owner id are not touched. The caches can
        be used anew, which charges the same owner again. After `pool.free_all(owner)` instead, they
        keep their tokens and are charged for them again at their next update.
        """
        if self._charge is not None:
            self._charge.request.release()

    def __enter__(self) -> Self:
        """Release the cache's request when the block is left."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _emptied(self) -> None:
        """Called by the request, which has freed the blocks: drop the tokens too."""
        self.keys = self.values = None
        self.offset = 0
        if self._charge is not None:
            self._charge.drop()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for name, value in vars(self).items():
            if name != "_charge":
                setattr(new, name, copy.deepcopy(value, memo))
        if self._charge is not None:
            request = copy.deepcopy(self._charge.request, memo)
            try:
                new._bind(request)
            except BaseException:
                request.release()  # the layers copied so far: a copy is whole or not at all
                raise
        return new

    def __copy__(self) -> Self:
        # Two caches cannot share one charge.
        return copy.deepcopy(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if self._charge is not None:
            raise TypeError(
                "a PoolBackedKVCache bound to a pool cannot be pickled, its blocks belong to this "
                "process: use mlx_lm's save_prompt_cache, or pickle PoolBackedKVCache.from_state("
                "cache.state) and attach() what is loaded"
            )
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        bound = "unbound" if self._charge is None else f"owner={self.owner!r}"
        n_blocks = 0 if self._charge is None else self._charge.n_blocks
        return f"<PoolBackedKVCache {bound} offset={self.offset} blocks=2x{n_blocks}>"


class PooledCaches(list[Any]):
    """The caches of a request, layer by layer: a list that a `with` statement releases.

    ::

        with build_pooled_caches(model, pool, owner=7) as caches:
            for token, _ in generate_step(prompt, model, prompt_cache=caches):
                ...
    """

    request: Request | None = None

    def release(self) -> None:
        """End the request, and those of other pool-backed caches that were put into the list.

        Caches of other kinds are left alone.
        """
        if self.request is not None:
            self.request.release()
        for cache in _pooled_in(self):
            cache.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def build_pooled_caches(
    model: Any, pool: BlockPoolAllocator, owner: Owner | None, step: int | None = None
) -> PooledCaches:
    """The caches that mlx-lm would make for a model, its plain `KVCache` ones charged to a pool.

    Only caches of exactly that type are replaced, also inside a `CacheList`: sliding-window,
    recurrent and other kinds stay as the model made them, and are not charged.

    Args:
        model: A model of mlx-lm.
        pool: The pool to charge.
        owner: The request's id, shared by all layers; None takes one that no other cache has.
        step: Tokens by which a layer's arrays grow, an int >= 1; None is max(block_size, 256).

    Returns:
        One cache for each layer, to be given to mlx-lm as `prompt_cache`.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ValueError: `step` is below 1.
    """
    if step is not None:
        step = checked_step(step)
    request = Request.of(pool, owner, new=True)  # the layers find it by its owner
    caches = PooledCaches(
        _pooled(cache, pool, request.owner, step) for cache in make_prompt_cache(model)
    )
    caches.request = request
    return caches


def _pooled(cache: Any, pool: BlockPoolAllocator, owner: Owner, step: int | None) -> Any:
    if type(cache) is KVCache:
        return PoolBackedKVCache(pool, owner, step)
    if isinstance(cache, CacheList):
        cache.caches = tuple(_pooled(c, pool, owner, step) for c in cache.caches)
    return cache


def _pooled_in(caches: Iterable[Any]) -> Iterator[PoolBackedKVCache]:
    for cache in caches:
        if isinstance(cache, PoolBackedKVCache):
            yield cache
        elif isinstance(cache, CacheList):
            yield from _pooled_in(cache.caches)


# load_prompt_cache looks a saved cache's class up among mlx-lm's own names.
mlx_lm_cache.PoolBackedKVCache = PoolBackedKVCache  # type: ignore[attr-defined]
