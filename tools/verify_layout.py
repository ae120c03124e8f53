"""Check that a layout trains like one process: your configuration, scaled down, in float64 on CPU ranks.

    python tools/verify_layout.py --config configs/quickstart.yaml --layout "tp=2,pp=2,ep=2"
    python tools/verify_layout.py --config mine.yaml --layout "cp=2,zero=3,schedule=zb-v,pp=2" --qk-layernorm

Takes every flag of pretrain_moe.py. Sizes are cut down, features are kept; what --layout names comes before flags and
files: tp, cp, pp, dp (default: as little as the experts allow), ep, etp, vpp, mbs, sp (0 or 1), schedule,
zero (0 to 3), cp_comm, dispatcher.

Three optimizer steps of the same global batches run under the layout and in one process. Prints "equal" and exits with
0, or names the first parameter in the model's order whose gradient differs, by how much, and exits with 1. A
configuration or layout that cannot be is an error: exit status 2.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from megatron_moe.config import ConfigError, normalise, resolve
from megatron_moe.config.schema import Config, ParallelConfig
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.training import registries
from megatron_moe.training.local_ranks import RankFailure, RankPool
from megatron_moe.training.parity import TOLERANCE, Comparison, Prepare, compare, trace
from megatron_moe.training.shrink import read_layout, shrink, smallest_world, vary

MAX_RANKS = 64


def scaled_down(argv: Sequence[str], layout: str) -> tuple[Config, int]:
    """(the small configuration under the layout, its world size).

    Raises:
        ConfigError, ValueError: what is wrong with the configuration or the layout.
    """
    values, sizes = read_layout(layout)
    config = vary(resolve(argv, registries.CHOICES).config, **values)
    world_size = smallest_world(config)
    if "dp" in sizes:
        world_size = sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"]
    if world_size > MAX_RANKS:
        raise ValueError(
            f'--layout "{layout}" takes {world_size} ranks, more than the {MAX_RANKS} that are started here.'
        )
    return shrink(normalise(config, world_size)[0], world_size), world_size


def verify(config: Config, world_size: int, pool: RankPool, prepare: Prepare | None = None) -> Comparison:
    """Run a configuration on ranks of a pool, and in one process without what a layout adds to it, and compare.

    Args:
        prepare: holds on the ranks while they run; for tests of this check.

    Raises:
        RankFailure: a rank raised, died or hung.
    """
    assert config.training.global_batch_size is not None
    alone = vary(
        replace(config, parallel=ParallelConfig()),
        micro_batch_size=config.training.global_batch_size,
        moe_token_dispatcher_type="alltoall",
        moe_dispatch_deduplicate=False,
        moe_overlap_degree=1,
        moe_overlap_attention=False,
        recompute_granularity=None,
    )
    return compare(trace(config, world_size, pool, prepare=prepare), trace(alone, 1, pool))


def report(comparison: Comparison) -> str:
    """The verdict in words."""
    if not comparison.differences:
        return f"equal: largest relative difference {comparison.largest:.1e} (tolerance {TOLERANCE:.0e})"
    lines = [f"differs in {len(comparison.differences)} respects"]
    parameters = comparison.parameters
    if parameters:
        lines.append(f"first parameter in the model's order: {parameters[0]}")
    if len(parameters) > 1:
        lines.append(f"last of {len(parameters)} such parameters: {parameters[-1]}")
    lines += ["in the order of the run:", *(f"    {difference}" for difference in comparison.differences[:10])]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: equal, 1: not, 2: cannot be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layout", default="", help='e.g. "tp=2,pp=2,ep=2"; default: the sizes of the configuration')
    arguments, rest = parser.parse_known_args(argv)
    try:
        config, world_size = scaled_down(rest, arguments.layout)
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    model, sizes = config.model, MeshSizes.of(config.parallel, world_size)
    mesh = ", ".join(f"{name} {getattr(sizes, name)}" for name in ("tp", "cp", "pp", "dp", "ep", "etp"))
    print(
        f"{world_size} ranks: {mesh}; "
        f"{model.num_layers} layers, hidden size {model.hidden_size}, {config.moe.num_experts or 'no'} experts, "
        f"{config.data.seq_length} tokens, batch {config.training.global_batch_size}, float64",
        flush=True,
    )
    pool = RankPool(world_size)
    try:
        comparison = verify(config, world_size, pool)
    except RankFailure as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        pool.stop()
    print(report(comparison))
    return int(bool(comparison.differences))


if __name__ == "__main__":
    sys.exit(main())
