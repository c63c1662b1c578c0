"""Masked diffusion for text in one file: corrupt, denoise, train, sample. Needs torch alone; a minute or two on a CPU.

Time runs from t = 0, the data, to t = 1, where every token is masked. A text is masked token by token, independently,
each with probability t; a transformer that sees the rest predicts what was there; to write, start from masks alone and
reveal a few positions at a time. The package does the same with more care for speed: tests hold the two equal.
"""

import argparse
import itertools
import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B batch, L positions, D width, H heads, E head width, V vocabulary, N rows (positions of a batch, flattened).

MASK, END = 0, 1
LENGTH = 10

# The data is a small language, so that one can tell whether a sample belongs to it.
SOUNDS = {"cat": "purrs", "dog": "barks", "owl": "hoots", "frog": "croaks", "bee": "hums", "cow": "moos"}
SENTENCES = [
    f"{start} {size} {animal} {sound} {place} ."
    for start, size, (animal, sound), place in itertools.product(
        ("a", "the", "my", "one"),
        ("small", "old", "happy", "red", "big"),
        SOUNDS.items(),
        ("in the barn", "by the pond", "on my roof", "at night", "all day"),
    )
]
WORDS = sorted({word for sentence in SENTENCES for word in sentence.split()})
VOCABULARY = 2 + len(WORDS)


def encode(text: str) -> list[int]:
    """One token a word, then end tokens up to the length; the ends are predicted like any token."""
    ids = [2 + WORDS.index(word) for word in text.split()]
    return ids + [END] * (LENGTH - len(ids))


def decode(ids: list[int]) -> str:
    """Words up to the first end; masks as underscores."""
    text = ids[: ids.index(END)] if END in ids else ids
    return " ".join("____" if token == MASK else WORDS[token - 2] for token in text)


class Block(nn.Module):
    """Self-attention, then an MLP, each added to the stream."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_norm = nn.RMSNorm(width // heads, eps=1e-5)
        self.k_norm = nn.RMSNorm(width // heads, eps=1e-5)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x_BLD: Tensor) -> Tensor:
        """The stream after both."""
        heads = self.qkv(self.norm1(x_BLD)).unflatten(-1, (3, self.heads, -1))
        q_BHLE, k_BHLE, v_BHLE = heads.permute(2, 0, 3, 1, 4)
        mixed_BHLE = F.scaled_dot_product_attention(self.q_norm(q_BHLE), self.k_norm(k_BHLE), v_BHLE)
        x_BLD = x_BLD + self.out(mixed_BHLE.transpose(1, 2).flatten(2))
        return x_BLD + self.mlp(self.norm2(x_BLD))


class Denoiser(nn.Module):
    """Tokens with masks in, logits of the clean tokens out. It is not told the time: the masks tell."""

    def __init__(self, vocabulary: int, length: int, *, width: int = 64, layers: int = 3, heads: int = 4):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        """Hidden states at every position."""
        x_BLD = self.tokens(tokens_BL) + self.positions.weight[: tokens_BL.shape[1]]
        return self.norm(self.blocks(x_BLD))

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits of the rows asked for; the mask is never an answer."""
        logits_NV = self.head(hidden_ND)
        return logits_NV.index_fill(1, torch.tensor([MASK], device=logits_NV.device), -math.inf)


def stratified_times(u: Tensor, batch: int) -> Tensor:
    """One time in each of `batch` equal intervals of [0, 1): far less noise than independent times."""
    return (u + torch.arange(batch)) / batch


def masked_loss(model: Denoiser, tokens_BL: Tensor, t_B: Tensor, noise_BL: Tensor) -> Tensor:
    """Cross-entropy where tokens are masked, summed and divided by the number of all positions.

    Noise is uniform on [0, 1), so a token is masked with probability t. Each sample divided by its t too would bound
    the negative log-likelihood; without, gradients are calmer, and a free network's optimum is the same.
    """
    masked_BL = noise_BL < t_B[:, None]
    hidden_BLD = model.trunk(torch.where(masked_BL, MASK, tokens_BL))
    return (
        F.cross_entropy(model.logits(hidden_BLD[masked_BL]), tokens_BL[masked_BL], reduction="sum") / tokens_BL.numel()
    )


