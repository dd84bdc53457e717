"""What an agent gets as its client where the openai package is not installed."""

from __future__ import annotations

import copy

import pytest

from asyncrl.actors.endpoint import clients
from asyncrl.actors.endpoint.clients import Clients


def test_without_openai_the_client_is_an_address_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_openai", lambda: None)
    client = Clients(1.0).of("http://127.0.0.1:1/v1", asynchronous=True)
    assert client.base_url == "http://127.0.0.1:1/v1"
    assert client.api_key
    with pytest.raises(AttributeError, match=r"client\.chat: the openai package is not installed.* pip install openai"):
        client.chat.completions.create()
    assert copy.deepcopy(client) == client
    assert not hasattr(client, "responses")
