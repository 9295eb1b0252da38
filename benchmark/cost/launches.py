"""What an update asks of a GPU: launches, copies and waits, counted on a CPU, and the time that they imply.

    python benchmark/cost/launches.py             # counts, and writes the tables of launches.md: two minutes
    python benchmark/cost/launches.py --lines 20  # the lines of the code with most waits and launches, one layer

stand_in.py counts. A count is a + b * layers + c * tokens + d * layers * tokens, with the tokens of a response. Four
runs with one or two layers and two lengths give a, b, c and d of each step, and these give the counts of the whole
model. The width is that of the model, because models of at least 512 may read no padding. The vocabulary is small,
since counts don't depend on it.

The bound: a launch takes the host 5 microseconds, and a wait 20. The device computes the FLOPs that speed.py counts,
in bfloat16 at the card's rate, and moves the bytes of scaling.py's kernels at its bandwidth; for each token it reads
all weights and the cache of keys and values. Host and device work at the same time, so the slower of them binds.
"""

import contextlib
import io
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmark.cost import scaling, speed, stand_in
from benchmark.curves.compare import markdown
from ppo_rlhf import rlvr_policy, train_policy
from ppo_rlhf.lib import cli, files, run

PAGE = Path(__file__).with_name("launches.md")
RESULT = speed.ROOT / "benchmark/results/launches/launches.json"
LAUNCH, WAIT = 5e-6, 20e-6  # seconds
HEADS = {"launch": "launches", "copy to device": "copies to the device"}  # of the columns
HEADS |= {"copy to host": "copies to the host", "wait": "waits"}
KINDS = tuple(HEADS)
LAYERS, TOKENS = (1, 2), (8, 16)  # of the counted runs
# A function that is on the way to a line says to which step the line belongs; the first that is found counts.
STEPS = {
    "trace": ("record", "record_trace"),
    "evaluate": ("evaluate",),
    "reference": ("reference_logprobs", "logprobs", "response_logprobs"),
    "generate": ("respond", "generate"),
    "read": ("read_responses",),
    "score": ("score", "score_responses"),
    "passes": ("ppo_update", "update"),
    "advantages": ("compute_advantages", "token_rewards", "compute_rewards"),
    "log": ("update_metrics", "run_metrics", "end_of_update"),
}


@dataclass(frozen=True)
class Args:
    lines: int = 0
    """print so many lines of the code with most waits, and with most launches, in an update; write nothing"""


@dataclass(frozen=True)
class Shape:
    """A model, and an update of it."""

    config: PretrainedConfig
    chapter: int
    query: int
    response: int
    batch: int
    epochs: int
    passes: int
    """forward and backward passes per update of one process"""


# GPT-2 as in chapter 1's default; GRPO with Qwen2.5-0.5B.
SHAPES = {
    "gpt2": Shape(speed.SHAPES["gpt2"](), 1, query=64, response=24, batch=512, epochs=4, passes=4),
    "qwen2.5-0.5b": Shape(
        speed.SHAPES["qwen2.5-0.5b"](),
        chapter=3,
        query=128,
        response=256,
        batch=256,
        epochs=1,
        passes=2,
    ),
}


@dataclass(frozen=True)
class Card:
    """From the data sheet of the SXM version; rates of dense products."""

    bfloat16: float
    float32: float
    memory: float
    """bytes per second"""


CARDS = {"H100": Card(989e12, 67e12, 3.35e12), "H200": Card(989e12, 67e12, 4.8e12)}

Counts = dict[str, float]  # of each kind
TIMES = {"generate, each token": lambda shape: shape.response, "update, each pass": lambda shape: shape.passes}

# ---- Count -----------------------------------------------------------------------------------------------------


def step_of(place: stand_in.Place) -> str:
    functions = {line.rsplit(":", 1)[1] for line in place}
    # Training reads log-probs with the reference's function, so it comes first.
    return next((step for step in ["passes", *STEPS] if functions & set(STEPS[step])), "other")


def small_model(folder: Path, config: PretrainedConfig, layers: int) -> Path:
    """A model of this width with few layers, and a tokenizer of a few words."""
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    few = {"vocab_size": 64, "num_hidden_layers": layers, "layer_types": None, **ends}
    config = type(config)(**config.to_dict() | few)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    speed.word_tokenizer(64).save_pretrained(folder / "model")
    return folder / "model"


def ones(prompts: list[str], *_: list[str]) -> list[float]:
    """Scores that differ, so that no group is without a signal."""
    return [float(number % 2) for number in range(len(prompts))]


