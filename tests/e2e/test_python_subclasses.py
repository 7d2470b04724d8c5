# SPDX-License-Identifier: Apache-2.0
"""Subclasses of attend.Client, copied and in a pool: a copy that cannot be made from Client's
arguments raises an error when it is used, and hangs no pool."""

import copy
import pickle
import subprocess
import sys

import attend
import pytest

import harness

pytestmark = pytest.mark.usefixtures("libraries")

COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy,
          "pickle": lambda each: pickle.loads(pickle.dumps(each))}


class Same(attend.Client):
    """Takes the same arguments as Client."""


class Model(attend.Client):
    """Takes other arguments."""

    def __init__(self, name, *, address):
        super().__init__(address)
        self.name = name


class Picky(attend.Client):
    """Refuses some arguments once it has a connection."""

    def __init__(self, server, **options):
        super().__init__(server, **options)
        if options:
            raise KeyError("no options")


@pytest.mark.parametrize("make,words", [
    (lambda address: Model("bert", address=address), "TypeError: .*unexpected keyword.*__reduce__"),
    (Picky, "KeyError: 'no options'.*__reduce__")], ids=["arguments", "raises"])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_subclass_with_other_arguments_fails_when_used(server, how, make, words):
    with make(server.address) as client:
        other = COPIES[how](client)
        again = COPIES[how](other)
        assert client.health() == "SERVING"
    for each in (other, again):
        assert type(each) is type(client) and repr(each) == repr(client)
        for use in (each.health, each.stream, lambda each=each: each.session(1, 8, tenant="a")):
            with pytest.raises(attend.Error, match=f"^FAILED_PRECONDITION: .*{words}"):
                use()
        each.close()


@pytest.mark.parametrize("how", COPIES)
def test_a_subclass_with_the_same_arguments_is_copied(server, how):
    with Same(server.address) as client, COPIES[how](client) as other:
        assert type(other) is Same and other.health() == "SERVING"


POOL = """
import faulthandler, multiprocessing, sys
sys.path[:0] = PATH
import attend


class Model(attend.Client):
    def __init__(self, name):
        super().__init__(name)


def health(client):
    return client.health()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(60, exit=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            pool.apply(health, (Model(sys.argv[1]),))
            assert False
        except attend.Error as failure:
            assert "__reduce__" in failure.message, failure
        assert pool.apply(health, (attend.Client(sys.argv[1]),)) == "SERVING"
"""


def test_a_pool_fails_instead_of_hanging(server, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"PATH = {harness.PACKAGES!r}\n{POOL}")
    done = subprocess.run([sys.executable, program, server.address], capture_output=True,
                          text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
