"""What the small JSON files beside a vocabulary say, checked: any field may have a wrong type.

Tokens are named in five places (`added_tokens_decoder`, `additional_special_tokens` and the roles
of tokenizer_config.json, special_tokens_map.json, added_tokens.json): a token named anywhere is a
token. Where files disagree, tokenizer_config.json wins, but what the other names is a token still.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from jaxpage.errors import CheckpointError
from jaxpage.reading import read_json, read_text, reading
from jaxpage.tokenizers.default_templates import default_template

CONFIG_FILE, GENERATION_FILE = "tokenizer_config.json", "generation_config.json"
MAP_FILE, ADDED_FILE = "special_tokens_map.json", "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
PARTS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
MOST_TOKENS = 1 << 24
"""Most ids of a vocabulary; the largest known has 262,144."""
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
Json = dict[str, Any]
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


@dataclass(frozen=True, slots=True)
class Settings:
    """What the files of a directory say of its tokenizer."""

    directory: Path
    parts: Mapping[str, AddedToken]
    """Token by role (bos_token, ...), in the order in which Hugging Face adds them."""
    extra: tuple[AddedToken, ...]
    """Special tokens without a role."""
    outvoted: tuple[AddedToken, ...]
    """Tokens of special_tokens_map.json whose role tokenizer_config.json gives to another."""
    added: Mapping[int, AddedToken]
    """By the id that a file gives them."""
    ends: tuple[str, ...]
    """The text of eos_token in each of the files."""
    end_ids: tuple[int, ...]
    """eos_token_id of generation_config.json and config.json."""
    template: str | None
    names: tuple[str, ...]
    """What the model is called: this decides the template of a model without one."""
    said: Json
    """tokenizer_config.json."""

    def flag(self, name: str) -> bool | None:
        """A yes or no of tokenizer_config.json; None where it is absent or null."""
        value = self.said.get(name)
        if value is not None and not isinstance(value, bool):
            raise _wrong(self.directory / CONFIG_FILE, name, value, "true or false")
        return value

    @property
    def named(self) -> tuple[AddedToken, ...]:
        """Tokens that are special because a file names them as such."""
        return (*self.parts.values(), *self.extra, *self.outvoted)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The text of each role's token."""
        return {part: token.content for part, token in self.parts.items()}

    def chat_template(self, special_tokens: Mapping[str, str]) -> str | None:
        """The model's own template, or the default of models with such names and tokens."""
        if self.template is not None:
            return self.template
        bos, eos = (special_tokens.get(part, "") for part in ("bos_token", "eos_token"))
        return default_template(self.names, bos_token=bos, eos_token=eos)


def read_settings(directory: Path) -> Settings:
    """The settings in `directory`, where each file may be missing; raises CheckpointError."""
    said, older = _read(directory / CONFIG_FILE), _read(directory / MAP_FILE)
    with reading(directory / CONFIG_FILE, "the settings of a tokenizer"):
        files = [(directory / CONFIG_FILE, said), (directory / MAP_FILE, older)]
        first, second = (_parts(path, file) for path, file in files)
        parts = second | first
        ordered = {part: parts[part] for part in (*PARTS, *parts) if part in parts}
        extra = [token for path, file in files for token in _extra(path, file)]
        names = {token.content for token in (*ordered.values(), *extra)}
        outvoted = {t.content: t for t in second.values() if t.content not in names}
        added = _added(directory, said, names | outvoted.keys())
        for token in added.values():  # a role makes a token special, whatever its flag
            token.special |= token.content in {part.content for part in parts.values()}
        ends = [each["eos_token"].content for each in (first, second) if "eos_token" in each]
        return Settings(
            directory=directory,
            parts=ordered,
            extra=tuple({token.content: token for token in extra}.values()),
            outvoted=tuple(outvoted.values()),
            added=added,
            ends=tuple(ends),
            end_ids=_end_ids(directory),
            template=_template(directory, said),
            names=_names(directory),
            said=said,
        )


def _read(path: Path) -> Json:
    """The object in a file, or nothing where there is no file."""
    return read_json(path) if os.path.lexists(path) else {}


