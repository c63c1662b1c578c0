"""The model card of a training run, written from what the run left on the disk."""

from pathlib import Path
from typing import Any

from diladiff.config import to_json
from diladiff.engine import checkpoint
from diladiff.engine.logging import read_rows
from diladiff.recipes.base import Recipe


def model_card(recipe: Recipe, *, run: Path, dataset: dict[str, Any], init_from: Path | str | None) -> str:
    """README.md of the model folder: data, recipe, steps, tokens, seed and the held-out bound so far."""
    model = recipe.objective.model
    steps = _steps(run)
    rows = "\n".join(f"| {name} | {value} |" for name, value in _facts(recipe, steps, run, dataset, init_from).items())
    return f"""---
library_name: diladiff
license: apache-2.0
pipeline_tag: text-generation
tags: [masked-diffusion, text]
---

# {run.name}

A masked diffusion language model: {model.layers} layers of {model.width}, {model.length} tokens, a vocabulary of
{model.vocab_size:,}, trained with `diladiff train {recipe.name}`. Weights are the run's averaged ones.

| | |
|---|---|
{rows}

```python
from diladiff import MaskedLM

lm = MaskedLM.from_pretrained("{run.name}")
print(lm.generate(num=1, steps=64, seed=0).texts[0])
```

## Recipe

```json
{to_json(recipe)}
```
"""


def _facts(
    recipe: Recipe, steps: int, run: Path, dataset: dict[str, Any], init_from: Path | str | None
) -> dict[str, str]:
    train, model = recipe.train, recipe.objective.model
    planned = "" if steps == train.steps else f" of {train.steps:,} planned: the run was not finished"
    facts = {
        "steps": f"{steps:,} of {train.global_batch} blocks{planned}",
        "tokens": f"{steps * recipe.tokens_per_step:,}",
        "seed": str(train.seed),
        "data": _data(dataset),
        "tokenizer": f"{recipe.data.tokenizer} (fingerprint {dataset['meta']['fingerprint']})",
    }
    if init_from is not None:
        facts["started from"] = Path(init_from).name
    measured = [row for row in read_rows(run) if "val_nll" in row]
    if measured:
        last = measured[-1]
        facts["held-out bound"] = f"{_bound(last['val_nll'], model.length, dataset)} (step {last['step']:,})"
    return facts


def _data(dataset: dict[str, Any]) -> str:
    made_by = dataset["made_by"]
    names = [name.rstrip("/").rpartition("/")[2] if "://" not in name else name for name in made_by["inputs"]]
    source = ", ".join(names) or f"{made_by['stories']:,} stories of the known law"
    counts = [
        f"{split} {held['documents']:,} documents, {held['tokens']:,} tokens"
        for split, held in dataset["splits"].items()
    ]
    return f"{source}; packing {dataset['meta']['packing']}; " + "; ".join(counts)


def _bound(nll: float, length: int, dataset: dict[str, Any]) -> str:
    """A held-out bound, for one document a block also by the document and by its own tokens, padding left out."""
    text = f"{nll:.4f} nats a token"
    if dataset["meta"]["packing"] == "document":
        valid = dataset["splits"]["valid"]
        own = nll * length * valid["documents"] / valid["tokens"]
        text += f" of the block; {nll * length:.2f} nats a document, {own:.4f} a token without its padding"
    return text


def _steps(run: Path) -> int:
    """The step whose weights are being written: that of the checkpoint just saved."""
    folder = checkpoint.latest(run)
    return 0 if folder is None else int(folder.name.removeprefix("step_"))
