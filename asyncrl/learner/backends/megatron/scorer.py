"""Scores of packed rows from a model of Megatron-core, whose last stage computes them from hidden states.

With a teacher in this process (`Distillation`) its last stage computes hidden states of the same tokens first; both
heads are split over the tensor-parallel ranks at the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from asyncrl.learner.backends.comparison import TeacherStates, compared
from asyncrl.learner.backends.hf.row_attention import ends_of, layout_of
from asyncrl.learner.backends.megatron.logprobs import parallel_logprobs
from asyncrl.learner.backends.megatron.model import Decoder, PackedRows
from asyncrl.learner.backends.megatron.names import Layout
from asyncrl.learner.backends.megatron.vocabulary import Split
from asyncrl.learner.backends.protocol import Packed, Scores
from asyncrl.learner.backends.recorded import compared_with_recorded
from asyncrl.learner.backends.shared_prefixes import Segment
from asyncrl.learner.distillation.divergence import Comparison


class Scorer:
    """The scorer of one rank; `run` is the decoder, or a wrapper of it."""

    def __init__(
        self, decoder: Decoder, run: nn.Module, layout: Layout, temperature: float, group: dist.ProcessGroup
    ) -> None:
        """`group`: the ranks that share each matrix."""
        self.decoder, self.run, self.device = decoder, run, next(decoder.parameters()).device
        self._layout, self._temperature, self._group = layout, temperature, group
        self.distillation: Distillation | None = None
        """What the policy is compared with, where that is wanted"""

    def __call__(self, part: Packed) -> Scores:
        """Scores of a part, with a single stage."""
        of_teacher = None
        if (teacher := self.teacher(part)) is not None:
            with torch.no_grad():
                of_teacher = teacher.scorer(teacher.read(part)).hidden
        return self.scores(part, self.states(part), of_teacher)

    def teacher(self, part: Packed) -> LocalTeacher | None:
        """The one that computes the part too."""
        return self.distillation.teacher if self.distillation is not None and "teacher" in part.wants else None

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

    def scores(self, part: Packed, states: Tensor, of_teacher: Tensor | None = None) -> Scores:
        """Scores from the `states` of the last stage, and the teacher's hidden states of the same tokens."""
        device = self.device
        if self.decoder.config.sequence_parallel:
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        wanted = part.mask.to(device).nonzero()[:, 0]
        predicting = states[:, 0].index_select(0, wanted - 1)

        def on_tokens(x: Tensor) -> Tensor:
            return torch.zeros(len(part.token_ids), device=device).index_put((wanted,), x)

        targets = part.token_ids.to(device)[wanted]
        logprobs = entropy = torch.zeros(len(part.token_ids), device=device)
        squares = rows = None
        if part.wants & {"logprobs", "sum_pi_sq"}:
            selected = parallel_logprobs(
                predicting,
                self.head(),
                targets,
                self._temperature,
                first=self.first,
                vocabulary=self._layout.vocabulary,
                group=self._group,
                kept=None if part.kept is None else part.kept.to(device),
            )
            logprobs, entropy, squares = map(on_tokens, selected)
        if self.distillation is not None and "teacher" in part.wants:
            rows = torch.stack([on_tokens(x.float()) for x in self._compared(part, predicting, targets, of_teacher)])
        return Scores(
            logprobs,
            entropy,
            predicting if "hidden" in part.wants else None,
            squares if "sum_pi_sq" in part.wants else None,
            rows,
        )

    def _compared(self, part: Packed, hidden: Tensor, targets: Tensor, of_teacher: Tensor | None) -> Tensor:
        """[6, n] the `ROWS` of comparison.py."""
        assert self.distillation is not None
        head, teacher, how = self.head(), self.distillation.teacher, self.distillation.how
        if teacher is None:
            assert part.recorded is not None
            words = Split(self.vocabulary, self.first, len(head), self._group)
            return compared_with_recorded(
                hidden, head, part.recorded, how.divergence, temperature=self._temperature, words=words
            )
        assert of_teacher is not None
        words = Split(min(self.vocabulary, teacher.words), self.first, len(head), self._group)
        states = TeacherStates(of_teacher.to(self.device), teacher.head())
        return compared(hidden, head, targets, states, how, temperature=self._temperature, words=words)

    @property
    def vocabulary(self) -> int:
        """Words of the head, on all ranks."""
        return self._layout.vocabulary

    @property
    def first(self) -> int:
        """The word of this rank's first row of the head."""
        return self._group.rank() * self._rows()

    def head(self) -> Tensor:
        """This rank's rows of the output matrix, without those that belong to no token."""
        decoder = self.decoder
        tied = decoder.share_embeddings_and_output_weights
        weight: Tensor = decoder.shared_embedding_or_output_weight() if tied else decoder.output_layer.weight
        return weight[: max(0, min(self._rows(), self._layout.vocabulary - self.first))]

    def _rows(self) -> int:
        size: int = self._group.size()
        return -(-self._layout.vocabulary // size)


@dataclass(frozen=True, slots=True)
class LocalTeacher:
    """A teacher in this process."""

    scorer: Scorer
    shown: Callable[[Packed], Packed]
    """What it reads of a part; on every rank. Raises RunError for a row that is too long"""
    head: Callable[[], Tensor]
    """Its rows of the words that this rank has of the policy's head; on the last stage"""
    words: int
    """Of its head, on all ranks"""

    def read(self, part: Packed) -> Packed:
        """The part as its scorer computes it."""
        return replace(self.shown(part), wants=frozenset(("hidden",)))


@dataclass(frozen=True, slots=True)
class Distillation:
    """The teacher, and how the policy is compared with it."""

    teacher: LocalTeacher | None
    """None: it is on servers, and parts bring what these said of their tokens"""
    how: Comparison
