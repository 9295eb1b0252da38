"""PPO inside a loop of your own: generate responses, score them as you like, make one update.

    from ppo_rlhf.loop import PPO

    ppo = PPO("gpt2", lr=1e-5)
    for _ in range(100):
        batch = ppo.generate(["The movie was"] * 64)
        scores = [float(response.count("good")) for response in batch.responses]
        metrics = ppo.step(batch, scores)
    ppo.save("models/mine")  # opens with AutoModelForCausalLM

The update is that of chapter 2, by its own functions: responses of any length, a penalty on the KL divergence from
the model that the policy was at the start, a critic of its own, GAE, whitened advantages, and epochs of clipped
losses. docs/from_trl.md has programs to begin with, and says what is called what in TRL.

Under `accelerate launch`, each process generates for queries of its own, as many as every other. Gradients, metrics
and whitening are over all of them together.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.lib import command_line, errors, pretrained, processes, reward_functions
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.lib.reward_model_files import save_reward_model
from ppo_rlhf.tldr import models, packing
from ppo_rlhf.tldr.policy import (
    ActorCritic,
    PpoArgs,
    Rollout,
    algorithm_metrics,
    compute_rewards,
    ppo_update,
    reference_logprobs,
    respond,
)
from ppo_rlhf.tldr.responses import draw_minibatches
from ppo_rlhf.train_policy import (
    AdaptiveKLController,
    TaskArgs,
    episode_noise,
    has_stop,
    load_pretrained,
    read_tokens,
)

Text = str | Sequence[int] | Tensor  # a text, or its token ids, which are taken as they are


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Queries and responses of this process, as policy, critic and reference read them before the next step."""

    queries: list[str]
    responses: list[str]
    response_ids: list[list[int]]  # with the token that ends a text, where there is one
    stopped: list[bool]  # whether there is one
    step: int  # how many steps the policy had made
    rollout: Rollout  # without scores, and so without rewards


