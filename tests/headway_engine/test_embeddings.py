"""Bodies of embeddings, their answers, and the portions in which inputs go to the core."""

import base64
import json
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_engine.answers import ApiError
from headway_engine.embeddings import (
    MAX_INPUTS,
    MOST_IN_FLIGHT,
    EmbeddingsCall,
    Feed,
    answer,
    check_dimensions,
    cut,
    parse_embeddings,
)
from headway_engine.messages import Embeddings
from headway_engine.protocol import Capacity, Limits
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import (
    NO_TOKEN,
    Finished,
    Pooling,
    Request,
    SampledToken,
    SamplingParams,
    Sequence,
)
from headway_engine.tenants import Tenant, TenantPolicy


def parse(**body):
    return parse_embeddings(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        ("abc", ("abc",)),
        (["abc", "d"], ("abc", "d")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_the_four_forms_of_input(given, understood):
    call = parse(input=given, model="m", user="u", encoding_format=None)
    assert (call.inputs, call.model, call.base64, call.dimensions) == (understood, "m", False, 0)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "8"}, "dimensions"),
        ({"input": "a", "temperature": 1}, "temperature"),
        ({"input": "a", "priority": 5000}, "priority"),
    ],
)
def test_what_is_wrong_is_named(body, field):
    with pytest.raises(ApiError) as caught:
        parse(**body)
    assert (caught.value.status, caught.value.param) == (400, field)


def test_the_empty_input_of_many_is_told_by_its_place():
    with pytest.raises(ApiError, match=r"input\[2\]: must not be empty"):
        parse(input=["a", "b", "", "d"])


WHOLE = Embeddings(pooling=Pooling.LAST, dimensions=64)
NESTED = Embeddings(pooling=Pooling.LAST, dimensions=64, cuts=(8, 16))
FREE = Embeddings(pooling=Pooling.LAST, dimensions=64, any_cut=True)


@pytest.mark.parametrize(
    ("embeddings", "dimensions", "fine"),
    [
        (WHOLE, 0, True),
        (WHOLE, 64, True),
        (WHOLE, 63, False),
        (WHOLE, 65, False),
        (NESTED, 8, True),
        (NESTED, 9, False),
        (FREE, 1, True),
        (FREE, 63, True),
        (FREE, 65, False),
    ],
)
def test_vectors_are_cut_only_where_the_model_was_trained_for_it(embeddings, dimensions, fine):
    call = parse(input="a", **({"dimensions": dimensions} if dimensions else {}))
    if fine:
        check_dimensions(call, embeddings)
        return
    with pytest.raises(ApiError, match=f"dimensions: {dimensions}; vectors of this model have") as caught:
        check_dimensions(call, embeddings)
    assert (caught.value.status, caught.value.param) == (400, "dimensions")


def test_a_cut_vector_has_length_one_again():
    vector = struct.pack("<4f", 0.6, 0.0, 0.0, 0.8)
    assert struct.unpack("<2f", cut(vector, 2)) == (1.0, 0.0)
    assert cut(vector, 0) == cut(vector, 4) == vector
    assert cut(struct.pack("<2f", 0.0, 1.0), 1) == struct.pack("<f", 0.0), "nothing is left to scale"


def a_call(**changes):
    values = {"model": "", "inputs": (), "base64": False, "dimensions": 0, "priority": 0}
    return EmbeddingsCall(**(values | changes))


