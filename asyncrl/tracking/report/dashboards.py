"""`asyncrl dashboard`: the local trackio dashboard of a run, or a workspace at Weights & Biases.

Both show the panels of panels.py; neither is needed for a run, so their packages are imported where they are used.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import RunError
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.report.panels import DASHBOARD, Panel, regex
from asyncrl.tracking.series import SERIES
from asyncrl.tracking.sinks import jsonl

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

NAME = "asyncrl throughput"
"""Name of the workspace."""


def dashboard(
    what: str | None,
    *,
    runs_dir: Path = Path("runs"),
    project: str = "asyncrl",
    entity: str | None = None,
    save_to: Path | None = None,
    port: int | None = None,
    browser: bool = True,
) -> int:
    """The command. `what`: `wandb`, a run folder, or None for the newest run of `runs_dir`. Raises RunError."""
    if what == "wandb":
        print(make_workspace(project, entity, save_to=save_to))
        return 0
    run = newest(runs_dir) if what is None else RunFolder.existing(Path(what))
    app, address = open_local(run, port=port, browser=browser)
    print(f"{run.name}: {address}  (Ctrl-C ends it)", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        app.close()
    return 0


def newest(runs_dir: Path) -> RunFolder:
    """The run that was started last. Raises RunError if there is none."""
    records = sorted(runs_dir.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    if not records:
        raise RunError(f"{runs_dir} holds no run: give a run folder, or start one with `asyncrl launch`.")
    return RunFolder.existing(records[-1].parent)


def open_local(run: RunFolder, *, port: int | None = None, browser: bool = True) -> tuple[Any, str]:
    """Serve the dashboard of a run and its neighbours on 127.0.0.1; returns what closes it (`close()`) and its address.

    A run that did not log to trackio itself is read from its metrics.jsonl first, afresh each time.
    Raises RunError when trackio is not installed or the run has no metrics.
    """
    from asyncrl.tracking.sinks.trackio import Trackio, load

    try:
        trackio = load(run)
    except ModuleNotFoundError as error:
        raise RunError(f"The local dashboard needs {error.name}: pip install 'asyncrl[trackio]'.") from None
    config = run.load_config()
    project = config.tracking.project
    try:
        earlier = [known for known in trackio.Api().runs(project) if known.name == run.name]
    except ValueError:
        earlier = []  # no such project yet
    if "trackio" not in config.tracking.sinks or not earlier:
        records = jsonl.by_step(run.metrics)
        if not records:
            raise RunError(f"{run.metrics} holds no training step yet: open the dashboard once the run has made one.")
        for known in earlier:
            known.delete()
        sink = Trackio(run, config)
        for record in records:
            sink.record(record)
        sink.close({})
    app, address, *_ = trackio.show(
        project, open_browser=browser, block_thread=False, host="127.0.0.1", server_port=port
    )
    return app, str(address)


def workspace(project: str, entity: str) -> Workspace:
    """The workspace as an object; nothing is sent. Reward and success come first."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    def line_plot(panel: Panel) -> Any:
        families = [name for name in panel.series if SERIES[name].family]
        # A panel at wandb takes names or one regular expression.
        wanted = (
            {"metric_regex": "|".join(f"^{regex(n)}$" for n in panel.series)} if families else {"y": list(panel.series)}
        )
        return wr.LinePlot(
            title=panel.title, x=panel.x, title_y=panel.unit or None, log_y=panel.log or None,
            plot_type="stacked-area" if panel.stacked else "line", **wanted,
        )  # fmt: skip

    sections = [
        ws.Section(name=title, panels=[line_plot(p) for p in panels], is_open=title in ("Throughput", "Reward"))
        for title, panels in DASHBOARD.items()
    ]
    return ws.Workspace(entity=entity, project=project, name=NAME, sections=sections)


def spec(made: Workspace) -> dict[str, Any]:
    """The specification of the workspace, as plain JSON values."""
    model = made._to_model()
    document: dict[str, Any] = json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True))
    return document


def make_workspace(project: str, entity: str | None = None, *, save_to: Path | None = None) -> str:
    """Make the workspace in a project; returns its address. With `save_to` nothing is sent: its specification
    goes into that file, whose path is returned.

    Raises RunError when wandb-workspaces is not installed, no API key is known, or the service refuses.
    """
    try:
        import wandb
        import wandb_workspaces  # noqa: F401
    except ModuleNotFoundError as error:
        raise RunError(f"The workspace needs {error.name}: pip install 'asyncrl[wandb]'.") from None
    if save_to is not None:
        save_to.write_text(json.dumps(spec(workspace(project, entity or "entity")), indent=2) + "\n")
        return str(save_to)
    if not wandb.login(prompt=False, verify=False):
        raise RunError(
            "wandb has no API key: run `wandb login` first, or write the workspace's specification to a file "
            "with --save-to FILE."
        )
    try:
        made = workspace(project, entity or wandb.Api().default_entity)
        made.save()
    except Exception as error:  # its client raises errors of requests, graphql and its own
        raise RunError(f"wandb did not take the workspace for project {project!r}: {error}") from error
    return str(made.url)
