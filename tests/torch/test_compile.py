"""torch.compile: gradients of a compiled backward come through the same hooks.

The backend aot_eager compiles forward and backward graphs without a C++ compiler, which would take
half a minute.
"""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from cupynccl_reduce import run_local as run
from cupynccl_reduce.torch import Sharded, attach

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

    Reduced = Callable[[Sharded], dict[str, torch.Tensor]]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.filterwarnings("ignore")  # torch's compilers warn about themselves
def test_compiled_model(world_size: int, reduced: Reduced) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    inputs = torch.randn(6, 5)
    plain = copy.deepcopy(net)
    plain(inputs).square().sum().backward()
    compiler = threading.Lock()  # torch's compilers are not made for several ranks in one process

    def rank(world: World) -> Any:
        model = copy.deepcopy(net)
        with attach(model, world) as sharded:
            compiled = torch.compile(model, backend="aot_eager")
            steps = []
            for _ in range(2):
                with compiler:
                    sharded.backward(compiled(inputs).square().sum())
                assert all(p.grad is None for p in model.parameters())
                steps.append(reduced(sharded))
                with sharded.no_sync(), compiler:
                    sharded.backward(compiled(inputs).square().sum())
                with compiler:
                    sharded.backward(compiled(inputs).square().sum())
                steps.append({n: g / 2 for n, g in reduced(sharded).items()})
            sharded.step(torch.optim.SGD(sharded.parameters(), lr=0.125))
            with torch.no_grad(), compiler:
                return steps, compiled(inputs), model(inputs)

    for steps, through_graph, through_model in run(world_size, rank):
        for grads in steps:
            for name, param in plain.named_parameters():
                torch.testing.assert_close(grads[name], param.grad.double(), rtol=1e-5, atol=1e-6)
        # The graph reads the parameters that step() wrote in place.
        torch.testing.assert_close(through_graph, through_model)
