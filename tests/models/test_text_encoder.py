"""Text encoders: ids by string and by role, windows, padding, hashes, where they are looked for, and MiniLM itself."""

import ast
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor, nn

from diladiff import files
from diladiff.config import from_dict, to_dict
from diladiff.data.tokenizer import Tokenizer, from_pretrained
from diladiff.data.vocabulary import reduce_tokenizer, train_tokenizer
from diladiff.models import text_encoder
from diladiff.models.text_encoder import PretrainedEncoderConfig, SelfEncoderConfig, TextEncoder, Vocabulary
from diladiff.models.token_transformer import TokenTransformer, TokenTransformerConfig

WORDS = ["the", "cat", "dog", "sat", "on", "a", "mat", "##s", "##ting", "[", "]", "sep"]
BERT_TOKENS = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
MPNET_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", *BERT_TOKENS, "<mask>"]
OURS = ["[PAD]", "[UNK]", "[SEP]", "[MASK]", "mat", "the", "cat", "##s", "sat", "on"]
PAD, SEP, MAT, THE, CAT, PLURAL, SAT, ON = 0, 2, 4, 5, 6, 7, 8, 9
SPECIALS = {"pad": "[PAD]", "unknown": "[UNK]", "separator": "[SEP]", "end": "[SEP]", "mask": "[MASK]"}
POSITIONS = 8


def decode(ids: list[int]) -> str:
    """The words of ids, up to the end, their pieces joined."""
    words = [OURS[i] for i in ids[: ids.index(SEP) if SEP in ids else None] if i != PAD]
    return " ".join(words).replace(" ##", "")


VOCABULARY = Vocabulary(tokens=OURS, specials=SPECIALS, decode=decode, pad_id=PAD)


