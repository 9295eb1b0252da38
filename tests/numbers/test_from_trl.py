"""Models with a value head, in the forms that TRL 0.11.4 saves: ours give the same values and log-probs."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Hostile
from runs import error_line
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ppo_rlhf import from_trl
from ppo_rlhf.tldr.models import load_reward_model
from ppo_rlhf.tldr.policy import ActorCritic

Tensors = dict[str, torch.Tensor]


def write(folder: Path, tensors: Tensors, name: str, parts: int = 1) -> None:
    """Weights in one file, or in parts with an index; the head is in the last of them."""
    save = save_file if name.endswith("safetensors") else torch.save
    if parts == 1:
        save(tensors, folder / name)
        return
    stem, ending = name.split(".")
    places = {key: f"{stem}-{i % parts + 1:05}-of-{parts:05}.{ending}" for i, key in enumerate(tensors)}
    for part in set(places.values()):
        save({key: tensor for key, tensor in tensors.items() if places[key] == part}, folder / part)
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.fixture
def saved(tiny_models, tiny_tokenizer, tmp_path) -> tuple[Path, Tensors, PreTrainedModel, nn.Linear]:
    """A folder without weights, the weights, the model and the head that they are from.

    The wrapper's state_dict holds no output layer where it is tied to the embedding.
    """
    folder = tmp_path / "old"
    model = tiny_models("gpt2").eval()
    model.config.summary_dropout_prob = 0.1
    with torch.random.fork_rng():
        torch.manual_seed(5)
        head = nn.Linear(model.config.hidden_size, 1)
    model.config.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    tensors |= {f"v_head.summary.{name}": tensor for name, tensor in head.state_dict().items()}
    return folder, tensors, model, head


@pytest.mark.parametrize("prefix", ["", "pretrained_model."])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@torch.no_grad()
def test_values_and_logits_are_the_same(name, parts, prefix, saved, tmp_path, capsys):
    folder, tensors, model, head = saved
    tensors |= {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}  # of older versions
    write(folder, {prefix * ("v_head" not in key) + key: tensor for key, tensor in tensors.items()}, name, parts)
    tokens = torch.randint(26, (4, 11), generator=torch.Generator().manual_seed(1))
    output = model(tokens, output_hidden_states=True)
    values = head(output.hidden_states[-1]).squeeze(-1)  # (4, 11), before each next token
    logprobs = output.logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(-1)  # (4, 10)

    from_trl.convert(from_trl.Args(folder=folder, output=tmp_path / "new"))
    assert "no such tensors: transformer.h.0.attn.masked_bias; 1 in all" in capsys.readouterr().out
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "new/policy")
    critic = load_reward_model(tmp_path / "new/value", torch.float32)
    ours = ActorCritic(policy, critic, 29)(tokens, tokens[:, 5:], 29, 1.0)
    torch.testing.assert_close(ours[0], logprobs[:, 4:], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[2], values[:, 4:-1], rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("error:Detected pickle protocol")
@pytest.mark.parametrize("raw", [False, True])
def test_a_pickle_with_code_is_refused_and_not_run(raw, saved, tmp_path):
    folder, tensors, *_ = saved
    file, content = folder / "pytorch_model.bin", tensors | {"code": Hostile(tmp_path / "ran")}
    file.write_bytes(pickle.dumps(content, protocol=5)) if raw else torch.save(content, file)
    line = error_line(from_trl.load, folder)
    assert "pytorch_model.bin is no pickle of tensors alone" in line and not (tmp_path / "ran").exists()
    pickle.loads(file.read_bytes()) if raw else torch.load(file, weights_only=False)
    assert (tmp_path / "ran").exists()


HEAD = "v_head.summary.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(HEAD), "KeyError: 'v_head.summary.weight'"),
        (lambda tensors: tensors.update({HEAD: torch.zeros(1, 15)}), "[1, 15]"),
        (lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.weight"), "means: transformer.h.1.mlp.c_fc.weight"),
        (lambda tensors: tensors.update({"transformer.wpe.weight": torch.zeros(9, 16)}), "[9, 16]"),
        (lambda tensors: tensors.setdefault("v_head.dense.weight", torch.zeros(9)), "more than v_head.summary: v_h"),
    ],
)
def test_what_is_no_such_model_is_refused(change, words, saved, tmp_path):
    folder, tensors, *_ = saved
    change(tensors)
    write(folder, tensors, "model.safetensors")
    args = from_trl.Args(folder=folder, output=tmp_path / "new")
    assert words in error_line(from_trl.convert, args) and not args.output.exists()


def test_other_mistakes_are_refused(saved, tokenizer_with_a_hole, tmp_path):
    folder, tensors, *_ = saved

    def line(**others: Any) -> str:
        return error_line(from_trl.convert, from_trl.Args(**{"folder": folder, "output": tmp_path / "new"} | others))

    assert "neither model.safetensors nor" in line()
    write(folder, tensors, "pytorch_model.bin", parts=3)
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    assert "No such file or directory" in line() and "pytorch_model-00002-of-00003.bin" in line()
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(index.read_text().replace("pytorch_model-00003", "../evil/pytorch_model-00003", 1))
    assert "../evil/pytorch_model-00003-of-00003.bin, which is outside of the folder" in line()
    write(folder, tensors, "model.safetensors")
    assert "name a new folder" in line(output=tmp_path)
    tokenizer_with_a_hole.save_pretrained(tmp_path / "larger")  # 30 tokens
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path / "larger")
    assert "an embedding of 29 rows for a tokenizer of 30" in line(tokenizer=str(tmp_path / "larger"))
    (folder / "tokenizer.json").unlink()
    assert f"--tokenizer {folder} cannot be loaded" in line()
    (folder / "config.json").unlink()
    assert "it has no config.json; if it holds adapters" in line() and not (tmp_path / "new").exists()