def _parts(path: Path, said: Json) -> dict[str, AddedToken]:
    """The token of each role; any other text called "..._token" is a role of the model's own."""
    found = {part: _token(path, part, said.get(part)) for part in PARTS}
    for name, value in said.items():
        if name.endswith("_token") and name not in PARTS and isinstance(value, str):
            found[name] = _token(path, name, value)
    extra = said.get("extra_special_tokens")
    for name, value in extra.items() if isinstance(extra, dict) else ():
        found[name] = _token(path, name, value)
    return {part: token for part, token in found.items() if token is not None}


def _extra(path: Path, said: Json) -> list[AddedToken]:
    found: list[AddedToken | None] = []
    for name in _EXTRA:
        value = said.get(name)
        if isinstance(value, list):
            found += [_token(path, name, each) for each in value]
        elif value is not None and not (name == _EXTRA[1] and isinstance(value, dict)):
            raise _wrong(path, name, value, "a list of tokens")
    return [token for token in found if token is not None]


def _added(directory: Path, said: Json, named: set[str]) -> dict[int, AddedToken]:
    found: dict[int, AddedToken] = {}
    path = directory / ADDED_FILE
    for text, token_id in _read(path).items():
        if not text:  # would be found between any two characters
            continue
        is_special = text in named
        token = AddedToken(text, special=is_special, normalized=not is_special)
        found[_id(path, text, token_id)] = token
    path, name = directory / CONFIG_FILE, "added_tokens_decoder"
    newer = said.get(name)
    if newer is not None and not isinstance(newer, dict):
        raise _wrong(path, name, newer, "tokens by their ids")
    for key, value in (newer or {}).items():
        if not isinstance(value, dict):
            raise _wrong(path, name, value, "a token with its content")
        token = _token(path, name, value, special=bool(value.get("special", False)))
        if token is not None:
            found[_id(path, name, int(key) if key.isdecimal() else key)] = token
    return found


def _token(path: Path, name: str, value: Any, *, special: bool = True) -> AddedToken | None:
    """A token written as text, or as an object with its flags; None where there is none."""
    flags = value if isinstance(value, dict) else {}
    text = flags.get("content") if isinstance(value, dict) else value
    if text is None or text == "":
        return None
    if not isinstance(text, str):
        raise _wrong(path, name, value, "a token's text")
    for flag in _FLAGS:
        if not isinstance(flags.get(flag), bool | None):
            raise _wrong(path, f"{flag} of {name}", flags[flag], "true or false")
    set_flags = {flag: flags[flag] for flag in _FLAGS if flags.get(flag) is not None}
    return AddedToken(text, special=special, **set_flags)


def _id(path: Path, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_TOKENS:
        raise _wrong(path, name, value, f"an id below {MOST_TOKENS}")
    return value


def _end_ids(directory: Path) -> tuple[int, ...]:
    found: list[int] = []
    for path in (directory / GENERATION_FILE, directory / "config.json"):
        value = _read(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise _wrong(path, "eos_token_id", value, "an id or a list of ids")
        found += [token_id for token_id in ids if token_id >= 0]
    return tuple(dict.fromkeys(found))


def _template(directory: Path, said: Json) -> str | None:
    own, path = directory / TEMPLATE_FILE, directory / CONFIG_FILE
    if os.path.lexists(own):
        return read_text(own, wanted="a chat template")
    template = said.get("chat_template")
    if template is None:
        path = directory / "chat_template.json"
        template = _read(path).get("chat_template")
    if isinstance(template, list):  # several by name: [{"name": ..., "template": ...}]
        if not all(isinstance(each, dict) for each in template):
            raise _wrong(path, "chat_template", template, "templates by name")
        template = {str(each.get("name")): each.get("template") for each in template}
    if isinstance(template, dict):
        by_name = template
        template = by_name.get("default", next(iter(by_name.values()), None))
    if template is not None and not isinstance(template, str):
        raise _wrong(path, "chat_template", template, "a template's text")
    return template


def _names(directory: Path) -> tuple[str, ...]:
    """What the directory is called (the Hub's cache says it two levels up), and the config."""
    path = directory.resolve()
    cached = (path.parent.parent.name,) if path.parent.name == "snapshots" else ()
    return (path.name, *cached, str(_read(directory / "config.json").get("_name_or_path", "")))


def _wrong(path: Path, name: str, value: Any, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"got {_SHORT.repr(name)[1:-1]}={_SHORT.repr(value)} in {path}, wanted {wanted}; "
        "mend the file"
    )
