"""Sizes of the acoustic networks as frozen dataclasses. Published sizes: minicpmo45.md 1.8."""

from __future__ import annotations

import dataclasses

CODES_PER_SECOND = 25
MEL_PER_CODE = 2  # frames
SAMPLES_PER_FRAME = 480
OUTPUT_RATE = 24_000  # Hz
LOOKAHEAD = 3  # codes the flow reads beyond those it renders
SILENCE_CODE = 4218


@dataclasses.dataclass(frozen=True)
class SpeechTokenizerConfig:
    """S3 tokenizer v2: mel at 100 frames a second to 25 codes a second, `levels ** codebook_dims` of them."""

    num_mels: int = 128
    hidden_size: int = 1280
    num_heads: int = 20
    num_layers: int = 6
    fsmn_kernel: int = 31
    codebook_dims: int = 8
    levels: int = 3


@dataclasses.dataclass(frozen=True)
class FlowConfig:
    """Conformer encoder and DiT estimator of the conditional flow matching."""

    vocab_size: int = 6561
    speaker_dim: int = 192
    num_mels: int = 80
    hidden_size: int = 512  # of the encoder
    num_heads: int = 8
    intermediate_size: int = 2048
    num_layers: int = 6  # at the rate of codes
    num_up_layers: int = 4  # at the rate of mel frames
    dit_hidden_size: int = 512
    dit_num_layers: int = 16
    dit_num_heads: int = 8
    dit_head_dim: int = 64
    dit_intermediate_size: int = 2048
    guidance: float = 0.7
    num_steps: int = 10  # Euler steps


@dataclasses.dataclass(frozen=True)
class HiftConfig:
    """HiFT vocoder; `causal` chooses the form of minicpmo-utils 1.0.7 over that of 1.0.6 and before."""

    num_mels: int = 80
    base_channels: int = 512
    f0_channels: int = 512
    upsample_rates: tuple[int, ...] = (8, 5, 3)
    upsample_kernels: tuple[int, ...] = (16, 11, 7)
    resblock_kernels: tuple[int, ...] = (3, 7, 11)
    source_kernels: tuple[int, ...] = (7, 7, 11)
    dilations: tuple[int, ...] = (1, 3, 5)
    n_fft: int = 16
    hop: int = 4
    num_harmonics: int = 8
    sine_amplitude: float = 0.1
    noise_std: float = 0.003
    voiced_threshold: float = 10.0  # Hz
    slope: float = 0.1
    limit: float = 0.99
    causal: bool = False
    lookahead: int = 4  # frames right of a causal vocoder's first convolution


@dataclasses.dataclass(frozen=True)
class SpeakerConfig:
    """CAM++ speaker encoder: filter banks at 100 frames a second to one vector a sound."""

    num_bins: int = 80
    head_channels: int = 32
    head_blocks: tuple[int, ...] = (2, 2)  # residual blocks a stage; a stage and the head's end halve the bins
    tdnn_channels: int = 128
    tdnn_kernel: int = 5
    num_layers: tuple[int, ...] = (12, 24, 16)  # of each dense block
    dilations: tuple[int, ...] = (1, 2, 2)
    growth: int = 32  # channels a layer adds
    kernel: int = 3
    bottleneck: int = 128
    mask_channels: int = 64
    segment: int = 100  # frames of the nearer context
    embedding_size: int = 192
