"""Chapter 2 through its command lines, on a tiny world: what runs leave, processes, resume, adapters, bad input."""

import csv
import json
import math
import shutil
import statistics
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import launch, launch_together
from runs import interrupt, meta_of, metrics_of, only, posts_arguments, rows_of, samples_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from ppo_rlhf import sample
from ppo_rlhf.lib import reward_functions, several_stages
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.tldr import all as tldr_all, policy as tldr_policy

TRAIN, HELD_OUT = 48, 16  # posts of the tiny world, and as many comparisons
EXACT = {"rel": 1e-9, "abs": 1e-12}

# 48 rows in batches of 20: the last batch of a pass has 8, and of two processes one gets none of them.
SFT = "--batch_size 20 --epochs 2 --lr 0.03 --save_interval 2 --eval_posts 0"
REWARD = "--batch_size 20 --lr 0.01 --save_interval 2 --normalize_posts 0"
POLICY = (
    "--ppo.total_episodes 80 --ppo.batch_size 20 --ppo.nminibatches 2 --ppo.noptepochs 2 --ppo.lr 1e-3 "
    "--save_interval 2 --eval_interval 3 --eval_posts 0 --log_interval 1 "
    "--trace_interval 0 --rewards.adaptive_kl.target 0.05 --rewards.adaptive_kl.horizon 200"
)
LORA = f"{POLICY} --lora.rank 2 --lora.target_modules all-linear --ppo.lr 0.1"


@dataclass(frozen=True)
class Trained:
    """A run that came to its end, as it was started."""

    folder: Path  # where it was started
    script: str
    arguments: list[str]

    @property
    def run(self) -> Path:
        return only(self.folder, "runs/*")

    def model(self, kind: str) -> Path:
        return only(self.folder, f"models/*/{kind}")

    @property
    def meta(self) -> dict[str, Any]:
        return meta_of(self.run)

    def rows(self, name: str = "evaluation.jsonl") -> list[dict[str, Any]]:
        return rows_of(self.run / name)

    def again(self, folder: Path, extra: str = "", processes: int = 1, **environment: str) -> "Trained":
        """The same run, started elsewhere, with a few more arguments."""
        return train(folder, self.script, [*self.arguments, *extra.split()], processes, **environment)


def train(folder: Path, script: str | Path, arguments: list[str], processes: int = 1, **options: Any) -> Trained:
    folder.mkdir(exist_ok=True)
    if processes == 1:
        results = [launch(script, *arguments, folder=folder, **options)]
    else:
        results = launch_together(processes, script, *arguments, folder=folder, **options)
    for result in results:
        assert result.status == 0, result.stdout + result.stderr
    (folder / "stdout").write_text(results[0].stdout)
    return Trained(folder, str(script), arguments)


@pytest.fixture(scope="session")
def common(tiny_posts: Path) -> list[str]:
    """Float64, and evaluations that take the likeliest token."""
    return [*posts_arguments(tiny_posts), "--dtype", "float64", "--task.eval_temperature", "1e-6"]


