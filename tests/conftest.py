from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncrl.run_folder import RunFolder


@pytest.fixture(autouse=True)
def no_sockets_or_weights_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run without a launcher has nobody who removes its folders for sockets and weights."""
    opened: list[RunFolder] = []
    open_run = RunFolder.open

    def remember(run: RunFolder) -> None:
        open_run(run)
        opened.append(run)

    monkeypatch.setattr(RunFolder, "open", remember)
    yield
    for run in opened:
        if (run.path / "run.json").is_file():
            run.remove_temporary()
