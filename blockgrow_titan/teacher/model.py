"""The frozen teacher: a Qwen3 from a Hugging Face folder, run by torchtitan's own Qwen3 model.

``TeacherFiles`` reads the folder (config, names, shapes, single tensors or slices of them) and refuses a bad one in one
line. ``build_teacher`` makes the model on the meta device without its head, shards it if asked to, and streams the
weights into place tensor by tensor, each rank only its own shard. ``TeacherModel.hidden_states`` turns the valid tokens
of some documents into final, normed hidden states; logits are never formed here.
"""

import json
import os
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}


class TeacherFiles:
    """A Hugging Face folder of a dense Qwen3: ``config.json`` and one or more safetensors files.

    Args:
        folder: The folder, from ``paths.resolve(teacher.path)``.

    Attributes:
        args: The model's dimensions; ``max_seq_len`` is the longest sequence that it was made for.
        tied: Whether the head is the embedding.

    Raises:
        ValueError: In one line with the file and what to do: the folder or a file is absent or unreadable, the config
            is not a Qwen3's or lacks a field, a tensor is missing or its shape is not the config's.
        NotImplementedError: The config asks for what torchtitan's Qwen3 does not have.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        if not os.path.isdir(folder):
            raise ValueError(
                f"there is no teacher folder {folder}; set teacher.path to a Hugging Face folder of a Qwen3"
            )
        self.args = _model_args(self._json(CONFIG, "it must be a Hugging Face folder"), os.path.join(folder, CONFIG))
        self.tied = self.args.enable_weight_tying
        self._handles: dict[str, Any] = {}
        self._file_of = self._find_tensors()
        self._check_shapes()

    def names(self) -> list[str]:
        """Hugging Face names of all tensors in the folder's files."""
        return sorted(self._file_of)

    def read(self, name: str) -> Tensor:
        """The tensor of a Hugging Face name, on CPU in the file's dtype."""
        return self._handle(name).get_tensor(name)

    def read_slice(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, on CPU; the other rows are not read."""
        return self._handle(name).get_slice(name)[start:stop]

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor, from its file's header."""
        return list(self._handle(name).get_slice(name).get_shape())

    def embedding(self) -> Tensor:
        """[V, D] token embedding, on CPU in the file's dtype."""
        return self.read(EMBEDDING)

    def head(self) -> Tensor:
        """[V, D] language-modelling head, the embedding when tied, on CPU in the file's dtype."""
        return self.read(EMBEDDING if self.tied else HEAD)

    def final_norm(self) -> Tensor:
        """[D] weight of the final RMSNorm, on CPU in the file's dtype."""
        return self.read(FINAL_NORM)

    def _json(self, name: str, why: str) -> dict[str, Any]:
        path = os.path.join(self.folder, name)
        if not os.path.isfile(path):
            raise ValueError(f"the teacher has no {path}: {why}; set teacher.path to a complete one")
        try:
            with open(path, encoding="utf-8") as file:
                value = json.load(file)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"the teacher's {path} is not JSON ({error}); download it again") from error
        if not isinstance(value, dict):
            raise ValueError(f"the teacher's {path} must hold a JSON object; download it again")
        return value

    def _find_tensors(self) -> dict[str, str]:
        """Hugging Face name -> file name."""
        if not os.path.isfile(os.path.join(self.folder, INDEX)):
            if not os.path.isfile(os.path.join(self.folder, SINGLE)):
                raise ValueError(
                    f"the teacher's folder {self.folder} has neither {SINGLE} nor {INDEX}; its weights must be in "
                    "safetensors format (save_pretrained of transformers writes it)"
                )
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        index = self._json(INDEX, "it lists the weight files")
        if not isinstance(index.get("weight_map"), dict):
            raise ValueError(f"the teacher's {os.path.join(self.folder, INDEX)} has no weight_map; download it again")
        for file in sorted(set(index["weight_map"].values())):
            if not os.path.isfile(os.path.join(self.folder, file)):
                raise ValueError(
                    f"the teacher's {os.path.join(self.folder, INDEX)} names {file}, which is not there; download it"
                )
        return index["weight_map"]

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            path = os.path.join(self.folder, file)
            try:
                self._handles[file] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"the teacher's {path} is not a whole safetensors file ({error}); download it again"
                ) from error
        return self._handles[file]

    def _handle(self, name: str) -> Any:
        file = self._file_of.get(name)
        handle = None if file is None else self._open(file)
        if handle is None or name not in handle.keys():  # a handle is no dict
            where = self.folder if file is None else os.path.join(self.folder, file)
            raise ValueError(f"the teacher's tensor {name} is missing in {where}; download the teacher again")
        return handle

    def _check_shapes(self) -> None:
        """Every tensor that the model needs is there in its shape; reads headers only."""
        expected = {hf: list(p.shape) for hf, p in hf_parameters(_meta_model(self.args), self.args).items()}
        if not self.tied:
            expected[HEAD] = [self.args.vocab_size, self.args.dim]
        for name, shape in expected.items():
            if self.shape(name) != shape:
                raise ValueError(
                    f"the teacher's tensor {name} in {os.path.join(self.folder, self._file_of[name])} has shape "
                    f"{self.shape(name)}, but {CONFIG} says {shape}; use the config that belongs to the weights"
                )


