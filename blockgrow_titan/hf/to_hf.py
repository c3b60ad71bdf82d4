"""From a checkpoint to a folder that transformers loads.

The flow: open the checkpoint (metadata only), name its tensors as Hugging Face does, write the config and, for a placement
that is not Qwen3's own, the modelling file; check on the meta device that the model which these describe has exactly these
tensors and runs; copy the tokenizer; then write the tensors, one file of at most ``max_shard_size`` after the other. All of
it happens in a temporary folder that gets its name at the end.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from blockgrow_titan.hf.card import model_card
from blockgrow_titan.hf.checkpoint import StudentCheckpoint, open_checkpoint
from blockgrow_titan.hf.from_hf import COPIED
from blockgrow_titan.hf.modeling import ARCHITECTURE, AUTO_MAP, MODEL_TYPE, MODELING_FILE, check_model, modeling_source
from blockgrow_titan.hf.output import check_output, check_space, new_folder
from blockgrow_titan.hf.verify import TOKENIZER, read_tokenizer
from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.model.state_dict_adapter import BlockStackStateDictAdapter
from blockgrow_titan.paths import resolve
from blockgrow_titan.teacher.files import CONFIG, INDEX, TeacherFiles, is_finite

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = tuple(name for name in COPIED if name not in (CONFIG, GENERATION_CONFIG))


@dataclass(frozen=True)
class Exported:
    """What ``to_hf`` wrote."""

    folder: Path
    files: int
    tensors: int
    parameters: int
    layers: int
    dtypes: str


@dataclass(frozen=True)
class _Tensors:
    """Hugging Face name -> shape and dtype of what is written, and how to read some of them as stored."""

    shapes: dict[str, torch.Size]
    dtypes: dict[str, torch.dtype]
    read: Callable[[list[str]], dict[str, torch.Tensor]]

    @property
    def parameters(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def num_bytes(self) -> int:
        return sum(shape.numel() * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    @property
    def main_dtype(self) -> str:
        """Name of the dtype that most parameters have."""
        counts: Counter[str] = Counter()
        for name, dtype in self.dtypes.items():
            counts[str(dtype).removeprefix("torch.")] += self.shapes[name].numel()
        return counts.most_common(1)[0][0]

    @property
    def dtypes_in_words(self) -> str:
        return " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in self.dtypes.values()}))


def to_hf(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str = "auto",
    max_shard_size: int | str = "5GB",
    tokenizer: str | None = None,
    custom_import: str | None = None,
    progress: bool = False,
) -> Exported:
    """Write a student, at any depth, or a converted teacher as a Hugging Face folder.

    Of the weights, one file's worth is in memory at a time, in the wider of the two dtypes. Optimizer state is not read.

    Args:
        checkpoint: A run's ``.../checkpoint/step-N``, or a folder that ``from-hf`` wrote.
        out: A folder that is absent or empty.
        dtype: "auto" (each tensor as stored), "float32", "bfloat16" or "float16".
        max_shard_size: The most bytes of tensors in a file: a number, or a string as in "5GB". A tensor is never split.
        tokenizer: Folder of the tokenizer; None for the run's ``model.hf_assets_path`` (a teacher's own).
        custom_import: Module that registers the placement; None for the one that the run imported.
        progress: Show a bar.

    Raises:
        ValueError: In one line: the checkpoint is not one, or is damaged; the tokenizer is not there or does not fit; the
            placement's code is not self-contained; a weight is not finite in the output's dtype; ``out`` is not empty.
    """
    path, max_bytes = check_output(out, checkpoint), _bytes(max_shard_size)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f'the dtype is "{dtype}": it must be auto, {", ".join(DTYPES)}')
    source = open_checkpoint(checkpoint, custom_import)
    stored = _student_tensors(source) if isinstance(source, StudentCheckpoint) else _teacher_tensors(source)
    tensors = _with_dtype(stored, dtype)
    check_space(path, tensors.num_bytes)
    with new_folder(path) as folder:
        if isinstance(source, StudentCheckpoint):
            _write_student(folder, source, tensors, dtype, tokenizer)
        else:
            _write_teacher(folder, source, tensors, dtype, tokenizer)
        files = _write_tensors(folder, tensors, max_bytes, progress)
    return Exported(path, files, len(tensors.shapes), tensors.parameters, source.args.n_layers, tensors.dtypes_in_words)


def _bytes(size: int | str) -> int:
    """A size in bytes, given as a number or with a decimal unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])?B)?", str(size).strip().upper())
    value = int(float(match[1]) * 1000 ** " KMGT".index(match[2] or " ")) if match else 0
    if value < 1:
        raise ValueError(f'the largest shard is "{size}": give a number of bytes, or a size as in 500MB or 5GB')
    return value


