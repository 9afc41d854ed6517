"""Speech codes to sound and back: networks that are fixed while the conversation model learns."""

import importlib

_PLACES = {"Voice": "voice", "encode": "speech_tokenizer", "prepare": "voice"}

__all__ = sorted(_PLACES)


def __getattr__(name: str):
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
