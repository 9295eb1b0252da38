"""One update each of GRPO, PPO with a critic and RLOO by verl 0.9.1: writes tests/golden/verl_updates.

    python -m pip install --no-deps --target build/verl verl==0.9.1 tensordict==0.10.0 antlr4-python3-runtime==4.9.3 \
        codetiming omegaconf hydra-core torchdata pyvers orjson cachetools uvicorn click h11 fastapi starlette \
        annotated-doc
    PYTHONPATH=build/verl python benchmark/verl_updates.py

Everything from the rewards to the optimiser step is verl's own code, unmodified: apply_kl_penalty and
compute_advantage of its trainer, TrainingWorker with its minibatches, FSDPEngine with its micro-batches, its losses,
clipping and AdamW. tests/golden/verl_updates/README.md says what is replaced, and what the files hold.
"""

import copy
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForTokenClassification, GPT2LMHeadModel
from verl import DataProto
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.trainer.config import AlgoConfig, KLControlConfig
from verl.trainer.ppo.core_algos import get_kl_controller
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
from verl.utils import tensordict_utils as tu
from verl.utils.profiler import DistProfiler
from verl.workers.config import ActorConfig, CriticConfig, FSDPEngineConfig, FSDPOptimizerConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

FOLDER = Path(__file__).parent.parent / "tests/golden/verl_updates"
PAD, STOPS = 20, 2  # the model has the ids below PAD, and those below STOPS end a response
PROMPTS, SAMPLES, CONTEXT, RESPONSE = 4, 4, 5, 7
TEMPERATURE = 0.75  # exact in float32, to which verl rounds it
MINIBATCH, MICRO_BATCH, EPOCHS, SEED = 8, 4, 2, 42

KL = KLControlConfig(kl_coef=0.05)

# In verl's names. All are 0 or off where nothing is said.
CASES = {
    "grpo": {
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"},
    },
    "ppo": {
        "algorithm": {"adv_estimator": "gae", "gamma": 1.0, "lam": 0.95, "use_kl_in_reward": True, "kl_ctrl": KL},
        "actor": {"entropy_coeff": 0.01},
        "critic": {"cliprange_value": 0.2},
    },
    "rloo": {
        "algorithm": {"adv_estimator": "rloo", "use_kl_in_reward": True, "kl_ctrl": KL},
        "actor": {"loss_agg_mode": "seq-mean-token-sum", "clip_ratio_c": 1.5},
    },
}
PARTS = ("actor/pg_loss", "kl_loss", "actor/entropy_loss", "grad_norm")  # of a step's metrics
LR = {"policy": 0.002, "value": 0.004}
OPTIMIZER = {"weight_decay": 0.01, "betas": (0.9, 0.999), "clip_grad": 0.5}


class Processor(PlatformCUDA):
    """The CPU as a device of verl, which knows only accelerators."""

    device_name = "cpu"
    device_module = SimpleNamespace(max_memory_allocated=lambda: 0, max_memory_reserved=lambda: 0)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


# ---- Models and rollout ----------------------------------------------------------------------------------------


