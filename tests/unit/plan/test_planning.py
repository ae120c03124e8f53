"""Plans of published layouts, the arithmetic of clusters and time, and what cannot be planned."""

import json
from pathlib import Path

import pytest
import yaml

import pretrain_moe
from megatron_moe.config import ConfigError
from megatron_moe.plan.cluster import read_cluster
from megatron_moe.plan.configure import configured
from megatron_moe.plan.dry_run import Plan, dry_run
from megatron_moe.plan.estimate import collective_seconds, estimate
from megatron_moe.plan.main import memory_problem
from megatron_moe.plan.search import as_yaml, search
from tools import plan as tool

ROOT = Path(__file__).parents[3]
H100 = ROOT / "configs/clusters/h100-sxm.yaml"
PRESETS = {  # layout: model, world, parameters of the model in all
    "mixtral-8x7b-64": ("mixtral-8x7b", 64, 46_702_792_704),
    "mixtral-8x22b-128": ("mixtral-8x22b", 128, 140_630_071_296),
    "qwen3-30b-16": ("qwen3-30b-a3b", 16, 30_532_122_624),
    "qwen3-235b-256": ("qwen3-235b-a22b", 256, 235_093_634_560),
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
        assert sum(plan.memory(pp_rank).values()) < 150e9


def test_deepseek_v3_on_2048_ranks() -> None:
    """Parameters and FLOPs per token of the report, without its module of multi-token prediction."""
    without = ["--mtp-num-layers", "none", "--mtp-loss-scaling-factor", "0.1", "--pipeline-schedule", "1f1b"]
    plan = _preset("deepseek-v3-2048", "deepseek-v3", 2048, *without)
    assert plan.num_parameters == 671_026_419_200
    assert plan.model_flops / plan.tokens == pytest.approx(250.5e9, rel=0.01)


@pytest.mark.parametrize("num", [1, 2, 4, 8])
def test_small_layouts_are_planned(num: int) -> None:
    files = [f"--config={ROOT}/configs/quickstart.yaml", f"--config={ROOT}/configs/parallel/gpus-{num}.yaml"]
    plan = dry_run(configured(files, num), num)
    assert plan.num_parameters == 9_214_464


def test_memory_of_a_device_stays_when_experts_grow_with_devices() -> None:
    """GShard's claim: 128 to 2,048 experts, one a device."""
    totals = []
    for num in (128, 512, 2048):
        argv = ["--num-layers=2", "--hidden-size=64", "--vocab-size=512", "--seq-length=256", "--params-dtype=bfloat16"]
        argv += [f"--num-experts={num}", f"--expert-model-parallel-size={num}", "--moe-ffn-hidden-size=512"]
        argv += ["--moe-router=gshard_top2", "--moe-expert-capacity-factor=2"]
        plan = dry_run(configured(argv, num), num)
        state = plan.ranks[0].state
        router = num * 64 * 4 * 4  # the one weight that grows: weights, gradients and two moments, in float32
        totals.append(state.total - router)
    assert totals[0] == totals[1] == totals[2]


def test_skew_shows_in_memory_and_traffic() -> None:
    config = configured([*TINY, "--expert-model-parallel-size=4"], 4)
    balanced, skewed = dry_run(config, 4), dry_run(config, 4, skew=2.0)
    assert skewed.memory(0)["activations"] > balanced.memory(0)["activations"]
    assert skewed.ranks[0].state == balanced.ranks[0].state


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


def test_what_does_not_fit_says_what_would_cut_it() -> None:
    cluster = read_cluster(H100)
    plan = dry_run(configured([*TINY, "--expert-model-parallel-size=2"], 2), 2)
    assert memory_problem(plan, cluster) is None
    small = type(cluster)(**{**vars(cluster), "memory_gb": 0.001})
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
    found = search([*TINY], 4, read_cluster(H100), best=3)
    assert [f.time.step for f in found] == sorted(f.time.step for f in found)
    path = tmp_path / "found.yaml"
    path.write_text(as_yaml(found[0], read_cluster(H100)))
    assert dry_run(configured([*TINY, f"--config={path}"], 4), 4).traffic_bytes == found[0].plan.traffic_bytes


def test_the_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_moe.main([*TINY, "--dry-run", "--world-size", "8", "--expert-model-parallel-size", "8"]) == 0
    assert "8 ranks = pp 1 x dp 8" in capsys.readouterr().out
    assert pretrain_moe.main([*TINY, "--dry-run", "--world-size", "6", "--expert-model-parallel-size", "4"]) == 2
    assert "--expert-model-parallel-size 4" in capsys.readouterr().err
    refused = ["--moe-router", "expert_choice", "--moe-allow-acausal-routing", "--moe-expert-capacity-factor", "1"]
    refused += ["--moe-router-load-balancing-type", "none", "--moe-aux-loss-coeff", "none"]
    assert pretrain_moe.main([*TINY, "--dry-run", *refused]) == 2
    assert "--dry-run cannot plan --moe-router expert_choice" in capsys.readouterr().err
    png, out = tmp_path / "plan.png", tmp_path / "plan.json"
    shown = ["show", *TINY, "--world-size=4", f"--cluster={H100}", f"--json={out}", f"--png={png}"]
    assert tool.main(shown) == 0
    assert "tokens/s" in capsys.readouterr().out and png.stat().st_size > 10_000
    assert json.loads(out.read_text())["ranks"][0]["memory_bytes"]["parameters"] > 0
    with pytest.raises(ConfigError):
        configured([*TINY, "--tensor-model-parallel-size=3"], 3)
