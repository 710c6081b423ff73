"""The model card of a converted checkpoint: the source's card, kept, with what was done to the model said on top."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

_BEGIN = "<!-- headfold: begin -->"
_END = "<!-- headfold: end -->"
_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def amended_card(card: str | None, record: Mapping[str, Any]) -> str:
    """The source's README.md with a section from the record of headfold.json (replaced if there is one already).

    The front matter keeps every line, its licence above all; a base_model link is added if it has none.
    """
    front, body = _split_front_matter(card or "")
    source = record.get("source", {}).get("name", "")
    if _HUB_NAME.fullmatch(source) and not re.search(r"^base_model\s*:", front, re.MULTILINE):
        front += f"base_model: {source}\n"
    if not card:
        front += "library_name: transformers\n"
    body = re.sub(rf"{re.escape(_BEGIN)}.*?{re.escape(_END)}\n*", "", body, flags=re.DOTALL)
    header = f"---\n{front}---\n\n" if front else ""
    return f"{header}{_BEGIN}\n{_section(record)}\n{_END}\n\n{body.lstrip()}".rstrip("\n") + "\n"


def _split_front_matter(card: str) -> tuple[str, str]:
    """The YAML lines between the two `---` at the top, and the rest; no front matter if it is not a YAML mapping."""
    match = re.match(r"﻿?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", card, re.DOTALL | re.MULTILINE)
    if match is None or len(match[1]) > 1_000_000:
        return "", card
    try:
        # the events alone: aliases are not expanded, nothing is constructed
        first = [type(event).__name__ for _, event in zip(range(3), yaml.parse(match[1]), strict=False)]
    except (yaml.YAMLError, RecursionError):
        return "", card
    return (match[1], card[match.end() :]) if first[2:] == ["MappingStartEvent"] else ("", card)


def _section(record: Mapping[str, Any]) -> str:
    source = record.get("source", {})
    name = re.sub(r"[`\r\n<>]", "", str(source.get("name", ""))).rstrip("/")
    link = f"[{name}](https://huggingface.co/{name})" if _HUB_NAME.fullmatch(name) else f"`{name.rpartition('/')[2]}`"
    lines = ["## Converted to grouped-query attention", "", f"This is {link}"]
    heads = record.get("num_key_value_heads")
    if isinstance(heads, Mapping):
        before, after = heads["before"], heads["after"]
        per_layer = before if isinstance(before, list) else [before]
        lines[-1] += (
            f" with its {' or '.join(map(str, dict.fromkeys(per_layer)))} key/value heads per layer "
            f"merged into {after} by Headfold (method `{record.get('method')}`, grouping `{record.get('grouping')}`). "
            f"Its KV cache takes {100 * after * len(per_layer) / sum(per_layer):.3g} % of the memory."
        )
    uptrain = record.get("uptrain")
    if isinstance(uptrain, Mapping):
        tokens = uptrain.get("tokens")
        amount = f" on {tokens:,} tokens" if isinstance(tokens, int) else ""
        lines += ["", f"It was then uptrained{amount} to recover its quality."]
    else:
        lines += ["", "It has not been trained since: expect it to be worse than its source until it is uptrained."]
    lines += ["", "headfold.json beside the weights holds the details."]
    return "\n".join(lines)
