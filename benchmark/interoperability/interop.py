"""Models of chapter 2 go to TRL and come back: a reward model and a policy that both sides can use.

    python benchmark/interoperability/interop.py   # trains two small models first
    python benchmark/interoperability/interop.py --sft models/<run>/sft --reward models/<run>/reward
    python benchmark/interoperability/interop.py --python <environment with TRL>/bin/python

On tales, without a network, on a CPU. TRL runs in an environment of its own, that of speed.py, unless --python names
another. What happens, in this order:

    1. our sft and reward model open in TRL: scores, values and log-probs of the same rows of tokens, next to ours
    2. PPOTrainer trains the policy for a few updates: sft is policy and reference, reward is reward and value model
    3. the policy that TRL saved goes on in tldr_policy.py, with the same reward model
    4. the policy and the critic that tldr_policy.py saved open in TRL, and PPOTrainer trains them for one update

The models themselves cross as they are. TRL needs a padding token in the tokenizer, and saves that tokenizer with the
policy; interop_trl.py adds it on the way there and puts ours back on the way home. The table at the end has one row
for each check; the exit status is 1 if one fails.
"""

import csv
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers.utils import logging

from benchmark.cost import speed
from benchmark.cost.speed_runs import as_argv
from benchmark.curves.compare import markdown
from ppo_rlhf.lib.errors import InputError, exit_with
from ppo_rlhf.lib.files import write_json
from ppo_rlhf.lib.models import load_pretrained, load_reward_model, load_tokenizer
from ppo_rlhf.lib.posts import TASKS, TaskIds, read_posts, task_ids
from ppo_rlhf.lib.run import commit, cpu_name
from ppo_rlhf.tldr_policy import ActorCritic, response_masks

ROOT = Path(__file__).resolve().parents[2]
TASK = TASKS["posts"]
TOLERANCE = 1e-4  # of scores, values and log-probs, float32 on both sides
SFT = ("--num_train", "4096", "--eval_posts", "16")  # with fewer posts, hardly a summary ends
REWARD = ("--num_train", "512", "--normalize_posts", "256")
ROWS = 64  # held-out posts with a response each, on which both sides are compared
UPDATES, BATCH_SIZE, LR = 3, 32, 1e-4  # of TRL, and then of ours


@dataclass(frozen=True)
class Args:
    sft: Path | None = None
    """fine-tuned model, models/<run>/sft; None: a small one is trained"""
    reward: Path | None = None
    """reward model that started from it, models/<run>/reward; None: a small one is trained"""
    python: Path | None = None
    """interpreter of an environment with TRL; None: that of speed.py, which is made if it is not there"""
    folder: Path = ROOT / "benchmark" / "runs" / "interop"
    """where models, runs and logs are kept"""
    output: Path = ROOT / "benchmark" / "results" / "interop"
    """folder that gets interop.json: checks, metrics, versions and commit"""


# ---- Checks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    difference: float
    limit: float
    above: bool = False  # a control: the difference must be above the limit

    @property
    def passed(self) -> bool:
        """NaN never passes."""
        return self.difference > self.limit if self.above else self.difference <= self.limit


def check_table(checks: list[Check]) -> list[dict[str, str]]:
    return [
        {
            "check": check.name,
            "difference": f"{check.difference:.2g}",
            "limit": f"{'above' if check.above else 'at most'} {check.limit:g}",
            "passed": "yes" if check.passed else "**no**",
        }
        for check in checks
    ]


def exit_status(checks: list[Check]) -> int:
    return 0 if all(check.passed for check in checks) else 1


def largest_difference(ours: torch.Tensor, theirs: list, mask: torch.Tensor | None = None) -> float:
    """Between numbers of one shape, where the mask is True. NaN if a number that counts is NaN."""
    difference = (ours.double() - torch.tensor(theirs, dtype=torch.float64)).abs()
    return (difference if mask is None else difference[mask]).max().item()


def count_not_finite(updates: list[dict[str, Any]]) -> int:
    """Numbers among the metrics that are NaN or infinite; at least 1 if there are no metrics."""
    values = [value for update in updates for value in update.values()]
    return sum(not math.isfinite(value) for value in values) if values else 1


# ---- Rows of tokens that both sides read -----------------------------------------------------------------------


