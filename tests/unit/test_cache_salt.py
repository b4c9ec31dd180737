"""Names and salts: no tenant can reach what belongs to another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingress.errors import ApiError
from services.ingress.sessions import cache_salt, identify, new_turn_id


def test_a_salt_depends_on_secret_tenant_and_the_client_s_own() -> None:
    base = cache_salt("s", "a", "x")
    others = [
        cache_salt("s2", "a", "x"),
        cache_salt("s", "b", "x"),
        cache_salt("s", "a", "y"),
        cache_salt("s", "a", None),
    ]
    assert base == cache_salt("s", "a", "x")
    assert len({base, *others}) == 5
    assert len(base) == 64


def test_a_long_salt_is_refused() -> None:
    with pytest.raises(ApiError):
        cache_salt("s", "a", "x" * 257)


def test_a_session_is_named_by_tenant_user_and_header() -> None:
    session = identify("a", "ann", "s-1")
    assert (session.session_key, session.user_key) == ("a/ann/s-1", "a/ann")


def test_without_a_header_a_user_has_one_session() -> None:
    assert identify("a", "ann", None).session_key == identify("a", "ann", None).session_key == "a/ann/"
    assert identify("a", "ann", None).session_key != identify("b", "ann", None).session_key


def test_without_header_and_user_each_turn_is_its_own_session() -> None:
    assert identify("a", "", None).session_key != identify("a", "", None).session_key


@pytest.mark.parametrize("header", ["", "a/b", "a b", "x" * 129, "é", "a\n", "../b", "{x}"])
def test_a_header_that_is_no_id_is_refused(header: str) -> None:
    with pytest.raises(ApiError) as caught:
        identify("a", "ann", header)
    assert caught.value.status == 400


users = st.text(max_size=12)
sessions = st.from_regex(r"[A-Za-z0-9._:@=+~-]{1,8}", fullmatch=True)


@given(st.tuples(users, sessions), st.tuples(users, sessions))
def test_different_users_and_sessions_never_share_a_key(one: tuple[str, str], other: tuple[str, str]) -> None:
    keys = [identify("a", user, header).session_key for user, header in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)
    assert all(key.count("/") == 2 and key.startswith("a/") for key in keys)


def test_turn_ids_carry_their_tenant_and_differ() -> None:
    ids = {new_turn_id("a") for _ in range(100)}
    assert len(ids) == 100
    assert all(turn_id.startswith("a-") for turn_id in ids)
