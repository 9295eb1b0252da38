"""Rollouts and learner apart: chapter 3, asynchronous, and still the same numbers each time (but for vLLM's).

rlvr_policy.py samples and trains in turn, so that one of the two always waits. Here workers, processes of their own
on this machine or others, sample ahead while the learner trains. With staleness K, the batch of update t is sampled
by the weights that had seen max(t - K, 0) updates, version t - K, whatever the timing, the number of workers, or what
becomes of them. (With filter_groups, which needs K = 0, what an update leaves over is trained on in the next.)

    learner, update t                                            worker, again and again

    a. publish the weights: version t
    b. ask for batch t + K, of version t          pieces ->      wait for a piece: prompts, noise, version
    c. wait for batch t, of version t - K                        load that version, if it is another
       1. to 5. of rlvr_policy.py, but for       <- answers      sample: ids, their log-probs, the version
       the sampling
    d. correct for the age of the weights
       6. to 8. of rlvr_policy.py

Time goes from left to right; v1 is the weights after the first update:

    K = 0   workers   | batch 0, v0 |          | batch 1, v1 |          | batch 2, v2 |
            learner                 | update 0 |             | update 1 |             | update 2 |

    K = 1   workers   | batch 0, v0 | batch 1, v0 | batch 2, v1 | batch 3, v2 |
            learner                 | update 0 |  | update 1 |  | update 2 |  | update 3 |

At most K batches lie ready; then workers wait. Nothing is dropped, for what takes longest would be dropped first:
long answers. Sampling noise belongs to the episode. So a piece that was lost with its worker is sampled again, the
same, by another; and with K = 0 metrics and weights are those of rlvr_policy.py, bit for bit.

Marks like [V81] name an implementation detail. The original is verl-project/verl at commit b178a3c; its file and line
stand beside the mark. See docs/details.

    pip install -e '.[async]'
    python ppo_rlhf/rlvr_async.py --preset sums --staleness 1 --workers 2 --ppo.local_rollout_batch_size 64
    python ppo_rlhf/rlvr_async.py --resume runs/<run>           # go on after an interruption
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from ppo_rlhf import rlvr_policy
from ppo_rlhf.lib import cli, engine, errors, processes, run
from ppo_rlhf.lib.errors import InputError

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args(rlvr_policy.Args):
    exp_name: str = "rlvr_async"
    staleness: int = 1
    """how many updates old the weights are that sample a batch, fewer at the start; 0: sampling and training take
    turns"""
    workers: int = 1
    """processes that sample"""
    engine: Literal["built-in", "vllm"] = "built-in"
    """what samples: PyTorch, as in rlvr_policy.py, or vLLM"""
    vllm_python: str = ""
    """with vllm: the interpreter of an environment that has it, on every machine with workers"""
    ray_address: str = ""
    """of a Ray cluster, such as auto for the one of this machine; empty: one of this run's own"""
    gpus_per_worker: float | None = None
    """GPUs of a worker, which may be a part of one; None: 1 if the learner has one, else 0"""
    time_out: float = 600.0
    """seconds that a worker may take to start, and for one piece, before another takes its place"""
    correction: Literal["auto", "decoupled", "bypass", "none"] = "auto"
    """what is done about the age of the weights that have sampled; see `correct`. auto: decoupled if staleness is
    above 0 or vLLM samples, else none"""
    correction_level: Literal["token", "sequence"] = "token"
    """whether a token has an importance weight of its own, or that of its whole response"""
    correction_cap: float = 2.0
    """the largest weight: truncated importance sampling, TIS"""
    correction_normalised: bool = False
    """divide the weights by their mean over the batch"""
    rejection: Literal["none", "token", "sequence"] = "none"
    """leave out of the loss what has a ratio out of bounds: tokens (masked importance sampling, MIS, as in IcePop),
    or responses by the geometric mean of theirs"""
    rejection_low: float = 0.5
    """the smallest ratio that is kept"""
    rejection_high: float = 2.0
    """the largest ratio that is kept"""


def preset(args: rlvr_policy.Args) -> Args:
    """The same, sampled ahead if that can be."""
    same = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    return Args(**same | {"exp_name": Args.exp_name, "staleness": 0 if args.ppo.filter_groups else Args.staleness})


