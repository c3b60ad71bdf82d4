"""The frozen teacher: a Qwen3 from files (``files.py``), run by torchtitan's own Qwen3 model.

``build_teacher`` makes the model on the meta device without its head, shards it if asked to, and streams the weights into
place tensor by tensor, each rank only its own shard. ``TeacherModel.hidden_states`` turns the valid tokens of some
documents into final, normed hidden states, in one packed row or in padded ones; logits are never formed here.
"""

import os
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model

from blockgrow_titan.model.attention import packed_row, within_documents
from blockgrow_titan.teacher.files import CONFIG, TeacherFiles
from blockgrow_titan.teacher.layout import tensor_layout


def meta_teacher(
    args: Qwen3ModelArgs, dtype: torch.dtype, mesh: DeviceMesh | None = None, packed: bool = False
) -> Qwen3Model:
    """The frozen model without its head, on the meta device: it will return final, normed hidden states.

    Args:
        args: The model's dimensions.
        dtype: Data type of the weights.
        mesh: One-dimensional mesh of the ranks that share one copy by FSDP, or None for a full copy.
        packed: Make it for packed rows: its ``attention_masks`` are then the spans of ``packed_row``.
    """
    with torch.device("meta"):
        model = Qwen3Model(args)
    model.output = None
    if packed:
        for layer in model.layers.values():
            within_documents(layer.attention)
    model.to(dtype).requires_grad_(False).eval()
    if mesh is not None:
        # The gradients' settings do not matter here: nothing is ever reduced.
        for unit in (model.tok_embeddings, *model.layers.values()):
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
    return model


def hf_parameters(model: nn.Module, args: Qwen3ModelArgs) -> dict[str, nn.Parameter]:
    """Hugging Face name -> parameter of a model without its head, by torchtitan's own name map."""
    parameters = dict(model.named_parameters())
    return {name: parameters[fqn] for name, (fqn, _) in tensor_layout(args).items() if fqn in parameters}


class TeacherModel:
    """A frozen Qwen3 without its head. Make it with ``build_teacher``.

    Attributes:
        sharded: True if ``hidden_states`` must be called by all ranks of a shard group together.
        packed: True if documents are run end to end in one row; else each has a row, padded to the longest.
        num_parameters: Parameters of the whole model, the head not counted.
    """

    def __init__(
        self, model: Qwen3Model, dtype: torch.dtype, device: torch.device, sharded: bool, packed: bool
    ) -> None:
        self.model, self.dtype, self.device, self.sharded, self.packed = model, dtype, device, sharded, packed
        self.num_parameters = sum(param.numel() for param in model.parameters())

    @property
    def hidden_size(self) -> int:
        return self.model.model_args.dim

    @torch.no_grad()
    def hidden_states(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Final, normed hidden states of documents, each seen alone from its first token.

        A document's result depends on its own tokens only: a packed row's attention stays within each document, and right
        padding needs no mask under causal attention.

        Args:
            ids: [N] integers, the documents' tokens one document after the other.
            lengths: [B] integers >= 0, the documents' lengths; their sum is N.

        Returns:
            [N, D] in the teacher's dtype, on its device. With N = 0 a sharded teacher still runs a forward, of one
            token, because the other ranks of its group need this rank's shards.

        Raises:
            ValueError: If the lengths do not fit ``ids``, a document is longer than the model was built for, or an id
                is not in the vocabulary.
        """
        ids, lengths = ids.to("cpu", torch.int64), lengths.to("cpu", torch.int64)
        self._check(ids, lengths)
        if not len(ids):
            if self.sharded:
                self._run(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
            return torch.empty(0, self.hidden_size, dtype=self.dtype, device=self.device)
        return self._run(ids, lengths[lengths > 0])

    def _run(self, ids: Tensor, lengths: Tensor) -> Tensor:
        if self.packed:
            row = ids[None].to(self.device)  # [1, N]
            spans, positions = packed_row(row, lengths.tolist(), self.model.model_args.max_seq_len)
            return self.model(row, spans, positions[None])[0]  # [N, D]
        mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]  # [B, S]
        tokens = torch.zeros(mask.shape, dtype=torch.int64)  # [B, S]
        tokens[mask] = ids
        hidden = self.model(tokens.to(self.device))  # [B, S, D]
        return hidden.flatten(0, 1)[mask.flatten().nonzero()[:, 0].to(self.device)]  # [N, D]

    def _check(self, ids: Tensor, lengths: Tensor) -> None:
        longest = self.model.model_args.max_seq_len
        if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > longest):
            raise ValueError(f"a document's length must be 0 to training.seq_len = {longest}, got {lengths.tolist()}")
        if int(lengths.sum()) != len(ids):
            raise ValueError(f"the lengths of the documents sum to {int(lengths.sum())}, but there are {len(ids)} ids")
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.model.vocab_size):
            raise ValueError(
                f"token ids {int(ids.min())} to {int(ids.max())} do not fit the teacher's vocabulary of "
                f"{self.model.vocab_size}: student and teacher must share a tokenizer"
            )


def build_teacher(
    files: TeacherFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_seq_len: int,
    mesh: DeviceMesh | None = None,
    packed: bool = False,
) -> TeacherModel:
    """The teacher with its weights, frozen and in eval mode.

    Args:
        files: The teacher's files, from ``open_teacher``.
        dtype: Data type of weights and hidden states.
        device: Where it runs.
        max_seq_len: The longest document, ``training.seq_len``; RoPE's table is computed in fp32 for it.
        mesh: One-dimensional mesh of the ranks that share one copy by FSDP, or None for a full copy here. All of them
            must call together, and each reads its own shard of the files only.
        packed: Whether it runs documents end to end in one row, or padded.

    Raises:
        ValueError: If ``max_seq_len`` is beyond the teacher's ``max_position_embeddings``, or a weight is not finite.
    """
    if max_seq_len > files.args.max_seq_len:
        raise ValueError(
            f"training.seq_len = {max_seq_len} is beyond the teacher's max_position_embeddings = "
            f"{files.args.max_seq_len} ({os.path.join(files.folder, CONFIG)}): lower --training.seq_len"
        )
    args = replace(files.args, max_seq_len=max_seq_len)
    model = meta_teacher(args, dtype, mesh, packed)
    model.to_empty(device=device)
    with torch.device("cpu"):
        model.rope_cache = model._precompute_rope_cache().to(device)  # [max_seq_len, 2 * head_dim], fp32
    parameters = hf_parameters(model, args)
    with torch.no_grad():
        for name, param in parameters.items():
            if isinstance(param, DTensor):
                param.to_local().copy_(_local_rows(files, name, param))
            else:
                param.copy_(files.read(name))
            files.close()
    filled = {id(param) for param in parameters.values()} | {id(model.rope_cache)}
    random = [name for name, p in (*model.named_parameters(), *model.named_buffers()) if id(p) not in filled]
    assert not random, f"no file gave values to {', '.join(random)}"
    return TeacherModel(model, dtype, device, sharded=mesh is not None, packed=packed)


def _local_rows(files: TeacherFiles, name: str, param: DTensor) -> Tensor:
    """This rank's rows of a parameter that FSDP shards on dim 0: ``torch.chunk``'s division, the last ones shorter."""
    rows, mesh = param.shape[0], param.device_mesh
    per_rank = -(-rows // mesh.size())
    start = min(mesh.get_local_rank() * per_rank, rows)
    return files.read_slice(name, start, min(start + per_rank, rows))
