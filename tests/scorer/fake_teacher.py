"""A fake teacher server: it speaks vLLM's and SGLang's requests for prompt logprobs, of a made-up bigram model.

In this process (`serving`), or in one of its own that a test may kill:
`python -m tests.scorer.fake_teacher PORT WORDS`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

DRIP_S = 4.0
"""The first head under `drip`: no read waits long for its next byte."""


@dataclass
class Fake:
    """What the server serves, and how it misbehaves; a test may change it while it serves."""

    words: int = 50
    seed: int = 1
    context: int = 4096
    most_words: int = 1000
    fault: str = ""
    """truncate, renormalise, infinite, nameless, form, delay, trickle, drip, hang, dead, 500, 503, 404, 400."""
    spares: int = 0
    """Rows of at most so many tokens, such as the probe, are answered whatever hang, dead, 500, 503 or 400 say."""
    hanging: int = 0
    """Requests that were asked while it hung."""
    released: threading.Event = field(default_factory=threading.Event)
    """Ends the hanging."""
    about: Any = None
    """What /v1/models answers instead."""
    until: int = 1 << 60
    """Rows that it answers before it answers 500."""
    asked: list[int] = field(default_factory=list)
    """Tokens of each row, the probe's too."""

    def table(self) -> Any:
        """[words, words] logprobs of the next word behind each."""
        logits = np.random.default_rng(self.seed).normal(size=(self.words, self.words)) * 2
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    def said(self, tokens: list[int], k: int) -> list[tuple[float, list[tuple[float, int]]]]:
        """(logprob of the token, the most likely words) of each token but the first."""
        table, found = self.table(), []
        for before, token in itertools.pairwise(tokens):
            row = table[before]
            best = [(float(row[w]), int(w)) for w in np.argsort(-row, kind="stable")[:k]]
            if self.fault == "truncate":
                best = best[: max(0, k - 1)]
            if self.fault == "renormalise" and best:
                total = math.log(sum(math.exp(lp) for lp, _ in best))
                best = [(lp - total, w) for lp, w in best]
            own = float(row[token])
            if self.fault == "infinite":
                own = -9999.0
            found.append((own, best))
        return found


def _reply(fake: Fake, path: str, body: dict[str, Any]) -> Any:
    if path == "/v1/completions":
        tokens, k = body["prompt"], body["prompt_logprobs"]
        fake.asked.append(len(tokens))
        entries: list[Any] = [None]
        for token, (own, best) in zip(tokens[1:], fake.said(tokens, k), strict=True):
            words = {str(w): {"logprob": lp, "rank": rank} for rank, (lp, w) in enumerate(best, 1)}
            if fake.fault != "nameless":
                words.setdefault(str(token), {"logprob": own, "rank": 99})
            if fake.fault == "infinite":
                words[str(token)] = {"logprob": own, "rank": 99}
            entries.append(words)
        return {"choices": [{"text": "", "prompt_logprobs": entries}]}
    tokens, k = body["input_ids"], body["top_logprobs_num"]
    fake.asked.append(len(tokens))
    said = fake.said(tokens, k)
    behind = zip(tokens[1:], said, strict=True)
    of_tokens: list[Any] = [[None, tokens[0], None], *([lp, token, None] for token, (lp, _) in behind)]
    top = [None, *([[lp, w, None] for lp, w in best] for _, best in said)]
    return {"output_ids": [0], "meta_info": {"input_token_logprobs": of_tokens, "input_top_logprobs": top}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: Fake

    def do_GET(self) -> None:
        if self.fake.fault == "404":
            self._send(404, {"error": "as the test wants it"})
            return
        if self.fake.fault == "dead":
            self.fake.released.wait()
        said = {"data": [{"id": f"fake-{self.fake.seed}", "max_model_len": self.fake.context}]}
        self._send(200, said if self.fake.about is None else self.fake.about)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake = self.fake
        faulty = len(body.get("prompt") or body["input_ids"]) > fake.spares
        if fake.fault == "delay":
            time.sleep(1.0)
        if fake.fault in ("hang", "dead") and faulty:
            fake.hanging += 1
            fake.released.wait()
        if len(fake.asked) >= fake.until:
            self._send(500, {"error": "as the test wants it"})
        elif fake.fault in ("500", "503", "400") and faulty:
            self._send(int(fake.fault), {"error": "as the test wants it"})
        elif max(body.get("prompt_logprobs", 0), body.get("top_logprobs_num", 0)) > fake.most_words:
            self._send(400, {"error": {"message": f"Requested prompt logprobs, max allowed: {fake.most_words}"}})
        elif fake.fault == "form":
            self._send(200, {"choices": []})
        else:
            self._send(200, _reply(fake, self.path, body))

    def _send(self, code: int, reply: Any) -> None:
        content = json.dumps(reply).encode()
        if self.fake.fault == "drip" and not self._drip():
            return
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        for byte in content if self.fake.fault == "trickle" else ():
            try:
                self.wfile.write(bytes([byte]))
            except OSError:  # the client went away
                return
            time.sleep(0.05)
        if self.fake.fault != "trickle":
            self.wfile.write(content)

    def _drip(self) -> bool:
        """Sends an interim answer whose head takes DRIP_S; whether the client stayed for it."""
        head = b"HTTP/1.1 103 Early Hints\r\nLink: " + b"x" * 160 + b"\r\n\r\n"
        for byte in head:
            try:
                self.wfile.write(bytes([byte]))
            except OSError:
                return False
            time.sleep(DRIP_S / len(head))
        return True

    def log_message(self, *_: Any) -> None:
        return None


def server_of(fake: Fake, port: int = 0) -> ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"fake": fake})
    ThreadingHTTPServer.daemon_threads = True
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


@contextlib.contextmanager
def serving(fake: Fake, port: int = 0) -> Iterator[str]:
    """Its URL."""
    server = server_of(fake, port)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5.0)


if __name__ == "__main__":
    server_of(Fake(words=int(sys.argv[2])), int(sys.argv[1])).serve_forever()
