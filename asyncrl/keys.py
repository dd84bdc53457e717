"""The CURVE keys of one launch, which decide who may connect to its sockets.

Every role that listens has the server's pair, every role that connects the client's; both are in one file that only its
owner can read. Each launch makes new keys and removes them at its end. They are on no command line and in no log.
"""

from __future__ import annotations

import hmac
import json
import os
from dataclasses import dataclass, fields
from pathlib import Path

import zmq

from asyncrl.errors import RunError


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """Keys as 40 characters of Z85 each, without `repr`, so that none gets into a log."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def new(cls) -> Keys:
        """New keys. Raises RunError if libzmq was built without CURVE."""
        if not zmq.has("curve"):
            raise RunError("launch.host needs libzmq with CURVE, and this one has none: reinstall pyzmq from a wheel.")
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    def save(self, path: Path) -> None:
        """Write to a new file of mode 0600."""
        text = json.dumps({field.name: getattr(self, field.name).decode() for field in fields(self)})
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)

    def derived(self, purpose: str) -> bytes:
        """A key for what is no socket of ours: the same for all who have these keys, another one for each purpose."""
        return hmac.digest(self.server_secret, purpose.encode(), "sha256")

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Keys from a file. Raises RunError if it is missing, malformed, or readable by others than its owner."""
        try:
            if path.stat().st_mode & 0o077:
                raise RunError(f"{path} can be read by others than its owner: start the run again, with new keys.")
            entries = json.loads(path.read_text())
            return cls(**{field.name: entries[field.name].encode() for field in fields(cls)})
        except FileNotFoundError:
            raise RunError(f"{path} is not there: the run has ended, or its folder is another on this host.") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{path} holds no keys: {type(error).__name__}. Start the run again.") from error