class PPO:
    """A policy, its critic, the reference, and an optimiser for the first two."""

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        critic: str | Path | None = None,
        reference: str | Path | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        max_grad_norm: float | None = None,
        lora: models.LoraArgs | None = None,
        response_length: int = 48,
        temperature: float = 0.7,
        kl_coef: float = 0.05,
        kl_target: float | None = None,
        kl_horizon: int = 10_000,
        dtype: Literal["float32", "bfloat16", "float64"] = "float32",
        seed: int = 1,
        trust_remote_code: bool = False,
        **ppo: Any,
    ):
        """model: a causal language model: its folder, its name on the hub, or itself, with its tokenizer.

        critic: what the critic starts as: a reward model or critic that was trained here, a sequence classifier with
        one label, or a base model; None: the language model, with a new head. reference: None: the model as it is
        now. optimizer: makes one from the parameters that learn; None: AdamW with ppo's lr, adam_eps and
        weight_decay. It is `self.optimizer`, whose learning rate nobody changes but you. max_grad_norm: gradients of
        policy and critic together are scaled to it.

        kl_coef: reward per nat, meant for scores whose deviation is about 1; with kl_target, nats per response, it is
        adapted. ppo: lr, noptepochs, nminibatches, cliprange, vf_coef, lam and whatever else chapter 2's PpoArgs
        has, but for total_episodes and batch_size. Raises InputError, a ValueError.
        """
        self.accelerator = processes.make_accelerator()
        device = self.accelerator.device
        self.args = PpoArgs(**ppo)
        command_line.check_bounds(self.args)
        if response_length < 1 or not temperature > 0 or not kl_coef >= 0:
            raise InputError("response_length must be at least 1, temperature above 0, and kl_coef at least 0")
        weights = torch.float64 if dtype == "float64" else torch.float32
        if isinstance(model, PreTrainedModel):
            if tokenizer is None:
                raise InputError("a loaded model needs its tokenizer: PPO(model, tokenizer=tokenizer)")
            lm_backbone = model.eval()  # without dropout
        else:
            tokenizer = tokenizer or pretrained.load_tokenizer(str(model), trust_remote_code)
            lm_backbone = load_pretrained(str(model), weights, trust_remote_code)
        self.base_model = str(getattr(model, "name_or_path", model))
        self.tokenizer, self.dtype, self.seed = tokenizer, dtype, seed
        self.response_length, self.temperature = response_length, temperature
        self.pad_id, self.stop_ids = pretrained.vocabulary_size(tokenizer), pretrained.end_ids(tokenizer)
        # What is copied is copied first: afterwards, these models read rows without padding.
        adapted = lora is not None and lora.rank > 0
        if adapted and reference is not None:
            raise InputError("with lora, the reference is the policy without its adapters; leave it out")
        if critic is None and isinstance(model, PreTrainedModel):
            value_model = models.with_new_head(copy.deepcopy(lm_backbone.base_model), seed)
        else:
            critic = critic or model
            pretrained.check_vocabulary(str(critic), f"critic {critic}", self.base_model, trust_remote_code)
            value_model = models.load_any_critic(str(critic), weights, seed, trust_remote_code)
        frozen = lm_backbone
        if reference is not None:
            pretrained.check_vocabulary(str(reference), f"reference {reference}", self.base_model, trust_remote_code)
            frozen = load_pretrained(str(reference), weights, trust_remote_code)
        elif not adapted:
            frozen = copy.deepcopy(lm_backbone)
        packing.enable(lm_backbone, value_model.lm_backbone)
        self.actor_critic = ActorCritic(lm_backbone, value_model, self.pad_id, low_precision=dtype == "bfloat16")
        self.actor_critic.to(device)
        models.check_model(lm_backbone, self.base_model, response_length + 1, self.pad_id, read_tokens)
        if adapted:
            self.reference = models.Reference(lm_backbone, models.add_adapters(lm_backbone, lora, seed))
        else:
            packing.enable(frozen)
            self.reference = models.Reference(frozen.requires_grad_(False).to(device), None)
        parameters = [parameter for parameter in self.actor_critic.parameters() if parameter.requires_grad]
        if optimizer is None:
            eps, weight_decay = self.args.adam_eps, self.args.weight_decay
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                parameters, self.args.lr, eps=eps, weight_decay=weight_decay, fused=True
            )
        else:
            self.optimizer = optimizer(parameters)
        if max_grad_norm is not None:
            self.optimizer.register_step_pre_hook(partial(clip, parameters=parameters, most=max_grad_norm))
        self.controller = AdaptiveKLController(kl_coef, kl_target, kl_horizon)
        self.steps = 0
        self.draws = 0  # calls of generate, each with noise of its own

    # ---- Generate: steps 1 to 3 --------------------------------------------------------------------------------

    def generate(self, queries: Sequence[Text], response_length: int | None = None) -> Batch:
        """Sample a response to each query, up to a token that ends a text, or of response_length tokens."""
        contexts = self._padded(self._encode(queries, "queries"))  # (batch, context_length)
        batch, length = len(contexts), response_length or self.response_length
        noise = episode_noise(self.seed, self.draws, batch * self.accelerator.num_processes, length)
        self.draws += 1
        uniforms = noise[self._rows(batch)].to(processes.device_of_noise(contexts.device))
        responses, logprobs, values, _ = self._in_passes(
            respond, contexts, uniforms, new_tokens=length, stop_ids=self.stop_ids
        )
        return self._make_batch(contexts, responses, logprobs, values, own=responses != self.pad_id)

    def batch(
        self, queries: Sequence[Text], responses: Sequence[Text], mask: Sequence[Sequence[bool]] | None = None
    ) -> Batch:
        """A batch of responses that were written elsewhere, or have tokens of somebody else between the policy's.

        mask: for each token of a response, whether it is the policy's and learns; None: all of them. Nothing is
        appended: a text that ends needs `tokenizer.eos_token` at its end.
        """
        contexts, rows = self._padded(self._encode(queries, "queries")), self._encode(responses, "responses")
        own = [[True] * len(row) for row in rows] if mask is None else [[bool(x) for x in row] for row in mask]
        if len(contexts) != len(rows) or [len(row) for row in own] != [len(row) for row in rows]:
            raise InputError("there must be one response for each query, and one entry of mask for each token")
        if not all(any(row) for row in own):
            raise InputError("in each response, mask must have a token of the policy")
        tokens = self._padded(rows)  # (batch, response_length)
        query_responses = torch.cat([contexts, tokens], dim=1)
        logprobs, _, values = self._in_passes(nn.Module.__call__, query_responses, tokens)
        of_policy = pad_sequence([torch.tensor(row) for row in own], batch_first=True).to(tokens.device)
        return self._make_batch(contexts, tokens, logprobs, values, own=of_policy)

    def _in_passes(self, function: Callable, tokens: Tensor, *others: Tensor, **more: Any) -> Any:
        """What a function of the actor-critic returns for rows of tokens, of which it gets a few at a time."""
        rows, sampled_at = self.args.local_rollout_batch_size, self.temperature
        with self.actor_critic.sampling():
            return packing.by_length(
                function,
                self.actor_critic,
                tokens,
                *others,
                pad_id=self.pad_id,
                rows=rows,
                temperature=sampled_at,
                **more,
            )

    def _make_batch(
        self, contexts: Tensor, responses: Tensor, logprobs: Tensor, values: Tensor, *, own: Tensor
    ) -> Batch:
        """own: whether a token is the policy's. All tensors but contexts are (batch, response_length)."""
        query_responses = torch.cat([contexts, responses], dim=1)
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
            stopped=has_stop(responses, self.stop_ids, 0),
            ref_logprobs=self._in_passes(reference_logprobs, query_responses, responses, reference=self.reference),
        )
        ends = torch.isin(responses, responses.new_tensor(self.stop_ids))
        return Batch(
            queries=self._decode(contexts),
            responses=self._decode(responses.masked_fill(ends, self.pad_id)),
            response_ids=self._without_padding(responses),
            stopped=rollout.stopped.tolist(),
            step=self.steps,
            rollout=rollout,
        )

    # ---- Step: steps 5 to 8 ------------------------------------------------------------------------------------

    def step(self, batch: Batch, scores: Sequence[float]) -> dict[str, float]:
        """One update of PPO. scores: one for each response. Returns metrics under the names of chapter 2's script.

        Every process must call this, with a batch of its own. Raises an InputError, on all of them, if the scores
        don't fit the batch, or if the batch is older than the last step.
        """
        scores = [float(score) for score in scores]
        self._check(batch, scores)
        args, rollout = self.args, batch.rollout
        of_episodes = torch.tensor(scores).to(rollout.logprobs)  # (batch,)
        kl_coef = self.controller.value
        rewards, non_score_rewards, kl = compute_rewards(
            of_episodes,
            logprobs=rollout.logprobs,
            ref_logprobs=rollout.ref_logprobs,
            mask=rollout.mask,
            kl_coef=kl_coef,
            kl_estimator="k1",
        )
        rollout = dataclasses.replace(
            rollout, rewards=rewards, scores=of_episodes, kl=kl, non_score_rewards=non_score_rewards
        )
        rows = self._rows(len(scores))
        steps = ppo_update(
            self.actor_critic,
            self.optimizer,
            rollout=rollout,
            minibatches=draw_minibatches(self.seed, self.steps, args.noptepochs, rows, args.nminibatches),
            ppo=args,
            pad_id=self.pad_id,
            temperature=self.temperature,
            accelerator=self.accelerator,
        )
        metrics = algorithm_metrics(rollout, steps, self.accelerator, kl_coef=kl_coef, more={})
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        processes.check_update(metrics, self.steps, self.dtype, gap="val/first_ratio_gap")
        self.controller.update(metrics["objective/kl"], len(scores) * self.accelerator.num_processes)
        self.steps += 1
        return metrics

    def _check(self, batch: Batch, scores: list[float]) -> None:
        count, problem = len(batch.responses), ""
        wrong = [score for score in scores if not abs(score) <= reward_functions.LARGEST_SCORE]
        if len(scores) != count:
            problem = f"there are {len(scores)} scores for {count} responses"
        elif wrong:
            problem = f"score {scores.index(wrong[0]) + 1} is {wrong[0]}; scores must be finite numbers"
        elif batch.step != self.steps:
            problem = f"the batch is of step {batch.step}, but the policy has made {self.steps}; make it again"
        elif count % self.args.nminibatches:
            problem = f"{count} responses do not divide by nminibatches {self.args.nminibatches}"
        processes.fail_together(problem)
        processes.check_equal("the number of responses", count, self.accelerator)

    def _rows(self, local_batch: int) -> slice:
        """This process's rows of what all have together."""
        rank = self.accelerator.process_index
        return slice(rank * local_batch, (rank + 1) * local_batch)

    # ---- Keep --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` of a PPO that was made in the same way needs to go on with the same numbers."""
        return {
            "actor_critic": self.actor_critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "kl_coef": self.controller.value,
            "steps": self.steps,
            "draws": self.draws,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.actor_critic.load_state_dict(state["actor_critic"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # else it would share its moments
        self.controller.value = state["kl_coef"]
        self.steps, self.draws = state["steps"], state["draws"]

    def save(self, folder: str | Path) -> None:
        """Save the policy as an ordinary causal language model, adapters merged in, and the critic in `critic` there.

        Training may go on.
        """
        if not errors.is_first_process():
            return
        folder, policy = Path(folder), self.actor_critic.lm_backbone
        if self.reference.adapters is not None:
            policy = copy.deepcopy(self.reference.adapters).merge_and_unload()
        config = policy.generation_config
        policy.generation_config = pretrained.sampling_config(config, self.tokenizer, self.temperature)
        # sample.py reads these: a policy that continues texts as chapter 1's do.
        task = TaskArgs(
            response_length=self.response_length,
            temperature=self.temperature,
            start_text=None,
            end_text=None,
            truncate_text=None,
        )
        info = {"base_model": self.base_model, "vocab_size": self.pad_id, "task": dataclasses.asdict(task)}
        policy_info = {**info, "kind": "policy", "monitor": "", "function": "", "reward_model": ""}
        models.save_language_model(folder, policy, self.tokenizer, policy_info)
        policy.generation_config = config
        save_reward_model(folder / "critic", self.actor_critic.critic, self.tokenizer, {**info, "kind": "critic"})

    # ---- Texts and token ids -----------------------------------------------------------------------------------

    def _encode(self, rows: Sequence[Text], what: str) -> list[list[int]]:
        """Token ids of texts; of queries with what the tokenizer puts before every text."""
        if isinstance(rows, str) or not len(rows):
            raise InputError(f"{what} must be a list with a text, or a list of token ids, for each episode")
        start = pretrained.start_of_plain(self.tokenizer) if what == "queries" else []
        encoded = []
        for row in rows:
            if isinstance(row, str):
                encoded.append([*start, *self.tokenizer.encode(row, add_special_tokens=False)])
            else:
                encoded.append(row.tolist() if isinstance(row, Tensor) else list(row))
        for number, row in enumerate(encoded, 1):
            if not row:
                raise InputError(f"{what}: number {number} has no token")
            if not all(isinstance(token, int) and 0 <= token < self.pad_id for token in row):
                raise InputError(f"{what}: number {number} is no text and no list of ids in 0..{self.pad_id - 1}")
        return encoded

    def _padded(self, rows: list[list[int]]) -> Tensor:
        """Token ids (rows, longest), with padding at the end."""
        tensors = [torch.tensor(row) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_value=self.pad_id).to(self.accelerator.device)

    def _without_padding(self, tokens: Tensor) -> list[list[int]]:
        return [[token for token in row if token != self.pad_id] for row in tokens.tolist()]

    def _decode(self, tokens: Tensor) -> list[str]:
        return [self.tokenizer.decode(row) for row in self._without_padding(tokens)]


def clip(*_: Any, parameters: list[nn.Parameter], most: float) -> None:
    """Scale the gradients of parameters to a norm of at most this; a hook of an optimiser."""
    nn.utils.clip_grad_norm_(parameters, most)
