"""WeightReceiver: what a vLLM worker needs to take broadcast weights from a trainer; as of 0.32.

    vllm serve MODEL --worker-extension-cls agent_rl.engine.vllm_receiver.WeightReceiver ...

vLLM mixes the class into its workers, and ``vllm.py`` calls its methods through /collective_rpc.
Tensors have the names and shapes of the checkpoint; vLLM's own loaders divide them among workers.
Until ``end_weights`` the model is in pieces: the server has to be paused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from agent_rl.engine.broadcast import join_group

# Of making the group and of each tensor; the trainer's own limit is usually shorter.
_TIMEOUT_S = 600.0


class WeightReceiver:
    # vLLM's worker has these.
    rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any

    weights_group: distributed.ProcessGroup | None = None

    def join_weights_group(
        self,
        address: str,
        port: int,
        first_rank: int,
        world_size: int,
        name: str,
        backend: str,
    ) -> None:
        """As one of this server's workers, of which the first has ``first_rank``."""
        parallel = self.vllm_config.parallel_config
        index = parallel.data_parallel_index * parallel.world_size + self.rank
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            address, port, world_size, is_master=False
        )
        self.weights_group = join_group(
            store,
            rank=first_rank + index,
            world_size=world_size,
            name=name,
            backend=backend,
            timeout_s=_TIMEOUT_S,
        )

    def leave_weights_group(self) -> None:
        self.weights_group = None

    def begin_weights(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with self._configured():
            initialize_layerwise_reload(self.model_runner.get_model())

    def receive_weights(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """These tensors, in this order, from rank 0."""
        group = self.weights_group
        assert group is not None, "the trainer makes it first"
        tensors: list[tuple[str, Tensor]] = []
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            value = torch.empty(list(shape), dtype=getattr(torch, dtype), device=self.device)
            tensors.append((name, value))
        works = [group.broadcast(value, 0) for _, value in tensors]
        for work in works:
            work.wait()
        with self._configured():
            self.model_runner.get_model().load_weights(tensors)

    def end_weights(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        runner = self.model_runner
        with self._configured():
            finalize_layerwise_reload(runner.get_model(), self.vllm_config.model_config)
        runner.reset_lora_state()
        runner.reset_encoder_cache()
        runner.reset_mm_cache()

    def _configured(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)
