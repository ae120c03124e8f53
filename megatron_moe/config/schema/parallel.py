"""Parallelism: sizes of the mesh's axes."""

from dataclasses import dataclass

from megatron_moe.config.fields import flag


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism: sizes of the mesh's axes; data parallelism takes the ranks that are left."""

    tensor_model_parallel_size: int = flag(1, "Ranks that share the matrices of attention and dense layers (tp).")
    pipeline_model_parallel_size: int = flag(1, "Ranks that share the layers (pp).")
    context_parallel_size: int = flag(1, "Ranks that share a sequence in attention (cp).")
    expert_model_parallel_size: int = flag(1, "Ranks that share the experts (ep); free of tp, cp and dp.")
    expert_tensor_parallel_size: int | None = flag(None, "Ranks that share one expert (etp). Default: tp.")
    sequence_parallel: bool = flag(
        False, "Cut the sequence over tp between the matrices. Switched on by MoE with tp > 1, and said."
    )
    cp_comm_type: str = flag(
        "allgather",
        "Context parallelism: gather keys and values, or pass them round a ring.",
        choices=("allgather", "p2p"),
    )
    pipeline_schedule: str = flag("1f1b", "Pipeline schedule.", registry="schedules")
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "Model chunks per pipeline rank, for interleaved schedules. Default: what the schedule needs."
    )
    pipeline_model_parallel_layout: str | None = flag(
        None, 'Layers of each stage in Megatron\'s syntax, e.g. "Et*3|(tt|)*29,m|L". Default: balanced by cost.'
    )
    data_parallel_sharding_strategy: str = flag(
        "no_shard",
        "What data-parallel ranks share out: nothing, optimizer state (ZeRO-1), and gradients (ZeRO-2), "
        "and parameters (ZeRO-3).",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    distributed_backend: str | None = flag(
        None, "Backend of the process groups. Default: nccl with GPUs, else gloo.", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(10.0, "How long a collective may wait before the run is ended.")
    elastic: bool = flag(
        False,
        "Fit the layout to however many ranks are started: data parallelism takes what is there, expert parallelism "
        "and the micro-batch shrink to the largest divisors that fit; the global batch stays.",
    )

    @property
    def expert_tp(self) -> int:
        """Size of the expert tensor-parallel axis."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size
