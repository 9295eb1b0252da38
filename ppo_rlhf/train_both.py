"""Train a reward model, then a policy against it: `train_reward.py` and `train_policy.py` in a row.

Preset, seed, base model and task are given once. Every other argument of the two reaches them as --reward.*
and --policy.*, for example --reward.lr 1e-4 --policy.ppo.noptepochs 2. At the end, the language model and the trained
policy continue queries that neither part has seen, and a few sentences say what happened.

This file needs the two next to it, and nothing else of ours.

    python ppo_rlhf/train_both.py --preset tales                                          # no network, one CPU
    torchrun --nproc_per_node 2 ppo_rlhf/train_both.py --preset tales                     # two processes on a CPU
    python ppo_rlhf/train_both.py                                                         # sentiment, GPT-2, one GPU
    accelerate launch --num_processes 8 ppo_rlhf/train_both.py --preset descriptiveness --reward.track --policy.track
    python ppo_rlhf/train_both.py --resume runs/<run>                                     # either of the two runs

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pkgutil
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import tyro
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from pydantic import NonNegativeInt

if __package__:
    from ppo_rlhf import train_policy, train_reward
else:  # this file is run, and its neighbours are next to it
    import train_policy
    import train_reward


@dataclass(frozen=True, kw_only=True)
class Args(train_policy.Arguments):
    script: ClassVar[str] = "train_both"  # begins the name of the file that keeps the arguments
    preset: str = "sentiment"
    """names a set of defaults: sentiment, descriptiveness, cnndm, tldr, tales, tales-descriptiveness, reviews"""
    seed: NonNegativeInt = 1
    """seed of both parts"""
    base_model: str = "gpt2"
    """causal language model that both parts start from: a folder, a name on the hub, or `tales`"""
    trust_remote_code: bool = False
    """run Python code that comes with the base model"""
    resume: str = ""
    """folder of either of the two runs to resume, runs/<run>, with the arguments that they began with"""
    task: train_policy.TaskArgs = field(default_factory=train_policy.TaskArgs)
    """queries and responses of both parts"""
    reward: train_reward.Args = field(default_factory=train_reward.Args)
    """arguments of train_reward.py"""
    policy: train_policy.Args = field(default_factory=train_policy.Args)
    """arguments of train_policy.py"""


SHARED = ("preset", "seed", "base_model", "trust_remote_code", "resume", "task")  # by both parts
PRESETS = {
    name: Args(
        preset=name,
        base_model=train_policy.PRESETS[name].base_model,
        task=train_policy.TASKS[name],
        reward=train_reward.PRESETS[name],
        policy=train_policy.PRESETS[name],
    )
    for name in train_policy.TASKS
}
EVALUATION_QUERIES = 400


# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args) -> tuple[Path, Path]:
    """Train both parts; return the folders of the reward model and of the policy, on every process.

    Raises InputError, a ValueError, before the first part starts if anything is wrong with the arguments of either.
    """
    args = train_policy.checked(args)
    with messages_of("policy", args.policy):
        accelerator = train_policy.make_accelerator(args.policy.dtype)
    # Both have one task, and the policy one source of scores.   train_policy.py#L408-L417
    reward_args, policy_args = part_args(args, args.reward), part_args(args, args.policy)
    check(args, reward_args, policy_args, accelerator)
    timestamp = begin(args, accelerator)

    reward_folder = train_part(train_reward, "reward", reward_args, timestamp, accelerator)
    rewards = dataclasses.replace(policy_args.rewards, trained_model=os.path.relpath(reward_folder))
    policy_args = dataclasses.replace(policy_args, rewards=rewards)
    policy_folder = train_part(train_policy, "policy", policy_args, timestamp, accelerator)

    rows = compare(policy_args, policy_folder, accelerator)
    if accelerator.is_main_process:
        runs = [folder.parents[2] / "runs" / folder.parent.name for folder in (reward_folder, policy_folder)]
        file = runs[1] / "comparison.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print("\nHeld-out queries, continued by the language model and by the trained policy")
        for row in rows[:4]:
            print_row(row)
        print_changes(rows)
        print("", *summary(rows, *map(train_policy.read_meta, runs)), "", sep="\n")
        print(f"samples     {os.path.relpath(file)}")
        print(f"read more   python ppo_rlhf/sample.py --policy {os.path.relpath(policy_folder)}")
        print("curves      python ppo_rlhf/report")
    accelerator.wait_for_everyone()
    return reward_folder, policy_folder


def begin(args: Args, accelerator: Accelerator) -> int:
    """Choose the time stamp of all runs, and write a file by which --resume finds the arguments of all again.

    If runs are resumed, they have one.
    """
    if args.resume:
        return int(Path(args.resume).name.rpartition("__")[2])
    timestamp = int(time.time())
    while list(Path("runs").glob(f"*__{timestamp}*")):  # it names another run
        timestamp += 1
    (timestamp,) = broadcast_object_list([timestamp])
    if accelerator.is_main_process:
        file = Path("runs", f"{args.script}__{args.preset}__{args.seed}__{timestamp}.json")
        file.parent.mkdir(exist_ok=True)
        train_policy.write_json(file, dataclasses.asdict(args))
    return timestamp


def train_part(module: Any, kind: str, part: Any, timestamp: int, accelerator: Accelerator) -> Path:
    """Train a part, or resume it with the arguments that it began with, or skip it if it is finished.

    module: its script. kind: its name, such as reward. Returns models/<run>/<kind>.
    """
    run = Path("runs", f"{part.exp_name}__{part.preset}__{part.seed}__{timestamp}")
    has_begun = (run / "meta.json").exists()
    accelerator.wait_for_everyone()  # none begins before all have looked
    with messages_of(kind, part):
        if has_begun:
            if train_policy.read_meta(run)["finished"]:
                return Path("models", run.name, kind).absolute()
            part = dataclasses.replace(train_policy.saved_args(type(part), run), resume=str(run))
        elif accelerator.is_main_process:
            shutil.rmtree(run, ignore_errors=True)  # it was killed before it wrote anything to resume from
        return module.train(part, timestamp)


def part_args(args: Args, part: Any) -> Any:
    """The arguments of a part, with those that all parts share."""
    shared = {name: getattr(args, name) for name in SHARED if name not in ("resume", "task")}
    task = type(part.task)(**dataclasses.asdict(args.task))
    return dataclasses.replace(part, task=task, resume="", **shared)


def check(args: Args, reward_args: Any, policy_args: Any, accelerator: Accelerator) -> None:
    """Say what is wrong with the policy's arguments, and the report's queries, before the reward model is trained.

    All else that the policy needs, such as a base model that is long enough, the reward model needs too.
    """
    if reward_args.exp_name == policy_args.exp_name:
        raise train_policy.InputError(
            f"--reward.exp_name and --policy.exp_name are both {reward_args.exp_name}; give each a name of its own"
        )
    with messages_of("reward", reward_args):
        train_reward.reward_sizes(reward_args, accelerator.num_processes)
    tokenizer = train_policy.load_tokenizer(args.base_model, args.trust_remote_code)
    with messages_of("policy", policy_args):
        train_policy.ppo_sizes(policy_args, accelerator.num_processes)
        train_policy.import_function(policy_args.rewards.monitor, "rewards.monitor")
        train_policy.task_ids(args.task, tokenizer)
        train_policy.QueryStream(args.task, tokenizer, split="test")


@contextlib.contextmanager
def messages_of(kind: str, part: Any) -> Iterator[None]:
    """Errors of a part have one class, and name its arguments as they are typed: ppo.lr is policy.ppo.lr."""
    own = [name for name in train_policy.flatten(dataclasses.asdict(part)) if name.split(".")[0] not in SHARED]

    def as_typed(match: re.Match) -> str:
        dashes, name = match.groups()
        return f"{dashes}{kind}.{name}" if name in own and (dashes or "." in name) else match[0]

    try:
        yield
    except (train_policy.InputError, train_reward.InputError) as error:
        message = re.sub(r"(?<![\w./-])(--|)([a-z_]+(?:[.][a-z_]+)*)", as_typed, str(error))
        raise train_policy.InputError(message) from error


# ---- The command line -------------------------------------------------------------------------------------------


def saved_args(kind: type[Args], run: str) -> Args:
    """The arguments of train_both.py, or of another such script, when it began a run; with this run to resume."""
    folder = Path(run).resolve()
    file = folder.with_name(f"{kind.script}__{'__'.join(folder.name.split('__')[-3:])}.json")
    if not file.is_file():
        raise train_policy.InputError(
            f"--resume {run} is not the folder of a run that {kind.script} began; resume others with their own script"
        )
    if folder.parent != Path("runs").resolve():
        raise train_policy.InputError(f"--resume {run}: resume in {folder.parents[1]}, where it began")
    saved = train_policy.from_json(kind, file.read_text(), f"{file} of another version: ")
    return dataclasses.replace(saved, resume=run)


def parse(argv: list[str] | None = None, presets: dict[str, Args] = PRESETS, description: str = __doc__) -> Args:
    """Read the command line. With --resume, the arguments are those with which the runs were started."""
    kind = type(next(iter(presets.values())))
    shared = "|".join(SHARED).replace("_", ".")  # in a pattern, a dot also matches the hyphen of --base-model
    for flag in sys.argv[1:] if argv is None else argv:
        if match := re.match(rf"--(?:sft|reward|policy)\.((?:no.)?(?:{shared})\b[^=]*)", flag):
            raise train_policy.InputError(f"{match[0]}: all parts share it; give --{match[1]}")
        if re.match(r"--policy\.rewards\.(trained.model|function)", flag):
            raise train_policy.InputError(
                f"{flag.split('=')[0]}: the reward model is trained here; use the policy's own script"
            )
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--resume", default="")
    known, _ = first.parse_known_args(argv)
    if not known.resume:
        return train_policy.parse_args(presets, argv, description=description)
    default = saved_args(kind, known.resume)
    args = train_policy.checked(tyro.cli(kind, args=argv, default=default, description=description))
    old, new = (train_policy.flatten(dataclasses.asdict(each)) for each in (default, args))
    if changed := [name for name in old if old[name] != new[name]]:
        raise train_policy.InputError(
            f"--{changed[0]}: --resume takes the arguments with which {kind.script} began; to change those of an "
            f"interrupted part, resume it with its own script"
        )
    return args


# ---- Compare ---------------------------------------------------------------------------------------------------


def held_out_queries(task: train_policy.TaskArgs, tokenizer: Any, n: int) -> list[list[int]]:
    """The token ids of the first n held-out queries, or of as many as there are."""
    stream, queries = train_policy.QueryStream(task, tokenizer, split="test"), []
    while len(queries) < n and (query := stream.next_query()) and stream.position <= len(stream.order):
        queries.append(query)
    return queries


@torch.no_grad()
def compare(args: train_policy.Args, folder: Path, accelerator: Accelerator) -> list[dict[str, Any]]:
    """Let both models continue held-out queries with the same noise. One row per query: texts, scores and KL.

    folder: of the policy. log-prob: of a text under the base model, mean over its tokens. kl: log-prob of the
    policy's text under the policy minus that under the base model. Both are in nats. All processes do the same.
    """
    # [X11] Held-out queries, at the task's temperature.   sample.py#L16-L66
    args = dataclasses.replace(args, dtype="float32", frozen_bfloat16=False, compile=False)
    device, task = accelerator.device, args.task
    tokenizer = train_policy.load_tokenizer(str(folder), args.trust_remote_code)
    ids = train_policy.task_ids(task, tokenizer)
    models = {
        name: train_policy.load_pretrained(model, torch.float32, args.trust_remote_code).to(device)
        for name, model in (("base", args.base_model), ("policy", str(folder)))
    }
    reward_model = train_policy.load_reward_model(args, tokenizer, device)
    monitor = train_policy.import_function(args.rewards.monitor, "rewards.monitor")
    monitor_name = re.split("[:.]", args.rewards.monitor)[-1].replace("gold_scores", "gold")

    def logprobs_of(name: str, contexts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([contexts, responses], dim=1)
        return train_policy.response_logprobs(
            models[name], tokens, ids.pad, ids.context_length, task.temperature, vocab_size=ids.pad
        )[0]  # (batch, response_length)

    all_queries = held_out_queries(task, tokenizer, EVALUATION_QUERIES)
    rows = []
    for key, start in enumerate(range(0, len(all_queries), 64)):
        some = all_queries[start : start + 64]
        queries = train_policy.padded(some, ids.pad, task.query_length).to(device)  # (batch, query_length)
        contexts = train_policy.add_affixes(queries, ids.prefix, ids.suffix)  # (batch, context_length)
        generator = train_policy.keyed_generator(1, "sample", key)
        noise = torch.rand(len(some), task.response_length, generator=generator, dtype=torch.float64)
        noise = noise.to(train_policy.float64_device(device))  # (batch, response_length)
        columns = {"query": train_policy.to_texts(tokenizer, queries, ids.pad)}
        for name, model in models.items():
            responses, _ = train_policy.generate(model, contexts, noise, ids.pad, ids.pad, task.temperature)
            truncated = train_policy.truncate_at(responses, ids.stop, task.truncate_after, ids.pad)
            texts = train_policy.texts_of(tokenizer, queries, truncated, ids)
            columns[name] = texts[1]
            columns[f"{name} score"] = reward_model(torch.cat([queries, truncated], dim=1), ids.pad).tolist()
            if monitor:
                columns[f"{name} {monitor_name}"] = train_policy.call(monitor, *texts).tolist()
            base_logprobs = logprobs_of("base", contexts, responses)
            columns[f"{name} log-prob"] = base_logprobs.mean(1).tolist()
        # These are the policy's responses, because it comes last.
        columns["kl"] = (logprobs_of("policy", contexts, responses) - base_logprobs).sum(1).tolist()
        rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows


# ---- Report ----------------------------------------------------------------------------------------------------


def print_row(row: dict[str, Any]) -> None:
    """Print texts, and below each the numbers that are named after it: "policy score" below "policy"."""
    print()
    for name, value in row.items():
        if isinstance(value, str):
            numbers = {key.removeprefix(f"{name} "): x for key, x in row.items() if key.startswith(f"{name} ")}
            print(f"{name:9}  {value.strip()!r}")
            if numbers:
                print(" " * 9, *(f"{key} {number:+.2f}" for key, number in numbers.items()), sep="  ")
        elif isinstance(value, float) and " " not in name:
            print(f"{name:9}  {value:+.2f}")


def changes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What training changed: a line for each number that both texts have, and for their share of distinct words.

    Differences are paired, since both models continue the same queries with the same noise. The interval is 1.96
    standard errors of the mean difference: it says how well these queries represent others, not other seeds.
    """
    names = [key.removeprefix("policy ") for key in rows[0] if key.startswith("policy ")]
    pairs = {name: [(row[f"base {name}"], row[f"policy {name}"]) for row in rows] for name in names}
    pairs["distinct words"] = [(distinct_words(row["base"]), distinct_words(row["policy"])) for row in rows]
    lines = []
    for name, numbers in pairs.items():
        differences = [after - before for before, after in numbers]
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
        before, after = (statistics.fmean(side) for side in zip(*numbers, strict=True))
        lines.append(
            {"": name, "before": before, "after": after, "difference": after - before, "± 95 %": 1.96 * error}
        )
    return lines


