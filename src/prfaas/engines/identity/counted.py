"""The fields of vLLM's configuration that are facts, and the reasons against the others.

A test walks the fields of the pinned vLLM and fails on one that is in none of these tables.

Sources: vLLM 0.32 and 0.33, `vllm/config/*.py`, `v1/kv_cache_interface.py`,
`v1/kv_offload/file_mapper.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

_OTHER = "is in "
_SPEED = "speed, memory or scheduling; the same bytes"
_OUTPUT = "sampling or what is answered; not what is cached"
_HOST = "where and how processes of one site run"
_LOADING = "how files are read; the digest is over their bytes"
_ROUNDING = "the order of additions alone, as batch size and hardware do"
_NOT_READ = "set by vLLM while it runs, from fields that count"


def _by_reason(names: Mapping[str, str]) -> dict[str, str]:
    """Reasons by name, from names by reason."""
    return {name: reason for reason, text in names.items() for name in text.split()}


def _tuples(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {where: tuple(text.split()) for where, text in names.items()}


COUNTED: Mapping[str, tuple[str, ...]] = _tuples(
    {
        "model_config": """
            dtype quantization quantization_config runner convert tokenizer_mode
            disable_sliding_window model_class_overrides enable_prompt_embeds
        """,
        "cache_config": """
            cache_dtype kv_cache_layout prefix_caching_hash_algo sliding_window is_attention_free
            kv_cache_dtype_skip_layers mamba_cache_mode use_replayssm replayssm_buffer_len
            use_kda_recoverssm kv_sharing_fast_prefill swa_bounded_replay
        """,
        "parallel_config": """
            tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size
            decode_context_parallel_size world_size dcp_kv_cache_interleave_size
            cp_kv_cache_interleave_size dcp_q_replicate
        """,
        "speculative_config": """
            method num_speculative_tokens quantization kv_cache_dtype draft_tensor_parallel_size
            parallel_drafting index_share_for_mtp_iteration use_heterogeneous_vocab
            disable_eagle_block_drop
        """,
        "multimodal_config": """
            language_model_only media_io_kwargs mm_processor_kwargs mm_device_do_normalize
            mm_hasher_algorithm mm_encoder_only mm_encoder_attn_dtype mm_encoder_fp8_scale_path
            video_pruning_rate video_pruning_method interleave_mm_strings
            allow_missing_mm_embeddings
        """,
        "load_config": "load_format model_loader_extra_config ignore_patterns",
        "mamba_config": "backend enable_stochastic_rounding",
        "attention_config": "indexer_kv_dtype indexer_sparse_logits hisparse_config use_non_causal",
        "scheduler_config": "disable_hybrid_kv_cache_manager",
        "vllm_config": "additional_config",
    }
)
"""Fields whose value is a fact, by configuration object of `VllmConfig`."""

ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "model_config": {
        "model": _OTHER + "model.*: digests of its files",
        "model_weights": _OTHER + "model.*; weights in an object store are refused",
        "tokenizer": _OTHER + "model.tokenizer or tokenizer.*: digests of its files",
        "hf_config": _OTHER + "config.*, after all overrides",
        "hf_text_config": _OTHER + "config.*, of which it is a part",
        "hf_overrides": _OTHER + "config.*, to which they were applied",
        "hf_config_path": _OTHER + "config.*, which was read from there",
        "config_format": _OTHER + "config.*, which was read in that format",
        "revision": _OTHER + "model.*: digests of the files of that revision",
        "code_revision": _OTHER + "model.remote_code; bytes of code in the checkpoint count",
        "tokenizer_revision": _OTHER + "model.tokenizer or tokenizer.*",
        "trust_remote_code": _OTHER + "model.code and model.remote_code",
        "max_model_len": _OTHER + "rope.max_model_len, where the rotary embedding depends on it",
        "model_impl": _OTHER + "transformers_backend, after `auto` was resolved",
        "pooler_config": _OTHER + "model_config.runner: engines that pool do not decode",
        "multimodal_config": _OTHER + "multimodal_config.*",
    },
    "cache_config": {
        "block_size": _OTHER + "group.*.tokens_per_block",
        "prefix_match_unit": _OTHER + "tokens_per_hash",
        "hash_block_size": _OTHER + "tokens_per_hash",
        "mamba_block_size": _OTHER + "group.*.tokens_per_block",
        "mamba_page_size_padded": _OTHER + "rows",
        "skip_page_size_padded": _OTHER + "rows",
        "mamba_cache_dtype": _OTHER + "group.*.dtypes, after `auto` was resolved",
        "mamba_ssm_cache_dtype": _OTHER + "group.*.dtypes, after `auto` was resolved",
    },
    "speculative_config": {
        "model": _OTHER + "draft.*: digests of its files",
        "revision": _OTHER + "draft.*",
        "code_revision": _OTHER + "draft.*",
        "draft_model_config": _OTHER + "draft.*",
    },
    "vllm_config": {
        name: _OTHER + f"{name}.*"
        for name in (
            "model_config",
            "cache_config",
            "parallel_config",
            "scheduler_config",
            "load_config",
            "attention_config",
            "mamba_config",
            "speculative_config",
        )
    }
    | {
        "device_config": _OTHER + "platform",
        "quant_config": _OTHER + "model_config.quantization, model_config.quantization_config",
    },
}
"""Fields that facts of another name stand for, and which."""

NOT_COUNTED: Mapping[str, Mapping[str, str]] = {
    where: _by_reason(names)
    for where, names in {
        "model_config": {
            _OUTPUT: """
                seed return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel
                enable_trace_replay generation_config override_generation_config logits_processors
                io_processor_plugin
            """,
            _NOT_READ: "is_submodel_config word_embeddings_untied_by_checkpoint",
            "which media are let in; their bytes are in the block hash": (
                "allowed_local_media_path allowed_media_domains"
            ),
            "a limit of lengths": "spec_target_max_model_len",
            "what is let in; the method counts": "allow_deprecated_quantization",
            _ROUNDING: "enforce_eager",
            "without effect in this vLLM": "disable_cascade_attn",
            "blocks are named by token ids": "skip_tokenizer_init",
            "a name that clients use": "served_model_name",
            "a secret that opens downloads; the bytes count": "hf_token",
            _SPEED: """
                enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
                sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator
                renderer_num_workers
            """,
        },
        "cache_config": {
            _NOT_READ: """
                user_specified_block_size _block_size_resolved effective_attention_block_size
            """,
            "of a connector of vLLM's own": "simple_cpu_offload_num_blocks",
            _SPEED: """
                gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks
                kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes
                kv_offloading_size kv_offloading_backend
            """,
            "without it there are no blocks to share": "enable_prefix_caching",
            "which checkpoints are kept, not what is in them": """
                prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint
            """,
            "how long a hit may be, not what is in a block": "cache_hit_alignment_tokens",
        },
        "parallel_config": {
            _HOST: """
                data_parallel_size data_parallel_size_local data_parallel_rank
                data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port
                data_parallel_master_port data_parallel_backend data_parallel_external_lb
                data_parallel_hybrid_lb data_parallel_index _data_parallel_master_port_list
                _coord_store_port _api_process_count _api_process_rank
                _allow_auto_resolve_cp_interleave_size max_parallel_loading_workers
                enable_shm_tensor_arena ray_workers_use_nsight ray_runtime_env placement_group
                worker_cls worker_extension_cls master_addr master_port numa_bind numa_bind_nodes
                numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds
                cpu_distributed_timeout_seconds rank enable_fault_tolerance fault_tolerance_config
            """,
            _ROUNDING: """
                dp_sync_interval enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling
                enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy
                all2all_backend disable_custom_all_reduce enable_elastic_ep elastic_ep_max_dp_size
                enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
                disable_nccl_for_dp_synchronization dcp_comm_backend
            """,
            "ranks on several hosts are refused (config/engine_args.py, canonical/vllm_ranks.py)": (
                "nnodes node_rank distributed_executor_backend"
            ),
            _NOT_READ: "is_moe_model",
        },
        "speculative_config": {
            "speed of drafting; files, dtypes and groups of the draft model count": """
                enforce_eager tensor_parallel_size moe_backend attention_backend max_model_len
                disable_padded_drafter_batch use_local_argmax_reduction target_model_config
                target_parallel_config draft_parallel_config draft_load_config
                num_speculative_tokens_per_batch_size
            """,
            "which tokens are guessed; a guess is kept only if the model agrees": """
                prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth
                suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
                suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates
                synthetic_acceptance_length enable_adaptive_verification draft_sample_method
                dspark_draft_topk draft_lm_head_quantization xpress_topc
            """,
            "which guesses are accepted; blocks are named by the tokens that were": (
                "fly_window_size fly_entropy_threshold fly_entropy_top_k"
            ),
            "with a KV connector, hashes never look ahead": "disable_lookahead_block_hashes",
        },
        "multimodal_config": {
            _SPEED: """
                limit_per_prompt enable_mm_embeds mm_processor_cache_gb mm_processor_cache_type
                mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend
                mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling
                mm_tensor_ipc mm_ipc_gpu_memory_gb
            """
        },
        "load_config": {
            _LOADING: """
                download_dir safetensors_load_strategy safetensors_prefetch_num_threads
                safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location
            """
        },
        "mamba_config": {_ROUNDING: "stochastic_rounding_philox_rounds ssu_algorithm"},
        "attention_config": {
            "which kernel reads the cache; what it has pages look like is in group.*.parts, "
            "group.*.kernel_blocks and the specification of groups": """
                backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version
                flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
                tq_max_kv_splits_for_cuda_graph use_trtllm_attention
                disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization
                sparse_mla_force_mqa sparse_mla_prefill_workspace_factor flex_attn_block_m
                flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size
                trtllm_ragged_backend indexer_tp_shard_min_rows minimax_m3_indexer_cp
            """
        },
        "scheduler_config": {
            _SPEED: """
                runner_type max_num_batched_tokens max_num_scheduled_tokens max_num_seqs
                max_num_active_seqs long_prefill_token_threshold
                long_prefill_token_threshold_adaptive max_num_queued_reqs max_num_queued_tokens
                enable_chunked_prefill is_multimodal_model max_num_encoder_input_tokens
                encoder_cache_size policy disable_chunked_mm_input scheduler_cls
                scheduler_reserve_full_isl watermark prefill_schedule_interval async_scheduling
                stream_interval
            """
        },
        "vllm_config": {
            "blocks of adapters stay in their engine; the model's are as without": "lora_config",
            _SPEED: """
                offload_config engram_config ec_transfer_config ec_manager_config performance_mode
            """,
            _OUTPUT: """
                aux_output_config watermark_config structured_outputs_config reasoning_config
            """,
            _ROUNDING: "kernel_config compilation_config optimization_level",
            "diffusion models leave no prefix to share": "diffusion_config",
            "what is shown": "observability_config logging_config profiler_config",
            "this connector itself; `canonical_layout` is a fact of its own": "kv_transfer_config",
            "what is told of the cache": "kv_events_config",
            _HOST: "instance_id shutdown_timeout watchdog_config",
            "weights that are replaced while it runs are not supported": "weight_transfer_config",
        },
    }.items()
}
"""Fields that may differ between engines that share blocks, and why."""

SPEC_NOT_COUNTED: Mapping[str, str] = {
    "block_stride_alignment": "in rows: where blocks lie",
    "alignment": "in rows: padding",
    "page_size_padded": "in rows: padding",
    "num_speculative_blocks": "blocks beside those that are kept",
    "num_prefill_checkpoint_blocks": "blocks beside those that are kept",
    "prefill_checkpoint_alignment": "which checkpoints are kept, not what is in them",
    "extra_retained_tokens": "which blocks are kept, not what is in them",
    "kv_cache_specs": "layers of one group that differ: each counts by itself",
}
"""Fields of a cache group's specification that are no facts; all others are."""

ONLY_IN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "0.33": _tuples(
        {
            "cache_config": "simple_cpu_offload_num_blocks",
            "speculative_config": """
                disable_lookahead_block_hashes draft_lm_head_quantization fly_entropy_threshold
                fly_entropy_top_k fly_window_size xpress_topc
            """,
            "attention_config": """
                indexer_tp_shard_min_rows minimax_m3_indexer_cp trtllm_ragged_backend
            """,
            "vllm_config": "watchdog_config",
        }
    )
}
"""Fields that one of the supported versions has alone."""
