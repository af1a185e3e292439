"""The store for torch.distributed: what is kept, who waits for what, and that only those with the secret get at it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from paceline.network.means.group import Broken, GroupRequest, Header
from paceline.network.means.process_group import TorchGroup
from paceline.network.secure import secret
from paceline.network.secure.admission import AdmissionListener, listener
from paceline.network.secure.channel import ProtocolError
from paceline.network.secure.store_client import StoreClient
from paceline.network.secure.store_server import Ask, KeyValueStore, StoreError, StoreServer, packed, unpacked

SECRET = secret.fresh()


class Client:
    """Somebody who asks a shelf, without any socket."""

    def __init__(self, shelf: KeyValueStore) -> None:
        self.shelf, self.answers, self.number = shelf, [], 0  # type: ignore[var-annotated]
        self.reply = self.answers.append

    def ask(self, what: int, *fields: bytes) -> list[bytes] | None:
        """The fields of the answer; None as long as there is none."""
        self.number += 1
        self.shelf.handle(packed(self.number, what, *fields), self.reply)
        return self.answer(self.number)

    def answer(self, number: int) -> list[bytes] | None:
        for message in self.answers:
            answered, well, fields = unpacked(message)
            if answered == number:
                if not well:
                    raise StoreError(fields[0].decode())
                return fields
        return None


def test_values_are_kept_changed_counted_and_forgotten() -> None:
    client = Client(KeyValueStore())
    assert client.ask(Ask.PEEK, b"a") == []
    assert client.ask(Ask.SET, b"a", b"1") == []
    assert client.ask(Ask.GET, b"a") == [b"1"]
    assert client.ask(Ask.PEEK, b"a") == [b"1"]
    assert client.ask(Ask.ADD, b"n", b"3") == [b"3"]
    assert client.ask(Ask.ADD, b"n", b"-5") == [b"-2"]
    assert client.ask(Ask.CHECK, b"a", b"n") == [b"1"]
    assert client.ask(Ask.CHECK, b"a", b"other") == [b"0"]
    assert client.ask(Ask.COUNT) == [b"2"]
    assert client.ask(Ask.DELETE, b"a") == [b"1"]
    assert client.ask(Ask.DELETE, b"a") == [b"0"]
    for name in (b"x/1", b"x/2", b"y/1"):
        client.ask(Ask.SET, name, b"")
    assert client.ask(Ask.CLEAR, b"x/") == [b"2"]
    assert client.ask(Ask.COUNT) == [b"2"]


def test_of_two_who_compare_and_set_one_wins() -> None:
    client = Client(KeyValueStore())
    assert client.ask(Ask.COMPARE, b"k", b"", b"mine") == [b"mine"]
    assert client.ask(Ask.COMPARE, b"k", b"", b"yours") == [b"mine"]
    assert client.ask(Ask.COMPARE, b"k", b"mine", b"yours") == [b"yours"]
    assert client.ask(Ask.COMPARE, b"none", b"expected", b"new") == [b"expected"]
    assert client.ask(Ask.PEEK, b"none") == []


def test_who_waits_is_answered_when_the_last_key_is_there() -> None:
    shelf = KeyValueStore()
    waiting, gone, other = Client(shelf), Client(shelf), Client(shelf)
    assert waiting.ask(Ask.WAIT, b"a", b"b") is None
    assert waiting.ask(Ask.GET, b"b") is None
    assert gone.ask(Ask.GET, b"b") is None
    shelf.drop(gone.reply)
    other.ask(Ask.SET, b"a", b"1")
    assert waiting.answers == []
    other.ask(Ask.SET, b"b", b"2")
    assert waiting.answer(1) == []
    assert waiting.answer(2) == [b"2"]
    assert gone.answers == []


def test_a_shelf_is_bounded() -> None:
    client = Client(KeyValueStore(most_keys=2, most_bytes=100))
    client.ask(Ask.SET, b"a", b"")
    with pytest.raises(StoreError, match="the store is full: 1 keys"):
        client.ask(Ask.SET, b"b", bytes(200))
    client.ask(Ask.SET, b"b", b"")
    with pytest.raises(StoreError, match="full"):
        client.ask(Ask.SET, b"c", b"")
    client.ask(Ask.SET, b"b", bytes(50))  # what is there may change
    client.ask(Ask.DELETE, b"a")
    client.ask(Ask.SET, b"c", bytes(40))
    for _ in range(3000):  # and nobody can wait without end for more and more
        client.ask(Ask.GET, b"never")
    assert len(client.shelf._waiting[client.reply]) == 1024


@pytest.mark.parametrize(
    "request_",
    [
        *(b"", b"abc", packed(1, 99), packed(1, Ask.GET), packed(1, Ask.SET, b"a"), packed(1, Ask.ADD, b"a", b"x")),
        *(struct.pack("<IBI", 1, 0, 1 << 31), packed(1, Ask.SET, b"a", b"b")[:-1]),
    ],
)
def test_what_is_no_request_is_refused(request_: bytes) -> None:
    with pytest.raises(ProtocolError):
        KeyValueStore().handle(request_, lambda _: None)


@contextlib.contextmanager
def served(log: list[str] | None = None) -> Iterator[tuple[tuple[str, int, bytes], StoreServer]]:
    """A desk in a loop as a launcher has it."""
    listening = listener("127.0.0.1")
    gate = AdmissionListener(listening, SECRET, log=(log if log is not None else []).append)
    desk = StoreServer(gate, ("127.0.0.1", listening.getsockname()[1], SECRET))
    woken, wake = socket.socketpair()
    selector = selectors.DefaultSelector()
    selector.register(woken, selectors.EVENT_READ)
    selector.register(desk, selectors.EVENT_READ)

    def loop() -> None:
        while not any(key.fileobj is woken for key, _ in selector.select(1.0)):
            desk.pump()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield desk.place, desk
    finally:
        wake.close()
        thread.join()
        selector.close()
        woken.close()
        desk.close()


def test_a_far_store_does_all_that_torch_may_ask_for() -> None:
    with served() as (place, _):
        store, other = StoreClient(*place, patience=5.0), StoreClient(*place, patience=5.0)
        store.set("a", b"1")
        store.set("text", "words")
        assert other.get("a") == b"1"
        assert other.get("text") == b"words"
        assert other.add("n", 2) == 2
        assert store.add("n", 3) == 5
        assert store.check(["a", "n"])
        assert not store.check(["a", "z"])
        assert store.compare_set("c", "", "mine") == b"mine"
        assert other.compare_set("c", "", "yours") == b"mine"
        assert other.peek("c") == b"mine"
        assert other.peek("z") == b""
        assert store.num_keys() == 4
        assert store.delete_key("a")
        assert not store.delete_key("a")
        assert store.clear("te") == 1
        waited: list[bytes] = []
        thread = threading.Thread(target=lambda: waited.append(other.get("later")))
        thread.start()
        store.set("later", b"now")
        thread.join(5.0)
        assert waited == [b"now"]
        store.set_timeout(timedelta(seconds=0.05))
        assert store.timeout == timedelta(seconds=0.05)
        with pytest.raises(TimeoutError):
            store.get("never")
        with pytest.raises(TimeoutError):
            store.wait(["never"], timedelta(seconds=0.05))
        store.set("after", b"all")  # a late answer to what was given up is not taken for another
        assert store.peek("after") == b"all"
        store.close()
        other.close()


def test_a_prefix_store_of_torch_goes_through_it() -> None:
    with served() as (place, _):
        store = StoreClient(*place, patience=5.0)
        within = PrefixStore("run/1", store)
        within.set("key", "value")
        assert store.peek("run/1/key") == b"value"
        assert within.get("key") == b"value"
        assert within.add("count", 1) == 1
        within.wait(["key"], timedelta(seconds=1))
        store.close()


def test_without_the_secret_there_is_no_store() -> None:
    log: list[str] = []
    with served(log) as (place, _):
        with pytest.raises(StoreError, match="secret"):
            StoreClient(place[0], place[1], secret.fresh(), patience=2.0).set("a", b"1")
        with socket.create_connection(place[:2], timeout=5.0) as stranger:
            stranger.sendall(packed(1, Ask.SET, b"a", b"1") * 10)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(4096):
                    pass
        good = StoreClient(*place, patience=5.0)
        assert good.num_keys() == 0
        good.close()
    assert log


def test_a_lost_connection_is_made_again() -> None:
    with served() as (place, desk):
        store = StoreClient(*place, patience=5.0)
        store.set("a", b"1")
        assert store._channel is not None
        with socket.socket(fileno=socket.dup(store._channel.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)
        assert store.get("a") == b"1"
        store.close()
        deadline = time.monotonic() + 5.0
        while desk._clients and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert not desk._clients  # a client that has gone leaves nothing behind


def asked(store: StoreClient, name: str, place: int, size: int, device: torch.device) -> GroupRequest:
    builder: Any = None  # torch's groups do not ask whether they are still wanted
    return GroupRequest(store, name, list(range(size)), place, device, builder, lambda: None)


def joined(size: int, place: tuple[str, int, bytes], prefix: str) -> list[TorchGroup]:
    """A group of threads of this process."""
    groups: list[TorchGroup | None] = [None] * size

    def join(k: int) -> None:
        store = StoreClient(*place, patience=5.0)
        cpu = torch.device("cpu")
        groups[k] = TorchGroup("gloo", asked(store, prefix, k, size, cpu), "127.0.0.1")
        store.close()  # it is needed only as long as they look for each other

    threads = [threading.Thread(target=join, args=(k,)) for k in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(groups)
    return [group for group in groups if group is not None]


def finished(exchange: object, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not exchange.over:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)
    exchange.finish()  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [5, 700_001])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")
def test_a_group_of_torch_meets_through_it_and_adds_in_the_order_of_its_places(size: int, count: int) -> None:
    torch.manual_seed(0)
    vectors = [torch.randn(count) for _ in range(size)]
    weights = [1.0, 0.25, 3.0][:size]
    wanted = vectors[0] * weights[0]
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        wanted = wanted + vector * weight
    wanted = wanted / sum(weights)
    with served() as (place, _):
        groups = joined(size, place, "g/1")
        starts = [g.start(v, Header(7, 40 + g.place, weights[g.place])) for g, v in zip(groups, vectors, strict=True)]
        for start in starts:
            finished(start)
        assert [header.number for header in groups[-1].headers()] == list(range(40, 40 + size))
        told = [header.weight for header in groups[0].headers()]
        assert told == weights
        if groups[0].small:
            means = [group.small_mean(v, told) for group, v in zip(groups, vectors, strict=True)]
        else:
            for exchange in [group.start_second(told) for group in groups]:
                finished(exchange)
            means = [group.large_mean(vectors[0]) for group in groups]
        for mean in means:
            assert torch.equal(mean, wanted)
        for group in groups:
            group.bury()


def test_nccl_takes_the_same_operations_on_a_gpu() -> None:
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        pytest.skip("NCCL or a GPU is not there")
    device = torch.device("cuda", 0)
    with served() as (place, _):
        store = StoreClient(*place, patience=30.0)  # alone: NCCL refuses two members on one GPU
        group = TorchGroup("nccl", asked(store, "g/3", 0, 1, device), "127.0.0.1")
        for count in (5, 700_001):
            vector = torch.randn(count, device=device)
            finished(group.start(vector, Header(1, 3, 1.0)), 30.0)
            assert [header.number for header in group.headers()] == [3]
            if group.small:
                mean = group.small_mean(vector, [1.0])
            else:
                finished(group.start_second([1.0]), 30.0)
                mean = group.large_mean(vector)
            assert mean.device == device
            assert torch.equal(mean, vector)
            finished(group.broadcast(vector, 0), 30.0)
            group._sent = None  # of the other length
        group.bury()
        store.close()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")
def test_a_group_that_is_let_go_breaks_the_others_operation_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())  # threads of earlier tests may still end

    def added() -> int:
        return len(set(threading.enumerate()) - before)

    with served() as (place, _):
        left, right, third = joined(3, place, "g/2")
        exchange = left.start(torch.zeros(10), Header(1, 1, 1.0))
        waits = right.start(torch.zeros(10), Header(1, 1, 1.0))
        left.bury()  # with its operation under way: this must not wait for it
        third.bury()
        with pytest.raises(Broken):
            finished(waits)
        with pytest.raises(Broken):
            finished(exchange)
        right.bury()
        deadline = time.monotonic() + 5.0
        while added() > 1 and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert added() == 1  # the store server's own
