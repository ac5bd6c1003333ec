"""What the compiler made of the pool's loops: a signal must not fall out of a `try`."""

from __future__ import annotations

import ast
import dis
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

import veloxquant_mlx.memory

MODULES = ("books", "checks", "gate", "giving", "hot_path", "lease", "stream", "taking")


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code and every code inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def jumps_out_of_a_try(code: CodeType) -> list[str]:
    """Jumps back to a place inside of a `try`, made outside of it.

    CPython looks at signals at every jump back. From 3.12 on, the compiler copies the jump of a loop
    into the branch of an `if` that ends it, and forgets the handler: an exception raised there skips
    the `finally`.
    """
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handlers(offset: int) -> set[int]:
        return {entry.target for entry in table if entry.start <= offset < entry.end}

    return [
        f"{code.co_qualname}, line {jump.positions.lineno if jump.positions else '?'}"
        for jump in dis.get_instructions(code)
        if jump.opname.startswith("JUMP_BACKWARD")
        if not handlers(jump.argval) <= handlers(jump.offset)
    ]


def functions_with_try(source: str) -> set[str]:
    """Names of functions that have a `try` of their own; comprehensions have one by the compiler."""
    return {
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        if any(isinstance(inner, ast.Try) for inner in ast.walk(node))
    }


@pytest.mark.parametrize("name", MODULES)
def test_no_jump_leaves_a_try(name: str) -> None:
    """Every loop inside of a `try` is inside of it at its end too."""
    source = (Path(veloxquant_mlx.memory.__path__[0]) / f"{name}.py").read_text("utf-8")
    names = functions_with_try(source)
    codes = [c for c in codes_in(compile(source, name, "exec")) if c.co_name in names]
    assert [found for code in codes for found in jumps_out_of_a_try(code)] == []


def test_the_modules_exist() -> None:
    """A module that was renamed is not left out."""
    found = {module.name for module in pkgutil.iter_modules(veloxquant_mlx.memory.__path__)}
    assert found.issuperset(MODULES)
    folder = Path(veloxquant_mlx.memory.__path__[0])
    assert "free_batch" in functions_with_try((folder / "giving.py").read_text("utf-8"))


def test_the_check_sees_such_a_jump() -> None:
    """A loop that ends in an `if` is caught where the compiler breaks it, and nowhere else."""
    source = """
def count(items):
    n = 0
    try:
        for item in items:
            n += 1
            if item:
                n += 1
    finally:
        report(n)
"""
    (inner,) = [c for c in codes_in(compile(source, "planted", "exec")) if c.co_name == "count"]
    jumps = [i for i in dis.get_instructions(inner) if i.opname.startswith("JUMP_BACKWARD")]
    assert jumps
    table = dis._parse_exception_table(inner)  # type: ignore[attr-defined]
    loose = [j for j in jumps if not any(e.start <= j.offset < e.end for e in table)]
    assert len(jumps_out_of_a_try(inner)) == len(loose)
