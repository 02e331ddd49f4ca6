#!/usr/bin/env bash
# Everything that must pass before a change goes in, without a GPU. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

prepare test checkpoint,mpi,plot,torch,test
limit_threads 4

stage() {
    printf '== %s (after %s s)\n' "$1" "$SECONDS"
    shift
    "$@"
}

stage "lint" "$python" -m ruff check --quiet
stage "format" "$python" -m ruff format --check
stage "types" "$python" -m mypy
stage "architecture" lint-imports
stage "spelling" "$python" -m codespell_lib
# Two workers: most tests are one thread, and those that start ranks mostly wait for them.
stage "tests" "$python" -m pytest -m "not gpu" -n 2 --dist worksteal "$@"
