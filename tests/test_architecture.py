"""The arrows of docs/map.md may not bend: ranks, no cycles, light import, sorted public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import agent_rl

PACKAGE = Path(agent_rl.__file__).parent
RANKS = {
    "__init__": 0,
    "types": 0,
    "errors": 0,
    "foreign_error": -1,
    "config": 0,
    "loop_thread": 0,
    "workflow_context": 0,
    "stats": 1,
    "tokens": 1,
    "engine": 2,
    "record": 2,
    "api": 3,
    "client": 4,
    "gateway": 4,
    "rollout": 5,
    "online": 5,
    "train": 6,
    "view": 6,
    "demo": 7,
    "serve": 7,
    "cli": 8,
}


def place(module: str) -> str:
    """``agent_rl.engine.local`` -> ``engine``; ``agent_rl.types`` -> ``types``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__version__" else "__init__"


def imports(path: Path) -> set[str]:
    """Modules of the package that the file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= names if module == "agent_rl" else {module}
    return {name for name in found if name.split(".")[0] == "agent_rl"}


def modules() -> dict[str, Path]:
    return {
        ".".join(("agent_rl", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def test_imports_go_strictly_downward() -> None:
    wrong = []
    for name, path in modules().items():
        here = place(name)
        assert here in RANKS, f"{here} has no rank; add it to docs/map.md and to this table"
        for target in imports(path):
            there = place(target)
            if there != here and RANKS[there] >= RANKS[here] and there not in ("types", "errors"):
                wrong.append(f"{name} imports {target}")
    assert not wrong, wrong


def test_no_import_cycles_between_modules() -> None:
    files = modules()
    graph = {name: {t for t in imports(path) if t in files} for name, path in files.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_engine_and_train_know_no_openai() -> None:
    for name, path in modules().items():
        if place(name) in ("engine", "train", "record"):
            text = path.read_text(encoding="utf-8")
            assert "import openai" not in text and "from openai" not in text, name


def test_every_folder_is_installed() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    for folder in {path.parent for path in modules().values()}:
        name = ".".join(("agent_rl", *folder.relative_to(PACKAGE).parts))
        assert f'"{name}"' in text, f"{name} is missing from tool.setuptools.packages"


def test_public_names_are_sorted_and_real() -> None:
    assert agent_rl.__all__ == sorted(agent_rl.__all__)
    for name in agent_rl.__all__:
        assert getattr(agent_rl, name) is not None


def test_import_is_light() -> None:
    code = (
        "import sys, agent_rl; "
        "print([m for m in ('torch', 'transformers', 'openai', 'pydantic') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_import_costs_little_cpu() -> None:
    """Less than 0.3 s above a bare interpreter: CPU time, which other processes cannot stretch."""

    def cpu_s(code: str) -> float:
        program = f"import time; {code}; print(time.process_time())"
        out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        return float(out.stdout)

    assert cpu_s("import agent_rl") - cpu_s("pass") < 0.3
