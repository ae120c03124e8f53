"""Rules about the batch, the length of the run, its learning rate and what is recomputed."""

from collections.abc import Iterator

from megatron_moe.config.checks.support import (
    Rule,
    data_parallel_size,
    divisors,
    multiples_near,
    one_of,
    typed,
)
from megatron_moe.config.schema import Config
from megatron_moe.config.settings import settings

_MIN_OFFLOADED = settings()["min_offloaded_tensor_size"].default
RECOMPUTABLE = ("core_attn", "mlp", "moe", "shared_experts", "moe_act", "layernorm", "mla_up_proj")


def micro_batches_fill_global_batch(config: Config, world_size: int) -> Iterator[str]:
    """A global batch is the same whole number of micro-batches on every data-parallel rank."""
    dp = data_parallel_size(config, world_size)
    size, micro = config.training.global_batch_size, config.training.micro_batch_size
    if dp is None or size is None or size % (micro * dp) == 0:
        return
    micros = f", or a micro-batch of {one_of(divisors(size // dp))}" if size % dp == 0 else ""
    yield (
        f"{typed(config, 'global_batch_size')} is not a multiple of {typed(config, 'micro_batch_size')} x "
        f"data-parallel size {dp}; use a global batch of {multiples_near(size, micro * dp)}{micros}."
    )


def elastic_runs_have_a_global_batch(config: Config, world_size: int) -> Iterator[str]:
    """What stays when the number of ranks changes must be said."""
    if config.parallel.elastic and config.training.global_batch_size is None:
        yield "--elastic needs the batch that stays when the number of ranks changes; give --global-batch-size."


def rampup_reaches_global_batch(config: Config, world_size: int) -> Iterator[str]:
    """The batch grows from its start to the global batch by whole increments of whole micro-batches."""
    rampup, size = config.training.rampup_batch_size, config.training.global_batch_size
    if not rampup:
        return
    flag = typed(config, "rampup_batch_size")
    if len(rampup) != 3 or min(rampup[:2]) < 1:
        yield f"{flag} needs three numbers: first batch and increment, both at least 1, and samples."
        return
    start, increment, _ = rampup
    if size is None:
        yield f"{flag} needs --global-batch-size, the size at which it ends."
        return
    if start > size or (size - start) % increment:
        yield (
            f"{flag} does not lead from {start} to {typed(config, 'global_batch_size')} in steps of "
            f"{increment}; use an increment of "
            f"{one_of(divisors(size - start)) if start < size else 'any size from a smaller start'}."
        )
    dp = data_parallel_size(config, world_size)
    step = config.training.micro_batch_size * dp if dp else 1
    for what, value in (("start", start), ("increment", increment)):
        if value % step:
            yield (
                f"{flag}: the {what} {value} is not a multiple of {typed(config, 'micro_batch_size')} x "
                f"data-parallel size {dp}; use {multiples_near(value, step)}."
            )


def length_is_given_once(config: Config, world_size: int) -> Iterator[str]:
    """The run is so many iterations or so many samples long."""
    iters, samples = config.training.train_iters, config.training.train_samples
    if iters is not None and samples is not None:
        yield (
            f"{typed(config, 'train_iters')} and {typed(config, 'train_samples')} both set the length of the "
            "run; give one of them."
        )


