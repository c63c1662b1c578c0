"""Text to ids and back: a thin wrapper around `tokenizers` that knows the mask, the end, the separator and the padding.

Text is always text: a document that spells `[MASK]` is encoded letter by letter, never as the special token.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, SupportsIndex, final

import tokenizers

from diladiff import files

SCHEMA = 1
BREAK = "\n\n"
"""What stands between the documents of a decoded block that holds several."""

Packing = Literal["joined", "document"]


@dataclass(frozen=True, kw_only=True)
class Specials:
    """The special tokens by name: mask, end of a document, separator between documents, padding, unknown."""

    mask: str
    end: str
    separator: str
    pad: str
    unknown: str | None = None


@final
class Tokenizer:
    """A tokenizer with its special tokens; `packing` says whether decoding stops at the end of the first document."""

    def __init__(self, backend_json: str, specials: Specials, packing: Packing = "document") -> None:
        self._json = backend_json
        self._backend = tokenizers.Tokenizer.from_str(backend_json)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self.specials = specials
        self.packing: Packing = packing
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.mask_id = self._id(specials.mask)
        self.end_id = self._id(specials.end)
        self.separator_id = self._id(specials.separator)
        self.pad_id = self._id(specials.pad)
        self.unknown_id = self._id(specials.unknown) if specials.unknown else None

    @classmethod
    def load(cls, path: Path | str) -> "Tokenizer":
        """Read what `save` wrote."""
        folder = Path(path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (folder / name).is_file():
                raise ValueError(f"{folder} holds no {name}: expected a folder that diladiff wrote")
        saved = files.read_json(folder / "tokenizer_config.json")
        ours = saved.get("diladiff") if isinstance(saved, dict) else None
        if not isinstance(ours, dict) or ours.get("schema") != SCHEMA:
            raise ValueError(f"{folder / 'tokenizer_config.json'} was not written by diladiff with schema {SCHEMA}")
        specials = Specials(
            mask=saved["mask_token"],
            end=saved["eos_token"],
            separator=saved["sep_token"],
            pad=saved["pad_token"],
            unknown=saved["unk_token"],
        )
        files.read_json(folder / "tokenizer.json")
        return cls((folder / "tokenizer.json").read_text(encoding="utf-8"), specials, ours["packing"])

    def save(self, path: Path | str) -> None:
        """Write tokenizer.json and tokenizer_config.json into a folder; transformers reads them too."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "mask_token": self.specials.mask,
            "eos_token": self.specials.end,
            "sep_token": self.specials.separator,
            "pad_token": self.specials.pad,
            "unk_token": self.specials.unknown,
            "diladiff": {"schema": SCHEMA, "packing": self.packing},
        }
        files.write_atomic(Path(path) / "tokenizer.json", self._json)
        files.write_atomic(Path(path) / "tokenizer_config.json", json.dumps(config, indent=1) + "\n")

    @property
    def fingerprint(self) -> str:
        """16 characters that change with anything that changes an id; packing changes none."""
        ids = [self.mask_id, self.end_id, self.separator_id, self.pad_id, self.unknown_id]
        canonical = json.dumps([json.loads(self._json), ids], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def backend_json(self) -> str:
        """The text of tokenizer.json."""
        return self._json

    def with_packing(self, packing: Packing) -> "Tokenizer":
        """The same tokenizer for blocks of another packing."""
        return Tokenizer(self._json, self.specials, packing)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without any special token."""
        return [found.ids for found in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The text of ids: up to the first end token, or, for joined documents, all of them with blank lines between.

        Special tokens leave no trace, so a half-revealed sequence shows what is known.
        """
        parts: list[list[int]] = [[]]
        for index in ids:
            if self.packing == "document" and int(index) == self.end_id:
                break
            if self.packing == "joined" and int(index) == self.separator_id:
                parts.append([])
            else:
                parts[-1].append(int(index))
        texts = [self._backend.decode(part, skip_special_tokens=True) for part in parts]
        return BREAK.join(text for text in texts if text)

    def tokens(self) -> list[str]:
        """Every token's own string, in the order of ids (empty where a vocabulary has a gap)."""
        names = {index: name for name, index in self._backend.get_vocab(with_added_tokens=True).items()}
        return [names.get(index, "") for index in range(self.vocab_size)]

    def _id(self, token: str) -> int:
        index = self._backend.token_to_id(token)
        if index is None:
            raise ValueError(f"the tokenizer has no token {token!r}: its files do not belong together")
        return index


def from_pretrained(name: str) -> Tokenizer:
    """A tokenizer from a folder of diladiff's, a folder of transformers' or a name on the Hugging Face hub.

    Where it lacks a mask or padding token, `[MASK]` or `[PAD]` is added behind its vocabulary.
    """
    path = Path(name)
    if (path / "tokenizer_config.json").is_file() and "diladiff" in files.read_json(path / "tokenizer_config.json"):
        return Tokenizer.load(path)
    from transformers import AutoTokenizer  # slow to import, and needed here alone

    try:
        found: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"tokenizer {name!r}: neither a folder nor a name that can be fetched ({reason})") from None
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"tokenizer {name!r}: only fast tokenizers (with a tokenizer.json) can be used")
    end = found.eos_token or found.sep_token or "[SEP]"
    specials = Specials(
        mask=found.mask_token or "[MASK]",
        end=end,
        separator=found.sep_token or end,
        pad=found.pad_token or "[PAD]",
        unknown=found.unk_token if found.unk_token != end else None,
    )
    return wrap(backend.to_str(), specials)


def wrap(backend_json: str, specials: Specials) -> Tokenizer:
    """A `tokenizers` JSON as a Tokenizer; special tokens that it lacks are added behind its vocabulary."""
    backend = tokenizers.Tokenizer.from_str(backend_json)
    backend.no_truncation()
    backend.no_padding()
    wanted = [specials.mask, specials.end, specials.separator, specials.pad]
    missing = [token for token in dict.fromkeys(wanted) if backend.token_to_id(token) is None]
    backend.add_special_tokens(missing)
    unknown = specials.unknown if specials.unknown and backend.token_to_id(specials.unknown) is not None else None
    return Tokenizer(backend.to_str(), replace(specials, unknown=unknown))
