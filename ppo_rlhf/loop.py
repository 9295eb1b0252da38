"""PPO inside a loop of your own: generate responses, score them as you like, make one update.

    from ppo_rlhf.loop import PPO

    ppo = PPO("gpt2", lr=1e-5)
    for _ in range(100):
        batch = ppo.generate(["The movie was"] * 64)
        scores = [float(response.count("good")) for response in batch.responses]
        metrics = ppo.step(batch, scores)
    ppo.save("models/mine")  # opens with AutoModelForCausalLM

The update is that of chapter 2, by its own functions: responses of any length, a penalty on the KL divergence from
a reference, which is the model at the start unless you name another, a critic of its own, GAE, whitened advantages,
and epochs of clipped losses. docs/from_trl.md has programs to begin with, and says what is called what in TRL.

Under `accelerate launch`, each process generates for queries of its own, as many as every other. Gradients, metrics
and whitening are over all of them together.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.activations import ACT2FN, NewGELUActivation

from ppo_rlhf.tldr import models, packing
from ppo_rlhf.tldr.policy import (
    FIRST_RATIO_TOLERANCE,
    Args,
    PpoArgs,
    RewardsArgs,
    Rollout,
    compute_rewards,
    join_networks,
    ppo_update,
    reference_logprobs,
    update_metrics,
)
from ppo_rlhf.tldr.responses import draw_minibatches, generate_until
from ppo_rlhf.tldr.reward_functions import LARGEST_SCORE
from ppo_rlhf.tldr.shares import sum_over_processes
from ppo_rlhf.train_policy import (
    AdaptiveKLArgs,
    AdaptiveKLController,
    InputError,
    TaskArgs,
    checked,
    episode_noise,
    float64_device,
    has_stop,
    input_errors,
    load_pretrained,
    make_accelerator,
    padded,
    start_of_texts,
    to_texts,
    vocabulary_size,
)
from ppo_rlhf.train_reward import RewardModel

Text = str | Sequence[int] | Tensor  # a text, or its token ids, which are taken as they are


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Queries and responses of this process, as policy, critic and reference read them before the next step."""

    queries: list[str]
    responses: list[str]
    response_ids: list[list[int]]  # with the token that ends a text, where there is one
    stopped: list[bool]  # whether there is one
    step: int  # how many steps the policy had made
    maker: PPO
    rollout: Rollout  # rewards are 0, because there are no scores yet
    ref_logprobs: Tensor  # (batch, response_length)


