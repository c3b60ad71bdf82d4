"""Placements as a user would add them, registered when ``experimental.custom_import`` names this module.

Every registration is undone by ``forget``, for the other tests count the package's own.
"""

import torch
import torch.nn.functional as F
from torch import nn

import blockgrow_titan  # noqa: F401  (registers the train spec, which custom_import must)
from blockgrow_titan.model.placement import PLACEMENTS, DecoderLayer, PostNorm, PreNorm, placement


@placement("sandwich")
class SandwichNorm(DecoderLayer):
    """Norms before and after each branch, with two norms of its own."""

    def __init__(self, args):
        super().__init__(args)
        self.attention_out_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_out_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def place(self, h, attend):
        h = h + self.attention_out_norm(attend(self.attention_norm(h)))
        return h + self.ffn_out_norm(self.feed_forward(self.ffn_norm(h)))

    @staticmethod
    def enter(h, boundary_norm):
        return h

    @staticmethod
    def leave(h, boundary_norm):
        return boundary_norm(h)


@placement("scaled_post")
class ScaledPostNorm(PostNorm):
    """Post-norm with a residual scale that follows the depth, and a LayerNorm in the place of an RMSNorm."""

    def __init__(self, args):
        super().__init__(args)
        self.alpha = (2 * args.n_layers) ** 0.25
        self.ffn_norm = nn.LayerNorm(args.dim)

    # A comment and a helper that is a method: both stay.
    @torch.no_grad()
    def scale(self):
        return self.alpha

    def place(self, h, attend):
        h = self.attention_norm(self.scale() * h + attend(h))
        return self.ffn_norm(self.scale() * h + self.feed_forward(h))


@placement("doubled_pre")
class DoubledPreNorm(PreNorm):
    """A subclass of Qwen3's own placement is not Qwen3."""

    def place(self, h, attend):
        return super().place(h, attend) + h


def _helper(h):
    return 2 * h


@placement("helped")
class HelpedNorm(PostNorm):
    """Uses a function of its module, in a branch that no forward of the check would reach."""

    def place(self, h, attend):
        return _helper(h) if h.shape[1] > 100 else super().place(h, attend)


@placement("importing")
class ImportingNorm(PostNorm):
    """Imports from a package that whoever loads the file may lack; math would be fine."""

    def place(self, h, attend):
        import math

        from blockgrow_titan.model.init import clean_fqn

        return super().place(h * math.sqrt(len(clean_fqn("norm"))), attend)


@placement("buffered")
class BufferedNorm(PostNorm):
    """Has a tensor that no file holds."""

    def __init__(self, args):
        super().__init__(args)
        self.register_buffer("gain", torch.ones(args.dim), persistent=False)


@placement("weighted")
class WeightedNorm(PreNorm):
    """Reads the boundary norm's weight, which an exported file hands over as a function."""

    @staticmethod
    def leave(h, boundary_norm):
        return boundary_norm(h) * boundary_norm.weight


@placement("shifted")
class ShiftedNorm(PostNorm):
    """Mixes each position with the one before, which a KV cache does not remember."""

    def place(self, h, attend):
        return super().place(h + F.pad(h, (0, 0, 1, 0))[:, :-1], attend)


@placement("taken")
class BlockStackModel(PostNorm):
    """Has the name of another class of the exported file."""


placement("sourceless")(type("Sourceless", (PostNorm,), {"__module__": __name__}))

_OWN = {name: PLACEMENTS[name] for name in PLACEMENTS if PLACEMENTS[name].__module__ == __name__}


def remember() -> None:
    """Register these placements (again)."""
    PLACEMENTS.update(_OWN)


def forget() -> None:
    """Leave the package's own placements only."""
    for name in _OWN:
        PLACEMENTS.pop(name, None)
