"""What a configuration says of weights on GPUs: how many copies there are, and what is refused without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.run_folder import RunFolder
from asyncrl.weights.channels import CHANNELS, device_copies


@pytest.mark.parametrize(
    ("weights", "copies"),
    [
        ({"channel": "shm"}, 0),
        ({"channel": "cuda_ipc"}, 2),
        ({"channel": "nccl"}, 1),
        ({"channel": "nccl", "drain": True}, 2),
    ],
)
def test_copies_of_the_weights_on_the_learners_gpu(weights: dict[str, Any], copies: int) -> None:
    shares: dict[str, Any] = {"learner": {"gpu_memory": 0.5}} if weights["channel"] == "cuda_ipc" else {}
    engine = {"actors": {"engine": "vllm", "engine_options": {"gpu_memory": 0.35}}}
    assert device_copies(Config.model_validate({"weights": weights} | shares | engine)) == copies


@pytest.mark.parametrize("name", ["cuda_ipc", "nccl"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_said_with_what_to_do(tmp_path: Path, name: str) -> None:
    run = RunFolder.create(tmp_path / "run", Config.model_validate({"weights": {"channel": name}}))
    try:
        with pytest.raises(ConfigError, match=rf"weights\.channel is {name}.*weights\.channel shm"):
            CHANNELS[name]().publisher(run)
        subscriber = CHANNELS[name]().subscriber(run)
        try:
            with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
                subscriber._device()  # type: ignore[attr-defined]
        finally:
            subscriber.close()
    finally:
        run.remove_temporary()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, r"learner\.gpu_memory is 1 .*0\.9 for each of 1 actors"),
        ({"learner": {"gpu_memory": 0.5, "ranks": 2, "backend": "fsdp2"}}, r"learner\.ranks is 2.*nccl"),
        ({"launch": {"backend": "ray", "host": "auto"}}, r"launch\.backend is ray and weights\.channel cuda_ipc"),
    ],
)
def test_one_gpu_is_shared_by_two_shares(values: dict[str, Any], says: str) -> None:
    same = {"weights": {"channel": "cuda_ipc"}, "actors": {"engine": "vllm"}}
    with pytest.raises(ValueError, match=says):
        Config.model_validate(same | values)
    Config.model_validate(
        {"weights": {"channel": "cuda_ipc"}, "learner": {"gpu_memory": 0.5}}
        | {"actors": {"engine": "vllm", "engine_options": {"gpu_memory": 0.35}}}
    )
