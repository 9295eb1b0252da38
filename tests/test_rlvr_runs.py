"""Chapter 3 through its command line and train(), on a tiny world and on a few rows of GSM8K with a tiny Qwen2."""

import csv
import dataclasses
import functools
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from processes import launch, launch_together
from runs import explained_metrics, meta_of, metrics_of, only, rows_of, samples_of
from safetensors.torch import load_file
from test_problems import byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from ppo_rlhf import sample, train_policy, train_reward
from ppo_rlhf.lib import classifiers, command_line, errors, learning_curves, pretrained, traces
from ppo_rlhf.lib.errors import InputError, NumericalError
from ppo_rlhf.rlvr import (
    arguments as rlvr_arguments,
    metrics as rlvr_metrics,
    policy as rlvr_policy,
    problems,
    tools as rlvr_tools,
)
from ppo_rlhf.rlvr.algebra import ESTIMATORS, IN_GROUPS
from ppo_rlhf.rlvr.arguments import PRESETS
from ppo_rlhf.tldr import models

GSM8K = Path(__file__).parent / "golden" / "gsm8k"
SIZES = (
    "--dtype float64 --ppo.batch_size 16 --ppo.total_episodes 48 --ppo.nminibatches 2 --save_interval 1 "
    "--log_interval 1 --eval_interval 2 --eval_samples 2 --eval_problems 8 "
    "--task.response_length 20 --ppo.local_micro_batch_size 256 --trace_interval 0"
)
LETTERS = """
def letters(prompts, responses, answers):
    return [float(sum(map(str.isalpha, response)) % 2) for response in responses]

def some(prompts, responses, answers):
    return [None if len(response) % 3 == 0 else 1.0 for response in responses]

def some_of_three(prompts, responses, answers):
    sums = [sum(map(ord, response)) for response in responses]
    return [None if total % 3 == 0 else float(len(response) % 3) for total, response in zip(sums, responses)]

def silent(prompts, responses, answers):
    return [None] * len(responses)

def never(prompts, responses, answers):
    return [0.0] * len(responses)

def one_of_eight_is_none(prompts, responses, answers):
    return [None if (len(responses), i) == (8, 0) else 1.0 for i in range(len(responses))]

def three_groups(prompts, responses, answers):
    return [float(i in (0, 4, 8)) for i in range(len(responses))]

def first(prompts, responses, answers):
    return [float(i == 0) for i in range(len(responses))]
"""


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory) -> Path:
    """A Qwen2 of random weights, a token for each byte, a chat template, and two stop ids as Qwen2.5's."""
    folder = tmp_path_factory.mktemp("qwen")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=264, intermediate_size=32, max_position_embeddings=4_200, **sizes)
    config.eos_token_id, config.bos_token_id, config.pad_token_id = 258, None, None
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = [258, 256]
    model.generation_config.repetition_penalty = 1.1
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def sums_arguments(world: Path) -> list[str]:
    return ["--preset", "sums", "--base_model", f"{world}/model", "--task.problems", str(world), *SIZES.split()]


@pytest.fixture(scope="session")
def in_folder(tmp_path_factory):
    """A function that gives a new folder with the module `letters`."""

    def make() -> Path:
        folder = tmp_path_factory.mktemp("run")
        (folder / "letters.py").write_text(LETTERS)
        return folder

    return make


COMMON = (
    "--rewards.verifier letters:letters --rewards.kl_coef 0.1 --ppo.critic_warmup 1 --rewards.adaptive_kl.target 1"
)


KINDS = {
    "ppo": "",
    "critic": "--ppo.critic_lr 0.01 --ppo.lam_alpha 0.5 --ppo.critic_lam 0.9 --ppo.nll_coef 0.1",
    "groups": "--ppo.advantage grpo --ppo.samples_per_prompt 4 --ppo.filter_groups --ppo.critic_warmup 0",
}


@pytest.fixture(scope="session")
def whole_run(tiny_sums, in_folder):
    """A function (kind) -> the folder in which such a run came to its end, and its arguments; each runs once."""

    @functools.cache
    def make(kind: str) -> tuple[Path, list[str]]:
        folder, arguments = in_folder(), [*sums_arguments(tiny_sums), *COMMON.split(), *KINDS[kind].split()]
        result = launch("rlvr/policy.py", *arguments, folder=folder, pictures=kind == "ppo")
        assert result.status == 0, result.stdout + result.stderr
        return folder, arguments

    return make


@pytest.fixture(scope="session")
def ppo_run(whole_run) -> tuple[Path, list[str]]:
    return whole_run("ppo")


# ---- What a run leaves -----------------------------------------------------------------------------------------


