"""Speed: benchmark/cost/speed.py, and what can be proven of it without a GPU and without a clock."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import HELPERS, launch
from runs import ROOT, metrics_of, policy_arguments, world_arguments
from torch.utils._python_dispatch import TorchDispatchMode
from whole_runs import Whole

from benchmark.cost import speed
from ppo_rlhf import train_policy
from ppo_rlhf.train_policy import (
    AdamTensorFlowStyle,
    PolicyWithValueHead,
    PpoArgs,
    Rollout,
    compute_rewards,
    draw_permutations,
    episode_noise,
    few_rows_at_a_time,
    generate,
    ppo_update,
)

SPEED = ROOT / "benchmark/cost/speed.py"
VOCAB = PAD = 29
RESPONSE, TEMPERATURE = 5, 0.7

# ---- Work of Python --------------------------------------------------------------------------------------------
# tests/runs/test_device.py says how often an update waits for the device.


def update(model, batch: int, query: int) -> None:
    """Responses that are generated and scored, and the epochs of PPO on them."""
    policy, reward_model = PolicyWithValueHead(model, VOCAB), train_policy.RewardModel(model)
    queries, rows = torch.ones(batch, query, dtype=torch.long), batch // 2
    noise = episode_noise(1, 0, batch, RESPONSE)
    responses, _ = few_rows_at_a_time(
        lambda *parts: generate(policy.lm_backbone, *parts, PAD, VOCAB, TEMPERATURE), rows, queries, noise
    )
    context_responses = torch.cat([queries, responses], dim=1)
    with torch.no_grad():
        logprobs, _, values = few_rows_at_a_time(
            lambda tokens: policy(tokens, PAD, query, TEMPERATURE), rows, context_responses
        )
        scores = few_rows_at_a_time(lambda tokens: reward_model(tokens, PAD), rows, context_responses)
    rollout = Rollout(
        context_responses=context_responses,
        logprobs=logprobs,
        values=values,
        rewards=compute_rewards(scores, logprobs, logprobs, 0.15)[0],
    )
    optimizer = AdamTensorFlowStyle(policy.parameters(), lr=1e-4)
    ppo = PpoArgs(batch_size=batch, whiten_groups=2, noptepochs=2, local_micro_batch_size=batch)
    permutations = draw_permutations(1, 0, ppo.noptepochs, range(2), batch // 2)
    ppo_update(policy, optimizer, rollout, permutations, ppo, PAD, TEMPERATURE)


class Operations(TorchDispatchMode):
    """Counts operations on tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_work_of_python_does_not_grow_with_batch_and_length(tiny_models):
    counts = []
    for batch, query in ((16, 6), (64, 6), (16, 24)):
        with Operations() as operations:
            update(tiny_models("gpt2"), batch, query)
        counts.append(operations.count)
    assert counts[0] == counts[1] == counts[2] > 1_000


# ---- benchmark/cost/speed.py -----------------------------------------------------------------------------------


SMALL = [
    *("--batch_size", "16", "--query_length", "8", "--response_length", "8", "--epochs", "2"),
    *("--pairs", "1", "--updates", "2"),
]


def speed_of(folder: Path, *words: str) -> dict:
    """The report of speed.py."""
    places = ["--folder", str(folder / "speed"), "--output", str(folder / "out.json")]
    result = launch(SPEED, *SMALL, *words, *places, folder=folder)
    assert result.status == 0, result.stdout + result.stderr
    return json.loads((folder / "out.json").read_text())


def test_speed_of_ours(tmp_path):
    report = speed_of(tmp_path, "--dtype", "bfloat16")
    ((run,),) = report["runs"].values()
    assert len(run["updates"]) == 3
    seconds = (run["updates"][2] - run["updates"][0]) / 2
    assert run["seconds_per_update"] == pytest.approx(seconds)
    assert run["episodes_per_second"] == pytest.approx(16 / seconds)
    assert 1e8 < run["peak_memory"] < 1e10
    # GPT-2 with four layers, 128 wide: embeddings of 1,024 tokens and 128 places, layers, and the last norm.
    weights = (1024 + 128) * 128 + 4 * (12 * 128**2 + 13 * 128) + 2 * 128
    (used,) = report["utilisation"]
    flops = 2 * weights * 16 * 16 * (3 + 3 * 2)  # episodes, their tokens, passes
    share = float(used["utilisation, %"].split()[0])
    assert share == pytest.approx(100 * flops / seconds / run["matmul_rate"], rel=0.01)
    assert str(tmp_path) not in json.dumps(report["arguments"])
    again = launch(SPEED, "--output", "out.json", "--folder", "speed", folder=tmp_path)
    assert again.status == 2 and "out.json exists" in again.stderr and "Traceback" not in again.stderr


