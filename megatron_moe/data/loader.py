"""Reads the micro-batches of each step ahead of time, in threads.

    plan of step t+1, t+2:   futures  f f f f | f f f f      <- filled by num_workers threads
    step t:                  results, in order               -> the training loop

Threads are enough: reading is copying from a memory map, and NumPy lets go of the interpreter while it
copies.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_moe.data.batch import Batch, CollateOptions, collate
from megatron_moe.data.blend import SampleSource
from megatron_moe.data.sampler import micro_batches

_STEPS_AHEAD = 2


class StepLoader:
    """Yields, step by step, the micro-batches of one data rank.

    Args:
        source: gives the samples.
        options: how micro-batches are made.
        batch_size_at: global batch size of the step that begins at so many consumed samples.
        micro_batch_size: sequences per micro-batch, B.
        dp_rank, dp_size: this rank's place among the data ranks.
        num_workers: reading threads; 0 reads in line.
    """

    def __init__(
        self,
        source: SampleSource,
        options: CollateOptions,
        *,
        batch_size_at: Callable[[int], int],
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int,
    ) -> None:
        if num_workers < 0:
            raise ValueError(f"--num-workers {num_workers} should be 0 or more.")
        self._source = source
        self._options = options
        self._batch_size_at = batch_size_at
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._num_workers = num_workers

    def steps(self, consumed_samples: int) -> Generator[tuple[Batch, ...], None, None]:
        """The steps after ``consumed_samples``, without end; close the iterator to stop its threads.

        An error of a reading thread is raised here, at the step it belongs to, with a note that says which
        samples were being read.
        """
        plans = self._plans(consumed_samples)
        return self._ahead(plans) if self._num_workers else self._in_line(plans)

    def _in_line(self, plans: Iterator[tuple[range, ...]]) -> Generator[tuple[Batch, ...], None, None]:
        for plan in plans:
            yield tuple(self._read(sample_ids) for sample_ids in plan)

    def _ahead(self, plans: Iterator[tuple[range, ...]]) -> Generator[tuple[Batch, ...], None, None]:
        executor = ThreadPoolExecutor(self._num_workers, thread_name_prefix="data")
        steps: deque[list[Future[Batch]]] = deque()
        try:
            for plan in plans:
                steps.append([executor.submit(self._read, sample_ids) for sample_ids in plan])
                if len(steps) > _STEPS_AHEAD:
                    yield tuple(future.result() for future in steps.popleft())
        finally:
            executor.shutdown(cancel_futures=True)

    def _plans(self, consumed_samples: int) -> Iterator[tuple[range, ...]]:
        while True:
            batch_size = self._batch_size_at(consumed_samples)
            yield micro_batches(consumed_samples, batch_size, self._micro_batch_size, self._dp_rank, self._dp_size)
            consumed_samples += batch_size

    def _read(self, sample_ids: range) -> Batch:
        try:
            return collate([self._source[i] for i in sample_ids], sample_ids, self._options)
        except Exception as error:
            error.add_note(f"while reading samples {sample_ids[0]}..{sample_ids[-1]} of {self._source.name}")
            raise
