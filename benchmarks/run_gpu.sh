#!/usr/bin/env bash
# Everything that wants one GPU, in under ten minutes: the tests of the kernels compiled, then benchmarks/bench_gpu.py.
# Arguments go to the benchmark. Tables go to the terminal, figures to $OUT (default: benchmarks/gpu.json).
#   bash benchmarks/run_gpu.sh
#   bash benchmarks/run_gpu.sh --parts kernels products
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/common.sh"

has_gpu || die "no GPU is found (nvidia-smi -L). Without one: TRITON_INTERPRET=1 python benchmarks/bench_gpu.py --device cpu --tiny"
prepare dev
say "Kernels against their references, compiled"
timeout 180 python -m pytest -q tests/unit/kernels || die "a kernel differs from its reference: its speed means nothing"
say "Benchmark"
timeout 400 python benchmarks/bench_gpu.py --json "${OUT:-benchmarks/gpu.json}" "$@"
