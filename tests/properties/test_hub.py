"""Whatever the presets take from the hub, read by the real clients from a cache of the published layout."""

import hashlib
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import torch
from runs import error_line, tar
from safetensors.torch import save_file
from small_problems import byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from benchmark.interoperability import hub_check
from ppo_rlhf import train_both, train_policy, train_reward
from ppo_rlhf.rlvr import problems
from ppo_rlhf.tldr import all as tldr_all, models, posts
from ppo_rlhf.train_policy import to_texts

CHAPTER_2 = tldr_all.PRESETS["tldr"]
LABELS = {
    "sentiment": ("sentiment/offline_5k", 64, 24),
    "descriptiveness": ("descriptiveness/offline_5k", 64, 24),
    "cnndm": ("cnndm/online_45k", 500, 75),
    "tldr": ("tldr/online_45k", 500, 75),
}

# A story's file: hash, split, lines. Between the lines lie empty ones.
STORIES = {
    "cnn": [
        ("a1", "train", ["LONDON, England (CNN) -- Rain fell.", "It stopped.", "@highlight", "Rain"]),
        ("b2", "test", ["(CNN)The wind rose.", "Nobody slept", "@highlight", "Wind"]),
        ("c3", "validation", ["Snow.", "@highlight", "Snow"]),
    ],
    "dailymail": [
        ("d4", "train", ["By", "Ann Lee", "PUBLISHED:", "14:11 EST, 25 October 2013", "|", "UPDATED:",
                         "15:36 EST, 25 October 2013", "The cat\u2019s in.", "So is the dog.", "@highlight", "Cat"]),
    ],
}  # fmt: skip
POST = {"id": "t3_1", "subreddit": "cats", "title": "A cat", "post": "It slept.\nIt ate.", "summary": "Cat sleeps."}
INFO = {"id": "t3_1", "post": "It slept.", "title": "A cat", "subreddit": "cats", "article": None, "site": None}
ARTICLE = INFO | {"post": None, "article": "Rain fell.", "site": "cnn"}


def comparison(info: dict, texts: list[str], choice: int) -> dict:
    return {
        "info": info,
        "summaries": [{"text": text} for text in texts],
        "choice": choice,
        "batch": "batch3",
        "split": "train",
        "extra": {"confidence": 7 if info is INFO else None},
    }


# ---- The cache -------------------------------------------------------------------------------------------------


def folder_of(cache: Path, name: str, revision: str = "main", kind: str = "datasets") -> Path:
    """Where the cache keeps the files of a revision. kind: datasets or models."""
    repository = cache / f"{kind}--{name.replace('/', '--')}"
    commit = hashlib.sha1(revision.encode()).hexdigest()
    ref, folder = repository / "refs" / revision, repository / "snapshots" / commit
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_parquet(file: Path, *rows: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)


def write_json(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content) + "\n")


def write_data_sets(cache: Path) -> None:
    books = folder_of(cache, "rojagtap/bookcorpus")
    for number, lines in enumerate((range(200), range(200, 16 * 51)), 1):
        (books / f"books_large_p{number}.txt").write_text("".join(f"row {i} , he said .\n" for i in lines))
    for site, stories in STORIES.items():
        files = {f"{site}/stories/{name}.story": "\n\n".join(lines).encode() for name, _, lines in stories}
        (folder_of(cache, "ccdv/cnn_dailymail") / f"{site}_stories.tgz").write_bytes(tar(files))
        for name, split, lines in stories:
            table = folder_of(cache, "abisee/cnn_dailymail") / f"3.0.0/{split}-{name}.parquet"
            write_parquet(table, {"article": " ".join(lines), "highlights": "x", "id": name})
    openai = folder_of(cache, "vwxyzjn/lm-human-preferences")
    for part, texts in {"train": ["One.\n\n\n\nTwo ", "caf\u00e9", "half \ud83d!"], "valid": ["Held out."]}.items():
        write_json(openai / f"tldr/{part}-subset.json", [{"content": text, "summary": ""} for text in texts])
    for name, query_length, response_length in LABELS.values():
        row = {"query": [1, 2, *[50259] * (query_length - 2)]}
        row |= {f"sample{i}": [i] * response_length for i in range(4)}
        write_json(openai / f"{name}.json", [row | {"best": 3}, row | {"best": 0}])
    for split in ("train", "valid", "test"):
        file = folder_of(cache, posts.POSTS_REPOSITORY) / f"{split}.jsonl"
        write_json(file, POST | {"title": f"A {split} cat"})
    comparisons = folder_of(cache, "openai/summarize_from_feedback", "refs/convert/parquet") / "comparisons"
    pair = comparison(INFO, [" Sleep.", " Ate."], 0)
    write_parquet(comparisons / "train/0000.parquet", comparison(INFO, [" It slept.", " It ate."], 1))
    write_parquet(comparisons / "validation/0000.parquet", pair, comparison(ARTICLE, [" Rain.", " Sun."], 0))
    for split in ("train", "test"):
        row = {"question": f"1+1 in {split}?", "answer": "1+1=<<1+1=2>>2\n#### 2"}
        write_parquet(folder_of(cache, "openai/gsm8k") / f"main/{split}-00000-of-00001.parquet", row)


GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 259, "n_positions": 64, "n_ctx": 64,
    "n_embd": 16, "n_layer": 1, "n_head": 2, "activation_function": "gelu_new", "bos_token_id": 256,
    "eos_token_id": 256, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1,
}  # fmt: skip
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 264, "hidden_size": 32,
    "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 64,
    "rotary_pct": 0.25, "rotary_emb_base": 10000, "torch_dtype": "float16", "tie_word_embeddings": False,
    "bos_token_id": 256, "eos_token_id": 256, "use_parallel_residual": True,
}  # fmt: skip
MODELS = {
    "gpt2": GPT2,
    "EleutherAI/pythia-1b-deduped": NEOX,
    "somebody/pickle": GPT2,
    "somebody/pickle@refs/pr/2": GPT2,
}


def write_model(cache: Path, typed: str) -> list[float]:
    """Weights and a configuration with the names of the published models, and a tokenizer of bytes.

    Returns a few logits.
    """
    name, _, revision = typed.partition("@")
    folder, config = folder_of(cache, name, revision or "main", "models"), MODELS[typed]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # numbers that half precision keeps
        parameter.data = torch.randn(parameter.shape, generator=generator).half().float() / 4
    state = {key.removeprefix("transformer."): tensor.contiguous() for key, tensor in model.state_dict().items()}
    if config is GPT2:
        del state["lm_head.weight"]
        state["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    else:
        state = {key: tensor.half() for key, tensor in state.items()}
        state["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9).half()
    if typed == "somebody/pickle":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", config)

    byte_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    if config is NEOX:
        settings = {"eos_token": "<|endoftext|>", "tokenizer_class": "GPTNeoXTokenizer", "model_max_length": 2048}
        write_json(folder / "tokenizer_config.json", settings)
    with torch.no_grad():
        return model(torch.arange(5).unsqueeze(0)).logits[0, -1, :4].tolist()


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    """A cache with everything that the presets use, and a few logits of its models."""
    cache = tmp_path_factory.mktemp("cache")
    write_data_sets(cache)
    return cache, {name: write_model(cache, name) for name in MODELS}


@pytest.fixture(autouse=True)
def cache(filled, tmp_path, monkeypatch) -> Path:
    """The cache, from which alone the clients read."""
    load_dataset, (cache, _) = datasets.load_dataset, filled

    def load(name: str, *words, **options):
        """Posts are loaded by the name of their data set, for which its cache is no folder of plain files."""
        return load_dataset(
            str(folder_of(cache, name)) if name == posts.POSTS_REPOSITORY else name, *words, **options
        )

    for module in (datasets, posts):
        monkeypatch.setattr(module, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "tables")
    return cache


# ---- What is read ----------------------------------------------------------------------------------------------

BOOKS = [" ".join(f"row {i}, he said." for i in range(16 * passage, 16 * passage + 16)) for passage in range(51)]


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        ("books", BOOKS[:49] + BOOKS[50:], BOOKS[49:50]),
        (
            "cnndm",
            ["Rain fell.\n\nIt stopped.", "The cat's in.\n\nSo is the dog."],
            ["The wind rose.\n\nNobody slept"],
        ),
        ("tldr", ["One.\n\nTwo", "caf\u00e9", "half \ufffd!"], ["Held out."]),
    ],
)
def test_texts(name, train, test):
    splits = [train_policy.load_texts(name, split) for split in ("train", "test")]
    assert [[texts[i] for i in range(len(texts))] for texts in splits] == [train, test]


@pytest.mark.parametrize("name", LABELS)
def test_labels_of_chapter_1(name):
    preset, (_, query_length, response_length) = train_both.PRESETS[name], LABELS[name]
    tokenizer = models.load_tokenizer(preset.base_model)
    labels = train_reward.read_labels(preset.reward.label_dataset, preset.task, tokenizer)
    assert labels.queries.shape == (2, query_length) and labels.samples.shape == (2, 4, response_length)
    assert labels.targets.tolist() == [3, 0] and labels.queries[0, :3].tolist() == [1, 2, 259]


