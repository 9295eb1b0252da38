"""Whatever the presets take from the hub, loaded by the real clients from a small hub of the published layout.

Two processes load everything, one with the hub (hub.py) and one after it, with nothing but the cache. Each test looks
at one of the things that they loaded.
"""

import io
import json
import shutil
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hub import folder_of, serve
from processes import Result, launch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from benchmark.interoperability import hub_check
from ppo_rlhf.lib.errors import InputError

CLIENT = Path(__file__).parent / "hub_client.py"
DEAD = "http://127.0.0.1:9"  # nobody listens there
LABELS = {
    "sentiment/offline_5k": 64,
    "descriptiveness/offline_5k": 64,
    "cnndm/online_45k": 500,
    "tldr/online_45k": 500,
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
        ("e5", "test", ["By", "Bo Ek", "The sea is calm.", "@highlight", "Sea"]),
    ],
}  # fmt: skip
POST = {"id": "t3_1", "subreddit": "cats", "title": "A cat", "post": "It slept.\nIt ate.", "summary": "Cat sleeps."}
INFO = {"id": "t3_1", "post": "It slept.", "title": "A cat", "subreddit": "cats", "article": None, "site": None}
ARTICLE = {"id": "x", "post": None, "title": "Rain", "subreddit": None, "article": "Rain fell.", "site": "cnn"}


def comparison(info: dict, texts: list[str], choice: int) -> dict:
    summaries = [{"text": text, "policy": "sup4", "note": None} for text in texts]
    extra = {"confidence": 7 if info is INFO else None}
    return {
        "info": info,
        "summaries": summaries,
        "choice": choice,
        "worker": "w",
        "batch": "batch3",
        "split": "train",
        "extra": extra,
    }


