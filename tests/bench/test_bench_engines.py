"""Engine names: what is understood, and what a mistake is answered with."""

from __future__ import annotations

import pytest

from shardwise.bench import engines
from shardwise.bench.engines import KINDS, STANDARD, parse_engine, parse_engines
from shardwise.comm.choose import names
from shardwise.errors import ConfigError


def test_options_stand_in_any_order():
    spec = parse_engine("shardwise:c10d:shard_grad_op@A=1@B=x=y")
    assert spec.kind == "shardwise"
    assert spec.one_of(names(), "auto") == "c10d"
    assert spec.one_of(engines.STRATEGIES, "full_shard") == "shard_grad_op"
    assert spec.environment == (("A", "1"), ("B", "x=y"))
    assert parse_engine("shardwise:ZeRO-2:c10d").options == ("shard_grad_op", "c10d")
    assert parse_engine("shardwise:shard_grad_op:c10d").one_of(names(), "") == "c10d"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("shardwize", "no engine 'shardwize'; did you mean shardwise?"),
        ("horovod", "no engine 'horovod'; there are shardwise, fsdp2"),
        ("fsdp2:kep", "fsdp2:kep: no option 'kep'; did you mean keep?"),
        ("megatron_fsdp:keep", "megatron_fsdp has no options"),
        ("shardwise:c10d:auto", "c10d and auto exclude each other"),
        ("shardwise:zero2:full_shard", "shard_grad_op and full_shard exclude each other"),
        ("fsdp2@X", "expected @NAME=VALUE, found @X"),
        ("", "no engine ''"),
    ],
)
def test_mistakes(name, expected):
    with pytest.raises(ConfigError) as caught:
        parse_engine(name)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_are_those_of_the_engine():
    """The lists here spare the import of torch; they must not fall behind."""
    from shardwise.layout.strategy import STRATEGIES, strategy_named

    assert {strategy_named(name).name for name in engines.STRATEGIES} == set(STRATEGIES)


def test_installed_leaves_out_what_is_not_there(monkeypatch):
    kind = engines.Kind("none", ("1", "2", "3"), "a_package_that_nobody_has", "a-package")
    monkeypatch.setitem(KINDS, "deepspeed", kind)
    names = [spec.name for spec in parse_engines("installed")]
    assert "fsdp2" in names
    assert not any(name.startswith("deepspeed") for name in names)
    assert parse_engine("deepspeed:1").missing == "not installed: pip install a-package"


def test_all_and_duplicates(monkeypatch):
    assert [spec.name for spec in parse_engines("all")] == list(STANDARD)
    assert [spec.name for spec in parse_engines("floor, fsdp2,floor")] == ["floor", "fsdp2"]


def test_every_kind_says_what_it_is():
    for kind in KINDS.values():
        assert kind.about
        assert kind.install or kind.package in ("torch", "shardwise")
