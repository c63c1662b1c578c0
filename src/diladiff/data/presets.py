"""Well-known data sets by name: functions that return a complete PrepareConfig; the command line changes its fields."""

from collections.abc import Callable
from pathlib import Path

from diladiff.data.settings import PrepareConfig


def openwebtext() -> PrepareConfig:
    """The paper's data: OpenWebText, documents joined by [SEP], the last 100,000 documents held out.

    Source: Hugging Face data set Skylion007/openwebtext, 8,013,769 documents, about 9 billion tokens, 18 GB of shards.
    """
    return PrepareConfig(
        inputs=("hf:Skylion007/openwebtext",),
        out=Path("data/openwebtext"),
        valid_documents=100_000,
        packing="joined",
        tokenizer="bert-base-uncased",
    )


def wikipedia() -> PrepareConfig:
    """English Wikipedia as prose: paragraphs and `Heading.` lines; no lists, tables, markup or end matter.

    Source: wikimedia/wikipedia, 20231101.en (CC BY-SA, its authors; whatever is trained on it says so).
    Filters, line by line: reading stops at References, External links, See also, Further reading, Notes, Bibliography,
    Sources, Citations or Gallery; a line is prose if it has 5 words or more, ends a sentence (. ! ? and closing
    quotes), does not begin like a list and holds no { } | < >; a line of at most 8 words without punctuation is a
    heading, kept with a full stop if prose follows; all else is dropped. Articles below 100 words are left out;
    the dump holds every article once.
    Split: the first 8 bytes of the sha256 of the article's id, as a fraction of 1: below .01 valid, below .02 test.
    """
    return PrepareConfig(
        inputs=("hf:wikimedia/wikipedia@20231101.en",),
        out=Path("data/wikipedia"),
        key_field="id",
        filter="wikipedia",
        valid_share=0.01,
        test_share=0.01,
        packing="joined",
        tokenizer="bert-base-uncased",
    )


def tinystories() -> PrepareConfig:
    """TinyStories with its own validation split: one story a block of 512, a cased vocabulary of 8,192 trained on it.

    Source: Hugging Face data set roneneldan/TinyStories, 2.1 million stories.
    """
    return PrepareConfig(
        inputs=("hf:roneneldan/TinyStories",),
        valid=("hf:roneneldan/TinyStories#validation",),
        out=Path("data/tinystories"),
        packing="document",
        length=512,
        train_tokenizer=8192,
    )


def stories() -> PrepareConfig:
    """Stories of a known law, drawn on the spot by examples/stories_law.py; needs `make parts`.

    One story a block of 256, a cased vocabulary of 4,096 trained on them. Training stories are drawn with the seeds
    100, 101, ..., validation stories with 800, ..., 8,192 stories a seed. A CPU core draws about 6 stories a second:
    20,000 take an hour; real trainings draw a few hundred thousand with --stories-device cuda.
    """
    return PrepareConfig(
        out=Path("data/stories"),
        stories=20_000,
        stories_valid=2_000,
        packing="document",
        length=256,
        train_tokenizer=4096,
    )


PRESETS: dict[str, Callable[[], PrepareConfig]] = {
    "openwebtext": openwebtext,
    "wikipedia": wikipedia,
    "tinystories": tinystories,
    "stories": stories,
}
