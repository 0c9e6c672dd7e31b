"""What other trainers call what a config, or a sampler's options, call otherwise; for hints in errors only."""

from __future__ import annotations

#: Key here (of a config with its section, of a sampler without): its names elsewhere.
NAMES = {
    "model.name": "model_path model_name model_name_or_path pretrained_model_name_or_path base_model",
    "model.dtype": "torch_dtype",
    "model.lora.rank": "lora_r lora_rank lora_dim",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "target_modules lora_target lora_target_modules",
    "data.train": "dataset dataset_name train_data train_dataset train_file",
    "data.validation": "eval_data eval_dataset val_data val_dataset valid_data validation_file",
    "data.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "data.pack_tokens": "seq_len seq_length sequence_length context_length max_length max_seq_len max_seq_length "
    "cutoff_len pack_length pack_size",
    "optimizer.name": "optim optimizer_type",
    "optimizer.learning_rate": "lr base_lr max_lr peak_lr",
    "optimizer.weight_decay": "wd",
    "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.eps": "epsilon adam_eps adam_epsilon",
    "schedule.name": "lr_scheduler lr_scheduler_type lr_schedule scheduler",
    "schedule.warmup": "num_warmup_steps warmup_iters warmup_ratio warmup_steps",
    "schedule.floor": "lr_min min_lr min_lr_ratio",
    "training.steps": "max_iters max_steps max_train_steps num_steps num_train_steps total_steps train_steps",
    "training.epochs": "max_epochs n_epochs num_epochs num_train_epochs",
    "training.batch_size": "batch bs global_batch_size total_batch_size train_batch_size",
    "training.micro_batch": "grad_accum grad_accum_steps accumulate_grad_batches gradient_accumulation_steps "
    "micro_batch_size per_device_batch_size per_device_train_batch_size",
    "training.clip": "clip_grad clip_grad_norm grad_clip gradient_clip_val gradient_clipping max_grad_norm max_norm",
    "training.precision": "amp bf16 fp16 mixed_precision",
    "training.checkpointing": "activation_checkpointing gradient_checkpointing grad_checkpointing",
    "training.ema": "ema_decay",
    "training.seed": "data_seed random_seed",
    "checkpoint.path": "out_dir output output_dir output_path run_dir save_dir save_folder",
    "checkpoint.every": "ckpt_interval save_every save_interval save_steps",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.resume": "resume_from resume_from_checkpoint",
    "evaluation.every": "eval_every eval_interval eval_steps val_check_interval",
    "log.every": "log_every log_interval logging_steps",
    "log.trackers": "logger report_to",
    "parallel.model_parallel_size": "tensor_model_parallel_size tensor_parallel_size tp_size",
    "parallel.pipeline_stages": "pipeline_model_parallel_size pipeline_parallel_size pp_size",
    "length": "gen_length max_gen_length max_length max_new_tokens max_tokens new_tokens",
    "steps": "diffusion_steps num_inference_steps",
    "block_size": "block_length",
    "strategy": "alg remasking",
    "guidance": "cfg cfg_scale guidance_scale",
    "temperature": "do_sample temp",
    "num_samples": "n num_return_sequences",
}


def known_as(name: str, keys: list[str]) -> str | None:
    """Which of `keys` another trainer's `name` is; None for a name that none of them has."""
    plain = name.lower().replace("-", "_")
    return next((key for key, names in NAMES.items() if plain in names.split() and key in keys), None)
