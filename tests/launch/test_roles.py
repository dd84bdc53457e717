"""What a role sets aside, and what cannot be placed."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.launch.placement.resources import resources_of

RAY = {"backend": "ray", "host": "auto"}


def config(**sections: Any) -> Config:
    given = {"launch": RAY, "weights": {"channel": "zmq"}}
    return Config.model_validate(given | {k: {**given.get(k, {}), **v} for k, v in sections.items()})


def test_a_role_of_its_own_goes_before_its_kind() -> None:
    c = config(
        launch={"gpus": {"learner": 1, "actor-1": 0.5}},
        ray={"cpus": {"actor": 4}, "resources": {"buffer": {"fast_disk": 1}}},
    )
    assert resources_of("learner-1", c) == {"CPU": 1.0, "GPU": 1.0}
    assert resources_of("actor-0", c) == {"CPU": 4.0}
    assert resources_of("actor-1", c) == {"CPU": 4.0, "GPU": 0.5}
    assert resources_of("buffer", c) == {"CPU": 1.0, "fast_disk": 1.0}


def test_an_actor_s_gpus_are_its_tensor_parallel_size() -> None:
    options = {"engine": "vllm", "engine_options": {"tensor_parallel": 4}}
    assert resources_of("actor-0", config(actors=options))["GPU"] == 4
    with pytest.raises(ValueError, match=r"launch\.gpus\.actor is 2 and actors\.engine_options\.tensor_parallel 4"):
        config(actors=options, launch={"gpus": {"actor": 2}})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"launch": {"host": ""}}, r"launch\.host is empty.*set launch\.host auto"),
        ({"weights": {"channel": "shm"}}, r"weights\.channel shm.*set weights\.channel zmq"),
        ({"ray": {"cpus": {"trainer": 1}}}, r"ray\.cpus names 'trainer': expected actor, learner"),
    ],
)
def test_what_ray_cannot_place_is_refused_with_the_remedy(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**sections)
