"""Reward models from elsewhere: the library's classifiers, and what it says of one text alone."""

import json
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from processes import launch
from runs import metrics_of, only, posts_arguments, sums_arguments
from test_problems import TEMPLATE, byte_tokenizer
from test_templates import IN_LETTERS, queries_of_chapter_2
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from ppo_rlhf.lib import classifiers
from ppo_rlhf.lib.errors import InputError, NumericalError
from ppo_rlhf.lib.reward_functions import import_function
from ppo_rlhf.rlvr import arguments as rlvr_arguments, policy as rlvr_policy, problems
from ppo_rlhf.tldr import policy as tldr_policy, posts

PAD = 29  # of the policy with the tiny tokenizer
TASK = posts.TaskArgs(query_length=20, response_length=10)
LEFT_OUT = -1  # of a setting
CHATTY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
CHATTY += "{% if add_generation_prompt %}<assistant>{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATTY
QUERIES, RESPONSES = ["the cat sat", "a dog"], [" on the mat.", " ran."]


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def classifier(
    architecture: str,
    folder: Path,
    tokenizer,
    labels: list[str],
    pad_id: int | None,
    rows: int = 29,
    **settings: int | None,
) -> str:
    """The folder of a sequence classifier with random weights that differ from text to text."""
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    ids = {"pad_token_id": pad_id, "bos_token_id": None, "eos_token_id": 28}
    settings = SMALL | {"max_position_embeddings": 300} | ids | settings
    settings = {name: value for name, value in settings.items() if value != LEFT_OUT}
    config = AutoConfig.for_model(architecture, vocab_size=rows, **settings, **names)
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
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def load(model: str, label: str = "") -> classifiers.Classifier:
    kind = {"dtype": torch.float32, "device": torch.device("cpu"), "trust_remote_code": False}
    return classifiers.Classifier(model, label, **kind, field="rewards.trained_model")


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


