"""Reward models from elsewhere: the library's classifiers, and what it says of one text alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from processes import launch
from runs import metrics_of, only, policy_arguments, posts_arguments, world_arguments
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from ppo_rlhf.lib.base.errors import InputError, NumericalError
from ppo_rlhf.lib.data import problems
from ppo_rlhf.lib.nets import foreign

PAD = 29  # of the policy with the tiny tokenizer
CHATTY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
CHATTY += "{% if add_generation_prompt %}<assistant>{% endif %}"
QUERIES, RESPONSES = ["the cat sat", "a dog"], [" on the mat.", " ran."]


def classifier(
    architecture: str, folder: Path, tokenizer, labels: list[str], pad_id: int | None, rows: int = 29
) -> str:
    """The folder of a sequence classifier with random weights that differ from text to text."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 300}
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    config = AutoConfig.for_model(
        architecture, vocab_size=rows, pad_token_id=pad_id, bos_token_id=None, eos_token_id=28, **sizes, **names
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        for parameter in model.parameters():
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def letters(tiny_tokenizer) -> PreTrainedTokenizerFast:
    """The tiny tokenizer, of which texts come back as they were."""
    from tokenizers import Tokenizer, decoders

    backend = Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str())
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture
def wordy(tmp_path) -> PreTrainedTokenizerFast:
    """A tokenizer of words, which puts [CLS] before and [SEP] after a text, as BERT's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "a", "cat", "dog", "sat", "ran", "on", "mat", "."]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")


def load(model: str, label: str = "") -> foreign.Classifier:
    kind = {"dtype": torch.float32, "device": torch.device("cpu"), "trust_remote_code": False}
    return foreign.Classifier(model, label, **kind, field="rewards.trained_model")


def padded(tokenizer, texts: list[str], pad_id: int = PAD, left: bool = False) -> torch.Tensor:
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    longest = max(map(len, rows)) + 1
    return torch.tensor(
        [[pad_id] * (longest - len(r)) + r if left else r + [pad_id] * (longest - len(r)) for r in rows]
    )


def said_alone(folder: str, rows: list[list[int]], label: int = 0) -> list[float]:
    """What the library's model says of each row by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return [model(torch.tensor([row])).logits[0, label].item() for row in rows]


