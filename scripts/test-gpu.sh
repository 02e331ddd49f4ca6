#!/usr/bin/env bash
# The GPU suite, with the packages of python3 (or PYTHON) as they are. Arguments go to pytest.
# Tests of 2 and 4 ranks start mpirun themselves, each with a time limit.
#
#   --memcheck   first argument: everything under NVIDIA's compute-sanitizer, on memory blocks of
#                exactly the bytes asked for; an access outside one fails the run. Takes far longer.
PYTHON=${PYTHON:-python3}
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

[ "$(count_gpus)" -gt 0 ] || fail "no GPU is visible (nvidia-smi -L, CUDA_VISIBLE_DEVICES)"
prepare gpu ""
limit_threads 4
watched=() tests=gpu
if [ "${1:-}" = --memcheck ]; then
    shift
    PATH=$PATH:/usr/local/cuda/bin
    command -v compute-sanitizer >/dev/null || fail "compute-sanitizer (CUDA toolkit) is not on PATH"
    tests="gpu and not pool"
    export TEST_EXACT_MEMORY=1 TEST_PATIENCE=10
    # NCCL and torch try calls that fail and take another way: errors of the API are theirs. NCCL's
    # kernels poll their peers, which watching slows down past every limit. A backtrace of the host
    # would keep every Python frame that called CUDA, and with it whole autograd graphs.
    watched=(compute-sanitizer --tool memcheck --target-processes all --report-api-errors no
        --kernel-name-exclude kns=nccl --show-backtrace device --error-exitcode 99)
fi
"${watched[@]}" "$python" -m pytest -m "$tests" -rfEsxX --durations=5 "$@"
