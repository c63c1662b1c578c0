"""An exact world of three tokens at three positions: its law is a table, its denoiser a sum over it.

Tokens are 0, 1, 2 and MASK = 3. A law over texts is a vector over the 27 rows of TEXTS, a law over partly masked
sequences one over the 64 rows of STATES. A denoiser here maps tokens (B, L) to log probabilities (B, L, 4).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor

from diladiff.processes.masked import loss_weight, posterior
from diladiff.processes.schedules import MaskSchedule
from diladiff.processes.times import uniform_grid

LENGTH, MASK, VOCABULARY = 3, 3, 4
TEXTS = torch.tensor(list(product(range(MASK), repeat=LENGTH)))
STATES = torch.tensor(list(product(range(VOCABULARY), repeat=LENGTH)))
SUBSETS = torch.tensor(list(product((False, True), repeat=LENGTH)))
CLEAN_STATES = (STATES != MASK).all(1).nonzero()[:, 0]

LogDenoiser = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class World:
    """A law over TEXTS, with the denoiser that goes with it."""

    law: Tensor

    def log_denoiser(self, tokens_BL: Tensor) -> Tensor:
        """Exact log q(x_0^l | x_t): the marginals of the texts that agree with what is not masked."""
        agrees_BLX = (tokens_BL[..., None] == MASK) | (tokens_BL[..., None] == TEXTS.T)
        weight_BX = agrees_BLX.all(1) * self.law
        one_hot_XLV = torch.nn.functional.one_hot(TEXTS, VOCABULARY).double()
        marginal_BLV = torch.einsum("bx,xlv->blv", weight_BX / weight_BX.sum(1, keepdim=True), one_hot_XLV)
        return marginal_BLV.log()

    def denoise(self, tokens_AL: Tensor, time_A: Tensor, rows_N: Tensor) -> Tensor:
        """The exact denoiser as samplers call a network: logits at flat rows."""
        assert len(time_A) == len(tokens_AL)
        return self.log_denoiser(tokens_AL).flatten(0, 1)[rows_N]

    def draw(self, uniform_N: Tensor) -> Tensor:
        """Texts of the true law, from uniforms."""
        place_N = torch.searchsorted(self.law.cumsum(0), uniform_N.double(), right=True)
        return TEXTS[place_N.clamp(max=len(TEXTS) - 1)]


def correlated_world() -> World:
    """Tokens that depend strongly on each other; every text is possible."""
    generator = torch.Generator().manual_seed(7)
    law = torch.rand(len(TEXTS), generator=generator, dtype=torch.float64) ** 6 + 1e-3
    return World(law / law.sum())


@dataclass(frozen=True)
class LatentWorld:
    """Given a latent z the tokens are independent: p(x) = sum_z p(z) prod_l p(x^l | z)."""

    prior_Z: Tensor
    token_ZLV: Tensor

    def given(self, z: int) -> World:
        """The law of the texts of one latent."""
        return World(torch.stack([self.token_ZLV[z, place, TEXTS[:, place]] for place in range(LENGTH)]).prod(0))

    def mixture(self) -> World:
        """The law of the texts of all latents."""
        return World(sum(p * self.given(z).law for z, p in enumerate(self.prior_Z)))


def latent_world() -> LatentWorld:
    """Two latents with unlike tokens."""
    token_ZLV = torch.tensor(
        [
            [[0.90, 0.06, 0.04], [0.80, 0.15, 0.05], [0.02, 0.90, 0.08]],
            [[0.05, 0.15, 0.80], [0.10, 0.10, 0.80], [0.70, 0.05, 0.25]],
        ],
        dtype=torch.float64,
    )
    return LatentWorld(torch.tensor([0.3, 0.7], dtype=torch.float64), token_ZLV)


def perturbed(denoiser: LogDenoiser, scale: float, seed: int = 0) -> LogDenoiser:
    """A denoiser that is wrong: noise on the logits, its own for each state."""
    noise_SLV = scale * torch.randn(
        len(STATES), LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )

    def denoise(tokens_BL: Tensor) -> Tensor:
        return (denoiser(tokens_BL) + noise_SLV[state_number(tokens_BL)]).log_softmax(-1)

    return denoise


def state_number(tokens_BL: Tensor) -> Tensor:
    """The rows of STATES that hold these tokens."""
    return (tokens_BL * VOCABULARY ** torch.arange(LENGTH - 1, -1, -1)).sum(1)


def all_masked() -> Tensor:
    """The law over STATES that is sure of the fully masked one."""
    return torch.nn.functional.one_hot(torch.tensor(len(STATES) - 1), len(STATES)).double()


def step_matrix(log_denoised_SLV: Tensor, schedule: MaskSchedule, t: Tensor, s: Tensor) -> Tensor:
    """Probability of each state at s (columns) given the one at t (rows), from the denoiser on all STATES: eq. (3)."""
    count = len(STATES)
    log_law_SLV = posterior(log_denoised_SLV, STATES, t.expand(count), s.expand(count), schedule=schedule, mask_id=MASK)
    return log_law_SLV.exp()[:, torch.arange(LENGTH), STATES].prod(-1)


def ancestral_law(denoiser: LogDenoiser, schedule: MaskSchedule, steps: int) -> Tensor:
    """The law over TEXTS of the N-step factorised chain that starts all masked."""
    grid, state_law, log_denoised_SLV = uniform_grid(steps), all_masked(), denoiser(STATES)
    for t, s in pairwise(grid):
        state_law = state_law @ step_matrix(log_denoised_SLV, schedule, t, s)
    return state_law[CLEAN_STATES]


def reveal_law(denoiser: LogDenoiser, groups: list[Tensor]) -> Tensor:
    """The law over TEXTS when these sets of positions (bools) are revealed one after the other, each set at once."""
    text_law = torch.ones(len(TEXTS), dtype=torch.float64)
    known_L = torch.zeros(LENGTH, dtype=torch.bool)
    for group_L in groups:
        seen_XL = torch.where(known_L, TEXTS, MASK)
        token_XL = denoiser(seen_XL).exp().gather(2, TEXTS[..., None])[..., 0]
        text_law = text_law * torch.where(group_L, token_XL, 1.0).prod(1)
        known_L = known_L | group_L
    return text_law


def planned_law(denoiser: LogDenoiser, schedule: MaskSchedule, steps: int) -> Tensor:
    """The law over TEXTS when every position's step is drawn first, tokens afterwards and only there."""
    alpha = schedule.alpha(uniform_grid(steps))
    step_law = (alpha[1:] - alpha[:-1]) / (1 - alpha[0])
    law = torch.zeros(len(TEXTS), dtype=torch.float64)
    for plan in product(range(steps), repeat=LENGTH):
        plan_L = torch.tensor(plan)
        law = law + step_law[plan_L].prod() * reveal_law(denoiser, [plan_L == step for step in range(steps)])
    return law


