"""Build the Grafana boards from their YAML sources: `make dash`.

    python dashboards/build.py           write dashboards/grafana/*.json
    python dashboards/build.py --check   exit 1 if a committed file is not what the sources make

grafana-dashboard-builder reads the YAML and finds the panel components of `panels.py` by its own
plug-in mechanism (subclasses register themselves). It lays panels out in the rows of Grafana
before 5; `modern.py` turns those into the grid of today.

Needs grafana-dashboard-builder, installed without its dependencies, and PyYAML.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import panels  # noqa: E402, F401 - registers the components
import yaml  # noqa: E402
from grafana_dashboards.exporter import DashboardExporter, ProjectProcessor  # noqa: E402
from grafana_dashboards.parser import DefinitionParser  # noqa: E402
from modern import modernise  # noqa: E402

SOURCE = HERE / "source"
OUTPUT = HERE / "grafana"


class Collected(DashboardExporter):  # type: ignore[misc] # the library has no annotations
    """Keeps the boards instead of writing them, by file name."""

    def __init__(self, sources: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self._sources = sources
        self.boards: dict[str, dict[str, Any]] = {}

    def process_dashboard(
        self, project_name: str, dashboard_name: str, dashboard_data: Any
    ) -> None:
        """Called by the library once a board."""
        if dashboard_name in self.boards:
            raise ValueError(f"two boards are named {dashboard_name!r}")
        # The library hands on only the keys that it knows.
        source = self._sources[dashboard_name]
        more = {key: source[key] for key in ("description", "job_metric") if key in source}
        self.boards[dashboard_name] = modernise({**dashboard_data, **more})


def build(source: Path = SOURCE) -> dict[str, str]:
    """The boards as text, by file name."""
    files = sorted(source.glob("*.yaml"))
    entries = [entry for file in files for entry in yaml.safe_load(file.read_text("utf-8"))]
    collected = Collected({e["name"]: e["dashboard"] for e in entries if "dashboard" in e})
    projects = DefinitionParser().load_projects(list(map(str, files)))
    ProjectProcessor([collected]).process_projects(projects)
    return {
        f"{name}.json": json.dumps(board, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        for name, board in sorted(collected.boards.items())
    }


def stale(boards: dict[str, str], output: Path = OUTPUT) -> list[str]:
    """Names of files that differ from what the sources make, are missing, or have no source."""
    found = {path.name: path.read_text() for path in output.glob("*.json")}
    return sorted(n for n in {*boards, *found} if boards.get(n) != found.get(n))


def main(arguments: list[str] | None = None) -> int:
    """Write or check the boards; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    options = parser.parse_args(arguments)
    boards = build()
    if options.check:
        wrong = stale(boards)
        for name in wrong:
            print(f"{name} is not what dashboards/source makes: run `make dash`", file=sys.stderr)
        return 1 if wrong else 0
    OUTPUT.mkdir(exist_ok=True)
    for name, text in boards.items():
        (OUTPUT / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
