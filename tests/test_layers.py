"""Data flows one way through the house: which room imports which, and which library stands where."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOTS = {
    "veloxquant_mlx": ROOT / "veloxquant_mlx",
    "veloxquant_exporters": ROOT / "exporters" / "veloxquant_exporters",
}
MLX, EXPORTERS = "veloxquant_mlx", "veloxquant_exporters"

# Of the thing observed: a room imports itself and what is named here.
BELOW = {
    "core": set(),
    "memory": {"core"},
    "telemetry": {"core", "memory"},
    "serving": {"core", "memory", "telemetry"},
}
# A library is imported by these rooms and no other.
LIBRARIES = {
    "mlx": {"core", "memory", "demo"},
    "mlx_lm": {"memory"},
    "numpy": {"telemetry", "check", "replay", "report", "top"},
    "msgpack": set(),  # telemetry.trace loads them by name, so as to say which extra is missing
    "zstandard": set(),
    "prometheus_client": {"prometheus", "sidecar", "check", "top"},
    "opentelemetry": {"opentelemetry"},
    "h11": {"http"},
    "click": {"cli", "demo", "top"},
    "rich": {"cli", "demo", "simulate", "top"},
    "textual": {"top"},
    "bokeh": {"report"},
    "matplotlib": {"cli", "simulate"},
    "psutil": {"port_holder"},
}


def imports(text: str) -> Iterator[str]:
    """Every module that a source imports, wherever in it; those for the type checker too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def room_of(module: str) -> tuple[str, str]:
    """Package and room of a dotted name; the room "" is the package itself."""
    package, _, rest = module.partition(".")
    return package, rest.partition(".")[0]


def house() -> dict[tuple[str, str], set[str]]:
    """By room, all that its modules import."""
    found: dict[tuple[str, str], set[str]] = {}
    for package, folder in ROOTS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            room = "" if parts == ("__init__",) else parts[0]
            found.setdefault((package, room), set()).update(imports(path.read_text("utf-8")))
    return found


HOUSE = house()


def ours(room: tuple[str, str]) -> set[tuple[str, str]]:
    """The other rooms of ours that a room imports."""
    used = {room_of(name) for name in HOUSE[room] if name.split(".")[0] in ROOTS}
    return used - {room}


@pytest.mark.parametrize("room", [room for package, room in HOUSE if package == MLX and room])
def test_what_is_observed_knows_nothing_of_who_looks(room: str) -> None:
    """Memory does not know telemetry, telemetry no exporter and no program."""
    used = {name for package, name in ours((MLX, room)) if package == MLX and name}
    assert {package for package, _ in ours((MLX, room))} <= {MLX}
    assert used <= BELOW[room], f"{room} reaches up"


def test_no_two_rooms_import_each_other() -> None:
    """Rooms stand in an order: whoever has to reach back is in the wrong one."""
    graph = {room: ours(room) - {(MLX, ""), (EXPORTERS, "")} for room in HOUSE}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"these rooms import each other: {error.args[1]}")
    assert order.index((EXPORTERS, "cli")) > order.index((EXPORTERS, "prometheus"))


def test_a_library_stands_in_the_rooms_that_are_for_it() -> None:
    """Each part can be installed without the others' libraries."""
    used: dict[str, set[str]] = {name: set() for name in LIBRARIES}
    for (_, room), names in HOUSE.items():
        for name in {name.split(".")[0] for name in names} - ROOTS.keys():
            if name not in sys.stdlib_module_names:
                used.setdefault(name, set()).add(room)
    assert used == LIBRARIES


def test_every_room_is_in_the_architecture() -> None:
    """Who reads the page knows where everything is."""
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    folders = {
        room
        for (package, room) in HOUSE
        if (ROOTS[package] / room).is_dir() and room
    }  # fmt: skip
    named = set(re.findall(r"`(?:[\w/]*/)?(\w+)/`", page))
    assert sorted(folders - named) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import a.b as c, d", {"a.b", "d"}),
        ("def f():\n    from e.f import g", {"e.f"}),
        ("if TYPE_CHECKING:\n    from h import i", {"h"}),
    ],
)
def test_imports_are_found_wherever_they_stand(text: str, found: set[str]) -> None:
    """At the top, in a function, for the type checker."""
    assert set(imports(text)) == found


def test_a_room_that_reaches_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: telemetry imports an exporter, and two rooms each other."""
    monkeypatch.setitem(HOUSE, (MLX, "telemetry"), {f"{EXPORTERS}.sources"})
    with pytest.raises(AssertionError):
        test_what_is_observed_knows_nothing_of_who_looks("telemetry")
    with pytest.raises(pytest.fail.Exception, match="import each other"):
        test_no_two_rooms_import_each_other()
