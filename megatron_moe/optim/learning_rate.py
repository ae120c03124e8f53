"""Learning rate as a pure function of progress; progress is counted in samples, so batch ramp-up is covered."""

import math
from dataclasses import dataclass

from megatron_moe.config.schema import OptimizerConfig


@dataclass(frozen=True)
class LearningRate:
    """A schedule with all lengths in samples.

    Warm-up: linear from ``init`` to ``peak``. Then by style (``x`` runs from 0 to 1 over the decay):
    constant; linear ``1-x``; cosine ``(1+cos(pi x))/2``; inverse square root ``sqrt(warmup/n)``;
    WSD: constant, then over the last ``wsd`` samples linear, cosine or exponential ``2 * 0.5**x - 1``.
    """

    peak: float
    minimum: float
    init: float
    style: str
    warmup: float
    decay: float
    wsd: float
    wsd_style: str

    @staticmethod
    def of(config: OptimizerConfig, total_samples: int, samples_per_iteration: int) -> "LearningRate":
        """The schedule of a run of ``total_samples``, iterations counted at the full global batch size."""
        decay = float(total_samples)
        if config.lr_decay_samples is not None:
            decay = float(config.lr_decay_samples)
        elif config.lr_decay_iters is not None:
            decay = float(config.lr_decay_iters * samples_per_iteration)
        if config.lr_warmup_fraction is not None:
            warmup = config.lr_warmup_fraction * decay
        else:
            warmup = float(config.lr_warmup_samples or config.lr_warmup_iters * samples_per_iteration)
        wsd = float(config.lr_wsd_decay_samples or (config.lr_wsd_decay_iters or 0) * samples_per_iteration)
        return LearningRate(
            peak=config.lr,
            minimum=config.min_lr,
            init=config.lr_warmup_init,
            style=config.lr_decay_style,
            warmup=warmup,
            decay=decay,
            wsd=wsd,
            wsd_style=config.lr_wsd_decay_style,
        )

    def at(self, samples: int) -> float:
        """Rate of the step that ends at ``samples`` consumed samples."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.init + (self.peak - self.init) * samples / self.warmup
        if self.style == "constant":
            return self.peak
        if samples > self.decay:
            return self.minimum
        if self.style == "inverse-square-root":
            return max(self.minimum, self.peak * math.sqrt(max(self.warmup, 1.0) / samples))
        if self.style == "WSD":
            start = self.decay - self.wsd
            if samples <= start:
                return self.peak
            share = _shape(self.wsd_style, (samples - start) / self.wsd)
        else:
            share = _shape(self.style, (samples - self.warmup) / max(self.decay - self.warmup, 1.0))
        return self.minimum + (self.peak - self.minimum) * share


def _shape(style: str, x: float) -> float:
    """Share of the peak that is left at progress x of the decay."""
    if style == "linear":
        return 1.0 - x
    if style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * x))
    assert style == "exponential", style
    return 2.0 * 0.5**x - 1.0