PRESETS = {name: preset(args) for name, args in rlvr_policy.PRESETS.items()}

# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args) -> Path:
    """As train of rlvr_policy.py, with samplers in processes of their own."""
    accelerator = processes.make_accelerator()
    check_arguments(args)
    with connected(args) as ray:
        learner = rlvr_policy.Learner(args)
        setup, updates, controller = learner.setup, learner.setup.sizes.updates, learner.controller
        progress = learner.run.progress("RLVR", updates, learner.first_update)
        with last_words(accelerator), Batches(learner, ray) as batches, progress as advance:
            for number in range(learner.first_update, updates):
                # a. Publish the weights, and b. ask for batches.
                batches.publish(number)
                batches.ask_up_to(min(number + args.staleness, updates - 1))
                learner.begin(number)

                # c. Wait for the batch, and read and score it with the learner's own networks: 1. to 4.
                with learner.actor_critic.sampling():
                    found = rlvr_policy.fill_batch(setup, batches.roll_out, learner.rounds, learner.surplus)
                batch, generated, learner.surplus, learner.rounds = found

                # [V88] The KL in the reward is that of the policy that learns, the score of another's text.
                batch = rlvr_policy.with_rewards(batch, controller.value, args.rewards.kl_estimator)  # 5.

                # d. Correct, 6. advantages and returns, and 7. epochs over minibatches.
                trained, weights, mismatch = correct(batch, args, number, accelerator)
                steps, estimate = learner.update(number, trained, weights)

                # 8. Log, and adapt the KL coefficient.
                mismatch |= batches.seconds()
                advance(learner.log(number, batch, generated, steps, estimate, trained, **mismatch))
                learner.save(number, batches.kept_versions)
    return learner.finish()


# ---- Batches that are sampled ahead ----------------------------------------------------------------------------


