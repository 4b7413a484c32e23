"""Names that other software gives to our options: nanoGPT, nanochat, Hugging Face, litgpt, torchtitan, Megatron-LM.

They are not accepted, since their units may differ, but an error names our option or says what to do instead.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from gptmill.config.errors import suggest

# Option: its names elsewhere. Where a name stands with several options, the first that the verb has is meant.
NAMES_ELSEWHERE = {
    "max_lr": "lr learning_rate peak_lr base_lr",
    "min_lr": "min_learning_rate lr_min learning_rate_min",
    "warmup_steps": "warmup_iters lr_warmup_iters lr_warmup_steps num_warmup_steps",
    "schedule": "lr_scheduler lr_scheduler_type lr_schedule lr_decay_style scheduler",
    "decay_fraction": "warmdown_ratio cooldown_frac decay_ratio",
    "optimizer": "optim optimizer_name optimizer_type",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_epsilon adam_eps",
    "weight_decay": "wd",
    "grad_clip": "max_grad_norm clip_grad max_norm gradient_clipping clip_grad_norm",
    "max_steps": "steps iters max_iters num_iterations num_steps train_steps train_iters total_steps max_train_steps",
    "num_epochs": "epochs max_epochs num_train_epochs",
    "mini_batch_size": (
        "micro_batch_size device_batch_size local_batch_size per_device_batch_size per_device_train_batch_size"
    ),
    "context_length": (
        "block_size seq_len seq_length sequence_length sequence_len max_seq_len max_seq_length n_ctx n_positions "
        "max_position_embeddings"
    ),
    "num_layers": "n_layer n_layers depth num_hidden_layers layers",
    "num_heads": "n_head n_heads heads num_attention_heads",
    "num_kv_heads": "n_kv_head n_kv_heads num_key_value_heads num_query_groups n_query_groups",
    "embd_size": "n_embd hidden_size d_model hidden_dim embed_dim dim width",
    "head_size": "head_dim kv_channels",
    "ffn_size": "intermediate_size ffn_hidden_size d_ff ffn_dim",
    "tied_head": "tie_word_embeddings tie_embeddings weight_tying",
    "rope_base": "rope_theta rotary_base",
    "experts_per_token": "num_experts_per_tok top_k_experts moe_router_topk",
    "num_experts": "num_local_experts n_experts",
    "size": "model model_name model_size model_type flavor",
    "eval_freq": "eval_interval eval_steps eval_strategy eval_every evaluation_interval val_every val_interval",
    "checkpoint_freq": (
        "save_steps save_strategy save_every save_interval save_freq checkpoint_interval checkpoint_every"
    ),
    "keep_checkpoints": "save_total_limit keep_latest_k max_checkpoints",
    "log_freq": "log_interval logging_steps log_every log_steps",
    "use_tensorboard": "tensorboard use_tb tensorboard_dir tensorboard_log_dir",
    "use_wandb": "wandb wandb_log enable_wandb",
    "use_trackio": "trackio",
    "wandb_project": "project log_project",
    "init_from": "initial_checkpoint_dir model_name_or_path pretrained_model_name_or_path",
    "resume": "resume_from_checkpoint resume_from load load_checkpoint from_checkpoint",
    "logdir": "out_dir output_dir log_dir save_dir dump_folder runs_dir",
    "run_name": "name run model_tag wandb_run_name exp_name experiment_name",
    "precision": "dtype torch_dtype mixed_precision amp",
    "gradient_checkpointing": "activation_checkpointing recompute_activations recompute_granularity",
    "compile": "torch_compile use_compile",
    "deterministic": "use_deterministic_algorithms full_determinism",
    "kernels": "use_liger_kernel",
    "hang_seconds": "ddp_timeout",
    "time_limit": "max_time",
    "order": "train_sampling_strategy",
    "device": "device_type accelerator cuda",
    "gpus": "num_gpus n_gpus devices world_size nproc_per_node data_parallel_size",
    "prefetch_batches": "num_workers dataloader_num_workers dataloader_prefetch_factor workers",
    "seed": "random_seed rng_seed data_seed",
    "data_dir": "data_root dataset_dir dataset_path data_path tokenized_dir",
    "tokenizer": "tokenizer_dir tokenizer_name tokenizer_path tokenizer_type encoding",
    "val_fraction": "val_ratio val_split val_size test_size validation_split",
    # prepare, tokenizer and sample
    "out": "output out_dir output_dir output_path save_dir destination",
    "processes": "num_workers workers num_proc nproc num_processes",
    "text_field": "text_column text_key column json_keys",
    "shard_tokens": "shard_size tokens_per_shard",
    "overwrite": "force overwrite_output_dir",
    "prompt": "start text input input_prompt",
    "num_samples": "n num_return_sequences samples",
    "max_new_tokens": "max_tokens max_length length tokens",
    "temperature": "temp",
    "stop": "stop_strings stop_sequences",
    "checkpoint": "ckpt checkpoint_path",
    "tensor_parallel": "tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp tp_size",
    "context_parallel": "context_parallel_size context_parallel_degree cp cp_size",
    "expert_parallel": "expert_parallel_size expert_parallel_degree expert_model_parallel_size ep ep_size",
}
# What to do where no single option corresponds.
ADVICE = {
    "batch_size": "--mini_batch_size is the sequences of a micro-batch, --total_batch_size the tokens of a step",
    "global_batch_size": "--total_batch_size counts tokens: give sequences x --context_length",
    "gradient_accumulation_steps": (
        "set --total_batch_size (tokens of a step) and --mini_batch_size; gradient accumulation follows from them"
    ),
    "max_tokens": "set --max_steps to the tokens divided by --total_batch_size",
    "lr_decay_iters": "--schedule decays until the last step, --max_steps",
    "decay_lr": "use --schedule cosine, or --schedule constant for no decay",
    "warmup_ratio": "set --warmup_steps, a number of steps",
    "eval_iters": "set --eval_tokens, the validation tokens of an evaluation",
    "vocab_size": "the tokenizer sets the vocabulary size: choose one with --tokenizer, or run gptmill tokenizer train",
    "bf16": "use --precision bf16",
    "fp16": "use --precision fp16",
    "fp8": "use --precision fp8",
    "tf32": "use --precision tf32",
    "tracker": "use --use_tensorboard, --use_wandb or --use_trackio; events.jsonl has every metric in any case",
    "dataset": "give --corpus (text, tokenized on first use) or --data_dir (prepared shards)",
    "fsdp": "use --parallel fsdp",
    "use_cpu": "use --device cpu",
    "lr_scheduler_kwargs": "set --min_lr, and --decay_fraction of --schedule wsd",
    "model_config": "compose the model with --num_layers, --embd_size, --num_heads and others, or choose a --size",
    "num_nodes": "--gpus is for one machine; on several, start torchrun on each of them",
    "auto_find_batch_size": "--hardware auto sets sizes for this GPU; gptmill tune measures them",
    "torch_empty_cache_steps": "PyTorch reuses its memory; lower --mini_batch_size if it does not suffice",
    "eval_on_start": "the start and the end are always evaluated, besides every --eval_freq steps",
    "val_data_path": "--val_fraction holds out a part of the corpus; gptmill prepare takes a text of its own",
    "load_best_model_at_end": "best_model has the lowest validation loss; --export_best exports it at the end",
    "push_to_hub": "--export_best hf writes a Hugging Face folder at the end, for you to upload",
    "always_save_checkpoint": "every --checkpoint_freq steps and the end are saved, whatever the loss",
    "config": "give the recipe as a word, e.g. gptmill train my.toml --max_steps 100",
}
SAME_ADVICE = {
    "batch_size": "train_batch_size bs",
    "global_batch_size": "effective_batch_size",
    "gradient_accumulation_steps": "grad_accum grad_accum_steps gradient_accumulation accumulate_grad_batches",
    "max_tokens": "train_tokens num_tokens",
    "lr_decay_iters": "lr_decay_steps",
    "warmup_ratio": "lr_warmup_fraction warmup_fraction",
    "eval_on_start": "initial_validation final_validation",
    "load_best_model_at_end": "metric_for_best_model",
    "push_to_hub": "hub_model_id",
    "eval_iters": "eval_batches max_eval_iters eval_max_iters",
    "vocab_size": "padded_vocab_size",
    "tracker": "report_to logger_name log_with",
    "dataset": "data datasets dataset_name train_file train_data train_data_path",
    "config": "config_file recipe",
}
ADVICE_BY_NAME = ADVICE | {name: ADVICE[key] for key, names in SAME_ADVICE.items() for name in names.split()}


def suggest_option(name: str, known: Collection[str]) -> str:
    """What to add to "unknown option": our name for it, advice, or the nearest of the known names; empty if none fits.

    A name that begins with -- is a flag, and so are the answers; `known` are names without it.
    """
    dashes = "--" if name.startswith("--") else ""
    for plain in _list_spellings(name):
        options = [option for option, names in NAMES_ELSEWHERE.items() if plain in names.split()]
        if option := next((option for option in (plain, *options) if option in known), None):
            return f"; gptmill calls it {dashes}{option}"
        advice = ADVICE_BY_NAME.get(plain, "")
        if advice and list_options(advice) <= set(known):
            return f"; {advice if dashes else advice.replace('--', '')}"
    return suggest(name.lstrip("-"), known, dashes)


def list_options(advice: str) -> set[str]:
    """The options that a sentence of advice names."""
    return set(re.findall(r"--(\w+)", advice))


def _list_spellings(name: str) -> list[str]:
    """The name with `_` throughout, and of a dotted one, such as training.seq_len, also the last part alone."""
    plain = name.lstrip("-").replace("-", "_").lower()
    return [plain.replace(".", "_"), plain.rpartition(".")[2]]
