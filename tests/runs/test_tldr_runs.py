"""Chapter 2 through its command lines, on a tiny world: what runs leave, processes, resume, adapters, functions."""

import csv
import json
import shutil
import statistics
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import edit
from runs import interrupt, meta_of, metrics_of, only, posts_arguments, rows_of, samples_of, trained
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline
from whole_runs import Whole, check_same

from ppo_rlhf import sample, train_both
from ppo_rlhf.tldr import (
    all as tldr_all,
    policy as tldr_policy,
    reward as tldr_reward,
    sft as tldr_sft,
    shares,
)
from ppo_rlhf.train_policy import InputError
from ppo_rlhf.worlds.posts import gold_scores

TRAIN = 48  # posts of the tiny world, and as many comparisons
EXACT = {"rel": 1e-9, "abs": 1e-12}


def run_of(stage: str, whole: Whole) -> Path:
    return only(whole.folder, f"runs/tldr_{stage}__*[0-9]")


def results_of(stage: str, whole: Whole) -> dict[str, Any]:
    return meta_of(run_of(stage, whole))["results"]


def table_of(stage: str, whole: Whole, name: str = "evaluation") -> list[dict[str, Any]]:
    return rows_of(run_of(stage, whole) / f"{name}.jsonl")


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


@torch.no_grad()
def text_logprobs(folder: Path, query: str, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """The log-probs of token ids after a query, under an ordinary language model."""
    tokens = torch.tensor([*AutoTokenizer.from_pretrained(folder)(query)["input_ids"], *ids])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logprobs = (model(input_ids=tokens[None, :-1]).logits[0] / temperature).log_softmax(1)
    return logprobs[-len(ids) :].gather(1, tokens[-len(ids) :, None])[:, 0]


# ---- What a run leaves -----------------------------------------------------------------------------------------


def test_the_tables_hold_every_held_out_post(all_three, tiny_posts):
    texts = {"query", "response", "reference", "tokens", "reference_tokens"}
    scores = {"scores", "reference_scores", "gold_scores", "reference_gold_scores"}
    for stage, columns in (("sft", texts), ("policy", texts | scores)):
        for split, name in (("validation", "evaluation"), ("test", "evaluation_test")):
            posts, table = rows_of(tiny_posts / f"posts_{split}.jsonl"), table_of(stage, all_three, name)
            assert [row["query"] for row in table] == [query_of(post) for post in posts]
            assert [row["reference"] for row in table] == [f" {post['summary']}" for post in posts]
            assert all(set(row) == columns and "<|endoftext|>" not in str(row) for row in table)


def test_the_policy_leaves_what_was_summarised_before_its_first_update(all_three):
    """The first validation posts, with the scores whose means are the metrics of the first update."""
    rows = table_of("policy", all_three, "evaluation_before")
    first = metrics_of(run_of("policy", all_three))[0]
    assert [row["query"] for row in rows] == [row["query"] for row in table_of("policy", all_three)][: len(rows)]
    for name in ("scores", "gold_scores", "reference_scores"):
        assert statistics.mean(row[name] for row in rows) == pytest.approx(first[f"eval/{name}"])


def test_metrics_of_a_policy_keep_to_their_definitions(all_three):
    rows = metrics_of(run_of("policy", all_three))
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-9)  # it starts as the reference [T35]
    assert all(abs(row["objective/kl"]) > 1e-4 for row in rows[1:])
    for row in rows:
        total = row["objective/scores"] - row["objective/kl_coef"] * row["objective/kl"]
        assert row["objective/rlhf_reward"] == pytest.approx(total)
        assert 0 < row["objective/eos_rate"] < 1  # so that the punishment counts for some
        assert row["val/first_ratio_gap"] < 1e-9 and row["objective/sampler_gap"] < 1e-9  # [T34]
    for row, after in pairwise(rows):  # 20 episodes of 200: a tenth of an error of 0.2 at most
        error = min(max(row["objective/kl"] / 0.05 - 1, -0.2), 0.2)
        assert after["objective/kl_coef"] == pytest.approx(row["objective/kl_coef"] * (1 + error / 10))
    # Updates between evaluations repeat the last one.
    evaluations = [{name: value for name, value in row.items() if name.startswith("eval/")} for row in rows]
    assert evaluations[0] == evaluations[1] == evaluations[2] != evaluations[3]