@pytest.mark.parametrize("pad_id", [28, None, 3], ids=["padding is the end of text", "no padding", "its own padding"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_with_the_policy_s_tokens_it_reads_token_ids(tmp_path, tiny_tokenizer, architecture, pad_id):
    """The score is that of a text alone, whatever the batch, wherever our padding is."""
    folder = classifier(architecture, tmp_path / "reward", tiny_tokenizer, ["LABEL_0"], pad_id)
    score = foreign.scorer_of(load(folder), tiny_tokenizer, PAD, 30)
    rows = [tiny_tokenizer.encode(q + r) for q, r in zip(QUERIES, RESPONSES, strict=True)]
    scores = score(padded(tiny_tokenizer, QUERIES, left=True), padded(tiny_tokenizer, RESPONSES))
    assert scores.tolist() == pytest.approx(said_alone(folder, rows), abs=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-2


def test_another_tokenizer_reads_the_text(tmp_path, letters, wordy):
    """With its own special tokens, and without what follows the end of a response."""
    folder = classifier("bert", tmp_path / "reward", wordy, ["NEGATIVE", "POSITIVE"], 0, rows=13)
    rows = [[2, 4, 6, 8, 10, 4, 11, 12, 3], [2, 5, 7, 9, 12, 3]]
    for number, label in enumerate(["NEGATIVE", "POSITIVE"]):
        score = foreign.scorer_of(load(folder, label), letters, PAD, 30)
        responses = padded(letters, RESPONSES)
        responses[1, 5:7] = torch.tensor([28, 3])  # the end of text, and a letter
        scores = score(padded(letters, QUERIES), responses)
        assert scores.tolist() == pytest.approx(said_alone(folder, rows, number), abs=1e-5)


def test_a_text_that_is_too_long_is_read_at_its_end(tmp_path, tiny_tokenizer, wordy):
    folder = classifier("bert", tmp_path / "reward", wordy, ["good"], 0, rows=13)
    judge = load(folder)
    judge.longest = 5
    assert judge.of_texts(["the cat sat"], [" on the mat."]).tolist() == pytest.approx(
        said_alone(folder, [[2, 4, 11, 12, 3]]), abs=1e-5
    )


def test_its_own_chat_template_makes_messages_of_query_and_response(tmp_path, letters, wordy):
    wordy.chat_template = CHATTY
    folder = classifier("bert", tmp_path / "reward", wordy, ["good"], 0, rows=13)
    score = foreign.scorer_of(load(folder), letters, PAD, 30)
    scores = score(padded(letters, QUERIES), padded(letters, RESPONSES))
    texts = ["<user>the cat sat|<assistant>on the mat.|", "<user>a dog|<assistant>ran.|"]
    rows = [wordy.encode(text, add_special_tokens=False) for text in texts]
    assert scores.tolist() == pytest.approx(said_alone(folder, rows), abs=1e-5)


def test_the_policy_s_template_is_read_as_it_is(tmp_path, tiny_tokenizer):
    """A reward model with the policy's tokenizer, template and all, reads the prompts as the policy does."""
    theirs = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer, eos_token="<eos>")
    theirs.chat_template = CHATTY
    folder = classifier("gpt2", tmp_path / "reward", theirs, ["LABEL_0"], 28)
    assert load(folder).shares_tokens(theirs) and not load(folder).shares_tokens(tiny_tokenizer)


@pytest.mark.parametrize("examples", [False, True])
def test_the_question_of_a_rendered_prompt(tmp_path, tiny_tokenizer, examples):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer, eos_token="<eos>")
    tokenizer.chat_template = CHATTY
    (tmp_path / "few.jsonl").write_text(json.dumps({"question": "b", "answer": "c"}) + "\n")
    task = problems.TaskArgs(
        prompt_suffix=" say it.",
        system_prompt="be kind.",
        response_prefix="<think>",
        examples=str(tmp_path / "few.jsonl") if examples else "",
    )
    prompt = problems.render_prompt("what is it", task, tokenizer, problems.read_examples(task))
    assert prompt.endswith("<user>what is it say it.|<assistant><think>") and prompt.startswith("<system>be kind.|")
    assert problems.reader_of_prompts(task, tokenizer)(prompt) == [
        {"role": "system", "content": "be kind."},
        {"role": "user", "content": "what is it say it."},
    ]


def break_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "labels, label, damage, message",
    [
        (["NEGATIVE", "POSITIVE"], "", None, "2 labels, NEGATIVE, POSITIVE; .*: --rewards.label POSITIVE"),
        (["LABEL_0"], "GOOD", None, "--rewards.label GOOD: .* has the labels LABEL_0"),
        (
            ["LABEL_0"],
            "",
            lambda folder: (folder / "config.json").unlink(),
            "no config.json; give models/<run>/reward",
        ),
        (["LABEL_0"], "", lambda folder: (folder / "config.json").write_text("{"), "its config.json cannot be read"),
        (["LABEL_0"], "", lambda folder: [file.unlink() for file in folder.glob("token*")], "has no tokenizer"),
        (["LABEL_0"], "", break_weights, "its weights lack score.weight"),
    ],
)
def test_what_is_no_reward_model_ends_in_one_line(tmp_path, tiny_tokenizer, labels, label, damage, message):
    folder = classifier("gpt2", tmp_path / "reward", tiny_tokenizer, labels, 28)
    if damage:
        damage(Path(folder))
    with pytest.raises(InputError, match=message) as raised:
        load(folder, label)
    assert "\n" not in str(raised.value)


def test_a_language_model_and_one_that_reads_too_little(tmp_path, tiny_tokenizer, tiny_models):
    tiny_models("gpt2").save_pretrained(tmp_path / "lm")
    with pytest.raises(InputError, match=r"lm is a language model \(GPT2LMHeadModel\), not a reward model; give"):
        foreign.check_name(str(tmp_path / "lm"))
    folder = classifier("gpt2", tmp_path / "reward", tiny_tokenizer, ["LABEL_0"], 28)
    with pytest.raises(InputError, match=r"reads at most 300 tokens, but query and response are 301; shorten --task"):
        foreign.scorer_of(load(folder), tiny_tokenizer, PAD, 301)


def test_scores_that_are_no_numbers_end_the_run(tmp_path, tiny_tokenizer):
    judge = load(classifier("gpt2", tmp_path / "reward", tiny_tokenizer, ["LABEL_0"], 28))
    judge.model.score.weight.data.fill_(float("nan"))
    with pytest.raises(NumericalError, match="scores that are not finite"):
        judge.of_ids([[1, 2]])


# ---- Whole runs ------------------------------------------------------------------------------------------------


