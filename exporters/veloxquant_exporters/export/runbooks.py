"""Copies of the runbooks, which links lead to where the user names no other place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from veloxquant_exporters.export.shipped import shipped

__all__ = ["LocalRunbooks"]


@dataclass(frozen=True, slots=True)
class LocalRunbooks:
    """Copies of the runbooks in the exported folder, for who publishes none elsewhere.

    Attributes:
        directory: The folder that is exported to.
    """

    directory: Path

    @property
    def base(self) -> str:
        """Their address: links to it work on this machine."""
        return (Path(os.path.realpath(self.directory)) / "runbooks").as_uri()

    def files(self) -> dict[str, str]:
        """The copies: text by path within the folder."""
        return {f"runbooks/{name}": text for name, text in shipped("runbooks").items()}