def test_both_encodings_say_the_same_in_the_order_of_the_inputs():
    vectors = [struct.pack("<2f", 0.6, 0.8), struct.pack("<2f", 0.1, -1e-30)]
    plain = json.loads(answer(a_call(), vectors, "m", 7))
    coded = json.loads(answer(a_call(base64=True), vectors, "m", 7))
    assert plain["object"] == "list"
    assert plain["model"] == "m"
    assert plain["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [d["index"] for d in plain["data"]] == [0, 1]
    assert {d["object"] for d in plain["data"]} == {"embedding"}
    for a, b, vector in zip(plain["data"], coded["data"], vectors, strict=True):
        assert base64.b64decode(b["embedding"]) == vector
        assert struct.pack("<2f", *a["embedding"]) == vector


# Portions.


def a_request(id, tokens=5):
    sampling = SamplingParams(max_tokens=0)
    return Request(id=id, prompt=(1,) * tokens, sampling=sampling, arrival_s=0.0, pooling=Pooling.LAST)


def limits(**changes):
    return Limits(**({"max_queued_requests": 1000, "max_queued_tokens": 100_000} | changes))


def ids(requests):
    return [r.id for r in requests]


def test_a_small_call_goes_at_once():
    feed = Feed([a_request(str(i)) for i in range(100)], limits())
    assert len(feed.take()) == 100
    assert feed.take() == []


def test_a_large_call_goes_in_the_order_of_its_inputs_as_others_end():
    """No more at a time than the core has use for."""
    feed = Feed([a_request(str(i)) for i in range(MOST_IN_FLIGHT + 3)], limits())
    first = feed.take()
    assert ids(first) == [str(i) for i in range(MOST_IN_FLIGHT)]
    feed.end("5")
    feed.end("7")
    assert ids(feed.take()) == [str(MOST_IN_FLIGHT), str(MOST_IN_FLIGHT + 1)]


def test_a_call_stays_inside_the_queues_limits():
    """An idle engine lets all of a portion in: in requests and in tokens; a single input always goes."""
    feed = Feed([a_request(str(i)) for i in range(9)], limits(max_queued_requests=2, max_batch_sequences=1))
    assert len(feed.take()) == 3
    feed = Feed([a_request("a", 50), a_request("b", 40), a_request("c", 30)], limits(max_queued_tokens=45))
    assert ids(feed.take()) == ["a"]
    feed.end("a")
    assert ids(feed.take()) == ["b"]
    feed.end("b")
    assert ids(feed.take()) == ["c"]


@pytest.mark.parametrize(
    ("tenant", "first"),
    [
        (Tenant(), 9),
        (Tenant(max_queued_requests=6), 6),
        (Tenant(max_queued_requests=1), 3),
        (Tenant(max_queued_tokens=20), 4),
        (Tenant(max_queued_tokens=3), 1),
        (Tenant(max_queued_requests=50, max_queued_tokens=10_000), 9),
    ],
)
def test_a_call_stays_inside_its_tenants_caps(tenant, first):
    """Or its own size would have it refused. Those that find a slot do not count as queued; a single input
    always goes."""
    rules = limits(max_batch_sequences=3, max_queued_requests=6)
    feed = Feed([a_request(str(i)) for i in range(20)], rules, tenant)
    assert len(feed.take()) == first


@pytest.mark.parametrize("caps", [{"max_queued_requests": 2}, {"max_queued_tokens": 12}, {}])
def test_an_idle_engine_refuses_nothing_of_a_portion(caps):
    """What the front end takes for room is what the scheduler takes for it, in both of its checks."""
    tenant = Tenant(**caps)
    rules = limits(max_batch_sequences=3, max_queued_requests=6, max_queued_tokens=40, max_batch_tokens=8)
    capacity = Capacity(
        max_batch_tokens=64, max_batch_sequences=8, kv_blocks=64, block_tokens=4, max_model_tokens=64
    )
    scheduler = Scheduler(capacity, rules, tenants=TenantPolicy(tenants={"": tenant}))
    feed = Feed([a_request(str(i)) for i in range(30)], rules, tenant)
    while not feed.done:
        for request in feed.take():
            assert isinstance(scheduler.admit(request, 0.0), Sequence)
        step = scheduler.next_step(0.0)
        made = {c.sequence.id: SampledToken(NO_TOKEN, vector=b"1") for c in step.chunks if c.pools}
        for event in scheduler.commit(step, made, 0.0):
            if isinstance(event, Finished):
                feed.end(event.id)


def test_an_input_that_is_refused_waits_until_another_has_ended():
    feed = Feed([a_request(i) for i in "abcd"], limits())
    assert ids(feed.take()) == ["a", "b", "c", "d"]
    feed.hold_back("c")
    feed.hold_back("d")
    assert feed.take() == []
    assert not feed.idle
    feed.end("a")
    assert ids(feed.take()) == ["d", "c"]
    assert feed.answered == 1


def test_a_call_of_which_nothing_is_let_in_is_idle_and_not_done():
    feed = Feed([a_request(i) for i in "ab"], limits())
    feed.take()
    feed.hold_back("a")
    feed.hold_back("b")
    assert (feed.idle, feed.done, feed.answered) == (True, False, 0)
    assert len(feed.take()) == 1, "the next try is a careful one"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(0, 1 << 30))
def test_every_input_is_answered_once_whatever_is_refused(sizes, seed):
    """Random limits, refusals and ends in any order; never past the limits."""
    chance = random.Random(seed)
    rules = limits(
        max_queued_requests=chance.randrange(7),
        max_batch_sequences=chance.randrange(1, 5),
        max_queued_tokens=chance.randrange(100),
    )
    feed = Feed([a_request(str(i), size) for i, size in enumerate(sizes)], rules)
    handed: dict[str, int] = {}
    ended: list[str] = []
    while not feed.done:
        handed |= {r.id: len(r.prompt) for r in feed.take()}
        assert handed, "something is always on its way"
        assert len(handed) <= rules.max_queued_requests + rules.max_batch_sequences
        assert len(handed) == 1 or sum(handed.values()) <= rules.max_queued_tokens
        id = chance.choice(sorted(handed))
        del handed[id]
        if chance.randrange(4):
            feed.end(id)
            ended.append(id)
        else:
            feed.hold_back(id)
    assert sorted(ended, key=int) == [str(i) for i in range(len(sizes))]
    assert feed.answered == len(sizes)
