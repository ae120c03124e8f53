#!/usr/bin/env bash
# Installs what the tests need into .venv and runs every check: lint, format, types, floors, tests.
# Arguments go to pytest: bash launch/test.sh tests/unit -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare dev
# Ranks are processes: one thread each, or they fight over the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

failed=()
check() {
    say "$*"
    "$@" || failed+=("$1")
}

check ruff check
check ruff format --check
check pyright
check lint-imports --no-logo
check python -m pytest "$@"

if [ ${#failed[@]} -gt 0 ]; then
    printf '\nFailed: %s\n' "${failed[*]}" >&2
    exit 1
fi
