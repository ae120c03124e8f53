"""Train a Mixture-of-Experts language model.

    python pretrain_moe.py --config configs/quickstart.yaml                       one process
    torchrun --nproc-per-node 8 pretrain_moe.py --config A.yaml --config B.yaml --lr 3e-4

Flags override files, later files override earlier ones. This file holds no logic of its own.
"""

import sys

from megatron_moe.config import ConfigError, Resolved, check, dump, resolve
from megatron_moe.training import launch, registries
from megatron_moe.training.memory import restart_for_cpu

DESCRIPTION = "Train a Mixture-of-Experts language model: any layout, the same curve."


def configuration(argv: list[str]) -> Resolved:
    """Flags and files -> a configuration that has passed every check.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    resolved = resolve(argv, registries.CHOICES, DESCRIPTION)
    actions = resolved.actions
    on_ranks = not (actions.dump_config or actions.print_topology or actions.dry_run)
    to_train = on_ranks and actions.check_cluster is None
    world_size = actions.world_size or launch.world_size(None if on_ranks else resolved.config.parallel)
    resolved, notes = resolved.normalised(world_size)
    problems = check(resolved.config, world_size, registries.CHOICES, registries.RULES, to_train=to_train)
    if problems:
        raise ConfigError(problems)
    if to_train and launch.is_main_rank():
        print(*notes, sep="\n", flush=True, end="\n" if notes else "")
    return resolved


def main(argv: list[str]) -> int:
    """Exit status 0 only when what was asked for was done."""
    try:
        resolved = configuration(argv)
    except ConfigError as error:
        if launch.is_main_rank():
            print(error, file=sys.stderr)
        return launch.EXIT_USER_ERROR
    if resolved.actions.dump_config:
        print(dump(resolved.config, resolved.provenance), end="")
        return 0
    if resolved.actions.print_topology:
        from megatron_moe.parallel.layout import MeshSizes, describe

        world_size = resolved.actions.world_size or launch.world_size(resolved.config.parallel)
        print(describe(MeshSizes.of(resolved.config.parallel, world_size)))
        return 0
    if resolved.actions.dry_run:
        from megatron_moe.plan.main import show

        return show(resolved.config, resolved.actions.world_size or launch.world_size(resolved.config.parallel))
    if resolved.actions.check_cluster is not None:
        from megatron_moe.plan.measured import check_cluster

        return check_cluster(resolved.config, resolved.actions.check_cluster)
    from megatron_moe.training.main import train

    return train(resolved)


if __name__ == "__main__":
    restart_for_cpu()
    sys.exit(main(sys.argv[1:]))