def gpt2(seed: int, like: nn.Module | None = None, critic: bool = False) -> nn.Module:
    """A model with random weights, or with those of another model and some noise; all are exact in float32."""
    config = GPT2Config(
        vocab_size=PAD,
        n_positions=CONTEXT + RESPONSE,
        n_embd=12,
        n_layer=2,
        n_head=2,
        n_inner=24,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        classifier_dropout=0.0,
        num_labels=1,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = GPT2ForTokenClassification(config) if critic else GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            start = like.get_parameter(name) if like else parameter
            parameter.copy_(start + (0.05 if like else 0.3) * torch.randn(parameter.shape))
    return model.double()


@torch.no_grad()
def sample(policy: nn.Module) -> dict[str, Tensor]:
    """Prompts, padded on the left, SAMPLES responses to each at the temperature, and a score of each response."""
    generator = torch.Generator().manual_seed(SEED)
    queries = torch.full((PROMPTS, CONTEXT), PAD)
    for row, length in enumerate([5, 2, 4, 3]):
        queries[row, CONTEXT - length :] = torch.randint(1, PAD, (length,), generator=generator)
    queries = queries.repeat_interleave(SAMPLES, 0)
    responses = torch.full((len(queries), RESPONSE), PAD)
    for query, response in zip(queries, responses, strict=True):
        for place in range(RESPONSE):
            text = torch.cat([query[query != PAD], response[:place]])
            probabilities = (policy(text.unsqueeze(0)).logits[0, -1] / TEMPERATURE).softmax(0)
            response[place] = torch.multinomial(probabilities, 1, generator=generator)
            if response[place] < STOPS:
                break
    words = responses.masked_fill((responses < STOPS) | (responses == PAD), 0)
    scores = words.sum(1).remainder(5).double() / 4  # equal for equal texts
    return {"queries": queries, "responses": responses, "scores": scores}


def for_verl(rollout: dict[str, Tensor]) -> DataProto:
    """The rollout as verl's trainer has it."""
    tokens = torch.cat([rollout["queries"], rollout["responses"]], dim=1)
    attention_mask = (tokens != PAD).long()
    response_mask = attention_mask[:, CONTEXT:]
    last = response_mask.sum(1) - 1  # has the score
    scores = torch.zeros(response_mask.shape, dtype=torch.float64)
    scores[torch.arange(len(tokens)), last] = rollout["scores"]
    rows = torch.arange(len(tokens))
    tensors = {
        "rows": rows,
        "input_ids": tokens.masked_fill(tokens == PAD, 0),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "prompts": tokens[:, :CONTEXT],
        "responses": tokens[:, CONTEXT:],
        "response_mask": response_mask,
        "token_level_scores": scores,
    }
    groups = [str(group) for group in (rows // SAMPLES).tolist()]
    return DataProto.from_dict(tensors, {"uid": np.array(groups, dtype=object)})


# ---- verl's workers --------------------------------------------------------------------------------------------


class Recorder:
    """Keeps of each step of an engine: its rows, its loss, and the gradient from before it is clipped."""

    def take(self, module: nn.Module) -> None:
        """In place of what the engine would load and shard."""
        self.module, self.steps = module, []
        self.optimizer = self._build_optimizer(module)
        self.lr_scheduler = self._build_lr_scheduler(self.optimizer)
        self._autocast_dtype = torch.float32  # with which it takes the model as it is

    def train_batch(self, data: TensorDict, loss_function) -> dict:
        self.steps.append({"rows": data["rows"]})
        output = super().train_batch(data, loss_function)
        self.steps[-1]["loss"] = sum(output["loss"])  # of its micro-batches; its metric is rounded to float32
        return output

    def optimizer_step(self) -> float:
        self.steps[-1]["gradient"] = flat(parameter.grad for parameter in self.module.parameters())
        return super().optimizer_step()


class PolicyEngine(Recorder, FSDPEngineWithLMHead):
    pass


class CriticEngine(Recorder, FSDPEngineWithValueHead):
    pass


class Learner(TrainingWorker):
    """verl's worker in this process, with an engine of its own."""

    def __init__(self, engine_class: type, module: nn.Module, loss: Callable | None, lr: float):
        settings = {"use_remove_padding": False, "lora_rank": 0}
        self.model_config = SimpleNamespace(**settings, get=settings.get)
        self.engine_config = FSDPEngineConfig(
            use_torch_compile=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=MICRO_BATCH,
            infer_micro_batch_size_per_gpu=MICRO_BATCH,
        )
        optimizer_config = FSDPOptimizerConfig(**OPTIMIZER, lr=lr, total_training_steps=1, lr_warmup_steps=0)
        self.engine = engine_class(self.model_config, self.engine_config, optimizer_config, None)
        self.engine.take(module)
        self.profiler, self.flops_counter, self.device_name = DistProfiler(rank=0), None, "cpu"
        self.loss_fn = loss

    def read(self, batch: DataProto, name: str) -> Tensor:
        """Log-probs or values of the response tokens, as its trainer computes them, but not rounded to float32."""
        data = left_right_2_no_padding(batch.to_tensordict())
        tu.assign_non_tensor(data, compute_loss=False, temperature=TEMPERATURE)
        return no_padding_2_padding(self.infer_batch(data)[name], data)

    def learn(self, batch: DataProto, **more) -> dict:
        """All epochs, with what its trainer's _update_actor and _update_critic hand over. Returns metrics."""
        data = left_right_2_no_padding(batch.to_tensordict())
        tu.assign_non_tensor(
            data,
            global_batch_size=MINIBATCH,
            mini_batch_size=MINIBATCH,
            epochs=EPOCHS,
            seed=SEED,
            dataloader_kwargs={"shuffle": True},
            temperature=TEMPERATURE,
            **more,
        )
        return tu.get(self.train_mini_batch(data), "metrics")


def update(
    case: dict[str, dict], rollout: dict[str, Tensor], policy: nn.Module, reference: nn.Module, value: nn.Module
) -> dict[str, Tensor]:
    """The numbers of one update, in the order of RayPPOTrainer.fit."""
    algorithm = AlgoConfig(**case["algorithm"])
    of_all = {"strategy": "fsdp", "ppo_micro_batch_size_per_gpu": MICRO_BATCH, "rollout_n": 1}
    actor_config = ActorConfig(**of_all, **case["actor"])
    actor = Learner(PolicyEngine, policy, partial(ppo_loss, actor_config), LR["policy"])
    learners = {"policy": actor}
    batch = for_verl(rollout)
    batch.batch["old_log_probs"] = actor.read(batch, "log_probs")
    batch.batch["ref_log_prob"] = Learner(PolicyEngine, reference, None, 0.0).read(batch, "log_probs")
    if "critic" in case:
        loss = partial(value_loss, CriticConfig(**of_all, **case["critic"]))
        learners["value"] = Learner(CriticEngine, value, loss, LR["value"])
        batch.batch["values"] = learners["value"].read(batch, "values")
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    if algorithm.use_kl_in_reward:
        batch, _ = apply_kl_penalty(batch, get_kl_controller(algorithm.kl_ctrl), algorithm.kl_penalty)
    batch = compute_advantage(
        batch,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=SAMPLES,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    metrics = {}
    if "critic" in case:
        metrics["value"] = learners["value"].learn(batch)
    metrics["policy"] = actor.learn(batch, calculate_entropy=actor_config.entropy_coeff != 0, compute_loss=True)
    found = {"rows": torch.stack([step["rows"] for step in actor.engine.steps])}
    for name, learner in learners.items():
        steps = learner.engine.steps
        assert torch.stack([step["rows"] for step in steps]).equal(found["rows"])
        numbers = {key.rpartition("/")[2]: metrics[name][key] for key in PARTS if key in metrics[name]}
        numbers["loss"] = [step["loss"] for step in steps]
        found |= {f"{name}/{key}": torch.tensor(values, dtype=torch.float64) for key, values in numbers.items()}
        found[f"{name}/first_gradient"] = steps[0]["gradient"]
        found[f"{name}/weights"] = flat(learner.engine.module.parameters())
    return found


def main() -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    set_platform(Processor())
    torch.distributed.init_process_group("gloo")
    policy = gpt2(32)  # of 30 seeds, one whose responses have many lengths
    models = {"policy": policy, "reference": gpt2(2, like=policy), "value": gpt2(3, critic=True)}
    rollout = sample(policy)
    arrays = {f"rollout/{name}": tensor for name, tensor in rollout.items()}
    arrays |= {f"start/{name}": flat(model.parameters()).float() for name, model in models.items()}
    for name, case in CASES.items():
        found = update(case, rollout, **copy.deepcopy(models))
        arrays |= {f"{name}/{key}": tensor for key, tensor in found.items()}
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(FOLDER / "updates.npz", **{name: tensor.numpy() for name, tensor in arrays.items()})


if __name__ == "__main__":
    main()
