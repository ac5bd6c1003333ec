"""Checks of arguments, made before the pool's lock is taken: a refused call changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.memory.block import Block, Owner

__all__ = ["check_blocks", "check_format", "check_owner", "check_tokens", "wrong_stream"]

FORMAT_MAX_CHARS = 64

# Of anything else than a Block a TypeError, of one that `__init__` never saw an AttributeError: one
# call an item asks both, at a third of the time of a loop.
_LEASE_OF: Final[Callable[[object], object]] = Block.__dict__["_lease"].__get__


def check_owner(owner: object) -> Owner:
    """`owner` as a plain int or str.

    A subclass is turned into its base: its own `__hash__` or `__eq__` could call the pool back
    while the lock is held.

    Raises:
        ArgumentTypeError: Neither an int nor a str, or a bool.
    """
    if isinstance(owner, str):
        return str.__str__(owner)
    if isinstance(owner, int) and not isinstance(owner, bool):
        return int.__add__(owner, 0)
    raise ArgumentTypeError(f"owner must be an int or a str (and no bool), got {owner!r}")


def check_tokens(n_tokens: object) -> int:
    """`n_tokens` as a plain int.

    Raises:
        ArgumentTypeError: Not an int, or a bool.
        ValueError: Below 1.
    """
    if not isinstance(n_tokens, int) or isinstance(n_tokens, bool):
        raise ArgumentTypeError(f"n_tokens must be an int >= 1, got {n_tokens!r}")
    if n_tokens < 1:
        raise ValueError(f"n_tokens must be >= 1, got {n_tokens}")
    return int.__add__(n_tokens, 0)


def check_format(fmt: object) -> str:
    """`fmt` as a plain str.

    Raises:
        ArgumentTypeError: Not a str.
        ValueError: Empty or longer than 64 characters.
    """
    if not isinstance(fmt, str):
        raise ArgumentTypeError(f"format must be a str, got {fmt!r}")
    if not 0 < len(fmt) <= FORMAT_MAX_CHARS:
        raise ValueError(f"format must have 1 to {FORMAT_MAX_CHARS} characters, got {len(fmt)}")
    return str.__str__(fmt)


def check_blocks(blocks: Iterable[Block]) -> list[Block]:
    """`blocks` as a list of `Block`.

    Raises:
        ArgumentTypeError: Not an iterable, an item that is no Block, or one without its fields
            (`Block.__new__` alone makes such), on which the books would stumble half-way.
    """
    try:
        items = iter(blocks)
    except TypeError:
        raise ArgumentTypeError(
            f"blocks must be an iterable of Block, got {type(blocks).__name__}"
        ) from None
    batch = list(items)
    try:
        all(map(_LEASE_OF, batch))  # a lease is always true
    except (TypeError, AttributeError):
        for position, block in enumerate(batch):
            _check_block(position, block)
    return batch


def _check_block(position: int, block: object) -> None:
    try:
        _LEASE_OF(block)
    except TypeError:
        raise ArgumentTypeError(f"blocks[{position}] must be a Block, got {block!r}") from None
    except AttributeError:
        raise ArgumentTypeError(
            f"blocks[{position}] must be a Block that a pool or Block(...) made, got one without "
            "its fields"
        ) from None


def wrong_stream(stream: object, known: Iterable[str]) -> ValueError:
    """The error for a stream that this pool has not."""
    return ValueError(f"stream must be one of {', '.join(map(repr, known))}, got {stream!r}")
