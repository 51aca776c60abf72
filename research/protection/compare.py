"""Fine-tune a model on German by several methods, and measure what it forgets.

compare.py byte --data FOLDER --seed 0 --out rows.jsonl --runs adamw,distil,both_rotated@1e-3
A run is a method with one rate; without "@RATE" a method runs with each of --rates. Runs that the
file has already are skipped.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from byte_model import MEDIUM, START, Size, byte_windows, load_or_pretrain, read_bytes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

SHARES = (1.0, 0.85, 0.7, 0.5)  # of the way from the start's weights to the tuned ones
WARMUP = 20  # steps
TEST_BATCH = 64
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TINY = Size(width=32, layers=2, heads=2, context=64)  # tries the runner on a CPU


# Arguments of `syngap.protect` by name; None: no protection.
METHODS: dict[str, dict[str, Any] | None] = {
    "adamw": None,
    "distil": {"gate": False},
    "gate_filtered": {"teacher": False, "rotate": False},
    "gate_rotated": {"teacher": False, "rotate": True, "rank": "full"},
    "both_filtered": {"rotate": False},
    "both_rotated": {"rotate": True, "rank": "full"},
    "default": {},
}
# Added to a method's name with "+": both_filtered+tau0.9+every2
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"tau{tau}": {"consolidation": float(tau)} for tau in ("0.9", "0.99", "0.99999")},
    **{f"rank{rank}": {"rank": float(rank)} for rank in ("0.125", "0.25", "0.5")},
    **{f"rank{rank}": {"rank": int(rank)} for rank in ("16", "64", "256")},
    "rankfull": {"rank": "full"},
    **{f"anchors{count}": {"anchors": count} for count in (2, 4, 16, 32)},
    **{f"every{count}": {"every": count} for count in (2, 4, 8)},
    **{f"strength{weight}": {"strength": float(weight)} for weight in ("0.3", "0.5", "2", "4")},
    **{f"ambient{share}": {"ambient": float(share)} for share in ("0", "0.1")},
}


def options_of(method: str) -> dict[str, Any] | None:
    """Return the arguments of `syngap.protect` for a name; None for plain AdamW."""
    name, *variants = method.split("+")
    unknown = [variant for variant in variants if variant not in VARIANTS]
    if name not in METHODS or unknown:
        raise SystemExit(
            f"there is no method {method!r}; methods: {', '.join(METHODS)}; "
            f"variants: {', '.join(VARIANTS)}"
        )
    options = METHODS[name]
    if options is None:
        if variants:
            raise SystemExit(f"{name} has no variants")
        return None
    for variant in variants:
        options = options | VARIANTS[variant]
    return options


@dataclass(frozen=True)
class Defaults:
    """What a model is tuned with unless the command line says otherwise."""

    rates: tuple[float, ...]
    steps: int
    batch: int
    windows: int  # of each half of a test text


DEFAULTS = {
    "tiny": Defaults((1e-3,), 4, 4, 4),
    "byte": Defaults((1e-4, 3e-4, 1e-3, 3e-3), 200, 32, 256),
    "smollm2": Defaults((1e-4, 3e-4, 1e-3), 400, 16, 96),
}


@dataclass
class Task:
    """A model before tuning, its training text, and windows of both halves of each test text."""

    model: nn.Module
    predict: Callable[[nn.Module, Tensor], Tensor]  # model and tokens: logits of the next tokens
    cut: Callable[[Tensor, Tensor], Tensor]  # text and offsets: windows of tokens
    text: Tensor
    tests: dict[str, list[Tensor]]
    start: int  # the token that begins a text
    context: int

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return the mean loss in nats per token."""
        logits = self.predict(model, tokens[:, :-1])
        return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def batches(self, steps: int, batch: int, seed: int) -> Iterator[Tensor]:
        """Return the batches that all methods see."""
        order = torch.Generator().manual_seed(2000 + seed)
        offsets = torch.randint(len(self.text) - self.context, (steps, batch), generator=order)
        return (self.cut(self.text, row) for row in offsets.to(self.text.device))

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, list[float]]:
        """Return the loss on both halves of each test text."""
        model.eval()
        return {
            domain: [
                torch.stack([self.loss(model, part) for part in half.split(TEST_BATCH)])
                .mean()
                .item()
                for half in halves
            ]
            for domain, halves in self.tests.items()
        }


def spread(length: int, context: int, count: int, device: torch.device) -> Tensor:
    """Return offsets of windows that are evenly spread over a text."""
    return torch.linspace(0, length - context - 1, count, device=device).long()