def test_a_run_that_fails_is_told(tmp_path):
    result = launch(SPEED, *SMALL, "--query_length", "200", "--folder", str(tmp_path), folder=tmp_path)
    assert result.status == 2 and "reads at most 128 tokens" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ours ended with status 1")


# GRPOTrainer as TRL has one: every prompt comes so many times, and its callbacks hear of each optimiser step.
GRPO = """
import time
from types import SimpleNamespace
class GRPOConfig(SimpleNamespace): pass
class GRPOTrainer:
    def __init__(self, args, processing_class, model, reward_funcs, train_dataset, callbacks):
        self.args, self.rewards, self.rows, self.callbacks = args, reward_funcs, train_dataset, callbacks
        self.accelerator = SimpleNamespace(device=next(model.parameters()).device)
        assert not (args.bf16 or args.gradient_checkpointing or args.shuffle_dataset)
        assert args.disable_dropout and args.num_iterations == 2
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 8
        assert args.per_device_train_batch_size * args.steps_per_generation == 16
    def train(self):
        for step in range(self.args.max_steps):
            if step % 4 == 0:
                rows = [row for row in list(self.rows)[step : step + 4] for _ in range(self.args.num_generations)]
                columns = {key: [row[key] for row in rows] for key in rows[0]}
                prompts, ids = columns.pop("prompt"), [[1] * (1 + i % 16) for i in range(16)]
                assert all(prompt.endswith("\\n") for prompt in prompts)
                texts = ["#### 1" if i % 4 else "#### 11" for i in range(16)]
                assert self.rewards(completions=texts, completion_ids=ids, **columns) == [0.0, 1.0, 1.0, 1.0] * 4
            time.sleep(0.05)
            for callback in self.callbacks:
                callback.on_step_end(self.args, SimpleNamespace(global_step=step + 1), None)
"""


def test_speed_of_chapter_3(tmp_path):
    """Next to TRL, of which there is only this module."""
    folder = tmp_path / f"speed/trl-{speed.TRL[3]}"
    folder.mkdir(parents=True)
    (folder / "trl.py").write_text(GRPO)
    words = "--chapter 3 --minibatches 2 --samples_per_prompt 4 --micro_batch_size 4 --response_length 16 --trl"
    report = speed_of(tmp_path, *words.split())
    (ours,), (trl,) = report["runs"]["ours"], report["runs"]["trl"]
    assert trl["tokens"] == {"query": 8, "response": 8.5}
    assert len(trl["updates"]) == 3 and trl["seconds_per_update"] >= 0.2  # four steps of 0.05 s
    assert ours["tokens"]["query"] == 8 and 12 < ours["tokens"]["response"] <= 16  # one token in 1,024 ends a text
    assert len(ours["updates"]) == 3
    assert report["versions"]["trl"] == speed.TRL[3]


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmark/results/speed").glob("*.json")), ids=lambda file: file.stem
)
def test_tables_of_committed_results_follow_from_their_runs(file):
    """Some are of older programs, which compared more than two at once."""
    report = json.loads(file.read_text())
    assert re.fullmatch("[0-9a-f]{40}", report["commit"])
    assert report["speed"] == speed.speed_table(SimpleNamespace(**report["arguments"]), report["runs"])


# ---- torch.compile ---------------------------------------------------------------------------------------------


def test_compiled_models_give_the_same_run(both, tiny_world, tiny_reward, tmp_path):
    words = [*world_arguments(tiny_world, tiny_reward), *policy_arguments(), "--ppo.total_episodes", "16"]
    words += ["--ppo.cliprange", "0.01"]  # that of `both`
    run = Whole(tmp_path / "run", str(HELPERS / "compiled_run.py"), [*words, "--compile"]).made()
    graphs = int((run.folder / "graphs").read_text())
    assert graphs >= 5  # context, token; policy, reference, reward model
    compiled, plain = (metrics_of(each.run("train_policy"))[0] for each in (run, both))
    assert compiled == pytest.approx(plain, rel=1e-4, abs=1e-5)
