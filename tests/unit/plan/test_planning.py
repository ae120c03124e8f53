"""Plans of published layouts, the arithmetic of clusters and time, and what cannot be planned."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import pretrain_moe
from megatron_moe.config import ConfigError
from megatron_moe.model.flops import ForwardFlops
from megatron_moe.moe.routers.forced import dealt_ids
from megatron_moe.pipeline.actions import Kind
from megatron_moe.plan.cluster import Cluster, read_cluster
from megatron_moe.plan.configure import configured
from megatron_moe.plan.dry_run import Plan, dry_run
from megatron_moe.plan.estimate import collective_seconds, estimate
from megatron_moe.plan.found import as_yaml, difference, table
from megatron_moe.plan.main import memory_problem
from megatron_moe.plan.published import compare, read_rows
from megatron_moe.plan.search import search
from megatron_moe.training.shrink import vary
from tools import plan as tool

ROOT = Path(__file__).parents[3]
H100 = ROOT / "configs/clusters/h100-sxm.yaml"
PRESETS = {  # layout: model, world, parameters of the model in all
    "mixtral-8x7b-64": ("mixtral-8x7b", 64, 46_702_792_704),
    "mixtral-8x22b-128": ("mixtral-8x22b", 128, 140_630_071_296),
    "qwen3-30b-16": ("qwen3-30b-a3b", 16, 30_532_122_624),
    "qwen3-235b-256": ("qwen3-235b-a22b", 256, 235_093_634_560),
    "deepspeed-moe-52b-128": ("deepspeed-moe-52b-decoder", 128, 52_451_186_688),
    "gshard-600b-2048": ("gshard-36l-2048e-decoder", 2048, 619_182_704_640),
}
TINY = [
    "--num-layers",
    "4",
    "--hidden-size",
    "64",
    "--vocab-size",
    "512",
    "--seq-length",
    "64",
    "--global-batch-size",
    "16",
]
TINY += ["--num-experts", "8", "--moe-ffn-hidden-size", "32"]


def _preset(layout: str, model: str, world_size: int, *others: str) -> Plan:
    files = [f"--config={ROOT}/configs/models/{model}.yaml", f"--config={ROOT}/configs/parallel/{layout}.yaml"]
    return dry_run(configured([*files, *others], world_size), world_size)


@pytest.mark.parametrize("layout", PRESETS)
def test_published_layouts_are_planned(layout: str) -> None:
    model, world_size, parameters = PRESETS[layout]
    plan = _preset(layout, model, world_size)
    assert plan.num_parameters == parameters
    recomputing = plan.config.training.recompute_granularity is not None
    assert 1.0 <= plan.hardware_flops / plan.model_flops < (1.35 if recomputing else 1.01)
    for pp_rank, rank in enumerate(plan.ranks):
        # bfloat16 weights and float32 gradients; moments and masters over the replicas, 12 bytes in all
        assert rank.state.optimizer < 12 * rank.state.parameters / 2
        assert sum(plan.memory(pp_rank).values()) < 80e9


def test_deepseek_v3_on_2048_ranks() -> None:
    """Parameters and FLOPs per token of the report, without its module of multi-token prediction."""
    without = ["--mtp-num-layers", "none", "--mtp-loss-scaling-factor", "0.1"]
    plan = _preset("deepseek-v3-2048", "deepseek-v3", 2048, *without)
    assert plan.num_parameters == 671_026_419_200
    assert plan.model_flops / plan.tokens == pytest.approx(250.5e9, rel=0.01)


@pytest.mark.parametrize("num", [1, 2, 4, 8])
def test_small_layouts_are_planned(num: int) -> None:
    files = [f"--config={ROOT}/configs/quickstart.yaml", f"--config={ROOT}/configs/parallel/gpus-{num}.yaml"]
    plan = dry_run(configured(files, num), num)
    assert plan.num_parameters == 9_214_464


def test_a_device_holds_and_sends_the_same_when_experts_grow_with_devices() -> None:
    """GShard's claim: 128 to 2,048 experts, one a device; a device sends (D - 1) / D of its copies."""
    held, sent = [], []
    for num in (128, 512, 2048):
        argv = [
            "--num-layers=2",
            "--hidden-size=64",
            "--vocab-size=512",
            "--seq-length=1024",
            "--params-dtype=bfloat16",
        ]
        argv += [f"--num-experts={num}", f"--expert-model-parallel-size={num}", "--moe-ffn-hidden-size=512"]
        argv += ["--moe-router=gshard_top2", "--moe-expert-capacity-factor=2"]
        rank = dry_run(configured(argv, num), num).ranks[0]
        router = num * 64 * 4 * 4  # the one weight that grows: weights, gradients and two moments, in float32
        counts = num * 8 * (num - 1) // num
        held.append(rank.state.total - router)
        sent.append((rank.traffic["ep", "all_to_all"][1] - counts) * num / (num - 1))
    assert held[0] == held[1] == held[2]
    assert sent == pytest.approx([sent[0]] * 3)


