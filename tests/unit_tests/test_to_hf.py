"""An exported student is the model that was trained: for transformers, at every depth, whatever its placement."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM, pipeline

from blockgrow_titan.events import METRICS_FILE, read_events
from blockgrow_titan.hf.from_hf import convert
from blockgrow_titan.hf.to_hf import Exported, to_hf
from blockgrow_titan.teacher.layout import tensor_layout
from tests.unit_tests.jobs import JOB_VOCAB
from tests.unit_tests.models import read_json, small_args
from tests.unit_tests.rank_pool import RankPool
from tests.unit_tests.resuming import contents
from tests.unit_tests.students import (
    DEPTHS,
    IDS,
    SEQ_LEN,
    assert_whole,
    load,
    logits,
    made,
    own_module_cache,  # noqa: F401  (a fixture)
    trained,
    training_model,
)

RUNS = [(placement, teacher) for placement in ("pre", "post") for teacher in ("teacher", "tied_teacher")]


@pytest.fixture(scope="module")
def exports(
    workspace: Path, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, int], tuple[Path, Path]]:
    """``exports(placement, teacher, step)``: checkpoint and its export, made once."""
    base = tmp_path_factory.mktemp("exports")

    def export(placement: str, teacher: str, step: int) -> tuple[Path, Path]:
        checkpoint = trained(workspace, rank_pool, placement, teacher) / "checkpoint" / f"step-{step}"
        out = base / f"{placement}-{teacher}-{step}"
        if not out.exists():
            to_hf(checkpoint, out)
        return checkpoint, out

    return export


@pytest.mark.parametrize(("placement", "teacher"), RUNS)
@pytest.mark.parametrize("step", DEPTHS)
def test_transformers_loads_the_trained_model(exports, tmp_path: Path, placement: str, teacher: str, step: int) -> None:
    checkpoint, out = exports(placement, teacher, step)
    trained_model, model = training_model(checkpoint, placement), load(out)
    assert type(model).__name__ == ("Qwen3ForCausalLM" if placement == "pre" else "BlockStackForCausalLM")
    assert len(model.model.layers) == model.config.num_hidden_layers == DEPTHS[step]
    assert (logits(model, IDS) - logits(trained_model, IDS)).abs().max() < 1e-5
    tensors = assert_whole(out)
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    assert layers == {str(i) for i in range(DEPTHS[step])}
    assert not model.config.tie_word_embeddings and model.config.max_position_embeddings == SEQ_LEN

    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    cached = model.generate(IDS, use_cache=True, **greedy)
    assert torch.equal(cached, model.generate(IDS, use_cache=False, **greedy))
    expected = IDS
    for _ in range(6):
        expected = torch.cat([expected, logits(trained_model, expected)[:, -1:].argmax(-1)], 1)
    assert torch.equal(cached, expected)

    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved"), IDS), logits(model, IDS))


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_what_users_of_transformers_do(exports, placement: str) -> None:
    """Padding on the left, eager attention, hidden states, checkpointed gradients, labels, pipeline, AutoModel."""
    checkpoint, out = exports(placement, "teacher", 4)
    model, expected = load(out), logits(training_model(checkpoint, placement), IDS)
    eager = load(out, attn_implementation="eager")
    assert (logits(eager, IDS) - expected).abs().max() < 1e-5
    attentions = eager(IDS, output_attentions=True).attentions
    assert len(attentions) == 3 and attentions[0].shape == (3, 4, 17, 17)

    hidden = model(IDS, output_hidden_states=True).hidden_states
    assert len(hidden) == 4
    assert (model.lm_head(hidden[-1]) - expected).abs().max() < 1e-5
    base = AutoModel.from_pretrained(out, trust_remote_code=True).eval()
    assert torch.equal(base(IDS).last_hidden_state, hidden[-1])
    embeds = model.get_input_embeddings()(IDS)
    assert torch.equal(logits(model, None, inputs_embeds=embeds), logits(model, IDS))
    with pytest.raises(ValueError, match="exactly one"):
        model(IDS, inputs_embeds=embeds)

    model.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
    reference = nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert abs(loss.item() - reference.item()) < 1e-5
    assert all(torch.allclose(gradients[0][name], gradients[1][name], atol=1e-7) for name in gradients[0])


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_batch_padded_on_the_left_says_what_each_prompt_says_alone(exports, placement: str) -> None:
    _, out = exports(placement, "teacher", 4)
    model = load(out)
    trust = {} if placement == "pre" else {"trust_remote_code": True}
    tokenizer = AutoTokenizer.from_pretrained(out, padding_side="left", **trust)
    prompts = ["the of and to a in was", "she", "it that not he"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    assert (batch["attention_mask"] == 0).any()
    # transformers sizes the mask by the model's dtype: fp32 leaves padding no weight at all
    together = model.generate(**batch, max_new_tokens=5, do_sample=False)[:, batch["input_ids"].shape[1] :]
    for prompt, row in zip(prompts, together, strict=True):
        alone = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**alone, max_new_tokens=5, do_sample=False)[0, alone["input_ids"].shape[1] :]
        assert torch.equal(row[: len(ids)], ids)
    text = pipeline("text-generation", model=str(out), **trust)("she was", max_new_tokens=3, do_sample=False)
    assert text[0]["generated_text"].startswith("she was")


def test_own_code_runs_only_when_trusted(exports) -> None:
    _, out = exports("post", "teacher", 4)
    for loader in (AutoConfig, AutoModel, AutoModelForCausalLM):
        with pytest.raises(ValueError, match="trust_remote_code"):
            loader.from_pretrained(out, trust_remote_code=False)
    source = (out / "modeling_block_stack.py").read_text()
    assert "blockgrow_titan" not in source.split('"""', 1)[1] and "torchtitan" not in source
    assert not (exports("pre", "teacher", 4)[1] / "modeling_block_stack.py").exists()


