"""The import law, no cycles, and the size budget, tests too, read from the source with ast."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# room -> rooms that it may import
LAW = {
    "parallel": {"parallel"},
    "model": {"model", "parallel"},
    "data": {"data"},
    "training": {"training", "data", "model", "parallel"},
    "configs": {"configs", "training", "data", "model", "parallel"},
    "train": {"configs", "training", "data", "model", "parallel"},
    "scripts": {"configs", "training", "data", "model", "parallel"},
}
SOURCES = sorted(
    path
    for room in LAW
    for path in ([ROOT / "train.py"] if room == "train" else (ROOT / room).rglob("*.py"))
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 500, 80, 8


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Modules of ours that this file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    modules = {module_name(source) for source in SOURCES}
    return {name for name in found if name in modules}


def room_of(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_follow_the_law(path: Path) -> None:
    module = module_name(path)
    for imported in imports(path):
        assert room_of(imported) in LAW[room_of(module)], f"{module} must not import {imported}"


def test_imports_have_no_cycle() -> None:
    graph = {module_name(path): imports(path) for path in SOURCES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for imported in graph[module] - {module}:
                visit(imported, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=module_name)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION, f"{node.name} has {lines} lines"
            # pytest gives a test its arguments by name.
            few = node.name.startswith("test_") or len(node.args.args) <= MAX_PARAMETERS
            assert few, f"{node.name}: too many positional"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_stand_at_the_top(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            local = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
            assert not local, f"{node.name} imports locally"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_public_names_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.name != "__init__.py":
        assert ast.get_docstring(tree), f"{path.name} has no module docstring"
    owners = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for owner in owners:
        for node in owner.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if isinstance(owner, ast.ClassDef) and owner.name.startswith("_"):
                continue
            inherited = isinstance(owner, ast.ClassDef) and node.name in ("emit", "handleError")
            assert inherited or ast.get_docstring(node), f"{node.name} has no docstring"


def test_one_module_alone_selects_the_clone_that_scripts_import_from() -> None:
    patched = {path.name for path in SOURCES if "sys.path" in path.read_text()}
    assert patched == {"_clone.py"}


def test_the_readme_names_every_file() -> None:
    tree = (ROOT / "README.md").read_text()
    for path in SOURCES:
        if path.name != "__init__.py":
            assert path.name in tree, f"README.md does not mention {path.relative_to(ROOT)}"
