"""The student: embedding, a stack of decoder layers, one boundary norm, and a head that forms the loss itself.

Tokens go through ``tok_embeddings``, the placement's ``enter``, ``layers``, its ``leave``, and ``output``; a row is one
padded document, or several end to end (``attention.py``). With targets
the head returns loss sums, without ever holding [tokens, vocabulary] logits; without targets it returns logits. The
parameter names are torchtitan's Qwen3 names, which Hugging Face's map onto.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torchtitan.models.qwen3.model.model import precompute_rope_cache
from torchtitan.protocols.model import ModelProtocol

from blockgrow_titan.distill.head import DistillationHead, LossTargets
from blockgrow_titan.distill.objective import LossSums
from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.model.attention import packed_row
from blockgrow_titan.model.init import initialize_parameters
from blockgrow_titan.model.placement import PLACEMENTS


class BlockStackModel(ModelProtocol):
    """A Qwen3 block stack with a chosen norm placement, at the depth of one phase.

    Args:
        model_args: Dimensions, placement and phase. Which parameters train is decided here, at construction: FSDP2 must
            know it before it shards.
    """

    rope_cache: torch.Tensor

    def __init__(self, model_args: BlockStackArgs) -> None:
        super().__init__(model_args)
        self.model_args = model_args
        layer_cls = PLACEMENTS[model_args.placement]
        self.enter, self.leave = layer_cls.enter, layer_cls.leave

        self.tok_embeddings = nn.Embedding(model_args.vocab_size, model_args.dim)
        self.register_buffer("rope_cache", self._precompute_rope_cache(), persistent=False)
        self.layers = nn.ModuleDict({str(i): layer_cls(model_args) for i in range(model_args.n_layers)})
        self.norm = nn.RMSNorm(model_args.dim, eps=model_args.norm_eps)
        self.output = DistillationHead(model_args.dim, model_args.vocab_size)

        self.tok_embeddings.requires_grad_(model_args.train_embedding)
        self.norm.requires_grad_(model_args.train_boundary)
        self.output.requires_grad_(model_args.train_boundary)
        for index, layer in self.layers.items():
            layer.requires_grad_(model_args.block_of_layer(int(index)) >= model_args.frozen_blocks)

    def _precompute_rope_cache(self) -> torch.Tensor:
        args = self.model_args
        return precompute_rope_cache(args.head_dim, args.max_seq_len, args.rope_theta)  # (max_seq_len, 2 * head_dim)

    def init_buffers(self, device: torch.device | None = None) -> None:
        """Fill the rotary cache, on ``device`` or where it is; ``to_empty`` leaves it undefined."""
        with torch.device(device or self.rope_cache.device):
            self.rope_cache = self._precompute_rope_cache()

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initialise every parameter by invariant 1 and fill the buffers."""
        self.init_buffers(buffer_device)
        initialize_parameters(self, self.model_args.seed, self.model_args.init_std)

    def forward(
        self,
        tokens: torch.Tensor,
        targets: LossTargets | None = None,
        document_lengths: Sequence[int] | None = None,
    ) -> torch.Tensor | LossSums:
        """Logits, or loss sums when there are targets.

        Args:
            tokens: [B, S] int64, each row a document, right-padded: causal attention keeps padding from reaching valid
                positions. With ``document_lengths`` one packed row [1, S]: documents end to end, then padding.
            targets: Labels, objective and the teacher's hidden states.
            document_lengths: Lengths of the documents of a packed row; each is computed as if it were alone.

        Returns:
            [B, S, V] logits without targets, ``LossSums`` with them.

        Raises:
            ValueError: If the lengths do not fit the row or the model.
        """
        rope_cache, spans = self.rope_cache, None
        if document_lengths is not None:
            spans, positions = packed_row(tokens, document_lengths, len(rope_cache))
            rope_cache = rope_cache[positions]  # (S, 2 * head_dim)
        h = self.enter(self.tok_embeddings(tokens), self.norm)  # (B, S, D)
        for layer in self.layers.values():
            h = layer(h, rope_cache, spans)
        return self.output(self.leave(h, self.norm), targets)
