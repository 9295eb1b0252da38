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

The loop is `train` of rlvr/policy.py; `SamplerAhead` below is its step 2.

Marks like [V80] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's. See docs/reference.

    pip install -e '.[async]'
    python ppo_rlhf/rlvr/asynchronous.py --preset sums --staleness 1 --workers 2 --ppo.local_rollout_batch_size 64
    python ppo_rlhf/rlvr/asynchronous.py --resume runs/<run>           # resume after an interruption
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from ppo_rlhf import worlds
from ppo_rlhf.lib import checkpoints, command_line, errors, processes, run
from ppo_rlhf.lib.bounds import NonNegativeInt, PositiveFloat, PositiveInt
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.rlvr import (
    algebra,
    arguments as rlvr_arguments,
    policy as rlvr_policy,
    samplers,
    vllm_sampler,
)

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Args(rlvr_arguments.Args):
    exp_name: str = "rlvr_async"
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
    correction_cap: Annotated[float, Ge(1)] = 2.0
    """the largest weight: truncated importance sampling, TIS"""
    rejection: Literal["none", "token", "sequence", "product"] = "none"
    """leave tokens out of the loss whose ratio is out of bounds (masked importance sampling, MIS, as in IcePop), or
    responses whose ratios have a geometric mean (sequence) or a product out of bounds"""
    rejection_low: Annotated[float, Ge(0), Lt(1)] = 0.5
    """the smallest ratio that is kept; 0: no lower bound"""
    rejection_high: Annotated[float, Gt(1)] = 2.0
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


def train(args: Args) -> Path:
    """As `train` of rlvr/policy.py, with samplers in processes of their own."""
    processes.make_accelerator()
    rlvr_arguments.check_arguments(args)  # before Ray starts
    check_arguments(args)
    return rlvr_policy.train(args, partial(SamplerAhead, ray=processes.on_main(partial(connect, args))))


# ---- Batches that are sampled ahead ----------------------------------------------------------------------------


class SamplerAhead(rlvr_policy.Sampler):
    """Step 2 in other processes, ahead of the learner. The main process asks for the responses of all processes."""

    def __init__(self, setup: rlvr_arguments.Setup, actor_critic: rlvr_policy.ActorCritic, ray: Any):
        """ray: the library, connected to a cluster; None on all processes but the first."""
        super().__init__(setup, actor_critic)
        self.ray = ray
        self.asked: dict[int, list[list[list[Any]]]] = {}  # of each round, process and request the pieces
        self.versions: dict[int, Any] = {}  # published weights
        self.waiting = self.publishing = 0.0  # seconds

    @contextlib.contextmanager
    def at_work(self, this_run: run.Run, progress: rlvr_policy.Progress) -> Iterator[None]:
        self.next = progress.pool.rounds  # round to ask for; without filter_groups, each update has one
        kept_versions, progress.sampler_state = progress.sampler_state, {}
        if self.ray:
            self.workers = itertools.cycle(start_workers(self.ray, self.setup))
            # Batches that had been sampled ahead before an interruption are sampled again, by the same weights.
            for name, weights in kept_versions.items():
                self.put(int(name.removeprefix("version ")), weights)
        yield

    def begin_update(self, number: int) -> None:
        """Publish the weights, and ask for all batches that they are to sample."""
        self.publish(number)
        if self.setup.args.ppo.filter_groups:
            return  # how many rounds a batch needs is known only when they are there
        while self.next <= min(number + self.setup.args.staleness, self.setup.sizes.updates - 1):
            self.ask(self.next, self.version_of(self.next))

    def publish(self, version: int) -> None:
        """Make the policy's weights known as this version; forget those that no batch needs any more."""
        started = time.monotonic()
        # All trained parameters by name, tied weights once, are one object with one version.
        weights = checkpoints.trained_parameters(self.actor_critic.lm_backbone)
        processes.from_main(lambda: self.put(version, weights))
        self.versions = {old: weights for old, weights in self.versions.items() if old >= self.version_of(version)}
        self.current, self.publishing = version, time.monotonic() - started

    def put(self, version: int, weights: dict[str, Tensor]) -> None:
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in weights.items()}
        self.versions[version] = self.ray.put(arrays)

    def version_of(self, number: int) -> int:
        """The version of the weights that sample the batch of an update."""
        # [V80] It depends on the number alone, not on timing.   one_step_off_policy/ray_trainer.py#L437-L515
        return max(number - self.setup.args.staleness, 0)

    def ask(self, round_number: int, version: int) -> None:
        setup, self.next = self.setup, round_number + 1
        if not self.ray:
            return
        chunk, n = setup.sizes.local_rollout_batch, setup.args.ppo.samples_per_prompt
        copies = (math.gcd(chunk, n), 1)  # rows of one prompt in a piece; a greedy one is alone
        self.asked[round_number] = [[] for _ in range(setup.accelerator.num_processes)]
        for rank, of_rank in enumerate(self.asked[round_number]):
            requests = rlvr_policy.draw_problems(setup, round_number, rank).requests
            for n, (contexts, noise, temperature) in zip(copies, requests, strict=False):
                pieces = []
                # A piece has as many rows as the learner would sample at a time, so that sums are rounded alike.
                for prompts, uniforms in zip(contexts.split(chunk), noise.split(chunk), strict=True):
                    piece = next(self.workers).sample.remote(
                        weights=self.versions[version],
                        version=version,
                        prompts=prompts[::n].cpu().numpy(),
                        n=n,
                        noise=uniforms.cpu().numpy(),
                        temperature=temperature,
                    )
                    pieces.append(piece)
                of_rank.append(pieces)

    def sample(self, draw: rlvr_policy.Draw) -> rlvr_policy.Samples:
        """Responses to the requests of this process in a round; waits for them."""
        version = self.version_of(self.current)
        if draw.round >= self.next:
            self.ask(draw.round, version)
        started, device = time.monotonic(), self.setup.accelerator.device
        of_processes = processes.from_main(partial(self.wait, draw.round))
        answers = []
        for pieces in of_processes[self.setup.accelerator.process_index]:
            # [V82] The sampler's log-probs are kept, in addition to those of the learner's forward pass.
            responses, logprobs = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
            answers.append((torch.tensor(responses, device=device), torch.tensor(logprobs, device=device)))
        self.waiting += time.monotonic() - started
        return rlvr_policy.Samples(
            draw=draw, answers=answers, version=version, on_policy=is_on_policy(self.setup.args)
        )

    def wait(self, round_number: int) -> list[list[list[tuple[np.ndarray, np.ndarray]]]]:
        """Of each process and request the answers to the pieces of a round."""
        ray_errors = self.ray.exceptions
        try:
            return [[self.ray.get(pieces) for pieces in of_rank] for of_rank in self.asked.pop(round_number)]
        except ray_errors.RayTaskError:  # a fault of our code in a worker
            raise
        except ray_errors.RayError as error:
            # A worker that cannot start says why in the last line, Ray says what has happened in the first.
            lines = str(error).strip().splitlines()
            raise InputError(f"sampling has failed: {lines[-1 if 'Error' in lines[-1] else 0]}") from error

    def correct(self, episodes: algebra.Rollout, number: int) -> rlvr_policy.Correction:
        return correct(episodes, self.setup.args, number, self.setup.accelerator)

    def state(self, made: int) -> dict[str, dict[str, Tensor]]:
        """For a checkpoint: the weights that sample for the next updates, except the newest, which it has anyway."""
        needed = range(self.version_of(made), made)
        kept = {v: self.ray.get(self.versions[v]) for v in self.versions if v in needed}
        return {f"version {v}": {name: torch.tensor(x) for name, x in kept[v].items()} for v in kept}

    def metrics(self) -> dict[str, float]:
        """Seconds of the last update: waiting for batches, and publishing."""
        waiting, self.waiting = self.waiting, 0.0
        return {"time/waiting": waiting, "time/weight_sync": self.publishing}