class Publisher:
    """Puts files into the folder of a hub."""

    def __init__(self, root: Path):
        self.root = root

    def file(self, kind: str, name: str, path: str, revision: str = "main") -> Path:
        file = folder_of(self.root, kind, name, revision) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def texts_of_2019(self) -> None:
        for number, lines in enumerate((range(200), range(200, 16 * 51)), 1):
            file = self.file("datasets", "rojagtap/bookcorpus", f"books_large_p{number}.txt")
            file.write_text("".join(f"row {i} , he said .\n" for i in lines))
        for site, stories in STORIES.items():
            archive = self.file("datasets", "ccdv/cnn_dailymail", f"{site}_stories.tgz")
            with tarfile.open(archive, "w:gz") as members:
                for name, _, lines in stories:
                    story = "\n\n".join(lines).encode()
                    member = tarfile.TarInfo(f"{site}/stories/{name}.story")
                    member.size = len(story)
                    members.addfile(member, io.BytesIO(story))
        everything = [story for stories in STORIES.values() for story in stories]
        for split in ("train", "validation", "test"):
            rows = [(name, " ".join(lines)) for name, story_split, lines in everything if story_split == split]
            for i, (name, article) in enumerate(rows):
                file = f"3.0.0/{split}-{i:05}-of-{len(rows):05}.parquet"
                table = {"article": [article], "highlights": ["x"], "id": [name]}
                target = self.file("datasets", "abisee/cnn_dailymail", file)
                pyarrow.parquet.write_table(pyarrow.table(table), target)
        for part, rows in {
            "train": ["One.\n\n\n\nTwo ", "caf\u00e9", "half \ud83d!"],
            "valid": ["Held out."],
        }.items():
            file = self.file("datasets", "vwxyzjn/lm-human-preferences", f"tldr/{part}-subset.json")
            file.write_text(json.dumps([{"id": str(i), "content": row, "summary": ""} for i, row in enumerate(rows)]))

    def labels(self) -> None:
        for name, query_length in LABELS.items():
            response_length = 24 if query_length == 64 else 75
            query = [1, 2, *[50259] * (query_length - 2)]
            row = {"query": query, **{f"sample{i}": [i] * response_length for i in range(4)}}
            file = self.file("datasets", "vwxyzjn/lm-human-preferences", f"{name}.json")
            file.write_text(json.dumps([row | {"best": 3}, row | {"best": 0}]))

    def chapter_2(self) -> None:
        for number, split in enumerate(("train", "valid", "test")):
            file = self.file("datasets", "vwxyzjn/summarize_from_feedback_tldr_3_filtered", f"{split}.jsonl")
            file.write_text(json.dumps(POST | {"title": f"A cat {number}"}) + "\n")
        for split, rows in {
            "train": [comparison(INFO, [" It slept.", " It ate."], 1)],
            "validation": [comparison(INFO, [" Sleep.", " Ate."], 0), comparison(ARTICLE, [" Rain.", " Sun."], 0)],
        }.items():
            path, revision = f"comparisons/{split}/0000.parquet", "refs/convert/parquet"
            file = self.file("datasets", "openai/summarize_from_feedback", path, revision)
            table = pyarrow.Table.from_pylist(rows)
            choice = table.schema.get_field_index("choice")
            table = table.set_column(choice, "choice", table["choice"].cast(pyarrow.int32()))
            pyarrow.parquet.write_table(table, file)
        # main is a script, which nobody may run
        script = self.file("datasets", "openai/summarize_from_feedback", "summarize_from_feedback.py")
        script.write_text("raise SystemExit\n")

    def chapter_3(self) -> None:
        for split in ("train", "test"):
            row = {"question": f"1+1 in {split}?", "answer": "1+1=<<1+1=2>>2\n#### 2"}
            file = self.file("datasets", "openai/gsm8k", f"main/{split}-00000-of-00001.parquet")
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)

    def tokenizer(self, name: str, files: tuple[str, ...], revision: str = "main") -> None:
        """Byte by byte, and an end of text."""
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {token: i for i, token in enumerate([*letters, "<|endoftext|>"])}
        if "tokenizer.json" in files:
            tokenizer = Tokenizer(models.BPE(vocab, []))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.add_special_tokens(["<|endoftext|>"])
            tokenizer.save(str(self.file("models", name, "tokenizer.json", revision)))
        if "vocab.json" in files:
            self.file("models", name, "vocab.json", revision).write_text(json.dumps(vocab))
            self.file("models", name, "merges.txt", revision).write_text("#version: 0.2\n")
        if "tokenizer_config.json" in files:
            config = {"eos_token": "<|endoftext|>", "tokenizer_class": "GPTNeoXTokenizer", "model_max_length": 2048}
            self.file("models", name, "tokenizer_config.json", revision).write_text(json.dumps(config))

    def model(self, name: str, model, config: dict, revision: str = "main", pickle: bool = False) -> None:
        """Weights under the names, and a configuration with the fields, of the published models."""
        self.file("models", name, "config.json", revision).write_text(json.dumps(config))
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if config["model_type"] == "gpt2":
            state = {
                key.removeprefix("transformer."): tensor for key, tensor in state.items() if key != "lm_head.weight"
            }
            state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(config["n_layer"])}
        else:
            state = {key: tensor.half() for key, tensor in state.items()}
            state["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9).half()
        if pickle:
            torch.save(state, self.file("models", name, "pytorch_model.bin", revision))
        else:
            save_file(state, self.file("models", name, "model.safetensors", revision), {"format": "pt"})


GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 257, "n_positions": 64, "n_ctx": 64,
    "n_embd": 16, "n_layer": 1, "n_head": 2, "activation_function": "gelu_new", "bos_token_id": 256,
    "eos_token_id": 256, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1,
}  # fmt: skip
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 264, "hidden_size": 32,
    "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 64,
    "rotary_pct": 0.25, "rotary_emb_base": 10000, "torch_dtype": "float16", "tie_word_embeddings": False,
    "bos_token_id": 256, "eos_token_id": 256, "use_parallel_residual": True,
}  # fmt: skip


