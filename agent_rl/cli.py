"""The command line: thin commands over public names.

Exit code 0: done, also after Ctrl-C, when a checkpoint was kept; 1: it failed; 2: the user's input.
Errors are one line; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from agent_rl import __version__, errors

_USER_INPUT = (
    errors.ConfigError,
    errors.DatasetError,
    errors.MissingDependencyError,
    errors.ModelLoadError,
    errors.RequestError,
    errors.TokenError,
    errors.WorkflowResolutionError,
)

_overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--debug", is_flag=True, help="Show tracebacks and debug logs.")
@click.version_option(__version__, prog_name="agent-rl")
def app(debug: bool) -> None:
    """Swap one client and any LLM agent becomes trainable."""
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )


@app.command()
@click.option("--seed", default=1, show_default=True, help="Of tasks, sampling and training.")
@click.option("--out", default="runs/demo", show_default=True, help="Folder of the run; replaced.")
@_overrides
def demo(seed: int, out: str, overrides: tuple[str, ...]) -> None:
    """Train a small tool-using agent on this machine and watch its reward rise.

    Example: agent-rl demo --seed 2 total_train_steps=4
    """
    _announce(f"demo, seed {seed}")
    from agent_rl.demo.runner import run_demo

    run_demo(seed=seed, out=Path(out), overrides=overrides)


@app.command()
@click.argument("config", type=click.Path(path_type=Path))
@_overrides
@click.option(
    "--workflow", help="The agent or workflow to train: pkg.mod.Name. Not with mode=online."
)
@click.option("--eval-workflow", help="The same for evaluation; default: the one that is trained.")
def train(
    config: Path, overrides: tuple[str, ...], workflow: str | None, eval_workflow: str | None
) -> None:
    """Train an agent with PPO/GRPO, settings from a YAML file.

    Example: agent-rl train ppo.yaml --workflow my_agents.MathAgent rollout.group_size=8
    """
    from agent_rl.config import load_config
    from agent_rl.config.files import check_files
    from agent_rl.rollout.import_path import import_name

    settings = load_config(config, overrides)
    if workflow is None and settings.rollout.agent.mode != "online":
        raise click.UsageError("--workflow PKG.MOD.NAME is missing: the agent to train")
    check_files(settings)
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: the user's modules are here
    for option, name in (("--workflow", workflow), ("--eval-workflow", eval_workflow)):
        if name is not None:
            import_name(name, what=option)  # a slip of the pen is found before torch is loaded
    if settings.stats_logger.console != "off":
        _announce(f"train {workflow or 'from conversations'}, settings of {config}")
    from agent_rl.train.trainer import PPOTrainer

    with PPOTrainer(settings) as trainer:
        trainer.train(workflow=workflow, eval_workflow=eval_workflow)


@app.command("config")
@click.argument("key", default="")
@click.option("--out", type=click.Path(path_type=Path), help="New file, in place of the screen.")
def show_config(key: str, out: Path | None) -> None:
    """Print every setting with its meaning and default, as YAML to start from; or those of KEY.

    Example: agent-rl config rollout.agent; agent-rl config --out ppo.yaml
    """
    from agent_rl.config.describe import describe_config

    text = describe_config(key)
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise click.UsageError(f"{out} exists; choose another file or remove it") from None


@app.command()
@click.option("--model", required=True, help="Hugging Face folder; small: the small model.")
@click.option(
    "--learn",
    type=click.Choice(["binary", "opd", "combine"]),
    help="Learn from the users' next messages: a judge's score, hints, or both.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="0: any free port.")
@_overrides
def serve(model: str, learn: str | None, host: str, port: int, overrides: tuple[str, ...]) -> None:
    """Serve a local model as an OpenAI-compatible endpoint, learning from its users or not.

    Example: agent-rl serve --model ./my-model --learn binary online.judge.votes=5
    """
    from agent_rl.config.files import check_model

    check_model("--model", model)
    _announce(f"serve {model}")
    from agent_rl.serve import serve as serve_model
    from agent_rl.serve import serve_config

    serve_model(serve_config(model, learn=learn, host=host, port=port, overrides=overrides))


@app.command()
@click.argument("model")
@click.option("--renderer", default="auto", show_default=True, help="Model family, or template.")
@click.option("--tool-call-parser", default="auto", show_default=True)
@click.option("--reasoning-parser", default="auto", show_default=True)
def certify(model: str, renderer: str, tool_call_parser: str, reasoning_parser: str) -> None:
    """Try out which kinds of turns MODEL's tokenizer and chat template can do token-exactly.

    MODEL is a Hugging Face folder; small: the small model.

    Example: agent-rl certify ./my-model
    """
    from agent_rl.config.files import check_model

    check_model("MODEL", model)
    from agent_rl.engine.loading import load_tokenizer
    from agent_rl.tokens.certify import certify

    certification = certify(
        load_tokenizer(model),
        renderer=renderer,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
    click.echo(certification.table())


@app.command()
@click.argument("model")
@click.option("--gpus", type=click.IntRange(2, 100_000), default=8, show_default=True)
@click.option("--gpu", type=click.Choice(["a100", "h100", "h200", "l40s"]), default="h100")
@click.option("--groups", type=click.IntRange(min=1), default=16, help="Data of one step.")
@click.option("--group-size", type=click.IntRange(min=1), default=8, help="Episodes of each.")
@click.option("--turns", type=click.IntRange(min=1), default=4, help="Model calls of an episode.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=2000, help="Given, in all.")
@click.option("--completion-tokens", type=click.IntRange(min=1), default=500, help="Of each turn.")
@click.option("--link-gb-s", type=click.FloatRange(min=0, min_open=True), default=25.0)
def plan(model: str, gpu: str, gpus: int, link_gb_s: float, **workload: int) -> None:
    """Estimate servers, trainers and the time of a step for MODEL, a folder with config.json.

    Example: agent-rl plan ./Qwen2.5-7B --gpus 8 --gpu h100 --turns 6
    """
    from agent_rl.engine.plan import GPUS, ModelSize, Workload
    from agent_rl.engine.plan import plan as best_split

    size = ModelSize.of(model)
    sheet = best_split(size, Workload(**workload), GPUS[gpu], gpus, link_gb_s=link_gb_s)
    click.echo(sheet.table())


def _unknown_option(error: click.NoSuchOption) -> click.UsageError:
    """Only what is near is suggested; a setting is written KEY=VALUE, not as an option."""
    from agent_rl.config.describe import config_keys
    from agent_rl.config.explain import nearest
    from agent_rl.config.foreign_names import our_name

    name = error.option_name.lstrip("-").replace("-", "_")
    ours = name if name in config_keys() else our_name(name.split("."))
    message = f"No such option {error.option_name!r}."
    if near := nearest(error.option_name, error.possibilities or ()):
        message += f" Did you mean {near!r}?"
    elif ours is not None:
        message += f" Settings are KEY=VALUE; this one is {ours}."
    return click.UsageError(message, ctx=error.ctx)


def _announce(what: str) -> None:
    """At once, because importing torch takes seconds."""
    click.echo(f"agent-rl {what}: loading libraries")


def main() -> None:
    """Entry point of ``agent-rl``: maps every outcome to an exit code and one line."""
    try:
        code = app(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = 0
    except click.NoSuchOption as error:
        _unknown_option(error).show()
        code = 2
    except click.ClickException as error:
        error.show()
        code = 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("stopped", err=True)
        code = 0
    except (errors.AgentRLError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        click.echo(f"error: {' '.join(str(error).split()) or type(error).__name__}", err=True)
        code = 2 if isinstance(error, _USER_INPUT) else 1
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
