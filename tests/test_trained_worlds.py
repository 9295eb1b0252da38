"""The language models of the small worlds that are part of the package."""

import errno
import random
import statistics
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmark import train_worlds
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.data import problems
from ppo_rlhf.worlds import building, posts, sums, tales

GENERATORS = {"sums": sums.SumsArgs(), "sums-long": sums.LongArgs(), "sums-tools": sums.ToolsArgs()}


def trained(name: str) -> Path:
    return building.TRAINED / building.name_with_hash(name, train_worlds.WORLDS[name][1])


def new_texts(name: str) -> list[list[str]]:
    """Texts such as the language model learnt from, by another seed: pieces that are read and learnt in turn."""
    rng = random.Random(1234)
    if name == "tales":
        return [["", tales.write_story(rng, 3)] for _ in range(40)]
    if name == "posts":
        return [["", posts.write_thread(rng, posts.PostsArgs())] for _ in range(20)]
    args, found = GENERATORS[name], []
    suffix = problems.TASKS[name].prompt_suffix
    for problem in sums.write_problems(rng, 200, args, set()):
        if name == "sums-tools":
            solution = sums.solve_with_calculator(rng, problem, args)
        else:
            solution = sums.solve(rng, problem, args.error_rate, args.wordy, args.hasty)
        found.append([problem.question + suffix, *sums.split_answers(solution)])
    return found


def loss_of(model: torch.nn.Module, tokenizer, text: list[str]) -> list[float]:
    """-log p of every token of the pieces 1, 3, 5 ... after the first token of all."""
    pieces = [tokenizer.encode(piece) for piece in text]
    ids = torch.tensor([token for piece in pieces for token in piece])
    learnt = [number % 2 for number, piece in enumerate(pieces) for _ in piece][1:]
    with torch.no_grad():
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(1)
    losses = -log_probs[torch.arange(len(ids) - 1), ids[1:]]
    return [loss for loss, counts in zip(losses.tolist(), learnt, strict=True) if counts]


def test_every_usual_world_has_its_model_and_there_are_no_others():
    """Where this fails, settings or grammar have changed: run benchmark/train_worlds.py, and measure again."""
    folders = {path for path in building.TRAINED.iterdir() if path.is_dir()}
    assert folders == {trained(name) for name in train_worlds.WORLDS}


@pytest.mark.parametrize("name", train_worlds.WORLDS)
def test_a_model_has_learnt_the_texts_of_its_world(name):
    """Its loss on texts that it has not seen is the recorded one of its last steps."""
    facts = building.read_facts(trained(name))
    model = AutoModelForCausalLM.from_pretrained(trained(name) / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained(name) / "model")
    assert facts["settings"] == train_worlds.WORLDS[name][1][0]
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    losses = [loss for text in new_texts(name) for loss in loss_of(model, tokenizer, text)]
    assert statistics.fmean(losses) == pytest.approx(facts["lm_loss"], abs=0.06)


@pytest.mark.parametrize("module, name", [(sums, "sums"), (posts, "posts"), (tales, "tales")])
def test_a_usual_world_gets_the_model_of_the_package(tmp_path, monkeypatch, module, name):
    def simulate(folder, args, device):
        assert (folder / building.WEIGHTS).exists() and (folder / "stories.txt").exists()
        return {"sentiment": {"ceiling": 0.5}}

    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path))
    monkeypatch.setattr(tales, "simulate_comparisons", simulate)
    monkeypatch.setattr(module, "train_language_model", None)  # calling it fails
    world = module.find_world()
    for file in (trained(name) / "model").iterdir():
        assert (world / "model" / file.name).read_bytes() == file.read_bytes()
    facts, recorded = building.read_facts(world), building.read_facts(trained(name))
    computed = {"sentiment": {"ceiling": 0.5}} if name == "tales" else {}
    assert facts == {**recorded, **computed}
    AutoTokenizer.from_pretrained(world / "model")


def test_a_full_disk_and_no_home_are_said(tmp_path, monkeypatch):
    """As errors of which a script makes one line; shutil's own would hide what it is."""

    def no_space(source, target):
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(building.shutil, "copyfile", no_space)
    with pytest.raises(OSError, match=r"No space left on device: .*/model/"):
        building.copy_trained(trained("sums"), tmp_path)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("PPO_RLHF_CACHE")
    with pytest.raises(InputError, match="PPO_RLHF_CACHE"):
        building.find("x", [], Path.mkdir)


def test_another_model_makes_another_world(tmp_path, monkeypatch):
    """A cache that holds a world with an older model is not used."""
    made_of, folder = ["x"], tmp_path / "trained" / building.name_with_hash("sums", ["x"])
    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path))
    monkeypatch.setattr(building, "TRAINED", tmp_path / "trained")
    found = [building.find("sums", made_of, Path.mkdir)]
    (folder / "model").mkdir(parents=True)
    for weights in (b"1", b"2"):
        (folder / building.WEIGHTS).write_bytes(weights)
        found.append(building.find("sums", made_of, Path.mkdir))
    assert len(set(found)) == 3 and {path.parent for path in found} == {tmp_path}
