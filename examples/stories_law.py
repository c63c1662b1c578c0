"""Stories of a known law, to measure generators by: a 15M-parameter Llama trained on TinyStories, at temperature .8.

python examples/stories_law.py sample llama2.data --stories 4096 --seed 107 --out more.jsonl [--device cuda --wave 2048]
python examples/stories_law.py score  llama2.data mine.jsonl --out scored.jsonl    # nats of any text under the law
python examples/stories_law.py export llama2.data --out judge                      # the law as a Hugging Face folder
"""

import argparse
import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import decoders, models, normalizers, processors
from torch import Tensor

UNKNOWN, BEGIN, END = 0, 1, 2  # this Llama was trained to end a story with BEGIN; END is all but never drawn
BYTES = range(3, 259)  # tokens that stand for single bytes
BLOCK = 128  # entries in a block of the two-level draw
COMPACT_EVERY = 16  # steps after which stories that have ended leave the wave
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Law:
    """The weights of a llama2.c checkpoint, its vocabulary and the temperature: together, a law over texts."""

    heads: int
    length: int
    embedding: Tensor
    head: Tensor
    norm_attention: Tensor
    qkv: Tensor
    out: Tensor
    norm_mlp: Tensor
    gate_up: Tensor
    down: Tensor
    norm_out: Tensor
    cos: Tensor
    sin: Tensor
    pieces: list[bytes]
    scores: list[float]
    temperature: float

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.qkv)

    @property
    def head_width(self) -> int:
        """The width of an attention head."""
        return self.embedding.shape[1] // self.heads

    def text(self, ids: list[int]) -> str:
        """The text of token ids."""
        pieces = (bytes([i - BYTES.start]) if i in BYTES else self.pieces[i] for i in ids if i > END)
        return b"".join(pieces).decode("utf-8", "replace").strip()


class Wave(NamedTuple):
    """Stories drawn together: ids padded with -1, whether each has ended, and the nats of what was drawn."""

    ids: Tensor
    ended: Tensor
    nats: Tensor


def load(path: Path | str, *, temperature: float = TEMPERATURE, device: str = "cpu") -> Law:
    """Read a llama2.c checkpoint with its tokenizer behind the weights."""
    raw = Path(path).read_bytes()
    if len(raw) < 28:
        raise ValueError(f"{path} is not a llama2.c checkpoint: it has {len(raw)} bytes")
    width, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("7i", raw[:28])
    if kv_heads != heads or vocab < 0:
        raise ValueError(f"{path}: checkpoints with shared keys or an untied head are not supported")
    at = 28

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = int(np.prod(shape))
        part = np.frombuffer(raw, dtype=np.float32, count=count, offset=at).copy()
        at += 4 * count
        return torch.from_numpy(part).view(shape).to(device)

    embedding, norm_attention = take(vocab, width), take(layers, width)
    query, key, value, out = (take(layers, width, width) for _ in range(4))
    norm_mlp, gate = take(layers, width), take(layers, hidden, width)
    down, up, norm_out = take(layers, width, hidden), take(layers, hidden, width), take(width)
    cos, sin = take(length, width // heads // 2), take(length, width // heads // 2)
    pieces, scores = _read_vocabulary(raw[at:], vocab)
    return Law(
        heads=heads,
        length=length,
        embedding=embedding,
        head=embedding / temperature,
        norm_attention=norm_attention,
        qkv=torch.cat([query, key, value], 1),
        out=out,
        norm_mlp=norm_mlp,
        gate_up=torch.cat([gate, up], 1),
        down=down,
        norm_out=norm_out,
        cos=cos,
        sin=sin,
        pieces=pieces,
        scores=scores,
        temperature=temperature,
    )


def _read_vocabulary(raw: bytes, count: int) -> tuple[list[bytes], list[float]]:
    pieces, scores, at = [], [], 4  # the longest piece's length comes first
    for _ in range(count):
        score, size = struct.unpack_from("fi", raw, at)
        pieces.append(raw[at + 8 : at + 8 + size])
        scores.append(score)
        at += 8 + size
    return pieces, scores


# The network. Float32 throughout; B rows, T positions, D width, H heads, E head width, V vocabulary.


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; the two of a pair are neighbours."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def _mlp(law: Law, x: Tensor, layer: int) -> Tensor:
    gate, up = F.linear(_norm(x, law.norm_mlp[layer]), law.gate_up[layer]).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, law.down[layer])


