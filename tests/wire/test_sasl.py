"""SASL, both sides: against each other, against an independent library, and against a recorded exchange."""

from __future__ import annotations

import base64

import pytest
import scramp

from mirror.wire.sasl import (
    HASHES,
    MECHANISMS,
    SaslError,
    ScramClient,
    ScramServer,
    ScramVerifier,
    choose_mechanism,
    plain_decode,
    plain_encode,
)
from tests import recordings

SCRAMP_NAMES = {"SCRAM-SHA512": "SCRAM-SHA-512", "SCRAM-SHA256": "SCRAM-SHA-256", "SCRAM-SHA1": "SCRAM-SHA-1"}
PASSWORDS = {"demo": "demo", "o=d,d": "pass wörd"}


def exchange(client: ScramClient, server: ScramServer) -> None:
    client.verify(server.outcome(client.final(server.challenge(client.first()))))


@pytest.mark.parametrize("mechanism", HASHES)
def test_the_client_agrees_with_an_independent_server(mechanism: str) -> None:
    library = scramp.ScramMechanism(SCRAMP_NAMES[mechanism])
    stored = library.make_auth_info("demo")
    server = library.make_server(lambda user: stored)
    client = ScramClient(mechanism, "demo", "demo")
    server.set_client_first(client.first().decode())
    server.set_client_final(client.final(server.get_server_first().encode()).decode())
    client.verify(server.get_server_final().encode())


@pytest.mark.parametrize("mechanism", HASHES)
def test_the_server_agrees_with_an_independent_client(mechanism: str) -> None:
    client = scramp.ScramClient([SCRAMP_NAMES[mechanism]], "demo", "demo")
    server = ScramServer(mechanism, PASSWORDS.get)
    client.set_server_first(server.challenge(client.get_client_first().encode()).decode())
    client.set_server_final(server.outcome(client.get_client_final().encode()).decode())  # raises on a wrong proof
    assert server.username == "demo"


def test_a_recorded_exchange_of_an_sdk_with_a_real_server_is_reproduced() -> None:
    """The SDK's nonce holds blanks, and its proof and the server's signature must come out to the byte."""
    sent = [data for _, data in recordings.read("sdk_72_conn2").pieces[:6]]
    first = sent[0][sent[0].index(b"n,,") :]
    challenge = sent[2][sent[2].index(b"r=") :]
    final = sent[3][sent[3].index(b"c=biws") :]
    outcome = sent[4][sent[4].index(b"v=") :]
    nonce = first.decode().partition("r=")[2]
    assert " " in nonce
    client = ScramClient("SCRAM-SHA512", "@admin", "password", nonce=nonce)
    assert client.first() == first
    assert client.final(challenge) == final
    client.verify(outcome)

    salt = base64.b64decode(challenge.partition(b"s=")[2].partition(b",")[0])
    own_nonce = challenge.decode().partition(",")[0][2 + len(nonce) :]
    server = ScramServer("SCRAM-SHA512", {"@admin": "password"}.get, salt=salt, nonce=own_nonce)
    assert server.challenge(first) == challenge
    assert server.outcome(final) == outcome


def test_the_client_refuses_an_impostor() -> None:
    client = ScramClient("SCRAM-SHA256", "demo", "demo")
    server = ScramServer("SCRAM-SHA256", PASSWORDS.get)
    client.final(server.challenge(client.first()))
    with pytest.raises(SaslError, match="impostor"):
        client.verify(b"v=AAAA")