def first_hitting_law(denoiser: LogDenoiser) -> Tensor:
    """The law over TEXTS with one token a forward, the next position uniform among those masked."""
    state_law = all_masked()
    masked_SL = STATES == MASK
    for _ in range(LENGTH):
        law_SLV = denoiser(STATES).exp()
        moved = torch.zeros_like(state_law)
        for place in range(LENGTH):
            share_S = state_law * masked_SL[:, place] / masked_SL.sum(1).clamp(min=1)
            for token in range(MASK):
                after_SL = STATES.clone()
                after_SL[:, place] = token
                gain_S = torch.where(masked_SL[:, place], share_S * law_SLV[:, place, token], 0.0)
                moved = moved.index_add(0, state_number(after_SL), gain_S)
        state_law = moved
    return state_law[CLEAN_STATES]


def subset_losses(denoiser: LogDenoiser) -> Tensor:
    """Cross-entropy of the masked tokens, summed, for each text (rows) and masked subset (columns)."""
    losses = []
    for masked_L in SUBSETS:
        log_law_XLV = denoiser(torch.where(masked_L, MASK, TEXTS))
        token_XL = log_law_XLV.gather(2, TEXTS[..., None])[..., 0]
        losses.append(-torch.where(masked_L, token_XL, 0.0).sum(1))
    return torch.stack(losses, dim=1)


def subset_law(mask_rate: Tensor) -> Tensor:
    """The probability of each masked subset when every token is masked with this probability."""
    size = SUBSETS.sum(1)
    return mask_rate**size * (1 - mask_rate) ** (LENGTH - size)


def continuous_bound(denoiser: LogDenoiser, schedule: MaskSchedule) -> Tensor:
    """The ELBO of docs/math.md (5) for each text, its integral over t by 24 Gauss-Legendre nodes on (0, 1]."""
    losses_XS = subset_losses(denoiser)
    bound_X = torch.zeros(len(TEXTS), dtype=torch.float64)
    for t, width in gauss_legendre(24):
        weight = loss_weight("elbo", schedule, t)
        bound_X = bound_X + width * weight * (losses_XS @ subset_law(schedule.mask_rate(t)))
    return bound_X


def end_term(world: World, schedule: MaskSchedule) -> Tensor:
    """E[-log p(x_1's unmasked tokens)] for each text: what a schedule that ends above alpha = 0 leaves to p(x_1)."""
    seen_probability_XS = torch.stack(
        [((TEXTS[:, None] == TEXTS[None]) | masked_L).all(-1).double() @ world.law for masked_L in SUBSETS],
        dim=1,
    )
    return -seen_probability_XS.log() @ subset_law(schedule.mask_rate(torch.ones((), dtype=torch.float64)))


def discrete_bound(denoiser: LogDenoiser) -> Tensor:
    """The estimator L/k of docs/math.md (6) for each text, averaged over k and all subsets of size k."""
    losses_XS, size_S = subset_losses(denoiser), SUBSETS.sum(1)
    bound_X = torch.zeros(len(TEXTS), dtype=torch.float64)
    for k in range(1, LENGTH + 1):
        bound_X = bound_X + (LENGTH / k) * losses_XS[:, size_S == k].mean(1) / LENGTH
    return bound_X


def gauss_legendre(count: int) -> list[tuple[Tensor, float]]:
    """Nodes (0-dim float64) and weights on (0, 1): the eigenvalues of the Jacobi matrix (Golub and Welsch 1969)."""
    i = torch.arange(1, count, dtype=torch.float64)
    off_diagonal = i / (4 * i**2 - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1))
    return [((x + 1) / 2, float(w)) for x, w in zip(values, vectors[0] ** 2, strict=True)]


def total_variation(p: Tensor, q: Tensor) -> float:
    """Half the sum of absolute differences."""
    return float((p - q).abs().sum()) / 2


def law_deviation(texts_NL: Tensor, law_X: Tensor) -> float:
    """How many standard deviations the chi-square of drawn texts lies above its mean; about 3.5 is suspicious."""
    counts = (texts_NL * MASK ** torch.arange(LENGTH - 1, -1, -1)).sum(1).bincount(minlength=len(TEXTS))
    expected = len(texts_NL) * law_X
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(law_X) - 1
    return (chi_square - freedom) / math.sqrt(2 * freedom)
