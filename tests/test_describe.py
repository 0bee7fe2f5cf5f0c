"""`agent-rl config`: complete, true to the classes, and a YAML that is used as it is."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from agent_rl.cli import main
from agent_rl.config import PPOConfig, load_config
from agent_rl.config.describe import config_keys, describe_config
from agent_rl.errors import ConfigError

REFERENCE = Path(__file__).parent.parent / "docs/reference/config.yaml"


def test_the_reference_in_docs_is_what_is_printed() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == describe_config(), (
        "the config has changed: run `agent-rl config > docs/reference/config.yaml`"
    )


def test_what_is_printed_reads_back_to_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(describe_config(), encoding="utf-8")
    assert load_config(tmp_path / "all.yaml") == PPOConfig()


def test_absent_sections_can_be_switched_on_by_removing_the_comment(tmp_path: Path) -> None:
    text = describe_config()
    start = text.index("critic: null\n# critic:")
    end = text.index("\n\n", start)
    shown = text[start:end].removeprefix("critic: null\n").replace("# ", "", 1)
    text = text[:start] + shown.replace("\n# ", "\n").replace("\n#\n", "\n\n") + text[end:]
    (tmp_path / "critic.yaml").write_text(text, encoding="utf-8")
    assert load_config(tmp_path / "critic.yaml") == load_config(None, ["critic={}"])


def test_every_key_stands_under_a_comment() -> None:
    lines = describe_config().splitlines()
    for above, line in itertools.pairwise(lines):
        if line and not line.lstrip().startswith("#"):
            assert above.lstrip().startswith("# "), line
    assert max(map(len, lines)) <= 100


def test_one_section_one_key() -> None:
    assert list(yaml.safe_load(describe_config("rollout"))) == ["rollout"]
    assert yaml.safe_load(describe_config("rollout.agent.mode")) == {
        "rollout": {"agent": {"mode": "inline"}}
    }
    assert describe_config("seed") == "# of data order, sampling and training (integer)\nseed: 1\n"
    # Asked for by name, a section that is absent by default is shown in use.
    assert yaml.safe_load(describe_config("actor.lora")) == {
        "actor": {"lora": {"rank": 16, "alpha": 32, "target_modules": ["all-linear"]}}
    }
    assert yaml.safe_load(describe_config("critic.optimizer.lr")) == {
        "critic": {"optimizer": {"lr": 1e-5}}
    }


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("rolout", "did you mean 'rollout'?"),
        ("rollout.groupsize", "did you mean 'group_size'?"),
        ("seed.value", "valid keys: none"),
        ("num_generations", "here it is rollout.group_size"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'") as caught:
        describe_config(key)
    assert hint in str(caught.value)


def test_all_keys() -> None:
    keys = config_keys()
    assert {"seed", "rollout", "rollout.agent.ray.num_actors", "critic.optimizer.lr"} <= keys
    assert "rollout.groupsize" not in keys


def test_the_command_writes_new_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["agent-rl", "config", "rollout", "--out", "ppo.yaml"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as first:
        main()
    assert first.value.code == 0
    assert (tmp_path / "ppo.yaml").read_text(encoding="utf-8") == describe_config("rollout")

    (tmp_path / "ppo.yaml").write_text("mine", encoding="utf-8")
    with pytest.raises(SystemExit) as second:
        main()
    assert second.value.code == 2
    assert "ppo.yaml exists" in capsys.readouterr().err
    assert (tmp_path / "ppo.yaml").read_text(encoding="utf-8") == "mine"
