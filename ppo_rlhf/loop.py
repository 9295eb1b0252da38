"""PPO inside a loop of your own: generate responses, score them as you like, make one update.

    from ppo_rlhf.loop import PPO

    ppo = PPO("gpt2", lr=1e-5)
    for _ in range(100):
        batch = ppo.generate(["The movie was"] * 64)
        scores = [float(response.count("good")) for response in batch.responses]
        metrics = ppo.step(batch, scores)
    ppo.save("models/mine")  # opens with AutoModelForCausalLM

The update is that of chapter 2, by its own functions: responses of any length, a penalty on the KL divergence from
a reference, which is the model at the start unless you name another, a critic, GAE, whitened advantages, and epochs
of clipped losses. Rewards may also come where they happen: on a token, at the end of a step or of a turn.
loop_models.py makes the networks. docs/from_trl.md has programs to begin with, and says what is called what in TRL.

Under `accelerate launch`, each process generates for queries of its own, as many as every other. Gradients, metrics
and whitening are over all of them together.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never

import torch
import torch.nn.functional as F
from accelerate.tracking import filter_trackers
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.loop_inputs import (
    Chat,
    Reward,
    Text,
    as_a_guest,
    in_arguments_of_loop,
    listed,
    name_of,
    place_rewards,
    plain,
    read_mask,
    read_scores,
    refuse,
    token_rows,
)
from ppo_rlhf.loop_models import SHARED, lora_of, make_networks
from ppo_rlhf.tldr import models, packing
from ppo_rlhf.tldr.policy import (
    FIRST_RATIO_TOLERANCE,
    Args,
    PpoArgs,
    RewardsArgs,
    Rollout,
    compute_rewards,
    ppo_update,
    reference_logprobs,
    update_metrics,
)
from ppo_rlhf.tldr.responses import draw_minibatches, generate_until
from ppo_rlhf.tldr.shares import sum_over_processes
from ppo_rlhf.train_policy import (
    AdaptiveKLArgs,
    AdaptiveKLController,
    InputError,
    TaskArgs,
    checked,
    episode_noise,
    flatten,
    float64_device,
    has_stop,
    input_errors,
    make_accelerator,
    padded,
    to_texts,
    vocabulary_size,
    weights_dtype,
)
from ppo_rlhf.train_reward import RewardModel

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel  # slow to import, and used by few


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Queries and responses of this process, as policy, critic and reference read them before the next step."""

    queries: list[str]
    responses: list[str]
    response_ids: list[list[int]]  # with the token that ends a text, where there is one
    stopped: list[bool]  # whether there is one
    step: int  # how many steps the policy had made
    maker: str  # names the weights that read it
    rollout: Rollout  # rewards are 0, because there are no scores yet
    ref_logprobs: Tensor  # (batch, response_length)

    def state_dict(self) -> dict[str, Any]:
        """Lists, texts, numbers and tensors, such as `torch.save` stores, for `Batch.from_state_dict`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Batch:
        """The batch again, for a PPO whose state was stored after the batch was made, and before the next step."""
        try:
            return cls(**state | {"rollout": Rollout(**state["rollout"])})
        except (TypeError, KeyError) as error:
            raise InputError(f"this is no state of a batch: {error}") from error


class PPO:
    """A policy, its critic, the reference, and an optimiser for the first two."""

    def __init__(
        self,
        model: str | Path | PreTrainedModel | PeftModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        critic: Literal["shared"] | str | Path | RewardModel | None = None,
        value_gradient: bool = True,
        reference: str | Path | PreTrainedModel | None = None,
        lora: Mapping[str, Any] | LoraConfig | models.LoraArgs | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        lr: float = PpoArgs.lr,
        adam_eps: float = PpoArgs.adam_eps,
        weight_decay: float = PpoArgs.weight_decay,
        max_grad_norm: float | None = None,
        nminibatches: int = PpoArgs.nminibatches,
        noptepochs: int = PpoArgs.noptepochs,
        cliprange: float = PpoArgs.cliprange,
        cliprange_value: float = PpoArgs.cliprange_value,
        vf_coef: float = PpoArgs.vf_coef,
        gamma: float = PpoArgs.gamma,
        lam: float = PpoArgs.lam,
        whiten_rewards: bool = PpoArgs.whiten_rewards,
        kl_coef: float = 0.05,
        kl_target: float | None = None,
        kl_horizon: float = 10_000,
        response_length: int = 48,
        temperature: float = 0.7,
        local_micro_batch_size: int = PpoArgs.local_micro_batch_size,
        local_rollout_batch_size: int = PpoArgs.local_rollout_batch_size,
        dtype: Literal["float32", "bfloat16", "float64"] = "float32",
        frozen_bfloat16: bool = False,
        gradient_checkpointing: bool = False,
        seed: int = 1,
        log_with: str | list[str] | None = None,
        tracker_project_name: str = "ppo_rlhf",
        logging_dir: str | Path = "runs",
        trust_remote_code: bool = False,
        **others: Never,
    ):
        """model: a causal language model, its folder or its name on the hub. A loaded one needs its tokenizer, and is
        trained in place; of one of peft's with LoRA, the adapters learn.

        critic: what the critic starts as: a reward model or critic that was trained here, a sequence classifier with
        one label, or a base model; None: the language model with a new head, with adapters of its own if the policy
        has some; shared: a new head on the policy's hidden states, whose loss changes the policy's weights, too,
        unless value_gradient is False. reference: a language model, loaded or not; None: the model as it is now.
        lora: adapters of the policy, by arguments of LoraArgs or of peft's LoraConfig; the reference is the policy
        without them.

        optimizer: makes one from the parameters that learn; None: AdamW with lr, adam_eps and weight_decay. It is
        `self.optimizer`, whose learning rate nobody changes but you. max_grad_norm: gradients of policy and critic
        together are scaled to it. kl_coef: reward per nat, meant for scores whose deviation is about 1; with
        kl_target, nats per response, it is adapted.

        frozen_bfloat16: the reference's weights are in bfloat16; with adapters, these are the policy's frozen ones.
        log_with: trackers of accelerate's for `log`, such as tensorboard or wandb. What isn't named here is as in
        PpoArgs and Args of tldr/policy.py. Raises InputError, a ValueError.
        """
        refuse(others, "PPO")
        if not isinstance(model, str | Path) and tokenizer is None:
            raise InputError("a loaded model needs its tokenizer: PPO(model, tokenizer=tokenizer)")
        if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
            raise InputError("tokenizer must be a loaded one: AutoTokenizer.from_pretrained(...)")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise InputError(f"max_grad_norm is {max_grad_norm}; it must be above 0")
        if isinstance(optimizer, torch.optim.Optimizer) or not (optimizer is None or callable(optimizer)):
            raise InputError(
                "optimizer must be a function that makes one: partial(torch.optim.Adam, betas=(0.9, 0.95))"
            )
        if not value_gradient and critic != SHARED:
            raise InputError(f"value_gradient is about a critic on the policy's network: critic={SHARED!r}")
        ppo = PpoArgs(
            lr=lr,
            adam_eps=adam_eps,
            weight_decay=weight_decay,
            nminibatches=nminibatches,
            noptepochs=noptepochs,
            cliprange=cliprange,
            cliprange_value=cliprange_value,
            vf_coef=vf_coef,
            gamma=gamma,
            lam=lam,
            whiten_rewards=whiten_rewards,
            local_micro_batch_size=local_micro_batch_size,
            local_rollout_batch_size=local_rollout_batch_size,
        )
        whole = isinstance(kl_horizon, float) and kl_horizon.is_integer()  # as TRL's default is
        adaptive_kl = AdaptiveKLArgs(target=kl_target, horizon=int(kl_horizon) if whole else kl_horizon)
        lora = lora_of(lora)
        args = Args(
            base_model=name_of(model),
            rewards=RewardsArgs(kl_coef=kl_coef, adaptive_kl=adaptive_kl),
            ppo=ppo,
            lora=lora if isinstance(lora, models.LoraArgs) else models.LoraArgs(),
            dtype=dtype,
            frozen_bfloat16=frozen_bfloat16,
            gradient_checkpointing=gradient_checkpointing,
            seed=seed,
            trust_remote_code=trust_remote_code,
        )
        task = TaskArgs(
            response_length=response_length,
            temperature=temperature,
            start_text=None,
            end_text=None,
            truncate_text=None,
        )
        with in_arguments_of_loop(), as_a_guest():
            self.args, self.task = checked(plain(args)), checked(plain(task))
            self.accelerator = make_accelerator(dtype)
            self.tokenizer = tokenizer or models.load_tokenizer(self.args.base_model, trust_remote_code)
            self.pad_id = vocabulary_size(self.tokenizer)
            self.networks = make_networks(
                model,
                critic,
                reference,
                lora,
                value_gradient=value_gradient,
                args=self.args,
                tokenizer=self.tokenizer,
                length=self.task.response_length + 1,
                device=self.accelerator.device,
            )
        self.actor_critic, self.reference = self.networks.actor_critic, self.networks.reference
        self.stop_ids = models.end_ids(self.tokenizer, self.actor_critic.lm_backbone.generation_config)
        parameters = [parameter for parameter in self.actor_critic.parameters() if parameter.requires_grad]
        self.optimizer = (optimizer or partial(adam, args=self.args.ppo))(parameters)
        if optimizer and (lr, adam_eps, weight_decay) != (PpoArgs.lr, PpoArgs.adam_eps, PpoArgs.weight_decay):
            warnings.warn("lr, adam_eps and weight_decay do nothing: optimizer makes its own", stacklevel=2)
        if max_grad_norm is not None:
            self.optimizer.register_step_pre_hook(partial(clip, parameters=parameters, most=max_grad_norm))
        shaping = self.args.rewards
        self.controller = AdaptiveKLController(
            shaping.kl_coef, shaping.adaptive_kl.target, shaping.adaptive_kl.horizon
        )
        self.steps = 0
        self.draws = 0  # calls of generate, each with noise of its own
        self.broken = ""  # why nothing can go on, if an update has not come to its end
        self.maker = new_name()  # of today's weights, on all processes
        # Try to save what `save` will save, but for the weights, before anything is trained.
        with tempfile.TemporaryDirectory() as folder, input_errors("the model could not be saved after training"):
            self._save(Path(folder), weights=False)
        if log_with:
            self._start_trackers(log_with, tracker_project_name, Path(logging_dir))

    def _check_whole(self) -> None:
        """Raise an InputError if an update has not come to its end: its weights are nobody's."""
        if self.broken:
            raise InputError(self.broken)

    # ---- Generate: steps 1 to 3 --------------------------------------------------------------------------------

    def generate(
        self,
        queries: Sequence[Text | Chat],
        response_length: int | Sequence[int] | None = None,
        **others: Never,
    ) -> Batch:
        """Sample a response to each query, up to a token that ends a text, or of response_length tokens.

        response_length: of all, or of each query; then every process must give a list.
        """
        refuse(others, "generate")
        self._check_whole()
        contexts = self._tokens(queries, "queries")  # (batch, context_length)
        responses = self._sample(self.actor_critic.lm_backbone, contexts, response_length, self.draws)
        self.draws += 1
        return self.batch([row[row != self.pad_id] for row in contexts], responses)

    def reference_responses(
        self, queries: Sequence[Text | Chat], response_length: int | Sequence[int] | None = None
    ) -> list[str]:
        """What the reference says, with the random numbers of the latest `generate`: a look at before and after."""
        self._check_whole()
        contexts = self._tokens(queries, "queries")
        with self.reference.in_use():
            responses = self._sample(
                self.reference.lm_backbone, contexts, response_length, draw=max(self.draws - 1, 0)
            )
        return self._texts(padded(responses, self.pad_id))

    def batch(
        self,
        queries: Sequence[Text | Chat],
        responses: Sequence[Text],
        mask: Sequence[Sequence[bool]] | None = None,
    ) -> Batch:
        """A batch of responses that were written elsewhere, or have tokens of somebody else between the policy's.

        mask: for each token of a response, whether it is the policy's and learns; None: all of them. Nothing is
        appended: a text that ends needs `tokenizer.eos_token` at its end. Tokens after one in the middle count, too.
        The score comes after the last token of the policy, on a step of its own.
        """
        self._check_whole()
        contexts, tokens = self._tokens(queries, "queries"), self._tokens(responses, "responses")
        own = tokens != self.pad_id  # (batch, response_length)
        if len(contexts) != len(tokens):
            raise InputError(f"there are {len(contexts)} queries and {len(tokens)} responses; each needs its own")
        if mask is not None:
            own = padded(read_mask(mask, own.sum(1).tolist()), 0).bool().to(own.device)
        if not own.any(1).all():
            raise InputError("in each response, mask must have a token of the policy")
        self._check_length(contexts.shape[1] + tokens.shape[1])
        # Every response has a step after its last token, the longest one, too. Else numbers would depend on which
        # responses are in one process.
        tokens, own = F.pad(tokens, (0, 1), value=self.pad_id), F.pad(own, (0, 1))
        query_responses = torch.cat([contexts, tokens], dim=1)
        pad_id, temperature = self.pad_id, self.task.temperature
        logprobs, _, values = self._by_length(
            lambda rows, responses: self.actor_critic(rows, responses, pad_id, temperature), query_responses, tokens
        )
        ref_logprobs = self._by_length(
            lambda rows, responses: reference_logprobs(
                self.reference, rows, responses, pad_id, temperature, vocab_size=pad_id
            ),
            query_responses,
            tokens,
        )
        # As response_masks has them, but tokens of somebody else don't count, wherever they are.
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        last = (columns * own).max(1, keepdim=True).values  # (batch, 1)
        rollout = Rollout(
            query_responses=query_responses,
            logprobs=logprobs,
            values=values,
            rewards=torch.zeros_like(logprobs),
            mask=own,
            value_mask=own | (columns == last + 1),
        )
        return Batch(
            queries=to_texts(self.tokenizer, contexts, pad_id),
            responses=self._texts(tokens),
            response_ids=[row[row != pad_id].tolist() for row in tokens],
            stopped=has_stop(tokens, self.stop_ids, 0).tolist(),
            step=self.steps,
            maker=self.maker,
            rollout=rollout,
            ref_logprobs=ref_logprobs,
        )

    def _sample(
        self,
        lm_backbone: PreTrainedModel,
        contexts: Tensor,
        response_length: int | Sequence[int] | None,
        draw: int,
    ) -> list[list[int]]:
        """Responses of a language model. draw: which random numbers."""
        batch = len(contexts)
        lengths, longest = self._lengths(response_length, batch)
        self._check_length(contexts.shape[1] + longest)
        noise = episode_noise(self.args.seed, draw, batch * self.accelerator.num_processes, longest)
        responses, _ = self._by_length(
            lambda tokens, noise: generate_until(
                lm_backbone,
                tokens,
                noise,
                self.pad_id,
                vocab_size=self.pad_id,
                temperature=self.task.temperature,
                stop_ids=self.stop_ids,
            ),
            contexts,
            noise[self._rows(batch)].to(float64_device(contexts.device)),
            new_tokens=longest,
        )
        cut = [row[:length] for row, length in zip(responses, lengths, strict=True)]
        return [row[row != self.pad_id].tolist() for row in cut]

    @torch.no_grad()
    def _by_length(self, function: Callable, *tensors: Tensor, new_tokens: int = 0) -> Any:
        """Apply a function to a few rows at a time, which are of similar length, so that little padding is read."""
        self.actor_critic.eval()  # without dropout, also if the model that is trained in place was in use elsewhere
        return packing.by_length(
            function,
            *tensors,
            model=self.actor_critic,
            pad_id=self.pad_id,
            rows=self.args.ppo.local_rollout_batch_size,
            new_tokens=new_tokens,
        )

    # ---- Step: steps 5 to 8 ------------------------------------------------------------------------------------

    def step(
        self,
        batch: Batch,
        scores: Sequence[float] | None = None,
        rewards: Sequence[Sequence[Reward]] | None = None,
    ) -> dict[str, float]:
        """One update of PPO. Returns metrics under the names of chapter 2's script.

        scores: one for each response, on the step after its last token. rewards: of each response, a list of numbers,
        one for each token, or of pairs: the index of a token of the policy's in `response_ids`, and a reward; the
        number of tokens stands for the step after the last one. Scores and rewards add up, also in
        `objective/scores`. One of them must be given.

        Every process must call this, with a batch of its own. Raises an InputError, on all of them, if the scores
        or rewards don't fit the batch, or if the batch is older than the last step; then nothing has changed.

        Raises one, too, before an optimiser step whose losses or gradients are not finite, and before the first one
        if the ratio is not 1. After that, or any other exception within the update, such as that of Ctrl-C, no method
        goes on but load_state_dict, with a state from before it.
        """
        self._check_whole()
        if not torch.is_grad_enabled():
            raise InputError("step needs gradients, which torch.no_grad or inference_mode has switched off")
        given, placed = self._checked(batch, scores, rewards)
        args, ppo, device = self.args, self.args.ppo, self.accelerator.device
        rollout = Rollout(**{name: tensor.to(device) for name, tensor in vars(batch.rollout).items()})
        kl_coef = self.controller.value
        after_last, non_score_rewards, kl = compute_rewards(
            given.to(rollout.logprobs),
            rollout.logprobs,
            batch.ref_logprobs.to(device),
            rollout.mask,
            kl_coef=kl_coef,
            kl_estimator="k1",
        )
        rows = self._rows(len(given))
        minibatches = draw_minibatches(args.seed, self.steps, ppo.noptepochs, rows, ppo.nminibatches)
        # From here on, the batch is spent.
        self.broken = (
            f"step {batch.step} did not come to its end, so the weights may be in the middle of its update; go on "
            f"with load_state_dict and a state from before it, or with a new PPO"
        )
        self.steps += 1
        self.actor_critic.eval()
        stats = ppo_update(
            self.actor_critic,
            self.optimizer,
            dataclasses.replace(rollout, rewards=after_last + placed.to(after_last)),
            minibatches,
            ppo,
            pad_id=self.pad_id,
            temperature=self.task.temperature,
            accelerator=self.accelerator,
            before_step=partial(self._check_numbers, batch.step),
        )
        if not all(parameter.isfinite().all() for parameter in self.actor_critic.parameters()):
            raise InputError(f"the weights are not finite after step {batch.step}; a lower lr may prevent it")
        objectives = {  # as in train() of tldr/policy.py
            "kl": kl.sum(1),
            "entropy": -rollout.logprobs.masked_fill(~rollout.mask, 0).sum(1),
            "non_score_reward": non_score_rewards.sum(1),
            "scores": (given + placed.sum(1)).to(rollout.logprobs),
            "eos_rate": torch.tensor(batch.stopped, device=device),
            "response_length": rollout.mask.sum(1),
        }
        metrics = update_metrics(objectives, stats, kl_coef, self.accelerator)
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        self.controller.update(metrics["objective/kl"], len(given) * self.accelerator.num_processes)
        self.maker = new_name()
        self.broken = ""
        return metrics

    def _checked(self, batch: Batch, scores: Any, rewards: Any) -> tuple[Tensor, Tensor]:
        """Scores (batch,) and rewards (batch, response_length), if they fit a batch of today's policy.

        Else an InputError, on every process.
        """
        given, placed, problem = torch.zeros(0), torch.zeros(0), ""
        try:
            self._check_batch(batch)
            given = read_scores([0.0] * len(batch.responses) if scores is None else scores, len(batch.responses))
            lengths = [len(ids) for ids in batch.response_ids]
            placed = place_rewards(batch.rollout.mask.cpu(), lengths, rewards)
            if scores is None and rewards is None:
                raise InputError("step needs scores or rewards")
        except InputError as error:
            problem = str(error)
        problems, counts = zip(*gather_object([(problem, len(given))]), strict=True)
        if problem := next(filter(None, problems), ""):
            raise InputError(problem)
        if len(set(counts)) > 1:
            raise InputError(f"processes have {counts} responses; each needs as many as every other")
        return given, placed

    def _check_batch(self, batch: Batch) -> None:
        """Raise an InputError unless today's policy has made this batch, and minibatches divide it."""
        nminibatches = self.args.ppo.nminibatches
        if not isinstance(batch, Batch):
            raise InputError("step needs a batch that generate or batch of the same PPO has made")
        if batch.step != self.steps:
            raise InputError(
                f"the batch is of step {batch.step}, but the policy has made {self.steps}; make it again"
            )
        if batch.maker != self.maker:
            raise InputError("step needs a batch of the same PPO, or of the one whose state it has loaded")
        if len(batch.responses) % nminibatches:
            raise InputError(f"{len(batch.responses)} responses do not divide by nminibatches {nminibatches}")

    def _check_numbers(self, step: int, optimizer_step: int, shares: dict[str, Tensor]) -> None:
        """Raise an InputError, on every process, if the numbers of an optimiser step of this step are impossible.

        shares: as ppo_update has them.
        """
        means = sum_over_processes(shares, self.accelerator)
        where = f"before optimiser step {optimizer_step + 1} of step {step}"
        if wrong := [f"{name} is {mean}" for name, mean in means.items() if not math.isfinite(mean)]:
            raise InputError(f"{', '.join(wrong[:4])} {where}; a lower lr may prevent it")
        gap = math.sqrt(means["squared_ratio_gap"])
        if optimizer_step == 0 and gap > FIRST_RATIO_TOLERANCE[self.args.dtype]:
            raise InputError(
                f"the ratio is off 1 by {gap:.2g} {where}: the model that learns is not the one that read the batch"
            )

    # ---- Log ---------------------------------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send numbers to the trackers that `log_with` names. step: None is that of the latest `step`, from 0."""
        if not self.accelerator.trackers:
            raise InputError('PPO has no tracker to log to; name one: PPO(model, log_with="tensorboard")')
        self.accelerator.log(dict(metrics), step=self.steps - 1 if step is None else step)

    def _start_trackers(self, log_with: str | list[str], project: str, folder: Path) -> None:
        with input_errors(f"log_with {log_with}"):
            self.accelerator.log_with = filter_trackers(log_with, folder)
            if not self.accelerator.log_with:
                raise InputError(f"log_with {log_with}: its package is not installed")
            self.accelerator.project_configuration.logging_dir = str(folder)
            settings = flatten(dataclasses.asdict(self.args)) | {"response_length": self.task.response_length}
            settings = {name: value for name, value in settings.items() if value is not None}
            self.accelerator.init_trackers(project, config=settings)

    # ---- Keep --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` of a PPO that was made in the same way needs to go on with the same numbers.

        Its tensors are not copies, so the next step changes them: store it, or keep `copy.deepcopy` of it.
        """
        self._check_whole()
        return {
            "actor_critic": self.actor_critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_name": type(self.optimizer).__name__,
            "kl_coef": self.controller.value,
            "steps": self.steps,
            "draws": self.draws,
            "maker": self.maker,
            # Adapters are switched off for the reference, which is in the first entry then.
            "reference": {} if self.reference.adapters else self.reference.lm_backbone.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises an InputError, before anything changes, if it is that of another kind of PPO."""
        reference = None if self.reference.adapters else self.reference.lm_backbone
        wanted = {"actor_critic", "optimizer", "optimizer_name", "kl_coef", "steps", "draws", "maker", "reference"}
        if missing := wanted - (state.keys() if isinstance(state, Mapping) else set()):
            raise InputError(f"the state lacks {min(missing)}; give what state_dict returns")
        if (name := type(self.optimizer).__name__) != state["optimizer_name"]:
            raise InputError(f"the state is of the optimizer {state['optimizer_name']}, not {name}")
        for name, module in (("actor_critic", self.actor_critic), ("reference", reference)):
            own = {} if module is None else module.state_dict()
            shapes, theirs = ({key: x.shape for key, x in weights.items()} for weights in (own, state[name]))
            if wrong := [key for key in shapes.keys() | theirs.keys() if shapes.get(key) != theirs.get(key)]:
                raise InputError(
                    f"the state is of a PPO that was made in another way: {name} differs in {min(wrong)}"
                )
        now = self.actor_critic.state_dict().items()
        is_own = any(x.data_ptr() == state["actor_critic"][key].data_ptr() for key, x in now)
        if is_own and (self.broken or state["maker"] != self.maker):
            raise InputError(
                "the state's tensors are those of this PPO, which a step has changed since; give a state that was "
                "stored, or copied by copy.deepcopy, before the step"
            )
        with input_errors("the state's optimizer is another one"):
            # The copy keeps the two from sharing their moments. PyTorch looks at it before it changes anything.
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.actor_critic.load_state_dict(state["actor_critic"])
        if reference is not None:
            reference.load_state_dict(state["reference"])
        self.controller.value = state["kl_coef"]
        self.steps, self.draws, self.maker = state["steps"], state["draws"], state["maker"]
        self.broken = ""

    def save(self, folder: str | Path) -> None:
        """Save the policy as an ordinary causal language model, adapters merged in, and the critic in `critic` there.

        Training may go on. sample.py continues texts with what is saved. The main process saves; every process must
        call this, and returns when the files are there.
        """
        self._check_whole()
        problem = ""
        if self.accelerator.is_main_process:
            try:
                with input_errors(f"{folder} cannot be saved"):
                    self._save(Path(folder))
            except InputError as error:
                problem = str(error)
        (problem,) = broadcast_object_list([problem])  # waits for the main process
        if problem:
            raise InputError(problem)

    def _save(self, folder: Path, *, weights: bool = True) -> None:
        """weights: whether theirs are saved, too."""
        # What is saved gets the generation_config of the sampler. A model that is trained in place keeps its own.
        policy, adapters = copy.copy(self.actor_critic.lm_backbone), self.reference.adapters
        critic, trust = self.actor_critic.critic, self.args.trust_remote_code
        if adapters is not None and weights:
            policy, adapters, critic = self.networks.copied(weights_dtype(self.args, frozen=False))
        info = {
            "base_model": self.args.base_model,
            "task": dataclasses.asdict(self.task),
            "monitor": "",
            "function": "",
            "reward_model": "",
        }
        with as_a_guest():
            models.save_policy(folder, policy, adapters, self.tokenizer, info, weights=weights)
            models.save_critic(
                folder / "critic", critic, self.tokenizer, info, trust_remote_code=trust, weights=weights
            )

    # ---- Texts and token ids -----------------------------------------------------------------------------------

    def _tokens(self, rows: Sequence[Text | Chat], what: str) -> Tensor:
        """Token ids (rows, longest), with padding at the end; of queries with what the tokenizer puts before them."""
        return padded(token_rows(rows, what, self.tokenizer), self.pad_id).to(self.accelerator.device)

    def _texts(self, responses: Tensor) -> list[str]:
        """Responses (batch, response_length) as texts, without the tokens that end them."""
        ends = torch.isin(responses, responses.new_tensor(self.stop_ids))
        return to_texts(self.tokenizer, responses.masked_fill(ends, self.pad_id), self.pad_id)

    def _lengths(self, response_length: int | Sequence[int] | None, batch: int) -> tuple[list[int], int]:
        """The longest response to each query of this process, and the longest to any of all, in tokens."""
        given = self.task.response_length if response_length is None else response_length
        given = given.tolist() if hasattr(given, "tolist") else given  # of torch or numpy
        each = isinstance(given, Iterable)
        # TRL's LengthSampler returns numbers of NumPy.
        lengths = [plain(length) for length in listed(given, "response_length")] if each else [given] * batch
        with in_arguments_of_loop():
            for length in {repr(length): length for length in lengths}.values():
                checked(dataclasses.replace(self.task, response_length=length))
        if len(lengths) != batch:
            raise InputError(f"response_length has {len(lengths)} numbers for {batch} queries")
        # Random numbers depend on how many there are, which must not depend on what is in one process.
        return lengths, max(gather_object([max(lengths)])) if each else given

    def _check_length(self, length: int) -> None:
        networks = (self.actor_critic.lm_backbone, self.actor_critic.critic.lm_backbone, self.reference.lm_backbone)
        limits = [getattr(network.config, "max_position_embeddings", None) or length for network in networks]
        if length > min(limits):
            raise InputError(f"the model reads at most {min(limits)} tokens; query and response have {length}")

    def _rows(self, local_batch: int) -> slice:
        """This process's rows of what all have together."""
        rank = self.accelerator.process_index
        return slice(rank * local_batch, (rank + 1) * local_batch)


# ---- Plumbing --------------------------------------------------------------------------------------------------


def new_name() -> str:
    """A name that nothing else has, the same on all processes."""
    return broadcast_object_list([uuid.uuid4().hex])[0]


def adam(parameters: Iterable[nn.Parameter], args: PpoArgs) -> torch.optim.Optimizer:
    """The optimiser of chapter 2."""
    return torch.optim.AdamW(parameters, args.lr, eps=args.adam_eps, weight_decay=args.weight_decay, fused=True)


def clip(*_: Any, parameters: list[nn.Parameter], most: float) -> None:
    """Scale the gradients of parameters to a norm of at most this; a hook of an optimiser."""
    nn.utils.clip_grad_norm_(parameters, most)
