"""Guesses of what a layout costs, cheap enough for thousands of them: one layer is traced, all else is arithmetic.

    trace of 1 layer, of 2 layers, of 1 dense + 1 MoE  --differences-->  a dense layer, an MoE layer, embedding and head
    a layout      layers of the fullest rank x (compute / (tp cp) + messages of tp, ep, etp, cp, ZeRO) x micro-batches
                  + the schedule's bubble;  memory: state + layers x micro-batches in flight x what a layer keeps

A guess only decides which layouts are worth a dry run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from megatron_moe.config.schema import Config
from megatron_moe.model.flops import ForwardFlops
from megatron_moe.parallel.layout import MeshSizes, peers
from megatron_moe.pipeline import balance
from megatron_moe.pipeline.actions import Kind, stage_to_rank
from megatron_moe.pipeline.schedules import SCHEDULES, chunks_per_rank
from megatron_moe.plan.cluster import Cluster
from megatron_moe.plan.estimate import collective_seconds
from megatron_moe.plan.rank import trace_rank
from megatron_moe.training.shrink import vary

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Piece:
    """A part of the model on a rank by itself, per token of a micro-batch: seconds of computation, bytes of memory."""

    seconds: float
    kept: float
    most: float

    def __sub__(self, other: "Piece") -> "Piece":
        return Piece(self.seconds - other.seconds, self.kept - other.kept, self.most - other.most)


@dataclass(frozen=True)
class Measured:
    """Pieces of a model under one way of recomputation."""

    dense: Piece
    moe: Piece
    ends: Piece


def measure(base: Config, recomputation: Values, cluster: Cluster) -> Measured:
    """Trace models of one and two layers; experts over two ranks, so that tokens are dispatched."""
    has_experts = base.moe.num_experts is not None
    dense_too = has_experts and not all(base.moe.layer_pattern(base.model.num_layers))

    def piece(pattern: str) -> Piece:
        values = {
            "num_layers": len(pattern),
            "mtp_num_layers": None,
            "expert_model_parallel_size": 2 if has_experts else 1,
            "micro_batch_size": 1,
            "global_batch_size": 2,
            "data_parallel_sharding_strategy": "optim",
            "pipeline_model_parallel_layout": None,
        }
        if has_experts:
            values |= {"moe_layer_freq": f"[{','.join(pattern)}]", "moe_first_dense_layers": 0}
        trace = trace_rank(vary(base, **values, **recomputation), 2, 0)
        work, tokens = trace.work, base.data.seq_length
        peak = cluster.peak_tflops[base.training.params_dtype] * 1e12
        seconds = (
            work["matmul"] / (peak * cluster.efficiency["matmul"])
            + work["attention"] / (peak * cluster.efficiency["attention"])
            + work["touched"] / (cluster.memory_gb_per_s * 1e9 * cluster.efficiency["memory"])
        )
        kept = sum(cost.kept for action, cost in trace.actions if action.kind is Kind.F)
        return Piece(seconds / tokens, kept / tokens, (trace.peak[0] - kept) / tokens)

    one, two = piece("1"), piece("11")
    layer = two - one
    dense = piece("01") - one if dense_too else layer
    return Measured(dense=dense, moe=layer, ends=one - layer)


class Guesser:
    """Guesses for one model, cluster and world.

    Args:
        measured: by ``recompute_granularity`` and the modules that are recomputed.
    """

    def __init__(self, base: Config, cluster: Cluster, world_size: int, measured: Mapping[str, Measured]) -> None:
        self.base, self.cluster, self.world_size, self.measured = base, cluster, world_size, measured
        self.flops = ForwardFlops.of(base)
        # Many layouts share sizes.
        self._layers_of_fullest, self._messages = cache(self._count_layers), cache(self._time_messages)
        self._weights, self._state = cache(self._count_weights), cache(self._count_state)
        self._sharing = cache(self._time_sharing)

    def guess(self, values: Values, recompute: str) -> tuple[float, float] | None:
        """(seconds of a step, bytes of the fullest rank); None where the sizes do not divide."""
        tp, cp, pp = (values[f"{axis}_parallel_size"] for axis in ("tensor_model", "context", "pipeline_model"))
        ep, etp = values["expert_model_parallel_size"], values["expert_tensor_parallel_size"]
        if self.world_size % (tp * cp * pp) or self.world_size % (ep * etp * pp):
            return None
        sizes = MeshSizes(tp=tp, cp=cp, dp=self.world_size // (tp * cp * pp), pp=pp, etp=etp, ep=ep)
        mbs, batch = values["micro_batch_size"], self.base.training.global_batch_size or 0
        num = batch // (mbs * sizes.dp)
        virtual = values["num_virtual_stages_per_pipeline_rank"]
        chunks = chunks_per_rank(values["pipeline_schedule"], virtual)
        if not num or batch % (mbs * sizes.dp) or pp * chunks > self.base.model.num_layers + 2:
            return None
        measured, zero = self.measured[recompute], values["data_parallel_sharding_strategy"]
        tokens = mbs * self.base.data.seq_length / (tp * cp)
        layers = self._layers_of_fullest(values["pipeline_schedule"], pp, chunks)
        moe = self._moe_share
        piece_seconds = moe * measured.moe.seconds + (1 - moe) * measured.dense.seconds
        messages = self._messages(sizes, tokens, 1.0 if recompute == "none" else 1.5)
        per_microbatch = layers * (piece_seconds * tokens + messages)
        reduced, gathered = self._sharing(sizes)
        again = per_microbatch * 2 / 3  # a backward pass hides so much
        step, each = gathered, max(0.0, reduced - again)
        if zero == "optim":  # gradients once a step
            step, each = gathered + each, 0.0
        elif zero == "optim_grads_params":
            step, each = 0.0, each + 2 * gathered
        in_flight, bubble = _schedule_costs(values["pipeline_schedule"], pp, chunks, num)
        seconds = (per_microbatch + each) * (num + bubble) + step
        kept = (moe * measured.moe.kept + (1 - moe) * measured.dense.kept) * tokens
        memory = self._state(sizes, zero) + layers * kept * min(in_flight, num)
        return seconds, memory + (max(measured.ends.most, 0.0) / (1 if pp == 1 else 2) + measured.moe.most) * tokens

    @cached_property
    def _moe_share(self) -> float:
        model = self.base.model
        return sum(map(bool, self.base.moe.experts_per_layer(model.num_layers))) / model.num_layers

    def _count_layers(self, schedule: str, pp: int, chunks: int) -> float:
        """Layers of the rank with most to compute; the head counts as what it costs of one."""
        last = self.flops.head + self.flops.mtp
        cut = balance(self.flops.layers, 0.0, last, pp * chunks)
        costs = [0.0] * pp
        for number, stage in enumerate(cut):
            rank = stage_to_rank(SCHEDULES[schedule].placement, number, pp)
            costs[rank] += sum(self.flops.layers[i] for i in stage.layer_ids) + last * stage.head
        return max(costs) / (sum(self.flops.layers) / len(self.flops.layers))

    def _time_messages(self, sizes: MeshSizes, tokens: float, forwards: float) -> float:
        """Seconds of what a layer sends in a micro-batch; ``forwards``: 1.5 if its forward pass is run twice."""
        model, moe = self.base.model, self.base.moe
        row = model.hidden_size * (2 if self.base.training.params_dtype == "bfloat16" else 4)
        copies = moe.moe_router_topk * tokens * row
        keys = 2 * tokens * sizes.tp * model.query_groups * model.head_channels / model.hidden_size * row / sizes.tp
        sent = (
            ("tp", "all_gather", 4, 4 * (sizes.tp - 1) * tokens * row),
            ("ep", "all_to_all", 7, 4 * copies * (sizes.ep - 1) / sizes.ep * self._moe_share),
            ("etp", "all_gather", 6, 4 * copies * (sizes.etp - 1) * self._moe_share),
            ("cp", "all_gather", 2, 2 * (sizes.cp - 1) * keys),
        )
        return sum(
            collective_seconds(peers(0, axis, sizes), collective, calls, num_bytes * forwards, self.cluster)
            for axis, collective, calls, num_bytes in sent
            if num_bytes
        )

    def _time_sharing(self, sizes: MeshSizes) -> tuple[float, float]:
        """Seconds to reduce all gradients of a rank, and to gather all weights."""
        reduced = gathered = 0.0
        for axis, weights in zip(("dp_cp", "edp"), self._weights(sizes), strict=True):
            members = peers(0, axis, sizes)
            if len(members) > 1:
                reduced += collective_seconds(members, "reduce_scatter", 0, 4.0 * weights, self.cluster)
                gathered += collective_seconds(members, "all_gather", 0, 2.0 * weights, self.cluster)
        return reduced, gathered

    def _count_weights(self, sizes: MeshSizes) -> tuple[float, float]:
        """Weights of a rank: dense ones, and experts'."""
        model, moe = self.base.model, self.base.moe
        matrices = (3 if model.gated else 2) * model.hidden_size * (moe.moe_ffn_hidden_size or model.dense_ffn_size)
        counts = moe.experts_per_layer(model.num_layers)
        experts = sum(count * matrices for count in counts)
        active = sum(moe.moe_router_topk * matrices for count in counts if count)
        core = self.base.data.seq_length * model.num_attention_heads * model.head_channels * model.num_layers
        dense = max(sum(self.flops.layers) / 2 - core - active, 0.0) + 2 * model.hidden_size * (model.vocab_size or 0)
        return dense / (sizes.tp * sizes.pp), experts / (sizes.ep * sizes.etp * sizes.pp)

    def _count_state(self, sizes: MeshSizes, zero: str) -> float:
        """Bytes of weights, float32 gradients, and masters with two moments."""
        width = 2 if self.base.training.params_dtype == "bfloat16" else 4
        total = 0.0
        for weights, copies in zip(self._weights(sizes), (sizes.dp * sizes.cp, sizes.edp), strict=True):
            grads = 4 if zero == "optim" else 4 / copies
            kept = width / copies if zero == "optim_grads_params" else width
            total += weights * (kept + grads + 12 / copies)
        return total


def _schedule_costs(name: str, pp: int, chunks: int, num: int) -> tuple[float, float]:
    """Micro-batches in flight on the fullest rank, and the bubble in micro-batches (formulas 6)."""
    if pp == 1:
        return 1.0, 0.0
    if name == "interleaved-1f1b":
        return pp * (1 + (pp - 1) / (pp * chunks)), (pp - 1) / chunks
    return min(float(pp), num), (pp - 1) * {"1f1b": 1.0, "zb-h1": 0.4, "zb-v": 0.2, "dualpipe-v": 0.4}[name]
