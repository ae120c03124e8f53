"""AdamW over the pieces this rank owns, with master weights in float32 (float64) where the model's are lower."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_moe.config.schema import OptimizerConfig
from megatron_moe.kernels.selection import functions
from megatron_moe.parallel.buckets import Piece


class AdamW:
    """AdamW over flat views, by torch or another library (``kernels/adam*.py``); norms and biases do not decay."""

    def __init__(self, pieces: Sequence[Piece], config: OptimizerConfig, kernels: str = "torch") -> None:
        self.pieces = list(pieces)
        self.masters: list[Tensor] = []
        for piece in self.pieces:
            shares_type = piece.weight.dtype == piece.grad.dtype
            self.masters.append(piece.weight if shares_type else piece.weight.to(piece.grad.dtype))
        decayed = [m for m, p in zip(self.masters, self.pieces, strict=True) if p.parameter.spec.decay]
        others = [m for m, p in zip(self.masters, self.pieces, strict=True) if not p.parameter.spec.decay]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adamw = functions("adam", kernels).make_adamw(
            [g for g in groups if g["params"]] or [{"params": [torch.zeros(0)]}],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
        )
        self._create_state()

    def _create_state(self) -> None:
        """Moments exist from the start, so that a checkpoint of iteration 0 and its loading need no special case."""
        for master in self.masters:
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def step(self, learning_rate: float) -> None:
        """One update of the masters, copied to the model's weights."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        for master, piece in zip(self.masters, self.pieces, strict=True):
            master.grad = piece.grad
        self._adamw.step()
        for master, piece in zip(self.masters, self.pieces, strict=True):
            master.grad = None
            if master.dtype != piece.weight.dtype:
                piece.weight.copy_(master)

    def tensors(self, piece_index: int) -> dict[str, Tensor]:
        """State of one piece by name: ``master``, ``exp_avg``, ``exp_avg_sq``, each [piece]."""
        master = self.masters[piece_index]
        state = self._adamw.state[master]
        return {"master": master, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

    def masters_from_weights(self) -> None:
        """After loading weights alone: master weights start from them."""
        for master, piece in zip(self.masters, self.pieces, strict=True):
            master.copy_(piece.weight)

    @property
    def num_steps(self) -> int:
        """Updates done; Adam's bias correction counts them."""
        return int(self._adamw.state[self.masters[0]]["step"]) if self.masters else 0

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        for master in self.masters:
            self._adamw.state[master]["step"].fill_(value)
        for group in self._adamw.param_groups:
            group.pop("step", None)  # Apex counts by group, and begins with the state's count
