"""Frozen readers of text, whose hidden states are the features that an auto-encoder makes latents of.

A pre-trained Hugging Face encoder reads our tokens (mapped by their strings) or the decoded text (with its own
tokenizer), or our own token transformer reads its tokens at t = 0. Texts longer than a reader's window are read window
by window, with nothing added to any. A reader is known by its name and its weights' hash and is in no checkpoint.
"""

import copy
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from diladiff import files
from diladiff.models.token_transformer import TokenTransformer

POSITIONS_MULTIPLE = 64
"""Decoded texts are padded to a multiple of this, so that what reads the features meets few shapes."""

ROLES = {"pad": "pad_token", "mask": "mask_token", "separator": "sep_token", "end": "sep_token", "unknown": "unk_token"}
"""Our special tokens by role, and what transformers calls the encoder's own."""


class Features(NamedTuple):
    """Hidden states, zero where there is no text, and where there is text (None: everywhere)."""

    features_BFD: Tensor
    mask_BF: Tensor | None


class Known(NamedTuple):
    """A pre-trained encoder that `make parts` fetches: its name on the hub and its weights' sha256."""

    hub: str
    sha256: str


KNOWN = {
    "minilm": Known(
        hub="sentence-transformers/all-MiniLM-L6-v2",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    )
}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What a reader has to know of our tokens; a tokenizer has all of it."""

    tokens: Sequence[str]
    """Every token's string, in the order of ids; empty where there is none."""
    specials: Mapping[str, str | None]
    """Role (mask, end, separator, pad, unknown) -> token."""
    decode: Callable[[list[int]], str]
    pad_id: int | None
    """None where blocks hold no padding: then nothing is masked, which is faster."""


Reader = Callable[[Tensor], tuple[Tensor, Tensor | None]]
Network = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class PretrainedEncoderConfig:
    """An encoder in the form of Hugging Face's: a folder, a part that `make parts` fetched, or a name on the hub."""

    encoder: str = "bert-base-uncased"
    reads: Literal["tokens", "text"] = "tokens"
    """tokens: ours, each of which the encoder's vocabulary must hold; text: decoded, with the encoder's tokenizer."""
    sha256: str | None = None
    """What its weights must be (model.safetensors); None: those written here for a part, any for others."""
    revision: str | None = None
    """Which of the hub's."""
    window: int | None = None
    """Positions read at once; None: as many as the encoder can."""
    layer: int | None = None
    """Whose output to take, 0 being the embeddings'; None: the last."""
    name: Literal["pretrained"] = "pretrained"

    def __post_init__(self) -> None:
        if self.reads not in ("tokens", "text"):
            raise ValueError(f"reads is {self.reads!r}: give 'tokens' or 'text'")
        if self.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ValueError(f"sha256 is {self.sha256!r}: give 64 hexadecimal digits")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}: give at least 1")
        if self.layer is not None and self.layer < 0:
            raise ValueError(f"layer is {self.layer}: give 0 (the embeddings) or more")

    def build(self, vocabulary: Vocabulary, *, device: torch.device | str, dtype: torch.dtype) -> "TextEncoder":
        """Find the encoder, check its hash and load it."""
        folder = find(self.encoder, revision=self.revision)
        sha256 = _check_hash(self, folder)
        model, tokenizer = _load(folder, device, dtype)
        window = _longest(model, tokenizer)
        if self.window is not None and self.window > window:
            raise ValueError(f"window is {self.window}: {self.encoder} reads at most {window} positions at once")
        layers = model.config.num_hidden_layers
        if self.layer is not None and self.layer > layers:
            raise ValueError(f"layer is {self.layer}: {self.encoder} has {layers}")
        if self.reads == "tokens":
            read = _aligned(vocabulary, tokenizer, self.encoder, device)
        else:
            read = _decoded(vocabulary, tokenizer, self.encoder, device)
        return TextEncoder(
            network=_hidden_states(model, self.layer),
            read=read,
            device=device,
            window=self.window or window,
            width=model.config.hidden_size,
            name=folder.resolve().name if folder == Path(self.encoder).expanduser() else self.encoder,
            sha256=sha256,
        )