# ---- The models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "stage"), [("all_three", "sft"), ("all_three", "policy"), ("lora", "policy")])
def test_a_saved_model_writes_what_was_evaluated(run, stage, request):
    """An ordinary language model, adapters merged in, with its likeliest tokens, one query at a time."""
    whole = request.getfixturevalue(run)
    write, rows = pipeline("text-generation", whole.model(stage), dtype=torch.float64), table_of(stage, whole)
    assert write.model.get_input_embeddings().num_embeddings == len(write.tokenizer)
    options = {"max_new_tokens": 24, "do_sample": False, "return_full_text": False}
    written = write([row["query"] for row in rows], **options)
    assert [one["generated_text"] for (one,) in written] == [row["response"] for row in rows]


def test_sample_shows_what_the_evaluations_have(all_three, tmp_path, monkeypatch):
    """Policy and fine-tuned model, on the test split; a function gets the references of its posts."""
    monkeypatch.chdir(all_three.folder)
    tables = [table_of(stage, all_three, "evaluation_test")[:3] for stage in ("sft", "policy")]
    folder = all_three.model("policy")
    rows = sample.sample(sample.Args(policy=str(folder), n=3))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row, base, after in zip(rows, *tables, strict=True):
        assert (row["query"], row["base"], row["policy"]) == (base["query"], base["response"], after["response"])
        assert row["reference"] == after["reference"]
        assert row["policy score"] == pytest.approx(after["scores"], abs=1e-4)
        assert row["policy gold"] == pytest.approx(after["gold_scores"])
        ids = tokenizer(row["policy"])["input_ids"]
        ids += [tokenizer.eos_token_id] * (after["tokens"] - len(ids))  # the end of text counts, nothing after it
        ours, theirs = (text_logprobs(path, row["query"], ids, 0.7) for path in (folder, all_three.model("sft")))
        assert row["kl"] == pytest.approx((ours - theirs).sum().item(), abs=1e-3)
        assert row["policy log-prob"] == pytest.approx(theirs.mean().item(), abs=1e-3)
    assert any(row["base"] != row["policy"] for row in rows)


def test_sample_gives_a_function_the_references(all_three, tiny_posts, tmp_path, monkeypatch):
    """Those of the task's posts; a prompt has none."""
    copy = all_three.copy(tmp_path / "copy")
    monkeypatch.chdir(copy.folder)
    folder = copy.model("policy")
    edit("ppo_rlhf.json", "monitor", to="own_functions:constant")(folder)
    for what in ({"n": 2}, {"prompt": ("It is wet.",)}):
        sample.sample(sample.Args(policy=str(folder), trust_remote_code=True, **what))
    summaries = [f" {post['summary']}" for post in rows_of(tiny_posts / "posts_test.jsonl")[:2]]
    seen = [references for _, _, references in rows_of(Path("seen.jsonl"))]
    assert [references for references in seen if references != seen[0]] == [summaries, summaries, [None], [None]]


def test_the_loss_on_held_out_posts_is_that_of_the_saved_model(all_three, tiny_posts):
    """[T21] The mean over every token of all texts but the first of each, the end of text among them."""
    folder, losses = all_three.model("sft"), []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for post in rows_of(tiny_posts / "posts_validation.jsonl"):
        first, *ids = tokenizer(f"{query_of(post)} {post['summary']}")["input_ids"]
        losses += (-text_logprobs(folder, tokenizer.decode([first]), [*ids, tokenizer.eos_token_id])).tolist()
    results = results_of("sft", all_three)
    assert results["validation/sft/loss"] == pytest.approx(statistics.mean(losses), rel=1e-6)
    assert results["too_long"] == 0


def test_references_have_a_mean_score_of_0(all_three, tiny_posts):
    """[T29] By the saved reward model, as an ordinary classifier. PPO's scores are its scores."""
    scores = {}
    for split in ("train", "validation"):
        texts = [f"{query_of(post)} {post['summary']}" for post in rows_of(tiny_posts / f"posts_{split}.jsonl")]
        scores[split] = scores_of(all_three.model("reward"), texts)
    assert scores["train"].mean().item() == pytest.approx(0, abs=1e-6)
    deviation = results_of("reward", all_three)["eval/rm/normalized_std"]
    assert 0 < deviation == pytest.approx(scores["train"].std(correction=0).item(), rel=1e-5)
    found = [row["reference_scores"] for row in table_of("policy", all_three)]
    assert found == pytest.approx(scores["validation"].tolist(), rel=1e-5, abs=1e-6)