@pytest.fixture(scope="session")
def sft(common: list[str], tiny_posts: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    arguments = [*common, "--base_model", str(tiny_posts / "model"), *SFT.split()]
    return train(tmp_path_factory.mktemp("sft"), "tldr/sft.py", arguments)


@pytest.fixture(scope="session")
def reward(common: list[str], sft: Trained, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    arguments = [*common, "--base_model", str(sft.model("sft")), *REWARD.split()]
    return train(tmp_path_factory.mktemp("reward"), "tldr/reward.py", arguments)


@pytest.fixture(scope="session")
def policy_arguments(common: list[str], sft: Trained, reward: Trained) -> list[str]:
    models = ["--base_model", str(sft.model("sft")), "--rewards.trained_model", str(reward.model("reward"))]
    return [*common, *models]


@pytest.fixture(scope="session")
def policy(policy_arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    arguments = [*policy_arguments, *POLICY.split()]
    return train(tmp_path_factory.mktemp("policy"), "tldr/policy.py", arguments, pictures=True)


@pytest.fixture(scope="session")
def lora(policy_arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("lora"), "tldr/policy.py", [*policy_arguments, *LORA.split()])


@pytest.fixture(params=["sft", "reward", "policy", "lora"])
def trained(request: pytest.FixtureRequest) -> Trained:
    """A run of each kind in turn."""
    return request.getfixturevalue(request.param)


# ---- The world's texts, and what transformers makes of them ----------------------------------------------------


def query_of(post: dict[str, str]) -> str:
    return f"SUBREDDIT: r/{post['subreddit']}\n\nTITLE: {post['title']}\n\nPOST: {post['post']}\n\nTL;DR:"


@torch.no_grad()
def scores_of(folder: Path, texts: list[str]) -> torch.Tensor:
    """What an ordinary classifier says of texts that end, one by one, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    rows = [torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) for text in texts]
    return torch.stack([classifier(input_ids=row.unsqueeze(0)).logits[0, 0] for row in rows])


def greedy_summaries(folder: Path, queries: list[str], length: int) -> list[str]:
    """What an ordinary language model continues with, the likeliest token at a time, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    summaries = []
    for query in queries:
        ids = torch.tensor([tokenizer(query)["input_ids"]])
        both = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, pad_token_id=0
        )
        summaries.append(tokenizer.decode(both[0, ids.shape[1] :], skip_special_tokens=True))
    return summaries


def text_logprob(folder: Path, query: str, ids: list[int], temperature: float) -> float:
    """The log-prob of token ids after a query, under an ordinary language model."""
    model, before = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)(query)
    tokens = torch.tensor([*before["input_ids"], *ids])
    with torch.no_grad():
        logprobs = (model(input_ids=tokens[None, :-1]).logits[0] / temperature).log_softmax(1)
    return logprobs[-len(ids) :].gather(1, tokens[-len(ids) :, None]).sum().item()


# ---- What a run leaves -----------------------------------------------------------------------------------------

KEPT = {"sft": ["4", "6"], "reward": ["2", "3"], "policy": ["2", "4"]}  # checkpoints


@pytest.mark.parametrize("kind", KEPT)
def test_a_run_leaves_its_folder(kind, request):
    trained = request.getfixturevalue(kind)
    run, meta = trained.run, trained.meta
    assert run.name.startswith(f"tldr_{kind}__posts__1__")
    assert meta["finished"] and meta["num_processes"] == 1 and meta["args"]["dtype"] == "float64"
    assert meta["script"] == f"tldr_{kind}"
    steps = {"sft": 6, "reward": 3, "policy": 4}[kind]
    assert [row["step"] for row in metrics_of(run)] == list(range(steps))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == KEPT[kind]
    drawn = (run / "learning_curves.png").stat().st_size
    assert (drawn > 10_000) == (kind == "policy")  # the others are only said to be drawn: see processes.py
    assert len(list(run.glob("events.out.tfevents.*"))) == 1


def test_the_tables_hold_every_held_out_post(sft, policy, tiny_posts):
    texts = {"query", "response", "reference", "tokens", "reference_tokens"}
    scores = {"scores", "reference_scores", "gold_scores", "reference_gold_scores"}
    tables = {"validation": (sft.rows(), policy.rows()), "test": (sft.rows("evaluation_test.jsonl"),)}
    for split, kinds in tables.items():
        posts = rows_of(tiny_posts / f"posts_{split}.jsonl")
        for table in kinds:
            assert [row["query"] for row in table] == [query_of(post) for post in posts]
            assert [row["reference"] for row in table] == [f" {post['summary']}" for post in posts]
    assert all(set(row) == texts for row in sft.rows())
    assert all(set(row) == texts | scores for row in policy.rows())
    for row in policy.rows():
        assert 1 <= row["tokens"] <= 24 and "<|endoftext|>" not in row["response"] + row["reference"]


def test_the_policy_leaves_what_was_summarised_before_its_first_update(policy):
    """The first validation posts, with the scores whose means are the metrics of the first update."""
    rows, first = policy.rows("evaluation_before.jsonl"), metrics_of(policy.run)[0]
    assert [row["query"] for row in rows] == [row["query"] for row in policy.rows()][: len(rows)]
    for name in ("scores", "gold_scores", "reference_scores"):
        assert statistics.mean(row[name] for row in rows) == pytest.approx(first[f"eval/{name}"])
    samples = samples_of(policy.run)
    assert Counter(row["step"] for row in samples) == {0: 3, 1: 3, 2: 3, 3: 3}
    assert all({"query", "response", "reference", "scores", "kl"} < set(row) for row in samples)


METRICS = """
objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores policy/approxkl_avg
policy/clipfrac_avg loss/policy_avg loss/value_avg val/clipfrac_avg policy/entropy_avg val/ratio val/ratio_var
val/num_eos_tokens lr episode eps objective/raw_scores objective/eos_rate objective/kl_coef objective/gold_scores
objective/response_length objective/sampler_gap val/mean val/var val/error val/vpred val/var_explained returns/mean
returns/var gradient_norm eval/scores eval/reference_scores eval/gold_scores eval/eos_rate eval/response_length
"""


def test_metrics_have_the_names_of_the_dashboards(sft, reward, policy):
    header = (policy.run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert set(METRICS.split()) <= set(header)
    assert len(set(header)) == len(header)
    assert set(metrics_of(sft.run)[0]) == {"step"} | {
        f"train/sft/{name}" for name in ("loss", "lr", "tokens", "gradient_norm")
    }
    names = ("loss", "accuracy", "chosen_rewards", "rejected_rewards", "lr", "gradient_norm")
    assert set(metrics_of(reward.run)[0]) == {"step"} | {f"train/rm/{name}" for name in names}
    results = {"rouge/rouge1", "rouge/rouge2", "rouge/rougeL", "loss", "eos_rate"}
    assert {f"{split}/sft/{name}" for split in ("validation", "test") for name in results} <= set(sft.meta["results"])


def test_metrics_of_a_policy_keep_to_their_definitions(policy):
    rows = metrics_of(policy.run)
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-9)  # it starts as the reference [T35]
    assert all(abs(row["objective/kl"]) > 1e-4 for row in rows[1:])
    for update, row in enumerate(rows):
        assert row["episode"] == 20 * (update + 1)
        assert row["lr"] == pytest.approx(1e-3 * (1 - update / 4))
        assert row["objective/rlhf_reward"] == pytest.approx(
            row["objective/scores"] + row["objective/non_score_reward"]
        )
        assert row["objective/non_score_reward"] == pytest.approx(-row["objective/kl_coef"] * row["objective/kl"])
        assert row["val/num_eos_tokens"] == pytest.approx(20 * row["objective/eos_rate"])
        assert 0 < row["objective/eos_rate"] < 1  # so that the punishment counts for some
        assert row["val/first_ratio_gap"] < 1e-9 and row["objective/sampler_gap"] < 1e-9  # [T34]
        assert row["objective/entropy"] > row["objective/response_length"] > 1
        assert 0 < row["policy/entropy_avg"] < math.log(1024)
        assert row["val/ratio"] == pytest.approx(1, abs=0.1) and row["val/ratio_var"] > 0
    for row, after in pairwise(rows):  # 20 episodes of 200: a tenth of an error of 0.2 at most
        error = min(max(row["objective/kl"] / 0.05 - 1, -0.2), 0.2)
        assert after["objective/kl_coef"] == pytest.approx(row["objective/kl_coef"] * (1 + error / 10))
    # Updates between evaluations repeat the last one.
    evaluations = [{name: value for name, value in row.items() if name.startswith("eval/")} for row in rows]
    assert evaluations[0] == evaluations[1] == evaluations[2] and len(evaluations[3]) == 6


def test_learning_rates_follow_their_schedules(sft, reward, policy):
    for trained, name, lr, steps in ((sft, "train/sft/lr", 0.03, 6), (reward, "train/rm/lr", 0.01, 3)):
        expected = [lr * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps)]
        assert [row[name] for row in metrics_of(trained.run)] == pytest.approx(expected)
    rates = [row["lr"] for row in metrics_of(policy.run)]
    assert rates == pytest.approx([rates[0] * (1 - update / len(rates)) for update in range(len(rates))])


