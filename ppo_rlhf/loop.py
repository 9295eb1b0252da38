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
    response_masks,
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

Text = str | Sequence[int]  # a text, or its token ids


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
        weight_decay. It is `self.optimizer`, whose learning rate nobody changes but you.

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
        if critic is None:
            value_model = models.with_new_head(copy.deepcopy(lm_backbone.base_model), seed)
        else:
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
        self.controller = AdaptiveKLController(kl_coef, kl_target, kl_horizon)
        self.steps = 0
        self.draws = 0  # calls of generate, each with noise of its own

    # ---- Generate: steps 1 to 3 --------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, queries: Sequence[Text], response_length: int | None = None) -> Batch:
        """Sample a response to each query, up to a token that ends a text, or of response_length tokens."""
        contexts = self._padded(self._encode(queries, "queries"))  # (batch, context_length)
        batch, length = len(contexts), response_length or self.response_length
        rank, num_processes = self.accelerator.process_index, self.accelerator.num_processes
        uniforms = episode_noise(self.seed, self.draws, batch * num_processes, length)
        self.draws += 1
        with self.actor_critic.sampling():
            responses, logprobs, values, _ = packing.by_length(
                respond,
                self.actor_critic,
                contexts,
                uniforms[rank * batch : (rank + 1) * batch].to(processes.device_of_noise(contexts.device)),
                pad_id=self.pad_id,
                rows=self.args.local_rollout_batch_size,
                new_tokens=length,
                stop_ids=self.stop_ids,
                temperature=self.temperature,
            )
        return self._make_batch(contexts, responses, logprobs, values, responses != self.pad_id)

    @torch.no_grad()
    def batch(
        self, queries: Sequence[Text], responses: Sequence[Text], mask: Sequence[Sequence[bool]] | None = None
    ) -> Batch:
        """A batch of responses that were written elsewhere, or that have tokens of somebody else among the policy's.

        mask: for each token of a response, whether it is the policy's and learns; None: all of them. A response that
        ends needs the token that ends a text, which a text gets by writing it: `text + tokenizer.eos_token`.
        """
        contexts, rows = self._padded(self._encode(queries, "queries")), self._encode(responses, "responses")
        if len(contexts) != len(rows):
            raise InputError(f"there are {len(contexts)} queries and {len(rows)} responses")
        own = [[True] * len(row) for row in rows] if mask is None else [list(map(bool, row)) for row in mask]
        if [len(row) for row in own] != [len(row) for row in rows]:
            raise InputError("mask must have one entry for each token of each response")
        if not all(any(row) for row in own):
            raise InputError("mask must have a token of the policy in each response")
        tokens = self._padded(rows)  # (batch, response_length)
        own_tokens = pad_sequence([torch.tensor(row) for row in own], batch_first=True).to(tokens.device)
        with self.actor_critic.sampling():
            logprobs, _, values = packing.by_length(
                nn.Module.__call__,
                self.actor_critic,
                torch.cat([contexts, tokens], dim=1),
                tokens,
                pad_id=self.pad_id,
                rows=self.args.local_rollout_batch_size,
                temperature=self.temperature,
            )
        return self._make_batch(contexts, tokens, logprobs, values, own_tokens)

    def _make_batch(
        self, contexts: Tensor, responses: Tensor, logprobs: Tensor, values: Tensor, own: Tensor
    ) -> Batch:
        """own: which tokens are the policy's; all tensors but contexts are (batch, response_length)."""
        query_responses = torch.cat([contexts, responses], dim=1)
        with self.actor_critic.sampling():
            ref_logprobs = packing.by_length(
                reference_logprobs,
                self.actor_critic,
                query_responses,
                responses,
                pad_id=self.pad_id,
                rows=self.args.local_rollout_batch_size,
                reference=self.reference,
                temperature=self.temperature,
            )
        mask, value_mask = response_masks(responses, self.pad_id)
        stopped = has_stop(responses, self.stop_ids, 0)
        rollout = Rollout(
            query_responses=query_responses,
            logprobs=logprobs,
            values=values,
            rewards=torch.zeros_like(logprobs),
            mask=mask & own,
            # The value after the last token counts, too, whoever wrote that token.
            value_mask=value_mask & (own | ~mask),
            stopped=stopped,
            ref_logprobs=ref_logprobs,
        )
        ends = responses.new_tensor(self.stop_ids)
        texts = responses.masked_fill(torch.isin(responses, ends), self.pad_id)
        return Batch(
            queries=self._decode(contexts),
            responses=self._decode(texts),
            response_ids=[[token for token in row if token != self.pad_id] for row in responses.tolist()],
            stopped=stopped.tolist(),
            step=self.steps,
            rollout=rollout,
        )

    # ---- Step: steps 5 to 8 ------------------------------------------------------------------------------------

    def step(self, batch: Batch, scores: Sequence[float]) -> dict[str, float]:
        """One update of PPO. scores: one for each response. Returns metrics under the names of chapter 2's script.

        Every process must call this, each with its own batch. Raises an InputError, on all of them, if the scores
        don't fit or the batch is older than the last step.
        """
        rollout = self._with_rewards(batch, scores)
        rank, num_processes = self.accelerator.process_index, self.accelerator.num_processes
        local_batch = len(rollout.logprobs)
        episodes = local_batch * num_processes
        minibatches = draw_minibatches(
            self.seed,
            self.steps,
            self.args.noptepochs,
            slice(rank * local_batch, (rank + 1) * local_batch),
            self.args.nminibatches,
        )
        steps = ppo_update(
            self.actor_critic,
            self.optimizer,
            rollout=rollout,
            minibatches=minibatches,
            ppo=self.args,
            pad_id=self.pad_id,
            temperature=self.temperature,
            accelerator=self.accelerator,
        )
        kl_coef = self.controller.value
        metrics = algorithm_metrics(rollout, steps, self.accelerator, kl_coef=kl_coef, more={})
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        processes.check_update(metrics, self.steps, self.dtype, gap="val/first_ratio_gap")
        self.controller.update(metrics["objective/kl"], episodes)
        self.steps += 1
        return metrics

    def _with_rewards(self, batch: Batch, scores: Sequence[float]) -> Rollout:
        """The rollout of a batch with its scores, and step 5: the KL penalty on every token, the score at the end."""
        rollout, problem = batch.rollout, ""
        numbers = [float(score) for score in scores]
        if len(numbers) != len(batch.responses):
            problem = f"{len(numbers)} scores for {len(batch.responses)} responses"
        elif wrong := [x for x in numbers if not abs(x) <= reward_functions.LARGEST_SCORE]:
            problem = f"score {numbers.index(wrong[0]) + 1} is {wrong[0]}; scores must be finite numbers"
        elif batch.step != self.steps:
            problem = (
                f"the batch was read before step {batch.step}, and the policy has made {self.steps}; make it again"
            )
        elif len(numbers) % self.args.nminibatches:
            problem = f"{len(numbers)} responses do not divide by nminibatches {self.args.nminibatches}"
        processes.fail_together(problem)
        processes.check_equal("the number of responses", len(numbers), self.accelerator)
        scores_ = rollout.logprobs.new_tensor(numbers)  # (batch,)
        _, non_score_rewards, kl = compute_rewards(
            torch.zeros_like(scores_),
            logprobs=rollout.logprobs,
            ref_logprobs=rollout.ref_logprobs,
            mask=rollout.mask,
            kl_coef=self.controller.value,
            kl_estimator="k1",
        )
        # The score comes with the last value that counts, as compute_rewards has it where the policy wrote everything.
        columns = torch.arange(kl.shape[1], device=kl.device)
        last = (columns * rollout.value_mask).max(1, keepdim=True).values  # (batch, 1)
        rewards = non_score_rewards.scatter_add(1, last, scores_.unsqueeze(1))
        return dataclasses.replace(
            rollout, rewards=rewards, scores=scores_, kl=kl, non_score_rewards=non_score_rewards
        )

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
        self.optimizer.load_state_dict(state["optimizer"])
        self.controller.value = state["kl_coef"]
        self.steps, self.draws = state["steps"], state["draws"]

    def save(self, folder: str | Path) -> None:
        """Save the policy as an ordinary causal language model, and in its folder `critic` the critic. Training may go on.

        Adapters are saved merged.
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
        encoded = [
            [*start, *self.tokenizer.encode(row, add_special_tokens=False)] if isinstance(row, str) else list(row)
            for row in rows
        ]
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

    def _decode(self, tokens: Tensor) -> list[str]:
        rows = tokens.tolist()
        return [self.tokenizer.decode([token for token in row if token != self.pad_id]) for row in rows]
