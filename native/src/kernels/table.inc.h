// The members of struct Kernels, in order.
W4CONV_TIER_NAME, W4CONV_TIER::matmul_int, W4CONV_TIER::matmul_float, W4CONV_TIER::prepare_int, W4CONV_TIER::prepare_float,
    W4CONV_TIER::rmsnorm, W4CONV_TIER::gated, W4CONV_TIER::softcap, W4CONV_TIER::softmax, W4CONV_TIER::store_kv,
    W4CONV_TIER::attend, W4CONV_TIER::join_spans, W4CONV_TIER::quantize_tile, W4CONV_TIER::pack_tile,
    W4CONV_TIER::dequantize_row, W4CONV_TIER::load_values, W4CONV_TIER::compare_rows, W4CONV_TIER::round_with_feedback,
    W4CONV_TIER::solve_rows, W4CONV_TIER::refine, W4CONV_TIER::search_scales, W4CONV_TIER::multiply_panels,
    W4CONV_TIER::factor_block, W4CONV_TIER::factor_panel, W4CONV_TIER::read, W4CONV_TIER::peak_int, W4CONV_TIER::peak_bytes,
    W4CONV_TIER::peak_float, W4CONV_TIER::dot_instruction,
