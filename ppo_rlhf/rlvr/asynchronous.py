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
longest: long answers. Sampling noise belongs to the episode. So a piece that was lost with its worker is sampled
again by another worker, with the same result; and with K = 0, metrics and weights are those of rlvr/policy.py, bit
for bit.

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
import math
import os
import queue
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from accelerate import Accelerator
from annotated_types import Ge
from torch import Tensor

from ppo_rlhf.lib.base import checkpoints, errors, processes
from ppo_rlhf.lib.base.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.services import cli, run
from ppo_rlhf.rlvr import (
    algebra,
    arguments as rlvr_arguments,
    checks as rlvr_checks,
    engine,
    episodes as rlvr_episodes,
    policy as rlvr_policy,
)

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Args(rlvr_arguments.Args):
    script = "rlvr_async"
    exp_name: str = "rlvr_async"
    staleness: NonNegativeInt = 1
    """age in updates of the weights that sample a batch, less at the start; 0: sampling and training take turns"""
    workers: PositiveInt = 1
    """number of processes that sample"""
    engine: Literal["built-in", "vllm"] = "built-in"
    """sampler: PyTorch, as in rlvr/policy.py, or vLLM"""
    vllm_python: str = ""
    """with vllm: the Python interpreter of an environment that has it, on every machine with workers"""
    ray_address: str = ""
    """address of a Ray cluster; auto: the one of this machine; empty: the run starts its own"""
    gpus_per_worker: NonNegativeFloat | None = None
    """GPUs of a worker, which may be a fraction; None: 1 if the learner has one, otherwise 0"""
    time_out: PositiveFloat = 600.0
    """seconds that a worker may take to start, and for one piece, before another takes its place"""
    correction: Literal["auto", "decoupled", "bypass", "none"] = "auto"
    """correction for the age of the weights that have sampled; see `correct`. auto: decoupled if staleness is above 0
    or vLLM samples, otherwise none"""
    correction_level: Literal["token", "sequence"] = "token"
    """whether each token has its own importance weight, or that of its whole response"""
    correction_cap: Annotated[float, Ge(1)] = 2.0
    """the largest weight: truncated importance sampling, TIS"""
    correction_normalised: bool = False
    """divide the weights by their mean over the batch"""
    rejection: Literal["none", "token", "sequence", "product"] = "none"
    """leave tokens out of the loss whose ratio is out of bounds (masked importance sampling, MIS, as in IcePop), or
    responses whose ratios have a geometric mean (sequence) or a product out of bounds"""
    rejection_low: NonNegativeFloat = 0.5
    """the smallest ratio that is kept; 0: no lower bound"""
    rejection_high: float = 2.0
    """the largest ratio that is kept"""
    off_policy_mask: PositiveFloat | None = None
    """a response that has become less likely by more than this, in nats per token, is no longer blamed: its tokens
    with a negative advantage have no policy loss. None: no such mask"""


def preset(args: rlvr_arguments.Args) -> Args:
    """The same arguments, sampled ahead where that is possible."""
    same = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    return Args(**same | {"exp_name": Args.exp_name, "staleness": 0 if args.ppo.filter_groups else Args.staleness})


PRESETS = {name: preset(args) for name, args in rlvr_arguments.PRESETS.items()}

# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args) -> Path:
    """As `train` of rlvr/policy.py, with samplers in processes of their own."""
    processes.make_accelerator()
    rlvr_checks.check_arguments(args)  # before Ray starts
    check_arguments(args)
    with connected(args) as ray:
        return rlvr_policy.train(args, partial(SamplerAhead, ray=ray))


# ---- Batches that are sampled ahead ----------------------------------------------------------------------------


