"""Tokens that a request allows or bans."""

from __future__ import annotations

from quire.constraints.masks import mask_of
from quire.constraints.token_rules import TokenRulesState
from quire.core.request import TokenRules

SIZE = 70


def allowed(state: TokenRulesState) -> set[int]:
    return {each for each in range(SIZE) if (state.mask() & mask_of((each,), SIZE)).any()}


def test_tokens_must_be_allowed_and_not_banned() -> None:
    state = TokenRulesState(TokenRules(allowed=(3, 5, 69), banned=((5,),)), SIZE)
    assert allowed(state) == {3, 69}


def test_a_sequence_is_banned_by_its_last_token_behind_the_others() -> None:
    state = TokenRulesState(TokenRules(banned=((1, 2), (2, 1, 7), (1, 9))), SIZE)
    everything = set(range(SIZE))
    assert allowed(state) == everything
    for token, missing in ((2, set()), (1, {2, 9, 7}), (3, set()), (1, {2, 9}), (1, {2, 9})):
        state.accept(token)
        assert allowed(state) == everything - missing
