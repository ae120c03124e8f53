"""What a training step may send, by formula: calls and bytes of every collective, summed over all ranks.

The formulas are those of docs/communication.md. Letters: b micro-batch, s sequence, h hidden size, beta bytes of a
number, m micro-batches of a rank; t c d p e x the sizes of tp, cp, dp, pp, ep, etp; A = b (s / c) h beta, the
activations of a micro-batch. Rings of n ranks send (n - 1) / n of the whole for a gather or a scatter, twice that for
an all-reduce.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import comb, prod

from megatron_moe.config.schema import Config
from megatron_moe.parallel.layout import MeshSizes

Key = tuple[str, str]
BETA = 8  # everything is float64 or int64


@dataclass
class Sent:
    """Calls and bytes by (axis, collective), over all ranks."""

    calls: Counter[Key] = field(default_factory=Counter)
    sent_bytes: Counter[Key] = field(default_factory=Counter)

    def add(self, axis: str, collective: str, calls: int, bytes_each: float) -> None:
        """So many calls of so many bytes."""
        if calls and bytes_each:
            self.calls[axis, collective] += calls
            self.sent_bytes[axis, collective] += round(calls * bytes_each)


class Formulas:
    """The formulas for one configuration and mesh, over one step."""

    def __init__(self, config: Config, sizes: MeshSizes) -> None:
        self.config, self.sizes, self.sent = config, sizes, Sent()
        model, training = config.model, config.training
        assert training.global_batch_size is not None
        self.m = training.global_batch_size // training.micro_batch_size // sizes.dp
        self.pattern = config.moe.layer_pattern(model.num_layers)
        self.stage = sizes.tp * sizes.cp * sizes.dp  # ranks that run a layer
        self.tokens = training.micro_batch_size * config.data.seq_length // sizes.cp
        self.activations = self.tokens * model.hidden_size * BETA
        self.sequence_parallel = config.parallel.sequence_parallel

    def ring(self, axis: str, collective: str, calls: int, whole: float) -> None:
        """So many calls over an axis, whose whole tensor has so many bytes."""
        n = getattr(self.sizes, axis) if axis in ("tp", "cp", "ep", "etp", "dp", "edp") else self.group(axis)
        factor = 2 if collective == "all_reduce" else 1
        self.sent.add(axis, collective, calls, factor * (n - 1) * whole / n)

    def group(self, axis: str) -> int:
        """Size of a product of axes."""
        sizes = self.sizes
        return {"seq": sizes.tp * sizes.cp, "dp_cp": sizes.dp * sizes.cp, "stage": self.stage, "world": sizes.world}[
            axis
        ]

    def tensor_parallel(self) -> None:
        """7.2: an all-reduce out of each half of a layer and back; or, cutting the sequence, gather and scatter."""
        dense, moe = self.pattern.count(False), self.pattern.count(True)
        halves = 2 * dense + moe + (moe if self.config.moe.moe_shared_expert_intermediate_size else 0)
        runs = self.m * self.stage
        if self.sequence_parallel:
            # Forward and backward each; then the embedding (scatter, gather) and the head (gather, scatter).
            self.ring("tp", "all_gather", (2 * halves + 2) * runs, self.activations)
            self.ring("tp", "reduce_scatter", (2 * halves + 2) * runs, self.activations)
        else:
            self.ring("tp", "all_reduce", (2 * halves + 2) * runs, self.activations)
        self.ring("tp", "all_reduce", runs, self.tokens * BETA)  # loss: the maximum
        self.ring("tp", "all_reduce", runs, 2 * self.tokens * BETA)  # and two sums in one

    def balance_counts(self) -> None:
        """Integer counts of the sequence's groups for each balance loss: E + 1 numbers a sequence."""
        assert self.config.moe.num_experts is not None
        axis = "seq" if self.sequence_parallel else "cp"
        numbers = self.config.training.micro_batch_size * (self.config.moe.num_experts + 1)
        self.ring(axis, "all_reduce", self.pattern.count(True) * self.m * self.stage, numbers * BETA)

    def context_parallel(self) -> None:
        """7.6: keys and values of the other c - 1 ranks come here, and their gradients go back."""
        model, c, runs = self.config.model, self.sizes.cp, self.m * self.stage * self.config.model.num_layers
        local = (
            2
            * self.tokens
            * (model.query_groups // min(self.sizes.tp, model.query_groups))
            * model.head_channels
            * BETA
        )
        if self.config.parallel.cp_comm_type == "allgather":
            self.ring("cp", "all_gather", runs, c * local)
            self.ring("cp", "reduce_scatter", runs, c * local)
        else:
            self.sent.add("cp", "send", 3 * (c - 1) * runs, local)

    def all_to_all(self, remote_copies: int, copies: int) -> None:
        """7.3: copies whose expert is elsewhere, there and back, forward and backward, and their weights there."""
        sizes, config = self.sizes, self.config
        runs = self.pattern.count(True) * self.m * self.stage
        row = config.model.hidden_size * BETA
        assert config.moe.num_experts is not None
        if sizes.ep > 1:
            self.ring("ep", "all_to_all", runs, config.moe.num_experts * BETA)  # counts
            self.sent.calls["ep", "all_to_all"] += 6 * runs
            self.sent.sent_bytes["ep", "all_to_all"] += remote_copies * (4 * row + 2 * BETA)
        if sizes.etp > 1:
            self.ring("etp", "all_gather", runs, sizes.etp * config.moe.num_experts * BETA)
            self.sent.calls["etp", "all_to_all"] += 6 * runs
            self.sent.sent_bytes["etp", "all_to_all"] += (sizes.etp - 1) * copies * (4 * row + 2 * BETA)

    def all_to_all_without_duplicates(self, distinct: int, remote_copies: int) -> None:
        """The same with a row for each token and other rank; a copy has the place of its row (4 bytes) there, too."""
        runs = self.pattern.count(True) * self.m * self.stage
        row, sent = self.config.model.hidden_size * BETA, self.sent
        assert self.config.moe.num_experts is not None
        self.ring("ep", "all_to_all", runs, (self.config.moe.num_experts + self.sizes.ep) * BETA)  # counts
        sent.calls["ep", "all_to_all"] += 7 * runs
        sent.sent_bytes["ep", "all_to_all"] += distinct * 4 * row + remote_copies * (2 * BETA + 4)

    def all_gather_dispatch(self) -> None:
        """7.3: every token to every rank of ep, and partial sums back; ids and weights of the copies beside."""
        e, runs = self.sizes.ep, self.pattern.count(True) * self.m * self.stage
        tokens, copies = self.activations, self.tokens * self.config.moe.moe_router_topk
        for whole in (2 * BETA, copies * BETA, tokens, copies * BETA, tokens):  # counts, ids, x, weights; gradient of y
            self.ring("ep", "all_gather", runs, e * whole)
        for whole in (tokens, tokens, copies * BETA):  # y; gradients of x and of the weights
            self.ring("ep", "reduce_scatter", runs, e * whole)

    def pipeline(self, num_messages: int) -> None:
        """7.5: so many boundaries between ranks, once forward and once backward for each micro-batch."""
        share = self.sizes.tp if self.sequence_parallel else 1
        self.sent.add("pp", "send", 2 * num_messages * self.m * self.stage, self.activations / share)

    def gradients(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """7.4, without tensor parallelism: gradients of all parameters, and weights where they are shared out."""
        level = ("no_shard", "optim", "optim_grads", "optim_grads_params").index(
            self.config.parallel.data_parallel_sharding_strategy
        )
        units: dict[tuple[str, str], int] = Counter()
        for name, shape in shapes.items():
            unit = name.split(".")[1] if name.startswith("layers.") else "outside"
            axis = "edp" if ".experts." in name else "stage" if name.endswith("gate.weight") else "dp_cp"
            held = prod(shape) // (self.sizes.ep * self.sizes.etp if axis == "edp" else 1)
            units[unit if level >= 2 else "all", axis] += held
        for (unit, axis), numel in units.items():
            runs, whole = self.stage, numel * BETA
            if level == 0:
                self.ring(axis, "all_reduce", runs, whole)
                continue
            self.ring(axis, "reduce_scatter", runs * (self.m if level >= 2 else 1), whole)
            # Outside the layers weights stay for a step; a layer's are gathered for each forward and each backward.
            gathers = 2 * self.m if level == 3 and unit != "outside" else 1
            self.ring(axis, "all_gather", runs * gathers, whole)

    def scalars(self) -> None:
        """Once a step: numbers of tokens, the loss, the gradient norm."""
        world = self.sizes.world
        self.ring("dp", "all_reduce", world, 2 * BETA)
        self.ring("dp_cp", "all_reduce", world, BETA)
        self.sent.add("pp", "all_reduce", world, 2 * (self.sizes.pp - 1) * BETA / self.sizes.pp)
        self.ring("world", "all_reduce", world, BETA)


def rows_without_duplicates(num_experts: int, topk: int, num_ranks: int) -> float:
    """Rows that a token sends in the mean, one to each rank with experts of it, if it chooses experts at random."""
    elsewhere = num_experts - num_experts // num_ranks
    return num_ranks * (1 - comb(elsewhere, topk) / comb(num_experts, topk))
