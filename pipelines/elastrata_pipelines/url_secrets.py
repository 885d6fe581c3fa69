"""Secrets in URLs: recognises, refuses and hides them.

Only the scheme, host, path and listed query keys of a URL are recorded. A value with anything else
is refused, and never shown. A secret is anything that logs in, at any place in a URL. Harmless
parts differ by scheme, so one table decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from urllib.parse import unquote

_HIDDEN = "***"
NO_SECRET = (
    "expected no secret in a URL: recipes are written down; leave it to the environment "
    "or to the service's own file"
)


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """The parts that a URL of a scheme may have."""

    user: str | None = None
    """Regular expression of the text that may precede the host's @; None if nothing may."""
    is_path: bool = False
    """Whether ?, # and ; are part of a file name, unless a `NAME=` follows them."""
    is_local: bool = False
    """Whether it names a local file; then only values of names that are known for secrets are
    hidden."""


# A token as the user's name is a custom of web servers, so that no name may stand there.
_WEB = _Rules()
# A user name is no secret if a key or password, from ~/.ssh or ~/.pgpass, is needed as well.
_LOGIN = _Rules(user=r"\w[\w.-]*")
# Azure writes the container before the @ and its account behind it.
_CONTAINER = _Rules(user=r"[a-z0-9$][a-z0-9-]{0,62}", is_path=True)
# Names in a bucket hold any letter, and globs do. Keys come from the environment or ~/.aws.
_BUCKET = _Rules(is_path=True)
_LOCAL = _Rules(user=r"[^:]*", is_path=True, is_local=True)
_RULES = {
    **dict.fromkeys(("http", "https", "ftp", "webdav", "webhdfs", "github", "git", "ray"), _WEB),
    **dict.fromkeys(("sftp", "ssh", "smb", "hdfs"), _LOGIN),
    **dict.fromkeys(("postgresql", "postgres", "mysql", "mariadb", "mssql"), _LOGIN),
    **dict.fromkeys(("abfs", "abfss", "wasb", "wasbs"), _CONTAINER),
    **dict.fromkeys(("s3", "s3a", "gs", "gcs", "hf", "az", "adl", "oci", "oss", "r2"), _BUCKET),
    **dict.fromkeys(("file", "local", "sqlite", "memory", "zip", "tar", "dir"), _LOCAL),
}
"""Rules by scheme; any other scheme is treated like the web."""
# Those of databases name files that hold keys, not the keys.
_KEPT_KEYS = frozenset(
    (
        *("version", "versionid", "revision", "rev", "ref", "branch", "tag", "format", "lang"),
        *("language", "download", "dl", "raw", "export", "id", "page", "offset", "limit", "start"),
        *("end", "part", "split", "config", "name", "file", "filename", "path", "sv", "signed"),
        *("host", "port", "driver", "charset", "sslmode", "sslrootcert", "sslcert", "sslkey"),
        *("ssl_ca", "ssl_cert", "ssl_key", "connect_timeout", "application_name", "timeout"),
        *("encrypt", "trustservercertificate"),
    )
)
"""Query keys that are recorded."""
_KEPT_VALUE = re.compile(r"[\w.,:+/ -]*")
_SECRET_NAME = re.compile(
    r"sig|code|pass|pw|sas|sid|jwt|hmac|otp|pin|session|bearer|auth\w*|x-(?:amz|goog)-[\w-]+|"
    r"[\w.-]*(?:passw(?:or)?d|passphrase|pwd|secret|token|signature|credentials?|auth|"
    r"key(?:[-_]?id)?)"
)
_BEGIN = re.compile(r"(?i)(?<![\w+.-])(?P<scheme>[a-z][a-z0-9+.-]*):(?P<slashes>[/\\]+)")
_CHAINED = re.compile(r"(?i)\s*(?:[a-z][\w+.-]*::)*[a-z][a-z0-9+.-]*:[/\\]")
_LINK = re.compile(r"(?i)::(?=[a-z][a-z0-9+.-]*:[/\\])")
_HOSTS = re.compile(r"(?:\[[^\]@]*\]|[^\[\]:@%;&=]*)(?::\d*)?")
_USER_IN_LINE = re.compile(r"[^/?#\s'\"<>\\]*@")
_NAME_IN_LINE = re.compile(
    r"(?<=[?&;#])(?P<name>[\w.%+-]{1,200})=(?!\*{3}(?:[^\w*]|$))(?=[^\s'\"])"
)
_WORD_END = re.compile(r"[\s'\"]|$")
# A longer name, or one with digits, may be the secret itself.
_SHOWN_NAME = re.compile(r"[A-Za-z%_-]{1,24}")
"""Names that are shown in front of a hidden value."""
_WORD = re.compile(r"(?i)(?<![\w+.-])[a-z][a-z0-9+.-]*://[^\s'\"<>]*[^\s'\"<>:,.;()\[\]{}?!]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MOST_ENCODINGS = 5


def refuse_secrets(value: object) -> None:
    """Check that a value can be recorded.

    Args:
        value: any value; texts and paths are checked, also in lists and sections.

    Raises:
        ValueError: a URL in the value holds something that is not recorded.
    """
    if isinstance(value, Mapping):
        refuse_secrets([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            refuse_secrets(item)
    elif isinstance(value, str | PathLike):
        text = fspath(value)
        if isinstance(text, str) and hide_unrecorded_parts(text) != text:
            raise ValueError(NO_SECRET)


def hide_unrecorded_parts(text: str) -> str:
    """Return a value with `***` in place of everything in its URL that is not recorded.

    Args:
        text: a whole value. If it is not a URL, only certain secrets are hidden.
    """
    # urllib and fsspec drop line breaks and tabs, so the URL to which they would connect is
    # checked.
    plain = _CONTROL.sub("", text)
    if not _CHAINED.match(plain):
        hidden = _hide_certain(plain)
    else:
        hidden = _hide_certain("::".join(map(_hide_unrecorded, _LINK.split(plain))))
    return text if hidden == plain else hidden


def hide_secrets(line: str) -> str:
    """Return a line with `***` in place of everything in its URLs that is not recorded."""
    return _WORD.sub(lambda word: _hide_unrecorded(word.group()), _hide_certain(line))


def _hide_certain(line: str) -> str:
    """Return a line with `***` in place of users, passwords and signatures in its URLs."""
    if "://" not in line and "=" not in line:
        return line
    parts, end = list[str](), 0
    for begin in _BEGIN.finditer(line):
        user = _USER_IN_LINE.match(line, begin.end())
        rules = _rules(begin["scheme"])
        if user is None or begin.end() < end or len(begin["slashes"]) == 1:
            continue
        if not _is_user(rules, user.group()[:-1]) and not _is_path_only(rules, begin):
            parts += [line[end : begin.end()], f"{_HIDDEN}@"]
            end = user.end()
    return _hide_named("".join((*parts, line[end:])))


def _hide_unrecorded(url: str) -> str:
    """Return one URL of a chain, with `***` in place of parts that are not recorded."""
    begin = _BEGIN.search(url)
    if begin is None:
        return url
    rules = _rules(begin["scheme"])
    if rules.is_local or (len(begin["slashes"]) == 1 and begin["scheme"].lower() not in _RULES):
        return url
    host, tail = _split_host(url[begin.end() :])
    user, at, host = host.rpartition("@")
    # A "/", "?" or "#" in a password ends the host too early: then nothing behind it is shown.
    is_split = "\\" in url or not _HOSTS.fullmatch(host) or (_is_login(host, rules) and "@" in tail)
    is_refused = bool(at) and not _is_user(rules, user)
    kept = tail if is_split else _kept_tail(tail, rules)
    if is_split or ("@" in tail and (is_refused or kept != tail)):
        return f"{url[: begin.end()]}{_HIDDEN}"
    return f"{url[: begin.end()]}{_HIDDEN if is_refused else user}{at}{host}{kept}"


def _rules(scheme: str) -> _Rules:
    return _RULES.get(scheme.lower().partition("+")[0], _WEB)


def _is_user(rules: _Rules, user: str) -> bool:
    return user == _HIDDEN or (rules.user is not None and bool(re.fullmatch(rules.user, user)))


def _is_path_only(rules: _Rules, begin: re.Match[str]) -> bool:
    """Return whether no host follows the slashes, as in `file:///path`."""
    return rules.is_local and len(begin["slashes"]) > 2


def _is_login(host: str, rules: _Rules) -> bool:
    """Return whether a path with an @ may be the rest of a password, as in `me:12/34@host`."""
    return rules is _LOGIN or bool(re.search(r":\d*$", host))


def _split_host(rest: str) -> tuple[str, str]:
    found = re.search(r"[/\\?#]", rest)
    end = found.start() if found else len(rest)
    return rest[:end], rest[end:]


def _kept_tail(tail: str, rules: _Rules) -> str:
    """Return path, query and fragment up to the first part that is not recorded."""
    parts = re.split(r"([?#;&])", tail)
    # A server decodes the path once more: an encoded "?token=" in it is one.
    path = _decoded(parts[0])
    if path != parts[0] and re.search(r"[?#;&][^/?#;&]*=", path):
        return f"/{_HIDDEN}"
    kept, in_query = parts[0], False
    for mark, part in zip(parts[1::2], parts[2::2], strict=True):
        in_query = in_query or mark == "?"
        written, equals, value = part.partition("=")
        name = _decoded(written).lower()
        if equals:
            is_kept = mark != "#" and name in _KEPT_KEYS and _KEPT_VALUE.fullmatch(_decoded(value))
        else:
            is_letter = rules.is_path or (mark == "&" and not in_query)
            is_kept = not part or (is_letter and "=" not in name) or part == _HIDDEN
        if not is_kept and value != _HIDDEN:
            is_shown = equals and _SECRET_NAME.fullmatch(name)
            return f"{kept}{mark}{_shown_name(written) if is_shown else ''}{_HIDDEN}"
        kept += mark + part
    return kept


def _hide_named(line: str) -> str:
    """Return a line with `***` in place of the values of names that are known for secrets.

    A value ends at the next space or quote.
    """
    parts, end = list[str](), 0
    for found in _NAME_IN_LINE.finditer(line):
        name = _decoded(found["name"]).lower()
        if found.start() >= end and name not in _KEPT_KEYS and _SECRET_NAME.fullmatch(name):
            parts += [line[end : found.start()], _shown_name(found["name"]), _HIDDEN]
            end = _end_of_word(line, found.end())
    return "".join((*parts, line[end:]))


def _end_of_word(line: str, start: int) -> int:
    found = _WORD_END.search(line, start)
    return found.start() if found else len(line)


def _shown_name(name: str) -> str:
    return f"{name}=" if _SHOWN_NAME.fullmatch(name) else ""


def _decoded(text: str) -> str:
    """Return a text with its %-codes decoded repeatedly."""
    for _ in range(_MOST_ENCODINGS):
        if (decoded := unquote(text)) == text:
            break
        text = decoded
    return text
