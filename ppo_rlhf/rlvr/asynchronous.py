"""Rollouts and learner in different processes: chapter 3, asynchronous, and still the same numbers (except vLLM's).

rlvr/policy.py samples and trains in turn, so that one of the two always waits. Here workers, which are processes of
their own on this machine or others, sample ahead while the learner trains. With staleness K, the batch of update t is
sampled by the weights that had seen max(t - K, 0) updates: version t - K. This does not depend on timing, on the
number of workers, or on whether some of them die. (filter_groups needs K = 0; there, what an update leaves over is
trained on in the next.)

    learner, update t                                            worker, again and again

    publish the weights: version t
    ask for batch t + K, of version t             pieces ->      wait for a piece: prompts, noise, version
    1. of rlvr/policy.py                                         load that version, if it is another
    2. wait for batch t, of version t - K        <- answers      sample: ids, their log-probs, the version
    3. to 5. of rlvr/policy.py
    correct for the age of the weights
    6. to 8. of rlvr/policy.py

Time goes from left to right; v1 is the weights after the first update:

    K = 0   workers   | batch 0, v0 |          | batch 1, v1 |          | batch 2, v2 |
            learner                 | update 0 |             | update 1 |             | update 2 |

    K = 1   workers   | batch 0, v0 | batch 1, v0 | batch 2, v1 | batch 3, v2 |
            learner                 | update 0 |  | update 1 |  | update 2 |  | update 3 |

At most K batches are ready at a time; then workers wait. Nothing is dropped, because that would drop what takes
longest: long answers. Sampling noise belongs to the episode. So what was lost with a worker is sampled again when Ray
has started it anew, with the same result; and with K = 0, metrics and weights are those of rlvr/policy.py, bit for
bit.

The loop is `train` of rlvr/policy.py; `SamplerAhead` below is its step 2, and corrects what it has sampled.

Marks like [V80] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's. See docs/reference.

    pip install -e '.[async]'
    python ppo_rlhf/rlvr/asynchronous.py --preset sums --staleness 1 --workers 2 --ppo.local_rollout_batch_size 64
    python ppo_rlhf/rlvr/asynchronous.py --resume runs/<run>           # resume after an interruption
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from ppo_rlhf.rlvr import (
    algebra,
    arguments as rlvr_arguments,
    policy as rlvr_policy,
    problems,
    samplers,
    vllm_sampler,
)
from ppo_rlhf.rlvr.algebra import Rollout
from ppo_rlhf.tldr.shares import widened
from ppo_rlhf.train_policy import InputError, checked, find, make_accelerator, parse_args, run_script

MAY_CHANGE = rlvr_policy.MAY_CHANGE | {"workers", "ray_address"}

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Args(rlvr_arguments.Args):
    exp_name: Annotated[str, Field(pattern=r"^[\w.+ -]{1,150}$")] = "rlvr_async"
    staleness: NonNegativeInt = 1
    """age in updates of the weights that sample a batch, less at the start; 0: sampling and training take turns"""
    workers: PositiveInt = 1
    """number of processes that sample"""
    engine: Literal["built-in", "vllm"] = "built-in"
    """sampler: PyTorch, as in rlvr/policy.py, or vLLM, which must be installed in the same environment"""
    ray_address: str = ""
    """address of a Ray cluster; auto: the one of this machine; empty: the run starts its own"""
    correction: Literal["auto", "decoupled", "bypass", "none"] = "auto"
    """correction for the age of the weights that have sampled; see `correct`. auto: decoupled if staleness is above 0
    or vLLM samples, otherwise none"""
    correction_cap: Annotated[float, Field(ge=1)] = 2.0
    """the largest weight: truncated importance sampling, TIS"""
    rejection: Literal["none", "token", "sequence", "product"] = "none"
    """leave tokens out of the loss whose ratio is out of bounds (masked importance sampling, MIS, as in IcePop), or
    responses whose ratios have a geometric mean (sequence) or a product out of bounds"""
    rejection_low: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """the smallest ratio that is kept; 0: no lower bound"""
    rejection_high: Annotated[float, Field(gt=1)] = 2.0
    """the largest ratio that is kept"""
    off_policy_mask: PositiveFloat | None = None
    """a response that has become less likely by more than this, in nats per token, is no longer blamed: its tokens
    with a negative advantage have no policy loss. None: no such mask"""


def preset(args: rlvr_arguments.Args) -> Args:
    """The same arguments, sampled ahead where that is possible."""
    return Args(
        **vars(args) | {"exp_name": Args.exp_name, "staleness": 0 if args.ppo.filter_groups else Args.staleness}
    )


PRESETS = {name: preset(args) for name, args in rlvr_arguments.PRESETS.items()}

# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args, timestamp: int | None = None) -> Path:
    """As `train` of rlvr/policy.py, with samplers in processes of their own."""
    args = checked(args)
    accelerator = make_accelerator(args.dtype)
    rlvr_arguments.ppo_sizes(args, accelerator.num_processes)  # before Ray starts
    check_arguments(args)
    ray = on_main(lambda: connect(args), accelerator)
    return rlvr_policy.train(args, SamplerAhead(ray), timestamp)


def on_main(function: Callable[[], Any], accelerator: Accelerator) -> Any:
    """The result of a function on the main process, and None on the others; or its InputError on every process."""
    made, problem = None, ""
    if accelerator.is_main_process:
        try:
            made = function()
        except InputError as error:
            problem = str(error)
    (problem,) = broadcast_object_list([problem])
    if problem:
        raise InputError(problem)
    return made


# ---- Batches that are sampled ahead ----------------------------------------------------------------------------


class SamplerAhead(rlvr_policy.Sampler):
    """Step 2 in other processes, ahead of the learner. The main process asks for the responses of all processes."""

    def __init__(self, ray: Any):
        """ray: the library, connected to a cluster; None on all processes but the first."""
        self.ray = ray
        # Of each round, greedy or not, and process the pieces.
        self.asked: dict[tuple[int, bool], list[list[Any]]] = {}
        self.versions: dict[int, Any] = {}  # published weights
        self.waiting = self.publishing = 0.0  # seconds

    def begin(self, args, *more, rounds: int = 0, stored: dict[str, Tensor] | None = None, **options) -> None:
        super().begin(args, *more, **options)
        self.updates = args.ppo.total_episodes // args.ppo.batch_size
        self.next = rounds  # round to ask for; without filter_groups, each update has one
        if self.ray:
            self.workers = itertools.cycle(start_workers(self.ray, args, self.ids))
            # Batches that had been sampled ahead before an interruption are sampled again, by the same weights.
            stored = stored or {}
            for version in {key.partition(".")[0] for key in stored}:
                start = f"{version}."
                self.put(
                    int(version), {key.removeprefix(start): x for key, x in stored.items() if key.startswith(start)}
                )

    @property
    def computes_as_training(self) -> bool:
        return is_on_policy(self.args) and super().computes_as_training

    def begin_update(self, update: int) -> None:
        """Publish the weights, forget those that nobody needs any more, and ask for all that the new ones sample."""
        self.update, started = update, time.monotonic()
        if self.ray:
            # All trained parameters by name, tied weights once, are one object with one version.
            self.put(update, {name: x for name, x in self.lm_backbone.named_parameters() if x.requires_grad})
            self.versions = {old: x for old, x in self.versions.items() if old >= self.version_of(update)}
        self.publishing = time.monotonic() - started
        if self.args.ppo.filter_groups:
            return  # how many rounds a batch needs is known only when they are there
        while self.next <= min(update + self.args.staleness, self.updates - 1):
            self.ask(self.next, self.version_of(self.next))

    def put(self, version: int, weights: dict[str, Tensor]) -> None:
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in weights.items()}
        self.versions[version] = self.ray.put(arrays)

    def version_of(self, update: int) -> int:
        """The version of the weights that sample the batch of an update."""
        # [V80] It depends on the number alone, not on timing.   one_step_off_policy/ray_trainer.py#L437-L515
        return max(update - self.args.staleness, 0)

    def ask(self, round_number: int, version: int) -> None:
        """Send the pieces of a round to the workers."""
        self.next = round_number + 1
        if not self.ray:
            return
        n, processes = self.args.ppo.samples_per_prompt, self.accelerator.num_processes
        _, _, contexts, noise = rlvr_policy.draw_problems(self.args, self.problem_set, self.ids.pad, round_number)
        requests = {False: (contexts, noise, self.args.task.temperature)}
        if self.args.ppo.advantage == "remax":
            requests[True] = contexts[::n], torch.full_like(noise[::n], 0.5), problems.GREEDY
        # A piece has as many rows as the learner would sample at a time, so that sums are rounded alike.
        chunk = min(self.args.ppo.local_rollout_batch_size, len(contexts) // processes)
        for greedy, (contexts, noise, temperature) in requests.items():
            copies = 1 if greedy else math.gcd(chunk, n)  # rows of one prompt in a piece
            self.asked[round_number, greedy] = [
                [
                    next(self.workers).sample.remote(
                        weights=self.versions[version],
                        version=version,
                        prompts=prompts[::copies].numpy(),
                        n=copies,
                        noise=uniforms.numpy(),
                        temperature=temperature,
                    )
                    for prompts, uniforms in zip(*(rows.split(chunk) for rows in of_process), strict=True)
                ]
                for of_process in zip(contexts.chunk(processes), noise.chunk(processes), strict=True)
            ]

    def sample(
        self, round_number: int, contexts: Tensor, uniforms: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """The answers to the rows of this process in a round, which `ask` has drawn, too; waits for them."""
        if round_number >= self.next:
            self.ask(round_number, self.version_of(self.update))
        started = time.monotonic()
        greedy = temperature == problems.GREEDY
        answers = on_main(lambda: self.wait(round_number, greedy), self.accelerator)
        (answers,) = broadcast_object_list([answers])
        # [V82] The sampler's log-probs are kept, in addition to those of the learner's forward pass.
        pieces = answers[self.accelerator.process_index]
        responses, logprobs = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        self.waiting += time.monotonic() - started
        return torch.tensor(responses, device=contexts.device), torch.tensor(logprobs, device=contexts.device)

    def wait(self, round_number: int, greedy: bool) -> list[list[tuple[np.ndarray, np.ndarray]]]:
        """Of each process the answers to the pieces of a round."""
        ray_errors = self.ray.exceptions
        try:
            return [self.ray.get(pieces) for pieces in self.asked.pop((round_number, greedy))]
        except ray_errors.RayTaskError:  # a fault of our code in a worker
            raise
        except ray_errors.RayError as error:
            # A worker that cannot start says why in the last line, Ray says what has happened in the first.
            lines = str(error).strip().splitlines()
            raise InputError(f"sampling has failed: {lines[-1 if 'Error' in lines[-1] else 0]}") from error

    def correct(self, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
        rollout = dataclasses.replace(rollout, age=rollout.age + self.update - self.version_of(self.update))
        rollout, metrics = correct(rollout, self.args, self.accelerator)
        metrics |= {"time/waiting": self.waiting, "time/weight_sync": self.publishing}  # seconds of this update
        self.waiting = 0.0
        return rollout, metrics

    def correct_losses(self, losses: Tensor, new_logprobs: Tensor, rollout: Rollout) -> tuple[Tensor, dict]:
        factors = newest_factors(new_logprobs, rollout, self.args)
        return (losses, {}) if factors is None else (factors * losses, {"async/masked_share": factors == 0})

    def tensors(self, step: int) -> dict[str, Tensor]:
        """The weights that sample for the next updates, except the newest, which a checkpoint has anyway."""
        needed = range(self.version_of(step), step)
        kept = {v: self.ray.get(self.versions[v]) for v in self.versions if v in needed}
        return {f"{v}.{name}": torch.tensor(x) for v, weights in kept.items() for name, x in weights.items()}


# ---- Workers: Ray ----------------------------------------------------------------------------------------------


# A worker that is lost is started anew. If a piece has cost five, it is not to blame on them.
REPLACED = {"max_restarts": -1, "max_task_retries": 4}


def start_workers(ray: Any, args: Args, ids: problems.TaskIds) -> list[Any]:
    """Actors that sample: Ray starts one that was lost anew, and makes the calls again that it had."""
    sampler = vllm_sampler.VLLMSampler if args.engine == "vllm" else samplers.TorchSampler
    gpus = ray.cluster_resources().get("GPU", 0)
    actor_class = ray.remote(
        num_gpus=1 / math.ceil(args.workers / gpus) if gpus else 0,  # several workers may share one
        scheduling_strategy="SPREAD",
        **REPLACED,
    )(sampler)
    if folder := find(args.base_model):
        args = dataclasses.replace(args, base_model=str(folder.absolute()))  # workers may be in another folder
    return [actor_class.remote(args, ids, torch.get_num_threads()) for _ in range(args.workers)]


def connect(args: Args) -> Any:
    """Ray, connected to a cluster. If it is already, because the caller of train() has started it, it stays so."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends statistics to its makers
    try:
        import ray  # an extra
    except ModuleNotFoundError as error:
        raise InputError("sampling in other processes needs Ray: pip install -e '.[async]'") from error
    if ray.is_initialized():
        return ray
    own = {"address": "local", "num_cpus": args.workers, "include_dashboard": False}
    where = {"address": args.ray_address} if args.ray_address else own
    try:
        ray.init(**where, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as error:  # some are of other versions of Ray or Python
        raise InputError(f"--ray_address {args.ray_address}: {error}") from error
    return ray


# ---- Corrections: the policy that samples is older than the one that learns -------------------------------------

ROUNDING = 1e-4  # by which a ratio may be off in float32


def correct(rollout: Rollout, args: Args, accelerator: Accelerator) -> tuple[Rollout, dict[str, float]]:
    """The batch from which an update learns, of episodes that older weights have sampled, and how old they are.

    With mu the policy that has sampled, prox the learner's when the batch arrived and new the one that learns:

        decoupled   min(prox / mu, cap) * the loss of the ratio new / prox
        bypass      the loss of the ratio new / mu: its clip also counts how far prox has moved from mu. The loss
                    reinforce has no ratio and gets a factor instead: min(new / mu, cap) * the loss
        none        the loss of the ratio new / prox: as if prox had sampled

    Factors that depend on new are in newest_factors. rollout.age: updates that the sampling weights had not seen.
    Every process must call this, and all get the same statistics of the whole batch.
    """
    # Of the whole batch, the first three (batch, response_length), the last (batch,).
    columns = (rollout.logprobs, rollout.sampler_logprobs, rollout.mask, rollout.age)
    prox, mu, mask, age = (accelerator.gather(column.contiguous()) for column in columns)
    local_batch = len(rollout.mask)
    mine = slice(accelerator.process_index * local_batch, (accelerator.process_index + 1) * local_batch)
    # They are capped below.
    weights = algebra.importance_weights(prox, mu, mask, kind="token", cap=math.inf)
    clipped = weights[mask] > args.correction_cap * (1 + ROUNDING)
    weights = weights.clamp(max=args.correction_cap)
    kept = mask
    if args.rejection != "none":
        kept = algebra.rejection_mask(
            prox, mu, mask, kind=args.rejection, low=args.rejection_low, high=args.rejection_high
        )
    # The mismatch is always logged, also where the weights are the same.
    metrics = {f"async/{name}": value.item() for name, value in algebra.mismatch(prox, mu, mask).items()}
    if not age.any():
        # [V94] Sampler and learner have the same weights, so their log-probs must agree.
        check_gap(mean_of((prox - mu).abs()[mask]).item(), args.dtype)
    metrics |= {"async/staleness_mean": widened(age).mean().item(), "async/staleness_max": age.max().item()}
    metrics |= {"async/weight_mean": mean_of(weights[mask]).item()}
    metrics |= {"async/clipped_share": mean_of(clipped).item()}
    metrics |= {"async/rejected_share": mean_of(~kept[mask]).item()}

    # Advantages are those of all tokens, and a rejection only leaves tokens out of the loss. But a response of which
    # every token is rejected leaves its group's baseline too.
    changes = {"mask": rollout.mask & kept[mine].any(1, keepdim=True), "loss_mask": rollout.loss_mask & kept[mine]}
    if correction_of(args) == "decoupled":
        # [V83] The clip is around prox, and the weight leads from mu to prox.   core_algos.py#L1237
        changes["weights"] = weights[mine]
    if correction_of(args) == "bypass":
        # [V84] With bypass, the old log-probs are the sampler's.   core_algos.py#L2065-L2195
        changes["logprobs"] = rollout.sampler_logprobs
    return dataclasses.replace(rollout, **changes), metrics


def newest_factors(new_logprobs: Tensor, rollout: Rollout, args: Args) -> Tensor | None:
    """Factors of the policy's losses that each pass computes from the newest policy; None if there are none."""
    # [V84] Where the loss has no ratio, the weights are those of the policy of this step.
    has_weights = correction_of(args) == "bypass" and args.ppo.loss == "reinforce"
    if not has_weights and args.off_policy_mask is None:
        return None
    factors = torch.ones_like(new_logprobs)
    if has_weights:
        factors = algebra.importance_weights(
            new_logprobs, rollout.logprobs, rollout.loss_mask, kind="token", cap=args.correction_cap
        )
    if args.off_policy_mask is not None:
        factors = factors * algebra.off_policy_mask(
            new_logprobs,
            rollout.sampler_logprobs,
            rollout.advantages,
            mask=rollout.loss_mask,
            delta=args.off_policy_mask,
        )
    return factors


def mean_of(numbers: Tensor) -> Tensor:
    """Their mean, 0-d; 0 if there are none, as in a batch of which no response can be scored."""
    return widened(numbers).sum() / max(len(numbers), 1)


def check_gap(gap: float, dtype: str) -> None:
    """Refuse a sampler whose log-probs are not ours, although the weights are the same. gap: the mean, in nats."""
    # [V94] In bfloat16 the mean is 0.02 for the small world's model, and single tokens are much further off.
    limit = 0.05 if dtype == "bfloat16" else 1e-3
    if not gap <= limit:
        raise InputError(
            f"a sampler with the learner's weights computes other log-probs than the learner: they differ by "
            f"{gap:.2g} nats on average, and {limit:g} is the limit"
        )


def correction_of(args: Args) -> str:
    if args.correction != "auto":
        return args.correction
    return "none" if is_on_policy(args) else "decoupled"


def is_on_policy(args: Args) -> bool:
    # [V90] Another engine's log-probs differ from ours even with the same weights.
    return not args.staleness and args.engine == "built-in"


# ---- Plumbing --------------------------------------------------------------------------------------------------


def check_arguments(args: Args) -> None:
    if args.engine == "vllm" and not importlib.util.find_spec("vllm"):
        raise InputError("--engine vllm needs vLLM in this environment: see docs/chapter3.md")
    if args.engine == "vllm" and (args.lora.rank or args.dtype == "float64"):
        raise InputError("--engine vllm goes with --lora.rank 0, and --dtype float32 or bfloat16")
    if args.engine == "vllm" and not 0.01 <= args.task.temperature <= 2:
        raise InputError(f"--task.temperature {args.task.temperature}: vLLM takes 0.01 to 2")
    if args.ppo.filter_groups and args.staleness:
        raise InputError(
            "--ppo.filter_groups goes with --staleness 0: which rounds a batch needs, and so what could be sampled "
            "ahead for it, is known only when the batch before it is full"
        )


if __name__ == "__main__":
    run_script(lambda: train(parse_args(PRESETS, description=__doc__, may_change=MAY_CHANGE)))
