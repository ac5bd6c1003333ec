"""Where the boards, rules and runbooks lie that came with this installation."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from veloxquant_exporters.export.errors import ExportError

__all__ = ["Kind", "shipped"]

Kind = Literal["boards", "rules", "runbooks"]

_HERE: Final = Path(__file__).resolve().parent
# Where each kind lies in a checkout, which an editable install runs from. The wheel has the same
# files under data/: the table in pyproject.toml that puts them there is compared by a test.
_CHECKOUT: Final[dict[Kind, tuple[str, str]]] = {
    "boards": ("dashboards/grafana", "*.json"),
    "rules": ("dashboards/alerts", "*.yaml"),
    "runbooks": ("docs/runbooks", "*.md"),
}


def shipped(kind: Kind) -> dict[str, str]:
    """The files of a kind: text by name, in the order of the names.

    Raises:
        ExportError: They are not there, or cannot be read.
    """
    folder, pattern = _CHECKOUT[kind]
    places = [_HERE / "data" / kind, _HERE.parents[2] / folder]
    for place in places:
        paths = sorted(place.glob(pattern))
        if paths:
            return {path.name: _read(path) for path in paths}
    raise ExportError(
        f"the {kind} are missing from this installation: neither {places[0]} nor {places[1]} "
        f"holds any. Install veloxquant-mlx-monitor anew"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} cannot be read: {error}") from error