def _student_tensors(source: StudentCheckpoint) -> _Tensors:
    adapter = BlockStackStateDictAdapter(source.args)
    fqns = {adapter.hf_name(fqn): fqn for fqn in source.shapes}

    def read(names: list[str]) -> dict[str, torch.Tensor]:
        values = source.read(fqns[name] for name in names)
        return {name: values[fqns[name]] for name in names}

    names = sorted(fqns, key=lambda name: [part.zfill(6) for part in name.split(".")])  # layer 2 before layer 10
    return _Tensors(
        {name: source.shapes[fqns[name]] for name in names}, {name: source.dtypes[fqns[name]] for name in names}, read
    )


def _teacher_tensors(source: TeacherFiles) -> _Tensors:
    names = source.names()
    return _Tensors(
        {name: torch.Size(source.shape(name)) for name in names},
        {name: source.dtype(name) for name in names},
        lambda wanted: {name: source.read(name) for name in wanted},
    )


def _with_dtype(tensors: _Tensors, dtype: str) -> _Tensors:
    """The same tensors, to be written in a dtype; a buffer of integers keeps its own."""
    dtypes = {
        name: DTYPES.get(dtype, stored) if stored.is_floating_point else stored
        for name, stored in tensors.dtypes.items()
    }
    return replace(tensors, dtypes=dtypes)


def qwen3_config(args: BlockStackArgs, dtype: str, end_of_document: int) -> dict[str, Any]:
    """``config.json`` of a plain Qwen3 with an untied head.

    Args:
        args: Dimensions; ``max_seq_len``, the longest sequence of training, becomes ``max_position_embeddings``.
        dtype: Name of the weights' dtype.
        end_of_document: Id of the token that ends a document; as in Qwen3's base models, bos and eos are both that one.
    """
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "initializer_range": args.init_std,
        "intermediate_size": args.hidden_dim,
        "max_position_embeddings": args.max_seq_len,
        "num_attention_heads": args.n_heads,
        "num_hidden_layers": args.n_layers,
        "num_key_value_heads": args.n_kv_heads,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "use_cache": True,
        "vocab_size": args.vocab_size,
    }


