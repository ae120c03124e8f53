"""Seconds of a step from what a layout computes and sends, and the rates of a cluster.

    an action       FLOPs / (peak x efficiency) + bytes touched / (memory x efficiency)
                    + its collectives, for which the code waits (tp, cp, ep, etp, seq)
                    + what its own computation cannot hide of the reductions of gradients it begins, and of the
                      way of tokens, where samples take turns
    the pipeline    the simulator runs the schedule with these; activations sent to neighbours travel meanwhile
    afterwards      what the step sends outside its actions (norm, gather of weights), and the optimizer's pass

A collective takes calls x latency + bytes / rate. A group inside a node has the node's rate. Over several nodes a ring
has the network shares of all its members in a node; the rows that an all-to-all sends to other nodes have one share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb

from megatron_moe.config.schema import MoEConfig
from megatron_moe.pipeline.actions import COMPUTE, Kind
from megatron_moe.pipeline.simulate import Durations, simulate
from megatron_moe.plan.cluster import Cluster
from megatron_moe.plan.dry_run import Plan
from megatron_moe.plan.operations import WORK
from megatron_moe.plan.rank import ActionCost, Traffic

_REDUCTIONS = {(axis, kind) for axis in ("dp_cp", "edp", "stage") for kind in ("all_reduce", "reduce_scatter")}
_MESSAGES = ("pp", "send")
_OF_EXPERTS = ("ep", "etp")  # the axes on which tokens travel


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step.

    Attributes:
        step: all of it.
        parts: of the busiest pipeline rank: computation by kind, awaited communication by axis, optimizer, bubble.
        hidden: seconds of communication behind computation, by axis.
    """

    cluster: Cluster
    step: float
    parts: dict[str, float]
    hidden: dict[str, float]
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    utilization: float

    def largest(self, num: int) -> str:
        """The largest parts in words, with their share of the step."""
        parts = sorted(self.parts.items(), key=lambda item: -item[1])[:num]
        return ", ".join(f"{name} {seconds / self.step:.0%}" for name, seconds in parts)


def estimate(plan: Plan, cluster: Cluster, per_node: bool = False) -> Estimate:
    """Time a plan on a cluster.

    Args:
        per_node: count the network's share of dispatch and combine as if a token went once to each node with experts
            of it (DeepSeek-V3's dispatch, DeepEP), not once for each expert as this code sends it.
    """
    share = _share_of_copies(plan, cluster) if per_node else 1.0
    seconds = [_PipelineRank(plan, cluster, pp_rank, share) for pp_rank in range(plan.sizes.pp)]
    timeline = simulate(plan.ranks[0].schedule, _durations(plan, seconds))
    tails = [rank.afterwards() for rank in seconds]
    step = timeline.length + max(sum(tail.values()) for tail in tails)
    busiest = max(range(plan.sizes.pp), key=lambda r: timeline.busy[r])
    parts, hidden = seconds[busiest].parts()
    parts["bubble"] = timeline.length - timeline.busy[busiest]
    for name, value in tails[busiest].items():
        parts[name] = parts.get(name, 0.0) + value
    tflops = plan.model_flops / step / plan.sizes.world / 1e12
    peak = cluster.peak_tflops[plan.config.training.params_dtype]
    return Estimate(cluster, step, parts, hidden, plan.tokens / step / plan.sizes.world, tflops, tflops / peak)


def _share_of_copies(plan: Plan, cluster: Cluster) -> float:
    """Nodes that a token goes to, over the rows that are sent of it."""
    moe, nodes = plan.config.moe, nodes_of(plan.members(0, "ep"), cluster)
    if nodes == 1 or moe.num_experts is None:
        return 1.0
    return owners(moe, nodes) / (owners(moe, plan.sizes.ep) if moe.moe_dispatch_deduplicate else moe.moe_router_topk)


def owners(moe: MoEConfig, num: int) -> float:
    """Of so many equal owners of the experts, those that a token goes to: by uniform choice, limited by groups."""
    assert moe.num_experts is not None
    elsewhere = moe.num_experts - moe.num_experts // num
    reached = num * (1 - comb(elsewhere, moe.moe_router_topk) / comb(moe.num_experts, moe.moe_router_topk))
    limited = moe.moe_router_num_groups == num
    return min(reached, moe.moe_router_group_topk or num) if limited else reached