class PPO:
    """A policy, its critic, the reference, and an optimiser for the first two."""

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        critic: str | Path | RewardModel | None = None,
        reference: str | Path | PreTrainedModel | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        max_grad_norm: float | None = None,
        response_length: int = 48,
        temperature: float = 0.7,
        kl_coef: float = 0.05,
        kl_target: float | None = None,
        kl_horizon: int = 10_000,
        lora: models.LoraArgs | None = None,
        dtype: Literal["float32", "bfloat16", "float64"] = "float32",
        seed: int = 1,
        trust_remote_code: bool = False,
        **ppo: Any,
    ):
        """model: a causal language model, its folder or its name on the hub. A loaded one needs its tokenizer, and is
        trained in place.

        critic: what the critic starts as: a reward model or critic that was trained here, a sequence classifier with
        one label, or a base model; None: the language model, with a new head. reference: a language model, loaded or
        not; None: the model as it is now. optimizer: makes one from the parameters that learn; None: AdamW with
        ppo's lr, adam_eps and weight_decay. It is `self.optimizer`, whose learning rate nobody changes but you.
        max_grad_norm: gradients of policy and critic together are scaled to it.

        kl_coef: reward per nat, meant for scores whose deviation is about 1; with kl_target, nats per response, it is
        adapted. ppo: lr, noptepochs, nminibatches, cliprange, vf_coef, lam and whatever else chapter 2's PpoArgs
        has, but for total_episodes and batch_size. Raises InputError, a ValueError.
        """
        loaded = model if isinstance(model, PreTrainedModel) else None
        if not loaded and not isinstance(model, str | Path):
            raise InputError(f"model is a {type(model).__name__}, no language model of transformers; merge adapters")
        name = str(loaded.name_or_path if loaded else model)
        if loaded and tokenizer is None:
            raise InputError("a loaded model needs its tokenizer: PPO(model, tokenizer=tokenizer)")
        if hasattr(loaded, "peft_config"):  # peft changes the model that it is given
            merged = "peft.AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()"
            raise InputError(f"the model has adapters inside, which could not be saved; merge them: {merged}")
        lora = lora or models.LoraArgs()
        if lora.rank and reference is not None:
            raise InputError("with lora, the reference is the policy without its adapters; leave it out")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise InputError(f"max_grad_norm is {max_grad_norm}; it must be above 0")
        if isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                "optimizer must be a function that makes one: partial(torch.optim.Adam, betas=(0.9, 0.95))"
            )
        known = vars(PpoArgs()).keys() - {"total_episodes", "batch_size"}
        if unknown := [name for name in ppo if name not in known]:
            raise InputError(f"PPO has no argument {unknown[0]}; docs/from_trl.md says what TRL's are called here")
        args = Args(
            base_model=name,
            rewards=RewardsArgs(kl_coef=kl_coef, adaptive_kl=AdaptiveKLArgs(target=kl_target, horizon=kl_horizon)),
            ppo=PpoArgs(**ppo),
            lora=lora,
            dtype=dtype,
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
        with input_errors("PPO"):
            self.args, self.task = checked(args), checked(task)
        self.accelerator = make_accelerator(dtype)
        self.tokenizer = tokenizer or models.load_tokenizer(name, trust_remote_code)
        self.pad_id = vocabulary_size(self.tokenizer)
        # Every copy is made before the networks are joined, which changes how they read rows.
        weights = torch.float64 if dtype == "float64" else torch.float32
        if loaded:
            policy = as_if_loaded_here(loaded.to(weights))
        else:
            policy = load_pretrained(name, weights, trust_remote_code)
        self.stop_ids = models.end_ids(self.tokenizer, policy.generation_config)
        if isinstance(critic, RewardModel):
            value_model = models.critic_that_learns(critic.to(weights))
            as_if_loaded_here(value_model.lm_backbone)
        elif critic is None and loaded:
            value_model = models.with_new_head(copy.deepcopy(policy.base_model), seed)
        else:
            critic = str(critic or name)
            models.check_vocabulary(critic, "critic", self.tokenizer, trust_remote_code)
            value_model = models.load_any_critic(critic, weights, seed, trust_remote_code)
        if isinstance(reference, PreTrainedModel):
            frozen = as_if_loaded_here(copy.deepcopy(reference).to(weights))
            if frozen.get_input_embeddings().num_embeddings != policy.get_input_embeddings().num_embeddings:
                raise InputError("reference has another number of token embeddings than the model")
        elif reference is not None:
            models.check_vocabulary(str(reference), "reference", self.tokenizer, trust_remote_code)
            frozen = load_pretrained(str(reference), weights, trust_remote_code)
        else:
            frozen = None if lora.rank else copy.deepcopy(policy)
        self.actor_critic, self.reference = join_networks(
            policy,
            value_model,
            frozen and frozen.requires_grad_(False),
            args=self.args,
            length=response_length + 1,
            vocab_size=self.pad_id,
            device=self.accelerator.device,
        )
        if not any(parameter.requires_grad for parameter in self.actor_critic.lm_backbone.parameters()):
            raise InputError("no weight of the model learns, because requires_grad is False for all of them")
        parameters = [parameter for parameter in self.actor_critic.parameters() if parameter.requires_grad]
        self.optimizer = (optimizer or partial(adam, args=self.args.ppo))(parameters)
        if max_grad_norm is not None:
            self.optimizer.register_step_pre_hook(partial(clip, parameters=parameters, most=max_grad_norm))
        self.controller = AdaptiveKLController(kl_coef, kl_target, kl_horizon)
        self.steps = 0
        self.draws = 0  # calls of generate, each with noise of its own
        self.broken = ""  # why nothing can go on, if an update has not come to its end
        # Try to save what `save` will save, but for the weights, before anything is trained.
        with tempfile.TemporaryDirectory() as folder, input_errors("the model could not be saved after training"):
            self._save(Path(folder), weights=False)

    def _check_whole(self) -> None:
        """Raise an InputError if an update has not come to its end: its weights are nobody's."""
        if self.broken:
            raise InputError(self.broken)

    # ---- Generate: steps 1 to 3 --------------------------------------------------------------------------------

    def generate(self, queries: Sequence[Text], response_length: int | None = None) -> Batch:
        """Sample a response to each query, up to a token that ends a text, or of response_length tokens."""
        self._check_whole()
        contexts = self._tokens(queries, "queries")  # (batch, context_length)
        task = self.task
        if response_length is not None:
            task = checked(dataclasses.replace(task, response_length=response_length))
        self._check_length(contexts.shape[1] + task.response_length)
        batch, length = len(contexts), task.response_length
        noise = episode_noise(self.args.seed, self.draws, batch * self.accelerator.num_processes, length)
        self.draws += 1
        uniforms = noise[self._rows(batch)].to(float64_device(contexts.device))
        responses, _ = self._by_length(
            lambda tokens, noise: generate_until(
                self.actor_critic.lm_backbone,
                tokens,
                noise,
                self.pad_id,
                vocab_size=self.pad_id,
                temperature=self.task.temperature,
                stop_ids=self.stop_ids,
            ),
            contexts,
            uniforms,
            new_tokens=length,
        )
        return self._read(contexts, responses, own=responses != self.pad_id)

    def batch(
        self, queries: Sequence[Text], responses: Sequence[Text], mask: Sequence[Sequence[bool]] | None = None
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
            if [len(row) for row in mask] != own.sum(1).tolist():
                raise InputError("mask must have one entry for each token of each response")
            own = padded([[int(bool(entry)) for entry in row] for row in mask], 0).bool().to(own.device)
        if not own.any(1).all():
            raise InputError("in each response, mask must have a token of the policy")
        self._check_length(contexts.shape[1] + tokens.shape[1])
        # Every response has a step after its last token, the longest one, too. Else numbers would depend on which
        # responses are in one process.
        tokens, own = F.pad(tokens, (0, 1), value=self.pad_id), F.pad(own, (0, 1))
        return self._read(contexts, tokens, own=own)

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

    def _read(self, contexts: Tensor, responses: Tensor, *, own: Tensor) -> Batch:
        """What all networks say of responses (batch, response_length). own: whether a token is the policy's."""
        pad_id, temperature = self.pad_id, self.task.temperature
        query_responses = torch.cat([contexts, responses], dim=1)
        logprobs, _, values = self._by_length(
            lambda tokens, responses: self.actor_critic(tokens, responses, pad_id, temperature),
            query_responses,
            responses,
        )
        ref_logprobs = self._by_length(
            lambda tokens, responses: reference_logprobs(
                self.reference, tokens, responses, pad_id, temperature, pad_id
            ),
            query_responses,
            responses,
        )
        # As response_masks has them, but tokens of somebody else don't count, wherever they are.
        columns = torch.arange(responses.shape[1], device=responses.device)
        last = (columns * own).max(1, keepdim=True).values  # (batch, 1)
        rollout = Rollout(
            query_responses=query_responses,
            logprobs=logprobs,
            values=values,
            rewards=torch.zeros_like(logprobs),
            mask=own,
            value_mask=own | (columns == last + 1),
        )
        ends = torch.isin(responses, responses.new_tensor(self.stop_ids))
        return Batch(
            queries=to_texts(self.tokenizer, contexts, pad_id),
            responses=to_texts(self.tokenizer, responses.masked_fill(ends, pad_id), pad_id),
            response_ids=[row[row != pad_id].tolist() for row in responses],
            stopped=has_stop(responses, self.stop_ids, 0).tolist(),
            step=self.steps,
            maker=self,
            rollout=rollout,
            ref_logprobs=ref_logprobs,
        )

    # ---- Step: steps 5 to 8 ------------------------------------------------------------------------------------

    def step(self, batch: Batch, scores: Sequence[float]) -> dict[str, float]:
        """One update of PPO. scores: one for each response. Returns metrics under the names of chapter 2's script.

        Every process must call this, with a batch of its own. Raises an InputError, on all of them, if the scores
        don't fit the batch, or if the batch is older than the last step; then nothing has changed.

        Raises one, too, before an optimiser step whose losses or gradients are not finite, and before the first one
        if the ratio is not 1. After that, or any other exception within the update, such as that of Ctrl-C, no method
        goes on but load_state_dict, with a state from before it.
        """
        self._check_whole()
        scores = self._checked_scores(batch, scores)
        args, ppo, rollout = self.args, self.args.ppo, batch.rollout
        of_episodes = torch.tensor(scores, dtype=torch.float64).to(rollout.logprobs)  # (batch,)
        kl_coef = self.controller.value
        rewards, non_score_rewards, kl = compute_rewards(
            of_episodes, rollout.logprobs, batch.ref_logprobs, rollout.mask, kl_coef=kl_coef, kl_estimator="k1"
        )
        rows = self._rows(len(scores))
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
            dataclasses.replace(rollout, rewards=rewards),
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
            "scores": of_episodes,
            "eos_rate": torch.tensor(batch.stopped, device=kl.device),
            "response_length": rollout.mask.sum(1),
        }
        metrics = update_metrics(objectives, stats, kl_coef, self.accelerator)
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        self.controller.update(metrics["objective/kl"], len(scores) * self.accelerator.num_processes)
        self.broken = ""
        return metrics

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

    def _checked_scores(self, batch: Batch, scores: Sequence[float]) -> list[float]:
        """Finite numbers, one for each response of a batch that is made with today's policy."""
        numbers: list[float] = []
        problem, nminibatches = "", self.args.ppo.nminibatches
        try:
            numbers = [float(score) for score in scores]
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # RuntimeError: of a longer tensor
            problem = f"scores must be a list of numbers: {error}"
        wrong = [number for number in numbers if not abs(number) <= LARGEST_SCORE]
        if not isinstance(batch, Batch) or batch.maker is not self:
            problem = "step needs a batch that generate or batch of the same PPO has made"
        elif not problem and len(numbers) != len(batch.responses):
            problem = f"there are {len(numbers)} scores for {len(batch.responses)} responses"
        elif wrong:
            problem = f"score {numbers.index(wrong[0]) + 1} is {wrong[0]}; scores must be finite numbers"
        elif batch.step != self.steps:
            problem = f"the batch is of step {batch.step}, but the policy has made {self.steps}; make it again"
        elif len(numbers) % nminibatches:
            problem = f"{len(numbers)} responses do not divide by nminibatches {nminibatches}"
        problems, counts = zip(*gather_object([(problem, len(numbers))]), strict=True)
        if problem := next(filter(None, problems), ""):
            raise InputError(problem)
        if len(set(counts)) > 1:
            raise InputError(f"processes have {counts} responses; each needs as many as every other")
        return numbers

    # ---- Keep --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` of a PPO that was made in the same way needs to go on with the same numbers."""
        self._check_whole()
        return {
            "actor_critic": self.actor_critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "kl_coef": self.controller.value,
            "steps": self.steps,
            "draws": self.draws,
            # Adapters are switched off for the reference, which is in the first entry then.
            "reference": {} if self.reference.adapters else self.reference.lm_backbone.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.actor_critic.load_state_dict(state["actor_critic"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # else it would share its moments
        if not self.reference.adapters:
            self.reference.lm_backbone.load_state_dict(state["reference"])
        self.controller.value = state["kl_coef"]
        self.steps, self.draws = state["steps"], state["draws"]
        self.broken = ""

    def save(self, folder: str | Path) -> None:
        """Save the policy as an ordinary causal language model, adapters merged in, and the critic in `critic` there.

        Training may go on. sample.py continues texts with what is saved. The main process saves.
        """
        self._check_whole()
        if self.accelerator.is_main_process:
            self._save(Path(folder))

    def _save(self, folder: Path, *, weights: bool = True) -> None:
        """weights: whether theirs are saved, too."""
        # What is saved gets the generation_config of the sampler. A model that is trained in place keeps its own.
        policy, adapters = copy.copy(self.actor_critic.lm_backbone), self.reference.adapters
        if adapters is not None and weights:  # they are merged into a copy
            policy, adapters = copy.deepcopy((self.actor_critic.lm_backbone, adapters))
        info = {
            "base_model": self.args.base_model,
            "task": dataclasses.asdict(self.task),
            "monitor": "",
            "function": "",
            "reward_model": "",
        }
        models.save_policy(folder, policy, adapters, self.tokenizer, info, weights=weights)
        critic, trust = self.actor_critic.critic, self.args.trust_remote_code
        models.save_critic(folder / "critic", critic, self.tokenizer, info, trust_remote_code=trust, weights=weights)

    # ---- Texts and token ids -----------------------------------------------------------------------------------

    def _tokens(self, rows: Sequence[Text], what: str) -> Tensor:
        """Token ids (rows, longest), with padding at the end; of queries with what the tokenizer puts before them."""
        listed = [] if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable) else [*rows]
        if not listed:
            raise InputError(f"{what} must be a list with a text, or a list of token ids, for each episode")
        start = start_of_texts(self.tokenizer) if what == "queries" else []
        encoded = []
        for number, row in enumerate(listed, 1):
            if isinstance(row, str):
                tokens = self.tokenizer.encode(row, add_special_tokens=False)
                if tokens[: len(start)] != start:  # what a chat template has made begins with it
                    tokens = [*start, *tokens]
            else:
                tokens = row.tolist() if hasattr(row, "tolist") else row  # of torch or numpy
            is_list = isinstance(tokens, list | tuple) and len(tokens) > 0
            if not is_list or not all(type(token) is int and 0 <= token < self.pad_id for token in tokens):
                raise InputError(
                    f"{what}: number {number} must be a text or a list of ids in 0..{self.pad_id - 1}, not empty"
                )
            encoded.append([*tokens])
        return padded(encoded, self.pad_id).to(self.accelerator.device)

    def _check_length(self, length: int) -> None:
        longest = getattr(self.actor_critic.lm_backbone.config, "max_position_embeddings", None)
        if longest and length > longest:
            raise InputError(f"the model reads at most {longest} tokens; query and response have {length}")

    def _rows(self, local_batch: int) -> slice:
        """This process's rows of what all have together."""
        rank = self.accelerator.process_index
        return slice(rank * local_batch, (rank + 1) * local_batch)


def as_if_loaded_here(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model that somebody has loaded, in place, compute what it would if `load_pretrained` had loaded it.

    See there for the reasons. Dropout is off while the model is in eval mode.
    """
    if getattr(model.config, "final_logit_softcapping", None) or getattr(
        model.config, "attn_logit_softcapping", None
    ):
        raise InputError(f"a {type(model).__name__} that caps its logits (Gemma 2) is not supported")
    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(part, name, ACT2FN["gelu_pytorch_tanh"])
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def adam(parameters: Iterable[nn.Parameter], args: PpoArgs) -> torch.optim.Optimizer:
    """The optimiser of chapter 2."""
    return torch.optim.AdamW(parameters, args.lr, eps=args.adam_eps, weight_decay=args.weight_decay, fused=True)


def clip(*_: Any, parameters: list[nn.Parameter], most: float) -> None:
    """Scale the gradients of parameters to a norm of at most this; a hook of an optimiser."""
    nn.utils.clip_grad_norm_(parameters, most)
