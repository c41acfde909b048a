"""Text to token ids and back: tokenizers, chat templates, incremental decoding, stop strings."""

from engine.text.codec import TextCodec
from engine.text.detokenizer import Detokenizer
from engine.text.stops import StopFilter
from engine.text.template import TemplateError

__all__ = ["Detokenizer", "StopFilter", "TemplateError", "TextCodec"]