def random_model(config: dict):
    """A model with random numbers that half precision keeps."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).half().float() / 4
    return model


def publish(root: Path) -> dict[str, list[float]]:
    """Everything that the presets use. Returns a few logits of each model."""
    publisher, logits = Publisher(root), {}
    publisher.texts_of_2019()
    publisher.labels()
    publisher.chapter_2()
    publisher.chapter_3()
    gpt2, neox = random_model(GPT2), random_model(NEOX)
    publisher.model("openai-community/gpt2", gpt2, GPT2)
    publisher.tokenizer("openai-community/gpt2", ("tokenizer.json", "vocab.json"))
    publisher.model("EleutherAI/pythia-1b-deduped", neox, NEOX)
    publisher.tokenizer("EleutherAI/pythia-1b-deduped", ("tokenizer.json", "tokenizer_config.json"))
    publisher.model("somebody/pickle", gpt2, GPT2, pickle=True)
    publisher.tokenizer("somebody/pickle", ("vocab.json",))
    publisher.model("somebody/pickle", gpt2, GPT2, revision="refs/pr/2")
    publisher.tokenizer("somebody/pickle", ("vocab.json",), revision="refs/pr/2")
    for name, model in {"gpt2": gpt2, "neox": neox}.items():
        with torch.no_grad():
            logits[name] = model(torch.arange(5).unsqueeze(0)).logits[0, -1, :4].tolist()
    return logits


def run_client(folder: Path, address: str, script: str | Path, *arguments: str | Path) -> Result:
    """Run a script that asks the hub at an address and keeps in the folder what it gets."""
    hub = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address, "HF_HOME": str(folder / "home"), "HF_TOKEN": "hf_token"}
    return launch(script, *map(str, arguments), folder=folder, **hub)


def loaded(result: Result) -> dict:
    assert result.status == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def hub_root(tmp_path_factory):
    """The folder of a hub with everything that the presets use, and a few logits of its models."""
    root = tmp_path_factory.mktemp("hub")
    return root, publish(root)


@pytest.fixture(scope="module")
def answers(hub_root, tmp_path_factory):
    """What the client read with the hub, and what it read without."""
    folder, (root, logits) = tmp_path_factory.mktemp("client"), hub_root
    trained = folder / "policy"
    trained.mkdir()
    for file in folder_of(root, "models", "openai-community/gpt2").iterdir():
        (trained / file.name).write_bytes(file.read_bytes())
    with serve(root) as hub:
        online = loaded(run_client(folder, hub.address, CLIENT, trained))
    return {"online": online, "offline": loaded(run_client(folder, DEAD, CLIENT, "")), "logits": logits}


both = pytest.mark.parametrize("when", ["online", "offline"])
BOOKS = [" ".join(f"row {i}, he said." for i in range(16 * passage, 16 * passage + 16)) for passage in range(51)]
CAT = "SUBREDDIT: r/cats\n\nTITLE: A cat\n\nPOST: It slept.\n\nTL;DR:"


@both
@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "books, train": BOOKS[:49] + BOOKS[50:],
        "books, test": BOOKS[49:50],
        "cnndm, train": ["Rain fell.\n\nIt stopped.", "The cat's in.\n\nSo is the dog."],
        "cnndm, test": ["The wind rose.\n\nNobody slept", "Bo Ek\n\nThe sea is calm."],
        "tldr, train": ["One.\n\nTwo", "caf\u00e9", "half \ufffd!"],
        "tldr, test": ["Held out."],
        "queries of cnndm": ["Rain fell.\n\n"] * 2 + ["The cat's in.\n\n"],
        "queries of tldr": ["One.\n\nTwo", "caf\u00e9", "half \ufffd!"],
    }.items(),
)
def test_texts(answers, when, name, expected):
    assert answers[when][name] == expected


@both
@pytest.mark.parametrize("name", ["sentiment", "descriptiveness"])
def test_queries_of_books(answers, when, name):
    """Between full stops, at most 64 tokens, and a token here is a letter."""
    queries = answers[when][f"queries of {name}"]
    assert len(queries) == 3
    for query in queries:
        assert query.startswith(" row ") and query.endswith(", he said.") and 30 < len(query) <= 64


@both
@pytest.mark.parametrize("name", LABELS)
def test_labels(answers, when, name):
    query, response = (64, 24) if "offline" in name else (500, 75)
    shapes = [[2, query], [2, 4, response]]
    assert answers[when][f"labels of {name.split('/')[0]}"] == [*shapes, [3, 0], [1, 2, 257]]


@both
def test_posts(answers, when):
    for number, split in enumerate(("train", "validation", "test")):
        query = f"SUBREDDIT: r/cats\n\nTITLE: A cat {number}\n\nPOST: It slept.\nIt ate.\n\nTL;DR:"
        assert answers[when][f"posts, {split}"] == [[query], [" Cat sleeps.<|endoftext|>"]]


@both
def test_comparisons(answers, when):
    end, group = "<|endoftext|>", {"split": "train", "batch": "batch3"}
    confident, unsure = group | {"confidence": "7"}, group | {"confidence": "None"}
    expected = {
        "train": [[CAT], [f" It ate.{end}"], [f" It slept.{end}"], [confident]],
        "validation": [[CAT], [f" Sleep.{end}"], [f" Ate.{end}"], [confident]],
        "articles": [["Article:\nRain fell.\n\nTL;DR:"], [f" Rain.{end}"], [f" Sun.{end}"], [unsure]],
    }
    for name, comparisons in expected.items():
        assert answers[when][f"comparisons, {name}"] == comparisons, name


@both
@pytest.mark.parametrize("split", ["train", "test"])
def test_problems(answers, when, split):
    suffix = ' Let\'s think step by step and output the final answer after "####".'
    assert answers[when][f"problems, {split}"] == [[f"1+1 in {split}?{suffix}"], ["2"]]


@both
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gpt2", "gpt2"),
        ("EleutherAI/pythia-1b-deduped", "neox"),
        ("uploaded", "gpt2"),
        ("uploaded to company", "gpt2"),
    ],
)
def test_models(answers, when, name, model):
    """As the hub has them, and as they were uploaded."""
    assert answers[when][name] == pytest.approx(answers["logits"][model], abs=1e-5)


@both
def test_a_model_without_safetensors(answers, when):
    line = answers[when]["pickle"]
    assert line.startswith("error: --base_model somebody/pickle cannot be loaded from safetensors")
    tokens, *logits = answers[when]["pickle's safe revision"]
    assert tokens == 257 and logits == pytest.approx(answers["logits"]["gpt2"], abs=1e-5)


@both
def test_no_such_revision(answers, when):
    assert answers[when]["no such revision"].startswith("error: --base_model gpt2@v7 cannot be loaded")


def test_the_upload_says_nothing(answers):
    """The card has what the hub asks for."""
    assert answers["online"]["upload"] is None
    assert not [warning for warning in answers["online"]["warnings"] if "metadata" in warning]


def test_hub_check_finds_everything(answers):
    assert answers["online"]["hub check"][-2:] == ["all 19 are there", "0"]


def test_hub_check_finds_what_is_missing(hub_root, tmp_path):
    shutil.copytree(hub_root[0], tmp_path / "hub")
    for kind, name, file in (
        ("datasets", "ccdv/cnn_dailymail", "dailymail_stories.tgz"),
        ("datasets", "vwxyzjn/lm-human-preferences", "cnndm/online_45k.json"),
        ("models", "EleutherAI/pythia-1b-deduped", "model.safetensors"),
    ):
        (folder_of(tmp_path / "hub", kind, name) / file).unlink()
    rows = folder_of(tmp_path / "hub", "datasets", "vwxyzjn/lm-human-preferences") / "tldr/valid-subset.json"
    rows.write_text('[{"text": "under another name"}]')
    with serve(tmp_path / "hub") as hub:
        incomplete = run_client(tmp_path, hub.address, hub_check.__file__)
    assert incomplete.status == 1
    *lines, last = incomplete.stdout.splitlines()
    assert last == "4 of 19 are missing"
    missing = [line for line in lines if line.startswith("MISSING")]
    for line, what, reason in zip(
        missing,
        ("cnndm stories", "tldr valid", "labels cnndm", "model"),
        ("no dailymail_stories.tgz", "KeyError: 'content'", "no cnndm/online_45k.json", "safetensors"),
        strict=True,
    ):
        assert what in line and reason in line
    with pytest.raises(InputError, match="this needs a network"):
        hub_check.main(hub_check.Args())
