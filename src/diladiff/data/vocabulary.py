"""Vocabularies fitted to a corpus: a byte-level BPE trained on it, or a given tokenizer cut down to what it uses.

A reduced tokenizer keeps all special tokens and all characters seen; whatever else is dropped re-splits into the rest.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from diladiff.data.tokenizer import Specials, Tokenizer

TRAINED = Specials(mask="[MASK]", end="[SEP]", separator="[SEP]", pad="[PAD]")
"""Special tokens of a trained vocabulary; their ids are [PAD] 0, [MASK] 1, [SEP] 2, and no token is unknown."""

SHRINK = 0.7
"""A WordPiece vocabulary is cut to this share of its size at a time, and counted anew in between."""


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """A cased byte-level BPE of `size` tokens; decoding gives back every text to the byte."""
    smallest = 3 + 256
    if size < smallest:
        raise ValueError(f"train_tokenizer {size}: the bytes and special tokens alone need {smallest}; ask for more")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[TRAINED.pad, TRAINED.mask, TRAINED.end],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend.to_str(), TRAINED)


def reduce_tokenizer(tokenizer: Tokenizer, texts: Iterable[str], size: int) -> Tokenizer:
    """The same tokenizer with the `size` tokens that a corpus needs most, in their old order."""
    saved = json.loads(tokenizer.backend_json)
    kind = saved["model"]["type"]
    if kind == "BPE" and (saved.get("decoder") or {}).get("type") != "ByteLevel":
        kind = "BPE without byte level"
    if kind not in ("WordPiece", "BPE"):
        raise ValueError(f"vocab_size {size}: only WordPiece and byte-level BPE can be reduced, this is {kind}")
    words = _words(tokenizer, texts)
    keep = _wordpiece(saved, words, size) if kind == "WordPiece" else _bytelevel(saved, words, size)
    return Tokenizer(json.dumps(_restrict(saved, keep), ensure_ascii=False), tokenizer.specials, tokenizer.packing)


def _words(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[str]:
    """How often each word occurs, in the form in which the model sees it."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_json)
    normalizer, splitter = backend.normalizer, backend.pre_tokenizer
    counts: Counter[str] = Counter()
    for text in texts:
        clean = normalizer.normalize_str(text) if normalizer else text
        counts.update([word for word, _ in splitter.pre_tokenize_str(clean)] if splitter else [clean])
    return counts


def _wordpiece(saved: dict[str, Any], words: Counter[str], size: int) -> set[str]:
    model = saved["model"]
    prefix = model["continuing_subword_prefix"]
    seen = {character for word in words for character in word}
    must = _specials(saved) | {model["unk_token"]}
    must |= {form for character in seen for form in (character, prefix + character) if form in model["vocab"]}
    _check_size(size, len(must))
    keep = set(model["vocab"]) | must
    while True:
        counts = _count(_restrict(saved, keep), words)
        goal = max(size, int(SHRINK * len(keep)))
        # BERT's [unusedN] can never be met in a text, so they go first among what the corpus does not use
        rest = sorted(keep - must, key=lambda token: (-counts[token], token[:7] == "[unused", model["vocab"][token]))
        keep = must | set(rest[: goal - len(must)])
        if goal == size:
            return keep


def _bytelevel(saved: dict[str, Any], words: Counter[str], size: int) -> set[str]:
    vocab = saved["model"]["vocab"]
    must = _specials(saved) | {token for token in vocab if len(token) == 1}
    _check_size(size, len(must))
    ranks = {pair: rank for rank, pair in enumerate(_merges(saved))}
    counts = _count(saved, words)
    # A token is made of the two that its last merge joins, so these are needed wherever it is: with their counts
    # included no token outranks its parts, and the best of them are closed under merging.
    parents = {token: _last_merge(token, ranks) for token in vocab if len(token) > 1 and token not in must}
    for token in sorted(parents, key=len, reverse=True):
        pair = parents[token]
        if pair is not None:
            for part in pair:
                counts[part] += counts[token]
    order = sorted(parents, key=lambda token: (-counts[token], len(token), vocab[token]))
    return must | set(order[: size - len(must)])


def _last_merge(token: str, ranks: Mapping[tuple[str, str], int]) -> tuple[str, str] | None:
    """The pair that byte-pair encoding joins last when it spells a token, or None where it never arrives there."""
    parts = list(token)
    while len(parts) > 1:
        found = [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not found:
            return None
        at = min(found)[1]
        if len(parts) == 2:
            return parts[0], parts[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return None


def _count(saved: dict[str, Any], words: Counter[str]) -> Counter[str]:
    """How often each token is used on the corpus."""
    model = tokenizers.Tokenizer.from_str(json.dumps(saved)).model
    counts: Counter[str] = Counter()
    for word, times in words.items():
        for token in model.tokenize(word):
            counts[token.value] += times
    return counts


def _restrict(saved: dict[str, Any], keep: set[str]) -> dict[str, Any]:
    """A tokenizer's JSON with some of its tokens, numbered anew in their old order."""
    old = dict(saved["model"]["vocab"]) | {added["content"]: added["id"] for added in saved["added_tokens"]}
    ids = {token: new for new, token in enumerate(sorted(keep, key=lambda token: old[token]))}
    model = dict(saved["model"], vocab={token: ids[token] for token in ids if token in saved["model"]["vocab"]})
    if model["type"] == "BPE":
        model["merges"] = [list(pair) for pair in _merges(saved) if {*pair, "".join(pair)} <= keep]
    added = [dict(token, id=ids[token["content"]]) for token in saved["added_tokens"]]
    return dict(saved, model=model, added_tokens=added, post_processor=None)


def _merges(saved: dict[str, Any]) -> list[tuple[str, str]]:
    """A BPE model's merges as pairs; older files write them as one string."""
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in saved["model"]["merges"]]
    return [(left, right) for left, right in pairs]


def _specials(saved: dict[str, Any]) -> set[str]:
    return {added["content"] for added in saved["added_tokens"]}


def _check_size(size: int, smallest: int) -> None:
    if size < smallest:
        raise ValueError(f"vocab_size {size}: special tokens and characters seen alone need {smallest}; ask for more")