def load_bytes(args: argparse.Namespace, size: Size) -> Task:
    device, folder = torch.device(args.device), args.data / "texts"

    def cut(text: Tensor, offsets: Tensor) -> Tensor:
        return byte_windows(text, offsets, size.context)

    def halves(domain: str) -> list[Tensor]:
        chunks = read_bytes(folder / f"{domain}.test.txt", device).chunk(2)
        return [cut(c, spread(len(c), size.context, args.windows, device)) for c in chunks]

    old = [read_bytes(folder / f"{domain}.train.txt", device) for domain in ("english", "python")]
    weights = args.cache / f"{args.model}-{args.pretrain}-seed{args.seed}.pt"
    return Task(
        load_or_pretrain(weights, size, old, args.pretrain, args.seed),
        lambda model, tokens: model(tokens),
        cut,
        read_bytes(folder / "german.train.txt", device),
        {domain: halves(domain) for domain in ("english", "python", "german")},
        START,
        size.context,
    )


def load_smollm2(args: argparse.Namespace) -> Task:
    sys.path.append(str(args.data / "site"))  # the package gguf, where it is not installed
    import numpy as np
    from transformers import AutoModelForCausalLM

    device, folder, context = torch.device(args.device), args.data / "smollm2", 256
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    with np.load(folder / "tokens.npz") as file:
        tokens = {name: torch.from_numpy(file[name].astype(np.int64)) for name in file.files}

    def cut(text: Tensor, offsets: Tensor) -> Tensor:
        return text[offsets[:, None] + torch.arange(context, device=text.device)]

    def halves(domain: str) -> list[Tensor]:
        texts = [tokens[f"{domain}_{half}"].to(device) for half in (0, 1)]
        return [cut(t, spread(len(t), context, args.windows, device)) for t in texts]

    def predict(model: nn.Module, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits.float()

    return Task(
        model.to(device),
        predict,
        cut,
        tokens["german_train"].to(device),
        {domain: halves(domain) for domain in ("python", "wiki", "postgres", "german")},
        model.config.bos_token_id,
        context,
    )


def load_task(args: argparse.Namespace) -> Task:
    if args.model == "smollm2":
        return load_smollm2(args)
    return load_bytes(args, MEDIUM if args.model == "byte" else TINY)


def load_samples(task: Task, args: argparse.Namespace) -> Tensor:
    """Return what the model writes before tuning; made once for a model and a seed."""
    from syngap import own_samples

    device = torch.device(args.device)
    name = f"{args.model}-{args.pretrain}" if args.model != "smollm2" else args.model
    path = args.cache / f"{name}-seed{args.seed}-samples{args.samples}.pt"
    if not path.exists():
        args.cache.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        torch.manual_seed(args.seed)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            samples = own_samples(task.model, args.samples, length=task.context, start=task.start)
        torch.save(samples.cpu(), path)
        print(f"{path.name}: {time.monotonic() - began:.1f} s", flush=True)
    return torch.load(path, weights_only=True).to(device)


@contextmanager
def interpolated(model: nn.Module, start: list[Tensor], share: float) -> Iterator[None]:
    """Give the model the weights start + share · (now - start), and then its own again."""
    params = list(model.parameters())
    now = [param.detach().clone() for param in params]

    @torch.no_grad()
    def write(weights: list[Tensor]) -> None:
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)

    write([torch.lerp(a, b, share) for a, b in zip(start, now, strict=True)])
    yield
    write(now)


