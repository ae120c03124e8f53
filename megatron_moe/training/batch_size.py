"""Global batch size as a pure function of consumed samples: constant, or ramped up in equal steps."""

from megatron_moe.config.schema import TrainingConfig


def batch_size_at(config: TrainingConfig, consumed_samples: int) -> int:
    """Global batch size of the step that begins at so many consumed samples.

    ``--rampup-batch-size start increment samples`` goes from ``start`` to the global batch size in steps of
    ``increment``, each lasting an equal part of ``samples`` (Megatron's historic rule).
    """
    assert config.global_batch_size is not None
    if not config.rampup_batch_size:
        return config.global_batch_size
    start, increment, samples = config.rampup_batch_size
    num_increments = (config.global_batch_size - start) // increment
    if consumed_samples >= samples or num_increments == 0:
        return config.global_batch_size
    return start + consumed_samples * num_increments // samples * increment


def run_length(config: TrainingConfig) -> tuple[int, int]:
    """(iterations, samples) of the whole run, whichever of them is given; never more samples than --train-samples."""
    iterations, consumed = 0, 0
    while True:
        batch_size = batch_size_at(config, consumed)
        if config.train_iters is not None:
            over = iterations == config.train_iters
        else:
            over = consumed + batch_size > (config.train_samples or 0)
        if over:
            return iterations, consumed
        iterations, consumed = iterations + 1, consumed + batch_size
