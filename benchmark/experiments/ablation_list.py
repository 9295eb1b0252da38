"""What ablations.py changes in the three small worlds: one detail at a time, and what each change is compared with.

A change is compared with the baseline of its world, or with a *setting*: another entry, whose changes it has too. So
`many-epochs-no-policy-clipping` and `many-epochs` differ in the clip alone. Settings are there for details that show
nothing in the plain run and should matter elsewhere. A setting may itself be compared with another.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ablation:
    """One change: arguments, or lines of the training scripts."""

    detail: str
    """id in docs/reference"""
    what: str
    """what is different, in words"""
    policy: tuple[str, ...] = ()
    """arguments of the script that trains the policy"""
    reward: tuple[str, ...] = ()
    """arguments of the script that trains the reward model; the ablation gets reward models of its own"""
    lines: dict[str, str] = field(default_factory=dict)
    """lines of the scripts and their replacements, wherever they are"""
    own_reward_model: bool = False
    """whether the lines matter for the reward model too"""
    against: str = "baseline"
    """the entry that it is compared with, whose changes it has too"""
    why: str = ""
    """what the detail is for, in a sentence"""


# ---- Chapter 1: tales ------------------------------------------------------------------------------------------

POSITIONS = "position_ids = mask.cumsum(1) - mask.long()"
WHITENED = "torch.stack([whiten(group, keep_mean=False) for group in advantages.view_as(values)])"
LOSS = "loss = pg_loss + ppo.vf_coef * vf_loss"
ADAM = {
    'group["eps"] = group["eps_tensorflow"] / math.sqrt(1 - group["betas"][1] ** group["steps"])': (
        'group["eps"] = group["eps_tensorflow"]'
    )
}
NO_PENALTY = {"scores = torch.where(stopped, raw_scores, task.penalty_reward_value)": "scores = raw_scores"}
UNWHITENED = {WHITENED: "advantages.view_as(values)"}
PADDING_COUNTS = {
    # As if the padding of a query stood to its left and the library numbered the columns: a whole row is moved on by
    # its padding. In [x, pad, pad, a, b], x is at 2, a at 3, b at 4; without the ablation at 0, 1, 2. The models are
    # not tried first: they would be refused, because padding matters to them.
    "    cli.check_model(lm_backbone, args.base_model, longest, ids.pad, read_tokens)\n": "",
    "    cli.check_model(language_model, args.base_model, longest, ids.pad, read_tokens)\n": "",
    POSITIONS: POSITIONS + " + (~mask & mask.flip(1).cummax(1).values.flip(1)).sum(1, keepdim=True)",
}
UNEVEN = {
    # Of the queries of a batch, the first keeps one sentence, the second two, and so on to five, then one again.
    "queries = stream.next_batch(sizes.batch, ids.pad)": (
        "queries = uneven(stream.next_batch(sizes.batch, ids.pad), ids)"
    ),
    "# ---- Step 1: queries": """\
def uneven(queries, ids):
    ends = (queries == ids.stop).long()
    kept = 1 + torch.arange(len(queries))[:, None] % 5
    return queries.masked_fill(ends.cumsum(1) - ends >= kept, ids.pad)


# ---- Step 1: queries""",
}
OPTIMIZER = "    optimizer = AdamTensorFlowStyle(reward_model.parameters(), lr=args.lr)"
WIDE_HEAD = {OPTIMIZER: f"    reward_model.reward_head.weight.data.mul_(10)\n{OPTIMIZER}"}
NO_POLICY_CLIP, NO_VALUE_CLIP = ("--ppo.cliprange", "1e9"), ("--ppo.cliprange_value", "1e9")

