"""Preferences and prompts as others publish them: files and data sets of the hub, texts and messages."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from runs import error_line
from test_problems import byte_tokenizer
from test_tldr_data import Letters, texts_of

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.tldr import data_files, posts, preferences

TOKENIZER = byte_tokenizer()  # its chat template has turns like "<|im_start|>user\nWhy?<|im_end|>\n"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# ---- Forms -----------------------------------------------------------------------------------------------------

HH = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:"
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [user("Why?"), assistant("So.")]
OTHER = [user("Why?"), assistant("No.")]
WHY = "\n\nHuman: Why?\n\nAssistant:"
# name: a row, and what it says as plain texts: prompt, chosen, rejected.
FORMS = {
    "explicit, and both begin alike": ({"prompt": "a", "chosen": " b c", "rejected": " b d"}, "a", " b c", " b d"),
    "HH-RLHF": ({"chosen": f"{HH} So.", "rejected": f"{HH} So what?"}, HH, " So.", " So what?"),
    "HH-RLHF, an earlier turn differs": (
        {"chosen": f"{HH} So.", "rejected": HH.replace("Hello", "Hey") + " So."},
        "\n\nHuman: Hi\n\nAssistant:",
        " Hello\n\nHuman: Why?\n\nAssistant: So.",
        " Hey\n\nHuman: Why?\n\nAssistant: So.",
    ),
    "HH-RLHF, one goes on": ({"chosen": f"{HH} 1", "rejected": f"{HH} 1\n\nHuman: 2"}, HH, " 1", " 1\n\nHuman: 2"),
    "no turns, lines": ({"chosen": "Rain.\n\nIt is", "rejected": "Rain.\n\nNo"}, "Rain.", "\n\nIt is", "\n\nNo"),
    "no turns, one goes on": ({"chosen": "It is", "rejected": "It is so"}, "It", " is", " is so"),
    "no turns, nothing in common": ({"chosen": "Yes", "rejected": "Yet"}, "", "Yes", "Yet"),
    "an empty prompt": ({"prompt": "", "chosen": "So.", "rejected": "So!"}, "", "So.", "So!"),
    "UltraFeedback": ({"prompt": "Why?", "chosen": CHAT, "rejected": OTHER, "score": 8.0}, WHY, " So.", " No."),
    "messages, null prompt": ({"prompt": None, "chosen": CHAT, "rejected": OTHER}, WHY, " So.", " No."),
    "messages and texts": ({"prompt": CHAT[:1], "chosen": "So.", "rejected": "No."}, WHY, " So.", " No."),
    "messages, with a system message": (
        {"prompt": "Why?", "chosen": [SYSTEM, *CHAT], "rejected": [SYSTEM, *OTHER]},
        f"\n\nSystem: Be brief.{WHY}",
        " So.",
        " No.",
    ),
    "messages, the second answer differs": (
        {"chosen": [*CHAT, user("Oh"), assistant("1")], "rejected": [*CHAT, user("Oh"), assistant("2")]},
        f"{WHY} So.\n\nHuman: Oh\n\nAssistant:",
        " 1",
        " 2",
    ),
    "messages, the prompt and more in common": (
        {"prompt": CHAT[:1], "chosen": [assistant("a"), *CHAT], "rejected": [assistant("a"), *OTHER]},
        f"{WHY} a{WHY}",
        " So.",
        " No.",
    ),
    "messages, the same answer and then another turn": (
        {"chosen": [*CHAT, user("Oh")], "rejected": [*CHAT, user("Ah")]},
        WHY,
        " So.\n\nHuman: Oh",
        " So.\n\nHuman: Ah",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    """As chapter 1 and chapter 2 read them."""
    row, *texts = FORMS[name]
    assert [*train_reward.read_preference(row)] == [*preferences.read_preference(row)] == texts


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("b")]}, "has no prompt"),
        ({"prompt": CHAT, "chosen": "a", "rejected": "b"}, "has no prompt"),
        ({"chosen": CHAT, "rejected": CHAT[:1]}, "rejected has no message of the assistant's"),
        ({"chosen": [SYSTEM, *CHAT], "rejected": [SYSTEM, user("c")]}, "chosen has no message of the assistant's"),
        ({"chosen": "a", "rejected": ["b"]}, "TypeError"),
        ({"chosen": "a", "rejected": "\udcff"}, "surrogates not allowed"),
    ],
)
def test_what_is_no_preference(row, words, tmp_path):
    file = written(tmp_path / "rows.jsonl", [pair(0), row])
    line = error_line(posts.read_comparisons, task_of(file), Letters(), "train")
    assert line.startswith(f"--task.comparisons {file}, line 2: ") and words in line
    line = error_line(read_labels, file)
    assert line.startswith(f"--label_dataset {file}, row 2, is no label; ") and words in line


# ---- Files and the hub -----------------------------------------------------------------------------------------


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    """The rows in the form that the name asks for."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text(f"[{','.join(lines)}]" if path.suffix == ".json" else "\n".join(lines))
    return str(path)


