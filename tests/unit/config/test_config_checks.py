"""Every rule with a configuration that breaks it and one that keeps it: the cases are in rules.yaml."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_moe.config import Config, check, resolve
from megatron_moe.config.checks import bounds
from megatron_moe.config.checks.run import ALWAYS, TO_TRAIN
from megatron_moe.config.settings import Registries, assemble, settings

CASES = yaml.safe_load((Path(__file__).parent / "rules.yaml").read_text())
GOOD = {"train_iters": 10, "mock_data": True}


@pytest.mark.parametrize("case", CASES, ids=[f"{case['rule']}-{i}" for i, case in enumerate(CASES)])
def test_rule(case: dict[str, Any], registries: Registries) -> None:
    def found(flags: str) -> list[str]:
        argv = ["--train-iters", "10", "--mock-data", *flags.split()]
        return check(resolve(argv, registries).config, case.get("ranks", 1), registries)

    problems = found(case["bad"])
    assert len([problem for problem in problems if case["says"] in problem]) == 1, problems
    for problem in problems:
        assert re.search(r"--[a-z]", problem) and problem[-1] in ".?", problem
    assert found(case["good"]) == []


def test_every_rule_has_a_case() -> None:
    assert {rule.__name__ for rule in (*ALWAYS, *TO_TRAIN)} <= {case["rule"] for case in CASES}


def test_unknown_names_are_found_in_configurations_made_by_code(registries: Registries) -> None:
    (problem,) = check(assemble({**GOOD, "moe_router": "second_othr"}), 1, registries)
    assert problem.startswith("--moe-router: 'second_othr' is not one of first_other, second_other,")
    assert problem.endswith("; did you mean second_other?")


def test_every_number_has_a_range() -> None:
    numbers = {name for name, setting in settings().items() if setting.base in (int, float)}
    assert numbers == set(bounds.RANGES), "give new settings a range in checks/bounds.py"


def test_defaults_are_well_and_lack_only_data_and_length(registries: Registries) -> None:
    assert check(Config(), 1, registries, to_train=False) == []
    assert len(check(Config(), 1, registries)) == 2


def test_all_problems_at_once_with_the_rules_of_others(registries: Registries) -> None:
    def schedule(config: Config, world_size: int) -> Iterator[str]:
        yield f"--pipeline-schedule {config.parallel.pipeline_schedule} wants more than {world_size} ranks."

    values = {**GOOD, "weight_decay": -1.0, "hidden_size": 100, "split": "x", "train_samples": 3}
    found = check(assemble(values), 1, registries, extra=[schedule])
    starts = ["--weight-decay", "--num-attention-heads", "--train-iters", "--split", "--pipeline-schedule"]
    assert [problem.split(" ")[0] for problem in found] == starts


def test_sizes_out_of_range_stop_the_rules_that_divide_by_them(registries: Registries) -> None:
    found = check(assemble({**GOOD, "num_attention_heads": 0, "micro_batch_size": 0, "lr": -1.0}), 1, registries)
    assert len(found) == 3 and all("out of range" in problem for problem in found)
