"""Tokenizers: round trips, special tokens, vocabularies trained and cut down."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from diladiff.data.tokenizer import Specials, Tokenizer, from_pretrained, wrap
from diladiff.data.vocabulary import reduce_tokenizer, train_tokenizer
from tests.data.corpora import texts

HARD = [
    "",
    " two  spaces\n\nand a tab\t",
    "na\u00efve \u4f60\u597d \U0001f600",
    "[MASK] and [SEP] are text here",
    "\x00\n",
]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(texts(300), 340)


@pytest.fixture(scope="module")
def wordpiece() -> Tokenizer:
    alphabet = "abcdefghijklmnopqrstuvwxyz.'"
    words = ["the", "cat", "saw", "dog", "house", "##se", "hou", "##ou", "small", "##all", "sm", "zebra", "##bra", "ze"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *alphabet, *(f"##{c}" for c in alphabet), *words]
    model = models.WordPiece(vocab={t: i for i, t in enumerate(tokens)}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(tokens[:5])
    return wrap(backend.to_str(), Specials(mask="[MASK]", end="[SEP]", separator="[SEP]", pad="[PAD]", unknown="[UNK]"))


def test_trained_specials_come_first(trained: Tokenizer) -> None:
    assert (trained.pad_id, trained.mask_id, trained.end_id, trained.separator_id) == (0, 1, 2, 2)
    assert trained.vocab_size == 340
    assert trained.unknown_id is None


def test_training_is_deterministic(trained: Tokenizer) -> None:
    assert train_tokenizer(iter(texts(300)), 340).fingerprint == trained.fingerprint
    assert train_tokenizer(texts(300, seed=1), 340).fingerprint != trained.fingerprint


def test_byte_level_gives_every_text_back(trained: Tokenizer) -> None:
    for text, ids in zip(HARD + texts(20), trained.encode(HARD + texts(20)), strict=True):
        assert trained.decode(ids) == text


def test_text_never_becomes_a_special_token(trained: Tokenizer, wordpiece: Tokenizer) -> None:
    for tokenizer in (trained, wordpiece):
        (ids,) = tokenizer.encode(["a [MASK] b [SEP] c [PAD]"])
        assert not {tokenizer.mask_id, tokenizer.end_id, tokenizer.pad_id} & set(ids)


def test_decode_cuts_at_the_end_or_breaks_at_separators(trained: Tokenizer) -> None:
    first, second = trained.encode(["one", "two"])
    block = [*first, trained.end_id, *second, trained.pad_id]
    assert trained.decode(block) == "one"
    assert trained.with_packing("joined").decode(block) == "one\n\ntwo"
    assert trained.decode([trained.mask_id, *first]) == "one"


def test_save_and_load(trained: Tokenizer, wordpiece: Tokenizer, tmp_path: Path) -> None:
    for name, tokenizer in (("a", trained), ("b", wordpiece.with_packing("joined"))):
        tokenizer.save(tmp_path / name)
        again = Tokenizer.load(tmp_path / name)
        assert (again.fingerprint, again.packing, again.specials) == (
            tokenizer.fingerprint,
            tokenizer.packing,
            tokenizer.specials,
        )
        assert again.encode(HARD) == tokenizer.encode(HARD)
        assert from_pretrained(str(tmp_path / name)).fingerprint == tokenizer.fingerprint


def test_saved_folder_is_readable_by_transformers(trained: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    trained.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = texts(1)[0]
    assert theirs.encode(text, add_special_tokens=False) == trained.encode([text])[0]
    assert theirs.mask_token_id == trained.mask_id


def test_a_mask_token_is_added_where_there_is_none(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = from_pretrained(str(tmp_path))
    assert (tokenizer.end_id, tokenizer.separator_id, tokenizer.mask_id, tokenizer.pad_id) == (2, 2, 3, 4)
    assert tokenizer.vocab_size == 5


def test_an_unknown_name_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match="tokenizer 'no/such-tokenizer': neither a folder nor a name"):
        from_pretrained("no/such-tokenizer")


def test_load_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_reduced_bpe_is_the_bpe_trained_at_that_size(trained: Tokenizer) -> None:
    """Merges are learned greedily, so cutting on the same corpus must give back the smaller vocabulary."""
    corpus = texts(300)
    small = reduce_tokenizer(trained, corpus, 300)
    assert small.vocab_size == 300
    assert sum(map(len, small.encode(corpus))) <= 1.01 * sum(map(len, train_tokenizer(corpus, 300).encode(corpus)))
    for text, ids in zip(HARD, small.encode(HARD), strict=True):
        assert small.decode(ids) == text
    assert set(small.tokens()) <= set(trained.tokens())


def test_reduced_bpe_drops_what_another_corpus_does_not_use(trained: Tokenizer) -> None:
    small = reduce_tokenizer(trained, ["cat cat cat"], 262)
    assert [len(ids) for ids in small.encode(["cat", "dog"])] == [1, 3]


def test_reduced_wordpiece_keeps_specials_characters_and_the_useful(wordpiece: Tokenizer) -> None:
    corpus = ["The cat saw the house."] * 3 + ["a small dog"]
    seen = len(set("".join(corpus).lower().replace(" ", "")))
    small = reduce_tokenizer(wordpiece, corpus, 5 + 2 * seen + 4)
    kept = set(small.tokens())
    assert {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "saw", "house"} <= kept
    assert "zebra" not in kept
    assert "z" not in kept
    assert [small.pad_id, small.unknown_id, small.end_id, small.mask_id] == [0, 1, 3, 4]
    assert [small.decode(ids) for ids in small.encode(corpus)] == ["the cat saw the house."] * 3 + ["a small dog"]
    assert not any(small.unknown_id in ids for ids in small.encode(corpus))


def test_reduction_refuses_what_it_cannot_do(wordpiece: Tokenizer) -> None:
    with pytest.raises(ValueError, match="vocab_size 6: special tokens and characters seen alone need"):
        reduce_tokenizer(wordpiece, ["the cat"], 6)
    backend = tokenizers.Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="a"))
    word_level = wrap(backend.to_str(), Specials(mask="[MASK]", end="[SEP]", separator="[SEP]", pad="[PAD]"))
    with pytest.raises(ValueError, match="only WordPiece and byte-level BPE can be reduced, this is WordLevel"):
        reduce_tokenizer(word_level, ["a"], 10)
    with pytest.raises(ValueError, match="train_tokenizer 100: the bytes"):
        train_tokenizer(["a"], 100)


@pytest.mark.parts
def test_bert_uncased_reduced(parts: Callable[[str], Path]) -> None:
    """The paper's vocabulary cut to 2,000 rows spells what the whole one spells."""
    folder = next(parts("minilm").rglob("tokenizer.json")).parent
    bert = from_pretrained(str(folder))
    assert (bert.vocab_size, bert.mask_id, bert.end_id, bert.pad_id) == (30_522, 103, 102, 0)
    corpus = [*texts(50), "Einstein's electrodynamics of 1905 (in \u00dcberlingen)."]
    small = reduce_tokenizer(bert, corpus, 2_000)
    assert (small.vocab_size, small.pad_id, small.mask_id) == (2_000, 0, 4)
    assert [small.decode(ids) for ids in small.encode(corpus)] == [bert.decode(ids) for ids in bert.encode(corpus)]