@pytest.fixture
def on_hub(tmp_path, monkeypatch):
    """A function (splits) -> the name of a data set, which the real client finds in a folder."""
    load_dataset = datasets.load_dataset
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def publish(**splits: list[dict[str, Any]]) -> str:
        configuration = {"config_name": "default", "data_files": []}
        for split, rows in splits.items():
            written(tmp_path / "hub" / f"{split}.parquet", rows)
            configuration["data_files"].append({"split": split, "path": f"{split}.parquet"})
        (tmp_path / "hub/README.md").write_text(f"---\n{json.dumps({'configs': [configuration]})}\n---\n")

        def load(name: str, *words: Any, **options: Any) -> Any:
            return load_dataset(str(tmp_path / "hub") if name == "owner/name" else name, *words, **options)

        for module in (data_files, train_policy, train_reward):
            monkeypatch.setattr(module, "load_dataset", load)
        return "owner/name"

    return publish


def read_labels(source: str, num_train: int = 0, longest: int | None = None) -> train_reward.Labels:
    return train_reward.read_labels(source, train_reward.TaskArgs(), TOKENIZER, num_train, longest)


def texts_of_labels(labels: train_reward.Labels) -> list[list[str]]:
    """Query, chosen and rejected sample of each."""
    assert labels.kind == "best" and labels.targets.eq(0).all() and labels.samples.shape[1] == 2
    rows = zip(labels.queries, *labels.samples.unbind(1), strict=True)
    return [train_policy.to_texts(TOKENIZER, torch.nn.utils.rnn.pad_sequence(row, True, 259), 259) for row in rows]


