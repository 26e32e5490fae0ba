"""Who has which program: what holds for any ids and any replicas, and what flags may say."""

import argparse
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_thunder.cli.coordinate import add_parser, launch_of
from vllm_thunder.coordinator.replicas.rendezvous import Rendezvous
from vllm_thunder.program.errors import ConfigError

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
NAMES = st.lists(KEYS, min_size=1, max_size=6, unique=True)


@given(st.data(), NAMES, KEYS)
def test_all_who_know_the_same_names_agree(data, names, key):
    shuffled = data.draw(st.permutations(names))
    present = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    owner = Rendezvous(names).owner(key, present)
    assert owner in present
    assert Rendezvous(shuffled).owner(key, reversed(present)) == owner


@given(st.data(), NAMES.filter(lambda names: len(names) > 1), st.lists(KEYS, max_size=20))
def test_who_leaves_moves_its_own_only_and_gets_them_back(data, names, keys):
    gone = data.draw(st.sampled_from(names))
    rest = [name for name in names if name != gone]
    rendezvous = Rendezvous(names)
    for key in keys:
        before, after = rendezvous.owner(key, names), rendezvous.owner(key, rest)
        assert after != gone
        assert before in (after, gone)
        # Whether it is not there or was never listed is the same.
        assert Rendezvous(rest).owner(key, rest) == after


def test_programs_are_spread_evenly():
    names = [f"http://10.0.0.{n}:8300" for n in range(4)]
    rendezvous = Rendezvous(names)
    counts = Counter(rendezvous.owner(f"issue-{n}", names) for n in range(4000))
    assert all(900 < counts[name] < 1100 for name in names)
    moved = Counter(rendezvous.owner(f"issue-{n}", names[1:]) for n in range(4000))
    assert all(1200 < moved[name] < 1467 for name in names[1:])


def test_another_process_and_a_later_version_agree():
    names = ["http://a:8300", "http://b:8300", "http://c:8300"]
    owners = [
        Rendezvous(names).owner(key, names)[7] for key in ("1", "ü", "issue-4711", "a b", "x")
    ]
    assert "".join(owners) == PINNED


#: Replicas of two versions run side by side while one is replaced by the other.
PINNED = "acaac"


def launched(*flags):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return launch_of(parser.parse_args(["coordinate", "--engines", "e:1", *flags]))


def test_flags_name_all_and_this_one():
    launch = launched("--replicas", "http://a:1/, b:2,https://c/x", "--replica", "b:2/")
    assert launch.replica == "http://b:2"
    assert launch.replicas == ["http://a:1", "http://b:2", "https://c/x"]
    alone = launched()
    assert (alone.replica, alone.replicas) == (None, [])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--replicas", "a:1,b:2"], "go together"),
        (["--replica", "a:1"], "go together"),
        (["--replicas", "a:1,b:2", "--replica", "c:3"], r"http://c:3 is none of --replicas"),
        (["--replicas", "", "--replica", "c:3"], "names none"),
        (["--replicas", "a:1,b:2,http://a:1/", "--replica", "b:2"], "http://a:1 is named twice"),
        (["--replicas", "a:1,ftp://b", "--replica", "a:1"], r"--replicas: 'ftp://b'"),
        (["--replicas", "a:1,no url", "--replica", "a:1"], "--replicas: .http://no url"),
        (["--replicas", "a:1,http://b:x", "--replica", "a:1"], "--replicas: 'http://b:x'"),
        (["--replicas", "a:1", "--replica", "http://u@a:1"], r"--replica: 'http://u@a:1'"),
    ],
)
def test_what_cannot_be_a_set_refuses_to_start(flags, problem):
    with pytest.raises(ConfigError, match=problem):
        launched(*flags)
