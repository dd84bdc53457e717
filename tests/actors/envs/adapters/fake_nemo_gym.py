"""A fake resources server of NeMo Gym, by its published contract, for Pythons that its package does not run on.

    python fake_nemo_gym.py PORT

What its `SimpleResourcesServer` and its `example_session_state_mgmt` do, as far as a client sees: sessions in a cookie,
tools as routes, bodies checked (422), a verifier that reads the episode. Beyond them it can be asked for failures.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

COOKIE = "CounterResourcesServer___counter"
FIELDS = {
    "message": {"id": str, "role": str, "status": str, "content": list},
    "reasoning": {"id": str, "summary": list},
    "function_call": {"name": str, "arguments": str, "call_id": str},
    "function_call_output": {"call_id": str, "output": str},
}
RESPONSE = ("id", "created_at", "model", "object", "output", "parallel_tool_calls", "tool_choice", "tools")


class FakeResourcesServer:
    """A counter: a row says where it begins (`initial_count`) and where it should end (`expected_count`)."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self.closed: list[str] = []

    async def seed_session(self, request: Request) -> Response:
        row = await request.json()
        if not isinstance(row.get("initial_count"), int) or "responses_create_params" not in row:
            return unprocessable("initial_count")
        session = uuid.uuid4().hex
        self._counts[session] = row["initial_count"]
        answer = JSONResponse({"mcp": {"url_path": "/mcp", "headers": {}}} if row.get("mcp") else {})
        answer.set_cookie(COOKIE, session, httponly=True)
        return answer

    async def increment_counter(self, request: Request) -> Response:
        count = (await request.json()).get("count")
        if not isinstance(count, int):
            return unprocessable("count")
        if count == 500:
            raise ValueError("asked for")
        if count == 503:
            return Response("busy", 503)
        if count == 666:
            os._exit(1)
        self._counts[self._session(request)] += count
        return JSONResponse({"success": True})

    async def get_counter_value(self, request: Request) -> Response:
        return JSONResponse({"count": self._counts[self._session(request)]})

    async def verify(self, request: Request) -> Response:
        body = await request.json()
        if wrong := problem(body["response"]):
            return unprocessable(wrong)
        right = self._counts[self._session(request)] == body["expected_count"]
        found: dict[str, Any] = {**body, "reward": float(right), "calls": calls(body["response"])}
        if body.get("lost"):
            found |= {"mask_sample": True, "failure_kind": "session_lost", "failure_reason": "asked for"}
        if body.get("parts"):
            found |= {"reward_components": {"right": float(right), "short": 0.5}}
        return JSONResponse(found)

    async def close_session(self, request: Request) -> Response:
        session = self._session(request)
        del self._counts[session]
        self.closed.append(session)
        return JSONResponse({"resources_session_id": (await request.json())["resources_session_id"]})

    async def sessions(self, request: Request) -> Response:
        """Of the tests."""
        return JSONResponse({"open": len(self._counts), "closed": len(self.closed)})

    def _session(self, request: Request) -> str:
        return request.cookies[COOKIE]

    def app(self) -> Starlette:
        posts = (
            self.seed_session, self.increment_counter, self.get_counter_value, self.verify, self.close_session
        )  # fmt: skip
        routes = [Route(f"/{route.__name__}", route, methods=["POST"]) for route in posts]
        return Starlette(routes=[*routes, Route("/sessions", self.sessions)])


def calls(response: dict[str, Any]) -> int:
    return sum(item["type"] == "function_call" for item in response["output"])


def problem(response: dict[str, Any]) -> str:
    """What a Responses object lacks; every call is answered by an output of its id, in order, unless it is the last."""
    if missing := [name for name in RESPONSE if name not in response]:
        return f"response.{missing[0]}"
    asked: list[str] = []
    for item in response["output"]:
        for name, kind in FIELDS[item["type"]].items():
            if not isinstance(item.get(name), kind):
                return f"response.output.{item['type']}.{name}"
        if item["type"] == "message" and [part["type"] for part in item["content"]] != ["output_text"]:
            return "response.output.message.content"
        if item["type"] == "function_call":
            json.loads(item["arguments"] or "{}") if item["name"] else None
            asked.append(item["call_id"])
        if item["type"] == "function_call_output" and item["call_id"] != asked.pop(0):
            return "response.output.function_call_output.call_id"
    return ""


def unprocessable(field: str) -> Response:
    return JSONResponse({"detail": [{"loc": ["body", field], "msg": "Field required"}]}, 422)


if __name__ == "__main__":
    uvicorn.run(FakeResourcesServer().app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