def test_many_files_and_other_dtypes(exports, tmp_path: Path) -> None:
    checkpoint, out = exports("post", "teacher", 3)
    whole = assert_whole(out)
    done = to_hf(checkpoint, tmp_path / "shards", max_shard_size="20KB")
    assert done.files > 2 and done == Exported(
        tmp_path / "shards", done.files, len(whole), sum(t.numel() for t in whole.values()), 2, "float32"
    )
    shards = assert_whole(tmp_path / "shards")
    assert shards.keys() == whole.keys() and all(torch.equal(shards[name], whole[name]) for name in whole)
    assert torch.equal(logits(load(tmp_path / "shards"), IDS), logits(load(out), IDS))
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        to_hf(checkpoint, tmp_path / name, dtype=name)
        rounded = assert_whole(tmp_path / name)
        assert all(torch.equal(rounded[key], whole[key].to(dtype)) for key in whole)
        assert load(tmp_path / name).dtype == dtype
        assert f"Weights are {name};" in (tmp_path / name / "README.md").read_text()


def test_a_checkpoint_stored_in_bfloat16_stays_so(workspace: Path, tmp_path: Path) -> None:
    checkpoint = made(workspace, tmp_path, "pre", dtype=torch.bfloat16)
    assert to_hf(checkpoint, tmp_path / "out").dtypes == "bfloat16"
    stored = contents(checkpoint)
    model = load(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, stored["output.weight"])


@pytest.mark.parametrize("step", DEPTHS)
def test_the_card_says_what_was_measured(exports, step: int) -> None:
    checkpoint, out = exports("post", "teacher", step)
    card = (out / "README.md").read_text()
    phase = {1: 0, 2: 1, 3: 1, 4: 2}[step]
    events = [
        event
        for event in read_events(str(checkpoint.parents[1] / METRICS_FILE))
        if event["event"] == "validation" and (event["step"], event["phase"]) == (step, phase)
    ]
    if step == 2:
        assert not events and "in nats a token: not measured" in card
    else:
        assert f"cross-entropy {events[0]['ce']:.4f}, perplexity {events[0]['ppl']:.2f}, KL" in card
    assert f"step {step} of 4, in phase {phase} of 3" in card
    manifest = card.split("```json\n")[1].split("```")[0]
    assert json.loads(manifest) == read_json(checkpoint / "manifest.json")
    assert card.count("**this model**") == 1 and card.startswith("---\nlibrary_name: transformers\n")


def test_generation_stops_at_the_end_of_a_document(exports, workspace: Path) -> None:
    for placement in ("pre", "post"):
        _, out = exports(placement, "teacher", 1)
        generation = load(out).generation_config
        assert generation.eos_token_id == generation.pad_token_id == generation.bos_token_id == 0
        tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|endoftext|>")
        assert (out / "tokenizer.json").read_bytes() == (workspace / "tokenizer" / "tokenizer.json").read_bytes()


def test_a_checkpoint_that_two_ranks_wrote(workspace: Path, rank_pool: RankPool, tmp_path: Path) -> None:
    folder = trained(workspace, rank_pool, "post", "teacher", ranks=2)
    checkpoint = folder / "checkpoint" / "step-4"
    assert len(list(checkpoint.glob("*.distcp"))) == 2
    to_hf(checkpoint, tmp_path / "out")
    tensors, teacher = assert_whole(tmp_path / "out"), load_file(workspace / "teacher" / "model.safetensors")
    assert torch.equal(tensors["model.embed_tokens.weight"], teacher["model.embed_tokens.weight"])  # frozen
    difference = logits(load(tmp_path / "out"), IDS) - logits(training_model(checkpoint, "post"), IDS)
    assert difference.abs().max() < 1e-5


def _teacher_checkpoint(source: Path, folder: Path, layers: int = 2) -> None:
    """A Hugging Face folder as a DCP in torchtitan's names, by dcp.save."""
    config = read_json(source / "config.json")
    fqns = {name: fqn for name, (fqn, _) in tensor_layout(small_args(blocks=layers, vocab_size=JOB_VOCAB)).items()}
    state = {fqns[name]: tensor for name, tensor in load_file(source / "model.safetensors").items()}
    assert ("output.weight" in state) != config["tie_word_embeddings"]
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)


@pytest.mark.parametrize("teacher", ["teacher", "tied_teacher"])
@pytest.mark.parametrize("through", ["dcp.save", "from-hf"])
def test_a_converted_teacher_comes_back_bit_for_bit(
    workspace: Path, tmp_path: Path, teacher: str, through: str
) -> None:
    if through == "from-hf":
        convert(str(workspace / teacher), str(tmp_path / "dcp"), progress=False)
    else:
        _teacher_checkpoint(workspace / teacher, tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "back", max_shard_size="30KB")
    original, back = load_file(workspace / teacher / "model.safetensors"), assert_whole(tmp_path / "back")
    assert original.keys() == back.keys()
    assert all(
        torch.equal(original[name], back[name]) and original[name].dtype == back[name].dtype for name in original
    )
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (workspace / teacher / name).read_bytes()
    assert torch.equal(
        logits(load(tmp_path / "back"), IDS), logits(Qwen3ForCausalLM.from_pretrained(workspace / teacher), IDS)
    )
    to_hf(tmp_path / "dcp", tmp_path / "half", dtype="bfloat16")
    assert load(tmp_path / "half").dtype == torch.bfloat16