@pytest.mark.parametrize(
    ("challenge", "said"),
    [
        (b"", "bad SCRAM"),
        (b"r=other,s=AAAA,i=4096", "nonce"),
        (b"r=abc,s=AAAA,i=4096", "nonce"),
        (b"r=abcd,s=AAAA,i=99999999", "iterations"),
        (b"r=abcd,s=AAAA,i=3999", "iterations"),
        (b"r=abcd,s=AAAA,i=1000001", "iterations"),
        (b"r=abcd,s=AAAA,i=10000000", "iterations"),
        (b"r=abcd,s=AAAA,i=-5", "iteration"),
        (b"r=abcd,s=*,i=4096", "base64"),
        (b"e=other-error", "refused"),
        (b"r=abcd,s=AAAA,i=4096,i=4096", "bad SCRAM message"),
        (b"\xff\xfe", "UTF-8"),
        (b"r=" + b"a" * 5000, "too long"),
    ],
)
def test_a_bad_challenge_is_one_clear_error(challenge: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashlib.pbkdf2_hmac", lambda *_: pytest.fail("no key is derived of a bad challenge"))
    with pytest.raises(SaslError, match=said):
        ScramClient("SCRAM-SHA1", "demo", "demo", nonce="abc").final(challenge)


@pytest.mark.parametrize(
    "first", [b"", b"p=x,,n=a,r=b", b"n,,r=b", b"n,,n=a", b"n,,garbage", b"\xff", b"n,,n=a,r=b,n=c"]
)
def test_a_bad_first_message_is_refused(first: bytes) -> None:
    with pytest.raises(SaslError):
        ScramServer("SCRAM-SHA1", PASSWORDS.get).challenge(first)


@pytest.mark.parametrize("final", [b"", b"c=biws,r=x,p=AAAA", b"c=AAAA,r=abcsrv,p=AAAA", b"c=biws,r=abcsrv"])
def test_a_bad_final_message_is_refused(final: bytes) -> None:
    server = ScramServer("SCRAM-SHA1", PASSWORDS.get, nonce="srv")
    server.challenge(b"n,,n=demo,r=abc")
    with pytest.raises(SaslError):
        server.outcome(final)


def test_steps_out_of_order_are_refused() -> None:
    with pytest.raises(SaslError):
        ScramServer("SCRAM-SHA1", PASSWORDS.get).outcome(b"c=biws,r=,p=AAAA")
    with pytest.raises(SaslError):
        ScramClient("SCRAM-SHA1", "demo", "demo").verify(b"v=AAAA")
    with pytest.raises(SaslError):
        ScramClient("MD5", "demo", "demo")


def test_a_plain_message_is_read_as_written_and_a_malformed_one_is_refused() -> None:
    assert plain_decode(plain_encode("demo", "pä")) == ("demo", "pä")
    assert plain_decode(b"demo\0demo\0x") == ("demo", "x")
    for bad in (b"", b"demo", b"\0demo", b"\0a\0b\0c", b"\0\xff\0x", b"bob\0ann\0x"):
        with pytest.raises(SaslError):
            plain_decode(bad)


def test_the_best_common_mechanism_is_chosen_and_plain_only_if_allowed() -> None:
    assert choose_mechanism(MECHANISMS, plain_allowed=True) == "SCRAM-SHA512"
    assert choose_mechanism(["PLAIN", "SCRAM-SHA1"], plain_allowed=True) == "SCRAM-SHA1"
    assert choose_mechanism(["PLAIN"], plain_allowed=True) == "PLAIN"
    with pytest.raises(SaslError, match="in the clear") as caught:
        choose_mechanism(["PLAIN"], plain_allowed=False)
    assert "couchbases://" in caught.value.hint
    with pytest.raises(SaslError, match="no mechanism"):
        choose_mechanism(["CRAM-MD5"], plain_allowed=True)


@pytest.mark.parametrize("mechanism", HASHES)
@pytest.mark.parametrize("user", ["demo", "unknown"])
def test_a_wrong_user_or_password_is_refused_without_a_secret_in_the_text(mechanism: str, user: str) -> None:
    with pytest.raises(SaslError, match="wrong user or password") as caught:
        exchange(ScramClient(mechanism, user, "hunter2"), ScramServer(mechanism, PASSWORDS.get))
    assert "hunter2" not in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("mechanism", HASHES)
def test_a_server_with_verifiers_checks_passwords_without_knowing_them(mechanism: str) -> None:
    kept = {user: ScramVerifier.of(mechanism, password, iterations=5000) for user, password in PASSWORDS.items()}
    for user, password in PASSWORDS.items():
        assert password.encode() not in kept[user].stored_key + kept[user].server_key
        exchange(ScramClient(mechanism, user, password), ScramServer(mechanism, verifier_of=kept.get))
        assert kept[user].proves(mechanism, password)
        assert not kept[user].proves(mechanism, password + "x")
        assert not kept[user].proves(mechanism, password + "\0"), "HMAC takes it for the same key"
        with pytest.raises(SaslError, match="wrong user or password"):
            exchange(ScramClient(mechanism, user, "wrong"), ScramServer(mechanism, verifier_of=kept.get))
    with pytest.raises(SaslError, match="wrong user or password"):
        exchange(ScramClient(mechanism, "unknown", "demo"), ScramServer(mechanism, verifier_of=kept.get))


def test_an_unknown_user_gets_the_same_salt_each_time() -> None:
    def salt_of(user: str, secret: bytes) -> bytes:
        def decoy_of(name: str) -> ScramVerifier:
            return ScramVerifier.decoy("SCRAM-SHA512", name, secret)

        server = ScramServer("SCRAM-SHA512", verifier_of=lambda _: None, decoy_of=decoy_of)
        return server.challenge(f"n,,n={user},r=abc".encode()).partition(b"s=")[2].partition(b",")[0]

    assert salt_of("a", b"secret") == salt_of("a", b"secret")
    assert salt_of("a", b"secret") != salt_of("b", b"secret")
    assert salt_of("a", b"secret") != salt_of("a", b"another")


@pytest.mark.parametrize("mechanism", HASHES)
def test_an_earlier_exchange_cannot_be_replayed_to_a_server(mechanism: str) -> None:
    """With the same nonce of the client, too: the server's own is another one each time."""
    verifier = ScramVerifier.of(mechanism, "demo")

    def server() -> ScramServer:
        return ScramServer(mechanism, verifier_of={"demo": verifier}.get)

    client, first_server = ScramClient(mechanism, "demo", "demo", nonce="reused"), server()
    first = client.first()
    challenge = first_server.challenge(first)
    final = client.final(challenge)
    assert first_server.outcome(final)
    for replayed in (final, final.replace(challenge.split(b",")[0], b"r=reused")):
        other = server()
        fresh = other.challenge(first)
        assert fresh != challenge
        with pytest.raises(SaslError):
            other.outcome(replayed)
        proof = final.rpartition(b",p=")[2]
        another = server()
        with pytest.raises(SaslError, match="wrong user or password"):  # the earlier proof under the fresh nonce
            another.outcome(b"c=biws," + another.challenge(first).split(b",")[0] + b",p=" + proof)
    with pytest.raises(SaslError):
        first_server.challenge(first)
    with pytest.raises(SaslError):
        server().outcome(final)


@pytest.mark.parametrize("mechanism", HASHES)
def test_an_earlier_exchange_cannot_be_replayed_to_a_client(mechanism: str) -> None:
    """A server that recorded one cannot pass for the one that knows the password."""
    server, client = ScramServer(mechanism, PASSWORDS.get), ScramClient(mechanism, "demo", "demo")
    challenge = server.challenge(client.first())
    outcome = server.outcome(client.final(challenge))
    client.verify(outcome)
    later = ScramClient(mechanism, "demo", "demo")
    with pytest.raises(SaslError, match="nonce"):
        later.final(challenge)
    nonce = later.first().decode().partition("r=")[2]
    later.final(f"r={nonce}replayed,{challenge.decode().partition(',')[2]}".encode())
    with pytest.raises(SaslError, match="impostor"):
        later.verify(outcome)
    assert ScramClient(mechanism, "demo", "demo").first() != ScramClient(mechanism, "demo", "demo").first()