def test_accuracies_are_those_of_the_table(all_three, tiny_posts):
    """Overall and by group, from validation.csv; and the table from the saved reward model."""
    with (run_of("reward", all_three) / "validation.csv").open() as file:
        table = list(csv.DictReader(file))
    results, groups = results_of("reward", all_three), {}
    shift = results["eval/rm/shift"]  # the table was written before it
    comparisons = rows_of(tiny_posts / "comparisons_validation.jsonl")
    for row, comparison in zip(table, comparisons, strict=True):
        texts = [query_of(comparison["info"]) + summary["text"] for summary in comparison["summaries"]]
        rejected, chosen = scores_of(all_three.model("reward"), texts).tolist()[:: 2 * comparison["choice"] - 1]
        found = [float(row[name]) + shift for name in ("chosen_reward", "rejected_reward")]
        assert found == pytest.approx([chosen, rejected], abs=1e-6)
        batch, confidence = comparison["batch"], comparison["extra"]["confidence"]
        for group in ("", "/split/validation", f"/batch/{batch}", f"/confidence/{confidence}"):
            groups.setdefault(f"eval/rm/validation/accuracy{group}", []).append(chosen > rejected)
    accuracies = {name: statistics.mean(right) for name, right in groups.items()}
    assert {name: value for name, value in results.items() if "accuracy" in name} == pytest.approx(accuracies)
    assert len(groups) > 6


def test_the_critic_opens_as_a_classifier_that_has_learned(all_three):
    folder = all_three.model("value")
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1
    heads = [load_file(all_three.model(kind) / "reward_head.safetensors") for kind in ("reward", "value")]
    assert {name for name in heads[0] if torch.equal(heads[0][name], heads[1][name])} == {"gain", "bias"}


# ---- However the work is divided -------------------------------------------------------------------------------

SCRIPTS = {"sft": tldr_sft, "reward": tldr_reward, "policy": tldr_policy}
PARTS = {  # of what each of two processes does at a time; 3 and 7 leave a shorter part
    "sft": "--local_micro_batch_size 2 --local_rollout_batch_size 3",
    "reward": "--local_micro_batch_size 5 --local_rollout_batch_size 7",
    "policy": "--ppo.local_micro_batch_size 1 --ppo.local_rollout_batch_size 2",
}


def own_arguments(stage: str, all_three: Whole) -> list[str]:
    """Those with which a stage's own script does what it did in tldr/all.py."""
    words: list[str] = []
    for flag, value in zip(all_three.arguments[::2], all_three.arguments[1::2], strict=True):
        of_stage, _, name = flag.removeprefix("--").partition(".")
        if of_stage == stage:
            words += [f"--{name}", value]
        elif of_stage not in SCRIPTS:
            words += [flag, value]
    if stage != "sft":
        words += ["--base_model", str(all_three.model("sft"))]
    if stage == "policy":
        words += ["--rewards.trained_model", str(all_three.model("reward"))]
    return words


@pytest.mark.parametrize("stage", PARTS)
def test_division_changes_nothing(stage, all_three, tmp_path):
    """Metrics of every step, results, and all tables, in which every summary is."""
    arguments = [*own_arguments(stage, all_three), *PARTS[stage].split()]
    run = Whole(tmp_path, f"tldr/{stage}.py", arguments, processes=2).made().run()
    expected = run_of(stage, all_three)
    assert meta_of(run)["num_processes"] == 2
    names = [table.name for table in expected.glob("*.jsonl") if table.stat().st_size]
    of_two, of_one = (
        [meta_of(one)["results"], *metrics_of(one), *chain(*(rows_of(one / name) for name in names))]
        for one in (run, expected)
    )
    for row, expected_row in zip(of_two, of_one, strict=True):
        numbers = {name: value for name, value in expected_row.items() if isinstance(value, int | float)}
        assert {name: row[name] for name in numbers} == pytest.approx(numbers, **EXACT)
        assert row.keys() == expected_row.keys()
        assert all(row[name] == expected_row[name] for name in row.keys() - numbers)  # texts
    row = metrics_of(run)[0]
    assert row != pytest.approx({name: value + 1e-6 for name, value in row.items()}, **EXACT)