class Batches:
    """What was asked for and not yet taken. The main process asks, and shares the answers with the others."""

    def __init__(self, learner: rlvr_policy.Learner, ray: Any):
        self.learner, self.ray, self.is_main = learner, ray, learner.accelerator.is_main_process
        self.staleness = learner.setup.args.staleness
        self.asked: dict[int, list[list[Future]]] = {}  # of each round the pieces of each process
        self.next = learner.rounds  # round to ask for; without filter_groups, each update has one
        self.versions: dict[int, Any] = {}  # published weights
        self.waiting = self.publishing = 0.0  # seconds

    def __enter__(self) -> Batches:
        if self.is_main:
            self.workers = Workers(self.learner.setup, self.ray)
            # What had been sampled ahead when the run was cut off is sampled again, by the weights of then.
            for name, weights in self.learner.parts.items():
                self.put(int(name.removeprefix("version ")), weights)
        self.learner.parts.clear()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_main:
            self.workers.close()
            self.learner.run.meta |= {"workers_lost": self.workers.lost, "vllm": self.workers.ours.get("vllm", "")}

    def publish(self, version: int) -> None:
        """Make the policy's weights known as this version; forget those that no batch needs any more."""
        started = time.monotonic()
        # [V92] Everything that learns by its name, tied weights once, as one object with its version.
        parameters = run.trained_parameters(self.learner.actor_critic.lm_backbone)
        weights = {name: processes.gather_for_saving(parameter) for name, parameter in parameters.items()}
        from_main(lambda: self.put(version, weights))
        self.versions = {old: weights for old, weights in self.versions.items() if old >= self.version_of(version)}
        self.current, self.publishing = version, run.seconds_since(started)

    def put(self, version: int, weights: dict[str, Tensor]) -> None:
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in weights.items()}
        with ray_errors(self.ray):
            self.versions[version] = self.ray.put(arrays)

    def version_of(self, number: int) -> int:
        """Of the weights that sample the batch of an update."""
        # [V80] [V81] Settled by the number alone: no timing moves it.   one_step_off_policy/ray_trainer.py#L437-L515
        return max(number - self.staleness, 0)

    def ask_up_to(self, number: int) -> None:
        """Ask for what was not asked for yet, up to the batch of this update."""
        if self.learner.setup.args.ppo.filter_groups:
            return  # how many rounds a batch has shows when they are there
        while self.next <= number:
            self.ask(self.next, self.version_of(self.next))

    def ask(self, round_number: int, version: int) -> None:
        setup, self.next = self.learner.setup, round_number + 1
        if not self.is_main:
            return
        chunk, weights = setup.sizes.local_rollout_batch, self.versions[version]
        copies = (math.gcd(chunk, setup.args.ppo.samples_per_prompt), 1)  # rows of one prompt; a greedy one is alone
        self.asked[round_number] = [[] for _ in range(setup.accelerator.num_processes)]
        for rank, pieces in enumerate(self.asked[round_number]):
            _, _, requests = rlvr_policy.draw_round(setup, round_number, rank)
            for n, (contexts, noise, temperature) in zip(copies, requests, strict=False):
                # As many rows at a time as the learner would sample, so that all sums are rounded alike.
                for prompts, uniforms in zip(contexts.split(chunk), noise.split(chunk), strict=True):
                    pieces.append(self.workers.ask(weights, prompts[::n], n, uniforms, temperature, version))

    def roll_out(self, round_number: int) -> rlvr_policy.Rollout:
        """A round, sampled elsewhere."""
        learner, version = self.learner, self.version_of(self.current)
        if round_number >= self.next:
            self.ask(round_number, version)
        answers = iter(self.take(round_number, version))
        # rollout() asks for what was asked for, in the same order.
        parts = (learner.setup, learner.actor_critic, learner.reference, lambda *_, **__: next(answers))
        return rlvr_policy.rollout(*parts, round_number, version=version)

    def take(self, round_number: int, version: int) -> list[tuple[Tensor, Tensor]]:
        """Responses and their log-probs, piece by piece, of this process; waits for them."""
        started, accelerator, stops = time.monotonic(), self.learner.accelerator, self.learner.setup.ids.stops

        def wait() -> list[list[engine.Sampled]]:
            return [[piece.result() for piece in pieces] for pieces in self.asked.pop(round_number)]

        mine = from_main(wait)[accelerator.process_index]
        for piece in mine:
            # [V91] Of one version from the first token to the last; the engine and we see the same ends.
            stopped = rlvr_policy.response_mask(torch.tensor(piece.responses), stops)[1]
            if (piece.versions != version).any() or (piece.finished != stopped.numpy()).any():
                raise RuntimeError(
                    f"round {round_number}: a worker has answered with other weights or ends than we see"
                )
        self.waiting += run.seconds_since(started)
        # [V82] The sampler's own log-probs stay beside those that the learner's forward pass finds.
        tensors = ((torch.tensor(piece.responses), torch.tensor(piece.logprobs)) for piece in mine)
        return [(ids.to(accelerator.device), logprobs.to(accelerator.device)) for ids, logprobs in tensors]

    def kept_versions(self) -> dict[str, dict[str, Tensor]]:
        """For a checkpoint: the weights that sample for the next updates, without the newest, which it has anyway."""
        kept = {
            v: self.workers.wait(self.versions[v]) for v in self.versions if v >= self.version_of(self.current + 1)
        }
        return {f"version {v}": {name: torch.tensor(x) for name, x in kept[v].items()} for v in kept}

    def seconds(self) -> dict[str, float]:
        """Of the last update: waiting for batches, and publishing."""
        waiting, self.waiting = self.waiting, 0.0
        return {"time/waiting": waiting, "time/weight_sync": self.publishing}


def from_main(function: Callable[[], Any]) -> Any:
    """What a function gives on the main process, on every process, which must all call this; also an InputError."""
    made, problem = None, ""
    if errors.is_first_process():
        try:
            made = function()
        except InputError as error:
            problem = str(error)
    processes.fail_together(problem)
    return broadcast_object_list([made])[0]


# ---- Workers: Ray ----------------------------------------------------------------------------------------------

LIVES = 5  # workers that one piece may cost


@dataclass
class Worker:
    actor: Any  # an engine elsewhere
    version: int | None = None  # of the weights that it has loaded


