"""Small Hugging Face directories, written and read by the `safetensors` library rather than by us."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from venus_jax import config as config_lib
from venus_jax.checkpoints import table
from venus_jax.tokens import ADDED_TEXT

TOKENIZER_FILES = ("added_tokens.json", "merges.txt", "special_tokens_map.json", "tokenizer.json",
                   "tokenizer_config.json", "vocab.json")


@dataclasses.dataclass(frozen=True)
class Lab:
    """What the tests of this folder share."""

    scratch: Path
    tokenizer: Path
    ROWS = 426  # of the recorded tokenizer, which lacks the four added tokens

    @staticmethod
    def tiny(rows: int = ROWS, vision: bool = True, audio: bool = True, talker: bool = True) -> config_lib.VenusConfig:
        """A config with these parts; no two widths of a part are alike, so that no axis passes for another."""
        return config_lib.VenusConfig(
            llm=config_lib.LLMConfig(vocab_size=rows, hidden_size=128, intermediate_size=24, num_layers=3, num_heads=4,
                                     num_kv_heads=2, head_dim=8),
            vision=config_lib.VisionConfig(hidden_size=20, intermediate_size=28, num_layers=2, num_heads=2,
                                           image_size=56) if vision else None,
            resampler=config_lib.ResamplerConfig(num_queries=6, hidden_size=128, kv_dim=20) if vision else None,
            audio=config_lib.AudioConfig(hidden_size=16, intermediate_size=64, num_layers=2, num_heads=2,
                                         max_positions=50) if audio else None,
            talker=config_lib.TalkerConfig(hidden_size=12, intermediate_size=36, num_layers=2, num_heads=2,
                                           num_kv_heads=2, num_audio_tokens=18, num_text_tokens=40,
                                           audio_bos_token_id=3, text_eos_token_id=4,
                                           unused_vocab_size=9) if talker else None)

    @staticmethod
    def text(rows: int = ROWS) -> config_lib.VenusConfig:
        """The smallest config: a backbone alone."""
        return Lab.tiny(rows, vision=False, audio=False, talker=False)

    def make(self, config: config_lib.VenusConfig, dtype=np.float32, shards: int = 1, added_tokens: bool = False,
             tokenizer: bool = True, config_json: dict | None = None) -> Path:
        """A directory with random weights; with `added_tokens` the tokenizer names the last four rows."""
        directory = self.scratch / "hf"
        directory.mkdir()
        rng = np.random.default_rng(0)
        self.write(directory, {name: rng.standard_normal(shape, np.float32).astype(dtype)
                               for name, shape in table.hf_shapes(config).items()}, shards)
        (directory / "config.json").write_text(json.dumps(
            {**(config_json or config.to_hf()), "torch_dtype": np.dtype(dtype).name}))
        for file in TOKENIZER_FILES if tokenizer else ():
            shutil.copyfile(self.tokenizer / file, directory / file)
        if added_tokens:
            path = directory / "added_tokens.json"
            ids = {text: config.llm.vocab_size - 4 + i for i, text in enumerate(ADDED_TEXT)}
            path.write_text(json.dumps({**json.loads(path.read_text()), **ids}))
        return directory

    @staticmethod
    def write(directory: Path, tensors, shards: int = 1) -> None:
        """`model.safetensors`, or that many files with an index."""
        if shards == 1:
            safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
            return
        weight_map = {}
        for n in range(shards):
            file = f"model-{n + 1:05}-of-{shards:05}.safetensors"
            part = dict(list(tensors.items())[n::shards])
            safetensors.numpy.save_file(part, directory / file, {"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    @staticmethod
    def read(directory: Path) -> dict[str, np.ndarray]:
        """Every tensor of a directory."""
        tensors = {}
        for path in sorted(directory.glob("*.safetensors")):
            tensors |= safetensors.numpy.load_file(path)
        return tensors

    def assert_same_model(self, a: Path, b: Path) -> None:
        """Equal tensors to the bit, and equal bytes of every file that is not weights."""
        x, y = self.read(a), self.read(b)
        assert x.keys() == y.keys()
        for name in x:
            assert (x[name].shape, x[name].dtype) == (y[name].shape, y[name].dtype), name
            assert x[name].tobytes() == y[name].tobytes(), name
        files = [{p.name: p.read_bytes() for p in d.iterdir() if not p.name.startswith("model")} for d in (a, b)]
        assert files[0] == files[1]


@pytest.fixture(scope="session")
def tiny():
    return Lab.tiny


@pytest.fixture
def lab(tmp_path, golden) -> Lab:
    return Lab(tmp_path, golden / "checkpoint")
