"""A toy language on which the encoder learns within a stated number of steps.

Two of eight four-letter words, 6 bits a text: without a latent a fully masked text is a guess.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from diladiff.models.autoencoder import DecoderConfig, LatentDecoder
from diladiff.models.perceiver import Perceiver, PerceiverConfig
from diladiff.models.token_transformer import TokenTransformer, TokenTransformerConfig
from diladiff.nn.embed import sinusoids

LENGTH, WIDTH, BATCH = 8, 32, 32
WORDS = torch.randint(1, 9, (8, 4), generator=torch.Generator().manual_seed(5))
LETTERS = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(9))
CODE = sinusoids(torch.arange(LENGTH).float(), WIDTH, longest=float(LENGTH))
MODEL = TokenTransformerConfig(vocab_size=9, mask_id=0, length=LENGTH, width=WIDTH, layers=2, heads=2, dropout=0.0)
ENCODER = PerceiverConfig(
    feature_width=WIDTH, length=LENGTH, latents=4, width=WIDTH, latent_width=WIDTH, heads=2, dropout=0.0
)


def texts(count: int, generator: torch.Generator) -> Tensor:
    """Texts of two words."""
    return WORDS[torch.randint(0, len(WORDS), (count, LENGTH // 4), generator=generator)].flatten(1)


def features(tokens_BL: Tensor) -> Tensor:
    """What a text encoder would say of them: letter and place, of unit variance."""
    return (LETTERS[tokens_BL] + CODE) / (1 + 0.5) ** 0.5


def noised(latents_BKC: Tensor, generator: torch.Generator) -> Tensor:
    """Noise with the latents' own mean and deviation."""
    with torch.no_grad():
        mean, deviation = latents_BKC.mean((0, 1)), latents_BKC.std((0, 1))
        return mean + deviation * torch.randn(latents_BKC.shape, generator=generator)


def loss(model: TokenTransformer, tokens_BL: Tensor, generator: torch.Generator, context: tuple = ()) -> Tensor:
    """Cross-entropy where a uniform share is masked."""
    rate_B1 = torch.rand(len(tokens_BL), 1, generator=generator)
    masked_BL = torch.rand(tokens_BL.shape, generator=generator) < rate_B1
    logits_BLV = model(tokens_BL.masked_fill(masked_BL, 0), None, context)
    return F.cross_entropy(logits_BLV[masked_BL], tokens_BL[masked_BL])


def train_masked_model(steps: int) -> TokenTransformer:
    """The decoder's start."""
    torch.manual_seed(0)
    model, generator = TokenTransformer(MODEL), torch.Generator().manual_seed(1)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    for _ in range(steps):
        loss(model, texts(BATCH, generator), generator).backward()
        optimiser.step()
        optimiser.zero_grad()
    return model


def train(encoder: Perceiver, decoder: LatentDecoder, steps: int, *, rate: float) -> None:
    """Half the latents are replaced by noise; the trained model moves at a tenth of the rate, its embedding not."""
    generator = torch.Generator().manual_seed(2)
    old = {name for name, _ in TokenTransformer(MODEL).named_parameters()}
    slow = [p for name, p in decoder.model.named_parameters() if name in old and name != "tokens.weight"]
    fast = [p for name, p in decoder.model.named_parameters() if name not in old]
    fast += [*encoder.parameters(), *decoder.projections.parameters()]
    optimiser = torch.optim.Adam([{"params": slow, "lr": rate / 10}, {"params": fast}], lr=rate, fused=True)
    for _ in range(steps):
        tokens_BL = texts(BATCH, generator)
        latents_BKC = encoder(features(tokens_BL))
        replaced_B11 = torch.rand(BATCH, 1, 1, generator=generator) < 0.5
        latents_BKC = torch.where(replaced_B11, noised(latents_BKC, generator), latents_BKC)
        loss(decoder.model, tokens_BL, generator, decoder.read(latents_BKC)).backward()
        optimiser.step()
        optimiser.zero_grad()


@torch.no_grad()
def recovery(encoder: Perceiver, decoder: LatentDecoder) -> tuple[float, float]:
    """The share of letters found in fully masked texts, told the true latent and told noise."""
    generator = torch.Generator().manual_seed(3)
    tokens_BL = texts(512, generator)
    latents_BKC = encoder(features(tokens_BL))
    found = [
        decoder(torch.zeros_like(tokens_BL), told).argmax(-1) == tokens_BL
        for told in (latents_BKC, noised(latents_BKC, generator))
    ]
    return found[0].float().mean().item(), found[1].float().mean().item()


def test_the_default_encoder_learns_within_a_hundred_steps() -> None:
    """Letters found with the true latent and with noise, seeds 0 to 2: .57 .66 .63 against .35 .33 .35.

    The literal initialisation of both networks finds .45 .47 .47 against .31 .35 .34. At a tenth of the rate, nearer
    what a large model is given, it is starved: .43 .47 against .35 .34 after 300 steps (two seeds), the default .61 .67
    against .33 .32.

    Measured once, at rate 3e-4 with 100 steps of warm-up: the encoder's first gradient is 3e-6 literal, 2e-5 by
    default; after 500 steps .44 and .91. Either of two departures would do here, matrices that keep the variance (.93,
    literal in all else) or a norm on the latent that is read (.89). The default with matrices of deviation .02 finds
    .71, without positions on the features .80, with the inner convolution zero too .89.
    """
    torch.manual_seed(0)
    encoder, decoder = Perceiver(ENCODER), LatentDecoder(DecoderConfig(model=MODEL, latent_width=WIDTH))
    decoder.adopt(train_masked_model(150))
    true, noise = recovery(encoder, decoder)
    assert true == noise < 0.4
    train(encoder, decoder, 100, rate=3e-3)
    true, noise = recovery(encoder, decoder)
    assert true > noise + 0.15
    assert noise < 0.4
