"""Patcher: puts wrappers around functions of mlx-lm when its modules are imported, or at once.

mlx-lm's modules import functions and classes from each other by name. So a module is patched in the
moment it has been executed, before any other module can take a name out of it. A point that this
version of mlx-lm lacks is left out and remembered; nothing is raised into the import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from veloxquant_mlx.serving.events import Seams
from veloxquant_mlx.serving.fork_lock import lock_of

__all__ = ["Make", "PatchPoint", "Patcher"]

# Makes the replacement of a function: it must pass on all arguments and results as they are.
Make = Callable[[Callable[..., Any], Seams], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class PatchPoint:
    """One function that is wrapped.

    Attributes:
        hook: The feature it serves: a label of the metrics.
        module: Where it is defined.
        target: Its name there, as in "load_model" or "KVCache.trim".
        make: Makes the wrapper.
        emits: Events that the wrapper tells.
        since: First mlx-lm that has it, of those tested.
    """

    hook: str
    module: str
    target: str
    make: Make
    emits: tuple[str, ...]
    since: str = "0.32.0"


class Patcher:
    """Keeps `points` wrapped from `install` to `remove`. Thread-safe."""

    def __init__(self, points: Sequence[PatchPoint], seams: Seams) -> None:
        self.points = tuple(points)
        self._seams = seams
        self._lock = lock_of(self)
        self._finder = _Finder({point.module for point in points}, self._patch)
        self._placed: dict[PatchPoint, tuple[Any, str, Any, Any]] = {}
        self._missing: dict[PatchPoint, None] = {}
        for point in points:
            for name in point.emits:
                seams.event(name).hook = point.hook

    def install(self) -> None:
        """Wrap what is imported already, and the rest when it is."""
        if self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)
        for name in dict.fromkeys(point.module for point in self.points):
            module = sys.modules.get(name)
            if module is not None:
                self._patch(module)

    def remove(self) -> None:
        """Put everything back as it was."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        with self._lock:
            for owner, name, original, wrapper in reversed(self._placed.values()):
                _put_back(owner, name, original, wrapper)
            self._placed.clear()
            self._missing.clear()

    def hooks(self) -> dict[str, bool]:
        """By hook: whether all its points are in place; without hooks that nothing imported yet."""
        found: dict[str, bool] = {}
        with self._lock:
            for point in self.points:
                if point in self._placed or point in self._missing:
                    found[point.hook] = found.get(point.hook, True) and point in self._placed
        return found

    def missing(self) -> list[str]:
        """What is off, as in "streams (mlx_lm.generate.stream_generate)"."""
        with self._lock:
            return [f"{point.hook} ({point.module}.{point.target})" for point in self._missing]

    # -- inside ---------------------------------------------------------------------------------

    def _patch(self, module: ModuleType) -> None:
        """Wrap what is not wrapped in `module`, which may have been executed once more (reload)."""
        with self._lock:
            for point in self.points:
                if point.module == module.__name__:
                    self._place(module, point)

    def _place(self, module: ModuleType, point: PatchPoint) -> None:
        placed = self._placed.pop(point, None)
        try:
            owner, name, original = _find(module, point.target)
            if placed is not None and owner is placed[0] and _is_there(placed):
                self._placed[point] = placed
                return
            wrapper = point.make(original, self._seams)
            _put(owner, name, original, wrapper)
        except Exception:  # noqa: BLE001 - whatever mlx-lm has there: the program must import
            self._missing[point] = None
            return
        self._placed[point] = (owner, name, original, wrapper)
        self._missing.pop(point, None)


def _find(module: ModuleType, target: str) -> tuple[Any, str, Any]:
    """Where `target` is, its name there, and the function itself."""
    *path, name = target.split(".")
    owner: Any = module
    for part in path:
        owner = vars(owner)[part]
    if name == "__new__":
        # One that was put there before stays there for good: see `_put_back`.
        return owner, name, getattr(owner.__new__, "original", owner.__new__)
    original = vars(owner)[name]
    if not isinstance(original, FunctionType):
        raise TypeError(f"{target} is no plain function")
    return owner, name, original


def _is_there(placed: tuple[Any, str, Any, Any]) -> bool:
    owner, name, _, wrapper = placed
    there = vars(owner).get(name)
    return (there.__func__ if isinstance(there, staticmethod) else there) is wrapper


def _put(owner: Any, name: str, original: Any, wrapper: Any) -> None:
    setattr(owner, name, staticmethod(wrapper) if name == "__new__" else wrapper)
    if isinstance(owner, ModuleType):
        _rebind(original, wrapper)


def _put_back(owner: Any, name: str, original: Any, wrapper: Any) -> None:
    if name == "__new__":
        # Taking it away again would leave a class whose slot looks it up and whose construction
        # refuses arguments; with nobody listening, the wrapper makes plain objects.
        return
    setattr(owner, name, original)
    if isinstance(owner, ModuleType):
        _rebind(wrapper, original)


def _rebind(old: Any, new: Any) -> None:
    """Replace `old` in the modules of mlx-lm that took it by name before it was wrapped."""
    for name, module in list(sys.modules.items()):
        if name == "mlx_lm" or name.startswith("mlx_lm."):
            for key, value in list(vars(module).items()):
                if value is old:
                    setattr(module, key, new)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the watched modules, and adds a step to their execution."""

    def __init__(self, names: Iterable[str], done: Callable[[ModuleType], None]) -> None:
        self._names = frozenset(names)
        self._done = done

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self._done)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A loader that tells when a module has been executed; in all else it is the other one."""

    def __init__(self, loader: Any, done: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._done = done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module shall look as if this had never been here.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._done(module)

    # Python leaves the frames of its import system out of the traceback of an import that failed;
    # this one shall not stand among those of the program either.
    exec_module.__code__ = exec_module.__code__.replace(
        co_filename=importlib.machinery.SourceFileLoader.exec_module.__code__.co_filename
    )
