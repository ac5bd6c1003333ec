"""StorageFormat: how a block of one format lies in memory. Needs no MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = ["STORAGE_FORMATS", "StorageFormat", "storage_format"]


@dataclass(frozen=True, slots=True)
class StorageFormat:
    """What a storage must know of a format tag.

    Attributes:
        name: The tag, e.g. "fp16" or "int4".
        dtype: Name of the element type in `mlx.core`. Codes of the integer formats are stored one
            a byte, so they take the same room whatever their width.
        itemsize: Bytes an element takes in the buffer.
        bits: Bits of information in an element: what packed storage would take.
        limit: Largest finite value of a float format, largest code of an integer format.
    """

    name: str
    dtype: str
    itemsize: int
    bits: int
    limit: float

    @property
    def is_float(self) -> bool:
        """True of fp32, fp16 and bf16; False of the formats that hold codes."""
        return self.dtype != "uint8"


STORAGE_FORMATS: Final[Mapping[str, StorageFormat]] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            StorageFormat("fp32", "float32", 4, 32, 3.4028234663852886e38),
            StorageFormat("fp16", "float16", 2, 16, 65504.0),
            StorageFormat("bf16", "bfloat16", 2, 16, 3.3895313892515355e38),
            StorageFormat("int8", "uint8", 1, 8, 255),
            StorageFormat("int4", "uint8", 1, 4, 15),
            StorageFormat("int2", "uint8", 1, 2, 3),
            StorageFormat("int1", "uint8", 1, 1, 1),
        )
    }
)


def storage_format(tag: str) -> StorageFormat:
    """The format of this tag.

    Raises:
        ValueError: No storage knows `tag`. (A pool accepts any tag: it holds no data.)
    """
    spec = STORAGE_FORMATS.get(tag)
    if spec is None:
        known = ", ".join(STORAGE_FORMATS)
        raise ValueError(f"format {tag!r} has no storage dtype; a storage holds {known}")
    return spec