@dataclass(frozen=True, kw_only=True)
class SelfEncoderConfig:
    """The token transformer that an auto-encoder's decoder starts from, reading its own tokens at t = 0."""

    name: Literal["self"] = "self"

    def build(
        self, model: TokenTransformer, *, pad_id: int | None, device: torch.device | str, dtype: torch.dtype
    ) -> "TextEncoder":
        """A frozen copy of the model as a reader; to it padding is a token like any other, only marked in the mask."""
        reader = copy.deepcopy(model).to(device, dtype).eval().requires_grad_(False)

        def network(ids_BF: Tensor, mask_BF: Tensor | None) -> Tensor:
            return reader.trunk(ids_BF, torch.zeros(len(ids_BF), device=ids_BF.device))

        def read(tokens_BL: Tensor) -> tuple[Tensor, Tensor | None]:
            tokens_BL = tokens_BL.to(device)
            return tokens_BL, None if pad_id is None else tokens_BL != pad_id

        return TextEncoder(
            network=network,
            read=read,
            device=device,
            window=model.config.length,
            width=model.config.width,
            name=self.name,
            sha256=weights_sha256(model),
        )


TextEncoderConfig = PretrainedEncoderConfig | SelfEncoderConfig


@final
class TextEncoder:
    """Tokens in, features out, always in eval mode, in the dtype it was built with, and without a gradient.

    It is no module, so that whoever holds it has none of its weights among the own.
    """

    def __init__(
        self,
        *,
        network: Network,
        read: Reader,
        device: torch.device | str,
        window: int,
        width: int,
        name: str,
        sha256: str,
    ) -> None:
        self._network = network
        self._read = read
        self.device = torch.device(device)
        self.window = window
        self.width = width
        self.name = name
        self.sha256 = sha256

    def features(self, tokens_BL: Int[Tensor, "B L"]) -> Features:
        """Hidden states of F positions on the encoder's device: the tokens' own L, or what the decoded texts need."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            ids_BF, mask_BF = self._read(tokens_BL)
            windows = []
            for start in range(0, ids_BF.shape[1], self.window):
                part = slice(start, start + self.window)
                windows.append(self._network(ids_BF[:, part], None if mask_BF is None else mask_BF[:, part]))
            features_BFD = torch.cat(windows, dim=1)
            if mask_BF is not None:  # a window without any text may hold NaN
                features_BFD = features_BFD.masked_fill(~mask_BF[..., None], 0.0)
        return Features(features_BFD, mask_BF)


def parts_folder() -> Path:
    """Where `make parts` puts what it fetches."""
    return Path(os.environ.get("DILADIFF_PARTS") or Path.home() / ".cache" / "diladiff" / "parts")


def find(encoder: str, *, revision: str | None = None) -> Path:
    """The encoder's folder: the one of that path, else the part of that name, else a snapshot from the hub."""
    path = Path(encoder).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or encoder.startswith((".", "~")):
        raise ValueError(f"text encoder {encoder}: no such folder; give one that holds config.json and safetensors")
    if (parts_folder() / encoder).is_dir():
        return parts_folder() / encoder
    return _download(encoder, revision)


