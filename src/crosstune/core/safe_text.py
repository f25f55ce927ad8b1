"""Make text safe to show and store: redact access tokens and credentials, escape control characters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[secret]"

# The repetitions before a match are bounded: otherwise a long text without spaces needs quadratic time.
_URL_LOGIN = re.compile(
    r"(?P<keep>\b[a-z][a-z0-9+.-]{0,20}://)[^\s/?#@:]*:[^\s/?#]*(?=@)"  # user:password@
    r"|(?P<keep_web>\bhttps?://)[^\s/?#@]+(?=@)",  # token@
    re.I,
)
_SECRET_NAME = r"(?:token|key|secret|password|passwd|pwd|signature|sig|auth|jwt|credentials?)"
_START = r"(?:[a-z0-9_.]|-(?!-)){0,60}"
# In a URL or an option, every name with such an ending contains a secret. The tokens of a tokenizer begin with < or [.
_NAMED_PART = re.compile(
    rf"(?P<keep>(?:[?&;#]|(?<![^\s,'\"({{])--)(?=[a-z0-9_]){_START}{_SECRET_NAME}=)[^\s&#;,'\"<\[{{(][^\s&#;,'\"]{{3,}}",
    re.I,
)
# Elsewhere, some names always contain a secret, others only if the value looks like one: not in `--columns sort_key=name`.
_NAMED_VALUE = re.compile(
    r"(?P<keep>(?:^|[\s,'\"({]|--)(?=[a-z0-9_])"
    rf"(?:{_START}(?:password|passwd|secret|api[_-]?key|access[_-]?key|signature|credentials?)"
    r"|(?:(?:access|auth|api|hub|hf|bearer|refresh|session|private|wandb)[_-])?token|sig|pwd"
    rf"|{_START}(?<=[a-z0-9_.-]){_SECRET_NAME}(?==(?=[^\s&#;,'\"]{{6}})[^\s&#;,'\"<\[{{(]*[0-9]|=[^\s&#;,'\"<\[{{(]{{16}}))=)"
    r"[^\s&#;,'\"]{4,}",
    re.I,
)
_NAMED_FIELD = re.compile(
    r"(?P<keep>(?:password|passwd|secret|(?:api|access|account|private|secret)[_-]?key|token|jwt|signature)"
    r"[\"']?\s*:\s*[\"']?)"
    r"(?=[^\s\"',}]*[0-9])[^\s\"',}]{8,}",
    re.I,
)
_BEARER = re.compile(r"(?P<keep>\bauthorization\s*[:=]\s*(?:bearer|basic|token)\s+)[^\s'\"]+", re.I)
_TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    # A folder may be called hf_checkpoints2024, so a short token needs capitals and digits.
    r"(?:hf|api_org)_(?:[A-Za-z0-9]{20,}|(?=[a-z0-9]*[A-Z])(?=[A-Za-z]*[0-9])[A-Za-z0-9]{14,})"  # Hugging Face
    r"|(?:gh[pousr]_|github_pat_)[A-Za-z0-9_]{16,}"  # GitHub
    r"|glpat-[A-Za-z0-9_-]{16,}"  # GitLab
    r"|xox[abprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|A[KS]IA[0-9A-Z]{16}"  # AWS
    r"|AIza[A-Za-z0-9_-]{30,}"  # Google
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"  # JSON web tokens
    r"|(?:npm|gsk|r8|dckr_pat|dop_v1)_(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{24,}"  # npm, Groq, Replicate, Docker, ...
    r"|pypi-[A-Za-z0-9_-]{32,}"
    r"|ya29\.[A-Za-z0-9_-]{20,}"  # Google OAuth
    r"|wandb_v1_[A-Za-z0-9_]{16,}"
    r"|sk-(?=[A-Za-z0-9_-]*[0-9])(?=[A-Za-z0-9_-]*[A-Za-z0-9]{10})[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic, ...
    r"|sk-[A-Za-z0-9_-]{32,}"
    r")"
)

_KEPT = "\n\t"
# C0, DEL and C1; byte order marks; invisible tags; changes of text direction; unpaired surrogates.
_CONTROLS = (
    *range(0x20),
    *range(0x7F, 0xA0),
    0xFEFF,
    *range(0xE0000, 0xE0080),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
)
_ESCAPED: Mapping[int, str] = {code: ascii(chr(code))[1:-1] for code in _CONTROLS if chr(code) not in _KEPT}
_ESCAPED_IN_JSON: Mapping[int, str] = {
    code: json.dumps(chr(code))[1:-1] for code in _CONTROLS if code >= 0x20
}


def redact(text: str) -> str:
    """Return the text with every secret replaced."""
    text = _URL_LOGIN.sub(lambda found: f"{found['keep'] or found['keep_web']}{HIDDEN}", text)
    for pattern in (_BEARER, _NAMED_PART, _NAMED_VALUE, _NAMED_FIELD):
        text = pattern.sub(rf"\g<keep>{HIDDEN}", text)
    return _TOKENS.sub(HIDDEN, text)


def holds_secret(text: str) -> bool:
    return redact(text) != text


def redact_values(value: Any) -> Any:
    """Return plain data with the secrets in all of its strings replaced."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact_values(key): redact_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_values(item) for item in value]
    return value


def redact_command(words: list[str]) -> list[str]:
    """Return the words of a command line with secrets replaced, including after an option such as `--token`."""
    hidden = [redact(word) for word in words]
    for place, word in enumerate(words[:-1]):
        if word.startswith("--") and "=" not in word and holds_secret(f"{word}={words[place + 1]}"):
            hidden[place + 1] = HIDDEN if hidden[place + 1] == words[place + 1] else hidden[place + 1]
    return hidden


def printable(text: str) -> str:
    """Escape control characters as Python does: `\\x1b` for ESC."""
    return text.translate(_ESCAPED)


def printable_json(text: str) -> str:
    """Escape the control characters that the JSON encoder does not."""
    return text.translate(_ESCAPED_IN_JSON)