def save(folder: Path, model: Any, tokens: list[str], specials: dict[str, str]) -> Path:
    """A folder with a random encoder and a WordPiece tokenizer of the given tokens."""
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token=specials["unk_token"]))
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=512)
    fast.add_special_tokens(specials)
    backend.enable_padding(length=30)  # as MiniLM's file asks for
    backend.enable_truncation(3)
    fast.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT of eight positions."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(BERT_TOKENS), max_position_embeddings=POSITIONS, initializer_range=0.5, **shape)
    specials = {"pad_token": "[PAD]", "unk_token": "[UNK]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return save(tmp_path_factory.mktemp("tiny-bert"), BertModel(config), BERT_TOKENS, specials)


@pytest.fixture(scope="module")
def mpnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MPNet: BERT's tokens behind special ones of its own, positions numbered behind the padding's id."""
    from transformers import MPNetConfig, MPNetModel

    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = MPNetConfig(
        vocab_size=len(MPNET_TOKENS), max_position_embeddings=POSITIONS + 2, initializer_range=0.5, **shape
    )
    specials = {"pad_token": "<pad>", "unk_token": "<unk>", "sep_token": "</s>", "mask_token": "<mask>"}
    return save(tmp_path_factory.mktemp("tiny-mpnet"), MPNetModel(config), MPNET_TOKENS, specials)


def reads(folder: Path | str, vocabulary: Vocabulary = VOCABULARY, **settings: Any) -> TextEncoder:
    """The encoder of a folder in float32."""
    config = PretrainedEncoderConfig(encoder=str(folder), **settings)
    return config.build(vocabulary, device="cpu", dtype=torch.float32)


def straight(folder: Path, words: list[str]) -> Tensor:
    """What transformers itself makes of tokens in the encoder's own vocabulary."""
    from transformers import AutoModel, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(words)
    with torch.no_grad():
        return AutoModel.from_pretrained(folder).eval()(torch.tensor([ids])).last_hidden_state[0]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_ids_are_mapped_by_the_tokens_string(bert: Path) -> None:
    encoder = reads(bert)
    found = encoder.features(torch.tensor([[THE, CAT, PLURAL, SEP, MAT]]))
    assert found.features_BFD.shape == (1, 5, encoder.width) == (1, 5, 8)
    close(found.features_BFD[0], straight(bert, ["the", "cat", "##s", "[SEP]", "mat"]))
    assert found.mask_BF is not None
    assert found.mask_BF.all()


def test_special_tokens_are_mapped_by_their_role(mpnet: Path) -> None:
    found = reads(mpnet).features(torch.tensor([[THE, CAT, SEP, PAD, PAD]])).features_BFD
    close(found[0, :3], straight(mpnet, ["the", "cat", "</s>"]))  # and not its never-trained token "[SEP]"
    assert (found[0, 3:] == 0).all()


def test_a_vocabulary_that_is_not_the_encoders_is_refused(bert: Path) -> None:
    trained = replace(VOCABULARY, tokens=[*OURS, "\u0120the", "xyz"])
    with pytest.raises(ValueError, match=r"lacks 2 of the vocabulary's 12 tokens \(.*'xyz'\): .*reads='text'"):
        reads(bert, trained)
    reads(bert, replace(VOCABULARY, tokens=[*OURS, ""]))  # a gap in the ids is no token
    unmasked = replace(VOCABULARY, tokens=[*OURS, "[HIDDEN]"], specials=SPECIALS | {"mask": "[HIDDEN]"})
    reads(bert, unmasked)


def test_long_texts_are_read_in_windows_with_nothing_added(bert: Path, mpnet: Path) -> None:
    ids = torch.randint(4, 10, (1, 19), generator=torch.Generator().manual_seed(0))
    words = [OURS[i] for i in ids[0].tolist()]
    for folder, settings, window in ((bert, {}, 8), (mpnet, {}, 8), (bert, {"window": 5}, 5)):
        encoder = reads(folder, **settings)
        assert encoder.window == window
        expected = torch.cat([straight(folder, words[i : i + window]) for i in range(0, 19, window)])
        close(encoder.features(ids).features_BFD[0], expected)
    with pytest.raises(ValueError, match=r"window is 9: .* reads at most 8 positions"):
        reads(bert, window=9)


def test_padding_is_masked_and_a_window_of_padding_alone_is_zero(bert: Path) -> None:
    encoder = reads(bert)
    text = [THE, CAT, SAT, SEP]
    found = encoder.features(torch.tensor([text + [PAD] * 14, [PAD] * 18, [ON] * 18]))
    close(found.features_BFD[0, :4], straight(bert, ["the", "cat", "sat", "[SEP]"]))
    assert (found.features_BFD[0, 4:] == 0).all()
    assert (found.features_BFD[1] == 0).all()
    assert found.mask_BF is not None
    assert found.mask_BF.sum(dim=1).tolist() == [4, 0, 18]
    unmasked = reads(bert, replace(VOCABULARY, pad_id=None)).features(torch.tensor([[*text, PAD, PAD]]))
    assert unmasked.mask_BF is None
    close(unmasked.features_BFD[0], straight(bert, ["the", "cat", "sat", "[SEP]", "[PAD]", "[PAD]"]))


def test_decoded_text_is_read_with_the_encoders_tokenizer(bert: Path) -> None:
    texts = {THE: "The dogs", CAT: "", SAT: "sat on [SEP] a mat sitting on the mat"}
    spoken = replace(VOCABULARY, tokens=["not", "theirs"], decode=lambda ids: texts[ids[0]])
    found = reads(bert, spoken, reads="text").features(torch.tensor([[THE, 0], [CAT, 0], [SAT, 0]]))
    assert found.features_BFD.shape == (3, 64, 8)
    assert found.mask_BF is not None
    close(found.features_BFD[0, :3], straight(bert, ["the", "dog", "##s"]))
    # spelt out, never the special token; no truncation
    pieces = ["sat", "on", "[", "sep", "]", "a", "mat", "[UNK]", "on", "the", "mat"]
    expected = torch.cat([straight(bert, pieces[:8]), straight(bert, pieces[8:])])
    close(found.features_BFD[2, :11], expected)
    assert found.mask_BF.sum(dim=1).tolist() == [3, 0, 11]
    assert (found.features_BFD[~found.mask_BF] == 0).all()


def test_another_layer(bert: Path) -> None:
    from transformers import AutoModel

    ids = torch.tensor([[THE, CAT]])
    theirs = torch.tensor([[BERT_TOKENS.index("the"), BERT_TOKENS.index("cat")]])
    with torch.no_grad():
        states = AutoModel.from_pretrained(bert).eval()(theirs, output_hidden_states=True).hidden_states
    for layer in range(3):
        close(reads(bert, layer=layer).features(ids).features_BFD, states[layer])
    with pytest.raises(ValueError, match=r"layer is 3: .* has 2"):
        reads(bert, layer=3)


TOKEN_MODEL = TokenTransformerConfig(
    vocab_size=10, mask_id=3, length=6, width=8, layers=1, heads=2, time_conditioning=True
)


def test_our_own_states_at_time_zero() -> None:
    torch.manual_seed(0)
    model = TokenTransformer(TOKEN_MODEL)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    encoder = SelfEncoderConfig().build(model, pad_id=PAD, device="cpu", dtype=torch.float32)
    ids = torch.tensor([[THE, CAT, SAT, ON, MAT, SEP, THE, PAD]])
    model.eval()
    with torch.no_grad():
        expected = torch.cat([model.trunk(part, torch.zeros(1)) for part in (ids[:, :6], ids[:, 6:])], dim=1)
    expected[:, 7] = 0
    close(encoder.features(ids).features_BFD, expected)
    assert (encoder.width, encoder.window, encoder.name) == (8, 6, "self")
    nn.init.zeros_(model.layers[0].mlp.inner.weight)  # the decoder learns on, the encoder stays
    close(encoder.features(ids).features_BFD, expected)
    assert (
        SelfEncoderConfig().build(model, pad_id=None, device="cpu", dtype=torch.float32).features(ids).mask_BF is None
    )


def test_our_own_weights_hash_changes_with_any_weight() -> None:
    model = TokenTransformer(TOKEN_MODEL)
    first = text_encoder.weights_sha256(model)
    assert SelfEncoderConfig().build(model, pad_id=0, device="cpu", dtype=torch.bfloat16).sha256 == first
    with torch.no_grad():
        model.output.bias[5] += 1e-6
    assert text_encoder.weights_sha256(model) != first


@pytest.mark.parametrize("source", ["pretrained", "self"])
def test_frozen_in_no_state_dict_and_deaf_to_autocast(bert: Path, source: str) -> None:
    class Holder(nn.Module):
        def __init__(self, encoder: TextEncoder):
            super().__init__()
            self.encoder = encoder
            self.own = nn.Linear(2, 2)

    for dtype in (torch.float32, torch.bfloat16):
        if source == "pretrained":
            encoder = PretrainedEncoderConfig(encoder=str(bert)).build(VOCABULARY, device="cpu", dtype=dtype)
        else:
            model = TokenTransformer(TOKEN_MODEL)
            encoder = SelfEncoderConfig().build(model, pad_id=PAD, device="cpu", dtype=dtype)
        holder = Holder(encoder).train()
        assert set(holder.state_dict()) == {"own.weight", "own.bias"}
        assert len(list(holder.parameters())) == 2
        ids = torch.tensor([[THE, CAT, SAT]])
        plain = holder.encoder.features(ids).features_BFD
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = holder.encoder.features(ids).features_BFD
        torch.testing.assert_close(cast, plain, atol=0, rtol=0)
        assert plain.dtype == dtype
        assert not plain.requires_grad
        assert not plain.is_inference()  # so that a network may learn from it


def test_the_weights_hash_is_checked(bert: Path, tmp_path: Path) -> None:
    own = files.sha256(bert / "model.safetensors")
    encoder = reads(bert, sha256=own)
    assert (encoder.sha256, encoder.name) == (own, bert.name)
    changed = shutil.copytree(bert, tmp_path / "changed")
    weights = bytearray((changed / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (changed / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=f"instead of {own}"):
        reads(changed, sha256=own)
    assert reads(changed).sha256 != own


def test_several_files_have_one_hash(bert: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    folder = shutil.copytree(bert, tmp_path / "sharded")
    (folder / "model.safetensors").unlink()
    AutoModel.from_pretrained(bert).save_pretrained(folder, max_shard_size="1KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    ids = torch.tensor([[THE, CAT]])
    encoder = reads(folder)
    close(encoder.features(ids).features_BFD, reads(bert).features(ids).features_BFD)
    (folder / sorted(folder.glob("*.safetensors"))[0].name).touch()
    assert reads(folder).sha256 == encoder.sha256 != reads(bert).sha256


def test_folders_that_hold_no_encoder_are_refused(bert: Path, tmp_path: Path) -> None:
    import safetensors.torch

    folder = shutil.copytree(bert, tmp_path / "broken")
    state = safetensors.torch.load_file(folder / "model.safetensors")
    kept = {name: value for name, value in state.items() if "layer.1.output" not in name}
    safetensors.torch.save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack encoder\.layer\.1\.output"):
        reads(folder)
    (folder / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(ValueError, match="is not one that transformers can load"):
        reads(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds no safetensors, and no other weights are read"):
        reads(folder)


def test_where_an_encoder_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def snapshot(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert not any("bin" in pattern or "py" in pattern for pattern in allow_patterns)
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setenv("DILADIFF_PARTS", str(tmp_path / "parts"))
    monkeypatch.chdir(tmp_path)
    assert text_encoder.find("minilm") == tmp_path / "hub"
    assert text_encoder.find("some/encoder", revision="abc") == tmp_path / "hub"
    assert asked == [("sentence-transformers/all-MiniLM-L6-v2", None), ("some/encoder", "abc")]
    for name in ("minilm", "some/encoder"):
        (tmp_path / "parts" / name).mkdir(parents=True)
        assert text_encoder.find(name) == tmp_path / "parts" / name
    (tmp_path / "minilm").mkdir()
    assert text_encoder.find("minilm") == Path("minilm")
    assert len(asked) == 2
    with pytest.raises(ValueError, match="no such folder"):
        text_encoder.find("./nowhere")


def test_one_line_says_how_to_get_an_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILADIFF_PARTS", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name, remedy in (("minilm", "run `make parts`"), ("no/encoder", "run `hf download no/encoder` .* its folder")):
        with pytest.raises(ValueError, match=f"^text encoder {name}: .*{remedy}$") as caught:
            reads(name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"sha256": "abc"}, "sha256 is 'abc'"), ({"window": 0}, "window is 0"), ({"layer": -1}, "layer is -1")],
)
def test_impossible_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PretrainedEncoderConfig(**settings)


def test_configurations_survive_json() -> None:
    for config in (PretrainedEncoderConfig(encoder="minilm", reads="text", layer=5), SelfEncoderConfig()):
        assert from_dict(type(config), to_dict(config)) == config
    with pytest.raises((ValueError, TypeError), match="ids"):  # a TypeError where annotations are checked
        PretrainedEncoderConfig(reads="ids")


def test_transformers_is_imported_when_it_is_needed() -> None:
    tree = ast.parse(Path(text_encoder.__file__).read_text())
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.split(".")[0] in ("transformers", "huggingface_hub")]


def of(tokenizer: Tokenizer) -> Vocabulary:
    """What a reader has to know of a tokenizer of ours."""
    specials = asdict(tokenizer.specials)
    return Vocabulary(tokens=tokenizer.tokens(), specials=specials, decode=tokenizer.decode, pad_id=tokenizer.pad_id)


TEXTS = ["A small dog played in the garden.", "The puppy ran over the lawn.", "Interest rates rose again in March."]


@pytest.mark.parts
@pytest.mark.parametrize("reading", ["tokens", "text"])
def test_minilm_reads_a_reduced_and_a_trained_vocabulary(parts: Callable[[str], Path], reading: str) -> None:
    folder = parts("minilm")
    assert Path(os.environ.get("DILADIFF_PARTS", folder.parent)) == folder.parent
    if reading == "tokens":
        tokenizer = reduce_tokenizer(from_pretrained(str(folder)), TEXTS, 150)
    else:
        tokenizer = train_tokenizer(TEXTS, 280)
    encoder = reads("minilm", of(tokenizer), reads=reading)
    assert (encoder.width, encoder.window, encoder.name) == (384, 512, "minilm")
    assert encoder.sha256 == text_encoder.KNOWN["minilm"].sha256
    rows = [*tokenizer.encode(TEXTS)]
    longest = max(map(len, rows))
    found = encoder.features(torch.tensor([row + [tokenizer.pad_id] * (longest - len(row)) for row in rows]))
    assert found.mask_BF is not None
    assert found.mask_BF.sum(dim=1).tolist() == ([len(row) for row in rows] if reading == "tokens" else [8, 7, 7])
    means = found.features_BFD.sum(dim=1) / found.mask_BF.sum(dim=1, keepdim=True)
    likeness = nn.functional.cosine_similarity(means[:1], means[1:])
    assert likeness[0] > 0.4 > likeness[1]
