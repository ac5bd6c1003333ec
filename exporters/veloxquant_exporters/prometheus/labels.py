"""Label values: any text a user may have named a pool by, made fit for a page."""

from __future__ import annotations

__all__ = ["label_value"]


def label_value(text: str) -> str:
    r"""`text` such that it can be encoded: a lone surrogate becomes its `\udc80` in letters.

    One such name would otherwise end the page for everybody. Distinct texts stay distinct but for
    those that spell the escape out.
    """
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()
