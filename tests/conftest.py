"""What the tests share. They run offline, on one CPU thread, with models that are made on the spot."""

import json
import os
import subprocess
from pathlib import Path

# Before the first import of a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["PPO_RLHF_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same numbers on a machine with a GPU
os.environ["PPO_RLHF_CACHE"] = os.devnull  # where no world can be built

import mistakes
import pytest
import torch
import whole_runs
from runs import TINY_TOOLS, both_arguments, build_tiny_posts, build_tiny_sums, build_tiny_world

torch.set_num_threads(1)

# The files that take longest, longest first: so that several workers, each with a file at a time, end together.
LONGEST = """
    device safety tldr_runs rlvr_runs explain refusals rlvr_async end_to_end faults replay gpu speed invariance traces
    soak check many_seeds compare judge train_policy run
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--changed", action="store_true", help="mistakes only of scripts that differ from git's last commit"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rank = {f"test_{name}.py": number for number, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    if config.getoption("changed"):
        command = ["git", "diff", "--name-only", "--relative", "HEAD"]
        changed = subprocess.check_output(command, cwd=mistakes.PACKAGE, text=True).split()

        def is_needless(item: pytest.Item) -> bool:
            title = item.callspec.params.get("mistake") if hasattr(item, "callspec") else None
            return title is not None and not list(mistakes.places(title, tuple(changed)))

        config.hook.pytest_deselected(items=[item for item in items if is_needless(item)])
        items[:] = [item for item in items if not is_needless(item)]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> whole_runs.MadeOnce:
    return whole_runs.folder_made_once(tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_world(made_once):
    """The folder of a very small tales world: model/, stories.txt, labels/<task>/offline_5k.json (64 + 32 rows)."""
    return made_once("tales", build_tiny_world)


@pytest.fixture(scope="session")
def tiny_posts(made_once):
    """The folder of a very small world of posts: model/, 48 + 16 + 16 posts, 48 + 16 comparisons, world.json."""
    return made_once("posts", build_tiny_posts)


@pytest.fixture(scope="session")
def tiny_sums(made_once):
    """The folder of a very small world of sums: model/, 64 + 32 problems, world.json."""
    return made_once("sums", build_tiny_sums)


@pytest.fixture(scope="session")
def tiny_tools(made_once):
    """The folder of a very small world with a calculator, whose model often writes the end of a call."""
    return made_once("tools", lambda folder: build_tiny_sums(folder, TINY_TOOLS))


@pytest.fixture
def in_a_fresh_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


VOCAB = 29  # tokens of tiny_tokenizer; its padding id


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """One token per character: a..z are 0..25, the full stop 26, the space 27, and <eos> 28."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([*"abcdefghijklmnopqrstuvwxyz. ", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(scope="session")
def tokenizer_with_a_hole(tiny_tokenizer):
    """The tiny tokenizer with z as 29 in place of 25: 29 tokens still, but the largest id is 29, and padding 30."""
    content = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
    content["model"]["vocab"]["z"] = 29
    backend = type(tiny_tokenizer.backend_tokenizer).from_str(json.dumps(content))
    return type(tiny_tokenizer)(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture(scope="session")
def tiny_models():
    """A function (architecture, rows, seed) -> causal language model with random weights, and large ones.

    architecture: one of those below. rows: of the embedding; the tiny tokenizer has 29 tokens.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    extra = {
        "gpt2": {"activation_function": "gelu_new", "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
        "gpt_neox": {"intermediate_size": 32},
        "llama": {"intermediate_size": 32, "num_key_value_heads": 2},
        "mistral": {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 4},
        "qwen2": {"intermediate_size": 32, "num_key_value_heads": 2},
        "qwen3": {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 4},
    }

    def make(architecture: str, rows: int = VOCAB, seed: int = 0):
        ids = {"bos_token_id": None, "eos_token_id": VOCAB - 1, "pad_token_id": None}
        config = AutoConfig.for_model(architecture, vocab_size=rows, **sizes, **extra[architecture], **ids)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
        return model

    return make


@pytest.fixture(scope="session")
def both(made_once, tiny_world) -> whole_runs.Whole:
    """train_both.py on the tiny world, with traces of every second update, the picture of its metrics drawn."""
    arguments = [*both_arguments(tiny_world), "--policy.trace_interval", "2"]
    run = whole_runs.Whole(Path(), "train_both.py", arguments)
    return whole_runs.whole(made_once, "both", run, pictures=True)


@pytest.fixture(scope="session")
def tiny_reward(both) -> Path:
    """The folder of a reward model that was trained for a few steps on the tiny world."""
    return both.model("reward")
