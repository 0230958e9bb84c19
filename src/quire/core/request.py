"""Requests to the engine, and its outputs.

Everything here is frozen and picklable, because it crosses from the HTTP side to the process that
owns MLX.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal, NamedTuple, Self

from quire.core.errors import RequestError
from quire.core.kv_format import KVFormat
from quire.core.media import PlacedMedia
from quire.core.pickling import Compact
from quire.core.speculation import Speculation


@dataclass(frozen=True)  # without slots: see `core.copies`
class SamplingParams(Compact):
    """How a row's tokens are sampled. Defaults are OpenAI's; `temperature == 0` is greedy.

    Attributes:
        top_k: keep the k likeliest tokens; 0 keeps all.
        min_p: drop tokens less likely than `min_p` times the likeliest.
        presence_penalty, frequency_penalty: subtracted from logits of generated tokens, once and
            per occurrence (OpenAI).
        repetition_penalty: divides positive and multiplies negative logits of every token of the
            prompt and the answer (CTRL, arXiv:1909.05858). 1 is off.
        typical_p: keep the tokens whose surprise is nearest to the distribution's entropy, until
            they hold `typical_p` of the whole (arXiv:2202.00666). 1 is off.
        xtc_probability: how often XTC drops tokens: of those with at least the probability
            `xtc_threshold`, all but the least likely. 0 is off.
        dry_multiplier: factor of the DRY penalty, which is subtracted from logits of tokens that
            would go on repeating the context, see `quire.sampling.dry`. 0 is off.
        dry_base: base of the DRY penalty; its exponent is the repeat's length beyond
            `dry_allowed_length`.
        dry_penalty_last_n: number of last tokens among which DRY looks for repeats; -1 is all, 0
            is none.
        dry_breakers: token ids across which nothing counts as a repeat.
        logit_bias: (token id, bias) pairs added to the logits.
        seed: with the position, the row's only source of randomness.
        logprobs: None for none, else how many alternatives to report beside the chosen token.
        times_from: the first of the tokens at the vocabulary's end that are times. Only these are
            drawn where they are likelier together than each other token (Whisper). None is off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_breakers: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    times_from: int | None = None

    @property
    def ranks(self) -> bool:
        """Whether a filter needs a row's tokens in the order of their probability."""
        return self.top_k != 0 or self.top_p < 1 or self.typical_p < 1 or self.xtc_probability > 0

    @property
    def needs_history(self) -> bool:
        """Whether a row's logits depend on the tokens before it."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or self.penalises_repeats
        )

    @property
    def penalises_repeats(self) -> bool:
        """Whether DRY is on, which needs the prompt's tokens in their order."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0


JSON_BLANKS = r"\x20"
"""Whitespace allowed between JSON's parts in a constrained answer: at most one blank. This saves
tokens, and a degenerate model cannot write blanks until its tokens run out.
"""