def train(model: Denoiser, data_ML: Tensor, *, steps: int, batch: int = 64, lr: float = 3e-3, seed: int = 0) -> None:
    """AdamW with warm-up, cosine decay and clipped gradients."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    warmup = max(1, steps // 10)
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda n: min(1.0, (n + 1) / warmup) * (0.5 + 0.5 * math.cos(math.pi * n / steps))
    )
    began = time.perf_counter()
    for step in range(steps):
        tokens_BL = data_ML[torch.randint(len(data_ML), (batch,), generator=generator)]
        t_B = stratified_times(torch.rand((), generator=generator), batch)
        loss = masked_loss(model, tokens_BL, t_B, torch.rand(tokens_BL.shape, generator=generator))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        decay.step()
        if step % max(1, steps // 8) == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}  {time.perf_counter() - began:5.1f} s")


def plan(order_BL: Tensor, steps: int) -> Tensor:
    """The step that reveals each position, from one uniform each.

    Going from t to s < t a masked token is revealed with probability (t - s) / t, whatever the network says. From all
    masked, on equal steps, every step is then equally likely: draw it beforehand.
    """
    return (order_BL * steps).long().clamp(max=steps - 1)


def draw(logits_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """A token a row by inverting the distribution function in float64: float32 cannot reach the tail."""
    upto_NV = logits_NV.double().softmax(dim=-1).cumsum(dim=-1)
    aim_N1 = uniform_N[:, None] * upto_NV[:, -1:]
    return torch.searchsorted(upto_NV, aim_N1, right=True)[:, 0]


@torch.no_grad()
def sample(
    model: Denoiser, canvas_BL: Tensor, order_BL: Tensor, uniform_BL: Tensor, *, steps: int, watch: int | None = None
) -> Tensor:
    """Fill the canvas' masks in `steps` steps; what is given stays. `watch` is a row to print as it forms."""
    tokens_BL = canvas_BL.clone()
    step_BL = torch.where(canvas_BL == MASK, plan(order_BL, steps), -1)
    for step in range(steps):
        now_BL = step_BL == step
        running_B = now_BL.any(dim=1)
        if running_B.any():  # sequences that reveal nothing cost nothing, and the head sees revealed rows alone
            hidden_ND = model.trunk(tokens_BL[running_B])[now_BL[running_B]]
            tokens_BL[now_BL] = draw(model.logits(hidden_ND), uniform_BL[now_BL])
        if watch is not None and (step + 1) % max(1, steps // 8) == 0:
            print(f"  step {step + 1:3d}/{steps}  {decode(tokens_BL[watch].tolist())}")
    return tokens_BL


def main() -> None:
    """Train on part of the language, then write, and count what belongs to it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-steps", type=int, default=500)
    parser.add_argument("--sample-steps", type=int, default=32)
    parser.add_argument("--num", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    held_out = set(SENTENCES[::7])
    data_ML = torch.tensor([encode(sentence) for sentence in SENTENCES if sentence not in held_out])
    model = Denoiser(VOCABULARY, LENGTH)
    train(model, data_ML, steps=options.train_steps, seed=options.seed)
    model.eval()

    generator = torch.Generator().manual_seed(options.seed)
    order_BL, uniform_BL = torch.rand(2, options.num, LENGTH, generator=generator, dtype=torch.float64)
    canvas_BL = torch.full((options.num, LENGTH), MASK)
    print("a sentence forms out of masks:")
    written = sample(model, canvas_BL, order_BL, uniform_BL, steps=options.sample_steps, watch=0)
    texts = [decode(row) for row in written.tolist()]
    right = [text for text in texts if text in set(SENTENCES)]
    print(
        f"{len(right)} of {len(texts)} samples belong to the language, {sum(t in held_out for t in right)} never seen:"
    )
    print("\n".join(f"  {text}" for text in texts[:8]))
    prompt = encode("my old owl")[:3] + [MASK] * (LENGTH - 3)
    finished = sample(model, torch.tensor([prompt] * 4), order_BL[:4], uniform_BL[:4], steps=options.sample_steps)
    print("continuing a prompt:\n" + "\n".join(f"  {decode(row)}" for row in finished.tolist()))


if __name__ == "__main__":
    main()
