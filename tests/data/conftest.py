"""Data sets that several tests of this folder read."""

from pathlib import Path

import pytest

from diladiff.data.prepare import prepare
from diladiff.data.settings import PrepareConfig
from tests.data.corpora import texts, write_jsonl


@pytest.fixture(scope="session")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents joined, in several shards."""
    folder = tmp_path_factory.mktemp("joined")
    source = write_jsonl(folder / "in.jsonl", texts(400))
    config = PrepareConfig(
        inputs=(str(source),), out=folder / "set", train_tokenizer=300, shard_tokens=5000, workers=1, valid_share=0.1
    )
    return prepare(config).folder


@pytest.fixture(scope="session")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One document a block of 48, with a few that are longer."""
    folder = tmp_path_factory.mktemp("document")
    source = write_jsonl(folder / "in.jsonl", texts(200))
    config = PrepareConfig(
        inputs=(str(source),),
        out=folder / "set",
        train_tokenizer=300,
        packing="document",
        length=48,
        workers=1,
        valid_documents=20,
    )
    return prepare(config).folder