@pytest.mark.parametrize(
    ("architecture", "pad_id"),
    [("gpt2", 28), ("llama", None), ("llama", 3)],
    ids=["padding is the end of text", "no padding", "its own padding"],
)
def test_a_score_is_that_of_a_text_alone(tmp_path, letters, architecture, pad_id):
    """Whatever the batch, wherever our padding is."""
    folder = classifier(architecture, tmp_path / "reward", letters, ["LABEL_0"], pad_id)
    score = classifiers.scorer_of(load(folder), letters, PAD, TASK)
    rows = [letters.encode(q + r) for q, r in zip(QUERIES, RESPONSES, strict=True)]
    scores = score(padded(letters, QUERIES, left=True), padded(letters, RESPONSES))
    assert scores.tolist() == pytest.approx(said_alone(folder, rows), abs=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-2


def test_another_tokenizer_reads_the_text(tmp_path, letters, wordy):
    """With its own special tokens, and without what follows the end of a response."""
    folder = classifier("bert", tmp_path / "reward", wordy, ["NEGATIVE", "POSITIVE"], 0, rows=13)
    rows = [[2, 4, 6, 8, 10, 4, 11, 12, 3], [2, 5, 7, 9, 12, 3]]
    for number, label in enumerate(["NEGATIVE", "POSITIVE"]):
        score = classifiers.scorer_of(load(folder, label), letters, PAD, TASK)
        responses = padded(letters, RESPONSES)
        responses[1, 5:7] = torch.tensor([28, 3])  # the end of text, and a letter
        scores = score(padded(letters, QUERIES), responses)
        assert scores.tolist() == pytest.approx(said_alone(folder, rows, number), abs=1e-5)


XLNET = {"d_model": 16, "n_layer": 1, "n_head": 2, "max_position_embeddings": LEFT_OUT}
XLNET |= dict.fromkeys(SMALL, LEFT_OUT)


@pytest.mark.parametrize(
    ("architecture", "longest", "settings"),
    [
        ("bert", 20, {}),
        ("xlnet", 99, XLNET),  # reads a text at its last place, also if that is padding, and has no greatest length
    ],
)
def test_long_texts_and_names_of_special_tokens(tmp_path, letters, wordy, architecture, longest, settings):
    """In one batch, with what the library says of each text alone as the oracle."""
    settings = {"max_position_embeddings": 20} | settings
    folder = classifier(architecture, tmp_path / "reward", wordy, ["good"], 0, rows=13, **settings)
    score = classifiers.scorer_of(load(folder), byte_tokenizer(None), 259, TASK)
    queries, responses = ["the cat", "a dog"], [" sat on the mat." * 5, " ran [SEP]."]
    scores = score(*(padded(byte_tokenizer(None), texts, 259) for texts in (queries, responses)))
    long, short = [4, 6, *[8, 10, 4, 11, 12] * 5], [5, 7, 9, 1, 1, 1, 12]
    rows = [[2, *long[-(longest - 2) :], 3], [2, *short, 3]]
    assert scores.tolist() == pytest.approx(said_alone(folder, rows), abs=1e-5)


def test_messages_that_its_template_refuses_are_found_before_training(tmp_path, letters, wordy):
    wordy.chat_template = NO_SYSTEM
    judge = load(classifier("bert", tmp_path / "chat", wordy, ["good"], 0, rows=13))
    dialogues = [turns("a", ""), turns("a", "", system="a")]
    classifiers.scorer_of(judge, letters, PAD, TASK, dialogues=dialogues[:1])
    with pytest.raises(InputError, match=r"fails on messages of system, user, assistant: .*no system"):
        classifiers.scorer_of(judge, letters, PAD, TASK, dialogues=dialogues)


def test_keys_and_values_that_nobody_reads_are_not_kept(tmp_path, tiny_tokenizer):
    judge = load(classifier("llama", tmp_path / "reward", tiny_tokenizer, ["LABEL_0"], 28))
    said = []
    judge.model.register_forward_hook(lambda model, inputs, output: said.append(output))
    judge.of_ids([[1, 2]])
    assert said[0].past_key_values is None


# ---- What a reward model reads of a row, a template, and the beginning of a response ---------------------------

OTHER = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|endoftext|>{% endfor %}\n"
THINKS = TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2<|im_end|>+2?"}
TURNS = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


def turns(*contents: str, system: str = "") -> list[dict[str, str]]:
    """Messages of user and assistant in turn, after the system's."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return [{"role": "system", "content": system}] * bool(system) + messages


@pytest.mark.parametrize("theirs", [OTHER, None], ids=["a template of its own", "none"])
@pytest.mark.parametrize(
    ("question", "changes", "template", "expected"),
    [
        ("2+2?", {"system_prompt": "Add."}, TEMPLATE, turns("2+2?!", "It is<|im_start|>4", system="Add.")),
        ([SYSTEM, *TURNS, ASKED], {"system_prompt": "Add."}, TEMPLATE,
         turns("1+1?", "2", "2<|im_end|>+2?!", "It is<|im_start|>4", system="Be brief.")),
        ("2+2?", {}, THINKS, turns("2+2?!", "<think>\n It is<|im_start|>4")),
        ([SYSTEM, ASKED], {"prompt_format": "plain", "response_prefix": "So: "}, TEMPLATE,
         turns("2<|im_end|>+2?!", "So:  It is<|im_start|>4", system="Be brief.")),
        ("2+2?", {"prompt_suffix": "\n<think>", "prompt_format": "plain"}, TEMPLATE,
         turns("2+2?\n", "<think> It is<|im_start|>4")),
    ],
)  # fmt: skip
def test_a_reward_model_reads_the_messages_of_a_row(tmp_path, theirs, question, changes, template, expected):
    """In its own template, as the library renders them; names of special tokens in them are letters."""
    judge, policy = byte_tokenizer(theirs), byte_tokenizer(template)
    folder = classifier("llama", tmp_path / "reward", judge, ["LABEL_0"], None, rows=259, eos_token_id=258)
    lines = [json.dumps({"question": one, "answer": "#### 4"}) for one in ("Other?", question)]
    for split in ("train", "test"):
        (tmp_path / f"problems_{split}.jsonl").write_text("\n".join(lines))
    task = {"problems": str(tmp_path), "prompt_suffix": "!", "prompt_length": 200, "response_length": 50}
    task = problems.TaskArgs(**task | changes)
    args = rlvr_arguments.Args(task=task, rewards=rlvr_arguments.RewardsArgs(trained_model=folder))
    found, ids = problems.read_problems(task, policy, "train"), problems.task_ids(task, policy)
    setup = SimpleNamespace(tokenizer=policy, ids=ids, problems=found)
    setup.sources = rlvr_policy.load_sources(args, policy, ids, Accelerator(cpu=True), found.messages)
    said = [*policy.encode(" It is<|im_start|>4", split_special_tokens=True), 258]
    parts, _ = rlvr_policy.score_responses(setup, torch.tensor([1]), found.batch([1], ids.pad), torch.tensor([said]))
    row = in_template(expected, judge)
    if theirs is None and task.prompt_format == "plain":  # the response continues the text
        row = policy.encode(found.texts[1] + " It is<|im_start|>4", split_special_tokens=True)
    assert parts[:, 1].tolist() == pytest.approx(said_alone(folder, [row]), abs=1e-5)


def in_template(messages: list[dict[str, str]], tokenizer) -> list[int]:
    """Token ids of what the library makes of messages; of their own special tokens, the letters."""
    hidden = json.loads(json.dumps(messages).replace("<|im_", "<|IM_"))
    text = "\n".join(message["content"] for message in hidden)
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(hidden, tokenize=False)
    first, *others = [tokenizer.encode(part, add_special_tokens=False) for part in text.split("<|IM_")]
    return first + [token for part in others for token in [*tokenizer.encode("<|im_"), *part]]


def test_a_reward_model_reads_a_post_and_a_summary_in_its_template(tmp_path):
    judge, policy = byte_tokenizer(OTHER), byte_tokenizer()
    folder = classifier("llama", tmp_path / "reward", judge, ["LABEL_0"], None, rows=259, eos_token_id=258)
    chat = {"prompt_format": "chat", "system_prompt": "Sum up."}
    found, ids = queries_of_chapter_2(tmp_path, policy, **chat)
    task = posts.TaskArgs(query_length=256, response_length=64, **chat)
    args = tldr_policy.Args(task=task, rewards=tldr_policy.RewardsArgs(trained_model=folder))
    score = tldr_policy.load_scorer(args, policy, ids, Accelerator(cpu=True))
    row = in_template(turns(IN_LETTERS, "It sleeps.", system="Sum up."), judge)
    scores = score(found.queries, found.references, found.references)
    assert scores.tolist() == pytest.approx(said_alone(folder, [row]), abs=1e-5)


def break_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "labels, label, damage, message",
    [
        (["NEGATIVE", "POSITIVE"], "", None, "--rewards.label : .* has the labels NEGATIVE, POSITIVE; name the one"),
        (["LABEL_0"], "GOOD", None, "--rewards.label GOOD: .* has the labels LABEL_0"),
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


def test_scores_that_are_no_numbers_end_the_run(tmp_path, tiny_tokenizer):
    judge = load(classifier("gpt2", tmp_path / "reward", tiny_tokenizer, ["LABEL_0"], 28))
    judge.model.score.weight.data.fill_(float("nan"))
    with pytest.raises(NumericalError, match="scores that are not finite"):
        judge.of_ids([[1, 2]])


# ---- Whole runs ------------------------------------------------------------------------------------------------


def test_the_recipe_of_a_classifier_as_a_function(tmp_path, wordy, monkeypatch):
    """The recipe of docs/running.md, for chapter 1, works as printed."""
    folder = classifier("bert", tmp_path / "theirs", wordy, ["NEGATIVE", "POSITIVE"], 0, rows=13)
    page = (Path(__file__).parents[1] / "docs" / "running.md").read_text()
    recipes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (recipe,) = [recipe for recipe in recipes if "AutoModelForSequenceClassification" in recipe]
    recipe = textwrap.dedent(recipe).replace("lvwerra/distilbert-imdb", "theirs")
    (tmp_path / "my_rewards.py").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    scores = import_function("my_rewards:score", "rewards.function")(["the cat", "a dog"], [" sat.", " ran."])
    rows = [[2, 4, 6, 8, 12, 3], [2, 5, 7, 9, 12, 3]]
    assert scores == pytest.approx(said_alone(folder, rows, 1), abs=1e-5)


def test_runs_of_chapters_2_and_3(tmp_path, tiny_posts, tiny_sums):
    """In chapter 3, the score is the verifier's value plus three times the logit."""
    sizes = "--ppo.total_episodes 16 --ppo.batch_size 16 --ppo.nminibatches 1 --ppo.noptepochs 1 --trace_interval 0"
    for script, world, words in (
        ("tldr/policy.py", tiny_posts, [*posts_arguments(tiny_posts), "--eval_posts", "4"]),
        ("rlvr/policy.py", tiny_sums, [*sums_arguments(tiny_sums), "--rewards.trained_weight", "3"]),
    ):
        folder, tokenizer = tmp_path / world.name, AutoTokenizer.from_pretrained(world / "model")
        theirs = classifier("llama", folder / "theirs", tokenizer, ["LABEL_0"], None, rows=len(tokenizer))
        words += ["--base_model", f"{world}/model", "--rewards.trained_model", theirs, *sizes.split()]
        result = launch(script, *words, folder=folder)
        assert result.status == 0, result.stderr
        (row,) = metrics_of(only(folder, "runs/*"))
        assert ("objective/function_score" in row) == (script == "tldr/policy.py")
    parts = row["objective/verifier_reward"] + 3 * row["objective/reward_model_reward"]
    assert row["objective/reward_model_reward"] and row["objective/scores"] == pytest.approx(parts, abs=1e-5)
