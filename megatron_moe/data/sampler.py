"""Which samples of the run a rank reads in a step: a pure function of the number of consumed samples.

Samples of a step are consecutive; micro-batch m is a block of them, shared out among D data ranks::

    consumed                                                              consumed + global batch
    | m=0: rank 0 | m=0: rank 1 | m=1: rank 0 | m=1: rank 1 | ...         |        each box: micro_batch_size

So the set of samples of a step depends neither on D nor on the micro-batch size, and the only state of the
data is ``consumed_samples``.
"""


def micro_batches(
    consumed_samples: int, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> tuple[range, ...]:
    """What data rank ``dp_rank`` of ``dp_size`` reads in the next step: one range per micro-batch.

    Raises ValueError if the global batch is not a multiple of ``micro_batch_size * dp_size``.
    """
    assert 0 <= dp_rank < dp_size and consumed_samples >= 0
    block = micro_batch_size * dp_size
    if global_batch_size <= 0 or global_batch_size % block:
        down, up = global_batch_size // block * block, (global_batch_size // block + 1) * block
        raise ValueError(
            f"--global-batch-size {global_batch_size} is not a multiple of micro-batch size "
            f"{micro_batch_size} x data-parallel size {dp_size} = {block}. Use "
            f"{f'{down} or {up}' if down > 0 else up}."
        )
    starts = range(consumed_samples + dp_rank * micro_batch_size, consumed_samples + global_batch_size, block)
    return tuple(range(start, start + micro_batch_size) for start in starts)
