"""The files of a teacher: a Hugging Face folder of a Qwen3, or that folder converted to a distributed checkpoint.

``open_teacher`` looks at a folder and gives its ``TeacherFiles``: the model's dimensions from ``config.json``, and its
tensors by their Hugging Face names, whole or by rows. Opening reads configs and headers only, and refuses whatever can
be seen there in one line: another kind of model, absent or cut files, and every tensor that is missing, of no use, of
another shape or of another dtype. Values are checked when they are read: one that is not finite is refused.

No collective runs here: each rank opens the folder itself and reads the rows that it holds.
"""

import json
import math
import os
from abc import ABC, abstractmethod
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

from blockgrow_titan.checkpoint_io import CheckpointReader, one_line
from blockgrow_titan.teacher.layout import (
    CONFIG,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    KINDS,
    Header,
    hf_names,
    model_args,
    shortened,
    tensor_problems,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DCP_METADATA = ".metadata"

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class AbsentFiles(ValueError):
    """The folder, its config or its weights are not there; in a dry run that is no fault.

    Args:
        text: As of any refusal.
        args_of_config: The dimensions, if ``config.json`` is there.
    """

    def __init__(self, text: str, args_of_config: Qwen3ModelArgs | None = None) -> None:
        super().__init__(text)
        self.args_of_config = args_of_config


class TeacherFiles(ABC):
    """A dense Qwen3 on disk. Open it with ``open_teacher``.

    Args:
        folder: Absolute path of the folder.
        role: What the errors call it: "teacher" for training.

    Attributes:
        args: The model's dimensions; ``max_seq_len`` is the longest sequence that it was made for.
        tied: Whether the head is the embedding.

    Raises:
        ValueError: In one line with the folder and what to do: a file is absent, unreadable or cut; the config is not a
            Qwen3's or lacks a field; tensors are missing, unused, misshapen or of another dtype than bf16, fp16, fp32.
        NotImplementedError: The config asks for what torchtitan's Qwen3 does not have, or is quantised.
    """

    def __init__(self, folder: str, role: str = "teacher") -> None:
        self.folder, self._subject = folder, f"the {role} in {folder}"
        self.args = model_args(self._json(CONFIG, f"give {KINDS}"), self._subject)
        self.tied = self.args.enable_weight_tying
        self._headers = self._read_headers()
        self._check_headers()

    def names(self) -> list[str]:
        """Hugging Face names of all tensors in the folder, in the order in which its files hold them."""
        return list(self._headers)

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor, from its header."""
        return list(self._headers[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor in its file: bfloat16, float16 or float32."""
        dtype = self._headers[name].dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    def read(self, name: str) -> Tensor:
        """The tensor of a Hugging Face name, on CPU in the file's dtype; for errors see ``read_slice``."""
        return self.read_slice(name, 0, self._headers[name].shape[0])

    def read_slice(self, name: str, start: int, stop: int, check_finite: bool = True) -> Tensor:
        """Rows [start, stop) of a tensor, on CPU in the file's dtype; of the other rows as little as possible is read.

        Args:
            name: Hugging Face name.
            start: First row, 0 <= start <= stop.
            stop: The row after the last, at most the tensor's rows.
            check_finite: Refuse values that are not finite.

        Raises:
            ValueError: If a value is NaN or infinite, or the file's content cannot be read.
        """
        rows = self._rows(name, start, stop)
        if check_finite and not is_finite(rows):
            raise self._error(f"has values that are not finite in {name}: take weights that are whole")
        return rows

    def embedding(self) -> Tensor:
        """[V, D] token embedding, on CPU in the file's dtype."""
        return self.read(EMBEDDING)

    def head(self) -> Tensor:
        """[V, D] language-modelling head, the embedding when tied, on CPU in the file's dtype."""
        if not self.tied:
            return self.read(HEAD)
        self.check_tied_head()
        return self.read(EMBEDDING)

    def final_norm(self) -> Tensor:
        """[D] weight of the final RMSNorm, on CPU in the file's dtype."""
        return self.read(FINAL_NORM)

    def check_tied_head(self) -> None:
        """Raise ``ValueError`` if the embeddings are tied and the folder has a head that is not the embedding."""
        if not self.tied or HEAD not in self._headers:
            return
        head, embedding = (self._rows(name, 0, self.args.vocab_size) for name in (HEAD, EMBEDDING))
        if head.dtype != embedding.dtype or not torch.equal(head.view(torch.uint8), embedding.view(torch.uint8)):
            raise self._error(
                f"has tie_word_embeddings = true in {CONFIG}, but its {HEAD} differs from {EMBEDDING}: set "
                "tie_word_embeddings to false if that head is meant, else remove it from the weights"
            )

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open, so that the pages that were read do not count as this process's memory."""

    @abstractmethod
    def _read_headers(self) -> dict[str, Header]:
        """The header of every tensor by its Hugging Face name, in the order of the files."""

    @abstractmethod
    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor."""

    def _absent(self, text: str) -> AbsentFiles:
        return AbsentFiles(f"{self._subject} {text}", getattr(self, "args", None))

    def _error(self, text: str) -> ValueError:
        return ValueError(f"{self._subject} {text}")

    def _json(self, name: str, advice: str) -> dict[str, Any]:
        path = os.path.join(self.folder, name)
        if not os.path.isfile(path):
            raise self._absent(f"has no {name}: {advice}")
        try:
            with open(path, encoding="utf-8") as file:
                value = json.load(file)
        except OSError as error:
            raise self._error(f"has a {name} that cannot be read ({error.strerror}): check its permissions") from error
        except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8, numbers too long, lists too deep
            raise self._error(f"has a {name} that is not JSON ({error}): download it again") from error
        if not isinstance(value, dict):
            raise self._error(f"has a {name} that holds no JSON object: download it again")
        return value

    def _check_headers(self) -> None:
        if problems := tensor_problems(self._headers, self.args):
            raise self._error(
                f"does not have the tensors of a Qwen3; {problems}. Take config and weights of one model, downloaded "
                "whole, in bf16, fp16 or fp32"
            )


class HuggingFaceFiles(TeacherFiles):
    """``config.json`` and one or more safetensors files, of which one at a time is mapped into memory."""

    def _read_headers(self) -> dict[str, Header]:
        self._opened: tuple[str, Any] = ("", None)
        self._file_of: dict[str, str] = {}
        headers = {}
        index = self._index()
        for file in sorted(set(index.values())) or [SINGLE]:
            handle = self._open(file)
            for name in handle.offset_keys():
                if index.get(name, file) == file:
                    view = handle.get_slice(name)
                    dtype = view.get_dtype()
                    headers[name] = Header(tuple(view.get_shape()), _DTYPES.get(dtype, dtype))
                    self._file_of[name] = file
        return headers

    def _index(self) -> dict[str, str]:
        """Tensor -> file, as the index says; empty without an index, when one file has all."""
        if not os.path.isfile(os.path.join(self.folder, INDEX)):
            if not os.path.isfile(os.path.join(self.folder, SINGLE)):
                raise self._absent(
                    f"has neither {SINGLE} nor {INDEX}: its weights must be in safetensors format (save_pretrained of "
                    "transformers writes it)"
                )
            return {}
        files = self._json(INDEX, "download it").get("weight_map")
        if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
            raise self._error(f"has no weight_map in {INDEX}: download it again")
        if outside := [file for file in sorted(set(files.values())) if os.path.basename(file) != file]:
            raise self._error(f"has a {INDEX} that names {shortened(outside)}, which is not in the folder: download it")
        absent = [f for f in sorted(set(files.values())) if not os.path.isfile(os.path.join(self.folder, f))]
        if absent:
            raise self._absent(f"has a {INDEX} that names {shortened(absent)}, which is not there: download it")
        return files

    def _open(self, file: str) -> Any:
        if self._opened[0] != file:
            try:
                handle = safe_open(os.path.join(self.folder, file), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                text = f"has a {file} that is not a whole safetensors file ({error}): download it again"
                raise self._error(text) from error
            self._opened = (file, handle)
        return self._opened[1]

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._open(self._file_of[name]).get_slice(name)[start:stop]

    def close(self) -> None:
        """Unmap the file that is open; the next read opens it again."""
        self._opened = ("", None)


class ConvertedFiles(TeacherFiles):
    """``config.json`` and a distributed checkpoint in torchtitan's names, as ``hf/from_hf.py`` writes it."""

    def _read_headers(self) -> dict[str, Header]:
        self._reader = CheckpointReader(self.folder)
        try:
            metadata = self._reader.read_metadata()
            ends = [
                (str(stored.relative_path), int(stored.offset + stored.length))
                for stored in metadata.storage_data.values()
            ]
            self._tensors: dict[str, Any] = metadata.state_dict_metadata
            self._fqns = hf_names(self._tensors, self.args)
            headers = {name: _header(self._tensors[fqn]) for name, fqn in self._fqns.items()}
        except Exception as error:  # a damaged pickle raises almost anything, and may hold anything
            raise self._error(
                f"has a {DCP_METADATA} that cannot be read ({one_line(error.__cause__ or error)}): convert its source again"
            ) from error
        self._check_files(ends)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        return headers

    def _check_files(self, ends: list[tuple[str, int]]) -> None:
        sizes: dict[str, int] = {}
        for file, end in ends:
            sizes[file] = max(end, sizes.get(file, 0))
        for file, size in sizes.items():
            path = os.path.join(self.folder, file)
            found = os.path.getsize(path) if os.path.isfile(path) else None
            if found is None or found < size:
                state = "is not there" if found is None else f"has {found:,} of its {size:,} bytes"
                raise self._error(f"is not whole: {file} {state}; convert its source again")

    def close(self) -> None:
        """Nothing stays open here."""

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        fqn, shape = self._fqns[name], self._headers[name].shape
        buffer = torch.empty(stop - start, *shape[1:], dtype=self.dtype(name))
        if not buffer.numel():
            return buffer
        wanted = ChunkStorageMetadata(torch.Size([start] + [0] * (len(shape) - 1)), buffer.shape)
        try:
            items = create_read_items_for_chunk_list(fqn, self._tensors[fqn], [wanted])
            complete = sum(math.prod(item.lengths) for item in items) == buffer.numel()
            if complete:
                self._reader.read_data(LoadPlan(items), _IntoBuffer(buffer)).wait()
        except Exception as error:  # as above
            raise self._error(f"cannot be read at {name} ({one_line(error)}): convert its source again") from error
        if not complete:
            raise self._error(f"does not have all rows of {name}: convert its source again")
        return buffer


class _IntoBuffer(DefaultLoadPlanner):
    """Puts what is read of one tensor into a buffer that is the wanted part of it."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.buffer = buffer

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        region = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self.buffer[tuple(slice(start, start + length) for start, length in region)]


def open_teacher(folder: str, role: str = "teacher") -> TeacherFiles:
    """The files of a Hugging Face folder, or of a converted checkpoint if it has DCP's ``.metadata``.

    Args:
        folder: The folder, for training from ``paths.resolve(teacher.path)``.
        role: What errors call it.

    Raises:
        ValueError, NotImplementedError: See ``TeacherFiles``.
    """
    if not os.path.isdir(folder):
        raise AbsentFiles(f"there is no {role} folder {folder}: give {KINDS}")
    kind = ConvertedFiles if os.path.isfile(os.path.join(folder, DCP_METADATA)) else HuggingFaceFiles
    return kind(folder, role)


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite; without a temporary tensor of the same size."""
    return not tensor.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))


def _header(stored: Any) -> Header:
    if not isinstance(stored, TensorStorageMetadata):
        return Header((), "not a tensor")
    return Header(tuple(stored.size), stored.properties.dtype)
