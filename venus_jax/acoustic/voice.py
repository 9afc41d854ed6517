"""A voice: what the flow and the talker's turns need of a prompt, computed once and kept in one small file.

A prepared voice needs neither the speech tokenizer nor the speaker encoder where it is used.
"""

from __future__ import annotations

import dataclasses
import os
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import logging

from venus_jax.acoustic import fbank, speaker, speech_tokenizer
from venus_jax.acoustic import sound as sound_lib
from venus_jax.acoustic.config import CODES_PER_SECOND, MEL_PER_CODE, OUTPUT_RATE, SpeakerConfig, SpeechTokenizerConfig
from venus_jax.config import SAMPLE_RATE
from venus_jax.errors import CheckpointError, MediaError
from venus_jax.typing import Params

SHORTEST = 0.5  # seconds; less says too little of a voice
LONGEST = 17.0  # seconds; the reference's buffers hold 1000 frames: 850 of a prompt, 100 of history, 50 of a chunk
SILENCE = 1e-3  # root mean square (-60 dB) that the loudest 25 ms of a prompt must exceed

_ARRAYS = {"codes": "prompt_tokens", "speaker": "spk_embedding", "mel": "prompt_mel"}  # our field: name in the file
_PADDED_TO = 500  # frames; one compiled speaker encoder for every 5 s


@dataclasses.dataclass(frozen=True)
class Voice:
    """A prompt as the flow takes it.

    Attributes:
      codes: int32 [P], 25 a second.
      speaker: float32 [E], E = 192 as published; not normalised.
      mel: float32 [2 P, 80], 50 frames a second.
      source: where it came from, for people.
      notes: what was done to the prompt, such as trimming.
    """

    codes: np.ndarray
    speaker: np.ndarray
    mel: np.ndarray
    source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self):
        shapes = [np.shape(getattr(self, field)) for field in _ARRAYS]
        if [len(shape) for shape in shapes] != [1, 1, 2] or not shapes[0][0] or (
                shapes[2][0] != MEL_PER_CODE * shapes[0][0]):
            raise CheckpointError(f"a voice of codes {list(shapes[0])}, speaker {list(shapes[1])} and mel "
                                  f"{list(shapes[2])}; expected [P], [E] and [{MEL_PER_CODE} P, M] with P at least 1")
        for field, dtype in (("codes", np.int32), ("speaker", np.float32), ("mel", np.float32)):
            value = np.asarray(getattr(self, field), dtype)
            if not np.isfinite(value).all():
                raise CheckpointError(f"a voice's {field} has numbers that are infinite or not a number")
            object.__setattr__(self, field, value)

    @property
    def seconds(self) -> float:
        """Length of the prompt."""
        return len(self.codes) / CODES_PER_SECOND

    def save(self, path: str | os.PathLike) -> None:
        """Writes one `.npz`, whole or not at all; CheckpointError where the file system refuses."""
        path = Path(path)
        scratch = path.with_name(f".{path.name}.incomplete")
        try:
            with open(scratch, "wb") as file:
                np.savez(file, source=self.source, notes=np.array(self.notes, str),
                         **{name: getattr(self, field) for field, name in _ARRAYS.items()})
            os.replace(scratch, path)
        except OSError as e:
            scratch.unlink(missing_ok=True)
            raise CheckpointError(f"{path}: cannot be written ({e.strerror or e})") from e

    @classmethod
    def load(cls, path: str | os.PathLike) -> Voice:
        """Reads what `save` wrote, or any `.npz` with `prompt_tokens`, `spk_embedding` and `prompt_mel`.

        Raises:
          CheckpointError: no such file; not one; arrays missing or misshapen; the message names the file.
        """
        try:
            with np.load(path) as file:
                if missing := [name for name in _ARRAYS.values() if name not in file]:
                    raise CheckpointError(f"no array {', '.join(missing)}")
                arrays = {field: file[name] for field, name in _ARRAYS.items()}
                return cls(**arrays, source=str(file["source"]) if "source" in file else str(path),
                           notes=tuple(file["notes"].tolist()) if "notes" in file else ())
        except CheckpointError as e:
            raise CheckpointError(f"{path}: {e}") from e
        except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as e:
            raise CheckpointError(f"{path}: not a voice; expected an .npz file ({e})") from e


def prepare(sound: str | os.PathLike | np.ndarray, tokenizer: tuple[SpeechTokenizerConfig, Params],
            speaker_encoder: tuple[SpeakerConfig, Params], sample_rate: float | None = None,
            longest: float = LONGEST) -> Voice:
    """Makes a voice of a recording of somebody speaking.

    Rules: minicpmo45.md 6.5. Channels are averaged (the reference takes the first for codes and speaker). The mel ends
    where the codes do: its last frame is repeated, or what is beyond is cut.

    Args:
      sound, sample_rate: a file, or an array and its rate, as in `acoustic.sound.mono`.
      tokenizer, speaker_encoder: configs and parameters, as the converters give them.
      longest: seconds of the beginning that are kept of a longer recording, with a logged warning and a note in the
        voice; every turn attends to the whole prompt.

    Raises:
      MediaError: not a sound that can be read (see `acoustic.sound.mono`); shorter than 0.5 s; silent.
    """
    name = str(sound) if isinstance(sound, (str, os.PathLike)) else "the recording"
    low, high = (sound_lib.mono(sound, sample_rate, rate) for rate in (SAMPLE_RATE, OUTPUT_RATE))
    seconds, notes = len(low) / SAMPLE_RATE, ()
    if seconds < SHORTEST:
        raise MediaError(f"{name}: {seconds:.2f} s long; a voice needs at least {SHORTEST} s of speech")
    if seconds > longest:
        notes = (f"only the first {longest:g} s of {seconds:.1f} s are used",)
        logging.warning("%s: %s", name, notes[0])
        low, high = low[:round(longest * SAMPLE_RATE)], high[:round(longest * OUTPUT_RATE)]
    loudest = np.sqrt((low[:len(low) // fbank.FRAME * fbank.FRAME].reshape(-1, fbank.FRAME)**2).mean(axis=1).max())
    if loudest < SILENCE:
        raise MediaError(f"{name}: silent (at most {20 * np.log10(max(loudest, 1e-9)):.0f} dB); expected speech above "
                         f"{20 * np.log10(SILENCE):.0f} dB")

    config, params = tokenizer
    codes = speech_tokenizer.encode(low, SAMPLE_RATE, params, config)
    mel = fbank.prompt_mel(high)
    wanted = MEL_PER_CODE * len(codes)
    mel = np.pad(mel, ((0, max(0, wanted - len(mel))), (0, 0)), mode="edge")[:wanted]
    return Voice(codes, _embed(fbank.speaker_features(low), *speaker_encoder), mel, name, notes)


def _embed(features: np.ndarray, config: SpeakerConfig, params: Params) -> np.ndarray:
    padding = -len(features) % _PADDED_TO
    vector = speaker.embed(params, config, np.pad(features, ((0, padding), (0, 0)))[None],
                           jnp.array([len(features)], jnp.int32))
    return np.asarray(vector[0])