# ---- The models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sft", "policy", "lora"])
def test_a_saved_model_writes_what_was_evaluated(kind, request):
    """An ordinary language model, adapters merged in, and its likeliest tokens."""
    trained = request.getfixturevalue(kind)
    folder, rows = trained.model("sft" if kind == "sft" else "policy"), trained.rows()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.get_input_embeddings().num_embeddings == len(AutoTokenizer.from_pretrained(folder))
    assert greedy_summaries(folder, [row["query"] for row in rows], 24) == [row["response"] for row in rows]
    info = json.loads((folder / "ppo_rlhf.json").read_text())
    assert info["base_model"] == trained.meta["args"]["base_model"] and info["task"]["response_length"] == 24


def test_sample_shows_what_the_evaluations_have(sft, policy, monkeypatch, capsys):
    """Policy and fine-tuned model, on the test split, on posts that are given and on one that somebody types."""
    tables = sft.rows("evaluation_test.jsonl")[:3], policy.rows("evaluation_test.jsonl")[:3]
    folder = policy.model("policy")
    rows = sample.sample(sample.Args(policy=str(folder), n=3))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row, base, trained in zip(rows, *tables, strict=True):
        assert (row["query"], row["base"], row["policy"]) == (base["query"], base["response"], trained["response"])
        assert row["policy score"] == pytest.approx(trained["scores"], abs=1e-4)
        assert row["policy gold"] == pytest.approx(trained["gold_scores"])
        ids = tokenizer(row["policy"])["input_ids"]
        ids += [tokenizer.eos_token_id] * (trained["tokens"] - len(ids))  # the end of text counts, nothing after it
        logprobs = [text_logprob(path, row["query"], ids, 0.7) for path in (folder, sft.model("sft"))]
        assert row["kl"] == pytest.approx(logprobs[0] - logprobs[1], abs=1e-3)
        assert row["policy log-prob"] == pytest.approx(logprobs[1] / len(ids), abs=1e-3)
        assert row.pop("reference") == trained["reference"]
        assert set(row) == {"query", "kl"} | {
            f"{name}{what}" for name in ("base", "policy") for what in ("", " score", " gold", " log-prob")
        }
    assert any(row["base"] != row["policy"] for row in rows)
    typed = iter(["It is wet.", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    capsys.readouterr()
    rows = sample.sample(sample.Args(policy=str(folder), interactive=True, temperature=0.7))
    assert [row["query"] for row in rows] == ["SUBREDDIT: r/\n\nTITLE: \n\nPOST: It is wet.\n\nTL;DR:"]
    assert "score" in capsys.readouterr().out


def test_sample_gives_a_function_the_references(policy, tiny_posts, tmp_path, monkeypatch):
    """Of the task's posts; of a prompt there are none."""
    (tmp_path / "wanted.py").write_text(
        "calls = []\n\n\ndef gold(queries, responses, answers):\n"
        "    calls.append(answers)\n    return [0.0] * len(queries)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "models/run/policy"
    shutil.copytree(policy.model("policy"), folder)
    info = json.loads((folder / "ppo_rlhf.json").read_text())
    (folder / "ppo_rlhf.json").write_text(json.dumps(info | {"monitor": "wanted:gold"}))
    sample.sample(sample.Args(policy=str(folder), n=2, trust_remote_code=True))
    sample.sample(sample.Args(policy=str(folder), prompt=("It is wet.",), trust_remote_code=True))
    summaries = [f" {post['summary']}" for post in rows_of(tiny_posts / "posts_test.jsonl")[:2]]
    tried, *calls = sys.modules["wanted"].calls
    assert [call for call in calls if call != tried] == [summaries, summaries, [None], [None]]


@torch.no_grad()
def test_the_loss_on_held_out_posts_is_that_of_the_saved_model(sft, tiny_posts):
    """[T21] The mean over every token of all texts but the first of each, the end of text among them."""
    folder = sft.model("sft")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).double()
    losses: list[float] = []
    for post in rows_of(tiny_posts / "posts_validation.jsonl"):
        text = f"{query_of(post)} {post['summary']}"
        ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        logprobs = model(input_ids=ids.unsqueeze(0)).logits[0].log_softmax(1)
        losses += (-logprobs[:-1].gather(1, ids[1:].unsqueeze(1))[:, 0]).tolist()
    results = sft.meta["results"]
    assert results["validation/sft/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert results["too_long"] == 0


def test_references_have_a_mean_score_of_0(reward, policy, tiny_posts):
    """[T29] By the saved reward model, as an ordinary classifier."""
    posts = rows_of(tiny_posts / "posts_train.jsonl")
    scores = scores_of(reward.model("reward"), [f"{query_of(post)} {post['summary']}" for post in posts])
    assert scores.mean().item() == pytest.approx(0, abs=1e-6)
    results = reward.meta["results"]
    assert results["eval/rm/normalized_std"] == pytest.approx(scores.std(correction=0).item(), rel=1e-5)
    assert scores.std() > 0
    extremes = [results[f"eval/rm/normalized_{name}"] for name in ("min", "max")]
    assert extremes == pytest.approx([scores.min().item(), scores.max().item()], rel=1e-5)

    # PPO's scores are the same.
    posts = rows_of(tiny_posts / "posts_validation.jsonl")
    scores = scores_of(reward.model("reward"), [f"{query_of(post)} {post['summary']}" for post in posts])
    rows = policy.rows()
    assert [row["reference_scores"] for row in rows] == pytest.approx(scores.tolist(), rel=1e-5, abs=1e-6)
    mean = sum(row["scores"] for row in rows) / len(rows)
    assert policy.meta["results"]["validation/scores"] == pytest.approx(mean)


def test_accuracies_are_those_of_the_table(reward, tiny_posts):
    """Overall and by group, from validation.csv; and the table from the saved reward model."""
    samples = samples_of(reward.run)
    with (reward.run / "validation.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["chosen_reward"]) for row in table[:3]] == [row["chosen_reward"] for row in samples]
    assert all(row["query"] and row["chosen"] != row["rejected"] for row in samples)
    comparisons = rows_of(tiny_posts / "comparisons_validation.jsonl")
    assert len(table) == len(comparisons) == HELD_OUT
    results, groups = reward.meta["results"], defaultdict(list)
    shift = results["eval/rm/shift"]  # the table was written before it
    for row, comparison in zip(table, comparisons, strict=True):
        texts = [query_of(comparison["info"]) + summary["text"] for summary in comparison["summaries"]]
        scores = scores_of(reward.model("reward"), texts).tolist()
        chosen, rejected = scores[comparison["choice"]], scores[1 - comparison["choice"]]
        assert float(row["chosen_reward"]) + shift == pytest.approx(chosen, abs=1e-6)
        assert float(row["rejected_reward"]) + shift == pytest.approx(rejected, abs=1e-6)
        right = float(row["chosen_reward"]) > float(row["rejected_reward"])
        assert row["correct"] == str(int(right))
        of_comparison = {"split": "validation", "batch": comparison["batch"]}
        of_comparison["confidence"] = str(comparison["extra"]["confidence"])
        assert {name: row[name] for name in of_comparison} == of_comparison
        for group in ("", *(f"/{name}/{value}" for name, value in of_comparison.items())):
            groups[group].append(right)
    accuracies = {f"eval/rm/validation/accuracy{group}": sum(r) / len(r) for group, r in groups.items()}
    assert {name: value for name, value in results.items() if "accuracy" in name} == pytest.approx(accuracies)
    assert len(groups) > 6
    world = json.loads((tiny_posts / "world.json").read_text())
    assert results["ceiling"] == world["ceiling"]
    assert not (reward.run / "validation_cnndm.csv").exists()


def test_the_critic_opens_as_a_classifier_that_has_learned(reward, policy):
    folder = policy.model("value")
    critic = AutoModelForSequenceClassification.from_pretrained(folder)
    before = load_file(reward.model("reward") / "reward_head.safetensors")
    after = load_file(folder / "reward_head.safetensors")
    assert critic.config.num_labels == 1
    assert not torch.equal(before["reward_head.weight"], after["reward_head.weight"])
    assert torch.equal(before["bias"], after["bias"]) and torch.equal(before["gain"], after["gain"])
    base, trained = load_file(policy.model("policy") / "model.safetensors"), load_file(folder / "model.safetensors")
    shared = [name for name in trained if name in base]
    assert shared and all(not torch.equal(base[name], trained[name]) for name in shared)  # two networks [T32]


def test_adapters_change_the_layers_they_are_in_and_nothing_else(lora, sft):
    before, after = (load_file(path / "model.safetensors") for path in (sft.model("sft"), lora.model("policy")))
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layers = ("query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h")
    assert changed == {name for name in before if name.endswith(".weight") and any(layer in name for layer in layers)}
    adapters = load_file(lora.model("policy") / "adapter" / "adapter_model.safetensors")
    assert {2} == {min(tensor.shape) for tensor in adapters.values()}  # the rank
    rows = metrics_of(lora.run)
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-9)
    assert all(abs(row["objective/kl"]) > 1e-6 for row in rows[1:])
    checkpoint = load_file(lora.run / "checkpoints" / "4" / "tensors.safetensors")
    learning = {name for name in checkpoint if name.startswith("model.lm_backbone.")}
    assert learning and all("lora_" in name for name in learning)


# ---- However the work is divided -------------------------------------------------------------------------------

PARTS = {  # of what each of two processes does at a time; 3 and 7 leave a shorter part
    "sft": "--local_micro_batch_size 2 --local_rollout_batch_size 3",
    "reward": "--local_micro_batch_size 5 --local_rollout_batch_size 7",
    "policy": "--ppo.local_micro_batch_size 1 --ppo.local_rollout_batch_size 2",
}
PARTS["lora"] = PARTS["policy"]


def check_row(row: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same numbers but for rounding, and the same texts."""
    numbers = {name: value for name, value in expected.items() if isinstance(value, int | float)}
    assert {name: row.get(name) for name in numbers} == pytest.approx(numbers, **EXACT)
    texts = {name: value for name, value in expected.items() if name not in numbers}
    assert {name: value for name, value in row.items() if name not in numbers} == texts


def check_same(run: Trained, expected: Trained) -> None:
    """Metrics of every step, results, and all tables, in which every summary is."""
    check_row(run.meta["results"], expected.meta["results"])
    tables = [(metrics_of(run.run), metrics_of(expected.run))]
    names = sorted(table.name for table in expected.run.glob("*.jsonl") if table.stat().st_size)
    tables += [(run.rows(name), expected.rows(name)) for name in names]
    for rows, expected_rows in tables:
        for row, expected_row in zip(rows, expected_rows, strict=True):
            check_row(row, expected_row)


@pytest.mark.parametrize("kind", PARTS)
def test_division_changes_nothing(kind, request, tmp_path):
    expected = request.getfixturevalue(kind)
    run = expected.again(tmp_path / "run", PARTS[kind], processes=2)
    assert run.meta["num_processes"] == 2
    check_same(run, expected)


# Of the first row, where nothing but rounding can differ: numbers of known texts, before the first step.
OF_KNOWN_TEXTS = {"sft": "train/sft/loss", "lora": "eval/reference_scores"}


@pytest.mark.parametrize("kind", OF_KNOWN_TEXTS)
def test_bfloat16_rounds_and_changes_nothing_else(kind, request, tmp_path):
    """The model is a GPT-NeoX, as the paper's."""
    expected = request.getfixturevalue(kind)
    run = expected.again(tmp_path / "run", "--dtype bfloat16")
    rows, name = metrics_of(run.run), OF_KNOWN_TEXTS[kind]
    exact = metrics_of(expected.run)[0][name]
    # Twice the 2^-8 by which bfloat16 rounds a number; a score is a difference of numbers of about 1.
    assert rows[0][name] != exact and rows[0][name] == pytest.approx(exact, rel=2**-7, abs=2**-7)
    if kind != "sft":
        assert rows[0]["objective/kl"] == 0  # policy and reference are one model, and read the same
        # The resolution of log-probs between -8 and -4.
        assert all(row["objective/sampler_gap"] < 2**-5 and row["val/first_ratio_gap"] < 2**-5 for row in rows)
    for file in run.folder.glob("models/**/*.safetensors"):
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}


def test_a_run_with_another_number_is_another(policy, tmp_path):
    """So that the comparisons above compare something."""
    changed = replace(policy, folder=Path(shutil.copytree(policy.folder, tmp_path / "changed")))
    check_same(changed, policy)
    file = changed.run / "evaluation.jsonl"
    first, *rows = changed.rows()
    file.write_text("".join(json.dumps(row) + "\n" for row in [first | {"scores": first["scores"] + 1e-6}, *rows]))
    with pytest.raises(AssertionError):
        check_same(changed, policy)


# tldr/sft.py or tldr/reward.py, keeping which rows each process has trained on in each step.
RECORDING = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
from ppo_rlhf.tldr import {module} as script
from ppo_rlhf.lib import processes
from ppo_rlhf.lib import command_line as cli, errors

deal, steps = processes.deal, []

def recorded_deal(*arguments):
    inds, counts = deal(*arguments)
    steps.append(inds[counts].tolist())
    return inds, counts

script.processes = SimpleNamespace(**vars(processes) | dict(deal=recorded_deal))  # evaluations deal rows too
errors.run_script(lambda: script.train(cli.parse_args(script.PRESETS)))
Path(f"rank{{os.environ.get('RANK', 0)}}.json").write_text(json.dumps(steps))
"""
STILL = "--lr 1e-30 --weight_decay 0"  # nothing changes, so that all losses are those of the same model


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_every_row_is_trained_on_once_in_each_pass(kind, request, tmp_path):
    """[T27] Also those of the last, short batch, which weigh as much as others. On two processes."""
    expected = request.getfixturevalue(kind)
    script = tmp_path / "recording.py"
    script.write_text(RECORDING.format(module=kind))
    arguments = [*expected.arguments, *STILL.split()]
    run = train(tmp_path, script, arguments, processes=2)
    by_rank = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    steps = [list(chain(*shares)) for shares in zip(*by_rank, strict=True)]
    assert [len(step) for step in steps] == [20, 20, 8] * (2 if kind == "sft" else 1)
    orders = [list(chain(*steps[first : first + 3])) for first in range(0, len(steps), 3)]
    assert all(sorted(order) == list(range(TRAIN)) for order in orders)
    assert all(order != sorted(order) for order in orders)
    assert len(set(map(tuple, orders))) == len(orders)  # each pass in an order of its own

    whole = train(tmp_path / "whole", expected.script, [*arguments, "--batch_size", "48"])
    (name, weight) = ("train/sft/loss", "train/sft/tokens") if kind == "sft" else ("train/rm/loss", "")
    rows = metrics_of(run.run)
    weights = [row[weight] for row in rows] if weight else [20, 20, 8]
    mean = sum(row[name] * w for row, w in zip(rows, weights, strict=True)) / sum(weights)
    assert mean == pytest.approx(metrics_of(whole.run)[0][name], rel=1e-9)
    assert len({row[name] for row in rows}) >= 3


# A function in place of a reward model, which keeps what it has read.
SEEN = """
import json
import math

def constant(queries, responses, references):
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps([queries, responses, references]) + "\\n")
    return [3.0] * len(queries)

def no_references(queries, responses, references):
    return [math.nan if pair[0] == pair[1] else 1.0 for pair in zip(responses, references)]

kl = constant
"""


@pytest.fixture(scope="module")
def function_runs(common, sft, tmp_path_factory) -> dict[str, Trained]:
    """Passes over the posts, each way to punish summaries that do not end; the score is 3, the penalty 2."""
    runs = {}
    for form in ("replace", "subtract", "none"):
        folder = tmp_path_factory.mktemp(form)
        (folder / "mine.py").write_text(SEEN)
        arguments = f"--rewards.function mine:constant --rewards.missing_eos {form} --rewards.missing_eos_penalty 2"
        arguments += " --rewards.normalize_samples 0"
        # Batches of 18 of 48 posts: the third and the sixth lie across two passes. The others are shorter.
        episodes = 150 if form == "subtract" else 72
        sizes = f"--ppo.total_episodes {episodes} --ppo.batch_size 18 --ppo.nminibatches 1 --ppo.noptepochs 1"
        evaluation = "--ppo.lr 1e-4 --eval_posts 4 --eval_interval 3 --task.eval_temperature 1"
        flags = f"{arguments} {sizes} {evaluation} --save_interval 0"
        runs[form] = train(folder, "tldr/policy.py", [*common, "--base_model", str(sft.model("sft")), *flags.split()])
    return runs


def test_each_pass_sees_each_post_once(function_runs, tiny_posts):
    """On one process, beyond the first pass."""
    run = function_runs["subtract"]
    texts = [query_of(post) for post in rows_of(tiny_posts / "posts_train.jsonl")]
    seen = [query for queries, *_ in rows_of(run.folder / "seen.jsonl") for query in queries if query in texts]
    assert len(seen) == 144 and len(metrics_of(run.run)) == 8
    passes = [seen[first : first + TRAIN] for first in (0, TRAIN, 2 * TRAIN)]
    assert all(sorted(queries) == sorted(texts) for queries in passes)
    assert len({tuple(queries) for queries in [texts, *passes]}) == 4  # each in an order of its own


def test_a_function_does_not_see_what_comes_after_the_end(function_runs):
    run = function_runs["subtract"]
    responses = [response for _, responses, _ in rows_of(run.folder / "seen.jsonl") for response in responses]
    assert all("<|endoftext|>" not in response for response in responses)
    assert len({len(response) for response in responses}) > 10
    assert run.model("policy").is_dir() and run.model("value").is_dir()


def test_a_function_gets_the_references_of_the_same_posts(function_runs, tiny_posts):
    """In training and evaluations; as texts that do not show their end, as the summaries are."""
    posts = chain(*(rows_of(tiny_posts / f"posts_{split}.jsonl") for split in ("train", "validation", "test")))
    summaries = {query_of(post): f" {post['summary']}" for post in posts}
    run = function_runs["subtract"]
    trial, *lines = rows_of(run.folder / "seen.jsonl")
    assert trial[2] == ["A reference."] * 2
    # Updates; evaluations at 0, 3 and 6; two splits after training. Traces don't call a function of the user's.
    assert len(lines) == 8 + 2 * 3 + 2 * 2
    for queries, _, references in lines:
        assert references == [summaries[query] for query in queries]


def test_a_monitor_replaces_nothing(policy):
    """The names that are refused are those that a run writes anyhow: metrics, and columns of its tables."""
    metrics = {
        name.split("/", 1)[1] for name in metrics_of(policy.run)[0] if name.startswith(("objective/", "eval/"))
    }
    written = metrics | set(policy.rows()[0]) | {key for row in samples_of(policy.run) for key in row} - {"step"}
    gold = {"gold_scores", "reference_gold_scores"}
    assert gold <= written and written - gold == set(tldr_policy.TAKEN) - {"function_score"}  # of other runs
    for name in written - gold:
        with pytest.raises(InputError, match=f"--rewards.monitor mine:{name}: the name {name} is taken"):
            reward_functions.load_monitor(f"mine:{name}", tldr_policy.TAKEN, None)
        # The other column of a monitor is taken only where its own name is.
        assert not name.startswith("reference_") or name.removeprefix("reference_") in written


@pytest.mark.parametrize(("interval", "step", "kept"), [(1, 0, {"samples.jsonl"}), (0, 1, {"checkpoints"})])
def test_a_score_of_an_evaluation_that_is_no_number_stops_the_run(interval, step, kept, common, sft, tmp_path):
    """In step 0, or after the training. What JSON files hold is JSON, and no model is saved."""
    (tmp_path / "mine.py").write_text(SEEN)
    flags = "--rewards.function mine:no_references --rewards.normalize_samples 0 --rewards.kl_estimator k3 "
    flags += "--ppo.total_episodes 8 --ppo.batch_size 8"
    flags += f" --eval_interval {interval} --eval_posts 2 --log_interval 0"
    arguments = [*common, "--base_model", str(sft.model("sft")), *flags.split()]
    result = launch("tldr/policy.py", *arguments, folder=tmp_path)
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and "mine:no_references returned nan for text 1" in line
    run = only(tmp_path, "runs/*")
    assert not (tmp_path / "models").exists() and not list(run.glob("evaluation*"))
    assert kept <= {path.name for path in run.iterdir()}
    for file in run.glob("**/*.json"):
        json.loads(file.read_text(), parse_constant=pytest.fail)
    assert not meta_of(run)["finished"]
    (line,) = [line for line in result.stdout.splitlines() if "--rewards.kl_estimator k3" in line]
    assert "vanishes near the reference" in line and "k1" in line


def test_summaries_that_do_not_end_are_punished(function_runs):
    for form, run in function_runs.items():
        for row in metrics_of(run.run):
            ended = row["objective/eos_rate"]
            assert 0 < ended < 1
            unfinished = {"replace": -2.0, "subtract": 3.0 - 2.0, "none": 3.0}[form]
            assert row["objective/scores"] == pytest.approx(3.0 * ended + unfinished * (1 - ended))
            assert row["objective/raw_scores"] == pytest.approx(3.0)
        for row in run.rows():
            assert row["scores"] == row["reference_scores"] == 3.0  # evaluations do not punish


# ---- Resume ----------------------------------------------------------------------------------------------------


def test_a_resumed_run_gives_the_same_numbers(trained, tmp_path):
    """Bit for bit: metrics, results, tables and weights."""
    shutil.copytree(trained.folder, tmp_path, dirs_exist_ok=True)
    resumed = Trained(tmp_path, trained.script, trained.arguments)
    interrupt(resumed.run)
    shutil.rmtree(tmp_path / "models")
    result = launch(trained.script, "--resume", f"runs/{resumed.run.name}", folder=tmp_path)
    assert result.status == 0, result.stderr
    assert metrics_of(resumed.run) == metrics_of(trained.run)
    assert resumed.meta["results"] == trained.meta["results"]
    for table in trained.run.glob("*.jsonl"):
        assert resumed.rows(table.name) == trained.rows(table.name)
    weights = sorted(path.relative_to(trained.folder) for path in trained.folder.glob("models/**/*.safetensors"))
    assert weights
    for path in weights:
        before, after = load_file(trained.folder / path), load_file(tmp_path / path)
        assert set(before) == set(after)
        assert all(torch.equal(before[name], after[name]) for name in before)


# ---- All three in a row ----------------------------------------------------------------------------------------

ALL = (
    "--sft.batch_size 16 --sft.lr 0.03 --sft.save_interval 1 --reward.batch_size 16 --reward.save_interval 1 "
    "--policy.ppo.total_episodes 32 --policy.ppo.batch_size 16 --policy.ppo.noptepochs 1 --policy.save_interval 1 "
    "--policy.trace_interval 0"
)


@pytest.fixture(scope="module")
def all_three(tiny_posts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which tldr/all.py ran."""
    arguments = [*posts_arguments(tiny_posts), "--base_model", str(tiny_posts / "model"), *ALL.split()]
    return train(tmp_path_factory.mktemp("all"), "tldr/all.py", arguments).folder


def run_of(stage: str, folder: Path) -> Path:
    return only(folder, f"runs/tldr_{stage}__*[0-9]")


def gold(query: str, summary: str) -> float:
    """The gold score, with facts found as three words of the post in a row; a summary of the tiny model has none."""
    statements = [statement.strip() for statement in summary.split(".") if statement.strip()]
    covered = {statement for statement in statements if len(statement.split()) == 3 and statement in query}
    return len(covered) - sum(s not in covered for s in statements) - len(summary.split()) / 10


def test_all_three_stages_build_on_each_other(all_three, tiny_posts):
    stages = {stage: meta_of(run_of(stage, all_three)) for stage in ("sft", "reward", "policy")}
    assert all(meta["finished"] for meta in stages.values())
    assert len({name.rsplit("__", 1)[1] for name in (meta["name"] for meta in stages.values())}) == 1
    assert len(list((all_three / "runs").glob("tldr_*[0-9]"))) == 3
    sft_model = f"models/{stages['sft']['name']}/sft"
    bases = [stages[stage]["args"]["base_model"] for stage in stages]
    assert bases == [str(tiny_posts / "model"), sft_model, sft_model]
    assert stages["policy"]["args"]["rewards"]["trained_model"] == f"models/{stages['reward']['name']}/reward"
    assert {meta["args"]["task"]["posts"] for meta in stages.values()} == {str(tiny_posts)}


def test_the_summary_says_what_happened(all_three, tiny_posts):
    said = (all_three / "stdout").read_text()
    sft, reward = (meta_of(run_of(stage, all_three)) for stage in ("sft", "reward"))
    for name in ("rouge1", "rouge2", "rougeL"):
        assert f"{name.replace('rouge', 'ROUGE-')} {sft['results'][f'validation/sft/rouge/{name}']:.3f}" in said
    ceiling = json.loads((tiny_posts / "world.json").read_text())["ceiling"]
    accuracy = reward["results"]["eval/rm/validation/accuracy"]
    assert f"agrees with the annotator in {accuracy:.1%}" in said
    assert f"a perfect judge would reach {ceiling:.1%}" in said
    assert f"learned {(accuracy - 0.5) / (ceiling - 0.5):.0%} of what can be learned" in said
    kl = sum(row["objective/kl"] for row in metrics_of(run_of("policy", all_three))) / 2
    assert f"{kl:.1f} nats per summary" in said
    assert "learning_curves.png" in said and "evaluation.jsonl" in said and "minutes" in said


def check_win_rates(folder: Path, said: str, posts: int) -> None:
    """Compare what was said of the policy with the gold scores of the first so many posts."""
    sft, policy = (rows_of(run_of(stage, folder) / "evaluation.jsonl")[:posts] for stage in ("sft", "policy"))
    assert [row["query"] for row in sft] == [row["query"] for row in policy] and len(sft) == posts
    ours = [gold(row["query"], row["response"]) for row in policy]
    others = {
        "the reference summaries": [gold(row["query"], row["reference"]) for row in policy],
        "those after SFT": [gold(row["query"], row["response"]) for row in sft],
    }
    assert max(others["the reference summaries"]) > 1
    for name, theirs in others.items():
        results = [(a > b - 1e-9) / 2 + (a > b + 1e-9) / 2 for a, b in zip(ours, theirs, strict=True)]
        assert f"win against {name} in {sum(results) / posts:.1%} of {posts} posts" in said
        assert f"{sum(ours) / posts:+.2f} against {sum(theirs) / posts:+.2f}" in said


def test_win_rates_are_those_of_the_tables(all_three):
    check_win_rates(all_three, (all_three / "stdout").read_text(), HELD_OUT)


@pytest.mark.parametrize("stage", ["sft", "policy"])
def test_one_stage_that_summarised_fewer_posts(all_three, tmp_path, capsys, stage):
    """As with --sft.eval_posts 5 or --policy.eval_posts 5: the posts that both have summarised are judged."""
    shutil.copytree(all_three, tmp_path, dirs_exist_ok=True)
    runs = {name: run_of(name, tmp_path) for name in ("sft", "reward", "policy")}
    file = runs[stage] / "evaluation.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:5]))
    stages = several_stages.Stages(tldr_all.Args(), *runs)
    stages.folders = runs
    tldr_all.report(stages)
    check_win_rates(tmp_path, capsys.readouterr().out, posts=5)


def sentences(text: str) -> list[str]:
    """What the summary says, without the paths, which differ between folders, and the times."""
    wanted = ("After supervised", "The reward model agrees", "The annotator", "The policy is", "Judged by")
    return [line for line in text.splitlines() if line.startswith(wanted)]


def test_resuming_what_is_finished_trains_nothing(all_three, tmp_path):
    folder = shutil.copytree(all_three, tmp_path / "here")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "stdout"}
    for stage in ("policy", "sft"):
        run = run_of(stage, folder)
        result = launch("tldr/all.py", "--resume", f"runs/{run.name}", folder=folder)
        assert result.status == 0, result.stderr
        assert "PPO 1/2" not in result.stdout and "SFT 1/" not in result.stdout
        assert sentences(result.stdout) == sentences((all_three / "stdout").read_text())
        assert len(sentences(result.stdout)) == 6
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "stdout"}
    changed = {path for path in before if after.get(path) != before[path]}
    assert all("__against_" in str(path) for path in changed | (set(after) - set(before)))  # what the judge writes


def test_stages_that_were_cut_off_go_on(all_three, tmp_path):
    """First the policy's own script resumes its run. Then all three go on as if killed in the second."""
    folder = shutil.copytree(all_three, tmp_path / "here")
    runs = {stage: run_of(stage, folder) for stage in ("sft", "reward", "policy")}
    expected = {stage: metrics_of(run) for stage, run in runs.items()}
    interrupt(runs["policy"])
    result = launch("tldr/policy.py", "--resume", str(runs["policy"]), folder=folder)
    assert result.status == 0, result.stderr
    assert metrics_of(runs["policy"]) == expected["policy"]
    for path in [*folder.glob("*/tldr_policy__*"), *folder.glob("models/tldr_reward__*")]:
        shutil.rmtree(path)
    interrupt(runs["reward"])
    result = launch("tldr/all.py", "--resume", str(runs["reward"]), folder=folder)
    assert result.status == 0, result.stderr
    assert {stage: metrics_of(run) for stage, run in runs.items()} == expected
    assert sentences(result.stdout) == sentences((all_three / "stdout").read_text())
