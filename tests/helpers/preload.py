"""What the fork server loads once for all ranks."""

import megatron_moe.training.step  # noqa: F401