class SamplerAhead(rlvr_policy.Sampler):
    """Step 2 in other processes, ahead of the learner. The main process asks for the responses of all processes."""

    def __init__(self, setup: rlvr_episodes.Setup, actor_critic: rlvr_policy.ActorCritic, ray: Any):
        super().__init__(setup, actor_critic)
        self.ray, self.is_main = ray, setup.accelerator.is_main_process
        self.asked: dict[int, list[list[Future]]] = {}  # of each round the pieces of each process
        self.versions: dict[int, Any] = {}  # published weights
        self.waiting = self.publishing = 0.0  # seconds

    @contextlib.contextmanager
    def at_work(self, this_run: run.Run, progress: rlvr_episodes.Progress) -> Iterator[None]:
        self.next = progress.pool.rounds  # round to ask for; without filter_groups, each update has one
        kept_versions, progress.of_sampler = progress.of_sampler, {}
        if not self.is_main:
            yield
            return
        with contextlib.closing(Workers(self.setup, self.ray)) as self.workers:
            # Batches that had been sampled ahead before an interruption are sampled again, by the same weights.
            for name, weights in kept_versions.items():
                self.put(int(name.removeprefix("version ")), weights)
            yield
            this_run.meta |= {"workers_lost": self.workers.lost, "vllm": self.workers.ours.get("vllm", "")}

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
        with ray_errors(self.ray):
            self.versions[version] = self.ray.put(arrays)

    def version_of(self, number: int) -> int:
        """The version of the weights that sample the batch of an update."""
        # [V80] It depends on the number alone, not on timing.   one_step_off_policy/ray_trainer.py#L437-L515
        return max(number - self.setup.args.staleness, 0)

    def ask(self, round_number: int, version: int) -> None:
        setup, self.next = self.setup, round_number + 1
        if not self.is_main:
            return
        chunk, weights = setup.sizes.local_rollout_batch, self.versions[version]
        copies = (math.gcd(chunk, setup.args.ppo.samples_per_prompt), 1)  # rows of one prompt; a greedy one is alone
        self.asked[round_number] = [[] for _ in range(setup.accelerator.num_processes)]
        for rank, pieces in enumerate(self.asked[round_number]):
            requests = rlvr_policy.draw_problems(setup, round_number, rank).requests
            for n, (contexts, noise, temperature) in zip(copies, requests, strict=False):
                # A piece has as many rows as the learner would sample at a time, so that sums are rounded alike.
                for prompts, uniforms in zip(contexts.split(chunk), noise.split(chunk), strict=True):
                    piece = {"prompts": prompts[::n].cpu().numpy(), "n": n, "noise": uniforms.cpu().numpy()}
                    piece |= {"temperature": temperature, "version": version}
                    pieces.append(self.workers.ask(weights, piece))

    def sample(self, draw: rlvr_episodes.Draw) -> rlvr_episodes.Samples:
        """Responses to the requests of this process in a round; waits for them."""
        version = self.version_of(self.current)
        if draw.round >= self.next:
            self.ask(draw.round, version)
        started, setup = time.monotonic(), self.setup

        def wait() -> list[list[engine.Sampled]]:
            return [[piece.result() for piece in pieces] for pieces in self.asked.pop(draw.round)]

        pieces = []
        for piece in processes.from_main(wait)[setup.accelerator.process_index]:
            # A piece has one version from the first token to the last. Engine and learner agree on its ends.
            responses, logprobs = torch.tensor(piece.responses), torch.tensor(piece.logprobs)
            stopped = algebra.response_mask(responses, setup.ids.stops)[1]
            if (piece.versions != version).any() or (piece.finished != stopped.numpy()).any():
                raise RuntimeError(
                    f"round {draw.round}: a worker has answered with other weights or ends than we see"
                )
            # [V82] The sampler's log-probs are kept, in addition to those of the learner's forward pass.
            pieces.append((responses.to(setup.accelerator.device), logprobs.to(setup.accelerator.device)))
        self.waiting += time.monotonic() - started
        rows = math.ceil(setup.sizes.local_round / setup.sizes.local_rollout_batch)  # pieces of the first request
        of_requests = [pieces[:rows], pieces[rows:]] if pieces[rows:] else [pieces]
        answers = [tuple(map(torch.cat, zip(*some, strict=True))) for some in of_requests]
        return rlvr_episodes.Samples(
            draw=draw, answers=answers, version=version, on_policy=is_on_policy(self.setup.args)
        )

    def correct(self, episodes: rlvr_episodes.Rollout, number: int) -> rlvr_episodes.Correction:
        return correct(episodes, self.setup.args, number, self.setup.accelerator)

    def state(self, made: int) -> dict[str, dict[str, Tensor]]:
        """For a checkpoint: the weights that sample for the next updates, except the newest, which it has anyway."""
        needed = range(self.version_of(made), made)
        kept = {v: self.workers.wait(self.versions[v]) for v in self.versions if v in needed}
        return {f"version {v}": {name: torch.tensor(x) for name, x in kept[v].items()} for v in kept}

    def metrics(self) -> dict[str, float]:
        """Seconds of the last update: waiting for batches, and publishing."""
        waiting, self.waiting = self.waiting, 0.0
        return {"time/waiting": waiting, "time/weight_sync": self.publishing}


# ---- Workers: Ray ----------------------------------------------------------------------------------------------

LIVES = 5  # workers that one piece may cost


