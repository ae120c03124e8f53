# Shared by the scripts of this folder: finds Python, makes .venv, installs into it once.
# To be sourced; leaves the shell in the repository's root with .venv's programs first on PATH.

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$REPO_ROOT"

say() { printf '\n==> %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Prints the first Python >= 3.11; $PYTHON, if set, is the only candidate.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 found (tried ${PYTHON:-python3 python3.11 ... python3.14}). Install one, or name it: PYTHON=/path/to/python bash $0"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

make_venv() {
    if [ -e .venv ]; then
        .venv/bin/python -c 'import pip' 2>/dev/null || die ".venv exists but does not work. Remove it: rm -r $REPO_ROOT/.venv"
        return
    fi
    local python options=()
    python="$(find_python)" || exit 1
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        die "$python cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"
    fi
    # A GPU machine usually has the torch that fits its driver: use it instead of fetching another.
    if has_gpu && "$python" -c 'import torch' 2>/dev/null; then
        options=(--system-site-packages)
    fi
    say "Making .venv with $("$python" --version)"
    "$python" -m venv "${options[@]}" .venv
}

# install_once SET: SET is "cpu" (what training needs) or "dev" (that and what tests need). The pins are for
# machines without a GPU; with one the ranges of pyproject.toml hold, which a torch that is there satisfies.
install_once() {
    local set="$1" stamp wanted
    stamp=".venv/installed-$set"
    wanted="$(cat pyproject.toml requirements/*.txt | cksum) $(has_gpu && echo gpu || echo cpu)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    say "Installing what \"$set\" needs (minutes the first time)"
    local quiet=(-qq --disable-pip-version-check)  # errors alone
    if has_gpu; then
        local extra=""
        if [ "$set" = dev ]; then extra="[dev]"; fi
        .venv/bin/python -m pip install "${quiet[@]}" --editable ".$extra"
    else
        .venv/bin/python -m pip install "${quiet[@]}" -r "requirements/$set.txt"
        .venv/bin/python -m pip install "${quiet[@]}" --no-build-isolation --no-deps --editable .
    fi
    printf '%s\n' "$wanted" >"$stamp"
    if [ "$set" = dev ]; then printf '%s\n' "$wanted" >.venv/installed-cpu; fi
}

# prepare SET: after this, python, torchrun, pytest, ... are those of .venv.
prepare() {
    make_venv
    install_once "$1"
    export PATH="$REPO_ROOT/.venv/bin:$PATH"
}
