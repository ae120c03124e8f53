"""Model FLOP utilisation: model FLOPs per second over what the devices could do at their peak."""

import time

import torch

# Dense bfloat16 peak of one device in TFLOP/s, from the vendors' data sheets; matched by part of the name.
GPU_PEAK_TFLOPS = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


def device_peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak of this rank's device: a table of GPUs; on a CPU the best of a few matrix products, a quarter second."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((peak for part, peak in GPU_PEAK_TFLOPS.items() if part in name), None)
    size = 512
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    out, best, deadline = torch.empty_like(a), 0.0, time.perf_counter() + 0.25
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start) / 1e12)
    return best
