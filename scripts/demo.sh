#!/usr/bin/env bash
# Train a small GPT on several ranks, and compare it with one process. Arguments go to the demo.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

extras=checkpoint,mpi,torch
ranks=4
share_gpu=
gpus=$(count_gpus)
if [ "$gpus" -gt 0 ]; then
    cuda=$(cuda_major)
    if [ "$cuda" = 12 ]; then extras+=,cuda12; else extras+=,cuda13; fi
    ranks=$gpus
    if [ "$gpus" = 1 ]; then
        ranks=2
        share_gpu=--share-gpu
    fi
fi

prepare demo "$extras"
limit_threads "$ranks"
mpirun -n "$ranks" "$python" -m mpi4py -m cupynccl_reduce demo $share_gpu "$@"