TALES = {
    "baseline": Ablation("", "nothing"),
    "no-reward-whitening": Ablation(
        "D55",
        "rewards are not whitened",
        policy=("--ppo.no-whiten_rewards",),
        why="Whitened rewards have a fixed scale, whatever scores and KL coefficient are.",
    ),
    "no-advantage-whitening": Ablation(
        "D58",
        "advantages are not whitened",
        lines=UNWHITENED,
        why="The policy loss gets a fixed scale, and so a fixed weight against the value loss.",
    ),
    "no-value-clipping": Ablation(
        "D59",
        "the value loss is not clipped",
        policy=NO_VALUE_CLIP,
        why="The clip stops one batch from moving the critic far.",
    ),
    "no-policy-clipping": Ablation(
        "D60",
        "the policy loss is not clipped",
        policy=NO_POLICY_CLIP,
        why="Advantages hold near the policy that sampled; beyond the clip nothing is gained by going further.",
    ),
    "fixed-kl": Ablation(
        "D69",
        "the KL coefficient stays 0.15",
        policy=("--rewards.adaptive_kl.target", "None"),
        why="The controller leads the KL to a target, so that runs with different scores end at one distance.",
    ),
    "no-kl": Ablation(
        "D51",
        "no KL penalty",
        policy=("--rewards.adaptive_kl.target", "None", "--rewards.kl_coef", "0"),
        why="The penalty keeps the text where the reward model can judge it.",
    ),
    "not-normalised-before": Ablation(
        "D34",
        "scores are not normalised before the reward model trains",
        reward=("--no-normalize_before",),
        why="Training starts from scores of a known scale.",
    ),
    "not-normalised-after": Ablation(
        "D38",
        "scores are not normalised after the reward model has trained",
        reward=("--no-normalize_after",),
        why="The KL coefficient is a price in units of the score.",
    ),
    "never-normalised": Ablation(
        "D39",
        "scores are never normalised",
        reward=("--normalize_samples", "0"),
        why="Both normalisations together.",
    ),
    "torch-adam": Ablation(
        "D64",
        "Adam as PyTorch has it, with the same eps",
        lines=ADAM,
        why="TensorFlow adds eps before the bias correction, which shortens the first steps.",
    ),
    "positions-count-padding": Ablation(
        "D14",
        "position ids count the padding",
        lines=PADDING_COUNTS,
        own_reward_model=True,
        why="A text means the same wherever its padding is.",
    ),
    "no-score-penalty": Ablation(
        "D50",
        "a response without a stop token keeps its score",
        lines=NO_PENALTY,
        why="The penalty teaches the policy to end a sentence in the allowed place.",
    ),
    "constant-learning-rate": Ablation(
        "D63",
        "the learning rate stays where it starts",
        lines={"return first_lr * (1 - update / math.ceil(ppo.total_episodes / ppo.batch_size))": "return first_lr"},
        why="Smaller steps at the end average the noise away.",
    ),
    "random-value-head": Ablation(
        "D46",
        "the value head starts at random, like the reward head",
        lines={
            "nn.init.zeros_(self.value_head.weight)": (
                "nn.init.normal_(self.value_head.weight, std=1 / math.sqrt(lm_backbone.config.hidden_size + 1))"
            )
        },
        why="A critic that says 0 adds no noise to the first advantages.",
    ),
    "lambda-1": Ablation(
        "D56",
        "lambda = 1: advantages are returns minus values",
        policy=("--ppo.lam", "1"),
        why="Lambda trades the noise of returns for the error of values.",
    ),
    "lambda-0": Ablation(
        "D56",
        "lambda = 0: advantages look one token ahead",
        policy=("--ppo.lam", "0"),
        why="With lambda 0 the score reaches earlier tokens only through the critic.",
    ),
    "gamma-0.9": Ablation(
        "D56",
        "gamma = 0.9: the score fades over ten tokens",
        policy=("--ppo.gamma", "0.9"),
        why="A text is judged at its end, so early tokens must not be discounted.",
    ),
    "one-epoch": Ablation(
        "D62",
        "one pass over each batch instead of four",
        policy=("--ppo.noptepochs", "1"),
        why="Sampling is expensive, so each batch is used several times.",
    ),
    # Settings for what shows nothing above.
    "short": Ablation(
        "D63",
        "setting: 20 updates, over which the learning rate falls to 0",
        policy=("--ppo.total_episodes", "1280"),
        why="Settings have 20 updates: some take several times as long, others learn several times as fast.",
    ),
    "many-epochs": Ablation(
        "D62",
        "setting: 16 epochs",
        policy=("--ppo.noptepochs", "16"),
        against="short",
        why="Many passes take the policy far from the one that sampled, which the clip is for.",
    ),
    "many-epochs-no-policy-clipping": Ablation(
        "D60", "the policy loss is not clipped", policy=NO_POLICY_CLIP, against="many-epochs"
    ),
    "many-epochs-no-value-clipping": Ablation(
        "D59", "the value loss is not clipped", policy=NO_VALUE_CLIP, against="many-epochs"
    ),
    "high-learning-rate": Ablation(
        "D63",
        "setting: five times the learning rate",
        policy=("--ppo.lr", "1e-3"),
        against="short",
        why="Large steps are what both clips and the whitening should tame.",
    ),
    "high-learning-rate-no-policy-clipping": Ablation(
        "D60", "the policy loss is not clipped", policy=NO_POLICY_CLIP, against="high-learning-rate"
    ),
    "high-learning-rate-no-value-clipping": Ablation(
        "D59", "the value loss is not clipped", policy=NO_VALUE_CLIP, against="high-learning-rate"
    ),
    "high-learning-rate-no-advantage-whitening": Ablation(
        "D58", "advantages are not whitened", lines=UNWHITENED, against="high-learning-rate"
    ),
    "small-gradients": Ablation(
        "D64",
        "setting: losses divided by 1,000",
        lines={LOSS: "loss = 0.001 * (pg_loss + ppo.vf_coef * vf_loss)"},
        against="short",
        why="Where gradients are near eps or below it, the two forms of Adam take steps of different lengths.",
    ),
    "small-gradients-torch-adam": Ablation(
        "D64", "Adam as PyTorch has it, with the same eps", lines=ADAM, against="small-gradients"
    ),
    "late-stop": Ablation(
        "D50",
        "setting: the sentence must end at token 22, 23 or 24",
        policy=("--task.truncate_after", "21"),
        against="short",
        why="Where few responses end in the allowed place, the penalty has something to teach.",
    ),
    "late-stop-no-score-penalty": Ablation(
        "D50", "a response without a stop token keeps its score", lines=NO_PENALTY, against="late-stop"
    ),
    "uneven-queries": Ablation(
        "D14",
        "setting: queries of one to five sentences in 64 columns; a sentence has about 12 tokens",
        policy=("--task.query_length", "64"),
        lines=UNEVEN,
        against="short",
        why="The more padding, the further away the positions of the same text are.",
    ),
    "uneven-queries-positions-count-padding": Ablation(
        "D14",
        "position ids count the padding",
        lines=PADDING_COUNTS,
        own_reward_model=True,
        against="uneven-queries",
    ),
    "wide-scores": Ablation(
        "D29",
        "setting: the reward head starts with ten times its deviation",
        lines=WIDE_HEAD,
        own_reward_model=True,
        against="short",
        why="Where the first scores are far too wide, normalising them has something to repair.",
    ),
    "wide-scores-not-normalised-before": Ablation(
        "D34",
        "scores are not normalised before the reward model trains",
        reward=("--no-normalize_before",),
        against="wide-scores",
    ),
}

