"""LoRA, OSF and CorDA of peft, and models of transformers, in the fine-tuning comparison."""

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
from syngap.bench.finetuning.language_setting import LanguageSetting
from syngap.bench.finetuning.loop import interpolate
from syngap.bench.finetuning.models import Making
from syngap.bench.finetuning.models.causal_lm import causal_lm
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
