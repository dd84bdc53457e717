"""A Hugging Face decoder as a model of Megatron-core, or those of its layers that one pipeline stage has.

Attention runs row by row in torch's own kernel, so a pack needs neither a mask of T x T nor Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from asyncrl.errors import ConfigError
from asyncrl.learner.backends.checkpointing import Checkpointing, options
from asyncrl.learner.backends.hf.row_attention import Layout as RowLayout
from asyncrl.learner.backends.hf.row_attention import attend
from asyncrl.learner.backends.megatron.groups import Groups, Options
from asyncrl.learner.backends.megatron.names import EMBEDDING, HEAD, Layout, in_layer, placed

FAMILIES = ("qwen3", "qwen2", "llama")


def layout_of(hf: PretrainedConfig, options: Options, field: str = "model.path") -> Layout:
    """Raises ConfigError for a model that megatron does not compute here, or that cannot be split as asked; `field`
    names it."""
    if problem := _unsupported(hf):
        raise ConfigError(f"{field} {problem}: learner.backend megatron does not compute it, use fsdp2.")
    for what, n in (("num_key_value_heads", hf.num_key_value_heads), ("intermediate_size", hf.intermediate_size)):
        if n % options.tensor_parallel:
            raise ConfigError(
                f"learner.backend_options.tensor_parallel is {options.tensor_parallel}, which does not divide {what} = "
                f"{n} of the model in {field}: choose a divisor."
            )
    if options.pipeline_parallel > hf.num_hidden_layers:
        raise ConfigError(
            f"learner.backend_options.pipeline_parallel is {options.pipeline_parallel} and the model in {field} has "
            f"{hf.num_hidden_layers} layers: each stage needs one, choose fewer stages."
        )
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return Layout(hf.num_attention_heads, hf.num_key_value_heads, head_dim, hf.vocab_size)


def _unsupported(hf: PretrainedConfig) -> str | None:
    rope_type = dict(getattr(hf, "rope_parameters", None) or {}).get("rope_type", "default")
    biased_attention = hf.model_type != "qwen2" and getattr(hf, "attention_bias", False)
    problems = (
        (hf.model_type not in FAMILIES, f"is a {hf.model_type}, expected one of {', '.join(FAMILIES)}"),
        (rope_type != "default", f"has scaled rotary positions ({rope_type})"),
        (getattr(hf, "use_sliding_window", False), "has layers with a sliding window"),
        (biased_attention, "has biases at its attention"),
        (getattr(hf, "mlp_bias", False), "has biases in its MLP"),
        (hf.hidden_act != "silu", f"has the activation {hf.hidden_act}, expected silu"),
    )
    return next((text for holds, text in problems if holds), None)


class Decoder(GPTModel):  # type: ignore[misc]
    """A decoder that returns the last hidden states, for the scorer."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters with the names that they have in a model of one stage."""
        for name, parameter in self.named_parameters():
            if name == HEAD and self.share_embeddings_and_output_weights:
                yield EMBEDDING, parameter
            elif place := in_layer(name):
                # Megatron counts layers from 1, over all stages.
                yield f"decoder.layers.{self.decoder.layers[place[0]].layer_number - 1}.{place[1]}", parameter
            else:
                yield name, parameter


def build(
    hf: PretrainedConfig,
    layout: Layout,
    options: Options,
    groups: Groups,
    dtype: torch.dtype,
    checkpointing: Checkpointing,
) -> Decoder:
    """This rank's piece, with uninitialised weights. Collective."""
    stages = stages_of(hf.num_hidden_layers, options.pipeline_parallel)
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
        # With dropout the proximal logprobs would be those of another policy than the one that samples.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        pipeline_model_parallel_layout=stages if len(stages) > 1 else None,
        # Micro-batches differ in size, for which Megatron wants this dispatcher, although there are no experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        sequence_parallel=options.sequence_parallel and options.tensor_parallel > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The gradients of micro-batches add up over ranks; the loss has its own denominators.
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
    layers = {"none": TransformerLayer, "selective": SelectiveLayer, "full": CheckpointedLayer}
    spec.module = layers[checkpointing]
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = RowAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    rows = -(-layout.vocabulary // options.tensor_parallel) * options.tensor_parallel
    decoder = Decoder(
        config,
        TransformerBlockSubmodules([spec] * stages[groups.stages.rank()].count("decoder"), Norm),
        vocab_size=rows,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=groups.first,
        post_process=groups.last,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"],
    )
    for name, parameter in decoder.named():
        if placed(name)[1] != "whole":
            # For the gradient's norm; Megatron sets this only where it initializes weights itself.
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    decoder.to(dtype)
    return decoder


def stages_of(layers: int, stages: int) -> list[list[str]]:
    """The parts of each stage, in Megatron's terms. If layers do not divide evenly, earlier stages have one more, since
    the last one has the head.

    >>> stages_of(3, 2)
    [['embedding', 'decoder', 'decoder'], ['decoder', 'loss']]
    """
    parts = [["decoder"] * (layers // stages + (stage < layers % stages)) for stage in range(stages)]
    parts[0].insert(0, "embedding")
    parts[-1].append("loss")
    return parts


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """The rows of a pass as Megatron and as `RowAttention` take them."""

    layout: RowLayout | None = None


class Norm(nn.RMSNorm):
    """torch's norm with the mark that sequence parallelism needs, which Megatron's own wrapper refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CheckpointedLayer(TransformerLayer):  # type: ignore[misc]
    """Computes its activations again in the backward pass. Megatron's own checkpointing saves the GPU's random state,
    and nothing here is random."""

    recomputes: Checkpointing = "full"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super().forward, *args, **options(self.recomputes), **kwargs)


class SelectiveLayer(CheckpointedLayer):
    recomputes: Checkpointing = "selective"


class RowAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention of each row of a pack: [T, heads, d] -> [T, heads * d]. Reads nothing back from the device."""

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
        packed_seq_params: PackedRows,
        **_: Any,
    ) -> Tensor:
        assert packed_seq_params.layout is not None
        return attend(query, key, value, packed_seq_params.layout, scale=self._scale).flatten(1)
