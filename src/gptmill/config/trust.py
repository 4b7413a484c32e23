"""What a run may execute and fetch: a stranger may have written its files, so they alone decide neither.

A plug-in or an address that a run names counts only if one of these holds: the user names it now, as a flag, in a
recipe that is no run's file, or in the program; this user has used it before, as trusted.json records; or --trust.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.json_text import read_json
from gptmill.config.plugins import fingerprint_plugin, is_named, load_plugins, split_names

SWITCH = "GPTMILL_TRUST"
"""The environment variable that --trust sets, for the processes that this one starts too."""
PLACE = "GPTMILL_TRUSTED"
"""The environment variable that moves trusted.json, as onto storage that the machines of a cluster share."""
ADDRESS = re.compile(r"(?<![\w+.-])(?!file:)(?:[a-z][a-z0-9+.-]+:/{1,2}|hf:)[^\s,]+", re.IGNORECASE)
SLASHES = re.compile(r":/{1,2}")
WEIGHT = re.compile(r"=[\d.]+$")  # of an address in a mixture

_suspects: dict[str, str] = {}
"""Addresses that nobody but a run has named, and the run's file."""
_named: set[str] = set()
_admitted: dict[str, str] = {}
"""What was trusted in this process, by the name that a run has for it, for the history of the run that starts."""


@dataclass(frozen=True)
class TrustOptions:
    """Trust"""

    trust: bool = False
    """Load plug-ins and open addresses that only the run names, also those that you have not used before."""


class UntrustedError(UserError):
    """A run names a plug-in or an address that the user has not used before."""


@contextmanager
def trusting(is_trusting: bool) -> Iterator[None]:
    """Trusts what runs name until the block ends; the processes that it starts do, too."""
    before = os.environ.get(SWITCH)
    if is_trusting:
        os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SWITCH, None)
        else:
            os.environ[SWITCH] = before


def admit_plugins(names: str | None, source: str, *, allows_changes: bool | None = None) -> None:
    """Loads the plug-ins that a file of a run names; raises UntrustedError, and loads none, if one is not trusted.

    `allows_changes`, of a run that resumes, says that the code is the user's own, though it has changed.
    """
    for name in split_names(names):
        if _is_missing(name):
            load_plugins(name)  # which says so
    trusted = _read_trusted()
    asked = {name: code for name in split_names(names) if (code := _find_unknown(name, trusted)) is not None}
    if asked and not (_is_trusting() or allows_changes):
        listed = ",".join(asked)
        own = "" if allows_changes is None else "; if you have changed it since, add --allow_changes alone"
        raise UntrustedError(
            f"{source} names the plug-in {listed}, whose code you have not run before: read it, then add --trust "
            f"({SWITCH}=1) or --plugin {listed}{own}"
        )
    load_plugins(names)
    for name, code in asked.items():
        _admitted[name] = f"the plug-in {name} ({code[:19]})"
    _remember(asked, ())


def load_trusted_plugins(names: str | None) -> list[str]:
    """Loads the trusted ones of the plug-ins that a checkpoint names; the rest is returned, and may not be needed."""
    trusted, left = _read_trusted(), []
    for name in split_names(names):
        unknown = _find_unknown(name, trusted)
        if _is_missing(name) or (unknown is not None and not _is_trusting()):
            left.append(name)
        else:
            load_plugins(name)
            _remember({name: unknown or ""}, ())
    return left


def suspect_addresses(values: Mapping[str, Any], source: str) -> None:
    """Notes the addresses in the settings of a run, so that `check_address` lets only trusted ones through."""
    for address in list_addresses(values):
        _suspects.setdefault(address, source)


def name_addresses(values: Iterable[object]) -> None:
    """Notes the addresses in what the user gives."""
    _named.update(address for value in values for address in _find_addresses(value))


