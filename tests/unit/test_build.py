"""From words to schemes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from paceline.config import build
from paceline.errors import UnknownName, UsageError
from paceline.fields import Count, Fraction, Rate, described
from paceline.rules import SGD, Adagrad, Adam, Momentum, Rule
from paceline.scheme import Scheme
from paceline.schemes.downpour import Downpour
from paceline.schemes.sync import SyncSGD


@dataclass(frozen=True)
class Sample(Scheme, name="sample"):
    lr: Rate = 0.1
    rule: Rule = SGD()
    server_rule: Rule = Adagrad()
    window: Count = 5
    need: Count | None = None
    share: Fraction = 0.5
    repeat: bool = False
    rates: tuple[Rate, ...] = ()
    reduce: Literal["mean", "sum"] = "mean"
    label: str = "none yet"


@dataclass(frozen=True)
class OneRule(Scheme, name="one-rule"):
    lr: Rate = 0.1
    rule: Rule = SGD()


@dataclass(frozen=True)
class NoRule(Scheme, name="no-rule"):
    lr: Rate = 0.1


def made(**hyper: Any) -> Any:
    return build.scheme_of(Sample, {key.replace("__", "."): value for key, value in hyper.items()})


def test_pairs() -> None:
    assert build.pairs(["lr=0.1", "rule.beta1=0.5", "label=a=b", "need="]) == {
        "lr": "0.1",
        "rule.beta1": "0.5",
        "label": "a=b",
        "need": "",
    }
    for wrong in ("lr", "=3", "lr 0.1", ""):
        with pytest.raises(UsageError, match="is not a hyper-parameter; write it as key=value"):
            build.pairs([wrong])
    with pytest.raises(UsageError, match=r"'lr' is given twice: '0\.1' and '0\.2'"):
        build.pairs(["lr=0.1", "window=3", "lr=0.2"])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("lr", "0.5", 0.5),
        ("lr", "1e-3", 0.001),
        ("lr", 2, 2.0),
        ("window", "7", 7),
        ("window", 7.0, 7),
        ("need", "3", 3),
        ("need", "none", None),
        ("need", "None", None),
        ("need", None, None),
        ("share", "1", 1.0),
        ("rates", "0.1,0.2", (0.1, 0.2)),
        ("rates", "0.1", (0.1,)),
        ("rates", 0.1, (0.1,)),
        ("rates", "", ()),
        ("rates", [1, 2], (1.0, 2.0)),
        ("reduce", "sum", "sum"),
        ("rule", "adam", Adam()),
        ("rule", Momentum(momentum=0.5), Momentum(momentum=0.5)),
        ("label", "text", "text"),
        *(("repeat", word, True) for word in ("true", "True", "yes", "on", "1", True)),
        *(("repeat", word, False) for word in ("false", "FALSE", "no", "off", "0", False)),
    ],
)
def test_values_from_text(key: str, text: Any, value: Any) -> None:
    got = getattr(build.scheme_of(Sample, {key: text}), key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("lr", "fast", "sample: lr must be a number, not 'fast'"),
        ("lr", True, "sample: lr must be a number, not True"),
        ("lr", None, "sample: lr must be a number, not None"),
        ("lr", "-1", "sample: lr must be at least 0, not -1"),
        ("lr", "nan", "sample: lr must be at least 0, not nan"),
        ("window", "2.5", "sample: window must be a whole number, not '2.5'"),
        ("window", 2.5, "sample: window must be a whole number, not 2.5"),
        ("window", True, "sample: window must be a whole number, not True"),
        ("window", None, "sample: window must be a whole number, not None"),
        ("window", [3], "sample: window must be a whole number, not [3]"),
        ("window", "0", "sample: window must be at least 1, not 0"),
        ("need", "0", "sample: need must be at least 1, not 0"),
        ("share", "2", "sample: share must be from 0 to 1, not 2"),
        ("repeat", "maybe", "sample: repeat must be true or false, not 'maybe'"),
        ("repeat", "2", "sample: repeat must be true or false, not '2'"),
        ("rates", "0.1,x", "sample: rates must be a number, not 'x'"),
        ("rates", "0.1,-2", "sample: rates must be at least 0, not -2"),
        ("reduce", "max", "sample: reduce must be one of mean, sum, not 'max'"),
        ("rule", "adm", "no rule 'adm'; did you mean 'adam'?"),
        ("label", 3, "sample: label must be text, not 3"),
        ("wndow", "3", "no hyper-parameter of sample 'wndow'; did you mean 'window'?"),
        ("zzz", "3", "no hyper-parameter of sample 'zzz'; there are: label, lr, "),
        ("window.size", "3", "no hyper-parameter of sample 'window.size'; did you mean 'window'?"),
        ("rule.momentm", "0.5", "no option of rule sgd 'momentm'"),
        ("server.epss", "0.5", "no option of rule adagrad 'epss'; did you mean 'eps'?"),
        ("rule.lr", "fast", "rule sgd: lr must be a number, not 'fast'"),
        ("rule.lr", "-1", "sgd: lr must be at least 0, not -1"),
        ("rule.weight_decay", "x", "rule sgd: weight_decay must be a number, not 'x'"),
    ],
)
def test_wrong_values_name_what_is_allowed(key: str, text: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build.scheme_of(Sample, {key: text})
    assert message in str(caught.value)


def test_options_of_a_rule() -> None:
    assert made(rule="adam", rule__beta1="0.5").rule == Adam(beta1=0.5)
    assert made(rule__beta1="0.5", rule="adam").rule == Adam(beta1=0.5)  # in whichever order
    assert made(rule__lr="0.5").rule == SGD(lr=0.5)
    assert made(rule__lr="none").rule == SGD()
    assert made(rule=Momentum(), rule__momentum=0.25).rule == Momentum(momentum=0.25)


def test_server_words_speak_of_the_servers_rule() -> None:
    both = made(server__rule="adam", server__lr="0.5", server__beta1="0.25", rule="momentum", lr="0.125")
    assert both.server_rule == Adam(lr=0.5, beta1=0.25)
    assert (both.rule, both.lr) == (Momentum(), 0.125)
    assert made(server__eps=1.0).server_rule == Adagrad(eps=1.0)


def test_server_words_where_the_only_rule_is_the_workers() -> None:
    with pytest.raises(UnknownName, match=r"no hyper-parameter of .* 'server.rule'"):
        build.scheme_of(OneRule, {"server.rule": "adam"})


def test_server_words_where_the_only_rule_is_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneRule, "rule_at_server", True)
    one = build.scheme_of(OneRule, {"server.rule": "adam", "server.lr": "0.5", "server.beta1": "0.25"})
    assert one == OneRule(lr=0.5, rule=Adam(beta1=0.25))
    with pytest.raises(UnknownName, match="no option of rule sgd 'bta'"):
        build.scheme_of(OneRule, {"server.bta": "1"})


def test_server_words_where_there_is_no_rule() -> None:
    for key in ("server.lr", "server.rule", "rule", "rule.lr"):
        with pytest.raises(UnknownName, match=f"no hyper-parameter of no-rule '{key}'"):
            build.scheme_of(NoRule, {key: "1"})


def test_a_switch_that_went_is_refused_with_the_word_to_give() -> None:
    with pytest.raises(UsageError, match=r"sync has no 'repeat' any more: .* the scheme sync-repeat"):
        build.scheme_of("sync", {"repeat": "true"})
    with pytest.raises(UsageError, match=r"sagn has no 'barrier' any more: .* the hook start-barrier"):
        build.scheme_of("sagn", {"barrier": True})
    assert build.scheme_of("sync", {"repeat": "no", "barrier": False}) == SyncSGD()  # what they are without it


def test_a_scheme_by_name_class_or_instance() -> None:
    assert build.scheme_of("sync", {"aggregate": "2"}) == SyncSGD(aggregate=2)
    assert build.scheme_of(SyncSGD, {}) == SyncSGD()
    mine = SyncSGD(lr=0.5, rule=Momentum(momentum=0.25))
    assert build.scheme_of(mine, {}) is mine
    assert build.scheme_of(mine, {"aggregate": 2}) == SyncSGD(lr=0.5, rule=Momentum(momentum=0.25), aggregate=2)
    assert build.scheme_of(mine, {"rule.momentum": 0.75}).rule == Momentum(momentum=0.75)  # type: ignore[attr-defined]


def test_the_words_of_a_scheme() -> None:
    assert build.keys_of(Downpour)[:4] == ["lr", "rule", "server.rule", "window"]
    scheme = Downpour(lr=0.5, rule=Momentum(momentum=0.25), server_rule=Adagrad(lr=0.5, eps=1.0))
    plain = build.hyper_of(scheme)
    assert plain["rule"] == "momentum"
    assert plain["rule.momentum"] == 0.25
    assert plain["server.rule"] == "adagrad"
    assert (plain["server.lr"], plain["server.eps"]) == (0.5, 1.0)
    assert build.scheme_of("downpour", plain) == scheme


def test_types_in_words() -> None:
    words = {field.name: described(hint) for field, hint in build.fields(Sample)}
    assert words == {
        "lr": "float, at least 0",
        "rule": "rule",
        "server_rule": "rule",
        "window": "int, at least 1",
        "need": "int, at least 1 or none",
        "share": "float, from 0 to 1",
        "repeat": "bool",
        "rates": "float, at least 0, …",
        "reduce": "mean | sum",
        "label": "str",
    }


@pytest.mark.parametrize(
    ("word", "meant"),
    [("learning_rate", "lr"), ("learning-rate", "lr"), ("eta", "lr"), ("optimizer", "rule"), ("tau", "window")],
)
def test_words_of_other_libraries_are_known(word: str, meant: str) -> None:
    with pytest.raises(UnknownName, match=f"did you mean '{meant}'"):
        build.scheme_of(Sample, {word: 1})


def test_a_word_for_something_that_a_scheme_lacks_is_not_suggested() -> None:
    with pytest.raises(UnknownName) as error:
        build.scheme_of(NoRule, {"optimizer": "adam"})
    assert "'rule'" not in str(error.value)


def test_another_scheme_adopts_what_it_can_have() -> None:
    given = {"rule.beta1": 0.5, "rule": "adam", "lr": 0.3, "window": 7, "server.rule": "adam"}
    made, dropped = build.adopted(OneRule, given)
    assert made == OneRule(lr=0.3, rule=Adam(beta1=0.5))
    assert dropped.keys() == {"window", "server.rule"}
    made, dropped = build.adopted(NoRule, given)
    assert made == NoRule(lr=0.3)
    assert dropped.keys() == {"rule", "rule.beta1", "window", "server.rule"}
    assert build.adopted(Sample, {"lr": -1})[1] == {"lr": "sample: lr must be at least 0, not -1"}


def test_what_was_given_to_an_instance() -> None:
    assert build.given_to(Sample()) == {}
    assert build.given_to(Sample(lr=0.3, server_rule=Adam())) == {"lr": 0.3, "server.rule": Adam()}


def test_the_value_of_a_key_is_that_of_a_field() -> None:
    scheme = Sample(lr=0.3, rule=Adam(beta1=0.5), server_rule=Adagrad())
    for key, value in (("lr", 0.3), ("rule.beta1", 0.5), ("server.rule", Adagrad()), ("rule.lr", None)):
        assert build.value_of(scheme, key) == value
    for scheme, key in ((Sample(), "server"), (NoRule(), "server.lr"), (NoRule(), "lr.x"), (Sample(), "rule.zzz")):
        with pytest.raises(UnknownName):
            build.value_of(scheme, key)
