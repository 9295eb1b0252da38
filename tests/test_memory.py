"""What changes memory, and what it may change besides: the size of passes, gradient checkpointing, frozen models in
bfloat16, slices.
"""

import json
import math
import mmap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from processes import SCRIPTS, launch
from refusals import edit_tensors
from runs import metrics_of, only, policy_arguments, posts_arguments, reward_arguments, world_arguments
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.lib.base import errors, processes
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.nets import classifier, memory, pretrained
from ppo_rlhf.lib.nets.layers import checkpoint_layers
from ppo_rlhf.rlvr import policy as rlvr_policy, problems
from ppo_rlhf.rlvr.arguments import Args, PpoArgs, PpoSizes
from ppo_rlhf.tldr import models, packing, responses as tldr_responses
from ppo_rlhf.tldr.policy import ActorCritic

VOCAB = PAD = 29
TOKENS = torch.randint(1, VOCAB, (3, 11), generator=torch.Generator().manual_seed(0))
TOKENS[0, :4] = TOKENS[1, 8:] = PAD
CONTEXT = 6
RUN = Path(__file__).parent / "checkpointed_run.py"


# ---- The size of passes ----------------------------------------------------------------------------------------

# SmolLM2-135M. Numbers of a layer for each token: 11 * 576 + 4 * 1536 = 12,480.
SMOL = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
)
BYTES = {
    "training": (31 * 4 * 12_480, {}),
    "checkpointed": (4 * 30 * 4 * 576 + 2 * 4 * 12_480, {"use": "training", "checkpointed": True}),
    "bfloat16": (31 * (4 * 4 * 576 + 2 * (10 * 576 + 4 * 1536)), {"use": "training", "narrow": 2}),
    "float64": (31 * 8 * 12_480, {"use": "training", "wide": 8, "narrow": 8}),
    "sampling": (30 * 2 * 192 * 4, {}),  # keys and values of 3 heads, 64 wide
    "reading": (4 * 12_480 + 30 * 2 * 192 * 4, {}),
}


@pytest.mark.parametrize("case", BYTES)
def test_bytes_of_a_token_by_hand(case: str):
    expected, settings = BYTES[case]
    assert memory.bytes_per_token(SMOL, **{"use": case} | settings) == expected


@pytest.mark.parametrize("low_precision", [False, True])
@pytest.mark.parametrize("architecture", packing.TRIED)
def test_a_layer_keeps_as_many_bytes_as_estimated(architecture, low_precision, monkeypatch):
    """Counted: the storages that autograd keeps in a network of three layers, less those in one of one layer."""
    monkeypatch.setattr(packing, "LEAST_WIDTH", 1)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": PAD, "bos_token_id": None}
    sizes |= {"eos_token_id": None} | ({} if architecture == "gpt2" else {"intermediate_size": 192})
    if architecture not in ("gpt2", "gpt_neox"):
        sizes |= {"num_key_value_heads": 2, "head_dim": 16}
    tokens, counts = torch.randint(0, PAD, (13, 61)), []
    for layers in (1, 3):
        config = AutoConfig.for_model(architecture, num_hidden_layers=layers, **sizes)
        model, kept = AutoModelForCausalLM.from_config(config).eval(), {}
        packing.enable(model)

        def keep(tensor: torch.Tensor, kept=kept) -> torch.Tensor:
            if tensor.numel() % tokens.numel() == 0:  # neither a weight nor the cast of one
                kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
            return tensor

        mixed = torch.autocast("cpu", torch.bfloat16, enabled=low_precision)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), mixed:
            train_policy.read_tokens(model, tokens, PAD, slice(None))
        counts.append(sum(size for size, _ in kept.values()) / tokens.numel())
    three_and_one_more = memory.bytes_per_token(config, "training", narrow=2 if low_precision else 4)
    least = 0.5 if architecture == "gpt_neox" else 0.9
    assert least < (counts[1] - counts[0]) / 2 / (three_and_one_more / 4) < 1.1


