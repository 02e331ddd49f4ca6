"""How many threads a rank may use. Needs torch."""

from __future__ import annotations

import os

import torch

from cupynccl_reduce.launcher import find_launcher

__all__ = ["limit_threads"]


def limit_threads() -> None:
    """Share this host's cores out: more threads than cores wait for each other, spinning."""
    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // find_launcher(os.environ).local_size)
    torch.set_num_threads(min(torch.get_num_threads(), share))
