"""Text to token ids and back: tokenizers, chat templates, incremental decoding, stop strings."""

from engine.text.codec import TextCodec
from engine.text.detokenizer import Detokenizer
from engine.text.grammar_matcher import CompiledGrammar
from engine.text.grammar_source import GrammarSpec
from engine.text.grammar_source import Tool as GrammarTool
from engine.text.guard import texts_of
from engine.text.replies import ReplyParser
from engine.text.reply_parts import Part, join_parts
from engine.text.stops import StopFilter
from engine.text.template import TemplateError

__all__ = [
    "CompiledGrammar",
    "Detokenizer",
    "GrammarSpec",
    "GrammarTool",
    "Part",
    "ReplyParser",
    "StopFilter",
    "TemplateError",
    "TextCodec",
    "join_parts",
    "texts_of",
]
