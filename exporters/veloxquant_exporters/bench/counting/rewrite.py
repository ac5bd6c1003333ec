"""Rewrite: import the target's source with each container operation made to pay.

A finder takes the modules of some packages, rewrites their syntax trees, and puts the helpers of
`charges` into their names. Everything else is imported as always.
"""

from __future__ import annotations

import ast
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, TypeVar

from veloxquant_exporters.bench.counting.charges import HELPERS

_Node = TypeVar("_Node", bound=ast.AST)

__all__ = ["CannotCountError", "Rewriter", "rewrite"]

# Their meaning hangs on the place where they are written.
_LEFT_ALONE = {"super", "locals", "globals", "vars", "dir", "eval", "exec", "_getframe"}


class CannotCountError(Exception):
    """The source holds an operation whose cost the rewriting cannot see."""


class Rewriter(MetaPathFinder):
    """Finds modules of `packages` and rewrites them; put first on `sys.meta_path`."""

    def __init__(self, packages: Sequence[str], spare: str) -> None:
        self.packages = tuple(packages)
        self.spare = spare  # the harness itself
        self.files: set[str] = set()

    def covers(self, name: str) -> bool:
        """True when the module of this name is rewritten."""
        inside = any(name == top or name.startswith(f"{top}.") for top in self.packages)
        return inside and not name.startswith(self.spare)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As `importlib` wants it; None leaves the module to others."""
        if not self.covers(name):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(name, spec.loader.path)
            self.files.add(spec.loader.path)
        return spec

    def install(self) -> None:
        """Rewrite from now on; forgets what was imported of `packages` before."""
        for name in [name for name in sys.modules if self.covers(name)]:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Leave later imports alone."""
        sys.meta_path.remove(self)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """The rewritten code; never from or into the bytecode cache."""
        return rewrite(self.get_data(self.path).decode("utf-8"), self.path)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module with the helpers at hand."""
        vars(module).update(HELPERS)
        super().exec_module(module)


def rewrite(source: str, filename: str) -> CodeType:
    """Compile `source` with its container operations charged.

    Raises:
        CannotCountError: A slice is assigned to together with other targets.
    """
    tree = _Charge(filename).visit(ast.parse(source, filename))
    return compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True)


class _Charge(ast.NodeTransformer):
    def __init__(self, filename: str) -> None:
        self.filename = filename

    # -- expressions ----------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> ast.AST:
        func = node.func
        name = getattr(func, "id", getattr(func, "attr", ""))
        self.generic_visit(node)
        if name in _LEFT_ALONE:
            return node
        args = [node.func, *node.args]
        return _at(node, ast.Call(_name("call"), args, node.keywords))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) != 1:
            return node
        left, right = node.left, node.comparators[0]
        op = node.ops[0]
        if isinstance(op, ast.In):
            return self._helper("in", node, left, right)
        if isinstance(op, ast.NotIn):
            return self._helper("not_in", node, left, right)
        if isinstance(op, ast.Eq):
            return self._helper("equal", node, left, right)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Add | ast.Mult | ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
            return self._helper("made", node, node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Slice):
            return self._helper("made", node, node)
        return node

    def visit_Starred(self, node: ast.Starred) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            node.value = self._helper("drawn", node, node.value)
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        self.generic_visit(node)
        node.values = [
            value if key is not None else self._helper("drawn", value, value)
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        return node

    # -- statements -----------------------------------------------------------------------------

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        target: ast.expr = node.target
        if isinstance(target, ast.Subscript):
            node.value = self._helper("drawn", node, node.value)
        else:
            node.value = self._helper("added", node, _load(target), node.value)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Slice):
                if len(node.targets) > 1:
                    raise CannotCountError(
                        f"{self.filename}:{node.lineno}: a slice is one of several targets"
                    )
                store = self._helper("store", node, target.value, _slice(target.slice), node.value)
                return _at(node, ast.Expr(store))
            if isinstance(target, ast.Tuple | ast.List) and any(
                isinstance(part, ast.Starred) for part in target.elts
            ):
                node.value = self._helper("drawn", node, node.value)
        return node

    def visit_Delete(self, node: ast.Delete) -> list[ast.AST]:
        self.generic_visit(node)
        return [
            _at(node, ast.Expr(self._helper("delete", node, target.value, _slice(target.slice))))
            if isinstance(target, ast.Subscript)
            else _at(node, ast.Delete([target]))
            for target in node.targets
        ]

    # -- left as they are -------------------------------------------------------------------------

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        node.body = [part for stmt in node.body for part in _listed(self.visit(stmt))]
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        node.args.defaults = [self.visit(default) for default in node.args.defaults]
        return node  # type: ignore[no-any-return]

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast says so

    # -- pieces ---------------------------------------------------------------------------------

    def _helper(self, name: str, near: ast.AST, *args: ast.expr) -> ast.Call:
        call = ast.Call(_name(name), list(args), [])
        ast.copy_location(call, near)
        return call


def _name(helper: str) -> ast.Name:
    return ast.Name(f"__counted_{helper}__", ast.Load())


def _at(near: ast.AST, node: _Node) -> _Node:
    return ast.copy_location(node, near)


def _load(node: ast.expr) -> ast.expr:
    """A copy of a target, to be read."""
    return ast.parse(ast.unparse(node), mode="eval").body


def _slice(node: ast.expr) -> ast.expr:
    """What stands in brackets, as a value."""
    if not isinstance(node, ast.Slice):
        return node
    parts = [ast.Constant(None) if p is None else p for p in (node.lower, node.upper, node.step)]
    return ast.copy_location(ast.Call(_name("slice"), parts, []), node)


def _listed(visited: Any) -> list[Any]:
    return visited if isinstance(visited, list) else [visited]
