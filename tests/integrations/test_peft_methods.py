"""LoRA, OSF and CorDA of peft, and models and encoders of transformers, in the comparison."""

from __future__ import annotations

import copy
import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from finetuned import setting, share_nothing

from syngap.bench.errors import UserError
from syngap.bench.finetuning import methods
from syngap.bench.finetuning.encoder_setting import EncoderSetting
from syngap.bench.finetuning.language_setting import LanguageSetting
from syngap.bench.finetuning.loop import interpolate
from syngap.bench.finetuning.models import Making
from syngap.bench.finetuning.models import causal_lm as module
from syngap.bench.finetuning.models.causal_lm import causal_lm, write_tokenizer
from syngap.bench.finetuning.models.encoder import sentence_encoder
from syngap.bench.finetuning.setting import Anchors, Batch
from syngap.bench.finetuning.texts.python import python_texts
from syngap.bench.store.shared import share_folder_in, share_in
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


def test_corda_looks_at_so_many_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    of, rows = setting(), 0
    predict = type(of).predict

    def counted(self: LanguageSetting, model: torch.nn.Module, inputs: torch.Tensor) -> Any:
        nonlocal rows
        rows += len(inputs)
        return predict(self, model, inputs)

    monkeypatch.setattr(type(of), "predict", counted)
    for samples, looked in ((2, 2), (256, len(of.anchors))):
        rows = 0
        methods.registry.get("corda")(of, rank=2, samples=samples)
        assert rows == looked


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


def test_a_gguf_file_is_read_and_a_long_text_tokenized_once_for_all_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    texts, cpu = python_texts(None, characters=4000), torch.device("cpu")
    making = Making(texts, 0, cpu, folder.parent, share_nothing)
    plain = causal_lm(making, folder="llama", context=16)
    reads: list[Path] = []
    read = module._read

    def counted(place: Path, gguf: str | None = None) -> tuple[Any, Any]:
        reads.append(place)
        return read(place)  # what the file would hold

    monkeypatch.setattr(module, "_read", counted)
    text = "a b " * 50_000
    for seed in (0, 1):
        share = share_in(tmp_path, {"seed": seed})
        making = Making(texts, seed, cpu, folder.parent, share, share_folder_in(tmp_path, {}))
        found = causal_lm(making, folder="llama", gguf="llama.gguf", context=16)
        for name, weight in plain.model.state_dict().items():
            assert torch.equal(found.model.state_dict()[name], weight)
        assert torch.equal(found.encode(text), plain.encode(text))
        assert torch.equal(found.encode("a b"), plain.encode("a b"))
    assert [place == folder for place in reads] == [True, False, False]
    names = sorted(path.name.partition("-")[0] for path in (tmp_path / "shared").iterdir())
    assert names == ["model", "tokens"]


