"""``"pkg.mod.Name"`` -> the object, or an error that says what to write.

Loads nothing but what the path names, so that the command line can look at a name first of all.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from agent_rl.config.explain import nearest
from agent_rl.errors import WorkflowResolutionError


def import_name(path: str, *, what: str) -> object:
    """``"pkg.mod.Name"`` or ``"pkg.mod:Name"`` -> the object; nested names such as
    ``"pkg.mod.Outer.Name"`` too.

    Raises:
        WorkflowResolutionError: with the import error where a module itself is broken.
    """
    parts = path.replace(":", ".", 1).split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and module_name.startswith(error.name):
                continue  # not a module: the shorter path may be one, with a class inside
            raise _cannot_import(what, path, error) from error
        except (ImportError, SyntaxError, ValueError) as error:
            raise _cannot_import(what, path, error) from error
        found: object = module
        for name in parts[split:]:
            if not hasattr(found, name):
                raise _has_no(what, path, module_name, found, name)
            found = getattr(found, name)
        return found
    raise WorkflowResolutionError(
        f"{what}={path!r}: no module {parts[0]!r} can be imported from {Path.cwd()} or what is "
        "installed; expected 'pkg.mod.Name'"
    )


def _has_no(
    what: str, path: str, module_name: str, found: object, name: str
) -> WorkflowResolutionError:
    near = nearest(name, vars(found)) if hasattr(found, "__dict__") else None
    hint = f"; did you mean {near!r}?" if near else ""
    return WorkflowResolutionError(
        f"{what}={path!r}: {module_name} was imported but has no {name!r}{hint}"
    )


def _cannot_import(what: str, path: str, error: BaseException) -> WorkflowResolutionError:
    return WorkflowResolutionError(
        f"{what}={path!r}: importing it raised {type(error).__name__}: {error}"
    )
