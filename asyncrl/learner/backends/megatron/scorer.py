"""Scores of packed rows from a model of Megatron-core, whose last stage computes them from hidden states."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from asyncrl.learner.backends.hf.row_attention import ends_of, layout_of
from asyncrl.learner.backends.megatron.logprobs import parallel_logprobs
from asyncrl.learner.backends.megatron.model import Decoder, PackedRows
from asyncrl.learner.backends.megatron.names import Layout
from asyncrl.learner.backends.protocol import Packed, Scores
from asyncrl.learner.backends.shared_prefixes import Segment


class Scorer:
    """The scorer of one rank; `run` is the decoder, or a wrapper of it."""

    def __init__(
        self, decoder: Decoder, run: nn.Module, layout: Layout, temperature: float, group: dist.ProcessGroup
    ) -> None:
        """`group`: the ranks that share each matrix."""
        self.decoder, self.run, self.device = decoder, run, next(decoder.parameters()).device
        self._layout, self._temperature, self._group = layout, temperature, group

    def __call__(self, part: Packed) -> Scores:
        """Scores of a part, with a single stage."""
        return self.scores(part, self.states(part))

    def states(self, part: Packed) -> Tensor:
        """[T, 1, H] after the layers of this rank's stage, or its share along the tokens. The decoder's input tensor
        was set to the output of the previous stage."""
        # Sequence parallelism splits the tokens evenly: a row of padding makes that possible.
        padding = -len(part.token_ids) % self._group.size() if self.decoder.config.sequence_parallel else 0
        lengths = (*part.lengths, padding) if padding else part.lengths
        segments = [Segment(0, n, 0) for n in lengths]
        ends = ends_of(segments)
        layout = layout_of(segments, None, ends=ends.to(self.device))
        # On the CPU: Megatron's rotation reads the numbers in every layer, and would wait for the GPU.
        starts = ends[0].int()
        states: Tensor = self.run(
            F.pad(part.token_ids, (0, padding)).to(self.device)[None],
            torch.cat([torch.arange(n) for n in lengths]).to(self.device)[None],
            None,
            packed_seq_params=PackedRows("thd", starts, starts, None, None, max(lengths), max(lengths), layout=layout),
        )
        return states

    def scores(self, part: Packed, states: Tensor) -> Scores:
        """Scores from the `states` of the last stage."""
        device = self.device
        if self.decoder.config.sequence_parallel:
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        wanted = part.mask.to(device).nonzero()[:, 0]
        predicting = states[:, 0].index_select(0, wanted - 1)

        def on_tokens(x: Tensor) -> Tensor:
            return torch.zeros(len(part.token_ids), device=device).index_put((wanted,), x)

        logprobs = entropy = torch.zeros(len(part.token_ids), device=device)
        squares = None
        if part.wants & {"logprobs", "sum_pi_sq"}:
            selected = parallel_logprobs(
                predicting,
                self._head(),
                part.token_ids.to(device)[wanted],
                self._temperature,
                first=self._group.rank() * self._rows(),
                vocabulary=self._layout.vocabulary,
                group=self._group,
                kept=None if part.kept is None else part.kept.to(device),
            )
            logprobs, entropy, squares = map(on_tokens, selected)
        return Scores(
            logprobs,
            entropy,
            predicting if "hidden" in part.wants else None,
            squares if "sum_pi_sq" in part.wants else None,
        )

    def _head(self) -> Tensor:
        """This rank's rows of the output matrix, without those that belong to no token."""
        decoder = self.decoder
        tied = decoder.share_embeddings_and_output_weights
        weight: Tensor = decoder.shared_embedding_or_output_weight() if tied else decoder.output_layer.weight
        return weight[: max(0, min(self._rows(), self._layout.vocabulary - self._group.rank() * self._rows()))]

    def _rows(self) -> int:
        size: int = self._group.size()
        return -(-self._layout.vocabulary // size)