def words_of(model: str | Path, architecture: str, folder: Path, labels: list[str]) -> str:
    """A classifier with the tokenizer of a world's language model."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return classifier(architecture, folder, tokenizer, labels, None, rows=len(tokenizer))


def test_a_run_of_chapter_1_and_samples_without_the_reward_model(tmp_path, tiny_world):
    words_of(tiny_world / "model", "gpt2", tmp_path / "theirs", ["NEGATIVE", "POSITIVE"])
    words = [*world_arguments(tiny_world), *policy_arguments(), "--ppo.total_episodes", "16"]
    words += ["--rewards.trained_model", "theirs"]
    result = launch("train_policy.py", *words, folder=tmp_path)
    assert result.status == 2 and "--rewards.label POSITIVE" in result.stderr and result.stderr.count("\n") == 1
    result = launch("train_policy.py", *words, "--rewards.label", "POSITIVE", folder=tmp_path)
    assert result.status == 0, result.stderr
    (row,) = metrics_of(only(tmp_path, "runs/*"))
    assert abs(row["objective/raw_score"]) < 2 and row["objective/function_score"] != row["objective/raw_score"]
    policy = str(only(tmp_path, "models/*/policy").relative_to(tmp_path))
    result = launch("sample.py", "--policy", policy, "--n", "2", "--out", "with.jsonl", folder=tmp_path)
    assert result.status == 0, result.stderr
    shutil.rmtree(tmp_path / "theirs")
    result = launch("sample.py", "--policy", policy, "--n", "2", "--out", "without.jsonl", folder=tmp_path)
    assert result.status == 0 and "no scores, unless --reward_model says whose: " in result.stdout, result.stderr
    with_scores, without = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("with.jsonl", "without.jsonl")
    )
    assert [{**row, "base score": 0, "policy score": 0} for row in without] == [
        {**row, "base score": 0, "policy score": 0} for row in with_scores
    ]
    assert "policy score" not in without[0]
    # Any causal language model continues that policy's queries; here it is the base model, which differs in nothing.
    sampled = ["sample.py", "--policy", str(tiny_world / "model"), "--n", "2", "--out", "any.jsonl"]
    result = launch(*sampled, folder=tmp_path)
    assert result.status == 2 and "add --task_of models/<run>/policy" in result.stderr
    result = launch(*sampled, "--task_of", policy, folder=tmp_path)
    assert result.status == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "any.jsonl").read_text().splitlines()]
    assert [row["query"] for row in rows] == [row["query"] for row in without]
    assert [row["policy"] for row in rows] == [row["base"] for row in without] and not any(row["kl"] for row in rows)


def test_a_run_of_chapter_2(tmp_path, tiny_posts):
    words_of(tiny_posts / "model", "llama", tmp_path / "theirs", ["LABEL_0"])
    words = [
        *posts_arguments(tiny_posts)[:4],
        "--base_model",
        str(tiny_posts / "model"),
        "--ppo.total_episodes",
        "16",
    ]
    words += ["--ppo.batch_size", "16", "--rewards.trained_model", "theirs"]
    words += ["--ppo.nminibatches", "1", "--ppo.noptepochs", "1", "--eval_posts", "4", "--trace_interval", "0"]
    result = launch("tldr_policy.py", *words, folder=tmp_path)
    assert result.status == 0, result.stderr
    assert "objective/function_score" in metrics_of(only(tmp_path, "runs/*"))[0]


def test_a_run_of_chapter_3(tmp_path, tiny_sums):
    """Its critic starts as the base model, and the score is the verifier's value plus three times the logit."""
    words_of(tiny_sums / "model", "llama", tmp_path / "theirs", ["LABEL_0"])
    words = ["--preset", "sums", "--base_model", str(tiny_sums / "model"), "--task.problems", str(tiny_sums)]
    sizes = "--ppo.total_episodes 16 --ppo.batch_size 16 --ppo.samples_per_prompt 2 --ppo.nminibatches 1"
    theirs = "--rewards.trained_model theirs --rewards.trained_weight 3 --eval_samples 0 --trace_interval 0"
    words += f"{sizes} {theirs}".split()
    result = launch("rlvr_policy.py", *words, folder=tmp_path)
    assert result.status == 0, result.stderr
    (row,) = metrics_of(only(tmp_path, "runs/*"))
    parts = row["objective/verifier_reward"] + 3 * row["objective/reward_model_reward"]
    assert row["objective/reward_model_reward"] and row["objective/scores"] == pytest.approx(parts, abs=1e-5)