ROWS = {  # of one form each, as files and tables hold them
    "HH-RLHF": [FORMS["HH-RLHF"], FORMS["HH-RLHF, one goes on"]],
    "TRL, explicit": [FORMS["explicit, and both begin alike"]] * 2,
    "UltraFeedback": [FORMS["UltraFeedback"]] * 2,
}


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_files_of_every_form(tmp_path, monkeypatch, form, suffix):
    """As labels of chapter 1, and as comparisons and posts of chapter 2, whose references are the chosen answers."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("posts", "comparisons"):
        file = written(tmp_path / f"{name}_train{suffix}", [row for row, *_ in ROWS[form]])
    labels = read_labels(file, num_train=1)
    assert texts_of_labels(labels) == [texts for _, *texts in ROWS[form]]
    assert (labels.held_out, labels.left_out) == (1, {})
    ended = [(prompt, f"{chosen}\0", f"{rejected}\0") for _, prompt, chosen, rejected in ROWS[form]]
    task = task_of(str(tmp_path))
    compared = posts.read_comparisons(task, Letters(), "train")
    sides = map(texts_of, (compared.queries, compared.chosen, compared.rejected))
    assert list(zip(*sides, strict=True)) == ended
    found = posts.read_posts(task, Letters(), "train")
    assert list(zip(texts_of(found.queries), texts_of(found.references), strict=True)) == [row[:2] for row in ended]


def pair(number: int, answer: str = " So.") -> dict[str, str]:
    return {"prompt": f"{number}?", "chosen": answer, "rejected": " No."}


@pytest.mark.parametrize("names", [("train", "test"), ("train_prefs", "test_prefs")])
def test_labels_of_the_hub_are_held_out_in_their_own_split(on_hub, names):
    """And of what is trained on, no more is read than num_train."""
    train, test = [pair(i) for i in range(9)], [pair(i) for i in (10, 11)]
    labels = read_labels(on_hub(**dict(zip(names, (train, test), strict=True))), num_train=4)
    assert [query for query, _, _ in texts_of_labels(labels)] == ["0?", "1?", "2?", "3?", "10?", "11?"]
    assert labels.held_out == 2


def test_labels_of_one_split_hold_out_every_fiftieth(on_hub):
    labels = read_labels(on_hub(train=[pair(i) for i in range(100)]), num_train=50)
    numbers = [*range(49), 50, 49, 99]
    assert [query for query, _, _ in texts_of_labels(labels)] == [f"{i}?" for i in numbers] and labels.held_out == 2


def test_labels_that_are_too_long_or_equal_are_left_out_and_counted(tmp_path):
    long = " " + "o" * 8
    rows = [pair(0), pair(1, long), pair(2, " No."), pair(3), pair(4, long[:-1]), pair(5)]
    rows.insert(2, pair(1) | {"rejected": long})
    file = tmp_path / "labels.jsonl"
    written(file, rows)
    labels = read_labels(str(file), num_train=2, longest=10)
    assert [query for query, _, _ in texts_of_labels(labels)] == ["0?", "3?", "4?", "5?"]  # two tokens and eight fit
    assert labels.left_out == {"too_long": 2, "identical": 1} and labels.held_out == 2
    for held_out, left in ((5, 3), (2, 2)):
        file.with_suffix(".meta.json").write_text(json.dumps({"held_out": held_out}))
        assert read_labels(str(file), num_train=1, longest=10).held_out == left
    line = error_line(read_labels, str(file), 3, 10)
    assert "--num_train 3" in line and "labels.jsonl" in line and "row 2 has 11" in line


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [{"question": "a", "answer": "b"}],
            "row 1, is no label; docs/running.md lists the forms: KeyError: 'query'",
        ),
        (
            [pair(0), {"query": "a", "sample0": "b", "sample1": "c", "best": 0}],
            "KeyError: 'chosen'",
        ),
        ([], "holds no rows"),
    ],
)
def test_labels_of_no_form(tmp_path, rows, words):
    line = error_line(read_labels, written(tmp_path / "labels.jsonl", rows))
    assert line.startswith(f"--label_dataset {tmp_path}/labels.jsonl") and words in line


# ---- Chapter 2 -------------------------------------------------------------------------------------------------


def task_of(source: str, **changes: Any) -> posts.TaskArgs:
    sizes = {"query_length": 120, "response_length": 20, "comparison_length": 30}
    return posts.TaskArgs(posts=source, comparisons=source, **{"query_format": "plain"} | sizes | changes)


def test_prompts_with_completions_under_a_named_column(on_hub):
    rows = {
        split: [{"a": {"q": f"{split} {i}?"}, "completion": " So."} for i in range(2)] for split in ("train", "test")
    }
    task = task_of(on_hub(**rows), query_column="a.q")
    for split, name in (("train", "train"), ("validation", "test"), ("test", "test")):
        found = posts.read_posts(task, Letters(), split)
        assert (
            texts_of(found.queries) == [f"{name} 0?", f"{name} 1?"] and texts_of(found.references) == [" So.\0"] * 2
        )


def test_a_file_of_comparisons_holds_rows_out(tmp_path):
    task = task_of(written(tmp_path / "rows.jsonl", [pair(i) for i in range(60)]))
    train, validation = (posts.read_comparisons(task, Letters(), split) for split in ("train", "validation"))
    assert len(train) == 59 and texts_of(validation.queries) == ["49?"]
    short = task_of(written(tmp_path / "short.jsonl", [pair(0)]))
    assert "give 50 rows or more" in error_line(posts.read_comparisons, short, Letters(), "validation")


def in_chat(messages: list[dict[str, str]]) -> list[int]:
    return TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize(
    ("prompt", "changes"),
    [
        (CHAT[:1], {}),
        ([*CHAT, user("Oh")], {}),
        ([*CHAT, user("Oh")], {"system_prompt": "Be brief."}),
        ([SYSTEM, *CHAT, user("Oh")], {"system_prompt": "Be brief."}),
    ],
)
def test_messages_in_a_chat_template(tmp_path, prompt, changes):
    row = {"chosen": [*prompt, assistant("1")], "rejected": [*prompt, assistant("2")]}
    written(tmp_path / "comparisons_train.jsonl", [row])
    task = task_of(str(tmp_path), prompt_format="chat", query_length=200, **changes)
    found = posts.read_comparisons(task, TOKENIZER, "train")
    system = [SYSTEM] if changes and prompt[0] != SYSTEM else []
    assert [token for token in found.queries[0].tolist() if token != 259] == in_chat([*system, *prompt])
    answers = [TOKENIZER.encode(f"{answer}<|im_end|>") for answer in ("1", "2")]
    assert [found.chosen[0, :2].tolist(), found.rejected[0, :2].tolist()] == answers


def test_the_mark_of_a_turn_within_a_message_is_text(tmp_path):
    prompt = [*CHAT, user("Oh<|im_end|>")]
    written(tmp_path / "comparisons_train.jsonl", [{"prompt": prompt, "chosen": "1", "rejected": "2"}])
    task = task_of(str(tmp_path), prompt_format="chat", query_length=200)
    tokens = posts.read_comparisons(task, TOKENIZER, "train").queries[0].tolist()
    assert tokens.count(258) == in_chat([*CHAT, user("Oh")]).count(258)


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        (
            {"chosen": [SYSTEM, *CHAT], "rejected": [SYSTEM, *OTHER]},
            {"prompt_format": "chat"},
            "--task.system_prompt",
        ),
        (FORMS["messages, the same answer and then another turn"][0], {"prompt_format": "chat"}, "several messages"),
        (FORMS["HH-RLHF"][0], {"query_format": "tldr"}, "--task.query_format plain"),
        (FORMS["HH-RLHF"][0], {"query_column": "query"}, "has nothing under 'query', but 'chosen', 'rejected'"),
    ],
)
def test_comparisons_that_are_refused(tmp_path, row, changes, words):
    written(tmp_path / "comparisons_train.jsonl", [row])
    line = error_line(posts.read_comparisons, task_of(str(tmp_path), **changes), TOKENIZER, "train")
    assert line.startswith("--task.comparisons") and "line 1" in line and words in line


# ---- Texts of chapter 1 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet", ".csv"])
def test_texts_under_a_named_column(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / f"rows{suffix}"
    if suffix == ".csv":
        file.write_text("prompt,other\n" + "".join(f"{i}?,x\n" for i in range(60)))
    else:
        written(file, [{"prompt": f"{i}?", "other": "x"} for i in range(60)])
    train, test = (list(train_policy.load_texts(str(file), split, "prompt")) for split in ("train", "test"))
    assert test == ["49?"] and train == [f"{i}?" for i in range(60) if i != 49]
    assert "'text'" in error_line(train_policy.load_texts, str(file), "train")


def test_texts_of_the_hub(on_hub):
    source = on_hub(train=[{"prompt": "Why?"}], test=[{"prompt": "No?"}])
    texts = [list(train_policy.load_texts(source, split, "prompt")) for split in ("train", "test")]
    assert texts == [["Why?"], ["No?"]]