@dataclass(kw_only=True)
class Worker:
    actor: Any  # an engine elsewhere
    version: int | None = None  # of the weights that it has loaded


class Workers:
    """Samplers in processes of their own, each with one piece at a time. If one is lost, another samples its piece.

    Each worker has a thread here, which waits for it.
    """

    # They are Ray actors that hold an engine; only the learner's first process talks to them. Ray is an extra.
    def __init__(self, setup: rlvr_episodes.Setup, ray: Any):
        args, ids = setup.args, setup.ids
        self.ray, self.time_out, self.lost, self.closed = ray, args.time_out, 0, False
        folder = Path(args.base_model)
        self.spec = engine.Spec(
            base_model=str(folder.absolute()) if folder.is_dir() else args.base_model,
            dtype=args.dtype,
            pad=ids.pad,
            stops=ids.stops,
            trust_remote_code=args.trust_remote_code,
            lora=args.lora,
            seed=args.seed,
            threads=torch.get_num_threads(),
            vllm_python=os.path.abspath(args.vllm_python) if "/" in args.vllm_python else args.vllm_python,
            length=args.task.prompt_length + args.task.response_length,
        )
        kind = engine.VLLM if args.engine == "vllm" else engine.BuiltIn
        default = float(setup.accelerator.device.type == "cuda")
        gpus = default if args.gpus_per_worker is None else args.gpus_per_worker
        self.actor_class = ray.remote(num_cpus=1, num_gpus=gpus, scheduling_strategy="SPREAD")(kind)
        self.ours, self.actors = engine.description(), []
        self.threads = ThreadPoolExecutor(args.workers)
        self.free: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()  # None: one that is yet to be started
        for _ in range(args.workers):
            self.free.put(None)

    def ask(self, weights: Any, piece: dict[str, Any]) -> Future:
        """A promise of a Sampled. Pieces are answered in their order.

        weights: of the piece's version, published. piece: the arguments of an engine's `sample`.
        """
        return self.threads.submit(self.answer, weights, piece)

    def answer(self, weights: Any, piece: dict[str, Any]) -> engine.Sampled:
        worker, there = self.free.get(), self.ray.exceptions
        try:
            for _ in range(LIVES):
                worker = worker or self.start()
                try:
                    return self.answer_of(worker, weights, piece)
                except (there.RayActorError, there.GetTimeoutError, engine.Lost) as error:
                    self.ray.kill(worker.actor)
                    worker = None
                    if self.closed:
                        raise
                    self.lost += 1
                    errors.say(f"a worker is lost ({type(error).__name__}); another takes its place")
            raise InputError(
                f"a piece of a batch has cost {LIVES} workers; is there memory for them, are there as many free "
                f"processors and GPUs, and are {errors.flag('time_out')} {self.time_out:g} seconds enough?"
            )
        finally:
            self.free.put(worker)

    def start(self) -> Worker:
        self.actors.append(self.actor_class.remote(self.spec))
        return Worker(actor=self.actors[-1])

    def answer_of(self, worker: Worker, weights: Any, piece: dict[str, Any]) -> engine.Sampled:
        actor = worker.actor
        if worker.version is None:
            self.check(self.wait(actor.describe.remote()))
        if worker.version != piece["version"]:
            self.wait(actor.load.remote(weights, piece["version"]))
            worker.version = piece["version"]
        return self.wait(actor.sample.remote(**piece))

    def wait(self, answer: Any) -> Any:
        with ray_errors(self.ray):
            return self.ray.get(answer, timeout=self.time_out)

    def check(self, theirs: dict[str, str]) -> None:
        """Refuse a worker that has another package or other libraries."""
        if other := [name for name, value in self.ours.items() if name != "place" and theirs.get(name) != value]:
            raise InputError(
                f"a worker ({theirs['place']}) has {other[0]} {theirs.get(other[0])}, the learner or another "
                f"worker {self.ours[other[0]]}; install the same on all machines"
            )
        self.ours = theirs | self.ours  # a version of vLLM too, which the next must have

    def close(self) -> None:
        """Stop everything; what is under way fails."""
        self.closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        for actor in self.actors:
            self.ray.kill(actor)
        self.threads.shutdown()


@contextlib.contextmanager
def connected(args: Args) -> Iterator[Any]:
    """Ray, on the first process; the others get None."""
    with contextlib.ExitStack() as at_end:
        yield processes.on_main(lambda: connect(args, at_end))


