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
    """Peak of this rank's device: a table of GPUs; on a CPU what matrix products reach in a quarter second."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((peak for part, peak in GPU_PEAK_TFLOPS.items() if part in name), None)
    return matmul_tflops(device, dtype, 0.25)


def matmul_tflops(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """TFLOP/s of the best of some square matrix products, for about so many seconds."""
    cuda = device.type == "cuda"
    size = 8192 if cuda else 512
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out, best, deadline = torch.mm(a, b), 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < deadline:
        if cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        if cuda:
            torch.cuda.synchronize(device)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start) / 1e12)
    return best