# ---- Chapter 2: posts ------------------------------------------------------------------------------------------

LAST_STEP = "position = mask.sum(1, keepdim=True).clamp(max=mask.shape[1] - 1)"
CRITIC = "networks.load_critic(args, vocab_size)"
ACTOR_CRITIC = "    actor_critic = ActorCritic("
SHARED_CRITIC = """\
    torch.manual_seed(args.seed)  # for the head
    critic = lm.RewardModel(lm_backbone.base_model)  # its parameters are the policy's; both losses move them
    critic.gain.requires_grad_(False)
    critic.bias.requires_grad_(False)
"""
POSTS = {
    "baseline": Ablation("", "nothing"),
    "missing-eos-subtract": Ablation(
        "T39",
        "a summary that does not end loses 1, in place of getting -1",
        policy=("--rewards.missing_eos", "subtract"),
        why="Subtracting leaves it better to write a good summary without an end than a bad one with it.",
    ),
    "missing-eos-none": Ablation(
        "T39",
        "a summary that does not end keeps its score",
        policy=("--rewards.missing_eos", "none"),
        why="The penalty teaches the policy to end, as the reward model has only seen summaries that do.",
    ),
    "critic-from-sft": Ablation(
        "T32",
        "the critic starts as the fine-tuned model with a random head",
        lines={
            CRITIC: "networks.load_critic(dataclasses.replace(args, rewards=dataclasses.replace("
            'args.rewards, trained_model="")), vocab_size)'
        },
        why="The reward model already knows what a summary is worth at its end.",
    ),
    "critic-shared": Ablation(
        "T32",
        "the random head is on the policy's own network",
        lines={ACTOR_CRITIC: SHARED_CRITIC + ACTOR_CRITIC},
        against="critic-from-sft",
        why="A critic of its own cannot disturb the policy, but costs the memory of a second network.",
    ),
    "whitened-rewards": Ablation(
        "T44",
        "rewards are whitened",
        policy=("--ppo.whiten_rewards",),
        why="Rewards get a fixed scale, which hides how large the scores are.",
    ),
    "no-advantage-whitening": Ablation(
        "T44",
        "advantages are not whitened",
        lines={
            "return whiten(advantages, mask, keep_mean=False, reduce=reduce), returns": "return advantages, returns"
        },
        why="The policy loss gets a fixed scale; Adam does much the same to the gradient.",
    ),
    "score-on-last-token": Ablation(
        "T43",
        "the score is the reward of the last token, not of the step after it",
        lines={LAST_STEP: "position = (mask.sum(1, keepdim=True) - 1).clamp(min=0)"},
        why="The critic also learns the value of a finished summary, which is its score.",
    ),
    "kl-k3": Ablation(
        "T42",
        "the KL in the reward is k3",
        policy=("--rewards.kl_estimator", "k3"),
        why="Only k1 has the gradient of the KL divergence as a reward.",
    ),
    "no-kl": Ablation(
        "T42",
        "no KL penalty",
        policy=("--rewards.kl_coef", "0"),
        why="The penalty keeps summaries where the reward model can judge them.",
    ),
    "temperature-1": Ablation(
        "T35",
        "policy and reference at temperature 1 instead of 0.7",
        policy=("--task.temperature", "1"),
        why="A lower temperature makes samples better and explores less.",
    ),
    "lambda-1": Ablation(
        "T44",
        "lambda = 1: advantages are returns minus values",
        policy=("--ppo.lam", "1"),
        why="Lambda trades the noise of returns for the error of values.",
    ),
    "one-epoch": Ablation(
        "T48",
        "one pass over each batch instead of four",
        policy=("--ppo.noptepochs", "1"),
        why="Sampling is expensive, so each batch is used several times.",
    ),
    "comparisons-256": Ablation(
        "T27",
        "the reward model learns from 256 comparisons instead of 2,048",
        reward=("--num_train", "256"),
        why="What the reward model has not learned, PPO cannot know, and will exploit.",
    ),
    "comparisons-12288": Ablation(
        "T27",
        "the reward model learns from 12,288 comparisons",
        reward=("--num_train", "12288"),
        why="More comparisons make the proxy truer.",
    ),
    "lora-4": Ablation(
        "X35",
        "LoRA of rank 4 on the layers that peft chooses",
        policy=("--lora.rank", "4"),
        why="Adapters train few weights, and the policy without them is the reference.",
    ),
    "lora-32": Ablation(
        "X35",
        "LoRA of rank 32 on the layers that peft chooses",
        policy=("--lora.rank", "32"),
        why="A higher rank can change more.",
    ),
    "lora-32-all-linear": Ablation(
        "X35",
        "LoRA of rank 32 on all linear layers but the output layer",
        policy=("--lora.rank", "32", "--lora.target_modules", "all-linear"),
        why="Layers without an adapter stay what they were.",
    ),
}

