"""The run around the training: checkpoints and logging."""

from dataclasses import dataclass

from megatron_moe.config.fields import flag


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: where they go and come from."""

    save: str | None = flag(None, "Folder for checkpoints, metrics and the configuration.")
    load: str | None = flag(
        None, "Folder to start from, unless --save holds a checkpoint, from which the run then goes on."
    )
    save_interval: int | None = flag(None, "Iterations between checkpoints. Default: at the end only.")
    save_interval_minutes: float | None = flag(None, "Minutes between checkpoints, besides --save-interval.")
    async_save: bool = flag(
        False, "Write checkpoints in the background: training waits only while its state is copied to host memory."
    )
    keep_last: int | None = flag(
        None, "Keep only so many newest checkpoints. Default: all; with --save-retain-interval, one."
    )
    save_retain_interval: int | None = flag(
        None,
        "Remove checkpoints but those whose iteration is a multiple of this, and the newest (--keep-last).",
        aliases=("--keep-every",),
    )
    auto_recover: bool = flag(
        False, "If the checkpoint to resume from is damaged, say so and take the newest one that is whole."
    )
    ckpt_step: int | None = flag(None, "Load this iteration instead of the latest.")
    finetune: bool = flag(False, "Load the weights alone and start at iteration 0.")


@dataclass(frozen=True)
class LoggingConfig:
    """Logging: progress line, metrics file and the services behind it."""

    log_interval: int = flag(1, "Iterations between progress lines and records.")
    tensorboard_dir: str | None = flag(None, "Write TensorBoard events here.")
    wandb_project: str | None = flag(None, "Weights & Biases project; WANDB_MODE=offline works.")
    wandb_exp_name: str | None = flag(None, "Weights & Biases run name.")
    wandb_save_dir: str | None = flag(None, "Folder of Weights & Biases' files. Default: below --save.")
    log_straggler: bool = flag(
        False, "Report at each log interval which ranks the others wait for: busy and waiting seconds of every rank."
    )
    profile_schedule: int | None = flag(
        None, "Record in this iteration what each pipeline rank does when, into schedule.jsonl below --save."
    )
    peak_tflops: float | None = flag(
        None, "Peak TFLOP/s of one device, for MFU. Default: a table of GPUs; measured once on a CPU."
    )
