"""Reward models from elsewhere: the library's classifiers, and what it says of one text alone."""

import json
import re
import textwrap

import pytest
import torch
from runs import ROOT
from small_models import LEFT_OUT, SMALL, classifier
from small_posts import IN_LETTERS, queries_of_chapter_2
from small_problems import TEMPLATE, byte_tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from ppo_rlhf.rlvr import arguments as rlvr_arguments, policy as rlvr_policy, problems
from ppo_rlhf.tldr import classifiers, policy as tldr_policy, posts
from ppo_rlhf.tldr.reward_functions import import_function
from ppo_rlhf.train_policy import InputError

PAD = 259  # of the policy
TASK = posts.TaskArgs(query_length=20, response_length=10)


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
    return classifiers.Classifier(model, label, **kind)


def padded(tokenizer, texts: list[str], side: str = "right") -> torch.Tensor:
    rows = [torch.tensor(tokenizer.encode(text)) for text in texts]
    return pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side=side)


def said_alone(folder: str, rows: list[list[int]], label: int = 0) -> list[float]:
    """What the library's model says of each row by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return [model(torch.tensor([row])).logits[0, label].item() for row in rows]


@pytest.mark.parametrize(("architecture", "pad_id"), [("gpt2", 258), ("llama", None)])
def test_a_score_is_that_of_a_text_alone(tmp_path, architecture, pad_id):
    """Whatever the batch, wherever our padding is, and whether theirs is the end of text or they have none."""
    tokenizer = byte_tokenizer(None)
    folder = classifier(architecture, tmp_path / "reward", tokenizer, ["LABEL_0"], pad_id, rows=259)
    judge = load(folder)
    score = classifiers.scorer_of(judge, tokenizer, PAD, TASK)
    queries, responses = ["the cat sat", "a dog"], [" on the mat.", " ran."]
    rows = [tokenizer.encode(q + r) for q, r in zip(queries, responses, strict=True)]
    scores = score(padded(tokenizer, queries, side="left"), padded(tokenizer, responses))
    assert scores.tolist() == pytest.approx(said_alone(folder, rows), abs=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-2
    assert judge.model(torch.tensor(rows[:1])).past_key_values is None  # nobody reads keys and values
    judge.model.score.weight.data.fill_(float("nan"))
    with pytest.raises(InputError, match="scores that are not finite"):
        judge.of_ids(rows)


XLNET = {"d_model": 16, "n_layer": 1, "n_head": 2, "max_position_embeddings": LEFT_OUT}
XLNET |= dict.fromkeys(SMALL, LEFT_OUT)


@pytest.mark.parametrize(
    ("architecture", "longest", "settings"),
    [
        ("bert", 20, {}),
        ("xlnet", 99, XLNET),  # reads a text at its last place, also if that is padding, and has no greatest length
    ],
)
def test_long_texts_and_names_of_special_tokens(tmp_path, wordy, architecture, longest, settings):
    """In one batch, by another tokenizer, whose special tokens are put around texts; the second label counts.

    What follows the end of a response is not read. The oracle is what the library says of each text alone.
    """
    settings = {"max_position_embeddings": 20} | settings
    folder = classifier(architecture, tmp_path / "reward", wordy, ["BAD", "GOOD"], 0, rows=13, **settings)
    tokenizer = byte_tokenizer(None)
    score = classifiers.scorer_of(load(folder, "GOOD"), tokenizer, PAD, TASK)
    queries, responses = ["the cat", "a dog"], [" sat on the mat." * 5, " ran [SEP].<|im_end|>a"]
    scores = score(*(padded(tokenizer, texts) for texts in (queries, responses)))
    long, short = [4, 6, *[8, 10, 4, 11, 12] * 5], [5, 7, 9, 1, 1, 1, 12]
    rows = [[2, *long[-(longest - 2) :], 3], [2, *short, 3]]
    assert scores.tolist() == pytest.approx(said_alone(folder, rows, 1), abs=1e-5)


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


def test_messages_that_its_template_refuses_are_found_before_training(tmp_path):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + OTHER
    policy = byte_tokenizer()
    judge = load(classifier("llama", tmp_path, byte_tokenizer(refusing), ["good"], None, rows=259))
    dialogues = [turns("a", ""), turns("a", "", system="a")]
    classifiers.scorer_of(judge, policy, PAD, TASK, dialogues=dialogues[:1])
    with pytest.raises(InputError, match=r"fails on messages of system, user, assistant: .*no system"):
        classifiers.scorer_of(judge, policy, PAD, TASK, dialogues=dialogues)


@pytest.mark.parametrize("theirs", [OTHER, None], ids=["a template of its own", "none"])
@pytest.mark.parametrize(
    ("question", "changes", "template", "expected"),
    [
        ([SYSTEM, *TURNS, ASKED], {"system_prompt": "Add."}, TEMPLATE,
         turns("1+1?", "2", "2<|im_end|>+2?!", "It is<|im_start|>4", system="Be brief.")),
        ("2+2?", {"system_prompt": "Add."}, THINKS, turns("2+2?!", "<think>\n It is<|im_start|>4", system="Add.")),
        ([SYSTEM, ASKED], {"prompt_format": "plain", "response_prefix": "So: "}, TEMPLATE,
         turns("2<|im_end|>+2?!", "So:  It is<|im_start|>4", system="Be brief.")),
    ],
)  # fmt: skip
def test_a_reward_model_reads_the_messages_of_a_row(tmp_path, theirs, question, changes, template, expected):
    """In its own template, as the library renders them; names of special tokens in them are letters."""
    judge, policy = byte_tokenizer(theirs), byte_tokenizer(template)
    folder = classifier("llama", tmp_path / "reward", judge, ["LABEL_0"], None, rows=259)
    (tmp_path / "problems_train.jsonl").write_text(json.dumps({"question": question, "answer": "#### 4"}))
    task = {"problems": str(tmp_path), "prompt_suffix": "!", "prompt_length": 200, "response_length": 50}
    task = problems.TaskArgs(**task | changes)
    rewards = rlvr_arguments.RewardsArgs(trained_model=folder, steps=folder, trained_weight=3.0)
    args = rlvr_arguments.Args(task=task, rewards=rewards)
    found, ids = problems.read_problems(task, policy, "train"), problems.task_ids(task, policy)
    sources = rlvr_policy.load_sources(args, policy, ids, found, torch.device("cpu"))
    said = torch.tensor([[*policy.encode(" It is<|im_start|>4", split_special_tokens=True), 258]])
    prompts = found.batch([0], ids.pad)

    def judged(said: torch.Tensor) -> tuple[torch.Tensor, ...]:
        written = said != ids.pad
        return rlvr_policy.score_responses(sources, found, torch.tensor([0]), prompts, said, policy, ids, written)

    parts, scores, token_scores = judged(said)
    torch.testing.assert_close(scores, parts[:, 0] + 3 * parts[:, 1] + 3 * parts[:, 2])
    row = in_template(expected, judge)
    if theirs is None and task.prompt_format == "plain":  # the response continues the text
        row = policy.encode(found.texts[0] + " It is<|im_start|>4", split_special_tokens=True)
    assert parts[:, 1].tolist() == pytest.approx(said_alone(folder, [row]), abs=1e-5)
    # Its one line is one step, which is rewarded where the response ends.
    assert parts[0, 2] == parts[0, 1] and token_scores[0].tolist() == [0] * (said.shape[1] - 1) + [3 * parts[0, 2]]
    # Of two lines, with an empty one between them, each is judged as a response that ends there.
    lines = policy.encode("It is\n\n4\n")
    parts, _, token_scores = judged(torch.tensor([[*lines, 258]]))
    alone = [judged(torch.tensor([[*lines[:n], 258]]))[0][0, 1] for n in (5, 8)]
    assert token_scores[0].nonzero()[:, 0].tolist() == [5, 8]
    torch.testing.assert_close(token_scores[0, [5, 8]], 3 * torch.stack(alone))
    torch.testing.assert_close(parts[0, 2], sum(alone))


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
    folder = classifier("llama", tmp_path / "reward", judge, ["LABEL_0"], None, rows=259)
    chat = {"prompt_format": "chat", "system_prompt": "Sum up."}
    found, ids = queries_of_chapter_2(tmp_path, policy, **chat)
    task = posts.TaskArgs(query_length=256, response_length=64, **chat)
    args = tldr_policy.Args(task=task, rewards=tldr_policy.RewardsArgs(trained_model=folder))
    assert tldr_policy.has_own_scale(args.rewards)
    score = tldr_policy.load_scorer(args, policy, ids, torch.device("cpu"))
    row = in_template(turns(IN_LETTERS, "It sleeps.", system="Sum up."), judge)
    scores = score(found.queries, found.references, found.references)
    assert scores.tolist() == pytest.approx(said_alone(folder, [row]), abs=1e-5)


@pytest.mark.parametrize(
    ("labels", "label", "message"),
    [
        (["NEGATIVE", "POSITIVE"], "", "--rewards.label : .* has the labels NEGATIVE, POSITIVE; name the one"),
        (["LABEL_0"], "GOOD", "--rewards.label GOOD: .* has the labels LABEL_0"),
        (None, "", "the weights of .* lack score.weight"),  # a language model
    ],
)
def test_what_is_no_reward_model_is_refused(tmp_path, tiny_tokenizer, tiny_models, labels, label, message):
    if labels:
        classifier("gpt2", tmp_path, tiny_tokenizer, labels, 28)
    else:
        tiny_models("gpt2").save_pretrained(tmp_path)
        tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message):
        load(str(tmp_path), label)


# ---- Whole runs ------------------------------------------------------------------------------------------------


def test_the_recipe_of_a_classifier_as_a_function(tmp_path, wordy, monkeypatch):
    """The recipe of docs/running.md, for chapter 1, works as printed."""
    folder = classifier("bert", tmp_path / "theirs", wordy, ["NEGATIVE", "POSITIVE"], 0, rows=13)
    page = (ROOT / "docs/running.md").read_text()
    recipes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (recipe,) = [recipe for recipe in recipes if "AutoModelForSequenceClassification" in recipe]
    recipe = textwrap.dedent(recipe).replace("lvwerra/distilbert-imdb", "theirs")
    (tmp_path / "recipe.py").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    scores = import_function("recipe:score", "rewards.function")(["the cat", "a dog"], [" sat.", " ran."])
    rows = [[2, 4, 6, 8, 12, 3], [2, 5, 7, 9, 12, 3]]
    assert scores == pytest.approx(said_alone(folder, rows, 1), abs=1e-5)
