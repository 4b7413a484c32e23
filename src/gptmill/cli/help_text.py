"""The end of a verb's help: examples, exit codes, and the verbs to see next."""

from __future__ import annotations

EXAMPLES: dict[str, dict[str, str]] = {
    "prepare": {
        "gptmill prepare input.txt --tokenizer char --val_fraction 0.1": "a text file, by characters",
        "gptmill prepare corpus.jsonl.gz --drop_duplicates --min_chars 40 --out data/web": "documents, filtered",
        "gptmill prepare fineweb-edu-10B --out data/fineweb-edu-10B": "a named corpus, downloaded",
    },
    "tokenizer": {
        "gptmill tokenizer train input.txt --vocab_size 4096 --out tokenizer.json": "a vocabulary of your text",
        "gptmill tokenizer show gpt2 --text 'O Romeo'": "how GPT-2 splits a text",
    },
    "train": {
        "gptmill train demo": "a first run, on Python's own source",
        "gptmill train demo --max_lr 1e-3 --num_layers 6": "flags on top of a recipe",
        "gptmill train gpt2-124m --data_dir data/books --gpus all": "prepared data, on all GPUs of this machine",
        "gptmill train --run_name bard --resume latest --max_steps 4000": "go on with a run, for longer",
        "gptmill train --corpus input.txt --budget 20m": "the best model that 20 minutes allow",
        "gptmill train demo --help": "this text, with the values of a recipe",
    },
    "sample": {
        "gptmill sample bard --prompt Romeo --temperature 0.8 --top_k 20": "one text",
        "gptmill sample bard --num_samples 100 --json": "a hundred, one JSON object per line",
        "gptmill sample bard --interactive": "ask for prompts",
    },
    "eval": {
        "gptmill eval bard": "loss and perplexity of the validation split",
        "gptmill eval bard --text letter.txt": "of a text",
        "gptmill eval bard --tasks hellaswag --limit 1000": "a task",
        "gptmill eval --tasks list": "the tasks there are",
    },
    "import": {
        "gptmill import models/gpt2 --out gpt2-hf": "a Hugging Face folder",
        "gptmill import gpt2_124M.bin --out gpt2": "a checkpoint of llm.c",
    },
    "export": {
        "gptmill export bard --to hf --out exports/bard": "for transformers and vLLM",
        "gptmill export bard --to gguf --checkpoint best": "for llama.cpp",
    },
    "compress": {
        "gptmill compress bard --method int8": "8-bit weights",
        "gptmill compress bard --method prune-2:4 --recover_steps 200": "half of the weights, then some training",
    },
    "data": {
        "gptmill data info data/web": "tokens, documents, tokenizer, cleaning",
        "gptmill data verify data/web": "every checksum",
        "gptmill data show --run web --step 1": "the documents of a step",
    },
    "runs": {
        "gptmill runs list --sort loss": "all runs, the best first",
        "gptmill runs compare bard web": "their options and losses",
        "gptmill runs remove web": "delete one",
    },
    "report": {
        "gptmill report bard": "a page: runs/bard/report.html",
        "gptmill report bard web --format md --out comparison.md": "two runs, in Markdown",
    },
    "checkpoints": {
        "gptmill checkpoints list bard": "steps, tiers, losses and sizes",
        "gptmill checkpoints verify bard": "every byte",
        "gptmill checkpoints diff bard best_model": "the best against the latest",
        "gptmill checkpoints history bard": "every start, stop and crash",
    },
    "tensorboard": {
        "gptmill tensorboard": "all runs",
        "gptmill tensorboard bard --port 6007": "one run",
    },
    "verify-resume": {
        "gptmill verify-resume demo": "on this machine, with the demo's model",
        "gptmill verify-resume gpt2-124m --data_dir data/books --deterministic": "on a GPU, and what it costs",
    },
    "plan": {
        "gptmill plan gpt2-124m --gpu H200": "time and cost on a GPU that is not here",
        "gptmill plan demo --probe": "measured here",
        "gptmill plan gpt2-1.5b --gpu H100 --gpus 64 --nodes 8": "on a cluster",
    },
    "tune": {
        "gptmill tune demo --max_trials 2": "a short search",
        "gptmill tune gpt2-124m --write tuned.toml": "keep the result as a recipe",
    },
    "bench": {
        "gptmill bench": "this machine's throughput",
        "gptmill bench gpt2-124m --ablate": "what each optimization is worth",
    },
    "doctor": {
        "gptmill doctor": "everything, in a minute",
        "gptmill doctor --quick --json": "in seconds, for a script",
    },
    "config": {
        "gptmill config list": "recipes and model sizes",
        "gptmill config show demo --max_lr 1e-3 > mine.toml": "a recipe of your own",
    },
    "completion": {
        "gptmill completion bash > ~/.local/share/bash-completion/completions/gptmill": "for bash",
        "gptmill completion zsh > ~/.zfunc/_gptmill": "for zsh, with fpath+=(~/.zfunc) before compinit in ~/.zshrc",
        "gptmill completion fish > ~/.config/fish/completions/gptmill.fish": "for fish",
    },
}
EXIT_CODES = {
    "train": {
        "0": "done, early stopping included",
        "2": "a mistake in the command, recipe or data; nothing was changed",
        "74": "finished, but the last checkpoint could not be written",
        "75": "saved and stopped by --time_limit; start it again to go on",
        "76": "diverged: max_rollbacks was used up",
        "77": "a worker hung and ended itself",
        "78": "another rank was lost or crashed",
        "79": "an audit found a rank that computes wrong numbers",
        "128+n": "saved and stopped by signal n: 130 for Ctrl-C, 143 for SIGTERM",
    },
    "doctor": {"0": "training will work", "1": "it will not"},
    "verify-resume": {"0": "identical to the bit", "1": "something differs"},
}
SEE_ALSO = {
    "prepare": "tokenizer data train",
    "tokenizer": "prepare",
    "train": "config plan tune sample report",
    "sample": "eval export",
    "eval": "sample report",
    "import": "export eval",
    "export": "import compress",
    "compress": "eval export",
    "data": "prepare",
    "runs": "report checkpoints",
    "report": "runs tensorboard",
    "checkpoints": "runs verify-resume",
    "tensorboard": "report",
    "verify-resume": "checkpoints doctor",
    "plan": "config tune train",
    "tune": "bench plan",
    "bench": "tune doctor",
    "doctor": "bench verify-resume",
    "config": "train plan",
    "completion": "config",
}


def describe_examples(verb: str) -> str:
    """Examples, exit codes that scripts may rely on, and related verbs."""
    sections = []
    if verb in EXAMPLES:
        lines = [f"  {command}\n      {purpose}" for command, purpose in EXAMPLES[verb].items()]
        sections.append("\n".join(["Examples:", *lines]))
    if verb in EXIT_CODES:
        lines = [f"  {code:<7}{meaning}" for code, meaning in EXIT_CODES[verb].items()]
        sections.append("\n".join(["Exit codes:", *lines]))
    if verb in SEE_ALSO:
        related = ", ".join(f"gptmill {each}" for each in SEE_ALSO[verb].split())
        sections.append(f"See also: {related}")
    return "\n\n".join(sections)