def _split_heads(law: Law, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each (B, H, T, E), before rotation."""
    qkv = F.linear(_norm(x, law.norm_attention[layer]), law.qkv[layer])
    q, k, v = qkv.unflatten(-1, (3, law.heads, law.head_width)).permute(2, 0, 3, 1, 4)
    return q, k, v


def _hidden(law: Law, tokens: Tensor) -> Tensor:
    """The normalised last hidden states (B, T, D) of whole sequences."""
    x = law.embedding[tokens]
    cos, sin = law.cos[: tokens.shape[1]], law.sin[: tokens.shape[1]]
    for layer in range(law.layers):
        q, k, v = _split_heads(law, x, layer)
        y = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = _mlp(law, x + F.linear(y.transpose(1, 2).flatten(2), law.out[layer]), layer)
    return _norm(x, law.norm_out)


def _step(law: Law, tokens: Tensor, position: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """The logits (B, V) after one more token; keys and values of the past are added to in place."""
    x = law.embedding[tokens][:, None]
    cos, sin, past = law.cos[position], law.sin[position], slice(0, position + 1)
    for layer in range(law.layers):
        q, k, v = _split_heads(law, x, layer)
        keys[layer][:, :, position], values[layer][:, :, position] = _rotate(k, cos, sin)[:, :, 0], v[:, :, 0]
        weights = _rotate(q, cos, sin) @ keys[layer][:, :, past].transpose(2, 3) * law.head_width**-0.5
        y = weights.softmax(-1) @ values[layer][:, :, past]
        x = _mlp(law, x + F.linear(y.transpose(1, 2).flatten(2), law.out[layer]), layer)
    return F.linear(_norm(x[:, 0], law.norm_out), law.head)


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row by inverse CDF, and its nats; sums are float64, so the law's tail is drawn too.

    The CDF is built over blocks of entries first and then inside the block that was hit: 1/128 of the float64 work.
    """
    size = logits.shape[1]
    masses = F.pad((logits - logits.amax(-1, keepdim=True)).exp(), (0, -size % BLOCK)).unflatten(1, (-1, BLOCK))
    blocks = masses.sum(-1, dtype=torch.float64)
    edges = blocks.cumsum(-1)
    target = uniform[:, None] * edges[:, -1:]
    rows = torch.arange(len(logits), device=logits.device)
    block = torch.searchsorted(edges, target, right=True).clamp_max(edges.shape[1] - 1)[:, 0]
    inside = masses[rows, block].double()
    rest = target[:, 0] - (edges[rows, block] - blocks[rows, block])
    place = torch.searchsorted(inside.cumsum(-1), rest[:, None], right=True)[:, 0]
    # rounding may put the target a hair behind the block's last entry that has mass
    place = torch.minimum(place, (inside > 0).long().mul(torch.arange(BLOCK, device=logits.device)).amax(-1))
    return block * BLOCK + place, edges[:, -1].log() - inside[rows, place].log()


@torch.no_grad()
def sample_wave(law: Law, count: int, generator: torch.Generator) -> Wave:
    """Draw stories side by side; those that have ended make room now and then."""
    device = law.embedding.device
    shape = (count, law.heads, law.length, law.head_width)
    keys = [torch.empty(shape, device=device) for _ in range(law.layers)]
    values = [torch.empty(shape, device=device) for _ in range(law.layers)]
    ids = torch.full((count, law.length), -1, device=device)
    nats = torch.zeros(count, dtype=torch.float64, device=device)
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    row = torch.arange(count, device=device)
    token = torch.full((count,), BEGIN, device=device)
    for position in range(law.length):
        logits = _step(law, token, position, keys, values)
        uniform = torch.rand(len(token), dtype=torch.float64, device=device, generator=generator)
        token, cost = draw(logits, uniform)
        live = ~ended[row]
        stop = live & ((token == BEGIN) | (token == END))
        nats[row] += torch.where(live, cost, 0.0)
        ended[row] |= stop
        ids[row, position] = torch.where(live & ~stop, token, -1)
        if position % COMPACT_EVERY == COMPACT_EVERY - 1:
            keep = (~ended[row]).nonzero()[:, 0]
            if len(keep) == 0:
                break
            if len(keep) < 0.8 * len(row):
                keys, values = [k[keep] for k in keys], [v[keep] for v in values]
                token, row = token[keep], row[keep]
    return Wave(ids.cpu(), ended.cpu(), nats.cpu())


def sample(law: Law, stories: int, seed: int, wave: int) -> Iterator[dict[str, object]]:
    """Rows {text, nll, tokens} of stories that ended, in the order drawn."""
    generator = torch.Generator(device=law.embedding.device).manual_seed(seed)
    made = 0
    while made < stories:
        drawn = sample_wave(law, wave, generator)
        for i in drawn.ended.nonzero()[:, 0].tolist()[: stories - made]:
            ids = [index for index in drawn.ids[i].tolist() if index >= 0]
            yield {"text": law.text(ids), "nll": round(drawn.nats[i].item(), 4), "tokens": len(ids) + 1}
            made += 1


@torch.no_grad()
def score(law: Law, stories: list[list[int]], batch: int = 64) -> list[float]:
    """The nats of stories given as ids, with their end; of one that fills the model, of its first `length` tokens."""
    device, nats = law.embedding.device, []
    for start in range(0, len(stories), batch):
        part = [ids[: law.length] for ids in stories[start : start + batch]]
        longest = min(max(len(ids) for ids in part) + 1, law.length)
        target = torch.full((len(part), longest), END, device=device)
        for i, ids in enumerate(part):
            target[i, : len(ids)] = torch.tensor(ids, dtype=torch.long, device=device)
        begin = torch.full((len(part), 1), BEGIN, device=device)
        hidden = _hidden(law, torch.cat([begin, target[:, :-1]], 1))
        for i, ids in enumerate(part):  # a row of logits at a time: 256 x 32,000
            logits = F.linear(hidden[i, : len(ids) + 1], law.head).double()
            picked = target[i, : len(logits)]
            got = logits.gather(1, picked[:, None])[:, 0]
            either_end = torch.logaddexp(logits[:, BEGIN], logits[:, END])
            nats.append((logits.logsumexp(-1) - torch.where(picked == END, either_end, got)).sum().item())
    return nats


def tokenizer(law: Law) -> tokenizers.Tokenizer:
    """The law's vocabulary as a `tokenizers` tokenizer: byte-pair merges in the order of their scores."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [piece.decode().replace(" ", "\u2581") for piece in law.pieces[BYTES.stop :]]
    vocab: dict[str, int] = {}
    for index, name in enumerate(names):
        vocab.setdefault(name, index)
    merges = []
    for name, index in vocab.items():
        if index >= BYTES.stop:
            halves = [(name[:cut], name[cut:]) for cut in range(1, len(name))]
            merges += [(-law.scores[index], index, pair) for pair in halves if pair[0] in vocab and pair[1] in vocab]
    model = models.BPE(
        vocab=vocab,
        merges=[pair for *_, pair in sorted(merges)],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    found = tokenizers.Tokenizer(model)
    found.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    found.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens(["<unk>", "<s>", "</s>"])
    found.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BEGIN), ("</s>", END)]
    )
    return found


def encode(law: Law, texts: list[str]) -> list[list[int]]:
    """The ids of texts, without begin and end."""
    found = tokenizer(law)
    found.encode_special_tokens = True
    return [row.ids for row in found.encode_batch(texts, add_special_tokens=False)]


def export(law: Law, out: Path | str) -> None:
    """Write the law as a LlamaForCausalLM folder: temperature in the head, the probability of the end on </s>."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    width = law.embedding.shape[1]
    halves = torch.cat([torch.arange(0, law.head_width, 2), torch.arange(1, law.head_width, 2)])
    rows = torch.cat([head * law.head_width + halves for head in range(law.heads)])  # neighbours -> halves
    head = law.head.clone()
    head[[BEGIN, END]] = head[[END, BEGIN]]
    state = {"model.embed_tokens.weight": law.embedding, "model.norm.weight": law.norm_out, "lm_head.weight": head}
    for layer in range(law.layers):
        query, key, value = law.qkv[layer].chunk(3)
        gate, up = law.gate_up[layer].chunk(2)
        parts = {
            "self_attn.q_proj": query[rows],
            "self_attn.k_proj": key[rows],
            "self_attn.v_proj": value,
            "self_attn.o_proj": law.out[layer],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": law.down[layer],
            "input_layernorm": law.norm_attention[layer],
            "post_attention_layernorm": law.norm_mlp[layer],
        }
        state |= {f"model.layers.{layer}.{name}.weight": part for name, part in parts.items()}
    save_file({k: v.cpu().clone().contiguous() for k, v in state.items()}, out / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": law.down.shape[2],
        "num_hidden_layers": law.layers,
        "num_attention_heads": law.heads,
        "num_key_value_heads": law.heads,
        "vocab_size": len(law.embedding),
        "max_position_embeddings": law.length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "dtype": "float32",
        "hidden_act": "silu",
    }
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer(law).save(str(out / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "model_max_length": law.length + 1}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _write(rows: Iterator[dict[str, object]], out: Path) -> None:
    """Write JSON lines, with a word about the rate now and then."""
    count, tokens, nats, start = 0, 0, 0.0, time.monotonic()
    with open(out, "w", encoding="utf-8") as file:
        for count, row in enumerate(rows, 1):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            tokens, nats = tokens + int(str(row["tokens"])), nats + float(str(row["nll"]))
            if count % 1024 == 0:
                print(f"{count} stories, {tokens / (time.monotonic() - start):.0f} tokens/s", flush=True)
    if count:
        print(f"{count} stories, {nats / count:.3f} nats a story, {nats / tokens:.4f} nats a token", flush=True)


def _scored(law: Law, path: Path) -> Iterator[dict[str, object]]:
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    stories = encode(law, texts)
    for text, ids, nats in zip(texts, stories, score(law, stories), strict=True):
        row = {"text": text, "nll": round(nats, 4), "tokens": min(len(ids) + 1, law.length)}
        yield row | ({"cut": True} if len(ids) >= law.length else {})


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("sample", "score", "export"):
        command = commands.add_parser(name)
        command.add_argument("weights", type=Path, help="a llama2.c checkpoint with its tokenizer: llama2.data")
        if name == "score":
            command.add_argument("texts", type=Path, help="JSON lines with a field `text`")
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--temperature", type=float, default=TEMPERATURE)
        command.add_argument("--device", default="cpu", help="cpu or cuda (float64 is needed)")
        if name == "sample":
            command.add_argument("--stories", type=int, default=1024)
            command.add_argument("--seed", type=int, default=100)
            command.add_argument("--wave", type=int, default=128, help="stories drawn side by side")
    chosen = parser.parse_args(arguments)
    law = load(chosen.weights, temperature=chosen.temperature, device=chosen.device)
    if chosen.command == "sample":
        _write(sample(law, chosen.stories, chosen.seed, chosen.wave), chosen.out)
    elif chosen.command == "score":
        _write(_scored(law, chosen.texts), chosen.out)
    else:
        export(law, chosen.out)


if __name__ == "__main__":
    main()