def check_address(address: str) -> None:
    """Raises UntrustedError if only a run has named the address, unless it is trusted."""
    address = _normalize(address)
    if any(address == name or address.startswith(f"{name}/") for name in _named):
        return
    suspects = [name for name in _suspects if address.startswith(name)]
    if not suspects or set(suspects) <= _read_trusted().keys():
        return
    if not _is_trusting():
        raise UntrustedError(
            f"{_suspects[suspects[0]]} names the address {suspects[0]}, which you have not used before: add --trust "
            f"({SWITCH}=1) to open it, or name it yourself, as in --data_dir {suspects[0]}"
        )
    for name in suspects:
        _admitted[name] = f"the address {name}"
    _remember({}, suspects)


def remember_run(values: Mapping[str, Any]) -> None:
    """Records the plug-ins and addresses of a run that this user starts, so that it resumes by its name alone."""
    plugins = {name: fingerprint_plugin(name) for name in split_names(values.get("plugin"))}
    _remember(plugins, list_addresses(values))


def take_admitted(values: Mapping[str, Any]) -> list[str]:
    """What was trusted in this process of what a run with these settings names; once."""
    names = [*split_names(values.get("plugin")), *list_addresses(values)]
    return [_admitted.pop(name) for name in names if name in _admitted]


def list_addresses(values: Mapping[str, Any]) -> list[str]:
    """The addresses in the settings of a run, by whatever option."""
    texts = (value for name, value in values.items() if name != "sample_prompt")
    return list(dict.fromkeys(address for text in texts for address in _find_addresses(text)))


def _find_addresses(value: object) -> list[str]:
    found = ADDRESS.findall(value) if isinstance(value, str) else []
    return [_normalize(WEIGHT.sub("", text)) for text in found]


def _normalize(address: str) -> str:
    scheme, _, rest = SLASHES.sub("://", address, count=1).partition(":")
    return f"{scheme.lower()}:{rest}".rstrip("/")


def _find_unknown(name: str, trusted: Mapping[str, str]) -> str | None:
    """The fingerprint of a plug-in that is not trusted, empty if it has none; None if it is trusted."""
    code = "" if is_named(name) else fingerprint_plugin(name)
    return None if is_named(name) or code in trusted else code


def _is_missing(name: str) -> bool:
    return name.endswith(".py") and not is_named(name) and not Path(name).expanduser().is_file()


def _is_trusting() -> bool:
    return os.environ.get(SWITCH, "0") not in ("", "0")


def _find_place() -> Path:
    if named := os.environ.get(PLACE):
        return Path(named).expanduser()
    configs = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(configs).expanduser() / "gptmill" / "trusted.json"


def _read_trusted() -> dict[str, str]:
    """What this user has used before: fingerprints of plug-ins with a name of each, and addresses."""
    try:
        content = read_json(_find_place())
    except (OSError, ValueError, RuntimeError):  # not there, damaged, or a user without a home
        return {}
    known = content.get("trusted") if isinstance(content, dict) else None
    return {str(key): str(name) for key, name in known.items()} if isinstance(known, dict) else {}


def _remember(plugins: Mapping[str, str], addresses: Iterable[str]) -> None:
    """Adds to trusted.json, which other runs of this user may be adding to as well."""
    new = {code: name for name, code in plugins.items() if code} | dict.fromkeys(addresses, "address")
    if new.keys() <= _read_trusted().keys():
        return
    try:
        place = _find_place()
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.with_name(f"{place.name}.lock").open("a", encoding="utf-8") as lock:
            with suppress(ImportError, OSError):  # Windows and some network disks have no such locks
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX)
            partial = place.with_name(f"{place.name}.{os.getpid()}")
            content = {"trusted": {**_read_trusted(), **new}}
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            partial.replace(place)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        sys.stderr.write(
            f"warning: cannot remember {', '.join(new.values())} as yours ({reason}): to resume the run by its name "
            f"alone, add --trust, or set {PLACE} to a file that can be written\n"
        )