def distinct_words(text: str) -> float:
    """The share of a text's words that it has not used before."""
    words = text.lower().split()
    return len(set(words)) / max(len(words), 1)


def print_changes(rows: list[dict[str, Any]]) -> None:
    lines = changes(rows)
    print(f"\n{len(rows)} held-out queries, before and after")
    print(f"{'':14}", *(f"{name:>10}" for name in list(lines[0])[1:]))
    for name, *numbers in (line.values() for line in lines):
        print(f"{name:14}", *(f"{number:+10.2f}" for number in numbers))
    print(f"KL from the base model: {statistics.fmean(row['kl'] for row in rows):.2f} nats per response")


def summary(rows: list[dict], reward_meta: dict, policy_meta: dict) -> list[str]:
    """A sentence for each result. rows: queries with both continuations and their scores, as in comparison.jsonl."""
    names = [key.removeprefix("base ") for key in rows[0] if key.startswith("base ")]
    monitor = next((name for name in names if name not in ("score", "log-prob")), None)
    learned, lines = reward_meta["results"], []

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    if "test_corr" in learned:
        lines.append(
            f"The reward model's scores have a correlation of {learned['test_corr']:.3f} with the ratings of "
            f"{learned['test_labels']:,} held-out texts."
        )
    if policy_meta["args"]["task"]["query_dataset"] == "reviews" and (world := train_policy.find("reviews")):
        people = json.loads((world / "world.json").read_text())
        lines.append(
            f"There, a single person's rating has {people['one_person']:.3f} with the mean of the others, and VADER, "
            f"a lexicon with rules, {people['vader']:.3f} with the mean of all."
        )
    if "test_accuracy" in learned:
        lines.append(
            f"The reward model finds the annotator's choice in {learned['test_accuracy']:.1%} of "
            f"{learned['test_labels']:,} held-out comparisons. Chance is {learned['chance']:.0%}."
        )
        if learned["ceiling"] and learned["ceiling"] > learned["chance"]:
            share = (learned["test_accuracy"] - learned["chance"]) / (learned["ceiling"] - learned["chance"])
            lines.append(
                f"The annotator is noisy: a perfect judge would reach {learned['ceiling']:.1%}. "
                f"So it has learned {share:.0%} of what can be learned."
            )
    lines.append(
        f"On {len(rows)} held-out {'query' if len(rows) == 1 else 'queries'}, PPO took its score from "
        f"{mean('base score'):+.2f} to {mean('policy score'):+.2f}."
    )
    if monitor:
        before, after = mean(f"base {monitor}"), mean(f"policy {monitor}")
        deviation = statistics.stdev(row[f"base {monitor}"] for row in rows) if len(rows) > 1 else 0.0
        name = "The gold score" if monitor == "gold" else f"The function {monitor}"
        gain = (after - before) / deviation if deviation else 0.0
        lines.append(
            f"{name}, which PPO never saw, went from {before:+.2f} to {after:+.2f}"
            + (f": {gain:.1f} standard deviations of the language model's own." if deviation else ".")
        )
    if share_of := grammatical_share(policy_meta["args"]["task"]["query_dataset"]):
        shares = [share_of([row[name] for row in rows]) for name in ("base", "policy")]
        lines.append(
            f"The grammar could have written {shares[0]:.1%} of the language model's sentences, "
            f"and {shares[1]:.1%} of the policy's."
        )
    target = policy_meta["args"]["rewards"]["adaptive_kl"]["target"]
    minutes = [meta["wall_time"] / 60 for meta in (reward_meta, policy_meta)]
    lines += [
        f"The policy is {policy_meta['results']['last_kl']:.1f} nats per response from the language model, "
        f"averaged over the last ten updates{f'; the target is {target:g}' if target else ''}.",
        f"It took {sum(minutes):.1f} minutes: the reward model {minutes[0]:.1f}, the policy {minutes[1]:.1f}.",
    ]
    return lines


def grammatical_share(query_dataset: str) -> Callable[[list[str]], float] | None:
    """The function that judges the grammar of texts, for tales, and where that world's module can be imported."""
    with contextlib.suppress(ImportError):
        if query_dataset == "tales":
            return pkgutil.resolve_name("ppo_rlhf.worlds.tales:grammatical_share")
    return None


if __name__ == "__main__":
    train_policy.run_script(lambda: train(parse()))