def test_posts():
    task, tokenizer = CHAPTER_2.task, models.load_tokenizer(CHAPTER_2.base_model)
    for split, title in (("train", "train"), ("validation", "valid"), ("test", "test")):
        found = posts.read_posts(task, tokenizer, split)
        query = f"SUBREDDIT: r/cats\n\nTITLE: A {title} cat\n\nPOST: It slept.\nIt ate.\n\nTL;DR:"
        texts = [to_texts(tokenizer, tokens, len(tokenizer)) for tokens in (found.queries, found.references)]
        assert texts == [[query], [" Cat sleeps.<|endoftext|>"]]


CAT = "SUBREDDIT: r/cats\n\nTITLE: A cat\n\nPOST: It slept.\n\nTL;DR:"


@pytest.mark.parametrize(
    ("split", "articles", "texts", "confidence"),
    [
        ("train", False, [CAT, " It ate.", " It slept."], "7"),
        ("validation", False, [CAT, " Sleep.", " Ate."], "7"),
        ("validation", True, ["Article:\nRain fell.\n\nTL;DR:", " Rain.", " Sun."], "None"),
    ],
)
def test_comparisons(split, articles, texts, confidence):
    task, tokenizer = CHAPTER_2.task, models.load_tokenizer(CHAPTER_2.base_model)
    found = posts.read_comparisons(task, tokenizer, split, articles=articles)
    columns = (to_texts(tokenizer, rows, len(tokenizer)) for rows in (found.queries, found.chosen, found.rejected))
    assert [text.removesuffix("<|endoftext|>") for (text,) in columns] == texts
    assert found.groups == [{"split": "train", "batch": "batch3", "confidence": confidence}]


@pytest.mark.parametrize("split", ["train", "test"])
def test_problems(split):
    task = problems.TaskArgs(prompt_format="plain")
    found = problems.read_problems(task, models.load_tokenizer("gpt2"), split)
    suffix = ' Let\'s think step by step and output the final answer after "####".'
    assert (found.texts, found.answers) == ([f"1+1 in {split}?{suffix}"], ["2"])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "somebody/pickle"])
def test_models(name, filled):
    assert models.load_tokenizer(name).eos_token_id == 256
    model = train_policy.load_pretrained(name, torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.arange(5).unsqueeze(0)).logits[0, -1, :4]
    assert logits.tolist() == pytest.approx(filled[1][name], abs=1e-5)


@pytest.mark.parametrize("name", ["somebody/pickle", "gpt2@v7"])
def test_a_model_without_safetensors_or_of_no_such_revision(name):
    line = error_line(train_policy.load_pretrained, name, torch.float32)
    assert line.startswith(f"--base_model {name} cannot be loaded from safetensors")


# ---- hub_check.py ----------------------------------------------------------------------------------------------


class Hub:
    """As much of the hub's interface as hub_check.py uses, from the files of a cache. A commit is a folder's path."""

    cache: Path

    def dataset_info(self, name: str, revision: str | None, files_metadata: bool) -> SimpleNamespace:
        folder = folder_of(self.cache, name, revision or "main")
        files = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
        return SimpleNamespace(sha=str(folder), siblings=[SimpleNamespace(rfilename=file, size=1) for file in files])

    def open(self, path: str) -> io.BufferedReader:
        return Path(path.partition("@")[2]).open("rb")

    def get_safetensors_metadata(self, name: str, revision: str | None) -> SimpleNamespace:
        weights = folder_of(self.cache, name, kind="models") / "model.safetensors"
        return SimpleNamespace(parameter_count={"F32": weights.stat().st_size})


def test_hub_check_finds_what_is_missing(cache, tmp_path, monkeypatch, capsys):
    """Three of 19: a file, the weights of a model, and a key of a row."""
    hub = Hub()
    hub.cache = Path(shutil.copytree(cache, tmp_path / "hub"))
    for name in ("HfApi", "HfFileSystem"):
        monkeypatch.setattr(hub_check, name, lambda: hub)
    (folder_of(hub.cache, "ccdv/cnn_dailymail") / "dailymail_stories.tgz").unlink()
    (folder_of(hub.cache, "EleutherAI/pythia-1b-deduped", kind="models") / "model.safetensors").unlink()
    rows = folder_of(hub.cache, "vwxyzjn/lm-human-preferences") / "tldr/valid-subset.json"
    rows.write_text('[{"text": "under another name"}]')
    with pytest.raises(SystemExit, match="1"):
        hub_check.main(hub_check.Args())
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "3 of 19 are missing"
    stories, texts, model = [line for line in lines if line.startswith("MISSING")]
    assert "no dailymail_stories.tgz" in stories and "KeyError: 'content'" in texts and "pythia" in model
