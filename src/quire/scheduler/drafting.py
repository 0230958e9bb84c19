"""Drafts: guessed tokens that a step verifies beside the rows that it has to compute. Pure Python.

A drafter guesses and the engine verifies. The model samples a token at each drafted position, with
that position's own randomness; the draft is accepted if it equals this token. The number of drafts
in a step follows from each sequence's acceptance rate and from measured step times by rows
(`draft_lengths`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from quire.scheduler.draft_lengths import Candidate, DraftLengths
from quire.scheduler.draft_pauses import LOOKUPS_BEFORE_PAUSE, Pauses
from quire.scheduler.draft_queries import Asked, Found, asked_of, keep_likelier
from quire.scheduler.draft_rates import REGAINED, AcceptanceRates
from quire.scheduler.draft_runs import BESIDE, Run, settled
from quire.scheduler.drafts import (
    UNREAD,
    Draft,
    Drafter,
    Foreseen,
    GuessingDrafter,
)
from quire.scheduler.sequence import Sequence


class Drafting:
    """Asks the drafters, chooses how many drafts a step verifies, and measures their acceptance.

    Args:
        drafters: drafters by preference; of two equally promising drafts the first drafter's is
            taken.
        lengths: decides how many drafts of each sequence are worth their rows.
        vocab_size: drafts end before a token that the model does not have.
        clock: returns seconds.
        head: the one of them whose tokens steps guess, if there is one.
        most_following: the most rows of a step whose tokens depend on what the step before keeps
            and guesses, and that need not wait for it; 0 if the executor runs no such steps.
    """

    def __init__(
        self,
        drafters: Seq[Drafter],
        lengths: DraftLengths,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        head: GuessingDrafter | None = None,
        *,
        most_following: int = 0,
    ) -> None:
        self._drafters = drafters
        self._head, self._most_following = head, most_following
        self._lengths = lengths
        self._vocab_size = vocab_size
        self._clock = clock
        self.computing_s = 0.0
        """Seconds that drafters which compute took, since the engine last set it to 0."""
        self._planned_at = clock()
        """Time of the last plan for which the engine asked `wants_tokens`."""
        self._step_s = 0.0
        """Seconds between the last two of these times."""
        self.least_chance = 0.0
        """Least probability of a guess that is worth its row, by the last `worth_guessing`."""
        self._asking = Pauses(lengths, LOOKUPS_BEFORE_PAUSE)
        """Pauses between steps that ask drafters before the running step's tokens are read."""
        self._guessing = Pauses(lengths)
        """Pauses between steps that decide whether the head guesses."""
        self._begun: set[int] = set()
        """Numbers of sequences that began since `wants_tokens` was called."""
        self._fresh: set[int] = set()
        """Numbers of those that had begun then."""
        self._rates = AcceptanceRates()
        self._trusted: dict[str, float] = {}
        """Factor of a drafter's time, which shrinks while it is not asked and nothing is measured.
        """
        self._guessed: dict[str, int] = {}
        """Number of tokens that the last planned step guesses, by the drafter that they are of."""
        ahead = {each.name for each in drafters if each.looks_ahead}
        self._ahead = ahead if head is None else {*ahead, head.name}
        """Names of the drafters whose drafts need no token of the running step."""
        self._runs: dict[int, Run] = {}
        """Drafts of the next plan that depend on the running step's tokens, by sequence number."""
        self.drafted: Counter[str] = Counter()
        """Number of drafted tokens that steps verified, by drafter."""
        self.accepted: Counter[str] = Counter()
        """Number of drafted tokens that were accepted, by drafter."""

    def begin(self, sequence: Sequence) -> None:
        """Note that a sequence has its first token. It is asked for at once, alone during a pause:
        what drafts of others were worth says nothing of its own.
        """
        if sequence.drafting is not None:
            self._begun.add(sequence.number)

    def wants_tokens(self, running: Seq[Sequence]) -> bool:
        """Return whether to plan the next step only after the running step's tokens are read.

        All sequences then continue together. True if the next rows of one cannot follow its drafts,
        and if drafting pays for a sequence whose last token is still on the device, but not before
        that is read. Drafters are asked less often where asking takes much of a step.
        """
        started = self._clock()
        self._runs = {}
        self._step_s, self._planned_at = started - self._planned_at, started
        self._fresh, self._begun = self._begun, set()
        if [each for each in running if each.progress.unsettled and not self.follows(each)]:
            return True
        asked, steps = running, self._asking.steps
        follow = not any(self._guessed.values()) or all(map(_may_follow, running))
        if follow and self._asking.skips_step():
            if not self._fresh:
                return False
            fresh = [each for each in running if each.number in self._fresh]
            if len(fresh) < len(running):
                asked, steps = fresh, 1
            else:
                self._asking = Pauses(self._lengths, LOOKUPS_BEFORE_PAUSE)
        rows = sum(each.progress.generated > 0 for each in running)
        wants = self._pays_ahead(asked, rows, steps)
        if wants or asked is running:
            in_vain = not (wants or self._runs)
            self._asking.asked(self._clock() - started, self._step_s, in_vain=in_vain)
        return wants

    def _pays_ahead(self, sequences: Seq[Sequence], rows: int, steps: int) -> bool:
        """Return whether drafting pays for a sequence whose last token is on the device, if that is
        read first. Where drafts need not wait for it, these are noted for the next plan.

        Drafts of the head count where they are read first.

        Args:
            rows: of the next step without drafts.
            steps: number of steps since these sequences were asked.
        """
        asked = asked_of([(each, each.tokens_left) for each in sequences if each.progress.pending])
        if not asked:
            return False
        # The first guess is of the token on the device: what follows it would be drafted.
        found = self._propose(asked, rows, ahead=True, steps=steps)
        ahead, runs = list[Candidate](), list[tuple[Sequence, Run]]()
        for each in asked:
            best, progress = found.get(each.query.number), each.sequence.progress
            follows = best is not None and self.follows(each.sequence)
            if best is None or (best.draft is None and follows):
                continue
            beyond = best.candidate.most - 1 - progress.unsettled
            if beyond > 0:
                ahead.append(best.candidate._replace(most=beyond))
                if best.draft is not None and follows:
                    runs.append((each.sequence, Run(best.draft, progress.unsettled)))
        beginning = not any(each.progress.unsettled for each in sequences)
        if not ahead or (len(runs) == len(ahead) and self._run(runs, rows, beginning)):
            return False
        return any(self._lengths.choose(ahead, rows, beginning=beginning))

    def _run(self, runs: Seq[tuple[Sequence, Run]], rows: int, beginning: bool) -> bool:
        """Note drafts that need not wait for the running step; return whether they are better than
        drafts that do.

        Args:
            rows: of the next step without drafts.
            beginning: whether no drafts are verified now.
        """
        candidates = list[Candidate]()
        for each, run in runs:
            assert each.drafting is not None, "sequences that are asked for have drafters"
            name, of = run.draft.drafter, partial(self._rates.of, each.drafting)
            rates = of((name, run.draft.grade)), of((name, BESIDE))
            candidates.append(run.candidate(each.progress.drafts[-1], *rates))
        most = self._most_following
        lengths = self._lengths.choose(candidates, rows, beginning=beginning, ahead=most)
        if not any(lengths) or self._lengths.prefers_waiting(candidates, lengths, rows):
            return False
        for (each, run), length in zip(runs, lengths, strict=True):
            if length:
                self._runs[each.number] = run._replace(length=length)
        return True

    @property
    def foresees(self) -> bool:
        """Whether there are drafts that depend on what the running step samples."""
        return bool(self._runs) or self._guesses > 0

    @property
    def _guesses(self) -> int:
        """Number of tokens that the head guesses in the last planned step."""
        return 0 if self._head is None else self._guessed.get(self._head.name, 0)

    def follows(self, sequence: Sequence) -> bool:
        """Return whether the next rows of a sequence can be planned although the running step
        samples for it and perhaps verifies drafts: they begin where these end to be right.
        """
        state, progress = sequence.drafting, sequence.progress
        if state is None or not state.may_follow or progress.pending != 1:
            return False
        return sequence.tokens_left > progress.unsettled

    def need_no_tokens(self, drafters: frozenset[str]) -> bool:
        """Return whether drafters draft behind tokens that are not read, and the executor runs such
        rows.
        """
        return self._most_following > 0 and drafters <= self._ahead

    def following(self, sequences: Seq[Sequence], rows: int, room: int) -> dict[int, Draft]:
        """Return drafts, by sequence number, that depend on what the running step samples: of runs,
        or else what it guesses.

        Args:
            sequences: those for which `follows` is true.
            rows, room: see `drafts`.
        """
        chosen, found = dict[int, Draft](), list[tuple[int, Candidate]]()
        head, guesses = self._head, self._guesses
        for each in sequences:
            limit, state = each.tokens_left - each.progress.unsettled - 1, each.drafting
            if (run := self._runs.get(each.number)) is not None:
                if count := min(run.length, limit, room):
                    chosen[each.number] = run.drafts(count)
                    room -= count
            elif guesses and limit and head and state and head.name in state.drafters:
                rate = self._rates.of(state, (head.name, 0))
                found.append((each.number, Candidate(rate, min(guesses, limit))))
        if not found or head is None:
            return chosen
        rows += sum([len(each.tokens) for each in chosen.values()])
        candidates = [each for _, each in found]
        lengths = self._lengths.choose(candidates, rows, ahead=self._most_following)
        for (number, _), length in zip(found, lengths, strict=True):
            if count := min(length, room):
                chosen[number] = Draft((UNREAD,) * count, head.name)
                room -= count
        return chosen

    def settle(self, sequence: Sequence, accepted: int) -> None:
        """Take in the tokens that a step ended with, for drafts of a run that the step in flight
        verifies.

        Args:
            accepted: number of right drafts in the step that was read.
        """
        state, progress = sequence.drafting, sequence.progress
        if state is None or not (progress.drafts and progress.drafts[0].run):
            return
        progress.drafts[0] = draft = settled(progress.drafts[0], accepted, progress.tokens[-1])
        grade = draft.drafter, draft.grade
        state.foreseen[grade] = Foreseen(len(progress.tokens), draft.tokens, grade)

    def foresee(self, sequence: Sequence, guesses: tuple[int, ...]) -> None:
        """Take in what a step guessed after a sequence's tokens, if the next step runs already."""
        state, drafts, head = sequence.drafting, sequence.progress.drafts, self._head
        if state is None or head is None or not drafts:
            return
        grade = head.name, 0
        if drafts[0].drafter == head.name:
            drafts[0] = drafts[0]._replace(tokens=guesses[: len(drafts[0].tokens)])
        tokens = tuple([max(token, ~token) for token in guesses])  # also those not verified
        state.foreseen[grade] = Foreseen(len(sequence.progress.tokens), tokens, grade)

    def worth_guessing(self, running: Seq[Sequence]) -> int:
        """Return how many tokens the draft head should guess in the next step for the step after
        it.
        """
        if (drafter := self._head) is None:
            return 0
        grade = drafter.name, 0
        self._guessed[drafter.name] = 0
        started, steps, asked = self._clock(), self._guessing.steps, running
        if paused := self._guessing.skips_step():
            # Asked alone, as in `wants_tokens`.
            asked = [each for each in running if each.number in self._fresh] if self._fresh else []
        states = [each.drafting for each in asked]
        own = [state for state in states if state is not None and drafter.name in state.drafters]
        if not own:
            return 0
        token_s = self._token_s(drafter, len(own))
        candidates = [
            Candidate(self._rates.of(state, grade), drafter.most, token_s) for state in own
        ]
        beginning = not any(each.progress.unsettled for each in running)
        ahead = self._most_following if any(map(_may_follow, running)) else 0
        choose = self._lengths.choose
        length = max(choose(candidates, len(running), beginning=beginning, ahead=ahead))
        self._guessed[drafter.name] = length
        lengths = [length] * len(candidates)
        self.least_chance = self._lengths.least_chance(candidates, lengths, len(running))
        if paused and not length:
            return 0
        self._trust(drafter, asked=length > 0, steps=steps)
        if not length:
            self._rates.reconsider(own, grade, steps, common=True)
        self._guessing.asked(self._clock() - started, self._step_s, in_vain=not length)
        return length

    def drafts(self, limits: Seq[tuple[Sequence, int]], rows: int, room: int) -> dict[int, Draft]:
        """Return the drafts that the next step should verify, by sequence number.

        Args:
            limits: sequences whose tokens are all read, each with the most drafts that it may have.
            rows: of the step without drafts.
            room: the most drafts of all sequences.
        """
        asked = asked_of(limits)
        if not asked:
            return {}
        found = self._propose(asked, rows, ahead=False)
        lengths = self._lengths.choose([each.candidate for each in found.values()], rows)
        chosen = {}
        for (number, each), length in zip(found.items(), lengths, strict=True):
            count = min(length, room)
            if count and (draft := each.draft) is not None:
                chosen[number] = draft.first(count)
                room -= count
        return chosen

    def observe(
        self, sequence: Sequence, foreseen: Seq[Foreseen], draft: Draft, accepted: int
    ) -> None:
        """Count the accepted and rejected drafts of a sequence, and compare guesses, drafted or
        not, with the tokens that followed.

        Args:
            draft: what was verified.
        """
        state, drafts = sequence.drafting, len([token for token in draft.tokens if token >= 0])
        if state is None:
            return
        if drafts:
            state.accepted += accepted
            state.rejected += drafts - accepted
            self.drafted[draft.drafter] += drafts
            self.accepted[draft.drafter] += accepted
            rate = self._rates.of(state, (draft.drafter, draft.grade))
            self._lengths.settle(sum([rate**n for n in range(1, drafts + 1)]), accepted)
        for each in foreseen:
            self._rates.compare(state, each, sequence.progress.tokens)

    def forget(self, sequence: Sequence) -> None:
        """Drop drafters' state of a sequence that has ended."""
        if sequence.drafting is not None:
            for drafter in self._drafters:
                drafter.forget(sequence.number)

    # -- within --------------------------------------------------------------------------------

    def _propose(
        self, asked: Seq[Asked], rows: int, *, ahead: bool, steps: int = 1
    ) -> dict[int, Found]:
        """Return each sequence's most promising draft, by sequence number.

        Args:
            rows: rows of the step without drafts.
            steps: number of steps since these sequences were asked.
            ahead: whether each sequence's last token is still unread. Drafters that need it are not
                asked; their acceptance rates stand for what they would find.

        What a step has guessed already costs nothing more.
        """
        best: dict[int, Found] = {}
        for drafter in self._drafters:
            own = [each for each in asked if drafter.name in each.state.drafters]
            guessed, token_s = self._guessed.get(drafter.name), 0.0
            if guessed == 0:
                continue
            if guessed is None and not drafter.looks_ahead:
                own = self._worth_asking(
                    drafter, own, best=best, rows=rows, ahead=ahead, steps=steps
                )
                token_s = self._token_s(drafter, len(own))
            if ahead and not drafter.looks_ahead:
                for each in own:
                    rate = self._rates.of(each.state, (drafter.name, 0))
                    most = 1 + min(each.query.limit, guessed or each.query.limit)
                    candidate = Candidate(rate, most, token_s, reading_s=each.reading_s(drafter))
                    keep_likelier(best, each, Found(candidate))
                continue
            started = self._clock()
            drafts = drafter.propose([each.query for each in own]) if own else ()
            if not drafter.looks_ahead:
                self.computing_s += self._clock() - started
            for each, draft in zip(own, drafts, strict=True):
                made = None if draft is None else each.possible(draft, self._vocab_size)
                if made is not None:
                    rate = self._rates.of(each.state, (made.drafter, made.grade))
                    found = Found(Candidate(rate, len(made.tokens)), made)
                    keep_likelier(best, each, found)
        for each in asked:
            leading = best.get(each.query.number)
            if leading is not None and (draft := leading.draft) is not None:
                grade = draft.drafter, draft.grade
                each.state.foreseen[grade] = Foreseen(len(each.query.tokens), draft.tokens, grade)
        return best

    def _worth_asking(
        self,
        drafter: Drafter,
        asked: Seq[Asked],
        best: dict[int, Found],
        rows: int,
        *,
        ahead: bool,
        steps: int,
    ) -> list[Asked]:
        """Return the sequences whose best draft may come from a drafter, if any is worth verifying.

        Their limits are the worthwhile lengths, so an expensive drafter makes no more.
        """
        leading, candidates = [], []
        token_s = self._token_s(drafter, len(asked))
        for each in asked:
            grade = drafter.name, 0
            rate, known = self._rates.of(each.state, grade), best.get(each.query.number)
            if known is None or known.candidate.rate < rate:
                leading.append(each)
                reading_s = each.reading_s(drafter)
                candidates.append(Candidate(rate, each.query.limit, token_s, reading_s=reading_s))
        lengths = self._lengths.choose(candidates, rows, beginning=ahead)
        if token_s:
            self._trust(drafter, asked=any(lengths), steps=steps)
        chosen, others = [], []
        for each, length in zip(leading, lengths, strict=True):
            if length:
                chosen.append(each._replace(query=each.query._replace(limit=length)))
            else:
                others.append(each.state)
        if others:
            self._rates.reconsider(others, (drafter.name, 0), steps, common=not chosen)
        return chosen

    def _token_s(self, drafter: Drafter, sequences: int) -> float:
        """Return the expected seconds of drafting one more token for so many sequences."""
        return drafter.token_s(sequences) * self._trusted.get(drafter.name, 1.0)

    def _trust(self, drafter: Drafter, *, asked: bool, steps: int) -> None:
        """Note whether a drafter is asked, so that one that seemed expensive is tried again.

        Args:
            steps: number of steps since the last note.
        """
        before = self._trusted.get(drafter.name, 1.0)
        self._trusted[drafter.name] = 1.0 if asked else before * (1 - REGAINED) ** steps


def _may_follow(sequence: Sequence) -> bool:
    return sequence.drafting is not None and sequence.drafting.may_follow
