"""Rules that no other test would notice being broken; CONTRIBUTING.md gives the reasons."""

import ast
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "venus_jax"

# A room imports rooms of its own line or of a line above it here, never of a line below.
FLOORS = [
    "config errors sharding tokens typing",
    "media nn",
    "acoustic checkpoints models",
    "stream",
    "data memory training",
    "evaluation serving",
    "aot api benchmarks cli playback reports timeline torch_yardstick",
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}
LINEN_ROOMS = {"acoustic", "models", "nn"}
SCRIPT_FOLDERS = ["configs", "datasets", "eval", "launch", "notebooks"]
MACHINE_PATH = re.compile(r"(?<![\w.)])/(?:work|root|farm|opt|home/\w+|tmp/\w+)/")
MAX_BYTES = 60 * 2**20


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def parsed(*folders: str):
    """Yields (path, syntax tree) of every Python file under these folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text(), filename=str(path))


def imports(tree: ast.AST):
    """Yields (line, dotted name) of everything imported anywhere in a file, `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def run_at_import(node: ast.AST):
    """Yields the nodes that run when a module is imported: all but the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from run_at_import(child)


def tracked_files() -> list[Path]:
    """Files under version control or about to be."""
    git = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                         capture_output=True, text=True)
    if git.returncode:
        pytest.skip(f"not a git checkout: {git.stderr.strip()}")
    return [ROOT / name for name in git.stdout.split("\0") if name and (ROOT / name).is_file()]


def check(wrong) -> None:
    if wrong := list(wrong):
        pytest.fail("\n".join(wrong), pytrace=False)


def test_imports_go_down_the_floors():
    wrong = []
    for path, tree in parsed("venus_jax"):
        room = room_of(path)
        if room == "__init__":
            continue
        if room not in FLOOR:
            wrong.append(f"{name_of(path)}: venus_jax/{room} is on no floor; give it one in FLOORS")
            continue
        for line, name in imports(tree):
            if name.startswith("."):
                wrong.append(f"{name_of(path)}:{line}: import {name} by its full name")
            elif name.startswith("venus_jax.") and FLOOR.get(name.split(".")[1], 0) > FLOOR[room]:
                wrong.append(f"{name_of(path)}:{line}: {name} is on a floor above {room}")
    check(wrong)


def test_linen_stays_in_its_rooms():
    check(f"{name_of(path)}:{line}: {name} outside {sorted(LINEN_ROOMS)}"
          for path, tree in parsed("venus_jax", *SCRIPT_FOLDERS) for line, name in imports(tree)
          if name.startswith("flax.linen") and not (path.is_relative_to(PACKAGE) and room_of(path) in LINEN_ROOMS))


def test_importing_the_library_defines_no_flags():
    check(f"{name_of(path)}:{node.lineno}: {ast.unparse(node.func)} belongs in launch/"
          for path, tree in parsed("venus_jax") for node in run_at_import(tree)
          if isinstance(node, ast.Call) and "DEFINE_" in ast.unparse(node.func))


def test_public_names_have_docstrings():
    check(f"{name_of(path)}:{node.lineno}: {node.name} has no docstring"
          for path, tree in parsed("venus_jax") for node in tree.body
          if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
          and not ast.get_docstring(node))


def test_script_folders_are_no_packages():
    # A package called `datasets` would shadow Hugging Face's for everything run from the root.
    check(f"{folder}/__init__.py" for folder in SCRIPT_FOLDERS if (ROOT / folder / "__init__.py").exists())


def test_no_file_names_a_machine():
    wrong = []
    for path in tracked_files():
        data = path.read_bytes()
        if b"\0" not in data:  # text
            lines = data.decode(errors="replace").splitlines()
            wrong += [f"{name_of(path)}:{i}: {m.group()}" for i, line in enumerate(lines, 1)
                      if (m := MACHINE_PATH.search(line))]
    check(wrong)


def test_no_file_is_too_large():
    sizes = {name_of(path): path.stat().st_size for path in tracked_files()}
    check(f"{name}: {size} bytes" for name, size in sizes.items() if size > MAX_BYTES)


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, venus_jax.config; print(*{'flax', 'jax', 'numpy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    check(run.stdout.split())


@pytest.mark.parametrize("command", sorted((ROOT / "launch").glob("*.py")), ids=name_of)
def test_commands_explain_themselves(command):
    run = subprocess.run([sys.executable, command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"python {name_of(command)}" in run.stdout, "its docstring shows no line to type"


def test_tests_cannot_reach_the_network():
    for address in ("192.0.2.1", "example.com"):
        with pytest.raises(pytest.fail.Exception, match=address):
            socket.create_connection((address, 80), timeout=1)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=1):
        pass  # this machine's own addresses still work
