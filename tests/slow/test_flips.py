"""A hundred flipped bits in checkpoints, token shards and model weights: each is caught, and the file is named."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from diladiff.data.prepare import prepare
from diladiff.data.settings import PrepareConfig
from diladiff.data.shards import TokenDataset
from diladiff.data.tokenizer import Tokenizer
from diladiff.models.token_transformer import TokenTransformer, TokenTransformerConfig
from diladiff.pipelines.masked_lm import MaskedLM
from tests.data.corpora import texts, write_jsonl
from tests.engine import driver

pytestmark = pytest.mark.slow
FLIPS = 100


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, tuple[Path, Callable[[Path], object]]]:
    """Name -> a whole folder and what reads all of it."""
    root = tmp_path_factory.mktemp("whole")
    source = write_jsonl(root / "in.jsonl", texts(200))
    config = PrepareConfig(
        inputs=(str(source),), out=root / "data", train_tokenizer=300, workers=1, valid_share=0.1, shard_tokens=5000
    )
    data = prepare(config).folder
    driver.train(root / "run", steps=4)
    tokenizer = Tokenizer.load(data / "tokenizer")
    shape = TokenTransformerConfig(
        vocab_size=tokenizer.vocab_size, mask_id=tokenizer.mask_id, length=16, width=16, layers=1, heads=2
    )
    MaskedLM(TokenTransformer(shape), tokenizer).save_pretrained(root / "model")

    def read_data(folder: Path) -> None:
        for split in ("train", "valid"):
            TokenDataset.open(folder, split, 16)

    def resume(folder: Path) -> None:
        driver.train(folder, steps=4)

    return {
        "checkpoint": (root / "run", resume),
        "data": (data, read_data),
        "model": (root / "model", lambda folder: MaskedLM.from_pretrained(folder, device="cpu")),
    }


def watched(name: str, folder: Path) -> list[Path]:
    """The files of a folder whose bits matter to its reader."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if name != "checkpoint":
        return [path for path in found if path.name != "README.md"]  # the card may be edited
    last = folder / "checkpoints" / "step_000004"
    return [path for path in found if path.parent == last or path.name in ("LATEST", "config.json")]


@pytest.mark.parametrize(("name", "count"), [("checkpoint", 34), ("data", 33), ("model", 33)])
def test_every_flipped_bit_is_named(folders, tmp_path, name, count):
    folder, read = folders[name]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    generator = random.Random(name)
    missed = []
    for _ in range(count):
        path = generator.choice(watched(name, copy))
        whole = path.read_bytes()
        place, bit = generator.randrange(len(whole)), generator.randrange(8)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        flip = f"{path.relative_to(copy)}: byte {place}, bit {bit}"
        try:
            read(copy)
            missed.append(flip)
        except ValueError as error:
            if path.name not in str(error):
                missed.append(f"{flip}: {error}")
        path.write_bytes(whole)
    assert not missed
    read(copy)
