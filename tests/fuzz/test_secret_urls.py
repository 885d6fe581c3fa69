"""URLs with a secret somewhere: refused wherever a user can write one, and shown nowhere. URLs
without one are kept as they are."""

from __future__ import annotations

import random
from urllib.parse import quote

import pytest

from elastrata.cli.main import BAD_INPUT, run
from elastrata.recipe.file import load_recipe
from elastrata.recipe.problems import format_value
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.url_secrets import hide_secrets, hide_unrecorded_parts, refuse_secrets
from support.mutations import quick, seeds

CASES = quick(40)
WEB = ("http", "https", "ftp", "webdav", "nobody-knows-it")
OBJECTS = ("s3", "gs", "gcs", "hf", "az", "oss")
LOGIN = ("sftp", "ssh", "smb", "hdfs", "postgresql", "mysql+pymysql", "mssql+pyodbc")
CONTAINERS = ("abfs", "abfss", "wasb")
NAMES = (
    *("token", "api_key", "apikey", "key", "auth", "access_key", "AWSAccessKeyId", "pwd", "code"),
    *("password", "passwd", "sig", "X-Amz-Signature", "X-Amz-Credential", "X-Goog-Signature"),
    *("access_token", "client_secret", "Authorization", "sslpassword", "session", "jwt"),
)
PATHS = ("", "/", "/a", "/a/b.txt", "/a b/c", "/@me/x", "/x=1/y", "/a%20b", "/a:b", "/v1.0/é")
CHAINS = ("", "", "", "simplecache::", "filecache::simplecache::", "zip://in.txt::", "blockcache::")
KEYS = ("storage", "tracking.uri", "data.path", "evaluation.path", "begin_with.run")


def secret(rng: random.Random) -> str:
    return "S3" + "".join(rng.choices("abcdefXYZ0123456789", k=12))


def scheme(rng: random.Random, names: tuple[str, ...]) -> str:
    return "".join(rng.choice((c, c, c.upper())) for c in rng.choice(names))


def hostile(rng: random.Random, planted: str) -> str:
    """A URL with the secret in it."""
    path, name = rng.choice(PATHS), rng.choice(NAMES)
    name = "".join(rng.choice((c, c, c.upper(), f"%{ord(c):02x}")) for c in name)
    host = rng.choice(("host", "host:80", "me.example.com", "[::1]:5000"))
    any_scheme = scheme(rng, (*WEB, *OBJECTS, *LOGIN, *CONTAINERS))
    web = scheme(rng, WEB)
    value = rng.choice((planted, quote(planted + "=", safe=""), planted + "/@x"))
    urls = (
        f"{any_scheme}://me:{planted}@{host}{path}",
        f"{any_scheme}://me:{planted}/x@{host}{path}",
        f"{any_scheme}://:{planted}@{host}{path}",
        f"{any_scheme}://a@{planted}@{host}{path}",
        f"{any_scheme}://me%3A{planted}@{host}{path}",
        f"{scheme(rng, (*WEB, *OBJECTS))}://{planted}@{host}{path}",
        f"{scheme(rng, (*WEB, *OBJECTS))}://{planted}%40{host}{path}",
        f"{any_scheme}://{host}{path}?{name}={value}",
        f"{any_scheme}://{host}{path}?version=3&{name}={value}",
        f"{any_scheme}://{host}{path}?version=3;{name}={value}",
        f"{any_scheme}://{host}{path};{name}={value}",
        f"{any_scheme}://{host}{path}#{name}={value}",
        f"{any_scheme}://{host}{path}%3F{name}={value}",
        f"{any_scheme}://{host}{path}?version=3%26{name}={value}",
        f"{any_scheme}://{host}{path}?q{rng.randrange(99)}={value}",
        f"{web}://{host}{path}?{planted}",
        f"{web}://{host}{path}?{planted}=",
        f"{web}://{host}{path}#{planted}",
        f"{web}://{host}{path};{planted}",
        f"{web}:\\\\{planted}@{host}",
        f"{web}://{host}\\@{planted}/",
        f"{web}:///{planted}@{host}{path}",
        f"https:/{planted}@{host}{path}",
        f"https://proxy/{web}://{planted}@{host}{path}",
    )
    return rng.choice(CHAINS) + rng.choice(urls)


def harmless(rng: random.Random) -> str:
    path = rng.choice(PATHS)
    urls = (
        f"{rng.choice(WEB)}://host{path}?version=3&format=raw",
        f"{rng.choice(WEB)}://host:80/x",
        f"{rng.choice(OBJECTS)}://bucket{path}/part-?.json#l;x&y",
        f"{rng.choice(LOGIN)}://me@host/x",
        f"{rng.choice(CONTAINERS)}://data@account.dfs.core.windows.net{path}",
        f"file:///data{path}/a?b#c;d.txt",
        f"/data{path}/a?b#c=1;d@e",
        f"hf://datasets/me/text@main{path}",
        f"sqlite:////data{path}/x:y@z.db",
    )
    return rng.choice(CHAINS[:5] if "://" in urls[0] else CHAINS[:1]) + rng.choice(urls)


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize("seed", seeds())
def test_a_secret_is_refused_and_shown_nowhere(
    seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    for number in range(CASES):
        planted = secret(rng)
        url, case = hostile(rng, planted), f"seed {seed}, case {number}"
        if rng.random() < 0.1:
            place = rng.randrange(len(url))
            url = f"{url[:place]}{rng.choice(chr(10) + chr(9) + chr(13))}{url[place:]}"
            if planted not in url:
                continue
        case = f"{case}: {url!r}"
        assert planted not in hide_unrecorded_parts(url), case
        assert planted not in format_value({"a": [url]}), case
        for value in (url, [url], {"a": {url: 1}}):
            with pytest.raises(ValueError, match="no secret"):
                refuse_secrets(value)
        with pytest.raises(UserError) as caught:
            Storage(url).path()
        assert planted not in str(caught.value), case
        if number % 8 == 0:
            refused_by_a_recipe(rng.choice(KEYS), url, planted, case)
            assert run(["inspect", url, "--json"]) == BAD_INPUT, case
            told = capfd.readouterr()
            assert planted not in told.out + told.err, case


def refused_by_a_recipe(key: str, url: str, planted: str, case: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("bert/tiny", [f"{key}={quoted(url)}"])
    assert planted not in str(caught.value), case


def quoted(text: str) -> str:
    letters = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\"}
    return '"' + "".join(letters.get(c, c) for c in text) + '"'


@pytest.mark.parametrize("seed", seeds())
def test_what_is_no_secret_is_kept(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(CASES):
        url = harmless(rng)
        assert hide_unrecorded_parts(url) == url
        assert hide_secrets(f"{url}: cannot be read") == f"{url}: cannot be read"
        refuse_secrets([url, {"a": url}])
