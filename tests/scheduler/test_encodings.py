"""Encodings take their part of a step's time, and some features are kept."""

from __future__ import annotations

from dataclasses import replace

from quire.core.kv_format import KVFormat
from quire.core.media import MediaItem, Pieces, PlacedMedia
from quire.core.request import Request
from quire.scheduler.encoding_cost import EncodingCost
from quire.scheduler.encodings import Encodings
from quire.scheduler.plan import EncoderWork
from quire.scheduler.sequence import Sequence, SequenceParts


def picture(seed: int, rows: int = 10) -> MediaItem:
    return MediaItem.of("image", bytes([seed]), (rows,), rows, bidirectional=False)


def sequence(number: int, *items: MediaItem, caller: str = "") -> Sequence:
    prompt: list[int] = []
    media = []
    for item in items:
        media.append(PlacedMedia(len(prompt), item))
        prompt += [1] * item.tokens
    request = Request(f"r{number}", (*prompt, 2), media=tuple(media), caller=caller)
    return Sequence(request, KVFormat(), b"", number, SequenceParts())


def work(rows: int, count: int = 1) -> EncoderWork:
    return EncoderWork(picture(0, rows), 0, count, rows, completes=False)


def served(encodings: Encodings, *items: MediaItem, number: int = 0) -> list[MediaItem]:
    """Serve a request of these items to its end; return what was encoded for it."""
    each = sequence(number, *items)
    made: list[MediaItem] = []
    while encodings.update_needs([each]):
        planned, _ = encodings.plan([each], 1.0)
        made += [piece.item for piece in planned]
        encodings.made({piece.item.key: 100 for piece in planned})
    assert encodings.ready(each) == len(each.progress.tokens)
    encodings.end(each)
    return made


def test_features_used_longest_ago_are_let_go_of_first() -> None:
    encodings = Encodings(1000, kept_bytes=250)
    one, two, three = picture(1), picture(2), picture(3)
    assert served(encodings, one) == [one]
    assert served(encodings, two) == [two]
    assert served(encodings, one) == []
    assert encodings.forget() == ()
    assert served(encodings, three) == [three]
    assert encodings.forget() == (two.key,)
    assert served(encodings, one, two, three) == [two]


def test_features_that_a_request_needs_stay_beyond_the_limit() -> None:
    encodings = Encodings(1000, kept_bytes=250)
    items = [picture(seed) for seed in range(5)]
    running = sequence(0, *items)
    while encodings.update_needs([running]):
        planned, _ = encodings.plan([running], 1.0)
        encodings.made({piece.item.key: 100 for piece in planned})
    assert encodings.forget() == ()
    running.progress.computed = 30  # the first three are read
    encodings.update_needs([running])
    assert encodings.forget() == tuple(item.key for item in items[:3])


def test_items_far_ahead_are_not_encoded_yet() -> None:
    encodings = Encodings(25)
    items = [picture(seed) for seed in range(5)]
    running = sequence(0, *items)
    made = []
    while encodings.update_needs([running]):
        made += [piece.item for piece in encodings.plan([running], 1.0)[0]]
    assert made == items[:3]


def test_a_piece_costs_what_pieces_of_its_size_took() -> None:
    cost = EncodingCost()
    assert cost.seconds("image", 100) is None
    cost.observe([work(100, count=4)], 8.0)
    assert cost.seconds("image", 100) == 2.0
    assert cost.seconds("image", 400) == 8.0
    assert cost.seconds("audio", 100) is None
    for _ in range(50):
        cost.observe([work(400)], 20.0)
    large, small = cost.seconds("image", 400), cost.seconds("image", 100)
    assert large is not None
    assert abs(large - 20) < 0.1
    assert small == 2.0


def test_a_slow_spell_throws_the_cost_off_by_little() -> None:
    cost = EncodingCost()
    cost.observe([work(100)], 1.0)
    cost.observe([work(100)], 100.0)
    assert cost.seconds("image", 100) == 1.2


def test_keys_take_turns_at_encoders() -> None:
    """A key with many pictures does not keep another's one picture waiting."""
    encodings = Encodings(1000)
    of_b = [sequence(number, picture(10 + number), caller="b") for number in range(6)]
    encodings.update_needs(of_b)
    first, _ = encodings.plan(of_b, 0.0)
    assert [piece.item for piece in first] == [picture(10)]
    of_a = sequence(9, picture(1), picture(2), caller="a")
    running = [*of_b, of_a]
    order = []
    for _ in range(4):
        encodings.update_needs(running)
        planned, _ = encodings.plan(running, 0.0)
        order += ["a" if piece.item in (picture(1), picture(2)) else "b" for piece in planned]
    assert order == ["a", "b", "a", "b"] or order == ["b", "a", "b", "a"]


def together(number: int, shape: int = 10) -> Sequence:
    """Return a request for one picture; four pictures of a shape are encoded by one call."""
    own = sequence(number, picture(100 + number, shape))
    pieces = {own.request.media[0].item.key: Pieces(4, shape, together=4)}
    return Sequence(own.request, KVFormat(), b"", number, SequenceParts(pieces=pieces))


def test_pictures_of_one_shape_stay_together() -> None:
    encodings = Encodings(1000)
    encodings.cost.observe([work(10)], 1.0)
    running = [*map(together, range(6)), together(6, shape=30)]
    groups: dict[int, list[tuple[MediaItem, int, int]]] = {}
    while encodings.update_needs(running):
        planned, _ = encodings.plan(running, 8.0)
        assert sum(each.count * each.rows / 10 for each in planned) <= 8
        for each in planned:
            groups.setdefault(each.group, []).append((each.item, each.first, each.count))
    items = [{item.key for item, _, _ in group} for group in groups.values()]
    assert sorted(map(len, items)) == [1, 2, 4]
    for group in groups.values():
        pieces = [
            [(first, count) for item, first, count in group if item == one]
            for one in {item for item, _, _ in group}
        ]
        assert all(each == pieces[0] for each in pieces)
        assert sum(count for _, count in pieces[0]) == 4


def test_keys_do_not_share_a_group() -> None:
    encodings = Encodings(1000)
    running = [together(0), together(1)]
    running[1].request = replace(running[1].request, caller="other")
    encodings.update_needs(running)
    encodings.cost.observe([work(10)], 1.0)
    planned, _ = encodings.plan(running, 8.0)
    assert len({each.group for each in planned}) == 2