@pytest.mark.parametrize("gguf", [None, "llama.gguf"])
@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_nothing_is_downloaded_and_a_tokenizer_beside_a_gguf_file_is_read_as_it_is(
    folder: Path,
    tmp_path: Path,
    gguf: str | None,
    has_tokenizer: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers

    pytest.importorskip("gguf")
    kind = transformers.PreTrainedTokenizerFast
    theirs = kind.from_pretrained(folder)
    theirs.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    if has_tokenizer:
        write_tokenizer(theirs, tmp_path)
        config = tmp_path / "tokenizer_config.json"  # a class that would make parts of it anew
        named = json.loads(config.read_text()) | {"tokenizer_class": "GemmaTokenizer"}
        config.write_text(json.dumps(named))
    calls: list[tuple[str, dict[str, Any]]] = []

    def noted(name: str, read: Any) -> Any:
        def from_pretrained(place: Path, **options: Any) -> Any:
            assert place == tmp_path
            calls.append((name, options))
            return read()

        return from_pretrained

    read_fast = kind.from_pretrained
    for name, read in (
        ("AutoTokenizer", lambda: theirs),
        ("PreTrainedTokenizerFast", lambda: read_fast(tmp_path)),
        ("AutoModelForCausalLM", lambda: None),
    ):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", noted(name, read))
    found, _ = module._read(tmp_path, gguf)
    assert [name for name, _ in calls] == [
        "PreTrainedTokenizerFast" if gguf and has_tokenizer else "AutoTokenizer",
        "AutoModelForCausalLM",
    ]
    assert all(options["local_files_only"] for _, options in calls)
    assert calls[-1][1].get("gguf_file") == gguf
    text = "a b<|user|>\nc<s>"
    assert found.bos_token_id == theirs.bos_token_id == 0
    assert found.encode(text, add_special_tokens=False) == theirs.encode(
        text, add_special_tokens=False
    )


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


# Models of llama2.c -------------------------------------------------------------------------------

PIECES = {" ": -9.0, "a": -8.0, "b": -7.0, " a": -3.0, "ab": -2.0, " ab": -1.0}
TOKENS = [1, 259, 264, 13, 261, 2]


def fetch_models() -> Any:
    """Return the module of research/protection."""
    folder = ROOT / "research" / "protection"
    if not folder.is_dir():
        pytest.skip("there is no research/ beside the tests")
    sys.path.insert(0, str(folder))
    import fetch_models

    return fetch_models


def tokenizer_file() -> bytes:
    """Return a tokenizer.bin: special tokens, bytes, and then pieces with their scores."""
    special = {"<unk>": 0.0, "\n<s>\n": 0.0, "\n</s>\n": 0.0}
    entries = [*special.items(), *((chr(byte), 0.0) for byte in range(256)), *PIECES.items()]
    parts = [struct.pack("<i", 6)]
    for piece, score in entries:
        encoded = piece.encode()
        parts.append(struct.pack("<fi", score, len(encoded)) + encoded)
    return b"".join(parts)


class Llama2C:
    """A model of llama2.c with random weights: its file, and its forward pass in plain loops."""

    width, hidden, layers, heads, key_heads, context = 16, 12, 2, 2, 1, 8
    tokens = 259 + len(PIECES)

    def __init__(self, *, tied: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        width, hidden, layers = self.width, self.hidden, self.layers
        keys = width // self.heads * self.key_heads
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (self.tokens, width),
            "rms_att": (layers, width),
            "wq": (layers, width, width),
            "wk": (layers, keys, width),
            "wv": (layers, keys, width),
            "wo": (layers, width, width),
            "rms_ffn": (layers, width),
            "w1": (layers, hidden, width),
            "w2": (layers, width, hidden),
            "w3": (layers, hidden, width),
            "rms_final": (width,),
            "freq_cis": (2, self.context, width // self.heads // 2),
            "wcls": (self.tokens, width),
        }
        arrays = {
            name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()
        }
        if tied:
            del arrays["wcls"]
        sizes = (width, hidden, layers, self.heads, self.key_heads)
        header = struct.pack("<7i", *sizes, self.tokens if tied else -self.tokens, self.context)
        self.file = header + b"".join(array.numpy().tobytes() for array in arrays.values())
        self.w: dict[str, Any] = {name: array.tolist() for name, array in arrays.items()}

    def logits(self, tokens: list[int]) -> list[list[float]]:
        """Return the logits after each token, as run.c of llama2.c computes them."""
        w, size = self.w, self.width // self.heads
        past: list[list[tuple[list[float], list[float]]]] = [[] for _ in range(self.layers)]
        found = []
        for position, token in enumerate(tokens):
            x = list(w["embedding"][token])
            for layer in range(self.layers):
                normed = rms_norm(x, w["rms_att"][layer])
                query = rotated(product(w["wq"][layer], normed), position, size)
                key = rotated(product(w["wk"][layer], normed), position, size)
                past[layer].append((key, product(w["wv"][layer], normed)))
                mixed: list[float] = []
                for head in range(self.heads):
                    own = query[head * size : (head + 1) * size]
                    shared = head * self.key_heads // self.heads
                    part = slice(shared * size, (shared + 1) * size)
                    scores = [dot(own, key[part]) / math.sqrt(size) for key, _ in past[layer]]
                    total = sum(map(math.exp, scores))
                    mixed += [
                        sum(
                            math.exp(score) / total * value[part][i]
                            for score, (_, value) in zip(scores, past[layer], strict=True)
                        )
                        for i in range(size)
                    ]
                x = [a + b for a, b in zip(x, product(w["wo"][layer], mixed), strict=True)]
                normed = rms_norm(x, w["rms_ffn"][layer])
                gate, up = product(w["w1"][layer], normed), product(w["w3"][layer], normed)
                inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
                x = [a + b for a, b in zip(x, product(w["w2"][layer], inner), strict=True)]
            found.append(product(w.get("wcls", w["embedding"]), rms_norm(x, w["rms_final"])))
        return found


def dot(a: list[float], b: list[float]) -> float:
    return sum(p * q for p, q in zip(a, b, strict=True))


def product(matrix: list[list[float]], vector: list[float]) -> list[float]:
    return [dot(row, vector) for row in matrix]


def rms_norm(x: list[float], weight: list[float]) -> list[float]:
    scale = 1 / math.sqrt(dot(x, x) / len(x) + 1e-5)
    return [scale * p * q for p, q in zip(x, weight, strict=True)]


def rotated(x: list[float], position: int, size: int) -> list[float]:
    """Rotate each two neighbours of a head together."""
    found = []
    for i in range(0, len(x), 2):
        angle = position * 10_000 ** (-(i % size) / size)
        cos, sin = math.cos(angle), math.sin(angle)
        found += [x[i] * cos - x[i + 1] * sin, x[i] * sin + x[i + 1] * cos]
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_llama2c_predicts_the_same_in_transformers(tmp_path: Path, tied: bool) -> None:
    theirs = Llama2C(tied=tied)
    fetch_models().write_llama(tmp_path / "llama", theirs.file, tokenizer_file())
    making = Making(
        python_texts(None, characters=4000), 0, torch.device("cpu"), tmp_path, share_nothing
    )
    language = causal_lm(making, folder="llama", context=4)
    assert language.start == 1
    assert language.encode("ab a").tolist() == [264, 262]
    with torch.no_grad():
        found = language.logits(language.model, torch.tensor([TOKENS]))
    torch.testing.assert_close(found[0], torch.tensor(theirs.logits(TOKENS)), rtol=1e-4, atol=1e-4)


def test_a_file_of_llama2c_that_is_cut_is_refused() -> None:
    with pytest.raises(SystemExit, match="numbers, the file"):
        fetch_models().read_llama2c(Llama2C(tied=True).file[:-4])


def test_the_tokenizer_of_llama2c_merges_by_score_and_has_a_token_for_each_byte() -> None:
    tokenizer = fetch_models().read_tokenizer(tokenizer_file())

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    assert encode("ab aab") == [264, 262, 263]
    assert encode("b") == [259, 261]
    assert encode("aé\n") == [262, 3 + 0xC3, 3 + 0xA9, 3 + ord("\n")]
    assert encode("a<s> a<s> ab") == [262, 1, 262, 1, 264]
    assert 0 not in encode("<unk>")
    assert tokenizer.decode(encode("ab é\n<s> a")) == " ab é\n<s> a"


def test_a_text_is_cut_at_a_line_and_no_line_is_in_both_parts(tmp_path: Path) -> None:
    fetch_models().write_parts(tmp_path, "poem", "one\ntwo\nthree\nfour\n", 0.5)
    parts = [(tmp_path / "texts" / f"poem.{part}.txt").read_text() for part in ("train", "test")]
    assert parts == ["one\ntwo\nthree\n", "four\n"]


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
