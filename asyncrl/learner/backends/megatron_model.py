"""A Hugging Face decoder as a model of Megatron-core, and the scores of packed rows from it.

Attention runs row by row in torch's own kernel, so a pack needs neither a mask of T x T nor Transformer Engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from asyncrl.errors import ConfigError
from asyncrl.learner.backends.megatron_logprobs import parallel_logprobs
from asyncrl.learner.backends.megatron_names import Layout, from_hf, placed
from asyncrl.learner.backends.protocol import Packed, Scores
from asyncrl.learner.backends.varlen_attention import varlen_sdpa
from asyncrl.learner.prefixes import Segment

FAMILIES = ("qwen3", "qwen2", "llama")


@dataclass(frozen=True, slots=True)
class Options:
    """learner.backend_options under `learner.backend: megatron`."""

    tensor_parallel: int = 1
    """Ranks that share each matrix; divides learner.ranks and the model's key and value heads."""
    sequence_parallel: bool = False
    """They share what lies between the matrices along the tokens too: less memory for activations."""
    distributed_optimizer: bool = False
    """Optimizer state sharded over the ranks that compute different micro-batches."""


def layout_of(hf: PretrainedConfig, tensor_parallel: int) -> Layout:
    """Raises ConfigError for a model that is not one of FAMILIES as it comes, or cannot be shared so."""
    rope = dict(getattr(hf, "rope_parameters", None) or {})
    problem = None
    if hf.model_type not in FAMILIES:
        problem = f"is a {hf.model_type}, expected one of {', '.join(FAMILIES)}"
    elif rope.get("rope_type", "default") != "default":
        problem = f"has scaled rotary positions ({rope['rope_type']})"
    elif getattr(hf, "use_sliding_window", False):
        problem = "has layers with a sliding window"
    elif hf.model_type != "qwen2" and getattr(hf, "attention_bias", False):
        problem = "has biases at its attention"
    elif getattr(hf, "mlp_bias", False):
        problem = "has biases in its MLP"
    elif hf.hidden_act != "silu":
        problem = f"has the activation {hf.hidden_act}, expected silu"
    if problem:
        raise ConfigError(f"model.path {problem}: learner.backend megatron does not compute it, use fsdp2.")
    for what, n in (("num_key_value_heads", hf.num_key_value_heads), ("intermediate_size", hf.intermediate_size)):
        if n % tensor_parallel:
            raise ConfigError(
                f"learner.backend_options.tensor_parallel is {tensor_parallel}, which does not divide the model's "
                f"{what} = {n}: choose a divisor."
            )
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return Layout(hf.num_attention_heads, hf.num_key_value_heads, head_dim, hf.vocab_size)


class Decoder(GPTModel):  # type: ignore[misc]
    """Ends with the last hidden states: what is made of them is the scorer's."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def build(
    hf: PretrainedConfig, layout: Layout, options: Options, dtype: torch.dtype, *, checkpointing: bool
) -> Decoder:
    """With memory for weights that nobody has written yet."""
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=layout.heads,
        num_query_groups=layout.groups,
        kv_channels=layout.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=hf.model_type == "qwen3",
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        gated_linear_unit=True,
        activation_func=F.silu,
        # Dropout would make the proximal logprobs another policy's than the one that samples.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=options.tensor_parallel,
        sequence_parallel=options.sequence_parallel and options.tensor_parallel > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The gradients of micro-batches add up, whoever computed them; the loss has its own denominators.
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    spec.module = CheckpointedLayer if checkpointing else TransformerLayer
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = RowAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    rows = -(-layout.vocabulary // options.tensor_parallel) * options.tensor_parallel
    decoder = Decoder(
        config,
        TransformerBlockSubmodules([spec] * config.num_layers, Norm),
        vocab_size=rows,
        max_sequence_length=hf.max_position_embeddings,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"],
    )
    for name, parameter in decoder.named_parameters():
        if placed(name)[1] != "whole":
            # Counted on every rank in the gradient's norm; Megatron marks it only where it initializes weights itself.
            parameter.tensor_model_parallel = True
    decoder.to(dtype)
    return decoder


def fill(decoder: Decoder, state: dict[str, Tensor], layout: Layout) -> None:
    """This rank's pieces of weights with Hugging Face names."""
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(from_hf(name, state.__getitem__, layout, rank, size))


class Scorer:
    """Scores of packed rows; `run` is the decoder, or what wraps it."""

    def __init__(self, decoder: Decoder, run: nn.Module, layout: Layout, temperature: float) -> None:
        self.decoder, self._run, self._layout, self._temperature = decoder, run, layout, temperature
        self._group = parallel_state.get_tensor_model_parallel_group()

    def __call__(self, part: Packed) -> Scores:
        weight = self._head()
        device, size = weight.device, self._group.size()
        sequence_parallel = self.decoder.config.sequence_parallel
        # Sequence parallelism shares the tokens evenly: a row of padding fills them up.
        padding = -len(part.token_ids) % size if sequence_parallel else 0
        lengths = (*part.lengths, padding) if padding else part.lengths
        token_ids = F.pad(part.token_ids, (0, padding)).to(device)
        starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32)
        hidden = self._run(
            token_ids[None],
            torch.cat([torch.arange(n) for n in lengths]).to(device)[None],
            None,
            packed_seq_params=PackedSeqParams("thd", starts, starts, None, None, max(lengths), max(lengths)),
        )
        if sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        wanted = part.mask.to(device).nonzero()[:, 0]
        predicting = hidden[:, 0].index_select(0, wanted - 1)

        def on_tokens(x: Tensor) -> Tensor:
            return torch.zeros(len(part.token_ids), device=device).index_put((wanted,), x)

        logprobs = entropy = torch.zeros(len(part.token_ids), device=device)
        squares = None
        if part.wants & {"logprobs", "sum_pi_sq"}:
            found = parallel_logprobs(
                predicting,
                weight,
                token_ids[wanted],
                self._temperature,
                first=self._group.rank() * self._rows(),
                vocabulary=self._layout.vocabulary,
                group=self._group,
            )
            logprobs, entropy, squares = map(on_tokens, found)
        return Scores(
            logprobs,
            entropy,
            predicting if "hidden" in part.wants else None,
            squares if "sum_pi_sq" in part.wants else None,
        )

    def _head(self) -> Tensor:
        """This rank's rows of the output matrix, those of real tokens."""
        decoder = self.decoder
        tied = decoder.share_embeddings_and_output_weights
        weight: Tensor = decoder.shared_embedding_or_output_weight() if tied else decoder.output_layer.weight
        return weight[: max(0, min(self._rows(), self._layout.vocabulary - self._group.rank() * self._rows()))]

    def _rows(self) -> int:
        size: int = self._group.size()
        return -(-self._layout.vocabulary // size)


class Norm(nn.RMSNorm):
    """Megatron's own wrapper of torch's norm refuses sequence parallelism, whose gradients need this mark alone."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CheckpointedLayer(TransformerLayer):  # type: ignore[misc]
    """Computes its activations again in the backward pass. Megatron's own way keeps a GPU's random numbers, and there
    is nothing random here."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class RowAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention of each row of a pack: [T, heads, d] -> [T, heads * d]."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config)
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> Tensor:
        starts = packed_seq_params.cu_seqlens_q.tolist()
        segments = [Segment(a, b - a, 0) for a, b in pairwise(starts)]
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        mixed, _nothing = varlen_sdpa(self, q, k, v, attention_mask, segments=segments, seen=None, scaling=self._scale)
        return mixed[0].flatten(1)
