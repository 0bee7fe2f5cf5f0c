"""``engine`` and ``engine.launch``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agent_rl.config.section import LimitS, Section, TimeoutS

_OF_SERVERS = (
    *("api_key", "routing", "update", "on_update", "max_in_flight", "timeout_s"),
    *("update_timeout_s", "unavailable_timeout_s", "trainer_address"),
)


class LaunchConfig(Section):
    """engine.launch: servers that the run starts on this machine, and stops at its end."""

    num_servers: int = Field(1, ge=1, description="servers, each with a copy of the model")
    gpus_per_server: int = Field(
        1, ge=0, description="GPUs of each, in order from first_gpu; 0: the server decides"
    )
    first_gpu: int = Field(0, ge=0, description="GPUs before it are the trainer's")
    command: tuple[str, ...] = Field(
        (), description="program that takes the server's arguments; empty: the backend's own"
    )
    args: tuple[str, ...] = Field((), description="more arguments of the server")
    env: dict[str, str] = Field({}, description="more environment variables of the server")
    ready_timeout_s: TimeoutS = Field(900.0, description="how long a server may take to start")
    max_restarts: int = Field(
        5, ge=0, description="how often one that ends is started again in succession; 0: never"
    )


class EngineConfig(Section):
    """engine: what samples. local: the embedded engine, on the actor's parameters and device."""

    backend: Literal["local", "sglang", "vllm"] = Field(
        "local", description="the embedded engine, or servers of one kind"
    )
    max_batch_size: int = Field(32, ge=1, description="local: sequences decoded together")
    max_seq_len: int = Field(
        2048, ge=8, description="local: prompt and completion tokens of a sequence"
    )
    addresses: tuple[str, ...] = Field((), description="servers: http://host:port of each")
    launch: LaunchConfig | None = Field(None, description="servers: start them, in place of those")
    api_key: str | None = Field(
        None, repr=False, description="servers: sent as bearer token; null: none is sent"
    )
    routing: Literal["round_robin", "least_loaded", "prefix"] = Field(
        "prefix", description="servers: who takes a request; prefix: who has most of it cached"
    )
    update: Literal["disk", "distributed", "tensor"] = Field(
        "disk",
        description="servers: new weights as a folder on a shared disk, by broadcast, or through "
        "the memory of this machine",
    )
    on_update: Literal["abort", "retract", "in_place"] = Field(
        "abort",
        description="servers: running requests end and are sent again, stay with their cache "
        "computed anew, or stay with the cache of the old weights",
    )
    max_in_flight: int = Field(256, ge=1, description="servers: requests that one gets at once")
    timeout_s: TimeoutS = Field(3600.0, description="servers: of one request; null: none")
    update_timeout_s: LimitS = Field(600.0, description="servers: of taking new weights")
    unavailable_timeout_s: TimeoutS = Field(
        120.0, description="servers: how long requests wait while none is up; null: for ever"
    )
    trainer_address: str = Field(
        "127.0.0.1", description="servers: this machine's address, for update=distributed"
    )

    @model_validator(mode="after")
    def _servers_are_named_once(self) -> EngineConfig:
        named = [name for name in ("addresses", "launch") if getattr(self, name)]
        if self.backend == "local" and named:
            raise ValueError(f"{named[0]} needs backend=sglang or backend=vllm")
        if self.backend != "local" and len(named) != 1:
            raise ValueError(
                f"backend={self.backend} needs either addresses or launch, and has "
                f"{'both' if named else 'neither'}"
            )
        if self.backend == "vllm" and self.on_update == "retract":
            raise ValueError("backend=vllm cannot do on_update=retract; use abort or in_place")
        if self.backend == "vllm" and self.update == "tensor":
            raise ValueError("backend=vllm cannot do update=tensor; use disk or distributed")
        return self

    @model_validator(mode="after")
    def _fields_are_of_the_backend(self) -> EngineConfig:
        if self.backend == "local":
            self.refuse_idle(*_OF_SERVERS, need="backend=sglang or backend=vllm")
        else:
            need = "backend=local; a server has arguments of its own (engine.launch.args)"
            self.refuse_idle("max_batch_size", "max_seq_len", need=need)
        return self
