"""Fine-tuning without the old data: which method forgets least for what it learns?

A byte-level GPT is trained on an old domain, then fine-tuned on a new one by each method and value.
Every evaluation on the way, (new loss, old loss), is a point: a stopping point is a hyper-parameter
like any other. Methods are compared along the lower left frontier of their points, never at one of
them. Losses are in nats a byte, on test text cut in two halves: points are chosen on the one and
judged on the other, so that a method gains nothing by many tries. README.md shows how to run it.
"""

from __future__ import annotations

import argparse
import copy
import csv
import fcntl
import hashlib
import itertools
import json
import math
import multiprocessing
import re
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, gelu, pad
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.nn.utils import parametrize

from syngap import SynGAP, rotate
from syngap.metrics import half_interval
from syngap.optim.rotation import Rotation

START = 256  # the token that begins every text
HALVES = ("a", "b")
LEVELS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of new loss, as shares: see `curves`
SHOWN = (0.5, 0.8, 0.95)  # those of them that the summary shows
COLUMNS = ("size", "parameters", "old", "new", "seed", "pretrain", "method", "values", "steps")
COLUMNS += ("step", "old_loss", "new_loss", *(f"{d}_{h}" for d in ("old", "new") for h in HALVES))
COLUMNS += ("seconds",)
KEY = ("size", "old", "new", "seed", "pretrain", "method", "values", "steps")  # of a run
GROUP = ("size", "old", "new", "pretrain", "steps")  # what seeds are repetitions of


@dataclass(frozen=True)
class Size:
    """A model's shape, and the highest rate of its pre-training."""

    width: int
    layers: int
    heads: int
    context: int
    rate: float


SIZES = {
    "tiny": Size(8, 1, 2, 32, 1e-2),
    "mini": Size(64, 3, 4, 128, 5e-3),  # for a CPU
    "small": Size(128, 4, 4, 256, 3e-3),
    "medium": Size(384, 6, 6, 256, 1e-3),
    "large": Size(768, 14, 12, 256, 5e-4),
}


