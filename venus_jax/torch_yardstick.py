"""The yardstick of `bench.py`: the same units in a plain PyTorch loop, in a process that never sees JAX.

    python -P venus_jax/torch_yardstick.py     # -P, or this package's typing.py hides the standard one
    python -m venus_jax.torch_yardstick        # from the root

Any Python with torch and transformers will do. Weights are random; what is measured is the work.

It talks in lines. The first line in is a model's JSON (the text of `--model_json` on one line); the answer is
`{"ready": true, "parameters": N}`. From then on `listen` or `speak` runs one unit, a second of noise, and answers
`{"seconds", "parts": {"audio", "backbone"}, "kv_length", "audio_kv_length"}`; `reset` begins a new session and answers
nothing; `quit` or the end of input ends. What goes wrong is a line `{"error": ...}`: without torch or transformers it
is the only one, before anything is read.

A unit is fed the way the reference feeds it: `<unit>`, ten embeddings of sound, then a decision and a forward pass for
every token, at last the terminator with `</unit>`. Nothing is computed that the loop does not use: logits exist only
where a decision is made, and of the last row.
"""

import inspect
import json
import os
import sys
import time

os.environ["USE_FLAX"] = "0"  # transformers 4 imports JAX where it finds it

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
    from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
    from transformers.audio_utils import mel_filter_bank
except ImportError as error:
    if __name__ != "__main__":
        raise
    print(json.dumps({"error": f"the PyTorch yardstick needs torch and transformers >= 4.51: {error}"}), flush=True)
    sys.exit(1)

SAMPLE_RATE = 16_000
FFT_SIZE, HOP = 400, 160
UNIT_FRAMES = SAMPLE_RATE // HOP
UNIT_STATES = UNIT_FRAMES // 2
CONTEXT = 2  # mel frames before and after a unit; the convolutions turn them into one state a side, which is cut
LEAD, LAG = 560, 80  # the first second is padded in front to 1035 ms, of which 1030 are heard
DYNAMIC_FROM, SLIDE_AT, SLIDE_BY = 5 * SAMPLE_RATE, 30 * SAMPLE_RATE, 10 * SAMPLE_RATE
POOL = 5


class StreamingMel:
    """Log-mel frames of a live stream, recomputed each time from all the sound remembered (20 to 30 s)."""

    def __init__(self, num_mels: int):
        filters = mel_filter_bank(FFT_SIZE // 2 + 1, num_mels, 0.0, SAMPLE_RATE / 2, SAMPLE_RATE, "slaney", "slaney")
        self.filters = torch.from_numpy(filters.T).float().contiguous()
        self.window = torch.hann_window(FFT_SIZE)
        self.reset()

    def reset(self) -> None:
        """Begins a new stream."""
        self.samples = torch.zeros(LEAD)
        self.start = 0  # the next unit's first frame, counted from `samples[0]`

    def __call__(self, second: torch.Tensor) -> torch.Tensor:
        """float32 [16000] -> [mels, 102] the first time, then [mels, 104]."""
        self.samples = torch.cat([self.samples, second])
        if len(self.samples) - LAG >= SLIDE_AT:
            self.samples = self.samples[SLIDE_BY:]
            self.start -= SLIDE_BY // HOP
        heard = self.samples[:-LAG]
        spectrum = torch.stft(heard, FFT_SIZE, HOP, window=self.window, return_complex=True)[:, :-1]
        power = spectrum.real.square() + spectrum.imag.square()
        log = (self.filters @ power).clamp_(min=1e-10).log10_()
        if len(heard) >= DYNAMIC_FROM:
            log.clamp_(min=log.max().item() - 8)
        frames = log[:, max(0, self.start - CONTEXT):self.start + UNIT_FRAMES + CONTEXT]
        self.start += UNIT_FRAMES
        return (frames + 4) / 4


class Attention(nn.Module):
    """Attention of the newest states over themselves and all in the cache."""

    def __init__(self, size: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.v_proj, self.out_proj = (nn.Linear(size, size) for _ in range(3))
        self.k_proj = nn.Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, past: int) -> torch.Tensor:
        """x [1, T, D], cache [2, 1, heads, slots, head_dim] of which `past` slots are in use; writes T more."""
        q, k, v = (proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        end = past + x.shape[1]
        cache[0, :, :, past:end], cache[1, :, :, past:end] = k, v
        out = F.scaled_dot_product_attention(q, *cache[:, :, :, :end])
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Whisper's pre-LN encoder block."""

    def __init__(self, size: int, heads: int, intermediate: int):
        super().__init__()
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.self_attn = Attention(size, heads)
        self.fc1, self.fc2 = nn.Linear(size, intermediate), nn.Linear(intermediate, size)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, past: int) -> torch.Tensor:
        """See `Attention.forward`."""
        x = x + self.self_attn(self.self_attn_layer_norm(x), cache, past)
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class StreamingWhisper(nn.Module):
    """Whisper's encoder over a stream of units; its cache holds `max_source_positions` states and then starts anew."""

    def __init__(self, aud: dict):
        super().__init__()
        size, heads, slots = aud["d_model"], aud["encoder_attention_heads"], aud["max_source_positions"]
        layers = aud["encoder_layers"]
        if slots < UNIT_STATES:
            raise ValueError(f"max_source_positions is {slots}; expected at least {UNIT_STATES}, a unit")
        self.conv1 = nn.Conv1d(aud["num_mel_bins"], size, 3, padding=1)
        self.conv2 = nn.Conv1d(size, size, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(slots, size)
        self.layers = nn.ModuleList(Block(size, heads, aud["encoder_ffn_dim"]) for _ in range(layers))
        self.layer_norm = nn.LayerNorm(size)
        self.cache = torch.zeros(layers, 2, 1, heads, slots, size // heads)
        self.length = 0

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        """mel [mels, 102 or 104] -> states [1, 50, D]."""
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel[None])))).transpose(1, 2)
        if self.length + x.shape[1] >= self.embed_positions.num_embeddings:  # the reference counts what is cut, too
            self.length = 0
        x = x[:, -1 - UNIT_STATES:-1] + self.embed_positions.weight[self.length:self.length + UNIT_STATES]
        for layer, cache in zip(self.layers, self.cache):
            x = layer(x, cache, self.length)
        self.length += UNIT_STATES
        return self.layer_norm(x)