def with_endless_rows(references: torch.Tensor, ids: TaskIds) -> torch.Tensor:
    """References (rows, response_length) as responses; in every fourth row random tokens that never end.

    So both kinds are there: the end-of-text token with padding after it, and neither of them.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(ids.pad - 1, references.shape, generator=generator)
    tokens += tokens >= ids.eos  # any id of the tokenizer but that of the end of text
    endless = torch.arange(len(references)) % 4 == 3  # (rows,)
    return torch.where(endless.unsqueeze(1), tokens, references)


def without_padding(queries: torch.Tensor, pad_id: int) -> list[list[int]]:
    return [row[row != pad_id].tolist() for row in queries]


@torch.no_grad()
def our_numbers(
    policy: Path, reward: Path, value: Path, queries: torch.Tensor, responses: torch.Tensor, pad_id: int
) -> dict[str, torch.Tensor]:
    """Scores (rows,), and values and log-probs (rows, response_length), as tldr_policy.py computes them."""
    reward_model, critic = (load_reward_model(folder, torch.float32) for folder in (reward, value))
    actor_critic = ActorCritic(load_pretrained(str(policy), torch.float32), critic, pad_id)
    query_responses = torch.cat([queries, responses], dim=1)
    logprobs, _, values = actor_critic(query_responses, pad_id, queries.shape[1], TASK.temperature)
    return {"scores": reward_model(query_responses, pad_id), "values": values, "logprobs": logprobs}


def comparison(
    where: str, ours: dict[str, torch.Tensor], theirs: dict[str, Any], responses: torch.Tensor, pad_id: int
) -> list[Check]:
    """Both sides' numbers for the same rows, where they mean something."""
    mask, value_mask = response_masks(responses, pad_id)
    return [
        Check(f"{where}: scores", largest_difference(ours["scores"], theirs["scores"]), TOLERANCE),
        Check(f"{where}: values", largest_difference(ours["values"], theirs["values"], value_mask), TOLERANCE),
        Check(f"{where}: log-probs", largest_difference(ours["logprobs"], theirs["logprobs"], mask), TOLERANCE),
    ]


# ---- Processes -------------------------------------------------------------------------------------------------


def run_logged(command: list[str], folder: Path, log: str, **environment: str) -> None:
    """Run a command in a folder, offline and on the CPU; its output goes to a file there."""
    print(f"{log} ...", flush=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **environment}
    with (folder / f"{log}.log").open("w") as file:
        status = subprocess.run(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT
        ).returncode
    if status:
        print("\n".join((folder / f"{log}.log").read_text().splitlines()[-15:]), file=sys.stderr)
        raise InputError(f"{log} ended with status {status}; the end of {folder / log}.log is above")


def train_here(folder: Path, script: str, *flags: str) -> Path:
    """Run one of our scripts with the preset of tales. Returns models/<run> that it made."""
    before = set(folder.glob("models/*"))
    command = [sys.executable, str(ROOT / "ppo_rlhf" / f"{script}.py"), "--preset", "posts", *flags]
    run_logged(command, folder, script, PYTHONPATH=str(ROOT))
    (made,) = set(folder.glob("models/*")) - before
    return made