def grid(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def rates(low: float, high: float, count: int) -> list[float]:
    return [float(f"{rate:.3g}") for rate in np.geomspace(low, high, count)]


OWN, DATA, EVEN = ["own"], ["data"], ["even"]  # where importance comes from
YES = [True]
# Rates are for "mini"; larger models have them lower by as much as in pre-training (`scaled`).
# Equally many runs for each method, by `--runs`; "gate_data" is a control, one value of "gate".
# "penalty" is λ in units of importance, so that even importance (L2) has the mean of the model's.
# "rotated" is `rotate` before all else; "way" is how far from the start a model is judged, on the
# line to its weights.
GRIDS: dict[int, dict[str, list[dict[str, Any]]]] = {
    12: {
        "adamw": grid(lr=rates(3e-5, 3e-3, 12)),
        "gate": grid(lr=rates(3e-5, 3e-3, 4), consolidation=[0.9, 0.999, 0.999999], source=OWN),
        "ewc": grid(lr=[3e-4, 1.5e-3], penalty=[0.3, 1.0, 3.0, 10.0, 30.0, 300.0], source=OWN),
        "l2": grid(lr=[3e-4, 1.5e-3], penalty=[0.3, 1.0, 3.0, 10.0, 30.0, 300.0], source=EVEN),
        "gate_ewc": grid(
            lr=[3e-4, 1.5e-3], consolidation=[0.9, 0.999], penalty=[1.0, 10.0, 100.0], source=OWN
        ),
        "lora": grid(lr=rates(3e-4, 1e-2, 4), rank=[2, 8, 32]),
        "rotated": grid(lr=rates(3e-5, 3e-3, 12), rotated=YES),
        "rotated_gate": grid(
            lr=[3e-4, 1e-3, 3e-3], consolidation=[0.5, 0.9, 0.99, 0.9999], source=OWN, rotated=YES
        ),
        "rotated_ewc": grid(
            lr=[3e-4, 1.5e-3], penalty=[0.03, 0.1, 0.3, 1.0, 3.0, 10.0], source=OWN, rotated=YES
        ),
        "back": grid(lr=[3e-4, 1e-3, 3e-3], way=[0.25, 0.5, 0.7, 0.85]),
        "rotated_back": grid(lr=[3e-4, 1e-3, 3e-3], way=[0.25, 0.5, 0.7, 0.85], rotated=YES),
        "rotated_gate_back": grid(
            lr=[1e-3, 3e-3],
            consolidation=[0.9, 0.9999],
            way=[0.5, 0.7, 0.85],
            source=OWN,
            rotated=YES,
        ),
        "rotated_ewc_back": grid(
            lr=[1.5e-3],
            penalty=[0.1, 0.3, 1.0, 3.0],
            way=[0.5, 0.7, 0.85],
            source=OWN,
            rotated=YES,
        ),
        "gate_data": grid(lr=[rates(3e-5, 3e-3, 4)[2]], consolidation=[0.999], source=DATA),
    },
    6: {
        "adamw": grid(lr=rates(3e-5, 3e-3, 6)),
        "gate": grid(lr=rates(3e-5, 3e-3, 3), consolidation=[0.9, 0.9999], source=OWN),
        "ewc": grid(lr=[3e-4, 1.5e-3], penalty=[1.0, 10.0, 100.0], source=OWN),
        "l2": grid(lr=[3e-4, 1.5e-3], penalty=[1.0, 10.0, 100.0], source=EVEN),
        "gate_ewc": grid(
            lr=[6e-4], consolidation=[0.9, 0.999], penalty=[1.0, 10.0, 100.0], source=OWN
        ),
        "lora": grid(lr=rates(5e-4, 5e-3, 3), rank=[4, 32]),
        "rotated": grid(lr=rates(3e-5, 3e-3, 6), rotated=YES),
        "rotated_gate": grid(
            lr=[7.5e-4, 3e-3], consolidation=[0.5, 0.9, 0.9999], source=OWN, rotated=YES
        ),
        "rotated_ewc": grid(lr=[3e-4, 1.5e-3], penalty=[0.3, 1.0, 10.0], source=OWN, rotated=YES),
        "back": grid(lr=[3e-4, 1e-3, 3e-3], way=[0.5, 0.8]),
        "rotated_back": grid(lr=[3e-4, 1e-3, 3e-3], way=[0.5, 0.8], rotated=YES),
        "rotated_gate_back": grid(
            lr=[3e-3], consolidation=[0.9, 0.9999], way=[0.5, 0.7, 0.85], source=OWN, rotated=YES
        ),
        "rotated_ewc_back": grid(
            lr=[1.5e-3, 3e-3], penalty=[0.3, 1.0], way=[0.5, 0.7, 0.85], source=OWN, rotated=YES
        ),  # twice as many: the gate's rate there was chosen in a pilot
        "gate_data": grid(lr=[rates(3e-5, 3e-3, 3)[1]], consolidation=[0.9999], source=DATA),
    },
}


# Text, from files that lie wherever torch does.

LARGEST = 200_000  # bytes of a file; larger ones are generated
PLAIN = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ,.\n"
COMMON = frozenset(b"the of and to a in is that for be it are as by with this or on not".split())


def is_prose(text: bytes) -> bool:
    words = text.lower().split()
    others = len(text.translate(None, PLAIN))
    return len(words) >= 12 and others < 0.06 * len(text) and _common(words) > 0.2


def _common(words: list[bytes]) -> float:
    return sum(word in COMMON for word in words) / max(len(words), 1)


def docstrings(program: bytes) -> tuple[bytes, list[bytes]]:
    """Return a program without its strings in triple quotes that begin a line, and those."""
    rest, found = b"", []
    for index, part in enumerate(program.split(b'"""')):
        if index % 2 == 0:
            rest += part
        elif rest.rpartition(b"\n")[2].strip() in (b"", b"r"):
            found.append(part)
        else:
            rest += b'"""' + part + b'"""'
    return rest, found


def english(path: Path) -> bytes:
    """Return the prose of a file; of a program, that of its docstrings."""
    text = path.read_bytes()
    if path.suffix == ".py":
        text = b"\n\n".join(docstrings(text)[1])
    lines = b"\n".join(line.strip() for line in text.splitlines())
    return b"\n\n".join(part for part in re.split(rb"\n\n+", lines) if is_prose(part))


def python(path: Path) -> bytes:
    """Return a program without its docstrings, which are English."""
    return docstrings(path.read_bytes())[0]


PACKAGES, LIBRARY = Path(torch.__file__).parents[1], Path(sysconfig.get_path("stdlib"))
PROGRAMS = [(PACKAGES, "*.py"), (LIBRARY, "*.py")]
WRITINGS = [
    (root, name)
    for root in (PACKAGES, LIBRARY, Path("/usr/share/doc"))
    for name in ("*.md", "*.rst", "*.txt", "METADATA", "LICENSE*")
]
HEADERS = [(PACKAGES / "torch" / "include", name) for name in ("*.h", "*.hpp", "*.cuh")]
DOMAINS: dict[str, tuple[list[tuple[Path, str]], Callable[[Path], bytes]]] = {
    "python": (PROGRAMS, python),
    "cpp": (HEADERS, Path.read_bytes),
    "english": (WRITINGS + PROGRAMS, english),
}


def files_of(domain: str) -> list[tuple[bytes, Path]]:
    """Return hashes of names and files, in the order of the hashes: the same each time."""
    found = {}
    for root, pattern in DOMAINS[domain][0]:
        for path in root.rglob(pattern):
            name = path.relative_to(root).as_posix()
            if path.is_file() and path.stat().st_size < LARGEST and "ATen/ops/" not in name:
                found[hashlib.sha256(name.encode()).digest()] = path
    return sorted(found.items())


def gathered(domain: str, megabytes: float) -> dict[str, Tensor]:
    """Return train and test text, a tenth of the files for test, no paragraph of it twice."""
    parts: dict[str, list[bytes]] = {"train": [], "test": []}
    seen: set[bytes] = set()
    length = 0
    files = files_of(domain)
    with multiprocessing.Pool() as pool:
        texts = pool.imap(DOMAINS[domain][1], [path for _, path in files], chunksize=32)
        for (digest, _), text in zip(files, texts, strict=True):
            pieces = text.split(b"\n\n") if domain == "english" else [text]
            hashes = [hashlib.md5(piece).digest() for piece in pieces]
            fresh = [p for p, h in zip(pieces, hashes, strict=True) if p and h not in seen]
            seen.update(hashes)
            parts["test" if digest[-1] < 26 else "train"] += fresh
            length += sum(len(piece) + 2 for piece in fresh)
            if length >= megabytes * 1e6:
                break
    joined = {name: b"\n\n".join(pieces) for name, pieces in parts.items()}
    return {
        name: torch.frombuffer(bytearray(text), dtype=torch.uint8) for name, text in joined.items()
    }


def describe(domain: str, text: dict[str, Tensor]) -> None:
    test = text["test"].numpy().tobytes()
    plain = 1 - len(test.translate(None, PLAIN)) / max(len(test), 1)
    sizes = ", ".join(f"{len(part):,} bytes {name}" for name, part in text.items())
    words = _common(test.lower().split())
    print(
        f"{domain}: {sizes}; {plain:.0%} letters and spaces, {words:.0%} common words", flush=True
    )


# The model.


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look = nn.Linear(width, 3 * width, bias=False)
        self.gather = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.look(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.gather(seen)
        return x + self.narrow(gelu(self.widen(self.between(x))))


class GPT(nn.Module):
    """Predicts each byte of a text from those before it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(START + 1, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, START, bias=False)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                ends = name.endswith(("gather.weight", "narrow.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * size.layers) if ends else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits of every byte and of one more after the last, up to the context."""
        tokens = pad(text, (1, 0), value=START)[:, : len(self.places.weight)]
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            return self.head(self.norm(self.blocks(x)))


def turn(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give a plain model the weights and directions of one that was rotated."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            both = (f"{name}.parametrizations.weight.0.{side}" for side in ("outer", "inner"))
            turned = Rotation(*(state.get(side) for side in both))
            parametrize.register_parametrization(layer, "weight", turned)
    model.load_state_dict(state)


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    return cross_entropy(model(text).flatten(0, 1).float(), text.flatten())


@torch.no_grad()
def own_samples(model: nn.Module, context: int, count: int, device: torch.device) -> Tensor:
    """Return texts that the model writes from the start token, at temperature 1."""
    text = torch.empty(count, 0, dtype=torch.long, device=device)
    for _ in range(context):
        chances = model(text)[:, -1].float().softmax(-1)
        text = torch.cat([text, torch.multinomial(chances, 1)], 1)
    return text


def windows(text: Tensor, offsets: Tensor, context: int) -> Tensor:
    return text[offsets[:, None] + torch.arange(context, device=text.device)].long()


# What runs share: text, pre-trained models, importance. Each is made once, by whoever comes first.


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.with_name(path.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the system opens it if its holder dies
        yield


class Shelf:
    """The cache folder of one size of batches and texts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        args.cache.mkdir(parents=True, exist_ok=True)
        self._texts: dict[str, dict[str, Tensor]] = {}

    def path(self, name: str) -> Path:
        return self.args.cache / f"{name}.safetensors"

    def _made(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        path = self.path(name)
        with locked(path):
            if not path.exists():
                began, partial = time.monotonic(), path.with_suffix(".part")
                save_file(make(), partial)
                partial.replace(path)
                print(f"made {name} in {time.monotonic() - began:.1f} s", flush=True)
        return load_file(path, str(self.device))

    def text(self, domain: str) -> dict[str, Tensor]:
        if domain not in self._texts:
            size = self.args.megabytes
            made = self._made(f"{domain}-{size:g}MB", lambda: gathered(domain, size))
            self._texts[domain] = made
            describe(domain, {name: part.cpu() for name, part in made.items()})
        return self._texts[domain]

    def base(self, size: str, old: str, seed: int) -> str:
        args = self.args
        return f"{size}-{old}-{args.megabytes:g}MB-{args.pretrain}x{args.batch}-seed{seed}"

    def model(self, size: str, old: str, seed: int, rotated: bool = False) -> GPT:
        """Return the pre-trained model, a new one each time, its weights as they are or turned."""
        torch.manual_seed(seed)
        with self.device:
            model = GPT(SIZES[size])
        state = self._made(self.base(size, old, seed), lambda: self._pretrained(size, old, seed))
        model.load_state_dict(state)
        if rotated:
            name = f"{self.base(size, old, seed)}-rotated{self.args.samples}"
            turn(model, self._made(name, lambda: self._turned(size, old, seed)))
        return model

    def _turned(self, size: str, old: str, seed: int) -> dict[str, Tensor]:
        model = self.model(size, old, seed)
        labels = torch.Generator(self.device).manual_seed(seed)
        rotate(model, self.written(size, old, seed), batch_size=16, generator=labels)
        return model.state_dict()

    def written(self, size: str, old: str, seed: int) -> Tensor:
        """Return what the model writes itself."""
        count, context = self.args.samples, SIZES[size].context

        def make() -> dict[str, Tensor]:
            model = self.model(size, old, seed)
            torch.manual_seed(seed)
            return {"text": own_samples(model, context, count, self.device)}

        return self._made(f"{self.base(size, old, seed)}-text{count}", make)["text"]

    def _pretrained(self, size: str, old: str, seed: int) -> dict[str, Tensor]:
        steps, highest = self.args.pretrain, SIZES[size].rate
        torch.manual_seed(seed)
        with self.device:
            model = GPT(SIZES[size])
        optimizer = adamw(model.parameters(), highest, 0.1)
        warm = max(1, steps // 20)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(
                (step + 1) / warm, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
            ),
        )
        for text in self.batches(old, size, steps, seed):
            optimizer.zero_grad()
            loss_of(model, text).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        return model.state_dict()

    def importance(
        self, source: str, size: str, old: str, seed: int, rotated: bool = False
    ) -> dict[str, Tensor]:
        """Return the Fisher information of each parameter, a byte, by name.

        Args:
            source: "own" samples of the model, old "data", or "even": everywhere the mean of "own".
            size: the model's.
            old: the domain that it was trained on.
            seed: of its training.
            rotated: of the model that is turned.
        """
        if source == "even":
            own = self.importance("own", size, old, seed)
            mean = sum(f.sum() for f in own.values()) / sum(f.numel() for f in own.values())
            return {name: mean.expand_as(f) for name, f in own.items()}
        count = self.args.samples
        name = f"{self.base(size, old, seed)}-{source}{count}{'-rotated' * rotated}"
        return self._made(name, lambda: self._measured(source, size, old, seed, rotated))

    def _measured(
        self, source: str, size: str, old: str, seed: int, rotated: bool
    ) -> dict[str, Tensor]:
        model, context = self.model(size, old, seed, rotated), SIZES[size].context
        if source == "own":
            text = self.written(size, old, seed)
        else:
            torch.manual_seed(seed)
            ends = len(self.text(old)["train"]) - context
            offsets = torch.randint(ends, (self.args.samples,), device=self.device)
            text = windows(self.text(old)["train"], offsets, context)
        torch.manual_seed(seed)
        gate = SynGAP.wrap(adamw(model.parameters(), 0.0), model=model)
        gate.consolidate(model, text, batch_size=1)
        return {name: f.contiguous() for name, f in gate.importance().items()}

    def batches(self, domain: str, size: str, steps: int, seed: int) -> Iterator[Tensor]:
        text, context = self.text(domain)["train"], SIZES[size].context
        order = torch.Generator().manual_seed(seed)
        offsets = torch.randint(len(text) - context, (steps, self.args.batch), generator=order)
        return (windows(text, row, context) for row in offsets.to(text.device))

    @torch.no_grad()
    def losses(self, model: nn.Module, size: str, old: str, new: str) -> dict[str, float]:
        """Return the loss on each half of each domain's test text."""
        context, count = SIZES[size].context, self.args.windows
        losses = []
        for domain in (old, new):
            for half in self.text(domain)["test"].chunk(2):
                offsets = torch.linspace(0, len(half) - context - 1, count, device=self.device)
                text = windows(half, offsets.long(), context)
                losses.append(torch.stack([loss_of(model, part) for part in text.split(64)]).mean())
        numbers = torch.stack(losses).tolist()
        by_name = dict(zip(COLUMNS[-5:-1], numbers, strict=True))
        return {"old_loss": fmean(numbers[:2]), "new_loss": fmean(numbers[2:])} | by_name


# Methods.


def adamw(params: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> torch.optim.AdamW:
    params = list(params)
    return torch.optim.AdamW(params, lr, weight_decay=weight_decay, fused=params[0].is_cuda)


def gated(
    model: nn.Module, lr: float, consolidation: float, importance: dict[str, Tensor]
) -> SynGAP:
    """Return AdamW behind the gate, with an importance that was taken before and stays."""
    gate = SynGAP.wrap(
        adamw(model.parameters(), lr), consolidation=consolidation, model=model, non_finite=None
    )
    names = [name for name, _ in model.named_parameters()]
    known = {index: {"importance": importance[name]} for index, name in enumerate(names)}
    gate.load_state_dict(gate.state_dict() | {"state": known})
    return gate


class Pull:
    """Adds the gradient of λ/2 Σ F (θ - θ₀)², θ₀ being the parameters as they are now."""

    def __init__(self, model: nn.Module, penalty: float, importance: dict[str, Tensor]) -> None:
        self.params = list(model.parameters())
        self.start = [param.detach().clone() for param in self.params]
        self.strength = [penalty * importance[name] for name, _ in model.named_parameters()]

    @torch.no_grad()
    def __call__(self) -> None:
        ways = torch._foreach_sub(self.params, self.start)
        torch._foreach_addcmul_([param.grad for param in self.params], self.strength, ways)


class LowRank(nn.Module):
    """A matrix and a product of two thin ones, which alone learn and begin at zero."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        down = torch.randn(rank, weight.shape[1], device=weight.device)
        self.down = nn.Parameter(down / math.sqrt(weight.shape[1]))
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def adapt(model: nn.Module, rank: int) -> list[nn.Parameter]:
    """Freeze the model but for adapters of its linear layers, which are returned."""
    model.requires_grad_(False)
    for module in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        parametrize.register_parametrization(module, "weight", LowRank(module.weight, rank))
    return [param for param in model.parameters() if param.requires_grad]


@contextmanager
def part_way(params: list[nn.Parameter], start: list[Tensor], share: float) -> Iterator[None]:
    """Put parameters at `share` of the way from the start to where they are, for a while."""
    ends = [param.detach().clone() for param in params]
    try:
        with torch.no_grad():
            torch._foreach_lerp_(params, start, 1 - share)
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(params, ends)


@dataclass(frozen=True)
class Run:
    size: str
    old: str
    new: str
    seed: int
    method: str
    values: str  # JSON, as in the table

    def key(self, args: argparse.Namespace) -> dict[str, Any]:
        return {**vars(self), "pretrain": args.pretrain, "steps": args.steps}


def fine_tuned(run: Run, shelf: Shelf) -> list[dict[str, Any]]:
    """Fine-tune by one method and its values; return what every evaluation found."""
    args, values, which = shelf.args, json.loads(run.values), (run.size, run.old, run.seed)
    rotated = values.get("rotated", False)
    model = shelf.model(*which, rotated)
    shared = run.key(args) | {"parameters": sum(param.numel() for param in model.parameters())}
    if run.method == "start":
        losses = shelf.losses(model, run.size, run.old, run.new)
        return [shared | {"step": 0, "seconds": 0.0} | losses]
    importance = shelf.importance(values["source"], *which, rotated) if "source" in values else {}
    pull = Pull(model, values["penalty"], importance) if "penalty" in values else None
    if "consolidation" in values:
        optimizer = gated(model, values["lr"], values["consolidation"], importance)
    elif "rank" in values:
        torch.manual_seed(run.seed)
        optimizer = adamw(adapt(model, values["rank"]), values["lr"])
    else:
        optimizer = adamw(model.parameters(), values["lr"])
    if args.compile:
        model.compile()
    params = list(model.parameters())
    start = [param.detach().clone() for param in params]
    looks = {round(step) for step in np.geomspace(min(4, args.steps), args.steps, args.looks)}
    rows, began = [], time.monotonic()
    texts = shelf.batches(
        run.new, run.size, args.steps, 1000 + run.seed
    )  # the same for all methods
    for step, text in enumerate(texts, start=1):
        optimizer.zero_grad()
        loss_of(model, text).backward()
        if pull is not None:
            pull()
        optimizer.step()
        if step in looks:
            with part_way(params, start, values.get("way", 1.0)):
                losses = shelf.losses(model, run.size, run.old, run.new)
            seconds = round(time.monotonic() - began, 2)
            rows.append(shared | {"step": step, "seconds": seconds} | losses)
            if not all(map(math.isfinite, losses.values())):
                break
    return rows


# All runs, shared out among processes.


def scaled(values: dict[str, Any], size: str) -> dict[str, Any]:
    """Return values with the rate for a model of that size."""
    if "lr" not in values:
        return values
    return values | {"lr": float(f"{values['lr'] * SIZES[size].rate / SIZES['mini'].rate:.3g}")}


def planned(args: argparse.Namespace) -> list[Run]:
    runs = []
    for size, seed, pair in itertools.product(args.size, args.seeds, args.pairs):
        old, new = pair.split(":")
        methods = {"start": [{}]} | GRIDS[args.runs]
        for method, grid_of in methods.items():
            if method == "start" or method in args.methods:
                values = [json.dumps(scaled(v, size)) for v in grid_of]
                runs += [Run(size, old, new, seed, method, each) for each in values]
    return runs


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a table, numbers as numbers."""
    if not path.exists():
        return []
    words = {"size", "old", "new", "method", "values"}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v if k in words else float(v) for k, v in row.items()} for row in rows]


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    with locked(path), path.open("a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        if not file.tell():
            table.writeheader()
        table.writerows(rows)


def work(args: argparse.Namespace) -> None:
    began, longest = time.monotonic(), 0.0
    shelf = Shelf(args)
    # Shared out before looking at what is done, which the others change meanwhile.
    runs = planned(args)
    done = {tuple(row[name] for name in KEY) for row in read(args.csv)}
    mine = [
        run
        for run in runs[args.job :: args.jobs]
        if tuple(run.key(args)[name] for name in KEY) not in done
    ]
    bases = list(dict.fromkeys((run.size, run.old, run.seed) for run in runs))
    bases.sort(key=lambda base: -(SIZES[base[0]].width ** 2) * SIZES[base[0]].layers)
    sources = ["own", "data"] if "gate_data" in args.methods else ["own"]
    for base in bases[args.job :: args.jobs] if mine else ():
        made = [shelf.importance(source, *base) for source in sources]
        flat = [torch.cat([f.flatten() for f in each.values()]) for each in made]
        alike = cosine_similarity(flat[0], flat[-1], 0)
        print(*base, f"importance of {' and '.join(sources)}: cosine {alike:.3f}", flush=True)
    while mine:
        # One whose base is there already, if any, rather than wait for another process.
        ready = (r for r in mine if shelf.path(shelf.base(r.size, r.old, r.seed)).exists())
        run = next(ready, mine[0])
        mine.remove(run)
        start = time.monotonic()
        if start + longest - began > args.seconds:
            print(f"{len(mine) + 1} runs left for another time")
            return
        rows = fine_tuned(run, shelf)
        append(args.csv, rows)
        longest = max(longest, rows[-1]["seconds"])
        last = f"old {rows[-1]['old_loss']:.3f} new {rows[-1]['new_loss']:.3f}"
        print(*vars(run).values(), last, f"{time.monotonic() - start:.1f} s", flush=True)


# What came out.

NAMES = {
    "adamw": "AdamW",
    "gate": "gate on AdamW's update",
    "ewc": "EWC with the same importance",
    "l2": "L2 to the start",
    "gate_ewc": "gate and EWC",
    "rotated": "turned",
    "rotated_gate": "turned, gate",
    "rotated_ewc": "turned, EWC",
    "back": "on the way",
    "rotated_back": "turned, on the way",
    "rotated_gate_back": "**turned, gate, on the way**",
    "rotated_ewc_back": "turned, EWC, on the way",
}


def grouped(rows: list[dict[str, Any]], names: Iterable[str]) -> dict[tuple[Any, ...], list[Any]]:
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def frontier(rows: list[dict[str, Any]], half: str) -> list[dict[str, Any]]:
    """Return the rows that no other beats in both losses on `half`, from low new loss to high."""
    new, old = f"new_{half}", f"old_{half}"
    best: list[dict[str, Any]] = []
    for row in sorted((r for r in rows if math.isfinite(r[old])), key=lambda r: (r[new], r[old])):
        if not best or row[old] < best[-1][old]:
            best.append(row)
    return best


def curves(rows: list[dict[str, Any]], shares: Iterable[float]) -> dict[str, np.ndarray]:
    """Return for each method new loss, old loss and forgetting at levels of new loss, of one seed.

    A level is a share of the way from the start to the lowest new loss that AdamW reaches. Each
    half of the test text chooses the points that the other judges; the mean of both is returned,
    and NaN where a method does not get that far.
    """
    shares = np.array(list(shares))
    methods = {method: part for (method,), part in grouped(rows, ["method"]).items()}
    start = methods.pop("start")
    found: dict[str, list[np.ndarray]] = {method: [] for method in methods}
    for chooses, judges in itertools.permutations(HALVES):
        new, old = f"new_{judges}", f"old_{judges}"
        fronts = {name: frontier(part + start, chooses) for name, part in methods.items()}
        lowest = min(row[new] for row in fronts["adamw"])
        levels = start[0][new] - shares * (start[0][new] - lowest)
        for method, front in fronts.items():
            points = sorted((row[new], row[old]) for row in front)
            losses = np.interp(levels, *zip(*points, strict=True), left=np.nan)
            found[method].append(np.stack([levels, losses, losses - start[0][old]]))
    return {method: np.mean(both, 0) for method, both in found.items()}


def ratio(curve: np.ndarray, to: np.ndarray) -> float:
    """Return the quotient of mean forgetting, over the levels that both reach."""
    both = np.isfinite(curve[2]) & np.isfinite(to[2])
    return float(curve[2][both].mean() / to[2][both].mean()) if both.any() else math.nan


def with_interval(values: Iterable[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    around = f" ± {half_interval(stdev(known), len(known)):.2f}" if len(known) > 1 else ""
    return f"{fmean(known):.2f}{around}"


def whole_seeds(rows: list[dict[str, Any]]) -> dict[float, list[dict[str, Any]]]:
    """Return the rows of each seed, of those seeds alone whose runs are all there."""
    seeds = {seed: part for (seed,), part in grouped(rows, ["seed"]).items()}
    runs = {seed: {(r["method"], r["values"]) for r in part} for seed, part in seeds.items()}
    most = max(runs.values(), key=len)
    if not {"start", "adamw"} <= {method for method, _ in most}:
        raise SystemExit("nothing to compare with: runs of adamw are missing")
    return {seed: part for seed, part in sorted(seeds.items()) if runs[seed] == most}


def summarise(path: Path) -> None:
    """Print a table for every size and pair: forgetting by method, and its ratio to the rivals'."""
    for (size, old, new, *_), rows in grouped(read(path), GROUP).items():
        seeds = whole_seeds(rows)
        found = [curves(part, LEVELS) for part in seeds.values()]
        starts = [row for part in seeds.values() for row in part if row["method"] == "start"]
        before = [fmean(row[name] for row in starts) for name in ("old_loss", "new_loss")]
        named = ", ".join(f"{seed:g}" for seed in seeds)
        count = starts[0]["parameters"] / 1e6
        print(f"\n### {size} ({count:.3g} M parameters), {old} to {new}, seeds {named}\n")
        print(f"Before fine-tuning: old {before[0]:.3f}, new {before[1]:.3f}.\n")
        shown = " | ".join(f"forgotten at {share:.0%}" for share in SHOWN)
        print(f"| method | runs | levels reached | {shown} | of AdamW's | of EWC's |")
        print("|---|---:|---:|" + "---:|" * (len(SHOWN) + 2))
        for method in found[0]:
            mine = [curve[method] for curve in found]
            runs = {r["values"] for part in seeds.values() for r in part if r["method"] == method}
            reached = fmean(int(np.isfinite(own[2]).sum()) for own in mine)
            cells = [method, f"{len(runs)}", f"{reached:.3g} of {len(LEVELS)}"]
            for share in SHOWN:
                each = [own[2][LEVELS.index(share)] for own in mine]
                cells.append(f"{fmean(each):.3f}" if all(map(math.isfinite, each)) else "")
            cells += [
                with_interval(ratio(c[method], c[rival]) for c in found if rival in c)
                for rival in ("adamw", "ewc")
            ]
            print(f"| {' | '.join(cells)} |")


@dataclass(frozen=True)
class Compared:
    """Methods against AdamW, for one size and pair.

    Args:
        millions: of parameters.
        old: domain.
        new: domain.
        ratios: of each method, forgetting over AdamW's, a number for each seed.
        reached: how many of the levels each method reaches, a mean over seeds.
        notes: methods with fewer runs than AdamW, or more: "5 runs of gate (AdamW has 6)".
    """

    millions: float
    old: str
    new: str
    ratios: dict[str, list[float]]
    reached: dict[str, float]
    notes: list[str]


def compared(paths: Iterable[Path]) -> list[Compared]:
    """Return what tables say, the smallest model first."""
    found = []
    for group, rows in (item for path in paths for item in grouped(read(path), GROUP).items()):
        seeds = whole_seeds(rows)
        all_curves = [curves(part, LEVELS) for part in seeds.values()]
        ratios = {m: [ratio(c[m], c["adamw"]) for c in all_curves] for m in all_curves[0]}
        reached = {m: fmean(int(np.isfinite(c[m][2]).sum()) for c in all_curves) for m in ratios}
        tried = {(r["method"], r["values"]) for part in seeds.values() for r in part}
        runs = {method: sum(m == method for m, _ in tried) for method in ratios}
        notes = [
            f"{count} runs of *{plain_name(method)}* (AdamW has {runs['adamw']})"
            for method, count in runs.items()
            if count != runs["adamw"]
        ]
        found.append(Compared(rows[0]["parameters"] / 1e6, *group[1:3], ratios, reached, notes))
    return sorted(found, key=lambda each: each.millions)


def recipe(paths: Iterable[Path]) -> None:
    """Print what one setting does at the end of a run, at the highest rate and τ = 0.9999.

    Both numbers are means over seeds: what was learned, as a share of what AdamW learns at its
    best, and what was forgotten, in nats a byte; nothing where a setting was not run.
    """
    gate = {"rotated": True, "consolidation": 0.9999, "source": "own"}
    settings: dict[str, dict[str, Any]] = {
        "AdamW, 20 % back": {"way": 0.8},
        "turned": {"rotated": True},
        "turned, 20 % back": {"rotated": True, "way": 0.8},
        "turned, gate": gate,
        "**turned, gate, 15 % back**": gate | {"way": 0.85},
        "turned, gate, 30 % back": gate | {"way": 0.7},
    }
    heads = []
    lines: dict[str, list[str]] = {name: [] for name in ("AdamW at its best", *settings)}
    groups = [item for path in paths for item in grouped(read(path), GROUP).items()]
    for (_, old, new, *_), rows in sorted(groups, key=lambda item: item[1][0]["parameters"]):
        ends: dict[str, list[tuple[float, float]]] = {name: [] for name in lines}
        for part in whole_seeds(rows).values():
            start = next(row for row in part if row["method"] == "start")
            best = min((r for r in part if r["method"] == "adamw"), key=lambda r: r["new_loss"])
            ended = [(json.loads(r["values"]), r) for r in part if r["step"] == r["steps"]]
            highest = max(values["lr"] for values, _ in ended)
            found = {"AdamW at its best": best}
            for name, setting in settings.items():
                wanted = setting | {"lr": highest}
                same = [row for values, row in ended if values == wanted]
                found |= {name: same[0]} if same else {}
            whole = start["new_loss"] - best["new_loss"]
            for name, row in found.items():
                learned = (start["new_loss"] - row["new_loss"]) / whole
                ends[name].append((learned, row["old_loss"] - start["old_loss"]))
        for name, both in ends.items():
            means = [fmean(each) for each in zip(*both, strict=True)]
            lines[name].append(", ".join(f"{mean:.2f}" for mean in means))
        millions = rounded(rows[0]["parameters"] / 1e6)
        heads.append(f"{old} to {new}, {millions} M, at {highest:.2g}")
    print(f"| learned, forgotten | {' | '.join(heads)} |")
    print("|---|" + "---:|" * len(heads))
    for name, cells in lines.items():
        print(f"| {name} | {' | '.join(cells)} |")


def plain_name(method: str) -> str:
    return NAMES.get(method, method).strip("*")


def cell(column: Compared, method: str) -> str:
    if method not in column.ratios:
        return ""
    few = column.reached[method]
    note = f" ({rounded(few)} of {len(LEVELS)})" if few < len(LEVELS) else ""
    return with_interval(column.ratios[method]) + note


def rounded(number: float) -> str:
    return f"{float(f'{number:.2g}'):g}"


def tabulate(paths: Iterable[Path]) -> None:
    """Print one table of all sizes and pairs: forgetting over AdamW's by method."""
    columns = compared(paths)
    heads = [f"{c.old} to {c.new}, {rounded(c.millions)} M" for c in columns]
    print(f"| forgetting over AdamW's | {' | '.join(heads)} |")
    print("|---|" + "---:|" * len(columns))
    methods = dict.fromkeys([*NAMES, *(method for c in columns for method in c.ratios)])
    for method in methods:
        if method != "adamw" and any(method in c.ratios for c in columns):
            cells = [cell(c, method) for c in columns]
            print(f"| {NAMES.get(method, method)} | {' | '.join(cells)} |")
    counts = [str(len(c.ratios["adamw"])) for c in columns]
    print(f"| seeds | {' | '.join(counts)} |")
    for head, column in zip(heads, columns, strict=True):
        if column.notes:
            print(f"\n{head}: {', '.join(column.notes)}.")


def draw_sizes(paths: Iterable[Path], picture: Path) -> None:
    """Draw forgetting over AdamW's against the size of the model, a line for each method."""
    from syngap.report.figures.style import COLOURS, INK, bare, drawn

    looks = {
        "ewc": (COLOURS[1], ":"),
        "rotated": (COLOURS[0], "--"),
        "rotated_gate": (INK, "--"),
        "rotated_back": (COLOURS[0], "-"),
        "rotated_gate_back": (INK, "-"),
    }
    every = compared(paths)
    first = (every[0].old, every[0].new)
    columns = [column for column in every if (column.old, column.new) == first]
    with drawn(picture, (7, 4)) as figure:
        axes = figure.subplots()
        axes.axhline(1, color=COLOURS[0], linestyle=":", label="AdamW")
        for index, (method, (colour, dashes)) in enumerate(looks.items()):
            label = plain_name(method)
            known = [c for c in columns if method in c.ratios]
            places = [c.millions * 1.08 ** (index - 2) for c in known]  # beside each other
            means = [fmean(c.ratios[method]) for c in known]
            axes.plot(places, means, "o", linestyle=dashes, color=colour, label=label)
            for place, mean, column in zip(places, means, known, strict=True):
                if len(each := column.ratios[method]) > 1:
                    around = half_interval(stdev(each), len(each))
                    axes.plot([place] * 2, [mean - around, mean + around], color=colour)
        axes.set(xscale="log", xlabel="million parameters", ylabel="forgetting over AdamW's")
        axes.set_xticks([c.millions for c in columns], [rounded(c.millions) for c in columns])
        axes.set_xticks([], minor=True)
        bare(axes, "both")
        figure.legend(loc="outside right upper", frameon=False)


def draw(path: Path, picture: Path) -> None:
    """Draw old against new loss along the frontiers, a mean over seeds at each level.

    Colours are rules; dots are weights as they are, dashes turned ones, lines judged on the way.
    """
    from syngap.report.figures.style import COLOURS, INK, SOFT, bare, drawn

    colours = {"adamw": COLOURS[0], "gate": INK, "ewc": COLOURS[1]}
    dashes = (":", "--", "-", "-")

    groups = grouped(read(path), GROUP)
    sizes, pairs = (
        list(dict.fromkeys(g[part] for g in groups)) for part in (slice(1), slice(1, 3))
    )
    with drawn(picture, (5 * len(pairs) + 1, 4 * len(sizes))) as figure:
        lines: dict[str, Any] = {}
        for group, rows in groups.items():
            place = sizes.index(group[:1]) * len(pairs) + pairs.index(group[1:3]) + 1
            axes = figure.add_subplot(len(sizes), len(pairs), place)
            axes.set_title(f"{group[0]}: {group[1]} to {group[2]}")
            axes.set(xlabel=f"loss on {group[2]}, nats a byte", ylabel=f"loss on {group[1]}")
            found = [curves(part, np.linspace(0, 1, 41)) for part in whole_seeds(rows).values()]
            for method in found[0]:
                words = method.split("_")
                rule = "_".join(w for w in words if w not in ("rotated", "back")) or "adamw"
                look = ("rotated" in words) + 2 * ("back" in words)
                new, old, _ = np.mean([curve[method] for curve in found], 0)
                colour, width = colours.get(rule, SOFT), 2.6 if look == 3 else 1.4
                (line,) = axes.plot(new, old, color=colour, linestyle=dashes[look], linewidth=width)
                lines.setdefault(method, line)
            bare(axes, "both")
        figure.legend(lines.values(), lines.keys(), loc="outside right upper", frameon=False)


def check() -> None:
    """Compare penalty, gate, adapters and frontier with what they are by definition."""
    torch.manual_seed(0)
    model = GPT(SIZES["tiny"])
    text = torch.randint(START, (4, SIZES["tiny"].context))
    importance = {name: torch.rand_like(param) for name, param in model.named_parameters()}
    importance = {name: f**4 for name, f in importance.items()}

    moved, start = copy.deepcopy(model), dict(model.named_parameters())
    pull = Pull(moved, 7.0, importance)
    with torch.no_grad():
        for param in moved.parameters():
            param.add_(torch.randn_like(param))
    away = [importance[n] * (p - start[n].detach()) ** 2 for n, p in moved.named_parameters()]
    whole = loss_of(moved, text) + 7.0 / 2 * sum(part.sum() for part in away)
    wanted = torch.autograd.grad(whole, list(moved.parameters()))
    loss_of(moved, text).backward()
    pull()
    for param, grad in zip(moved.parameters(), wanted, strict=True):
        torch.testing.assert_close(param.grad, grad)
    print("the penalty's gradient is that of the whole loss")

    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    gate = gated(ours, 1e-2, 0.9, importance)
    base = adamw(plain.parameters(), 1e-2)
    mean = torch.cat([f.flatten() for f in importance.values()]).double().mean()
    for _ in range(3):
        for each, optimizer in ((ours, gate), (plain, base)):
            optimizer.zero_grad()
            loss_of(each, text).backward()
            before = [param.detach().clone() for param in each.parameters()]
            optimizer.step()
        with torch.no_grad():
            for (name, param), old in zip(plain.named_parameters(), before, strict=True):
                mask = 1 - torch.tanh(math.atanh(0.9) * importance[name].double() / mean) + 0.01
                param.copy_(old + mask * (param - old))
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for name, kept in gate.importance().items():
        assert torch.equal(kept, importance[name]), f"the importance of {name} moved"
    print("three gated steps of AdamW are those of the formula, and importance stays")

    adapted = copy.deepcopy(model)
    params = adapt(adapted, 2)
    torch.testing.assert_close(adapted(text), model(text))
    loss_of(adapted, text).backward()
    learned = {param for param in adapted.parameters() if param.grad is not None}
    thin = {param for m in adapted.modules() if isinstance(m, LowRank) for param in (m.up, m.down)}
    assert learned == thin == set(params), "others than adapters learn, or not all of them"
    everything = list(adapted.parameters())
    with part_way(everything, [torch.zeros_like(param) for param in everything], 0.5):
        torch.testing.assert_close(next(adapted.parameters()), next(model.parameters()) / 2)
    print("adapters begin at the model, and they alone learn")

    turned, again = copy.deepcopy(model), copy.deepcopy(model)
    assert len(rotate(turned, text)) == 4 * SIZES["tiny"].layers + 1
    torch.testing.assert_close(turned(text), model(text))
    turn(again, turned.state_dict())
    assert torch.equal(again(text), turned(text)), "a turned model is not what its state makes"
    begun = [param.detach().clone() for param in turned.parameters()]
    base = adamw(turned.parameters(), 1e-2)
    loss_of(turned, text).backward()
    base.step()
    ended = [param.detach().clone() for param in turned.parameters()]
    with part_way(list(turned.parameters()), begun, 0.25):
        for param, one, other in zip(turned.parameters(), begun, ended, strict=True):
            torch.testing.assert_close(param.detach(), 0.75 * one + 0.25 * other)
    assert all(torch.equal(p, q) for p, q in zip(turned.parameters(), ended, strict=True))
    print("a turned model is the model, and a quarter of the way is a quarter of the way")

    table: dict[str, list[tuple[float, ...]]] = {  # new, old on a half, old on the other
        "start": [(3.0, 1.0, 1.0)],
        "adamw": [(2.0, 1.4, 1.4), (1.0, 3.0, 3.0), (2.5, 1.6, 1.6)],
        "gate": [(2.0, 1.2, 1.2), (1.5, 1.5, 1.5)],
        "lucky": [(2.0, 0.5, 2.0)],
    }
    rows = [
        {"method": method, "new_a": new, "new_b": new, "old_a": one, "old_b": other}
        for method, points in table.items()
        for new, one, other in points
    ]
    found = curves(rows, [0.25, 0.5, 0.75, 1.0])  # new loss 2.5, 2, 1.5, 1
    np.testing.assert_allclose(found["adamw"][2], [0.2, 0.4, 1.2, 2.0])
    np.testing.assert_allclose(found["gate"][2], [0.1, 0.2, 0.5, np.nan])
    np.testing.assert_allclose(found["lucky"][2], [0.375, 0.25, np.nan, np.nan])
    np.testing.assert_allclose(ratio(found["gate"], found["adamw"]), 0.8 / 1.8)
    print("frontiers, levels and ratios are those found by hand")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--size", nargs="+", choices=SIZES, default=["small"])
    add("--pairs", nargs="+", default=["python:english", "english:cpp"], metavar="OLD:NEW")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--methods", nargs="+", choices=GRIDS[12], default=list(GRIDS[12]))
    add("--runs", type=int, choices=GRIDS, default=12, help="of each method")
    add("--steps", type=int, default=300, help="of fine-tuning")
    add("--pretrain", type=int, default=2000, help="steps of training on the old domain")
    add("--batch", type=int, default=32, help="texts in a batch")
    add("--looks", type=int, default=12, help="evaluations of a run, ever further apart")
    add("--windows", type=int, default=64, help="texts in each half of a domain's test")
    add("--samples", type=int, default=256, help="texts that importance is taken from")
    add("--megabytes", type=float, default=30.0, help="of text, at most, in a domain")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile", action="store_true", help="compile the model")
    add("--cache", type=Path, default=Path("runs/finetune"), help="folder of what runs share")
    add("--csv", type=Path, default=Path("runs/finetune.csv"), help="table to add to")
    add("--jobs", type=int, default=1, help="processes that share the work")
    add("--job", type=int, default=0, help="which of them this is, from 0")
    add("--seconds", type=float, default=math.inf, help="begin no run that would end later")
    add("--check", action="store_true", help="compare the methods with their definitions")
    add("--text", action="store_true", help="make the text of all domains, and no more")
    add("--summary", type=Path, metavar="CSV", help="print tables")
    add("--table", type=Path, nargs="+", metavar="CSV", help="print one table of several sizes")
    add("--recipe", type=Path, nargs="+", metavar="CSV", help="print what one setting does")
    add("--sizes", type=Path, nargs="+", metavar="CSV", help="draw sizes; the last is the SVG")
    add("--draw", type=Path, nargs=2, metavar=("CSV", "SVG"), help="draw frontiers")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # what a weight is turned by; it is rounded anyway
    if args.check:
        check()
    elif args.summary:
        summarise(args.summary)
    elif args.table:
        tabulate(args.table)
    elif args.recipe:
        recipe(args.recipe)
    elif args.sizes:
        draw_sizes(args.sizes[:-1], args.sizes[-1])
    elif args.draw:
        draw(*args.draw)
    elif args.text:
        shelf = Shelf(args)
        for domain in DOMAINS:
            shelf.text(domain)
    else:
        work(args)


if __name__ == "__main__":
    main()
