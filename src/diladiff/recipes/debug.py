"""The twin of a recipe that runs in seconds on a CPU: the same choices, tiny sizes."""

from collections.abc import Callable
from dataclasses import replace

from diladiff.recipes.base import Recipe

VOCAB_SIZE = 320
MASK_ID = 1
LENGTH = 64


def debug(recipe: Recipe) -> Recipe:
    """Shrink a recipe; whatever is a choice of kind (positions, loss weight, packing, decay) stays as it is."""
    model = replace(
        recipe.objective.model, vocab_size=VOCAB_SIZE, mask_id=MASK_ID, length=LENGTH, width=32, layers=2, heads=2
    )
    train = replace(
        recipe.train,
        steps=4,
        global_batch=8,
        micro_batch=4,
        precision="float32",
        compile="none",
        log_every_steps=1,
        validate_every_steps=2,
        validate_blocks=8,
        checkpoint_every_steps=2,
        keep_every_steps=None,
    )
    packing = recipe.data.packing
    shape = f"--packing document --length {LENGTH}" if packing == "document" else "--packing joined"
    options = f"{shape} --text-documents line --train-tokenizer {VOCAB_SIZE} --valid-share 0.2"
    return replace(
        recipe,
        name=f"{recipe.name}_debug",
        objective=replace(recipe.objective, model=model),
        optim=replace(recipe.optim, warmup_steps=2),
        train=train,
        data=replace(
            recipe.data,
            tokenizer=f"byte-level BPE of {VOCAB_SIZE} tokens, trained on whatever text is at hand",
            prepare=f"diladiff prepare README.md {options} --out data/debug_{packing}",
        ),
    )


def twin(name: str, recipe: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """The recipe function of a debug twin, with a docstring of its own."""

    def function() -> Recipe:
        return debug(recipe())

    function.__name__ = f"{name}_debug"
    function.__doc__ = f"""The seconds-long twin of {name}, for tests and first looks.

    Command: diladiff train {name}_debug --data data/debug_{recipe().data.packing}
    Cost: seconds on a CPU
    Result: none; tests ask that two steps, a resume and two steps equal four
    """
    return function
