"""completing: what a shell offers for a value that click would take for any text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    import click

__all__ = ["files", "folders"]


def files(_context: click.Context, _option: click.Parameter, begun: str) -> list[CompletionItem]:
    """Files and folders, as the shell itself finds them; for `shell_complete`."""
    return [CompletionItem(begun, type="file")]


def folders(_context: click.Context, _option: click.Parameter, begun: str) -> list[CompletionItem]:
    """Folders only."""
    return [CompletionItem(begun, type="dir")]
