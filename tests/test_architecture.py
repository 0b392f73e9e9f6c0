"""The import law, the size limits, and documentation that names files which exist.

`python tests/test_architecture.py` writes the list of files in docs/architecture.md.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ANYWHERE = {"exit_codes.py", "registry.py", "safe_files.py", "units.py"}
PACKAGES = {"configs", "training", "data", "model", "parallel"}
# room -> what it may import besides itself and ANYWHERE. The rooms of parallel/ are separate.
LAW = {
    "exit_codes.py": set(),
    "registry.py": set(),
    "safe_files.py": set(),
    "units.py": set(),
    "parallel/sharding": set(),
    "parallel/linear": {"parallel/sharding"},
    "parallel/experts": {"parallel/sharding", "parallel/linear"},
    "parallel/cluster": {"parallel/sharding"},
    "parallel/planning": {"parallel/sharding"},
    "model": {"parallel"},
    "data": set(),
    "training": {"data", "model", "parallel"},
    "configs": PACKAGES,
    "train.py": PACKAGES,
    "scripts": PACKAGES,
}
SOURCES = [
    ROOT / "train.py",
    *(ROOT / name for name in sorted(ANYWHERE)),
    *sorted(
        (path for room in {*PACKAGES, "scripts"} for path in (ROOT / room).rglob("*.py")),
        key=lambda path: (path.parent, path.name),
    ),
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ROOT_PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
PAGES = [*ROOT_PAGES, *sorted((ROOT / "docs").glob("*.md"))]
MAX_FILE, MAX_TRAINING_FILE, MAX_FUNCTION, MAX_PARAMETERS = 500, 400, 60, 8
TREES = {path: ast.parse(path.read_text()) for path in SOURCES + TESTS}
FILES = re.compile("(<!-- files -->\n).*(<!-- /files -->)", re.DOTALL)


def module_name(path: Path) -> str:
    """The name under which a file is imported; commands run with scripts/ on the search path."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts).removeprefix("scripts.")


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "parallel" else parts[0]


MODULES = {module_name(path): path for path in SOURCES}


def imports(path: Path) -> set[Path]:
    """The files of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {MODULES[name] for name in found if name in MODULES}


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(TREES[path]) if isinstance(node, kinds)]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_follow_the_law(path: Path) -> None:
    room = room_of(path)
    for imported in imports(path):
        target = room_of(imported)
        allowed = {target, target.partition("/")[0]} & ({room} | ANYWHERE | LAW.get(room, set()))
        assert allowed, f"{room} must not import {module_name(imported)}"


def test_imports_have_no_cycle() -> None:
    done: set[Path] = set()

    def visit(path: Path, trail: tuple[Path, ...]) -> None:
        assert path not in trail, f"cycle: {' -> '.join(map(module_name, (*trail, path)))}"
        if path not in done:
            for imported in imports(path) - {path}:
                visit(imported, (*trail, path))
            done.add(path)

    for path in SOURCES:
        visit(path, ())


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    most = MAX_TRAINING_FILE if room_of(path) == "training" else MAX_FILE
    assert len(path.read_text().splitlines()) <= most
    for node in functions(path):
        lines = (node.end_lineno or 0) - node.lineno + 1
        assert lines <= MAX_FUNCTION, f"{node.name} has {lines} lines"
        # pytest passes the arguments of a test by name.
        few = node.name.startswith("test_") or len(node.args.args) <= MAX_PARAMETERS
        assert few, f"{node.name}: too many positional parameters"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_stand_at_the_top(path: Path) -> None:
    for node in functions(path):
        local = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
        assert not local, f"{node.name} imports locally"


def uses(name: str, definer: Path) -> list[str]:
    """The modules that use a function outside of imports, once for every use."""
    found = []
    for path in SOURCES:
        imported = {
            alias.name
            for node in TREES[path].body
            if isinstance(node, ast.ImportFrom) and node.module == module_name(definer)
            for alias in node.names
        }
        if path == definer or name in imported:
            nodes = ast.walk(TREES[path])
            count = sum(isinstance(node, ast.Name) and node.id == name for node in nodes)
            found += [module_name(path)] * count
    return found


def test_every_choice_is_made_in_one_place() -> None:
    # A call of a named operation outside of the model has no plan to read its backend from.
    exceptions = {"model.attention.registry.choose_backend"}
    found = {
        f"{module_name(path)}.{node.name}": uses(node.name, path)
        for path in SOURCES
        for node in TREES[path].body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("choose_")
        and room_of(path) not in ("training", "scripts")
    }
    several = {name for name, users in found.items() if len(users) != 1}
    assert found and several == exceptions


# What replaces or creates files without `safe_files.py`, and why it may.
OTHER_WRITERS = {
    "data.block_cache": "a cache, whose blocks may be lost",
    "data.checked_array": "checksums in a folder that is published when it is complete",
    "data.packed_store": "rows in a folder that is published when it is complete",
    "data.prepare": "an empty file for a lock",
    "data.store_writer": "a journal says which bytes are on disk",
    "parallel.cluster.distributed": "the standard output, and /dev/null",
    "parallel.planning.trace": "the user names the file, which may be a pipe",
    "report": "the user names the file",
    "training.directory": "a lock with its holder, and a marker that only the running job reads",
    "training.hugging_face.tensor_files": "synced before config.json completes the folder",
    "training.logs": "/dev/null",
}
MEASUREMENTS = ("soaks.", "benchmarks.", "mutants")


def writes_a_file(call: ast.Call) -> bool:
    """Whether a call creates, replaces or renames a file. `str.replace` has two arguments."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name == "open":
        modes = [*call.args, *(word.value for word in call.keywords)]
        return any(isinstance(x, ast.Constant) and re.match("[wx]", str(x.value)) for x in modes)
    if not isinstance(call.func, ast.Attribute):
        return False
    of_a_module = getattr(call.func.value, "id", "") in ("os", "shutil")
    return (
        (of_a_module and name in ("replace", "rename", "renames", "move", "copyfile", "copy"))
        or (name == "write_text" and len(call.args) < 3)  # a metrics writer's has three
        or (name in ("replace", "rename") and len(call.args) == 1 and not call.keywords)
        or name == "write_bytes"
    )


