"""Execute: run a program under the name `__main__`, as Python would have without us."""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import os
import pkgutil
import runpy
import sys
import warnings
from collections.abc import Collection
from importlib import import_module
from io import TextIOWrapper
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from veloxquant_exporters.run.command_line import Program

__all__ = ["execute"]


def execute(program: Program, *, shared: Collection[str] = ()) -> None:
    """Run it to its end; what it raises ends the process as it would without us.

    To be called on the main thread, with nothing of ours left to be done: `sys.argv`, `sys.path`
    and `__main__` become the program's.

    Args:
        program: What to run.
        shared: Modules that shall exist once, although `-m` would make a second copy of them under
            the name `__main__`, past all hooks.

    Raises:
        SystemExit: The program's, or 1 after the traceback of what it raised was shown.
        KeyboardInterrupt: The program's, after its traceback was shown: it ends the process by
            SIGINT.
    """
    _apply_flags(program)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    try:
        _run(program, main, shared)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - Python itself would show it and end
        _end(error)


def _run(program: Program, main: ModuleType, shared: Collection[str]) -> None:
    if program.kind == "module":
        sys.argv[:] = ["-m", *program.arguments]
        _put_first(os.getcwd())  # noqa: PTH109 - sys.path holds text
        _run_module(program.target, main, shared)
    elif program.kind == "code":
        sys.argv[:] = ["-c", *program.arguments]
        _put_first("")
        main.__dict__["__loader__"] = importlib.machinery.BuiltinImporter
        exec(_compile(program.target, "<string>"), main.__dict__)  # noqa: S102
    else:
        sys.argv[:] = [program.target, *program.arguments]
        # Not `abspath`: Python leaves what is between as it was written.
        _run_script(os.path.join(os.getcwd(), program.target), main)  # noqa: PTH109, PTH118


def _put_first(entry: str) -> None:
    """What Python puts before its own path: for us that was the folder of `vqmon`."""
    if sys.flags.safe_path:
        return
    sys.path[0:1] = [entry]


# -- modules -------------------------------------------------------------------------------------


def _run_module(name: str, main: ModuleType, shared: Collection[str]) -> None:
    try:
        found = _details_of(name)
    except _NotFoundError as error:
        _refuse(str(error))
    spec: importlib.machinery.ModuleSpec = found[1]
    code: CodeType = found[2]
    sys.argv[0] = spec.origin or name
    if spec.name in shared:
        module = import_module(spec.name)
        main.__dict__.update(
            {key: value for key, value in vars(module).items() if key != "__builtins__"}
        )
        code = _main_block(spec)
    _describe(main, spec.origin, spec)
    exec(code, main.__dict__)  # noqa: S102 - that is the job


def _details_of(name: str) -> Any:
    """Find it as `python -m` does, and say in Python's own words what cannot be found."""
    details = runpy._get_module_details  # type: ignore[attr-defined] # noqa: SLF001
    if name not in sys.modules:
        return details(name, _NotFoundError)
    with warnings.catch_warnings():
        # It is there because we use it, which is nothing to warn the program of.
        warnings.simplefilter("ignore", RuntimeWarning)
        return details(name, _NotFoundError)


class _NotFoundError(Exception):
    """There is no such module to run."""


def _refuse(text: str) -> NoReturn:
    sys.exit(f"{sys.executable}: {text}")


def _describe(main: ModuleType, origin: str | None, spec: Any) -> None:
    main.__dict__.update(
        __name__="__main__",
        __file__=origin,
        __cached__=getattr(spec, "cached", None),
        __doc__=main.__dict__.get("__doc__"),
        __loader__=getattr(spec, "loader", None),
        __package__=getattr(spec, "parent", None),
        __spec__=spec,
    )


def _main_block(spec: importlib.machinery.ModuleSpec) -> CodeType:
    """What stands under `if __name__ == "__main__"`: all that is left to do once it is imported."""
    assert spec.loader is not None
    source = spec.loader.get_source(spec.name)  # type: ignore[attr-defined]
    tree = ast.parse(source or "", spec.origin or "<string>")
    tree.body = [node for node in tree.body if _asks_for_main(node)]
    return compile(tree, spec.origin or "<string>", "exec", dont_inherit=True)


def _asks_for_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "'__main__'" in ast.unparse(node.test)


# -- scripts -------------------------------------------------------------------------------------


def _run_script(path: str, main: ModuleType) -> None:
    if pkgutil.get_importer(path) is not None:  # a folder, or a zip file of whatever name
        _put_first(path)
        spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
        if spec is None or spec.loader is None:
            _refuse(f"can't find '__main__' module in {path!r}")
        code = spec.loader.get_code("__main__")  # type: ignore[attr-defined]
        _describe(main, spec.origin, spec)
        main.__dict__["__package__"] = ""
    else:
        _put_first(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120 - sys.path holds text
        code = _compiled(path)
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__.update(
            __file__=path, __cached__=None, __loader__=loader, __package__=None, __spec__=None
        )
    exec(code, main.__dict__)  # noqa: S102


def _compiled(path: str) -> CodeType:
    try:
        if path.endswith(".pyc"):
            code = importlib.machinery.SourcelessFileLoader("__main__", path).get_code("__main__")
            assert code is not None
            return code
        with open(path, "rb") as file:  # noqa: PTH123 - a path of the user's, as it stands
            source = file.read()
    except OSError as error:
        sys.stderr.write(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n"
        )
        sys.exit(2)
    return _compile(source, path)


def _compile(source: str | bytes, path: str) -> CodeType:
    # What this file has from __future__ must not reach into the program.
    return compile(source, path, "exec", dont_inherit=True)


# -- Python's options, and its end ---------------------------------------------------------------


def _apply_flags(program: Program) -> None:
    if "u" in program.flags:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):  # not what a caller put there
                stream.reconfigure(write_through=True)
    if "B" in program.flags:
        sys.dont_write_bytecode = True
    sys.warnoptions.extend(program.warnings)
    # As Python at its start, which says what is no such option and goes on.
    warnings._processoptions(program.warnings)  # type: ignore[attr-defined] # noqa: SLF001


def _end(error: BaseException) -> NoReturn:
    """Show what the program raised, without our own frames, and end as Python would."""
    error.__traceback__ = _theirs(error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        # Python ends by the signal itself, so that shells and supervisors see what it was.
        sys.excepthook = lambda *_: None
        raise error
    sys.exit(1)


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the program."""
    ours = {__file__}
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in ours:
        rest = rest.tb_next
    return rest
