# Copyright (c) The blockgrow_titan authors.
# All rights reserved.
#
# This source code is licensed under the BSD-3-Clause license.

"""A Qwen3 block stack whose norms stand where its placement says, for transformers.

Everything but the norms is transformers' Qwen3: attention, KV cache, masks, rotary embedding, generation. A placement's
``place`` is one decoder layer's computation; its ``enter`` and ``leave`` say what the one boundary norm does before the
first layer and after the last. This file needs torch and transformers (4.57 or later) only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401  (for a placement's code)
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer


class BlockStackConfig(Qwen3Config):
    """Qwen3's config with ``placement`` and ``layers_per_block``, under a model type of its own."""

    model_type = "qwen3_block_stack"


class LayerArgs:
    """What a placement's ``__init__`` may ask for, under the names that it has in training.

    Args:
        config: The model's config.
        layer_idx: Position of the layer, from 0; Qwen3's layer needs it for the KV cache.
    """

    def __init__(self, config: BlockStackConfig, layer_idx: int) -> None:
        self.config, self.layer_idx = config, layer_idx
        self.placement, self.layers_per_block = config.placement, config.layers_per_block
        self.vocab_size, self.dim, self.hidden_dim = config.vocab_size, config.hidden_size, config.intermediate_size
        self.n_heads, self.n_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.max_seq_len = config.head_dim, config.max_position_embeddings
        self.norm_eps, self.init_std = config.rms_norm_eps, config.initializer_range
        self.n_layers = config.num_hidden_layers
        self.active_blocks = self.n_layers // self.layers_per_block


class DecoderLayer(Qwen3DecoderLayer):
    """A Qwen3 decoder layer whose norms a subclass places.

    Its modules have Qwen3's names in files, and in a placement's code the names that they have in training.
    """

    qwen3_names = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "feed_forward": "mlp"}

    def __init__(self, args: LayerArgs) -> None:
        super().__init__(args.config, args.layer_idx)

    @property
    def attention_norm(self) -> nn.Module:
        """Qwen3's ``input_layernorm``."""
        return self.input_layernorm

    @property
    def ffn_norm(self) -> nn.Module:
        """Qwen3's ``post_attention_layernorm``."""
        return self.post_attention_layernorm

    @property
    def feed_forward(self) -> nn.Module:
        """Qwen3's ``mlp``."""
        return self.mlp

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(self.qwen3_names.get(name, name), value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(self.qwen3_names.get(name, name))

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """One layer: [B, S, D] -> [B, S, D]; the keywords are those of Qwen3's attention."""

        def attend(h: torch.Tensor) -> torch.Tensor:
            return self.self_attn(hidden_states=h, **kwargs)[0]

        return self.place(hidden_states, attend)

    def place(self, h: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The layer's computation on h [B, S, D], with ``attend`` [B, S, D] -> [B, S, D] as its attention."""
        raise NotImplementedError

    @staticmethod
    def enter(h: torch.Tensor, boundary_norm: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What happens to the embeddings [B, S, D] before the first layer."""
        return h

    @staticmethod
    def leave(h: torch.Tensor, boundary_norm: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What happens to the last layer's output [B, S, D] before the head."""
        return h


StudentLayer = DecoderLayer  # an exported file has its placement here, and names it


class BoundaryNorm(nn.RMSNorm):
    """The one norm outside the layers, called where Qwen3 has its final norm, and on the embeddings."""

    def forward(self, h: torch.Tensor, entering: bool = False) -> torch.Tensor:
        """[B, S, D] -> [B, S, D], as the placement's ``enter`` or ``leave`` says."""
        step = StudentLayer.enter if entering else StudentLayer.leave
        return step(h, super().forward)


class BlockStackModel(Qwen3Model):
    """Embeddings, ``enter``, the layers, ``leave``: final hidden states."""

    config_class = BlockStackConfig
    _no_split_modules = [StudentLayer.__name__]

    def __init__(self, config: BlockStackConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(StudentLayer(LayerArgs(config, i)) for i in range(len(self.layers)))
        self.norm = BoundaryNorm(config.hidden_size, eps=config.rms_norm_eps)  # type: ignore[assignment]
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *args: Any,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As Qwen3Model's, with the placement's ``enter`` on the embeddings."""
        if input_ids is not None and inputs_embeds is None:
            input_ids, inputs_embeds = None, self.embed_tokens(input_ids)
        if inputs_embeds is not None:
            inputs_embeds = self.norm(inputs_embeds, entering=True)
        return super().forward(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)


class BlockStackForCausalLM(Qwen3ForCausalLM):
    """``BlockStackModel`` with a language-modelling head."""

    config_class = BlockStackConfig
    _no_split_modules = [StudentLayer.__name__]

    def __init__(self, config: BlockStackConfig) -> None:
        super().__init__(config)
        self.model = BlockStackModel(config)
        self.post_init()