def _model_args(config: dict[str, Any], path: str) -> Qwen3ModelArgs:
    """torchtitan's arguments of a Hugging Face Qwen3 config, old layout or new."""
    if config.get("model_type") != "qwen3":
        raise ValueError(
            f'{path} has model_type "{config.get("model_type")}"; the teacher must be a dense Qwen3 ("qwen3"): set '
            "teacher.path to one"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    for name, value, supported in (
        ("rope_type", rope_type, "default"),
        ("use_sliding_window", bool(config.get("use_sliding_window")), False),
        ("attention_bias", bool(config.get("attention_bias")), False),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
    ):
        if value != supported:
            raise NotImplementedError(f"{path} has {name} = {value}; only {supported} is supported")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    needed = {field: config.get(field) for field in (*_SIZES.values(), "rms_norm_eps")} | {"rope_theta": theta}
    for field, value in needed.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{path} has {field} = {value}; it must be a positive number, as in a published Qwen3")
    return Qwen3ModelArgs(
        **{ours: int(needed[theirs]) for ours, theirs in _SIZES.items()},  # type: ignore[arg-type]
        norm_eps=float(needed["rms_norm_eps"]),  # type: ignore[arg-type]
        rope_theta=float(needed["rope_theta"]),  # type: ignore[arg-type]
        enable_weight_tying=bool(config.get("tie_word_embeddings", False)),
    )


def _meta_model(args: Qwen3ModelArgs) -> Qwen3Model:
    """The model without its head, on the meta device: it returns final, normed hidden states."""
    with torch.device("meta"):
        model = Qwen3Model(args)
    model.output = None
    return model


def hf_parameters(model: nn.Module, args: Qwen3ModelArgs) -> dict[str, nn.Parameter]:
    """Hugging Face name -> parameter, by torchtitan's own name map."""
    adapter = Qwen3StateDictAdapter(args, None)
    return {next(iter(adapter.to_hf({fqn: param}))): param for fqn, param in model.named_parameters()}


class TeacherModel:
    """A frozen Qwen3 without its head. Make it with ``build_teacher``.

    Attributes:
        sharded: True if ``hidden_states`` must be called by all ranks of a shard group together.
        num_parameters: Parameters of the whole model, the head not counted.
    """

    def __init__(self, model: Qwen3Model, dtype: torch.dtype, device: torch.device, sharded: bool) -> None:
        self.model, self.dtype, self.device, self.sharded = model, dtype, device, sharded
        self.num_parameters = sum(param.numel() for param in model.parameters())

    @property
    def hidden_size(self) -> int:
        return self.model.model_args.dim

    @torch.no_grad()
    def hidden_states(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Final, normed hidden states of documents, each seen alone from its first token.

        Right padding needs no mask under causal attention, so a document's result depends on its own tokens only.

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
                self.model(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
            return torch.empty(0, self.hidden_size, dtype=self.dtype, device=self.device)
        lengths = lengths[lengths > 0]
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
) -> TeacherModel:
    """The teacher with its weights, frozen and in eval mode.

    Args:
        files: The teacher's folder.
        dtype: Data type of weights and hidden states.
        device: Where it runs.
        max_seq_len: The longest document, ``training.seq_len``; RoPE's table is computed in fp32 for it.
        mesh: One-dimensional mesh of the ranks that share one copy by FSDP, or None for a full copy here. All of them
            must call together, and each reads its own shard of the files only.

    Raises:
        ValueError: If ``max_seq_len`` is beyond the teacher's ``max_position_embeddings``.
    """
    if max_seq_len > files.args.max_seq_len:
        raise ValueError(
            f"training.seq_len = {max_seq_len} is beyond the teacher's max_position_embeddings = "
            f"{files.args.max_seq_len} ({os.path.join(files.folder, CONFIG)}): lower --training.seq_len"
        )
    args = replace(files.args, max_seq_len=max_seq_len)
    model = _meta_model(args).to(dtype)
    model.requires_grad_(False)
    model.eval()
    if mesh is not None:
        # The gradients' settings do not matter here: nothing is ever reduced.
        for unit in (model.tok_embeddings, *model.layers.values()):
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    with torch.device("cpu"):
        model.rope_cache = model._precompute_rope_cache().to(device)  # [max_seq_len, 2 * head_dim], fp32
    with torch.no_grad():
        for name, param in hf_parameters(model, args).items():
            if isinstance(param, DTensor):
                param.to_local().copy_(_local_rows(files, name, param))
            else:
                param.copy_(files.read(name))
    return TeacherModel(model, dtype, device, sharded=mesh is not None)


def _local_rows(files: TeacherFiles, name: str, param: DTensor) -> Tensor:
    """This rank's rows of a parameter that FSDP shards on dim 0: ``torch.chunk``'s division, the last ones shorter."""
    rows, mesh = param.shape[0], param.device_mesh
    per_rank = -(-rows // mesh.size())
    start = min(mesh.get_local_rank() * per_rank, rows)
    return files.read_slice(name, start, min(start + per_rank, rows))
