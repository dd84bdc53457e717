"""The model of a configuration: its files, its chat template, and the configuration itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config import Config
from asyncrl.data.base import Message
from asyncrl.doctor.finding import Finding
from asyncrl.errors import ConfigError
from asyncrl.launch import preflight
from asyncrl.model import local_path, resolve_path
from asyncrl.rendering.build import build_renderer
from asyncrl.rendering.template import TemplateRenderer

_GREETING: list[Message] = [{"role": "user", "content": "Hello"}]


def folder(config: Config) -> Path | None:
    """The model's folder on this machine; None for a hub name. Raises ConfigError."""
    return resolve_path(config.model) if config.model.path == "quickstart" else local_path(config.model)


def weights(config: Config) -> int:
    """Bytes of the model's weights on this machine; 0 for a hub name, and for a folder that is not there."""
    try:
        path = folder(config)
    except ConfigError:
        return 0
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) if path else 0


def look(config: Config) -> Iterator[Finding]:
    try:
        preflight.check(config)
    except ConfigError as error:
        yield Finding("fix", "config", str(error))
        return
    yield Finding("ok", "config", "its names and numbers fit together")
    if folder(config) is None:
        text = f"model.path {config.model.path!r} is a hub name, which is not fetched here: `asyncrl try` loads it."
        yield Finding("note", "model", text)
        return
    yield Finding("ok", "model", f"{config.model.path}, {weights(config) / 1e6:.1f} MB of weights")
    yield template(config)


def template(config: Config) -> Finding:
    """Whether the chat template renders, and whether it leaves earlier tokens as they are."""
    try:
        renderer = build_renderer(config)
        renderer.render_initial(_GREETING, [])
    except ConfigError as error:
        return Finding("fix", "template", str(error))
    except Exception as error:  # a template may raise anything
        text = f"the chat template renders no user message ({type(error).__name__}: {error}): give the model another."
        return Finding("fix", "template", " ".join(text.split()))
    if isinstance(renderer, TemplateRenderer) and (breaks := renderer.prefix_breaks()):
        text = f"changes earlier tokens at: {', '.join(breaks)}. There an episode becomes several rows."
        return Finding("note", "template", text)
    return Finding("ok", "template", "leaves earlier tokens as they are")