def count_run(shape: Shape, layers: int, tokens: int) -> Counter[tuple[str, stand_in.Place]]:
    """What the second of two updates counts: a few episodes in as many passes as the shape has, with a trace."""
    scorer = "benchmark.cost.launches:ones"
    # Queries differ in length, so that there is always padding.
    texts = [" ".join(f"w{number}" for number in range(1, 25 - i % 3)) for i in range(64)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = small_model(folder, shape.config, layers)
        common = {"base_model": model, "log_interval": 0, "save_interval": 0, "trace_interval": 1}
        batch = 64 if shape.chapter == 1 else 16  # chapter 1 has eight groups by default
        common |= {"ppo.total_episodes": 2 * batch, "ppo.batch_size": batch, "task.response_length": tokens}
        if shape.chapter == 1:
            speed.write_jsonl(folder / "texts.jsonl", texts)
            own = {"task.query_dataset": folder / "texts.jsonl", "task.query_length": 16, "task.start_text": None}
            own |= {"task.end_text": None, "task.truncate_after": 0, "ppo.whiten_groups": 8}
            own |= {"rewards.function": scorer}
            script = train_policy
        else:
            for split in ("train", "test"):
                rows = [{"question": text, "answer": "#### 1"} for text in texts]
                speed.write_jsonl(folder / f"problems_{split}.jsonl", rows)
            own = {"preset": "sums-grpo", "task.problems": folder, "task.prompt_length": 64, "eval_interval": 0}
            own |= {"ppo.samples_per_prompt": 4, "ppo.nminibatches": shape.passes, "rewards.kl_loss_coef": 0.001}
            own |= {"rewards.verifier": scorer, "eval_problems": 4, "eval_samples": 0}
            script = rlvr_policy
        words_of_run = [word for flag, value in (common | own).items() for word in (f"--{flag}", str(value))]
        quiet = contextlib.redirect_stdout(io.StringIO())
        with contextlib.chdir(folder), quiet, stand_in.count_updates() as counted:
            script.train(cli.parse_args(script.PRESETS, words_of_run))
    return counted[1]


def by_step(counts: Counter) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for (kind, place), number in counts.items():
        found.setdefault(step_of(place), Counter())[kind] += number
    return found


def coefficients(shape: Shape) -> dict[str, dict[str, list[float]]]:
    """For each step and kind, a, b, c and d of the count."""
    runs = {(layers, tokens): by_step(count_run(shape, layers, tokens)) for layers in LAYERS for tokens in TOKENS}
    rows = torch.tensor([[1, x, y, x * y] for x, y in runs], dtype=torch.float64)
    found: dict[str, dict[str, list[float]]] = {}
    for step in dict.fromkeys(step for one in runs.values() for step in one):
        for kind in KINDS:
            numbers = torch.tensor([one.get(step, Counter())[kind] for one in runs.values()], dtype=torch.float64)
            found.setdefault(step, {})[kind] = torch.linalg.solve(rows, numbers).round(decimals=6).tolist()
    return found


def counts_of(shape: Shape, fit: dict[str, dict[str, list[float]]]) -> dict[str, Counts]:
    """Counts of the whole model in its update, by step; those of a token and of a pass, once."""
    layers, tokens, found = shape.config.num_hidden_layers, shape.response, {}
    for step in sorted(fit, key=[*STEPS, "other"].index):
        kinds = fit[step]
        whole = {kind: a + b * layers + c * tokens + d * layers * tokens for kind, (a, b, c, d) in kinds.items()}
        if step == "generate":
            found["generate, context"] = {kind: a + b * layers for kind, (a, b, _, _) in kinds.items()}
            found["generate, each token"] = {kind: c + d * layers for kind, (_, _, c, d) in kinds.items()}
        elif step == "passes":
            found["update, each pass"] = {kind: number / shape.passes for kind, number in whole.items()}
        else:
            found[step] = whole
    return found


# ---- What that implies -----------------------------------------------------------------------------------------


def device_seconds(shape: Shape, card: Card, gpus: int) -> dict[str, float]:
    """Seconds of generation and of the rest of an update on so many GPUs, if the device never waited for the host."""
    config, episodes, length = shape.config, shape.batch / gpus, shape.query + shape.response
    flops = speed.flops_per_episode(config, shape.query, shape.response, shape.epochs, shape.chapter, "bfloat16")
    seconds = {name: x * episodes / card.bfloat16 for name, x in flops.items()}
    width, layers, vocab = config.hidden_size, config.num_hidden_layers, config.vocab_size
    trunk = episodes * length * layers * width * 30 * 4 / card.memory  # as in scaling.py: kernels without products
    logits = episodes * shape.response * vocab * 4 / card.memory
    weights = shape.response * 2 * scaling.parameters(config) / card.memory  # all of them for each token, in bfloat16
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads) / config.num_attention_heads
    mean_length = shape.query + shape.response / 2
    cache = shape.response * episodes * mean_length * layers * 2 * heads * width * 2 / card.memory
    reads = 2 if shape.chapter == 1 else 1
    rest = seconds["scoring"] + reads * trunk + 6 * logits
    rest += seconds["training"] + shape.epochs * (3 * trunk + 16 * logits)
    return {"generation": max(seconds["generation"], weights) + trunk + cache + 16 * logits, "the rest": rest}


