"""A Hugging Face folder of a Qwen3 -> a distributed checkpoint (DCP) in torchtitan's names, beside config and tokenizer.

The weights are streamed. Each tensor is cut into chunks of rows, the chunks are dealt in file order to the checkpoint's
files, and DCP's writer asks for them one at a time: only then are these rows read. So memory holds a file's worth of
chunks (``FILE_BYTES``) and the pages of the tensor that is being read, whatever the size of the model.

Everything is written to a folder beside the wanted one, which takes its name when all is on disk: a checkpoint of that
name is whole. ``teacher.path`` takes it as it takes the folder it came from, and ``torch.distributed.checkpoint`` loads it.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from tqdm import tqdm

from blockgrow_titan.checkpoint_io import hidden_cause
from blockgrow_titan.hf.output import check_output, check_space, new_folder, sync
from blockgrow_titan.teacher.files import CONFIG, DCP_METADATA, HuggingFaceFiles, is_finite, open_teacher
from blockgrow_titan.teacher.layout import HEAD, shortened, tensor_layout

FILE_BYTES = 64 * 2**20
"""Bytes of tensors in a file of the checkpoint, unless a single row has more. DCP's writer keeps a file's tensors until
the file is done, so this bounds the memory too."""

COPIED = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What is copied from the folder as it is, where it exists."""

_PICKLED_BYTES = 4096  # at most, around each chunk in a file


def convert(hf_folder: str, out: str, *, progress: bool = True) -> None:
    """Convert a Qwen3 folder to a checkpoint of one tensor per parameter, values and dtypes unchanged.

    Args:
        hf_folder: Hugging Face folder: a single safetensors file or an index of several; embeddings tied or not (a tied
            model has no ``output.weight`` in the checkpoint); bfloat16, float16 or float32.
        out: The checkpoint's folder. It must not exist, or be empty; absent parents are made.
        progress: Show a progress bar on stderr.

    Raises:
        ValueError: In one line with what to do: ``out`` is in use or cannot be written, the disk is too small, the folder
            is no whole Qwen3 (see ``TeacherFiles``) or is converted already, its values are not finite, or its head
            differs from the embedding that it is tied to. Nothing is left of ``out`` then.
        NotImplementedError: The config asks for what torchtitan's Qwen3 does not have, or is quantised.
    """
    source, path = os.path.abspath(os.path.expanduser(hf_folder)), check_output(out, hf_folder)
    if os.path.isfile(os.path.join(source, DCP_METADATA)):
        raise ValueError(f"{source} is a checkpoint already: give a Hugging Face folder")
    files = open_teacher(source, role="model")
    assert isinstance(files, HuggingFaceFiles)
    files.check_tied_head()
    chunks = _chunks(files)
    total = sum(chunk.num_bytes for chunk in chunks)
    check_space(path, total + _PICKLED_BYTES * len(chunks))
    with new_folder(path) as folder, tqdm(total=total, unit="B", unit_scale=True, disable=not progress) as bar:
        _write_tensors(files, chunks, folder, bar)
        for name in COPIED:
            if os.path.isfile(os.path.join(source, name)):
                shutil.copyfile(os.path.join(source, name), folder / name)
                sync(folder / name)
        open_teacher(str(folder), role="converted model")  # every tensor is there, every file has its length


@dataclass(frozen=True)
class _Chunk:
    """Rows [start, stop) of a tensor."""

    name: str
    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * _row_bytes(self.shape, self.dtype)

    def write_item(self) -> WriteItem:
        offsets = torch.Size([self.start] + [0] * (len(self.shape) - 1))
        chunk = ChunkStorageMetadata(offsets, torch.Size([self.stop - self.start, *self.shape[1:]]))
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(self.shape))
        return WriteItem(MetadataIndex(self.fqn, offsets), WriteItemType.SHARD, tensor_data=data)


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape[1:]).numel() * dtype.itemsize


def _chunks(files: HuggingFaceFiles) -> list[_Chunk]:
    """All tensors of the model in row chunks of at most ``FILE_BYTES``, in the order of the files."""
    layout = tensor_layout(files.args)
    chunks = []
    for name in files.names():
        if name not in layout or (files.tied and name == HEAD):
            continue
        (fqn, shape), dtype = layout[name], files.dtype(name)
        rows = max(1, FILE_BYTES // _row_bytes(shape, dtype))
        chunks += [
            _Chunk(name, fqn, shape, dtype, start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)
        ]
    return chunks


def _file_plans(chunks: list[_Chunk]) -> list[SavePlan]:
    """A plan for each file of the checkpoint: chunks of at most ``FILE_BYTES`` together."""
    plans: list[list[WriteItem]] = []
    room = 0
    for chunk in chunks:
        if not plans or chunk.num_bytes > room:
            plans.append([])
            room = FILE_BYTES
        plans[-1].append(chunk.write_item())
        room -= chunk.num_bytes
    return [SavePlan(items) for items in plans]


class _Reader(DefaultSavePlanner):
    """Gives DCP's writer the rows of a chunk when it is about to write them."""

    def __init__(self, files: HuggingFaceFiles, chunks: list[_Chunk], bar: tqdm) -> None:
        super().__init__(flatten_state_dict=False)
        self.files, self.bar = files, bar
        self.not_finite: dict[str, None] = {}
        self._chunks = {chunk.write_item().index: chunk for chunk in chunks}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        chunk = self._chunks[write_item.index]
        rows = self.files.read_slice(chunk.name, chunk.start, chunk.stop, check_finite=False)
        if chunk.stop == chunk.shape[0]:
            self.files.close()  # the pages of what was read count as this process's memory
        if not is_finite(rows):
            self.not_finite[chunk.name] = None
        self.bar.update(chunk.num_bytes)
        return rows.clone()


def _write_tensors(files: HuggingFaceFiles, chunks: list[_Chunk], folder: Path, bar: tqdm) -> None:
    """What ``dcp.save`` does, for one process that stands for as many ranks as there are files to write.

    ``dcp.save`` itself would hold all tensors of a rank until its file is done, and wrap Ctrl-C in an error of its own.
    """
    reader = _Reader(files, chunks, bar)
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = reader.create_global_plan([writer.prepare_local_plan(plan) for plan in _file_plans(chunks)])
    results = []
    for plan in writer.prepare_global_plan(plans):
        try:
            results.append(writer.write_data(plan, reader).value())
        except RuntimeError as error:
            raise hidden_cause(error) from None
    if reader.not_finite:
        raise ValueError(
            f"the model in {files.folder} has values that are not finite in {shortened(list(reader.not_finite))}: take "
            "weights that are whole"
        )
    writer.finish(metadata, results)
