"""A fake of SGLang's server: its HTTP interface over a plain loop that runs the whole model for every token.

What it is asked, and what it answers, passes the schema that SGLang ships. Its loop does what the real server was seen
to do: `stop` tokens are part of the output, an abort keeps it, a paused server keeps what runs, weights of another
version begin at a token, everything else is refused with 400.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.actors.engines.sglang_schema import schema

FIELDS = {"max_new_tokens", "temperature", "stop_token_ids"}


class FakeRank:
    """A server's rank of the process group, in a process of its own: one process cannot be in the group twice."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        command = [sys.executable, str(Path(__file__).with_name("fake_sglang_rank.py")), self._folder.name]
        self._process = subprocess.Popen([*command, json.dumps(asked)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def receive(self, body: dict[str, Any]) -> dict[str, torch.Tensor]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(body).encode() + b"\n")
        self._process.stdin.flush()
        return load_file(self._process.stdout.readline().decode().strip())

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        self._folder.cleanup()


INTERVAL = 4
"""Tokens in one event of a stream."""


@dataclass
class Running:
    rid: str
    ids: list[int]
    prompt: int
    params: dict[str, Any]
    logprobs: list[list[Any]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    reason: dict[str, Any] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class FakeSGLang:
    def __init__(self, model: Any, incremental: bool = True) -> None:
        self._schema = schema()
        self.model, self.incremental = model, incremental
        self.version = "default"
        self.paused = False
        self.running: list[Running] = []
        self.asked: list[tuple[str, Any]] = []
        self.named: set[str] = set()
        self.session = False
        self.rank: FakeRank | None = None

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        posts = {
            "/generate": self.generate, "/pause_generation": self.pause, "/continue_generation": self.resume,
            "/update_weights_from_disk": self.update, "/update_weight_version": self.name_version,
            "/abort_request": self.abort, "/begin_weight_update": self.begin, "/end_weight_update": self.end,
            "/update_weights_from_tensor": self.by_tensor, "/init_weights_update_group": self.join,
            "/update_weights_from_distributed": self.by_group,
        }  # fmt: skip
        routes = [Route(path, do, methods=["POST"]) for path, do in posts.items()]
        routes.append(Route("/health", lambda request: Response()))
        app = Starlette(routes=routes, lifespan=self._looping)
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", access_log=False))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            if self.rank is not None:
                self.rank.close()
            server.should_exit = server.force_exit = True
            thread.join(20)

    @contextlib.asynccontextmanager
    async def _looping(self, app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.create_task(self._loop())
        yield
        loop.cancel()

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(0.002)  # not so fast that a busy client comes too late to pause it
            if self.running and not self.paused:
                self._step()

    def _step(self) -> None:
        longest = max(len(r.ids) for r in self.running)
        rows = torch.tensor([r.ids + [0] * (longest - len(r.ids)) for r in self.running])
        last = torch.tensor([len(r.ids) - 1 for r in self.running])
        with torch.no_grad():
            logits = self.model(rows).logits[torch.arange(len(rows)), last].float()
        for r, row in zip(self.running, logits, strict=True):
            heat = r.params["temperature"]
            logprobs = torch.log_softmax(row / (heat or 1.0), -1)
            token = int(torch.multinomial(logprobs.exp(), 1)) if heat else int(row.argmax())
            r.ids.append(token)
            r.logprobs.append([float(logprobs[token]), token, None])
            r.versions.append(self.version)
            if token in r.params["stop_token_ids"]:
                r.reason = {"type": "stop", "matched": token}
            elif len(r.ids) - r.prompt == r.params["max_new_tokens"]:
                r.reason = {"type": "length", "length": r.params["max_new_tokens"]}
            if r.reason or len(r.ids) % INTERVAL == 0:
                r.changed.set()
        self.running = [r for r in self.running if r.reason is None]

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(("/generate", body))
        try:
            asked = self._schema.GenerateRequest.from_json_value(body)
        except self._schema.JsonContractError as error:
            return JSONResponse({"error": str(error)}, 400)
        assert asked.return_logprob
        assert asked.cache_salt
        assert set(body["sampling_params"]) == FIELDS
        running = Running(body["rid"], list(body["input_ids"]), len(body["input_ids"]), body["sampling_params"])
        assert not any(r.rid.startswith(running.rid) or running.rid.startswith(r.rid) for r in self.running)
        assert running.rid not in self.named, "2 s after its end a request's name is aborted once more"
        self.named.add(running.rid)
        self.running.append(running)
        return StreamingResponse(self._stream(running), media_type="text/event-stream")

    async def _stream(self, r: Running) -> AsyncIterator[str]:
        sent = 0
        try:
            while True:
                await r.changed.wait()
                r.changed.clear()
                yield f"data: {json.dumps(self._chunk(r, sent if self.incremental else 0))}\n\n"
                sent = len(r.ids) - r.prompt
                if r.reason:
                    break
            yield "data: [DONE]\n\n"
        finally:
            if r in self.running:
                self.running.remove(r)

    def _chunk(self, r: Running, sent: int) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for i, version in enumerate(r.versions if r.reason else ()):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": i, "end": i})
            spans[-1]["end"] = i + 1
        chunk = {
            "text": "",
            "output_ids": r.ids[r.prompt + sent :],
            "meta_info": {
                "id": r.rid,
                "finish_reason": r.reason,
                "prompt_tokens": r.prompt,
                "completion_tokens": len(r.ids) - r.prompt,
                "weight_version": self.version,
                "output_token_logprobs": r.logprobs[sent:],
                "weight_versions": spans,
            },
        }
        if r.reason or not sent:
            self._schema.GenerateResponse.from_json_value(chunk)
        return chunk

    async def abort(self, request: Request) -> Response:
        rid = (await request.json())["rid"]
        for r in [r for r in self.running if r.rid.startswith(rid)]:
            r.reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            self.running.remove(r)
            r.changed.set()
        return Response()

    async def pause(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(("/pause_generation", body))
        assert body["mode"] in ("retract", "in_place")
        self.paused = True
        return JSONResponse({"status": "ok", "message": ""})

    async def resume(self, request: Request) -> Response:
        self.paused = False
        return JSONResponse({"status": "ok", "message": ""})

    async def update(self, request: Request) -> Response:
        body = await request.json()
        assert self.paused, "an update without a pause waits until all requests are finished"
        return self._loaded(load_file(f"{body['model_path']}/model.safetensors"), body)

    def _loaded(self, tensors: dict[str, torch.Tensor], body: dict[str, Any]) -> Response:
        kept = next(body for path, body in reversed(self.asked) if path == "/pause_generation")["mode"] == "in_place"
        self.model.load_state_dict(tensors, strict=False)
        self.version = body["weight_version"]
        if kept and self.running and body["flush_cache"]:
            return JSONResponse({"success": False, "message": "the cache was not flushed"}, 400)
        return JSONResponse({"success": True, "message": "", "num_paused_requests": len(self.running)})

    async def begin(self, request: Request) -> Response:
        self.session = True
        return JSONResponse({"success": True, "message": ""})

    async def end(self, request: Request) -> Response:
        self.session = False
        return JSONResponse({"success": True, "message": ""})

    async def by_tensor(self, request: Request) -> Response:
        body = await request.json()
        assert self.paused
        assert self.session, "must run between begin_weight_update() and end_weight_update()"
        [handles] = body["serialized_named_tensors"]
        return self._loaded(dict(pickle.loads(base64.b64decode(handles))), body)

    async def join(self, request: Request) -> Response:
        self.rank = FakeRank(await request.json())
        return JSONResponse({"success": True, "message": ""})

    async def by_group(self, request: Request) -> Response:
        body = await request.json()
        assert self.paused
        assert self.session
        assert self.rank is not None
        return self._loaded(await asyncio.to_thread(self.rank.receive, body), body)

    async def name_version(self, request: Request) -> Response:
        body = await request.json()
        if body.get("abort_all_requests", True):
            for r in list(self.running):
                r.reason = {"type": "abort", "message": "", "status_code": None, "err_type": None}
        self.version = body["new_version"]
        return JSONResponse({"success": True, "message": "", "new_version": self.version})
