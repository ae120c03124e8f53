"""What may change between a checkpoint and the run that resumes from it.

Each setting has one class, by its section unless it is named below:

========== =========================================================================================
must agree what the stored state means, or which tokens come next: another value is another run
warn       the same run under other conditions: rates, coefficients, batch, where the data lies
free       how and where it runs: layout, micro-batch, intervals, folders, logging
========== =========================================================================================
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_moe.config.resolve import from_dict
from megatron_moe.config.schema import Config
from megatron_moe.config.settings import flag_of, settings, value_of


class Agreement(Enum):
    """How a resumed run has to agree with its checkpoint."""

    MUST = "must agree"
    WARN = "warn"
    FREE = "free"


BY_SECTION = {
    "model": Agreement.MUST,
    "moe": Agreement.MUST,
    "parallel": Agreement.FREE,
    "data": Agreement.MUST,
    "optim": Agreement.WARN,
    "training": Agreement.FREE,
    "checkpoint": Agreement.FREE,
    "logging": Agreement.FREE,
}

_EXCEPTIONS = {
    Agreement.MUST: "seed",
    Agreement.WARN: """
        hidden_dropout init_method_std mtp_loss_scaling_factor
        moe_router_init_std moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
        moe_input_jitter_eps moe_eval_capacity_factor moe_router_bias_update_rate
        data_path train_data_path valid_data_path test_data_path tokenizer_model
        global_batch_size rampup_batch_size train_iters train_samples params_dtype
        fp8_format fp8_recipe
        check_for_nan_in_loss_and_grad on_nonfinite on_spike loss_spike_factor grad_norm_spike_factor
        """,
    Agreement.FREE: """
        make_vocab_size_divisible_by kernels moe_token_dispatcher_type moe_dispatch_deduplicate moe_overlap_degree
        moe_overlap_attention moe_expert_backend num_workers
        """,
}
BY_NAME = {name: agreement for agreement, names in _EXCEPTIONS.items() for name in names.split()}

# Settings whose None stands for a value that follows from others: the values are compared.
_EFFECTIVE = {
    "ffn_hidden_size": lambda config: config.model.dense_ffn_size,
    "num_query_groups": lambda config: config.model.query_groups,
    "kv_channels": lambda config: config.model.head_channels,
    "qk_layernorm_epsilon": lambda config: config.model.qk_norm_epsilon,
    "window_attn_skip_freq": lambda config: config.model.windows,
    "moe_ffn_hidden_size": lambda config: config.moe.moe_ffn_hidden_size or config.model.dense_ffn_size,
    "num_experts": lambda config: config.moe.experts_per_layer(config.model.num_layers),
    "moe_num_experts_per_layer": lambda config: config.moe.experts_per_layer(config.model.num_layers),
    "moe_layer_freq": lambda config: config.moe.layer_pattern(config.model.num_layers),
    "moe_first_dense_layers": lambda config: config.moe.layer_pattern(config.model.num_layers),
}


@dataclass(frozen=True)
class Difference:
    """One setting that differs. ``str()`` is ``--num-experts: 8 in the checkpoint, 16 now``."""

    name: str
    saved: Any
    current: Any

    def __str__(self) -> str:
        return f"{flag_of(self.name)}: {_shown(self.saved)} in the checkpoint, {_shown(self.current)} now"


@dataclass(frozen=True)
class Differences:
    """Differences that forbid to resume, and those worth saying."""

    must: tuple[Difference, ...]
    warn: tuple[Difference, ...]

    def must_text(self) -> str:
        """The message of the error, or an empty string."""
        if not self.must:
            return ""
        return (
            "The checkpoint is of another run. Differences that change what it holds or what comes "
            f"next:{_lines(self.must)}\nSet these as in the checkpoint, or begin a new run with --finetune "
            "or another --save."
        )

    def warn_text(self) -> str:
        """The message of the warning, or an empty string."""
        return f"The run goes on with other settings than before:{_lines(self.warn)}" if self.warn else ""


def agreement(name: str) -> Agreement:
    """The class of a setting."""
    return BY_NAME.get(name, BY_SECTION[settings()[name].section])


def compare(saved: Mapping[str, Any], current: Config) -> Differences:
    """What differs between the configuration in a checkpoint and the present one.

    Args:
        saved: what ``to_dict`` gave when the checkpoint was written. Settings that did not exist then count
            as their defaults; settings that no longer exist are left out.
        current: the configuration now. With ``finetune`` only the weights are taken, whose shapes the loading
            itself compares, so that no setting must agree.
    """
    then = from_dict(_still_known(saved))
    found = {Agreement.MUST: [], Agreement.WARN: [], Agreement.FREE: []}
    for name in settings():
        before, now = value_of(then, name), value_of(current, name)
        effective = _EFFECTIVE.get(name)
        if before != now and (effective is None or effective(then) != effective(current)):
            found[agreement(name)].append(Difference(name, before, now))
    must, warn = found[Agreement.MUST], found[Agreement.WARN]
    if current.checkpoint.finetune:
        must, warn = [], must + warn
    return Differences(tuple(must), tuple(warn))


def _still_known(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        section: {name: value for name, value in entries.items() if name in settings()}
        for section, entries in saved.items()
        if section in BY_SECTION
    }


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _lines(differences: Iterable[Difference]) -> str:
    return "".join(f"\n  {difference}" for difference in differences)
