"""Problems of chapter 3 for tests: a part of GSM8K, and a tokenizer of bytes with a chat template."""

import dataclasses
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ppo_rlhf.rlvr import problems
from ppo_rlhf.rlvr.problems import TaskArgs

GSM8K = Path(__file__).parents[1] / "golden" / "gsm8k"
# As Qwen2.5's: a text of its own where no system message is given.
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A token for each byte, and three special ones: 256 to 258. Texts end with 258."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=chat_template)


TOKENIZER = byte_tokenizer()


def task(**changes) -> TaskArgs:
    return dataclasses.replace(TaskArgs(problems=str(GSM8K)), **changes)


def read(
    source: Path | str, split: str = "train", limit: int = 0, verifier: str = "gsm8k_strict", **changes
) -> problems.Problems:
    given = task(problems=str(source), **changes)
    return problems.read_problems(given, TOKENIZER, split, limit, verifier=verifier)