class Projector(nn.Module):
    """States of the audio tower -> embeddings of the backbone, ten a second."""

    def __init__(self, size: int, hidden: int):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(size, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, 50, D] -> [1, 10, hidden]; the mean of every five follows the projection."""
        return self.linear2(F.relu(self.linear1(x))).unflatten(1, (-1, POOL)).mean(2)


class Yardstick:
    """The models of one `--model_json` file and one session with them."""

    def __init__(self, spec: dict):
        model = spec["model"]
        torch.manual_seed(spec["seed"])
        torch.set_num_threads(spec["threads"])
        self.speak_tokens = spec["speak_tokens"]
        self.mel = StreamingMel(model["aud"]["num_mel_bins"])
        self.audio = StreamingWhisper(model["aud"])
        self.projector = Projector(model["aud"]["d_model"], model["hidden"])
        self.llm = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=spec["vocab_size"], hidden_size=model["hidden"], intermediate_size=model["inter"],
            num_hidden_layers=model["layers"], num_attention_heads=model["heads"], num_key_value_heads=model["kv"],
            head_dim=model["head_dim"], tie_word_embeddings=False, use_sliding_window=False, sliding_window=None,
            attn_implementation="sdpa")).eval()
        # transformers renamed the argument in version 5
        renamed = "cache" in inspect.signature(Qwen3ForCausalLM.forward).parameters
        self.cache_name = "cache" if renamed else "past_key_values"
        self.parameters = sum(p.numel() for part in (self.audio, self.projector, self.llm) for p in part.parameters())
        self.reset()

    def reset(self) -> None:
        """Begins a new session."""
        self.mel.reset()
        self.audio.length = 0
        self.cache = DynamicCache()

    def embed(self, *ids: int) -> torch.Tensor:
        """Embeddings [1, T, hidden] of some tokens."""
        return self.llm.model.embed_tokens(torch.tensor([ids]))

    def feed(self, embeds: torch.Tensor) -> torch.Tensor:
        """Appends embeddings [1, T, hidden] to the session; the last hidden state [1, hidden]."""
        return self.llm.model(inputs_embeds=embeds, use_cache=True, **{self.cache_name: self.cache})[0][:, -1]

    def decide(self, hidden: torch.Tensor) -> int:
        """The likeliest token after a hidden state [1, hidden]."""
        return self.llm.lm_head(hidden).argmax().item()

    def unit(self, speak: bool) -> dict:
        """Runs one unit and says how long its parts took, in seconds, and how long the caches are, in positions."""
        last = self.llm.config.vocab_size - 1
        unit, listen, chunk_eos, unit_end = range(last, last - 4, -1)  # random weights: any four will do
        second = torch.randn(SAMPLE_RATE) * 0.1
        start = time.perf_counter()
        sound = self.projector(self.audio(self.mel(second)))
        middle = time.perf_counter()
        self.feed(self.embed(unit))
        token = self.decide(self.feed(sound))
        # The script, not random weights, says how many tokens follow; each is still decided.
        for _ in range(self.speak_tokens if speak else 0):
            token = self.decide(self.feed(self.embed(token)))
        self.feed(self.embed(chunk_eos if speak else listen, unit_end))
        end = time.perf_counter()
        return {"seconds": end - start, "parts": {"audio": middle - start, "backbone": end - middle},
                "kv_length": self.cache.get_seq_length(), "audio_kv_length": self.audio.length}


def answer(**message) -> None:
    """Prints one line of JSON."""
    print(json.dumps(message), flush=True)


@torch.inference_mode()
def main() -> int:
    """Reads lines, answers lines; returns the exit status."""
    try:
        yardstick = Yardstick(json.loads(sys.stdin.readline()))
    except KeyError as error:
        answer(error=f"the model's JSON has no {error}")
        return 1
    except Exception as error:  # no JSON, or sizes that torch or transformers refuse, each in its own way
        answer(error=f"no model can be built from the first line: {' '.join(str(error).split())}")
        return 1
    answer(ready=True, parameters=yardstick.parameters)
    for line in sys.stdin:
        match line.strip():
            case "listen" | "speak" as word:
                answer(**yardstick.unit(word == "speak"))
            case "reset":
                yardstick.reset()
            case "quit":
                break
            case word:
                answer(error=f"unknown command {word!r}; expected listen, speak, reset or quit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
