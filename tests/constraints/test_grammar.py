"""Answers under a grammar, with the embedded model's tokenizer and random choices for a model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import quire.demo
from quire.constraints.grammar import GrammarCompiler, GrammarState, check_grammar, readable
from quire.constraints.masks import TokenMask
from quire.core.errors import RequestError
from quire.core.request import NO_BEGINNING, GrammarSpec

TOKENIZER = Path(quire.demo.__file__).parent / "model" / "tokenizer.json"

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F", None]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 31}},
    },
    "required": ["name", "unit", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def eos(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset({tokenizer.token_to_id("<eos>"), tokenizer.token_to_id("<turn|>")})


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer, eos: frozenset[int]) -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, tokenizer.get_vocab_size() + 45, eos)


def schema_spec(schema: object, **free: tuple[int, ...]) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), **free)


def allowed(mask: TokenMask | None) -> list[int]:
    assert mask is not None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    tokens: list[int] = np.flatnonzero(bits).tolist()
    return tokens


def random_answer(state: GrammarState, eos: frozenset[int], seed: int) -> list[int] | None:
    """Return a random answer within the grammar; None if it has not ended after 400 tokens."""
    rng, answer = np.random.default_rng(seed), list[int]()
    for _ in range(400):
        choices = allowed(state.mask())
        ends = [token for token in choices if token in eos]
        token = int(rng.choice(ends if ends and rng.random() < 0.5 else choices))
        state.accept(token)
        if token in eos:
            assert state.finished
            return answer
        answer.append(token)
    return None


def feed(state: GrammarState, tokens: list[int]) -> None:
    for token in tokens:
        assert token in allowed(state.mask())
        state.accept(token)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_whatever_is_drawn_is_valid_against_the_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: frozenset[int]
) -> None:
    ended = 0
    for seed in range(40):
        answer = random_answer(compiler.compile(schema_spec(SCHEMA)), eos, seed)
        if answer is not None:
            ended += 1
            value = json.loads(tokenizer.decode(answer, skip_special_tokens=False))
            assert list(value) == ["name", "unit", "days"]
            assert isinstance(value["name"], str)
            assert len(value["name"]) <= 8
            assert value["unit"] in ("C", "F", None)
            assert all(type(day) is int and 1 <= day <= 31 for day in value["days"])
    assert ended >= 30


def test_json_mode_gives_an_object(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: frozenset[int]
) -> None:
    state = compiler.compile(schema_spec({"type": "object"}))
    assert not set(ids_of(tokenizer, "[")) & set(allowed(state.mask()))
    feed(state, ids_of(tokenizer, '{"a": {"b": [1.5e3, null, "é\\n"]}}'))
    assert set(allowed(state.mask())) == eos


def test_a_regex_and_its_end_tokens(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: frozenset[int]
) -> None:
    state = compiler.compile(GrammarSpec("regex", "[ab]{2,3}"))
    a = tokenizer.token_to_id("a")
    state.accept(a)
    assert not eos & set(allowed(state.mask()))
    state.accept(a)
    assert eos <= set(allowed(state.mask()))
    assert a in allowed(state.mask())
    assert not state.finished
    state.accept(a)
    assert state.finished
    assert set(allowed(state.mask())) == eos
    state.accept(min(eos))
    assert state.finished


def test_lark_may_name_special_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    lark = 'start: <|tool_call> "call:now" <tool_call|>'
    state = compiler.compile(GrammarSpec("lark", lark))
    assert allowed(state.mask()) == [tokenizer.token_to_id("<|tool_call>")]
    state.accept(tokenizer.token_to_id("<|tool_call>"))
    feed(state, ids_of(tokenizer, "call:now"))
    assert allowed(state.mask()) == [tokenizer.token_to_id("<tool_call|>")]


def test_blanks_are_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(schema_spec(SCHEMA))
    feed(state, ids_of(tokenizer, "{"))
    taken = {}
    for blank in ("\n", " "):
        (token,) = ids_of(tokenizer, blank)
        taken[blank] = 0
        while token in allowed(state.mask()):
            state.accept(token)
            taken[blank] += 1
    assert taken == {"\n": 0, " ": 1}
    feed(state, ids_of(tokenizer, '"name"'))


def test_an_answer_is_free_until_its_thought_has_ended(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    end = ids_of(tokenizer, "<channel|>ok")
    assert len(end) > 1
    state = compiler.compile(schema_spec(SCHEMA, start_after=tuple(end)))
    for token in [*ids_of(tokenizer, "so {] be it "), end[0], *end]:
        assert state.pending
        assert state.mask() is None
        assert not state.finished
        state.accept(token)
    assert not state.pending
    feed(state, ids_of(tokenizer, '{"name": "x"'))


@pytest.mark.parametrize(("last", "goes_on"), [(":", '{"name": "x"'), (":{", '"name": "x"')])
def test_a_mark_of_ordinary_tokens_ends_a_thought_however_it_is_cut(
    compiler: GrammarCompiler, tokenizer: Tokenizer, last: str, goes_on: str
) -> None:
    """Text beside a mark changes its tokens: the last one may start the answer."""
    end = tuple(ids_of(tokenizer, "</think:"))
    assert len(end) > 1
    state = compiler.compile(schema_spec(SCHEMA, start_after=end))
    apart = [each for text in "so.</think" for each in ids_of(tokenizer, text)]
    assert apart[-len(end) + 1 :] != list(end[:-1])
    for token in (*apart, tokenizer.token_to_id(last)):
        assert state.pending
        state.accept(token)
    assert not state.pending
    feed(state, ids_of(tokenizer, goes_on))


def test_a_thought_may_be_opened_or_left_out(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    opening = tuple(ids_of(tokenizer, "<|channel>thought\n"))
    assert len(opening) > 1
    end = tokenizer.token_to_id("<channel|>")
    spec = schema_spec(SCHEMA, start_after=(end,), opened_by=opening)

    thinks = compiler.compile(spec)
    assert opening[0] in allowed(thinks.mask())
    assert ids_of(tokenizer, "{")[0] in allowed(thinks.mask())
    thinks.accept(opening[0])
    for token in opening[1:]:
        assert allowed(thinks.mask()) == [token]
        thinks.accept(token)
    assert thinks.mask() is None
    thinks.accept(end)
    assert opening[0] not in allowed(thinks.mask())
    feed(thinks, ids_of(tokenizer, '{"name"'))

    answers = compiler.compile(spec)
    feed(answers, ids_of(tokenizer, "{"))
    assert opening[0] not in allowed(answers.mask())


def test_an_answer_goes_on_wherever_it_was_cut(
    compiler: GrammarCompiler, eos: frozenset[int], tokenizer: Tokenizer
) -> None:
    """Cuts fall between tokens and within them: only the text counts."""
    answer = '{"name": "ä🙂\\n<e", "unit": null, "days": [1, 12]}'
    schema = schema_spec(SCHEMA)
    for cut in range(len(answer) + 1):
        state = compiler.compile(replace(schema, started=answer[:cut]))
        feed(state, ids_of(tokenizer, answer[cut:]) if cut < len(answer) else [])
        assert set(allowed(state.mask())) == eos
        again = compiler.compile(replace(schema, started=answer[:cut]))
        drawn = random_answer(again, eos, seed=cut)
        if drawn is not None:
            read = json.loads(answer[:cut] + tokenizer.decode(drawn, skip_special_tokens=False))
            assert list(read) == ["name", "unit", "days"]


@pytest.mark.parametrize(
    ("spec", "started", "rest"),
    [
        (GrammarSpec("regex", "[ab]{4}"), "abc", "'c'"),
        (GrammarSpec("regex", "[ab]{4}"), "ababa", "'a'"),
        (GrammarSpec("regex", "a*"), "a" * 3000 + "b", "b'"),
        (GrammarSpec("lark", 'start: "yes" | "no"'), "yes<eos>", "'<eos>'"),
        (schema_spec(SCHEMA), "Here it is:", "'Here it is:'"),
        (schema_spec(SCHEMA), '{"name": "Bo", "unit": "K', "'K'"),
        (schema_spec({"type": "null"}), "null and more", "and more'"),
    ],
)
def test_a_start_of_no_answer(
    compiler: GrammarCompiler, spec: GrammarSpec, started: str, rest: str
) -> None:
    with pytest.raises(RequestError, match="'the field'") as refused:
        compiler.compile(replace(spec, started=started), "the field")
    assert (refused.value.param, refused.value.code) == ("the field", NO_BEGINNING)
    assert rest in refused.value.message


def test_a_call_in_the_reasoning_is_bound_from_its_own_start(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    opener, closing = (tokenizer.token_to_id(t) for t in ("<|tool_call>", "<channel|>"))
    spec = GrammarSpec(
        "lark",
        f'start: "yes" | <[{opener}]> "no"',
        start_after=(closing,),
        opener=opener,
        started="y",
    )
    state = compiler.compile(spec)
    state.accept(closing)
    feed(state, ids_of(tokenizer, "es"))
    state = compiler.compile(spec)
    state.accept(opener)
    feed(state, ids_of(tokenizer, "no"))


def test_states_of_one_grammar_do_not_share_progress(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    spec = GrammarSpec("regex", "a[bc]")
    first, second = compiler.compile(spec), compiler.compile(spec)
    first.accept(tokenizer.token_to_id("a"))
    assert tokenizer.token_to_id("a") in allowed(second.mask())
    assert tokenizer.token_to_id("a") not in allowed(first.mask())


def test_padding_of_the_vocabulary_is_never_allowed(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    size = tokenizer.get_vocab_size()
    mask = compiler.compile(GrammarSpec("regex", "(?s:.*)")).mask()
    assert mask is not None
    assert mask.dtype == np.uint32
    assert len(mask) == -(-(size + 45) // 32)
    assert max(allowed(mask)) < size


def test_a_model_with_fewer_logits_than_tokens(tokenizer: Tokenizer, eos: frozenset[int]) -> None:
    state = GrammarCompiler(tokenizer, 100, eos).compile(GrammarSpec("regex", "a"))
    assert tokenizer.token_to_id("a") in allowed(state.mask())


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (GrammarSpec("json_schema", '{"type": "object"'), "line 1"),
        (GrammarSpec("json_schema", "[]"), "object schema"),
        (schema_spec({"type": "strin"}), "strin"),
        (schema_spec({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema_spec({"$ref": "http://example.org/s"}), "example.org"),
        (schema_spec({"type": "string", "pattern": "(?=a)"}), "look-around"),
        (schema_spec({"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable"),
        (GrammarSpec("regex", "a("), "unclosed group"),
        (GrammarSpec("lark", "start: other"), "other"),
        (GrammarSpec("ebnf", "start: a"), "ebnf"),
    ],
)
def test_what_cannot_be_compiled_is_refused_and_says_why(
    compiler: GrammarCompiler, spec: GrammarSpec, why: str
) -> None:
    for refuse in (compiler.compile, check_grammar):
        with pytest.raises(RequestError, match=why) as caught:
            refuse(spec)
        assert caught.value.param == "response_format"
        assert caught.value.code == "invalid_schema"
    with pytest.raises(RequestError) as caught:
        check_grammar(spec, "tools")
    assert caught.value.param == "tools"


def test_what_can_be_compiled_passes_the_check() -> None:
    check_grammar(schema_spec(SCHEMA))
    check_grammar(GrammarSpec("regex", "a+"))


def test_a_token_outside_the_mask_fails_this_answer(
    compiler: GrammarCompiler, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    state = compiler.compile(GrammarSpec("regex", "ab"))
    with pytest.raises(RequestError) as caught:
        state.accept(tokenizer.token_to_id("b"))
    assert caught.value.code == "grammar_failed"
    assert "\n" not in caught.value.message
    assert capfd.readouterr().err == ""


def test_an_opening_needs_an_end(compiler: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match="opening"):
        compiler.compile(schema_spec(SCHEMA, opened_by=(5,)))


def test_a_compiler_needs_a_token_that_ends_the_answer(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="ends"):
        GrammarCompiler(tokenizer, 5000, frozenset())


def test_the_http_side_can_check_without_mlx() -> None:
    code = (
        "import sys\n"
        "import quire.constraints.grammar, quire.core.sampling_params\n"
        "import quire.sampling.loops, quire.constraints.thinking\n"
        "sys.exit(any(name.split('.')[0] == 'mlx' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("regex", "[a-", 'the regular expression "[a-" cannot be read: unclosed character class.'),
        ("json_schema", '{"$ref": "http://x/y"}', "'$ref' points to 'http://x/y', and nothing is"),
        (
            "json_schema",
            '{"$ref": "#/$defs/a"}',
            "points to '#/$defs/a', which the schema does not",
        ),
        (
            "json_schema",
            '{"type": "number", "minimum": 1e30}',
            "bounds of this size cannot be held",
        ),
        ("json_schema", '{"type": "string", "pattern": "(?=a)"}', "cannot be read: look-around"),
    ],
)
def test_a_refused_grammar_gets_a_one_line_message(kind: str, source: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_grammar(GrammarSpec(kind, source), "text.format")
    message = refused.value.message
    assert message.startswith("'text.format' cannot be compiled as a ")
    assert said in message
    assert "\n" not in message


def test_words_of_the_compiler_are_translated() -> None:
    assert readable("NoExtensionBias <non-verbose/>") == "no token of the model can continue it"


def test_numbers_of_a_limited_grammar_come_to_an_end(
    tokenizer: Tokenizer, eos: frozenset[int]
) -> None:
    compiler = GrammarCompiler(TOKENIZER, tokenizer.get_vocab_size(), eos)
    (digit,) = tokenizer.encode("1", add_special_tokens=False).ids
    for limited in (False, True):
        state = compiler.compile(GrammarSpec("json_schema", '{"type": "number"}'), limited=limited)
        for token in tokenizer.encode("0." + "1" * 64, add_special_tokens=False).ids:
            state.accept(token)
        mask = state.mask()
        assert mask is not None
        assert bool(mask[digit // 32] >> digit % 32 & 1) is not limited
