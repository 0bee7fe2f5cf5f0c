"""Run the tests of every framework: one virtual environment for each group whose pins agree.

    python tests/integrations/run.py              every group
    python tests/integrations/run.py camel light  these

An environment sees the packages of the interpreter that runs this (torch, transformers, ...) and
has of its own what its extras pin otherwise, such as an older openai. It is kept for the next run.
Versions are in constraints.txt beside this file; where an extra is missing its tests are skipped.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
VENVS = Path(sys.prefix) / "integrations"

# Group -> extras of pyproject.toml. Tests of extra x-y are in test_x_y.py.
GROUPS: dict[str, list[str]] = {
    "light": ["autogen", "dspy", "langchain", "litellm", "smolagents"],
    "openai2": ["llama-index", "strands"],
    "camel": ["camel"],
    "claude": ["claude"],
    "google-adk": ["google-adk"],
    "crewai": ["crewai"],
    "tasks": ["math-verify", "reasoning-gym"],
    "openenv": ["openenv"],
}
# Their own warnings are not ours to mend.
PYTEST = ["-m", "pytest", "-q", "-rs", "-W", "default", "--disable-warnings"]


def interpreter(group: str) -> Path:
    """The group's Python, its extras installed."""
    venv = VENVS / group
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        below = venv / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        shared = sysconfig.get_path("purelib")
        (below / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [p for e in GROUPS[group] for p in extras["optional-dependencies"][e]]
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    pip += ["--no-warn-conflicts"]  # with the shared packages that nobody uses here
    subprocess.run([*pip, "-c", HERE / "constraints.txt", *packages], check=True)
    return python


def run(group: str) -> int:
    print(f"== {group}: {', '.join(GROUPS[group])}", flush=True)
    files = [HERE / f"test_{extra.replace('-', '_')}.py" for extra in GROUPS[group]]
    try:
        python = interpreter(group)
    except subprocess.CalledProcessError as error:  # pip has said why; the other groups can run
        print(f"{group} cannot be installed: {error}", flush=True)
        return error.returncode
    return subprocess.run([python, *PYTEST, *files], cwd=ROOT).returncode


def main() -> int:
    groups = sys.argv[1:] or list(GROUPS)
    if unknown := [group for group in groups if group not in GROUPS]:
        print(f"no such group: {', '.join(unknown)}; groups: {', '.join(GROUPS)}")
        return 2
    failed = [group for group in groups if run(group)]
    print(f"groups failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