def test_a_run_leaves_metrics_samples_evaluation_and_models(ppo_run, tiny_sums):
    folder, _ = ppo_run
    this_run, saved = only(folder, "runs/*"), only(folder, "models/*")
    rows = metrics_of(this_run)
    header = (this_run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert len(set(header)) == len(header)
    assert [row["episode"] for row in rows] == [16, 32, 48] == [row["train/used_episodes"] for row in rows]
    assert all(row["val/first_ratio_gap"] < 1e-9 and row["objective/sampler_gap"] == 0 for row in rows)
    assert rows[0]["objective/kl"] == 0 < abs(rows[2]["objective/kl"])
    assert rows[0]["val/mean"] == 0 and rows[2]["val/mean"] != 0  # the critic's head starts at 0 [V70]
    assert rows[0]["objective/kl_coef"] == 0.1 != rows[1]["objective/kl_coef"]
    for row in rows:
        assert row["objective/rlhf_reward"] == pytest.approx(
            row["objective/scores"] + row["objective/non_score_reward"]
        )
        assert row["objective/non_score_reward"] == pytest.approx(-row["objective/kl_coef"] * row["objective/kl"])
        assert row["val/sequence_lengths_min"] <= row["val/sequence_lengths"] <= row["val/sequence_lengths_max"] <= 20
        assert 0 < row["policy/entropy_avg"] < math.log(400) and row["policy/grad_norm"] > 0
    meta, first = meta_of(this_run), rows_of(tiny_sums / "problems_train.jsonl")[0]
    assert meta["finished"] and meta["first_prompt"] == first["question"] + "\n"
    assert meta["sizes"]["steps_per_update"] == 2
    solved, held_out = rows_of(this_run / "evaluation.jsonl"), rows_of(tiny_sums / "problems_test.jsonl")
    assert [row["prompt"] for row in solved] == [row["question"] + "\n" for row in held_out[:8]]
    assert all(0 <= row["right_samples"] <= 2 for row in solved)
    assert meta["results"]["eval/gsm8k_strict"] == sum(row["gsm8k_strict"] for row in solved) / 8
    right = [row["right_samples"] / 2 for row in solved]
    assert meta["results"]["eval/mean@2"] == pytest.approx(sum(right) / 8) == meta["results"]["eval/pass@1"]
    assert meta["results"]["eval/pass@2"] == sum(share > 0 for share in right) / 8
    assert {"prompt", "response", "answer", "score", "advantage"} <= set(samples_of(this_run)[0])
    policy = AutoModelForCausalLM.from_pretrained(saved / "policy")
    start = AutoModelForCausalLM.from_pretrained(tiny_sums / "model")
    assert any((p != start.get_parameter(name)).any() for name, p in policy.named_parameters())
    AutoTokenizer.from_pretrained(saved / "policy")
    assert models.load_reward_model(saved / "value", torch.float32).reward_head.weight.abs().max() > 0
    assert (this_run / "learning_curves.png").stat().st_size > 10_000


def test_the_policy_waits_for_the_critic(ppo_run):
    first, second, *_ = metrics_of(only(ppo_run[0], "runs/*"))
    assert first["policy/kl_old_new"] == pytest.approx(0, abs=1e-12) and first["policy/grad_norm"] > 0
    assert second["objective/kl"] == pytest.approx(0, abs=1e-12)  # after one update, in which it did not move
    assert second["policy/approxkl_avg"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_same_numbers_bit_for_bit(whole_run, in_folder, kind):
    (whole, arguments), folder = whole_run(kind), in_folder()
    for words in ([*arguments, "--ppo.total_episodes", "32"], ["--ppo.total_episodes", "48"]):
        resume = ["--resume", str(only(folder, "runs/*"))] if list(folder.glob("runs/*")) else []
        result = launch("rlvr/policy.py", *resume, *words, folder=folder)
        assert result.status == 0, result.stderr
    assert metrics_of(only(folder, "runs/*")) == metrics_of(only(whole, "runs/*"))
    names = ["policy/model.safetensors"] + ["value/model.safetensors"] * (kind != "groups")
    for name in names:
        assert only(folder, f"models/*/{name}").read_bytes() == only(whole, f"models/*/{name}").read_bytes()


HOSTILE = (
    "--dtype float64 --ppo.batch_size 16 --ppo.total_episodes 32 --ppo.nminibatches 2 --save_interval 1 "
    "--log_interval 0 --trace_interval 0 --eval_interval 1 --eval_samples 2 "
    "--task.test_problems one.jsonl --task.kind_column kind --task.system_prompt None --task.prompt_format plain "
    "--task.prompt_length 64 --task.response_length 24 --rewards.overlong_buffer 0 --task.prompt_suffix"
)
HELD_OUT = {"question": "Petra has 7 apples. How many?", "answer": "#### 7", "kind": "one\u2028line\ror\ntwo"}
FAMILIES = {**PRESETS, **rlvr_tools.PRESETS}
IN_ROUNDS = "--ppo.filter_groups"
MAY_BE_HELD = {name: (name, "") for name, args in FAMILIES.items() if not args.ppo.filter_groups}
MAY_BE_HELD |= {
    f"{name}, filtered": (name, IN_ROUNDS) for name, args in FAMILIES.items() if args.ppo.samples_per_prompt > 1
}
MAY_BE_HELD |= {f"{name}, no score": (name, "--rewards.verifier letters:silent") for name in ("sums", "sums-tools")}
MAY_BE_HELD |= {"remax": ("gsm8k", "--ppo.advantage remax")}


@pytest.mark.parametrize(("family", "more"), MAY_BE_HELD.values(), ids=MAY_BE_HELD)
def test_a_checkpoint_takes_whatever_a_run_may_hold(tiny_sums, tiny_tools, in_folder, monkeypatch, family, more):
    """One held-out problem, of an odd kind; responses without a score; groups that are left over; a tool's tokens."""
    n, with_tool = min(FAMILIES[family].ppo.samples_per_prompt, 4), family in rlvr_tools.PRESETS
    world, folder = tiny_tools if with_tool else tiny_sums, in_folder()
    (folder / "one.jsonl").write_text(json.dumps(HELD_OUT) + "\n")
    common = f"--preset {family} --base_model {world}/model --task.problems {world} --ppo.samples_per_prompt {n} "
    words = f"{common} --rewards.verifier letters:some_of_three {more} {HOSTILE}".split()
    module = rlvr_tools if with_tool else rlvr_policy
    rows = run_in(folder, monkeypatch, *words, "\n", module=module)
    newest = only(folder, "runs/*/checkpoints/2")
    shutil.rmtree(newest)
    tensors = load_file(newest.with_name("1") / "tensors.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    if IN_ROUNDS in more:
        surplus = len(tensors["surplus/mask"])
        assert surplus or family not in ("gsm8k-grpo", "dr-grpo", "sums-grpo")
    assert len(rows) == 2 and run_in(folder, monkeypatch, "--resume", str(newest.parents[1]), module=module) == rows


CHUNKS = "--ppo.local_micro_batch_size 2 --ppo.local_rollout_batch_size 4"


@pytest.mark.parametrize("kind", ["ppo", "critic"])
def test_processes_and_chunks_change_nothing_but_rounding(whole_run, in_folder, kind):
    (whole, arguments), folder = whole_run(kind), in_folder()
    results = launch_together(2, "rlvr/policy.py", *arguments, *CHUNKS.split(), folder=folder)
    assert all(result.status == 0 for result in results), results[0].stderr
    for one, other in zip(metrics_of(only(folder, "runs/*")), metrics_of(only(whole, "runs/*")), strict=True):
        assert one == pytest.approx(other, rel=1e-7, abs=1e-9)


def test_shared_prefixes_change_nothing_but_rounding(tiny_sums, in_folder, monkeypatch):
    """V120: critic, reference and policy in two processes, next to one process that reads each row."""
    words = [*sums_arguments(tiny_sums), *COMMON.split(), *ONCE, "--ppo.samples_per_prompt", "4"]
    expected, folder = run_in(in_folder(), monkeypatch, *words), in_folder()
    results = launch_together(2, "rlvr/policy.py", *words, "--ppo.share_prefixes", folder=folder)
    assert all(result.status == 0 for result in results), results[0].stderr
    assert "each row is read by itself" not in results[0].stdout
    for one, other in zip(metrics_of(only(folder, "runs/*")), expected, strict=True):
        assert one == pytest.approx(other, rel=1e-7, abs=1e-9)


# ---- Estimators, losses and rewards, each through its own flag -------------------------------------------------


def run_in(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    module: ModuleType = rlvr_policy,
    draw: Callable = lambda *_: None,  # the picture takes longer than the run
) -> list[dict[str, float]]:
    """train() of a script in this process: the rows of its metrics.csv."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "letters", raising=False)
    monkeypatch.setattr(learning_curves, "draw_learning_curves", draw)
    module.train(command_line.parse_args(module.PRESETS, list(words)))
    return metrics_of(max(folder.glob("runs/*"), key=lambda folder: folder.stat().st_mtime))


ONCE = ["--ppo.total_episodes", "32", "--eval_interval", "0", "--eval_samples", "0", "--log_interval", "0"]


@pytest.fixture
def run_once(tiny_sums, in_folder, monkeypatch) -> Callable[..., list[dict[str, float]]]:
    """A function (more arguments) -> the rows of a run of two updates, whose folder is then the current one."""
    arguments = [*sums_arguments(tiny_sums), *ONCE]
    return lambda words, **options: run_in(in_folder(), monkeypatch, *arguments, *words.split(), **options)


WAYS = {
    name: f"--ppo.advantage {name} --ppo.samples_per_prompt {4 if name in IN_GROUPS else 2}" for name in ESTIMATORS
}
WAYS["gdpo"] += " --rewards.kl_coef 0 --rewards.kl_loss_coef 0.1 --rewards.format letters:some"
WAYS |= {
    "ipo": f"{WAYS['dr_grpo']} --ppo.loss ipo --ppo.trust_region 0.1",
    "dppo": f"{WAYS['dr_grpo']} --ppo.loss dppo",
    "gspo": f"{WAYS['grpo']} --ppo.loss gspo --ppo.loss_aggregation seq-mean-token-mean",
    "cispo": f"{WAYS['rloo']} --ppo.loss cispo --ppo.loss_aggregation seq-mean-token-sum",
    "reinforce": f"{WAYS['remax']} --ppo.loss reinforce --ppo.loss_aggregation seq-mean-token-sum-norm",
    "k3+ in the loss": f"{WAYS['grpo']} --rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator k3+",
    "full": "--rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator full --rewards.kl_estimator full "
    "--ppo.whiten_advantages False",
    "k3 in the reward": "--rewards.kl_estimator k3 --rewards.kl_loss_coef 0.1",
    "no kl": f"{WAYS['dr_grpo']} --rewards.kl_coef 0",
    "adapters": "--lora.rank 2 --lora.target_modules all-linear",
    "critic": "--ppo.critic_lam 1 --ppo.lam_alpha 0.5 --ppo.nll_coef 0.1",
    "entropy": "--ppo.entropy_coef 0.1 --ppo.dual_clip 3 --ppo.noptepochs 2",
}


def test_pictures_are_of_the_verifiers_of_the_run(run_once):
    drawn = []
    run_once("--eval_interval 1 --rewards.verifier letters:letters", draw=lambda *of_run: drawn.append(of_run))
    ((_, rows, args),) = drawn
    shown = learning_curves.panels_of(
        learning_curves.without_groups_of_one(rows[0], args), learning_curves.own_metrics([args])
    )
    panels = {panel["title"]: names for panel, names in shown}
    assert "eval/letters:letters" in panels["Held-out queries"] and "Groups without a signal" not in panels


@pytest.mark.parametrize("way", WAYS)
def test_every_way_learns_something_through_its_flag(run_once, capsys, way):
    rows = run_once(f"--rewards.verifier letters:letters --rewards.kl_coef 0.1 --ppo.critic_warmup 0 {WAYS[way]}")
    assert len(rows) == 2 and rows[0]["val/first_ratio_gap"] < 1e-9
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["val/advantages_abs_mean"] > 0 and rows[0]["policy/grad_norm"] > 0
    assert abs(rows[1]["policy/kl_old_new"]) > 0
    assert rows[0]["val/num_stop_token_ids"] == pytest.approx(16 * rows[0]["val/stop_token_rate"])
    with only(Path.cwd(), "runs/*/metrics.csv").open() as file:
        first, second = csv.DictReader(file)  # with the times
    assert second["time/from_scratch"] == second["time"]
    assert 0 < float(second["time/training"]) < float(second["time"]) - float(first["time"])
    assert ("value/grad_norm" in rows[0]) == ("--ppo.advantage" not in WAYS[way] or "advantage gae" in WAYS[way])
    # A divergence is logged where something has computed it.
    assert ("objective/kl" in rows[0]) == ("objective/kl_per_token" in rows[0]) == (way != "no kl")
    assert ("loss/kl_avg" in rows[0]) == ("kl_loss_coef" in WAYS[way])
    said = capsys.readouterr().out
    assert ("gradient vanishes near the reference" in said) == (way == "k3 in the reward")
    assert ("both penalise the KL" in said) == ("in the" in way and "loss" in WAYS[way])
    if way == "adapters":
        assert only(Path.cwd(), "models/*/policy/adapter/adapter_model.safetensors")


def test_a_group_whose_greedy_response_cannot_be_scored_counts_nowhere(run_once):
    """The first of eight greedy responses, each of which is the baseline of two others."""
    rows = run_once(f"{WAYS['remax']} --ppo.critic_warmup 0 --rewards.verifier letters:one_of_eight_is_none")
    assert [row["val/unscorable"] for row in rows] == [2 / 16] * 2


@pytest.mark.parametrize("verifier", ["some", "silent"])
def test_a_minibatch_without_a_token_is_in_no_mean(run_once, verifier):
    """The critic warms up: the policy does not move, and all ratios are 1."""
    row, _ = run_once(f"--rewards.verifier letters:{verifier} --ppo.nminibatches 16 --ppo.entropy_coef 0.5")
    assert row["val/unscorable"] > 0.1 and row["val/ratio_var"] == pytest.approx(0, abs=1e-9)
    if verifier == "silent":
        assert row["val/unscorable"] == 1 and row["policy/entropy_avg"] == 0
        return
    assert row["val/unscorable"] < 1 and row["objective/scores"] == 1
    # An episode is a minibatch: the losses are those of its tokens, and the unscorable have none.
    assert row["val/ratio"] == pytest.approx(1, abs=1e-9) and 1 < row["policy/entropy_avg"] < math.log(400)
    assert row["policy/entropy_avg"] == pytest.approx(row["loss/entropy_avg"])
    assert row["objective/loss"] == pytest.approx(row["loss/policy_avg"] - 0.5 * row["loss/entropy_avg"])


@pytest.mark.parametrize("verifier", ["never", "silent"])
def test_a_critic_explains_nothing_where_all_returns_are_equal(run_once, verifier):
    """Although no return differs from what the critic says."""
    rows = run_once(f"--rewards.verifier letters:{verifier} --ppo.critic_warmup 2")
    assert [row["val/explained_var"] for row in rows] == [0, 0]


def test_the_likelihood_loss_is_a_mean_over_minibatches_with_a_correct_response(run_once):
    """One of 16 responses is correct, in one of four minibatches. The policy does not move."""
    words = "--rewards.verifier letters:first --ppo.nll_coef 0.1 --ppo.nminibatches 4 --ppo.total_episodes 16 "
    words += "--trace_interval 1 --trace_episodes 16"
    (row,) = run_once(words)
    trace = traces.read(only(Path.cwd(), "runs/*"), 0)
    logprobs = trace.tokens["logprobs"][0][trace.tokens["mask"][0].bool()]
    assert row["loss/nll_avg"] == pytest.approx(-logprobs.double().mean().item(), rel=1e-5) != 0


def test_scores_are_sums_and_correct_rates_are_those_of_the_verifier(run_once):
    words = "--rewards.verifier letters:letters --rewards.format gsm8k_format"
    words += " --rewards.missing_stop subtract --rewards.missing_stop_penalty 0.25"
    rows = run_once(words)
    for row in rows:
        verifier, form = row["objective/verifier_reward"], row["objective/format_reward"]
        expected = verifier + form - 0.25 * (1 - row["val/stop_token_rate"])
        assert row["objective/scores"] == pytest.approx(expected)
        assert row["objective/verifiable_correct_rate"] == pytest.approx(verifier)


def test_the_reward_model_reads_a_few_rows_at_a_time_and_must_be_finite(ppo_run, tiny_sums, tmp_path, monkeypatch):
    args = command_line.parse_args(PRESETS, sums_arguments(tiny_sums))
    folder, ids = tmp_path / "reward", problems.TaskIds(pad=400, stops=(0,))
    shutil.copytree(only(ppo_run[0], "models/*") / "value", folder)  # a critic, which is of the same form
    info = json.loads((folder / "ppo_rlhf.json").read_text())
    (folder / "ppo_rlhf.json").write_text(json.dumps(info | {"kind": "reward model"}))
    few = dataclasses.replace(args.ppo, local_rollout_batch_size=2)
    args = dataclasses.replace(
        args, rewards=dataclasses.replace(args.rewards, trained_model=str(folder), trained_weight=3.0), ppo=few
    )
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    score, weight = rlvr_policy.load_sources(args, None, ids, accelerator)["reward_model"]
    queries = torch.tensor([[400, 400, 5], [6, 7, 8], [400, 9, 10], [11, 12, 13], [400, 400, 14]])
    responses = torch.tensor([[1, 2, 0], [3, 0, 400], [0, 400, 400], [4, 5, 6], [7, 8, 0]])
    model = models.load_reward_model(folder, torch.float64)
    rows = [torch.cat(row)[None] for row in zip(queries, responses, strict=True)]
    alone = [model(row[row != 400][None], 400).item() for row in rows]
    read, forward = [], train_reward.RewardModel.forward

    def counted(self, tokens, pad_id):
        read.append(tuple(tokens.shape))
        return forward(self, tokens, pad_id)

    monkeypatch.setattr(train_reward.RewardModel, "forward", counted)
    assert (
        score([], [], [], queries=queries, responses=responses).tolist() == pytest.approx(alone, rel=1e-9)
        and weight == 3.0
    )
    assert sorted(read) == [(1, 3), (2, 4), (2, 6)]  # tokens of the rows: 6, 5, 4, 4, 3
    monkeypatch.setattr(
        train_reward.RewardModel, "forward", lambda self, tokens, pad_id: torch.full((len(tokens),), math.nan)
    )
    with pytest.raises(NumericalError, match="the reward model gives scores that are not finite"):
        score([], [], [], queries=queries, responses=responses)


def test_filtered_groups_count_as_episodes_but_are_not_trained_on(run_once, monkeypatch):
    """In three groups of four, one response is correct: two rounds leave two groups over, and then one is enough."""
    words = f"{WAYS['grpo']} --ppo.critic_warmup 0 --rewards.verifier letters:three_groups --ppo.filter_groups"
    take, versions = rlvr_policy.Pool.take, []

    def watched(pool):
        found = take(pool)
        versions.append(found[0].versions)
        return found

    monkeypatch.setattr(rlvr_policy.Pool, "take", watched)
    rows = run_once(words)
    assert [row["train/used_episodes"] for row in rows] == [16, 32]
    assert [row["episode"] for row in rows] == [32, 48]
    ages = [float((number - of_batch).double().mean()) for number, of_batch in enumerate(versions)]
    assert [row["train/staleness_mean"] for row in rows] == ages and ages[1] > 0
    # The ratio of groups that were left over doesn't start at 1, and so they are not in this number.
    assert all(row["val/first_ratio_gap"] < 1e-9 for row in rows)
    words = words.replace("letters:three_groups", "letters:never")
    with pytest.raises(InputError, match=r"10 rounds of generation did not fill a batch: only 0 of 16"):
        run_once(words)


# ---- GSM8K -----------------------------------------------------------------------------------------------------

SHRUNK = (
    "--dtype float32 --ppo.batch_size {batch} --ppo.total_episodes {batch} --task.response_length 16 "
    "--ppo.samples_per_prompt {n} --save_interval 0 --eval_problems 4 --task.problems {gsm8k} --base_model {model}"
)


@pytest.mark.parametrize("preset", ["gsm8k", "gsm8k-grpo", "dr-grpo", "rloo"])
def test_presets_of_gsm8k_run_from_the_first_line_to_the_last(tiny_qwen, in_folder, monkeypatch, preset):
    n = min(4, PRESETS[preset].ppo.samples_per_prompt)
    batch = max(8, 4 * n)
    words = SHRUNK.format(batch=batch, n=n, gsm8k=GSM8K, model=tiny_qwen).split()
    rows = run_in(in_folder(), monkeypatch, "--preset", preset, *words)
    assert len(rows) == 1 and rows[0]["val/sequence_lengths_max"] <= 16
    assert rows[0]["eval/gsm8k_strict"] == 0 == rows[0]["eval/gsm8k_format"]
    prompt = rows_of(only(Path.cwd(), "runs/*") / "evaluation.jsonl")[0]["prompt"]
    assert prompt.startswith("<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\n")
    assert "<|im_end|>\n<|im_start|>assistant\n" in prompt


# ---- Reading what a policy writes: sample.py -------------------------------------------------------------------


def sampled(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes) -> list[dict]:
    """Rows of sample.py for the policy of a run that lies in a folder, where the module `letters` is, too."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "letters", raising=False)
    policy = str(only(folder, "models/*/policy"))
    return sample.sample(sample.Args(policy=policy, trust_remote_code=True, **changes))


def test_the_likeliest_solutions_are_those_of_the_evaluation(ppo_run, monkeypatch):
    folder, _ = ppo_run
    solved = rows_of(only(folder, "runs/*") / "evaluation.jsonl")
    rows = sampled(folder, monkeypatch, n=8, temperature=0.0)
    names = {"query": "prompt", "reference": "answer", "policy": "response", "policy score": "letters:letters"}
    assert len(rows) == 8
    for row, expected in zip(rows, solved, strict=True):
        assert {name: row[name] for name in names} == {name: expected[of_run] for name, of_run in names.items()}
    assert {row["policy score"] for row in rows} == {0.0, 1.0}


@torch.no_grad()
def solve_slowly(model, prompt: list[int], noise: list[float], stop: int, temperature: float) -> list[int]:
    """Token by token, each from a pass over the whole text: the first whose cumulative probability is above noise."""
    response: list[int] = []
    for threshold in noise:
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, -1].double()
        probabilities = (logits / temperature).softmax(0).cumsum(0)
        response.append(int((probabilities <= threshold).sum()))
        if response[-1] == stop:
            break
    return response


def text_logprob(model, prompt: list[int], response: list[int], temperature: float) -> float:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    return (logits / temperature).log_softmax(1)[range(len(response)), response].sum().item()


def test_solutions_are_sampled_at_the_temperature_of_the_run(ppo_run, tiny_sums, tmp_path, monkeypatch):
    """By the policy and by its base model; the KL is that of the policy's response."""
    policy = tmp_path / "models/run/policy"
    shutil.copytree(only(ppo_run[0], "models/*/policy"), policy)
    info = json.loads((policy / "ppo_rlhf.json").read_text())
    info["task"] |= {"temperature": 0.7, "response_length": 12}
    (policy / "ppo_rlhf.json").write_text(json.dumps(info))
    shutil.copy(ppo_run[0] / "letters.py", tmp_path)
    rows = sampled(tmp_path, monkeypatch, n=3, seed=5)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    networks = {"base": AutoModelForCausalLM.from_pretrained(tiny_sums / "model")}
    networks["policy"] = AutoModelForCausalLM.from_pretrained(policy)
    noise = torch.rand(3, 12, generator=train_policy.keyed_generator(5, "sample", 0), dtype=torch.float64).tolist()
    held_out = rows_of(tiny_sums / "problems_test.jsonl")[:3]
    for row, problem, uniforms in zip(rows, held_out, noise, strict=True):
        question = problem["question"] + "\n"
        prompt, kl = tokenizer(question, add_special_tokens=False)["input_ids"], []
        assert row["query"] == question
        for name, network in networks.items():
            response = solve_slowly(network.float(), prompt, uniforms, tokenizer.eos_token_id, 0.7)
            text = tokenizer.decode(response, skip_special_tokens=True)
            assert (row[name], row[f"{name} score"]) == (text, sum(map(str.isalpha, text)) % 2)
            kl = [text_logprob(one.float(), prompt, response, 0.7) for one in networks.values()]
        assert row["kl"] == pytest.approx(kl[1] - kl[0], abs=1e-4)


def test_a_question_becomes_the_prompt_of_the_run(tiny_qwen, tmp_path):
    """In the tokenizer's chat template; without an answer there is no verdict."""
    policy = tmp_path / "models/run/policy"
    shutil.copytree(tiny_qwen, policy)
    task = dataclasses.replace(problems.TASKS["gsm8k"], problems=str(GSM8K), prompt_length=160, response_length=4)
    info = {"kind": "policy", "base_model": str(tiny_qwen), "vocab_size": 259, "task": dataclasses.asdict(task)}
    info |= {"function": "gsm8k_strict", "monitor": "", "reward_model": ""}
    (policy / "ppo_rlhf.json").write_text(json.dumps(info))
    comparison = sample.Comparison(sample.Args(policy=str(policy)))
    (query,) = comparison.queries(prompts=["1+1?"])
    message = {"role": "user", "content": "1+1?" + task.prompt_suffix}
    chat = AutoTokenizer.from_pretrained(tiny_qwen).apply_chat_template([message], add_generation_prompt=True)
    assert query.context == chat["input_ids"]
    assert comparison.ids.stops == (256, 258)  # those of the model's generation config
    (row,) = sample.sample(sample.Args(policy=str(policy), prompt=("1+1?",)))
    assert set(row) == {"query", "base", "policy", "base log-prob", "policy log-prob", "kl"} and row["kl"] == 0


# ---- Bad input -------------------------------------------------------------------------------------------------

RLOO = "--ppo.advantage rloo --ppo.samples_per_prompt 4 --ppo.critic_warmup 0"
DOUBTFUL = {
    "--ppo.advantage grpo --rewards.kl_coef 1e-5": "--ppo.advantage grpo divides by the group's standard deviation",
    "--ppo.loss gspo": "a clip range above 0.01 never acts",
    "--ppo.advantage dr_grpo": "Dr. GRPO only with --ppo.loss_aggregation seq-mean-token-sum-norm",
    "--rewards.kl_coef 0.1 --rewards.adaptive_kl.target 3 --rewards.kl_estimator k2": "k2 does not estimate",
    "--rewards.kl_coef 0.1 --rewards.kl_loss_coef 0.1": "--rewards.kl_loss_coef both penalise the KL",
    "--ppo.advantage maxrl --rewards.kl_coef 0.1": "--ppo.advantage maxrl divides by the mean of the scores",
    "--ppo.advantage maxrl --rewards.kl_loss_coef 0.1": "",
    "--ppo.advantage rloo --rewards.kl_coef 1e-5": "",
    "--ppo.loss gspo --ppo.cliprange_low 3e-4 --ppo.cliprange_high 4e-4": "",
    "--ppo.advantage dr_grpo --ppo.loss_aggregation seq-mean-token-sum-norm --rewards.kl_coef 0.1": "",
    "--ppo.advantage grpo --rewards.kl_coef 0.1 --ppo.filter_groups": "",
}


@pytest.mark.parametrize("words", DOUBTFUL)
def test_what_may_not_be_meant_is_said(words):
    said = list(rlvr_arguments.doubts(command_line.parse_args(PRESETS, ["--preset", "sums", *words.split()])))
    assert DOUBTFUL[words] in "\n".join(said) and bool(said) == bool(DOUBTFUL[words])
    assert not any("\n" in line for line in said)


def test_a_run_of_an_older_version_is_called_that(tmp_path):
    """It lacks two arguments."""
    args = dataclasses.asdict(PRESETS["sums"])
    del args["eval_temperature"], args["ppo"]["nll_coef"]
    (tmp_path / "meta.json").write_text(json.dumps({"args": args, "commit": "1f2e3d"}))
    words = "written at commit 1f2e3d, is not of this version's runs: its arguments differ in eval_temperature"
    with pytest.raises(InputError, match=words):
        command_line.parse_args(PRESETS, ["--resume", str(tmp_path)])


def test_a_temperature_of_samples_may_stay_when_they_are_switched_off():
    rlvr_arguments.check_arguments(
        command_line.parse_args(PRESETS, ["--preset", "sums", "--eval_samples", "0", "--eval_temperature", "0.7"])
    )


def test_a_reward_model_that_reads_too_few_tokens_names_this_chapter_s_arguments(tiny_sums, in_folder, monkeypatch):
    def too_short(*_, **__):
        raise InputError(f"shorten {errors.flag('task.query_length')}")

    monkeypatch.setattr(pretrained, "find_head", lambda *_: None)  # as if there were a reward model x
    monkeypatch.setattr(classifiers, "is_foreign", lambda _: False)
    monkeypatch.setattr(models, "load_scalar_model", too_short)
    words = [*sums_arguments(tiny_sums), *RLOO.split(), "--rewards.trained_model", "x"]
    with pytest.raises(InputError, match=r"shorten --task\.prompt_length"):
        run_in(in_folder(), monkeypatch, *words)


def test_k1_in_the_loss_is_no_choice():
    with pytest.raises(SystemExit):
        command_line.parse_args(PRESETS, ["--rewards.kl_loss_estimator", "k1"])


def test_presets_are_named_by_their_key_and_pass_the_checks():
    for name, args in PRESETS.items():
        assert args.preset == name and not [*rlvr_arguments.doubts(args)]
        rlvr_arguments.check_arguments(args)
        rlvr_arguments.ppo_sizes(args.ppo, 4)
        assert command_line.from_dict(rlvr_policy.Args, json.loads(json.dumps(dataclasses.asdict(args)))) == args


def test_every_metric_is_explained(ppo_run):
    """A name with <words> stands for many."""
    patterns = [re.sub("<[a-z]+>", ".+", re.escape(name)) for name in explained_metrics(3)]
    names = metrics_of(only(ppo_run[0], "runs/*"))[0].keys() - {"step"}
    assert len(names) > 50 and {name for name in names if not any(re.fullmatch(p, name) for p in patterns)} == set()
    of_another_script = ("async/", "time/", "val/tool_")
    standing = {name for name in explained_metrics(3) if "<" not in name and not name.startswith(of_another_script)}
    of_others = {"objective/format_reward", "objective/reward_model_reward", "train/staleness_mean"}
    of_others |= {"loss/nll_avg", "loss/kl_avg"}
    assert standing - names == of_others | {"eps", "time"}


def test_a_run_ends_with_what_was_before_and_after(tmp_path, capsys):
    """By kind and by number of samples; a dash where nothing was measured before. Solutions keep their lines."""
    before = {"eval/boxed": 0.25, "eval/boxed_steps_2": 0.125, "eval/length": 7.0}
    after = before | {"eval/boxed": 0.75, "eval/pass@1": 0.5, "eval/pass@4": 1.0, "eval/sampled_length": 9.25}
    row = {"prompt": "1+1?\n", "answer": "2", "a_right_sample": "1+1=2\n#### 2", "a_wrong_sample": "#### 3"}
    rows = [row, row | {"prompt": "2+2?\n", "a_wrong_sample": None}]
    places = {"folder": tmp_path / "runs/r", "model_folder": tmp_path / "models/r"}
    this_run = SimpleNamespace(is_main=True, rows=[before, after], meta={"wall_time": 90.0}, **places)
    rlvr_metrics.report(this_run, "boxed", "steps", after, rows)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any("1+1?" in line for line in lines) and not any("2+2?" in line or "⏎" in line for line in lines)
    start = lines.index("2 held-out problems before after")
    assert lines[start + 1 : start + 8] == [
        "correct, likeliest response 25.0% 75.0%",
        "steps 2 12.5% 12.5%",
        "correct, samples: pass@1 - 50.0%",
        "correct, samples: pass@4 - 100.0%",
        "tokens, likeliest response 7.0 7.0",
        "tokens, samples - 9.2",
        "pass@k: one of k samples, or more, is correct.",
    ]
    assert "It took 1.5 minutes." in lines
    this_run.is_main = False
    rlvr_metrics.report(this_run, "boxed", "steps", after, rows)
    assert not capsys.readouterr().out
