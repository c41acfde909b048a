"""GBNF is read as it is written elsewhere, and means the same: a character is a character."""

from __future__ import annotations

import pytest
from grammar_rig import accepts, allowed

from engine.errors import RequestError
from engine.text import GrammarSpec, TextCodec

JSON = r"""
# JSON, as grammars of this kind usually have it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# one blank, or a line with its indentation
ws ::= | " " | "\n" [ \t]{0,20}
"""

LIST = """root ::= item+\r
item ::= "- " [^\\r\\n]+ "\\n"   # comment ::= "no rule"\r
"""

ARITHMETIC = """
root  ::= expr "=" [0-9]+
expr  ::= term ([-+*/] term)*
term  ::= "(" expr ")"
        | num-ber
        | [a-z_]+
num-ber ::= [0-9]{1,}
unused ::= "x" unused
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            JSON,
            ['{"a": [1, -2.5e3, "x\\n\\u00e9é"], "b": {}}', "{}", '{ "a": true }'],
            ["[]", '{"a":}', "{,}"],
        ),
        (LIST, ["- one\n", "- one\n- zwei ü 漢\n"], ["", "-one\n", "- one", "- a\r\n"]),
        (ARITHMETIC, ["1+(a*22)=7", "x_y=0"], ["1+=7", "=7", "1=", "unused"]),
        ('root ::= ("a" | "ab") "b"', ["ab", "abb"], ["a", "b", "abbb"]),
        ('root ::= [a-z]* "x"', ["x", "abx", "xx"], ["", "ab", "xa"]),
        ('root ::= "if" | [a-z]+ "?"', ["if", "if?", "i?"], ["i", "ifs"]),
        ('root ::= "a"{3}', ["aaa"], ["aa", "aaaa"]),
        ('root ::= "a"{2,}', ["aa", "a" * 60], ["a", ""]),
        ('root ::= ("ab"){0,2} "."', [".", "ab.", "abab."], ["ababab.", "a."]),
        ('root ::= "a"{ 1 , 2 }', ["a", "aa"], ["", "aaa"]),
        (r'root ::= "\x41\u00e9\U0001F600\t\\\"\[\]"', ['Aé😀\t\\"[]'], ["A"]),
        (r"root ::= [\x41-\x43\u00e0-\u00e9\]\\^-]+", ["ABCéè]\\^-"], ["D", "ê", "["]),
        ("root ::= [^a-c]", ["d", "漢", "\n", "^"], ["a", "dd"]),
        ("root ::= [-a] [a-]", ["--", "aa", "-a"], ["b-"]),
        ("root ::= .", ["x", "é", "\n", "😀"], ["", "xy"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "a" | \n "b"', ["a", "b"], ["ab"]),
        (
            "root ::= a?\na ::= b | c\nb ::= 'x' | b\nc ::= \"c\"".replace("'x'", '"x"'),
            ["", "x", "c"],
            ["xx"],
        ),
        ('root ::= r*\nr ::= ("x" | "y")? "z"', ["", "zxz", "yz"], ["x", "xx"]),
        ('root ::= "/" "//" "#" "\\\\"', ["///#\\"], ["///#"]),
        ('start ::= "s"\nroot ::= start R\nR ::= "r"\nr ::= "R"', ["sr"], ["sR"]),
    ],
)
def test_a_grammar_lets_through_what_it_says(
    codec: TextCodec, grammar: str, good: list[str], bad: list[str]
) -> None:
    compiled = codec.grammars.compile(GrammarSpec("gbnf", grammar))
    assert [text for text in good if not accepts(compiled, codec, text)] == []
    assert [text for text in bad if accepts(compiled, codec, text)] == []


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= [a-z ] root | "."', "some words that go on and on " * 120 + ".", "some words"),
        ('root ::= "." | [a-z ] root?', "more and more " * 200, "A"),
        ('root ::= "" | "a" root | "b" root', "ab" * 1500, "abc"),
    ],
)
def test_recursion_at_the_end_goes_on_for_as_long_as_a_text(
    codec: TextCodec, grammar: str, good: str, bad: str
) -> None:
    compiled = codec.grammars.compile(GrammarSpec("gbnf", grammar))
    assert accepts(compiled, codec, good)
    assert not accepts(compiled, codec, bad)


def test_the_mask_is_the_grammars_next_characters(codec: TextCodec) -> None:
    constraint = codec.grammars.compile(GrammarSpec("gbnf", 'root ::= "ye" ("s" | "t") | "no"')).start()
    firsts = {codec.token_text(i) for i in allowed(constraint.mask([]))}
    assert firsts == {"y", "n", "ye", "yes", "yet", "no"} & firsts
    assert {"ye", "no"} <= firsts


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "the grammar has no rule 'root'"),
        ('start ::= "a"', "the grammar has no rule 'root'"),
        ("root ::= missing", "line 1: the rule 'missing' is not defined"),
        ('root ::= "a"\n\nb ::= "x" c', "line 3: the rule 'c' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined twice"),
        ('root = "a"', "line 1: '::=' must follow the name 'root'"),
        ('root ::= "a', "line 1: a literal lacks its closing '\"'"),
        ("root ::= [a-z", "line 1: a character class lacks its ']'"),
        ("root ::= []", "line 1: a character class is empty"),
        ("root ::= [z-a]", "line 1: the range 'z' to 'a' runs backwards"),
        ('root ::= ("a"\n', "line 2: a group lacks its ')'"),
        ('root ::= "a")', "line 1: ')' is not expected here"),
        (r'root ::= "\q"', r"line 1: the escape \q is not known"),
        (r'root ::= "\xg1"', r"line 1: \xg1 is no character"),
        (r'root ::= "\ud800"', r"line 1: \ud800 is no character"),
        ('root ::= "a"{,3}', "line 1: a repetition must be {m}, {m,} or {m,n}"),
        ('root ::= "a"{3', "line 1: a repetition must be {m}, {m,} or {m,n}"),
        ('root ::= "a"{3,2}', "line 1: the repetition {3,2} runs backwards"),
        ('root ::= "a"{9999}', "line 1: a repetition counts to more than 5000"),
        (
            'root ::= * "a"',
            "line 1: a literal, a character class, a group or a rule's name is expected, not '*'",
        ),
        ("root ::= <think>", "line 1: a literal, a character class, a group or a rule's name is expected"),
        ("root ::= " + "(" * 70 + '"a"' + ")" * 70, "line 1: groups are nested more than 64 deep"),
        ("\n".join(f'r{i} ::= "a"' for i in range(2100)), "the grammar has more than 2000 rules"),
        ('root ::= "a" root', ""),
        ('root ::= "\ud800"', "half of a surrogate pair"),
    ],
)
def test_a_bad_grammar_is_refused_with_line_and_reason(codec: TextCodec, grammar: str, message: str) -> None:
    """O067: never free text where a grammar was asked for."""
    with pytest.raises(RequestError) as caught:
        codec.grammars.compile(GrammarSpec("gbnf", grammar), param="response_format.grammar")
    assert message in str(caught.value)
    assert caught.value.param == "response_format.grammar"
