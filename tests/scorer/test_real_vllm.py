"""The scorer's requests to a real vLLM server, on a CPU; by `make test-vllm`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here (`make test-vllm` runs these tests)", allow_module_level=True)

import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.scorer.dialects import TeacherUnusable
from asyncrl.trajectory import TicketId
from tests.actors.engines.test_evaluation_vllm import CHECKPOINT
from tests.buffer.fakes import trajectory
from tests.scorer.test_servers import asked
from tests.vllm_server import vllm_server

pytestmark = pytest.mark.timeout(500)
K, MOST, CONTEXT = 5, 8, 128


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with vllm_server(str(CHECKPOINT), "--max-logprobs", str(MOST), "--max-model-len", str(CONTEXT)) as url:
        yield url


@pytest.mark.parametrize("k", [0, K])
def test_the_scores_are_those_of_the_models_own_forward_pass(url: str, tmp_path: Path, k: int) -> None:
    t = trajectory(TicketId(0, 0, 0), (0,) * 20)
    tokens = torch.from_numpy(t.rows[0].token_ids.astype(np.int64))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
        log_q = model(tokens[None]).logits[0].log_softmax(-1)
    with asked([url], tmp_path / "teacher.json", k=k, server_s=120.0) as servers:
        servers.look(0.0)
        assert servers.silence == ""
        (scores,) = servers.score([t])
    before = torch.arange(1, 21)
    expected = log_q[before, tokens[2:]].numpy()
    assert np.abs(scores.sampled - expected).max() < 1e-4
    top = log_q[before].topk(max(k, 1), 1)
    assert np.abs(scores.logprobs - top.values.numpy()[:, :k]).max(initial=0.0) < 1e-4
    assert scores.ids.shape == (20, k)
    if k:
        found = np.take_along_axis(log_q[before].numpy(), scores.ids.astype(np.int64), 1)
        assert np.abs(found - scores.logprobs).max() < 1e-4, "the words are those of the logprobs"


def test_more_words_than_it_gives_and_a_longer_context_are_refused(url: str, tmp_path: Path) -> None:
    many = pytest.raises(TeacherUnusable, match=rf"refused a row of \d+ tokens: 400.*--max-logprobs {MOST + 1}")
    with asked([url], tmp_path / "teacher.json", k=MOST + 1, server_s=120.0) as servers, many:
        servers.look(0.0)
    long = pytest.raises(ConfigError, match=rf"env\.max_tokens is {CONTEXT}, and the teacher at .* {CONTEXT - 1} ")
    with asked([url], tmp_path / "teacher.json", longest=CONTEXT) as servers, long:
        servers.look(0.0)
