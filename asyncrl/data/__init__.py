"""Tasks in. `SOURCES` names the task sources that come with asyncrl."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.data.base import TaskSource
from asyncrl.data.mix import MixSource
from asyncrl.data.sources.generated import GeneratedSource
from asyncrl.data.sources.hugging_face import DatasetSource
from asyncrl.data.sources.json_lines import JsonLinesSource
from asyncrl.data.sources.lookup import LookupSource
from asyncrl.data.sources.nemo_gym import NemoGymSource
from asyncrl.data.sources.reasoning_gym import ReasoningGymSource
from asyncrl.data.sources.seeds import SeedSource
from asyncrl.data.sources.verifiers import VerifiersSource

SOURCES: dict[str, Callable[..., TaskSource]] = {
    "datasets": DatasetSource,
    "generated": GeneratedSource,
    "json_lines": JsonLinesSource,
    "lookup": LookupSource,
    "mix": MixSource,
    "nemo_gym": NemoGymSource,
    "reasoning_gym": ReasoningGymSource,
    "seeds": SeedSource,
    "verifiers": VerifiersSource,
}
"""A config names one of these, or gives an import path `package.module:name`. Called with the options, and with `seed`
and `model` (`model.path`) where it takes them."""
