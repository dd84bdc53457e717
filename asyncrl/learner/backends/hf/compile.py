"""torch.compile of a decoder's layers: elementwise operations (norms, rotation, activation) become few kernels.

The layers are compiled once with gradient and once without, for any number of tokens. If they would recompile
repeatedly, the learner ends with an error instead of falling back silently. Attention is not compiled: it is a kernel
of its own, or a loop over rows.

    call of a layer ─> hooks (fsdp2 gathers its weights, checkpointing) ─> forward, compiled

The hooks stay outside: `layer.compile()` would compile them too.
"""

from __future__ import annotations

import os
import shutil

import torch
from transformers import AttentionInterface

from asyncrl.errors import ConfigError
from asyncrl.learner.backends.hf.compute_dtype import Cast
from asyncrl.learner.backends.hf.scorer import Scorer, layers
from asyncrl.learner.backends.hf.varlen_attention import NAME, packed
from asyncrl.learner.backends.protocol import Packed


def compile_layers(scorer: Scorer, device: torch.device) -> None:
    """Compiles for `device`, on which the scorer computes; on all ranks if it is sharded. Raises ConfigError when that
    is not possible here."""
    from torch._dynamo import config as dynamo  # seconds of imports
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor import config as inductor

    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"learner.compile is true, and there is no C++ compiler here: {compiler} is not found. Install one (g++), "
            "name another in the environment variable CXX, or set learner.compile false."
        )
    dynamo.fail_on_recompile_limit_hit = True
    inductor.compile_threads = 1  # worker processes would have to be ended with this one
    AttentionInterface.register(NAME, torch.compiler.disable(packed))  # type: ignore[no-untyped-call]
    for layer in layers(scorer.model):
        if isinstance(layer.forward, Cast):
            layer.forward.compile()  # the weights are cast outside what is compiled
        else:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    probe = Packed(torch.zeros(2, dtype=torch.long), torch.tensor([False, True]), (2,))
    try:
        with torch.no_grad():
            scorer(probe)
    except TorchDynamoException as error:
        raise ConfigError(
            f"learner.compile is true, and the layers of a {type(scorer.model).__name__} cannot be compiled here: "
            f"{str(error).strip()[:600]}. Set learner.compile false."
        ) from error
