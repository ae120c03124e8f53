"""Guesses of what a layout costs, cheap enough for thousands of them: one layer is traced, all else is arithmetic.

    traces of 1 layer, of 2 layers, of 1 dense + 1 MoE,   --differences-->   a dense and an MoE layer, per token;
        each with micro-batches of 1 and of 2 sequences                      gradients, per weight
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
from megatron_moe.plan.estimate import collective_seconds, owners
from megatron_moe.plan.rank import trace_rank
from megatron_moe.training.shrink import vary

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Piece:
    """A part of the model on a rank by itself, per token of a micro-batch: seconds of computation, bytes of memory."""

    seconds: float
    kept: float

    def __sub__(self, other: "Piece") -> "Piece":
        return Piece(self.seconds - other.seconds, self.kept - other.kept)


@dataclass(frozen=True)
class Measured:
    """Pieces of a model under one way of recomputation.

    Attributes:
        per_weight_byte: seconds of a micro-batch for each byte of weights, whatever its tokens: gradients are added up.
    """

    dense: Piece
    moe: Piece
    per_weight_byte: float


def measure(base: Config, recomputation: Values, cluster: Cluster) -> Measured:
    """Trace models of one and two layers; experts over two ranks, so that tokens are dispatched."""
    has_experts = base.moe.num_experts is not None
    dense_too = has_experts and not all(base.moe.layer_pattern(base.model.num_layers))

    def traced(pattern: str, sequences: int) -> tuple[Piece, int]:
        """Totals of a micro-batch, and bytes of the weights."""
        values = {
            "num_layers": len(pattern),
            "mtp_num_layers": None,
            "expert_model_parallel_size": 2 if has_experts else 1,
            "micro_batch_size": sequences,
            "global_batch_size": 2 * sequences,
            "data_parallel_sharding_strategy": "optim",
            "pipeline_model_parallel_layout": None,
        }
        if has_experts:
            values |= {"moe_layer_freq": f"[{','.join(pattern)}]", "moe_first_dense_layers": 0}
        trace = trace_rank(vary(base, **values, **recomputation), 2, 0)
        seconds = sum(cluster.compute_seconds(trace.work, base.training.params_dtype).values())
        kept = sum(cost.kept for action, cost in trace.actions if action.kind is Kind.F)
        return Piece(seconds, kept), trace.state.parameters

    def piece(pattern: str) -> tuple[Piece, float]:
        """Per token, and seconds per byte of weights."""
        (once, weights), (twice, _) = traced(pattern, 1), traced(pattern, 2)
        more, tokens = twice - once, base.data.seq_length
        return Piece(more.seconds / tokens, more.kept / tokens), max(once.seconds - more.seconds, 0.0) / weights

    (one, per_weight_byte), (two, _) = piece("1"), piece("11")
    layer = two - one
    dense = piece("01")[0] - one if dense_too else layer
    return Measured(dense, layer, per_weight_byte)


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
        width = 2 if self.base.training.params_dtype == "bfloat16" else 4
        gradients = measured.per_weight_byte * width * sum(self._weights(sizes))
        per_microbatch = layers * (piece_seconds * tokens + messages) + gradients
        reduced, gathered = self._sharing(sizes)
        again = per_microbatch * 2 / 3  # a backward pass hides so much
        step, each = gathered, max(0.0, reduced - again)
        if zero == "optim":  # gradients once a step
            step, each = gathered + each, 0.0
        elif zero == "optim_grads_params":
            step, each = 0.0, each + 2 * gathered
        schedule = values["pipeline_schedule"]
        bubble = _bubble(schedule, pp, chunks)
        seconds = (per_microbatch + each) * (num + bubble) + step
        whole = self.measured["none"]
        # A backward pass in two parts keeps what the second needs, recomputed or not.
        kept_by = whole if "zb" in schedule or "dualpipe" in schedule else measured
        kept = layers * (moe * kept_by.moe.kept + (1 - moe) * kept_by.dense.kept)
        again = max(1.5 * (whole.moe.kept - measured.moe.kept), 0.3 * whole.moe.kept)  # one layer at work
        heads = 1 + (self.base.model.mtp_num_layers or 0)
        # Float32 probabilities stay until the backward pass, which adds two gradients.
        head = (4.0 * heads + 4 + width) * (self.base.model.vocab_size or 0)
        first, last = (min(num, float(n)) for n in _in_flight(schedule, pp, chunks))
        peak = tokens * max(first * kept + again, last * kept + max(again, head))
        return seconds, self._state(sizes, zero) + peak

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
        once = moe.moe_dispatch_deduplicate and moe.num_experts is not None
        copies = (owners(moe, sizes.ep) if once else moe.moe_router_topk) * tokens * row
        keys = 2 * tokens * model.query_groups * model.head_channels / model.hidden_size * row
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
        """Weights of the fullest rank: dense ones with the embedding or the head, and experts'."""
        model, moe = self.base.model, self.base.moe
        matrices = (3 if model.gated else 2) * model.hidden_size * (moe.moe_ffn_hidden_size or model.dense_ffn_size)
        counts = moe.experts_per_layer(model.num_layers)
        experts = sum(count * matrices for count in counts)
        active = sum(moe.moe_router_topk * matrices for count in counts if count)
        core = self.base.data.seq_length * model.num_attention_heads * model.head_channels * model.num_layers
        dense = max(sum(self.flops.layers) / 2 - core - active, 0.0) / sizes.pp
        ends = model.hidden_size * (model.vocab_size or 0) * (2 if sizes.pp == 1 else 1)
        return (dense + ends) / sizes.tp, experts / (sizes.ep * sizes.etp * sizes.pp)

    def _count_state(self, sizes: MeshSizes, zero: str) -> float:
        """Bytes of weights, float32 gradients, and masters with two moments."""
        width = 2 if self.base.training.params_dtype == "bfloat16" else 4
        total = 0.0
        for weights, copies in zip(self._weights(sizes), (sizes.dp * sizes.cp, sizes.edp), strict=True):
            grads = 4 if zero == "optim" else 4 / copies
            kept = width / copies if zero == "optim_grads_params" else width
            total += weights * (kept + grads + 12 / copies)
        return total


def _bubble(schedule: str, pp: int, chunks: int) -> float:
    """In micro-batches (formulas 6); somewhat more than the closed forms where these assume equal parts."""
    parts = {"1f1b": 1.0, "interleaved-1f1b": 1 / chunks, "zb-h1": 0.4, "zb-v": 0.2, "dualpipe-v": 0.4}
    return (pp - 1) * parts[schedule]


def _in_flight(schedule: str, pp: int, chunks: int) -> tuple[float, float]:
    """Micro-batches in flight on the fullest rank, and on the one with the head (formulas 6)."""
    if schedule == "interleaved-1f1b":
        return pp * (1 + (pp - 1) / (pp * chunks)), ((chunks - 1) * pp + 1) / chunks
    return pp, pp if schedule in ("zb-v", "dualpipe-v") else 1