def _write_student(
    folder: Path, source: StudentCheckpoint, tensors: _Tensors, dtype: str, tokenizer: str | None
) -> None:
    """Everything but the tensors, and the check that these are the model's."""
    placement = source.args.placement
    end_of_document = _write_tokenizer(folder, source, tokenizer)
    config = qwen3_config(source.args, tensors.main_dtype, end_of_document)
    code = None
    if not source.layer_cls.is_qwen3:
        code = modeling_source(source.layer_cls, placement)
        (folder / MODELING_FILE).write_text(code, encoding="utf-8")
        config |= {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, "auto_map": AUTO_MAP}
        config |= {"placement": placement, "layers_per_block": source.layers_per_block}
    check_model(config, code, tensors.shapes, placement)
    # generate() stops at the end of a document; a batch is padded with it too, behind the attention mask
    ids = {f"{name}_token_id": end_of_document for name in ("bos", "eos", "pad")}
    _write_json(folder / CONFIG, config)
    _write_json(folder / GENERATION_CONFIG, ids | {"transformers_version": transformers.__version__})
    card = model_card(source, dtype, tensors.dtypes_in_words, tensors.parameters)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _write_tokenizer(folder: Path, source: StudentCheckpoint, tokenizer: str | None) -> int:
    """Copy the tokenizer, with the end of a document as its eos and pad token if it has none; returns that token's id."""
    config = source.manifest["config"]
    end = config["documents.end_of_document"]
    try:
        path = Path(resolve(tokenizer or config["model.hf_assets_path"], "the tokenizer"))
        if not (path / TOKENIZER).is_file():
            raise ValueError(f"there is no {path / TOKENIZER}")
    except ValueError as error:
        raise ValueError(f"{error}. Give the folder of the run's tokenizer with --tokenizer") from error
    vocabulary = read_tokenizer(path).get_vocab()
    if end not in vocabulary:
        raise ValueError(
            f'the tokenizer in {path} lacks "{end}", which ended the student\'s documents: give the one that it was trained '
            "with, with --tokenizer"
        )
    if max(vocabulary.values()) >= source.args.vocab_size:
        raise ValueError(
            f"the tokenizer in {path} has ids up to {max(vocabulary.values())}, but the student's vocabulary is "
            f"{source.args.vocab_size}: give the one that it was trained with, with --tokenizer"
        )
    _copy(path, folder, TOKENIZER_FILES)
    settings = _read_json(folder / TOKENIZER_CONFIG)
    named = _read_json(folder / "special_tokens_map.json") | settings
    absent = {key: end for key in ("eos_token", "pad_token") if not named.get(key)}
    if not settings.get("tokenizer_class"):
        absent["tokenizer_class"] = "PreTrainedTokenizerFast"
    if absent:
        _write_json(folder / TOKENIZER_CONFIG, settings | absent)
    return vocabulary[end]


def _write_teacher(folder: Path, source: TeacherFiles, tensors: _Tensors, dtype: str, tokenizer: str | None) -> None:
    """The files beside a converted teacher's tensors, as they were."""
    path = Path(source.folder)
    _copy(path, folder, (CONFIG, GENERATION_CONFIG))
    _copy(Path(resolve(tokenizer, "--tokenizer")) if tokenizer else path, folder, TOKENIZER_FILES)
    config = _read_json(folder / CONFIG)
    if dtype != "auto":
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
        _write_json(folder / CONFIG, config)
    check_model(config, None, tensors.shapes, "pre")


def _write_tensors(folder: Path, tensors: _Tensors, max_bytes: int, progress: bool) -> int:
    """The safetensors files and their index; returns how many files."""
    written = {
        name: torch.empty(shape, dtype=tensors.dtypes[name], device="meta") for name, shape in tensors.shapes.items()
    }
    split = split_state_dict_into_shards_factory(
        written,
        get_storage_size=lambda tensor: tensor.nbytes,
        get_storage_id=lambda tensor: None,  # tensors on the meta device all look like one
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    for file, names in tqdm(split.filename_to_tensors.items(), unit="file", disable=not progress):
        values = tensors.read(names)
        for name in names:
            value = values[name] = values[name].to(tensors.dtypes[name])
            if not is_finite(value):
                raise ValueError(
                    f"{name} holds values that are not finite in {value.dtype}: did the run diverge, or is its range beyond "
                    "this dtype's (then use bfloat16 or float32)?"
                )
        try:
            save_file(values, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, most likely
            raise OSError(str(error)) from error
        (folder / file).chmod(0o644)
        del values, value  # before the next file is read
    index = {
        "metadata": split.metadata,
        "weight_map": {name: split.tensor_to_filename[name] for name in tensors.shapes},
    }
    _write_json(folder / INDEX, index)
    return len(split.filename_to_tensors)


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Those of the files that are there."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path.name} is not JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object: download it again")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
