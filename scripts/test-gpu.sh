#!/usr/bin/env bash
# The GPU suite, with the packages of python3 (or PYTHON) as they are. Arguments go to pytest.
# Tests of 2 and 4 ranks start mpirun themselves, each with a time limit.
PYTHON=${PYTHON:-python3}
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

[ "$(count_gpus)" -gt 0 ] || fail "no GPU is visible (nvidia-smi -L, CUDA_VISIBLE_DEVICES)"
prepare gpu ""
limit_threads 4
"$python" -m pytest -m gpu -rfEsxX --durations=5 "$@"
