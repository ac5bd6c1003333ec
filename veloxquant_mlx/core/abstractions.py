"""The interface of a single-stream KV cache: one key vector and one value vector a token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Only a checker needs the array type: a process that merely watches pools must not load MLX.
    import mlx.core as mx

__all__ = ["KVCache"]


class KVCache(ABC):
    """A growing sequence of (key, value) vectors that a query attends to.

    Vectors have shape ``(d,)``, the same ``d`` for every key and every query of one cache; values
    share one length of their own. Token order is append order, separately for keys and values, so
    that keys and values may be written by separate calls. An implementation may store them in any
    format: what it returns is an approximation of what was put in.

    A cache belongs to one request; unless an implementation says otherwise it is not thread-safe.
    """

    @abstractmethod
    def append_key(self, k: mx.array) -> None:
        """Append the key of the next token.

        Args:
            k: Floating-point vector of shape ``(d,)``.

        Raises:
            ValueError: ``k`` has another shape than the keys before it; nothing was changed.
        """

    @abstractmethod
    def append_value(self, v: mx.array) -> None:
        """Append the value of the next token.

        Args:
            v: Floating-point vector of shape ``(d_v,)``.

        Raises:
            ValueError: ``v`` has another shape than the values before it; nothing was changed.
        """

    def append(self, k: mx.array, v: mx.array) -> None:
        """Append the key and the value of the next token.

        The default is the two single appends in this order. An implementation that can fail half
        way, for want of blocks say, overrides it so that a failure leaves neither behind.

        Args:
            k: Floating-point vector of shape ``(d,)``.
            v: Floating-point vector of shape ``(d_v,)``.
        """
        self.append_key(k)
        self.append_value(v)

    @abstractmethod
    def attend(self, q: mx.array) -> mx.array:
        """Softmax attention of one query over all tokens held.

        Args:
            q: Floating-point vector of shape ``(d,)``.

        Returns:
            The weighted sum of the values, shape ``(d_v,)``.

        Raises:
            ValueError: The cache is empty, or ``q`` does not have the shape of the keys.
        """

    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes that this cache holds in memory now, or is charged for where memory is pooled."""

    @abstractmethod
    def reset(self) -> None:
        """Drop all tokens and give back what held them; the cache can be used anew."""

    @abstractmethod
    def __len__(self) -> int:
        """Tokens held: those whose key and value have both been appended."""