def test_flops_are_split_by_part() -> None:
    config = configured([*TINY, "--moe-layer-freq=[0]*2+[1]*2"], 2)
    plain, full = dry_run(config, 2), dry_run(vary(config, recompute_granularity="full"), 2)
    forward = ForwardFlops.of(config)
    tokens = 3 * plain.tokens
    assert plain.flops["head"] == tokens * forward.head
    assert plain.flops["recomputation"] == 0.0
    assert sum(plain.flops.values()) == plain.hardware_flops
    assert full.flops | {"recomputation": 0.0} == plain.flops
    assert full.flops["recomputation"] == pytest.approx(plain.tokens * sum(forward.layers), rel=0.01)
    dense = 3 * 2 * 64 * config.model.dense_ffn_size
    assert plain.flops["dense"] == tokens * 2 * dense
    predicting = vary(config, mtp_num_layers=1)  # whose module does not take turns
    turns = vary(predicting, micro_batch_size=2, moe_overlap_degree=2, moe_overlap_attention=True)
    assert dry_run(turns, 2).flops == dry_run(predicting, 2).flops


def test_buffers_of_collectives_are_apart() -> None:
    """At the peak, in the forward pass, the rows of the last all-to-all are alive."""
    plan = dry_run(configured([*TINY, "--expert-model-parallel-size=4", "--vocab-size=32"], 4), 4)
    rows = 4 * 64 // 4 * 2 * 64  # a micro-batch's copies of a rank, in float32
    assert plan.memory(0)["communication"] >= rows * 4
    assert plan.memory(0)["communication"] + plan.memory(0)["activations"] == plan.ranks[0].peak[0]


def test_capacity_and_expert_choice_bound_what_is_sent() -> None:
    def sent(*flags: str, skew: float = 1.0) -> int:
        config = configured([*TINY, "--expert-model-parallel-size=4", *flags], 4)
        return dry_run(config, 4, skew).ranks[0].traffic["ep", "all_to_all"][1]

    choice = ["--moe-router=expert_choice", "--moe-allow-acausal-routing", "--moe-router-load-balancing-type=none"]
    choice += ["--moe-aux-loss-coeff", "none"]
    counts = 8 * 8 * 3 // 4 * 2 * 4  # of 8 experts in int64 to 3 of 4 peers, for 2 layers and 4 micro-batches
    balanced = sent()
    assert sent("--moe-expert-capacity-factor=1") == sent(*choice) == balanced
    assert sent(*choice, "--moe-expert-capacity-factor=2") - counts == 2 * (balanced - counts)
    assert sent("--moe-expert-capacity-factor=0.5") - counts == (balanced - counts) / 2
    assert sent("--moe-expert-capacity-factor=1", skew=2.0) < sent(skew=2.0)
    for flags, skew, problem in (([], 9.0, "from 1 to E/K = 4"), (choice, 2.0, "experts have equal loads")):
        with pytest.raises(ValueError, match=problem):
            sent(*flags, skew=skew)


def test_without_duplicates_a_token_is_sent_once_to_each_rank() -> None:
    """And as often as a token that chooses at random, 4.54 times in the mean (tests/parity/test_traffic.py)."""
    argv = [*TINY, "--num-experts=64", "--moe-router-topk=6", "--expert-model-parallel-size=8", "--num-layers=2"]
    argv += ["--global-batch-size=8", "--moe-dispatch-deduplicate", "--moe-layer-freq=[0,1]"]
    plan, ranks_TK = dry_run(configured(argv, 8), 8), dealt_ids(64, 64, 6, 1.0) // 8  # of every rank's tokens
    owners = [set(ranks) for ranks in ranks_TK.tolist()]
    sent, received = sum(len(ranks - {0}) for ranks in owners), 7 * sum(0 in ranks for ranks in owners)
    copies_sent, copies_received = int((ranks_TK > 0).sum()), 7 * int((ranks_TK == 0).sum())
    weights_and_places = 4 * (copies_sent + copies_received) + 4 * copies_sent
    counts = 8 * (8 + 1) * 7
    expected = 2 * (sent + received) * 64 * 4 + weights_and_places + counts
    assert plan.ranks[0].traffic["ep", "all_to_all"][1] == expected
    assert sum(map(len, owners)) / 64 == pytest.approx(4.54, rel=0.05)


