"""LoRA, OSF and CorDA of peft, and models and encoders of transformers, in the comparison."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuned import setting

from syngap.bench.errors import UserError
from syngap.bench.finetuning import methods
from syngap.bench.finetuning.encoder_setting import EncoderSetting
from syngap.bench.finetuning.language_setting import LanguageSetting
from syngap.bench.finetuning.loop import interpolate
from syngap.bench.finetuning.models import Making
from syngap.bench.finetuning.models.causal_lm import causal_lm
from syngap.bench.finetuning.models.encoder import sentence_encoder
from syngap.bench.finetuning.models.language_model import share_nothing
from syngap.bench.finetuning.setting import Anchors, Batch
from syngap.bench.finetuning.texts.python import python_texts
from syngap.bench.training.checkpoint import pack, unpack

pytest.importorskip("peft")

OPTIONS: dict[str, dict[str, Any]] = {"lora": {"rank": 2}, "osf": {}, "corda": {"rank": 2}}
each = pytest.mark.parametrize("name", OPTIONS)


def make(name: str, of: LanguageSetting) -> Any:
    return methods.registry.get(name)(of, lr=0.01, **OPTIONS[name])


def windows(of: LanguageSetting, step: int = 0) -> Batch:
    return of.batch(2, f"batch {step}")


@each
def test_adapters_begin_at_the_start_and_merged_weights_predict_what_they_do(name: str) -> None:
    of = setting()
    method = make(name, of)
    starts = dict(of.start.named_parameters())
    weights = method.weights()
    assert list(weights) == list(starts)
    for key, value in weights.items():
        torch.testing.assert_close(value, starts[key], rtol=1e-3, atol=1e-4)
    for step in range(3):
        method.step(windows(of, step))
    merged = copy.deepcopy(of.start).eval()
    interpolate(merged, of.start, method.weights(), 1.0)
    tokens = of.anchors
    with torch.no_grad():
        told, found = of.predict(method.model.eval(), tokens), of.predict(merged, tokens)
    torch.testing.assert_close(found, told, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found, of.predict(of.start, tokens), atol=1e-3)


@each
def test_adapters_go_on_bit_for_bit(name: str) -> None:
    of = setting()
    whole, half = make(name, of), make(name, of)
    for step in range(2):
        whole.step(windows(of, step))
        half.step(windows(of, step))
    resumed = make(name, of)
    resumed.load_state_dict(unpack(pack(half.state_dict())))
    for step in range(2, 4):
        whole.step(windows(of, step))
        resumed.step(windows(of, step))
    ended = whole.weights()
    for key, value in resumed.weights().items():
        assert torch.equal(value, ended[key]), key


def test_corda_refuses_a_rank_that_no_weight_has() -> None:
    with pytest.raises(UserError, match="rank: got 32, and the smallest side of a weight is 8"):
        methods.registry.get("corda")(setting())


# Models of transformers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("data") / "llama"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(place)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    return place


@pytest.mark.parametrize("name", ["adamw", "protect", "freeze", "kronecker_ewc", *OPTIONS])
def test_a_model_of_transformers_is_tuned_from_its_folder(folder: Path, name: str) -> None:
    texts = python_texts(None, characters=4000)
    making = Making(texts, 0, torch.device("cpu"), folder.parent, share_nothing)
    of = LanguageSetting(
        causal_lm(making, folder="llama", context=16), making, anchors=Anchors(count=4), windows=4
    )
    assert of.anchors.shape == (4, 16)
    assert windows(of)[0][:, 0].tolist() == [0, 0]  # the token that begins a text
    method = methods.registry.get(name)(of, **OPTIONS.get(name, {}))
    before = of.evaluate(of.start).new
    for step in range(5):
        method.step(windows(of, step))
    assert list(method.weights()) == [key for key, _ in of.start.named_parameters()]
    interpolate(of.start, of.start, method.weights(), 1.0)
    assert sum(of.evaluate(of.start).new) < sum(before)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    texts = python_texts(None, characters=4000)
    making = Making(texts, 0, torch.device("cpu"), tmp_path, share_nothing)
    with pytest.raises(UserError, match="there is no folder"):
        causal_lm(making, folder="llama")


def test_without_transformers_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    texts = python_texts(None, characters=4000)
    making = Making(texts, 0, torch.device("cpu"), tmp_path, share_nothing)
    with pytest.raises(UserError, match=r"syngap\[transformers\]"):
        causal_lm(making, folder="llama")


# Encoders of transformers -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny BERT and a tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("data") / "bert"
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{chr(97 + n): n + 2 for n in range(26)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(place)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(place)
    return place


def encoder_setting_of(folder: Path) -> EncoderSetting:
    texts = python_texts(None, characters=40_000)
    making = Making(texts, 0, torch.device("cpu"), folder.parent, share_nothing)
    encoder = sentence_encoder(making, folder=folder.name, context=16)
    return EncoderSetting(encoder, making, anchors=Anchors(source="text", count=4), windows=8)


@pytest.mark.parametrize("name", ["adamw", "protect", "freeze", "kronecker_ewc", "ewc", *OPTIONS])
def test_an_encoder_of_transformers_is_tuned_from_its_folder(
    encoder_folder: Path, name: str
) -> None:
    of = encoder_setting_of(encoder_folder)
    assert of.anchors.shape == (4, 16)
    start = of.evaluate(of.start)
    assert start.old["code"] == pytest.approx((0.0, 0.0), abs=1e-12)
    batch = of.batch(8, "batch")
    method = methods.registry.get(name)(of, lr=0.003, **OPTIONS.get(name, {}))
    for _ in range(20):
        method.step(batch)
    assert list(method.weights()) == [key for key, _ in of.start.named_parameters()]
    tuned = copy.deepcopy(of.start)
    interpolate(tuned, of.start, method.weights(), 1.0)
    before, now = (float(of.loss(model.eval(), batch).detach()) for model in (of.start, tuned))
    assert now < before
    assert sum(of.evaluate(tuned).old["code"]) > 0


def test_embeddings_are_means_over_tokens_that_are_not_padding(encoder_folder: Path) -> None:
    of = encoder_setting_of(encoder_folder)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    tokens[0, :3], tokens[1, :9] = torch.tensor([2, 3, 4]), torch.arange(2, 11)
    of.start.eval()
    found = of.embed(of.start, tokens)
    for row, length in zip(range(2), (3, 9), strict=True):
        states = of.start(input_ids=tokens[row : row + 1, :length]).last_hidden_state[0]
        mean = states.mean(0)
        torch.testing.assert_close(found[row], mean / mean.norm(), rtol=1e-4, atol=1e-5)


def test_without_its_folder_an_encoder_is_refused(tmp_path: Path) -> None:
    texts = python_texts(None, characters=4000)
    making = Making(texts, 0, torch.device("cpu"), tmp_path, share_nothing)
    with pytest.raises(UserError, match="there is no folder"):
        sentence_encoder(making, folder="bert")
