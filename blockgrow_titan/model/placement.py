"""Norm placements: one small decoder layer class for each, behind ``PLACEMENTS``.

A placement decides where the two RMSNorms of a layer stand and where the one model-boundary RMSNorm does, so that all
placements have the same parameters under the same names. A new one is a subclass with the ``@placement("name")``
decorator; nothing else in the package asks which placement it has. ``place`` sees attention as a plain function of the
hidden states, so the same few lines are the layer in training and in an exported Hugging Face model (``hf/``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torchtitan.models.attention import VarlenMetadata
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Attention, FeedForward

from blockgrow_titan.model.attention import WHOLE_ROWS, within_documents

PLACEMENTS: dict[str, type["DecoderLayer"]] = {}


def placement(name: str) -> Callable[[type["DecoderLayer"]], type["DecoderLayer"]]:
    """Register a decoder layer class under the name that ``block_stack.placement`` gives."""

    def register(layer_cls: type["DecoderLayer"]) -> type["DecoderLayer"]:
        PLACEMENTS[name] = layer_cls
        return layer_cls

    return register


class DecoderLayer(nn.Module):
    """A Qwen3 decoder layer whose norms a subclass places.

    Attention and feed-forward are torchtitan's; so are the parameter names, which keeps its state-dict adapter,
    activation checkpointing and compile usable.
    """

    is_qwen3: ClassVar[bool] = False
    """Whether this placement is Qwen3's own, so that an exported student is a plain ``Qwen3ForCausalLM``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.is_qwen3 = vars(cls).get("is_qwen3", False)  # a subclass of a placement is another one

    def __init__(self, args: Qwen3ModelArgs) -> None:
        super().__init__()
        self.attention = within_documents(Attention(args))
        self.feed_forward = FeedForward(dim=args.dim, hidden_dim=args.hidden_dim)
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, h: torch.Tensor, rope_cache: torch.Tensor, spans: VarlenMetadata | None = None) -> torch.Tensor:
        """One layer: h [B, S, D] -> [B, S, D].

        Args:
            h: The layer's input.
            rope_cache: [>= S, 2 * head_dim], the rotary table at the positions of a row.
            spans: The documents of a packed row; None if every row is one.
        """
        return self.place(h, partial(self.attention, rope_cache=rope_cache, attention_masks=spans or WHOLE_ROWS))

    def place(self, h: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The layer's computation, with the norms in their places.

        Args:
            h: [B, S, D], the layer's input.
            attend: The layer's attention, [B, S, D] -> [B, S, D].

        Returns:
            [B, S, D]. An exported model runs this method's source, and that of ``enter`` and ``leave``, on modules of
            the same names: it may use ``torch``, ``nn``, ``F`` and the layer's own modules.
        """
        raise NotImplementedError

    @staticmethod
    def enter(h: torch.Tensor, boundary_norm: nn.Module) -> torch.Tensor:
        """What happens to the embeddings [B, S, D] before the first layer."""
        return h

    @staticmethod
    def leave(h: torch.Tensor, boundary_norm: nn.Module) -> torch.Tensor:
        """What happens to the last layer's output [B, S, D] before the head."""
        return h


@placement("pre")
class PreNorm(DecoderLayer):
    """Norms on the branches, the residual stream itself is never normed: h' = h + Attn(N1(h)); out = h' + MLP(N2(h')).
    The boundary norm is a final norm: logits = W_lm N_final(h_K). This is Qwen3 itself (paper, section on placements).
    """

    is_qwen3 = True

    def place(self, h: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        h = h + attend(self.attention_norm(h))
        return h + self.feed_forward(self.ffn_norm(h))

    @staticmethod
    def leave(h: torch.Tensor, boundary_norm: nn.Module) -> torch.Tensor:
        return boundary_norm(h)


@placement("post")
class PostNorm(DecoderLayer):
    """Norms on the residual stream after each addition: h' = N1(h + Attn(h)); out = N2(h' + MLP(h')).
    The boundary norm is an entry norm, h_0 = N_entry(E(x)), and nothing stands before the head: the last layer's N2 has
    normed what the head sees.
    """

    def place(self, h: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        h = self.attention_norm(h + attend(h))
        return self.ffn_norm(h + self.feed_forward(h))

    @staticmethod
    def enter(h: torch.Tensor, boundary_norm: nn.Module) -> torch.Tensor:
        return boundary_norm(h)
