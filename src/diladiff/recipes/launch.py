"""Running a recipe on a data set: what is checked before, what the engine is handed, and the model folder it leaves."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diladiff import files
from diladiff.config import difference, from_dict, to_dict
from diladiff.data.loader import Loader, RawBatch, validation_batches
from diladiff.data.shards import DATASET, Meta, TokenDataset, read_dataset
from diladiff.data.tokenizer import Tokenizer
from diladiff.engine import distributed
from diladiff.engine.logging import Reporter
from diladiff.engine.loop import FitResult, fit
from diladiff.pipelines.masked_lm import MaskedLM
from diladiff.recipes.base import Recipe
from diladiff.recipes.card import model_card

SPLITS = ("train", "valid")


class Plan(NamedTuple):
    """What a recipe amounts to: parameters, tokens read, floating-point operations of the training."""

    parameters: int
    tokens: int
    flops: float


def plan(recipe: Recipe) -> Plan:
    """Count without allocating anything: the objective is built on the meta device."""
    with torch.device("meta"):
        objective = recipe.objective.build()
    parameters = sum(parameter.numel() for parameter in objective.parameters())
    return Plan(parameters, recipe.total_tokens, objective.flops_per_token() * recipe.total_tokens)


def run(
    recipe: Recipe,
    *,
    data: Path | str | None,
    out: Path | str,
    init_from: Path | str | None = None,
    device: str | None = None,
    reporter: Reporter | None = None,
) -> FitResult:
    """Train a recipe into a run folder, or carry the run in it on; ValueError says what does not fit and what to do."""
    data, out = find_data(recipe, data), Path(out)
    with distributed.session(device) as place:
        train, valid = open_splits(recipe, data, place)
        tokenizer = train.tokenizer()
        torch.manual_seed(recipe.train.seed)
        objective = recipe.objective.build()
        start = None if init_from is None else load_weights(recipe, objective.model, tokenizer, init_from)
        dataset = {"fingerprint": train.meta.fingerprint, "sha256": files.sha256(data / DATASET)}
        settings = recipe.train

        def batches(step: int) -> Iterator[list[RawBatch]]:
            loader = Loader(
                train,
                global_batch=settings.global_batch,
                # A micro-batch bounds memory: with many processes a rank's whole share can be smaller.
                micro_batch=min(settings.micro_batch, settings.global_batch // distributed.world()),
                rank=distributed.rank(),
                world=distributed.world(),
                seed=settings.seed,
                start_step=step,
                device=place,
            )
            return iter(loader)

        def held_out() -> Iterator[RawBatch]:
            size = settings.micro_batch * distributed.world()
            return validation_batches(
                valid, size, distributed.rank(), distributed.world(), settings.validate_blocks, place
            )

        def export(folder: Path) -> None:
            model = objective.model
            training = model.training
            card = model_card(recipe, run=out, dataset=read_dataset(data), init_from=init_from)
            MaskedLM(model, tokenizer).save_pretrained(folder, card=card)
            model.train(training)

        return fit(
            optim=recipe.optim,
            train=settings,
            objective=objective,
            loader=batches,
            validation=held_out,
            run=out,
            identity={**to_dict(recipe), "dataset": dataset, "init_from": start},
            export=export,
            device=place,
            reporter=reporter,
        )


def find_data(recipe: Recipe, data: Path | str | None) -> Path:
    """The folder of a recipe's data; a ValueError says how to make them where they are missing."""
    if data is None or not Path(data).is_dir():
        where = "--data is not given" if data is None else f"--data {data} does not exist"
        raise ValueError(f"{where}; make the data with: {recipe.data.prepare}")
    return Path(data)


def open_splits(recipe: Recipe, data: Path, device: torch.device) -> tuple[TokenDataset, TokenDataset]:
    """The training and held-out blocks, after one process has compared every byte with its sha256."""
    length = recipe.objective.model.length

    def check() -> None:
        # Reading all shards takes a while, and a wrong recipe is the likelier mistake.
        check_fit(recipe, data)
        for split in SPLITS:
            TokenDataset.open(data, split, length)

    distributed.on_main(check, device)
    train, valid = (TokenDataset.open(data, split, length, verify=False) for split in SPLITS)
    return train, valid


def check_fit(recipe: Recipe, data: Path) -> None:
    """Raise ValueError, with what to type, where a data set is not of the kind that a recipe trains on."""
    found = read_dataset(data)
    files.verify(data, only=[DATASET])
    meta = from_dict(Meta, found["meta"], f"{data / DATASET}: meta")
    model = recipe.objective.model
    if meta.packing != recipe.data.packing:
        raise ValueError(
            f"{data} is packed {meta.packing!r}, the recipe wants {recipe.data.packing!r}: prepare it with --packing "
            f"{recipe.data.packing}, or train with --data.packing {meta.packing}"
        )
    if (meta.vocab_size, meta.mask_id) != (model.vocab_size, model.mask_id):
        raise ValueError(
            f"{data} has a vocabulary of {meta.vocab_size:,} with mask {meta.mask_id}, the recipe {model.vocab_size:,} "
            f"with mask {model.mask_id}: add --objective.model.vocab-size {meta.vocab_size} "
            f"--objective.model.mask-id {meta.mask_id}, or prepare the data with: {recipe.data.prepare}"
        )
    if meta.length not in (None, model.length):
        raise ValueError(
            f"{data} holds blocks of {meta.length} tokens, the recipe takes {model.length}: add "
            f"--objective.model.length {meta.length}, or prepare the data with --length {model.length}"
        )


def load_weights(recipe: Recipe, model: torch.nn.Module, tokenizer: Tokenizer, source: Path | str) -> dict[str, Any]:
    """Give a fresh model the weights of a saved one of the same shape and tokenizer; returns what names them."""
    saved = MaskedLM.from_pretrained(source, device="cpu", dtype="float32")
    if saved.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"--init-from {source} has another tokenizer ({saved.tokenizer.fingerprint}) than the data "
            f"({tokenizer.fingerprint}): prepare the data with --tokenizer {source}"
        )
    wanted = recipe.objective.model
    lines = difference(replace(saved.model.config, dropout=wanted.dropout), wanted)
    if lines:
        raise ValueError(f"--init-from {source} has another shape ({'; '.join(lines)}): give these fields its values")
    model.load_state_dict(saved.model.state_dict(), strict=True)
    return {"weights_sha256": saved.identity["weights_sha256"]}