def test_skew_shows_in_memory_and_traffic() -> None:
    config = configured([*TINY, "--expert-model-parallel-size=4"], 4)
    balanced, skewed = dry_run(config, 4), dry_run(config, 4, skew=2.0)
    assert skewed.memory(0)["activations"] > balanced.memory(0)["activations"]
    assert skewed.ranks[0].state == balanced.ranks[0].state


def test_fp8_halves_what_experts_and_feed_forward_keep_and_the_time_of_their_products() -> None:
    """What is kept for the weights' gradients: a byte a number and four a tile, instead of two a number."""
    flags = [
        *TINY,
        "--hidden-size=256",
        "--ffn-hidden-size=384",
        "--moe-ffn-hidden-size=128",
        "--params-dtype=bfloat16",
    ]
    plain, scaled = (
        dry_run(configured([*flags, "--pipeline-model-parallel-size=1", *fp8], 1), 1)
        for fp8 in ([], ["--fp8-format=e4m3", "--fp8-recipe=blockwise"])
    )
    kept = [
        next(c.kept for (kind, _, _), c in plan.ranks[0].costs.items() if kind is Kind.F) for plan in (plain, scaled)
    ]
    rows = 64 * (2 * (256 + 128) + 256 + 384)  # of both experts of a token, and of a dense layer
    ends = 8 * 4  # where each expert's rows end, which the grouped product wants on the device
    assert kept[0] - kept[1] == 2 * (rows * 2 + ends - (rows + rows // 128 * 4))
    work, cluster = scaled.ranks[0].work, read_cluster(H100)
    projections = 4 * 2 * 256 * (256 + 256 + 256 + 256)
    widths = 3 * (2 * 2 * 2 * 256 * 128 + 2 * 2 * 256 * 384)
    assert work["fp8"] == scaled.tokens * 2 * (projections + widths)  # forward, and for the input's gradient
    assert work["matmul"] == plain.ranks[0].work["matmul"] and plain.ranks[0].work["fp8"] == 0
    saved = product_seconds(plain, cluster) - product_seconds(scaled, cluster)
    assert saved == pytest.approx(work["fp8"] * (1 / 989e12 - 1 / 1979e12) / 0.65)
    a100 = read_cluster(ROOT / "configs/clusters/a100-80g.yaml")
    assert product_seconds(plain, a100) == pytest.approx(product_seconds(scaled, a100))


def product_seconds(plan: Plan, cluster: Cluster) -> float:
    """Of the matrix products of a step."""
    return cluster.compute_seconds(plan.ranks[0].work, "bfloat16")["matrix products"]


def test_collectives_take_latency_and_the_slowest_link() -> None:
    cluster = read_cluster(H100)
    inside = collective_seconds(tuple(range(8)), "all_to_all", 10, 450e9 * 0.75, cluster)
    assert inside == pytest.approx(10 * 5e-6 + 1.0)
    apart = collective_seconds((0, 8), "all_reduce", 0, 50e9 * 0.75, cluster)
    assert apart == pytest.approx(1.0)  # one network share
    wide = collective_seconds(tuple(range(16)), "all_gather", 0, 8 * 50e9 * 0.75, cluster)
    assert wide == pytest.approx(8 * 50 / 400)  # eight shares, less than the node's 450
    crossing = collective_seconds(tuple(range(16)), "all_to_all", 0, 15e9, cluster)
    assert crossing == pytest.approx(8e9 / (50e9 * 0.75))  # 8 of 15 peers are on the other node


def test_a_step_is_its_parts() -> None:
    time = estimate(dry_run(configured([*TINY, "--pipeline-model-parallel-size=2"], 4), 4), read_cluster(H100))
    assert sum(time.parts.values()) == pytest.approx(time.step, rel=0.05)
    assert 0 < time.utilization < 1


def test_reductions_of_sharded_gradients_are_behind_the_backward_pass() -> None:
    """Once a micro-batch, where a long computation hides them; what is waited for gathers weights once a step."""
    flags = ["--hidden-size=512", "--seq-length=4096", "--data-parallel-sharding-strategy=optim_grads"]
    time = estimate(dry_run(configured([*TINY, *flags], 4), 4), read_cluster(H100))
    for axis in ("dp_cp", "edp"):
        assert time.hidden[axis] > time.parts[f"communication {axis}"] > 0


def test_the_way_of_tokens_is_behind_attention_where_samples_take_turns() -> None:
    """Of long sequences all but the last transfer is hidden; the bytes are the same in smaller parts."""
    flags = [*TINY, "--hidden-size=512", "--seq-length=4096", "--micro-batch-size=2", "--expert-model-parallel-size=4"]
    flags += ["--moe-overlap-degree=2"]
    in_line, in_turns = (
        estimate(dry_run(configured([*flags, *turns], 4), 4), read_cluster(H100))
        for turns in ([], ["--moe-overlap-attention"])
    )
    assert "ep" not in in_line.hidden
    waited = in_turns.parts["communication ep"]
    assert 0 < waited < 0.1 * in_turns.hidden["ep"]
    assert waited + in_turns.hidden["ep"] == pytest.approx(in_line.parts["communication ep"], rel=0.02)


def test_what_does_not_fit_says_what_would_cut_it() -> None:
    cluster = read_cluster(H100)
    plan = dry_run(configured([*TINY, "--expert-model-parallel-size=2"], 2), 2)
    assert memory_problem(plan, cluster) is None
    small = replace(cluster, memory_gb=0.001)
    problem = memory_problem(plan, small)
    assert problem is not None and "optimizer" in problem and "--data-parallel-sharding-strategy optim" in problem


def test_absurd_clusters_are_refused(tmp_path: Path) -> None:
    data = yaml.safe_load(H100.read_text())
    del data["node_gb_per_s"]
    data |= {"memory_gb": -1, "gpu_per_node": 8, "efficiency": {"matmul": 2.0}}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(ValueError) as caught:
        read_cluster(tmp_path / "bad.yaml")
    for part in ("node_gb_per_s is missing", "memory_gb is -1", "gpu_per_node is unknown", "efficiency needs a number"):
        assert part in str(caught.value)
    for path in (ROOT / "configs/clusters").glob("*.yaml"):
        assert read_cluster(path).name == path.stem


def test_search_finds_layouts_that_load_again(tmp_path: Path) -> None:
    cluster = read_cluster(H100)
    given = ["--pipeline-model-parallel-size=2", "--expert-model-parallel-size=2"]
    result = search(TINY, 4, cluster, best=2, beside=given)
    found = result.found
    assert [f.time.step for f in found] == sorted(f.time.step for f in found)
    assert result.beside is not None and found[0].time.step <= result.beside.time.step
    assert "given" in table(result) and "less than the given: " in difference(found[0], result.beside)
    path = tmp_path / "found.yaml"
    path.write_text(as_yaml(found[0], cluster))
    again = dry_run(configured([*TINY, f"--config={path}"], 4), 4)
    assert [rank.traffic for rank in again.ranks] == [rank.traffic for rank in found[0].plan.ranks]


def test_search_says_why_nothing_is_found() -> None:
    cluster = read_cluster(H100)
    with pytest.raises(ValueError, match="no layout divides 7 ranks and the global batch"):
        search(TINY, 7, cluster, best=1)
    with pytest.raises(ValueError, match=r"fits nowhere: of .* Use more ranks"):
        search(TINY, 4, replace(cluster, memory_gb=1e-4), best=1)


def test_published_rows_are_legal_and_mixtral_is_near() -> None:
    rows = read_rows(ROOT / "configs/published.yaml")
    for row in rows:
        row.configured(ROOT / "configs/models")
    found = compare(rows[0], ROOT / "configs/models", read_cluster(H100))
    assert 0.8 < found.per_node / rows[0].published[0] < 1.2
    documented = re.search(r"438 to 468, bfloat16 \| (\d+) \|", (ROOT / "docs/planning.md").read_text())
    assert documented is not None and float(documented[1]) == pytest.approx(found.here, rel=0.05)


def test_a_copy_a_node_passes_the_network_once() -> None:
    cluster, ranks = read_cluster(H100), tuple(range(16))
    every = collective_seconds(ranks, "all_to_all", 0, 15e9, cluster)
    assert collective_seconds(ranks, "all_to_all", 0, 15e9, cluster, share=0.25) == pytest.approx(every / 4)


def test_the_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert pretrain_moe.main([*TINY, "--dry-run", "--world-size", "8", "--expert-model-parallel-size", "8"]) == 0
    assert "8 ranks = pp 1 x dp 8" in capsys.readouterr().out
    assert pretrain_moe.main([*TINY, "--dry-run", "--world-size", "6", "--expert-model-parallel-size", "4"]) == 2
    assert "--expert-model-parallel-size 4" in capsys.readouterr().err
    png, out = tmp_path / "plan.png", tmp_path / "plan.json"
    shown = ["show", *TINY, "--world-size=4", f"--cluster={H100}", f"--json={out}", f"--png={png}"]
    assert tool.main(shown) == 0
    assert "tokens/s" in capsys.readouterr().out and png.stat().st_size > 10_000
    assert json.loads(out.read_text())["ranks"][0]["memory_bytes"]["parameters"] > 0
    assert tool.main(["show", *TINY, "--world-size=4", "--skew=0.5"]) == 2
    assert "A skew of 0.5 cannot be" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert pretrain_moe.main([*TINY, "--dry-run", "--world-size", "8"]) == 2
    assert "start it without torchrun" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        configured([*TINY, "--tensor-model-parallel-size=3"], 3)
