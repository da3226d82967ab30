"""The programs of the zoo that `make test` runs: together they have every primitive.

The others are left to `make test-all`. `tests/zoo/test_zoo.py` fails where a primitive of
`docs/reference/primitives.md`, or an origin of its rule, stands in none of these; then add the
cheapest program that has it.
"""

FAST = frozenset(
    """
    attention_blockwise_scan attention_causal attention_linear
    cond_both_branches custom_jvp_log1pexp fori_loop_writes_rows hessian_full
    straight_through_estimator
    batch_norm_with_statistics pooling
    decoder_nnx_train_step remat_named_policy scan_over_layers_remat
    lm_loss_logsumexp mlp_mixed_precision
    batched_factorisations cholesky_solve complex_numbers complex_parameters cumulative_sums
    fft_filter histogram quantiles random_numbers random_rejection scatters singular_values
    special_functions
    global_norm_clipping sgd_momentum_schedule
    approximate_top_k composite_function custom_vmap_rule empty_arrays exported_call
    host_counter integer_gradients mutable_references platform_branches reduce_of_own_making
    scipy_conjugate_gradient sparse_matrix_product vmapped_axis_names
    gru_linen moe_ragged_groups moe_top2_with_capacity state_space_associative_scan
    custom_partitioning_rule debug_callback_in_cond debug_print optimization_barrier
    pallas_kernel_opaque pallas_kernel_with_grid pure_callback shard_map_with_gradient
    sharding_constraint_inside
    train_state_with_static_fields
    """.split()
)