class Clock:
    """Adds up the time spent inside `with clock:`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic()

    def __enter__(self) -> None:
        self.began = self._now()

    def __exit__(self, *_: object) -> None:
        self.seconds += self._now() - self.began


def fine_tune(task: Task, method: str, lr: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tune a copy of the model; return a row for each evaluation."""
    options, device = options_of(method), torch.device(args.device)
    model = copy.deepcopy(task.model)
    start = [param.detach().clone() for param in model.parameters()]
    known = None if options is None else load_samples(task, args)
    clock, memory = Clock(device), 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with clock:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr, weight_decay=0.0, fused=device.type == "cuda"
        )
        protection = None
        if options is not None:
            from syngap import protect

            protection = protect(
                model,
                known,
                predict=lambda tokens: task.predict(model, tokens),
                seed=args.seed,
                **options,
            )
            optimizer = protection.optimizer(optimizer)
    setup = clock.seconds
    shared = {
        "model": args.model,
        "seed": args.seed,
        "method": method,
        "options": options,
        "lr": lr,
        "steps": args.steps,
        "batch": args.batch,
    }
    rows: list[dict[str, Any]] = []
    looks = {max(1, args.steps // 2), args.steps}
    for step, tokens in enumerate(task.batches(args.steps, args.batch, args.seed), start=1):
        with clock:
            model.train()
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, step / WARMUP)
            loss = task.loss(model, tokens)
            if protection is not None:
                loss = loss + protection.loss()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step not in looks:
            continue
        if device.type == "cuda":
            memory = max(memory, torch.cuda.max_memory_allocated(device))
        for share in SHARES:
            with interpolated(model, start, share) if share < 1 else nullcontext():
                losses = task.evaluate(model)
            rows.append(
                shared
                | {"step": step, "share": share, "losses": losses, "memory": memory}
                | {"seconds": round(clock.seconds, 2), "setup_seconds": round(setup, 2)}
            )
        if device.type == "cuda":  # evaluations do not count
            torch.cuda.reset_peak_memory_stats(device)
        if not all(math.isfinite(loss) for pair in rows[-1]["losses"].values() for loss in pair):
            print(f"{method}@{lr:g}: loss is not finite at step {step}", flush=True)
    return rows


def warm_up(task: Task, batch: int) -> None:
    """Take a few steps with a copy, so that the first run is timed like the others."""
    model = copy.deepcopy(task.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=task.text.is_cuda)
    for tokens in task.batches(3, batch, seed=0):
        optimizer.zero_grad()
        task.loss(model, tokens).backward()
        optimizer.step()


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "seed", "method", "lr", "steps", "batch"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=DEFAULTS, help="tiny tries the runner on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="rows are added to this file")
    parser.add_argument("--runs", required=True, help="METHOD or METHOD@RATE, separated by commas")
    parser.add_argument("--data", type=Path, required=True, help="what fetch.py or parts.py wrote")
    parser.add_argument("--cache", type=Path, help="pre-trained weights, samples; DATA/cache")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rates", help="separated by commas")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--windows", type=int, help="of each half of a test text")
    parser.add_argument("--samples", type=int, default=256, help="that the model writes itself")
    parser.add_argument("--pretrain", type=int, default=4000, help="steps of the byte model")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after these")
    args = parser.parse_args()
    defaults = DEFAULTS[args.model]
    for name in ("steps", "batch", "windows"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(defaults, name))
    args.rates = [float(rate) for rate in args.rates.split(",")] if args.rates else defaults.rates
    args.cache = args.cache or args.data / "cache"
    return args


def parse_runs(runs: str, rates: list[float]) -> list[tuple[str, float]]:
    """Return methods with their rates."""
    pairs = []
    for run in runs.split(","):
        method, _, rate = run.partition("@")
        options_of(method)  # it is an error now if there is no such method
        pairs += [(method, float(rate))] if rate else [(method, lr) for lr in rates]
    return pairs


def main() -> None:
    args, began = parse_args(), time.monotonic()
    runs = parse_runs(args.runs, args.rates)
    torch.set_float32_matmul_precision("high")
    task = load_task(args)
    shared = {"model": args.model, "seed": args.seed, "steps": args.steps, "batch": args.batch}
    start = shared | {"method": "start", "options": None, "lr": 0.0, "step": 0, "share": 1.0}
    done = {key_of(row) for row in read_rows(args.out)}
    if key_of(start) not in done:
        size = sum(param.numel() for param in task.model.parameters())
        append_rows(args.out, [start | {"losses": task.evaluate(task.model), "parameters": size}])
    warm_up(task, args.batch)
    for method, lr in runs:
        if key_of(shared | {"method": method, "lr": lr}) in done:
            print(f"{method}@{lr:g}: there already", flush=True)
            continue
        if time.monotonic() - began > args.seconds:
            print(f"{method}@{lr:g}: no time left", flush=True)
            continue
        rows = fine_tune(task, method, lr, args)
        append_rows(args.out, rows)
        last = next(row for row in reversed(rows) if row["share"] == 1)
        losses = ", ".join(f"{name} {sum(pair) / 2:.3f}" for name, pair in last["losses"].items())
        memory = f"{last['memory'] / 2**30:.1f} GiB"
        spent = f"{last['seconds']:.1f} s (setup {last['setup_seconds']:.1f} s)"
        print(f"{method}@{lr:g}: {losses}; {spent}, {memory}", flush=True)


if __name__ == "__main__":
    main()
