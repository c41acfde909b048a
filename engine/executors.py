"""What computes: the decoder and the attention executor that a config asks for, and this machine can run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.attention.base import AttentionBackend, KvShape
from engine.attention.compiled import CompiledAttention, paging_refusal
from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from engine.config import EngineConfig
from engine.errors import ConfigError, KernelUnavailable
from engine.kernels.library import load_library
from engine.models import cuda_setup
from engine.models.cuda import CudaCapture
from engine.models.decoder import Decoder
from engine.models.linear import has_packed_linear, native_bf16
from engine.models.loader import load_model
from engine.models.native import NativeDecoder
from engine.models.store import ModelLocation
from engine.pipeline import Pipeline
from engine.sampling.sampler import Sampler


def load_decoder(config: EngineConfig, location: ModelLocation) -> tuple[Decoder, tuple[str, ...]]:
    """Load the weights for what computes, in the dtype this machine can run, and what the user should know.

    The reference executor always computes in float32, from the weights that the chosen dtype would have.
    """
    if config.executor == "flashinfer":
        return cuda_setup.load_cuda_decoder(config, location, capture=CudaCapture()), ()
    bf16 = native_bf16() and has_packed_linear()
    wants_bf16 = config.dtype == "bfloat16" or (config.dtype == "auto" and bf16)
    load = partial(load_model, location, max_context=config.max_context or None)
    if config.executor == "reference":
        decoder = load(torch.float32, arithmetic="plain", round_to_bf16=wants_bf16)
        return decoder, ("reference executor: slow, for comparison",)
    notes = ("this machine has no native bfloat16: float32 is used",) if wants_bf16 and not bf16 else ()
    dtype = torch.bfloat16 if wants_bf16 and bf16 else torch.float32
    if config.executor != "torch":
        try:
            return load(dtype, arithmetic="native", build=_native(config, dtype)), notes
        except KernelUnavailable as error:
            if config.executor == "compiled":
                raise ConfigError(f"HEADWATER_EXECUTOR=compiled can't be had: {error}") from None
            notes = (*notes, f"no compiled kernel, torch computes instead, which is slower: {error}")
    return load(dtype), notes


def _native(config: EngineConfig, dtype: torch.dtype) -> Callable[..., NativeDecoder]:
    """What makes a decoder for the compiled kernel. Raises KernelUnavailable where there is none."""
    library = load_library()
    problem = paging_refusal(library, config.page_size, config.tile, dtype)
    if problem:
        raise KernelUnavailable(problem)
    return partial(NativeDecoder, library=library)


def make_pipeline(config: EngineConfig, decoder: Decoder, layers: int, pages: int) -> Pipeline:
    """The decoder's first layers over KV memory of their own."""
    shape = kv_shape(config, decoder, layers, pages)
    decoder = decoder if layers == decoder.config.num_layers else decoder.shallow(layers)
    sampler = Sampler(decoder.config.vocab_size)
    attention: AttentionBackend
    if config.executor == "reference":
        attention = ReferenceAttention(shape, align=config.tile)
    elif config.executor == "flashinfer":
        attention = cuda_setup.make_cuda_attention(config, shape, decoder.dtype)
    elif isinstance(decoder, NativeDecoder):
        attention = CompiledAttention(decoder.library, shape, decoder.dtype, tile=config.tile)
    else:
        attention = CpuAttention(shape, decoder.dtype, tile=config.tile)
    return Pipeline(decoder, attention, sampler)


def kv_shape(config: EngineConfig, decoder: Decoder, layers: int, pages: int) -> KvShape:
    """The KV memory of some layers of a decoder."""
    model = decoder.config
    return KvShape(layers, pages, config.page_size, model.num_heads, model.num_kv_heads, model.head_dim)


def page_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Bytes of one page in all layers."""
    shape = kv_shape(config, decoder, decoder.config.num_layers, 0)
    return shape.page_bytes(4 if config.executor == "reference" else decoder.dtype.itemsize)
