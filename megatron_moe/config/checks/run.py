"""All rules, run over a configuration before any process group exists; every problem is reported at once."""

from collections.abc import Sequence

from megatron_moe.config.checks import bounds, files, fp8, model, moe, parallel, parts, training
from megatron_moe.config.checks.support import Rule
from megatron_moe.config.errors import sentence
from megatron_moe.config.schema import Config
from megatron_moe.config.settings import Registries, settings, value_of

ALWAYS: tuple[Rule, ...] = (
    *model.RULES,
    *parts.RULES,
    *fp8.RULES,
    *moe.RULES,
    *parallel.RULES,
    *training.RULES,
    *files.RULES,
)
TO_TRAIN: tuple[Rule, ...] = (training.length_is_given, files.data_is_given)


def check(
    config: Config,
    world_size: int,
    registries: Registries,
    extra: Sequence[Rule] = (),
    to_train: bool = True,
) -> list[str]:
    """Everything that is wrong with a configuration on so many ranks.

    Args:
        config: the configuration, with or without its implied values filled in.
        world_size: number of ranks.
        registries: the choices of the names that the top floor offers.
        extra: rules of routing methods, schedules and others that configuration does not know.
        to_train: also ask for what only a real run needs: data and a length.

    Returns:
        Full sentences, each with flag, value, rule and choices; empty if all is well. Rules that relate sizes
        are left out while a size is not positive or a name is unknown, for they would have nothing to say.
    """
    names = unknown_names(config, registries)
    problems = names + bounds.out_of_range(config)
    if names or not bounds.can_be_divided_by(config):
        return problems
    rules = (*ALWAYS, *(TO_TRAIN if to_train else ()), *extra)
    return problems + [problem for rule in rules for problem in rule(config, world_size)]


def unknown_names(config: Config, registries: Registries) -> list[str]:
    """Names that are not among the choices; those of files and flags were found earlier, with their place."""
    found = []
    for name, setting in settings().items():
        problem = setting.choice_problem(value_of(config, name), registries)
        if problem is not None:
            found.append(sentence(f"{setting.flag}: {problem}"))
    return found