def host_seconds(shape: Shape, counts: dict[str, Counts], *, graph: bool = False) -> dict[str, float]:
    """The same for a device that never lets the host wait, but where the host must. Traces don't count.

    graph: whether the step of a token is a CUDA graph, which is one launch.
    """
    found = {"generation": 0.0, "the rest": 0.0}
    for step, kinds in counts.items():
        if step == "generate, each token" and graph:
            kinds = kinds | {"launch": 1}
        part, times = (
            ("generation" if step.startswith("generate") else "the rest"),
            TIMES.get(step, lambda _: 1)(shape),
        )
        if step != "trace":
            found[part] += times * (kinds["launch"] * LAUNCH + kinds["wait"] * WAIT)
    return found


def shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.3g}"


def count_rows(shape: Shape, counts: dict[str, Counts]) -> list[dict[str, str]]:
    return [
        {"step": step, "times": str(TIMES.get(step, lambda _: 1)(shape))}
        | {head: shown(kinds[kind]) for kind, head in HEADS.items()}
        for step, kinds in counts.items()
    ]


def bound_rows(all_counts: dict[str, dict[str, Counts]]) -> list[dict[str, str]]:
    rows = []
    for name, shape in SHAPES.items():
        for card, of_card in CARDS.items():
            for gpus in (1, 8):
                device, host = device_seconds(shape, of_card, gpus), host_seconds(shape, all_counts[name])
                with_graph = host_seconds(shape, all_counts[name], graph=True)
                row = {"model": name, "GPUs": f"{gpus} {card}"}
                for part in device:
                    row[f"{part}: host, ms"] = f"{1e3 * host[part]:.0f}"
                    row["device, ms" if part == "generation" else "its device, ms"] = f"{1e3 * device[part]:.0f}"
                for column, times in (("an update, ms", host), ("with a graph, ms", with_graph)):
                    row[column] = f"{1e3 * sum(max(times[part], device[part]) for part in device):.0f}"
                rows.append(row)
    return rows


def tables(all_counts: dict[str, dict[str, Counts]]) -> dict[str, str]:
    """What the page has between each pair of marks."""
    counts = [f"{name}:\n\n{markdown(count_rows(SHAPES[name], steps))}" for name, steps in all_counts.items()]
    return {"counts": "\n".join(counts), "bounds": markdown(bound_rows(all_counts))}


def write_page(all_counts: dict[str, dict[str, Counts]]) -> None:
    page = PAGE.read_text()
    for name, table in tables(all_counts).items():
        start, end = f"<!-- {name}, written by launches.py -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(start)
        page = f"{before}{start}\n{table}{end}{rest.partition(end)[2]}"
    PAGE.write_text(page)


def print_lines(counts: Counter, most: int) -> None:
    """The innermost lines with most waits and launches."""
    for kind in ("wait", "launch"):
        lines: Counter[str] = Counter()
        for (one, place), number in counts.items():
            if one == kind and step_of(place) != "trace":
                lines[f"{step_of(place):10} {place[-1] if place else 'outside'}"] += number
        for line, number in lines.most_common(most):
            print(f"{kind:8}{number:6}  {line}")


def main(args: Args) -> None:
    stand_in.install()
    if args.lines:
        for name, shape in SHAPES.items():
            print(name)
            print_lines(count_run(shape, 1, TOKENS[1]), args.lines)
        return
    commit = run.commit()
    fits = {name: coefficients(shape) for name, shape in SHAPES.items()}
    RESULT.parent.mkdir(exist_ok=True, parents=True)
    files.write_json(RESULT, {"commit": commit, "kinds": KINDS, "coefficients": fits})
    write_page({name: counts_of(SHAPES[name], fit) for name, fit in fits.items()})


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
