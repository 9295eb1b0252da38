"""What the tests share. They run offline, on one CPU thread, with models that are made on the spot."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Before the first import of a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same numbers on a machine with a GPU
os.environ["PPO_RLHF_CACHE"] = os.devnull  # where no world can be built

import mistakes
import pytest
import torch
import whole_runs
from runs import (
    TINY_TOOLS,
    both_arguments,
    build_tiny_posts,
    build_tiny_sums,
    build_tiny_world,
    posts_arguments,
    sums_arguments,
)

torch.set_num_threads(1)

# The files that take longest, longest first: so that several workers, each with a file at a time, end together.
LONGEST = """
    device safety tldr_runs rlvr_runs explain refusals rlvr_async end_to_end faults replay gpu speed house invariance
    micro traces check many_seeds compare judge train_policy run loop annotate
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


@pytest.fixture(autouse=True)
def signals_as_before():
    """A run that is cut off in a test's process leaves its handlers."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


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
    """train_both.py on the tiny world, with traces of every second update."""
    # The policy changes so little that few ratios leave a wider range.
    traces_and_clipping = ["--policy.trace_interval", "2", "--policy.ppo.cliprange", "0.01"]
    arguments = [*both_arguments(tiny_world), *traces_and_clipping]
    run = whole_runs.Whole(Path(), "train_both.py", arguments)
    return whole_runs.whole(made_once, "both", run)


@pytest.fixture(scope="session")
def tiny_reward(both) -> Path:
    """The folder of a reward model that was trained for a few steps on the tiny world."""
    return both.model("reward")


# ---- A browser -------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
QUIET += "--disable-component-update --disable-sync"
NO_CHROMIUM = "there is no Chromium"
LOCAL = ("file:", "blob:", "data:")


@pytest.fixture(scope="module")
def browser() -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api", reason=NO_CHROMIUM)
    if not CHROMIUM:
        pytest.skip(NO_CHROMIUM)
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser):
    """A function (file, options of the context) -> the page in a browser; at the end nothing was wrong with it."""
    wrong, contexts = [], []

    def open_page(path: Path, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(LOCAL) else wrong.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def pytest_terminal_summary(terminalreporter) -> None:
    """Say which tests were skipped because there is no browser, and how to get one."""
    skipped = [
        report.nodeid for report in terminalreporter.getreports("skipped") if NO_CHROMIUM in str(report.longrepr)
    ]
    if skipped:
        files = ", ".join(sorted({node.partition("::")[0] for node in skipped}))
        terminalreporter.write_line(
            f"{len(skipped)} tests of the report's page in {files} were skipped because they need a browser. To run "
            f"them, install Chromium, with `apt-get install chromium` or `brew install chromium`, and playwright."
        )


# ---- Whole runs of chapters 2 and 3: in float64, four updates with traces of 0, 2 and 3, checkpoints of 2 and 4 ----

# 48 rows in batches of 20: the last batch of a pass has 8, and of two processes one gets none of them.
STAGES = (
    "--sft.dtype float64 --sft.batch_size 20 --sft.epochs 2 --sft.lr 0.03 --sft.save_interval 2 --sft.eval_posts 0 "
    "--reward.dtype float64 --reward.batch_size 20 --reward.lr 0.01 --reward.save_interval 2 "
    "--reward.normalize_posts 0"
)
SUMMARIES = (
    "--policy.dtype float64 --policy.ppo.total_episodes 80 --policy.ppo.batch_size 20 --policy.ppo.nminibatches 2 "
    "--policy.ppo.noptepochs 2 --policy.ppo.lr 1e-3 --policy.save_interval 2 --policy.eval_interval 3 "
    "--policy.eval_posts 0 --policy.log_interval 1 --policy.trace_interval 2 "
    "--policy.rewards.adaptive_kl.target 0.05 --policy.rewards.adaptive_kl.horizon 200"
)
SUMS = "--ppo.total_episodes 64 --save_interval 2 --trace_interval 2 --rewards.verifier own_functions:letters"
CRITIC = (
    f"{SUMS} --ppo.critic_lr 0.01 --ppo.lam_alpha 0.5 --ppo.critic_lam 0.9 --ppo.nll_coef 0.1 --ppo.critic_warmup 1 "
    "--ppo.samples_per_prompt 2 --rewards.kl_coef 0.1 --rewards.adaptive_kl.target 1 "
    "--ppo.entropy_coef 0.02"
)
GROUPS = (
    f"{SUMS} --ppo.advantage grpo --ppo.samples_per_prompt 4 --ppo.filter_groups --ppo.critic_warmup 0 "
    "--rewards.kl_coef 0.1"
)


@pytest.fixture(scope="session")
def all_three(made_once, tiny_posts) -> whole_runs.Whole:
    """tldr/all.py: SFT, a reward model and a policy. Evaluations are greedy."""
    task = ["--base_model", f"{tiny_posts}/model", "--task.eval_temperature", "1e-6"]
    stages = [*STAGES.split(), *SUMMARIES.split()]
    run = whole_runs.Whole(Path(), "tldr/all.py", [*posts_arguments(tiny_posts), *task, *stages])
    return whole_runs.whole(made_once, "all_three", run)


@pytest.fixture(scope="session")
def lora(made_once, all_three, tiny_posts) -> whole_runs.Whole:
    """tldr/policy.py with adapters, on the models of `all_three`."""
    models = ["--base_model", str(all_three.model("sft")), "--rewards.trained_model", str(all_three.model("reward"))]
    settings = SUMMARIES.replace("--policy.", "--") + " --task.eval_temperature 1e-6"
    adapters = "--lora.rank 2 --lora.target_modules all-linear --ppo.lr 0.1"
    arguments = [*posts_arguments(tiny_posts), *models, *settings.split(), *adapters.split()]
    return whole_runs.whole(made_once, "lora", whole_runs.Whole(Path(), "tldr/policy.py", arguments))


@pytest.fixture(scope="session")
def critic(made_once, tiny_sums) -> whole_runs.Whole:
    """rlvr/policy.py with a critic that learns alone at first, and an adaptive KL coefficient; prompts come twice."""
    run = whole_runs.Whole(Path(), "rlvr/policy.py", [*sums_arguments(tiny_sums), *CRITIC.split()])
    return whole_runs.whole(made_once, "critic", run)


@pytest.fixture(scope="session")
def groups(made_once, tiny_sums) -> whole_runs.Whole:
    """rlvr/policy.py in groups of four responses to a prompt, of which those with equal scores are left out."""
    run = whole_runs.Whole(Path(), "rlvr/policy.py", [*sums_arguments(tiny_sums), *GROUPS.split()])
    return whole_runs.whole(made_once, "groups", run)


@pytest.fixture(scope="session")
def groups_on_two(made_once, groups) -> whole_runs.Whole:
    """The run of `groups` on two processes, which read a few rows at a time."""
    few = ["--ppo.local_micro_batch_size", "2", "--ppo.local_rollout_batch_size", "4"]
    run = whole_runs.Whole(Path(), groups.script, [*groups.arguments, *few], processes=2)
    return whole_runs.whole(made_once, "groups_on_two", run)