# ---- Chapter 3: sums -------------------------------------------------------------------------------------------

ROUNDED_LOGITS = """\
def rounded_logits(model, hidden_states, vocab_size, temperature):
    with torch.autocast(hidden_states.device.type, torch.bfloat16):
        return model.get_output_embeddings()(hidden_states)[..., :vocab_size].float() / temperature


lm.scaled_logits = rounded_logits
# ---- Train -"""
NO_CLIP = ("--ppo.cliprange_low", "1", "--ppo.cliprange_high", "1e9")
GAE = ("--ppo.advantage", "gae", "--ppo.samples_per_prompt", "1", "--ppo.critic_warmup", "3")
SUMS = {
    "baseline": Ablation("", "nothing"),
    "aggregation-token-sum": Ablation(
        "V60",
        "losses of a response are summed, then averaged over responses",
        policy=("--ppo.loss_aggregation", "seq-mean-token-sum"),
        why="A sum gives long responses more weight; for a fixed batch it is the token mean times a constant.",
    ),
    "aggregation-token-mean-of-sequence": Ablation(
        "V60",
        "losses of a response are averaged, then averaged over responses",
        policy=("--ppo.loss_aggregation", "seq-mean-token-mean"),
        why="A token of a long response then weighs less, so that long wrong responses are punished less per token.",
    ),
    "aggregation-constant": Ablation(
        "V60",
        "losses of a response are summed and divided by the greatest length",
        policy=("--ppo.loss_aggregation", "seq-mean-token-sum-norm"),
        why="The weight of a token depends on no length.",
    ),
    "whitened": Ablation(
        "V47",
        "the advantages of GRPO are whitened, too",
        policy=("--ppo.whiten_advantages", "True"),
        why="Whitening shifts groups without a signal away from 0.",
    ),
    "not-divided": Ablation(
        "V36",
        "the group's scores are not divided by their deviation (Dr. GRPO)",
        policy=("--ppo.advantage", "dr_grpo"),
        why="Division gives groups that are nearly all right or all wrong more weight.",
    ),
    "group-2": Ablation(
        "V33",
        "groups of 2 instead of 8, the same number of responses",
        policy=("--ppo.samples_per_prompt", "2"),
        why="A larger group has a better baseline, a smaller one more problems per update.",
    ),
    "group-4": Ablation(
        "V33",
        "groups of 4",
        policy=("--ppo.samples_per_prompt", "4"),
        why="More problems per update, and a noisier baseline for each.",
    ),
    "group-16": Ablation(
        "V33",
        "groups of 16",
        policy=("--ppo.samples_per_prompt", "16"),
        why="A better baseline for each problem, and fewer problems per update.",
    ),
    "clip-higher": Ablation(
        "V63",
        "the upper bound of the clip is 0.28 instead of 0.2 (DAPO)",
        policy=("--ppo.cliprange_high", "0.28"),
        why="Unlikely tokens can become likely faster, which keeps entropy up.",
    ),
    "no-clip": Ablation(
        "V58",
        "the policy loss is not clipped",
        policy=NO_CLIP,
        why="With two steps per batch, the ratio stays near 1 anyway.",
    ),
    "dual-clip": Ablation(
        "V59",
        "dual clip at 3",
        policy=("--ppo.dual_clip", "3"),
        why="A token that has become likely in a bad response would otherwise have an unbounded loss.",
    ),
    "no-gradient-clipping": Ablation(
        "V72",
        "the gradient's norm is not clipped",
        policy=("--ppo.max_grad_norm", "1e9"),
        why="One unlucky batch should not undo many.",
    ),
    "many-steps": Ablation(
        "V75",
        "setting: 4 epochs of 8 minibatches, 32 optimiser steps per batch instead of 2",
        policy=("--ppo.noptepochs", "4", "--ppo.nminibatches", "8"),
        why="Many steps take the policy far from the one that sampled, which the clips are for.",
    ),
    "many-steps-clip-higher": Ablation(
        "V63",
        "the upper bound of the clip is 0.28 (DAPO)",
        policy=("--ppo.cliprange_high", "0.28"),
        against="many-steps",
    ),
    "many-steps-no-clip": Ablation("V58", "the policy loss is not clipped", policy=NO_CLIP, against="many-steps"),
    "many-steps-dual-clip": Ablation("V59", "dual clip at 3", policy=("--ppo.dual_clip", "3"), against="many-steps"),
    "critic": Ablation(
        "V29",
        "setting: GAE with a critic, one response to a problem",
        policy=GAE,
        why="A critic judges tokens, a group only responses; it has to learn first.",
    ),
    "critic-lambda-1": Ablation(
        "V29",
        "lambda = 1 instead of 0.95",
        policy=("--ppo.lam", "1"),
        against="critic",
        why="Lambda trades the noise of returns for the error of values.",
    ),
    "critic-lambda-0": Ablation(
        "V29",
        "lambda = 0",
        policy=("--ppo.lam", "0"),
        against="critic",
        why="With lambda 0 the score reaches earlier tokens only through the critic.",
    ),
    "critic-no-warmup": Ablation(
        "V71",
        "the policy learns from the first update on",
        policy=("--ppo.critic_warmup", "0"),
        against="critic",
        why="Advantages from a critic that knows nothing are noisy, but not wrong on average with lambda 1.",
    ),
    "critic-not-whitened": Ablation(
        "V47",
        "advantages are not whitened",
        policy=("--ppo.whiten_advantages", "False"),
        against="critic",
        why="The policy loss gets a fixed scale; Adam does much the same to the gradient.",
    ),
    "critic-random-head": Ablation(
        "V70",
        "the critic's head starts at random",
        policy=("--ppo.value_head", "normal"),
        against="critic",
        why="A critic that says 0 adds no noise to the first advantages.",
    ),
    "rloo": Ablation(
        "V38",
        "setting: RLOO",
        policy=("--ppo.advantage", "rloo"),
        why="A response is compared with the others of its group; the advantages keep the scale of the scores.",
    ),
    "rloo-whitened": Ablation(
        "V47", "advantages are whitened", policy=("--ppo.whiten_advantages", "True"), against="rloo"
    ),
    "reinforce-plus-plus": Ablation(
        "V39",
        "setting: REINFORCE++, one response to a problem",
        policy=("--ppo.advantage", "reinforce++", "--ppo.samples_per_prompt", "1"),
        why="Whitening is the only baseline that it has.",
    ),
    "reinforce-plus-plus-not-whitened": Ablation(
        "V47",
        "advantages are not whitened",
        policy=("--ppo.whiten_advantages", "False"),
        against="reinforce-plus-plus",
    ),
    "remax": Ablation(
        "V41",
        "setting: ReMax, one response to a problem",
        policy=("--ppo.advantage", "remax", "--ppo.samples_per_prompt", "1"),
        why="A greedy response is right more often than a sample, so most advantages are negative or 0.",
    ),
    "remax-whitened": Ablation(
        "V47", "advantages are whitened", policy=("--ppo.whiten_advantages", "True"), against="remax"
    ),
    "bfloat16": Ablation(
        "V15",
        "setting: matrix products of the layers in bfloat16",
        policy=("--dtype", "bfloat16"),
        why="It is what GPUs are fastest at; sampler and training pass then round differently.",
    ),
    "bfloat16-output-layer": Ablation(
        "V15",
        "the output layer is in bfloat16, too",
        lines={"# ---- Train -": ROUNDED_LOGITS},
        against="bfloat16",
        why="A rounded logit moves the log-prob of its token, and the ratio with it.",
    ),
}