# ---- Workers: Ray ----------------------------------------------------------------------------------------------


# A worker that is lost is started anew. If a piece has cost five, it is not to blame on them.
REPLACED = {"max_restarts": -1, "max_task_retries": 4}


def start_workers(ray: Any, setup: rlvr_arguments.Setup) -> list[Any]:
    """Actors that sample: Ray starts one that was lost anew, and makes the calls again that it had."""
    args = setup.args
    sampler = vllm_sampler.VLLMSampler if args.engine == "vllm" else samplers.TorchSampler
    gpus = ray.cluster_resources().get("GPU", 0)
    actor_class = ray.remote(
        num_gpus=1 / math.ceil(args.workers / gpus) if gpus else 0,  # several workers may share one
        scheduling_strategy="SPREAD",
        **REPLACED,
    )(sampler)
    folder = Path(worlds.find_value("base_model", args.base_model))
    if folder.is_dir():
        args = dataclasses.replace(args, base_model=str(folder.absolute()))  # workers may be in another folder
    return [actor_class.remote(args, setup.ids, torch.get_num_threads()) for _ in range(args.workers)]


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
        raise InputError(f"{errors.flag('ray_address')} {args.ray_address}: {error}") from error
    return ray


# ---- Corrections: the policy that samples is older than the one that learns -------------------------------------

ROUNDING = 1e-4  # by which a ratio may be off in float32


