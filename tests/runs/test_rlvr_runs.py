"""Chapter 3 through its command line and train(), on a tiny world and on a few rows of GSM8K with a tiny Qwen2."""

import csv
import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from refusals import edit
from runs import (
    check_close,
    explained_metrics,
    interrupt,
    meta_of,
    metrics_of,
    only,
    rows_of,
    samples_of,
    sums_arguments,
    trained,
    write_rows,
)
from safetensors.torch import load_file
from small_problems import GSM8K, byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_runs import check_same

from ppo_rlhf import sample, train_policy, train_reward
from ppo_rlhf.rlvr import (
    arguments as rlvr_arguments,
    policy as rlvr_policy,
    problems,
    tools as rlvr_tools,
)
from ppo_rlhf.rlvr.arguments import PRESETS
from ppo_rlhf.tldr import models
from ppo_rlhf.train_policy import InputError, parse_args


@pytest.fixture(scope="session")
def tiny_qwen(tiny_models, tmp_path_factory) -> Path:
    """A Qwen2 with a token for each byte, a chat template, and two stop ids as Qwen2.5's."""
    folder, model = tmp_path_factory.mktemp("qwen"), tiny_models("qwen2", 264)
    model.config.max_position_embeddings, model.config.eos_token_id = 4_200, 258
    model.generation_config.eos_token_id = [258, 256]
    model.generation_config.repetition_penalty = 1.1
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


# ---- What a run leaves -----------------------------------------------------------------------------------------


def test_a_run_leaves_metrics_samples_evaluation_and_models(critic, tiny_sums):
    this_run = critic.run()
    rows = metrics_of(this_run)
    assert [row["episode"] for row in rows] == [16, 32, 48, 64] == [row["train/used_episodes"] for row in rows]
    assert all(row["val/first_ratio_gap"] < 1e-9 and row["objective/sampler_gap"] < 1e-9 for row in rows)
    assert rows[0]["objective/kl"] == 0 < abs(rows[3]["objective/kl"])
    assert rows[0]["policy/grad_norm"] > 0
    assert rows[1]["objective/kl"] == pytest.approx(0, abs=1e-12)  # the policy waits for the critic
    assert rows[0]["val/mean"] == 0 and rows[3]["val/mean"] != 0  # the critic's head starts at 0 [V70]
    assert rows[0]["objective/kl_coef"] == 0.1 != rows[1]["objective/kl_coef"]
    # Two responses to each of 64 problems: after 64 episodes, half of the problems were drawn.
    assert [row["epoch"] for row in rows] == [0.125, 0.25, 0.375, 0.5]
    for row in rows:
        total = row["objective/scores"] - row["objective/kl_coef"] * row["objective/kl"]
        assert row["objective/rlhf_reward"] == pytest.approx(total)
        assert row["val/sequence_lengths_min"] <= row["val/sequence_lengths"] <= row["val/sequence_lengths_max"] <= 20
    meta = meta_of(this_run)
    solved, held_out = rows_of(this_run / "evaluation.jsonl"), rows_of(tiny_sums / "problems_test.jsonl")
    assert [row["prompt"] for row in solved] == [row["question"] + "\n" for row in held_out[:8]]
    first = rows_of(this_run / "evaluation_before.jsonl")
    assert [row["prompt"] for row in first] == [row["prompt"] for row in solved]
    assert rows[0]["eval/mean@2"] == pytest.approx(sum(row["right_samples"] for row in first) / 16)
    results, right = meta["results"], [row["right_samples"] / 2 for row in solved]
    assert results["eval/gsm8k_strict"] == sum(row["gsm8k_strict"] for row in solved) / 8
    assert results["eval/mean@2"] == pytest.approx(sum(right) / 8) == results["eval/pass@1"]
    assert results["eval/pass@2"] == sum(share > 0 for share in right) / 8
    before_and_after = f"{rows[0]['eval/mean@2']:>9.1%}{results['eval/mean@2']:>9.1%}"
    assert before_and_after in (critic.folder / "stdout").read_text()
    assert {"prompt", "response", "answer", "score", "advantage"} <= set(samples_of(this_run)[0])
    policy = AutoModelForCausalLM.from_pretrained(critic.model("policy"))
    start = AutoModelForCausalLM.from_pretrained(tiny_sums / "model")
    assert any((p != start.get_parameter(name)).any() for name, p in policy.named_parameters())
    AutoTokenizer.from_pretrained(critic.model("policy"))
    assert models.load_reward_model(critic.model("value"), torch.float32).reward_head.weight.abs().max() > 0


