"""Masked diffusion language models: the paper's, the original's, and those for half an hour of one GPU or a laptop.

A recipe is a function that returns one complete value; a variant calls another recipe and replaces fields.
"""

from dataclasses import replace

from diladiff.engine.loop import TrainConfig
from diladiff.engine.optim import OptimConfig
from diladiff.models.token_transformer import TokenTransformerConfig
from diladiff.objectives.masked import MaskedConfig
from diladiff.recipes.base import DataSpec, Recipe


def mdlm_owt() -> Recipe:
    """The paper's masked diffusion model: 12 layers of 768, 1,024 tokens of OpenWebText, uncased BERT vocabulary.

    Command: torchrun --nproc-per-node 8 --no-python diladiff train mdlm_owt --data data/owt
    Cost: 524 G tokens, 1M steps; at 600,000 tokens/s a GPU about 30 hours on eight H200
    Result: not yet run
    """
    return Recipe(
        name="mdlm_owt",
        objective=MaskedConfig(
            model=TokenTransformerConfig(
                vocab_size=30_522, mask_id=103, length=1024, width=768, layers=12, heads=12, dropout=0.1
            ),
            weight="flat",
            schedule="linear",
        ),
        optim=OptimConfig(lr=3e-4, warmup_steps=1_000, decay="cosine", weight_decay=0.0, clip_norm=1.0),
        train=TrainConfig(
            steps=1_000_000,
            global_batch=512,
            micro_batch=32,
            ema=(0.9999,),
            precision="bfloat16",
            compile="blocks",
            log_every_steps=100,
            validate_every_steps=5_000,
            validate_blocks=2_048,
            checkpoint_every_steps=5_000,
            keep_every_steps=100_000,
        ),
        data=DataSpec(
            packing="joined",
            tokenizer="bert-base-uncased, all 30,522 tokens",
            prepare="diladiff prepare openwebtext --out data/owt",
        ),
    )


def mdlm_owt_cased() -> Recipe:
    """mdlm_owt with the cased BERT vocabulary, which the paper's printed samples and sizes speak for.

    Command: torchrun --nproc-per-node 8 --no-python diladiff train mdlm_owt_cased --data data/owt_cased
    Cost: as mdlm_owt
    Result: not yet run
    """
    paper = mdlm_owt()
    return replace(
        paper,
        name="mdlm_owt_cased",
        objective=replace(paper.objective, model=replace(paper.objective.model, vocab_size=28_996, mask_id=103)),
        data=replace(
            paper.data,
            tokenizer="bert-base-cased, all 28,996 tokens",
            prepare="diladiff prepare openwebtext --tokenizer bert-base-cased --out data/owt_cased",
        ),
    )


def mdlm_original_owt() -> Recipe:
    """The original MDLM on OpenWebText: GPT-2's vocabulary, rotary positions, AdaLN, carry-over.

    Command: torchrun --nproc-per-node 8 --no-python diladiff train mdlm_original_owt --data data/owt_gpt2
    Cost: 524 G tokens, 1M steps; a larger head than mdlm_owt's, so somewhat more than its 30 hours on eight H200
    Result: not yet run
    """
    paper = mdlm_owt()
    model = replace(
        paper.objective.model,
        vocab_size=50_259,
        mask_id=50_257,
        positions="rotary",
        qk_norm=False,
        time_conditioning=True,
        carry_over=True,
    )
    return replace(
        paper,
        name="mdlm_original_owt",
        objective=replace(paper.objective, model=model, weight="elbo", schedule="log_linear"),
        optim=replace(paper.optim, warmup_steps=2_500, decay="constant"),
        data=replace(
            paper.data,
            tokenizer="gpt2, 50,257 tokens; a mask and a padding token are added",
            prepare="diladiff prepare openwebtext --tokenizer gpt2 --out data/owt_gpt2",
        ),
    )


def mdlm_stories() -> Recipe:
    """A small model of the stories' known law: 8 layers of 384, one story a block of 256, 4,096 tokens, cased.

    Command: diladiff train mdlm_stories --data data/stories
    Cost: 3.1 G tokens, 24,000 steps of 512 stories; sized for half an hour of one H200 (its speed is not yet measured)
    Result: not yet run
    """
    paper = mdlm_owt()
    return Recipe(
        name="mdlm_stories",
        objective=replace(
            paper.objective,
            model=TokenTransformerConfig(
                vocab_size=4_096, mask_id=1, length=256, width=384, layers=8, heads=6, dropout=0.0
            ),
        ),
        optim=replace(paper.optim, lr=1e-3, weight_decay=0.01),
        train=replace(
            paper.train,
            steps=24_000,
            micro_batch=512,
            validate_every_steps=1_000,
            checkpoint_every_steps=2_000,
            keep_every_steps=None,
        ),
        data=DataSpec(
            packing="document",
            tokenizer="byte-level BPE of 4,096 tokens, trained on the stories",
            prepare="diladiff prepare stories --stories 450000 --stories-device cuda --out data/stories",
        ),
    )


def mdlm_stories_cpu() -> Recipe:
    """The stories on a laptop: 4 layers of 256 in float32, for an hour and a half of one idle CPU core.

    Command: diladiff train mdlm_stories_cpu --data data/stories
    Cost: 12.3 M tokens, 3,000 steps of 16 stories; 80 minutes of one CPU core at 2,500 tokens/s (600 to 2,600 seen)
    Result: 518 +- 3 nats a story after 2,600 steps (bound, 1,984 held-out stories; the law's: 125); more in its card
    """
    stories = mdlm_stories()
    return replace(
        stories,
        name="mdlm_stories_cpu",
        objective=replace(stories.objective, model=replace(stories.objective.model, width=256, layers=4, heads=4)),
        optim=replace(stories.optim, lr=1.5e-3, warmup_steps=100, decay="constant"),
        train=replace(
            stories.train,
            steps=3_000,
            global_batch=16,
            micro_batch=16,
            ema=(0.998,),
            precision="float32",
            compile="none",
            log_every_steps=20,
            validate_every_steps=500,
            validate_blocks=64,
            checkpoint_every_steps=100,
        ),
        data=replace(stories.data, prepare="diladiff prepare stories --stories 20000 --out data/stories"),
    )


def mdlm_wiki() -> Recipe:
    """Wikipedia in 20 minutes: 8 layers of 512, blocks of 128, the 8,192 most useful tokens of uncased BERT.

    Command: diladiff train mdlm_wiki --data data/wiki
    Cost: 1.4 G tokens, 22,000 steps of 512 blocks; 18 minutes of one H200 at 1.4 M tokens/s, the prototype's speed
    Result: not yet run
    """
    paper = mdlm_owt()
    return Recipe(
        name="mdlm_wiki",
        objective=replace(
            paper.objective,
            model=TokenTransformerConfig(
                vocab_size=8_192, mask_id=4, length=128, width=512, layers=8, heads=8, dropout=0.1
            ),
        ),
        optim=replace(paper.optim, lr=6e-4, weight_decay=0.01),
        train=replace(
            paper.train,
            steps=22_000,
            micro_batch=512,
            validate_every_steps=1_000,
            checkpoint_every_steps=2_000,
            keep_every_steps=None,
        ),
        data=DataSpec(
            packing="joined",
            tokenizer="bert-base-uncased, reduced to its 8,192 most useful tokens",
            prepare="diladiff prepare wikipedia --vocab-size 8192 --out data/wiki",
        ),
    )