def train_there(python: str, folder: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """interop_trl.py in TRL's environment. The policy that it trains lands in <name>/ of the folder."""
    write_json(folder / f"{name}_settings.json", {**settings, "output": str(folder / name)})
    script = str(Path(__file__).with_name("interop_trl.py"))
    files = [str(folder / f"{name}_{part}.json") for part in ("settings", "result")]
    Path(files[1]).unlink(missing_ok=True)
    run_logged([python, script, *files], folder, name)
    return json.loads(Path(files[1]).read_text())


def metrics_of(run: Path) -> list[dict[str, float]]:
    """metrics.csv of a run."""
    with (run / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def row_facts(queries: torch.Tensor, responses: torch.Tensor, ids: TaskIds) -> dict[str, int]:
    """How many of the rows are of which kind."""
    return {
        "queries": len(queries),
        "padded queries": (queries == ids.pad).any(1).sum().item(),
        "responses that end": (responses == ids.eos).any(1).sum().item(),
        "padded responses": (responses == ids.pad).any(1).sum().item(),
    }


def save_report(args: Args, facts: dict[str, Any], checks: list[Check], updates: dict[str, list]) -> None:
    """interop.json."""
    packages = ("torch", "transformers", "accelerate", "tokenizers")
    report = {
        "commit": commit(),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in packages},
        **facts,
        "arguments": {"rows": ROWS, "updates": UPDATES, "batch_size": BATCH_SIZE, "lr": LR},
        "checks": [asdict(check) | {"passed": check.passed} for check in checks],
        "updates": updates,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / "interop.json", report)


# ---- There and back --------------------------------------------------------------------------------------------


def check_arguments(args: Args) -> None:
    """Refuse what cannot be meant."""
    if args.reward and not args.sft:
        raise InputError("--reward needs --sft, the model that it started from")
    if args.python and not args.python.is_file():
        raise InputError(f"--python {args.python}: no such file")


def main(args: Args) -> int:
    check_arguments(args)
    python = str(args.python.absolute()) if args.python else speed.peers_python(speed.Args())
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sft = args.sft.resolve() if args.sft else train_here(folder, "tldr_sft", *SFT) / "sft"
    started_from = ("--base_model", str(sft))
    reward = (
        args.reward.resolve() if args.reward else train_here(folder, "tldr_reward", *started_from, *REWARD) / "reward"
    )
    tokenizer = load_tokenizer(str(sft))
    ids = task_ids(TASK, tokenizer)
    held_out = read_posts(TASK, tokenizer, "validation", ROWS)
    queries, responses = held_out.queries, with_endless_rows(held_out.references, ids)
    settings = {
        "reward": str(reward),
        "reference": str(sft),
        "queries": queries.tolist(),
        "responses": responses.tolist(),
        "training_queries": without_padding(read_posts(TASK, tokenizer, "train", 512 + BATCH_SIZE).queries, ids.pad),
        "response_length": TASK.response_length,
        "temperature": TASK.temperature,
        "batch_size": BATCH_SIZE,
        "lr": LR,
    }
    mask, _ = response_masks(responses, ids.pad)
    tokens = (queries, responses, ids.pad)

    # 1. Ours in TRL, and 2. TRL trains.
    models = {"policy": str(sft), "value": str(reward)}
    there = train_there(python, folder, "trl_policy", settings | models | {"updates": UPDATES})
    numbers = our_numbers(sft, reward, reward, *tokens)
    checks = [
        Check("padding id of both sides", abs(there["pad_id"] - ids.pad), 0),
        *comparison("ours in TRL", numbers, there, responses, ids.pad),
        Check("TRL's updates: metrics that are not finite", count_not_finite(there["updates"]), 0),
        Check("TRL's first update: objective/kl", abs(there["updates"][0]["objective/kl"]), TOLERANCE),
    ]

    # 3. TRL's policy goes on here.
    policy = folder / "trl_policy"
    flags = {
        "base_model": policy,
        "rewards.trained_model": reward,
        "ppo.total_episodes": BATCH_SIZE * UPDATES,
        "ppo.batch_size": BATCH_SIZE,
        "ppo.lr": LR,
        "eval_posts": 16,
        "eval_interval": 0,
    }
    made = train_here(folder, "tldr_policy", *as_argv(flags))
    updates = metrics_of(folder / "runs" / made.name)
    logprobs = our_numbers(policy, reward, reward, *tokens)["logprobs"]
    moved = largest_difference(numbers["logprobs"], there["new_logprobs"], mask)
    checks += [
        Check("TRL's policy here: log-probs", largest_difference(logprobs, there["new_logprobs"], mask), TOLERANCE),
        Check("control: how far TRL moved those log-probs", moved, 100 * TOLERANCE, above=True),
        Check("control: episodes that end in our first update", updates[0]["val/num_eos_tokens"], 0, above=True),
        Check("our first update: ratio - 1", updates[0]["val/first_ratio_gap"], 0),
        Check("our first update: objective/kl", abs(updates[0]["objective/kl"]), 0),
        Check("our updates: metrics that are not finite", count_not_finite(updates), 0),
    ]

    # 4. What came of it, in TRL once more.
    models = {name: str(made / name) for name in ("policy", "value")}
    again = train_there(python, folder, "trl_policy_again", settings | models | {"updates": 1})
    numbers = our_numbers(made / "policy", reward, made / "value", *tokens)
    checks += [
        *comparison("ours in TRL again", numbers, again, responses, ids.pad),
        Check("TRL's update of it: metrics that are not finite", count_not_finite(again["updates"]), 0),
    ]

    print("", markdown(check_table(checks)), sep="\n")
    facts = {"versions_of_trl": there["versions"], "rows": row_facts(queries, responses, ids)}
    updates_of = {"trl": there["updates"], "ours": updates, "trl again": again["updates"]}
    save_report(args, facts, checks, updates_of)
    return exit_status(checks)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except InputError as error:
        exit_with(str(error))
