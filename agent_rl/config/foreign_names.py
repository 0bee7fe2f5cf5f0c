"""How other frameworks call our keys: who moves here writes the names that they know.

The longest end of a key that stands here counts: ``actor_rollout_ref.rollout.n`` ends in
``rollout.n``. Each meaning begins with a key of ours.
"""

from __future__ import annotations

from collections.abc import Sequence

FOREIGN_NAMES: dict[str, str] = {
    # AReaL
    "actor.temperature": "gconfig.temperature",
    "allocation_mode": "engine.launch for servers; trainers are processes of torchrun",
    "async_training": "rollout.max_head_offpolicyness, 0 is synchronous",
    "behav_imp_weight_cap": "actor.rejection_sampling.upper",
    "cluster": "engine.launch for servers; trainers are processes of torchrun",
    "cluster.fileroot": "fileroot",
    "discount": "actor.gamma",
    "enable_tree_training": "actor.tree_packing",
    "group_size": "rollout.group_size",
    "lora_alpha": "actor.lora.alpha",
    "lora_rank": "actor.lora.rank",
    "mask_no_eos_with_zero": "actor.truncated_rows=zero",
    "max_tokens_per_mb": "actor.max_tokens_per_mb",
    "mb_spec": "actor.max_tokens_per_mb",
    "routing_strategy": "engine.routing",
    "session_timeout_seconds": "gateway.session_timeout_s",
    "sglang": "engine.backend=sglang, its arguments in engine.launch.args",
    "train_dataset.batch_size": "rollout.consumer_batch_size",
    "train_dataset.path": "train_dataset, which is the path itself",
    "use_lora": "actor.lora",
    "use_sapo_loss": "actor.policy_loss=sapo",
    "valid_dataset.path": "valid_dataset, which is the path itself",
    "vllm": "engine.backend=vllm, its arguments in engine.launch.args",
    "weight_update_mode": "engine.update",
    # verl
    "actor.strategy": "parallel",
    "adv_estimator": "actor.reward_norm for group baselines, critic for GAE",
    "algorithm.kl_ctrl.kl_coef": "actor.kl_ctl",
    "clip_ratio": "actor.eps_clip",
    "clip_ratio_c": "actor.c_clip",
    "clip_ratio_high": "actor.eps_clip_higher",
    "data.max_prompt_length": "engine.max_seq_len, of prompt and answers together",
    "data.max_response_length": "gconfig.max_new_tokens",
    "data.train_batch_size": "rollout.consumer_batch_size",
    "data.train_files": "train_dataset",
    "data.val_files": "valid_dataset",
    "entropy_coeff": "actor.entropy_coef",
    "gae.lam": "actor.gae_lambda",
    "grad_clip": "actor.optimizer.gradient_clipping",
    "lam": "actor.gae_lambda",
    "loss_agg_mode": "actor.loss_aggregation",
    "model.path": "actor.path",
    "optim.lr": "actor.optimizer.lr",
    "ppo_epochs": "actor.ppo_n_minibatches, steps of one pass: a batch is trained once",
    "ppo_max_token_len_per_gpu": "actor.max_tokens_per_mb",
    "ppo_mini_batch_size": "actor.ppo_n_minibatches, a count of minibatches",
    "rollout.n": "rollout.group_size",
    "rollout.name": "engine.backend",
    "rollout.response_length": "gconfig.max_new_tokens",
    "total_epochs": "total_train_epochs",
    "total_training_steps": "total_train_steps",
    "trainer.default_local_dir": "fileroot",
    "trainer.experiment_name": "trial_name",
    "trainer.logger": "stats_logger",
    "trainer.project_name": "experiment_name",
    "trainer.save_freq": "saver.freq_steps",
    "trainer.test_freq": "evaluator.freq_steps",
    "trainer.val_before_train": "evaluator.eval_before_train",
    # TRL
    "beta": "actor.kl_loss_coef",
    "cliprange": "actor.eps_clip",
    "delta": "actor.c_clip",
    "epsilon": "actor.eps_clip",
    "epsilon_high": "actor.eps_clip_higher",
    "eval_steps": "evaluator.freq_steps",
    "generation_batch_size": "rollout.consumer_batch_size",
    "gradient_accumulation_steps": "actor.max_tokens_per_mb",
    "init_kl_coef": "actor.kl_ctl",
    "kl_coef": "actor.kl_ctl",
    "learning_rate": "actor.optimizer.lr",
    "lr_scheduler_type": "actor.optimizer.lr_scheduler_type",
    "max_completion_length": "gconfig.max_new_tokens",
    "max_grad_norm": "actor.optimizer.gradient_clipping",
    "max_prompt_length": "engine.max_seq_len, of prompt and answers together",
    "max_steps": "total_train_steps",
    "model_name_or_path": "actor.path",
    "num_generations": "rollout.group_size",
    "num_iterations": "actor.ppo_n_minibatches, steps of one pass: a batch is trained once",
    "num_train_epochs": "total_train_epochs",
    "output_dir": "fileroot",
    "per_device_train_batch_size": "rollout.consumer_batch_size",
    "report_to": "stats_logger",
    "response_length": "gconfig.max_new_tokens",
    "run_name": "trial_name",
    "save_steps": "saver.freq_steps",
    "scale_rewards": "actor.reward_norm.std_level",
    "use_vllm": "engine.backend",
    "vf_coef": "critic.loss_coef",
    "warmup_ratio": "actor.optimizer.warmup_steps_proportion",
    # What people try first
    "batch_size": "rollout.consumer_batch_size",
    "epochs": "total_train_epochs",
    "exp_name": "experiment_name",
    "model": "actor.path",
    "n_samples": "rollout.group_size",
    "num_epochs": "total_train_epochs",
    "num_steps": "total_train_steps",
    "project": "experiment_name",
    "steps": "total_train_steps",
}

_LEAVE_OUT = "nothing here needs it; leave it out"
NO_KEYS: dict[str, str] = {
    "disable_dropout": _LEAVE_OUT,
    "dynamic_sampling": "no key but an argument, train(should_accept_fn=...)",
    "enable_offload": _LEAVE_OUT,
    "enable_rollout_tracing": "metrics.jsonl and rollout.dump_to_file have what it showed",
    "init_from_scratch": _LEAVE_OUT,
    "launcher": _LEAVE_OUT,
    "optimizer.type": "always AdamW; leave it out",
    "scheduler": _LEAVE_OUT,
}
"""AReaL's keys that none of ours stands for, and what to do about each."""


def our_name(parts: Sequence[str]) -> str | None:
    """What a key, given as its parts, is called here: ``["actor", "n_samples"]``."""
    return _by_longest_end(FOREIGN_NAMES, parts)


def why_no_key(parts: Sequence[str]) -> str | None:
    """What to do about a key that has no counterpart."""
    return _by_longest_end(NO_KEYS, parts)


def _by_longest_end(meanings: dict[str, str], parts: Sequence[str]) -> str | None:
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((meanings[end] for end in ends if end in meanings), None)
