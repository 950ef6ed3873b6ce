"""How many processes share a run, and how its weights are spread over them."""

from __future__ import annotations

from typing import Annotated, Literal, final

from pydantic import Field, model_validator

from fewstep.settings import Settings

ParallelKind = Literal["none", "ddp", "fsdp1", "fsdp2"]
Positive = Annotated[int, Field(gt=0)]


@final
class ParallelSettings(Settings):
    """How every network is spread over the ranks. The result does not depend on it."""

    kind: ParallelKind = Field(
        "none",
        description="none: whole on every rank, gradients averaged once a phase; ddp: the same "
        "by torch's DistributedDataParallel; fsdp2: sharded by fully_shard; fsdp1: by "
        "FullyShardedDataParallel",
    )
    shard_size: Positive | None = Field(
        None,
        description="fsdp1, fsdp2: ranks that share one copy of the weights (hybrid sharding, for "
        "example the GPUs of a node); null: all of them",
    )
    cpu_offload: bool = Field(
        False, description="fsdp1, fsdp2: keep weights, gradients and optimizer in host memory"
    )
    reduce_each_micro_batch: bool = Field(
        False,
        description="fsdp1, fsdp2: reduce gradients after every micro-batch: more communication, "
        "but no whole gradient is held in between",
    )

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part only."""
        return self.kind in ("fsdp1", "fsdp2")

    @model_validator(mode="after")
    def _check(self) -> ParallelSettings:
        for key in ("shard_size", "cpu_offload", "reduce_each_micro_batch"):
            if getattr(self, key) and not self.sharded:
                raise ValueError(
                    f"{key}: only for kind 'fsdp1' or 'fsdp2', which shard the weights; kind is "
                    f"{self.kind!r}"
                )
        return self


@final
class LaunchSettings(Settings):
    """The processes of a run. Under torchrun its own arguments decide."""

    kind: Literal["local", "ray"] = Field(
        "local", description="local: processes of this machine; ray: those of a Ray cluster"
    )
    processes: Positive = Field(
        1,
        description="processes that `fewstep train` starts, one for each device; on Ray: the size "
        "of every trainer group",
    )
    address: str | None = Field(
        None,
        description="ray: 'auto' or host:port of a cluster that is running; null: start one on "
        "this machine for the run",
    )
    timeout_seconds: Positive = Field(
        600, description="how long a rank waits for the others before it gives up and says so"
    )
    grace_seconds: Positive = Field(
        300,
        description="how long a run that `fewstep train` has started and that is stopped may take "
        "to finish its cycle and save; then it is killed",
    )

    @model_validator(mode="after")
    def _check(self) -> LaunchSettings:
        if self.address is not None and self.kind != "ray":
            raise ValueError(f"address: only for kind 'ray'; kind is {self.kind!r}")
        host, _, port = (self.address or "auto").rpartition(":")
        if self.address not in (None, "auto") and not (host and port.isdecimal()):
            raise ValueError(
                f"address: {self.address!r} is given; it should be 'auto', host:port of a cluster "
                f"that is running, or null"
            )
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                f"address: {self.address!r} is that of a Ray client, through which no driver can "
                f"share files with its workers; start the run on a node of the cluster, with 'auto'"
            )
        return self
