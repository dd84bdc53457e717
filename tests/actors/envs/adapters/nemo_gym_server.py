"""Serves one resources server of the real package: `python nemo_gym_server.py MODULE:CLASS PORT`."""

from __future__ import annotations

import sys
from importlib import import_module


def serve(path: str, port: int) -> None:
    import uvicorn
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import ServerClient
    from omegaconf import OmegaConf

    module, _, name = path.partition(":")
    kind, place = getattr(import_module(module), name), {"host": "127.0.0.1", "port": port}
    config = kind.model_fields["config"].annotation(name="resources", entrypoint="app.py", **place)
    client = ServerClient(head_server_config=BaseServerConfig(**place), global_config_dict=OmegaConf.create({}))
    uvicorn.run(kind(config=config, server_client=client).setup_webserver(), log_level="warning", **place)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