NO_BEGINNING = "invalid_beginning"
"""Code of a `RequestError`: the given start of the answer violates a constraint."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the answer, compiled with llguidance.

    Attributes:
        kind: "json_schema", "regex" or "lark".
        source: the schema as JSON text, or the grammar's text.
        start_after: token ids that end reasoning; the constraint applies after them. If empty, it
            applies from the first token.
        opened_by: token ids with which the model may open that reasoning first; if it starts
            otherwise, the constraint binds at once. Empty: the reasoning is open already, or there
            is none.
        opener: the token that starts a tool call, or None. The constraint applies from it even
            within reasoning, so that no call escapes.
        lazy: whether the answer is free except for parts that start with `opener`, each of which
            must meet the constraint as a whole.
        schema: whether it includes JSON of a client's schema, whose runs of digits and blanks are
            limited; see `constraints.runs`.
        started: text of the answer that exists already. It meets the constraint together with the
            text that follows.
    """

    kind: str
    source: str
    start_after: tuple[int, ...] = ()
    opened_by: tuple[int, ...] = ()
    opener: int | None = None
    lazy: bool = False
    started: str = ""
    schema: bool = False


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A limit on reasoning, whose end is then forced, so that tokens are left for the answer.

    Attributes:
        max_tokens: reasoning tokens allowed.
        start_ids: the tokens that open reasoning (empty: the prompt leaves it open).
        end_ids: the tokens forced when the budget is spent.
    """

    max_tokens: int
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timestamps:
    """The rules of transcripts with times (Whisper, arXiv:2212.04356, section 2.4 and its code).

    A transcript starts with a time. Times come in pairs, the end of a segment and the start of the
    next, or before the token that ends the transcript; none is earlier than those before it.

    Attributes:
        first: the token of time zero; all tokens from it on are times.
        end: the token that ends a transcript; tokens below it are text.
        latest_start: the latest first time, in steps from zero; None leaves it free.
    """

    first: int
    end: int
    latest_start: int | None = None


@dataclass(frozen=True, slots=True)
class TokenRules(Compact):
    """Tokens that a request allows or bans.

    Attributes:
        allowed: the only tokens that may come, those that end an answer included; empty allows all.
        banned: sequences of tokens, the last of which may not follow the others. No sequence is
            empty.
        not_first: tokens with which an answer may not start.
        timestamps: the answer is a transcript with times.
    """

    allowed: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    not_first: tuple[int, ...] = ()
    timestamps: Timestamps | None = None


@dataclass(frozen=True, slots=True)
class Generate(Compact):
    """The task of generating tokens, each sampled given those before it."""

    samples: ClassVar[bool] = True
    needs_every_row: ClassVar[bool] = False


PoolingKind = Literal["cls", "last", "max", "mean"]


@dataclass(frozen=True, slots=True)
class Embed:
    """Task: one vector, made of the final hidden states of the prompt.

    Attributes:
        pooling: "last" takes the last token's, "cls" the first one's, "mean" and "max" the mean and
            the greatest number of each column over all tokens.
        normalized: whether the vector is scaled to length one.
    """

    pooling: PoolingKind = "last"
    normalized: bool = True

    samples: ClassVar[bool] = False

    @property
    def needs_every_row(self) -> bool:
        """Whether the result depends on the hidden states of all tokens."""
        return self.pooling != "last"


@dataclass(frozen=True, slots=True)
class Classify:
    """Task: the logits of the model's classification head, of which rerankers have one."""

    samples: ClassVar[bool] = False
    needs_every_row: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Score:
    """Task: natural-log probabilities of given tokens as the next one after the prompt.

    Rerankers are asked this way whether a document answers a question: "yes" or "no"
    (Qwen3-Reranker).

    Attributes:
        labels: token ids, at least one.
    """

    labels: tuple[int, ...]

    samples: ClassVar[bool] = False
    needs_every_row: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class ScorePrompt:
    """Task: natural-log probabilities of the prompt's own tokens, each given those before it.

    The vector has `2 + 2 * top` numbers for each target: its log-probability, its rank among all
    tokens from 1, the ids of the likeliest tokens, and their log-probabilities.

    Attributes:
        targets: the prompt's tokens after the first, at least one.
        top: how many of the likeliest tokens to report.
    """

    targets: tuple[int, ...]
    top: int = 0

    samples: ClassVar[bool] = False
    needs_every_row: ClassVar[bool] = True

    def read(self, vector: tuple[float, ...]) -> tuple[ScoredToken, ...]:
        """Return the scored tokens in a vector, in order."""
        width = 2 + 2 * self.top
        rows = (vector[first : first + width] for first in range(0, len(vector), width))
        return tuple(
            ScoredToken(
                target,
                logprob=row[0],
                top=tuple(zip(map(int, row[2 : 2 + self.top]), row[2 + self.top :], strict=True)),
                rank=int(row[1]),
            )
            for target, row in zip(self.targets, rows, strict=True)
        )


Task = Generate | Embed | Classify | Score | ScorePrompt


