"""Sharded checkpoints: every rank writes its shards, any number of ranks reads them. No gathers.

A checkpoint is a folder: `manifest.json`, and beside it the folder of one save, with one
safetensors file for each rank. The manifest is written last and replaces the older one in a single
step, so that a crash at any point leaves the older or the newer checkpoint whole::

    checkpoint/manifest.json                       names, shapes, dtypes, sizes, meta
    checkpoint/save-<token>/rank-00000-of-00002.safetensors    its elements of every state
    checkpoint/save-<token>/rank-00001-of-00002.safetensors

The state of random generators goes into `meta`, as JSON::

    meta = {"step": step, "numpy": rng.bit_generator.state}  # of a numpy.random.Generator
    meta["torch"] = base64.b64encode(torch.get_rng_state().numpy()).decode()

    rng.bit_generator.state = meta["numpy"]
    state = bytearray(base64.b64decode(meta["torch"]))
    torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))

Names that torch ties to a registered one are `tied`::

    first = {param: name for name, param in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    tied = {name: first[param] for name, param in every if name != first[param]}

Importing this package loads no array library: `save` and `load` import NumPy and safetensors
(`pip install "cupynccl_reduce[checkpoint]"`).
"""

from .loading import load
from .saving import save

__all__ = ["load", "save"]