def test_files_are_replaced_by_one_function() -> None:
    found = {
        module_name(path)
        for path in SOURCES
        if path.name != "safe_files.py" and not module_name(path).startswith(MEASUREMENTS)
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Call) and writes_a_file(node)
    }
    assert found == {*OTHER_WRITERS}, "use replace_file, rename or publish_folder of safe_files.py"


def test_packages_run_no_code_at_import_but_registration() -> None:
    for path in SOURCES:
        if path.name == "__init__.py" and path.read_text():
            assert "register" in path.read_text(), f"{module_name(path)} should be empty"


def test_one_module_alone_selects_the_clone_that_scripts_import_from() -> None:
    patched = {path.name for path in SOURCES if "sys.path" in path.read_text()}
    assert patched == {"_clone.py"}


def file_list() -> str:
    """Every source file with the first line of its docstring, by folder."""
    lines, folder = ["```"], None
    for path in SOURCES:
        relative = path.relative_to(ROOT)
        if path.name == "__init__.py" and not path.read_text():
            continue
        if relative.parent != folder and relative.parent != Path():
            folder = relative.parent
            lines.append(f"{folder}/")
        summary = (ast.get_docstring(TREES[path]) or "").partition("\n\n")[0].replace("\n", " ")
        name = path.name if relative.parent == Path() else f"  {path.name}"
        lines.append(f"{name:<24} {summary}".rstrip())
    return "\n".join([*lines, "```", ""])


def test_the_architecture_page_lists_every_file() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    shown = FILES.search(text)
    assert shown is not None
    assert shown[0].removeprefix(shown[1]).removesuffix(shown[2]) == file_list(), (
        "run python tests/test_architecture.py"
    )


def named_files(page: Path) -> set[str]:
    """The files of this repository that a page names in code or links."""
    text = page.read_text()
    code = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|train\.py)[` ]", text)
    code += re.findall(r"python ((?:scripts|tests)/\w+\.py|train\.py)", text)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = re.findall(r"\]\((?!http)([^)#]+)", prose)
    inside = [str((page.parent / link).resolve().relative_to(ROOT)) for link in links]
    rooms = {*LAW, "train.py", "docs", "tests", ".ci", "configs"}
    return {
        name
        for name in [*code, *inside]
        # Upper case stands for a name that the reader chooses.
        if name.partition("/")[0] in rooms and not any(map(str.isupper, name.split("/")))
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    missing = [name for name in sorted(named_files(page)) if not (ROOT / name).exists()]
    assert not missing, f"{page.name} names {missing}"


def test_every_test_file_that_ci_names_exists() -> None:
    names = re.findall(r"tests/[\w./]+", (ROOT / ".ci/run").read_text())
    assert names and all((ROOT / name).exists() for name in names), names


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_at_most_two_files_are_named_for_each_change() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## To change X, open Y")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20
    for change, files in rows:
        names = re.findall(r"`(\w[\w./]+)`", files)
        assert 1 <= len(names) <= 2, f"{change}: {names}"
        assert all((ROOT / name).exists() for name in names), f"{change}: {names}"


if __name__ == "__main__":
    architecture = ROOT / "docs/architecture.md"
    written = FILES.sub(lambda found: found[1] + file_list() + found[2], architecture.read_text())
    architecture.write_text(written)
