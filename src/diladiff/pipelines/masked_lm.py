"""MaskedLM: a masked diffusion language model to load, to write with, to save and to share."""

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor

from diladiff.config import to_dict
from diladiff.data.tokenizer import Tokenizer
from diladiff.models.token_transformer import TokenTransformer
from diladiff.pipelines import canvas as canvases
from diladiff.pipelines import folder
from diladiff.pipelines.canvas import Canvas
from diladiff.pipelines.denoise import ModelDenoiser
from diladiff.pipelines.frames import Frame, FrameMaker
from diladiff.pipelines.samples import Samples
from diladiff.samplers import SamplerConfig, TokenState, sample, sampler_config

Observer = Callable[[int, TokenState], None]
"""Told after each step: how many samples were finished before this batch, and the batch's state."""

BATCH_SIZES = {"cuda": 32}
"""Samples a batch where none is given; 8 elsewhere."""


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What to write: how many, from which canvas, with which sampler and random numbers."""

    num: int
    sampler: SamplerConfig
    seed: int
    canvas: Canvas
    first_index: int = 0

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ValueError(f"num: {self.num} must be at least 1")
        if self.first_index < 0:
            raise ValueError(f"first_index: {self.first_index} must be at least 0")


@final
class MaskedLM:
    """A network with its tokenizer."""

    def __init__(self, model: TokenTransformer, tokenizer: Tokenizer, *, source: str | None = None) -> None:
        folder.check_tokenizer(model.config, tokenizer)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.source = source
        self._weights_sha256: str | None = None
        self._compiled: ModelDenoiser | None = None

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        revision: str | None = None,
    ) -> "MaskedLM":
        """Load a model folder, the model of a run folder, or a repository of the Hugging Face hub.

        Without a device the first of cuda, mps and cpu that is there; without a dtype the stored one on cuda and
        float32 elsewhere.
        """
        where = pick_device(device)
        loaded = folder.read(folder.find(source, revision=revision))
        stored = next(loaded.model.parameters()).dtype
        wanted = parse_dtype(dtype) if dtype is not None else (stored if where.type == "cuda" else torch.float32)
        lm = cls(loaded.model.to(where, wanted), loaded.tokenizer, source=str(source))
        lm._weights_sha256 = loaded.weights_sha256
        return lm

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the network's weights."""
        return next(self.model.parameters()).dtype

    @property
    def identity(self) -> dict[str, Any]:
        """Where the model came from and the sha256 of its stored weights."""
        if self._weights_sha256 is None:
            self._weights_sha256 = hashlib.sha256(folder.serialise(self.model)).hexdigest()
        return {"source": self.source, "weights_sha256": self._weights_sha256}

    def save_pretrained(
        self, path: str | Path, *, dtype: str | torch.dtype | None = None, card: str | None = None
    ) -> None:
        """Write a model folder; `dtype` sets the type of the stored weights, `card` is the text of its README.md."""
        folder.write(path, self.model, self.tokenizer, dtype=None if dtype is None else parse_dtype(dtype), card=card)

    def push_to_hub(
        self,
        repository: str,
        *,
        dtype: str | torch.dtype | None = None,
        card: str | None = None,
        private: bool = False,
        message: str = "Upload model",
    ) -> str:
        """Save to a repository of the Hugging Face hub, made where there is none; returns the commit's address."""
        import huggingface_hub  # slow to import, and needed here alone

        api = huggingface_hub.HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / repository.rpartition("/")[2]
            self.save_pretrained(path, dtype=dtype, card=card)
            return str(api.upload_folder(repo_id=repository, folder_path=path, commit_message=message))

    def generate(
        self,
        num: int = 1,
        *,
        steps: int | None = 64,
        seed: int = 0,
        sampler: str | SamplerConfig = "ancestral",
        temperature: float = 1.0,
        top_p: float | None = None,
        nucleus: Literal["keep", "drop"] = "keep",
        prompt: str | None = None,
        suffix: str | None = None,
        canvas: str | Tensor | None = None,
        blank_tokens: int = 16,
        length: int | None = None,
        batch_size: int | None = None,
        first_index: int = 0,
        compile: bool = False,
        deterministic: bool = False,
        observe: Observer | None = None,
    ) -> Samples:
        """Write `num` texts. Sample i depends on the seed and its index `first_index + i`, not on the batch.

        `canvas` is a text with ___ where words are wanted, or ids with masks. `steps`, `temperature`, `top_p` and
        `nucleus` belong to a sampler given by name. In bfloat16 a batch's shape may move a near-tie: `deterministic`
        pads every call to one shape.
        """
        request = Request(
            num=num,
            sampler=_sampler(sampler, steps, temperature, top_p, nucleus),
            seed=seed,
            canvas=self.canvas(prompt=prompt, suffix=suffix, canvas=canvas, blank_tokens=blank_tokens, length=length),
            first_index=first_index,
        )
        size = self._batch_size(batch_size)
        denoise = self._denoiser(compile=compile, fixed_batch=size if deterministic else None)
        started = time.perf_counter()
        ids = []
        for first in range(0, num, size):
            for state in self._states(request, first, min(size, num - first), denoise):
                if observe is not None:
                    observe(first, state)
            ids.append(state.tokens_BL.cpu())
        ids_BL = torch.cat(ids)
        seconds = time.perf_counter() - started
        return Samples(
            ids=ids_BL,
            texts=[canvases.read(self.tokenizer, request.canvas, ids_L) for ids_L in ids_BL],
            settings={
                "sampler": to_dict(request.sampler),
                "seed": seed,
                "protocol": canvases.describe(self.tokenizer, request.canvas),
                "batch_size": size,
                "device": self.device.type,
                "dtype": folder.dtype_name(self.dtype),
                "compile": compile,
                "deterministic": deterministic,
            },
            seconds=seconds,
            tokens=num * int((request.canvas.ids_L == self.tokenizer.mask_id).sum()),
            first_index=first_index,
        )

    def stream(
        self,
        num: int = 1,
        *,
        steps: int | None = 64,
        seed: int = 0,
        sampler: str | SamplerConfig = "ancestral",
        temperature: float = 1.0,
        top_p: float | None = None,
        nucleus: Literal["keep", "drop"] = "keep",
        prompt: str | None = None,
        suffix: str | None = None,
        canvas: str | Tensor | None = None,
        blank_tokens: int = 16,
        length: int | None = None,
        first_index: int = 0,
    ) -> Iterator[Frame]:
        """The same texts as `generate`'s, in one batch, as frames while they form: the canvas, then each step."""
        request = Request(
            num=num,
            sampler=_sampler(sampler, steps, temperature, top_p, nucleus),
            seed=seed,
            canvas=self.canvas(prompt=prompt, suffix=suffix, canvas=canvas, blank_tokens=blank_tokens, length=length),
            first_index=first_index,
        )
        return self._frames(request, self._denoiser(compile=False, fixed_batch=None))

    def canvas(
        self,
        *,
        prompt: str | None = None,
        suffix: str | None = None,
        canvas: str | Tensor | None = None,
        blank_tokens: int = 16,
        length: int | None = None,
    ) -> Canvas:
        """What `generate` starts from: ids with masks where it writes, and the parts that its text is read by."""
        most = self.model.config.length
        if length is not None and not 1 <= length <= most:
            raise ValueError(f"length: {length} must be between 1 and {most}, the model's length")
        size = most if length is None else length
        if canvas is None:
            if prompt or suffix:
                return canvases.around(self.tokenizer, size, prefix=prompt or "", suffix=suffix or "")
            return canvases.blank(self.tokenizer, size)
        if prompt is not None or suffix is not None:
            raise ValueError("canvas: give it alone, the prompt and the suffix written into it")
        if isinstance(canvas, str):
            return canvases.infill(self.tokenizer, size, canvas, blank_tokens=blank_tokens)
        return canvases.of_ids(self.tokenizer, size, canvas)

    def text(self, canvas: Canvas, ids_L: Tensor) -> str:
        """The text of a filled canvas: what was given word for word, the rest decoded."""
        return canvases.read(self.tokenizer, canvas, ids_L)

    def _states(self, request: Request, first: int, count: int, denoise: ModelDenoiser) -> Iterator[TokenState]:
        """One batch: `count` samples behind the first `first`."""
        canvas_BL = request.canvas.ids_L.expand(count, -1).to(self.device)
        index_B = request.first_index + first + torch.arange(count)
        mask_id = self.tokenizer.mask_id
        return sample(
            request.sampler,
            denoise,
            canvas_BL,
            index_B.to(self.device),
            mask_id=mask_id,
            seed=request.seed,
            write=denoise.writer,
        )

    def _frames(self, request: Request, denoise: ModelDenoiser) -> Iterator[Frame]:
        """Frames whose seconds leave out what the caller does between them."""
        maker = FrameMaker(self.tokenizer, request.canvas.ids_L)
        seconds, resumed = 0.0, time.perf_counter()
        for state in self._states(request, 0, request.num, denoise):
            ids_BL = state.tokens_BL.cpu()  # waits for the device, so that the time is the step's own
            seconds += time.perf_counter() - resumed
            yield maker.make(state._replace(tokens_BL=ids_BL), seconds)
            resumed = time.perf_counter()

    def _batch_size(self, batch_size: int | None) -> int:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size: {batch_size} must be at least 1")
        return BATCH_SIZES.get(self.device.type, 8) if batch_size is None else batch_size

    def _denoiser(self, *, compile: bool, fixed_batch: int | None) -> ModelDenoiser:
        if not compile or fixed_batch is not None:
            return ModelDenoiser(self.model, compile=compile, fixed_batch=fixed_batch)
        if self._compiled is None:
            self._compiled = ModelDenoiser(self.model, compile=True)
        return self._compiled


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """The given device, or the first of cuda, mps and cpu that is there."""
    if device is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device: {device!r} is not a device; give cuda, cuda:1, mps or cpu") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for and this machine or this torch has none; give cpu or leave it out")
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device: mps was asked for and this machine or this torch has none; give cpu or leave it out")
    return found


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A type of weights by its name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _sampler(
    sampler: str | SamplerConfig,
    steps: int | None,
    temperature: float,
    top_p: float | None,
    nucleus: Literal["keep", "drop"],
) -> SamplerConfig:
    """A sampler's settings; those given beside a full configuration would be lost, so they are refused."""
    if isinstance(sampler, str):
        return sampler_config(sampler, steps=steps, temperature=temperature, top_p=top_p, nucleus=nucleus)
    if temperature != 1.0 or top_p is not None or nucleus != "keep":
        raise ValueError("temperature, top_p and nucleus: set them in the draw of the sampler's own configuration")
    return sampler