class Workers:
    """Samplers in processes of their own, each with one piece at a time; what a lost one had, its successor samples.

    Each worker has a thread here, which waits for it.
    """

    # [V97] Actors that hold an engine; Ray is an extra. The learner's first process alone talks to them.
    def __init__(self, setup: rlvr_policy.Setup, ray: Any):
        args, ids = setup.args, setup.ids
        self.ray, self.time_out, self.lost, self.closed = ray, args.time_out, 0, False
        folder = Path(args.base_model)
        self.spec = engine.Spec(
            str(folder.absolute()) if folder.is_dir() else args.base_model,
            *(args.dtype, ids.pad, ids.stops, args.trust_remote_code, args.lora, args.seed, torch.get_num_threads()),
            os.path.abspath(args.vllm_python) if "/" in args.vllm_python else args.vllm_python,
            args.task.prompt_length + args.task.response_length,
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

    def ask(self, weights: Any, prompts: Tensor, n: int, noise: Tensor, temperature: float, version: int) -> Future:
        """A promise of a Sampled. weights: those of the version, published. What is asked for first comes first."""
        piece = (prompts.cpu().numpy(), n, noise.cpu().numpy(), temperature, version)
        return self.threads.submit(self.answer, weights, piece)

    def answer(self, weights: Any, piece: tuple) -> engine.Sampled:
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
                    run.say(f"a worker is lost ({type(error).__name__}); another takes its place")
            raise InputError(
                f"a piece of a batch has cost {LIVES} workers; is there memory for them, are there as many free "
                f"processors and GPUs, and are {cli.flag('time_out')} {self.time_out:g} seconds enough?"
            )
        finally:
            self.free.put(worker)

    def start(self) -> Worker:
        self.actors.append(self.actor_class.remote(self.spec))
        return Worker(self.actors[-1])

    def answer_of(self, worker: Worker, weights: Any, piece: tuple) -> engine.Sampled:
        actor, version = worker.actor, piece[-1]
        if worker.version is None:
            self.check(self.wait(actor.describe.remote()))
        if worker.version != version:
            self.wait(actor.load.remote(weights, version))
            worker.version = version
        return self.wait(actor.sample.remote(*piece))

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
    ray, problem = None, ""
    with contextlib.ExitStack() as at_end:
        if errors.is_first_process():
            try:
                ray = connect(args, at_end)
            except InputError as error:
                problem = str(error)
        processes.fail_together(problem)
        yield ray


def connect(args: Args, at_end: contextlib.ExitStack) -> Any:
    """Ray. It is ended with at_end, unless it was there before: a program that calls train() may have started it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers
    try:
        import ray  # an extra
    except ModuleNotFoundError as error:
        raise InputError("rollouts apart from the learner need Ray: pip install -e '.[async]'") from error
    if ray.is_initialized():
        return ray
    own = {"address": "local", "num_cpus": args.workers + 1, "include_dashboard": False}
    where = {"address": args.ray_address} if args.ray_address else own
    host, _, port = args.ray_address.removeprefix("ray://").rpartition(":")
    # Ray starts in a thread of its own. In the main thread it would replace our handler of SIGTERM, and a signal
    # would leave it half started, which makes it crash later. Its processes end with the thread that started them.
    starter = at_end.enter_context(ThreadPoolExecutor(1))
    at_end.callback(lambda: starter.submit(ray.shutdown).result())
    try:
        if port.isdecimal():  # where no cluster listens, Ray would wait for twelve minutes
            greet(host.strip("[]"), int(port))
        starter.submit(ray.init, **where, log_to_driver=False, logging_level="error").result()
    except (OSError, RuntimeError, ValueError, OverflowError) as error:  # some are of other versions of Ray or Python
        hint = "; `ray start --head` prints the address of a cluster" * bool(args.ray_address)
        raise InputError(
            f"{cli.flag('ray_address')} {args.ray_address or '(a cluster of its own)'}: {error}{hint}"
        ) from error
    return ray


def greet(host: str, port: int) -> None:
    """Raise an OSError unless a server answers here in HTTP/2, which Ray speaks, within ten seconds."""
    with socket.create_connection((host, port), timeout=10) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return  # Ray then speaks HTTP/2 within TLS
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        # Both sides begin with a frame of settings: three bytes of length, type 4, and five more (RFC 9113, 3.4).
        if connection.makefile("rb").read(9)[3:4] != b"\4":
            raise OSError("another program than Ray listens there")


@contextlib.contextmanager
def last_words(accelerator: Accelerator) -> Iterator[None]:
    """If Ray's own processes die, its library ends this one without a word; a second process stands by to say so."""
    if not accelerator.is_main_process:
        yield
        return
    words = f"error: this process has died: Ray was lost, or it was killed; {errors.how_to_go_on}"
    code = "import os, sys; os.read(0, 1) or print(sys.argv[1], file=sys.stderr)"  # without a word, the end
    options = {"stdin": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", code, words], **options) as witness:
        try:
            yield
        finally:
            witness.communicate("ended as it should, or with an error of its own")


@contextlib.contextmanager
def ray_errors(ray: Any) -> Iterator[None]:
    """Turns what cannot be mended by another worker into one line."""
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


# ---- Corrections: what samples is older than what learns ---------------------------------------------------------

ROUNDING = 1e-4  # by which a ratio of equal weights may be off 1 in float32


def correct(
    batch: rlvr_policy.Rollout, args: Args, number: int, accelerator: Accelerator
) -> tuple[rlvr_policy.Rollout, rlvr_policy.Weights | None, dict[str, float]]:
    """The batch as the losses take it, factors of its tokens' losses (None: all 1), and how far the sampler is off.

    With mu the policy that has sampled, prox the learner's when the batch arrived and new the one that learns:

        decoupled   min(prox / mu, cap) * the loss of the ratio new / prox
        bypass      the loss of the ratio new / mu: its clip also counts how far prox has come from mu. The loss
                    reinforce has no ratio and gets a factor instead: min(new / mu, cap) * the loss
        none        the loss of the ratio new / prox: as if prox had sampled

    number: of the update. Every process must call this, and all find the same of the whole batch.
    """
    whole = (batch.logprobs, batch.sampler_logprobs, batch.mask, batch.versions)
    # (batch, response_length) the first three, (batch,) the last
    prox, mu, mask, versions = (accelerator.gather(tensor.contiguous()) for tensor in whole)
    mine = slice(accelerator.process_index * len(batch.mask), (accelerator.process_index + 1) * len(batch.mask))
    # Weights of each token or of its response; they are capped below.
    weights = rlvr_policy.importance_weights(prox, mu, mask, args.correction_level, math.inf)
    each = weights[mask] if args.correction_level == "token" else weights.amax(1)[mask.any(1)]
    clipped, each = each > args.correction_cap * (1 + ROUNDING), each.clamp(max=args.correction_cap)
    weights, mean = weights.clamp(max=args.correction_cap), mean_of(each)
    if args.correction_normalised and mask.any():
        # [V86] By the mean over the batch on all processes.   rollout_corr_helper.py#L566-L597
        weights = weights / mean
    kept = mask
    if args.rejection != "none":
        kept = rlvr_policy.rejection_mask(prox, mu, mask, args.rejection, args.rejection_low, args.rejection_high)
    # Always, also where the weights are the same.
    metrics = {f"async/{name}": value.item() for name, value in rlvr_policy.mismatch(prox, mu, mask).items()}
    age = (number - versions).double()
    if not age.any():
        # [V94] Where both have the same weights.
        engine.check_gap(mean_of((prox - mu).abs()[mask]).item(), args.dtype)
    metrics |= {"async/staleness_mean": age.mean().item(), "async/staleness_max": age.max().item()}
    metrics |= {"async/weight_mean": mean.item()}
    metrics |= {"async/clipped_share": mean_of(clipped).item()}
    metrics |= {"async/rejected_share": mean_of(~kept[mask]).item()}

    # Advantages are those of all tokens: a rejection narrows the loss alone. But a response that is rejected whole
    # leaves its group's baseline too.
    masks = {"mask": batch.mask & kept[mine].any(1, keepdim=True), "loss_mask": batch.loss_mask & kept[mine]}
    trained, way = dataclasses.replace(batch, **masks), correction_of(args)
    if way == "decoupled":
        # [V83] The clip is around prox, the weight leads from mu to prox.   core_algos.py#L1237
        return trained, weights[mine], metrics
    if way == "none":
        return trained, None, metrics
    # [V84] Old is what the sampler says.   core_algos.py#L2065-L2195
    trained = dataclasses.replace(trained, logprobs=batch.sampler_logprobs)

    def weights_now(new_logprobs: Tensor, mb: rlvr_policy.Rollout) -> Tensor:
        told = (mb.logprobs, mb.loss_mask, args.correction_level, args.correction_cap)
        return rlvr_policy.importance_weights(new_logprobs, *told)

    return trained, weights_now if args.ppo.loss == "reinforce" else None, metrics


def mean_of(numbers: Tensor) -> Tensor:
    """Their mean, 0-d; 0 where there are none, as in a batch of which no response can be scored."""
    return numbers.double().sum() / max(len(numbers), 1)


def correction_of(args: Args) -> str:
    if args.correction != "auto":
        return args.correction
    # [V90] Another engine's log-probs are never quite ours, whatever its weights.
    return "decoupled" if args.staleness or args.engine == "vllm" else "none"


# ---- Plumbing --------------------------------------------------------------------------------------------------


def check_arguments(args: Args) -> None:
    cli.at_least(0, "", args, "staleness")
    cli.at_least(1, "", args, "workers")
    cli.at_least(1, "", args, "correction_cap")
    cli.above_zero("", args, "time_out", "rejection_low")
    cli.at_least(0, "", args, *(["gpus_per_worker"] if args.gpus_per_worker is not None else []))
    if not args.rejection_low <= 1 - ROUNDING < 1 + ROUNDING <= args.rejection_high:
        raise InputError(
            f"{cli.flag('rejection_low')} {args.rejection_low} and {cli.flag('rejection_high')} "
            f"{args.rejection_high} must have 1 between them, the ratio of what has not changed, and {ROUNDING:g} on "
            f"either side for rounding; {Args.rejection_low} and {Args.rejection_high} would do"
        )
    for problem in without_effect(args):
        raise InputError(problem)
    if args.engine == "vllm" and not args.vllm_python:
        raise InputError(f"{cli.flag('engine')} vllm wants {cli.flag('vllm_python')}, the interpreter that has vLLM")
    if args.engine == "vllm" and (args.lora.rank or args.dtype == "float64"):
        raise InputError(
            f"{cli.flag('engine')} vllm goes with {cli.flag('lora.rank')} 0, and {cli.flag('dtype')} float32 or "
            f"bfloat16"
        )
    if args.engine == "vllm" and not 0.01 <= args.task.temperature <= 2:
        raise InputError(f"{cli.flag('task.temperature')} {args.task.temperature}: vLLM takes 0.01 to 2")
    if args.engine == "vllm" and args.gpus_per_worker not in (None, 1):
        raise InputError(f"{cli.flag('gpus_per_worker')} {args.gpus_per_worker}: vLLM takes a whole GPU")
    if args.ppo.filter_groups and args.staleness:
        raise InputError(
            f"{cli.flag('ppo.filter_groups')} goes with {cli.flag('staleness')} 0: which rounds a batch needs, "
            f"and so what could be sampled ahead for it, is known only when the batch before it is full"
        )
    threads, busy, cores = torch.get_num_threads(), args.workers + (args.staleness > 0), os.cpu_count() or 1
    if busy * threads > cores and not args.ray_address and not torch.cuda.is_available():
        run.say(
            f"{busy} processes of {threads} threads each share {cores} cores and slow each other down; "
            f"PPO_RLHF_THREADS={max(1, cores // busy)} would be faster"
        )
    if args.correction == "none" and (args.staleness or args.engine == "vllm"):
        # [V82] As open-instruct did until 7917d41 (March 2026).
        run.say(
            f"{cli.flag('correction')} none: the ratio starts at 1 although older weights have sampled, or vLLM, "
            f"and nothing makes up for that"
        )


def without_effect(args: Args) -> Iterator[str]:
    """Arguments of the corrections that nothing reads, although they were given: they are not at their defaults."""
    way, flag = correction_of(args), cli.flag
    # [V56] The loss reinforce has no ratio; in its place it has weights with bypass too.
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
