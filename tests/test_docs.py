"""Every Python block of README and guides runs as it stands, in an empty folder.

A block of text right behind one is what it prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_rl.config import load_config
from agent_rl.config.describe import config_keys
from agent_rl.config.foreign_names import our_name

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(
        match.group(1),
        match.group(2),
        id=f"{page.relative_to(ROOT)}:{page.read_text()[: match.start()].count(chr(10)) + 1}",
    )
    for page in PAGES
    for match in re.finditer(
        r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", page.read_text(), re.M | re.S
    )
]


@pytest.mark.parametrize(("code", "printed"), BLOCKS)
def test_block_runs(
    code: str,
    printed: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "block", "exec"), names)
    if printed is not None:
        assert capsys.readouterr().out == printed


def _anchors(page: Path) -> set[str]:
    """As they are made of headings: "Where a run's files are" -> "where-a-runs-files-are"."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^):]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            leads_to = page.parent / path if path else page
            assert leads_to.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in _anchors(leads_to), f"{page.name} links to {target}"


def _key_tables(page: Path) -> Iterator[tuple[list[str], list[str]]]:
    """What is named in the first and last cells of tables whose last column is "our key"."""
    is_inside = False
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        is_inside = bool(cells) and (is_inside or cells[-1] == "our key")
        if is_inside and set(cells[-1]) != {"-"} and cells[-1] != "our key":
            theirs, ours = re.findall(r"`([^`]+)`", cells[0]), re.findall(r"`([^`]+)`", cells[-1])
            yield theirs, [name for name in ours if name != "max_completion_length"]


MOVES = list(_key_tables(ROOT / "docs/guides/migrating.md"))


def test_keys_that_migrants_are_sent_to_exist() -> None:
    assert len(MOVES) > 60
    for _, ours in MOVES:
        unknown = {name.partition("=")[0] for name in ours} - config_keys()
        assert not unknown
        load_config(None, [name for name in ours if "=" in name])


def test_the_guide_and_the_errors_call_their_keys_the_same() -> None:
    compared = 0
    for theirs, ours in MOVES:
        told = [our_name(name.partition("=")[0].split(".")) for name in theirs]
        for meaning in filter(None, told if ours else ()):
            key = re.split("[=, ]", meaning)[0]
            assert any(name.startswith(key) for name in ours), f"{theirs}: {meaning}"
            compared += 1
    assert compared > 40


def test_what_the_map_names_is_there() -> None:
    """``record/path.py: TokenPath`` is a class, function or method of that file."""
    text = " ".join((ROOT / "docs/map.md").read_text().split())
    named = re.findall(r"`(\w+/\w+\.py)(?:: ([\w.]+))?`", text)
    assert len(named) > 40
    for path, name in named:
        file = ROOT / "agent_rl" / path
        assert file.exists() or (ROOT / path).exists(), path
        if name:
            defined = re.findall(r"^ *(?:async )?(?:def|class) (\w+)", file.read_text(), re.M)
            assert name.split(".")[-1] in defined, f"{path}: {name}"


YAML_BLOCKS = [
    pytest.param(block, id=f"{page.name}:{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.M | re.S)
    )
]


@pytest.mark.parametrize("block", YAML_BLOCKS)
def test_yaml_is_a_config(block: str, tmp_path: Path) -> None:
    (tmp_path / "ppo.yaml").write_text(block, encoding="utf-8")
    load_config(tmp_path / "ppo.yaml")