def test_tokens_that_fit_by_hand():
    """A token has 1.2 * 1,547,520 = 1,857,024 bytes, and 12 * 49,152 = 589,824 of logits, 3 GiB of these at most."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SMOL)
    # So many gibibytes are enough for 965, 1,053 and, because 3 GiB of logits are enough, 35,270 tokens.
    fit = {size: memory.tokens_that_fit(model, size * 2**30, "training") for size in (0, 2.2, 2.4, 64)}
    assert fit == {0: 1, 2.2: 512, 2.4: 1024, 64: 32768}
    assert memory.pass_bytes(model, 1024, "training") == 1024 * (1_857_024 + 589_824)
    assert memory.pass_bytes(model, 32768, "training") == 32768 * 1_857_024 + 3 * 2**30
    checkpoint_layers(model)
    assert memory.pass_bytes(model, 1, "training") == 1.2 * (276_480 + 99_840) + 589_824
    assert memory.bytes_per_token(SimpleNamespace(hidden_size=9), "training") == 0
    assert memory.tokens_that_fit(torch.nn.Linear(2, 2), 1, "training") == math.inf


def test_numbers_of_two_networks_are_kept_for_training_alone(tiny_models):
    backbone = tiny_models("llama")
    both = ActorCritic(backbone, train_reward.RewardModel(tiny_models("llama", seed=1).base_model), VOCAB)
    for use, times in (("training", 2), ("reading", 1)):
        assert memory.costs(both, use)[0] == pytest.approx(times * memory.costs(backbone, use)[0], abs=1)


def test_rows_that_are_sampled_in_parts_are_the_same(tiny_models, monkeypatch):
    model = tiny_models("llama").double()
    uniforms = torch.rand(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    monkeypatch.setattr(tldr_responses, "read_contexts", counted := Counted(tldr_responses.read_contexts))
    expected = tldr_responses.generate_until(model, TOKENS, uniforms, PAD, VOCAB, 0.7, {3})
    # A token has 1.2 * 2 layers * 2 * 2 heads * 4 * 8 bytes of keys and values: 307. A row has 16, two rows 32.
    monkeypatch.setattr(memory, "budget", 2 * 32 * 308.0)  # half of it is for them
    actual = tldr_responses.generate_until(model, TOKENS, uniforms, PAD, VOCAB, 0.7, {3})
    for tensor, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-12, atol=1e-13)
    assert counted.rows == [3, 2, 1]


V2, V1 = {"proc/self/cgroup": "0::/job\n"}, {"proc/self/cgroup": "9:cpu:/\n4:cpuset,memory:/a/b\n0::/\n"}
OF_V1 = {"limit_in_bytes": "3000", "usage_in_bytes": "1200", "stat": "cache 9\ntotal_inactive_file 200\n"}
MACHINES = {  # files, and how many bytes are free
    "no limit": ({"proc/self/cgroup": "0::/\n"}, 5000 * 1024),
    "no groups": ({}, 5000 * 1024),
    "version 2": (
        V2
        | {
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.max": "4000\n",
            "sys/fs/cgroup/job/memory.current": "1500\n",
            "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 100\n",
        },
        4000 - 1500 + 100,
    ),
    "version 1": (V1 | {f"sys/fs/cgroup/memory/a/memory.{name}": text for name, text in OF_V1.items()}, 2000),
    "in a container": (V1 | {f"sys/fs/cgroup/memory/memory.{name}": text for name, text in OF_V1.items()}, 2000),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_free_memory_of_a_machine(machine: str, tmp_path: Path):
    files, expected = MACHINES[machine]
    files = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 1000 kB\nMemAvailable:   5000 kB\n"} | files
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory.free_on_cpu(tmp_path) == expected


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux has another count of it")
def test_the_most_that_a_process_has_held():
    with mmap.mmap(-1, 2**28) as mapped:  # 256 MiB, which are free again, whatever the C library keeps
        for start in range(0, 2**28, mmap.PAGESIZE):
            mapped[start] = 1
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    most = int(lines["VmHWM"].split()[0]) * 1024
    assert memory.most_held() == pytest.approx(most, rel=0.01)
    assert memory.held_memory(torch.device("cpu")) < most - 2**27  # what was held was given back


def limit(monkeypatch, max_memory: float = 0.0, free: float = 10.0, **knobs: int) -> dict[str, int]:
    """The sizes of a process that holds 2 GiB, with so many GiB free. 1 GiB of its weights learns."""
    with torch.device("meta"):
        network = torch.nn.ModuleList([torch.nn.Linear(2**14, 2**14, bias=False) for _ in range(2)])
    network[1].requires_grad_(False)
    knobs = {"local_micro_batch_size": 0, "local_micro_batch_tokens": 0} | knobs
    args = SimpleNamespace(max_memory=max_memory, ppo=SimpleNamespace(**knobs))
    monkeypatch.setattr(memory, "budget", None)
    monkeypatch.setattr(memory, "held_memory", lambda device: 2 * 2**30)
    monkeypatch.setattr(memory, "free_memory", lambda device: free * 2**30)
    return memory.limit_passes(args, Accelerator(cpu=True), network, rows=8, length=50)


@pytest.mark.parametrize(
    ("settings", "gibibytes"),
    # Gradients, two moments and a gradient that is added to another one take 4 GiB.
    [
        ({"free": 10.0}, 0.8 * 10 - 4),
        ({"free": 5.0}, 1),  # the least
        ({"max_memory": 9.5, "free": 1.0}, 9.5 - 2 - 4),
        ({"max_memory": 6.5, "free": 90.0}, 6.5 - 2 - 4),
    ],
)
def test_what_is_left_for_a_pass(settings, gibibytes, monkeypatch):
    assert limit(monkeypatch, **settings) == {
        "largest_pass_tokens": 8 * 50,
        "largest_pass_mib": 0,  # there is no language model
        "process_mib": 6 * 1024,
    }
    assert memory.budget == pytest.approx(gibibytes * 2**30)
    assert limit(monkeypatch, local_micro_batch_size=2)["largest_pass_tokens"] == 2 * 50
    assert limit(monkeypatch, local_micro_batch_tokens=120)["largest_pass_tokens"] == 120
    with pytest.raises(InputError, match=r"max_memory is 6 GiB.* take 6\.0; --max_memory 7 may do"):
        limit(monkeypatch, max_memory=6.0)


def test_a_shared_prompt_counts_once_in_the_largest_pass(tiny_models, monkeypatch):
    """Four prompts of 7 tokens at most, with 3 responses of 5 tokens each: 4 * 7 + 12 * 5, or else 12 * 12."""

    def stop(args: object, accelerator: object, sizes: dict[str, int], **more: object) -> None:
        raise InputError(str(sizes["largest_pass_tokens"]))

    monkeypatch.setattr(rlvr_policy.run, "Run", stop)
    args = Args(task=problems.TaskArgs(prompt_length=40, response_length=5), ppo=PpoArgs(samples_per_prompt=3))
    sizes = PpoSizes(**{field.name: 12 for field in fields(PpoSizes)})
    setup = {"args": args, "typed_args": args, "accelerator": Accelerator(cpu=True), "sizes": sizes}
    setup = SimpleNamespace(**setup, problems=SimpleNamespace(longest=lambda: 7))
    for shares, tokens in ((False, 12 * 12), (True, 4 * 7 + 12 * 5)):
        packing.enable(network := tiny_models("llama"), share_prefixes=shares)
        with pytest.raises(InputError, match=f"^{tokens}$"):
            rlvr_policy.start_run(setup, network, {})


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.\nTried ...")])
def test_one_line_says_what_needs_less_memory(error, monkeypatch, capsys):
    monkeypatch.setattr(errors, "how_to_need_less", "")
    with errors.typed_as({"max_memory": "policy.max_memory"}):
        limit(monkeypatch)

    def fail() -> None:
        raise error

    with pytest.raises(SystemExit):
        errors.run_script(fail)
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "--policy.max_memory" in line and "--ppo.local_micro_batch_size" in line


# ---- Gradient checkpointing ------------------------------------------------------------------------------------


def one_pass(network: ActorCritic) -> tuple[list[torch.Tensor], int]:
    """Results and gradients of a pass forward and backward; how many numbers it keeps in between."""
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() if tensor.requires_grad and not tensor.is_leaf else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = network(TOKENS, TOKENS[:, CONTEXT:], PAD, 0.7)
    sum((tensor * tensor).sum() for tensor in results if tensor.requires_grad).backward()
    return [*results, *(p.grad for p in network.parameters() if p.grad is not None)], kept


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "llama", "qwen2"])
def test_gradient_checkpointing_keeps_less_and_gives_the_same(architecture, tiny_models):
    networks = [
        ActorCritic(
            tiny_models(architecture).eval(),
            train_reward.RewardModel(tiny_models(architecture, seed=1).base_model),
            VOCAB,
        )
        for _ in range(2)
    ]
    networks[1].load_state_dict(networks[0].state_dict())
    checkpoint_layers(networks[1])
    (expected, all_kept), (actual, kept) = map(one_pass, networks)
    assert len(expected) == len(actual) and all(map(torch.equal, actual, expected))
    assert kept < 0.5 * all_kept
    uniforms = torch.rand(3, 5, generator=torch.Generator().manual_seed(1))
    sampled = [train_policy.generate(network.lm_backbone, TOKENS, uniforms, PAD, VOCAB, 0.7) for network in networks]
    assert all(map(torch.equal, *sampled))  # with its cache


@pytest.mark.parametrize("rows", [1, 2])
def test_logits_in_pieces_give_the_same(rows, tiny_models, monkeypatch):
    """Those of a row or two at a time, and once more in the backward pass."""
    network = ActorCritic(
        tiny_models("gpt2").double(), train_reward.RewardModel(tiny_models("gpt2").base_model).double(), VOCAB
    )
    expected, _ = one_pass(network)
    network.zero_grad()
    length = TOKENS.shape[1] - CONTEXT
    monkeypatch.setattr(memory, "MOST_LOGITS", rows * length * VOCAB + 1)
    monkeypatch.setattr(tldr_responses, "scaled_logits", counted := Counted(train_policy.scaled_logits))
    actual, _ = one_pass(network)
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, rtol=1e-12, atol=1e-13)
    assert sorted(counted.rows) == sorted(2 * {1: [1, 1, 1], 2: [2, 1]}[rows])


class Counted:
    def __init__(self, function: Callable):
        self.function, self.rows = function, []

    def __call__(self, lm_backbone, rows, *arguments):
        self.rows.append(len(rows))
        return self.function(lm_backbone, rows, *arguments)


SMALL = {  # a script, and what makes a run of it small
    "tldr/sft.py": "--batch_size 16 --epochs 1 --eval_posts 4 --lr 0.01",
    "tldr/reward.py": "--batch_size 16 --lr 0.01 --normalize_posts 4",
    "tldr/policy.py": "--ppo.total_episodes 16 --ppo.batch_size 8 --ppo.nminibatches 1 --ppo.lr 0.01 "
    "--eval_interval 0 --eval_posts 4 --rewards.function ppo_rlhf.worlds.posts:gold_scores --rewards.monitor=",
    "train_reward.py": "--save_interval 0",
    "train_policy.py": "--ppo.total_episodes 32 --save_interval 0 --ppo.lr 0.01 "
    "--rewards.function ppo_rlhf.worlds.tales:sentiment.gold_scores --rewards.monitor=",
}
STEPS = {"tldr/sft.py": 3, "tldr/reward.py": 3, "tldr/policy.py": 8, "train_reward.py": 5, "train_policy.py": 8}


@pytest.mark.parametrize("script", SMALL)
def test_metrics_are_the_same_with_gradient_checkpointing(script, tiny_world: Path, tiny_posts: Path, tmp_path: Path):
    if script.startswith("tldr"):
        words = [*posts_arguments(tiny_posts), "--base_model", str(tiny_posts / "model")]
    else:
        own = reward_arguments(tiny_world) if script == "train_reward.py" else policy_arguments()
        words = [*world_arguments(tiny_world), *own]
    rows, checkpoints = [], []
    for name, flags in {"without": [], "with": ["--gradient_checkpointing"]}.items():
        folder = tmp_path / name
        folder.mkdir()
        result = launch(RUN, str(SCRIPTS / script), *words, *SMALL[script].split(), *flags, folder=folder)
        assert result.status == 0, result.stderr
        rows.append(metrics_of(only(folder, "runs/*")))
        checkpoints.append(int((folder / "checkpoints").read_text()))
    assert rows[0] == rows[1] and len(rows[0]) >= 2
    layers_of_a_pass = 2 if script == "tldr/policy.py" else 1  # policy and critic, of one layer each
    assert checkpoints[0] == 0 and checkpoints[1] >= layers_of_a_pass * STEPS[script]


# ---- Frozen models in bfloat16 ---------------------------------------------------------------------------------


@pytest.fixture(params=["gpt2", "gpt_neox", "llama", "qwen2"])
def saved(request, tiny_models, tiny_tokenizer, tmp_path: Path) -> Path:
    """The folders sft and reward: a language model, and a reward model with another."""
    language_model = tiny_models(request.param).eval()
    language_model.save_pretrained(tmp_path / "sft")
    reward_model = train_reward.RewardModel(tiny_models(request.param, seed=1).base_model.eval())
    with torch.no_grad():
        reward_model.bias.fill_(1.5)
    classifier.save_reward_model(tmp_path / "reward", reward_model, tiny_tokenizer, {})
    return tmp_path


def test_a_frozen_reward_model_has_a_head_in_full_precision(saved: Path):
    exact, rounded = (models.load_reward_model(saved / "reward", dtype) for dtype in (torch.float32, torch.bfloat16))
    assert {parameter.dtype for parameter in rounded.lm_backbone.parameters()} == {torch.bfloat16}
    own = [rounded.gain, rounded.bias, *rounded.reward_head.parameters(), *rounded.buffers()]
    assert {tensor.dtype for tensor in own} == {torch.float32}
    scores, expected = rounded(TOKENS, PAD), exact(TOKENS, PAD)
    assert scores.dtype == torch.float32 and not torch.equal(scores, expected)
    torch.testing.assert_close(scores, expected, rtol=0, atol=0.1)


def test_a_run_of_chapter_1_with_frozen_models_in_bfloat16(tiny_world: Path, tiny_reward: Path, tmp_path: Path):
    words = [*world_arguments(tiny_world, tiny_reward), *policy_arguments()]
    rows = []
    for name, flags in {"without": [], "with": ["--frozen_bfloat16"]}.items():
        (tmp_path / name).mkdir()
        result = launch("train_policy.py", *words, *flags, folder=tmp_path / name)
        assert result.status == 0, result.stderr
        rows.append(metrics_of(only(tmp_path / name, "runs/*"))[0])
    assert abs(rows[0]["objective/kl"]) < 1e-5 < abs(rows[1]["objective/kl"]) < 0.05
    assert rows[0]["objective/score"] != rows[1]["objective/score"]
    assert rows[1]["objective/score"] == pytest.approx(rows[0]["objective/score"], abs=0.05)


# ---- Slices of weights from files ------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch, tmp_path: Path):
    """A group of one process, which reads all slices."""
    monkeypatch.setattr(processes, "sharding", lambda: True)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield SimpleNamespace(device=torch.device("cpu"))
    torch.distributed.destroy_process_group()


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: processes.full_tensor(tensor).detach().clone() for name, tensor in tensors}


@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModel, None])
@pytest.mark.parametrize("several", [False, True])
def test_slices_are_those_of_the_whole_model(saved: Path, auto_class, several: bool, monkeypatch, alone):
    """Of a language model, with its output layer and without, in one file or several; and of a reward model."""
    monkeypatch.setattr(pretrained, "WIDE", 1)

    def load() -> torch.nn.Module:
        if auto_class is None:
            return models.load_reward_model(saved / "reward", torch.float32)
        return models.load_pretrained(str(saved / "sft"), torch.float32, auto_class=auto_class)

    if several:
        for folder, opened in (("sft", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)):
            opened.from_pretrained(saved / folder).save_pretrained(saved / folder, max_shard_size="10KB")
            (saved / folder / "model.safetensors").unlink(missing_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(processes, "sharding", lambda: False)
        whole = load()
    model = load()
    assert all(parameter.is_meta for parameter in getattr(model, "lm_backbone", model).parameters())
    models.place(model, alone)
    expected, actual = weights_of(whole), weights_of(model)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())
    assert not model.training or auto_class is None
    if auto_class is None:
        assert torch.equal(model(TOKENS, PAD), whole(TOKENS, PAD))
    elif auto_class is AutoModelForCausalLM:
        copied = models.whole_copy(model, torch.bfloat16)
        assert {parameter.dtype for parameter in copied.parameters()} == {torch.bfloat16}
        assert type(copied.get_output_embeddings()) is pretrained.FewRowsLinear
        rounded = {name: tensor.bfloat16().float() for name, tensor in expected.items()}
        buffers = dict(copied.named_buffers())
        for name, tensor in weights_of(copied).items():
            assert torch.equal(tensor.float(), expected[name] if name in buffers else rounded[name])


NORM = "transformer.ln_f.weight"
SPOILT = {
    "its weights lack transformer.ln_f.weight": lambda tensors: tensors.pop(NORM),
    r"hold transformer.ln_f.weight of shape \(3,\), but config.json means \(16,\)": lambda tensors: tensors.update(
        {NORM: torch.ones(3)}
    ),
    "its weights hold numbers that are not finite": lambda tensors: tensors[NORM][2].fill_(torch.inf),
}


@pytest.mark.parametrize("message", SPOILT)
def test_slices_of_a_damaged_model_are_refused(message, tiny_models, tmp_path: Path, alone):
    tiny_models("gpt2").save_pretrained(tmp_path / "model")
    edit_tensors("model/model.safetensors", SPOILT[message])(tmp_path)
    model = models.load_pretrained(str(tmp_path / "model"), torch.float32)
    with pytest.raises(InputError, match=message):
        models.place(model, alone)


@pytest.mark.parametrize("there", [[], ["pytorch_model.bin"]])
def test_pickles_are_not_read_for_slices(there, tiny_models, tmp_path: Path, alone):
    tiny_models("gpt2").save_pretrained(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    for name in there:
        torch.save({}, tmp_path / "model" / name)
        index = {"weight_map": {"transformer.ln_f.weight": name}}
        (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="safetensors"):
        models.place(models.load_pretrained(str(tmp_path / "model"), torch.float32), alone)