def test_a_resumed_run_has_the_same_numbers_bit_for_bit(critic, tmp_path):
    """test_traces.py resumes a run in groups."""
    copy = critic.copy(tmp_path / "copy")
    shutil.rmtree(copy.folder / "models")
    interrupt(copy.run())
    copy.resumed(copy.run())
    check_same(copy, critic)


def test_processes_and_chunks_change_nothing_but_rounding(groups, groups_on_two):
    check_close(groups_on_two.run(), groups.run(), rel=1e-7, abs=1e-9)


def test_shared_prefixes_change_nothing_but_rounding(critic, tmp_path):
    """V120: critic, reference and policy in two processes, next to one process that reads each row."""
    arguments = [*critic.arguments, "--ppo.share_prefixes"]
    two = dataclasses.replace(critic, folder=tmp_path, arguments=arguments, processes=2).made()
    assert "each row is read by itself" not in (tmp_path / "stdout").read_text()
    check_close(two.run(), critic.run(), rel=1e-7, abs=1e-9)


def run_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str, module: ModuleType = rlvr_policy
) -> list[dict]:
    """train() of a script in this process: the rows of its metrics.csv."""
    monkeypatch.chdir(folder)
    return metrics_of(trained(module, folder, words))


HOSTILE = (
    "--dtype float64 --ppo.batch_size 16 --ppo.total_episodes 32 --ppo.nminibatches 2 --save_interval 1 "
    "--log_interval 0 --trace_interval 0 --eval_interval 1 --eval_samples 2 "
    "--task.test_problems one.jsonl --task.kind_column kind --task.system_prompt None --task.prompt_format plain "
    "--task.prompt_length 64 --task.response_length 24 --rewards.overlong_buffer 0 --task.prompt_suffix"
)
HELD_OUT = {"question": "Petra has 7 apples. How many?", "answer": "#### 7", "kind": "one\u2028line\ror\ntwo"}


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("gsm8k-grpo", "--rewards.verifier own_functions:some_of_three --ppo.filter_groups"),
        ("gsm8k", "--rewards.verifier own_functions:some_of_three --ppo.advantage remax"),
        ("sums-tools", "--rewards.verifier own_functions:silent"),
    ],
    ids=["groups that are left over", "a greedy response for each", "a tool and no score"],
)
def test_a_checkpoint_takes_whatever_a_run_may_hold(tiny_sums, tiny_tools, tmp_path, monkeypatch, preset, more):
    """One held-out problem, of an odd kind; responses without a score; groups that are left over; a tool's tokens."""
    write_rows(tmp_path / "one.jsonl", HELD_OUT)
    module = rlvr_tools if preset in rlvr_tools.PRESETS else rlvr_policy
    n, world = min(module.PRESETS[preset].ppo.samples_per_prompt, 4), {rlvr_tools: tiny_tools}.get(module, tiny_sums)
    common = f"--preset {preset} --base_model {world}/model --task.problems {world} --ppo.samples_per_prompt {n} "
    rows = run_in(tmp_path, monkeypatch, *f"{common} {more} {HOSTILE}".split(), "\n", module=module)
    newest = only(tmp_path, "runs/*/checkpoints/2")
    shutil.rmtree(newest)
    tensors = load_file(newest.with_name("1") / "tensors.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert "filter" not in more or len(tensors["surplus.mask"])
    again = run_in(tmp_path, monkeypatch, "--resume", str(newest.parents[1]), module=module)
    assert len(rows) == 2 and again == rows


# ---- Estimators, losses and rewards, each through its own flag -------------------------------------------------


@pytest.fixture
def run_once(tiny_sums, tmp_path, monkeypatch) -> Callable[[str], list[dict[str, float]]]:
    """A function (more arguments) -> the rows of a run of two updates, whose folder is then the current one."""
    once = "--ppo.total_episodes 32 --eval_interval 0 --eval_samples 0 --log_interval 0 --save_interval 0 "
    arguments = [*sums_arguments(tiny_sums), *once.split(), "--trace_interval", "0"]
    return lambda words: run_in(tmp_path, monkeypatch, *arguments, *words.split())


WAYS = {  # of which each has something that no other has
    "gdpo": "--ppo.advantage gdpo --ppo.samples_per_prompt 4 --rewards.kl_coef 0 --rewards.kl_loss_coef 0.1 "
    "--rewards.format own_functions:some",
    "ipo": "--ppo.advantage dr_grpo --ppo.samples_per_prompt 4 --ppo.loss ipo --ppo.trust_region 0.1",
    "dppo": "--ppo.advantage dr_grpo --ppo.samples_per_prompt 4 --ppo.loss dppo --rewards.kl_coef 0",
    "cispo": "--ppo.advantage rloo --ppo.samples_per_prompt 4 --ppo.loss cispo "
    "--ppo.loss_aggregation seq-mean-token-sum --rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator k3+",
    "reinforce": "--ppo.advantage remax --ppo.samples_per_prompt 2 --ppo.loss reinforce "
    "--ppo.loss_aggregation seq-mean-token-sum-norm",
    "full": "--rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator full --rewards.kl_estimator full "
    "--ppo.whiten_advantages False",
    "k3 in the reward": "--rewards.kl_estimator k3 --ppo.entropy_coef 0.1 --ppo.dual_clip 3 --ppo.noptepochs 2",
    "adapters": "--lora.rank 2 --lora.target_modules all-linear",
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_learns_something_through_its_flag(run_once, way):
    common = "--rewards.verifier own_functions:letters --rewards.kl_coef 0.1 --ppo.critic_warmup 0"
    rows = run_once(f"{common} {WAYS[way]}")
    assert len(rows) == 2 and rows[0]["val/first_ratio_gap"] < 1e-9
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["val/advantages_abs_mean"] > 0 and rows[0]["policy/grad_norm"] > 0
    assert abs(rows[1]["policy/kl_old_new"]) > 0
    assert rows[0]["val/num_stop_token_ids"] == pytest.approx(16 * rows[0]["val/stop_token_rate"])
    with only(Path.cwd(), "runs/*/metrics.csv").open() as file:
        first, second = csv.DictReader(file)  # with the times
    assert second["time/from_scratch"] == second["time"]
    assert 0 < float(second["time/training"]) < float(second["time"]) - float(first["time"])
    assert ("value/grad_norm" in rows[0]) == ("--ppo.advantage" not in WAYS[way])
    # A divergence is logged where something has computed it.
    assert ("objective/kl" in rows[0]) == ("objective/kl_per_token" in rows[0]) == (way != "dppo")
    assert ("loss/kl_avg" in rows[0]) == ("kl_loss_coef" in WAYS[way])
    if way == "adapters":
        assert only(Path.cwd(), "models/*/policy/adapter/adapter_model.safetensors")


@pytest.mark.parametrize("form", ["k1", "full"])
def test_a_teacher_takes_the_place_of_scores_and_of_the_reference(run_once, tiny_sums, tmp_path, form):
    """With its tokenizer, and other weights than the policy's. The verifier's values are still logged."""
    model = AutoModelForCausalLM.from_pretrained(tiny_sums / "model")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    model.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(tiny_sums / "model").save_pretrained(tmp_path / "teacher")
    rows = run_once(
        f"--rewards.teacher {tmp_path}/teacher --rewards.kl_estimator {form} --ppo.critic_warmup 0 --ppo.gamma 0 "
        "--rewards.verifier own_functions:letters --ppo.advantage reinforce++ --ppo.whiten_advantages False"
    )
    for row in rows:
        assert row["objective/scores"] == 0 < row["objective/verifier_reward"]
        assert row["objective/rlhf_reward"] == pytest.approx(-row["objective/kl"]) and row["objective/kl_coef"] == 1
        assert abs(row["objective/kl"]) > 0.01 and row["policy/grad_norm"] > 0
        # The exact KL of a token is all in the loss; what is sampled is all in the advantage.
        assert (row["val/advantages_abs_mean"] == 0) == ("loss/kl_avg" in row) == (form == "full")
    if form == "full":
        assert rows[0]["loss/kl_avg"] == pytest.approx(rows[0]["objective/kl_per_token"], rel=0.5)
    assert abs(rows[1]["policy/kl_old_new"]) > 0


def test_a_group_whose_greedy_response_cannot_be_scored_counts_nowhere(run_once):
    """The first of eight greedy responses, each of which is the baseline of two others."""
    rows = run_once(
        f"{WAYS['reinforce']} --ppo.critic_warmup 0 --rewards.verifier own_functions:one_of_eight_is_none"
    )
    assert [row["val/unscorable"] for row in rows] == [2 / 16] * 2


@pytest.mark.parametrize("verifier", ["some", "silent"])
def test_a_minibatch_without_a_token_is_in_no_mean(run_once, verifier):
    """The critic warms up: the policy does not move, and all ratios are 1."""
    settings = "--ppo.nminibatches 16 --ppo.entropy_coef 0.5 --ppo.critic_warmup 2"
    row, _ = run_once(f"--rewards.verifier own_functions:{verifier} {settings}")
    assert row["val/unscorable"] > 0.1 and row["val/ratio_var"] == pytest.approx(0, abs=1e-9)
    if verifier == "silent":
        assert row["val/unscorable"] == 1 and row["policy/entropy_avg"] == 0
        assert row["val/explained_var"] == 0  # where all returns are equal, a critic explains nothing
        return
    assert row["val/unscorable"] < 1 and row["objective/scores"] == 1
    # An episode is a minibatch: the losses are those of its tokens, and the unscorable have none.
    assert row["val/ratio"] == pytest.approx(1, abs=1e-9) and 1 < row["policy/entropy_avg"] < math.log(400)
    assert row["policy/entropy_avg"] == pytest.approx(row["loss/entropy_avg"])
    assert row["objective/loss"] == pytest.approx(row["loss/policy_avg"] - 0.5 * row["loss/entropy_avg"])


def test_the_likelihood_loss_is_a_mean_over_minibatches_with_a_correct_response(run_once):
    """One of 16 responses is correct, in one of four minibatches. The policy does not move."""
    words = "--rewards.verifier own_functions:first --ppo.nll_coef 0.1 --ppo.nminibatches 4 --ppo.total_episodes 16 "
    (row,) = run_once(f"{words} --trace_interval 1 --trace_episodes 16")
    trace = load_file(only(Path.cwd(), "runs/*/traces/0.safetensors"))
    logprobs = trace["tokens.logprobs"][0][trace["tokens.mask"][0]]
    assert trace["epochs.right_tokens"].sum() == len(logprobs)
    assert row["loss/nll_avg"] == pytest.approx(-logprobs.double().mean().item(), rel=1e-5) != 0


def test_scores_are_sums_and_correct_rates_are_those_of_the_verifier(run_once):
    words = "--rewards.verifier own_functions:letters --rewards.format gsm8k_format"
    words += " --rewards.missing_stop subtract --rewards.missing_stop_penalty 0.25"
    for row in run_once(words):
        verifier, form = row["objective/verifier_reward"], row["objective/format_reward"]
        expected = verifier + form - 0.25 * (1 - row["val/stop_token_rate"])
        assert row["objective/scores"] == pytest.approx(expected)
        assert row["objective/verifiable_correct_rate"] == pytest.approx(verifier)


def test_with_the_whole_score_on_the_last_token_a_run_is_the_ordinary_one(run_once):
    """Bit for bit. Functions that reward tokens get them in evaluations and in sample.py, too."""
    words = "--ppo.critic_warmup 0 --rewards.kl_coef 0.1 --rewards.verifier own_functions:letters"
    ordinary = run_once(words)
    shutil.move("runs", "ordinary")
    shutil.rmtree("models")
    assert run_once(f"{words}_at_the_end") == ordinary
    policy = only(Path.cwd(), "models/*/policy")
    rows = sample.sample(sample.Args(policy=str(policy), n=3, trust_remote_code=True))
    assert {row["policy score"] for row in rows} <= {0.0, 1.0}


def test_each_line_is_rewarded_where_it_ends(run_once, tiny_tools):
    """And the last token gets the rest of the score, which is -0.5 where the response doesn't end."""
    words = "--ppo.critic_warmup 0 --rewards.kl_coef 0.1 --rewards.verifier own_functions:letters "
    words += "--rewards.steps own_functions:hundredths --rewards.trained_weight 2 "
    words += "--rewards.missing_stop replace --rewards.missing_stop_penalty 0.5"
    words += f" --base_model {tiny_tools}/model --task.problems {tiny_tools} --task.response_length 40"
    rows = run_once(f"{words} --trace_interval 1 --trace_episodes 16")
    trace = load_file(only(Path.cwd(), "runs/*/traces/0.safetensors"))
    tokenizer, lines = AutoTokenizer.from_pretrained(tiny_tools / "model"), 0
    for row, own in enumerate(trace["tokens.mask"]):
        n, line, count, expected = int(own.sum()), "", 0, []
        stopped = bool(trace["episodes.stopped"][row])
        for i, token in enumerate(trace["tokens.ids"][row, :n].tolist()):
            is_last = i + 1 == n
            line += "" if is_last and stopped else tokenizer.decode([token])
            of_line = line.partition("\n")[0] if "\n" in line or is_last else ""
            expected.append(2 * (len(of_line) / 100 + count) if of_line.strip() else 0)
            count += bool(of_line.strip())
            line = line.partition("\n")[2] if "\n" in line else line
        lines += count
        total = trace["episodes.verifier"][row] + sum(expected) if stopped else torch.tensor(-0.5)
        assert trace["episodes.scores"][row].item() == pytest.approx(total.item())
        expected[-1] += total.item() - sum(expected)
        found = (trace["tokens.rewards"] + 0.1 * trace["tokens.kl"])[row, :n]
        assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert lines > 20 and rows[0]["objective/steps_reward"] > 0


@pytest.fixture
def reward_model(critic, tmp_path) -> Path:
    """The folder of a reward model: a critic is of the same form."""
    folder = shutil.copytree(critic.model("value"), tmp_path / "reward")
    edit("ppo_rlhf.json", "kind", to="reward model")(folder)
    return folder


def test_the_reward_model_scores_a_text_as_if_alone_and_must_be_finite(reward_model, tiny_sums, monkeypatch):
    words = f"--rewards.trained_model {reward_model} --rewards.trained_weight 3 --ppo.local_rollout_batch_size 2"
    args = parse_args(PRESETS, [*sums_arguments(tiny_sums), *words.split()])
    tokenizer, ids = models.load_tokenizer(args.base_model), problems.TaskIds(pad=400, stops=(0,))
    train_problems = problems.read_problems(args.task, tokenizer, "train", 2)
    sources = rlvr_policy.load_sources(args, tokenizer, ids, train_problems, torch.device("cpu"))
    score, weight = sources["reward_model"]
    queries = torch.tensor([[400, 400, 5], [6, 7, 8], [400, 9, 10]])
    responses = torch.tensor([[1, 2, 0], [3, 0, 400], [0, 400, 400]])
    texts, model = {"queries": queries, "responses": responses}, models.load_reward_model(reward_model, torch.float64)
    alone = [model(row[row != 400][None], 400).item() for row in torch.cat([queries, responses], 1)]
    assert weight == 3.0 and score([], [], [], **texts)[0].tolist() == pytest.approx(alone, rel=1e-9)
    nan = lambda self, tokens, pad_id: torch.full((len(tokens),), math.nan)  # noqa: E731
    monkeypatch.setattr(train_reward.RewardModel, "forward", nan)
    with pytest.raises(InputError, match="the reward model gives scores that are not finite"):
        score([], [], [], **texts)


def test_filtered_groups_count_as_episodes_but_are_not_trained_on(run_once, monkeypatch):
    """In three groups of four, one response is correct: two rounds leave two groups over, and then one is enough."""
    words = "--ppo.advantage grpo --ppo.samples_per_prompt 4 --ppo.critic_warmup 0 --ppo.filter_groups "
    ages, correct = [], rlvr_policy.Sampler.correct

    def watched(sampler, rollout):
        ages.append(rollout.age.tolist())
        return correct(sampler, rollout)

    monkeypatch.setattr(rlvr_policy.Sampler, "correct", watched)
    rows = run_once(f"{words} --rewards.verifier own_functions:three_groups")
    assert [row["train/used_episodes"] for row in rows] == [16, 32]
    assert [row["episode"] for row in rows] == [32, 48]
    assert ages == [[0] * 16, [1] * 8 + [0] * 8]  # the older ones first
    assert [row["train/staleness_mean"] for row in rows] == [0, 0.5]
    # The ratio of groups that were left over doesn't start at 1, and so they are not in this number.
    assert all(row["val/first_ratio_gap"] < 1e-9 for row in rows)
    with pytest.raises(InputError, match=r"10 rounds of generation did not fill a batch: only 0 of 16"):
        run_once(f"{words} --rewards.verifier own_functions:never")


# ---- GSM8K -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "n"), [("gsm8k", 1), ("dr-grpo", 4)])
def test_presets_of_gsm8k_run_from_the_first_line_to_the_last(tiny_qwen, tmp_path, monkeypatch, preset, n):
    words = f"--preset {preset} --ppo.samples_per_prompt {n} --dtype float32 --ppo.batch_size 16 "
    words += "--ppo.total_episodes 16 --task.response_length 16 --save_interval 0 --eval_problems 4 "
    words += f"--task.problems {GSM8K} --base_model {tiny_qwen}"
    rows = run_in(tmp_path, monkeypatch, *words.split())
    assert len(rows) == 1 and rows[0]["val/sequence_lengths_max"] <= 16
    assert rows[0]["eval/gsm8k_strict"] == 0 == rows[0]["eval/gsm8k_format"]
    prompt = rows_of(only(tmp_path, "runs/*") / "evaluation.jsonl")[0]["prompt"]
    assert prompt.startswith("<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\n")
    assert "<|im_end|>\n<|im_start|>assistant\n" in prompt
    # sample.py makes the same prompt of a question. Without an answer there is no verdict.
    chosen = sample.Args(policy=str(only(tmp_path, "models/*/policy")), prompt=("1+1?",))
    comparison = sample.Comparison(chosen)
    (query,) = comparison.queries(prompts=chosen.prompt)
    message = {"role": "user", "content": "1+1?" + problems.TASKS["gsm8k"].prompt_suffix}
    chat = AutoTokenizer.from_pretrained(tiny_qwen).apply_chat_template([message], add_generation_prompt=True)
    assert query.context == chat["input_ids"]
    assert comparison.ids.stops == (256, 258)  # those of the model's generation config
    (row,) = sample.sample(chosen)
    assert set(row) == {"query", "base", "policy", "base log-prob", "policy log-prob", "kl"}


# ---- Reading what a policy writes: sample.py -------------------------------------------------------------------


def test_the_likeliest_solutions_are_those_of_the_evaluation(critic, in_a_fresh_folder):
    rows = sample.sample(
        sample.Args(policy=str(critic.model("policy")), n=8, temperature=0.0, trust_remote_code=True)
    )
    verifier = "own_functions:letters"
    names = {"query": "prompt", "reference": "answer", "policy": "response", "policy score": verifier}
    for row, expected in zip(rows, rows_of(critic.run() / "evaluation.jsonl"), strict=True):
        assert {name: row[name] for name in names} == {name: expected[of_run] for name, of_run in names.items()}
    assert {row["policy score"] for row in rows} == {0.0, 1.0}


def test_columns_and_golds_that_are_objects_reach_a_function(run_once, tiny_sums, tmp_path):
    """In training, evaluation and sample.py: each prompt with the gold and the columns of its own row."""
    folder, questions = tmp_path / "countdown", {}
    for split in ("train", "test"):
        questions[split] = [row["question"] for row in rows_of(tiny_sums / f"problems_{split}.jsonl")]
        rows = [
            {
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"ground_truth": {"target": place, "numbers": [place, 0]}},
                "number": place,
                "data_source": split,
            }
            for place, question in enumerate(questions[split])
        ]
        write_rows(folder / f"problems_{split}.jsonl", *rows)
    run_once(f"--task.problems {folder} --rewards.verifier own_functions:countdown --eval_interval 1")
    policy = only(Path.cwd(), "models/*/policy")
    sampled = sample.sample(sample.Args(policy=str(policy), n=3, temperature=0.0, trust_remote_code=True))
    assert all(row["policy score"] in (0, 1) for row in sampled)
    called = rows_of(Path("golds.jsonl"))
    for prompt, gold, place, source in called:
        assert prompt == questions[source][place] + "\n"
        assert json.loads(gold) == {"target": place, "numbers": [place, 0]}
    assert {source for _, _, _, source in called} == {"train", "test"}


# ---- Bad input -------------------------------------------------------------------------------------------------


def test_presets_are_named_by_their_key_and_pass_the_checks():
    for name, args in PRESETS.items():
        assert args.preset == name
        rlvr_arguments.ppo_sizes(args, 4)
        assert train_policy.checked(args) == args


@pytest.mark.parametrize(("chapter", "run"), [(1, "both"), (2, "all_three"), (3, "critic")])
def test_every_metric_is_explained(chapter, run, request):
    """A name with <words> or a star stands for many, but not for all of an evaluation."""
    in_sentences = {"step", "objective/gold_scores", "eval/*gold_scores", "train_reward/minibatch/*"}
    explained = explained_metrics(chapter) - {"eval/*", "objective/<name>"} | in_sentences
    patterns = [re.sub(r"<[a-z]+>|\\\*", ".*", re.escape(name)) for name in explained]
    runs = request.getfixturevalue(run).folder.glob("runs/*/")
    names = {name for one in runs for name in metrics_of(one)[0]}
    assert len(names) > 30 and [name for name in names if not any(re.fullmatch(p, name) for p in patterns)] == []
