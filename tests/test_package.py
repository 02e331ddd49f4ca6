"""The package as a whole: what it promises, what importing it loads, and how its files look."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cupynccl_reduce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE = Path(cupynccl_reduce.__file__).parent
TESTS = Path(__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


def public(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions of a module, and the public methods of the classes."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


def test_all_is_true_and_sorted() -> None:
    names = {
        name
        for name, value in vars(cupynccl_reduce).items()
        if not name.startswith("_") and not isinstance(value, type(ast))
    }
    assert set(cupynccl_reduce.__all__) == names
    assert cupynccl_reduce.__all__ == sorted(names)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_all_of_every_module_is_true(path: Path) -> None:
    """Read, not imported: some modules need a GPU."""
    bound: set[str] = set()
    exported: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            bound.update(names)
            if names == ["__all__"]:
                exported = ast.literal_eval(node.value)
    assert set(exported) <= bound
    assert len(set(exported)) == len(exported)


def test_the_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z]+\d+)?", cupynccl_reduce.__version__)


def test_importing_the_package_loads_no_array_library(run_python: Callable[..., Any]) -> None:
    source = """
import sys
hook = sys.excepthook
import cupynccl_reduce
print(sorted({"numpy", "ml_dtypes", "cupy", "mpi4py", "torch"} & set(sys.modules)))
print(sys.excepthook is hook)
"""
    done = run_python(source)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\nTrue\n", "")


def test_the_host_runtime_loads_numpy_alone(run_python: Callable[..., Any]) -> None:
    source = """
import sys
from cupynccl_reduce import run_local
run_local(2, lambda world: world.rank)
print(sorted({"cupy", "mpi4py", "torch"} & set(sys.modules)))
"""
    done = run_python(source)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_module_is_longer_than_300_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_everything_public_has_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module"
    bare = [name for name, node in public(tree) if not ast.get_docstring(node)]
    assert not bare


def test_every_file_is_ascii() -> None:
    kinds = {".py", ".cu", ".toml", ".cfg", ".sh", ".md"}
    folders = [PACKAGE, TESTS]
    if (TESTS.parent / "pyproject.toml").exists():  # a checkout, not an installed package
        folders += [TESTS.parent / "scripts", TESTS.parent / ".ci"]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in kinds]
    files += [path for path in TESTS.parent.iterdir() if path.suffix in kinds]
    assert files
    assert not [str(path) for path in files if not path.read_bytes().isascii()]