def connect(args: Args, at_end: contextlib.ExitStack) -> Any:
    """Ray. It is shut down with at_end, unless it was running before: the caller of train() may have started it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends statistics to its makers
    try:
        import ray  # an extra
    except ModuleNotFoundError as error:
        raise InputError("sampling in other processes needs Ray: pip install -e '.[async]'") from error
    if ray.is_initialized():
        return ray
    own = {"address": "local", "num_cpus": args.workers + 1, "include_dashboard": False}
    where = {"address": args.ray_address} if args.ray_address else own
    host, _, port = args.ray_address.removeprefix("ray://").rpartition(":")
    # Ray starts in a thread of its own. In the main thread it would replace our handler of SIGTERM, and a signal
    # would leave it half started, which makes it crash later. Its processes end with the thread that started them.
    starter = at_end.enter_context(ThreadPoolExecutor(1))
    # This starts the thread. If a signal cut its start off, the next submit would start a second thread.
    starter.submit(int).result()
    at_end.callback(lambda: starter.submit(ray.shutdown).result())
    try:
        if port.isdecimal():  # where no cluster listens, Ray would wait for twelve minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        starter.submit(ray.init, **where, log_to_driver=False, logging_level="error").result()
    except (OSError, RuntimeError, ValueError, OverflowError) as error:  # some are of other versions of Ray or Python
        hint = "; `ray start --head` prints the address of a cluster" * bool(args.ray_address)
        raise InputError(
            f"{errors.flag('ray_address')} {args.ray_address or '(a cluster of its own)'}: {error}{hint}"
        ) from error
    return ray


@contextlib.contextmanager
def ray_errors(ray: Any) -> Iterator[None]:
    """Turns errors that another worker could not fix into one line."""
    there = ray.exceptions
    try:
        yield
    except (there.ObjectStoreFullError, there.OutOfDiskError) as error:
        raise InputError(
            f"Ray's object store has no room for the weights: {str(error).splitlines()[0]}; give it more "
            f"(ray start --object-store-memory), or the disk that it spills to"
        ) from error
    except there.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise InputError(f"a worker says: {error.cause}") from error
        raise
    except there.RayActorError as error:
        if not error.actor_init_failed:
            raise
        raise InputError(
            f"a worker cannot start: {str(error).strip().splitlines()[-1].split(': ', 1)[-1]}"
        ) from error
    except there.RaySystemError as error:
        raise InputError(f"Ray is gone: {str(error).splitlines()[0]}; {errors.how_to_go_on}") from error


# ---- Corrections: the policy that samples is older than the one that learns -------------------------------------

ROUNDING = 1e-4  # by which a ratio of equal weights may be off 1 in float32


def correct(
    episodes: rlvr_episodes.Rollout, args: Args, number: int, accelerator: Accelerator
) -> rlvr_episodes.Correction:
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
    # Weights of each token or of its response; they are capped below.
    weights = algebra.importance_weights(prox, mu, mask, kind=args.correction_level, cap=math.inf)
    each = weights[mask] if args.correction_level == "token" else weights.amax(1)[mask.any(1)]
    clipped, each = each > args.correction_cap * (1 + ROUNDING), each.clamp(max=args.correction_cap)
    weights, mean = weights.clamp(max=args.correction_cap), mean_of(each)
    if args.correction_normalised and mask.any():
        # Divided by the mean over the batch on all processes.   rollout_corr_helper.py#L566-L597
        weights = weights / mean
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
        engine.check_gap(mean_of((prox - mu).abs()[mask]).item(), args.dtype)
    metrics |= {"async/staleness_mean": age.mean().item(), "async/staleness_max": age.max().item()}
    metrics |= {"async/weight_mean": mean.item()}
    metrics |= {"async/clipped_share": mean_of(clipped).item()}
    metrics |= {"async/rejected_share": mean_of(~kept[mask]).item()}

    # Advantages are those of all tokens, and a rejection only leaves tokens out of the loss. But a response of which
    # every token is rejected leaves its group's baseline too.
    masks = {"mask": episodes.mask & kept[mine].any(1, keepdim=True), "loss_mask": episodes.loss_mask & kept[mine]}
    way = correction_of(args)
    # [V84] With bypass, the old log-probs are the sampler's.   core_algos.py#L2065-L2195
    logprobs = episodes.sampler_logprobs if way == "bypass" else episodes.logprobs
    return rlvr_episodes.Correction(
        episodes=dataclasses.replace(episodes, **masks, logprobs=logprobs),
        # [V83] The clip is around prox, and the weight leads from mu to prox.   core_algos.py#L1237
        weights=weights[mine] if way == "decoupled" else None,
        reweigh=newest_factors(args),
        metrics=metrics,
    )


def newest_factors(args: Args) -> rlvr_episodes.Reweigh | None:
    """Factors of the policy's losses that each pass computes from the newest policy; None if there are none."""
    has_weights = correction_of(args) == "bypass" and args.ppo.loss == "reinforce"
    if not has_weights and args.off_policy_mask is None:
        return None

    def factors(new_logprobs: Tensor, mb: rlvr_episodes.Batch) -> Tensor:
        found = torch.ones_like(new_logprobs)
        if has_weights:
            found = algebra.importance_weights(
                new_logprobs, mb.logprobs, mb.loss_mask, kind=args.correction_level, cap=args.correction_cap
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


def correction_of(args: Args) -> str:
    if args.correction != "auto":
        return args.correction
    return "none" if is_on_policy(args) else "decoupled"


def is_on_policy(args: Args) -> bool:
    # [V90] Another engine's log-probs differ from ours even with the same weights.
    return not args.staleness and args.engine == "built-in"


# ---- Plumbing --------------------------------------------------------------------------------------------------


def check_arguments(args: Args) -> None:
    if not args.rejection_low <= 1 - ROUNDING < 1 + ROUNDING <= args.rejection_high:
        raise InputError(
            f"{errors.flag('rejection_low')} {args.rejection_low} and {errors.flag('rejection_high')} "
            f"{args.rejection_high} must have 1 between them, the ratio of what has not changed, and {ROUNDING:g} on "
            f"either side for rounding; {Args.rejection_low} and {Args.rejection_high} would do"
        )
    for problem in without_effect(args):
        raise InputError(problem)
    if args.engine == "vllm" and not args.vllm_python:
        raise InputError(
            f"{errors.flag('engine')} vllm needs {errors.flag('vllm_python')}, the interpreter that has vLLM"
        )
    if args.engine == "vllm" and (args.lora.rank or args.dtype == "float64"):
        raise InputError(
            f"{errors.flag('engine')} vllm goes with {errors.flag('lora.rank')} 0, and "
            f"{errors.flag('dtype')} float32 or bfloat16"
        )
    if args.engine == "vllm" and not 0.01 <= args.task.temperature <= 2:
        raise InputError(f"{errors.flag('task.temperature')} {args.task.temperature}: vLLM takes 0.01 to 2")
    if args.engine == "vllm" and args.gpus_per_worker not in (None, 1):
        raise InputError(f"{errors.flag('gpus_per_worker')} {args.gpus_per_worker}: vLLM takes a whole GPU")
    if args.ppo.filter_groups and args.staleness:
        raise InputError(
            f"{errors.flag('ppo.filter_groups')} goes with {errors.flag('staleness')} 0: which rounds a batch needs, "
            f"and so what could be sampled ahead for it, is known only when the batch before it is full"
        )
    threads, busy, cores = torch.get_num_threads(), args.workers + (args.staleness > 0), os.cpu_count() or 1
    if busy * threads > cores and not args.ray_address and not torch.cuda.is_available():
        errors.say(
            f"{busy} processes of {threads} threads each share {cores} cores and slow each other down; "
            f"PPO_RLHF_THREADS={max(1, cores // busy)} would be faster"
        )
    if args.correction == "none" and (args.staleness or args.engine == "vllm"):
        # [V82] As open-instruct did until 7917d41 (March 2026).
        errors.say(
            f"{errors.flag('correction')} none: the ratio starts at 1 although older weights have sampled, or vLLM, "
            f"and nothing makes up for that"
        )


def without_effect(args: Args) -> Iterator[str]:
    """Arguments of the corrections that were given although nothing reads them: they are not at their defaults."""
    way, flag = correction_of(args), errors.flag
    # [V56] With bypass, only the loss reinforce has weights, because it has no ratio.
    weights = way == "decoupled" or (way == "bypass" and args.ppo.loss == "reinforce")
    acts = {"correction_level": weights, "correction_cap": weights, "correction_normalised": way == "decoupled"}
    acts |= dict.fromkeys(("rejection_low", "rejection_high"), args.rejection != "none")
    for name in acts:
        value, usual = getattr(args, name), getattr(Args, name)
        if not acts[name] and value != usual:
            chosen = f"{flag('rejection')} none" if name.startswith("rejection") else f"{flag('correction')} {way}"
            yield f"{flag(name)} {value} does nothing with {chosen}; leave it at {usual}"


if __name__ == "__main__":
    cli.run_script(train, lambda argv: cli.parse_args(PRESETS, argv, __doc__))
