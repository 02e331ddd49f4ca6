"""Run the real engine on a laptop under a scheduler that a seed decides, with a race detector.

::

    from cupynccl_reduce.testing import Simulation


    def work(world):  # runs once per rank; ordinary Python
        registry = cr.Registry([cr.ParamSpec("p", (8,), "float32")], world)
        with cr.Reducer(registry) as reducer:
            with reducer.backward():
                reducer.reduce_grad("p", world.runtime.produce(np.ones(8), "float32"))
            return world.runtime.consume(reducer.wait()["p"])


    result = Simulation(world_size=2, seed=7, schedule="random").run(work)

Arrays stand for device memory: read and write them through `consume`, `overwrite`, `peek` and
`poke`, from a thread of the rank (`spawn` starts more); `queue` takes kernels of your own. Indexing
one as the NumPy array that it also is goes unseen.

A missing wait, a buffer freed too early, ranks that disagree or wait for ever: each is an error
that shows both operations, where they were asked for, the bytes, and the line that replays it.
A race shows whatever the schedule is. What only some schedules show, `explore` finds: it runs them
all, where the program is small.
"""

from .exploration import Exploration, explore
from .findings import DeadlockError, DeclarationError, RaceError
from .simulation import Simulation, SimulationResult

__all__ = [
    "DeadlockError",
    "DeclarationError",
    "Exploration",
    "RaceError",
    "Simulation",
    "SimulationResult",
    "explore",
]