def nodes_of(ranks: tuple[int, ...], cluster: Cluster) -> int:
    """How many nodes a group spans."""
    return len({rank // cluster.gpus_per_node for rank in ranks})


def collective_seconds(
    ranks: tuple[int, ...],
    collective: str,
    calls: int,
    num_bytes: float,
    cluster: Cluster,
    share: float = 1.0,
) -> float:
    """Seconds of calls of a collective over a group that send so many bytes from each rank in all.

    Args:
        share: of what an all-to-all sends to other nodes, so much passes the network; the rest is copied there.
    """
    node = cluster.node_gb_per_s * 1e9 * cluster.efficiency["node"]
    network = cluster.network_gb_per_s * 1e9 * cluster.efficiency["network"]
    nodes = nodes_of(ranks, cluster)
    if nodes == 1:
        return calls * cluster.node_microseconds * 1e-6 + num_bytes / node
    latency = calls * cluster.network_microseconds * 1e-6
    in_node = len(ranks) / nodes
    if collective == "all_to_all":
        outside = (len(ranks) - in_node) / (len(ranks) - 1)
        inside = 1 - outside * share
        return latency + max(num_bytes * outside * share / network, num_bytes * inside / node)
    return latency + num_bytes / min(node, network * in_node)


class _PipelineRank:
    """Seconds of the actions of one pipeline rank."""

    def __init__(self, plan: Plan, cluster: Cluster, pp_rank: int, share: float) -> None:
        self.plan, self.cluster, self.pp_rank, self.rank = plan, cluster, pp_rank, plan.ranks[pp_rank]
        self.share = share  # of the rows for other nodes, what passes the network
        # Many actions share a cost, and many collectives a group.
        self._members: dict[str, tuple[int, ...]] = {}
        self._split: dict[int, tuple[dict[str, float], dict[str, float]]] = {}

    def compute(self, work: Mapping[str, float]) -> dict[str, float]:
        return self.cluster.compute_seconds(work, self.plan.config.training.params_dtype)

    def communication(self, sent: Traffic) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds by axis: waited for, and begun to be waited for later."""
        waited: dict[str, float] = {}
        begun: dict[str, float] = {}
        for (axis, collective), (calls, num_bytes) in sent.items():
            members = self._members.get(axis) or self.plan.members(self.pp_rank, axis)
            self._members[axis] = members
            later = float((axis, collective) in _REDUCTIONS or (axis, collective) == _MESSAGES)
            if self.plan.config.moe.moe_overlap_attention and axis in _OF_EXPERTS:
                later = 1 - 1 / calls  # all but the last have another part's computation before them
            share = self.share if axis == "ep" else 1.0
            spent = collective_seconds(members, collective, calls, num_bytes, self.cluster, share)
            for into, seconds in ((begun, later * spent), (waited, (1 - later) * spent)):
                if seconds:
                    into[axis] = into.get(axis, 0.0) + seconds
        return waited, begun

    def split(self, cost: ActionCost) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of an action by part, and what of its communication is hidden, by axis."""
        if id(cost) not in self._split:
            self._split[id(cost)] = self._split_of(cost)
        return self._split[id(cost)]

    def _split_of(self, cost: ActionCost) -> tuple[dict[str, float], dict[str, float]]:
        parts = self.compute(cost.work)
        busy = sum(parts.values())
        waited, begun = self.communication(cost.sent)
        hidden = {}
        for axis, spent in begun.items():
            hidden[axis] = spent if axis == "pp" else min(spent, busy)
            busy -= hidden[axis] * (axis != "pp")
            if spent > hidden[axis]:
                waited[axis] = waited.get(axis, 0.0) + spent - hidden[axis]
        return parts | {f"communication {axis}": spent for axis, spent in waited.items()}, hidden

    def mean(self, kind: Kind, chunk: int) -> float | None:
        """Seconds of a kind of action of one of the rank's stages, in the mean over its micro-batches."""
        stages = self.rank.schedule.stages_of(self.pp_rank)
        spent = [
            sum(self.split(cost)[0].values())
            for action, cost in self.rank.actions
            if action.kind is kind and stages.index(action.stage) == chunk
        ]
        return sum(spent) / len(spent) if spent else None

    def parts(self) -> tuple[dict[str, float], dict[str, float]]:
        """Sums over the rank's list: seconds by part, hidden seconds by axis."""
        parts: dict[str, float] = {}
        hidden: dict[str, float] = {}
        for action, cost in self.rank.actions:
            mine, behind = self.split(cost)
            for total, some in ((hidden, behind), (parts, mine if action.kind in COMPUTE else {})):
                for name, value in some.items():
                    total[name] = total.get(name, 0.0) + value
        return parts, hidden

    def afterwards(self) -> dict[str, float]:
        """Seconds after the last action: what is sent there, and the optimizer's reading and writing."""
        inside = self.rank.sent_in_actions
        rest = {
            k: (c - inside.get(k, (0, 0))[0], b - inside.get(k, (0, 0))[1]) for k, (c, b) in self.rank.traffic.items()
        }
        waited, begun = self.communication({key: value for key, value in rest.items() if value[0] > 0})
        state = self.rank.state
        touched = 2 * state.optimizer + state.gradients + state.parameters
        nothing = dict.fromkeys(WORK, 0.0)
        found = {"optimizer": self.compute(nothing | {"touched": float(touched)})["other operations"]}
        for axis, spent in [*waited.items(), *begun.items()]:
            name = f"communication {axis}"
            found[name] = found.get(name, 0.0) + spent
        return found


def _durations(plan: Plan, ranks: list[_PipelineRank]) -> Durations:
    """Of every stage, for the simulator; a full backward counts as its two parts."""
    schedule = plan.ranks[0].schedule
    forward, backward, weight = [], [], []
    messages = 0.0
    for stage in range(schedule.num_stages):
        pp_rank = schedule.rank_of(stage)
        chunk, rank = schedule.stages_of(pp_rank).index(stage), ranks[pp_rank]
        forward.append(rank.mean(Kind.F, chunk) or 0.0)
        split = rank.mean(Kind.I, chunk)
        whole = rank.mean(Kind.B, chunk)
        weight.append(rank.mean(Kind.W, chunk) or 0.0)
        backward.append(split if split is not None else (whole or 0.0) - weight[-1])
        for kind in (Kind.SEND_F, Kind.SEND_B):
            messages = max(
                [
                    messages,
                    *(sum(rank.communication(c.sent)[1].values()) for a, c in rank.rank.actions[:64] if a.kind is kind),
                ]
            )
    return Durations(forward, backward, weight, messages)