@dataclass(frozen=True)  # without slots: see `core.copies`
class Request(Compact):
    """One sequence, as the engine sees it.

    Attributes:
        prompt: token ids, at least one. Placeholders of media have the id of the token that
            marks their kind.
        token_types: kinds of the prompt's tokens, for encoders that tell a pair's texts apart;
            empty if all are of kind 0.
        media: in order; their places do not overlap.
        max_tokens: the most tokens to generate, at least one.
        min_tokens: tokens that must come before an end token, unless a grammar allows nothing else.
        stop_token_ids: tokens that end the answer. The one that does is reported, but is not part
            of the text.
        kv_format: how this sequence's KV cache is stored; None means the server's default.
        stop_on_loop: repeats of a cycle that end the answer; None means the server's default. 0
            means never, and does not limit runs of digits and blanks.
        rules: tokens that the client allows or bans; forced ends of reasoning are exempt.
        adapter: name of the LoRA adapter; empty for none.
        caller: digest of the request's API key; keys take turns.
        share: weight of the API key when places and rows are divided.
        priority: lower numbers go first; see `scheduler.fairness`.
        session: requests of one session prefer the same one of several engines; empty for none.
        cache_salt: part of the keys of cached blocks; different salts never share.
        snapshots: prompt positions at which recurrent state is worth keeping (message ends).
        deadline_s: seconds after arrival at which the request ends with an error; None means never.
        task: the kind of result: tokens, or a vector.
        speculation: which drafters may draft its tokens; None means the server's default.
        prediction: tokens that the client expects as the answer; they are drafted.
        hold: number of tokens that wait for each other, unless the answer ends; the progress of
            reading is then not reported. 0 sends tokens as they come.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    kv_format: KVFormat | None = None
    grammar: GrammarSpec | None = None
    thinking: ThinkingBudget | None = None
    stop_on_loop: int | None = None
    rules: TokenRules = field(default_factory=TokenRules)
    adapter: str = ""
    caller: str = ""
    share: float = 1.0
    priority: int = 0
    session: str = ""
    cache_salt: str = ""
    snapshots: tuple[int, ...] = ()
    deadline_s: float | None = None
    media: tuple[PlacedMedia, ...] = ()
    task: Task = field(default_factory=Generate)
    speculation: Speculation | None = None
    prediction: tuple[int, ...] = ()
    token_types: tuple[int, ...] = ()
    hold: int = 0


class FinishReason(StrEnum):
    """Why a sequence ended. Exactly one ends each accepted request."""

    STOP = "stop"  # an end token, or a stop string seen by the text side
    LENGTH = "length"  # max_tokens or the context is used up
    LOOP = "loop"  # --stop-on-loop saw an exact cycle
    MALFORMED_CALL = "malformed_call"  # the text side saw that a call it had started is none
    ABORT = "abort"  # nobody waits for it: its client left, or a choice beside it failed
    ERROR = "error"  # `Output.error` says what happened

    @property
    def is_cut_off(self) -> bool:
        """Whether the answer ended before the model ended it."""
        return self in (FinishReason.LENGTH, FinishReason.LOOP, FinishReason.MALFORMED_CALL)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one generated position, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken(TokenLogprobs):
    """A token of a prompt.

    Attributes:
        rank: rank among all tokens; the likeliest has 1.
    """

    rank: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that crossed the queue: the fields of a `RequestError`, or status 500."""

    message: str
    status: int = 500
    type: str = "server_error"
    param: str | None = None
    code: str | None = None
    overflow: tuple[int, int] | None = None

    @classmethod
    def of(cls, error: RequestError) -> Self:
        """Return the fields of an error."""
        return cls(
            error.message,
            error.status,
            error.type,
            param=error.param,
            code=error.code,
            overflow=error.overflow,
        )


class Output(NamedTuple):
    """The output of one step for one request. The last one of a request carries `finish`.

    There is one for each row of each step, and a tuple is made many times as fast as a frozen
    dataclass.

    Attributes:
        token_ids: new tokens, in order; the stop token is included when one ended the answer.
        logprobs: one entry a token when the request asked for them.
        prompt_tokens, cached_tokens: set on every output; how many prompt tokens there were and how
            many of them were read from the prefix cache.
        reuse: why no more of the prompt was reused, e.g. "new", "first difference at token 812",
            "evicted", or "still being written at token 32" where a neighbour had the same, but had
            not shared it yet; empty if all was. None before that is known.
        read: of an output that says nothing else: how many prompt tokens are computed. 0 means that
            the request was accepted.
        queued_s: seconds that the request waited until it was first scheduled; None before that.
        vector: the result of a vector task, in an output with `finish`.
        accepted_drafts, rejected_drafts: number of drafted tokens accepted and rejected so far.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    error: Failure | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reuse: str | None = None
    read: int | None = None
    queued_s: float | None = None
    vector: tuple[float, ...] | None = None
    accepted_drafts: int = 0
    rejected_drafts: int = 0

    @property
    def entries(self) -> int:
        """Number of tokens and log-probabilities in it, at least 1: a measure of the cost to render
        it.
        """
        entries = len(self.token_ids)
        for each in self.logprobs:
            entries += 1 + len(each.top)
        return entries or 1
