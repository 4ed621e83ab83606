"""Fields of ``config.json`` that say nothing about what a model computes; they are carried along as they are."""

_ABOUT_THE_FILE = (
    "_name_or_path",
    "architectures",
    "dtype",
    "model_type",
    "torch_dtype",
    "transformers_version",
    "transformers.js_config",
    "unsloth_fixed",
    "unsloth_version",
)
_ABOUT_TOKENS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "image_seq_length",
    "pad_token_id",
    "prefix",
    "sep_token_id",
    "suppress_tokens",
    "tokenizer_class",
)
_ABOUT_GENERATION = (
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "return_dict_in_generate",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "use_cache",
)
_ABOUT_LABELS = ("finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params")
_ABOUT_SOFTWARE = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attn_implementation",
    "ignore_keys_at_rope_validation",
    "keys_to_ignore_at_inference",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "return_dict",
    "tf_legacy_loss",
    "torchscript",
    "use_bfloat16",
)
_ABOUT_BEGINNINGS = ("initializer_factor", "initializer_range", "max_position_embeddings")
"""Of weights that are not trained yet; and how long texts were, which rotary embeddings do not depend on."""
SILENT = frozenset(
    (*_ABOUT_THE_FILE, *_ABOUT_TOKENS, *_ABOUT_GENERATION, *_ABOUT_LABELS, *_ABOUT_SOFTWARE, *_ABOUT_BEGINNINGS)
)