def weights_sha256(model: nn.Module) -> str:
    """A hash of a module's parameters and buffers: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _download(encoder: str, revision: str | None) -> Path:
    import huggingface_hub  # slow to import, and needed here alone
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name = KNOWN[encoder].hub if encoder in KNOWN else encoder
    try:
        patterns = ["*.json", "*.txt", "*.model", "*.safetensors"]
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        remedy = "run `make parts`" if encoder in KNOWN else f"run `hf download {name}` on a network or give its folder"
        raise ValueError(
            f"text encoder {encoder}: no folder, not in {parts_folder()}, nor given by the hub ({reason}): {remedy}"
        ) from None


def _check_hash(config: PretrainedEncoderConfig, folder: Path) -> str:
    """The sha256 of the encoder's one file of weights, or of the hashes of several."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"text encoder {config.encoder}: {folder} holds no safetensors, and no other weights are read")
    hashes = [files.sha256(path) for path in paths]
    found = hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    known = KNOWN.get(config.encoder)
    wanted = config.sha256 or (known.sha256 if known else found)
    if found != wanted:
        raise ValueError(
            f"text encoder {config.encoder}: the weights in {folder} have the sha256 {found} instead of {wanted}: "
            "put the right ones there, or set sha256 to these"
        )
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing progress bars and reporting on poolers."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _load(folder: Path, device: torch.device | str, dtype: torch.dtype) -> tuple[Any, Any]:
    """The encoder, frozen, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer  # slow to import, and needed here alone

    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model, report = AutoModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype=dtype, output_loading_info=True
            )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"text encoder: {folder} is not one that transformers can load ({reason})") from None
    # transformers draws at random what a file lacks; nothing reads the pooler.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ValueError(f"text encoder: the weights in {folder} lack {missing[0]} ({len(missing)} in all)")
    if model.config.is_encoder_decoder:
        raise ValueError(f"text encoder: {folder} holds an encoder and a decoder, give an encoder alone")
    return model.to(device).eval().requires_grad_(False), tokenizer


def _longest(model: Any, tokenizer: Any) -> int:
    """How many positions the encoder reads at once; some number theirs from the padding's id onward."""
    most = int(model.config.max_position_embeddings)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            most = module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return int(min(most, tokenizer.model_max_length))


def _hidden_states(model: Any, layer: int | None) -> Network:
    def network(ids_BF: Tensor, mask_BF: Tensor | None) -> Tensor:
        if layer is None:
            return model(input_ids=ids_BF, attention_mask=mask_BF).last_hidden_state
        return model(input_ids=ids_BF, attention_mask=mask_BF, output_hidden_states=True).hidden_states[layer]

    return network


def _aligned(vocabulary: Vocabulary, tokenizer: Any, encoder: str, device: torch.device | str) -> Reader:
    """Read our tokens, each as the encoder's of the same role or string."""
    theirs: dict[str, int] = tokenizer.get_vocab()
    named = {token: getattr(tokenizer, ROLES[role]) for role, token in vocabulary.specials.items() if token}
    strings = [named.get(token) or token for token in vocabulary.tokens]
    never = {"", vocabulary.specials.get("mask")}  # no clean text holds a mask, so any id will do for it
    pairs = zip(strings, vocabulary.tokens, strict=True)
    missing = [token for string, token in pairs if string not in theirs and token not in never]
    if missing:
        raise ValueError(
            f"text encoder {encoder} lacks {len(missing)} of the vocabulary's {len(strings)} tokens "
            f"({_some(missing)}): let it read text instead (reads='text')"
        )
    table_V = torch.tensor([theirs.get(string, 0) for string in strings], device=device)

    def read(tokens_BL: Tensor) -> tuple[Tensor, Tensor | None]:
        tokens_BL = tokens_BL.to(device)
        return table_V[tokens_BL], None if vocabulary.pad_id is None else tokens_BL != vocabulary.pad_id

    return read


def _decoded(vocabulary: Vocabulary, tokenizer: Any, encoder: str, device: torch.device | str) -> Reader:
    """Read the decoded text with the encoder's own tokenizer, without special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"text encoder {encoder}: only fast tokenizers (with a tokenizer.json) can be used")
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    pad_id = int(tokenizer.pad_token_id or 0)

    def read(tokens_BL: Tensor) -> tuple[Tensor, Tensor | None]:
        texts = [vocabulary.decode(ids) for ids in tokens_BL.tolist()]
        found = backend.encode_batch_fast(texts, add_special_tokens=False)
        rows = [torch.tensor(row.ids, dtype=torch.long) for row in found]
        lengths_B = torch.tensor([len(row) for row in rows])
        longest = max(1, int(lengths_B.max()))
        count = -(-longest // POSITIONS_MULTIPLE) * POSITIONS_MULTIPLE
        ids_BF = nn.functional.pad(pad_sequence(rows, batch_first=True), (0, count - int(lengths_B.max())))
        mask_BF = torch.arange(count) < lengths_B[:, None]
        return ids_BF.masked_fill(~mask_BF, pad_id).to(device), mask_BF.to(device)

    return read


def _some(tokens: Iterable[str]) -> str:
    first = list(tokens)
    return ", ".join(map(repr, first[:3])) + (", ..." if len(first) > 3 else "")