def correct(episodes: algebra.Rollout, args: Args, number: int, accelerator: Accelerator) -> rlvr_policy.Correction:
    """The batch from which update `number` learns, of episodes that older weights have sampled.

    With mu the policy that has sampled, prox the learner's when the batch arrived and new the one that learns:

        decoupled   min(prox / mu, cap) * the loss of the ratio new / prox
        bypass      the loss of the ratio new / mu: its clip also counts how far prox has moved from mu. The loss
                    reinforce has no ratio and gets a factor instead: min(new / mu, cap) * the loss
        none        the loss of the ratio new / prox: as if prox had sampled

    reweigh of what it returns: see newest_factors. Every process must call this, and all get the same statistics of
    the whole batch.
    """
    # Of the whole batch, the first three (batch, response_length), the last (batch,).
    columns = (episodes.logprobs, episodes.sampler_logprobs, episodes.mask)
    prox, mu, mask = (accelerator.gather(column.contiguous()) for column in columns)
    versions = accelerator.gather(episodes.versions.contiguous())
    local_batch = len(episodes.mask)
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
    age = processes.widened(number - versions)
    if not age.any():
        # [V94] Sampler and learner have the same weights, so their log-probs must agree.
        check_gap(mean_of((prox - mu).abs()[mask]).item(), args.dtype)
    metrics |= {"async/staleness_mean": age.mean().item(), "async/staleness_max": age.max().item()}
    metrics |= {"async/weight_mean": mean_of(weights[mask]).item()}
    metrics |= {"async/clipped_share": mean_of(clipped).item()}
    metrics |= {"async/rejected_share": mean_of(~kept[mask]).item()}

    # Advantages are those of all tokens, and a rejection only leaves tokens out of the loss. But a response of which
    # every token is rejected leaves its group's baseline too.
    masks = {"mask": episodes.mask & kept[mine].any(1, keepdim=True), "loss_mask": episodes.loss_mask & kept[mine]}
    way = correction_of(args)
    # [V84] With bypass, the old log-probs are the sampler's.   core_algos.py#L2065-L2195
    logprobs = episodes.sampler_logprobs if way == "bypass" else episodes.logprobs
    return rlvr_policy.Correction(
        episodes=dataclasses.replace(episodes, **masks, logprobs=logprobs),
        # [V83] The clip is around prox, and the weight leads from mu to prox.   core_algos.py#L1237
        weights=weights[mine] if way == "decoupled" else None,
        reweigh=newest_factors(args),
        metrics=metrics,
    )


def newest_factors(args: Args) -> algebra.Reweigh | None:
    """Factors of the policy's losses that each pass computes from the newest policy; None if there are none."""
    has_weights = correction_of(args) == "bypass" and args.ppo.loss == "reinforce"
    if not has_weights and args.off_policy_mask is None:
        return None

    def factors(new_logprobs: Tensor, mb: algebra.Batch) -> Tensor:
        found = torch.ones_like(new_logprobs)
        if has_weights:
            found = algebra.importance_weights(
                new_logprobs, mb.logprobs, mb.loss_mask, kind="token", cap=args.correction_cap
            )
        if args.off_policy_mask is not None:
            found = found * algebra.off_policy_mask(
                new_logprobs, mb.sampler_logprobs, mb.advantages, mask=mb.loss_mask, delta=args.off_policy_mask
            )
        return found

    return factors


def mean_of(numbers: Tensor) -> Tensor:
    """Their mean, 0-d; 0 if there are none, as in a batch of which no response can be scored."""
    return processes.widened(numbers).sum() / max(len(numbers), 1)


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
    way = correction_of(args)
    # [V56] An argument that nothing reads is refused. With bypass, only the loss reinforce has weights.
    without_effect = ["rejection_low", "rejection_high"] if args.rejection == "none" else []
    if way == "none" or (way == "bypass" and args.ppo.loss != "reinforce"):
        without_effect.append("correction_cap")
    for name in without_effect:
        if getattr(args, name) != getattr(Args, name):
            raise InputError(
                f"{errors.flag(name)} {getattr(args, name)} does nothing with {errors.flag('correction')} {way} and "
                f"{errors.flag('rejection')} {args.rejection}; leave it out"
            )
    if args.engine == "vllm" and not importlib.util.find_spec("vllm"):
        raise InputError(f"{errors.flag('engine')} vllm needs vLLM in this environment: see docs/chapter3.md")
    if args.engine == "vllm" and (args.lora.rank or args.dtype == "float64"):
        raise InputError(
            f"{errors.flag('engine')} vllm goes with {errors.flag('lora.rank')} 0, and "
            f"{errors.flag('dtype')} float32 or bfloat16"
        )
    if args.engine == "vllm" and not 0.01 <= args.task.temperature <= 2:
        raise InputError(f"{errors.flag('task.temperature')} {args.task.temperature}: vLLM takes 0.01 to 2")
    if args.ppo.filter_groups and args.staleness:
        raise InputError(
            f"{errors.flag('ppo.filter_groups')} goes with {errors.flag('staleness')} 0: which rounds a batch needs, "
            f"and so what could be sampled ahead for it, is known only when the batch before it is full"
        )
    if args.correction == "none" and (args.staleness or args.engine == "vllm"):
        # [V82] As open-instruct did until 7917d41 (March 2026).
        errors.say(
            f"{errors.flag('correction')} none: the ratio starts at 1 although older weights have sampled, or vLLM, "
            f"and nothing makes up for that"
        )


if __name__ == "__main__":
    errors.run_script(lambda: train(command_line.parse_args(PRESETS, description=__doc__)))