def test_bfloat16_rounds_and_changes_nothing_else(lora, tmp_path):
    """The model is a GPT-NeoX, as the paper's."""
    rows = metrics_of(trained(tldr_policy, tmp_path, [*lora.arguments, "--dtype", "bfloat16"]))
    name = "eval/reference_scores"
    exact = metrics_of(run_of("policy", lora))[0][name]
    # Twice the 2^-8 by which bfloat16 rounds a number; a score is a difference of numbers of about 1.
    assert rows[0][name] != exact and rows[0][name] == pytest.approx(exact, rel=2**-7, abs=2**-7)
    assert rows[0]["objective/kl"] == 0  # policy and reference are one model, and read the same
    # The resolution of log-probs between -8 and -4.
    assert all(row["objective/sampler_gap"] < 2**-5 and row["val/first_ratio_gap"] < 2**-5 for row in rows)
    for file in tmp_path.glob("models/**/*.safetensors"):
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_every_row_is_trained_on_once_in_each_pass(stage, all_three, tmp_path, monkeypatch):
    """[T27] Also those of the last, short batch."""
    steps = []

    def deal(*arguments):
        inds, counts = shares.deal(*arguments)
        steps.append(inds[counts].tolist())
        return inds, counts

    # Evaluations deal rows, too, but not by this name.
    monkeypatch.setattr(SCRIPTS[stage], "deal", deal)
    trained(SCRIPTS[stage], tmp_path, own_arguments(stage, all_three))
    assert [len(step) for step in steps] == [20, 20, 8] * (2 if stage == "sft" else 1)
    orders = [list(chain(*steps[first : first + 3])) for first in range(0, len(steps), 3)]
    assert all(sorted(order) == list(range(TRAIN)) != order for order in orders)
    assert len(set(map(tuple, orders))) == len(orders)  # each pass in an order of its own


# ---- A function in place of the reward model -------------------------------------------------------------------


def function_arguments(posts: Path, all_three: Whole, function: str, settings: str) -> list[str]:
    words = f"--base_model {all_three.model('sft')} --rewards.function own_functions:{function} {settings}"
    return [*posts_arguments(posts), *words.split()]


@pytest.fixture(scope="module")
def function_run(all_three, tiny_posts, tmp_path_factory) -> Path:
    """Six updates, with a score of 3 and a penalty of 2 for summaries that do not end."""
    settings = (
        "--rewards.missing_eos subtract --rewards.missing_eos_penalty 2 --rewards.normalize_samples 0 "
        "--ppo.total_episodes 72 --ppo.batch_size 12 --ppo.nminibatches 1 --ppo.noptepochs 1 --ppo.lr 1e-4 "
        "--dtype float64 --eval_posts 4 --eval_interval 3 --save_interval 0 --task.eval_temperature 1"
    )
    return trained(
        tldr_policy,
        tmp_path_factory.mktemp("function"),
        function_arguments(tiny_posts, all_three, "constant", settings),
    )


def test_a_function_gets_references_and_summaries_without_their_end(function_run, tiny_posts):
    """In training and evaluations; the references are those of the same posts."""
    posts = chain(*(rows_of(tiny_posts / f"posts_{split}.jsonl") for split in ("train", "validation", "test")))
    summaries = {query_of(post): f" {post['summary']}" for post in posts}
    trial, *seen = rows_of(function_run.parents[1] / "seen.jsonl")
    assert trial[2] == ["A reference."] * 2
    # Updates; evaluations at 0 and 3; two splits after training. Traces don't call a function of the user's.
    assert len(seen) == 6 + 2 * 2 + 2 * 2
    for queries, responses, references in seen:
        assert references == [summaries[query] for query in queries]
        assert not any("<|endoftext|>" in response for response in responses)


def test_summaries_that_do_not_end_are_punished(function_run):
    for row in metrics_of(function_run):
        ended = row["objective/eos_rate"]
        assert 0 < ended < 1 and row["objective/raw_scores"] == pytest.approx(3.0)
        assert row["objective/scores"] == pytest.approx(3.0 * ended + (3.0 - 2.0) * (1 - ended))
    for row in rows_of(function_run / "evaluation.jsonl"):
        assert row["scores"] == row["reference_scores"] == 3.0  # evaluations do not punish


def test_a_score_of_an_evaluation_that_is_no_number_stops_the_run(all_three, tiny_posts, tmp_path):
    """After the training. What JSON files hold is JSON, and no model is saved."""
    settings = (
        "--rewards.normalize_samples 0 --ppo.total_episodes 8 --ppo.batch_size 8 "
        "--eval_interval 0 --eval_posts 2 --log_interval 0"
    )
    with pytest.raises(InputError, match="own_functions:no_references returned nan for text 1"):
        trained(tldr_policy, tmp_path, function_arguments(tiny_posts, all_three, "no_references", settings))
    run = only(tmp_path, "runs/*")
    assert not (tmp_path / "models").exists() and not list(run.glob("evaluation*"))
    for file in run.glob("**/*.json"):
        json.loads(file.read_text(), parse_constant=pytest.fail)
    assert not meta_of(run)["finished"] and (run / "checkpoints").exists()


