"""The model card of a converted checkpoint: the source's card, kept, with what was done to the model said on top."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

_BEGIN = "<!-- headfold: begin -->"
_END = "<!-- headfold: end -->"
_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_BASE_MODEL = re.compile(r"""^["']?base_model["']?\s*:""", re.MULTILINE)
_MAX_FRONT_MATTER = 1_000_000


def amended_card(card: str | None, record: Mapping[str, Any]) -> str:
    """The source's README.md with a section from the record of headfold.json (replaced if there is one already).

    The front matter keeps every line, its licence above all; a base_model link is added if it has none.
    """
    front, body = _split_front_matter(card or "")
    name = _source_name(record)
    if _HUB_NAME.fullmatch(name) and _takes_keys(front) and not _BASE_MODEL.search(front):
        front += f"base_model: {name}\n"
    if not card:
        front += "library_name: transformers\n"
    header = f"---\n{front}---\n\n" if front else ""
    return f"{header}{_BEGIN}\n{_section(record)}\n{_END}\n\n{_without_section(body).lstrip()}".rstrip("\n") + "\n"


def _split_front_matter(card: str) -> tuple[str, str]:
    """The lines between the two `---` at the top, as the hub finds them, and the rest."""
    match = re.match(r"\ufeff?\s*---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", card, re.DOTALL | re.MULTILINE)
    return ("", card) if match is None else (match[1], card[match.end() :])


def _takes_keys(front: str) -> bool:
    """Whether one more `key: value` line can stand at its end: it is empty, or a YAML mapping in block style."""
    if len(front) > _MAX_FRONT_MATTER or re.search(r"^\.\.\.", front, re.MULTILINE):
        return False
    text = front.encode("utf-8", "replace").decode()
    try:
        # the events alone: aliases are not expanded, nothing is constructed
        events = [event for _, event in zip(range(3), yaml.parse(text), strict=False)]
    except (yaml.YAMLError, RecursionError):
        return False
    if len(events) < 3:
        return True
    node = events[2]
    is_block = isinstance(node, yaml.MappingStartEvent) and node.flow_style is False
    return is_block and node.start_mark is not None and node.start_mark.column == 0


def _without_section(body: str) -> str:
    """The card without the section that an earlier conversion has put there."""
    first, *others = body.split(_BEGIN)
    parts = [first]
    for part in others:
        _, end, after = part.partition(_END)
        parts.append(after.lstrip("\n") if end else _BEGIN + part)
    return "".join(parts)


def _source_name(record: Mapping[str, Any]) -> str:
    source = record.get("source")
    return str(source.get("name", "")) if isinstance(source, Mapping) else ""


def _section(record: Mapping[str, Any]) -> str:
    name = re.sub(r"[`\r\n<>]", "", _source_name(record)).rstrip("/")
    link = f"[{name}](https://huggingface.co/{name})" if _HUB_NAME.fullmatch(name) else f"`{name.rpartition('/')[2]}`"
    lines = ["## Converted to grouped-query attention", "", f"This is {link}"]
    heads = record.get("num_key_value_heads")
    before, after = (heads.get("before"), heads.get("after")) if isinstance(heads, Mapping) else (None, None)
    per_layer: list[Any] = before if isinstance(before, list) else [before]
    if per_layer and type(after) is int and all(type(count) is int and count > 0 for count in per_layer):
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