def decay_and_warmup_are_given_once(config: Config, world_size: int) -> Iterator[str]:
    """Warm-up, decay and final decay may be given in several units, each in one of them."""
    optim = config.optim
    for what, names in (
        ("the warm-up", ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")),
        ("the decay", ("lr_decay_iters", "lr_decay_samples")),
        ("the final decay", ("lr_wsd_decay_iters", "lr_wsd_decay_samples")),
    ):
        given = [typed(config, name) for name in names if getattr(optim, name)]
        if len(given) > 1:
            yield f"{' and '.join(given)} all set the length of {what}; give one of them."
    if optim.lr_decay_style == "WSD" and not (optim.lr_wsd_decay_iters or optim.lr_wsd_decay_samples):
        yield (
            "--lr-decay-style WSD needs the length of its final decay; give --lr-wsd-decay-iters or "
            "--lr-wsd-decay-samples."
        )


def warmup_ends_before_decay(config: Config, world_size: int) -> Iterator[str]:
    """Warm-up and final decay fit into the decay, where all are in the same unit."""
    optim, training = config.optim, config.training
    units = (
        (
            "iters",
            optim.lr_warmup_iters,
            optim.lr_wsd_decay_iters,
            optim.lr_decay_iters,
            training.train_iters,
        ),
        (
            "samples",
            optim.lr_warmup_samples,
            optim.lr_wsd_decay_samples,
            optim.lr_decay_samples,
            training.train_samples,
        ),
    )
    for unit, warmup, final, decay, length in units:
        end, of_what = (decay, f"--lr-decay-{unit}") if decay is not None else (length, f"--train-{unit}")
        final = final if optim.lr_decay_style == "WSD" else None
        if end is None or (warmup or 0) + (final or 0) <= end:
            continue
        parts = [f"--lr-warmup-{unit} {warmup}"] if warmup else []
        parts += [f"--lr-wsd-decay-{unit} {final}"] if final else []
        yield (f"{' and '.join(parts)} do not fit into {of_what} {end}; together they may take at most {end} {unit}.")


def learning_rates_are_ordered(config: Config, world_size: int) -> Iterator[str]:
    """The learning rate begins and ends at or below its peak."""
    optim = config.optim
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(optim, name) > optim.lr:
            yield f"{typed(config, name)} is above the peak {typed(config, 'lr')}; use at most {optim.lr}."


def recomputation_is_known(config: Config, world_size: int) -> Iterator[str]:
    """Selective recomputation names modules that exist."""
    training = config.training
    if training.recompute_granularity != "selective":
        return
    unknown = [module for module in training.recompute_modules if module not in RECOMPUTABLE]
    if unknown or not training.recompute_modules:
        yield (
            f"{typed(config, 'recompute_modules')} is not a list of modules to recompute; "
            f"name one or more of {', '.join(RECOMPUTABLE)}."
        )
    if "mla_up_proj" in training.recompute_modules and not config.model.multi_latent_attention:
        yield (
            f"{typed(config, 'recompute_modules')} names mla_up_proj, which is there with --multi-latent-attention "
            "only; add that, or leave it out."
        )


def offloaded_layers_exist(config: Config, world_size: int) -> Iterator[str]:
    """No more layers are offloaded than there are, and tensors are moved only if there are any."""
    training, flag = config.training, typed(config, "cpu_offloading_num_layers")
    if training.cpu_offloading_num_layers > config.model.num_layers:
        yield f"{flag} is more than {typed(config, 'num_layers')}; use at most {config.model.num_layers}."
    if not training.cpu_offloading_num_layers and training.min_offloaded_tensor_size != _MIN_OFFLOADED:
        yield (
            f"{typed(config, 'min_offloaded_tensor_size')} is read with --cpu-offloading-num-layers only; add that, or "
            "leave it out."
        )


def offloading_meets_no_recomputation(config: Config, world_size: int) -> Iterator[str]:
    """What is computed again is not kept, and what a recomputed region keeps is no saved tensor that could move."""
    training = config.training
    if training.cpu_offloading_num_layers and training.recompute_granularity is not None:
        yield (
            f"{typed(config, 'cpu_offloading_num_layers')} moves saved activations to the host, and "
            f"{typed(config, 'recompute_granularity')} does not save them; leave one of them out."
        )


RULES: tuple[Rule, ...] = (
    micro_batches_fill_global_batch,
    elastic_runs_have_a_global_batch,
    rampup_reaches_global_batch,
    length_is_given_once,
    decay_and_warmup_are_given_once,
    warmup_ends_before_decay,
    learning_rates_are_ordered,
    recomputation_is_known,
    offloaded_layers_exist,
    offloading_meets_no_recomputation,
)


def length_is_given(config: Config, world_size: int) -> Iterator[str]:
    """A run that trains ends somewhere."""
    if config.training.train_iters is None and config.training.train_samples is None:
        yield "The length of the run is missing; give --train-iters or --train-samples."
