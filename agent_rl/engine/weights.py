"""WeightPublisher: turns the weights of a trained model into updates that servers can take.

    disk           a folder {root}/v{version}, complete before it has that name
    lora           the same with the adapter only
    distributed    the tensors themselves, which the engine broadcasts
    tensor         the tensors themselves, which the engine puts into shared memory

Folders that no server can need any more are removed. What a folder holds is the trainer's business.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from agent_rl.engine.base import NamedTensor, WeightUpdate

_NAME = re.compile(r"v\d+")


class WeightPublisher:
    """
    Args:
        root: folder for ``disk`` and ``lora``, on a disk that the servers see under this path.
        save: writes a whole folder at the path it is given, atomically.
        tensors: name and value of each parameter, for the last two; may be called again.
    """

    def __init__(
        self,
        method: Literal["disk", "lora", "distributed", "tensor"],
        *,
        root: Path,
        save: Callable[[Path], object],
        tensors: Callable[[], Iterable[NamedTensor]],
    ) -> None:
        self.method = method
        self._root = root.absolute()
        self._save = save
        self._tensors = tensors

    def update(self, version: int) -> WeightUpdate:
        """The weights as they are now, to be handed to the engine."""
        if self.method in ("distributed", "tensor"):
            return WeightUpdate(version=version, method=self.method, tensors=self._tensors)
        folder = self._root / f"v{version}"
        self._save(folder)
        return WeightUpdate(version=version, method=self.method, path=folder)

    def clean(self, version: int) -> None:
        """Remove the folders of all versions but this one, from which lost servers come back."""
        if not self._root.is_dir():
            return
        for folder in self._root.iterdir():
            if _NAME.fullmatch(folder.name) and folder.name != f"v{version}":
                shutil.rmtree(folder, ignore_errors=True)
