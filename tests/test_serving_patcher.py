"""The patcher: modules are wrapped in the moment they are imported, and look as if they were not."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from veloxquant_mlx.serving import Listener, Patcher, PatchPoint, Seams
from veloxquant_mlx.serving.events import EVENTS
from veloxquant_mlx.serving.points import POINTS
from veloxquant_mlx.serving.wrap_batches import after, batch_filter

NAME = "patched_here"
SOURCE = '''"""A docstring."""
class Thing:
    uids = [1, 2]
    def step(self, n):
        """Double it."""
        if n < 0:
            raise ValueError(n)
        return 2 * n
    def filter(self, keep):
        self.uids = [self.uids[n] for n in keep]
    odd = 5
'''


class Heard(Listener):
    """Remembers."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.filtered: list[Any] = []
        self.fail = False

    def on_step(self, batch: Any) -> None:
        """See `Listener`."""
        self.steps.append(batch)
        if self.fail:
            raise RuntimeError("ours")

    def on_batch_filtered(self, batch: Any, keep: list[int], uids: list[int]) -> None:
        """See `Listener`."""
        self.filtered.append((batch.uids, keep, uids))


def point(target: str, make: Any = None, hook: str = "steps") -> PatchPoint:
    """A row of a table."""
    make = make or after("on_step", lambda event, args, _, __: event(args[0]))
    return PatchPoint(hook, f"{NAME}.core", target, make, ("on_step",))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose second module takes names out of the first."""
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "core.py").write_text(SOURCE + "\ndef load(path):\n    return path\n")
    (folder / "user.py").write_text(f"from {NAME}.core import Thing, load\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == NAME]:
        del sys.modules[name]


def test_a_module_is_wrapped_before_anybody_takes_a_name_out_of_it(package: Path) -> None:
    """Classes and functions; and the module is as it was in all that shows."""
    seams, heard = Seams(), Heard()
    seams.add(heard)
    patcher = Patcher([point("Thing.step"), point("load")], seams)
    assert patcher.hooks() == {}
    patcher.install()
    try:
        user = importlib.import_module(f"{NAME}.user")
        core = sys.modules[f"{NAME}.core"]
        thing = user.Thing()
        assert thing.step(4) == 8 and user.load("x") == "x"
        assert heard.steps == [thing, "x"]
        with pytest.raises(ValueError, match="-1"):
            thing.step(-1)
        assert len(heard.steps) == 2, "what raised is not told of"
        assert patcher.hooks() == {"steps": True} and patcher.missing() == []
        assert inspect.getsource(core).startswith('"""A docstring."""')
        assert type(core.__loader__).__name__ == "SourceFileLoader"
        assert core.__spec__ is not None and core.__spec__.loader is core.__loader__
        assert user.Thing.step.__doc__ == "Double it."
    finally:
        patcher.remove()
    assert thing.step(1) == 2 and len(heard.steps) == 2
    assert not any(type(finder).__module__.startswith("veloxquant") for finder in sys.meta_path)


def test_a_module_that_is_imported_already_is_wrapped_at_once(package: Path) -> None:
    """Its classes are the same objects wherever they were taken to."""
    user = importlib.import_module(f"{NAME}.user")
    seams, heard = Seams(), Heard()
    seams.add(heard)
    patcher = Patcher([point("Thing.step")], seams)
    patcher.install()
    user.Thing().step(1)
    patcher.remove()
    assert len(heard.steps) == 1


def test_what_is_missing_is_left_out_and_named(package: Path) -> None:
    """One of two points is enough to say that the hook is not whole; the other still works."""
    seams, heard = Seams(), Heard()
    seams.add(heard)
    points = [point("Thing.step"), point("Thing.gone"), point("No.step"), point("Thing.odd")]
    points.append(point("gone", hook="others"))
    patcher = Patcher(points, seams)
    patcher.install()
    try:
        core = importlib.import_module(f"{NAME}.core")
        core.Thing().step(1)
        assert len(heard.steps) == 1
        assert patcher.hooks() == {"steps": False, "others": False}
        assert patcher.missing()[0] == f"steps ({NAME}.core.Thing.gone)"
        assert len(patcher.missing()) == 4
    finally:
        patcher.remove()


def test_a_fault_of_ours_is_counted_and_goes_no_further(package: Path) -> None:
    """By hook; the program has its result, and other listeners are told all the same."""
    seams, one, two = Seams(), Heard(), Heard()
    one.fail = True
    seams.add(one, two)
    patcher = Patcher([point("Thing.step")], seams)
    patcher.install()
    try:
        core = importlib.import_module(f"{NAME}.core")
        assert core.Thing().step(3) == 6
        assert core.Thing().step(3) == 6
        assert seams.errors == {"steps": 2} and len(two.steps) == 2
        seams.remove(one)
        core.Thing().step(3)
        assert seams.errors == {"steps": 2} and len(two.steps) == 3
    finally:
        patcher.remove()


def test_filtering_tells_the_rows_of_before(package: Path) -> None:
    """By place or by name."""
    seams, heard = Seams(), Heard()
    seams.add(heard)
    row = PatchPoint("b", f"{NAME}.core", "Thing.filter", batch_filter, ("on_batch_filtered",))
    patcher = Patcher([row], seams)
    patcher.install()
    try:
        core = importlib.import_module(f"{NAME}.core")
        core.Thing().filter([1])
        core.Thing().filter(keep=[0])
    finally:
        patcher.remove()
    assert heard.filtered == [([2], [1], [1, 2]), ([1], [0], [1, 2])]


def test_an_import_that_fails_fails_as_ever(package: Path) -> None:
    """And the next one may do better."""
    (package / "core.py").write_text("1 / 0\n")
    patcher = Patcher([point("Thing.step")], Seams())
    patcher.install()
    try:
        with pytest.raises(ZeroDivisionError):
            importlib.import_module(f"{NAME}.core")
        assert patcher.hooks() == {}
    finally:
        patcher.remove()


def test_the_table_emits_events_that_exist_and_each_one_is_emitted() -> None:
    """Nobody can listen to an event that never comes."""
    emitted = {event for row in POINTS for event in row.emits}
    assert emitted == set(EVENTS)


def test_a_module_that_is_reloaded_is_wrapped_again(package: Path) -> None:
    """Its classes are other objects then; what was not replaced is not wrapped twice."""
    seams, heard = Seams(), Heard()
    seams.add(heard)
    patcher = Patcher([point("Thing.step"), point("load")], seams)
    patcher.install()
    try:
        core = importlib.import_module(f"{NAME}.core")
        importlib.reload(core)
        core.Thing().step(1)
        assert len(heard.steps) == 1
        patcher.install()
        core.load("x")
        assert len(heard.steps) == 2
        (package / "core.py").write_text("class Thing:\n    pass\n")
        importlib.invalidate_caches()
        del sys.modules[f"{NAME}.core"]
        importlib.import_module(f"{NAME}.core")
        assert patcher.hooks() == {"steps": False}
    finally:
        patcher.remove()
