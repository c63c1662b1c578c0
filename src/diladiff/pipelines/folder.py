"""Model folders: config.json, model.safetensors, tokenizer files, README.md and a manifest that is verified on loading.

The manifest holds every file's sha256, so a flipped bit is a ValueError that names the file; only the model card may
be edited. Nothing is unpickled.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch

from diladiff import files
from diladiff.config import from_dict, to_dict
from diladiff.data.tokenizer import Tokenizer
from diladiff.models.token_transformer import TokenTransformer, TokenTransformerConfig

SCHEMA = 1
KIND = "masked_lm"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CARD = "README.md"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Loaded(NamedTuple):
    """What a model folder holds: the network on the CPU as stored, its tokenizer, the sha256 of its weights."""

    model: TokenTransformer
    tokenizer: Tokenizer
    weights_sha256: str


def find(source: str | Path, *, revision: str | None = None) -> Path:
    """The model folder that a path, a run folder or a name on the Hugging Face hub means."""
    path = Path(source)
    if (path / "model" / CONFIG).is_file():
        return path / "model"
    if (path / WEIGHTS).is_file() or (path / files.MANIFEST).is_file():
        return path
    if path.exists():
        what = "is a file" if path.is_file() else f"holds neither {WEIGHTS} nor a finished run's model/"
        raise ValueError(f"{path} {what}: give a model folder, a run folder or a name on the Hugging Face hub")
    if isinstance(source, Path) or not HUB_NAME.fullmatch(source):
        raise ValueError(f"{path} does not exist: give a model folder, a run folder or a name on the Hugging Face hub")
    return _download(source, revision)


def read(folder: Path) -> Loaded:
    """Verify a model folder and load it. Its README.md may be edited: people and the hub do."""
    files.verify(folder, ignore=(CARD,))
    saved = files.read_json(folder / CONFIG)
    if not isinstance(saved, dict) or saved.get("kind") != KIND or saved.get("schema") != SCHEMA:
        kind, schema = (saved.get("kind"), saved.get("schema")) if isinstance(saved, dict) else (None, None)
        raise ValueError(f"{folder / CONFIG} is of kind {kind!r}, schema {schema!r}; this reads {KIND!r}, {SCHEMA}")
    config = from_dict(TokenTransformerConfig, saved.get("model"), "model")
    tokenizer = Tokenizer.load(folder)
    check_tokenizer(config, tokenizer)
    expected = saved.get("tokenizer", {}).get("fingerprint")
    if tokenizer.fingerprint != expected:
        raise ValueError(
            f"{folder} holds the tokenizer {tokenizer.fingerprint} and a model made with {expected}: "
            "put the model's own tokenizer files back"
        )
    model = _build(config, safetensors.torch.load_file(folder / WEIGHTS), folder / WEIGHTS)
    return Loaded(model, tokenizer, files.read_json(folder / files.MANIFEST)["files"][WEIGHTS]["sha256"])


def write(
    path: Path | str, model: TokenTransformer, tokenizer: Tokenizer, *, dtype: torch.dtype | None, card: str | None
) -> None:
    """Write a model folder in one step; an older model folder of that name is replaced once the new one is whole."""
    path = Path(path)
    check_tokenizer(model.config, tokenizer)
    ours = (path / files.MANIFEST).is_file() and (path / WEIGHTS).is_file()
    empty = path.is_dir() and not any(path.iterdir())
    if path.exists() and not ours and not empty:
        raise ValueError(f"{path} exists and is not a model folder: choose another path or remove it")
    weights = serialise(model, dtype)
    config = {
        "schema": SCHEMA,
        "kind": KIND,
        "model": to_dict(model.config),
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
        "dtype": dtype_name(dtype or next(model.parameters()).dtype),
    }
    with files.fresh_folder(path) as folder:
        files.write_atomic(folder / CONFIG, json.dumps(config, indent=1) + "\n")
        files.write_atomic(folder / WEIGHTS, weights)
        tokenizer.save(folder)
        files.write_atomic(folder / CARD, card if card is not None else minimal_card(path.name, model))


def serialise(model: TokenTransformer, dtype: torch.dtype | None = None) -> bytes:
    """The bytes of model.safetensors."""
    state = {name: value.detach().cpu().to(dtype or value.dtype) for name, value in model.state_dict().items()}
    return safetensors.torch.save({name: value.contiguous() for name, value in state.items()})


def check_tokenizer(config: TokenTransformerConfig, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer whose ids do not fit the network."""
    ours = {"vocab_size": tokenizer.vocab_size, "mask_id": tokenizer.mask_id}
    for name, value in ours.items():
        if getattr(config, name) != value:
            wanted = getattr(config, name)
            raise ValueError(f"tokenizer: its {name} is {value}, the model's {wanted}; give the model's own tokenizer")


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def minimal_card(name: str, model: TokenTransformer) -> str:
    """A model card that says what the folder itself shows."""
    config = model.config
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"""---
library_name: diladiff
license: apache-2.0
pipeline_tag: text-generation
tags: [masked-diffusion, text]
---

# {name}

A masked diffusion language model: {config.layers} layers, {config.width} wide, {config.length} tokens, a vocabulary of
{config.vocab_size}, {count / 1e6:.1f}M parameters.

```python
from diladiff import MaskedLM

lm = MaskedLM.from_pretrained("{name}")
print(lm.generate(num=1, steps=64, seed=0).texts[0])
```
"""


def _build(config: TokenTransformerConfig, state: dict[str, torch.Tensor], path: Path) -> TokenTransformer:
    """A network around stored weights; nothing is initialised first."""
    with torch.device("meta"):
        model = TokenTransformer(config)
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    for name in sorted(wanted.keys() | state.keys()):
        if name not in state:
            raise ValueError(f"{path} has no tensor {name}, which {CONFIG} asks for: they do not belong together")
        if name not in wanted:
            raise ValueError(f"{path} has a tensor {name} that {CONFIG} does not know: they do not belong together")
        if state[name].shape != wanted[name]:
            found, asked = tuple(state[name].shape), tuple(wanted[name])
            raise ValueError(
                f"{path}: {name} has shape {found}, {CONFIG} asks for {asked}: they do not belong together"
            )
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def _download(name: str, revision: str | None) -> Path:
    """A snapshot of a hub repository in huggingface_hub's own cache."""
    import huggingface_hub  # slow to import, and needed here alone
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{name!r} is neither a folder nor a model that the hub gave ({reason})") from None