def test_a_monitor_replaces_nothing(all_three):
    """The names that are refused are those that a run writes anyhow: metrics, and columns of its tables."""
    run = run_of("policy", all_three)
    names = [name.split("/", 1) for name in metrics_of(run)[0] if name.startswith(("objective/", "eval/"))]
    written = {name for _, name in names}.union(*rows_of(run / "evaluation.jsonl"), *samples_of(run)) - {"step"}
    gold = {"gold_scores", "reference_gold_scores"}
    assert gold <= written and written - gold == set(tldr_policy.RESERVED) - {"function_score"}  # of other runs
    args = tldr_policy.Args(
        rewards=tldr_policy.RewardsArgs(function="a:b", monitor="own_functions:kl"), base_model="a"
    )
    with pytest.raises(InputError, match="own_functions:kl: the name kl is taken"):
        tldr_policy.ppo_sizes(args, 1)


# ---- Resume, and all three in a row ----------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "stage"), [("all_three", "sft"), ("all_three", "reward"), ("lora", "policy")])
def test_a_resumed_run_gives_the_same_numbers(run, stage, request, tmp_path):
    """Bit for bit, as if it had been killed in a stage: metrics, results, tables and weights of all that follows."""
    whole = request.getfixturevalue(run)
    copy = whole.copy(tmp_path / "copy")
    later = list(SCRIPTS)[list(SCRIPTS).index(stage) + 1 :]
    resumed = run_of(stage, copy)
    for path in [
        copy.folder / "models" / resumed.name,
        *chain(*(copy.folder.glob(f"*/tldr_{name}__*") for name in later)),
    ]:
        shutil.rmtree(path)
    interrupt(resumed)
    copy.resumed(resumed)
    check_same(copy, whole)


def test_all_three_are_resumed_where_they_began_with_their_arguments(all_three, tmp_path, monkeypatch):
    def parse(*words: Any) -> tldr_all.Args:
        return train_both.parse(["--resume", *map(str, words)], tldr_all.PRESETS)

    copy = all_three.copy(tmp_path / "copy")
    run = run_of("reward", copy)
    monkeypatch.chdir(copy.folder)
    args = parse(f"runs/{run.name}/")
    assert (args.sft.lr, args.reward.batch_size, args.task.eval_temperature) == (0.03, 20, 1e-6)
    with pytest.raises(InputError, match=r"--reward\.lr: --resume takes the arguments with which tldr_all began"):
        parse(run, "--reward.lr", 1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"resume in {copy.folder}, where it began"):
        parse(run)
    only(copy.folder, "runs/*.json").unlink()
    with pytest.raises(InputError, match="is not the folder of a run that tldr_all began"):
        parse(run)


@pytest.mark.parametrize("shorter", ["sft", "policy"])
def test_the_summary_says_what_happened(all_three, tmp_path, capsys, shorter):
    """Where one stage has summarised fewer posts, as with --sft.eval_posts 5, those that both have are judged."""
    copy = all_three.copy(tmp_path / "copy")
    runs = {name: run_of(name, copy) for name in SCRIPTS}
    file = runs[shorter] / "evaluation.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:5]))
    tldr_all.report(*map(copy.model, SCRIPTS))
    said = capsys.readouterr().out
    sft, policy = (table_of(stage, copy)[:5] for stage in ("sft", "policy"))
    queries = [row["query"] for row in policy]
    ours, references, after_sft = (
        gold_scores(queries, [row[side] for row in rows])
        for rows, side in ((policy, "response"), (policy, "reference"), (sft, "response"))
    )
    for name, theirs in {"the reference summaries": references, "those after SFT": after_sft}.items():
        share = statistics.mean((a > b) + (a == b) / 2 for a, b in zip(ours, theirs, strict=True))
        assert f"win against {name} in {share:.1%} of 5 posts" in said
        assert f"{statistics.mean(ours):+.2f} against {statistics.mean(theirs):+.2f}" in said
    learned = results_of("reward", copy)
    accuracy, ceiling = learned["eval/rm/validation/accuracy"], learned["ceiling"]
    assert f"learned {(accuracy - 0.5) / (ceiling - 0.5):.0%} of what can be learned" in said
